"""One look at the queue: what it found, and what follows: which runs start, on which nodes, and why
the others do not. No I/O: `look` reads what is decided on, and `gate` writes what was decided.

The ledger knows what each run of ours was promised; the cluster knows what it has really taken,
which may be on other nodes than promised, as Ray places its groups by itself, or not yet. Where the
two differ, more is counted as held rather than less: no GPU is promised twice.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from prefect.client.schemas.objects import State, WorkQueueStatus

from tasks.queue import reasons
from tasks.queue.grants import failed_on, not_before
from tasks.queue.ledger import Ledger, Place, QueueEntry
from tasks.queue.nodes import NO_TABLE, bare_name
from tasks.queue.packing import Demand
from tasks.queue.policy import Held, Plan, Waiting, Why, plan
from tasks.queue.reasons import Message
from tasks.queue.settings import DEFAULT_POOL, LEFT_OUT, PoolSettings
from tasks.ray.usage import Cluster, ClusterNode
from tasks.spec.failure_kinds import FailureKind

#: Ray counts in ten-thousandths.
_SLACK = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Who has what of a cluster, as `plan` takes it."""

    #: With all that gangs can't have among what others use.
    nodes: tuple[ClusterNode, ...]
    #: `held[flow run id][node name]` GPUs. A promise on a node that is not there any more stays: it
    #: takes no room, and counts for limits.
    held: Mapping[UUID, Mapping[str, int]]
    #: `moved[flow run id][node name]` GPUs: runs that are wholly elsewhere than they were promised,
    #: as soon as their promise can be changed to that without promising any GPU twice.
    moved: Mapping[UUID, Mapping[str, int]]


def shares_of(cluster: Cluster, gangs: Sequence[QueueEntry]) -> Shares:
    """Who has what of a cluster.

    A run of ours that is none of `gangs` is one of the others: it belongs to another server, or has
    left something behind. No node has more free than by the promises alone: a run that is being
    taken down has given its GPUs back to Ray already, and Ray may have put a later run there, which
    was promised others. Until the first one has ended, both count.
    """
    names = [node.name for node in cluster.nodes]
    names, ours = [node.name for node in cluster.nodes], {gang.request.name for gang in gangs}
    promised = {gang.id: _present(gang.promised, names) for gang in gangs}
    taken = {gang.id: cluster.taken.get(gang.request.name, {}) for gang in gangs}
    held = {one.id: _held(one.demand, promised[one.id], taken[one.id]) for one in gangs}
    total, moved = {node.name: node.gpus for node in cluster.nodes}, {}
    for gang in gangs:
        id, now = gang.id, held[gang.id]
        if gang.promised and _has_all(gang.demand, taken[id]) and now != promised[id]:
            others = _sum(one for other, one in promised.items() if other != id)
            if all(others.get(name, 0) + gpus <= total.get(name, 0) for name, gpus in now.items()):
                # Its promise is changed in this very look: what it had been promised is free.
                moved[id] = promised[id] = now
    foreign = _sum(on for run_id, on in cluster.taken.items() if run_id not in ours)
    promised_on, held_on = _sum(promised.values()), _sum(held.values())
    flow_runs = {*map(str, promised)}

    def others_on(node: ClusterNode) -> float:
        leased = sum(owner not in flow_runs for owner in node.leased.values())
        used = node.others_gpus + foreign.get(node.name, 0.0) + leased
        return max(used, promised_on.get(node.name, 0) - held_on.get(node.name, 0))

    nodes = tuple(replace(node, others_gpus=others_on(node)) for node in cluster.nodes)
    return Shares(nodes=nodes, held=held, moved=moved)


def _held(
    demand: Demand, promised: Mapping[str, int], taken: Mapping[str, float]
) -> dict[str, int]:
    whole = {name: math.ceil(gpus - _SLACK) for name, gpus in taken.items() if gpus > _SLACK}
    if _has_all(demand, taken):
        return whole
    # It may still take the rest where it was promised.
    names = dict.fromkeys((*promised, *whole))
    return {name: max(promised.get(name, 0), whole.get(name, 0)) for name in names}


