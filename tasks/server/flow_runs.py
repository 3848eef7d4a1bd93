"""Read the flow runs on the Prefect server, find those without a process, and set their states.

State changes follow the server's orchestration rules. If a flow run ends or is cancelled between
the query and the change, its state is kept. Only two functions may force a state:

- `cancel`, if a run must be cancelled without grace periods, or if a run in a final state still has
  a process.
- `propose_state`, if the result of a run replaces Cancelling.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from itertools import count
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import LogCreate
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import (
    DeploymentResponse,
    OrchestrationResult,
    SetStateStatus,
)
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_AUTH_STRING
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Failed, Running, Scheduled

from tasks.processes.ending import Holders
from tasks.processes.identity import ProcessId, boot_id, host_name
from tasks.record.final_record import has_failed_by_loss
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.record.states import RunState
from tasks.server.concurrency_lease import set_state_and_release_lease
from tasks.server.events import override_client_settings
from tasks.server.proxies import Proxy, UnusableProxy, find_proxy
from tasks.spec.errors import MusterError
from tasks.spec.placeholders import mapping_or_empty

_REFUSALS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_NEXT_ATTACHES = "a new process of the run will take over the Ray jobs of the run"
_NEXT_RESUMES = "a new process of the pipeline will continue at the current stage"
_REMEDY = "set PREFECT_API_AUTH_STRING to the value of PREFECT_SERVER_API_AUTH_STRING of the server"


def read_refusal(answer: httpx.Response) -> str:
    """Return the reason in a server's error response, or the HTTP status if there is no reason."""
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


#: Environment variable with the flow run id of a process.
#: Source: prefect/runner/_starter_engine.py.
FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
#: Name of the Prefect state of a flow run that waits for its next process while its Ray jobs
#: continue. Muster uses Prefect's own name for retries, because a flow run in a final state can
#: change only to a state with this name.
JOBS_GO_ON = "AwaitingRetry"
#: Name of the Prefect state that `muster cancel --now` sets. In this state, the run skips its grace
#: periods. Muster uses a state instead of a label, because a user who may cancel a flow run may set
#: its state, but perhaps not its labels.
CANCELLING_NOW = "CancellingNow"
#: Names of flows. If a flow run of one of these flows loses its process, Muster ends or reschedules
#: the flow run.
OUR_FLOWS = ("train", "pipeline", "reconcile", "prune")
#: Names of the maintenance flows, which run on each host. Their finished flow runs can be deleted.
UPKEEP_FLOWS = ("reconcile", "prune")

#: Logger name that the Prefect UI shows next to the message of `log_end`.
_LOGGER_OF_RECONCILE = "muster.reconcile"
#: Types of the Prefect states in which a flow run has a process or will soon get a process.
HELD = (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)
#: Number of seconds without contact to the server after which a worker or a host counts as offline.
#: Workers send a heartbeat every 30 s, and the maintenance process of a host polls the server every
#: 10 s.
SILENT_AFTER_S = 120.0

#: Key of the label with the original name of a flow run. Muster replaces the original name with the
#: run id.
TYPED_NAME_LABEL = "muster.typed-name"
#: Keys of the labels with the name and type of a flow run's worker. Source:
#: prefect/workers/base.py, _give_worker_labels_to_flow_run.
_WORKER_LABEL, TYPE_LABEL = "prefect.worker.name", "prefect.worker.type"
#: Prefix of the tag of a flow run that a command such as `muster train` started without a worker.
#: The tag contains the host, the pid and the start time (in kernel clock ticks) of the flow run's
#: process.
_PROCESS_TAG = "process:"
#: Types of workers that start each flow run as a process on the worker's host.
_LOCAL_TYPES = ("process", "gang")
#: Names of the Prefect work pools of Muster's runs and pipelines.
_POOLS = ("gang", "pipelines")
#: Texts in the command lines of flow run processes. Each command line contains at least one of
#: them. Source: prefect/runner/_workspace_starter.py.
_ENGINES = ("prefect.engine", "prefect.flow_engine", "_workspace_", "-m flows")
#: Mapping from a final state of a run to the function that makes the Prefect state of its flow run.
#: For all other final states, the Prefect state is Failed.
STATE_OF = {RunState.COMPLETED: Completed, RunState.CANCELLED: Cancelled}
_OPEN = (*HELD, StateType.SCHEDULED, StateType.PAUSED)
#: A flow run without a process counts as lost if its state has not changed for this time. The
#: process of a submitted flow run needs some seconds to start.
_SETTLED_AFTER = timedelta(seconds=30)
#: Time after which a flow run without a worker label counts as lost. A living worker that has taken
#: a flow run sets the label within a second.
_UNLABELLED_AFTER = timedelta(seconds=60)
_TIMEOUT_S = 10.0
_RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0)
_PAGE = 200

