"""Finishes every lost run of $MUSTER_HOME, as each host does each minute.

Says as JSON what became of it: `{RUN ID: {"is_clean", "killed", "removed", "open"}}`.
"""

from __future__ import annotations

import json
import sys

from tasks.upkeep.reconcile import publish, reconcile_host


def main() -> None:
    report = reconcile_host()
    publish(report)
    said = {
        run.name: {
            "is_clean": not run.open,
            "killed": list(run.killed),
            "removed": [str(path) for path in run.removed],
            "open": run.open,
        }
        for run in report.runs
    }
    json.dump(said, sys.stdout)
