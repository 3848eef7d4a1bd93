"""Finish the runs of this host whose flow process is gone, and correct their records.

This is safe at any time and from several processes at once: each lost run is claimed by one of
them. Anything that is found alive, waiting or unclear is left as it is.

The upkeep reconciles its host every minute without creating a flow run. Nearly every pass finds
nothing. A flow run for each would start a process and would hide the runs that people look for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
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

from tasks.processes.ending import holders_of
from tasks.processes.identity import host_name
from tasks.processes.registry import LostRun, claimed, owner_of, registered_runs
from tasks.record.final_record import has_failed_by_loss
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.server.artifacts import leave_report, run_log
from tasks.server.flow_runs import (
    FLOW_RUN_VARIABLE,
    SILENT_AFTER_S,
    Host,
    ServerAway,
    ServerRefuses,
    clear_process,
    held_flow_runs,
    host_of,
    propose,
    server_now,
    state_of_closed,
    state_of_lost,
    talking_to,
    thread_here,
    upkeep_of,
)
from tasks.show.arguments import EXIT_DONE, EXIT_FAILED
from tasks.spec.errors import BadArgument
from tasks.upkeep.lost_run import (
    CHANGED,
    end_processes,
    finish_run,
    keep_jobs,
    make_report,
    stop_jobs,
)
from tasks.upkeep.node_checks import check_nodes_again
from tasks.upkeep.report import Reconciled, Report
from tasks.upkeep.waiting_runs import close_ended_waiting_runs

_log = logging.getLogger(__name__)

#: Seconds that all guardians together get in one reconcile to stop their components.
_SETTLE_TIMEOUT_S = 20.0
#: Seconds after which a Ray cluster that does not answer is given up until the next reconcile.
_CLUSTER_TIMEOUT_S = 5.0
#: Seconds to wait until the events have been sent.
_FLUSH_TIMEOUT_S = 5.0


def reconcile_host(lost: str | None = None) -> Report:
    """Finish every run of a host whose flow process is gone, and correct the records.

    - Nodes of Ray clusters that could not be checked for leftovers are checked again.
    - Lost runs of the registry are finished.
    - The records of runs that were cancelled while they waited without a process are closed.
    - Flow runs of the Prefect server that were assigned to the host, but have neither a process
      nor a registry entry, get their true state.

    Args:
        lost: Name of another host that is gone for good. Its runs are finished from here. What
            only that host could see, such as its processes, is taken to be gone. None: this host.
    """
    host = lost or host_name()
    runs = (
        *check_nodes_again(host),
        *_finish_lost_runs(host),
        *close_ended_waiting_runs(),
        *_close_lost_flow_runs(host),
    )
    return Report(host=host, runs=runs)


def publish(report: Report) -> None:
    """Log what was found. If anything was changed, also leave an artifact and emit events."""
    log = run_log(_log)
    for run in report.runs:
        log.warning("%s", run)
    if not report.acted or not PREFECT_API_URL.value():
        return
    leave_report("reconcile", report.as_markdown(), report.summary, log)
    for run in report.acted:
        if run.flow_run_id:
            resource_id = f"prefect.flow-run.{run.flow_run_id}"
        else:
            resource_id = f"prefect.muster.run.{run.name}"
        resource = {"prefect.resource.id": resource_id, "prefect.resource.name": run.name}
        # `emit_event` never raises.
        emit_event("muster.run.reconciled", resource=resource, payload=run.as_payload())
    if FlowRunContext.get() is None:
        # Events are sent by a thread. Wait for it, because this process may soon be replaced by
        # another program. Prefect would log a warning while it waits.
        logging.getLogger(EventsWorker.__name__).setLevel(logging.ERROR)
        EventsWorker.drain_all(timeout=_FLUSH_TIMEOUT_S)


def _finish_lost_runs(host: str) -> Iterator[Reconciled]:
    """Finish the lost runs of the registry, and yield a report for each."""
    deadline_s = time.monotonic() + _SETTLE_TIMEOUT_S
    for run_id in registered_runs():
        try:
            with claimed(run_id, host=host) as lost:
                if lost is not None and (run := _finish(lost, deadline_s)) is not None:
                    yield run
        except Exception as error:
            # Continue with the other runs. The entry is kept, so this run is tried again.
            _log.exception("run %s could not be reconciled", run_id)
            yield Reconciled(name=run_id, found="its process was gone", open=repr(error))


def _finish(lost: LostRun, deadline_s: float) -> Reconciled | None:
    """Finish a lost run. Returns None if its jobs go on and nothing was done."""
    loss, leftovers = end_processes(lost, deadline_s)
    if leftovers:
        return make_report(lost, loss, open=leftovers)
    if lost.owner.adopts:
        report = keep_jobs(lost, loss)
        if report is not None:
            return report if report.has_acted or report.open else None
    return finish_run(lost, stop_jobs(lost, loss, unknown_after_s=_CLUSTER_TIMEOUT_S))


def _close_lost_flow_runs(host: str) -> list[Reconciled]:
    """Correct the states of flow runs without a process that no registry entry mentions.

    They were submitted but never began, or their entry was removed long ago.
    """
    api_url = PREFECT_API_URL.value()
    if not api_url:
        return []
    try:
        with talking_to(api_url) as client:
            return list(_close_flow_runs(client, _describe_host(client, host)))
    except ServerRefuses as error:
        # Another try does not help: somebody must set the password.
        return [Reconciled(name=api_url, found="its flow runs are not shown", open=str(error))]
    except ServerAway as error:
        _log.warning("flow runs without a process were not looked for: %s", error)
        return []
    except Exception:
        # For example, a server of another release. This must not keep a worker from starting, nor
        # discard the reports about the lost runs that were finished before.
        _log.exception("flow runs without a process could not be looked for on %s", api_url)
        return []


def _close_flow_runs(client: SyncPrefectClient, host: Host) -> Iterator[Reconciled]:
    flow_runs = held_flow_runs(client)
    # Read the clock after the states: `propose` rejects a change of a state that is newer.
    now = server_now(client) if flow_runs else None
    if now is None:
        return
    for run in flow_runs:
        after = state_of_lost(run, host, now)
        if after is None or run.state is None:
            continue
        after = _recorded_end(run) or after
        if after.is_scheduled() and run.state.is_running():
            # Otherwise a cancel of the waiting flow run would wait for the recorded process, which
            # no longer exists.
            clear_process(client, str(run.id))
        is_accepted = propose(client, str(run.id), run.state, after)
        yield Reconciled(
            name=run.name,
            flow_run_id=str(run.id),
            found=f"{run.state.name}, without a process on {host.name}",
            server=after.name or "" if is_accepted else "",
            open="" if is_accepted else CHANGED,
        )


def _recorded_end(run: FlowRun) -> State[Any] | None:
    """Return the final state that the run's own record names.

    After an outage of the server, a late update can have replaced that state on the server.

    Returns:
        None if the record is missing, is not final, or was itself closed because of a loss.
    """
    with suppress(OSError, ValueError):
        record = RunJson.read_for_flow_run(RunPlace.of(run.name).record, str(run.id))
        if record is not None and record.state.is_final and not has_failed_by_loss(record):
            return state_of_closed(run.state, record, record.message)
    return None


def _describe_host(client: SyncPrefectClient, name: str) -> Host:
    """Collect what decides whether a flow run of the host is lost."""
    registered: set[str] = set()
    for owner in filter(None, map(owner_of, registered_runs())):
        registered |= {known for known in (owner.run_id, owner.flow_run_id) if known}
    flow_filter = FlowFilter.model_validate({"name": {"any_": ["pipeline"]}})
    pipeline_flows = client.read_flows(flow_filter=flow_filter, limit=1)
    return Host(
        name=name,
        is_lost=name != host_name(),
        upkeep_deployments=frozenset(deployment.id for _, deployment in upkeep_of(client, name)),
        processes=holders_of(FLOW_RUN_VARIABLE),
        registered=frozenset(registered),
        pipeline_flow=pipeline_flows[0].id if pipeline_flows else None,
    )


#: Seconds between two reconciles.
_EVERY_S = 60.0
#: Seconds to wait at the end for a reconcile in progress. One that is cut short is repeated by the
#: next process that reconciles.
_END_TIMEOUT_S = 5.0


@contextmanager
def reconcile_every_minute() -> Iterator[None]:
    """Reconcile this host every minute in a thread while the context is open.

    The first reconcile begins after one minute. Meanwhile, no other thread of this process may
    reconcile: the locks of the registry belong to the process and do not separate its threads.
    """
    ending = threading.Event()

    def reconcile_repeatedly() -> None:
        while not ending.wait(_EVERY_S):
            try:
                publish(reconcile_host())
            except Exception:
                _log.exception("this host was not reconciled, and is again in %g s", _EVERY_S)

    thread = thread_here("reconcile", reconcile_repeatedly)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(_END_TIMEOUT_S)


def give_up_host(name: str) -> Report:
    """Finish every run of a host that an operator has declared gone for good.

    A host that is switched off cannot be told from a host without network, whose processes still
    use their GPUs. So silence alone proves nothing, and an operator must decide. A host that was
    heard of recently is refused.

    Args:
        name: Name of the host.

    Raises:
        BadArgument: The host is not gone, or is unknown. Nothing was changed.
        ServerAway: The Prefect server does not answer.
    """
    if name == host_name():
        raise BadArgument(f"{name} is this host: `muster reconcile` looks after its runs")
    api_url = PREFECT_API_URL.value()
    if not api_url:
        raise BadArgument("PREFECT_API_URL is not set: only a server knows what a host had")
    with talking_to(api_url) as client:
        _check_is_silent(client, name)
    return reconcile_host(lost=name)


def _check_is_silent(client: SyncPrefectClient, name: str) -> None:
    """Raise BadArgument if the host was heard of recently or if no run names it."""
    last_contacts = dict(_last_contacts(client, name))
    now = server_now(client) or datetime.now(UTC)
    for source, contact_at in last_contacts.items():
        if (age_s := (now - contact_at).total_seconds()) < SILENT_AFTER_S:
            raise BadArgument(
                f"{source} was heard of {max(0.0, age_s):.0f} s ago, so {name} is not lost: cancel "
                f"its runs; or switch it off, and ask again after {SILENT_AFTER_S:.0f} s"
            )
    owners = filter(None, map(owner_of, registered_runs()))
    known_hosts = {owner.host for owner in owners} | {
        host_of(run) for run in held_flow_runs(client)
    }
    if not last_contacts and name not in known_hosts:
        other_hosts = sorted(filter(None, known_hosts - {host_name()}))
        others = ", ".join(other_hosts) or "no other host"
        raise BadArgument(f"nobody knows a host {name!r}; runs are on record of {others}")


def _last_contacts(client: SyncPrefectClient, name: str) -> Iterator[tuple[str, datetime]]:
    """Yield each of Muster's processes on the host, and when the server last heard of it."""
    for pool in client.read_work_pools():
        for worker in client.read_workers_for_work_pool(pool.name):
            if worker.name == name and worker.last_heartbeat_time is not None:
                yield f"its worker of the pool {pool.name}", worker.last_heartbeat_time
    for deployment_name, deployment in upkeep_of(client, name):
        if deployment.last_polled is not None:
            yield f"its upkeep (`{deployment_name}`)", deployment.last_polled


def reconcile(*, lost_host: str | None = None) -> int:
    """Finish the runs of this host whose process is gone, and correct their records.

    Leftover processes and jobs are ended. The records are corrected here and on the Prefect server.
    Safe at any time.

    Exit: 0 done, or nothing to do; 1 something could not be finished yet; 2 the host is not lost.

    Args:
        lost_host: Finish the runs of another host, which is gone for good, from this one. Their
            GPUs are then given to other runs. Use it only for a host that is switched off: on a
            host that only lost its network, old and new runs would share the GPUs. Refused for a
            host that was heard of in the last two minutes.
    """
    # The result is printed, so it need not be logged as well.
    _log.setLevel(logging.ERROR)
    report = give_up_host(lost_host) if lost_host else reconcile_host()
    publish(report)
    for run in report.runs:
        print(run)
    print(report.summary)
    return EXIT_FAILED if any(run.open for run in report.runs) else EXIT_DONE