_log = logging.getLogger(__name__)


class ServerAway(MusterError):
    """A Prefect server did not answer, or failed with a server error. Repeat the request later."""


class ProxyAway(ServerAway):
    """The proxy for a Prefect server did not answer, or did not pass the request on.

    The server itself may work. The error message names the environment variable of the proxy.
    """


class ServerRefuses(ServerAway):
    """The settings of this process do not allow requests to a Prefect server.

    The password is wrong or missing, or the address of the proxy is not valid. The error message
    names the setting that an operator must correct. Callers repeat their requests until the setting
    is correct.
    """


@contextmanager
def convert_server_errors(api_url: str) -> Iterator[None]:
    """Turn HTTP errors of the requests in the `with` block into ServerAway or ServerRefuses.

    Args:
        api_url: address of the Prefect server's API, for the error message.

    Raises: ServerAway, if the server does not answer. ProxyAway, if the request was sent to a proxy
        and the server did not answer. ServerRefuses, if the server rejects the password, or the
        address of the proxy cannot be used.
    """
    try:
        yield
    except UnusableProxy as error:
        raise ServerRefuses(str(error)) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
        if status not in _REFUSALS:
            why = str(error) or type(error).__name__
            if proxy := find_proxy(api_url):
                raise ProxyAway(_describe_proxy_failure(api_url, proxy, error, why)) from error
            raise ServerAway(f"no Prefect server answers at {api_url} ({why})") from error
        is_set = bool(PREFECT_API_AUTH_STRING.value())
        password = "with the PREFECT_API_AUTH_STRING of this process"
        credential = password if is_set else "without a password"
        problem = f"the Prefect server at {api_url} rejects requests {credential}"
        raise ServerRefuses(f"{problem} (HTTP {status}): {_REMEDY}") from error


def _describe_proxy_failure(api_url: str, proxy: Proxy, error: Exception, why: str) -> str:
    """Return the error message for a request that was sent through a proxy and was not answered.

    Args:
        api_url: address of the Prefect server's API.
        proxy: the proxy of the request.
        error: the error of the HTTP client.
        why: text of the error.
    """
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        problem = f"the proxy {proxy} for the Prefect server at {api_url} does not answer"
    else:
        problem = f"no Prefect server answers at {api_url} through the proxy {proxy}"
    return f"{problem} ({why}): {proxy.remedy}"


class PrefectConnection:
    """A client of the Prefect server at a given address.

    Flows in this process may use another server. The client stays open between requests, because a
    new client takes about 50 ms of CPU time.
    """

    def __init__(self, api_url: str) -> None:
        """
        Args:
            api_url: Address of the Prefect server's API.
        """
        self._api_url = api_url
        self._open_client = ExitStack()
        self._client: SyncPrefectClient | None = None

    @contextmanager
    def client(self) -> Iterator[SyncPrefectClient]:
        """Yield the client. After a failed request, the next call opens a new client.

        The client retries a failed request only once, because the callers repeat their work.

        Raises:
            ServerAway: The server does not answer a request within the context.
            ServerRefuses: The server rejects the password of a request within the context.
        """
        with (
            convert_server_errors(self._api_url),
            override_client_settings(retries=1, api_url=self._api_url),
        ):
            if self._client is None:
                # Pass HTTP settings, so that `get_client` creates a new client. Otherwise,
                # `get_client` would return the client of the current flow, which may use another
                # server.
                settings = {"timeout": _TIMEOUT_S}
                self._client = self._open_client.enter_context(
                    get_client(httpx_settings=settings, sync_client=True)
                )
            try:
                yield self._client
            except Exception:
                self.close()
                raise

    def close(self) -> None:
        """Close the client. The next request opens a new client."""
        self._client = None
        self._open_client.close()


