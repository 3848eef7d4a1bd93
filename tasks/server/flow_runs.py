"""Flow runs on the Prefect server: queries, lost processes, and the correct state after a loss.

State changes follow the server's orchestration rules. If a flow run ends or is cancelled between
the query and the change, its state is kept. Only `cancel` forces a state, for an immediate cancel.
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
from tasks.server.events import override_client_settings
from tasks.spec.errors import MusterError
from tasks.spec.placeholders import mapping_or_empty

_REFUSALS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_REMEDY = "set PREFECT_API_AUTH_STRING to what its server has as PREFECT_SERVER_API_AUTH_STRING"


def read_refusal(answer: httpx.Response) -> str:
    """Return the reason that a server gave for an error response, or its HTTP status."""
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


#: Environment variable with the flow run id of a process.
#: Source: prefect/runner/_starter_engine.py.
FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
#: Name of the state of a flow run that waits for its next process while its jobs continue. Prefect
#: uses this name for retries, and lets a flow run leave a final state only for this name.
JOBS_GO_ON = "AwaitingRetry"
#: Name of the state that `muster cancel --now` sets, so that the grace periods are skipped. This is
#: a state name and not a label, because every user who may cancel may also set a state.
CANCELLING_NOW = "CancellingNow"
#: Flows whose flow runs Muster closes after a loss of their process.
OUR_FLOWS = ("train", "pipeline", "reconcile", "prune")
#: Maintenance flows that each host serves itself. Their finished flow runs are not needed.
UPKEEP_FLOWS = ("reconcile", "prune")

#: States in which a flow run should have a process, or will soon get a process.
HELD = (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)
#: Seconds without contact after which a worker counts as offline. Workers send a heartbeat every
#: 30 s; the maintenance process asks for work every 10 s.
SILENT_AFTER_S = 120.0

#: Labels with the name and type of the worker of a flow run. Source: prefect/workers/base.py,
#: _give_worker_labels_to_flow_run.
_WORKER_LABEL, TYPE_LABEL = "prefect.worker.name", "prefect.worker.type"
#: Prefix of the tag of a directly started flow run. The tag has host, pid and start time in ticks.
_PROCESS_TAG = "process:"
#: Types of workers that run flow runs as processes on the worker's host.
_LOCAL_TYPES = ("process", "gang")
#: Work pools of Muster's runs and pipelines.
_POOLS = ("gang", "pipelines")
#: Parts of the command lines of flow run processes. Source: prefect/runner/_workspace_starter.py.
_ENGINES = ("prefect.engine", "prefect.flow_engine", "_workspace_", "-m flows")
#: Prefect state of each final run state other than failures.
STATE_OF = {RunState.COMPLETED: Completed, RunState.CANCELLED: Cancelled}
_OPEN = (*HELD, StateType.SCHEDULED, StateType.PAUSED)
#: The process of a flow run that was just submitted needs some seconds to appear.
_SETTLED_AFTER = timedelta(seconds=30)
#: A flow run without a worker label counts as abandoned after this time. A living worker sets its
#: label within a second.
_UNLABELLED_AFTER = timedelta(seconds=60)
_TIMEOUT_S = 10.0
_SAID_AGAIN_AFTER_S = (0.5, 1.0, 2.0, 4.0)
_PAGE = 200

_log = logging.getLogger(__name__)


class ServerAway(MusterError):
    """A Prefect server did not answer, or failed with a server error. Ask again later."""


class ServerRefuses(ServerAway):
    """A Prefect server rejects the password of this process. The message says which setting to fix.

    Changes for the server wait until then.
    """


@contextmanager
def convert_server_errors(api_url: str) -> Iterator[None]:
    """Convert HTTP errors of the enclosed requests. Raises: ServerAway, ServerRefuses."""
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
def connect_to_server(api_url: str) -> Iterator[SyncPrefectClient]:
    """Yield a client of a Prefect server, even if this process uses another server.

    The client gives up after one retry, because its callers try again every minute.

    Raises: ServerAway or ServerRefuses, if a request fails within the context.
    """
    # Without these settings, Prefect would return the client of the current flow's server.
    own = {"timeout": _TIMEOUT_S}
    with (
        convert_server_errors(api_url),
        override_client_settings(retries=1, api_url=api_url),
        get_client(httpx_settings=own, sync_client=True) as client,
    ):
        yield client


#: Variable of a work pool's base job template that holds the queue settings of the operator.
POOL_VARIABLE = "gang"


def read_pool_settings(base_job_template: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the queue settings in the base job template of a work pool."""
    properties = base_job_template.get("variables", {}).get("properties", {})
    found: Mapping[str, Any] = properties.get(POOL_VARIABLE, {}).get("default") or {}
    return found


