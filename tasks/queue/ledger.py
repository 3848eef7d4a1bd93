"""The ledger of the queue: what the Prefect server knows of runs that wait and runs that hold.

It is read in an order that misses no run on its way from one state to the next: first what waits,
then what holds, then whatever was known before and is in neither.
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
from tasks.queue.grants import HOST, PENDING_RESOURCES, Grant, goes_on, grant_of, state_of
from tasks.queue.packing import Demand
from tasks.queue.policy import class_s
from tasks.queue.settings import LEFT_OUT
from tasks.record.places import make_run_id
from tasks.server.flow_runs import HELD, JOBS_GO_ON, host_of_worker
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import parse_spec
from tasks.spec.run import Gang

#: The type of the work pools, and of their workers.
TYPE = "gang"
GANG_POOLS = WorkPoolFilter.model_validate({"type": {"any_": [TYPE]}})
#: The flow of runs that are started directly.
FLOW = "train"
#: Of what waits in one queue of a pool, so many are looked at, and as many more while too few of
#: them may start: as many as one request gives.
WINDOW = _PAGE = 200
#: What waits for a time so near is read with what is due: time alone asks for no new reading.
_AHEAD = timedelta(seconds=90)
#: They change from one answer to the next while nothing happens, and nobody here reads them.
_CLOCKS = ("estimated_run_time", "estimated_start_time_delta")
#: A run that comes is due by the clock of whoever submits it, or of the server.
_CLOCKS_APART = timedelta(seconds=10)
_HOUR_S = 3600.0
#: The server itself takes longer to see that one has gone.
_WORKERS_EVERY_S = 10.0
#: A pool and one of its queues; None: in all of them.
Place = tuple[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a flow run asks for."""

    #: The run id, or the flow run's name where it is no run of ours.
    name: str
    #: None where it asks for no GPUs.
    demand: Demand | None = None
    #: How long it is expected to have its gang, in seconds.
    estimate_s: float = 0.0
    #: The address of its Ray cluster; empty where it has none, LEFT_OUT where its pool says which.
    cluster: str = ""
    tags: frozenset[str] = frozenset()
    #: What is wrong with its gang; empty for nothing.
    fault: str = ""


def request_of(flow_run: FlowRun) -> Request:
    """What a flow run asks for; no more of its spec is checked."""
    tags, spec = frozenset(flow_run.tags), _spec_of(flow_run)
    if spec is None:
        return Request(name=flow_run.name, tags=tags)
    tags |= {tag for tag in spec.get("tags") or () if isinstance(tag, str)}
    name, ray = _run_id(flow_run, spec), spec.get("ray")
    cluster = str(ray.get("address") or LEFT_OUT).rstrip("/") if isinstance(ray, Mapping) else ""
    if spec.get("gang") is None:
        return Request(name=name, tags=tags, cluster=cluster)
    try:
        gang = Gang.model_validate(spec["gang"])
    except (ValidationError, InvalidSpec):
        return Request(name=name, tags=tags, fault=fault_of(flow_run) or "its gang can't be read")
    shape = gang.model_dump(include={"nodes", "gpus_per_node", "cpus_per_gpu"})
    return Request(
        name=name,
        demand=Demand(**shape),
        estimate_s=min(class_s(gang.hours * _HOUR_S), (gang.max_hours or math.inf) * _HOUR_S),
        cluster=cluster,
        tags=tags,
    )


def fault_of(flow_run: FlowRun) -> str:
    """What is wrong with the spec of a flow run, with every fault; empty for nothing. It takes
    some milliseconds."""
    if (spec := _spec_of(flow_run)) is None:
        return ""
    # Prefect's name of its flow run is not known to whoever wrote it.
    name = spec.get("name")
    called = f"the spec of {name}" if isinstance(name, str) else "the spec"
    try:
        parse_spec(dict(spec), source=called, from_form=True)
    except InvalidSpec as error:
        return str(error)
    return ""


def _spec_of(flow_run: FlowRun) -> Mapping[str, Any] | None:
    """As it was submitted; None where the flow run is none of ours."""
    spec = flow_run.parameters.get("spec")
    return spec if isinstance(spec, Mapping) else None


