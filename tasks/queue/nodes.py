"""The nodes on which gangs are placed: of Ray clusters, of a pool's node table, or this machine."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tasks.processes.devices import BadDevices, Devices, leased
from tasks.processes.identity import host_name
from tasks.queue.packing import Demand
from tasks.queue.settings import DEFAULT_POOL, PoolSettings, TableNode, merge_settings
from tasks.ray.dashboard import Credentials, Denied, NoAnswer
from tasks.ray.usage import Cluster, ClusterNode, ClusterReader
from tasks.spec.formatting import format_count, join_commas

_log = logging.getLogger(__name__)

#: End of the name of a node that shares its name with another node: a slash and a part of its id.
_SUFFIX = re.compile(r"/[0-9a-f]{8}$")


def bare_name(name: str) -> str:
    """Return a node's name without the suffix that separates nodes of the same name."""
    return _SUFFIX.sub("", name)


def explain_infeasible(demand: Demand, cluster: Cluster, *, only: str = "") -> str:
    """Return why a cluster cannot meet the demand even if it is empty; empty if it can.

    Unknown numbers of CPUs count as enough. Drained nodes count, because a drain is temporary.

    Args:
        demand: What the gang needs.
        cluster: The cluster.
        only: Name of the only node that the gang may use, or an empty string.
    """
    nodes = [node for node in cluster.nodes if only in ("", node.name)]
    if only and not nodes:
        node_names = join_commas(node.name for node in cluster.nodes) or "none"
        return (
            f"the run was started on {only}, which is none of the nodes of its work pool: "
            f"{node_names}. "
            f"Start it there, or with `muster submit`; `muster queue set node.{only}=GPUS` adds "
            "this one"
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
    return (
        f"the run asks for {demand.in_words(cluster.accelerator)}, and {len(fitting)} of the "
        f"cluster's nodes are that large; there are: {existing}. Ask for less, or for another "
        "cluster"
    )


#: A cluster that has not answered in time is asked in the background, with this timeout, until it
#: answers. Otherwise it would delay the gangs of all other clusters.
_BACKGROUND_TIMEOUT_S = 30.0
#: Seconds between two such requests.
_BACKGROUND_INTERVAL_S = 1.0
#: Seconds after which the GPUs of this machine are read again. A GPU may have failed.
_DEVICES_LIFETIME_S = 60.0


NO_TABLE = (
    "the work pool lists none: a run without a Ray cluster (ray.address) is placed on the nodes in "
    "the settings of its pool: muster queue set node.NAME=GPUS"
)


class NoCapacity(Exception):
    """The nodes cannot be read now. The message says why and what to do. May be tried again."""


@dataclass(slots=True, kw_only=True)
class Capacity:
    """Reads the nodes of each cluster. Use it in one asyncio loop and call `close` at the end."""

    #: True to place runs without a cluster on this machine if the pool has no node table.
    here: bool = False
    #: Deadline for reading one cluster, in seconds.
    within_s: float = 5.0
    #: Address of the cluster of this process's own run, or an empty string.
    own: str = ""
    #: Creates the reader of a cluster from its address and its credentials.
    look: Callable[[str, Credentials], ClusterReader] = ClusterReader
    clock: Callable[[], float] = time.monotonic
    #: The readers by address.
    _looks: dict[str, ClusterReader] = field(default_factory=dict)
    #: For each cluster that does not answer: the error, and the task that asks it meanwhile.
    _silent: dict[str, tuple[str, asyncio.Task[None]]] = field(default_factory=dict)
    #: The devices of this machine, and when they were read, by the clock.
    _local: tuple[Devices | None, float] = None, 0.0

    async def of(self, key: str, settings: Mapping[str, PoolSettings]) -> Cluster:
        """Return the nodes of a cluster as they are now, without regard to drains.

        Args:
            key: Address of the cluster's dashboard. Empty: the nodes for runs without a cluster.
            settings: Settings of the work pools, by name.

        Raises:
            NoCapacity: The nodes cannot be read.
        """
        all_settings = merge_settings(settings.values())
        if key:
            credentials = Credentials.of(key, all_settings.clusters, is_own=key == self.own)
            return await self._read_cluster(key, credentials)
        nodes = [await self._table_node(node) for node in all_settings.nodes]
        if self.here and not settings.get(DEFAULT_POOL, PoolSettings()).nodes:
            other_nodes = (node for node in nodes if node.name != host_name())
            nodes = [*other_nodes, await self._this_machine()]
        if not nodes:
            raise NoCapacity(NO_TABLE)
        return Cluster(nodes=tuple(nodes))

    async def show_demand(self, address: str, bundles: Sequence[Mapping[str, float]]) -> None:
        """Ask a cluster's autoscaler for nodes; see `control_store.show_demand`.

        Raises:
            NoAnswer, Denied: The cluster did not answer.
        """
        await self._looks[address].show_demand(bundles, within_s=self.within_s)

    async def _table_node(self, node: TableNode) -> ClusterNode:
        """Return a node of a node table. For this machine, its devices are read."""
        listed_node = ClusterNode(**node.model_dump(), devices=tuple(range(node.gpus)))
        if node.name != host_name():
            return listed_node
        try:
            machine = await self._this_machine()
        except NoCapacity as error:
            # Grant nothing on this machine, but do not block the other hosts of the table.
            _log.warning("nothing of %s is given: %s", node.name, error)
            return replace(listed_node, others_gpus=float(node.gpus))
        # On a machine without visible GPUs, the numbers of the table are used.
        devices = (machine.devices or listed_node.devices)[: node.gpus]
        return replace(listed_node, gpus=len(devices), devices=devices, leased=machine.leased)

    async def _this_machine(self) -> ClusterNode:
        local, read_at = self._local
        if local is None or self.clock() - read_at >= _DEVICES_LIFETIME_S:
            local = await devices_here()
            self._local = local, self.clock()
        devices = local.indices
        return ClusterNode(
            name=host_name(), gpus=len(devices), devices=devices, leased=leased(local)
        )

    async def close(self) -> None:
        """Close the connections and end the background tasks."""
        while self._silent:
            _, (_, task) = self._silent.popitem()
            task.cancel()
        while self._looks:
            _, look = self._looks.popitem()
            await look.close()

    async def _read_cluster(self, address: str, credentials: Credentials) -> Cluster:
        if address in self._silent:
            why, task = self._silent[address]
            if not task.done():
                raise NoCapacity(why)
            del self._silent[address]
        look = self._looks.get(address)
        if look is not None and look.credentials != credentials:
            await look.close()
            look = None
        if look is None:
            look = self.look(address, credentials)
            self._looks[address] = look
        started_s = self.clock()
        try:
            return await look.look(within_s=self.within_s)
        except Denied as error:
            if credentials.has_token:
                raise NoCapacity(str(error)) from error
            raise NoCapacity(
                "it gets no token and no headers, as the work pool does not list it "
                f"(muster queue set cluster.{address}=0): {error}"
            ) from error
        except NoAnswer as error:
            if self.clock() - started_s >= self.within_s and address not in self._silent:
                task = asyncio.create_task(_wait_for_answer(look))
                self._silent[address] = str(error), task
            raise NoCapacity(str(error)) from error
        except Exception as error:  # Users choose the address, so the reply can be anything.
            raise NoCapacity(f"{address} is no Ray cluster that Muster knows: {error!r}") from error


async def _wait_for_answer(look: ClusterReader) -> None:
    """Ask a cluster until it answers anything."""
    while True:
        try:
            await look.look(within_s=_BACKGROUND_TIMEOUT_S)
            return
        except NoAnswer:
            await asyncio.sleep(_BACKGROUND_INTERVAL_S)
        except Exception:  # The next pass asks again and reports the error.
            return


async def devices_here() -> Devices:
    """Return the devices of this machine that may be granted.

    Raises:
        NoCapacity: A driver does not answer, or MUSTER_GPUS is invalid.
    """
    try:
        return await asyncio.to_thread(Devices.here)
    except BadDevices as error:
        raise NoCapacity(str(error)) from error
    except OSError as error:
        raise NoCapacity(
            f"{error.strerror}: {error.filename}. Mend the driver: nvidia-smi says more"
        ) from error


def mark_drained(cluster: Cluster, names: Collection[str]) -> Cluster:
    """Return the cluster with drained nodes marked. A host's name drains all of its nodes."""
    drained_names = set(names)
    nodes = (
        replace(node, is_drained=True)
        if {node.name, bare_name(node.name)} & drained_names
        else node
        for node in cluster.nodes
    )
    return replace(cluster, nodes=tuple(nodes))
