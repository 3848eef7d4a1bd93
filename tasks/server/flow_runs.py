"""Flow runs as their Prefect server has them: which of them have lost their process, and the state
that is true of them then.

All proposals are made by the server's own rules, none is forced: a flow run that has come to its
end, or that somebody began to cancel, between our look and our word is left as it is.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from itertools import count
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import DeploymentResponse, SetStateStatus
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_AUTH_STRING
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Failed, Running, Scheduled

from tasks.processes.ending import Holders
from tasks.processes.identity import ProcessId, boot_id, host_name
from tasks.record.final_record import has_failed_by_loss
from tasks.record.run_json import RunJson
from tasks.record.states import RunState
from tasks.server.events import client_settings
from tasks.spec.errors import MusterError
from tasks.spec.placeholders import mapping_or_empty

_REFUSALS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_REMEDY = "set PREFECT_API_AUTH_STRING to what its server has as PREFECT_SERVER_API_AUTH_STRING"


def refusal_of(answer: httpx.Response) -> str:
    """Why a server did not do what it was asked, in its words."""
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


#: In the environment of a flow run's process. Source: prefect/runner/_starter_engine.py.
FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
#: The state of a flow run without a process whose jobs go on. Its name is that of a retry, with
#: which a flow run may leave a final state.
JOBS_GO_ON = "AwaitingRetry"
#: Name of the Cancelling state by which `muster cancel --now` skips the grace periods. A name, and
#: no label, since whoever may cancel may set a state.
CANCELLING_NOW = "CancellingNow"
#: The flows whose lost flow runs are closed.
OUR_FLOWS = ("train", "pipeline", "reconcile", "prune")
#: Of them, those that each host's upkeep serves itself; their flow runs are of no use once done.
UPKEEP_FLOWS = ("reconcile", "prune")

#: The states of a flow run that should have a process, or is about to get one.
HELD = (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)
#: Workers tell the server each 30 s that they are there; an upkeep asks it for work each 10 s.
SILENT_AFTER_S = 120.0

#: The labels by which a worker says who it is. Source: prefect/workers/base.py,
#: _give_worker_labels_to_flow_run.
_WORKER_LABEL, TYPE_LABEL = "prefect.worker.name", "prefect.worker.type"
#: Of a flow run that was started directly: host, pid and the ticks of its start.
_PROCESS_TAG = "process:"
#: Workers whose flow runs are processes of their own host; others' are somewhere else.
_LOCAL_TYPES = ("process", "gang")
#: The work pools of our runs and pipelines.
_POOLS = ("gang", "pipelines")
#: In the command line of a flow run's process. Source: prefect/runner/_workspace_starter.py.
_ENGINES = ("prefect.engine", "prefect.flow_engine", "_workspace_", "-m flows")
#: By that of a run which has ended and has not failed.
STATE_OF = {RunState.COMPLETED: Completed, RunState.CANCELLED: Cancelled}
_OPEN = (*HELD, StateType.SCHEDULED, StateType.PAUSED)
#: The process of a flow run that was just submitted needs some seconds to appear.
_SETTLED_AFTER = timedelta(seconds=30)
#: A worker labels what it has taken within a second, unless it is killed in that moment.
_UNLABELLED_AFTER = timedelta(seconds=60)
_TIMEOUT_S = 10.0
_SAID_AGAIN_AFTER_S = (0.5, 1.0, 2.0, 4.0)
_PAGE = 200

_log = logging.getLogger(__name__)


class ServerAway(MusterError):
    """A Prefect server did not answer, or with an error of its own: ask it again later."""


class ServerRefuses(ServerAway):
    """A Prefect server answers, and wants a password that this process has not: its message says
    what to set. What is to be told waits until that is done."""


@contextmanager
def answered_by(api_url: str) -> Iterator[None]:
    """Raises: ServerAway, for any question within that fails; ServerRefuses among them."""
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
        if status not in _REFUSALS:
            why = str(error) or type(error).__name__
            raise ServerAway(f"no Prefect server answers at {api_url} ({why})") from error
        is_set = bool(PREFECT_API_AUTH_STRING.value())
        who = "the PREFECT_API_AUTH_STRING of this process" if is_set else "who has no password"
        said = f"the Prefect server at {api_url} does not let in {who} (HTTP {status}): {_REMEDY}"
        raise ServerRefuses(said) from error


@contextmanager
def talking_to(api_url: str) -> Iterator[SyncPrefectClient]:
    """A client of a Prefect server, whatever server this process belongs to otherwise.

    It soon gives up: whoever comes by each minute need not insist.

    Raises: ServerAway, for any call within that fails; ServerRefuses among them.
    """
    # Settings of its own, or a flow's context would give the client of that flow's server.
    own = {"timeout": _TIMEOUT_S}
    with (
        answered_by(api_url),
        client_settings(retries=1, api_url=api_url),
        get_client(httpx_settings=own, sync_client=True) as client,
    ):
        yield client


#: Among the variables of a work pool's base job template: what an operator sets on the queue.
POOL_VARIABLE = "gang"


def settings_data(base_job_template: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is set there on the queue of a work pool."""
    properties = base_job_template.get("variables", {}).get("properties", {})
    found: Mapping[str, Any] = properties.get(POOL_VARIABLE, {}).get("default") or {}
    return found


