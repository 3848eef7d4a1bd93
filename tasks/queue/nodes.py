"""Read the nodes on which runs get GPUs.

They are the nodes of Ray clusters, the nodes that the settings of work pools list, or this machine.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tasks.processes.devices import BadDevices, Devices, read_leases
from tasks.processes.identity import host_name
from tasks.processes.registry import find_run_ids
from tasks.queue.packing import Demand
from tasks.queue.settings import DEFAULT_POOL, PoolSettings, TableNode, merge_settings
from tasks.ray.dashboard import Credentials, Denied, NoAnswer
from tasks.ray.usage import Cluster, ClusterNode, ClusterReader
from tasks.spec.formatting import format_count, join_commas

_log = logging.getLogger(__name__)

#: Matches the suffix that distinguishes the names of nodes with the same host name. The suffix is a
#: slash and the first eight characters of Ray's id of the node.
_SUFFIX = re.compile(r"/[0-9a-f]{8}$")


def bare_name(name: str) -> str:
    """Return the name of a node without its suffix, for example `gpu-1` for `gpu-1/0a1b2c3d`.

    Suffixes distinguish nodes with the same host name.
    """
    return _SUFFIX.sub("", name)


def explain_infeasible(demand: Demand, cluster: Cluster, *, only_node: str = "") -> str:
    """Return the reason why a run could not start even on an empty cluster.

    If the number of CPUs of a node is unknown, it counts as sufficient. Drained nodes count as
    available, because a drain is temporary.

    Args:
        demand: GPUs and CPUs that the run needs.
        cluster: Snapshot of the cluster.
        only_node: Name of the only node that the run may use. Empty if the run may use every node.

    Returns:
        The reason for the user, or an empty string if the cluster is large enough.
    """
    nodes = [node for node in cluster.nodes if only_node in ("", node.name)]
    if only_node and not nodes:
        node_names = join_commas(node.name for node in cluster.nodes) or "none"
        return (
            f"the run was started on {only_node}, but the work pool has only these nodes: "
            f"{node_names}. Start the run on one of these nodes, or queue the run with `muster "
            f"submit`. To add {only_node} to the pool: `muster queue set node.{only_node}=GPUS`"
        )
    fitting = [
        node
        for node in nodes
        if node.gpus >= demand.gpus_per_node
        and (node.cpus is None or node.cpus >= demand.cpus_per_node)
    ]
    if len(fitting) >= demand.nodes:
        return ""
    shapes = Counter(
        format_count(node.gpus, cluster.accelerator)
        + ("" if node.cpus is None else f" and {format_count(node.cpus, 'CPU')}")
        for node in nodes
    )
    existing = join_commas(f"{number} with {shape}" for shape, number in shapes.items()) or "none"
    node_count = len(nodes)
    if not nodes:
        count = "the cluster has no nodes"
    elif not fitting and node_count == 1:
        count = "the cluster's only node is too small"
    elif not fitting:
        count = f"none of the cluster's {node_count} nodes is large enough"
    else:
        verb = "is" if len(fitting) == 1 else "are"
        count = f"only {len(fitting)} of the cluster's {node_count} nodes {verb} large enough"
    trial_advice = ""
    if nodes and not cluster.id and not any(node.gpus for node in nodes):
        trial_advice = (
            ". To try the run on a machine without GPUs, set MUSTER_GPUS=0 before `muster train` "
            "or `muster up`, so that Muster counts one made-up GPU"
        )
    return (
        f"the run needs {demand.describe(cluster.accelerator)}, but {count}. The nodes are: "
        f"{existing}. Request fewer GPUs or CPUs, or use another cluster. If the run needs no "
        f"GPUs, remove `gang` from the spec{trial_advice}"
    )


#: Deadline, in seconds, of a background request for the nodes of a cluster. Background requests are
#: sent if the cluster did not answer a scheduling pass in time, so that the next scheduling passes
#: do not wait for the cluster.
_BACKGROUND_TIMEOUT_S = 30.0
#: Time, in seconds, between two background requests to a cluster that does not answer.
_BACKGROUND_INTERVAL_S = 1.0
#: Longest age, in seconds, of the list of usable GPUs of this machine. An older list is read again,
#: because a GPU may have failed.
_DEVICES_LIFETIME_S = 60.0

#: Reason why a run without a Ray cluster cannot start if no work pool lists nodes.
NO_NODES = "the work pool lists no nodes, and the spec names no Ray cluster (ray.address)"
#: The same reason, with advice. Only a process on the machine of a worker may use this message.
NO_TABLE = (
    f"{NO_NODES}. To add the machine of this worker with N GPUs: `muster queue set "
    f"node.{host_name()}=N`"
)


class NoCapacity(Exception):
    """The nodes of a cluster cannot be read now. The message says why. Callers may try again."""


@dataclass(slots=True, kw_only=True)
class Capacity:
    """Reads the nodes of Ray clusters, and the nodes that the settings of work pools list.

    Use an instance in one asyncio loop only, and call `close` at the end.
    """

    #: True if runs without a Ray cluster may use this machine. This field has an effect only if the
    #: settings of the work pool `gang` list no nodes.
    includes_this_machine: bool = False
    #: Deadline for reading one cluster, in seconds.
    within_s: float = 5.0
    #: Address of the Ray cluster of the run that this process executes. Empty in the process of a
    #: worker, because a worker executes no run itself.
    own_cluster: str = ""
    #: Function that creates the reader of a cluster from the address and the credentials of the
    #: cluster.
    make_reader: Callable[[str, Credentials], ClusterReader] = ClusterReader
    #: Function that returns the current time in seconds, by a monotonic clock.
    clock: Callable[[], float] = time.monotonic
    #: Mapping from the address of a cluster to its `ClusterReader`.
    _readers: dict[str, ClusterReader] = field(default_factory=dict)
    #: Clusters that did not answer in time: a mapping from address to the error and a task. The
    #: task requests the nodes of the cluster in the background until the cluster answers.
    _silent_clusters: dict[str, tuple[str, asyncio.Task[None]]] = field(default_factory=dict)
    #: GPU devices of this machine, and the time (a value of `clock`) at which they were read.
    #: Before the first reading, the devices are None.
    _local_devices: tuple[Devices | None, float] = None, 0.0

    async def read_cluster(self, key: str, settings: Mapping[str, PoolSettings]) -> Cluster:
        """Read the current nodes of a cluster.

        The result also contains drained nodes, but does not mark them. Call `mark_drained` with the
        result to mark them.

        Args:
            key: Address of the Ray cluster's dashboard. An empty string stands for the nodes
                without Ray in the settings of the work pools.
            settings: Mapping from pool name to the settings of the work pool.

        Raises:
            NoCapacity: The nodes cannot be read.
        """
        all_settings = merge_settings(settings.values())
        if key:
            is_own = key == self.own_cluster
            credentials = Credentials.of(key, all_settings.clusters, is_own=is_own)
            return await self._read_ray_cluster(key, credentials)
        nodes = [await self._read_table_node(node) for node in all_settings.nodes]
        if self.includes_this_machine and not settings.get(DEFAULT_POOL, PoolSettings()).nodes:
            other_nodes = (node for node in nodes if node.name != host_name())
            nodes = [*other_nodes, await self.read_this_machine()]
        if not nodes:
            raise NoCapacity(NO_TABLE)
        return Cluster(nodes=tuple(nodes))

    async def show_demand(self, address: str, bundles: Sequence[Mapping[str, float]]) -> None:
        """Request nodes from the autoscaler of a Ray cluster.

        Call `read_cluster` for this cluster at least once before this call.

        Args:
            address: Address of the cluster.
            bundles: One mapping for each requested node, from the name of a resource to its amount.

        Raises:
            NoAnswer, Denied: The cluster did not answer, or rejected the request.
        """
        await self._readers[address].show_demand(bundles, within_s=self.within_s)

    async def _read_table_node(self, node: TableNode) -> ClusterNode:
        """Return the present state of a node.

        The GPUs of the node are read only if the node is this machine.

        Args:
            node: The node, as the settings of a work pool list it.
        """
        listed_node = ClusterNode(**node.model_dump(), devices=tuple(range(node.gpus)))
        if node.name != host_name():
            return listed_node
        try:
            machine = await self.read_this_machine()
        except NoCapacity as error:
            # Show all GPUs of this machine as used, instead of raising the error. The other nodes
            # in the settings can then still be used.
            _log.warning("Muster grants no GPU of the node %s: %s", node.name, error)
            return replace(listed_node, others_gpus=float(node.gpus))
        # Without visible GPUs, `machine.devices` is empty. Then use the number of GPUs in the
        # settings, with devices numbered from 0.
        devices = (machine.devices or listed_node.devices)[: node.gpus]
        return replace(
            listed_node,
            gpus=len(devices),
            devices=devices,
            leased=machine.leased,
            run_ids=machine.run_ids,
        )

    async def read_this_machine(self) -> ClusterNode:
        """Return the GPUs of this machine and their leases.

        Raises:
            NoCapacity: The GPUs cannot be read.
        """
        devices, read_at = self._local_devices
        if devices is None or self.clock() - read_at >= _DEVICES_LIFETIME_S:
            devices = await read_local_devices()
            self._local_devices = devices, self.clock()
        leased = read_leases(devices)
        return ClusterNode(
            name=host_name(),
            gpus=len(devices.indices),
            devices=devices.indices,
            leased=leased,
            run_ids=find_run_ids() if leased else {},
        )

    async def close(self) -> None:
        """Close the connections to all clusters, and end the background tasks."""
        while self._silent_clusters:
            _, (_, task) = self._silent_clusters.popitem()
            task.cancel()
        while self._readers:
            _, reader = self._readers.popitem()
            await reader.close()

    async def _read_ray_cluster(self, address: str, credentials: Credentials) -> Cluster:
        """Read the nodes of the Ray cluster at an address.

        Raises:
            NoCapacity: The cluster did not answer in time, or its answer cannot be used.
        """
        if address in self._silent_clusters:
            earlier_error, task = self._silent_clusters[address]
            if not task.done():
                raise NoCapacity(earlier_error)
            del self._silent_clusters[address]
        reader = self._readers.get(address)
        if reader is not None and reader.credentials != credentials:
            await reader.close()
            reader = None
        if reader is None:
            reader = self.make_reader(address, credentials)
            self._readers[address] = reader
        started_s = self.clock()
        try:
            return await reader.look(within_s=self.within_s)
        except Denied as error:
            if credentials.has_token:
                raise NoCapacity(str(error)) from error
            raise NoCapacity(
                f"{error}. The work pool does not list this cluster, so Muster sent no token and "
                "no headers. To list this cluster as a cluster without an autoscaler: muster queue "
                f"set cluster.{address}=0"
            ) from error
        except NoAnswer as error:
            took_too_long = self.clock() - started_s >= self.within_s
            if took_too_long and address not in self._silent_clusters:
                task = asyncio.create_task(_wait_for_answer(reader))
                self._silent_clusters[address] = str(error), task
            raise NoCapacity(str(error)) from error
        except Exception as error:  # Users choose the address, so the reply can be anything.
            raise NoCapacity(
                f"the answer from {address} does not come from a Ray cluster. Check the address: "
                f"{error!r}"
            ) from error


async def _wait_for_answer(reader: ClusterReader) -> None:
    """Request the nodes of a cluster repeatedly until the cluster answers, even with an error."""
    while True:
        try:
            await reader.look(within_s=_BACKGROUND_TIMEOUT_S)
            return
        except NoAnswer:
            await asyncio.sleep(_BACKGROUND_INTERVAL_S)
        except Exception:  # The next scheduling pass asks the cluster again and reports the error.
            return


async def read_local_devices() -> Devices:
    """Return the GPU devices of this machine that runs may use.

    Raises:
        NoCapacity: A GPU driver does not answer, or the environment variable MUSTER_GPUS is
            invalid.
    """
    try:
        return await asyncio.to_thread(Devices.here)
    except BadDevices as error:
        raise NoCapacity(str(error)) from error
    except OSError as error:
        raise NoCapacity(
            f"the GPUs of {host_name()} cannot be read: {error.strerror}: {error.filename}. Check "
            "the GPU driver with nvidia-smi"
        ) from error


def mark_drained(cluster: Cluster, names: Collection[str]) -> Cluster:
    """Return a copy of a cluster in which the nodes with the given names are marked as drained.

    Args:
        cluster: The cluster.
        names: Names of nodes or hosts. The name of a host stands for all nodes on that host.
    """
    drained_names = set(names)
    nodes = (
        replace(node, is_drained=True)
        if {node.name, bare_name(node.name)} & drained_names
        else node
        for node in cluster.nodes
    )
    return replace(cluster, nodes=tuple(nodes))
