"""Read who uses which resources of a Ray cluster, without a driver and within milliseconds.

Ray creates resources such as `GPU_group_0_<group id>` on the nodes of a placement group. They are
part of the same snapshot as the free resources of a node, so the two always agree. The last 4 bytes
of the group id name the Ray job that created the group. A plain task (no actor, no placement group)
leaves no such trace, so its resources count as used by others.

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

from tasks.ray.control_store import (
    convert_grpc_errors,
    open_channel,
    prepare_request,
    request_nodes,
)
from tasks.ray.dashboard import ACCELERATORS, Credentials, Dashboard, NoAnswer

#: Name of a bundle's resource: resource, bundle index, group id. Names without an index stand for
#: all bundles of a group; they do not match.
_BUNDLE_RESOURCE = re.compile(rf"({'|'.join(ACCELERATORS)}|CPU)_group_(\d+)_([0-9a-f]{{36}})")
#: `<run id>--aNN` and optionally `-<component>`; see `tasks.record.places.make_run_id` and
#: `tasks.ray.submission.submission_id`.
_SUBMISSION = re.compile(r"(.+-\d{8}-\d{6}-[0-9a-f]{8})--a\d{2,}(-.+)?")
#: Start of the name of Ray's supervisor actor; the submission id follows.
#: Source: ray/dashboard/modules/job/common.py.
_SUPERVISOR = "_ray_internal_job_actor_"
#: Resources of every node that a driver cannot request through `entrypoint_resources`.
_MEMORY = ("memory", "object_store_memory")
#: Resource that only the head node has.
_HEAD = "node:__internal_head__"
#: Tolerance for comparing amounts. Ray counts in ten-thousandths.
_SLACK = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """Resources of one living node, as the control store reports them."""

    #: Ray's node id, in hex.
    node_id: str
    #: Ray's name for the node. Several nodes may have the same name.
    name: str
    #: Total amounts that the node registered with.
    own: Mapping[str, float]
    #: Amounts of `own` that are free now.
    available: Mapping[str, float]
    #: Total amounts of the resources that placement groups created on the node.
    grouped: Mapping[str, float] = field(default_factory=dict)
    #: True if the node is about to be removed. Ray places nothing new on it.
    is_draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorReport:
    """An actor that has been placed on a node."""

    node_id: str
    #: Name of the actor; empty for most actors.
    name: str
    #: Ray job id of the actor's driver, in hex.
    job_id: str
    #: Amounts that the actor holds. In a placement group, the keys are names of bundle resources.
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One living node of a Ray cluster or of a configured node table.

    GPU means the accelerator of the cluster, which can also be Ray's resource `NPU`, for example.
    """

    #: Ray's name for the node. If several living nodes share it, the start of the id is appended,
    #: so that the name is unique in the cluster. It stays the same while the node lives.
    name: str
    gpus: int
    #: None if unknown.
    cpus: float | None = None
    #: GPUs that are used by anything but Muster's runs.
    others_gpus: float = 0.0
    #: CPUs that are used by anything but Muster's submissions with GPUs. An actor of Muster that
    #: has no GPU counts here, too.
    others_cpus: float = 0.0
    #: Total amounts of other resources, such as `{"worker_node": 100}`.
    resources: Mapping[str, float] = field(default_factory=dict)
    #: Device numbers that the queue may grant. Empty if Ray assigns the devices.
    devices: tuple[int, ...] = ()
    #: `holder[device]`: the flow run, or another description, of who has leased the device.
    leased: Mapping[int, str] = field(default_factory=dict)
    #: True if no gang may be placed on the node: Ray is about to remove it, or an operator has
    #: drained it.
    is_drained: bool = False
    #: Name of the node's cluster in the queue.
    cluster: str = ""
    #: `gpus[run]` that the queue has granted on this node.
    held: Mapping[str, int] = field(default_factory=dict)

    @property
    def usable_gpus(self) -> int:
        """GPUs that gangs may use, whether or not other gangs hold them now.

        0 if the node is drained: a gang that ends there makes no room for the next.
        """
        if self.is_drained:
            return 0
        return max(0, math.floor(self.gpus - self.others_gpus + _SLACK))

    @property
    def usable_cpus(self) -> float | None:
        """CPUs that gangs may use, or None if unknown."""
        return None if self.cpus is None else max(0.0, self.cpus - self.others_cpus)

    @property
    def free_gpus(self) -> int:
        """GPUs that are free for new gangs."""
        return max(0, self.usable_gpus - sum(self.held.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Snapshot of a cluster, or of a configured node table."""

    #: Sorted by name.
    nodes: tuple[ClusterNode, ...]
    #: Ray's id of the cluster, whatever address it is reached at. Empty for a table.
    id: str = ""
    #: `gpus[run id][node name]` that Muster's runs have taken. A run that has not taken all its
    #: GPUs yet has too few here, or is missing. Empty for a table.
    taken: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    #: Ray's name for the accelerator of the cluster, from ACCELERATORS.
    accelerator: str = ACCELERATORS[0]


def run_id_of_submission(submission_id: str) -> str:
    """Return the id of the run that made a submission, or an empty string if it is not Muster's."""
    match = _SUBMISSION.fullmatch(submission_id)
    return match[1] if match else ""


def list_job_ids(nodes: Iterable[NodeReport], actors: Iterable[ActorReport]) -> set[str]:
    """Return the Ray job ids, in hex, of the jobs that have actors or placement groups."""
    job_ids = {actor.job_id for actor in actors}
    for node in nodes:
        for key in node.grouped:
            if bundle := _parse_bundle_resource(key):
                _, _, group_id = bundle
                job_ids.add(group_id[-8:])
    return job_ids


def compute_usage(
    nodes: Sequence[NodeReport], actors: Iterable[ActorReport], submissions: Mapping[str, str]
) -> Cluster:
    """Work out who uses which resources.

    Args:
        nodes: The living nodes.
        actors: The placed actors outside placement groups.
        submissions: `submission_id[job id]` of each driver. Missing or empty if the driver does not
            belong to a submission.
    """
    present = {name for node in nodes for name in ACCELERATORS if node.own.get(name)}
    accelerator = next((name for name in ACCELERATORS if name in present), ACCELERATORS[0])

    nodes_with_name = Counter(node.name for node in nodes)
    unique_names = {
        node.node_id: node.name
        if nodes_with_name[node.name] == 1
        else f"{node.name}/{node.node_id[:8]}"
        for node in nodes
    }

    #: `amount[node id][resource]` that Muster's submissions hold.
    ours: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    taken: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for node_id, submission_id, amounts in _list_uses(nodes, actors, submissions):
        run_id = run_id_of_submission(submission_id)
        if run_id and node_id in unique_names and amounts.get(accelerator):
            taken[run_id][unique_names[node_id]] += amounts[accelerator]
            for resource in (accelerator, "CPU"):
                ours[node_id][resource] += amounts.get(resource, 0.0)

    cluster_nodes = [
        _make_node(node, unique_names[node.node_id], accelerator, ours[node.node_id])
        for node in nodes
    ]
    return Cluster(
        nodes=tuple(sorted(cluster_nodes, key=lambda node: node.name)),
        taken={run_id: dict(gpus_on) for run_id, gpus_on in taken.items()},
        accelerator=accelerator,
    )


def _list_uses(
    nodes: Iterable[NodeReport], actors: Iterable[ActorReport], submissions: Mapping[str, str]
) -> Iterator[tuple[str, str, Mapping[str, float]]]:
    """Yield node id, submission id and held amounts of each actor and each bundle."""
    for actor in actors:
        # A supervisor actor belongs to the dashboard's driver, but its name has the submission id.
        supervised_id = ""
        if actor.name.startswith(_SUPERVISOR):
            supervised_id = actor.name.removeprefix(_SUPERVISOR)
        submission_id = supervised_id or submissions.get(actor.job_id, "")
        yield actor.node_id, submission_id, actor.resources

    for node in nodes:
        bundles: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        for key, amount in node.grouped.items():
            if bundle := _parse_bundle_resource(key):
                resource, index, group_id = bundle
                bundles[group_id, index][resource] = amount
        for (group_id, _), amounts in bundles.items():
            yield node.node_id, submissions.get(group_id[-8:], ""), amounts


# Cached, because a large cluster has thousands of these names, the same ones in each snapshot.
@lru_cache(maxsize=16_384)
def _parse_bundle_resource(key: str) -> tuple[str, str, str] | None:
    """Return resource, bundle index and group id, or None if the key is no bundle's resource."""
    match = _BUNDLE_RESOURCE.fullmatch(key)
    return (match[1], match[2], match[3]) if match else None


def _used(node: NodeReport, resource: str) -> float:
    # A new node may not have reported its free resources yet. They all count as used until then.
    return node.own.get(resource, 0.0) - node.available.get(resource, 0.0)


def _make_node(
    node: NodeReport, name: str, accelerator: str, ours: Mapping[str, float]
) -> ClusterNode:
    """Convert a report. `ours` are the amounts that Muster's submissions hold on the node."""

    def used_by_others(resource: str) -> float:
        used = _used(node, resource) - ours.get(resource, 0.0)
        return used if used > _SLACK else 0.0

    common = {accelerator, "CPU", *_MEMORY}
    return ClusterNode(
        name=name,
        gpus=math.floor(node.own.get(accelerator, 0.0)),
        cpus=node.own.get("CPU", 0.0),
        others_gpus=used_by_others(accelerator),
        others_cpus=used_by_others("CPU"),
        resources={key: amount for key, amount in node.own.items() if key not in common},
        is_drained=node.is_draining,
    )


#: States in which an actor can hold resources: PENDING_CREATION (its constructor runs), ALIVE and
#: RESTARTING. Source: ray/protobuf/gcs.proto, ActorTableData.ActorState.
_PLACED_STATES = (1, 2, 3)


@dataclass(slots=True)
class ClusterReader:
    """Reads snapshots of one cluster. Use it in one asyncio loop and call `close` at the end.

    The dashboard is asked only for the address of the control store. The control store is asked
    for everything else, over a channel that is kept until a snapshot fails.
    """

    _address: str
    credentials: Credentials
    _dashboard: Dashboard | None = None
    _store: _ControlStore | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def look(self, *, within_s: float) -> Cluster:
        """Return a snapshot of the cluster.

        Resources that were taken show up within milliseconds, and freed ones within about 0.1 s.
        The first call in a process takes a second longer because it loads Ray. That time does not
        count against the deadline.

        Args:
            within_s: Deadline in seconds.

        Raises:
            NoAnswer: The cluster did not answer in time.
            Denied: The cluster refused the request.
        """
        if self._store is None:
            await asyncio.to_thread(_import_ray)
        try:
            async with asyncio.timeout(within_s), self._lock:
                return await self._read_snapshot(within_s)
        except TimeoutError as error:
            raise NoAnswer(f"no answer from {self._address} within {within_s:g} s") from error

    async def show_demand(self, bundles: Sequence[Mapping[str, float]], *, within_s: float) -> None:
        """Ask the cluster's autoscaler for nodes, as `control_store.request_nodes` does.

        Does nothing if the last snapshot failed.

        Raises:
            NoAnswer, Denied: The control store did not answer.
        """
        async with self._lock:
            if self._store is not None:
                await asyncio.to_thread(self._store.show_demand, bundles, within_s)

    async def close(self) -> None:
        """Close the connections."""
        self._close_store()
        if self._dashboard is not None:
            await self._dashboard.aclose()

    async def _read_snapshot(self, within_s: float) -> Cluster:
        if self._store is not None:
            # After a restart of the head, the control store may have another address.
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
            # After a timeout the thread still runs. Closing its channel ends it at once.
            self._close_store()
            raise

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


class _ControlStore:
    """Connection to a control store, with cached facts that do not change. Its methods block."""

    def __init__(self, gcs_address: str, *, has_token: bool) -> None:
        self._gcs_address = gcs_address
        self._channel = open_channel(gcs_address, has_token=has_token)
        self._usage = prepare_request(self._channel, "NodeResourceInfo", "GetAllResourceUsage")
        self._nodes = prepare_request(self._channel, "NodeInfo", "GetAllNodeInfo")
        self._actors = prepare_request(self._channel, "ActorInfo", "GetAllActorInfo")
        self._jobs = prepare_request(self._channel, "JobInfo", "GetAllJobInfo")
        self._cluster = prepare_request(self._channel, "NodeInfo", "GetClusterId")
        #: Id of the cluster; empty before the first snapshot.
        self._id = ""
        #: GcsNodeInfo message by node id.
        self._infos: dict[bytes, Any] = {}
        #: Node id of the head, in hex.
        self._head = ""
        #: `submission_id[job id]`; empty if the driver belongs to no submission.
        self._submissions: dict[str, str] = {}

    def close(self) -> None:
        self._channel.close()

    def read(self, within_s: float) -> Cluster:
        """Return a snapshot of the cluster.

        Raises:
            NoAnswer, Denied: The control store did not answer.
        """
        with convert_grpc_errors(self._gcs_address):
            nodes, actors = self._request_reports(within_s)
            self._request_submissions(list_job_ids(nodes, actors), within_s)
        return replace(compute_usage(nodes, actors, self._submissions), id=self._id)

    def show_demand(self, bundles: Sequence[Mapping[str, float]], within_s: float) -> None:
        """Ask the autoscaler for nodes; see `control_store.request_nodes`."""
        with convert_grpc_errors(self._gcs_address):
            request_nodes(self._channel, bundles, within_s)

    def _request_reports(self, within_s: float) -> tuple[list[NodeReport], list[ActorReport]]:
        usage_reply = self._usage(within_s)
        # All requests are sent at once, the ones for actors last. An actor or a group that is
        # created in between counts as used by others for one snapshot. The queue then grants too
        # little, never too much.
        actor_replies = [
            self._actors(within_s, filters={"state": state}) for state in _PLACED_STATES
        ]
        nodes = self._make_reports(usage_reply.result().resource_usage_data.batch, within_s)
        actors = [
            ActorReport(
                node_id=actor.address.node_id.hex(),
                name=actor.name,
                job_id=actor.job_id.hex(),
                resources=dict(actor.required_resources),
            )
            for reply in actor_replies
            for actor in reply.result().actor_table_data
            # An actor in a placement group names bundle resources instead. Most actors are in one,
            # so skipping them here saves much of the time of a snapshot.
            if any(name in actor.required_resources for name in ACCELERATORS)
            and actor.address.node_id
        ]
        return nodes, actors

    def _make_reports(self, usages: Iterable[Any], within_s: float) -> list[NodeReport]:
        """Combine the usage of each node with the cached facts about the node."""
        usages = list(usages)
        if any(usage.node_id not in self._infos for usage in usages):
            reply = self._nodes(within_s).result()
            used_ids = {usage.node_id for usage in usages}
            self._infos = {
                info.node_id: info for info in reply.node_info_list if info.node_id in used_ids
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
            # This is another cluster at the same address. It numbers its jobs from 1 again.
            self._head = head
            self._id = self._cluster(within_s).result().cluster_id.hex()
            self._submissions.clear()
        return reports

    def _request_submissions(self, job_ids: Iterable[str], within_s: float) -> None:
        """Add the submissions of new drivers to the cache."""
        replies = {
            job_id: self._jobs(
                within_s,
                job_or_submission_id=job_id,
                skip_submission_job_info_field=True,
                # Without this flag the control store contacts every driver before it replies.
                skip_is_running_tasks_field=True,
            )
            for job_id in job_ids
            if job_id not in self._submissions
        }
        for job_id, reply in replies.items():
            for job in reply.result().job_info_list:
                metadata = job.config.metadata
                self._submissions[job_id] = metadata.get("job_submission_id") or ""


def _import_ray() -> None:
    """Import the slow modules of Ray before the deadline starts."""
    importlib.import_module("ray.core.generated.gcs_service_pb2_grpc")
    importlib.import_module("ray._private.grpc_utils")
    importlib.import_module("ray._private.authentication.http_token_authentication")
