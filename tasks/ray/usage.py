"""Who uses what of a Ray cluster: a look at it without a driver, in a few milliseconds and with
a deadline, and the rules that tell whose a use is.

A placement group is known by the resources that it makes on its nodes, `GPU_group_0_<group id>`: so
they are of the same instant as what the node has free. The last 4 bytes of the group's id are the
job's that made it. What a plain task (no actor, no placement group) has can't be told from what
others have.

Source: ray/design_docs/id_specification.md; ray/common/bundle_spec.h, FormatPlacementGroupResource.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from tasks.ray.control_store import answering, open_channel, question, show_demand
from tasks.ray.dashboard import ACCELERATORS, Credentials, Dashboard, NoAnswer

#: Of a bundle: resource, index, group. Without the index: that of all bundles of a group.
_OF_BUNDLE = re.compile(rf"({'|'.join(ACCELERATORS)}|CPU)_group_(\d+)_([0-9a-f]{{36}})")
#: `<run id>--aNN` and maybe `-<component>`, of `tasks.record.places.make_run_id` and
#: `tasks.ray.submission.submission_id`.
_SUBMISSION = re.compile(r"(.+-\d{8}-\d{6}-[0-9a-f]{8})--a\d{2,}(-.+)?")
#: The name of Ray's actor that runs a submission. Source: ray/dashboard/modules/job/common.py.
_SUPERVISOR = "_ray_internal_job_actor_"
#: What every node has; a driver can't ask for them by `entrypoint_resources`.
_MEMORY = ("memory", "object_store_memory")
_HEAD = "node:__internal_head__"
#: Ray counts in ten-thousandths.
_SLACK = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What the control store tells of one living node."""

    #: In hex.
    node_id: str
    #: Not unique.
    name: str
    #: Since it came.
    own: Mapping[str, float]
    #: Of `own`, now.
    available: Mapping[str, float]
    #: What placement groups have made on it, all of each.
    grouped: Mapping[str, float] = field(default_factory=dict)
    #: It is to go: nothing new is placed on it.
    is_draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorReport:
    """An actor that has its place."""

    node_id: str
    #: Empty for most.
    name: str
    #: Its driver's, in hex.
    job_id: str
    #: What it has; with names of bundles where it is in a placement group.
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One living node of a cluster, or of a table of nodes.

    GPU stands for the accelerator of the cluster, be it Ray's resource `GPU` or `NPU`.
    """

    #: Unique within the cluster, the same for as long as the node lives: Ray's name for it;
    #: followed by the start of its id where two living nodes share it.
    name: str
    gpus: int
    #: None where nobody says.
    cpus: float | None = None
    #: In use by others than runs of ours.
    others_gpus: float = 0.0
    #: In use beside the GPUs of our submissions, be it by others or by an actor of ours that has
    #: none.
    others_cpus: float = 0.0
    #: Other resources, all of each: `{"worker_node": 100}`.
    resources: Mapping[str, float] = field(default_factory=dict)
    #: What the queue gives of it, as its driver numbers them; empty where Ray gives them.
    devices: tuple[int, ...] = ()
    #: `leased[device]`: the flow run that has it, or whoever else says so.
    leased: Mapping[int, str] = field(default_factory=dict)
    #: Nothing new is placed on it: Ray is about to remove it, or an operator wants no gang there.
    is_drained: bool = False
    #: Its cluster, as the queue calls it.
    cluster: str = ""
    #: `held[run]`: the GPUs that the queue has given.
    held: Mapping[str, int] = field(default_factory=dict)

    @property
    def usable_gpus(self) -> int:
        """What gangs may have of it, as if none held anything; none where it is drained, so that
        what ends there makes no room."""
        return 0 if self.is_drained else max(0, math.floor(self.gpus - self.others_gpus + _SLACK))

    @property
    def usable_cpus(self) -> float | None:
        return None if self.cpus is None else max(0.0, self.cpus - self.others_cpus)

    @property
    def free_gpus(self) -> int:
        """For new gangs."""
        return max(0, self.usable_gpus - sum(self.held.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One reading of a cluster, or a table of nodes."""

    #: By name.
    nodes: tuple[ClusterNode, ...]
    #: Ray's own, the same at whichever address it is asked; empty for a table.
    id: str = ""
    #: `taken[run id][node name]` GPUs, of runs of ours that have any. A run that has not taken its
    #: GPUs yet is missing, or has too few. Empty for a table.
    taken: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    #: What its GPUs are called, one of ACCELERATORS.
    accelerator: str = ACCELERATORS[0]


def run_of(submission_id: str) -> str:
    """The id of the run that made the submission; empty where it is none of ours."""
    match = _SUBMISSION.fullmatch(submission_id)
    return match[1] if match else ""


def jobs_of(nodes: Iterable[NodeReport], actors: Iterable[ActorReport]) -> set[str]:
    """The ids, in hex, of the jobs that have actors or placement groups."""
    grouped = {of[2][-8:] for node in nodes for key in node.grouped if (of := _of_bundle(key))}
    return grouped | {actor.job_id for actor in actors}


