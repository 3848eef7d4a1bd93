"""The nodes that the queue places gangs on: of Ray clusters, of a pool's table, or this machine."""

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
from tasks.queue.settings import DEFAULT_POOL, PoolSettings, TableNode, merged
from tasks.ray.dashboard import Credentials, Denied, NoAnswer
from tasks.ray.usage import Cluster, ClusterLook, ClusterNode
from tasks.spec.words import commas, counted

_log = logging.getLogger(__name__)

#: The end of the name of a node that shares it with another one.
_SUFFIX = re.compile(r"/[0-9a-f]{8}$")


def bare_name(name: str) -> str:
    """A node's name without what tells it from others of the same name."""
    return _SUFFIX.sub("", name)


def why_never(demand: Demand, cluster: Cluster, *, only: str = "") -> str:
    """Why the demand can't be met even by a cluster that is free; empty where it can.

    CPUs that nobody knows are not counted. A drained node counts: it will be back.

    Args:
        only: the name of the one node that it can have, the host of its process.
    """
    nodes = [node for node in cluster.nodes if only in ("", node.name)]
    if only and not nodes:
        there = commas(node.name for node in cluster.nodes) or "none"
        return (
            f"the run was started on {only}, which is none of the nodes of its work pool: {there}. "
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
        counted(node.gpus, cluster.accelerator)
        + ("" if node.cpus is None else f" and {counted(node.cpus, 'CPU')}")
        for node in nodes
    )
    there = commas(f"{number} with {shape}" for shape, number in shapes.items()) or "none"
    return (
        f"the run asks for {demand.in_words(cluster.accelerator)}, and {len(fitting)} of the "
        f"cluster's nodes are that large; there are: {there}. Ask for less, or for another cluster"
    )


#: A cluster that let a look wait for so long is asked in the background until it answers: it would
#: hold up the gangs of all the others.
_PATIENT_S = 30.0
_ASK_EACH_S = 1.0
#: A GPU of this machine may break.
_GPUS_EVERY_S = 60.0


NO_TABLE = (
    "the work pool lists none: a run without a Ray cluster (ray.address) is placed on the nodes in "
    "the settings of its pool: muster queue set node.NAME=GPUS"
)


class NoCapacity(Exception):
    """Nobody can say now what there is; the message says why, and what helps. Ask again."""


@dataclass(slots=True, kw_only=True)
class Capacity:
    """What there is, cluster by cluster. Use it in one asyncio loop, and `close` it."""

    #: A run that names no cluster, in a pool without a table of nodes, is placed on this machine.
    here: bool = False
    #: For one look at a cluster.
    within_s: float = 5.0
    #: The address of the cluster of this process's own run; empty where it has none.
    own: str = ""
    #: At the cluster of an address.
    look: Callable[[str, Credentials], ClusterLook] = ClusterLook
    clock: Callable[[], float] = time.monotonic
    _looks: dict[str, ClusterLook] = field(default_factory=dict)
    #: `[address]`: what was said of it, until the task has ended.
    _silent: dict[str, tuple[str, asyncio.Task[None]]] = field(default_factory=dict)
    #: And when they were read, by the clock.
    _local: tuple[Devices | None, float] = None, 0.0

    async def of(self, key: str, settings: Mapping[str, PoolSettings]) -> Cluster:
        """The cluster as it is now, whatever is drained.

        Args:
            key: the address of its dashboard; empty for the nodes of runs that name none.
            settings: of the work pools, with their tables of nodes.

        Raises: NoCapacity.
        """
        every = merged(settings.values())
        if key:
            is_own = key == self.own
            return await self._look(key, Credentials.of(key, every.clusters, is_own=is_own))
        nodes = [await self._of_table(node) for node in every.nodes]
        if self.here and not settings.get(DEFAULT_POOL, PoolSettings()).nodes:
            nodes = [*(node for node in nodes if node.name != host_name()), await self._here()]
        if not nodes:
            raise NoCapacity(NO_TABLE)
        return Cluster(nodes=tuple(nodes))

    async def show_demand(self, address: str, bundles: Sequence[Mapping[str, float]]) -> None:
        """Have the autoscaler of a cluster see what its nodes are to hold in all.

        Raises: NoAnswer, Denied.
        """
        await self._looks[address].show_demand(bundles, within_s=self.within_s)

    async def _of_table(self, node: TableNode) -> ClusterNode:
        known = ClusterNode(**node.model_dump(), devices=tuple(range(node.gpus)))
        if node.name != host_name():
            return known
        try:
            here = await self._here()
        except NoCapacity as error:
            # The other hosts of the table are as good as before.
            _log.warning("nothing of %s is given: %s", node.name, error)
            return replace(known, others_gpus=float(node.gpus))
        # A table stands in for GPUs where nobody sees any.
        devices = (here.devices or known.devices)[: node.gpus]
        return replace(known, gpus=len(devices), devices=devices, leased=here.leased)

    async def _here(self) -> ClusterNode:
        local, read_at = self._local
        if local is None or self.clock() - read_at >= _GPUS_EVERY_S:
            local = await devices_here()
            self._local = local, self.clock()
        devices = local.indices
        return ClusterNode(
            name=host_name(), gpus=len(devices), devices=devices, leased=leased(local)
        )

    async def close(self) -> None:
        while self._silent:
            self._silent.popitem()[1][1].cancel()
        while self._looks:
            await self._looks.popitem()[1].close()

    async def _look(self, address: str, credentials: Credentials) -> Cluster:
        if address in self._silent:
            why, task = self._silent[address]
            if not task.done():
                raise NoCapacity(why)
            del self._silent[address]
        look = self._looks.get(address)
        if look is not None and look.credentials != credentials:
            await look.close()
            look = None
        look = self._looks[address] = look or self.look(address, credentials)
        began = self.clock()
        try:
            return await look.look(within_s=self.within_s)
        except Denied as error:
            unlisted = "it gets no token and no headers, as the work pool does not list it"
            unlisted = f"{unlisted} (muster queue set cluster.{address}=0): "
            raise NoCapacity(f"{'' if credentials.has_token else unlisted}{error}") from error
        except NoAnswer as error:
            if self.clock() - began >= self.within_s and address not in self._silent:
                self._silent[address] = str(error), asyncio.create_task(_answered(look))
            raise NoCapacity(str(error)) from error
        except Exception as error:  # An address is a user's: whatever stands there may answer.
            raise NoCapacity(f"{address} is no Ray cluster that Muster knows: {error!r}") from error


async def _answered(look: ClusterLook) -> None:
    """Return once there is an answer, whatever it is."""
    while True:
        try:
            await look.look(within_s=_PATIENT_S)
            return
        except NoAnswer:
            await asyncio.sleep(_ASK_EACH_S)
        except Exception:  # Whoever looks next is told.
            return


async def devices_here() -> Devices:
    """The devices of this machine that may be given.

    Raises: NoCapacity, where a driver does not answer, or MUSTER_GPUS can't be read.
    """
    try:
        return await asyncio.to_thread(Devices.here)
    except BadDevices as error:
        raise NoCapacity(str(error)) from error
    except OSError as error:
        raise NoCapacity(
            f"{error.strerror}: {error.filename}. Mend the driver: nvidia-smi says more"
        ) from error


def with_drained(cluster: Cluster, names: Collection[str]) -> Cluster:
    """With the nodes marked that are drained; the name of a host stands for all of its nodes."""
    nodes = (
        replace(node, is_drained=True) if {node.name, bare_name(node.name)} & {*names} else node
        for node in cluster.nodes
    )
    return replace(cluster, nodes=tuple(nodes))
