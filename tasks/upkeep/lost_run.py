"""Clean up after a run whose flow process was killed or lost.

There are two outcomes. If another process will resume the run, the run's Ray jobs keep running.
Otherwise the run is finished. Its jobs and processes are ended. Its record and its flow run on the
Prefect server get their final states. Its registry entry is removed.

`muster reconcile` cleans up after the lost runs of this host, or of another host that is
permanently gone. In addition, each new flow process of a run cleans up after the run's previous
flow process. A `FlowLoss` collects the results.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import yaml
from prefect.client.schemas.objects import FlowRun, State
from prefect.settings import PREFECT_API_URL
from prefect.states import Running

from tasks.processes import registry
from tasks.processes.ending import find_holders
from tasks.processes.identity import host_name
from tasks.processes.place_reader import PlaceReader
from tasks.processes.registry import JobEntry, LeftoverCleanup, LostRun, claim_lost_run, read_owner
from tasks.processes.survivors import describe_survivor
from tasks.ray.dashboard import add_listed_clusters
from tasks.ray.end import JobEnd
from tasks.ray.job import stop_submission
from tasks.ray.submission import SubmissionFile
from tasks.record.final_record import FlowLoss, write_final_record
from tasks.record.metrics_of_run import read_last_step
from tasks.record.places import AttemptPlace, RunPlace, read_own_file
from tasks.record.run_json import RunJson
from tasks.record.states import RunState
from tasks.server.flow_runs import (
    FLOW_RUN_VARIABLE,
    JOBS_GO_ON,
    ServerAway,
    clear_process,
    connect_to_server,
    decide_closed_state,
    find_flow_run,
    find_new_worker,
    log_end,
    make_handover_state,
    propose_state,
    read_listed_clusters,
)
from tasks.spec.formatting import join_commas
from tasks.upkeep.report import RunReport
from tasks.upkeep.waiting_runs import (
    cancel_evaluations_of_closed_run,
    note_waiting_run,
    update_page_of_closed_run,
)

_log = logging.getLogger(__name__)

#: Longest time that a flow run is normally Pending before a Prefect worker starts its flow process.
_START_TIMEOUT = timedelta(seconds=60)
#: Seconds from the loss of a flow process to the earliest start of the run's next flow process.
_DUE_AFTER_S = 2.0
#: If the Prefect server does not answer, the cleanup after the loss of a run is postponed for at
#: most this number of seconds. Then the cleanup is completed without the server.
_SERVER_TIMEOUT_S = 24 * 3600.0
#: Longest time, in seconds, that a new flow process of a run waits while another process cleans up
#: after the previous flow process.
_PREDECESSOR_TIMEOUT_S = 120.0
#: Seconds between two checks whether the guardian processes of a lost run have ended. A guardian
#: process owns the processes of one component, and ends them when the flow process dies.
_CHECK_INTERVAL_S = 0.2
#: Text in the report about a lost run if the Prefect server has rejected the new state of the flow
#: run. The reason is that another process had just changed the state.
CHANGED = "another process changed the state of the flow run on the Prefect server at the same time"


def complete_owner(lost: LostRun) -> None:
    """Add missing facts about a lost run if its file `owner.json` cannot be read.

    The added facts are the URL of this process's Prefect server, and the key `on_lost_flow` of the
    run's spec. Without the URL, the flow run would not get its final state. Without the key,
    Muster would end Ray jobs that the spec allows to continue.
    """
    owner = lost.owner
    if not owner.fault or owner.directory is None or owner.flow_run_id is None:
        return
    adopts = False
    with suppress(OSError, ValueError, yaml.YAMLError):
        spec = yaml.safe_load(read_own_file(RunPlace(directory=owner.directory).spec))
        adopts = isinstance(spec, dict) and spec.get("on_lost_flow") == "adopt"
    facts = {"api_url": PREFECT_API_URL.value(), "adopts": adopts}
    lost.owner = owner.model_copy(update=facts)


def stop_jobs(lost: LostRun, loss: FlowLoss, *, unknown_after_s: float) -> FlowLoss:
    """End all Ray jobs of a run whose flow process was killed or lost.

    A job that has ended without leftover processes is removed from the run's registry entry.

    Args:
        lost: The lost run.
        loss: The results of the cleanup so far.
        unknown_after_s: Longest wait for a Ray cluster that does not answer, in seconds.

    Returns:
        The results with the ended jobs, their leftovers, and the nodes that could not be checked.
    """
    ended_jobs: list[str] = []
    leftovers: list[str] = []
    unseen_nodes: list[str] = []
    if lost.jobs:
        add_listed_clusters(read_listed_clusters(lost.owner.api_url))
    for file in lost.unknown_jobs:
        # This registry file cannot be read, so its Ray job is unknown and may still run. Report the
        # file as a leftover, so that the run stays in the registry.
        leftovers.append(f"{file}, so its Ray job is unknown")
    for entry in reversed(lost.jobs):
        ended = _stop_job(entry, unknown_after_s)
        leftovers += ended.left
        unseen_nodes += ended.unseen
        if not ended.left:
            if ended.was_alive:
                ended_jobs.append(entry.submission_id)
            lost.forget_job(entry.component)
    return replace(
        loss,
        jobs=tuple(ended_jobs),
        jobs_left="; ".join(leftovers),
        unseen="; ".join(unseen_nodes),
    )


def _stop_job(entry: JobEntry, unknown_after_s: float) -> JobEnd:
    """End the Ray job of a registry entry, and return the job's final state and leftovers.

    Args:
        entry: Registry entry of the job.
        unknown_after_s: Longest wait for a Ray cluster that does not answer, in seconds.
    """
    file = _read_submission(entry)
    if file is None:
        return JobEnd(state=None, left=())
    try:
        return asyncio.run(
            stop_submission(
                file, emit=_log_event, grace_s=entry.grace_s, unknown_after_s=unknown_after_s
            )
        )
    except Exception as error:
        # The job may still run, so report it as a leftover. A later `muster reconcile` tries again.
        _log.exception("Muster could not end the Ray job %s.", entry.submission_id)
        problem = f"Muster could not end the job {entry.submission_id}: {error!r}"
        return JobEnd(state=None, left=(problem,))


def _read_submission(entry: JobEntry) -> SubmissionFile | None:
    """Return the submission file of a Ray job, or None if the job was never submitted."""
    for path in AttemptPlace(directory=entry.log.parent, number=entry.attempt).submissions():
        file = SubmissionFile.read(path)
        if file is not None and file.content.submission_id == entry.submission_id:
            return file if file.content.submit_began_at is not None else None
    return None


def _log_event(name: str, **fields: object) -> None:
    _log.info("%s %s", name, fields)


def keep_jobs(lost: LostRun, loss: FlowLoss) -> RunReport | None:
    """Let the Ray jobs of a lost run continue, and schedule the run's next flow process.

    Args:
        lost: The lost run.
        loss: The results of the cleanup so far.

    Returns:
        The report about the run. If the next flow process could not be scheduled, the report's
        field `open` contains the reason. None if no flow process will resume the run, so that the
        jobs must be ended. For example, the run was cancelled, has ended, or has no deployment on
        the Prefect server.
    """
    owner = lost.owner
    report = make_report(lost, loss)
    if owner.flow_run_id is None or owner.api_url is None or not has_adoptable_attempt(lost):
        return None
    if find_holders(FLOW_RUN_VARIABLE).pids.get(owner.flow_run_id):
        return report
    try:
        with connect_to_server(owner.api_url) as client:
            flow_run = find_flow_run(client, owner.flow_run_id)
            if flow_run is None or flow_run.deployment_id is None or flow_run.state is None:
                return None
            before = flow_run.state
            if find_new_worker(flow_run, owner.host, owner.worker):
                # Another host has taken over the attempt and its jobs in a new flow process.
                return None if before.is_final() else report
            if not _needs_next_process(before):
                return report if before.is_scheduled() or before.is_pending() else None
            clear_process(client, owner.flow_run_id)
            after = make_handover_state(
                f"the flow process (pid {owner.process.pid}) of the run was killed or lost; the "
                "Ray jobs of the run continue, and a new flow process will take them over",
                _DUE_AFTER_S,
            )
            if propose_state(client, owner.flow_run_id, before, after):
                return replace(report, server=JOBS_GO_ON)
            return replace(report, open=CHANGED)
    except ServerAway as error:
        return replace(
            report, open=f"the Ray jobs continue, but the Prefect server does not answer ({error})"
        )


def has_adoptable_attempt(lost: LostRun) -> bool:
    """Return True if the run's record has an attempt that a new flow process can resume."""
    if lost.owner.directory is None:
        return False
    try:
        place = RunPlace(directory=lost.owner.directory)
        return RunJson.read(place.record).adoptable(place) is not None
    except (OSError, ValueError):
        return False


