"""Looks at the queue of a work pool: what the ledger, the clusters and the policy say together.

A look may raise httpx.HTTPError and PrefectException. `QueueView` is the same as plain data.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import State, StateType
from pydantic import ValidationError

from tasks.processes.ending import holders_of
from tasks.queue import grants
from tasks.queue.decision import Look, Refused, overgranted, own_settings, pool_of
from tasks.queue.grants import Giver
from tasks.queue.ledger import WINDOW, Ledger, LedgerReader, Pool, QueueEntry, fault_of
from tasks.queue.nodes import Capacity, NoCapacity, why_never, with_drained
from tasks.queue.packing import Demand
from tasks.queue.reasons import one_line
from tasks.queue.settings import LEFT_OUT, FaultyNode, PoolSettings, merged, settings_of
from tasks.ray.usage import Cluster, ClusterNode
from tasks.server.flow_runs import FLOW_RUN_VARIABLE
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.words import commas

#: What was granted, or submitted, and has not come further by then is given back.
GIVEN_BACK_AFTER_S = 60.0
#: A process that a killed worker has just spawned is to be seen by then.
_SPAWNED_WITHIN_S = 2.0
#: A run that waits in a process says so each BEAT_EVERY_S.
_SILENT_AFTER_S = 4 * grants.BEAT_EVERY_S
#: Where more wait than were looked at: so many of those that may start are enough.
_ENOUGH = 50
#: So long a line is looked at, whatever keeps it.
_WINDOWS = 50
#: Specs are checked as a whole before they are admitted; of what waits, so many in one look.
_CHECKED_AT_ONCE = 20


@dataclass(slots=True)
class QueueReader:
    """Looks at the queue of a Prefect server: the line of all of its work pools."""

    client: PrefectClient
    capacity: Capacity
    giver: Giver
    reader: LedgerReader
    #: By pool, the last ones that could be read.
    _settings: dict[str, PoolSettings] = field(default_factory=dict)
    #: Flow runs whose spec was found in order.
    _checked: set[UUID] = field(default_factory=set)
    #: The last beat of each run that waits in its process, and when it was new here.
    _beats: dict[UUID, tuple[object, float]] = field(default_factory=dict)
    #: By address, each cluster when it had the most GPUs.
    _largest_seen: dict[str, Cluster] = field(default_factory=dict)
    #: Flow runs that have come back from their end, and the state in which that was in order.
    _came_back: dict[UUID, UUID] = field(default_factory=dict)
    #: The last reading.
    _ledger: Ledger | None = None

    async def look(
        self,
        *,
        after: Look | None = None,
        again: Collection[UUID] = (),
        in_flight: frozenset[UUID] = frozenset(),
        patient: frozenset[UUID] = frozenset(),
        is_told: bool = False,
    ) -> Look:
        """The queue now.

        Args:
            after: An earlier one, since when no other gate has decided: a long line is not read
                again, but for what it was to do, and for `again`.
            in_flight: What this process is submitting: never stuck.
            patient: What waits for nodes that have gone to come back.
            is_told: Nothing has changed on the server since the last look, as far as events tell:
                only the clusters and the clock are asked.
        """
        if is_told and self._ledger is not None:
            return await self._looked(self._ledger, in_flight, patient)
        if after is not None and not (after.ledger.is_cut and after.may_start() < _ENOUGH):
            again = {*again, *(entry.id for entry, _ in (*after.admitted, *after.cancelled))}
            self._ledger = await self.reader.read(after=after.ledger, again=again)
            return await self._looked(self._ledger, in_flight, patient)
        while True:
            self._ledger = await self.reader.read()
            look = await self._looked(self._ledger, in_flight, patient)
            if not look.ledger.is_cut:
                # Of a line that has become shorter, no more is read than there is.
                self.reader.windows = 1 + len(look.line) // WINDOW
                return look
            if look.may_start() >= _ENOUGH or self.reader.windows >= _WINDOWS:
                return look
            self.reader.windows += 1

    async def _looked(
        self, ledger: Ledger, in_flight: frozenset[UUID], patient: frozenset[UUID]
    ) -> Look:
        settings, troubles = self._read_settings(ledger.pools)
        ledger = ledger.with_clusters(lambda one: own_settings(one, settings).left_out)
        now = time.time()
        stuck = [one for one in ledger.holding if self._is_stuck(one, ledger, in_flight, now)]
        waiting = (entry for entry in ledger.waiting if entry.is_due(now))
        line = [*waiting, *(entry for entry in stuck if entry.is_scheduled)]
        cancelled = await self._cancelled(line)
        for entry, _cancel in cancelled:
            line.remove(entry)
        gone = [entry for entry in line if self._is_silent(entry)]
        line = sorted((e for e in line if e not in gone), key=lambda entry: entry.place)
        clusters, silent = await self._clusters([*line, *ledger.holding], settings)
        names = _one_name_each(clusters, {key for one in settings.values() for key in one.keys})
        ledger = ledger.with_clusters(lambda _one: names)
        line = [one.with_cluster(names) for one in line]
        stuck = [one.with_cluster(names) for one in stuck]
        stuck += [one for one in overgranted(ledger.holding, clusters) if one not in stuck]
        rules = _rules([*line, *ledger.holding], settings, clusters, names)
        clusters = {
            key: with_drained(one, rules[key].drained_at(now)) for key, one in clusters.items()
        }
        troubles += [f"{key or 'the nodes'}: {error}" for key, error in silent.items()]
        if gone:
            who = commas(entry.request.name for entry in gone)
            troubles.append(f"nothing is kept for runs whose process has not been heard of: {who}")
        if ledger.is_cut:
            seen = WINDOW * self.reader.windows
            troubles.append(f"of each queue only the first {seen} that wait are looked at")
        look = Look(
            at=now,
            ledger=ledger,
            settings=settings,
            rules=rules,
            line=line,
            clusters=clusters,
            silent=silent,
            cancelled=cancelled,
            stuck=stuck,
            troubles=troubles,
        )
        await self._doom(look, patient)
        return look.decided()

    def _is_silent(self, entry: QueueEntry) -> bool:
        """Whether it waits in a process of which nothing was heard for long: it may never start."""
        beat = entry.flow_run.labels.get(grants.BEAT)
        if not entry.waits_in_process or beat is None:
            return False
        if self._beats.get(entry.id, (None, 0.0))[0] != beat:
            self._beats[entry.id] = beat, time.monotonic()
        return time.monotonic() - self._beats[entry.id][1] > _SILENT_AFTER_S

    def _read_settings(
        self, pools: Mapping[str, Pool]
    ) -> tuple[dict[str, PoolSettings], list[str]]:
        """Of each pool, and what can't be read."""
        troubles = []
        for name, pool in pools.items():
            try:
                self._settings[name] = settings_of(pool.work_pool.base_job_template)
            except ValidationError as error:
                # The last good ones stay: a slip of the pen must not let a drained node be used.
                why = one_line(error)
                troubles.append(f"the settings of the work pool {name} can't be read: {why}")
        return {name: self._settings.get(name, PoolSettings()) for name in pools}, troubles

    async def _cancelled(self, line: Sequence[QueueEntry]) -> list[tuple[QueueEntry, State[Any]]]:
        found = []
        for entry in line:
            is_known = self._came_back.get(entry.id) == entry.state.id
            if is_known or not grants.may_have_been_cancelled(entry.flow_run):
                continue
            if cancel := await grants.lost_cancel(self.client, entry.flow_run):
                found.append((entry, cancel))
            else:
                self._came_back[entry.id] = entry.state.id
        return found

    def _is_stuck(
        self, entry: QueueEntry, ledger: Ledger, in_flight: frozenset[UUID], now: float
    ) -> bool:
        state = entry.state
        if entry.goes_on or entry.id in in_flight:
            return False
        giver = entry.grant.by if entry.grant else None
        # Once it has begun, it ends by its process, or by `reconcile`.
        is_cancelled = state.is_cancelling() and entry.flow_run.start_time is None
        if giver == self.giver and not is_cancelled:
            # Ours, and not in flight: it is handed out again.
            return False
        is_gone = giver is not None and (giver == self.giver or giver.is_surely_gone())
        if entry.is_scheduled and entry.grant is not None:
            return is_gone or now - entry.grant.at > GIVEN_BACK_AFTER_S
        if not (state.type is StateType.PENDING or is_cancelled) or entry.pool not in ledger.pools:
            return False
        age_s = now - entry.since.timestamp()
        if not is_gone:
            return age_s > GIVEN_BACK_AFTER_S and not entry.flow_run.infrastructure_pid
        # Its process may have been started by a worker that was killed before it could say so; and
        # one that is on record may have gone with its worker.
        pids = holders_of(FLOW_RUN_VARIABLE).pids
        return age_s > _SPAWNED_WITHIN_S and not pids.get(str(entry.id))

    async def _clusters(
        self, entries: Sequence[QueueEntry], settings: Mapping[str, PoolSettings]
    ) -> tuple[dict[str, Cluster], dict[str, str]]:
        keys = {entry.request.cluster for entry in entries if entry.request.demand is not None}
        keys = keys - {LEFT_OUT} | {key for one in settings.values() for key in one.keys}
        clusters: dict[str, Cluster] = {}
        silent: dict[str, str] = {}

        async def look(key: str) -> None:
            try:
                clusters[key] = await self.capacity.of(key, settings)
            except NoCapacity as error:
                silent[key] = str(error)

        await asyncio.gather(*map(look, sorted(keys)))
        return clusters, silent

    async def _doom(self, look: Look, patient: frozenset[UUID]) -> None:
        """Note the runs that can never start."""
        left = _CHECKED_AT_ONCE
        for entry in look.line:
            if entry.id in patient:
                continue
            kind, why = self._why_never(entry, look)
            if not why and left and entry.id not in self._checked:
                left -= 1
                kind = FailureKind.USER_ERROR
                if not (why := await asyncio.to_thread(fault_of, entry.flow_run)):
                    self._checked.add(entry.id)
            if why:
                look.doomed.append(Refused(entry=entry, kind=kind, message=why))

    def _why_never(self, entry: QueueEntry, look: Look) -> tuple[FailureKind, str]:
        """Why a run can never start; empty where it can, or nobody can say."""
        request, settings = entry.request, look.settings
        if request.fault:
            return FailureKind.USER_ERROR, request.fault
        has_waited = entry.state.name == grants.PENDING_RESOURCES
        if has_waited and not entry.waits_in_process:
            # What could start when it came waits for nodes that have gone to come back.
            return FailureKind.INFEASIBLE, ""
        unread = settings.keys() - self._settings.keys()
        if request.cluster == LEFT_OUT and pool_of(entry, settings) not in unread:
            return FailureKind.USER_ERROR, own_settings(entry, settings).why_no_cluster()
        cluster = self._largest(entry, look)
        if request.demand is None or cluster is None:
            return FailureKind.INFEASIBLE, ""
        rules, demand = look.rules[request.cluster], request.demand
        if most := rules.max_nodes(request.cluster):
            # With so many nodes with GPUs, each new one like its largest.
            there = [node for node in cluster.nodes if node.gpus]
            largest = max(there, key=lambda node: (node.gpus, node.cpus or 0))
            more = [largest] * (most - len(there))
            cluster = replace(cluster, nodes=(*cluster.nodes, *more))
        why = why_never(demand, cluster, only=entry.only)
        for tag in sorted(request.tags & rules.limits.keys()):
            if not why and demand.gpus > (limit := rules.limits[tag]):
                why = (
                    f"the run asks for {demand.gpus} GPUs in all, and its tag {tag} may have "
                    f"{limit} at once. Ask for less, or have the limit raised"
                )
        return FailureKind.INFEASIBLE, why

    def _largest(self, entry: QueueEntry, look: Look) -> Cluster | None:
        """What there is for a run at most: of a Ray cluster what it was when it had the most GPUs,
        as a node that reboots will be back; else the table of its pool. None: nobody can say."""
        key = entry.request.cluster
        if (cluster := look.clusters.get(key)) is None:
            return None
        if key:
            cluster = max(self._largest_seen.get(key, cluster), cluster, key=_gpus)
            self._largest_seen[key] = cluster
        elif entry.pool in look.settings:
            table = {node.name for node in look.settings[entry.pool].nodes}
            nodes = tuple(node for node in cluster.nodes if node.name in table)
            cluster = replace(cluster, nodes=nodes)
        return cluster if _gpus(cluster) or (not key and cluster.nodes) else None


