"""The ledger: a snapshot of the waiting runs and of the runs that hold GPUs.

The ledger is read from the Prefect server with several requests, and runs change their state
between these requests. The order of the requests makes sure that no run is missed: first the
waiting runs are read, and then the runs that hold GPUs. At the end, runs of the previous snapshot
are read again if neither answer contains them.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import WorkPoolFilter
from prefect.client.schemas.objects import (
    FlowRun,
    State,
    StateType,
    WorkerStatus,
    WorkPool,
    WorkQueue,
)
from prefect.client.schemas.sorting import FlowRunSort
from pydantic import ValidationError

from tasks.processes.identity import host_name
from tasks.queue.deployment_limits import DeploymentLimit, DeploymentLimitReader
from tasks.queue.early_start import find_series
from tasks.queue.grants import HOST, PENDING_RESOURCES, Grant, grant_of, is_handed_over, state_of
from tasks.queue.packing import Demand
from tasks.queue.policy import duration_class_s
from tasks.queue.settings import CLUSTER_OF_POOL, DEFAULT_POOL
from tasks.record.places import make_run_id
from tasks.server.flow_parameters import describe_wrong_names
from tasks.server.flow_runs import (
    HELD,
    JOBS_GO_ON,
    TYPE_LABEL,
    find_process_tags,
    parse_worker_host,
)
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import parse_spec
from tasks.spec.run import Gang
from tasks.spec.start_from import RUN_ID_PATTERN

#: Type of Muster's work pools and of their workers.
TYPE = "gang"
#: Filter that selects the work pools of type `gang`.
GANG_POOLS = WorkPoolFilter.model_validate({"type": {"any_": [TYPE]}})
#: Name of the Prefect flow that runs a training.
FLOW = "train"
#: Name of the only parameter of the flow `train`.
_SPEC = "spec"
#: Largest number of flow runs in one answer of the server.
_PAGE = 200
#: Number of waiting runs in a window. One request reads one window of a queue. Further windows are
#: read if too few of the runs can start.
WINDOW = _PAGE
#: Runs that will be due within this time are read in advance. Otherwise each run that becomes due
#: would cost another request to the server.
_AHEAD = timedelta(seconds=90)
#: Fields of a flow run that have different values in every answer of the server. These fields are
#: ignored when a flow run is compared with its earlier content.
_VOLATILE_FIELDS = ("estimated_run_time", "estimated_start_time_delta")
#: Largest expected difference between the clocks of this machine, of the server, and of the machine
#: from which a run was submitted.
_CLOCK_TOLERANCE = timedelta(seconds=10)
_HOUR_S = 3600.0
#: Time, in seconds, between two requests for the list of online workers. More frequent requests are
#: useless, because the server itself needs longer to notice the end of a worker.
_WORKERS_INTERVAL_S = 10.0
#: Name of a work pool, and the name of one of its queues. The second name is None for the whole
#: work pool. Work pools and queues can have concurrency limits.
PoolOrQueue = tuple[str, str | None]
#: Identifier of an object with a concurrency limit: a `PoolOrQueue` for a work pool or one of its
#: queues, or the id of a deployment.
Limited = PoolOrQueue | UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The resources that a flow run requests in its spec."""

    #: The run id, or the name of the flow run if the flow run is not a run of Muster.
    name: str
    #: GPUs and CPUs that the run needs, or None if the run needs no GPUs.
    demand: Demand | None = None
    #: Expected time, in seconds, from the start of the run to the release of its GPUs.
    estimate_s: float = 0.0
    #: True if the spec names neither `gang.hours` nor `gang.max_hours`, so that `estimate_s` is the
    #: default.
    is_estimate_assumed: bool = False
    #: Address of the run's Ray cluster. Empty if the run does not use Ray. CLUSTER_OF_POOL if the
    #: spec names no address. The run then uses the only cluster of its work pool.
    cluster: str = ""
    #: Tags of the flow run and of its spec, without the tags by which Muster finds processes.
    tags: frozenset[str] = frozenset()
    #: Series of the run, as returned by `find_series`. Empty if the run must never start early.
    series: str = ""
    #: Error in the key `gang` of the spec. Empty if there is no error.
    fault: str = ""