def read_listed_clusters(api_url: str | None) -> list[object]:
    """Return the unparsed Ray clusters that the work pools of a server list.

    The result is empty if there is no server or if it does not answer.
    """
    if api_url is None:
        return []
    try:
        with connect_to_server(api_url) as client:
            pools = client.read_work_pools(limit=_PAGE)
    except ServerAway as error:
        _log.warning("what is listed of Ray clusters is not known: %s", error)
        return []
    found = (read_pool_settings(pool.base_job_template).get("clusters") for pool in pools)
    return [one for listed in found if isinstance(listed, list) for one in listed]


def make_context_thread(
    name: str, target: Callable[..., object], *given: object
) -> threading.Thread:
    """Return a new daemon thread with a copy of the current context. It is not started yet.

    The thread needs the context for the server's address and credentials, and for the flow run.
    """
    run = contextvars.copy_context().run
    return threading.Thread(target=run, args=(target, *given), name=name, daemon=True)


def find_flow_run(client: SyncPrefectClient, flow_run_id: str) -> FlowRun | None:
    """Return a flow run, or None if the server does not know its id."""
    try:
        return client.read_flow_run(UUID(flow_run_id))
    except ObjectNotFound:
        return None


def read_state(client: SyncPrefectClient, flow_run_id: str) -> State[Any] | None:
    """Return the state of a flow run, or None if the server does not know its id."""
    flow_run = find_flow_run(client, flow_run_id)
    return flow_run.state if flow_run is not None else None


def read_held_flow_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """Return Muster's flow runs that should have a process, or will soon get a process."""
    return list(read_flow_runs(client, {"state": {"type": {"any_": HELD}}}, OUR_FLOWS))


def read_open_flow_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """Return the unfinished flow runs of trainings and pipelines."""
    return list(read_flow_runs(client, {"state": {"type": {"any_": _OPEN}}}, ("train", "pipeline")))