def _one_name_each(clusters: dict[str, Cluster], listed: Collection[str]) -> dict[str, str]:
    """Leaves each cluster in there by one of its addresses, a listed one where there is one; which,
    for the others."""
    known: dict[str, str] = {}
    names: dict[str, str] = {}
    for key in sorted(clusters, key=lambda key: (key not in listed, key)):
        if (id := clusters[key].id) and known.setdefault(id, key) != key:
            names[key] = known[id]
            del clusters[key]
    return names


def _gpus(cluster: Cluster) -> int:
    return sum(node.gpus for node in cluster.nodes)


def _rules(
    entries: Iterable[QueueEntry],
    settings: Mapping[str, PoolSettings],
    clusters: Iterable[str],
    names: Mapping[str, str],
) -> dict[str, PoolSettings]:
    """What holds on each cluster, by the pools that list it, or have a run for it."""
    users = {(entry.request.cluster, pool_of(entry, settings)) for entry in entries}
    users |= {(names.get(key, key), pool) for pool, one in settings.items() for key in one.keys}
    keys = {*clusters, *(key for key, _pool in users)}
    return {
        key: merged(settings[pool] for pool in sorted(settings) if (key, pool) in users)
        for key in keys
    }


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
    nodes: tuple[ClusterNode, ...]
    #: `used[tag]` and the limit of each tag that has one: `(used, limit)` GPUs.
    tags: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: Names of the pool's queues that are paused.
    paused_queues: tuple[str, ...] = ()
    #: Nodes that Muster has drained by itself.
    faulty: tuple[FaultyNode, ...] = ()
    #: What is wrong: a cluster that does not answer, settings that can't be read.
    troubles: tuple[str, ...] = ()


