"""The jobs of a run whose flow process is gone: kept for the run's next process, or ended.

Going on with a run whose earlier process was killed.
"""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from prefect.client.schemas.objects import State
from prefect.states import Scheduled

from tasks.processes.ending import holders_of
from tasks.processes.registry import JobEntry, LostRun, Remains, claimed, finish
from tasks.ray.dashboard import JobState
from tasks.ray.end import stop_submission
from tasks.ray.nodes import sweep_of
from tasks.record.closing import Loss, close_record
from tasks.record.places import AttemptPlace, RunPlace
from tasks.record.run_json import RunJson
from tasks.server.flow_runs import (
    FLOW_RUN_VARIABLE,
    JOBS_GO_ON,
    ServerAway,
    clear_process,
    find_flow_run,
    has_gone_to,
    propose,
    talking_to,
)

_log = logging.getLogger(__name__)

#: A worker that has taken a flow run starts its process in seconds.
_STARTED_WITHIN = timedelta(seconds=60)
#: The old process has surely left by then, see `waiting`.
_DUE_AFTER = timedelta(seconds=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsEnded:
    """What ending the jobs of a lost run came to."""

    #: Submission ids of those that were not over by themselves.
    ended: tuple[str, ...] = ()
    #: What is left or not known, in words; empty where nothing is.
    left: str = ""


NO_JOBS = JobsEnded()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """That the jobs of a lost run go on, for its next process."""

    #: The state that its flow run was given on its server; empty where it was left as it is.
    server: str = ""
    #: Why the next process is still to be seen to; empty where it is on its way.
    open: str = ""


def stop_jobs(lost: LostRun, *, unknown_after_s: float) -> JobsEnded:
    """End every job of a lost run, and forget those of which nothing is left.

    Args:
        unknown_after_s: for how long a cluster that does not answer is asked again.
    """
    ended: list[str] = []
    left: list[str] = []
    for entry in reversed(lost.jobs):
        file = _file_of(entry)
        seen: list[JobState] = []
        problems = _stop(entry, file, unknown_after_s, seen.append) if file is not None else ()
        left += problems
        if not problems:
            ended += [entry.submission_id] if seen and not seen[0].is_final else []
            lost.forget_job(entry.component)
    return JobsEnded(ended=tuple(ended), left="; ".join(left))


def _stop(
    entry: JobEntry, file: Path, unknown_after_s: float, on_state: Callable[[JobState], None]
) -> tuple[str, ...]:
    """What is left of a job, in words."""
    try:
        sweeping = sweep_of(entry.run_id, entry.attempt, entry.component, emit=_log_event)
        return stop_submission(
            file,
            sweep=sweeping,
            grace_s=entry.grace_s,
            unknown_after_s=unknown_after_s,
            on_state=on_state,
        )
    except Exception as error:
        # Whatever a cluster in trouble makes of it: nothing is known then.
        _log.exception("job %s could not be ended", entry.submission_id)
        return (f"job {entry.submission_id} could not be ended: {error!r}",)


def _file_of(entry: JobEntry) -> Path | None:
    """What was written of the submission before it was made; None where it never was."""
    for path in AttemptPlace(directory=entry.log.parent, number=entry.attempt).submissions():
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["submission_id"] == entry.submission_id:
            return path if content.get("submit_began_at") is not None else None
    return None


def _log_event(name: str, **fields: object) -> None:
    _log.info("%s %s", name, fields)


def keep_jobs(lost: LostRun) -> Kept | None:
    """Leave the jobs of a lost run to its next process, and have that started.

    Returns: None where there is to be no next process, so that the jobs have to end: the run was
        cancelled or has another final state by somebody's word, nobody starts it again, or its
        attempt was at its end already.
    """
    owner = lost.owner
    if owner.flow_run_id is None or owner.api_url is None or not is_under_way(lost):
        return None
    if holders_of(FLOW_RUN_VARIABLE).pids.get(owner.flow_run_id):
        return Kept()
    try:
        with talking_to(owner.api_url) as client:
            flow_run = find_flow_run(client, owner.flow_run_id)
            if flow_run is None or flow_run.deployment_id is None or flow_run.state is None:
                return None
            before = flow_run.state
            if has_gone_to(flow_run, owner.host, owner.worker):
                # Its process there has attached to them.
                return None if before.is_final() else Kept()
            if not _has_lost_its_process(before):
                return Kept() if before.is_scheduled() or before.is_pending() else None
            clear_process(client, owner.flow_run_id)
            after: State[None] = Scheduled(
                name=JOBS_GO_ON,
                scheduled_time=datetime.now(UTC) + _DUE_AFTER,
                message=f"its flow process (pid {owner.process.pid}) was killed or lost; its jobs "
                "go on, and its next process attaches to them",
            )
            if propose(client, owner.flow_run_id, before, after):
                return Kept(server=JOBS_GO_ON)
            return Kept(open="its state on the server has just changed")
    except ServerAway as error:
        return Kept(open=f"its jobs go on; the server does not answer ({error})")


def is_under_way(lost: LostRun) -> bool:
    """Whether the attempt that the run was at can be gone on with."""
    if lost.owner.directory is None:
        return False
    try:
        place = RunPlace(directory=lost.owner.directory)
        return RunJson.read(place.record).adoptable(place) is not None
    except (OSError, ValueError):
        return False


def _has_lost_its_process(state: State[object]) -> bool:
    """Whether somebody has to have its next process started."""
    if state.is_pending():
        return datetime.now(UTC) - state.timestamp > _STARTED_WITHIN
    return state.is_running() or state.is_crashed()


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