def _needs_next_process(state: State[object]) -> bool:
    """Return True if Muster must schedule the next process of a lost flow run.

    Workers will not start a flow run in the following states, so the result is True:

    - Running and Crashed: workers start only scheduled flow runs.
    - Pending for longer than `_START_TIMEOUT`: a worker would have started the flow run by now.
    """
    if state.is_pending():
        return datetime.now(UTC) - state.timestamp > _START_TIMEOUT
    return state.is_running() or state.is_crashed()


def end_processes(lost: LostRun, deadline_s: float) -> tuple[FlowLoss, str]:
    """End the processes of a lost run.

    A guardian process owns the processes of one component. If guardian processes of the run are
    already ending their components, wait for them.

    Args:
        lost: The lost run.
        deadline_s: End of the wait for guardian processes, in CLOCK_MONOTONIC seconds.

    Returns:
        The results of the cleanup, and a description of the leftover processes. The description is
        empty if no process is left over.
    """
    loss = FlowLoss(pid=lost.owner.process.pid, end=lost.end)
    while True:
        cleanup = registry.finish(lost)
        loss = replace(
            loss,
            killed=(*loss.killed, *cleanup.killed),
            removed=(*loss.removed, *cleanup.removed),
        )
        if not cleanup.waiting or cleanup.left or time.monotonic() > deadline_s:
            return loss, _describe_cleanup(cleanup)
        time.sleep(_CHECK_INTERVAL_S)