def parse_request(flow_run: FlowRun) -> Request:
    """Return the resources that a flow run requests. Other parts of its spec are not checked."""
    tags = frozenset(flow_run.tags) - find_process_tags(flow_run.tags)
    spec = _get_spec(flow_run)
    if spec is None:
        return Request(name=flow_run.name, tags=tags)

    tags |= {tag for tag in spec.get("tags") or () if isinstance(tag, str)}
    name = _get_run_id(flow_run, spec)
    ray = spec.get("ray")
    cluster = ""
    if isinstance(ray, Mapping):
        cluster = str(ray.get("address") or CLUSTER_OF_POOL).rstrip("/")
    if spec.get("gang") is None:
        return Request(name=name, tags=tags, cluster=cluster)
    try:
        gang = Gang.model_validate(spec["gang"])
    except (ValidationError, InvalidSpec):
        return Request(
            name=name,
            tags=tags,
            fault=find_spec_fault(flow_run)
            or "Muster can't read the key `gang` in the spec of the run. This key requests the "
            "GPUs of the run",
        )
    shape = gang.model_dump(include={"nodes", "gpus_per_node", "cpus_per_gpu"})
    max_s = (gang.max_hours or math.inf) * _HOUR_S
    return Request(
        name=name,
        demand=Demand(**shape),
        estimate_s=min(duration_class_s(gang.hours * _HOUR_S), max_s),
        is_estimate_assumed="hours" not in gang.model_fields_set and gang.max_hours is None,
        cluster=cluster,
        tags=tags,
        series=find_series(spec, gang, cluster),
    )


def find_spec_fault(flow_run: FlowRun) -> str:
    """Check the complete spec of a flow run, which takes some milliseconds.

    Returns:
        A message about unknown parameters of the flow run, or about all faults of the spec. Empty
        without a fault or without a spec.
    """
    spec = _get_spec(flow_run)
    if spec is None:
        return ""
    fault = describe_wrong_names(FLOW, flow_run.parameters, accepted=[_SPEC], required=[_SPEC])
    if fault:
        return fault
    # Use the key `name` of the spec in the message, because the author of the spec does not know
    # Prefect's random name of the flow run.
    name = spec.get("name")
    source = f"the spec of {name}" if isinstance(name, str) else "the spec"
    try:
        parse_spec(dict(spec), source=source, from_form=True)
    except InvalidSpec as error:
        return str(error)
    return ""


def _get_spec(flow_run: FlowRun) -> Mapping[str, Any] | None:
    """Return the run spec in the parameters of a flow run, or None if it has no run spec."""
    spec = flow_run.parameters.get(_SPEC)
    return spec if isinstance(spec, Mapping) else None


