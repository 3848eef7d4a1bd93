"""Read which jobs use which resources of a Ray cluster, within milliseconds.

This module requests the data directly from the cluster's control store (GCS), without a Ray driver
process:

- Ray creates resources such as `GPU_group_0_<group id>` on the nodes of a placement group. A node
  reports these resources in the same message as its free resources, so both belong to the same
  moment. The last 4 bytes of the group id are the id of the Ray job that created the group.
- Actors outside placement groups are listed with their job and their resources.
- The control store does not list Ray tasks outside placement groups. Their resources count as used
  by programs that are not Muster's runs.

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

#: Matches the name of a resource that belongs to one bundle of a placement group. The pattern
#: captures the base resource, the index of the bundle, and the id of the placement group. Ray also
#: has a name without an index, for all bundles together. This name does not match.
_BUNDLE_RESOURCE = re.compile(rf"({'|'.join(ACCELERATORS)}|CPU)_group_(\d+)_([0-9a-f]{{36}})")
#: Id of a job that Muster has submitted: `<run id>--aNN`, optionally with `-<component>`. The first
#: group of the pattern is the run id. See `tasks.ray.submission.submission_id`.
_SUBMISSION = re.compile(r"(.+-\d{8}-\d{6}-[0-9a-f]{8})--a\d{2,}(-.+)?")
#: Start of the name of the supervisor actor with which Ray manages a submitted job. The submission
#: id follows. Source: ray/dashboard/modules/job/common.py.
_SUPERVISOR = "_ray_internal_job_actor_"
#: Names of the Ray resources that represent memory. Every node has these resources. The key
#: `entrypoint_resources` of a spec cannot request memory, because the key is for custom resources.
_MEMORY = ("memory", "object_store_memory")
#: Ray resource that only the head node of a cluster has.
_HEAD = "node:__internal_head__"
#: Two amounts of a resource count as equal if they differ by at most this number. Ray rounds the
#: amounts to 0.0001.
_SLACK = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """Resources of one living Ray node, as the cluster's control store reports them."""

    #: Ray's node id, in hex.
    node_id: str
    #: Ray's name for the node. Several nodes may have the same name.
    name: str
    #: Mapping from resource name to the node's total amount, which is the sum of the used and the
    #: free amount. Resources that Ray creates for placement groups are not included.
    own: Mapping[str, float]
    #: Mapping from the name of each resource in `own` to its free amount.
    available: Mapping[str, float]
    #: Resources that Ray has reserved for placement groups on the node: a mapping from resource
    #: name, such as `GPU_group_0_<group id>`, to total amount.
    grouped: Mapping[str, float] = field(default_factory=dict)
    #: True if Ray is about to remove the node. Ray then starts no new tasks or actors on the node.
    is_draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorReport:
    """A Ray actor that has been placed on a node and can hold resources there."""

    #: Ray's id of the actor's node, in hex.
    node_id: str
    #: Name of the actor, or an empty string. Most actors have no name.
    name: str
    #: Ray's job id of the driver process that created the actor, in hex.
    job_id: str
    #: Mapping from resource name to the amount that the actor holds. For an actor in a placement
    #: group, the resources have names such as `GPU_group_0_<group id>`.
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One living node of a Ray cluster, or one machine in a list that an operator has configured.

    In this class, "GPU" means the accelerator of the cluster, for example Ray's resource `GPU` or
    `NPU`. A *gang* is the set of GPUs that the queue grants to one run.
    """

    #: Unique name of the node in the cluster: Ray's name for the node. If several living nodes have
    #: the same name, the start of the node id is appended.
    name: str
    #: Number of GPUs of the node.
    gpus: int
    #: Number of CPUs of the node, or None if unknown.
    cpus: float | None = None
    #: Number of GPUs in use by programs that are not Muster's runs.
    others_gpus: float = 0.0
    #: Number of CPUs that the queue cannot grant: the CPUs of other programs, plus the CPUs of
    #: actors and bundles that belong to Muster's runs but have no GPU.
    others_cpus: float = 0.0
    #: Total amounts of the node's other Ray resources, such as `{"worker_node": 100}`.
    resources: Mapping[str, float] = field(default_factory=dict)
    #: Numbers of the GPU devices that Muster's queue may grant to runs. Empty if Ray assigns the
    #: devices.
    devices: tuple[int, ...] = ()
    #: Mapping from device number to the owner of the lease, for all leased GPU devices. The owner
    #: is the id of a flow run, or an empty string if unknown.
    leased: Mapping[int, str] = field(default_factory=dict)
    #: Mapping from flow run id to run id, for the runs on the node. Empty if this process runs on
    #: another machine, or if Ray assigns the devices.
    run_ids: Mapping[str, str] = field(default_factory=dict)
    #: True if Muster's queue must not grant GPUs on the node. Either Ray is about to remove the
    #: node, or an operator has drained the node.
    is_drained: bool = False
    #: True if no readable Ray cluster contains the node and no work pool lists the node. In this
    #: case, Muster knows the node only from the programs that hold GPUs of the node, and `gpus` is
    #: the number of these GPUs.
    is_missing: bool = False
    #: Name that Muster's queue uses for the node's cluster.
    cluster: str = ""
    #: Mapping from run id to the number of this node's GPUs that Muster's queue has granted to the
    #: run.
    held: Mapping[str, int] = field(default_factory=dict)
    #: Mapping from the name of a program to the number of the node's GPUs that the program holds
    #: without a grant. These GPUs are part of `others_gpus`. A program can be one of Muster's runs,
    #: for example a run whose flow run was deleted. In this case, the name is the run id.
    other_holders: Mapping[str, float] = field(default_factory=dict)

    @property
    def usable_gpus(self) -> int:
        """Number of GPUs that Muster's runs may use, including the GPUs that runs hold now.

        The number is 0 if the node is drained, even while runs still hold GPUs of the node.
        """
        if self.is_drained:
            return 0
        return max(0, math.floor(self.gpus - self.others_gpus + _SLACK))

    @property
    def usable_cpus(self) -> float | None:
        """Number of CPUs that Muster's runs may use, or None if unknown."""
        return None if self.cpus is None else max(0.0, self.cpus - self.others_cpus)

    @property
    def free_gpus(self) -> int:
        """Number of the node's GPUs that Muster's queue may grant to runs now."""
        return max(0, self.usable_gpus - sum(self.held.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Snapshot of a Ray cluster, or of a list of machines that an operator has configured."""

    #: The living nodes, sorted by name.
    nodes: tuple[ClusterNode, ...]
    #: Ray's id of the cluster. The id does not depend on the address with which the cluster is
    #: reached. An empty string if the nodes are not those of a Ray cluster.
    id: str = ""
    #: `used[run id][node name]`: number of GPUs that the run's Ray jobs hold on the node now. The
    #: jobs take their GPUs step by step, so a run may hold fewer GPUs than Muster's queue has
    #: granted to the run. Empty if the nodes are not those of a Ray cluster.
    used: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    #: Ray's name for the accelerator of the cluster, from ACCELERATORS.
    accelerator: str = ACCELERATORS[0]


def run_id_of_submission(submission_id: str) -> str:
    """Return the id of the run that owns a submitted Ray job.

    Returns:
        The run id, or an empty string if Muster did not submit the job.
    """
    match = _SUBMISSION.fullmatch(submission_id)
    return match[1] if match else ""


def list_job_ids(nodes: Iterable[NodeReport], actors: Iterable[ActorReport]) -> set[str]:
    """Return the Ray job ids, in hex, of all jobs that have actors or placement groups.

    Args:
        nodes: The living nodes. Their resources contain the ids of the placement groups.
        actors: The actors that have been placed on a node.
    """
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
    """Return a snapshot with the resources that Muster's runs and other programs use on each node.

    Args:
        nodes: The living nodes.
        actors: The actors that have a node, except actors in placement groups.
        submissions: Mapping from Ray job id to submission id. The entry is missing or empty if the
            Ray job was not submitted through the dashboard.
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

    #: `ours[node id][resource]`: amount of the resource that the Ray jobs of Muster's runs hold.
    ours: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    used: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for node_id, submission_id, amounts in _list_uses(nodes, actors, submissions):
        run_id = run_id_of_submission(submission_id)
        if run_id and node_id in unique_names and amounts.get(accelerator):
            used[run_id][unique_names[node_id]] += amounts[accelerator]
            for resource in (accelerator, "CPU"):
                ours[node_id][resource] += amounts.get(resource, 0.0)

    cluster_nodes = [
        _make_node(node, unique_names[node.node_id], accelerator, ours[node.node_id])
        for node in nodes
    ]
    return Cluster(
        nodes=tuple(sorted(cluster_nodes, key=lambda node: node.name)),
        used={run_id: dict(gpus_on) for run_id, gpus_on in used.items()},
        accelerator=accelerator,
    )


def _list_uses(
    nodes: Iterable[NodeReport], actors: Iterable[ActorReport], submissions: Mapping[str, str]
) -> Iterator[tuple[str, str, Mapping[str, float]]]:
    """Yield node id, submission id and resource amounts of each actor and each placed bundle.

    The submission id is an empty string if the Ray job that owns the actor or the bundle was not
    submitted through the dashboard.
    """
    for actor in actors:
        # The dashboard starts a supervisor actor for each submitted job. This actor belongs to the
        # dashboard's own Ray job and not to the submitted job. So take the submission id from the
        # name of the actor, not from the actor's Ray job.
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


# The results are cached, because each report of a large cluster has the same thousands of names.
@lru_cache(maxsize=16_384)
def _parse_bundle_resource(key: str) -> tuple[str, str, str] | None:
    """Split the name that Ray gives to a resource in a bundle of a placement group.

    Returns:
        Name of the plain resource, index of the bundle, and id of the placement group. None if the
        key is not such a name.
    """
    match = _BUNDLE_RESOURCE.fullmatch(key)
    return (match[1], match[2], match[3]) if match else None


def _used_amount(node: NodeReport, resource: str) -> float:
    """Return the used amount of a resource of a node."""
    # Before a new node has reported its free resources, all of its resources count as used.
    return node.own.get(resource, 0.0) - node.available.get(resource, 0.0)


def _make_node(
    node: NodeReport, name: str, accelerator: str, ours: Mapping[str, float]
) -> ClusterNode:
    """Convert the report of a node into a `ClusterNode`.

    Args:
        node: The control store's report about the node.
        name: Unique name of the node in the cluster.
        accelerator: Ray's name for the accelerator of the cluster.
        ours: Mapping from resource name to the amount that the Ray jobs of Muster's runs hold on
            the node.
    """

    def used_by_others(resource: str) -> float:
        used = _used_amount(node, resource) - ours.get(resource, 0.0)
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


#: Numbers of the states in which an actor can hold resources: PENDING_CREATION (the constructor of
#: the actor runs), ALIVE and RESTARTING. Source: ray/protobuf/gcs.proto, ActorTableData.ActorState.
_PLACED_STATES = (1, 2, 3)


@dataclass(slots=True)
class ClusterReader:
    """Reads snapshots of one Ray cluster. Use it in one asyncio loop and call `close` at the end.

    The reader asks the dashboard only for the address of the cluster's control store. All other
    data comes from the control store over a gRPC channel. After an error, the reader opens a new
    channel.
    """

    #: URL of the cluster's dashboard.
    _address: str
    #: Credentials for requests to the cluster.
    credentials: Credentials
    _dashboard: Dashboard | None = None
    #: Connection to the control store, or None before the first snapshot and after an error.
    _store: _ControlStore | None = None
    #: Lock for the connection. A method holds the lock while the method uses the connection.
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def look(self, *, within_s: float) -> Cluster:
        """Return a snapshot of the cluster.

        A snapshot shows newly used resources within milliseconds and newly freed resources within
        about 0.1 s. The first call in a process takes a second longer, because it imports Ray. This
        second does not count against the deadline.

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
            raise NoAnswer(
                f"the Ray cluster at {self._address} did not answer within {within_s:g} s"
            ) from error

    async def show_demand(self, bundles: Sequence[Mapping[str, float]], *, within_s: float) -> None:
        """Ask the cluster's autoscaler for enough nodes to hold all resource bundles at once.

        Do nothing if the last snapshot failed, because the failure has closed the connection. See
        `control_store.request_nodes`.

        Args:
            bundles: For each bundle, a mapping from resource name to amount. An empty list
                withdraws the previous request.
            within_s: Time limit of a request in seconds. Two requests are sent, one for each
                version of Ray's autoscaler.

        Raises:
            NoAnswer, Denied: The control store did not answer.
        """
        async with self._lock:
            if self._store is not None:
                await asyncio.to_thread(self._store.show_demand, bundles, within_s)

    async def close(self) -> None:
        """Close the connections to the dashboard and to the control store."""
        self._close_store()
        if self._dashboard is not None:
            await self._dashboard.aclose()

    async def _read_snapshot(self, within_s: float) -> Cluster:
        """Read a snapshot of the cluster over the open gRPC channel, or else over a new channel."""
        if self._store is not None:
            # Ignore a failure here: after a restart of the cluster's head node, the control store
            # may have a new address. The code below asks the dashboard for the address.
            with contextlib.suppress(NoAnswer):
                return await self._read(self._store, within_s)
        if self._dashboard is None:
            self._dashboard = Dashboard(self._address, credentials=self.credentials)
        gcs_address = await self._dashboard.gcs_address()
        has_token = self.credentials.has_token
        self._store = await asyncio.to_thread(_ControlStore, gcs_address, has_token=has_token)
        return await self._read(self._store, within_s)

    async def _read(self, store: _ControlStore, within_s: float) -> Cluster:
        """Read a snapshot of the cluster's resources in a thread.

        After an error, the gRPC channel is closed.
        """
        try:
            return await asyncio.to_thread(store.read, within_s)
        except BaseException:
            # If the caller's timeout has cancelled this coroutine, `store.read` still waits for
            # replies in its thread. Close the channel to end this wait.
            self._close_store()
            raise

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


class _ControlStore:
    """Blocking gRPC connection to the control store of a Ray cluster.

    Data that does not change, such as the names of the nodes, is requested once and cached.
    """

    def __init__(self, gcs_address: str, *, has_token: bool) -> None:
        self._gcs_address = gcs_address
        self._channel = open_channel(gcs_address, has_token=has_token)
        self._usage = prepare_request(self._channel, "NodeResourceInfo", "GetAllResourceUsage")
        self._nodes = prepare_request(self._channel, "NodeInfo", "GetAllNodeInfo")
        self._actors = prepare_request(self._channel, "ActorInfo", "GetAllActorInfo")
        self._jobs = prepare_request(self._channel, "JobInfo", "GetAllJobInfo")
        self._cluster = prepare_request(self._channel, "NodeInfo", "GetClusterId")
        #: Ray's id of the cluster. An empty string before the first snapshot.
        self._id = ""
        #: Mapping from node id to GcsNodeInfo message, for all known nodes.
        self._infos: dict[bytes, Any] = {}
        #: Ray's id of the head node, in hex. An empty string before the first snapshot.
        self._head = ""
        #: Mapping from Ray job id to submission id. The submission id is empty if the Ray job was
        #: not submitted through the dashboard.
        self._submissions: dict[str, str] = {}

    def close(self) -> None:
        """Close the gRPC channel. Pending requests fail."""
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
        """Ask the cluster's autoscaler for nodes. See `control_store.request_nodes`."""
        with convert_grpc_errors(self._gcs_address):
            request_nodes(self._channel, bundles, within_s)

    def _request_reports(self, within_s: float) -> tuple[list[NodeReport], list[ActorReport]]:
        """Ask the control store for reports on all nodes and on the actors that hold GPUs.

        An actor is left out if it has no node yet, or if it belongs to a placement group.
        """
        usage_reply = self._usage(within_s)
        # Request the actors after the resource usage of the nodes. Otherwise the usage could
        # contain a new actor that is missing in the list of actors. GPUs of an unlisted actor count
        # as used by other programs, so the queue would grant too few GPUs for a short time.
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
            # Skip actors in placement groups. Resources of these actors have names such as
            # `GPU_group_0_...`, and are already in the reports of the nodes. Most actors are in a
            # placement group, so the snapshot becomes much faster.
            if any(name in actor.required_resources for name in ACCELERATORS)
            and actor.address.node_id
        ]
        return nodes, actors

    def _make_reports(self, usages: Iterable[Any], within_s: float) -> list[NodeReport]:
        """Combine the reported usage of each node with the cached data about the node.

        Args:
            usages: One usage message of the control store for each node.
            within_s: Deadline in seconds of a request for data that is not cached yet.
        """
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
            # Another head node means that another cluster runs at this address. Discard the cached
            # submission ids: the new cluster numbers its Ray jobs from 1 again.
            self._head = head
            self._id = self._cluster(within_s).result().cluster_id.hex()
            self._submissions.clear()
        return reports

    def _request_submissions(self, job_ids: Iterable[str], within_s: float) -> None:
        """Request and cache the submission ids of Ray jobs.

        Jobs whose submission id is already in the cache are skipped.
        """
        replies = {
            job_id: self._jobs(
                within_s,
                job_or_submission_id=job_id,
                skip_submission_job_info_field=True,
                # Do not ask whether the jobs have running tasks. The control store would contact
                # every driver before it replies, which can take long.
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
    """Import Ray's modules, which takes a second.

    Call this before a snapshot, so that the import does not use up the snapshot's time limit.
    """
    importlib.import_module("ray.core.generated.gcs_service_pb2_grpc")
    importlib.import_module("ray._private.grpc_utils")
    importlib.import_module("ray._private.authentication.http_token_authentication")