def _describe_cleanup(cleanup: LeftoverCleanup) -> str:
    """Return a description of the processes that still run after a cleanup.

    These are leftover processes, and guardian processes that are still ending their components. The
    result is an empty string if there are none.
    """
    parts = []
    if cleanup.left:
        survivors = "; ".join(
            f"{name}: {join_commas(map(describe_survivor, pids))}"
            for name, pids in cleanup.left.items()
        )
        parts.append(f"processes could not be ended ({survivors})")
    if cleanup.waiting:
        guardians = "; ".join(f"{name}: {pid}" for name, pid in cleanup.waiting.items())
        parts.append(f"guardian processes are still ending their components ({guardians})")
    return " and ".join(parts)


def make_report(
    lost: LostRun, loss: FlowLoss, record: str = "", *, server: str = "", open: str = ""
) -> RunReport:
    """Return the report about a lost run.

    Args:
        lost: The lost run.
        loss: The results of the cleanup.
        record: New state in the run's record, or an empty string if that state was not changed.
        server: New state name on the Prefect server, or an empty string if that state was not
            changed.
        open: Description of work that could not be done, with the reason, or an empty string.
    """
    return RunReport(
        name=lost.owner.run_id,
        flow_run_id=lost.owner.flow_run_id,
        found=_describe_loss(lost, loss),
        killed=loss.killed,
        jobs=loss.jobs,
        removed=loss.removed,
        record=record,
        server=server,
        open=" and ".join(filter(None, (open, loss.jobs_left, loss.unseen))),
    )