def listed_clusters(api_url: str | None) -> list[object]:
    """What the work pools of a server list as Ray clusters, each as it is written there; nothing
    without a server, or where it does not answer."""
    if api_url is None:
        return []
    try:
        with talking_to(api_url) as client:
            pools = client.read_work_pools(limit=_PAGE)
    except ServerAway as error:
        _log.warning("what is listed of Ray clusters is not known: %s", error)
        return []
    found = (settings_data(pool.base_job_template).get("clusters") for pool in pools)
    return [one for listed in found if isinstance(listed, list) for one in listed]


def thread_here(name: str, target: Callable[..., object], *given: object) -> threading.Thread:
    """A thread of this context, not started yet: the server's address and credentials may be
    settings of it only, and Prefect finds the flow run by it."""
    run = contextvars.copy_context().run
    return threading.Thread(target=run, args=(target, *given), name=name, daemon=True)


def find_flow_run(client: SyncPrefectClient, flow_run_id: str) -> FlowRun | None:
    """None where the server does not know it."""
    try:
        return client.read_flow_run(UUID(flow_run_id))
    except ObjectNotFound:
        return None


def state_of(client: SyncPrefectClient, flow_run_id: str) -> State[Any] | None:
    """The same of its state."""
    flow_run = find_flow_run(client, flow_run_id)
    return flow_run.state if flow_run is not None else None


def held_flow_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """Our flow runs that should have a process, or are about to get one."""
    return list(flow_runs_of(client, {"state": {"type": {"any_": HELD}}}, OUR_FLOWS))


def open_flow_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """Trainings, and pipelines of them, that have not ended."""
    return list(flow_runs_of(client, {"state": {"type": {"any_": _OPEN}}}, ("train", "pipeline")))


def flow_runs_of(
    client: SyncPrefectClient,
    which: Mapping[str, Any] | None = None,
    flows: Sequence[str] = (),
    sort: FlowRunSort | None = None,
) -> Iterator[FlowRun]:
    """All of them, asked for as they are taken; of these flows, where any are named.

    Args:
        which: a `FlowRunFilter`, as JSON has it.
    """
    flow = FlowFilter.model_validate({"name": {"any_": flows}}) if flows else None
    run = FlowRunFilter.model_validate(which) if which else None
    for offset in count(step=_PAGE):
        page = client.read_flow_runs(
            flow_filter=flow, flow_run_filter=run, sort=sort, limit=_PAGE, offset=offset
        )
        yield from page
        if len(page) < _PAGE:
            return


def upkeep_of(client: SyncPrefectClient, host: str) -> Iterator[tuple[str, DeploymentResponse]]:
    """The deployments of a host's upkeep that the server has, by their names."""
    for flow in UPKEEP_FLOWS:
        name = f"{flow}/{host}"
        with suppress(ObjectNotFound):
            yield name, client.read_deployment_by_name(name)


def worker_of(run: FlowRun) -> str | None:
    """The worker that was given the flow run last; None where it is not one of a host, or none."""
    name = run.labels.get(_WORKER_LABEL)
    return str(name) if name and _is_local(run) else None


def host_of_worker(name: str) -> str:
    """The host of a worker, which is called after it: `HOST`, or a second one there `NAME@HOST`."""
    return name.rpartition("@")[2]


def _is_local(run: FlowRun) -> bool:
    return run.labels.get(TYPE_LABEL, _LOCAL_TYPES[0]) in _LOCAL_TYPES


def host_of(run: FlowRun) -> str | None:
    """The host that has it, as far as the server knows."""
    tagged = (tag.removeprefix(_PROCESS_TAG).partition(":")[0] for tag in process_tags_of(run.tags))
    worker = worker_of(run)
    return host_of_worker(worker) if worker else next(tagged, None)


def has_gone_to(run: FlowRun, host: str, worker: str | None) -> str:
    """The worker of another host that was given the flow run since this host, and its worker where
    that is known, had it; empty where none was."""
    now = worker_of(run)
    return now if now and now != worker and host_of_worker(now) != host else ""


