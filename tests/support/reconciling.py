"""Finishes every lost run of $MUSTER_HOME: `python -m tests.support.reconciling`.

Says as JSON what became of it: `{RUN ID: {"is_clean", "killed", "left", "waiting", "removed"}}`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tasks.processes.registry import claimed, finish, registered_runs
from tasks.record.closing import Loss, close_record


def main() -> None:
    said: dict[str, Any] = {}
    for run_id in registered_runs():
        with claimed(run_id) as lost:
            if lost is None:
                continue
            remains = finish(lost)
            if remains.is_clean:
                # As `upkeep` does, of a run without a server.
                loss = Loss(pid=lost.owner.process.pid, killed=remains.killed, end=lost.end)
                if lost.owner.directory is not None:
                    close_record(lost.owner.directory, loss)
                lost.forget()
            said[run_id] = {
                "is_clean": remains.is_clean,
                "killed": remains.killed,
                "left": dict(remains.left),
                "waiting": dict(remains.waiting),
                "removed": [str(path) for path in remains.removed],
            }
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