def use_of(
    nodes: Sequence[NodeReport], actors: Iterable[ActorReport], submissions: Mapping[str, str]
) -> Cluster:
    """Who uses what.

    Args:
        submissions: `submissions[job id]`: the id of the submission that the driver belongs to;
            empty, or missing, where it belongs to none.
    """
    there = {name for node in nodes for name in ACCELERATORS if node.own.get(name)}
    accelerator = next((name for name in ACCELERATORS if name in there), ACCELERATORS[0])
    count = Counter(node.name for node in nodes)
    names = {
        node.node_id: node.name if count[node.name] == 1 else f"{node.name}/{node.node_id[:8]}"
        for node in nodes
    }
    #: `ours[node id][resource]`: what our submissions have there.
    ours: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    taken: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    for node_id, submission_id, has in _uses(nodes, actors, submissions):
        run_id = run_of(submission_id)
        if run_id and node_id in names and has.get(accelerator):
            taken[run_id][names[node_id]] += has[accelerator]
            for resource in (accelerator, "CPU"):
                ours[node_id][resource] += has.get(resource, 0.0)
    found = [_node(node, names[node.node_id], accelerator, ours[node.node_id]) for node in nodes]
    return Cluster(
        nodes=tuple(sorted(found, key=lambda node: node.name)),
        taken={run_id: dict(on) for run_id, on in taken.items()},
        accelerator=accelerator,
    )


def _uses(
    nodes: Iterable[NodeReport], actors: Iterable[ActorReport], submissions: Mapping[str, str]
) -> Iterator[tuple[str, str, Mapping[str, float]]]:
    """Of each actor and each bundle: its node, its submission, and what it has."""
    for actor in actors:
        # A supervisor is an actor of the dashboard's own driver.
        own = actor.name.removeprefix(_SUPERVISOR) if actor.name.startswith(_SUPERVISOR) else ""
        yield actor.node_id, own or submissions.get(actor.job_id, ""), actor.resources
    for node in nodes:
        bundles: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        for key, amount in node.grouped.items():
            if of := _of_bundle(key):
                resource, index, group = of
                bundles[group, index][resource] = amount
        for (group, _), has in bundles.items():
            yield node.node_id, submissions.get(group[-8:], ""), has


# A large cluster has thousands of these, the same in each reading.
@lru_cache(maxsize=16_384)
def _of_bundle(key: str) -> tuple[str, str, str] | None:
    """Resource, index and group."""
    match = _OF_BUNDLE.fullmatch(key)
    return (match[1], match[2], match[3]) if match else None


def _used(node: NodeReport, resource: str) -> float:
    # A node that has just come may not have told yet what it has free: all of it is in use.
    return node.own.get(resource, 0.0) - node.available.get(resource, 0.0)


def _node(node: NodeReport, name: str, accelerator: str, ours: Mapping[str, float]) -> ClusterNode:
    def others(resource: str) -> float:
        used = _used(node, resource) - ours.get(resource, 0.0)
        return used if used > _SLACK else 0.0

    own = {accelerator, "CPU", *_MEMORY}
    return ClusterNode(
        name=name,
        gpus=math.floor(node.own.get(accelerator, 0.0)),
        cpus=node.own.get("CPU", 0.0),
        others_gpus=others(accelerator),
        others_cpus=others("CPU"),
        resources={key: amount for key, amount in node.own.items() if key not in own},
        is_drained=node.is_draining,
    )


#: States of actors that may have their place: PENDING_CREATION (its constructor runs), ALIVE,
#: RESTARTING. Source: ray/protobuf/gcs.proto, ActorTableData.ActorState.
_PLACED = (1, 2, 3)


