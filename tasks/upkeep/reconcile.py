"""Clean up after runs of this host whose flow process was lost, and correct their records.

The functions of this module may be called at any time, even by several processes at once. A process
locks each lost run before it cleans up after the run. The functions do not change a run that is
running or waiting, or whose state is unknown.

Muster's maintenance process of each host calls `reconcile_host` every minute, and does not create a
flow run for the call. Most calls change nothing, and their flow runs would hide the users' runs in
the Prefect UI.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL

from tasks.processes.ending import find_holders
from tasks.processes.identity import host_name
from tasks.processes.registry import (
    LostRun,
    claim_lost_run,
    list_unreadable_files,
    read_owner,
    registered_runs,
)
from tasks.record.final_record import has_failed_by_loss
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.server.artifacts import create_report, find_run_logger
from tasks.server.flow_runs import (
    FLOW_RUN_VARIABLE,
    SILENT_AFTER_S,
    Host,
    ServerAway,
    ServerRefuses,
    clear_process,
    connect_to_server,
    decide_closed_state,
    decide_lost_state,
    find_host,
    make_context_thread,
    propose_state,
    read_held_flow_runs,
    read_server_time,
    read_upkeep_deployments,
)
from tasks.show.arguments import EXIT_DONE, EXIT_FAILED
from tasks.spec.errors import BadArgument
from tasks.upkeep.lost_run import (
    CHANGED,
    complete_owner,
    end_processes,
    finish_run,
    keep_jobs,
    make_report,
    stop_jobs,
)
from tasks.upkeep.node_checks import check_nodes_again
from tasks.upkeep.orphans import end_orphans
from tasks.upkeep.report import Report, RunReport
from tasks.upkeep.waiting_runs import close_ended_waiting_runs, list_waiting_runs

_log = logging.getLogger(__name__)

#: Longest time that one call of `reconcile_host` waits in total for the guardian processes of lost
#: runs, in seconds. A guardian process owns one component and may still be stopping it.
_SETTLE_TIMEOUT_S = 20.0
#: Longest time that `reconcile_host` waits for a Ray cluster that does not answer, in seconds.
_CLUSTER_TIMEOUT_S = 5.0
#: Longest time, in seconds, to wait until the Prefect events have been sent.
_FLUSH_TIMEOUT_S = 5.0


def reconcile_host(lost: str | None = None) -> Report:
    """Clean up after the lost runs of a host, and correct the records of the host's runs.

    A lost run is a run whose flow process has died.

    - Ray nodes that could not be checked for leftover processes are checked again.
    - For each lost run in the registry, the leftover processes are ended, and the record gets a
      final state.
    - Active runs of this host are ended if their flow run has ended or was deleted.
    - The records of runs that ended while they waited without a process are closed.
    - Flow runs that were assigned to the host, but have neither a process nor a registry entry, get
      their true state on the Prefect server.

    Args:
        lost: Name of another host that is permanently gone. This host finishes the other host's
            runs, and the other host's processes count as ended. If None, the runs of this host are
            finished.

    Returns:
        Reports about all runs whose recorded state was wrong.
    """
    host = lost or host_name()
    checked_nodes = tuple(check_nodes_again(host))
    lost_runs = tuple(_finish_lost_runs(host))
    runs = (
        *checked_nodes,
        *lost_runs,
        *_report_unreadable_files(reported={run.name for run in lost_runs}),
        *(end_orphans() if lost is None else ()),
        *close_ended_waiting_runs(),
        *_close_lost_flow_runs(host),
    )
    return Report(host=host, runs=runs)


def publish(report: Report) -> None:
    """Log the report of each run. If a run was changed, also publish an artifact and events."""
    log = find_run_logger(_log)
    for run in report.runs:
        log.warning("%s", run)
    if not report.changed_runs or not PREFECT_API_URL.value():
        return
    create_report("reconcile", report.as_markdown(), report.summary, log)
    for run in report.changed_runs:
        if run.flow_run_id:
            resource_id = f"prefect.flow-run.{run.flow_run_id}"
        else:
            resource_id = f"prefect.muster.run.{run.name}"
        resource = {"prefect.resource.id": resource_id, "prefect.resource.name": run.name}
        # `emit_event` never raises an exception, so no error handling is needed here.
        emit_event("muster.run.reconciled", resource=resource, payload=run.as_payload())
    if FlowRunContext.get() is None:
        # A thread of Prefect sends the events. Wait for the thread, because this process may soon
        # exit. Raise the log level, because Prefect would log a warning during the wait.
        logging.getLogger(EventsWorker.__name__).setLevel(logging.ERROR)
        EventsWorker.drain_all(timeout=_FLUSH_TIMEOUT_S)


def _finish_lost_runs(host: str) -> Iterator[RunReport]:
    """Clean up after each lost run in the registry of a host, and yield a report for each.

    A lost run is a run whose flow process has died.
    """
    deadline_s = time.monotonic() + _SETTLE_TIMEOUT_S
    for run_id in registered_runs():
        try:
            with claim_lost_run(run_id, host=host) as lost:
                if lost is not None and (run := _finish(lost, deadline_s)) is not None:
                    yield run
        except Exception as error:
            # Continue with the other runs. This run stays in the registry, so a later call cleans
            # up after it again.
            _log.exception("Muster could not clean up after the lost run %s.", run_id)
            yield RunReport(name=run_id, found="its process was gone", open=repr(error))


def _report_unreadable_files(reported: Collection[str]) -> Iterator[RunReport]:
    """Yield a report for each run that has an unreadable file in the registry.

    Args:
        reported: Ids of runs that already have another report. These runs are skipped.
    """
    files_by_run: dict[str, list[str]] = {}
    for file in list_unreadable_files():
        if file.path.parent.name not in reported:
            files_by_run.setdefault(file.path.parent.name, []).append(str(file))
    for run_id, files in files_by_run.items():
        owner = read_owner(run_id)
        is_of_unknown_host = owner is not None and not owner.host
        yield RunReport(
            name=run_id,
            found="; ".join(files),
            open="Muster does not know on which host the run was started. If the run has "
            "ended, remove the folder of the run in $MUSTER_HOME/live"
            if is_of_unknown_host
            else "",
        )


def _finish(lost: LostRun, deadline_s: float) -> RunReport | None:
    """End the leftover processes of a lost run, and write the run's final state into its record.

    If another process will resume the run, the run's Ray jobs are not ended.

    Args:
        lost: The lost run, whose flow process has died.
        deadline_s: Time of CLOCK_MONOTONIC in seconds. Until this time, the function waits for the
            guardian processes that own the run's components.

    Returns:
        The report about the run. None if the run's Ray jobs keep running and nothing was changed.
    """
    complete_owner(lost)
    loss, leftovers = end_processes(lost, deadline_s)
    if leftovers:
        return make_report(lost, loss, open=leftovers)
    if lost.owner.adopts:
        report = keep_jobs(lost, loss)
        if report is not None:
            return report if report.has_changes or report.open else None
    return finish_run(lost, stop_jobs(lost, loss, unknown_after_s=_CLUSTER_TIMEOUT_S))


def _close_lost_flow_runs(host: str) -> list[RunReport]:
    """Correct the states of flow runs that have neither a process nor a registry entry.

    A flow run without a registry entry was submitted but never began, or its entry was removed.

    Args:
        host: Name of the host of the flow runs.
    """
    api_url = PREFECT_API_URL.value()
    if not api_url:
        return []
    try:
        with connect_to_server(api_url) as client:
            return list(_close_flow_runs(client, _describe_host(client, host)))
    except ServerRefuses as error:
        # The server rejects the password. Another try does not help, because an operator must set
        # the right password.
        return [
            RunReport(
                name=api_url,
                found="Muster cannot read the flow runs of this Prefect server",
                open=str(error),
            )
        ]
    except ServerAway as error:
        _log.warning("Muster could not search for flow runs without a process: %s", error)
        return []
    except Exception:
        # An unexpected error can occur if the Prefect server has another version than this client.
        # Only log the error. An exception would prevent the start of a worker, and the reports
        # about the runs that were already cleaned up would be lost.
        _log.exception(
            "Muster could not search the Prefect server %s for flow runs whose process has ended.",
            api_url,
        )
        return []


def _close_flow_runs(client: SyncPrefectClient, host: Host) -> Iterator[RunReport]:
    """Correct the states of lost flow runs on the Prefect server, and yield a report for each.

    Args:
        client: Client of the Prefect server.
        host: The host of the flow runs, and the processes on that host.
    """
    flow_runs = read_held_flow_runs(client)
    # First the list of flow runs was read, and only now the clock of the server is read. So no flow
    # run in the list has a state from a time after `now`.
    now = read_server_time(client) if flow_runs else None
    if now is None:
        return
    for run in flow_runs:
        after = decide_lost_state(run, host, now)
        if after is None or run.state is None:
            continue
        after = _recorded_end(run) or after
        if after.is_scheduled() and run.state.is_running():
            # Delete the pid of the ended process from the flow run's record on the server.
            # Otherwise, a cancellation of the scheduled flow run would wait forever for the
            # process.
            clear_process(client, str(run.id))
        is_accepted = propose_state(client, str(run.id), run.state, after)
        yield RunReport(
            name=run.name,
            flow_run_id=str(run.id),
            found=f"the flow run is in the state {run.state.name}, but has no process on "
            f"{host.name}",
            server=after.name or "" if is_accepted else "",
            open="" if is_accepted else CHANGED,
        )


def _recorded_end(run: FlowRun) -> State[Any] | None:
    """Return a flow run's final Prefect state according to the run's record on this host.

    The state on the Prefect server may be wrong: after an outage of the server, a delayed update
    may have replaced the final state.

    Returns:
        The final state. None if the record is missing, if the record has no final state, or if
        `muster reconcile` has closed the record because the run was lost.
    """
    with suppress(OSError, ValueError):
        record = RunJson.read_for_flow_run(RunPlace.of(run.name).record, str(run.id))
        if record is not None and record.state.is_final and not has_failed_by_loss(record):
            return decide_closed_state(run.state, record, record.message)
    return None


def _describe_host(client: SyncPrefectClient, name: str) -> Host:
    """Return the facts about a host that decide whether its flow runs are lost.

    The facts come from the registry of this machine and from the Prefect server.
    """
    registered: set[str] = set()
    for run_id in registered_runs():
        owner = read_owner(run_id)
        registered |= {run_id, owner.flow_run_id or run_id} if owner else {run_id}
    flow_filter = FlowFilter.model_validate({"name": {"any_": ["pipeline"]}})
    pipeline_flows = client.read_flows(flow_filter=flow_filter, limit=1)
    return Host(
        name=name,
        is_lost=name != host_name(),
        upkeep_deployments=frozenset(
            deployment.id for _, deployment in read_upkeep_deployments(client, name)
        ),
        processes=find_holders(FLOW_RUN_VARIABLE),
        registered=frozenset(registered),
        waiting=frozenset(list_waiting_runs()),
        pipeline_flow=pipeline_flows[0].id if pipeline_flows else None,
    )


#: Seconds between two calls of `reconcile_host` in the maintenance process of this host.
_EVERY_S = 60.0
#: Seconds between two calls of `reconcile_host` in a process that waits for GPUs.
_EVERY_S_WHILE_WAITING = 15.0
#: Seconds to wait for a running call of `reconcile_host` when the thread of the call is stopped.
#: After this time, Muster abandons the call, and a later call of `reconcile_host` does the
#: remaining work.
_END_TIMEOUT_S = 5.0


@contextmanager
def reconcile_every_minute() -> Iterator[None]:
    """Call `reconcile_host` for this host every minute in a thread while the context is open.

    The first call begins after one minute. The file locks of the registry exclude other processes,
    but not other threads of this process. So no other thread may call `reconcile_host` while the
    context is open.
    """
    with _call_in_thread(lambda: publish(reconcile_host()), _EVERY_S):
        yield


@contextmanager
def reconcile_while_waiting() -> Iterator[None]:
    """Call `reconcile_host` for this host every 15 seconds in a thread while the context is open.

    A run uses this context manager while it waits for GPUs. Otherwise, a killed run would keep its
    GPUs forever on a host without a maintenance process. The first call begins after 15 seconds. No
    other thread of this process may call `reconcile_host` while the context is open.
    """

    def reconcile_and_log() -> None:
        for run in reconcile_host().changed_runs:
            _log.info("%s", run)

    with _call_in_thread(reconcile_and_log, _EVERY_S_WHILE_WAITING):
        yield


@contextmanager
def _call_in_thread(function: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call a function repeatedly in a thread while the context is open.

    The first call begins after `every_s` seconds. An error of the function is logged, and the
    function is called again.
    """
    ending = threading.Event()

    def call_repeatedly() -> None:
        while not ending.wait(every_s):
            try:
                function()
            except Exception:
                _log.exception(
                    "Muster could not clean up after the lost runs of this host. It tries again "
                    "in %g s.",
                    every_s,
                )

    thread = make_context_thread("reconcile", call_repeatedly)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(_END_TIMEOUT_S)


