"""One scheduling pass: its input facts, and the decisions that follow from these facts.

The decisions are which runs start, on which nodes, and why each other run waits. This module does
no I/O. The module `scheduling_pass` reads the facts, and the module `scheduler` writes the
decisions.

The Prefect server stores which GPUs each run was granted. A Ray cluster reports which GPUs each run
uses. The two can differ: Ray may place a run on other nodes than the granted nodes, and a run uses
its GPUs only some time after the grant. If they differ, a GPU counts as not free, and therefore no
GPU is granted twice.

Words for the state of a GPU in this module:

- *granted*: assigned to a run, according to the Prefect server.
- *used*: occupied by a run, according to the Ray cluster.
- *held*: granted or used, and therefore not free for other runs.
- *moved*: held by a run that Ray placed on other nodes than the granted nodes. The grant of the run
  is changed to these nodes.
- *free*: neither held by a run nor occupied by another program.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from prefect.client.schemas.objects import State, WorkQueueStatus

from tasks.queue import reasons
from tasks.queue.grants import failed_nodes, not_before, read_expected_end
from tasks.queue.ledger import Ledger, Limited, QueueEntry
from tasks.queue.nodes import NO_TABLE, bare_name
from tasks.queue.packing import Demand
from tasks.queue.policy import Held, Plan, Waiting, Why, plan
from tasks.queue.reasons import Message
from tasks.queue.settings import CLUSTER_OF_POOL, DEFAULT_POOL, PoolSettings
from tasks.ray.usage import Cluster, ClusterNode
from tasks.spec.failure_kinds import FailureKind

#: Tolerance for comparing numbers of GPUs. Ray rounds them to ten-thousandths of a GPU.
_SLACK = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The numbers of GPUs that runs and other programs hold on the nodes of a cluster.

    `tasks.queue.policy.plan` uses these numbers.
    """

    #: The nodes of the cluster. The field `others_gpus` of a node is the number of its GPUs that no
    #: waiting run can get.
    nodes: tuple[ClusterNode, ...]
    #: `held[flow_run_id][node_name]` is the number of GPUs that a run holds on a node. Nodes that
    #: have disappeared are included, because their GPUs still count for the GPU limits of tags.
    held: Mapping[UUID, Mapping[str, int]]
    #: `moved[flow_run_id][node_name]` is the number of GPUs that a run uses on a node. The mapping
    #: contains only runs that Ray has placed on other nodes than those in their grants. The
    #: scheduler can change the grant of such a run, because no other run has a grant for the GPUs
    #: that the run uses.
    moved: Mapping[UUID, Mapping[str, int]]


def compute_shares(cluster: Cluster, gangs: Sequence[QueueEntry]) -> Shares:
    """Compute how many GPUs runs and other programs hold on the nodes of a cluster.

    A run that is not in `gangs` counts as another program. Such a run belongs to another Prefect
    server, or has ended and left processes behind.

    All granted GPUs count as not free, even if Ray reports them as free. For example, Ray may place
    run B on the GPUs of run A, which is still stopping. Until run A has ended, these GPUs count for
    both runs.

    Args:
        cluster: Snapshot of the cluster.
        gangs: The runs that hold GPUs on this cluster.
    """
    node_names = [node.name for node in cluster.nodes]
    our_names = {gang.request.name for gang in gangs}
    granted = {gang.id: _current_names(gang.granted, node_names) for gang in gangs}
    used = {gang.id: cluster.used.get(gang.request.name, {}) for gang in gangs}
    held = {
        gang.id: _count_held_gpus(gang.demand, granted[gang.id], used[gang.id]) for gang in gangs
    }

    total = {node.name: node.gpus for node in cluster.nodes}
    moved: dict[UUID, Mapping[str, int]] = {}
    for gang in gangs:
        held_now = held[gang.id]
        has_moved = (
            gang.granted and _has_all(gang.demand, used[gang.id]) and held_now != granted[gang.id]
        )
        if not has_moved:
            continue
        of_others = _sum_by_node(gpus for id, gpus in granted.items() if id != gang.id)
        if all(
            of_others.get(name, 0) + gpus <= total.get(name, 0) for name, gpus in held_now.items()
        ):
            # Ray has placed the run on other nodes than granted, and this scheduling pass will
            # change the grant. So the check of the next run must already use the changed grant.
            granted[gang.id] = held_now
            moved[gang.id] = held_now

    foreign = _sum_by_node(
        gpus_on for run_id, gpus_on in cluster.used.items() if run_id not in our_names
    )
    granted_on = _sum_by_node(granted.values())
    held_on = _sum_by_node(held.values())
    flow_run_ids = {*map(str, granted)}

    def count_unavailable_gpus(node: ClusterNode) -> float:
        """Return the number of a node's GPUs that are neither free nor held by a run.

        The result is the larger of two numbers: the GPUs that other programs use, and the granted
        GPUs minus the held GPUs. The held GPUs are left out because the function `plan` subtracts
        them.
        """
        leased_by_others = sum(owner not in flow_run_ids for owner in node.leased.values())
        used_by_others = node.others_gpus + foreign.get(node.name, 0.0) + leased_by_others
        only_granted = granted_on.get(node.name, 0) - held_on.get(node.name, 0)
        return max(used_by_others, only_granted)

    nodes = tuple(replace(node, others_gpus=count_unavailable_gpus(node)) for node in cluster.nodes)
    return Shares(nodes=nodes, held=held, moved=moved)


