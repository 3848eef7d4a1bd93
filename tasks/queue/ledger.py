"""The ledger of the queue: which runs wait and which hold GPUs, read from the Prefect server.

Runs change their state while the server is read. The order of the requests makes sure that no run
is missed: first waiting runs, then holding runs, then runs that were known before and are in
neither answer.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import WorkPoolFilter
from prefect.client.schemas.objects import FlowRun, State, WorkerStatus, WorkPool, WorkQueue
from prefect.client.schemas.sorting import FlowRunSort
from pydantic import ValidationError

from tasks.processes.identity import host_name
from tasks.queue.grants import HOST, PENDING_RESOURCES, Grant, grant_of, is_handed_over, state_of
from tasks.queue.packing import Demand
from tasks.queue.policy import duration_class_s
from tasks.queue.settings import CLUSTER_OF_POOL
from tasks.record.places import make_run_id
from tasks.server.flow_runs import HELD, JOBS_GO_ON, host_of_worker
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import parse_spec
from tasks.spec.run import Gang

#: Type of the work pools and of their workers.
TYPE = "gang"
GANG_POOLS = WorkPoolFilter.model_validate({"type": {"any_": [TYPE]}})
#: Name of the flow of a run.
FLOW = "train"
#: Number of flow runs in one answer of the server.
_PAGE = 200
#: Number of waiting runs that are read from each queue of a pool. More are read if too few of them
#: may start.
WINDOW = _PAGE
#: Runs that are due within this time are read, too. Otherwise each run that becomes due would need
#: a new request.
_AHEAD = timedelta(seconds=90)
#: Fields that change with every answer although nothing has happened. They are not used here.
_VOLATILE_FIELDS = ("estimated_run_time", "estimated_start_time_delta")
#: Largest expected difference between the clocks of this machine, the server and whoever submits.
_CLOCK_TOLERANCE = timedelta(seconds=10)
_HOUR_S = 3600.0
#: Seconds between two requests for the online workers. The server itself takes longer to notice
#: that a worker has gone.
_WORKERS_INTERVAL_S = 10.0
#: Name of a pool and of one of its queues. None: all queues of the pool.
SlotOwner = tuple[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a flow run asks for, read from its spec."""

    #: The run id. For a flow run that is not Muster's, its name.
    name: str
    #: None if the run asks for no GPUs.
    demand: Demand | None = None
    #: Expected time that the run holds its gang, in seconds.
    estimate_s: float = 0.0
    #: Address of the run's Ray cluster. Empty if it uses none, CLUSTER_OF_POOL if its pool decides.
    cluster: str = ""
    tags: frozenset[str] = frozenset()
    #: What is wrong with the gang of the spec, or an empty string.
    fault: str = ""


def parse_request(flow_run: FlowRun) -> Request:
    """Return what a flow run asks for. Other parts of its spec are not checked."""
    tags = frozenset(flow_run.tags)
    spec = _spec_of(flow_run)
    if spec is None:
        return Request(name=flow_run.name, tags=tags)

    tags |= {tag for tag in spec.get("tags") or () if isinstance(tag, str)}
    name = _run_id(flow_run, spec)
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
            name=name, tags=tags, fault=find_spec_fault(flow_run) or "its gang can't be read"
        )
    shape = gang.model_dump(include={"nodes", "gpus_per_node", "cpus_per_gpu"})
    max_s = (gang.max_hours or math.inf) * _HOUR_S
    return Request(
        name=name,
        demand=Demand(**shape),
        estimate_s=min(duration_class_s(gang.hours * _HOUR_S), max_s),
        cluster=cluster,
        tags=tags,
    )


def find_spec_fault(flow_run: FlowRun) -> str:
    """Check the whole spec of a flow run, which takes some milliseconds.

    Returns:
        A message with every fault, or an empty string.
    """
    spec = _spec_of(flow_run)
    if spec is None:
        return ""
    # The author of the spec knows its `name`, but not the name that Prefect gave the flow run.
    name = spec.get("name")
    source = f"the spec of {name}" if isinstance(name, str) else "the spec"
    try:
        parse_spec(dict(spec), source=source, from_form=True)
    except InvalidSpec as error:
        return str(error)
    return ""


def _spec_of(flow_run: FlowRun) -> Mapping[str, Any] | None:
    """Return the spec as it was submitted, or None if the flow run is not Muster's."""
    spec = flow_run.parameters.get("spec")
    return spec if isinstance(spec, Mapping) else None