def read_flow_runs(
    client: SyncPrefectClient,
    which: Mapping[str, Any] | None = None,
    flows: Sequence[str] = (),
    sort: FlowRunSort | None = None,
) -> Iterator[FlowRun]:
    """Yield the matching flow runs, and read them page by page.

    Args:
        which: a `FlowRunFilter` in its JSON form. None: all flow runs.
        flows: names of the flows. Empty: all flows.
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


def read_upkeep_deployments(
    client: SyncPrefectClient, host: str
) -> Iterator[tuple[str, DeploymentResponse]]:
    """Yield name and deployment of each maintenance flow of a host that the server has."""
    for flow in UPKEEP_FLOWS:
        name = f"{flow}/{host}"
        with suppress(ObjectNotFound):
            yield name, client.read_deployment_by_name(name)


def find_worker(run: FlowRun) -> str | None:
    """Return the last worker of a flow run, or None if no worker of a host has taken it."""
    name = run.labels.get(_WORKER_LABEL)
    return str(name) if name and _is_local(run) else None


def parse_worker_host(name: str) -> str:
    """Return the host in the name of a worker, which is `HOST` or `NAME@HOST`."""
    return name.rpartition("@")[2]


def _is_local(run: FlowRun) -> bool:
    return run.labels.get(TYPE_LABEL, _LOCAL_TYPES[0]) in _LOCAL_TYPES


def find_host(run: FlowRun) -> str | None:
    """Return the host of a flow run according to the server, or None if unknown."""
    tagged = (
        tag.removeprefix(_PROCESS_TAG).partition(":")[0] for tag in find_process_tags(run.tags)
    )
    worker = find_worker(run)
    return parse_worker_host(worker) if worker else next(tagged, None)


def find_new_worker(run: FlowRun, host: str, worker: str | None) -> str:
    """Return the worker on another host that has taken over a flow run, or an empty string.

    Args:
        host: previous host of the flow run.
        worker: previous worker, or None if unknown.
    """
    now = find_worker(run)
    return now if now and now != worker and parse_worker_host(now) != host else ""


def read_server_time(client: SyncPrefectClient) -> datetime | None:
    """Return the server's time to the second, or None if its response has no date.

    The server's clock dates the states. Some proxies remove the date.
    """
    try:
        return parsedate_to_datetime(client.hello().headers["date"])
    except (KeyError, ValueError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Knowledge about the flow runs of a host: this machine, or another one if `is_lost`."""

    #: Name of the host, which is also the name of its worker.
    name: str
    #: True if this is another host that is permanently gone.
    is_lost: bool = False
    #: Ids of the host's maintenance deployments. No worker labels their flow runs.
    upkeep_deployments: frozenset[UUID]
    #: Living processes of the host, by flow run id.
    processes: Holders
    #: Ids and names of the flow runs in the registry on disk. The registry decides on these.
    registered: frozenset[str]
    #: Id of the flow `pipeline`. Its flow runs can continue in another process.
    pipeline_flow: UUID | None = None

    def has_process(self, run: FlowRun) -> bool:
        """Return True if the flow run has, or may have, a living process on the host."""
        if str(run.id) in self.processes.pids:
            return True
        if self.is_lost:
            return False
        if (process := _process_of(run, self.name)) is not None:
            return process.is_alive()
        hidden = self.processes.hidden.items()
        suspects = {pid for pid, line in hidden if any(part in line for part in _ENGINES)}
        pid = run.infrastructure_pid or ""
        # If the pid is unknown, it can be any engine process that this user may not inspect.
        return bool(suspects) and (not pid.isdecimal() or int(pid) in suspects)

    def has_been_given(self, run: FlowRun) -> bool:
        """Return True if the server says that the flow run was assigned to this host."""
        if _process_of(run, self.name) is not None or run.deployment_id in self.upkeep_deployments:
            return True
        return _is_local(run) and self.name == run.labels.get(_WORKER_LABEL)