def _describe_loss(lost: LostRun, loss: FlowLoss) -> str:
    """Return a text about the unexpected end of a lost run's flow process.

    The text also names the unreadable registry files of the run.
    """
    process = f"the flow process (pid {loss.pid})" if loss.pid else "the flow process"
    parts = [f"{process} was gone", *lost.faults]
    if lost.unreadable_entries:
        parts.append(
            "Muster found the processes of the run by the variable MUSTER_RUN_ID in their "
            "environment"
        )
    return "; ".join(parts)


def finish_run(lost: LostRun, loss: FlowLoss, *, goes_on_here: bool = False) -> RunReport:
    """Write the final states of a lost run whose processes have all ended, and return a report.

    The run's record and its flow run on the Prefect server get their final states, and the registry
    entry of the run is removed. But the registry entry stays for a later `muster reconcile` in each
    of the following cases:

    - A Ray job of the run may still run.
    - The state on the Prefect server has changed during the cleanup.
    - Another process of the same flow run is running.
    - The Prefect server does not answer, and the run was lost less than a day ago.

    Args:
        lost: The lost run.
        loss: The results of the cleanup so far.
        goes_on_here: True if this process resumes the run, and itself sets the flow run's state on
            the Prefect server.
    """
    owner = lost.owner
    flow_run_id = owner.flow_run_id
    directory = owner.directory
    record: RunJson | None = None
    is_changed = False
    server = ""
    open = ""
    if directory is not None:
        loss = replace(loss, last_step=_read_last_step(RunPlace(directory=directory)))
    if flow_run_id is None or directory is None:
        pass
    elif goes_on_here:
        record, is_changed = write_final_record(directory, replace(loss, is_waiting=True))
    elif pids := find_holders(FLOW_RUN_VARIABLE).pids.get(flow_run_id):
        # The run was started again, and its new process is not in the registry yet.
        open = f"another process of the same flow run is running (pid {pids[0]})"
    elif owner.api_url is None:
        record, is_changed = write_final_record(directory, loss)
    else:
        try:
            with connect_to_server(owner.api_url) as client:
                loss, state = _on_server(lost, loss, find_flow_run(client, flow_run_id))
                if loss.elsewhere:
                    # Another host has resumed the run, and sets the state of the flow run on the
                    # server. When the run has ended on the other host, the record on this host must
                    # be closed, too. The note file makes a later `muster reconcile` close the
                    # record.
                    note_waiting_run(owner.run_id, flow_run_id, owner.api_url)
                record, is_changed = write_final_record(directory, loss)
                after = decide_closed_state(state, record, loss.cause)
                if state is not None and after is not None:
                    if propose_state(client, flow_run_id, state, after):
                        server = after.name or ""
                    else:
                        open = CHANGED
                if is_changed and record is not None and record.state.is_final:
                    # If the flow run has already ended on the server, log the message that Muster
                    # would set for a running flow run.
                    end = after or decide_closed_state(Running(), record, loss.cause)
                    log_end(
                        client,
                        flow_run_id,
                        (end.message if end is not None else None) or record.message,
                        is_failure=record.state is RunState.FAILED,
                    )
                if server or (state is not None and state.is_final()):
                    # The killed process may have set the final state without an update of the run's
                    # artifacts in the Prefect UI. So update the artifacts.
                    cancel_evaluations_of_closed_run(client, RunPlace(directory=directory))
                    update_page_of_closed_run(client, flow_run_id, directory)
        except ServerAway as error:
            is_given_up = lost.seconds_lost() > _SERVER_TIMEOUT_S
            loss = replace(loss, is_waiting=False if is_given_up else None)
            if record is None:
                record, is_changed = write_final_record(directory, loss)
            open = "" if is_given_up else f"the Prefect server does not answer ({error})"
    if not open and not loss.jobs_left:
        lost.forget()
    new_state = record.state.value if record is not None and is_changed else ""
    return make_report(lost, loss, new_state, server=server, open=open)


