"""The runs of a worker, ended before it ends: `python -m deployments.stack.runs PID`.

For whoever is about to stop a worker: a stack, or a unit of systemd.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Sequence

from tasks.processes import tree
from tasks.processes.registry import teardown_s

_LOOK_EVERY_S = 0.1


def end_runs(worker: int, *, within_s: float) -> None:
    """Interrupt every run of a worker, and wait until each has taken itself down.

    The worker is held (SIGSTOP) first, and left so: it begins none of the runs that wait, and goes
    on, to its own end, with the next signal of its guardian.

    Args:
        worker: its pid.
        within_s: a run has ended by then, counted from the end of its longest grace periods.
    """
    tree.signal_process(worker, signal.SIGSTOP, parent=tree.parent_of(worker))
    runs = tree.children(worker)
    # Asked before the first signal: a component that has ended is registered no more.
    grace_s = max(map(teardown_s, runs), default=0.0)
    for run in runs:
        tree.signal_process(run, signal.SIGTERM, parent=worker)
    deadline = time.monotonic() + grace_s + within_s
    while time.monotonic() < deadline:
        # The worker, held, reaps none of them.
        if all(tree.is_zombie(run) for run in tree.children(worker)):
            return
        time.sleep(_LOOK_EVERY_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns: 0, also where the worker has gone already."""
    parser = argparse.ArgumentParser(
        prog="python -m deployments.stack.runs",
        description="Interrupt every run of a worker of this host, and wait until each has taken "
        "itself down. The worker is held meanwhile and left so: send it SIGTERM, then SIGCONT.",
    )
    parser.add_argument("pid", help="of the worker; empty: it has gone already")
    parser.add_argument(
        "--within-s",
        type=float,
        default=300.0,
        metavar="S",
        help="after the grace periods of the runs; 300 if left out",
    )
    options = parser.parse_args(arguments)
    if options.pid.strip():
        end_runs(int(options.pid), within_s=options.within_s)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