def decide_lost_state(run: FlowRun, host: Host, now: datetime) -> State[Any] | None:
    """Return the new state of a flow run that is not in the registry and has lost its process.

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
            # The flow run never started, so it can safely be scheduled again.
            return Scheduled(message=f"submitted, but {gone}: scheduled again")
        case StateType.CANCELLING:
            return Cancelled(message=f"cancelled; {gone}")
        case StateType.RUNNING if run.flow_id == host.pipeline_flow:
            return _state_of_lost_pipeline(run, host, f"{gone}: it was killed or lost")
        # The jobs survive the loss of the process, and a new process can attach to them.
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
    """Return the new state of a lost pipeline. Its stage continues; a new process can resume."""
    if run.deployment_id is None or _process_of(run, host.name) is not None:
        remedy = f"muster pipeline --resume {run.id}"
        return Crashed(message=f"{cause}; the run of its stage goes on: {remedy}")
    return Scheduled(name=JOBS_GO_ON, message=f"{cause}; its next process goes on where it was")


def decide_closed_state(
    state: State[Any] | None, run: RunJson | None, cause: str
) -> State[Any] | None:
    """Return the Prefect state that fits the closed record of a run.

    Args:
        run: None where there is no record.

    Returns: None where the server's state is true as it is: final, or that of a flow run which
        waits for its next process.
    """
    if state is None or state.type not in (StateType.RUNNING, StateType.CANCELLING):
        return None
    if state.is_cancelling():
        # From Cancelling, the server's rules allow only Cancelled.
        return Cancelled(message=f"cancelled; {cause}")
    if run is None or has_failed_by_loss(run) or not run.state.is_final:
        return Crashed(message=cause)
    return STATE_OF.get(run.state, Failed)(message=run.message)


def cancel(
    client: SyncPrefectClient, flow_run_id: UUID, message: str, *, is_now: bool = False
) -> None:
    """Request the cancellation of a flow run. A finished flow run is not changed. Idempotent.

    Args:
        is_now: without grace periods, also if the flow run is being cancelled already.

    Raises: ObjectNotFound, if the server does not know the flow run.
    """
    # First for the worker as well: Prefect's own listens for a state of this name only.
    client.set_flow_run_state(flow_run_id, Cancelling(message=message))
    state = read_state(client, str(flow_run_id)) if is_now else None
    if state is not None and state.is_cancelling():
        now = State(type=StateType.CANCELLING, name=CANCELLING_NOW, message=message)
        # Forced: by the server's rules a flow run may leave Cancelling for Cancelled only. If it
        # has just done so, `reconcile` finds it without a process and makes it Cancelled again.
        client.set_flow_run_state(flow_run_id, now, force=True)


def propose_state(
    client: SyncPrefectClient, flow_run_id: str, before: State[Any], after: State[Any]
) -> bool:
    """Set the state of a flow run unless its state has changed. Return True if it was set.

    Args:
        before: expected present state.
        after: new state.
    """
    now = read_state(client, flow_run_id)
    if now is None or now.id != before.id:
        return False
    answer = client.set_flow_run_state(UUID(flow_run_id), after)
    return answer.status == SetStateStatus.ACCEPT


def set_running_message(flow_run_id: UUID, message: str, over: threading.Event) -> None:
    """Have a flow run that runs say what it does; in any other state it keeps that.

    Each try looks at its state first. A client that asks again by itself, once an outage is over,
    would bring a flow run that has ended meanwhile back to Running, which the server allows. Once
    it is over nothing more is said.

    Raises: what the client does, after some tries.
    """
    for delay_s in (*_SAID_AGAIN_AFTER_S, None):
        try:
            with override_client_settings(retries=0), get_client(sync_client=True) as client:
                state = read_state(client, str(flow_run_id))
                if state is not None and state.is_running() and not over.is_set():
                    client.set_flow_run_state(flow_run_id, Running(message=message))
                return
        except httpx.HTTPError:
            if delay_s is None:
                raise
            if over.wait(delay_s):
                return


def make_handover_state(message: str, due_after_s: float) -> State[Any]:
    """The state of a flow run that waits for its next process, which goes on with its jobs, once
    the one before has surely left."""
    due = datetime.now(UTC) + timedelta(seconds=due_after_s)
    return Scheduled(name=JOBS_GO_ON, scheduled_time=due, message=message)


def clear_process(client: SyncPrefectClient, flow_run_id: str) -> None:
    """Delete the recorded process of a flow run. A cancel would wait endlessly for that process."""
    # `update_flow_run` does not send None values, so the request is sent directly.
    nothing = {"infrastructure_pid": None}
    client.request("PATCH", "/flow_runs/{id}", path_params={"id": flow_run_id}, json=nothing)


def make_process_tag() -> str:
    """Return the tag that names this process, for a flow run that it creates for itself.

    Such a flow run has no worker label to show its host.
    """
    me = ProcessId.of(os.getpid())
    return f"{_PROCESS_TAG}{host_name()}:{me.pid}:{me.start_ticks}"


def find_process_tags(tags: Iterable[str]) -> set[str]:
    """Return the tags that name a process."""
    return {tag for tag in tags if tag.startswith(_PROCESS_TAG)}


def has_lost_process(run: FlowRun) -> bool:
    """Return True if the process of a directly started flow run on this host has ended."""
    process = _process_of(run, host_name())
    return process is not None and not process.is_alive()


def _process_of(run: FlowRun, host: str) -> ProcessId | None:
    """Return the process in a flow run's tag, or None if no tag names a process of the host."""
    for tag in run.tags:
        name, _, numbers = tag.removeprefix(_PROCESS_TAG).partition(":")
        pid, _, ticks = numbers.partition(":")
        if tag.startswith(_PROCESS_TAG) and name == host and pid.isdecimal() and ticks.isdecimal():
            return ProcessId(pid=int(pid), start_ticks=int(ticks), boot_id=boot_id())
    return None


def _is_unlabelled(run: FlowRun, age: timedelta) -> bool:
    """Return True if a worker took the flow run and was probably killed before it set its label.

    Any host may then schedule the flow run again.
    """
    is_pending = run.state is not None and run.state.is_pending()
    is_taken = run.work_pool_name in _POOLS and is_pending
    return is_taken and not run.labels.get(_WORKER_LABEL) and age >= _UNLABELLED_AFTER
