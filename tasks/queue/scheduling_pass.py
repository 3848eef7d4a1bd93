"""Run scheduling passes: read the waiting runs and the GPUs, and decide which runs start.

`QueueReader.run_pass` runs one scheduling pass. `QueueView` contains the result of a pass as plain
data for tables and JSON. The functions that run a pass raise httpx.HTTPError or PrefectException if
the Prefect server does not answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import State, StateType
from pydantic import ValidationError

from tasks.processes.ending import find_holders
from tasks.processes.identity import host_name
from tasks.queue import grants
from tasks.queue.decision import Refused, SchedulingPass, find_overgranted, own_settings, pool_of
from tasks.queue.early_start import SeriesDurations, SeriesRun
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

#: Longest time, in seconds, from the GPU grant of a run to its start. After that time the grant is
#: deleted, and the run waits again.
GRANT_TIMEOUT_S = 60.0
#: Longest time, in seconds, until a process that a worker has started appears in /proc.
_SPAWN_TIMEOUT_S = 2.0
#: The process of a waiting run regularly changes the label HEARTBEAT. After this number of seconds
#: without a change, the process counts as ended, and the run gets no GPUs.
_SILENT_AFTER_S = 4 * grants.HEARTBEAT_EVERY_S
#: A user can set an active run to Scheduled by hand. If the run still has a live process, the run's
#: process sets the state to Running again within this number of seconds. If the state is still
#: Scheduled after that time, the run's process counts as ended, and a worker can start the run
#: again.
_CORRECTED_WITHIN_S = 60.0
#: A scheduling pass stops reading waiting runs from the server as soon as this number of runs can
#: start, or could start with more free GPUs.
_ENOUGH_RUNS = 50
#: Largest number of windows that a scheduling pass reads from each queue of a work pool. A window
#: is a group of 200 waiting runs.
_MAX_WINDOWS = 50
#: Largest number of waiting runs whose complete spec is checked in one pass. Each check takes some
#: milliseconds, so the limit keeps a scheduling pass short.
_CHECKS_PER_PASS = 20


@dataclass(slots=True)
class QueueReader:
    """Runs scheduling passes over the waiting runs of all work pools of a Prefect server."""

    #: Client of the Prefect server.
    client: PrefectClient
    #: Object that reads the nodes and their free GPUs.
    capacity: Capacity
    #: Identity of this process. The GPU grants that this process writes contain this identity.
    process: SchedulerProcess
    #: Object that requests two groups of runs from the server: waiting runs, and runs with GPUs.
    reader: LedgerReader
    #: Mapping from pool name to the last valid settings of the work pool.
    _settings: dict[str, PoolSettings] = field(default_factory=dict)
    #: Ids of the flow runs whose complete spec was checked and is valid.
    _valid_specs: set[UUID] = field(default_factory=set)
    #: Mapping from flow run id to two values: the last value of the label HEARTBEAT, and the
    #: monotonic time at which this value was first read. Contains only flow runs that wait in their
    #: own process. A live process changes the label regularly.
    _heartbeats: dict[UUID, tuple[object, float]] = field(default_factory=dict)
    #: Mapping from the address of a cluster to the snapshot in which the cluster had the most GPUs
    #: so far.
    _largest_clusters: dict[str, Cluster] = field(default_factory=dict)
    #: Flow runs for which `grants.find_lost_cancel` found no Cancelled state: a mapping from flow
    #: run id to the id of the state at the time of the search. Each new state causes a new search.
    _not_cancelled: dict[UUID, UUID] = field(default_factory=dict)
    #: Mapping from flow run id to two values: the id of the last state that `grants.was_set_back`
    #: checked, and the result. The result is True if a user has set this state by hand while the
    #: flow run was running.
    _set_back: dict[UUID, tuple[UUID, bool]] = field(default_factory=dict)
    #: The flow runs that the last scheduling pass read from the server. None before the first pass.
    _ledger: Ledger | None = None
    #: Durations of the last runs of each series, see `tasks.queue.early_start`.
    _series_durations: SeriesDurations = field(default_factory=SeriesDurations)

    async def run_pass(
        self,
        *,
        earlier_pass: SchedulingPass | None = None,
        changed: Collection[UUID] = (),
        in_flight: frozenset[UUID] = frozenset(),
        never_refused: frozenset[UUID] = frozenset(),
        is_unchanged: bool = False,
    ) -> SchedulingPass:
        """Run one scheduling pass, which reads from the server and the clusters, and writes
        nothing.

        Args:
            earlier_pass: The last pass of this process, or None if another scheduler has been
                active since then. With an earlier pass, only these waiting runs are read: new runs,
                the runs in `changed`, and the runs that the earlier pass admitted or found
                cancelled.
            changed: Ids of waiting runs that must be read again.
            in_flight: Ids of runs that this process is submitting. The GPU grants of these runs do
                not expire.
            never_refused: Ids of runs that wait instead of failing if their cluster is too small.
            is_unchanged: True if nothing has changed on the server since the last pass, according
                to its events. In that case the pass reads the clusters, but not the server.

        Raises:
            httpx.HTTPError, PrefectException: The server did not answer.
        """
        if is_unchanged and self._ledger is not None:
            return await self._evaluate(self._ledger, in_flight, never_refused)
        is_long_enough = earlier_pass is not None and (
            not earlier_pass.ledger.is_cut or earlier_pass.count_startable_runs() >= _ENOUGH_RUNS
        )
        if earlier_pass is not None and is_long_enough:
            changed_by_pass = (*earlier_pass.admitted, *earlier_pass.cancelled)
            changed = {*changed, *(entry.id for entry, _ in changed_by_pass)}
            self._ledger = await self.reader.read(earlier=earlier_pass.ledger, changed=changed)
            return await self._evaluate(self._ledger, in_flight, never_refused)
        while True:
            self._ledger = await self.reader.read()
            scheduling_pass = await self._evaluate(self._ledger, in_flight, never_refused)
            if not scheduling_pass.ledger.is_cut:
                # All waiting runs were read. Let the next scheduling pass read only as many windows
                # as the present waiting runs need. A window is a group of 200 runs.
                self.reader.windows = 1 + len(scheduling_pass.queue) // WINDOW
                return scheduling_pass
            has_enough_runs = scheduling_pass.count_startable_runs() >= _ENOUGH_RUNS
            if has_enough_runs or self.reader.windows >= _MAX_WINDOWS:
                return scheduling_pass
            self.reader.windows += 1

    async def _evaluate(
        self, ledger: Ledger, in_flight: frozenset[UUID], never_refused: frozenset[UUID]
    ) -> SchedulingPass:
        """Read the clusters, and decide which of the waiting runs start.

        Args:
            ledger: The waiting runs and the runs that hold GPUs.
            in_flight: Ids of runs that this process is submitting. The GPU grants of these runs do
                not expire.
            never_refused: Ids of runs that wait instead of failing if their cluster is too small.
        """
        settings, troubles = self._read_settings(ledger.pools)
        ledger = ledger.with_clusters(lambda entry: own_settings(entry, settings).cluster_of_pool)
        now = time.time()

        stuck = [entry for entry in ledger.holding if self._is_stuck(entry, ledger, in_flight, now)]
        waiting = [entry for entry in ledger.waiting if entry.is_due(now)]
        queue = [*waiting, *(entry for entry in stuck if entry.is_scheduled)]
        cancelled = await self._find_cancelled(queue)
        for entry, _ in cancelled:
            queue.remove(entry)
        set_back = [entry for entry in queue if await self._was_set_back(entry, now)]
        queue = [entry for entry in queue if entry not in set_back]
        silent_runs = [entry for entry in queue if self._is_silent(entry)]
        queue = sorted(
            (entry for entry in queue if entry not in silent_runs), key=lambda entry: entry.place
        )

        clusters, cluster_errors = await self._read_clusters([*queue, *ledger.holding], settings)
        listed_keys = {key for pool in settings.values() for key in pool.keys}
        names = _merge_addresses(clusters, listed_keys)
        ledger = ledger.with_clusters(lambda _entry: names)
        queue = [entry.with_cluster(names) for entry in queue]
        stuck = [entry.with_cluster(names) for entry in stuck]
        stuck += [
            entry for entry in find_overgranted(ledger.holding, clusters) if entry not in stuck
        ]

        rules = _merge_rules([*queue, *ledger.holding], settings, clusters, names)
        clusters = {
            key: mark_drained(cluster, rules[key].drained_at(now))
            for key, cluster in clusters.items()
        }

        troubles += [f"{key or 'the nodes'}: {error}" for key, error in cluster_errors.items()]
        if silent_runs:
            run_names = join_commas(entry.request.name for entry in silent_runs)
            troubles.append(
                "these runs get no GPUs, because their processes no longer report to the Prefect "
                f"server: {run_names}"
            )
        if set_back:
            run_names = join_commas(entry.request.name for entry in set_back)
            troubles.append(
                f"Muster does not start {run_names}: a user set these runs back to Scheduled, but "
                "the earlier processes of these runs may still be running"
            )
        if ledger.is_cut:
            count = WINDOW * self.reader.windows
            troubles.append(
                f"the queue is very long, so the scheduler considers only the first {count} "
                "waiting runs of each queue"
            )

        scheduling_pass = SchedulingPass(
            at=now,
            ledger=ledger,
            settings=settings,
            rules=rules,
            queue=queue,
            clusters=clusters,
            cluster_errors=cluster_errors,
            cancelled=cancelled,
            stuck=stuck,
            troubles=troubles,
            short_series=await self._update_short_series(ledger, now),
        )
        await self._add_refused_runs(scheduling_pass, never_refused)
        return scheduling_pass.decide()

    async def _update_short_series(self, ledger: Ledger, now: float) -> frozenset[str]:
        """Record which runs hold GPUs, and return the series whose runs are short.

        Args:
            ledger: The waiting runs and the runs that hold GPUs.
            now: Current time in UTC epoch seconds.
        """
        holding = {
            entry.id: SeriesRun(
                series=entry.request.series,
                node=next(iter(entry.grant.nodes), ""),
                granted_at=entry.grant.at,
                is_early=entry.grant.is_early,
            )
            for entry in ledger.holding
            if entry.request.series and entry.grant is not None
        }
        ended = self._series_durations.find_ended(holding)
        completed = await self.reader.find_completed(ended)
        return self._series_durations.update(holding, completed, now)

    def _is_silent(self, entry: QueueEntry) -> bool:
        """Return True if the process of a waiting run seems to have ended.

        The process counts as ended if it has not changed the label HEARTBEAT of its flow run for
        more than `_SILENT_AFTER_S` seconds. If the run does not wait in a process, return False.
        """
        heartbeat = entry.flow_run.labels.get(grants.HEARTBEAT)
        if not entry.waits_in_process or heartbeat is None:
            return False
        last_heartbeat, _ = self._heartbeats.get(entry.id, (None, 0.0))
        if last_heartbeat != heartbeat:
            self._heartbeats[entry.id] = heartbeat, time.monotonic()
        _, seen_at = self._heartbeats[entry.id]
        return time.monotonic() - seen_at > _SILENT_AFTER_S

    async def _was_set_back(self, entry: QueueEntry, now: float) -> bool:
        """Return True if a user has set a run to Scheduled, but the old process may still be alive.

        A live process sets the state Running again within some seconds. Until then, no worker may
        start the run. Otherwise, the run could have two processes.

        Args:
            entry: The run.
            now: Current time in UTC epoch seconds.
        """
        is_old = now - entry.state_since.timestamp() > _CORRECTED_WITHIN_S
        if is_old or not grants.may_have_process(entry.flow_run):
            return False
        state_id, was_set_back = self._set_back.get(entry.id, (None, False))
        if state_id != entry.state.id:
            was_set_back = await grants.was_set_back(self.client, entry.flow_run)
            self._set_back[entry.id] = entry.state.id, was_set_back
        return was_set_back

    def _read_settings(
        self, pools: Mapping[str, Pool]
    ) -> tuple[dict[str, PoolSettings], list[str]]:
        """Return the settings of each work pool by name, and messages about invalid settings."""
        troubles = []
        for name, pool in pools.items():
            try:
                self._settings[name] = settings_of(pool.work_pool.base_job_template)
            except ValidationError as error:
                # Use the last valid settings. With the default settings, drained nodes could be
                # used again.
                cause = one_line(error)
                troubles.append(f"the settings of the work pool {name} can't be read: {cause}")
        return {name: self._settings.get(name, PoolSettings()) for name in pools}, troubles

    async def _find_cancelled(
        self, queue: Sequence[QueueEntry]
    ) -> list[tuple[QueueEntry, State[Any]]]:
        """Return the cancelled runs that still wait, each with its Cancelled state.

        These runs wait because a scheduler has overwritten the Cancelled state, and was killed
        before it restored the state.
        """
        cancelled = []
        for entry in queue:
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
        """Return True if GPUs were granted to a run, but no worker will start the run.

        Args:
            entry: The run.
            ledger: The waiting runs and the runs that hold GPUs.
            in_flight: Ids of runs that this process is submitting. These runs are not stuck.
            now: Current time in UTC epoch seconds.
        """
        state = entry.state
        if entry.is_handed_over or entry.id in in_flight:
            return False
        granting_process = entry.grant.by if entry.grant else None
        # A run that is cancelled before its start can be stuck. After the start, the run's own
        # process or the flow `reconcile` ends the run.
        is_cancelled = state.is_cancelling() and entry.flow_run.start_time is None
        if granting_process == self.process and not is_cancelled:
            # The run is not stuck: this process granted GPUs to the run, and will still start the
            # run.
            return False
        has_ended = granting_process is not None and (
            granting_process == self.process or granting_process.has_surely_ended()
        )
        if entry.is_scheduled and entry.grant is not None:
            return has_ended or now - entry.grant.at > GRANT_TIMEOUT_S
        if not (state.type is StateType.PENDING or is_cancelled) or entry.pool not in ledger.pools:
            return False
        age_s = now - entry.state_since.timestamp()
        if not has_ended:
            return age_s > GRANT_TIMEOUT_S and not entry.flow_run.infrastructure_pid
        # Search the processes of this host. The process id on the server is not reliable: the
        # process may have ended, or the worker may have been killed before recording the id.
        pids = find_holders(FLOW_RUN_VARIABLE).pids
        return age_s > _SPAWN_TIMEOUT_S and not pids.get(str(entry.id))

    async def _read_clusters(
        self, entries: Sequence[QueueEntry], settings: Mapping[str, PoolSettings]
    ) -> tuple[dict[str, Cluster], dict[str, str]]:
        """Read all clusters that the given runs use or that the settings of work pools list.

        Args:
            entries: The runs.
            settings: Mapping from pool name to the settings of the work pool.

        Returns:
            Two mappings from the address of a cluster. The first contains the clusters that were
            read. The second contains the errors of the clusters that could not be read. The address
            "" stands for the nodes that work pools list for runs without Ray.
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

    async def _add_refused_runs(
        self, scheduling_pass: SchedulingPass, never_refused: frozenset[UUID]
    ) -> None:
        """Find the runs that can never start, and add them to `scheduling_pass.refused`.

        Args:
            scheduling_pass: The scheduling pass.
            never_refused: Ids of runs that must not be added.
        """
        remaining_checks = _CHECKS_PER_PASS
        for entry in scheduling_pass.queue:
            if entry.id in never_refused:
                continue
            kind, reason = self._find_refusal(entry, scheduling_pass)
            if not reason and remaining_checks and entry.id not in self._valid_specs:
                remaining_checks -= 1
                kind = FailureKind.USER_ERROR
                reason = await asyncio.to_thread(find_spec_fault, entry.flow_run)
                if not reason:
                    self._valid_specs.add(entry.id)
            if reason:
                refused = Refused(entry=entry, kind=kind, message=reason)
                scheduling_pass.refused.append(refused)

    def _find_refusal(
        self, entry: QueueEntry, scheduling_pass: SchedulingPass
    ) -> tuple[FailureKind, str]:
        """Return the failure kind and the reason of a run that can never start.

        If the run may start later, or if this is unknown, the reason is empty and the failure kind
        has no meaning.
        """
        request = entry.request
        settings = scheduling_pass.settings
        if request.fault:
            return FailureKind.USER_ERROR, request.fault
        has_waited = entry.state.name == grants.PENDING_RESOURCES
        if has_waited and not entry.waits_in_process:
            # The empty reason means that the run is not refused, but continues to wait. The cluster
            # was large enough for the run in an earlier scheduling pass, and missing nodes may
            # return.
            return FailureKind.INFEASIBLE, ""
        pools_without_settings = settings.keys() - self._settings.keys()
        is_readable = pool_of(entry, settings) not in pools_without_settings
        if request.cluster == CLUSTER_OF_POOL and is_readable:
            return FailureKind.USER_ERROR, own_settings(entry, settings).explain_missing_cluster()
        cluster = self._find_largest_cluster(entry, scheduling_pass)
        if request.demand is None or cluster is None:
            return FailureKind.INFEASIBLE, ""
        rules = scheduling_pass.rules[request.cluster]
        demand = request.demand
        max_nodes = rules.max_nodes(request.cluster)
        if max_nodes:
            # The autoscaler of the cluster may add nodes. Assume that a new node is as large as the
            # largest present node.
            gpu_nodes = [node for node in cluster.nodes if node.gpus]
            largest = max(gpu_nodes, key=lambda node: (node.gpus, node.cpus or 0))
            new_nodes = [largest] * (max_nodes - len(gpu_nodes))
            cluster = replace(cluster, nodes=(*cluster.nodes, *new_nodes))

        reason = explain_infeasible(demand, cluster, only_node=entry.only_node)
        for tag in sorted(request.tags & rules.limits.keys()):
            limit = rules.limits[tag]
            if not reason and demand.gpus > limit:
                reason = (
                    f"the run needs {demand.gpus} GPUs in all, but runs with its tag {tag} may use "
                    f"at most {limit}. Request fewer GPUs, or raise the limit: muster queue set "
                    f"limit.{tag}=N"
                )
        return FailureKind.INFEASIBLE, reason

    def _find_largest_cluster(
        self, entry: QueueEntry, scheduling_pass: SchedulingPass
    ) -> Cluster | None:
        """Return the snapshot in which a run's cluster had the most GPUs.

        A Ray cluster can have fewer GPUs now, for example because a node reboots. For a run without
        Ray, the snapshot contains the nodes that the run's work pool lists.

        Returns:
            The snapshot. None if the cluster could not be read, or if the Ray cluster has not had
            any GPUs yet.
        """
        key = entry.request.cluster
        cluster = scheduling_pass.clusters.get(key)
        if cluster is None:
            return None
        if key:
            largest_cluster = self._largest_clusters.get(key, cluster)
            cluster = max(largest_cluster, cluster, key=_count_gpus)
            self._largest_clusters[key] = cluster
        elif entry.pool in scheduling_pass.settings:
            table_names = {node.name for node in scheduling_pass.settings[entry.pool].nodes}
            nodes = tuple(node for node in cluster.nodes if node.name in table_names)
            cluster = replace(cluster, nodes=nodes)
        # A Ray cluster without GPUs may still be starting. Its size is unknown, so return None. In
        # contrast, a list of nodes in the settings of a work pool is reliable, even with zero GPUs.
        is_table = not key and bool(cluster.nodes)
        return cluster if _count_gpus(cluster) or is_table else None