def give_up_host(name: str) -> Report:
    """Clean up after every run of a host that an operator has declared permanently gone.

    Muster cannot decide by itself whether a host is gone. A host that is switched off and a host
    without network look the same, but processes of the host without network still use GPUs. A host
    that has recently contacted the Prefect server is rejected.

    Args:
        name: Name of the host.

    Raises:
        BadArgument: The host is this host, is unknown, or has recently contacted the Prefect
            server. No run was changed.
        ServerAway: The Prefect server does not answer.
    """
    if name == host_name():
        raise BadArgument(
            f"{name} is this host. To clean up after the lost runs of this host, run `muster "
            "reconcile` without --lost-host"
        )
    api_url = PREFECT_API_URL.value()
    if not api_url:
        raise BadArgument(
            "PREFECT_API_URL is not set. Set it to the address of the Prefect server that has the "
            f"runs of {name}"
        )
    with connect_to_server(api_url) as client:
        _check_is_silent(client, name)
    return reconcile_host(lost=name)


def _check_is_silent(client: SyncPrefectClient, name: str) -> None:
    """Check that a host exists and has not contacted the Prefect server recently.

    Raises:
        BadArgument: The host has contacted the server recently, or neither a worker nor a run of
            this host is known.
    """
    last_contacts = dict(_last_contacts(client, name))
    now = read_server_time(client) or datetime.now(UTC)
    for source, contact_at in last_contacts.items():
        if (age_s := (now - contact_at).total_seconds()) < SILENT_AFTER_S:
            raise BadArgument(
                f"The host {name} still reports to the Prefect server: {source} last reported "
                f"{max(0.0, age_s):.0f} s ago. To end the runs of the host, cancel them. If the "
                "host is lost for good, switch it off, and run this command again after "
                f"{SILENT_AFTER_S:.0f} s."
            )
    owners = filter(None, map(read_owner, registered_runs()))
    known_hosts = {owner.host for owner in owners} | {
        find_host(run) for run in read_held_flow_runs(client)
    }
    if not last_contacts and name not in known_hosts:
        other_hosts = sorted(filter(None, known_hosts - {host_name()}))
        others = ", ".join(other_hosts) or "no other host"
        raise BadArgument(
            f"the Prefect server has no worker and no run of a host with the name {name!r}. The "
            f"hosts with runs are: {others}"
        )