def _count_held_gpus(
    demand: Demand, granted: Mapping[str, int], used: Mapping[str, float]
) -> dict[str, int]:
    """Return a mapping from node name to the number of GPUs that a run holds on the node.

    If the run uses all the GPUs that it needs, the numbers are those of the used GPUs. Otherwise,
    the result for each node is the larger of two numbers: the used GPUs and the granted GPUs.

    Args:
        demand: GPUs and CPUs that the run needs.
        granted: Mapping from node name to the number of GPUs that were granted to the run.
        used: Mapping from node name to the number of GPUs that the run uses according to Ray.
    """
    used_gpus = {name: math.ceil(gpus - _SLACK) for name, gpus in used.items() if gpus > _SLACK}
    if _has_all(demand, used):
        return used_gpus
    # The run does not use all its GPUs yet. Count its granted GPUs, too, because Ray may still give
    # them to the run.
    names = dict.fromkeys((*granted, *used_gpus))
    return {name: max(granted.get(name, 0), used_gpus.get(name, 0)) for name in names}


def _has_all(demand: Demand, used: Mapping[str, float]) -> bool:
    """Return True if a run uses all the GPUs that it needs.

    Args:
        demand: GPUs and CPUs that the run needs.
        used: Mapping from node name to the number of GPUs that the run uses according to Ray.
    """
    return sum(used.values()) >= demand.gpus - _SLACK