def _has_all(demand: Demand, taken: Mapping[str, float]) -> bool:
    return sum(taken.values()) >= demand.gpus - _SLACK


def _sum(shares: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """GPUs by node."""
    found: dict[str, float] = {}
    for share in shares:
        for name, gpus in share.items():
            found[name] = found.get(name, 0) + gpus
    return found


def _present(promised: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """The promise by the names that the nodes have now: one gets its suffix when a second node of
    that name comes, as one that was restarted, and loses it when the other one goes."""
    there = set(names)
    found: dict[str, int] = {}
    for name, gpus in promised.items():
        bare = bare_name(name)
        now = [name]
        if name not in there:
            others = [bare] if name != bare else there
            now = [one for one in others if one in there and bare_name(one) == bare] or now
        for one in now:
            found[one] = found.get(one, 0) + gpus
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A run that can never start."""

    entry: QueueEntry
    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look found, and from `decided` on what is to be done about it."""

    #: UTC epoch seconds.
    at: float
    ledger: Ledger
    #: By pool.
    settings: Mapping[str, PoolSettings]
    #: By cluster: what the pools say that use it.
    rules: Mapping[str, PoolSettings]
    #: Every run that waits, in the order of the line, whatever its pool.
    line: Sequence[QueueEntry]
    #: By key, the address or nothing: those that could be looked at.
    clusters: Mapping[str, Cluster]
    #: By key, why the others could not.
    silent: Mapping[str, str] = field(default_factory=dict)
    doomed: list[Refused] = field(default_factory=list, init=False)
    #: They were cancelled, and a gate that was lost has written over it: the cancel each.
    cancelled: Sequence[tuple[QueueEntry, State[Any]]] = ()
    #: Granted or submitted by a worker that has not come further with them.
    stuck: Sequence[QueueEntry] = ()
    troubles: Sequence[str] = ()
    #: What the runs of ours hold: `held[flow run id][node name]` GPUs.
    held: dict[UUID, Mapping[str, int]] = field(default_factory=dict, init=False)
    #: Those with GPUs, by cluster, with what each run has of them, those that start now included.
    nodes: dict[str, Sequence[ClusterNode]] = field(default_factory=dict, init=False)
    #: To start now, in this order: `gpus[node name]` each.
    admitted: list[tuple[QueueEntry, Mapping[str, int]]] = field(default_factory=list, init=False)
    #: `devices[flow run id][node name]` of those, where nobody else gives them.
    devices: dict[UUID, Mapping[str, tuple[int, ...]]] = field(default_factory=dict, init=False)
    #: They have taken their GPUs elsewhere than they were granted them: `gpus[node name]` each.
    moved: list[tuple[QueueEntry, Mapping[str, int]]] = field(default_factory=list, init=False)
    #: By cluster, what the first asks for that waits for GPUs.
    heads: dict[str, Demand] = field(default_factory=dict, init=False)
    #: Why each of the others waits, by flow run id.
    messages: dict[UUID, Message] = field(default_factory=dict, init=False)

    @property
    def waiting(self) -> list[QueueEntry]:
        """Those of the line that can start some time."""
        doomed = {one.entry.id for one in self.doomed}
        return [entry for entry in self.line if entry.id not in doomed]

    @property
    def holding(self) -> list[QueueEntry]:
        """The runs that have a gang, or a process, and keep it."""
        lost = {one.entry.id for one in self.doomed} | {entry.id for entry in self.stuck}
        return [entry for entry in self.ledger.holding if entry.id not in lost]

    @property
    def resumed(self) -> list[QueueEntry]:
        """They have their gang, and wait for a new process only, which is due."""
        return [entry for entry in self.ledger.holding if entry.goes_on and entry.is_due(self.at)]

    def may_start(self) -> int:
        """How many of the line start, or would if there were room."""
        told = (self.messages.get(entry.id) for entry in self.line)
        return len(self.line) - sum(one is not None and one.is_held_back for one in told)

    def used(self, tag: str) -> int:
        """GPUs of the runs with a tag, those that start now included."""
        return self._used((tag,), self.admitted)[tag]

    def decided(self) -> Look:
        """The same look, with what is to be done."""
        taken = self.ledger.places()
        able = [entry for entry in self.waiting if not self._is_barred(entry, taken)]
        here = {key: self._shares_on(key) for key in self.clusters}
        start: list[tuple[QueueEntry, Mapping[str, int]]] = [
            (entry, {}) for entry in able if entry.request.demand is None
        ]
        plans: dict[str, Plan] = {}
        for key, held in here.items():
            gangs = {
                str(entry.id): entry
                for entry in able
                if entry.request.cluster == key and entry.request.demand is not None
            }
            plans[key] = plan(
                [self._waiting(entry) for entry in gangs.values()],
                held,
                self.nodes[key],
                self.at,
                policy=self.rules[key].policy,
                limits=self.rules[key].limits,
                used=self._used(self.rules[key].limits, start, beside=key),
            )
            start += [
                (gangs[id], dict.fromkeys(places, gangs[id].demand.gpus_per_node))
                for id, places in plans[key].admitted.items()
            ]
            for id, reason in plans[key].reasons.items():
                if reason.why is Why.GPUS:
                    self.heads.setdefault(key, gangs[id].demand)
        start.sort(key=lambda one: one[0].place)
        for entry, gpus in start:
            if entry.is_scheduled:
                if (full := self._full(entry, taken)) is not None:
                    self.messages[entry.id] = full
                    continue
                taken.update(((entry.pool, None), (entry.pool, entry.queue)))
            self.admitted.append((entry, gpus))
        self._number_devices()
        for key in self.nodes:
            self._note_holders(key)
        names = {str(e.id): e.request.name for e in (*self.waiting, *self.holding)}
        for number, entry in enumerate(able, start=1):
            made = plans.get(entry.request.cluster)
            if made is not None and str(entry.id) in made.reasons:
                self._explain(entry, number, made, names)
        return self

    def _used(
        self,
        tags: Iterable[str],
        start: Iterable[tuple[QueueEntry, Mapping[str, int]]],
        *,
        beside: str | None = None,
    ) -> dict[str, int]:
        """GPUs of each tag, of what holds and what is to start, but on the cluster `beside`."""
        used = dict.fromkeys(tags, 0)
        have = ((entry, self.held.get(entry.id, {})) for entry in self.holding)
        for entry, gpus in (*have, *start):
            if entry.request.cluster != beside:
                for tag in used.keys() & entry.request.tags:
                    used[tag] += sum(gpus.values())
        return used

    def wanted(self, key: str, most: int) -> list[dict[str, float]]:
        """What the nodes of a cluster are to have, a bundle a node: those that gangs are on; and
        where one waits for GPUs, all of them, and as many more as it lacks, `most` at most."""
        nodes, head = self.nodes[key], self.heads.get(key)
        kind = self.clusters[key].accelerator
        wanted = [{kind: float(node.gpus)} for node in nodes if head or node.held]
        if head is not None:
            fit = sum(node.free_gpus >= head.gpus_per_node for node in nodes)
            new = {kind: float(head.gpus_per_node), "CPU": float(head.cpus_per_node)}
            wanted += [new] * min(head.nodes - fit, most - len(nodes))
        return wanted

    def _is_barred(self, entry: QueueEntry, taken: Counter[Place]) -> bool:
        """Whether it can't start whatever is free; says why, and holds up nobody."""
        demand, key = entry.request.demand, entry.request.cluster
        pool = self.ledger.pools.get(entry.pool)
        if key == LEFT_OUT:
            message = reasons.no_answer(
                demand, key, own_settings(entry, self.settings).why_no_cluster()
            )
        elif demand is not None and key not in self.clusters:
            message = reasons.no_answer(demand, key, self.silent.get(key, ""))
        elif pool is None or not entry.is_scheduled:
            return False
        elif pool.work_pool.is_paused:
            message = reasons.paused(demand, pool.name)
        elif (queue := pool.queue_of(entry.flow_run)) is not None and queue.is_paused:
            message = reasons.paused(demand, pool.name, queue.name)
        elif queue is not None and queue.status is WorkQueueStatus.NOT_READY:
            message = reasons.unserved(demand, pool.name, queue.name)
        elif (full := self._full(entry, taken)) is not None:
            message = full
        elif entry.is_of_processes and not self.settings[pool.name].nodes:
            message = reasons.no_answer(demand, key, NO_TABLE)
        else:
            return False
        self.messages[entry.id] = message
        return True

    def _full(self, entry: QueueEntry, taken: Counter[Place]) -> Message | None:
        """Why a run waits whose pool, or whose queue of the pool, runs as many as it may."""
        if (pool := self.ledger.pools.get(entry.pool)) is None:
            return None
        limits: dict[str | None, int | None] = {None: pool.work_pool.concurrency_limit}
        limits |= {one.name: one.concurrency_limit for one in pool.queues.values()}
        for queue in (None, entry.queue):
            limit = limits.get(queue)
            if limit is not None and taken[pool.name, queue] >= limit:
                name = pool.name if queue is None else f"{pool.name}/{queue}"
                return reasons.at_pool_limit(entry.request.demand, name, limit)
        return None

    def _number_devices(self) -> None:
        """Give those that start the lowest devices that nobody has."""
        nodes = self.nodes.get("", ())
        free = {node.name: set(node.devices) - node.leased.keys() for node in nodes if node.devices}
        for entry in self.holding:
            for name, has in (entry.grant.devices if entry.grant else {}).items():
                free.get(name, set()).difference_update(has)
        for entry, gpus in self.admitted:
            if entry.is_of_processes:
                there = {name: count for name, count in gpus.items() if name in free}
                given = {name: tuple(sorted(free[name])[:n]) for name, n in there.items()}
                for name, has in given.items():
                    free[name].difference_update(has)
                self.devices[entry.id] = given

    def _shares_on(self, key: str) -> list[Held]:
        """Who has what of a cluster; its nodes as they are beside that are noted."""
        here = [
            entry
            for entry in self.holding
            if entry.request.cluster == key
            and entry.request.demand is not None
            # A run that began past the gate has no gang, until the cluster shows what it has taken.
            and (entry.grant is not None or key)
        ]
        # A head without GPUs is no place for a gang, and nothing to show.
        nodes = tuple(node for node in self.clusters[key].nodes if node.gpus)
        shares = shares_of(replace(self.clusters[key], nodes=nodes), here)
        self.nodes[key] = shares.nodes
        self.moved.extend((one, shares.moved[one.id]) for one in here if one.id in shares.moved)
        self.held.update(shares.held)

        def began(entry: QueueEntry) -> float:
            granted = entry.grant.at if entry.grant is not None else 0.0
            return granted or (entry.flow_run.start_time or entry.since).timestamp()

        return [
            Held(
                id=str(entry.id),
                gpus=shares.held[entry.id],
                cpus_per_gpu=entry.demand.cpus_per_gpu,
                place=entry.place,
                # One that outruns its estimate ends now: the head's reservation never moves back.
                ends_at=max(self.at, began(entry) + entry.request.estimate_s),
                tags=entry.request.tags,
            )
            for entry in here
        ]

    def _note_holders(self, key: str) -> None:
        held: dict[str, dict[str, int]] = defaultdict(dict)
        have = ((entry, self.held.get(entry.id, {})) for entry in self.ledger.holding)
        for entry, given in (*have, *self.admitted):
            if entry.request.cluster == key:
                for name, gpus in given.items():
                    held[name] |= {entry.request.name: gpus} if gpus else {}
        self.nodes[key] = [
            replace(node, cluster=key, held=held[node.name]) for node in self.nodes[key]
        ]

    def _waiting(self, entry: QueueEntry) -> Waiting:
        return Waiting(
            id=str(entry.id),
            demand=entry.demand,
            place=entry.place,
            estimate_s=entry.request.estimate_s,
            not_before=not_before(entry.flow_run),
            tags=entry.request.tags,
            among=self._among(entry),
            avoid=frozenset(failed_on(entry.flow_run)),
        )

    def _among(self, entry: QueueEntry) -> frozenset[str] | None:
        """The nodes whose hosts can start it; None: any."""
        if entry.only:
            return frozenset((entry.only,))
        if not entry.is_of_processes or (pool := self.ledger.pools.get(entry.pool)) is None:
            return None
        table = self._table_of(entry)
        return table & pool.hosts if pool.hosts else table

    def _table_of(self, entry: QueueEntry) -> frozenset[str]:
        """The nodes that its pool has for processes like its own."""
        has_any = entry.is_of_processes and not entry.only and entry.pool in self.settings
        table = self.settings[entry.pool].nodes if has_any else ()
        return frozenset(node.name for node in table)

    def _explain(
        self, entry: QueueEntry, number: int, plan: Plan, names: Mapping[str, str]
    ) -> None:
        reason, key, among = plan.reasons[str(entry.id)], entry.request.cluster, self._among(entry)
        free = {name: gpus for name, gpus in plan.free.items() if among is None or name in among}
        table = self._table_of(entry) - free.keys()
        self.messages[entry.id] = reasons.message_of(
            entry.request.demand,
            reason,
            names,
            free=free,
            unserved={name: gpus for name, gpus in plan.free.items() if name in table},
            pool=entry.pool,
            drained={
                node.name: replace(node, is_drained=False).free_gpus
                for node in self.nodes[key]
                if node.is_drained
            },
            others=sum(node.others_gpus for node in self.nodes[key]),
            now=self.at,
            number=number,
            limit=self.rules[key].limits.get(reason.tag, 0),
            not_before=not_before(entry.flow_run) or None,
        )


def pool_of(entry: QueueEntry, settings: Mapping[str, PoolSettings]) -> str:
    """The pool by whose settings a run waits."""
    return entry.pool if entry.pool in settings else DEFAULT_POOL


def own_settings(entry: QueueEntry, settings: Mapping[str, PoolSettings]) -> PoolSettings:
    return settings.get(pool_of(entry, settings), PoolSettings())


def overgranted(holding: Iterable[QueueEntry], clusters: Mapping[str, Cluster]) -> list[QueueEntry]:
    """The runs without a process yet whose grant promises what another one has: it came late to the
    ledger, when its gate had lost the lease."""
    room = {(key, one.name): one.gpus for key in clusters for one in clusters[key].nodes}
    devices: set[tuple[str, int]] = set()
    over = []
    granted = [
        (entry.is_scheduled and not entry.goes_on, entry.grant.at, entry, entry.grant)
        for entry in holding
        if entry.grant is not None
    ]
    for is_to_start, _at, entry, grant in sorted(granted, key=lambda one: one[:2]):
        wants = {(entry.request.cluster, name): gpus for name, gpus in grant.nodes.items()}
        numbered = {(name, one) for name, some in grant.devices.items() for one in some}
        too_much = any(gpus > room.get(node, gpus) for node, gpus in wants.items())
        if is_to_start and (too_much or not devices.isdisjoint(numbered)):
            over.append(entry)
            continue
        devices |= numbered
        for node in wants.keys() & room.keys():
            room[node] -= wants[node]
    return over
