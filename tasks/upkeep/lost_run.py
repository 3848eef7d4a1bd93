"""A run whose flow process is gone: its jobs are left to its next process, or all of it is ended,
its record closed, its Prefect server told and its entry forgotten.

`reconcile` comes here for the runs of this host and for those of a lost one, and the next process
of a run for its predecessor. They differ in what they have found, which a `Loss` says.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from prefect.client.schemas.objects import FlowRun, State

from tasks.processes import registry
from tasks.processes.ending import holders_of
from tasks.processes.identity import host_name
from tasks.processes.registry import JobEntry, LostRun, Remains, claimed, owner_of
from tasks.ray.dashboard import know
from tasks.ray.end import Ended
from tasks.ray.job import stop_submission
from tasks.ray.submission import SubmissionFile
from tasks.record.closing import Loss, close_record
from tasks.record.places import AttemptPlace, RunPlace
from tasks.record.run_json import RunJson
from tasks.server.flow_runs import (
    FLOW_RUN_VARIABLE,
    JOBS_GO_ON,
    ServerAway,
    clear_process,
    find_flow_run,
    goes_on,
    has_gone_to,
    listed_clusters,
    propose,
    state_of_closed,
    talking_to,
)
from tasks.spec.words import commas
from tasks.upkeep.parked import note_parked, tell_closed
from tasks.upkeep.report import Reconciled

_log = logging.getLogger(__name__)

#: A worker that has taken a flow run starts its process in seconds.
_STARTED_WITHIN = timedelta(seconds=60)
#: The old process has surely left by then, see `waiting`.
_DUE_AFTER_S = 2.0
#: A server that has not answered by then is not told any more.
_TELL_WITHIN_S = 24 * 3600.0
#: A guardian that still takes its component down is waited for.
_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.2
CHANGED = "its state on the server has just changed"


def stop_jobs(lost: LostRun, loss: Loss, *, unknown_after_s: float) -> Loss:
    """The loss with what ending every job of the run came to; those of which nothing is left are
    forgotten.

    Args:
        unknown_after_s: for how long a cluster that does not answer is asked again.
    """
    ended: list[str] = []
    left: list[str] = []
    unseen: list[str] = []
    if lost.jobs:
        know(listed_clusters(lost.owner.api_url))
    for entry in reversed(lost.jobs):
        done = _stop(entry, unknown_after_s)
        left += done.left
        unseen += done.unseen
        if not done.left:
            ended += [entry.submission_id] if done.was_alive else []
            lost.forget_job(entry.component)
    return replace(loss, jobs=tuple(ended), jobs_left="; ".join(left), unseen="; ".join(unseen))


def _stop(entry: JobEntry, unknown_after_s: float) -> Ended:
    """What has become of a job."""
    if (file := _file_of(entry)) is None:
        return Ended(state=None, left=())
    try:
        how = {"grace_s": entry.grace_s, "unknown_after_s": unknown_after_s}
        return asyncio.run(stop_submission(file, emit=_log_event, **how))
    except Exception as error:
        # Whatever a cluster in trouble makes of it: nothing is known then.
        _log.exception("job %s could not be ended", entry.submission_id)
        left = f"job {entry.submission_id} could not be ended: {error!r}"
        return Ended(state=None, left=(left,))


def _file_of(entry: JobEntry) -> SubmissionFile | None:
    """What was written of the submission before it was made; None where it never was."""
    for path in AttemptPlace(directory=entry.log.parent, number=entry.attempt).submissions():
        file = SubmissionFile.read(path)
        if file is not None and file.content.submission_id == entry.submission_id:
            return file if file.content.submit_began_at is not None else None
    return None


def _log_event(name: str, **fields: object) -> None:
    _log.info("%s %s", name, fields)


def keep_jobs(lost: LostRun, loss: Loss) -> Reconciled | None:
    """Leave the jobs of a lost run to its next process, and have that started.

    Returns: what was done, open where that process is still to be seen to; None where there is to
        be none, so that the jobs have to end: the run was cancelled or has another final state by
        somebody's word, nobody starts it again, or its attempt was at its end already.
    """
    owner, kept = lost.owner, reconciled(lost, loss)
    if owner.flow_run_id is None or owner.api_url is None or not is_under_way(lost):
        return None
    if holders_of(FLOW_RUN_VARIABLE).pids.get(owner.flow_run_id):
        return kept
    try:
        with talking_to(owner.api_url) as client:
            flow_run = find_flow_run(client, owner.flow_run_id)
            if flow_run is None or flow_run.deployment_id is None or flow_run.state is None:
                return None
            before = flow_run.state
            if has_gone_to(flow_run, owner.host, owner.worker):
                # Its process there has attached to them.
                return None if before.is_final() else kept
            if not _has_lost_its_process(before):
                return kept if before.is_scheduled() or before.is_pending() else None
            clear_process(client, owner.flow_run_id)
            after = goes_on(
                f"its flow process (pid {owner.process.pid}) was killed or lost; its jobs go on, "
                "and its next process attaches to them",
                _DUE_AFTER_S,
            )
            if propose(client, owner.flow_run_id, before, after):
                return replace(kept, server=JOBS_GO_ON)
            return replace(kept, open=CHANGED)
    except ServerAway as error:
        return replace(kept, open=f"its jobs go on; the server does not answer ({error})")


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


def end_processes(lost: LostRun, deadline_s: float) -> tuple[Loss, str]:
    """End the processes of a lost run. A guardian that still takes its component down is waited
    for, until that moment of CLOCK_MONOTONIC.

    Returns: what it came to, and what is left of them, in words; empty where nothing is.
    """
    loss = Loss(pid=lost.owner.process.pid, end=lost.end)
    while True:
        remains = registry.finish(lost)
        killed, removed = (*loss.killed, *remains.killed), (*loss.removed, *remains.removed)
        loss = replace(loss, killed=killed, removed=removed)
        if not remains.waiting or remains.left or time.monotonic() > deadline_s:
            return loss, _left_of(remains)
        time.sleep(_LOOK_EVERY_S)


def _left_of(remains: Remains) -> str:
    left = "; ".join(f"{name}: {commas(pids)}" for name, pids in remains.left.items())
    waiting = "; ".join(f"{name}: {pid}" for name, pid in remains.waiting.items())
    parts = [f"processes outlived SIGKILL ({left})"] if left else []
    parts += [f"guardians are at work ({waiting})"] if waiting else []
    return " and ".join(parts)


def reconciled(
    lost: LostRun, loss: Loss, record: str = "", *, server: str = "", open: str = ""
) -> Reconciled:
    """A lost run as a report has it."""
    return Reconciled(
        name=lost.owner.run_id,
        flow_run_id=lost.owner.flow_run_id,
        found=f"its process (pid {loss.pid}) was gone",
        killed=loss.killed,
        jobs=loss.jobs,
        removed=loss.removed,
        record=record,
        server=server,
        open=" and ".join(filter(None, (open, loss.jobs_left, loss.unseen))),
    )


def finish_run(lost: LostRun, loss: Loss, *, goes_on_here: bool = False) -> Reconciled:
    """Close the record of a run of which nothing lives, tell its server, and forget its entry.

    The entry stays where nobody can say whether a job has ended, where the server has to be asked
    again, and for a day where it is away.

    Args:
        goes_on_here: this process is the run's next one, and tells the server itself.
    """
    owner, flow_run_id, directory = lost.owner, lost.owner.flow_run_id, lost.owner.directory
    record: RunJson | None = None
    is_changed, server, open = False, "", ""
    if flow_run_id is None or directory is None:
        pass
    elif goes_on_here:
        record, is_changed = close_record(directory, replace(loss, is_waiting=True))
    elif pids := holders_of(FLOW_RUN_VARIABLE).pids.get(flow_run_id):
        # It was started anew, and has not registered itself yet.
        open = f"another process of its flow run lives (pid {pids[0]})"
    elif owner.api_url is None:
        record, is_changed = close_record(directory, loss)
    else:
        try:
            with talking_to(owner.api_url) as client:
                loss, state = _on_server(lost, loss, find_flow_run(client, flow_run_id))
                if loss.elsewhere:
                    # Its state on the server is that host's to tell. What becomes of it there is
                    # written here once it has ended, as for any run that waits.
                    note_parked(owner.run_id, flow_run_id, owner.api_url)
                record, is_changed = close_record(directory, loss)
                after = state_of_closed(state, record, loss.cause)
                if state is not None and after is not None:
                    done = propose(client, flow_run_id, state, after)
                    server, open = (after.name or "", "") if done else ("", CHANGED)
                if server or (state is not None and state.is_final()):
                    # Its process may have been killed between its final state and its last page.
                    tell_closed(client, flow_run_id, directory)
        except ServerAway as error:
            gives_up = lost.seconds_lost() > _TELL_WITHIN_S
            loss = replace(loss, is_waiting=False if gives_up else None)
            if record is None:
                record, is_changed = close_record(directory, loss)
            open = "" if gives_up else f"the server does not answer ({error})"
    if not open and not loss.jobs_left:
        lost.forget()
    given = record.state.value if record is not None and is_changed else ""
    return reconciled(lost, loss, given, server=server, open=open)


def _on_server(
    lost: LostRun, loss: Loss, flow_run: FlowRun | None
) -> tuple[Loss, State[Any] | None]:
    """The loss with what the server says of the run, and the state there that may have to change;
    None where the run is another host's, or unknown."""
    if flow_run is not None and (
        worker := has_gone_to(flow_run, lost.owner.host, lost.owner.worker)
    ):
        return replace(loss, is_waiting=True, elsewhere=worker), None
    if flow_run is None or (state := flow_run.state) is None:
        return loss, None
    has_process = state.is_running() or state.is_cancelling()
    is_waiting = not state.is_final() and not has_process
    is_cancelled = state.is_cancelling() or state.is_cancelled()
    return replace(loss, is_cancelled=is_cancelled, is_waiting=is_waiting), state


def finish_predecessor(run_id: str, *, adopts: bool = False) -> None:
    """End what an earlier process of the run has left, and close the attempt that it was at.

    Does nothing where there is none. One that is being reconciled is waited for.

    Args:
        adopts: its jobs outlive it: they, and the attempt, are left for this process to go on with.

    Raises: OSError, when something can't be ended, or nobody can say whether a job has: no second
        attempt may run beside it.
    """
    deadline = time.monotonic() + _WITHIN_S
    while True:
        with claimed(run_id) as lost:
            if lost is not None:
                loss, left = end_processes(lost, deadline)
                if not left and adopts and is_under_way(lost):
                    return
                if not left:
                    loss = stop_jobs(lost, loss, unknown_after_s=_WITHIN_S)
                    left = loss.jobs_left
                if left:
                    raise OSError(errno.EBUSY, f"an earlier attempt of {run_id} is left: {left}")
                finish_run(lost, loss, goes_on_here=True)
                return
        owner = owner_of(run_id)
        if owner is None or owner.host != host_name() or owner.process.is_alive():
            return
        if time.monotonic() > deadline:
            raise OSError(errno.EBUSY, f"an earlier attempt of {run_id} is being reconciled")
        time.sleep(_LOOK_EVERY_S)