def _read_last_step(place: RunPlace) -> float | None:
    """Return the last training step of a lost run's last attempt, or None if it is unknown.

    The record may lack the last steps, because the killed flow process read the metrics file only
    every `progress.every_s` seconds. Return None also if the file system does not answer.
    """

    def read() -> float | None:
        attempt = RunJson.read(place.record).attempt
        return read_last_step(place, attempt.number) if attempt is not None else None

    with suppress(OSError, ValueError):  # includes PlaceTimeout
        return PlaceReader(place.directory).ask_blocking(read)
    return None


def _on_server(
    lost: LostRun, loss: FlowLoss, flow_run: FlowRun | None
) -> tuple[FlowLoss, State[Any] | None]:
    """Add facts from the Prefect server to the cleanup results of a lost run.

    The facts are whether the run was cancelled, whether the run waits for its next flow process,
    and whether another host has taken over the run.

    Args:
        lost: The lost run.
        loss: The results of the cleanup so far.
        flow_run: The run's flow run on the Prefect server, or None if it does not exist.

    Returns:
        The completed results, and the present state of the flow run. The state is None if another
        host has taken over the run, or if the flow run does not exist or has no state.
    """
    if flow_run is None:
        return loss, None
    worker = find_new_worker(flow_run, lost.owner.host, lost.owner.worker)
    if worker:
        return replace(loss, is_waiting=True, elsewhere=worker), None
    state = flow_run.state
    if state is None:
        return loss, None
    has_process = state.is_running() or state.is_cancelling()
    is_waiting = not state.is_final() and not has_process
    is_cancelled = state.is_cancelling() or state.is_cancelled()
    return replace(loss, is_cancelled=is_cancelled, is_waiting=is_waiting), state


def finish_predecessor(run_id: str, *, adopts: bool = False) -> None:
    """Clean up after the previous flow process of a run, and close the attempt of that process.

    Does nothing if there was no previous process on this host. If another process, for example
    `muster reconcile`, is already cleaning up, this call waits until that process has finished.

    Args:
        run_id: Id of the run.
        adopts: True if this process will resume the attempt, so that the attempt and its Ray jobs
            must not be ended.

    Raises:
        OSError: A process could not be ended, or a Ray job may still run. A new attempt must not
            start at the same time.
    """
    deadline = time.monotonic() + _PREDECESSOR_TIMEOUT_S
    while True:
        with claim_lost_run(run_id) as lost:
            if lost is not None:
                loss, leftovers = end_processes(lost, deadline)
                if not leftovers and adopts and has_adoptable_attempt(lost):
                    return
                if not leftovers:
                    loss = stop_jobs(lost, loss, unknown_after_s=_PREDECESSOR_TIMEOUT_S)
                    leftovers = loss.jobs_left
                if leftovers:
                    raise OSError(
                        errno.EBUSY,
                        f"an earlier attempt of the run {run_id} has not ended completely: "
                        f"{leftovers}",
                    )
                finish_run(lost, loss, goes_on_here=True)
                return
        owner = read_owner(run_id)
        if owner is not None and not owner.host:
            raise OSError(
                errno.EBUSY,
                f"an earlier attempt of the run {run_id} may still be running on an unknown "
                f"machine, because {owner.fault}",
            )
        if owner is None or owner.host != host_name() or owner.process.is_alive():
            return
        if time.monotonic() > deadline:
            raise OSError(
                errno.EBUSY,
                f"another process of Muster is still ending an earlier attempt of the run {run_id}",
            )
        time.sleep(_CHECK_INTERVAL_S)