def _run_id(flow_run: FlowRun, spec: Mapping[str, Any]) -> str:
    name = spec.get("name")
    workload = spec.get("workload")
    if not isinstance(name, str) or not isinstance(workload, str):
        return flow_run.name
    return make_run_id(name, workload, flow_run.id, flow_run.created or datetime.now(UTC))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    """A flow run that waits or that holds a gang."""

    flow_run: FlowRun
    request: Request
    #: None if the run has no gang.
    grant: Grant | None
    #: Name of the work pool. Empty for a run that was started directly.
    pool: str
    #: Name of the queue in the pool.
    queue: str
    #: Priority of that queue; 1 comes first.
    priority: int

    @property
    def id(self) -> UUID:
        return self.flow_run.id

    def with_cluster(self, names: Mapping[str, str]) -> QueueEntry:
        """Return the entry with the main address of its cluster: `names[other address]`."""
        name = names.get(self.request.cluster)
        return self if name is None else replace(self, request=replace(self.request, cluster=name))

    @property
    def state(self) -> State[Any]:
        return state_of(self.flow_run)

    @property
    def demand(self) -> Demand:
        """The demand of a run that asks for GPUs."""
        assert self.request.demand is not None
        return self.request.demand

    @property
    def promised(self) -> Mapping[str, int]:
        """`gpus[node name]` that were granted; empty without a grant."""
        return self.grant.nodes if self.grant is not None else {}

    @property
    def place(self) -> tuple[float | int | str, ...]:
        """Position in the queue; a smaller value comes first. It is the same for all attempts."""
        created = self.flow_run.created
        expected = self.flow_run.expected_start_time or created
        return (self.priority, _seconds(expected), _seconds(created), str(self.flow_run.id))

    @property
    def waits_in_process(self) -> bool:
        """True if the run's own process waits, and continues as soon as there is a grant."""
        return self.state.is_running() and self.state.name == PENDING_RESOURCES

    @property
    def has_gang_without_ray(self) -> bool:
        """True if the gang is on one host without Ray, so that a worker there starts the run."""
        return self.request.demand is not None and not self.request.cluster

    @property
    def only_node(self) -> str:
        """Name of the only node on which the run can start: that of its waiting process, or ""."""
        is_here = self.waits_in_process and self.has_gang_without_ray
        return str(self.flow_run.labels.get(HOST) or "") if is_here else ""

    @property
    def is_scheduled(self) -> bool:
        return self.state.is_scheduled()

    @property
    def is_handed_over(self) -> bool:
        """True if the run holds its gang and waits for a new process."""
        return is_handed_over(self.flow_run)

    def is_due(self, at: float) -> bool:
        """Return True if the run may start at a time in UTC epoch seconds."""
        due = self.flow_run.next_scheduled_start_time
        return not self.is_scheduled or (due is not None and due.timestamp() <= at)

    @property
    def state_since(self) -> datetime:
        """Time at which the run got its current state."""
        return self.state.timestamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A work pool of type `gang`, with its queues and workers."""

    work_pool: WorkPool
    #: The pool's queues by id.
    queues: Mapping[UUID, WorkQueue]
    #: Names of the workers that are online.
    workers: Set[str] = frozenset()
    #: Names of the hosts on which these workers start processes.
    hosts: Set[str] = frozenset()

    @property
    def name(self) -> str:
        return self.work_pool.name

    def queue_of(self, flow_run: FlowRun) -> WorkQueue | None:
        """Return the queue of a flow run, or None if it is in no queue of this pool."""
        id = flow_run.work_queue_id
        return self.queues.get(id) if id else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Snapshot of all runs that wait or hold."""

    at: datetime
    #: The pools by name.
    pools: Mapping[str, Pool]
    #: Runs that wait for a gang or for a free slot of their pool, in the order of the queue. Runs
    #: that are due soon are included.
    waiting: tuple[QueueEntry, ...]
    #: Runs that have a gang, with or without a process, and runs without a gang that have a
    #: process, because they use a slot of their pool.
    holding: tuple[QueueEntry, ...]
    #: True if more runs wait than were read.
    is_cut: bool

    @property
    def leader(self) -> tuple[str, str] | None:
        """Pool and name of the worker that evaluates the queue for all workers, or None.

        It is the first one that is online, by pool and name.
        """
        online = ((pool.name, name) for pool in self.pools.values() for name in pool.workers)
        return min(online, default=None)

    def with_clusters(self, names: Callable[[QueueEntry], Mapping[str, str]]) -> Ledger:
        """Return the ledger with the main addresses of clusters: `names(entry)[other address]`."""
        waiting = tuple(entry.with_cluster(names(entry)) for entry in self.waiting)
        holding = tuple(entry.with_cluster(names(entry)) for entry in self.holding)
        return replace(self, waiting=waiting, holding=holding)

    def count_used_slots(self) -> Counter[SlotOwner]:
        """Return how many runs use a slot of each pool and of each of its queues."""
        waiting_in_process = [entry for entry in self.waiting if entry.waits_in_process]
        taken: Counter[SlotOwner] = Counter()
        for entry in (*self.holding, *waiting_in_process):
            if not entry.state.is_cancelling():
                taken.update(((entry.pool, None), (entry.pool, entry.queue)))
        return taken