def view_of(look: Look, name: str) -> QueueView:
    """The line and the nodes of a work pool."""
    pool = look.ledger.pools.get(name)
    settings = look.settings.get(name, PoolSettings())
    queues = pool.queues.values() if pool else ()
    waiting = [
        (number, entry)
        for number, entry in enumerate(look.waiting, start=1)
        # Those of another sort of pool, or of none, are shown with each.
        if entry.pool == name or entry.pool not in look.ledger.pools
    ]
    return QueueView(
        at=look.at,
        pool=name if pool else "",
        policy=settings.policy,
        is_paused=bool(pool and pool.work_pool.is_paused),
        limit=pool.work_pool.concurrency_limit if pool else None,
        running=look.ledger.places()[name, None],
        line=tuple(_queued(look, entry, number) for number, entry in waiting),
        nodes=tuple(node for _key, nodes in sorted(look.nodes.items()) for node in nodes),
        tags={tag: (look.used(tag), most) for tag, most in sorted(settings.limits.items())},
        paused_queues=tuple(sorted(one.name for one in queues if one.is_paused)),
        faulty=tuple(one for one in settings.faulty if one.until > look.at),
        troubles=tuple(look.troubles),
    )


def _queued(look: Look, entry: QueueEntry, number: int) -> QueuedRun:
    message = look.messages.get(entry.id)
    given = {one.id: gpus for one, gpus in look.admitted}.get(entry.id)
    starts = f"starts now{f', on {commas(given)}' if given else ''}"
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
        starts_at=message.starts_at if message else look.at if given is not None else None,
        tags=tuple(sorted(entry.request.tags)),
    )


async def queue_view(client: PrefectClient, pool: str) -> QueueView:
    """The queue of a work pool, or of the runs without one where there is no such pool."""
    reader = QueueReader(client, Capacity(), Giver.me(), LedgerReader(client))
    return view_of(await reader.look(), pool)
