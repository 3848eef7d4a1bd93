"""One scheduling pass: the facts that it read, and what follows from them.

The result says which runs start, on which nodes, and why the others wait. This module does no I/O:
`scheduling_pass` reads the facts, and `gate` writes the decisions.

The ledger knows which GPUs each run was granted. The cluster knows which GPUs each run has taken.
They can differ: Ray places the groups of a run by itself, perhaps on other nodes, and the run takes
its GPUs only after some time. If they differ, a GPU counts as held rather than free, so no GPU is
granted twice.

Words for the state of a GPU in this module:

- *promised*: granted to a run, according to the ledger.
- *taken*: used by a run, according to the cluster.
- *held*: promised or taken; not free for others.
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
from tasks.queue.grants import failed_nodes, not_before
from tasks.queue.ledger import Ledger, Place, QueueEntry
from tasks.queue.nodes import NO_TABLE, bare_name
from tasks.queue.packing import Demand
from tasks.queue.policy import Held, Plan, Waiting, Why, plan
from tasks.queue.reasons import Message
from tasks.queue.settings import DEFAULT_POOL, LEFT_OUT, PoolSettings
from tasks.ray.usage import Cluster, ClusterNode
from tasks.spec.failure_kinds import FailureKind

#: Tolerance for comparing amounts. Ray counts in ten-thousandths.
_SLACK = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Who holds how much of a cluster, in the form that `plan` needs."""

    #: The nodes. All GPUs that no gang can get are included in `others_gpus`.
    nodes: tuple[ClusterNode, ...]
    #: `gpus[flow run id][node name]` that runs hold. Nodes that no longer exist are included: there
    #: the GPUs take no room, but count for limits.
    held: Mapping[UUID, Mapping[str, int]]
    #: `gpus[flow run id][node name]` of runs that took all their GPUs on other nodes than promised.
    #: Their grants can now be changed to these nodes without promising a GPU twice.
    moved: Mapping[UUID, Mapping[str, int]]


def compute_shares(cluster: Cluster, gangs: Sequence[QueueEntry]) -> Shares:
    """Work out who holds how much of a cluster.

    A run that is not in `gangs` counts as a foreign user: it belongs to another Prefect server, or
    has left something behind.

    A node never has more free GPUs than the promises alone leave. An example shows why: a run that
    is being stopped has given its GPUs back to Ray. Ray may place a later run there, although that
    run was promised other nodes. Until the first run has ended, both the promise of the first run
    and the GPUs of the later run count.

    Args:
        cluster: Snapshot of the cluster.
        gangs: The runs that hold a gang on this cluster.
    """
    node_names = [node.name for node in cluster.nodes]
    our_names = {gang.request.name for gang in gangs}
    promised = {gang.id: _current_names(gang.promised, node_names) for gang in gangs}
    taken = {gang.id: cluster.taken.get(gang.request.name, {}) for gang in gangs}
    held = {gang.id: _held(gang.demand, promised[gang.id], taken[gang.id]) for gang in gangs}

    total = {node.name: node.gpus for node in cluster.nodes}
    moved: dict[UUID, Mapping[str, int]] = {}
    for gang in gangs:
        held_now = held[gang.id]
        has_moved = (
            gang.promised
            and _has_all(gang.demand, taken[gang.id])
            and held_now != promised[gang.id]
        )
        if not has_moved:
            continue
        of_others = _sum_by_node(gpus for id, gpus in promised.items() if id != gang.id)
        if all(
            of_others.get(name, 0) + gpus <= total.get(name, 0) for name, gpus in held_now.items()
        ):
            # The grant is changed in this pass, so the nodes that were promised before are free.
            promised[gang.id] = held_now
            moved[gang.id] = held_now

    foreign = _sum_by_node(
        gpus_on for run_id, gpus_on in cluster.taken.items() if run_id not in our_names
    )
    promised_on = _sum_by_node(promised.values())
    held_on = _sum_by_node(held.values())
    flow_run_ids = {*map(str, promised)}

    def others_on(node: ClusterNode) -> float:
        leased_by_others = sum(owner not in flow_run_ids for owner in node.leased.values())
        used_by_others = node.others_gpus + foreign.get(node.name, 0.0) + leased_by_others
        only_promised = promised_on.get(node.name, 0) - held_on.get(node.name, 0)
        return max(used_by_others, only_promised)

    nodes = tuple(replace(node, others_gpus=others_on(node)) for node in cluster.nodes)
    return Shares(nodes=nodes, held=held, moved=moved)


