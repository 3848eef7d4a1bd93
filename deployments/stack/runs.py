"""End the runs of a worker before the worker itself is stopped.

    python -m deployments.stack.runs PID

The systemd unit of a worker calls this program when it stops the worker.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Sequence

from tasks.processes import tree
from tasks.processes.registry import teardown_s
from tasks.processes.stop_notes import describe_stopped_worker, write_stop_notes

#: Time, in seconds, between two checks whether the runs have ended.
_CHECK_EVERY_S = 0.1


def end_runs(worker: int, *, within_s: float) -> None:
    """Send SIGTERM to every run of a worker, and wait until all runs have ended.

    The function first pauses the worker with SIGSTOP, so that the worker starts no further runs.
    The worker stays paused: the caller must then send SIGTERM and SIGCONT to the worker.

    Args:
        worker: Process id of the worker.
        within_s: Longest time to wait, in seconds, after the grace periods of the runs.
    """
    tree.signal_process(worker, signal.SIGSTOP, parent=tree.read_parent(worker))
    runs = tree.children(worker)
    write_stop_notes(describe_stopped_worker(), lambda owner: owner.process.pid in runs)
    # Compute the grace period before the first SIGTERM, because the registry of components forgets
    # the grace periods of components that have ended.
    grace_s = max(map(teardown_s, runs), default=0.0)
    for run in runs:
        tree.signal_process(run, signal.SIGTERM, parent=worker)
    deadline = time.monotonic() + grace_s + within_s
    while time.monotonic() < deadline:
        # Ended runs stay zombies, because the paused worker does not call wait().
        if all(tree.is_zombie(run) for run in tree.children(worker)):
            return
        time.sleep(_CHECK_EVERY_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """End the runs of a worker, and return the exit code 0.

    The argument is the process id of the worker. If the argument is empty, do nothing.
    """
    parser = argparse.ArgumentParser(
        prog="python -m deployments.stack.runs",
        description="Interrupt all runs of a Prefect worker on this host, and wait until all "
        "of them have ended. The command pauses the worker with SIGSTOP. "
        "Afterwards, to end the worker, send SIGTERM and then SIGCONT to the "
        "worker.",
    )
    parser.add_argument("pid", help="Process id of the worker. Empty: the worker has ended already")
    parser.add_argument(
        "--within-s",
        type=float,
        default=300.0,
        metavar="S",
        help="Seconds to wait for the runs after the end of their grace periods. Default: 300",
    )
    options = parser.parse_args(arguments)
    if options.pid.strip():
        end_runs(int(options.pid), within_s=options.within_s)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