def _get_run_id(flow_run: FlowRun, spec: Mapping[str, Any]) -> str:
    """Return the run id of a flow run, or the flow run's name if its spec is invalid."""
    name = spec.get("name")
    workload = spec.get("workload")
    if not isinstance(name, str) or not isinstance(workload, str):
        return flow_run.name
    continued_run = spec.get("run_id")
    if isinstance(continued_run, str) and re.fullmatch(RUN_ID_PATTERN, continued_run):
        return continued_run
    return make_run_id(name, workload, flow_run.id, flow_run.created or datetime.now(UTC))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    """A run that waits, holds GPUs or has a process, as it was read from the server."""

    #: The flow run as it was read from the server.
    flow_run: FlowRun
    #: Resources that the run requests.
    request: Request
    #: Grant of the run, or None if it has no valid GPU grant.
    grant: Grant | None
    #: Name of the work pool. Empty for a run that was started without a worker.
    pool: str
    #: Name of the queue of the work pool. Empty if the run is in no queue.
    queue: str
    #: Priority of the queue of the work pool. Priority 1 comes first.
    priority: int

    @property
    def id(self) -> UUID:
        """Id of the flow run."""
        return self.flow_run.id

    def with_cluster(self, kept_addresses: Mapping[str, str]) -> QueueEntry:
        """Return this entry with the new address of its Ray cluster, if the address has changed.

        Args:
            kept_addresses: Mapping from old address to new address. A cluster without an entry
                has kept its address.
        """
        address = kept_addresses.get(self.request.cluster)
        if address is None:
            return self
        return replace(self, request=replace(self.request, cluster=address))

    @property
    def state(self) -> State[Any]:
        """Prefect state of the flow run."""
        return state_of(self.flow_run)

    @property
    def deployment(self) -> UUID | None:
        """Id of the run's deployment, or None if the run has no deployment."""
        return self.flow_run.deployment_id

    @property
    def pool_and_queue(self) -> tuple[PoolOrQueue, PoolOrQueue]:
        """The work pool and the queue whose concurrency limits apply to the run."""
        return (self.pool, None), (self.pool, self.queue)

    @property
    def demand(self) -> Demand:
        """GPUs and CPUs that the run needs. Use this property only for runs that need GPUs."""
        assert self.request.demand is not None
        return self.request.demand

    @property
    def granted(self) -> Mapping[str, int]:
        """Mapping from node name to the number of granted GPUs. Empty if the run has no grant."""
        return self.grant.nodes if self.grant is not None else {}

    @property
    def place(self) -> tuple[float | int | str, ...]:
        """Sort key of the run in the queue. The run with the smallest key is first.

        All attempts of a run have the same key, so a requeued run returns to its old position.
        """
        created = self.flow_run.created
        expected = self.flow_run.expected_start_time or created
        return (
            self.priority,
            _to_epoch_seconds(expected),
            _to_epoch_seconds(created),
            str(self.flow_run.id),
        )

    @property
    def waits_in_process(self) -> bool:
        """True if the run already has a process that waits for the GPU grant.

        Such a run was started without a worker, or by a worker of another type than `gang`.
        """
        return self.state.is_running() and self.state.name == PENDING_RESOURCES

    @property
    def has_gang_without_ray(self) -> bool:
        """True if the run needs GPUs and does not use Ray.

        All its GPUs are on one host, and only a worker on that host can start the run.
        """
        return self.request.demand is not None and not self.request.cluster

    @property
    def only_node(self) -> str:
        """Name of the only node whose GPUs the run can use. Empty if the run can use several nodes.

        If the run does not use Ray, and its process has already started and waits for GPUs, the run
        can use only the GPUs on the host of that process.
        """
        is_bound_to_host = self.waits_in_process and self.has_gang_without_ray
        return str(self.flow_run.labels.get(HOST) or "") if is_bound_to_host else ""

    @property
    def is_scheduled(self) -> bool:
        """True if the flow run has a Prefect state of type Scheduled.

        Such a flow run normally has no process.
        """
        return self.state.is_scheduled()

    @property
    def has_started(self) -> bool:
        """True if the run has already had a process. This is the case for a requeued run."""
        return self.flow_run.run_count > 0

    @property
    def is_handed_over(self) -> bool:
        """True if the run waits for a new process while its Ray jobs keep its GPUs."""
        return is_handed_over(self.flow_run)

    def is_due(self, at: float) -> bool:
        """Return True if the scheduled start of the run is not later than the given time.

        Args:
            at: Time in UTC epoch seconds.
        """
        due = self.flow_run.next_scheduled_start_time
        return not self.is_scheduled or (due is not None and due.timestamp() <= at)

    @property
    def state_since(self) -> datetime:
        """Time at which the flow run got its current state."""
        return self.state.timestamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A work pool of type `gang`, with its queues and its online workers."""

    #: The work pool as it was read from the server.
    work_pool: WorkPool
    #: Mapping from queue id to queue, for the queues of the work pool.
    queues: Mapping[UUID, WorkQueue]
    #: Names of the workers of the pool that are online.
    workers: Set[str] = frozenset()
    #: Names of the hosts on which the online workers of the pool start processes.
    hosts: Set[str] = frozenset()

    @property
    def name(self) -> str:
        """Name of the work pool."""
        return self.work_pool.name

    def queue_of(self, flow_run: FlowRun) -> WorkQueue | None:
        """Return the queue of a flow run, or None if no queue of this work pool contains the run.

        A flow run whose own queue was deleted is in the default queue of its work pool.
        """
        id = flow_run.work_queue_id
        if id is None and has_lost_queue(flow_run):
            id = self.work_pool.default_queue_id
        return self.queues.get(id) if id else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Snapshot of all waiting runs, and of all runs that hold GPUs or have a process."""

    #: Time at which the snapshot was read from the server.
    at: datetime
    #: Mapping from pool name to pool, for the work pools of type `gang`.
    pools: Mapping[str, Pool]
    #: Runs that wait for GPUs or for a concurrency limit, in the order of the queue.
    #: Runs whose scheduled start is in the next 90 seconds are included.
    waiting: tuple[QueueEntry, ...]
    #: Runs that have a grant or a process. Such runs hold GPUs, or count for the concurrency limit
    #: of their work pool.
    holding: tuple[QueueEntry, ...]
    #: True if more runs wait than `waiting` contains.
    is_cut: bool
    #: Mapping from deployment id to concurrency limit, for the deployments of the runs. Deployments
    #: without a limit are not included.
    deployment_limits: Mapping[UUID, DeploymentLimit] = field(default_factory=dict)

    @property
    def leader(self) -> tuple[str, str] | None:
        """Work pool and name of the leader, the worker that decides for all workers which runs
        start.

        The leader is the first online worker in the order of pool names and worker names. None if
        no worker is online.
        """
        online = ((pool.name, name) for pool in self.pools.values() for name in pool.workers)
        return min(online, default=None)

    def with_clusters(self, find_addresses: Callable[[QueueEntry], Mapping[str, str]]) -> Ledger:
        """Return a copy of this snapshot with replaced addresses of Ray clusters.

        Args:
            find_addresses: Function that returns the replacements for a run, as a mapping from old
                address to new address.
        """
        waiting = tuple(entry.with_cluster(find_addresses(entry)) for entry in self.waiting)
        holding = tuple(entry.with_cluster(find_addresses(entry)) for entry in self.holding)
        return replace(self, waiting=waiting, holding=holding)

    def count_active_runs(self) -> Counter[Limited]:
        """Return the number of runs that count against each concurrency limit.

        The result contains a number for each work pool, for each queue of a work pool, and for each
        deployment.
        """
        waiting_in_process = [entry for entry in self.waiting if entry.waits_in_process]
        active_runs: Counter[Limited] = Counter()
        for entry in (*self.holding, *waiting_in_process):
            if not entry.state.is_cancelling():
                active_runs.update(entry.pool_and_queue)
            if entry.deployment is not None:
                active_runs[entry.deployment] += 1
        # A run may have started since this snapshot was read, and the server may already count it.
        # So use the server's number if it is larger than the number from the snapshot.
        for deployment, limit in self.deployment_limits.items():
            active_runs[deployment] = max(active_runs[deployment], limit.active)
        return active_runs


