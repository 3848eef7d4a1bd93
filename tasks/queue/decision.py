"""What is decided in one look: which runs start, on which nodes, and why the others do not.

No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from tasks.queue import reasons
from tasks.queue.capacity import GangHold, as_promised, free_of, moved
from tasks.queue.grants import not_before
from tasks.queue.ledger import Entry, Ledger, Pool
from tasks.queue.nodes import Cluster
from tasks.queue.policy import Held, NodeFree, Plan, Waiting, estimate_s, plan
from tasks.queue.reasons import Message
from tasks.queue.settings import PoolSettings


class Decision:
    """What is decided in one look."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        pool: Pool | None,
        settings: PoolSettings,
        clusters: Mapping[str, Cluster],
        silent: Mapping[str, str],
        holding: Sequence[Entry],
        now: float,
    ) -> None:
        self.held: dict[UUID, Mapping[str, int]] = {}
        self.free: dict[str, Mapping[str, int]] = {}
        self.admitted: list[tuple[Entry, Mapping[str, int]]] = []
        #: What has taken its GPUs elsewhere than it was granted them.
        self.moved: list[tuple[Entry, Mapping[str, int]]] = []
        self.messages: dict[UUID, Message] = {}
        self.starts_at: dict[UUID, float] = {}
        self._ledger = ledger
        self._pool = pool
        self._settings = settings
        self._clusters = clusters
        self._silent = silent
        self._holding = holding
        self._now = now

    def decide(self, line: Sequence[Entry]) -> None:
        able = [entry for entry in line if not self._is_barred(entry)]
        nodes = {key: self._nodes_of(key) for key in self._clusters}
        start: list[tuple[Entry, Mapping[str, int]]] = [
            (entry, {}) for entry in able if entry.ask.demand is None
        ]
        plans: dict[str, Plan] = {}
        for key, (free, held) in nodes.items():
            here = [e for e in able if e.ask.demand is not None and e.ask.cluster == key]
            plans[key] = self._plan(here, free, held)
            by_id = {str(entry.id): entry for entry in here}
            for id, places in plans[key].admitted.items():
                demand = by_id[id].ask.demand
                gpus = demand.gpus_per_node if demand else 0
                start.append((by_id[id], dict.fromkeys(places, gpus)))
            self.free[key] = plans[key].free
        start.sort(key=lambda one: one[0].place)
        self._take_places(start)
        names = {str(e.id): e.ask.name for e in (*line, *self._holding)}
        for number, entry in enumerate(able, start=1):
            key = entry.ask.cluster
            if key in plans and str(entry.id) in plans[key].reasons:
                self._explain(entry, number, plans[key], names)

    def _is_barred(self, entry: Entry) -> bool:
        """Whether it can't start whatever is free; says why, and holds up nobody."""
        demand, pool = entry.ask.demand, self._pool
        message: Message | None = None
        if demand is not None and entry.ask.cluster not in self._clusters:
            why = self._silent.get(entry.ask.cluster, "")
            message = reasons.no_answer(demand, entry.ask.cluster, why)
        elif pool is not None and entry.pool == pool.name and entry.is_scheduled:
            queue = pool.queues.get(entry.flow_run.work_queue_id or UUID(int=0))
            if pool.work_pool.is_paused:
                message = reasons.paused(demand, pool.name)
            elif queue is not None and queue.is_paused:
                message = reasons.paused(demand, pool.name, queue.name)
            else:
                message = self._full(entry, self._places_left(), self._places_left(entry.queue))
        if message is not None:
            self.messages[entry.id] = message
        return message is not None

    def _places_left(self, queue: str | None = None) -> int | None:
        """How many more runs the pool, or one of its queues, may run; None: any number."""
        if self._pool is None:
            return None
        limit = self._pool.work_pool.concurrency_limit
        if queue is not None:
            of_name = [q for q in self._pool.queues.values() if q.name == queue]
            limit = of_name[0].concurrency_limit if of_name else None
        if limit is None:
            return None
        return max(0, limit - self._ledger.running_in(self._pool.name, queue))

    def _full(self, entry: Entry, in_pool: int | None, in_queue: int | None) -> Message | None:
        """Why a run waits where its pool, or its queue of the pool, has so many places left."""
        pool = self._pool
        if pool is None or 0 not in (in_pool, in_queue):
            return None
        if in_pool == 0:
            limit = pool.work_pool.concurrency_limit or 0
            return reasons.at_pool_limit(entry.ask.demand, pool.name, limit)
        queue = pool.queues.get(entry.flow_run.work_queue_id or UUID(int=0))
        limit = (queue.concurrency_limit if queue else 0) or 0
        return reasons.at_pool_limit(entry.ask.demand, f"{pool.name}/{entry.queue}", limit)

    def _take_places(self, start: Sequence[tuple[Entry, Mapping[str, int]]]) -> None:
        left: dict[str | None, int | None] = {None: self._places_left()}
        for entry, gpus in start:
            if entry.is_scheduled:
                for key in (None, entry.queue):
                    if key not in left:
                        left[key] = self._places_left(key)
                if (full := self._full(entry, left[None], left[entry.queue])) is not None:
                    self.messages[entry.id] = full
                    continue
                for key in (None, entry.queue):
                    count = left[key]
                    left[key] = None if count is None else count - 1
            self.admitted.append((entry, gpus))

    def _nodes_of(self, key: str) -> tuple[tuple[NodeFree, ...], list[Held]]:
        cluster = self._clusters[key]
        here = {
            entry.ask.name: entry
            for entry in self._holding
            if entry.ask.cluster == key and entry.ask.demand is not None and _has_gang(entry)
        }
        # A head without GPUs is no place for a gang, and nothing to show.
        cluster = replace(cluster, nodes=tuple(node for node in cluster.nodes if node.gpus))
        holds = [
            GangHold(
                run_id=name,
                gpus=entry.grant.nodes if entry.grant else {},
                demand=entry.ask.demand,
            )
            for name, entry in here.items()
            if entry.ask.demand is not None
        ]
        nodes, gpus = free_of(cluster, holds)
        nodes = as_promised(cluster, nodes, gpus, holds)
        for name, on in moved(cluster, gpus, holds).items():
            self.moved.append((here[name], on))
        held = []
        for name, entry in here.items():
            self.held[entry.id] = gpus[name]
            demand = entry.ask.demand
            held.append(
                Held(
                    id=str(entry.id),
                    gpus=gpus[name],
                    cpus_per_gpu=demand.cpus_per_gpu if demand else 0.0,
                    place=entry.place,
                    ends_at=self._ends_at(entry),
                    tags=entry.ask.tags,
                )
            )
        return nodes, held

    def _plan(
        self, waiting: Sequence[Entry], nodes: Sequence[NodeFree], held: Sequence[Held]
    ) -> Plan:
        return plan(
            [
                Waiting(
                    id=str(entry.id),
                    demand=entry.ask.demand,
                    place=entry.place,
                    estimate_s=estimate_s(entry.ask.hours),
                    not_before=self._not_before(entry),
                    tags=entry.ask.tags,
                )
                for entry in waiting
                if entry.ask.demand is not None
            ],
            held,
            nodes,
            self._now,
            policy=self._settings.policy,
            limits=self._settings.limits,
        )

    def _ends_at(self, entry: Entry) -> float:
        since = entry.since.timestamp()
        return since + estimate_s(entry.ask.hours, max(0.0, self._now - since))

    def _not_before(self, entry: Entry) -> float:
        cluster = self._clusters[entry.ask.cluster]
        return not_before(entry.flow_run, room_is_told=cluster.is_live)

    def _explain(self, entry: Entry, number: int, plan: Plan, names: Mapping[str, str]) -> None:
        reason = plan.reasons[str(entry.id)]
        cluster = self._clusters[entry.ask.cluster]
        limit = None
        if reason.tag:
            limit = (self.used(reason.tag), self._settings.limits.get(reason.tag, 0))
        drained = {
            node.name: max(0, int(node.gpus - node.others_gpus) - self._held_on(node.name))
            for node in cluster.nodes
            if node.is_drained
        }
        self.messages[entry.id] = reasons.message_of(
            entry.ask.demand,
            reason,
            names,
            room=reasons.Room(
                free=plan.free,
                drained=drained,
                others=sum(node.others_gpus for node in cluster.nodes),
            ),
            now=self._now,
            number=number,
            limit=limit,
            not_before=self._not_before(entry) or None,
        )
        if reason.starts_at is not None:
            self.starts_at[entry.id] = reason.starts_at

    def used(self, tag: str) -> int:
        """GPUs of the runs with a tag, those that start now included."""
        held = (self.held.get(one.id, {}) for one in self._holding if tag in one.ask.tags)
        starting = (gpus for entry, gpus in self.admitted if tag in entry.ask.tags)
        return sum(sum(gpus.values()) for gpus in (*held, *starting))

    def _held_on(self, node: str) -> int:
        return sum(gpus.get(node, 0) for gpus in self.held.values())


def _has_gang(entry: Entry) -> bool:
    """A run that began past the gate has none, until the cluster shows what it has taken."""
    return entry.grant is not None or bool(entry.ask.cluster)
