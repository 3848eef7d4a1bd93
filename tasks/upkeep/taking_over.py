"""Going on with a run whose earlier process was killed."""

from __future__ import annotations

import errno
import time

from tasks.processes.registry import Remains, claimed, finish
from tasks.record.closing import Loss, close_record
from tasks.upkeep.lost_run import is_under_way, stop_jobs

#: A guardian that still takes its component down is waited for.
_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.2


def finish_predecessor(run_id: str, *, adopts: bool = False) -> None:
    """End what an earlier process of the run has left, and close the attempt that it was at.

    Does nothing where there is none, or where it is being reconciled.

    Args:
        adopts: its jobs outlive it: they, and the attempt, are left for this process to go on with.

    Raises: OSError, when something can't be ended, or nobody can say whether a job has: no second
        attempt may run beside it.
    """
    deadline = time.monotonic() + _WITHIN_S
    while True:
        with claimed(run_id) as lost:
            if lost is None:
                return
            remains = finish(lost)
            if remains.is_clean and adopts and is_under_way(lost):
                return
            if remains.is_clean:
                jobs = stop_jobs(lost, unknown_after_s=_WITHIN_S)
                if jobs.left:
                    problem = f"an earlier attempt of {run_id} is left: {jobs.left}"
                    raise OSError(errno.EBUSY, problem)
                if lost.owner.directory is not None:
                    loss = Loss(
                        pid=lost.owner.process.pid,
                        is_waiting=True,
                        killed=remains.killed,
                        removed=remains.removed,
                        jobs=jobs.ended,
                    )
                    close_record(lost.owner.directory, loss)
                lost.forget()
                return
        if remains.left or time.monotonic() > deadline:
            raise OSError(errno.EBUSY, f"an earlier attempt of {run_id} is left: {_told(remains)}")
        time.sleep(_LOOK_EVERY_S)


def _told(remains: Remains) -> str:
    left = [f"{name}: {', '.join(map(str, pids))}" for name, pids in remains.left.items()]
    waiting = [f"guardian of {name}: {pid}" for name, pid in remains.waiting.items()]
    return "; ".join([*left, *waiting])