@dataclass(slots=True)
class LedgerReader:
    """Reads the waiting runs and the runs that hold GPUs from the Prefect server.

    Unchanged flow runs are taken from a cache. If the server does not answer, the methods raise
    httpx.HTTPError or PrefectException.
    """

    _client: PrefectClient
    #: Names of the work pool and of the worker in which this reader runs. Empty strings outside of
    #: a worker.
    _own_worker: tuple[str, str] = ("", "")
    #: Cache: a mapping from flow run id to three values: the server's last answer about the flow
    #: run as JSON, the `FlowRun` made from this answer, and the resources that the flow run
    #: requests.
    _rows: dict[str, tuple[dict[str, Any], FlowRun, Request]] = field(default_factory=dict)
    #: Cache: a mapping from the name of a work pool to two values: the names of the pool's online
    #: workers, and the monotonic time at which the names were read.
    _workers: dict[str, tuple[frozenset[str], float]] = field(default_factory=dict)
    #: Number of windows that are read from each queue of a work pool. A window is a group of 200
    #: waiting runs.
    windows: int = 1
    _deployment_limits: DeploymentLimitReader = field(init=False)

    def __post_init__(self) -> None:
        self._deployment_limits = DeploymentLimitReader(self._client)

    async def read(
        self, *, earlier: Ledger | None = None, changed: Collection[UUID] = ()
    ) -> Ledger:
        """Read the waiting runs and the runs that hold GPUs from the server.

        The result also contains runs that are requeued during this call. If such a run were
        missing, a later run of the queue could start first.

        Args:
            earlier: Result of an earlier call, or None to read all waiting runs. With an earlier
                result, only two kinds of waiting runs are read: new runs, and the runs in
                `changed`. The other waiting runs are taken from the earlier result. Pass None if
                another scheduler has written a decision since the earlier call.
            changed: Ids of waiting runs that must be read again.
        """
        if earlier is None:
            self._workers.clear()
        at = datetime.now(UTC)
        pools = await self._read_pools()
        if earlier is not None:
            scheduled = [entry.flow_run for entry in earlier.waiting if entry.is_scheduled]
            waiting = [flow_run for flow_run in scheduled if flow_run.id not in changed]
            is_cut = earlier.is_cut
            recently_due = _make_due_filter(since=earlier.at - _CLOCK_TOLERANCE)
            of_gang_pools = {"type": {"any_": [TYPE]}}
            waiting += await self.pages(flow_runs=recently_due, work_pools=of_gang_pools)
        else:
            if not self._rows:
                # Put the runs that hold GPUs into the empty cache. One of these runs may be
                # requeued after `waiting` is read and before `holding` is read. Then neither of
                # these two lists contains the run. But the cache contains the run, and this method
                # requests each cached run that is in neither list.
                await self._read_holding()
            waiting, is_cut = await self._read_waiting(pools.values())
            waiting += await self._read_without_queue(pools)
        holding = await self._read_holding()

        flow_runs = {flow_run.id: flow_run for flow_run in (*waiting, *holding)}
        missing = [str(id) for id in {*map(UUID, self._rows), *changed} if id not in flow_runs]
        for start in range(0, len(missing), _PAGE):
            page_filter = {"id": {"any_": missing[start : start + _PAGE]}, **_make_due_filter()}
            page = await self._read_flow_runs(flow_runs=page_filter)
            # The page may also contain flow runs of other work pools, for example the flow runs of
            # pipelines. Leave these flow runs out, because they are not runs of the queue.
            flow_runs |= {
                flow_run.id: flow_run
                for flow_run in page
                if flow_run.work_pool_name in pools or has_lost_queue(flow_run)
            }
        self._rows = {id: row for id, row in self._rows.items() if UUID(id) in flow_runs}

        entries = sorted(
            (self._make_entry(flow_run, pools) for flow_run in flow_runs.values()),
            key=lambda entry: entry.place,
        )
        deployments = {entry.deployment for entry in entries if entry.deployment is not None}
        return Ledger(
            at=at,
            pools=pools,
            waiting=tuple(entry for entry in entries if _is_waiting(entry)),
            holding=tuple(entry for entry in entries if not _is_waiting(entry)),
            is_cut=is_cut,
            deployment_limits=await self._deployment_limits.read(deployments),
        )

    async def _read_pools(self) -> dict[str, Pool]:
        """Return a mapping from name to pool, for the work pools of type `gang`."""
        pools = {}
        for work_pool in await self._client.read_work_pools(work_pool_filter=GANG_POOLS):
            queues = await self._client.read_work_queues(work_pool_name=work_pool.name)
            workers = await self._read_online_workers(work_pool.name)
            hosts = {*map(parse_worker_host, workers)}
            own_pool, own_name = self._own_worker
            if work_pool.name == own_pool:
                # Add this worker, because the server does not list a worker before its first
                # heartbeat.
                workers |= {own_name}
                hosts |= {parse_worker_host(own_name), host_name()}
            pools[work_pool.name] = Pool(
                work_pool=work_pool,
                queues={queue.id: queue for queue in queues},
                workers=workers,
                hosts=hosts,
            )
        return pools

    async def _read_online_workers(self, pool: str) -> frozenset[str]:
        """Return the names of a work pool's online workers.

        The names may come from a cache. Cached names are at most 10 s old.
        """
        names, read_at = self._workers.get(pool, (frozenset[str](), -math.inf))
        if time.monotonic() - read_at < _WORKERS_INTERVAL_S:
            return names
        workers = await self._client.read_workers_for_work_pool(pool)
        names = frozenset(worker.name for worker in workers if worker.status is WorkerStatus.ONLINE)
        self._workers[pool] = names, time.monotonic()
        return names

    async def _read_waiting(self, pools: Iterable[Pool]) -> tuple[list[FlowRun], bool]:
        """Return the first waiting runs of the given work pools, and True if more runs wait."""
        flow_runs: list[FlowRun] = []
        is_cut = False
        for pool in pools:
            due, has_more = await self._read_due(pool.name)
            if has_more:
                # Read the first runs of every queue. The server sorts runs by their scheduled start
                # and not by the priority of their queue, so one request for all queues could miss
                # urgent runs.
                due = []
                is_cut = True
                for queue in pool.queues.values():
                    due_in_queue, _ = await self._read_due(pool.name, queue.name)
                    due += due_in_queue
            flow_runs += due
        return flow_runs, is_cut

    async def _read_without_queue(self, pools: Collection[str]) -> list[FlowRun]:
        """Return the waiting runs whose queue was deleted.

        Prefect's API has no filter for such runs. So this method compares the number of all waiting
        runs with the number of waiting runs in work pools, and reads the runs only if the numbers
        differ.

        Args:
            pools: Names of the work pools of type `gang`.
        """
        train_flow = {"name": {"any_": [FLOW]}}
        due = _make_due_filter()
        count_all = await self._count(flow_runs=due, flows=train_flow)
        if not count_all:
            return []
        in_pools = {"name": {"any_": [*pools]}}
        if count_all <= await self._count(flow_runs=due, flows=train_flow, work_pools=in_pools):
            return []
        flow_runs = await self.pages(flow_runs=due, flows=train_flow)
        lost = [flow_run for flow_run in flow_runs if has_lost_queue(flow_run)]
        # The cache now also contains flow runs of work pools that are not of type `gang`. Remove
        # these flow runs from the cache. Otherwise `read` would request them again. The reason is
        # that `read` requests each cached flow run that is neither in its list of waiting runs nor
        # in its list of runs with GPUs.
        lost_ids = {flow_run.id for flow_run in lost}
        for flow_run in flow_runs:
            if flow_run.id not in lost_ids and flow_run.work_pool_name not in pools:
                self._rows.pop(str(flow_run.id), None)
        return lost

    async def _count(self, **body: Any) -> int:
        """Return the number of flow runs that match the given filters of Prefect's REST API."""
        answer = await self._client.request("POST", "/flow_runs/count", json=body)
        return int(answer.json())

    async def _read_due(self, pool: str, queue: str | None = None) -> tuple[list[FlowRun], bool]:
        """Return the first waiting runs of a work pool, and True if more runs wait.

        Args:
            pool: Name of the work pool.
            queue: Name of a queue of the pool, or None for all queues.
        """
        flow_runs: dict[UUID, FlowRun] = {}
        for window in range(self.windows):
            page = await self._read_flow_runs(
                work_pools={"name": {"any_": [pool]}},
                work_pool_queues={"name": {"any_": [queue]}} if queue else None,
                flow_runs=_make_due_filter(),
                sort=FlowRunSort.EXPECTED_START_TIME_ASC,
                limit=WINDOW,
                offset=window * WINDOW,
            )
            # Use a dictionary to keep each run only once. If the list of waiting runs changes
            # between two requests, two pages may contain the same run.
            flow_runs |= {flow_run.id: flow_run for flow_run in page}
            if len(page) < WINDOW:
                return list(flow_runs.values()), False
        return list(flow_runs.values()), True

    async def _read_holding(self) -> list[FlowRun]:
        """Return the flow runs that hold GPUs or have a process."""
        holding = {"state": {"type": {"any_": HELD}}}
        handed_over = {"state": {"name": {"any_": [JOBS_GO_ON]}}}
        train_flow = {"name": {"any_": [FLOW]}}
        # Send the requests one after the other. A Prefect server on SQLite has few database
        # connections, so simultaneous requests would block other clients.
        of_flow = await self.pages(flow_runs=holding, flows=train_flow)
        of_pools = await self.pages(flow_runs=holding, work_pools={"type": {"any_": [TYPE]}})
        # Also read the runs that wait for a new process while their Ray jobs keep their GPUs. Such
        # a flow run is Scheduled, so the requests above do not return it.
        resumable = await self.pages(flow_runs=handed_over, flows=train_flow)
        return [*of_flow, *of_pools, *(run for run in resumable if is_handed_over(run))]

    async def pages(self, **filters: Any) -> list[FlowRun]:
        """Return all flow runs that match the given filters of Prefect's REST API.

        Args:
            filters: JSON content of the request, for example `flow_runs={"id": {"any_": [...]}}`.
        """
        # Sort the flow runs by their ids, which never change. With another order, a flow run could
        # move to a page that was already read.
        filters |= {"sort": FlowRunSort.ID_DESC, "limit": _PAGE}
        flow_runs: list[FlowRun] = []
        while True:
            page = await self._read_flow_runs(**filters, offset=len(flow_runs))
            flow_runs += page
            if len(page) < _PAGE:
                return flow_runs

    async def find_completed(self, ids: Collection[UUID]) -> frozenset[UUID]:
        """Return the ids of those flow runs that have completed.

        Args:
            ids: Ids of the flow runs to check. If empty, no request is sent.
        """
        if not ids:
            return frozenset()
        flow_runs = {
            "id": {"any_": [str(run_id) for run_id in ids]},
            "state": {"type": {"any_": [StateType.COMPLETED]}},
        }
        # Do not use `_read_flow_runs`, so that the ended runs do not come into its cache.
        answer = await self._client.request(
            "POST", "/flow_runs/filter", json={"flow_runs": flow_runs}
        )
        return frozenset(UUID(row["id"]) for row in answer.json())

    async def _read_flow_runs(self, **body: Any) -> list[FlowRun]:
        """Request flow runs from the server, and return them.

        Unlike `PrefectClient.read_flow_runs`, this method builds new FlowRun objects only for flow
        runs that have changed. Building the objects takes most of the time of a scheduling pass.

        Args:
            body: JSON content of the request: filters, sort order, limit and offset.
        """
        answer = await self._client.request("POST", "/flow_runs/filter", json=body)
        flow_runs = []
        for row in answer.json():
            content = {key: value for key, value in row.items() if key not in _VOLATILE_FIELDS}
            cached = self._rows.get(row["id"])
            if cached is None or cached[0] != content:
                flow_run = FlowRun.model_validate(content)
                cached = content, flow_run, parse_request(flow_run)
                self._rows[row["id"]] = cached
            flow_runs.append(cached[1])
        return flow_runs

    def _make_entry(self, flow_run: FlowRun, pools: Mapping[str, Pool]) -> QueueEntry:
        """Return the `QueueEntry` of a flow run that this reader has read before."""
        pool_name = flow_run.work_pool_name or ""
        if not pool_name and has_lost_queue(flow_run):
            pool_name = _find_fallback_pool(pools)
        pool = pools.get(pool_name)
        queue = pool.queue_of(flow_run) if pool else None
        grant = grant_of(flow_run)
        entry = QueueEntry(
            flow_run=flow_run,
            request=self._rows[str(flow_run.id)][2],
            grant=grant,
            pool=pool_name,
            queue=queue.name if queue else "",
            priority=_find_priority(queue, pools.values()),
        )
        if grant is None or not grant.cluster:
            return entry
        # Use the cluster in the GPU grant of the run, even if the settings of the work pool now
        # list another cluster.
        return entry.with_cluster({CLUSTER_OF_POOL: grant.cluster})