@dataclass(slots=True)
class LedgerReader:
    """Reads the ledger, and caches what does not change.

    The methods may raise httpx.HTTPError and PrefectException.
    """

    _client: PrefectClient
    #: Pool and name of the worker that reads, or empty strings.
    _reader: tuple[str, str] = ("", "")
    #: For each flow run id: the last answer of the server, its model, and what the run asks for.
    _rows: dict[str, tuple[dict[str, Any], FlowRun, Request]] = field(default_factory=dict)
    #: For each pool: the workers that are online, and the monotonic time at which they were read.
    _workers: dict[str, tuple[frozenset[str], float]] = field(default_factory=dict)
    #: How many times WINDOW waiting runs are read from each queue of a pool.
    windows: int = 1

    async def read(self, *, after: Ledger | None = None, again: Collection[UUID] = ()) -> Ledger:
        """Read the ledger.

        No run that was known before is missed, so a run that is sent back meanwhile keeps its
        position before others.

        Args:
            after: An earlier ledger, if no other gate has decided since. Its waiting runs are not
                read again, except those of `again`. New runs are read.
            again: Ids of waiting runs that are read again.
        """
        if after is None:
            self._workers.clear()
        at = datetime.now(UTC)
        pools = await self._read_pools()
        if after is not None:
            scheduled = [entry.flow_run for entry in after.waiting if entry.is_scheduled]
            waiting = [flow_run for flow_run in scheduled if flow_run.id not in again]
            is_cut = after.is_cut
            recently_due = _due_filter(since=after.at - _CLOCK_TOLERANCE)
            of_gang_pools = {"type": {"any_": [TYPE]}}
            waiting += await self.pages(flow_runs=recently_due, work_pools=of_gang_pools)
        else:
            if not self._rows:
                # At the first reading, holding runs must be known before waiting runs are read.
                await self._read_holding()
            waiting, is_cut = await self._read_waiting(pools.values())
        holding = await self._read_holding()

        flow_runs = {flow_run.id: flow_run for flow_run in (*waiting, *holding)}
        missing = [str(id) for id in {*map(UUID, self._rows), *again} if id not in flow_runs]
        for start in range(0, len(missing), _PAGE):
            page_filter = {"id": {"any_": missing[start : start + _PAGE]}, **_due_filter()}
            page = await self._read_flow_runs(flow_runs=page_filter)
            flow_runs |= {flow_run.id: flow_run for flow_run in page}
        self._rows = {id: row for id, row in self._rows.items() if UUID(id) in flow_runs}

        entries = sorted(
            (self._make_entry(flow_run, pools) for flow_run in flow_runs.values()),
            key=lambda entry: entry.place,
        )
        return Ledger(
            at=at,
            pools=pools,
            waiting=tuple(entry for entry in entries if _waits(entry)),
            holding=tuple(entry for entry in entries if not _waits(entry)),
            is_cut=is_cut,
        )

    async def _read_pools(self) -> dict[str, Pool]:
        """Return the pools of type `gang`, by name."""
        pools = {}
        for work_pool in await self._client.read_work_pools(work_pool_filter=GANG_POOLS):
            queues = await self._client.read_work_queues(work_pool_name=work_pool.name)
            workers = await self._read_online_workers(work_pool.name)
            hosts = {*map(host_of_worker, workers)}
            if work_pool.name == self._reader[0]:
                # The worker that reads is online, even if the server has not noticed it yet.
                workers |= {self._reader[1]}
                hosts |= {host_of_worker(self._reader[1]), host_name()}
            pools[work_pool.name] = Pool(
                work_pool=work_pool,
                queues={queue.id: queue for queue in queues},
                workers=workers,
                hosts=hosts,
            )
        return pools

    async def _read_online_workers(self, pool: str) -> frozenset[str]:
        names, read_at = self._workers.get(pool, (frozenset[str](), -math.inf))
        if time.monotonic() - read_at < _WORKERS_INTERVAL_S:
            return names
        workers = await self._client.read_workers_for_work_pool(pool)
        names = frozenset(worker.name for worker in workers if worker.status is WorkerStatus.ONLINE)
        self._workers[pool] = names, time.monotonic()
        return names

    async def _read_waiting(self, pools: Iterable[Pool]) -> tuple[list[FlowRun], bool]:
        """Return waiting runs of all pools, and whether there are more."""
        flow_runs: list[FlowRun] = []
        is_cut = False
        for pool in pools:
            due, has_more = await self._read_due(pool.name)
            if has_more:
                # Read each queue by itself. Otherwise the runs of a queue with a high priority
                # could stand behind many runs of another queue and be missed.
                due = []
                is_cut = True
                for queue in pool.queues.values():
                    due_in_queue, _ = await self._read_due(pool.name, queue.name)
                    due += due_in_queue
            flow_runs += due
        return flow_runs, is_cut

    async def _read_due(self, pool: str, queue: str | None = None) -> tuple[list[FlowRun], bool]:
        """Return the first waiting runs of a pool or queue, and whether there are more."""
        flow_runs: dict[UUID, FlowRun] = {}
        for window in range(self.windows):
            page = await self._read_flow_runs(
                work_pools={"name": {"any_": [pool]}},
                work_pool_queues={"name": {"any_": [queue]}} if queue else None,
                flow_runs=_due_filter(),
                sort=FlowRunSort.EXPECTED_START_TIME_ASC,
                limit=WINDOW,
                offset=window * WINDOW,
            )
            # A run that starts between two requests shifts the pages, so one may come twice.
            flow_runs |= {flow_run.id: flow_run for flow_run in page}
            if len(page) < WINDOW:
                return list(flow_runs.values()), False
        return list(flow_runs.values()), True

    async def _read_holding(self) -> list[FlowRun]:
        """Return the flow runs that hold a gang or a slot of a pool."""
        holding = {"state": {"type": {"any_": HELD}}}
        handed_over = {"state": {"name": {"any_": [JOBS_GO_ON]}}}
        train_flow = {"name": {"any_": [FLOW]}}
        # Send one request at a time. A server on SQLite has few connections, and many requests at
        # once would block other clients.
        of_flow = await self.pages(flow_runs=holding, flows=train_flow)
        of_pools = await self.pages(flow_runs=holding, work_pools={"type": {"any_": [TYPE]}})
        # These runs hold their gang although they are only scheduled, perhaps for a later time.
        resumable = await self.pages(flow_runs=handed_over, flows=train_flow)
        return [*of_flow, *of_pools, *(run for run in resumable if is_handed_over(run))]

    async def pages(self, **filters: Any) -> list[FlowRun]:
        """Return all flow runs that match filters, which are given as JSON."""
        # Sorted by id, because a run that leaves the result between two requests shifts the pages.
        filters |= {"sort": FlowRunSort.ID_DESC, "limit": _PAGE}
        flow_runs: list[FlowRun] = []
        while True:
            page = await self._read_flow_runs(**filters, offset=len(flow_runs))
            flow_runs += page
            if len(page) < _PAGE:
                return flow_runs

    async def _read_flow_runs(self, **body: Any) -> list[FlowRun]:
        """Do the same as `PrefectClient.read_flow_runs`, but reuse the models of unchanged runs.

        Building the models takes most of the time.
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
        pool = pools.get(flow_run.work_pool_name or "")
        queue = pool.queue_of(flow_run) if pool else None
        grant = grant_of(flow_run)
        entry = QueueEntry(
            flow_run=flow_run,
            request=self._rows[str(flow_run.id)][2],
            grant=grant,
            pool=flow_run.work_pool_name or "",
            queue=queue.name if queue else "",
            priority=_priority(queue, pools.values()),
        )
        if grant is None or not grant.cluster:
            return entry
        # The grant says which cluster it is, even if the pool lists another one by now.
        return entry.with_cluster({CLUSTER_OF_POOL: grant.cluster})


def _priority(queue: WorkQueue | None, pools: Iterable[Pool]) -> int:
    """Return the priority of a queue. A run without a queue has that of a queue `default`."""
    if queue is not None:
        return queue.priority or 1
    for pool in pools:
        for other in pool.queues.values():
            if other.priority and other.name == "default":
                return other.priority
    return 1


def _seconds(at: datetime | None) -> float:
    return at.timestamp() if at else 0.0


def _due_filter(since: datetime | None = None) -> dict[str, Any]:
    """Return a filter for scheduled flow runs that are due or soon will be.

    Args:
        since: Leave out runs that were due before this time. None: leave out none.
    """
    limits = {"before_": datetime.now(UTC) + _AHEAD, "after_": since}
    return {
        "state": {"type": {"any_": ["SCHEDULED"]}},
        "next_scheduled_start_time": {key: at.isoformat() for key, at in limits.items() if at},
    }


def _waits(entry: QueueEntry) -> bool:
    return entry.grant is None and (entry.is_scheduled or entry.waits_in_process)
