"""Scheduling passes over the queue: combine the ledger, the clusters and the policy.

`QueueReader.run_pass` runs one pass. `QueueView` is the result of a pass for people, as plain data. A
pass may raise httpx.HTTPError and PrefectException.
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
from tasks.queue.decision import Refused, SchedulingPass, find_overgranted, own_settings, pool_of
from tasks.queue.grants import SchedulerProcess
from tasks.queue.ledger import WINDOW, Ledger, LedgerReader, Pool, QueueEntry, find_spec_fault
from tasks.queue.nodes import Capacity, NoCapacity, explain_infeasible, mark_drained
from tasks.queue.packing import Demand
from tasks.queue.reasons import one_line
from tasks.queue.settings import (
    CLUSTER_OF_POOL,
    FaultyNode,
    PoolSettings,
    merge_settings,
    settings_of,
)
from tasks.ray.usage import Cluster, ClusterNode
from tasks.server.flow_runs import FLOW_RUN_VARIABLE
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.formatting import join_commas

#: Seconds after which a run that was granted or submitted, but has not started, loses its grant.
GIVEN_BACK_AFTER_S = 60.0
#: Seconds until a process that a killed worker has just started is visible.
_SPAWN_TIMEOUT_S = 2.0
#: Seconds without a beat after which the process of a waiting run counts as gone.
_SILENT_AFTER_S = 4 * grants.BEAT_EVERY_S
#: If more runs wait than were read, reading stops when this many of them may start.
_ENOUGH_RUNS = 50
#: Largest number of windows of waiting runs that are read.
_MAX_WINDOWS = 50
#: Number of waiting runs whose whole spec is checked in one pass. A spec is checked before its run
#: is admitted.
_CHECKS_PER_PASS = 20


@dataclass(slots=True)
class QueueReader:
    """Runs scheduling passes over the queue of a Prefect server, for all of its work pools."""

    client: PrefectClient
    capacity: Capacity
    process: SchedulerProcess
    reader: LedgerReader
    #: For each pool: the last settings that could be read.
    _settings: dict[str, PoolSettings] = field(default_factory=dict)
    #: Ids of flow runs whose spec was checked and is valid.
    _checked: set[UUID] = field(default_factory=set)
    #: For each run that waits in its process: its last beat, and when this beat was first seen.
    _beats: dict[UUID, tuple[object, float]] = field(default_factory=dict)
    #: For each cluster's address: its snapshot with the most GPUs.
    _largest_seen: dict[str, Cluster] = field(default_factory=dict)
    #: For each flow run that was checked for an overwritten cancel and had none: its state then.
    _not_cancelled: dict[UUID, UUID] = field(default_factory=dict)
    #: The last ledger.
    _ledger: Ledger | None = None

    async def run_pass(
        self,
        *,
        after: SchedulingPass | None = None,
        again: Collection[UUID] = (),
        in_flight: frozenset[UUID] = frozenset(),
        never_refused: frozenset[UUID] = frozenset(),
        is_unchanged: bool = False,
    ) -> SchedulingPass:
        """Run one scheduling pass. It only reads.

        Args:
            after: An earlier pass, if no other gate has decided since. The queue is then not read
                completely: only the runs that this pass wanted to change, and those of `again`.
            again: Ids of runs that are read again.
            in_flight: Ids of runs that this process is submitting. They are never stuck.
            never_refused: Ids of runs that wait for nodes that have gone, instead of failing.
            is_unchanged: True if events say that nothing has changed on the server since the last pass.
                Only the clusters and the clock are read then.
        """
        if is_unchanged and self._ledger is not None:
            return await self._evaluate(self._ledger, in_flight, never_refused)
        is_long_enough = after is not None and (
            not after.ledger.is_cut or after.count_startable_runs() >= _ENOUGH_RUNS
        )
        if after is not None and is_long_enough:
            changed = (*after.admitted, *after.cancelled)
            again = {*again, *(entry.id for entry, _ in changed)}
            self._ledger = await self.reader.read(after=after.ledger, again=again)
            return await self._evaluate(self._ledger, in_flight, never_refused)
        while True:
            self._ledger = await self.reader.read()
            look = await self._evaluate(self._ledger, in_flight, never_refused)
            if not look.ledger.is_cut:
                # The queue has become shorter, so read fewer windows next time.
                self.reader.windows = 1 + len(look.queue) // WINDOW
                return look
            if look.count_startable_runs() >= _ENOUGH_RUNS or self.reader.windows >= _MAX_WINDOWS:
                return look
            self.reader.windows += 1

    async def _evaluate(
        self, ledger: Ledger, in_flight: frozenset[UUID], never_refused: frozenset[UUID]
    ) -> SchedulingPass:
        settings, troubles = self._read_settings(ledger.pools)
        ledger = ledger.with_clusters(lambda entry: own_settings(entry, settings).cluster_of_pool)
        now = time.time()

        stuck = [entry for entry in ledger.holding if self._is_stuck(entry, ledger, in_flight, now)]
        waiting = [entry for entry in ledger.waiting if entry.is_due(now)]
        line = [*waiting, *(entry for entry in stuck if entry.is_scheduled)]
        cancelled = await self._find_cancelled(line)
        for entry, _ in cancelled:
            line.remove(entry)
        silent_runs = [entry for entry in line if self._is_silent(entry)]
        line = sorted(
            (entry for entry in line if entry not in silent_runs), key=lambda entry: entry.place
        )

        clusters, cluster_errors = await self._read_clusters([*line, *ledger.holding], settings)
        listed_keys = {key for pool in settings.values() for key in pool.keys}
        names = _merge_addresses(clusters, listed_keys)
        ledger = ledger.with_clusters(lambda _entry: names)
        line = [entry.with_cluster(names) for entry in line]
        stuck = [entry.with_cluster(names) for entry in stuck]
        stuck += [
            entry for entry in find_overgranted(ledger.holding, clusters) if entry not in stuck
        ]

        rules = _rules([*line, *ledger.holding], settings, clusters, names)
        clusters = {
            key: mark_drained(cluster, rules[key].drained_at(now))
            for key, cluster in clusters.items()
        }

        troubles += [f"{key or 'the nodes'}: {error}" for key, error in cluster_errors.items()]
        if silent_runs:
            run_names = join_commas(entry.request.name for entry in silent_runs)
            troubles.append(
                f"nothing is kept for runs whose process has not been heard of: {run_names}"
            )
        if ledger.is_cut:
            count = WINDOW * self.reader.windows
            troubles.append(f"of each queue only the first {count} that wait are looked at")

        look = SchedulingPass(
            at=now,
            ledger=ledger,
            settings=settings,
            rules=rules,
            queue=line,
            clusters=clusters,
            cluster_errors=cluster_errors,
            cancelled=cancelled,
            stuck=stuck,
            troubles=troubles,
        )
        await self._add_refused_runs(look, never_refused)
        return look.decide()

    def _is_silent(self, entry: QueueEntry) -> bool:
        """Return True if the process in which a run waits has had no beat for too long."""
        beat = entry.flow_run.labels.get(grants.BEAT)
        if not entry.waits_in_process or beat is None:
            return False
        last_beat, _ = self._beats.get(entry.id, (None, 0.0))
        if last_beat != beat:
            self._beats[entry.id] = beat, time.monotonic()
        _, seen_at = self._beats[entry.id]
        return time.monotonic() - seen_at > _SILENT_AFTER_S

    def _read_settings(
        self, pools: Mapping[str, Pool]
    ) -> tuple[dict[str, PoolSettings], list[str]]:
        """Return the settings of each pool, and messages about invalid settings."""
        troubles = []
        for name, pool in pools.items():
            try:
                self._settings[name] = settings_of(pool.work_pool.base_job_template)
            except ValidationError as error:
                # Keep the last valid settings. A typo must not make drained nodes usable.
                why = one_line(error)
                troubles.append(f"the settings of the work pool {name} can't be read: {why}")
        return {name: self._settings.get(name, PoolSettings()) for name in pools}, troubles

    async def _find_cancelled(
        self, line: Sequence[QueueEntry]
    ) -> list[tuple[QueueEntry, State[Any]]]:
        """Return the runs whose cancel was overwritten, each with its Cancelled state."""
        cancelled = []
        for entry in line:
            is_checked = self._not_cancelled.get(entry.id) == entry.state.id
            if is_checked or not grants.may_have_been_cancelled(entry.flow_run):
                continue
            if cancel := await grants.find_lost_cancel(self.client, entry.flow_run):
                cancelled.append((entry, cancel))
            else:
                self._not_cancelled[entry.id] = entry.state.id
        return cancelled

    def _is_stuck(
        self, entry: QueueEntry, ledger: Ledger, in_flight: frozenset[UUID], now: float
    ) -> bool:
        """Return True if a granted run will not be started by the worker that has its grant."""
        state = entry.state
        if entry.is_handed_over or entry.id in in_flight:
            return False
        giver = entry.grant.by if entry.grant else None
        # Once a run has begun, its process ends it, or `reconcile` if the process is gone.
        is_cancelled = state.is_cancelling() and entry.flow_run.start_time is None
        if giver == self.process and not is_cancelled:
            # This process has granted the run and must still start it.
            return False
        is_gone = giver is not None and (giver == self.process or giver.is_surely_gone())
        if entry.is_scheduled and entry.grant is not None:
            return is_gone or now - entry.grant.at > GIVEN_BACK_AFTER_S
        if not (state.type is StateType.PENDING or is_cancelled) or entry.pool not in ledger.pools:
            return False
        age_s = now - entry.state_since.timestamp()
        if not is_gone:
            return age_s > GIVEN_BACK_AFTER_S and not entry.flow_run.infrastructure_pid
        # A worker that was killed may have started the process without recording it. A recorded
        # process may have ended together with its worker.
        pids = holders_of(FLOW_RUN_VARIABLE).pids
        return age_s > _SPAWN_TIMEOUT_S and not pids.get(str(entry.id))

    async def _read_clusters(
        self, entries: Sequence[QueueEntry], settings: Mapping[str, PoolSettings]
    ) -> tuple[dict[str, Cluster], dict[str, str]]:
        """Read all clusters that runs or pools name.

        Returns:
            The clusters that were read, and the error for each other cluster, both by key.
        """
        keys = {entry.request.cluster for entry in entries if entry.request.demand is not None}
        keys -= {CLUSTER_OF_POOL}
        keys |= {key for pool in settings.values() for key in pool.keys}
        clusters: dict[str, Cluster] = {}
        errors: dict[str, str] = {}

        async def read_cluster(key: str) -> None:
            try:
                clusters[key] = await self.capacity.read_cluster(key, settings)
            except NoCapacity as error:
                errors[key] = str(error)

        await asyncio.gather(*map(read_cluster, sorted(keys)))
        return clusters, errors

    async def _add_refused_runs(self, look: SchedulingPass, never_refused: frozenset[UUID]) -> None:
        """Add the runs that can never start to `scheduling_pass.refused`."""
        checks_left = _CHECKS_PER_PASS
        for entry in look.queue:
            if entry.id in never_refused:
                continue
            kind, reason = self._why_never(entry, look)
            if not reason and checks_left and entry.id not in self._checked:
                checks_left -= 1
                kind = FailureKind.USER_ERROR
                reason = await asyncio.to_thread(find_spec_fault, entry.flow_run)
                if not reason:
                    self._checked.add(entry.id)
            if reason:
                look.refused.append(Refused(entry=entry, kind=kind, message=reason))

    def _why_never(self, entry: QueueEntry, look: SchedulingPass) -> tuple[FailureKind, str]:
        """Return why a run can never start. The reason is empty if it can or if that is unknown."""
        request = entry.request
        settings = look.settings
        if request.fault:
            return FailureKind.USER_ERROR, request.fault
        has_waited = entry.state.name == grants.PENDING_RESOURCES
        if has_waited and not entry.waits_in_process:
            # The run was accepted before, so its nodes were there then. They may come back.
            return FailureKind.INFEASIBLE, ""
        pools_without_settings = settings.keys() - self._settings.keys()
        is_readable = pool_of(entry, settings) not in pools_without_settings
        if request.cluster == CLUSTER_OF_POOL and is_readable:
            return FailureKind.USER_ERROR, own_settings(entry, settings).explain_missing_cluster()
        cluster = self._largest_cluster(entry, look)
        if request.demand is None or cluster is None:
            return FailureKind.INFEASIBLE, ""
        rules = look.rules[request.cluster]
        demand = request.demand
        max_nodes = rules.max_nodes(request.cluster)
        if max_nodes:
            # The autoscaler may add nodes. Assume that they are like the largest existing one.
            gpu_nodes = [node for node in cluster.nodes if node.gpus]
            largest = max(gpu_nodes, key=lambda node: (node.gpus, node.cpus or 0))
            new_nodes = [largest] * (max_nodes - len(gpu_nodes))
            cluster = replace(cluster, nodes=(*cluster.nodes, *new_nodes))

        reason = explain_infeasible(demand, cluster, only_node=entry.only_node)
        for tag in sorted(request.tags & rules.limits.keys()):
            limit = rules.limits[tag]
            if not reason and demand.gpus > limit:
                reason = (
                    f"the run asks for {demand.gpus} GPUs in all, and its tag {tag} may have "
                    f"{limit} at once. Ask for less, or have the limit raised"
                )
        return FailureKind.INFEASIBLE, reason

    def _largest_cluster(self, entry: QueueEntry, look: SchedulingPass) -> Cluster | None:
        """Return the largest cluster that the run could get, or None if unknown.

        For a Ray cluster, it is the snapshot with the most GPUs, because a node that reboots will
        come back. Otherwise it is the node table of the run's pool.
        """
        key = entry.request.cluster
        cluster = look.clusters.get(key)
        if cluster is None:
            return None
        if key:
            largest_seen = self._largest_seen.get(key, cluster)
            cluster = max(largest_seen, cluster, key=_gpus)
            self._largest_seen[key] = cluster
        elif entry.pool in look.settings:
            table_names = {node.name for node in look.settings[entry.pool].nodes}
            nodes = tuple(node for node in cluster.nodes if node.name in table_names)
            cluster = replace(cluster, nodes=nodes)
        # A Ray cluster without GPUs may still be starting. A node table is what it is.
        is_table = not key and bool(cluster.nodes)
        return cluster if _gpus(cluster) or is_table else None


def _merge_addresses(clusters: dict[str, Cluster], listed_keys: Collection[str]) -> dict[str, str]:
    """Remove clusters that are in the dict twice, under different addresses.

    The address that a pool lists is kept, if there is one.

    Returns:
        `kept address[removed address]`.
    """
    key_by_id: dict[str, str] = {}
    names: dict[str, str] = {}
    for key in sorted(clusters, key=lambda key: (key not in listed_keys, key)):
        cluster_id = clusters[key].id
        if not cluster_id:
            continue
        kept_key = key_by_id.setdefault(cluster_id, key)
        if kept_key != key:
            names[key] = kept_key
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
    """Return the settings that apply to each cluster, by its key.

    They are merged from the pools that list the cluster or have a run for it.
    """
    users = {(entry.request.cluster, pool_of(entry, settings)) for entry in entries}
    for pool_name, pool in settings.items():
        users |= {(names.get(key, key), pool_name) for key in pool.keys}
    keys = {*clusters, *(key for key, _ in users)}
    return {
        key: merge_settings(settings[pool] for pool in sorted(settings) if (key, pool) in users)
        for key in keys
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRun:
    """A waiting run, as plain data for people."""

    #: Position in the queue, from 1.
    number: int
    flow_run_id: str
    #: The run id. For a flow run that is not Muster's, its name.
    name: str
    #: None if the run asks for no GPUs.
    demand: Demand | None
    #: Address of the run's Ray cluster, or an empty string.
    cluster: str
    #: Name of its queue in the pool. Empty for a run that was started directly.
    queue: str
    #: UTC epoch seconds.
    waiting_since: float
    #: Why the run waits, in one line.
    reason: str
    #: Expected start in UTC epoch seconds. None if unknown.
    starts_at: float | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """The queue and the nodes of a work pool, as plain data for people."""

    #: UTC epoch seconds.
    at: float
    #: Name of the work pool. Empty if the server has no such pool.
    pool: str
    policy: str
    is_paused: bool
    #: Largest number of runs that may run at once. None: no limit.
    limit: int | None
    #: Number of runs that are pending or running.
    running: int
    line: tuple[QueuedRun, ...]
    nodes: tuple[ClusterNode, ...]
    #: `(used, limit)[tag]` in GPUs, for each tag with a limit.
    tags: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: Names of the pool's queues that are paused.
    paused_queues: tuple[str, ...] = ()
    #: Nodes that Muster itself has drained.
    faulty: tuple[FaultyNode, ...] = ()
    #: Problems, such as a cluster that does not answer or invalid settings.
    troubles: tuple[str, ...] = ()


def make_queue_view(look: SchedulingPass, name: str) -> QueueView:
    """Return the part of a pass that concerns one work pool."""
    pool = look.ledger.pools.get(name)
    settings = look.settings.get(name, PoolSettings())
    queues = pool.queues.values() if pool else ()
    waiting = [
        (number, entry)
        for number, entry in enumerate(look.waiting, start=1)
        # Runs without a pool, or of a pool of another type, are shown with every pool.
        if entry.pool == name or entry.pool not in look.ledger.pools
    ]
    return QueueView(
        at=look.at,
        pool=name if pool else "",
        policy=settings.policy,
        is_paused=bool(pool and pool.work_pool.is_paused),
        limit=pool.work_pool.concurrency_limit if pool else None,
        running=look.ledger.count_used_slots()[name, None],
        line=tuple(_queued(look, entry, number) for number, entry in waiting),
        nodes=tuple(node for _key, nodes in sorted(look.nodes.items()) for node in nodes),
        tags={
            tag: (look.count_gpus_of_tag(tag), limit)
            for tag, limit in sorted(settings.limits.items())
        },
        paused_queues=tuple(sorted(queue.name for queue in queues if queue.is_paused)),
        faulty=tuple(faulty for faulty in settings.faulty if faulty.until > look.at),
        troubles=tuple(look.troubles),
    )


def _queued(look: SchedulingPass, entry: QueueEntry, number: int) -> QueuedRun:
    message = look.messages.get(entry.id)
    gpus_of_admitted = {admitted.id: gpus for admitted, gpus in look.admitted}
    expected = entry.flow_run.expected_start_time or entry.state_since
    reason = ""
    starts_at = None
    if message is not None:
        reason = message.reason
        starts_at = message.starts_at
    elif entry.id in gpus_of_admitted:
        node_names = join_commas(gpus_of_admitted[entry.id])
        reason = f"starts now, on {node_names}" if node_names else "starts now"
        starts_at = look.at
    return QueuedRun(
        number=number,
        flow_run_id=str(entry.id),
        name=entry.request.name,
        demand=entry.request.demand,
        cluster=entry.request.cluster,
        queue=entry.queue,
        waiting_since=expected.timestamp(),
        reason=reason,
        starts_at=starts_at,
        tags=tuple(sorted(entry.request.tags)),
    )


async def read_queue_view(client: PrefectClient, pool: str) -> QueueView:
    """Run a pass and return the queue of a work pool, or of all runs if there is no such pool."""
    reader = QueueReader(client, Capacity(), SchedulerProcess.current(), LedgerReader(client))
    return make_queue_view(await reader.run_pass(), pool)