def _last_contacts(client: SyncPrefectClient, name: str) -> Iterator[tuple[str, datetime]]:
    """Yield a pair for each Muster process of a host: a description and a time in UTC.

    The time is the last contact of this process with the Prefect server.
    """
    for pool in client.read_work_pools():
        for worker in client.read_workers_for_work_pool(pool.name):
            if worker.name == name and worker.last_heartbeat_time is not None:
                yield f"its worker of the pool {pool.name}", worker.last_heartbeat_time
    for deployment_name, deployment in read_upkeep_deployments(client, name):
        if deployment.last_polled is not None:
            yield f"its upkeep (`{deployment_name}`)", deployment.last_polled


def reconcile(*, lost_host: str | None = None) -> int:
    """Finish the runs of this host whose process was killed or lost.

    Leftover processes and jobs are ended. The records of the runs are corrected on this host and on
    the Prefect server. The command is safe at any time.

    Exit: 0 done, or nothing to do; 1 a run could not be finished yet; 2 the host is not lost.

    Args:
        lost_host: Name of another host that is permanently gone. Its runs are finished from this
            host, and their GPUs become free for other runs. Use this only for a host that is
            switched off: on a host that only lost its network, old and new runs would share the
            GPUs. A host that has reported in the last two minutes is refused.
    """
    # Do not log the result, because it is printed to the terminal below.
    _log.setLevel(logging.ERROR)
    report = give_up_host(lost_host) if lost_host else reconcile_host()
    publish(report)
    for run in report.runs:
        print(run)
    print(report.summary)
    return EXIT_FAILED if any(run.open for run in report.runs) else EXIT_DONE