def has_lost_queue(flow_run: FlowRun) -> bool:
    """Return True if the queue of a flow run was deleted.

    If the queue or the whole work pool is deleted, the server keeps the flow run without a queue.
    No worker of Prefect starts such a flow run.
    """
    if flow_run.work_queue_id is not None or flow_run.deployment_id is None:
        return False
    # The flow run has no queue. Either the queue was deleted, or the deployment has no work pool.
    # If the queue was deleted, the flow run usually still contains the name of the queue. The name
    # is missing if the queue was a default queue. To recognise a flow run of a deleted default
    # queue, check two other facts: a worker of type `gang` has started the flow run, or Muster's
    # scheduler has set its state.
    was_started_by_muster = flow_run.labels.get(TYPE_LABEL) == TYPE
    state = state_of(flow_run)
    waits_for_muster = state.is_scheduled() and state.name == PENDING_RESOURCES
    return bool(flow_run.work_queue_name) or was_started_by_muster or waits_for_muster


def _find_fallback_pool(pools: Collection[str]) -> str:
    """Return the name of the work pool for runs whose queue was deleted.

    Args:
        pools: Names of the work pools of type `gang`.

    Returns:
        The name `gang` if a pool has this name. Otherwise the name of the only pool, or an empty
        string if there are no pools or several pools.
    """
    if DEFAULT_POOL in pools:
        return DEFAULT_POOL
    return next(iter(pools)) if len(pools) == 1 else ""


