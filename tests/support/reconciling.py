"""Reconcile the lost runs of $MUSTER_HOME once, as the upkeep of each host does every minute.

The program prints the results as JSON: `{RUN ID: {"is_clean", "killed", "removed", "open"}}`.
"""

from __future__ import annotations

import json
import sys

from tasks.upkeep.reconcile import publish, reconcile_host


def main() -> None:
    """Clean up all runs whose flow process has died, and print the result of each run."""
    report = reconcile_host()
    publish(report)
    results = {
        run.name: {
            "is_clean": not run.open,
            "killed": list(run.killed),
            "removed": [str(path) for path in run.removed],
            "open": run.open,
        }
        for run in report.runs
    }
    json.dump(results, sys.stdout)