def server_now(client: SyncPrefectClient) -> datetime | None:
    """What the server's clock, which dates its states, says to the second; None where it does not
    say, as behind some proxies."""
    try:
        return parsedate_to_datetime(client.hello().headers["date"])
    except (KeyError, ValueError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What this machine knows of the flow runs of a host, which is itself but for `is_lost`."""

    #: Its name, which is that of its worker.
    name: str
    #: It is another one, and gone for good.
    is_lost: bool = False
    #: Of `reconcile/<name>` and its like, whose flow runs no worker labels.
    upkeep_deployments: frozenset[UUID]
    #: By flow run id.
    processes: Holders
    #: Flow run ids and names of the registry on disk, which knows better about them.
    registered: frozenset[str]
    #: Of the flow `pipeline`, whose flow runs go on in another process.
    pipeline_flow: UUID | None = None

    def has_process(self, run: FlowRun) -> bool:
        """Whether the flow run has a living process here, or may have one."""
        if str(run.id) in self.processes.pids:
            return True
        if self.is_lost:
            return False
        if (process := _process_of(run, self.name)) is not None:
            return process.is_alive()
        hidden = self.processes.hidden.items()
        suspects = {pid for pid, line in hidden if any(part in line for part in _ENGINES)}
        pid = run.infrastructure_pid or ""
        # Without a pid, any of the processes that this user may not look at can be the one.
        return bool(suspects) and (not pid.isdecimal() or int(pid) in suspects)

    def has_been_given(self, run: FlowRun) -> bool:
        """Whether it was for this machine to run, as far as the server knows."""
        if _process_of(run, self.name) is not None or run.deployment_id in self.upkeep_deployments:
            return True
        return _is_local(run) and self.name == run.labels.get(_WORKER_LABEL)


def state_of_lost(run: FlowRun, host: Host, now: datetime) -> State[Any] | None:
    """The state of a flow run that the registry does not know and whose process is gone.

    Args:
        now: by the server's clock.

    Returns: None for every flow run that is alive, may be alive, may be about to start, or is not
        for this machine to judge.
    """
    state = run.state
    if state is None or {str(run.id), run.name} & host.registered or host.has_process(run):
        return None
    age = now - state.timestamp
    if not host.has_been_given(run) and not _is_unlabelled(run, age):
        return None
    if age < _SETTLED_AFTER and not host.is_lost:
        return None
    spec = mapping_or_empty(run.parameters.get("spec"))
    gone = f"its process is gone {'with' if host.is_lost else 'from'} {host.name}"
    match state.type:
        case StateType.PENDING if _process_of(run, host.name) is not None:
            return Crashed(message=f"{gone}: it was killed before it began")
        case StateType.PENDING:
            # Not started, so nothing stands against starting it.
            return Scheduled(message=f"submitted, but {gone}: scheduled again")
        case StateType.CANCELLING:
            return Cancelled(message=f"cancelled; {gone}")
        case StateType.RUNNING if run.flow_id == host.pipeline_flow:
            return _state_of_lost_pipeline(run, host, f"{gone}: it was killed or lost")
        # Its jobs outlive its processes, and another process can come.
        case StateType.RUNNING if (
            host.is_lost and spec.get("on_lost_flow") == "adopt" and run.deployment_id is not None
        ):
            return Scheduled(name=JOBS_GO_ON, message=f"{gone}; its next one attaches to its jobs")
        case StateType.RUNNING if host.is_lost and spec.get("ray") is not None:
            jobs = "its jobs on the Ray cluster, if any, may go on: `ray job list`"
            return Crashed(message=f"{gone}; {jobs}")
        case StateType.RUNNING:
            return Crashed(message=f"{gone}: it was killed or lost")
        case _:
            return None


def _state_of_lost_pipeline(run: FlowRun, host: Host, cause: str) -> State[Any]:
    """Its stage goes on without it, and any process of it goes on where the last one was."""
    if run.deployment_id is None or _process_of(run, host.name) is not None:
        remedy = f"muster pipeline --resume {run.id}"
        return Crashed(message=f"{cause}; the run of its stage goes on: {remedy}")
    return Scheduled(name=JOBS_GO_ON, message=f"{cause}; its next process goes on where it was")


def state_of_closed(state: State[Any] | None, run: RunJson | None, cause: str) -> State[Any] | None:
    """The Prefect state that fits the closed record of a run.

    Args:
        run: None where there is no record.

    Returns: None where the server's state is true as it is: final, or that of a flow run which
        waits for its next process.
    """
    if state is None or state.type not in (StateType.RUNNING, StateType.CANCELLING):
        return None
    if state.is_cancelling():
        # The server's rules allow no other way on.
        return Cancelled(message=f"cancelled; {cause}")
    if run is None or has_failed_by_loss(run) or not run.state.is_final:
        return Crashed(message=cause)
    return STATE_OF.get(run.state, Failed)(message=run.message)


def cancel(
    client: SyncPrefectClient, flow_run_id: UUID, message: str, *, is_now: bool = False
) -> None:
    """Ask for a flow run's end; one that has ended stays as it is. Safe to call again.

    Args:
        is_now: without grace periods, also if the flow run is being cancelled already.

    Raises: ObjectNotFound, if the server does not know the flow run.
    """
    # First for the worker as well: Prefect's own listens for a state of this name only.
    client.set_flow_run_state(flow_run_id, Cancelling(message=message))
    state = state_of(client, str(flow_run_id)) if is_now else None
    if state is not None and state.is_cancelling():
        now = State(type=StateType.CANCELLING, name=CANCELLING_NOW, message=message)
        # Forced: by the server's rules a flow run may leave Cancelling for Cancelled only. If it
        # has just done so, `reconcile` finds it without a process and makes it Cancelled again.
        client.set_flow_run_state(flow_run_id, now, force=True)


def propose(
    client: SyncPrefectClient, flow_run_id: str, before: State[Any], after: State[Any]
) -> bool:
    """Give a flow run a state, unless its state has changed since; whether it has it now."""
    now = state_of(client, flow_run_id)
    if now is None or now.id != before.id:
        return False
    answer = client.set_flow_run_state(UUID(flow_run_id), after)
    return answer.status == SetStateStatus.ACCEPT


def say_running(flow_run_id: UUID, message: str, over: threading.Event) -> None:
    """Have a flow run that runs say what it does; in any other state it keeps that.

    Each try looks at its state first. A client that asks again by itself, once an outage is over,
    would bring a flow run that has ended meanwhile back to Running, which the server allows. Once
    it is over nothing more is said.

    Raises: what the client does, after some tries.
    """
    for delay_s in (*_SAID_AGAIN_AFTER_S, None):
        try:
            with client_settings(retries=0), get_client(sync_client=True) as client:
                state = state_of(client, str(flow_run_id))
                if state is not None and state.is_running() and not over.is_set():
                    client.set_flow_run_state(flow_run_id, Running(message=message))
                return
        except httpx.HTTPError:
            if delay_s is None:
                raise
            if over.wait(delay_s):
                return


def goes_on(message: str, due_after_s: float) -> State[Any]:
    """The state of a flow run that waits for its next process, which goes on with its jobs, once
    the one before has surely left."""
    due = datetime.now(UTC) + timedelta(seconds=due_after_s)
    return Scheduled(name=JOBS_GO_ON, scheduled_time=due, message=message)


def clear_process(client: SyncPrefectClient, flow_run_id: str) -> None:
    """Forget the process that the flow run had: a cancel would wait for that one for ever."""
    # `update_flow_run` leaves out what is None.
    nothing = {"infrastructure_pid": None}
    client.request("PATCH", "/flow_runs/{id}", path_params={"id": flow_run_id}, json=nothing)


def process_tag() -> str:
    """A tag that a flow run which this process creates for itself has from its first moment on: no
    worker would say where it is."""
    me = ProcessId.of(os.getpid())
    return f"{_PROCESS_TAG}{host_name()}:{me.pid}:{me.start_ticks}"


def process_tags_of(tags: Iterable[str]) -> set[str]:
    """Those of the tags that name a process."""
    return {tag for tag in tags if tag.startswith(_PROCESS_TAG)}


def has_lost_its_process(run: FlowRun) -> bool:
    """Whether the process that a flow run was started in, directly, is known to have ended."""
    process = _process_of(run, host_name())
    return process is not None and not process.is_alive()


def _process_of(run: FlowRun, host: str) -> ProcessId | None:
    """The process that the flow run's tag names, where that is one of this host."""
    for tag in run.tags:
        name, _, numbers = tag.removeprefix(_PROCESS_TAG).partition(":")
        pid, _, ticks = numbers.partition(":")
        if tag.startswith(_PROCESS_TAG) and name == host and pid.isdecimal() and ticks.isdecimal():
            return ProcessId(pid=int(pid), start_ticks=int(ticks), boot_id=boot_id())
    return None


def _is_unlabelled(run: FlowRun, age: timedelta) -> bool:
    """Taken by a worker that was killed before it said who it was: anybody may give it back."""
    is_pending = run.state is not None and run.state.is_pending()
    is_taken = run.work_pool_name in _POOLS and is_pending
    return is_taken and not run.labels.get(_WORKER_LABEL) and age >= _UNLABELLED_AFTER