def _sum_by_node(shares: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up the GPUs of each node in several mappings.

    Args:
        shares: Mappings from node name to a number of GPUs.

    Returns:
        Mapping from node name to the sum.
    """
    total: dict[str, float] = {}
    for share in shares:
        for name, gpus in share.items():
            total[name] = total.get(name, 0) + gpus
    return total


def _current_names(granted: Mapping[str, int], node_names: Iterable[str]) -> dict[str, int]:
    """Return the granted GPUs of a run under the current names of the granted nodes.

    If several nodes of a cluster have the same host name, their names get a suffix. This suffix can
    appear or disappear after the grant. If the name in the grant now matches several nodes, the
    granted GPUs are counted on each of these nodes.

    Args:
        granted: Mapping from node name, at the time of the grant, to the number of granted GPUs.
        node_names: Current names of the nodes of the cluster.
    """
    existing = set(node_names)
    renamed: dict[str, int] = {}
    for name, gpus in granted.items():
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
    """A run that can never start. It fails instead of waiting."""

    #: The run that can never start.
    entry: QueueEntry
    #: Kind of failure with which the run fails.
    kind: FailureKind
    #: Reason why the run can never start, as a text for the user.
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A run that is cancelled because its deployment allows no waiting runs."""

    #: The run.
    entry: QueueEntry
    #: Reason for the cancellation, for the user.
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPass:
    """The input and the decisions of one scheduling pass.

    `QueueReader` sets the fields that contain the input, and the field `refused`. The method
    `decide` sets the other fields.

    The keys of many fields are addresses of clusters. The address of a Ray cluster is the URL of
    its dashboard. The key "" stands for the nodes that work pools list for runs without Ray.
    """

    #: Time of the scheduling pass, in UTC epoch seconds.
    at: float
    #: Snapshot of the waiting runs and of the runs that hold GPUs.
    ledger: Ledger
    #: Mapping from pool name to the settings of the work pool.
    settings: Mapping[str, PoolSettings]
    #: Mapping from the address of a cluster to the merged settings of all work pools that use the
    #: cluster.
    rules: Mapping[str, PoolSettings]
    #: All waiting runs of all work pools, in the order of the queue.
    queue: Sequence[QueueEntry]
    #: Mapping from the address of a cluster to its snapshot, for all clusters that could be read.
    clusters: Mapping[str, Cluster]
    #: Mapping from the address of a cluster to the error, for all clusters that could not be read.
    cluster_errors: Mapping[str, str] = field(default_factory=dict)
    #: Runs that can never start.
    refused: list[Refused] = field(default_factory=list, init=False)
    #: Runs that are cancelled because their deployment allows no waiting runs.
    skipped: list[Skipped] = field(default_factory=list, init=False)
    #: Cancelled runs that still wait, each with its Cancelled state. These runs wait because a
    #: scheduler has overwritten the Cancelled state, and was killed before it restored the state.
    cancelled: Sequence[tuple[QueueEntry, State[Any]]] = ()
    #: Runs that have a grant, but were not started by their worker. These runs lose their grants
    #: and wait again.
    stuck: Sequence[QueueEntry] = ()
    #: Messages about problems of the scheduling pass, for example about a cluster that does not
    #: answer.
    troubles: Sequence[str] = ()
    #: Series whose last ended runs were short, see `tasks.queue.early_start`. The runs of these
    #: series may start before their GPUs are free.
    short_series: Set[str] = frozenset()
    #: Number of GPUs that each run holds on each node: `held[flow_run_id][node_name]`.
    held: dict[UUID, Mapping[str, int]] = field(default_factory=dict, init=False)
    #: Mapping from the address of a cluster to its nodes with GPUs. The field `held` of each node
    #: contains the runs that hold its GPUs, including runs that start in this scheduling pass.
    nodes: dict[str, Sequence[ClusterNode]] = field(default_factory=dict, init=False)
    #: Runs that start in this scheduling pass, in the order of their starts. Each run is paired
    #: with a mapping from node name to the number of GPUs that the run gets there.
    admitted: list[tuple[QueueEntry, Mapping[str, int]]] = field(default_factory=list, init=False)
    #: Ids of the runs in `admitted` that start early, while other runs still use the granted GPUs.
    early: set[UUID] = field(default_factory=set, init=False)
    #: `devices[flow_run_id][node_name]` lists the GPU devices of a run, for each run without Ray
    #: that starts in this scheduling pass.
    devices: dict[UUID, Mapping[str, tuple[int, ...]]] = field(default_factory=dict, init=False)
    #: Runs that Ray placed on other nodes than granted. Each run is paired with a mapping from node
    #: name to the number of GPUs that the run uses there.
    moved: list[tuple[QueueEntry, Mapping[str, int]]] = field(default_factory=list, init=False)
    #: Mapping from the address of a cluster to the GPUs and CPUs that the cluster's first waiting
    #: run needs. Only runs that wait for free GPUs count.
    heads: dict[str, Demand] = field(default_factory=dict, init=False)
    #: Mapping from flow run id to the reason for waiting, for each run that does not start.
    messages: dict[UUID, Message] = field(default_factory=dict, init=False)

    @property
    def waiting(self) -> list[QueueEntry]:
        """The waiting runs in the order of the queue.

        Two kinds of runs are not included: runs that can never start, and runs that this scheduling
        pass cancels.
        """
        ended = {refused.entry.id for refused in self.refused}
        ended |= {skipped.entry.id for skipped in self.skipped}
        return [entry for entry in self.queue if entry.id not in ended]

    @property
    def holding(self) -> list[QueueEntry]:
        """The runs that hold GPUs or have a process.

        Two kinds of runs are not included: runs that this scheduling pass requeues, and runs that
        can never start.
        """
        lost_ids = {refused.entry.id for refused in self.refused}
        lost_ids |= {entry.id for entry in self.stuck}
        return [entry for entry in self.ledger.holding if entry.id not in lost_ids]

    @property
    def resumed(self) -> list[QueueEntry]:
        """The runs that hold their GPUs, have no process, and must get a new process now."""
        return [
            entry for entry in self.ledger.holding if entry.is_handed_over and entry.is_due(self.at)
        ]

    def count_startable_runs(self) -> int:
        """Return the number of waiting runs that start now or would start with more free GPUs.

        Runs that wait for another reason, such as a concurrency limit, are not counted.
        """
        messages = (self.messages.get(entry.id) for entry in self.queue)
        not_startable = sum(
            message is not None and message.waits_for_no_end for message in messages
        )
        return len(self.queue) - not_startable

    def list_missing_nodes(self, machine: ClusterNode | None = None) -> list[ClusterNode]:
        """Return the nodes that are missing in the field `nodes`, although their GPUs are in use.

        Examples are the nodes of a Ray cluster that does not answer, and the nodes of a work pool
        that was deleted.

        Args:
            machine: This machine with the leases of its GPU devices, or None. If no work pool lists
                this machine, and a program has leased a GPU of this machine without a grant, the
                result contains this machine.
        """
        listed = {(key, node.name) for key, nodes in self.nodes.items() for node in nodes}
        held: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        for entry in self.holding:
            for name, gpus in self.held.get(entry.id, entry.granted).items():
                node_key = (entry.request.cluster, name)
                if gpus and node_key not in listed:
                    held[node_key][entry.request.name] = gpus

        others: dict[tuple[str, str], dict[str, float]] = {}
        if machine is not None and ("", machine.name) not in listed:
            others["", machine.name] = self._name_other_holders("", machine)

        missing_nodes = []
        for key, name in sorted({*held, *(node_key for node_key in others if others[node_key])}):
            held_here = held.get((key, name), {})
            others_here = others.get((key, name), {})
            others_gpus = sum(others_here.values())
            missing_nodes.append(
                ClusterNode(
                    name=name,
                    gpus=sum(held_here.values()) + math.ceil(others_gpus),
                    others_gpus=others_gpus,
                    cluster=key,
                    held=held_here,
                    other_holders=others_here,
                    is_missing=True,
                )
            )
        return missing_nodes

    def count_gpus_of_tag(self, tag: str) -> int:
        """Return the number of GPUs of all runs with a tag, including runs that start now."""
        return self._count_gpus_by_tag((tag,), self.admitted)[tag]

    def decide(self) -> SchedulingPass:
        """Decide which runs start, and why the others wait.

        The decisions are stored in the fields of this object.

        Returns:
            This object.
        """
        active_runs = self.ledger.count_active_runs()
        self._skip_overlapping_runs(active_runs)
        candidates = [
            entry for entry in self.waiting if not self._cannot_start_at_all(entry, active_runs)
        ]
        held_by_cluster = {key: self._read_held_gangs(key) for key in self.clusters}

        # The runs that could start now, each with its number of GPUs on each node. The list begins
        # with the runs that need no GPUs. Runs with GPUs are added below.
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
                [self._make_waiting_gang(entry) for entry in gangs.values()],
                held,
                self.nodes[key],
                self.at,
                policy=rules.policy,
                limits=rules.limits,
                used=self._count_gpus_by_tag(rules.limits, starts, except_on=key),
            )
            starts += [
                (gangs[id], dict.fromkeys(node_names, gangs[id].demand.gpus_per_node))
                for id, node_names in plans[key].admitted.items()
            ]
            self.early.update(gangs[id].id for id in plans[key].early)
            for id, reason in plans[key].reasons.items():
                if reason.why is Why.GPUS:
                    self.heads.setdefault(key, gangs[id].demand)

        # If a concurrency limit of a work pool or deployment allows only some of these runs, start
        # the runs that are first in the queue, whichever cluster they use.
        starts.sort(key=lambda start: start[0].place)
        for entry, gpus in starts:
            if entry.is_scheduled:
                limit_message = self._make_limit_message(entry, active_runs)
                if limit_message is not None:
                    self.messages[entry.id] = limit_message
                    continue
                active_runs.update(entry.pool_and_queue)
                if entry.deployment is not None:
                    active_runs[entry.deployment] += 1
            self.admitted.append((entry, gpus))

        self._choose_devices()
        for key in self.nodes:
            self._add_holders(key)

        names = {str(entry.id): entry.request.name for entry in (*self.waiting, *self.holding)}
        for number, entry in enumerate(candidates, start=1):
            cluster_plan = plans.get(entry.request.cluster)
            if cluster_plan is not None and str(entry.id) in cluster_plan.reasons:
                self._store_reason(entry, number, cluster_plan, names)
        return self

    def _skip_overlapping_runs(self, active_runs: Counter[Limited]) -> None:
        """Find the runs to skip in deployments that cancel new runs above their concurrency limit.

        Both active runs and waiting runs count towards this limit. Runs above the limit are added
        to `skipped`, except runs that have already had a process.

        Args:
            active_runs: Number of active runs of each work pool, queue and deployment.
        """
        places = {
            id: limit.limit - active_runs[id]
            for id, limit in self.ledger.deployment_limits.items()
            if limit.skips
        }
        if not places:
            return
        earlier = {entry.deployment: entry for entry in self.ledger.holding}

        # A requeued run comes first. The other runs follow in the order of their scheduled starts.
        waiting = sorted(self.waiting, key=lambda entry: (not entry.has_started, *entry.place[1:]))
        for entry in waiting:
            deployment = entry.deployment
            if deployment not in places or not entry.is_scheduled:
                continue
            if places[deployment] > 0 or entry.has_started:
                places[deployment] -= 1
                earlier[deployment] = entry
                continue
            limit = self.ledger.deployment_limits[deployment].limit
            other = earlier.get(deployment)
            name = other.request.name if other is not None else "an earlier run"
            message = reasons.explain_skip(limit, name)
            self.skipped.append(Skipped(entry=entry, message=message))

    def _count_gpus_by_tag(
        self,
        tags: Iterable[str],
        starts: Iterable[tuple[QueueEntry, Mapping[str, int]]],
        *,
        except_on: str | None = None,
    ) -> dict[str, int]:
        """Return a mapping from each tag to the number of GPUs of the runs with this tag.

        The number includes the GPUs that runs hold, and the GPUs that the runs in `starts` get.

        Args:
            tags: The tags.
            starts: Runs that start, each with its number of GPUs on each node.
            except_on: Address of a cluster whose GPUs are not counted. None to count the GPUs of
                all clusters.
        """
        gpus_by_tag = dict.fromkeys(tags, 0)
        holding = ((entry, self.held.get(entry.id, {})) for entry in self.holding)
        for entry, gpus in (*holding, *starts):
            if entry.request.cluster != except_on:
                for tag in gpus_by_tag.keys() & entry.request.tags:
                    gpus_by_tag[tag] += sum(gpus.values())
        return gpus_by_tag

    def list_needed_nodes(self, key: str, max_nodes: int) -> list[dict[str, float]]:
        """Return the nodes that the autoscaler of a Ray cluster should provide.

        If runs wait for GPUs, the result contains all present nodes, and the new nodes that the
        first waiting run needs. Otherwise, the result contains only the nodes on which runs hold
        GPUs.

        Args:
            key: Address of the cluster.
            max_nodes: Largest number of nodes.

        Returns:
            One dictionary for each node: a mapping from the name of a resource to its amount.
        """
        nodes = self.nodes[key]
        head = self.heads.get(key)
        accelerator = self.clusters[key].accelerator
        bundles = [{accelerator: float(node.gpus)} for node in nodes if head or node.held]
        if head is not None:
            sufficient = sum(node.free_gpus >= head.gpus_per_node for node in nodes)
            new_node = {accelerator: float(head.gpus_per_node), "CPU": float(head.cpus_per_node)}
            bundles += [new_node] * min(head.nodes - sufficient, max_nodes - len(nodes))
        return bundles

    def _cannot_start_at_all(self, entry: QueueEntry, active_runs: Counter[Limited]) -> bool:
        """Return True if a run could not start now even if all GPUs were free.

        An example is a run of a paused work pool. Such a run does not delay later runs of the
        queue. The method stores the run's reason for waiting in `messages`.

        Args:
            entry: The run.
            active_runs: Number of active runs of each work pool, queue and deployment.
        """
        demand = entry.request.demand
        key = entry.request.cluster
        pool = self.ledger.pools.get(entry.pool)
        if key == CLUSTER_OF_POOL:
            message = reasons.no_answer_message(
                demand, key, own_settings(entry, self.settings).explain_missing_cluster()
            )
        elif demand is not None and key not in self.clusters:
            message = reasons.no_answer_message(demand, key, self.cluster_errors.get(key, ""))
        elif not entry.is_scheduled:
            return False
        elif pool is None:
            message = reasons.no_pool_message(demand, entry.pool)
        elif pool.work_pool.is_paused:
            message = reasons.paused_message(demand, pool.name)
        elif (queue := pool.queue_of(entry.flow_run)) is not None and queue.is_paused:
            message = reasons.paused_message(demand, pool.name, queue.name)
        elif queue is not None and queue.status is WorkQueueStatus.NOT_READY:
            message = reasons.unserved_message(demand, pool.name, queue.name)
        elif (limit_message := self._make_limit_message(entry, active_runs)) is not None:
            message = limit_message
        elif entry.has_gang_without_ray and not self.settings[pool.name].nodes:
            message = reasons.no_answer_message(demand, key, NO_TABLE)
        else:
            return False
        self.messages[entry.id] = message
        return True

    def _make_limit_message(
        self, entry: QueueEntry, active_runs: Counter[Limited]
    ) -> Message | None:
        """Return the message for a run that a concurrency limit prevents from starting.

        Args:
            entry: The run.
            active_runs: Number of active runs of each work pool, queue and deployment.

        Returns:
            The message. None if the limits of the run's work pool, queue and deployment still allow
            the run.
        """
        pool = self.ledger.pools.get(entry.pool)
        if pool is None:
            return None
        demand = entry.request.demand
        limits: dict[str | None, int | None] = {None: pool.work_pool.concurrency_limit}
        limits |= {queue.name: queue.concurrency_limit for queue in pool.queues.values()}
        for queue_name in (None, entry.queue):
            limit = limits.get(queue_name)
            if limit is not None and active_runs[pool.name, queue_name] >= limit:
                name = pool.name if queue_name is None else f"{pool.name}/{queue_name}"
                return reasons.pool_limit_message(demand, name, limit)
        if entry.deployment is None:
            return None
        of_deployment = self.ledger.deployment_limits.get(entry.deployment)
        if of_deployment is None or active_runs[entry.deployment] < of_deployment.limit:
            return None
        return reasons.deployment_limit_message(demand, of_deployment.limit)

    def _choose_devices(self) -> None:
        """Choose the GPU devices of the runs that start without Ray, and store them in `devices`.

        Each run gets the free devices with the lowest numbers.
        """
        nodes = self.nodes.get("", ())
        free = {node.name: set(node.devices) - node.leased.keys() for node in nodes if node.devices}
        for entry in self.holding:
            granted_devices = entry.grant.devices if entry.grant else {}
            for name, devices in granted_devices.items():
                free.get(name, set()).difference_update(devices)
        for entry, gpus in self.admitted:
            if not entry.has_gang_without_ray:
                continue
            chosen = {}
            for name, count in gpus.items():
                if name in free:
                    chosen[name] = tuple(sorted(free[name])[:count])
                    free[name].difference_update(chosen[name])
            self.devices[entry.id] = chosen

    def _read_held_gangs(self, key: str) -> list[Held]:
        """Return the runs that hold GPUs of a cluster, in the form that the function `plan` needs.

        This method also adds the data of the cluster to the fields `nodes`, `held` and `moved` of
        this scheduling pass.

        Args:
            key: Address of the cluster.
        """
        gangs = [
            entry
            for entry in self.holding
            if entry.request.cluster == key
            and entry.request.demand is not None
            # If a run does not use Ray, only its GPU grant shows its GPUs. So leave out such a run
            # if it has no grant.
            and (entry.grant is not None or key)
        ]
        # Nodes without GPUs are left out, for example a head node of Ray, because no run with GPUs
        # fits on them.
        nodes = tuple(node for node in self.clusters[key].nodes if node.gpus)
        shares = compute_shares(replace(self.clusters[key], nodes=nodes), gangs)
        self.nodes[key] = shares.nodes
        self.moved.extend(
            (gang, shares.moved[gang.id]) for gang in gangs if gang.id in shares.moved
        )
        self.held.update(shares.held)

        def find_start(entry: QueueEntry) -> float:
            """Return the start of a run in UTC epoch seconds."""
            granted_at = entry.grant.at if entry.grant is not None else 0.0
            return granted_at or (entry.flow_run.start_time or entry.state_since).timestamp()

        held_gangs = []
        for entry in gangs:
            start = find_start(entry)
            ends_at = start + entry.request.estimate_s
            is_end_assumed = entry.request.is_estimate_assumed
            expected_end = read_expected_end(entry.flow_run, since=start)
            if expected_end is not None:
                # The run reports an expected end from its progress. This end may be later than the
                # default estimate, but not later than an estimate in the spec.
                ends_at = expected_end if is_end_assumed else min(ends_at, expected_end)
                is_end_assumed = False
            held_gangs.append(
                Held(
                    id=str(entry.id),
                    gpus=shares.held[entry.id],
                    cpus_per_gpu=entry.demand.cpus_per_gpu,
                    place=entry.place,
                    # If a run already takes longer than its estimate, assume that it ends now.
                    # Otherwise the first run of the queue would get a reservation for a time in the
                    # past.
                    ends_at=max(self.at, ends_at),
                    is_end_assumed=is_end_assumed,
                    tags=entry.request.tags,
                    series=entry.request.series,
                )
            )
        return held_gangs

    def _add_holders(self, key: str) -> None:
        """Store the runs that hold GPUs of a cluster's nodes, in the field `held` of each node."""
        held: dict[str, dict[str, int]] = defaultdict(dict)
        holding = ((entry, self.held.get(entry.id, {})) for entry in self.ledger.holding)
        for entry, gpus_on in (*holding, *self.admitted):
            if entry.request.cluster != key:
                continue
            for name, gpus in gpus_on.items():
                if gpus:
                    held[name][entry.request.name] = gpus
        self.nodes[key] = [
            replace(
                node,
                cluster=key,
                held=held[node.name],
                other_holders=self._name_other_holders(key, node),
            )
            for node in self.nodes[key]
        ]

    def _name_other_holders(self, key: str, node: ClusterNode) -> dict[str, float]:
        """Return the programs that use GPUs of a node and have no GPU grant.

        Such a program is usually a run of another Prefect server. The program can also be a run
        that continues to work after the end or deletion of its flow run.

        Args:
            key: Address of the node's cluster.
            node: The node.

        Returns:
            Mapping from the name of a program to its number of GPUs.
        """
        entries = [*self.ledger.holding, *self.queue]
        names = {**node.run_ids, **{str(entry.id): entry.request.name for entry in entries}}
        granted_ids = {str(entry.id) for entry in self.ledger.holding}
        granted_names = {entry.request.name for entry in self.ledger.holding}

        holders: Counter[str] = Counter()
        for owner in node.leased.values():
            if owner not in granted_ids:
                holders[names.get(owner, owner) or "an unknown program"] += 1
        others: dict[str, float] = dict(holders)
        used = self.clusters[key].used if key in self.clusters else {}
        for run_id, gpus_on in used.items():
            if run_id not in granted_names and gpus_on.get(node.name, 0.0) > _SLACK:
                others[run_id] = gpus_on[node.name]
        return others

    def _make_waiting_gang(self, entry: QueueEntry) -> Waiting:
        """Return a waiting run in the form that the function `plan` needs."""
        return Waiting(
            id=str(entry.id),
            demand=entry.demand,
            place=entry.place,
            estimate_s=entry.request.estimate_s,
            is_estimate_assumed=entry.request.is_estimate_assumed,
            not_before=not_before(entry.flow_run),
            tags=entry.request.tags,
            among=self._usable_nodes(entry),
            avoid=frozenset(failed_nodes(entry.flow_run)),
            series=entry.request.series if entry.request.series in self.short_series else "",
        )

    def _usable_nodes(self, entry: QueueEntry) -> frozenset[str] | None:
        """Return the names of the nodes on which a run can be started.

        Returns:
            The names. None if the run can be started on every node of its cluster.
        """
        if entry.only_node:
            return frozenset((entry.only_node,))
        pool = self.ledger.pools.get(entry.pool)
        if not entry.has_gang_without_ray or pool is None:
            return None
        table_names = self._table_names(entry)
        return table_names & pool.hosts if pool.hosts else table_names

    def _table_names(self, entry: QueueEntry) -> frozenset[str]:
        """Return the names of the nodes in the settings of a run's work pool.

        Returns:
            The names. Empty if the run uses Ray, or if the run can use only the node on which its
            process waits.
        """
        if not entry.has_gang_without_ray or entry.only_node or entry.pool not in self.settings:
            return frozenset()
        return frozenset(node.name for node in self.settings[entry.pool].nodes)

    def _store_reason(
        self, entry: QueueEntry, number: int, plan: Plan, names: Mapping[str, str]
    ) -> None:
        """Store the message that explains why the scheduling policy does not start a run.

        Args:
            entry: The run.
            number: Position of the run in the queue. The first position is 1.
            plan: Decisions of the scheduling policy for the run's cluster.
            names: Mapping from flow run id to run id.
        """
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
    """Return the name of the work pool from which a run takes its settings.

    This is the run's own pool if that pool has settings, otherwise the pool `gang`.

    Args:
        entry: The run.
        settings: Mapping from pool name to the settings of the work pool.
    """
    return entry.pool if entry.pool in settings else DEFAULT_POOL


