"""Making the world agree with the record: what runs whose process is gone have left on this host.

Safe at any time, from any number of processes at once: each lost run is claimed by one of them,
and what is found alive, waiting or unclear is left as it is.

The upkeep does it again and again without a flow run for each look: nearly all find nothing, and a
flow run of each would start a process, and bury the runs that people look for.
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
from tasks.record.closing import is_by_loss
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
    reconciled,
    stop_jobs,
)
from tasks.upkeep.parked import close_ended_parked
from tasks.upkeep.report import Reconciled, Report
from tasks.upkeep.unseen_nodes import unseen_asked_again

_log = logging.getLogger(__name__)

#: Guardians that have lost their flow process get so long, in one reconcile, to take down theirs.
_SETTLE_WITHIN_S = 20.0
#: A cluster that does not answer is asked again by the next reconcile.
_UNKNOWN_AFTER_S = 5.0
_FLUSH_WITHIN_S = 5.0


def reconcile_host(lost: str | None = None) -> Report:
    """Finish every run of this host whose flow process is gone, and close its record, as that of
    one that was cancelled while it waited without a process.

    Nodes of Ray clusters that could not be asked what a job has left there are asked again. Flow
    runs of the server that is set, that this host was given and that have no process nor an entry
    in the registry, get the state that is true of them.

    Args:
        lost: another host, which is gone for good: the same from here, for its runs. What only it
            can see, its processes above all, is gone with it.
    """
    host = lost or host_name()
    runs = (
        *unseen_asked_again(host),
        *_finish_lost_runs(host),
        *close_ended_parked(),
        *_close_lost_flow_runs(host),
    )
    return Report(host=host, runs=runs)


def publish(report: Report) -> None:
    """Log what was found, and leave an artifact and events of what was done; of nothing, none."""
    log = run_log(_log)
    for run in report.runs:
        log.warning("%s", run)
    if not report.acted or not PREFECT_API_URL.value():
        return
    leave_report("reconcile", report.as_markdown(), report.summary, log)
    for run in report.acted:
        kind = f"flow-run.{run.flow_run_id}" if run.flow_run_id else f"muster.run.{run.name}"
        named = {"prefect.resource.id": f"prefect.{kind}", "prefect.resource.name": run.name}
        # Never raises.
        emit_event("muster.run.reconciled", resource=named, payload=run.as_payload())
    if FlowRunContext.get() is None:
        # Sent from a thread, which a program that goes on as another one would take with it. It
        # would warn that it is not done yet, which is what is waited for.
        logging.getLogger(EventsWorker.__name__).setLevel(logging.ERROR)
        EventsWorker.drain_all(timeout=_FLUSH_WITHIN_S)


def _finish_lost_runs(host: str) -> Iterator[Reconciled]:
    """Those of the registry."""
    deadline_s = time.monotonic() + _SETTLE_WITHIN_S
    for run_id in registered_runs():
        try:
            with claimed(run_id, host=host) as lost:
                if lost is not None and (run := _finish(lost, deadline_s)) is not None:
                    yield run
        except Exception as error:
            # The others shall not wait for this one; the entry is kept.
            _log.exception("run %s could not be reconciled", run_id)
            yield Reconciled(name=run_id, found="its process was gone", open=repr(error))


def _finish(lost: LostRun, deadline_s: float) -> Reconciled | None:
    """None where its jobs go on, and nothing is to be done for it."""
    loss, left = end_processes(lost, deadline_s)
    if left:
        return reconciled(lost, loss, open=left)
    if lost.owner.adopts and (kept := keep_jobs(lost, loss)) is not None:
        return kept if kept.has_acted or kept.open else None
    return finish_run(lost, stop_jobs(lost, loss, unknown_after_s=_UNKNOWN_AFTER_S))


def _close_lost_flow_runs(host: str) -> list[Reconciled]:
    """Those of the server that no registry knows: submitted, and never begun or long forgotten."""
    api_url = PREFECT_API_URL.value()
    if not api_url:
        return []
    try:
        with talking_to(api_url) as client:
            return list(_flow_runs_closed(client, _host(client, host)))
    except ServerRefuses as error:
        # Asking again changes nothing: somebody has to set the password.
        return [Reconciled(name=api_url, found="its flow runs are not shown", open=str(error))]
    except ServerAway as error:
        _log.warning("flow runs without a process were not looked for: %s", error)
        return []
    except Exception:
        # A server of another release, say. It keeps no worker from its start, nor the lost runs
        # that were finished before from being told.
        _log.exception("flow runs without a process could not be looked for on %s", api_url)
        return []


def _flow_runs_closed(client: SyncPrefectClient, host: Host) -> Iterator[Reconciled]:
    held = held_flow_runs(client)
    now = server_now(client) if held else None
    if now is None:
        return
    # After the states were read: a flow run that has ended since has another state by now.
    for run in held:
        after = state_of_lost(run, host, now)
        if after is None or run.state is None:
            continue
        after = _of_record(run) or after
        if after.is_scheduled() and run.state.is_running():
            # A cancel of the waiting flow run would wait for the process on record for ever.
            clear_process(client, str(run.id))
        done = propose(client, str(run.id), run.state, after)
        yield Reconciled(
            name=run.name,
            flow_run_id=str(run.id),
            found=f"{run.state.name}, without a process on {host.name}",
            server=after.name or "" if done else "",
            open="" if done else CHANGED,
        )


def _of_record(run: FlowRun) -> State[Any] | None:
    """How a run has ended by its record, where a word that came late, after an outage of the
    server, has taken the place of that; None where it says nothing."""
    with suppress(OSError, ValueError):
        record = RunJson.of_flow_run(RunPlace.of(run.name).record, str(run.id))
        if record is not None and record.state.is_final and not is_by_loss(record):
            return state_of_closed(run.state, record, record.message)
    return None


def _host(client: SyncPrefectClient, name: str) -> Host:
    owners = filter(None, map(owner_of, registered_runs()))
    registered = {known for owner in owners for known in (owner.run_id, owner.flow_run_id) if known}
    pipeline = FlowFilter.model_validate({"name": {"any_": ["pipeline"]}})
    pipelines = client.read_flows(flow_filter=pipeline, limit=1)
    return Host(
        name=name,
        is_lost=name != host_name(),
        upkeep_deployments=frozenset(found.id for _, found in upkeep_of(client, name)),
        processes=holders_of(FLOW_RUN_VARIABLE),
        registered=frozenset(registered),
        pipeline_flow=pipelines[0].id if pipelines else None,
    )


_EVERY_S = 60.0
#: A look that is cut short by the end of its process is done again by whoever comes next.
_END_WITHIN_S = 5.0


@contextmanager
def reconciled_each_minute() -> Iterator[None]:
    """While open, this host is reconciled from a thread, the first time after a minute.

    Nothing else of this process may reconcile meanwhile: the registry's locks are the process's,
    and keep two of its threads not apart.
    """
    ending = threading.Event()

    def look_again() -> None:
        while not ending.wait(_EVERY_S):
            try:
                publish(reconcile_host())
            except Exception:
                _log.exception("this host was not reconciled, and is again in %g s", _EVERY_S)

    thread = thread_here("reconcile", look_again)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(_END_WITHIN_S)


def give_up_host(name: str) -> Report:
    """Finish every run of a host that is gone for good, as somebody has said, and close its record.

    Nobody can tell a host that is off from one that is only cut off, whose processes still hold
    their GPUs. So nothing is concluded from silence; a host that is not even silent is refused.

    Raises: BadArgument, before anything is changed; ServerAway.
    """
    if name == host_name():
        raise BadArgument(f"{name} is this host: `muster reconcile` looks after its runs")
    api_url = PREFECT_API_URL.value()
    if not api_url:
        raise BadArgument("PREFECT_API_URL is not set: only a server knows what a host had")
    with talking_to(api_url) as client:
        _check(client, name)
    return reconcile_host(lost=name)


def _check(client: SyncPrefectClient, name: str) -> None:
    heard = dict(_heard(client, name))
    now = server_now(client) or datetime.now(UTC)
    for what, when in heard.items():
        if (age_s := (now - when).total_seconds()) < SILENT_AFTER_S:
            raise BadArgument(
                f"{what} was heard of {max(0.0, age_s):.0f} s ago, so {name} is not lost: cancel "
                f"its runs; or switch it off, and ask again after {SILENT_AFTER_S:.0f} s"
            )
    owners = filter(None, map(owner_of, registered_runs()))
    known = {owner.host for owner in owners} | {host_of(run) for run in held_flow_runs(client)}
    if not heard and name not in known:
        others = ", ".join(sorted(filter(None, known - {host_name()}))) or "no other host"
        raise BadArgument(f"nobody knows a host {name!r}; runs are on record of {others}")


def _heard(client: SyncPrefectClient, name: str) -> Iterator[tuple[str, datetime]]:
    """What runs on the host for Muster, and when it was heard of last."""
    for pool in client.read_work_pools():
        for worker in client.read_workers_for_work_pool(pool.name):
            if worker.name == name and worker.last_heartbeat_time is not None:
                yield f"its worker of the pool {pool.name}", worker.last_heartbeat_time
    for deployment, found in upkeep_of(client, name):
        if found.last_polled is not None:
            yield f"its upkeep (`{deployment}`)", found.last_polled


def reconcile(*, lost_host: str | None = None) -> int:
    """Finish what killed runs have left on this host and close their records, here and on the
    Prefect server. Safe at any time.

    Exit: 0 done, or nothing to do; 1 something could not be finished yet; 2 the host is not lost.

    Args:
        lost_host: Finish the runs of another host from here, which is gone for good: their GPUs are
            given to other runs. Say so only of a host that is off: what still runs on one that is
            only cut off would share its GPUs. Refused for a host that was heard of in the last two
            minutes.
    """
    # What it would log is printed here.
    _log.setLevel(logging.ERROR)
    report = give_up_host(lost_host) if lost_host else reconcile_host()
    publish(report)
    for run in report.runs:
        print(run)
    print(report.summary)
    return EXIT_FAILED if any(run.open for run in report.runs) else EXIT_DONE