def _run_id(flow_run: FlowRun, spec: Mapping[str, Any]) -> str:
    name, workload = spec.get("name"), spec.get("workload")
    if not isinstance(name, str) or not isinstance(workload, str):
        return flow_run.name
    return make_run_id(name, workload, flow_run.id, flow_run.created or datetime.now(UTC))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    """One flow run that waits, or that holds."""

    flow_run: FlowRun
    request: Request
    #: None where it has no gang (yet).
    grant: Grant | None
    #: Its work pool; empty for a run that was started directly.
    pool: str
    #: The pool's queue, and its priority: 1 comes first.
    queue: str
    priority: int

    @property
    def id(self) -> UUID:
        return self.flow_run.id

    def with_cluster(self, names: Mapping[str, str]) -> QueueEntry:
        """The same, where its cluster goes by another of its addresses: `names[address]`."""
        name = names.get(self.request.cluster)
        return self if name is None else replace(self, request=replace(self.request, cluster=name))

    @property
    def state(self) -> State[Any]:
        return state_of(self.flow_run)

    @property
    def demand(self) -> Demand:
        """Of one that asks for GPUs."""
        assert self.request.demand is not None
        return self.request.demand

    @property
    def promised(self) -> Mapping[str, int]:
        """`promised[node name]` GPUs; empty where nobody promised it anything."""
        return self.grant.nodes if self.grant is not None else {}

    @property
    def place(self) -> tuple[float | int | str, ...]:
        """Where it stands in the line: the same for all its attempts."""
        run = self.flow_run
        times = run.expected_start_time or run.created, run.created
        return (self.priority, *(at.timestamp() if at else 0.0 for at in times), str(run.id))

    @property
    def waits_in_process(self) -> bool:
        """Its own process waits, and goes on as soon as there is a grant."""
        return self.state.is_running() and self.state.name == PENDING_RESOURCES

    @property
    def is_of_processes(self) -> bool:
        """Its gang is of the GPUs of one host, which start its processes."""
        return self.request.demand is not None and not self.request.cluster

    @property
    def only(self) -> str:
        """The name of the one node that it can start on, where it is that of its process."""
        is_here = self.waits_in_process and self.is_of_processes
        return str(self.flow_run.labels.get(HOST) or "") if is_here else ""

    @property
    def is_scheduled(self) -> bool:
        return self.state.is_scheduled()

    @property
    def goes_on(self) -> bool:
        """It has its gang, and waits for a new process."""
        return goes_on(self.flow_run)

    def is_due(self, at: float) -> bool:
        """Whether it may start at that time, UTC epoch seconds."""
        due = self.flow_run.next_scheduled_start_time
        return not self.is_scheduled or (due is not None and due.timestamp() <= at)

    @property
    def since(self) -> datetime:
        """When it came into the state that it has."""
        return self.state.timestamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A work pool of type `gang`, and how full it is."""

    work_pool: WorkPool
    queues: Mapping[UUID, WorkQueue]
    #: The names of those that are online.
    workers: Set[str] = frozenset()
    #: Where they start processes.
    hosts: Set[str] = frozenset()

    @property
    def name(self) -> str:
        return self.work_pool.name

    def queue_of(self, flow_run: FlowRun) -> WorkQueue | None:
        id = flow_run.work_queue_id
        return self.queues.get(id) if id else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """One reading."""

    at: datetime
    #: By name.
    pools: Mapping[str, Pool]
    #: Runs that wait for a gang, or only for a place in their pool, in the order of the line; those
    #: that are soon due among them.
    waiting: tuple[QueueEntry, ...]
    #: Runs that have a gang, whether or not they have a process yet; and those without one that
    #: have a process, which take a place in their pool.
    holding: tuple[QueueEntry, ...]
    #: There are more that wait than were looked at.
    is_cut: bool

    @property
    def looker(self) -> tuple[str, str] | None:
        """The pool and the name of the worker that looks for all of them: the first that is online;
        None where none is."""
        online = ((pool.name, name) for pool in self.pools.values() for name in pool.workers)
        return min(online, default=None)

    def with_clusters(self, names: Callable[[QueueEntry], Mapping[str, str]]) -> Ledger:
        """The same, where clusters go by other names: `names(entry)[address]`."""
        waiting = tuple(entry.with_cluster(names(entry)) for entry in self.waiting)
        holding = tuple(entry.with_cluster(names(entry)) for entry in self.holding)
        return replace(self, waiting=waiting, holding=holding)

    def places(self) -> Counter[Place]:
        """How many runs take a place in each pool, and in each of its queues."""
        taken: Counter[Place] = Counter()
        for entry in (*self.holding, *(one for one in self.waiting if one.waits_in_process)):
            if not entry.state.is_cancelling():
                taken.update(((entry.pool, None), (entry.pool, entry.queue)))
        return taken


@dataclass(slots=True)
class LedgerReader:
    """Reads the ledger; keeps what of it never changes. It may raise httpx.HTTPError and
    PrefectException."""

    _client: PrefectClient
    #: The pool and the name of the worker that reads.
    _reader: tuple[str, str] = ("", "")
    #: By the id of its flow run: what the server told last, that as a model, and what it asks.
    _rows: dict[str, tuple[dict[str, Any], FlowRun, Request]] = field(default_factory=dict)
    #: By pool: its workers that are online, and when that was read.
    _workers: dict[str, tuple[frozenset[str], float]] = field(default_factory=dict)
    #: So many of WINDOW runs each are looked at, of what waits in one queue of a pool.
    windows: int = 1

    async def read(self, *, after: Ledger | None = None, again: Collection[UUID] = ()) -> Ledger:
        """The ledger now. No run is missed that was known before: one that is sent back meanwhile
        keeps its place before others.

        Args:
            after: An earlier reading, since when no other gate has decided. What waited then is
                not read again, but for `again`; what came since is.
        """
        if after is None:
            self._workers.clear()
        at, pools = datetime.now(UTC), await self._pools()
        if after is not None:
            waited = [one.flow_run for one in after.waiting if one.is_scheduled]
            waiting, is_cut = [run for run in waited if run.id not in again], after.is_cut
            due = _due(since=after.at - _CLOCKS_APART)
            waiting += await self.pages(flow_runs=due, work_pools={"type": {"any_": [TYPE]}})
        else:
            if not self._rows:
                # The first time, whatever holds is known before what waits is read.
                await self._holding()
            waiting, is_cut = await self._scheduled(pools.values())
        holding = await self._holding()
        found = {run.id: run for run in (*waiting, *holding)}
        left = [str(id) for id in {*map(UUID, self._rows), *again} if id not in found]
        for start in range(0, len(left), _PAGE):
            some = {"id": {"any_": left[start : start + _PAGE]}, **_due()}
            found |= {run.id: run for run in await self._flow_runs(flow_runs=some)}
        self._rows = {id: row for id, row in self._rows.items() if UUID(id) in found}
        entries = sorted(
            (self._entry(run, pools) for run in found.values()), key=lambda entry: entry.place
        )
        return Ledger(
            at=at,
            pools=pools,
            waiting=tuple(entry for entry in entries if _waits(entry)),
            holding=tuple(entry for entry in entries if not _waits(entry)),
            is_cut=is_cut,
        )

    async def _pools(self) -> dict[str, Pool]:
        found = {}
        for pool in await self._client.read_work_pools(work_pool_filter=GANG_POOLS):
            queues = await self._client.read_work_queues(work_pool_name=pool.name)
            # The one that reads is online, whatever the server has seen and whatever it is called.
            is_own = pool.name == self._reader[0]
            workers = await self._online(pool.name) | ({self._reader[1]} if is_own else set())
            found[pool.name] = Pool(
                work_pool=pool,
                queues={queue.id: queue for queue in queues},
                workers=workers,
                hosts={*map(host_of_worker, workers), *([host_name()] if is_own else [])},
            )
        return found

    async def _online(self, pool: str) -> frozenset[str]:
        names, read_at = self._workers.get(pool, (frozenset[str](), -math.inf))
        if time.monotonic() - read_at < _WORKERS_EVERY_S:
            return names
        workers = await self._client.read_workers_for_work_pool(pool)
        names = frozenset(one.name for one in workers if one.status is WorkerStatus.ONLINE)
        self._workers[pool] = names, time.monotonic()
        return names

    async def _scheduled(self, pools: Iterable[Pool]) -> tuple[list[FlowRun], bool]:
        found: list[FlowRun] = []
        is_cut = False
        for pool in pools:
            due, is_more = await self._due(pool.name)
            if is_more:
                # Those of a queue that comes first may stand behind many of another one.
                due, is_cut = [], True
                for queue in pool.queues.values():
                    due += (await self._due(pool.name, queue.name))[0]
            found += due
        return found, is_cut

    async def _due(self, pool: str, queue: str | None = None) -> tuple[list[FlowRun], bool]:
        """The first of what waits, and whether there is more."""
        found: dict[UUID, FlowRun] = {}
        for window in range(self.windows):
            page = await self._flow_runs(
                work_pools={"name": {"any_": [pool]}},
                work_pool_queues={"name": {"any_": [queue]}} if queue else None,
                flow_runs=_due(),
                sort=FlowRunSort.EXPECTED_START_TIME_ASC,
                limit=WINDOW,
                offset=window * WINDOW,
            )
            # One that started in between shifts the pages.
            found |= {run.id: run for run in page}
            if len(page) < WINDOW:
                return list(found.values()), False
        return list(found.values()), True

    async def _holding(self) -> list[FlowRun]:
        holding = {"state": {"type": {"any_": HELD}}}
        going_on = {"state": {"name": {"any_": [JOBS_GO_ON]}}}
        ours = {"name": {"any_": [FLOW]}}
        # One after the other, as all of it: a server on SQLite has few connections, and a line of
        # requests before them can hold up everybody.
        of_flow = await self.pages(flow_runs=holding, flows=ours)
        of_pools = await self.pages(flow_runs=holding, work_pools={"type": {"any_": [TYPE]}})
        # One of these may be due only later, and holds all the same.
        left = await self.pages(flow_runs=going_on, flows=ours)
        return [*of_flow, *of_pools, *(run for run in left if goes_on(run))]

    async def pages(self, **filters: Any) -> list[FlowRun]:
        """All flow runs of these filters, as JSON has them."""
        # A run that leaves in between shifts the pages: by its id, the others stay.
        filters |= {"sort": FlowRunSort.ID_DESC, "limit": _PAGE}
        found: list[FlowRun] = []
        while True:
            page = await self._flow_runs(**filters, offset=len(found))
            found += page
            if len(page) < _PAGE:
                return found

    async def _flow_runs(self, **body: Any) -> list[FlowRun]:
        """As `PrefectClient.read_flow_runs`, whose models take the longest by far: what has not
        changed is the same object as before."""
        answer = await self._client.request("POST", "/flow_runs/filter", json=body)
        found = []
        for row in answer.json():
            told = {key: value for key, value in row.items() if key not in _CLOCKS}
            known = self._rows.get(row["id"])
            if known is None or known[0] != told:
                run = FlowRun.model_validate(told)
                known = self._rows[row["id"]] = told, run, request_of(run)
            found.append(known[1])
        return found

    def _entry(self, run: FlowRun, pools: Mapping[str, Pool]) -> QueueEntry:
        pool = pools.get(run.work_pool_name or "")
        queue, grant = pool.queue_of(run) if pool else None, grant_of(run)
        # Between the queues of a pool, a run that was started directly is in the default one.
        queues = [queue] if queue else [q for one in pools.values() for q in one.queues.values()]
        places = (q.priority for q in queues if q.priority and (queue or q.name == "default"))
        entry = QueueEntry(
            flow_run=run,
            request=self._rows[str(run.id)][2],
            grant=grant,
            pool=run.work_pool_name or "",
            queue=queue.name if queue else "",
            priority=next(places, 1),
        )
        # Whatever its pool lists by now.
        on = {LEFT_OUT: grant.cluster} if grant is not None and grant.cluster else {}
        return entry.with_cluster(on)


def _due(since: datetime | None = None) -> dict[str, Any]:
    """A filter of flow runs that are due, or soon will be."""
    due = {"before_": datetime.now(UTC) + _AHEAD, "after_": since}
    return {
        "state": {"type": {"any_": ["SCHEDULED"]}},
        "next_scheduled_start_time": {key: at.isoformat() for key, at in due.items() if at},
    }


def _waits(entry: QueueEntry) -> bool:
    return entry.grant is None and (entry.is_scheduled or entry.waits_in_process)