def own_settings(entry: QueueEntry, settings: Mapping[str, PoolSettings]) -> PoolSettings:
    """Return the settings that apply to a run.

    These are the settings of the run's own work pool. If that pool has no settings, they are the
    settings of the pool `gang`.

    Args:
        entry: The run.
        settings: Mapping from pool name to the settings of the work pool.
    """
    return settings.get(pool_of(entry, settings), PoolSettings())


def find_overgranted(
    holding: Iterable[QueueEntry], clusters: Mapping[str, Cluster]
) -> list[QueueEntry]:
    """Return the runs that were granted GPUs which another run already holds.

    A GPU can be granted twice if a scheduler writes a grant after it has lost the scheduling lease.
    The returned runs will lose their grants. A run with a process must keep its grant, so only runs
    without a process are returned.

    Runs that started early are ignored, because the scheduler intentionally granted them GPUs that
    other runs still use.

    Args:
        holding: The runs that hold GPUs.
        clusters: Mapping from the address of a cluster to its snapshot.
    """
    free_gpus = {(key, node.name): node.gpus for key in clusters for node in clusters[key].nodes}
    used_devices: set[tuple[str, int]] = set()

    # If two runs were granted the same GPU, the run that comes first in this list keeps the GPU.
    # The list begins with the runs that have a process. The other runs are sorted by the time of
    # their grants.
    granted = [
        (entry.is_scheduled and not entry.is_handed_over, entry.grant.at, entry, entry.grant)
        for entry in holding
        if entry.grant is not None and not entry.grant.is_early
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