def _held(
    demand: Demand, promised: Mapping[str, int], taken: Mapping[str, float]
) -> dict[str, int]:
    """Return the GPUs that a run holds, by node name."""
    taken_gpus = {name: math.ceil(gpus - _SLACK) for name, gpus in taken.items() if gpus > _SLACK}
    if _has_all(demand, taken):
        return taken_gpus
    # The run may still take the rest of its GPUs on the promised nodes.
    names = dict.fromkeys((*promised, *taken_gpus))
    return {name: max(promised.get(name, 0), taken_gpus.get(name, 0)) for name in names}


def _has_all(demand: Demand, taken: Mapping[str, float]) -> bool:
    """Return True if a run has taken all GPUs of its demand."""
    return sum(taken.values()) >= demand.gpus - _SLACK


def _sum_by_node(shares: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for share in shares:
        for name, gpus in share.items():
            total[name] = total.get(name, 0) + gpus
    return total


def _current_names(promised: Mapping[str, int], node_names: Iterable[str]) -> dict[str, int]:
    """Return a promise with the current names of its nodes.

    A node's name gets a suffix when a second node of that name comes, for example after a restart.
    It loses the suffix when the other node goes. If it is unclear which node is meant, all nodes of
    that name count.
    """
    existing = set(node_names)
    renamed: dict[str, int] = {}
    for name, gpus in promised.items():
        bare = bare_name(name)
        current_names = [name]
        if name not in existing:
            candidates = [bare] if name != bare else existing
            matches = [
                other for other in candidates if other in existing and bare_name(other) == bare
            ]
            current_names = matches or [name]
        for current_name in current_names:
            renamed[current_name] = renamed.get(current_name, 0) + gpus
    return renamed


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A run that can never start, and the reason."""

    entry: QueueEntry
    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPass:
    """One scheduling pass. The fields after `troubles`, and `doomed`, are filled in by the pass."""

    #: Time of the pass, in UTC epoch seconds.
    at: float
    ledger: Ledger
    #: Settings of each pool, by name.
    settings: Mapping[str, PoolSettings]
    #: Settings that apply to each cluster, by key; merged from the pools that use it.
    rules: Mapping[str, PoolSettings]
    #: All runs that wait, of all pools, in the order of the queue.
    line: Sequence[QueueEntry]
    #: The clusters that could be read, by key: the address, or "" for nodes without Ray.
    clusters: Mapping[str, Cluster]
    #: Error of each cluster that could not be read, by key.
    silent: Mapping[str, str] = field(default_factory=dict)
    #: The runs that can never start.
    doomed: list[Refused] = field(default_factory=list, init=False)
    #: Runs whose cancel was overwritten by a gate that was killed, each with its Cancelled state.
    cancelled: Sequence[tuple[QueueEntry, State[Any]]] = ()
    #: Runs that were granted or submitted, but whose worker has not started them.
    stuck: Sequence[QueueEntry] = ()
    #: Messages about problems, for people.
    troubles: Sequence[str] = ()
    #: `gpus[flow run id][node name]` that runs hold.
    held: dict[UUID, Mapping[str, int]] = field(default_factory=dict, init=False)
    #: The nodes with GPUs of each cluster, with what each run holds of them, including runs that
    #: start now.
    nodes: dict[str, Sequence[ClusterNode]] = field(default_factory=dict, init=False)
    #: Runs that start now, in this order, each with its `gpus[node name]`.
    admitted: list[tuple[QueueEntry, Mapping[str, int]]] = field(default_factory=list, init=False)
    #: `devices[flow run id][node name]` of runs that start now on nodes without Ray.
    devices: dict[UUID, Mapping[str, tuple[int, ...]]] = field(default_factory=dict, init=False)
    #: Runs that took their GPUs on other nodes than granted, each with its `gpus[node name]`.
    moved: list[tuple[QueueEntry, Mapping[str, int]]] = field(default_factory=list, init=False)
    #: For each cluster: the demand of the first run that waits for GPUs.
    heads: dict[str, Demand] = field(default_factory=dict, init=False)
    #: The reason why each other run waits, by flow run id.
    messages: dict[UUID, Message] = field(default_factory=dict, init=False)

    @property
    def waiting(self) -> list[QueueEntry]:
        """The waiting runs that can start at some time."""
        doomed_ids = {refused.entry.id for refused in self.doomed}
        return [entry for entry in self.line if entry.id not in doomed_ids]

    @property
    def holding(self) -> list[QueueEntry]:
        """The runs that have a gang or a process, and keep it."""
        lost_ids = {refused.entry.id for refused in self.doomed}
        lost_ids |= {entry.id for entry in self.stuck}
        return [entry for entry in self.ledger.holding if entry.id not in lost_ids]

    @property
    def resumed(self) -> list[QueueEntry]:
        """The runs that hold their gang, wait only for a new process, and are due."""
        return [entry for entry in self.ledger.holding if entry.goes_on and entry.is_due(self.at)]

    def may_start(self) -> int:
        """Return how many waiting runs start now, or would if there were enough free GPUs."""
        messages = (self.messages.get(entry.id) for entry in self.line)
        held_back = sum(message is not None and message.is_held_back for message in messages)
        return len(self.line) - held_back

    def used(self, tag: str) -> int:
        """Return the GPUs that runs with a tag hold, including runs that start now."""
        return self._used((tag,), self.admitted)[tag]

    def decided(self) -> SchedulingPass:
        """Make the decisions of the pass, fill them in, and return this object."""
        slots_taken = self.ledger.places()
        candidates = [entry for entry in self.waiting if not self._is_barred(entry, slots_taken)]
        held_by_cluster = {key: self._held_on(key) for key in self.clusters}

        #: Runs that could start, each with its `gpus[node name]`.
        starts: list[tuple[QueueEntry, Mapping[str, int]]] = [
            (entry, {}) for entry in candidates if entry.request.demand is None
        ]
        plans: dict[str, Plan] = {}
        for key, held in held_by_cluster.items():
            gangs = {
                str(entry.id): entry
                for entry in candidates
                if entry.request.cluster == key and entry.request.demand is not None
            }
            rules = self.rules[key]
            plans[key] = plan(
                [self._waiting(entry) for entry in gangs.values()],
                held,
                self.nodes[key],
                self.at,
                policy=rules.policy,
                limits=rules.limits,
                used=self._used(rules.limits, starts, except_on=key),
            )
            starts += [
                (gangs[id], dict.fromkeys(node_names, gangs[id].demand.gpus_per_node))
                for id, node_names in plans[key].admitted.items()
            ]
            for id, reason in plans[key].reasons.items():
                if reason.why is Why.GPUS:
                    self.heads.setdefault(key, gangs[id].demand)

        # The slots of the pools are given out in the order of the queue, over all clusters.
        starts.sort(key=lambda start: start[0].place)
        for entry, gpus in starts:
            if entry.is_scheduled:
                full = self._pool_limit_message(entry, slots_taken)
                if full is not None:
                    self.messages[entry.id] = full
                    continue
                slots_taken.update(((entry.pool, None), (entry.pool, entry.queue)))
            self.admitted.append((entry, gpus))

        self._choose_devices()
        for key in self.nodes:
            self._add_holders(key)

        names = {str(entry.id): entry.request.name for entry in (*self.waiting, *self.holding)}
        for number, entry in enumerate(candidates, start=1):
            cluster_plan = plans.get(entry.request.cluster)
            if cluster_plan is not None and str(entry.id) in cluster_plan.reasons:
                self._explain(entry, number, cluster_plan, names)
        return self

    def _used(
        self,
        tags: Iterable[str],
        starts: Iterable[tuple[QueueEntry, Mapping[str, int]]],
        *,
        except_on: str | None = None,
    ) -> dict[str, int]:
        """Return the GPUs that runs with each tag hold or get, except those on one cluster."""
        used = dict.fromkeys(tags, 0)
        holding = ((entry, self.held.get(entry.id, {})) for entry in self.holding)
        for entry, gpus in (*holding, *starts):
            if entry.request.cluster != except_on:
                for tag in used.keys() & entry.request.tags:
                    used[tag] += sum(gpus.values())
        return used

    def wanted(self, key: str, most: int) -> list[dict[str, float]]:
        """Return the nodes that a cluster's autoscaler should provide, one bundle for each node.

        These are the nodes on which gangs run. If a run waits for GPUs, they are all nodes, and the
        nodes that the run lacks.

        Args:
            key: Key of the cluster.
            most: Largest number of nodes.
        """
        nodes = self.nodes[key]
        head = self.heads.get(key)
        accelerator = self.clusters[key].accelerator
        bundles = [{accelerator: float(node.gpus)} for node in nodes if head or node.held]
        if head is not None:
            sufficient = sum(node.free_gpus >= head.gpus_per_node for node in nodes)
            new_node = {accelerator: float(head.gpus_per_node), "CPU": float(head.cpus_per_node)}
            bundles += [new_node] * min(head.nodes - sufficient, most - len(nodes))
        return bundles

    def _is_barred(self, entry: QueueEntry, slots_taken: Counter[Place]) -> bool:
        """Return True if a run cannot start whatever is free. Its message is filled in.

        Such a run does not block later runs.
        """
        demand = entry.request.demand
        key = entry.request.cluster
        pool = self.ledger.pools.get(entry.pool)
        if key == LEFT_OUT:
            message = reasons.no_answer_message(
                demand, key, own_settings(entry, self.settings).why_no_cluster()
            )
        elif demand is not None and key not in self.clusters:
            message = reasons.no_answer_message(demand, key, self.silent.get(key, ""))
        elif pool is None or not entry.is_scheduled:
            return False
        elif pool.work_pool.is_paused:
            message = reasons.paused_message(demand, pool.name)
        elif (queue := pool.queue_of(entry.flow_run)) is not None and queue.is_paused:
            message = reasons.paused_message(demand, pool.name, queue.name)
        elif queue is not None and queue.status is WorkQueueStatus.NOT_READY:
            message = reasons.unserved_message(demand, pool.name, queue.name)
        elif (full := self._pool_limit_message(entry, slots_taken)) is not None:
            message = full
        elif entry.is_of_processes and not self.settings[pool.name].nodes:
            message = reasons.no_answer_message(demand, key, NO_TABLE)
        else:
            return False
        self.messages[entry.id] = message
        return True

    def _pool_limit_message(self, entry: QueueEntry, slots_taken: Counter[Place]) -> Message | None:
        """Return the reason if the run's pool, or its queue in the pool, has no free slot."""
        pool = self.ledger.pools.get(entry.pool)
        if pool is None:
            return None
        limits: dict[str | None, int | None] = {None: pool.work_pool.concurrency_limit}
        limits |= {queue.name: queue.concurrency_limit for queue in pool.queues.values()}
        for queue_name in (None, entry.queue):
            limit = limits.get(queue_name)
            if limit is not None and slots_taken[pool.name, queue_name] >= limit:
                name = pool.name if queue_name is None else f"{pool.name}/{queue_name}"
                return reasons.pool_limit_message(entry.request.demand, name, limit)
        return None

    def _choose_devices(self) -> None:
        """Choose the devices of runs that start on nodes without Ray: the lowest free numbers."""
        nodes = self.nodes.get("", ())
        free = {node.name: set(node.devices) - node.leased.keys() for node in nodes if node.devices}
        for entry in self.holding:
            granted_devices = entry.grant.devices if entry.grant else {}
            for name, devices in granted_devices.items():
                free.get(name, set()).difference_update(devices)
        for entry, gpus in self.admitted:
            if not entry.is_of_processes:
                continue
            chosen = {}
            for name, count in gpus.items():
                if name in free:
                    chosen[name] = tuple(sorted(free[name])[:count])
                    free[name].difference_update(chosen[name])
            self.devices[entry.id] = chosen

    def _held_on(self, key: str) -> list[Held]:
        """Return the gangs on a cluster, and fill in its nodes, `held` and `moved`."""
        gangs = [
            entry
            for entry in self.holding
            if entry.request.cluster == key
            and entry.request.demand is not None
            # A run that started without a grant has no gang until the cluster shows its GPUs.
            and (entry.grant is not None or key)
        ]
        # A node without GPUs, such as some heads, is no place for a gang.
        nodes = tuple(node for node in self.clusters[key].nodes if node.gpus)
        shares = compute_shares(replace(self.clusters[key], nodes=nodes), gangs)
        self.nodes[key] = shares.nodes
        self.moved.extend(
            (gang, shares.moved[gang.id]) for gang in gangs if gang.id in shares.moved
        )
        self.held.update(shares.held)

        def started_at(entry: QueueEntry) -> float:
            granted_at = entry.grant.at if entry.grant is not None else 0.0
            return granted_at or (entry.flow_run.start_time or entry.since).timestamp()

        return [
            Held(
                id=str(entry.id),
                gpus=shares.held[entry.id],
                cpus_per_gpu=entry.demand.cpus_per_gpu,
                place=entry.place,
                # A run that exceeds its estimate is expected to end now. Otherwise the reservation
                # of the head would move into the past.
                ends_at=max(self.at, started_at(entry) + entry.request.estimate_s),
                tags=entry.request.tags,
            )
            for entry in gangs
        ]

    def _add_holders(self, key: str) -> None:
        """Add to the nodes of a cluster which runs hold their GPUs."""
        held: dict[str, dict[str, int]] = defaultdict(dict)
        holding = ((entry, self.held.get(entry.id, {})) for entry in self.ledger.holding)
        for entry, gpus_on in (*holding, *self.admitted):
            if entry.request.cluster != key:
                continue
            for name, gpus in gpus_on.items():
                if gpus:
                    held[name][entry.request.name] = gpus
        self.nodes[key] = [
            replace(node, cluster=key, held=held[node.name]) for node in self.nodes[key]
        ]

    def _waiting(self, entry: QueueEntry) -> Waiting:
        """Return the entry in the form that `plan` needs."""
        return Waiting(
            id=str(entry.id),
            demand=entry.demand,
            place=entry.place,
            estimate_s=entry.request.estimate_s,
            not_before=not_before(entry.flow_run),
            tags=entry.request.tags,
            among=self._usable_nodes(entry),
            avoid=frozenset(failed_nodes(entry.flow_run)),
        )

    def _usable_nodes(self, entry: QueueEntry) -> frozenset[str] | None:
        """Return the names of the nodes on which a worker can start the run, or None for all."""
        if entry.only:
            return frozenset((entry.only,))
        pool = self.ledger.pools.get(entry.pool)
        if not entry.is_of_processes or pool is None:
            return None
        table_names = self._table_names(entry)
        return table_names & pool.hosts if pool.hosts else table_names

    def _table_names(self, entry: QueueEntry) -> frozenset[str]:
        """Return the names of the node table of the run's pool, if the run needs that table."""
        if not entry.is_of_processes or entry.only or entry.pool not in self.settings:
            return frozenset()
        return frozenset(node.name for node in self.settings[entry.pool].nodes)

    def _explain(
        self, entry: QueueEntry, number: int, plan: Plan, names: Mapping[str, str]
    ) -> None:
        """Fill in why the policy does not start a run."""
        reason = plan.reasons[str(entry.id)]
        key = entry.request.cluster
        usable = self._usable_nodes(entry)
        free = {name: gpus for name, gpus in plan.free.items() if usable is None or name in usable}
        unserved_names = self._table_names(entry) - free.keys()
        self.messages[entry.id] = reasons.explain_wait(
            entry.request.demand,
            reason,
            names,
            free=free,
            unserved_free={
                name: gpus for name, gpus in plan.free.items() if name in unserved_names
            },
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
    """Return the name of the pool whose settings apply to a run."""
    return entry.pool if entry.pool in settings else DEFAULT_POOL


def own_settings(entry: QueueEntry, settings: Mapping[str, PoolSettings]) -> PoolSettings:
    """Return the settings that apply to a run."""
    return settings.get(pool_of(entry, settings), PoolSettings())


def find_overgranted(
    holding: Iterable[QueueEntry], clusters: Mapping[str, Cluster]
) -> list[QueueEntry]:
    """Return the runs without a process whose grant promises what another run already has.

    Such a grant was written late, after its gate had lost the lease.
    """
    free_gpus = {(key, node.name): node.gpus for key in clusters for node in clusters[key].nodes}
    used_devices: set[tuple[str, int]] = set()

    # Runs with a process come first because they keep what they have; then the older grants.
    granted = [
        (entry.is_scheduled and not entry.goes_on, entry.grant.at, entry, entry.grant)
        for entry in holding
        if entry.grant is not None
    ]
    granted.sort(key=lambda item: item[:2])

    overgranted_runs = []
    for is_unstarted, _, entry, grant in granted:
        gpus_on = {(entry.request.cluster, name): gpus for name, gpus in grant.nodes.items()}
        devices = {(name, device) for name, numbers in grant.devices.items() for device in numbers}
        exceeds_node = any(gpus > free_gpus.get(node, gpus) for node, gpus in gpus_on.items())
        if is_unstarted and (exceeds_node or not used_devices.isdisjoint(devices)):
            overgranted_runs.append(entry)
            continue
        used_devices |= devices
        for node in gpus_on.keys() & free_gpus.keys():
            free_gpus[node] -= gpus_on[node]
    return overgranted_runs