def _find_priority(queue: WorkQueue | None, pools: Iterable[Pool]) -> int:
    """Return the priority of a run. 1 is the highest priority.

    Args:
        queue: The queue of the run. None if the run has no queue. The run then gets the priority of
            the first queue with the name `default`.
        pools: All work pools of type `gang`.
    """
    if queue is not None:
        return queue.priority or 1
    for pool in pools:
        for other in pool.queues.values():
            if other.priority and other.name == "default":
                return other.priority
    return 1


def _to_epoch_seconds(at: datetime | None) -> float:
    return at.timestamp() if at else 0.0


def _make_due_filter(since: datetime | None = None) -> dict[str, Any]:
    """Return a filter for scheduled flow runs that are due now or in the next 90 seconds.

    Args:
        since: Earliest scheduled start of the flow runs. None for no earliest start.
    """
    limits = {"before_": datetime.now(UTC) + _AHEAD, "after_": since}
    return {
        "state": {"type": {"any_": ["SCHEDULED"]}},
        "next_scheduled_start_time": {key: at.isoformat() for key, at in limits.items() if at},
    }


def _is_waiting(entry: QueueEntry) -> bool:
    """Return True if a run waits for its start, and False if it has a grant or is running."""
    return entry.grant is None and (entry.is_scheduled or entry.waits_in_process)
