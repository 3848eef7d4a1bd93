"""Looks at the queue of a work pool: what the ledger, the clusters and the policy say together.

A look changes nothing; it may raise httpx.HTTPError and PrefectException. A gate decides by it;
`QueueView` is the same as plain data, for people.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import State, StateType, WorkerStatus
from prefect.exceptions import ObjectNotFound
from pydantic import ValidationError

from tasks.processes.ending import holders_of
from tasks.queue.capacity import Capacity, NoCapacity, why_never
from tasks.queue.decision import Look, Refused
from tasks.queue.grants import (
    BEAT_EVERY_S,
    PENDING_RESOURCES,
    Giver,
    beat_of,
    lost_cancel,
    may_have_been_cancelled,
)
from tasks.queue.ledger import WINDOW, Ledger, LedgerReader, Pool, QueueEntry, Request, fault_of
from tasks.queue.packing import Demand
from tasks.queue.reasons import one_line
from tasks.queue.settings import LEFT_OUT, PoolSettings, settings_of
from tasks.ray.usage import Cluster
from tasks.server.flow_runs import FLOW_RUN_VARIABLE, host_of_worker
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.words import commas

#: What was granted, or submitted, and has not come further by then is given back, wherever its
#: worker may be.
GIVEN_BACK_AFTER_S = 60.0
#: A process that a killed worker has just spawned is to be seen by then.
_SPAWNED_WITHIN_S = 2.0
#: A run that waits in a process says so each BEAT_EVERY_S.
_SILENT_AFTER_S = 4 * BEAT_EVERY_S
#: Where more wait than were looked at: so many of those that may start are enough.
_ENOUGH = 50
#: So long a line is looked at, whatever keeps it.
_WINDOWS = 50
#: Specs are checked as a whole before they are admitted; of what waits, so many in one look.
_CHECKED_AT_ONCE = 20


class QueueReader:
    """Looks at the queue of one work pool."""

    def __init__(
        self,
        client: PrefectClient,
        *,
        pool: str,
        capacity: Capacity,
        giver: Giver,
        host: str = "",
    ) -> None:
        """
        Args:
            host: of the worker that looks, whatever it is called.
        """
        self._client = client
        self._reader = LedgerReader(client)
        self._pool = pool
        self._capacity = capacity
        self._giver = giver
        self._host = host
        self._settings = PoolSettings()
        #: They are those that the pool has now.
        self._is_read = False
        #: Flow runs whose spec was found in order.
        self._checked: set[UUID] = set()
        #: The last beat of each run that waits in its process, and when it was new here.
        self._beats: dict[UUID, tuple[object, float]] = {}
        #: By address, each cluster when it had the most GPUs.
        self._largest_seen: dict[str, Cluster] = {}
        #: Flow runs that have come back from their end, and the state in which that was in order.
        self._came_back: dict[UUID, UUID] = {}

    async def look(
        self,
        *,
        carefully: bool = False,
        in_flight: frozenset[UUID] = frozenset(),
        patient: frozenset[UUID] = frozenset(),
    ) -> Look:
        """The queue now.

        Args:
            carefully: As it must be before anything is decided.
            in_flight: What this process is submitting: never stuck.
            patient: What waits for nodes that have gone to come back.
        """
        while True:
            look = await self._looked(carefully, in_flight, patient)
            if not look.ledger.is_cut:
                # Of a line that has become shorter, no more is read than there is.
                self._reader.windows = 1 + len(look.line) // WINDOW
                return look
            if look.may_start() >= _ENOUGH or self._reader.windows >= _WINDOWS:
                return look
            self._reader.windows += 1

    async def _looked(
        self, carefully: bool, in_flight: frozenset[UUID], patient: frozenset[UUID]
    ) -> Look:
        ledger = await self._reader.read(carefully=carefully)
        pool = ledger.pools.get(self._pool)
        troubles = self._read_settings(pool)
        ledger = ledger.with_clusters(self._settings.left_out)
        now = time.time()
        stuck = [entry for entry in ledger.holding if self._is_stuck(entry, in_flight, now)]
        line = [
            entry
            for entry in (*ledger.waiting, *(entry for entry in stuck if entry.is_scheduled))
            # A run of another sort of pool waits in its own process.
            if entry.pool == self._pool or entry.pool not in ledger.pools
        ]
        cancelled = await self._cancelled(line)
        for entry, _cancel in cancelled:
            line.remove(entry)
        gone = [entry for entry in line if self._is_silent(entry)]
        line = sorted((e for e in line if e not in gone), key=lambda entry: entry.place)
        clusters, silent = await self._clusters([*line, *ledger.holding])
        names = _one_name_each(clusters)
        ledger, line = ledger.with_clusters(names), [one.with_cluster(names) for one in line]
        stuck = [one.with_cluster(names) for one in stuck]
        if "" in clusters:
            clusters[""] = _with_leases(clusters[""], {str(entry.id) for entry in ledger.holding})
        troubles += [f"{key or 'the nodes'}: {error}" for key, error in silent.items()]
        if gone:
            who = commas(entry.request.name for entry in gone)
            troubles.append(f"nothing is kept for runs whose process has not been heard of: {who}")
        if ledger.is_cut:
            seen = WINDOW * self._reader.windows
            troubles.append(f"of each queue only the first {seen} that wait are looked at")
        return Look(
            at=now,
            ledger=ledger,
            pool=pool,
            settings=self._settings,
            line=line,
            clusters=clusters,
            silent=silent,
            doomed=await self._doomed([e for e in line if e.id not in patient], clusters),
            cancelled=cancelled,
            stuck=stuck,
            troubles=troubles,
            served=await self._served(ledger),
        ).decided()

    def _is_silent(self, entry: QueueEntry) -> bool:
        """Whether it waits in a process of which nothing was heard for long: it may never start."""
        if not entry.waits_in_process or (beat := beat_of(entry.flow_run)) is None:
            return False
        now = time.monotonic()
        heard, since = self._beats.get(entry.id, (None, now))
        if heard != beat:
            since = now
        self._beats[entry.id] = beat, since
        return now - since > _SILENT_AFTER_S

    async def _served(self, ledger: Ledger) -> frozenset[str] | None:
        """The hosts with a worker of the pool, by what their workers are called, where the pool has
        a table of nodes; None where it has no worker."""
        if not self._settings.nodes or self._pool not in ledger.pools:
            return None
        workers = await self._client.read_workers_for_work_pool(self._pool)
        online = (one.name for one in workers if one.status is WorkerStatus.ONLINE)
        hosts = frozenset(filter(None, (self._host, *map(host_of_worker, online))))
        return hosts or None

    def _read_settings(self, pool: Pool | None) -> list[str]:
        try:
            if pool is not None:
                self._settings = settings_of(pool.work_pool.base_job_template)
            self._is_read = True
        except ValidationError as error:
            self._is_read = False
            # The last good ones stay: a slip of the pen must not let a drained node be used.
            return [f"the settings of the work pool {self._pool} can't be read: {one_line(error)}"]
        return []

    async def _cancelled(self, line: Sequence[QueueEntry]) -> list[tuple[QueueEntry, State[Any]]]:
        found = []
        for entry in line:
            state = entry.flow_run.state
            if state is None or not may_have_been_cancelled(entry.flow_run):
                continue
            if self._came_back.get(entry.id) == state.id:
                continue
            if cancel := await lost_cancel(self._client, entry.flow_run):
                found.append((entry, cancel))
            else:
                self._came_back[entry.id] = state.id
        return found

    def _is_stuck(self, entry: QueueEntry, in_flight: frozenset[UUID], now: float) -> bool:
        state = entry.flow_run.state
        if state is None or entry.goes_on or entry.id in in_flight:
            return False
        giver = entry.grant.by if entry.grant else None
        # Once it has begun, it ends by its process, or by `reconcile`.
        is_cancelled = state.is_cancelling() and entry.flow_run.start_time is None
        if giver == self._giver and not is_cancelled:
            # Ours, and not in flight: it is handed out again.
            return False
        is_gone = giver is not None and (giver == self._giver or giver.is_surely_gone())
        if entry.is_scheduled and entry.grant is not None:
            return is_gone or now - entry.grant.at > GIVEN_BACK_AFTER_S
        if not (state.type is StateType.PENDING or is_cancelled) or entry.pool != self._pool:
            return False
        age_s = now - entry.since.timestamp()
        if not is_gone:
            return age_s > GIVEN_BACK_AFTER_S and not entry.flow_run.infrastructure_pid
        # Its process may have been started by a worker that was killed before it could say so; and
        # one that is on record may have gone with its worker.
        id = str(entry.id)
        return age_s > _SPAWNED_WITHIN_S and not holders_of(FLOW_RUN_VARIABLE).pids.get(id)

    async def _clusters(
        self, entries: Sequence[QueueEntry]
    ) -> tuple[dict[str, Cluster], dict[str, str]]:
        keys = {
            entry.request.cluster
            for entry in entries
            if entry.request.demand is not None or entry.request.cluster == LEFT_OUT
        }
        if self._settings.nodes:
            keys.add("")
        keys.update(one.address for one in self._settings.clusters)
        clusters: dict[str, Cluster] = {}
        silent: dict[str, str] = {}

        async def look(key: str) -> None:
            try:
                clusters[key] = await self._capacity.of(key, self._settings)
            except NoCapacity as error:
                silent[key] = str(error)

        await asyncio.gather(*(look(key) for key in sorted(keys)))
        return clusters, silent

    async def _doomed(
        self, line: Sequence[QueueEntry], clusters: Mapping[str, Cluster]
    ) -> list[Refused]:
        doomed = [one for entry in line if (one := self._why_never(entry, clusters)) is not None]
        known = self._checked | {one.entry.id for one in doomed}
        unchecked = [entry for entry in line if entry.id not in known]
        for entry in unchecked[:_CHECKED_AT_ONCE]:
            if fault := await asyncio.to_thread(fault_of, entry.flow_run):
                doomed.append(Refused(entry=entry, kind=FailureKind.USER_ERROR, message=fault))
            else:
                self._checked.add(entry.id)
        return doomed

    def _largest(self, key: str, cluster: Cluster) -> Cluster | None:
        """A cluster as it was when it had the most GPUs: a node that reboots will be back.

        None where none with GPUs has joined its head yet.
        """
        if not key:
            return cluster
        most = max(self._largest_seen.get(key, cluster), cluster, key=_gpus)
        self._largest_seen[key] = most
        return most if _gpus(most) else None

    def _why_never(self, entry: QueueEntry, clusters: Mapping[str, Cluster]) -> Refused | None:
        request = entry.request
        if request.fault:
            return Refused(entry=entry, kind=FailureKind.USER_ERROR, message=request.fault)
        cluster = clusters.get(request.cluster)
        if cluster is not None:
            cluster = self._largest(request.cluster, cluster)
        state = entry.flow_run.state
        has_waited = state is not None and state.name == PENDING_RESOURCES
        has_waited = has_waited and not entry.waits_in_process
        if request.cluster == LEFT_OUT and self._is_read and not has_waited:
            why = self._settings.why_no_cluster()
            return Refused(entry=entry, kind=FailureKind.USER_ERROR, message=why)
        if request.demand is None or cluster is None or has_waited:
            # What could start when it came waits for nodes that have gone to come back.
            return None
        why = why_never(
            request.demand, cluster, entrypoint=request.entrypoint, only=entry.only
        ) or _over_a_limit(request, self._settings)
        return Refused(entry=entry, kind=FailureKind.INFEASIBLE, message=why) if why else None


def _one_name_each(clusters: dict[str, Cluster]) -> dict[str, str]:
    """Leaves each cluster in there by one of its addresses; which, for the others."""
    known: dict[str, str] = {}
    names: dict[str, str] = {}
    for key in sorted(clusters):
        if (id := clusters[key].id) and known.setdefault(id, key) != key:
            names[key] = known[id]
            del clusters[key]
    return names


def _gpus(cluster: Cluster) -> int:
    return sum(node.gpus for node in cluster.nodes)


def _with_leases(cluster: Cluster, holding: set[str]) -> Cluster:
    """With what those have leased who are not in the ledger among what others use."""
    nodes = (
        replace(
            node, others_gpus=float(sum(owner not in holding for owner in node.leased.values()))
        )
        for node in cluster.nodes
    )
    return replace(cluster, nodes=tuple(nodes))


def _over_a_limit(request: Request, settings: PoolSettings) -> str:
    gpus = request.demand.gpus if request.demand is not None else 0
    for tag in sorted(request.tags & settings.limits.keys()):
        if gpus > (limit := settings.limits[tag]):
            return (
                f"the run asks for {gpus} GPUs in all, and its tag {tag} may have {limit} at once. "
                "Ask for less, or have the limit raised"
            )
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRun:
    """A run that waits."""

    #: From 1 on, in the order of the line.
    number: int
    flow_run_id: str
    #: Its flow run's name.
    name: str
    #: None where it asks for no GPUs.
    demand: Demand | None
    #: Of its Ray cluster; empty where it names none.
    cluster: str
    #: The pool's queue; empty for a run that was started directly.
    queue: str
    #: UTC epoch seconds.
    waiting_since: float
    #: One line: what it waits for.
    reason: str
    #: UTC epoch seconds; None: nobody can say.
    starts_at: float | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """One node, and who holds what of it."""

    cluster: str
    name: str
    gpus: int
    #: For new gangs; 0 on a drained node.
    free: int
    #: `held[name of the flow run]` GPUs.
    held: Mapping[str, int] = field(default_factory=dict)
    #: In use by others than our runs.
    others: float = 0.0
    is_drained: bool = False
    cpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """The line and the nodes of a work pool."""

    #: UTC epoch seconds.
    at: float
    #: Name of the work pool; empty where the server has none.
    pool: str
    policy: str
    is_paused: bool
    #: How many runs may run at once; None: any number.
    limit: int | None
    #: How many do: pending and running.
    running: int
    line: tuple[QueuedRun, ...]
    nodes: tuple[NodeUse, ...]
    #: `used[tag]` and the limit of each tag that has one: `(used, limit)` GPUs.
    tags: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: Names of the pool's queues that are paused.
    paused_queues: tuple[str, ...] = ()
    #: What is wrong: a cluster that does not answer, settings that can't be read.
    troubles: tuple[str, ...] = ()


def view_of(look: Look, pool: str) -> QueueView:
    """The line and the nodes of a work pool."""
    work_pool = look.pool.work_pool if look.pool else None
    queues = look.pool.queues.values() if look.pool else ()
    return QueueView(
        at=look.at,
        pool=pool if work_pool else "",
        policy=look.settings.policy,
        is_paused=bool(work_pool and work_pool.is_paused),
        limit=work_pool.concurrency_limit if work_pool else None,
        running=look.ledger.running_in(pool),
        line=tuple(
            _queued(look, entry, number) for number, entry in enumerate(look.waiting, start=1)
        ),
        nodes=tuple(node for key in sorted(look.clusters) for node in _nodes(look, key)),
        tags={tag: (look.used(tag), most) for tag, most in sorted(look.settings.limits.items())},
        paused_queues=tuple(sorted(queue.name for queue in queues if queue.is_paused)),
        troubles=tuple(look.troubles),
    )


def _queued(look: Look, entry: QueueEntry, number: int) -> QueuedRun:
    message = look.messages.get(entry.id)
    given = {one.id: gpus for one, gpus in look.admitted}.get(entry.id)
    starts = f"starts now{', on ' + ', '.join(given) if given else ''}"
    expected = entry.flow_run.expected_start_time or entry.since
    return QueuedRun(
        number=number,
        flow_run_id=str(entry.id),
        name=entry.request.name,
        demand=entry.request.demand,
        cluster=entry.request.cluster,
        queue=entry.queue,
        waiting_since=expected.timestamp(),
        reason=message.reason if message else starts if given is not None else "",
        starts_at=look.at if given is not None else look.starts_at.get(entry.id),
        tags=tuple(sorted(entry.request.tags)),
    )


def _nodes(look: Look, key: str) -> list[NodeUse]:
    held: dict[str, dict[str, int]] = defaultdict(dict)
    have = ((entry, look.held.get(entry.id, {})) for entry in look.ledger.holding)
    for entry, given in (*have, *look.admitted):
        if entry.request.cluster == key:
            for name, gpus in given.items():
                held[name][entry.request.name] = gpus
    free = look.free.get(key, {})
    return [
        NodeUse(
            cluster=key,
            name=node.name,
            gpus=node.gpus,
            free=0 if node.is_drained else max(0, free.get(node.name, 0)),
            held={run: gpus for run, gpus in held[node.name].items() if gpus},
            others=node.others_gpus,
            is_drained=node.is_drained,
            cpus=node.cpus,
            resources=node.resources,
        )
        for node in look.clusters[key].nodes
        if node.gpus
    ]


class QueueViewer:
    """Looks at the queues of one Prefect server. Use it with one client, in one asyncio loop."""

    def __init__(self) -> None:
        #: What a reader has found out once, it does not ask again.
        self._readers: dict[str, QueueReader] = {}

    async def __call__(self, client: PrefectClient, pool: str) -> QueueView:
        """The queue of a work pool, or of the runs without one where there is no such pool."""
        if pool not in self._readers:
            self._readers[pool] = QueueReader(
                client, pool=pool, capacity=Capacity(), giver=Giver.me()
            )
        view = view_of(await self._readers[pool].look(), pool)
        workers = []
        with suppress(ObjectNotFound):
            workers = await client.read_workers_for_work_pool(pool) if view.pool else []
        if not view.pool or any(worker.status is WorkerStatus.ONLINE for worker in workers):
            return view
        # What could start is not in the line: without this it would seem to be on its way.
        trouble = (
            "no worker serves the pool, so nothing starts: "
            f"start one with `prefect worker start --pool {pool}`"
        )
        return replace(view, troubles=(*view.troubles, trouble))