def _merge_addresses(clusters: dict[str, Cluster], listed_keys: Collection[str]) -> dict[str, str]:
    """Keep only one address of each cluster, and remove the other addresses from `clusters`.

    A Ray cluster can have several addresses. If the settings of a work pool list one of the
    addresses, that address is kept.

    Args:
        clusters: Snapshots of the clusters, by address.
        listed_keys: Addresses that work pools list.

    Returns:
        Mapping from a removed address to the kept address of the same cluster.
    """
    key_by_id: dict[str, str] = {}
    kept_addresses: dict[str, str] = {}
    for key in sorted(clusters, key=lambda key: (key not in listed_keys, key)):
        cluster_id = clusters[key].id
        if not cluster_id:
            continue
        kept_key = key_by_id.setdefault(cluster_id, key)
        if kept_key != key:
            kept_addresses[key] = kept_key
            del clusters[key]
    return kept_addresses


def _count_gpus(cluster: Cluster) -> int:
    return sum(node.gpus for node in cluster.nodes)


def _merge_rules(
    entries: Iterable[QueueEntry],
    settings: Mapping[str, PoolSettings],
    clusters: Iterable[str],
    names: Mapping[str, str],
) -> dict[str, PoolSettings]:
    """Return a mapping from the address of each cluster to the settings for the cluster.

    The settings for a cluster are merged from all work pools that list the cluster, and from all
    work pools whose runs request the cluster.

    Args:
        entries: The waiting runs and the runs that hold GPUs.
        settings: Mapping from pool name to the settings of the work pool.
        clusters: Addresses of the clusters that could be read.
        names: Mapping from each address that is no longer used to another address of the same
            cluster, which replaces it.
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
    """A waiting run as plain data, for tables and for `muster queue --json`."""

    #: Position of the run in the queue. The first position is 1.
    number: int
    #: Id of the flow run.
    flow_run_id: str
    #: The run id, or the name of the flow run if the flow run is not a run of Muster.
    name: str
    #: GPUs and CPUs that the run needs, or None if the run needs no GPUs.
    demand: Demand | None
    #: Address of the run's Ray cluster. Empty if the run does not use Ray.
    cluster: str
    #: Name of the queue of the work pool. Empty if the run was started without a worker.
    queue: str
    #: Time at which the run began to wait, in UTC epoch seconds.
    waiting_since: float
    #: Reason why the run waits, in one line.
    reason: str
    #: Expected start in UTC epoch seconds, or None if unknown.
    starts_at: float | None = None
    #: True if the expected start is uncertain, because it depends on a run whose spec names no
    #: duration. A default duration was assumed for that run.
    is_start_assumed: bool = False
    #: Tags of the run.
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """The queue and the nodes of a work pool as plain data.

    `muster queue --json` prints this object, so its field names are keys of that JSON.
    """

    #: Time of the scheduling pass, in UTC epoch seconds.
    at: float
    #: Name of the work pool. Empty if the server has no such pool.
    pool: str
    #: Scheduling policy of the pool: `fifo` or `backfill`.
    policy: str
    #: True if the work pool is paused.
    is_paused: bool
    #: Largest number of simultaneous runs. None if there is no limit.
    limit: int | None
    #: Number of pending and running runs of the work pool. If the server has no such pool, the
    #: number of pending and running runs without a pool.
    running: int
    #: The waiting runs, in the order of the queue.
    line: tuple[QueuedRun, ...]
    #: All nodes that a cluster or a work pool lists, followed by unlisted nodes whose GPUs are in
    #: use. For example, the nodes of a cluster that does not answer are unlisted.
    nodes: tuple[ClusterNode, ...]
    #: Mapping from a tag with a GPU limit to two numbers: the GPUs in use, and the limit.
    tags: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: Names of the paused queues of the work pool.
    paused_queues: tuple[str, ...] = ()
    #: Nodes that Muster itself has drained because runs failed on them.
    faulty: tuple[FaultyNode, ...] = ()
    #: Messages about problems, for example a cluster that does not answer.
    troubles: tuple[str, ...] = ()


def make_queue_view(
    scheduling_pass: SchedulingPass, name: str, machine: ClusterNode | None = None
) -> QueueView:
    """Return the results of a scheduling pass for a work pool.

    Args:
        scheduling_pass: The scheduling pass.
        name: Name of the work pool.
        machine: This machine with the leases of its GPU devices, or None if unknown. The holders of
            these leases are shown even if no work pool lists the machine.
    """
    pool = scheduling_pass.ledger.pools.get(name)
    settings = scheduling_pass.settings.get(name, PoolSettings())
    queues = pool.queues.values() if pool else ()
    waiting = [
        (number, entry)
        for number, entry in enumerate(scheduling_pass.waiting, start=1)
        # A run without a work pool of type `gang` is shown with every pool.
        if entry.pool == name or entry.pool not in scheduling_pass.ledger.pools
    ]
    nodes = [node for _key, nodes in sorted(scheduling_pass.nodes.items()) for node in nodes]
    nodes += scheduling_pass.list_missing_nodes(machine)
    return QueueView(
        at=scheduling_pass.at,
        pool=name if pool else "",
        policy=settings.policy,
        is_paused=bool(pool and pool.work_pool.is_paused),
        limit=pool.work_pool.concurrency_limit if pool else None,
        running=scheduling_pass.ledger.count_active_runs()[name if pool else "", None],
        line=tuple(_make_queued_run(scheduling_pass, entry, number) for number, entry in waiting),
        nodes=tuple(nodes),
        tags={
            tag: (scheduling_pass.count_gpus_of_tag(tag), limit)
            for tag, limit in sorted(settings.limits.items())
        },
        paused_queues=tuple(sorted(queue.name for queue in queues if queue.is_paused)),
        faulty=tuple(faulty for faulty in settings.faulty if faulty.until > scheduling_pass.at),
        troubles=tuple(scheduling_pass.troubles),
    )


def _make_queued_run(scheduling_pass: SchedulingPass, entry: QueueEntry, number: int) -> QueuedRun:
    """Return the plain data of the waiting run at position `number` of the queue."""
    message = scheduling_pass.messages.get(entry.id)
    gpus_of_admitted = {admitted.id: gpus for admitted, gpus in scheduling_pass.admitted}
    expected = entry.flow_run.expected_start_time or entry.state_since
    reason = ""
    starts_at = None
    is_start_assumed = False
    if message is not None:
        reason = message.reason
        starts_at = message.starts_at
        is_start_assumed = message.is_start_assumed
    elif entry.id in gpus_of_admitted:
        node_names = join_commas(gpus_of_admitted[entry.id])
        reason = f"starts now, on {node_names}" if node_names else "starts now"
        starts_at = scheduling_pass.at
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
        is_start_assumed=is_start_assumed,
        tags=tuple(sorted(entry.request.tags)),
    )


async def read_queue_view(client: PrefectClient, pool: str) -> QueueView:
    """Run a scheduling pass, and return the queue and the nodes of a work pool.

    The queue in the result also contains the waiting runs that are in no work pool of type `gang`.
    If the given pool does not exist, the queue contains only these runs.

    Args:
        client: Client of the Prefect server.
        pool: Name of the work pool.

    Raises:
        httpx.HTTPError, PrefectException: The server did not answer.
    """
    capacity = Capacity()
    reader = QueueReader(client, capacity, SchedulerProcess.current(), LedgerReader(client))
    scheduling_pass = await reader.run_pass()
    machine = None
    if all(node.name != host_name() for node in scheduling_pass.nodes.get("", ())):
        with suppress(NoCapacity):
            machine = await capacity.read_this_machine()
    return make_queue_view(scheduling_pass, pool, machine)