@contextmanager
def connect_to_server(api_url: str) -> Iterator[SyncPrefectClient]:
    """Yield a new client of the Prefect server at `api_url`, and close it after the context.

    Raises:
        ServerAway: The server does not answer a request within the context.
        ServerRefuses: The server rejects the password of a request within the context.
    """
    with closing(PrefectConnection(api_url)) as connection, connection.client() as client:
        yield client


#: Name of the variable in a work pool's base job template that contains the operator's queue
#: settings.
POOL_VARIABLE = "gang"


def read_pool_settings(base_job_template: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the queue settings from the base job template of a work pool, or an empty mapping."""
    properties = base_job_template.get("variables", {}).get("properties", {})
    found: Mapping[str, Any] = properties.get(POOL_VARIABLE, {}).get("default") or {}
    return found


def read_listed_clusters(api_url: str | None) -> list[object]:
    """Return the entries of the setting `clusters` of all work pools, unparsed.

    Args:
        api_url: address of the Prefect server's API. None if no server is configured.

    Returns: an empty list if no server is configured or the server does not answer.
    """
    if api_url is None:
        return []
    try:
        with connect_to_server(api_url) as client:
            pools = client.read_work_pools(limit=_PAGE)
    except ServerAway as error:
        _log.warning("The Ray clusters of the work pools could not be read: %s", error)
        return []
    settings = (read_pool_settings(pool.base_job_template).get("clusters") for pool in pools)
    return [cluster for listed in settings if isinstance(listed, list) for cluster in listed]


def make_context_thread(
    name: str, target: Callable[..., object], *given: object
) -> threading.Thread:
    """Return a new daemon thread that calls `target(*given)`. The caller starts the thread.

    The thread has a copy of the current context variables, in which Prefect stores the server's
    address, the credentials and the current flow run.
    """
    run = contextvars.copy_context().run
    return threading.Thread(target=run, args=(target, *given), name=name, daemon=True)


def find_flow_run(client: SyncPrefectClient, flow_run_id: str) -> FlowRun | None:
    """Return a flow run, or None if the server does not know its id."""
    try:
        return client.read_flow_run(UUID(flow_run_id))
    except ObjectNotFound:
        return None


def is_flow_run_missing(error: ObjectNotFound) -> bool:
    """Return True if a Prefect server says that it does not have a flow run.

    The HTTP status 404 alone is no proof, because a proxy or another program at the server's
    address may also answer with 404.
    """
    response = getattr(error.http_exc, "response", None)
    return response is not None and read_refusal(response).lower().startswith("flow run not found")


def read_state(client: SyncPrefectClient, flow_run_id: str) -> State[Any] | None:
    """Return the state of a flow run, or None if the server does not know its id."""
    flow_run = find_flow_run(client, flow_run_id)
    return flow_run.state if flow_run is not None else None


def read_held_flow_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """Return the flow runs of Muster's flows that are pending, running or being cancelled."""
    return list(read_flow_runs(client, {"state": {"type": {"any_": HELD}}}, OUR_FLOWS))


def read_open_flow_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """Return the flow runs of `train` and `pipeline` that have not ended."""
    return list(read_flow_runs(client, {"state": {"type": {"any_": _OPEN}}}, ("train", "pipeline")))


def read_flow_runs(
    client: SyncPrefectClient,
    which: Mapping[str, Any] | None = None,
    flows: Sequence[str] = (),
    sort: FlowRunSort | None = None,
) -> Iterator[FlowRun]:
    """Yield the flow runs that match the filters. The server returns them page by page.

    Args:
        client: client of the Prefect server.
        which: a Prefect `FlowRunFilter` in its JSON form. None to omit this filter.
        flows: names of the flows. If empty, flow runs of all flows are read.
        sort: order of the flow runs. If None, the server's default order is used.
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
    """Yield the name and the deployment of each maintenance flow of a host.

    A flow is omitted if it has no deployment on the server.
    """
    for flow in UPKEEP_FLOWS:
        name = f"{flow}/{host}"
        with suppress(ObjectNotFound):
            yield name, client.read_deployment_by_name(name)


def find_worker(run: FlowRun) -> str | None:
    """Return the name of the last worker of a flow run.

    Returns: None if no worker took the flow run, or if the worker does not start processes on its
        own host.
    """
    name = run.labels.get(_WORKER_LABEL)
    return str(name) if name and _is_local(run) else None


def parse_worker_host(name: str) -> str:
    """Return the host from a worker name of the form `HOST` or `NAME@HOST`."""
    return name.rpartition("@")[2]


def _is_local(run: FlowRun) -> bool:
    """Return True if the worker of a flow run starts processes on its own host.

    The result is also True if no label contains the type of the worker.
    """
    return run.labels.get(TYPE_LABEL, _LOCAL_TYPES[0]) in _LOCAL_TYPES


def find_host(run: FlowRun) -> str | None:
    """Return the host of a flow run according to the server, or None if unknown."""
    tagged = (
        tag.removeprefix(_PROCESS_TAG).partition(":")[0] for tag in find_process_tags(run.tags)
    )
    worker = find_worker(run)
    return parse_worker_host(worker) if worker else next(tagged, None)


def find_new_worker(run: FlowRun, host: str, worker: str | None) -> str:
    """Return the name of a worker on another host that has taken over a flow run.

    Args:
        run: the flow run.
        host: previous host of the flow run.
        worker: name of the previous worker. None if unknown.

    Returns: an empty string if no worker on another host has taken the flow run.
    """
    now = find_worker(run)
    return now if now and now != worker and parse_worker_host(now) != host else ""


def read_server_time(client: SyncPrefectClient) -> datetime | None:
    """Return the present time by the server's clock, to the second.

    The server uses the same clock for the times of states, so the age of a state can be computed.
    The time is read from the header `date` of a response.

    Returns: None if the header is missing. Some proxies remove the header.
    """
    try:
        return parsedate_to_datetime(client.hello().headers["date"])
    except (KeyError, ValueError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Facts about a host that are needed to find its lost flow runs.

    The host is this machine, or another machine that is permanently lost.
    """

    #: Name of the host, which is also the name of its worker.
    name: str
    #: True if the host is not this machine and is permanently lost.
    is_lost: bool = False
    #: Ids of the host's maintenance deployments. Their flow runs have no worker label.
    upkeep_deployments: frozenset[UUID]
    #: Living processes of the host, with the flow run id of each process.
    processes: Holders
    #: Ids and names of the flow runs in the host's registry on disk. If one of these flow runs is
    #: lost, `tasks.upkeep.lost_run` cleans up after it.
    registered: frozenset[str]
    #: Names of the flow runs that have no process and wait for their next attempt, according to
    #: notes on the host's disk.
    waiting: frozenset[str] = frozenset()
    #: Id of the flow `pipeline`, whose flow runs can continue in another process. None if unknown.
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
        # Each process in `suspects` may belong to any flow run. But if the server has recorded a
        # pid for `run`, only the process with this pid can belong to `run`.
        return bool(suspects) and (not pid.isdecimal() or int(pid) in suspects)

    def has_been_given(self, run: FlowRun) -> bool:
        """Return True if the tags, labels or deployment of a flow run assign it to this host."""
        if _process_of(run, self.name) is not None or run.deployment_id in self.upkeep_deployments:
            return True
        return _is_local(run) and self.name == run.labels.get(_WORKER_LABEL)


def decide_lost_state(run: FlowRun, host: Host, now: datetime) -> State[Any] | None:
    """Return the new Prefect state of a flow run if its process is gone, otherwise None.

    Args:
        run: the flow run.
        host: host that may have run the process.
        now: present time by the server's clock.

    Returns: The new state, for example Crashed. None in three cases: the flow run may have a
    process or may soon get a process; the flow run belongs to another host; or the flow run is in
    `host.registered`, so that `tasks.upkeep.lost_run` handles the flow run.
    """
    state = run.state
    if state is None or {str(run.id), run.name} & host.registered or host.has_process(run):
        return None
    age = now - state.timestamp
    if not host.has_been_given(run) and not _is_unlabelled(run, age):
        return None
    if age < _SETTLED_AFTER and not host.is_lost:
        return None
    # A requeued flow run waits for its next process. The server stores no pid for the flow run
    # before a worker starts this process.
    is_requeued = run.name in host.waiting and run.infrastructure_pid is None
    if state.is_running() and (is_requeued or not host.has_been_given(run)):
        return Scheduled(
            message="a user set the state to Running, but the flow run had no process, so "
            "the flow run is scheduled again"
        )
    spec = mapping_or_empty(run.parameters.get("spec"))
    gone = f"the process of the flow run is no longer running on the host {host.name}"
    if host.is_lost:
        gone = f"the process of the flow run was lost together with the host {host.name}"
    match state.type:
        case StateType.PENDING if _process_of(run, host.name) is not None:
            return Crashed(message=f"{gone}: the process was killed before it began the run")
        case StateType.PENDING:
            # The flow run never started, so it can safely be scheduled again.
            return Scheduled(message=f"{gone}, so the flow run is scheduled again")
        case StateType.CANCELLING:
            return Cancelled(message=f"cancelled; {gone}")
        case StateType.RUNNING if run.flow_id == host.pipeline_flow:
            return _state_of_lost_pipeline(run, host, f"{gone}: the process was killed or lost")
        # With `on_lost_flow: adopt`, the Ray jobs of the run survive the loss of the host. A new
        # flow process can attach to these jobs.
        case StateType.RUNNING if (
            host.is_lost and spec.get("on_lost_flow") == "adopt" and run.deployment_id is not None
        ):
            return Scheduled(name=JOBS_GO_ON, message=f"{gone}; {_NEXT_ATTACHES}")
        case StateType.RUNNING if host.is_lost and spec.get("ray") is not None:
            jobs = "the run's jobs on the Ray cluster may still run; check with `ray job list`"
            return Crashed(message=f"{gone}; {jobs}")
        case StateType.RUNNING:
            return Crashed(message=f"{gone}: the process was killed or lost")
        case _:
            return None


def _state_of_lost_pipeline(run: FlowRun, host: Host, cause: str) -> State[Any]:
    """Return the new state of a pipeline's flow run whose process is lost.

    If a worker can start a new process of the pipeline, the new state is Scheduled, otherwise
    Crashed. In both cases, active runs of the stages continue.

    Args:
        run: flow run of the pipeline.
        host: host of the lost process.
        cause: start of the state message.
    """
    if run.deployment_id is None or _process_of(run, host.name) is not None:
        remedy = f"To resume the pipeline: muster pipeline --resume {run.id}"
        return Crashed(message=f"{cause}. The run of the current stage continues. {remedy}")
    return Scheduled(name=JOBS_GO_ON, message=f"{cause}; {_NEXT_RESUMES}")


def decide_closed_state(
    state: State[Any] | None, run: RunJson | None, cause: str
) -> State[Any] | None:
    """Return the Prefect state for a run whose record on disk is final.

    Args:
        state: present state of the flow run on the server. None if the server does not know the
            flow run.
        run: record of the run. None if there is no record.
        cause: reason why the process of the run has ended.

    Returns: The new state. None if the flow run is neither running nor cancelling on the server.
        In that case, the state on the server must not be changed.
    """
    if state is None or state.type not in (StateType.RUNNING, StateType.CANCELLING):
        return None
    result = get_recorded_result(run)
    if result is not None:
        # The run has completed or failed. A later cancellation does not change the result.
        return result
    if state.is_cancelling():
        return Cancelled(message=f"cancelled; {cause}")
    if run is not None and run.state is RunState.CANCELLED:
        return Cancelled(message=run.message)
    advice = f". To continue the run: muster retry {run.run_id}" if run is not None else ""
    return Crashed(message=f"{cause}{advice}")


def get_recorded_result(run: RunJson | None) -> State[Any] | None:
    """Return the Prefect state of a run that has completed or failed, according to its record.

    Args:
        run: record of the run. None if there is no record.

    Returns: None if the run has no record, has not ended, was cancelled, or was lost.
    """
    if run is None or run.state not in (RunState.COMPLETED, RunState.FAILED):
        return None
    if has_failed_by_loss(run):
        return None
    message = run.message
    if run.state is RunState.COMPLETED:
        message = RunPlace.of(run.run_id).shorten_paths(message)
    return STATE_OF.get(run.state, Failed)(message=message)


def cancel(
    client: SyncPrefectClient,
    flow_run_id: UUID,
    message: str,
    *,
    is_now: bool = False,
    has_process: bool = False,
) -> None:
    """Request the cancellation of a flow run. A repeated call has no further effect.

    A flow run in a final state is not changed, unless `has_process` is True.

    Args:
        client: client of the Prefect server.
        flow_run_id: id of the flow run.
        message: message of the new state.
        is_now: If True, the run skips its grace periods, even if it is being cancelled already.
        has_process: True if the flow run certainly has a process. Then the flow run is cancelled
            even if a user has set a final state by hand.

    Raises: ObjectNotFound, if the server does not know the flow run.
    """
    # Set the state Cancelling first, even if `is_now` is True, because Prefect's workers react only
    # to this state.
    before = read_state(client, str(flow_run_id)) if has_process else None
    is_forced = before is not None and before.is_final()
    answer: OrchestrationResult[Any] = client.set_flow_run_state(
        flow_run_id, Cancelling(message=message), force=is_forced
    )
    if answer.status is SetStateStatus.REJECT and answer.state and answer.state.is_cancelled():
        # The flow run has no process, so the server has set Cancelled instead of Cancelling. The
        # new state lacks the text `message`. Set Cancelled again with this text.
        client.set_flow_run_state(flow_run_id, Cancelled(message=message), force=True)
        return
    state = read_state(client, str(flow_run_id)) if is_now else None
    if state is not None and state.is_cancelling():
        now = State(type=StateType.CANCELLING, name=CANCELLING_NOW, message=message)
        # Force the change to CANCELLING_NOW, because by the server's rules a flow run in the state
        # Cancelling can only become Cancelled. If the flow run has become Cancelled meanwhile, this
        # call replaces Cancelled with CANCELLING_NOW, and `muster reconcile` later sets Cancelled
        # again.
        client.set_flow_run_state(flow_run_id, now, force=True)


def propose_state(
    client: SyncPrefectClient, flow_run_id: str, before: State[Any], after: State[Any]
) -> bool:
    """Set the state of a flow run, unless its state has changed. Return True on success.

    If the flow run is in the state Cancelling, the server's rules allow only Cancelled as the new
    state. This function forces the change to any other new state.

    Args:
        client: client of the Prefect server.
        flow_run_id: id of the flow run.
        before: state that the flow run had when the caller decided on the change.
        after: new state.
    """
    now = read_state(client, flow_run_id)
    if now is None or now.id != before.id:
        return False
    is_forced = before.is_cancelling() and not after.is_cancelled()
    answer = set_state_and_release_lease(client, UUID(flow_run_id), after, force=is_forced)
    return answer.status == SetStateStatus.ACCEPT


def log_end(client: SyncPrefectClient, flow_run_id: str, message: str, *, is_failure: bool) -> None:
    """Write how a run ended into the log of its flow run, for the tab Logs in the Prefect UI.

    An error of the server is only logged, because the run's record already has the message.

    Args:
        client: client of the Prefect server.
        flow_run_id: id of the flow run.
        message: message of the run's final state.
        is_failure: True to show the message as an error.
    """
    entry = LogCreate(
        name=_LOGGER_OF_RECONCILE,
        level=logging.ERROR if is_failure else logging.INFO,
        message=message,
        timestamp=datetime.now(UTC),
        flow_run_id=UUID(flow_run_id),
    )
    try:
        client.create_logs([entry])
    except httpx.HTTPError as error:
        _log.warning(
            "Muster could not write the end of the run into the log of its flow run: %r", error
        )


def set_running_message(flow_run_id: UUID, message: str, over: threading.Event) -> None:
    """Set the message of a flow run's state, if the state is Running.

    A failed request is repeated. The state is read again before each request. Otherwise, a request
    after a server outage could set an ended flow run back to Running.

    Args:
        flow_run_id: id of the flow run.
        message: new message of the state.
        over: event that is set when the run has ended. The request is not repeated after that.

    Raises: httpx.HTTPError, if the last request failed.
    """
    for delay_s in (*_RETRY_DELAYS_S, None):
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
    """Return the state of a flow run that waits for its next process.

    Args:
        message: message of the state.
        due_after_s: seconds until the next process may start. If the previous process is still
            running, it must exit within this time.
    """
    due = datetime.now(UTC) + timedelta(seconds=due_after_s)
    return Scheduled(name=JOBS_GO_ON, scheduled_time=due, message=message)


def clear_process(client: SyncPrefectClient, flow_run_id: str) -> None:
    """Delete the pid in a flow run's record on the server.

    Otherwise, a cancellation of the flow run would wait endlessly for the ended process.
    """
    # Send the request directly, because Prefect's `update_flow_run` does not send None values.
    content = {"infrastructure_pid": None}
    client.request("PATCH", "/flow_runs/{id}", path_params={"id": flow_run_id}, json=content)


def make_process_tag() -> str:
    """Return a flow run tag with the host, pid and start time of this process.

    A flow run that was started without a worker gets this tag, because it has no worker label.
    """
    me = ProcessId.of(os.getpid())
    return f"{_PROCESS_TAG}{host_name()}:{me.pid}:{me.start_ticks}"


def find_process_tags(tags: Iterable[str]) -> set[str]:
    """Return the tags from `tags` that name the process of a flow run, see `make_process_tag`."""
    return {tag for tag in tags if tag.startswith(_PROCESS_TAG)}


def has_lost_process(run: FlowRun) -> bool:
    """Return True if a flow run was started on this host without a worker and lost its process.

    The process is lost if it no longer exists.
    """
    process = _process_of(run, host_name())
    return process is not None and not process.is_alive()


def _process_of(run: FlowRun, host: str) -> ProcessId | None:
    """Return the process of `host` that is named in a tag of a flow run, or None."""
    for tag in run.tags:
        name, _, numbers = tag.removeprefix(_PROCESS_TAG).partition(":")
        pid, _, ticks = numbers.partition(":")
        if tag.startswith(_PROCESS_TAG) and name == host and pid.isdecimal() and ticks.isdecimal():
            return ProcessId(pid=int(pid), start_ticks=int(ticks), boot_id=boot_id())
    return None


def _is_unlabelled(run: FlowRun, age: timedelta) -> bool:
    """Return True if a flow run of Muster's pools still has no worker label after some time.

    A worker adds this label to each flow run that it takes. The label is missing in two cases: the
    worker was killed before it added the label, or a user has set the state of a waiting flow run
    by hand. In both cases, any host may schedule the flow run again.

    Args:
        run: the flow run.
        age: time since the last change of the flow run's state.
    """
    is_pending = run.state is not None and run.state.is_pending()
    # A worker records the pid of each process that it starts. So if a Running flow run has no
    # pid, a user has set its state by hand.
    is_running = run.state is not None and run.state.is_running()
    has_no_process = is_running and run.infrastructure_pid is None
    is_taken = run.work_pool_name in _POOLS and (is_pending or has_no_process)
    return is_taken and not run.labels.get(_WORKER_LABEL) and age >= _UNLABELLED_AFTER