@dataclass(slots=True)
class ClusterLook:
    """One cluster, by the URL of its dashboard. Use it in one asyncio loop, and `close` it.

    The dashboard is asked for the control store's address; all else is asked of that one, over a
    channel that is kept until a look fails.
    """

    _address: str
    credentials: Credentials
    _dashboard: Dashboard | None = None
    _store: _ControlStore | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def look(self, *, within_s: float) -> Cluster:
        """Who uses what now.

        What was taken shows within milliseconds, what was given back within about 0.1 s. The first
        look of a process takes a second more: it loads Ray, which the deadline does not count.

        Raises: NoAnswer when the cluster did not answer in time; Denied.
        """
        if self._store is None:
            await asyncio.to_thread(_load)
        try:
            async with asyncio.timeout(within_s), self._lock:
                return await self._look(within_s)
        except TimeoutError as error:
            raise NoAnswer(f"no answer from {self._address} within {within_s:g} s") from error

    async def show_demand(self, bundles: Sequence[Mapping[str, float]], *, within_s: float) -> None:
        """Have its autoscaler see what its nodes are to hold; see `control_store.show_demand`. Only
        where the last look was answered.

        Raises: NoAnswer, Denied.
        """
        async with self._lock:
            if self._store is not None:
                await asyncio.to_thread(self._store.show_demand, bundles, within_s)

    async def close(self) -> None:
        self._forget()
        if self._dashboard is not None:
            await self._dashboard.aclose()

    async def _look(self, within_s: float) -> Cluster:
        if self._store is not None:
            # A head that was restarted may have it elsewhere.
            with contextlib.suppress(NoAnswer):
                return await self._read(self._store, within_s)
        if self._dashboard is None:
            self._dashboard = Dashboard(self._address, credentials=self.credentials)
        gcs_address = await self._dashboard.gcs_address()
        has_token = self.credentials.has_token
        self._store = await asyncio.to_thread(_ControlStore, gcs_address, has_token=has_token)
        return await self._read(self._store, within_s)

    async def _read(self, store: _ControlStore, within_s: float) -> Cluster:
        try:
            return await asyncio.to_thread(store.read, within_s)
        except BaseException:
            # Of a look that is given up the thread goes on: without a channel it ends at once.
            self._forget()
            raise

    def _forget(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


class _ControlStore:
    """One connection, and what was learnt over it that does not change. Its calls block."""

    def __init__(self, gcs_address: str, *, has_token: bool) -> None:
        self._gcs_address = gcs_address
        self._channel = open_channel(gcs_address, has_token=has_token)
        self._usage = question(self._channel, "NodeResourceInfo", "GetAllResourceUsage")
        self._nodes = question(self._channel, "NodeInfo", "GetAllNodeInfo")
        self._actors = question(self._channel, "ActorInfo", "GetAllActorInfo")
        self._jobs = question(self._channel, "JobInfo", "GetAllJobInfo")
        self._cluster = question(self._channel, "NodeInfo", "GetClusterId")
        self._id = ""
        self._infos: dict[bytes, Any] = {}
        self._head = ""
        #: `[job id]`, empty where the driver belongs to no submission.
        self._submissions: dict[str, str] = {}

    def close(self) -> None:
        self._channel.close()

    def read(self, within_s: float) -> Cluster:
        """One reading.

        Raises: NoAnswer, Denied.
        """
        with answering(self._gcs_address):
            nodes, actors = self._ask(within_s)
            self._learn_jobs(jobs_of(nodes, actors), within_s)
        return replace(use_of(nodes, actors, self._submissions), id=self._id)

    def show_demand(self, bundles: Sequence[Mapping[str, float]], within_s: float) -> None:
        with answering(self._gcs_address):
            show_demand(self._channel, bundles, within_s)

    def _ask(self, within_s: float) -> tuple[list[NodeReport], list[ActorReport]]:
        asking = self._usage(within_s)
        # The actors after the nodes, and all of it at once: what comes in between, or is a group
        # that is being made, counts as used by others for one look, which promises nothing that
        # is not there.
        of_states = [self._actors(within_s, filters={"state": state}) for state in _PLACED]
        nodes = self._reports(asking.result().resource_usage_data.batch, within_s)
        actors = [
            ActorReport(
                node_id=actor.address.node_id.hex(),
                name=actor.name,
                job_id=actor.job_id.hex(),
                resources=dict(actor.required_resources),
            )
            for answer in of_states
            for actor in answer.result().actor_table_data
            # In a placement group it has none of these. Most are, and this is a large part of it.
            if any(name in actor.required_resources for name in ACCELERATORS)
            and actor.address.node_id
        ]
        return nodes, actors

    def _reports(self, usages: Iterable[Any], within_s: float) -> list[NodeReport]:
        usages = list(usages)
        if any(usage.node_id not in self._infos for usage in usages):
            answer = self._nodes(within_s).result()
            there = {usage.node_id for usage in usages}
            self._infos = {
                info.node_id: info for info in answer.node_info_list if info.node_id in there
            }
        reports = [
            NodeReport(
                node_id=usage.node_id.hex(),
                name=info.node_name,
                own=dict(info.resources_total),
                available={
                    key: usage.resources_available.get(key, 0.0) for key in info.resources_total
                },
                grouped={
                    key: amount for key, amount in usage.resources_total.items() if "_group_" in key
                },
                is_draining=usage.is_draining,
            )
            for usage in usages
            if (info := self._infos.get(usage.node_id)) is not None
        ]
        head = next((report.node_id for report in reports if _HEAD in report.own), "")
        if head != self._head or not self._id:
            # Another cluster at the same address: its jobs are counted from 1 again.
            self._head, self._id = head, self._cluster(within_s).result().cluster_id.hex()
            self._submissions.clear()
        return reports

    def _learn_jobs(self, job_ids: Iterable[str], within_s: float) -> None:
        asking = {
            job_id: self._jobs(
                within_s,
                job_or_submission_id=job_id,
                skip_submission_job_info_field=True,
                # For this one the control store asks each driver.
                skip_is_running_tasks_field=True,
            )
            for job_id in job_ids
            if job_id not in self._submissions
        }
        for job_id, answer in asking.items():
            for job in answer.result().job_info_list:
                metadata = job.config.metadata
                self._submissions[job_id] = metadata.get("job_submission_id") or ""


def _load() -> None:
    """Import what takes long, where nobody waits for it."""
    importlib.import_module("ray.core.generated.gcs_service_pb2_grpc")
    importlib.import_module("ray._private.grpc_utils")
    importlib.import_module("ray._private.authentication.http_token_authentication")
