"""What the queue places gangs on: Ray clusters, a pool's table of nodes, or this machine."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace

from tasks.processes.identity import host_name
from tasks.processes.machine import gpus_seen
from tasks.queue.free import bare_name
from tasks.queue.nodes import Cluster, Node
from tasks.queue.settings import PoolSettings
from tasks.ray.dashboard import Denied, NoAnswer
from tasks.ray.usage import ClusterLook, ClusterUse

#: How long one look at a cluster may take.
LOOK_WITHIN_S = 5.0
#: A cluster that let a look wait for so long is asked in the background until it answers: it would
#: hold up the gangs of all the others.
_PATIENT_S = 30.0
_ASK_EACH_S = 1.0


class NoCapacity(Exception):
    """Nobody can say now what there is; the message says why, and what helps. Ask again."""


class Capacity:
    """What there is, cluster by cluster. Use it in one asyncio loop, and `close` it.

    Args:
        here: a run that names no cluster, in a pool without a table of nodes, is placed on this
            machine.
        within_s: for one look at a cluster.
        look: at the cluster of an address.
    """

    def __init__(
        self,
        *,
        here: bool = False,
        within_s: float = LOOK_WITHIN_S,
        look: Callable[[str], ClusterLook] = ClusterLook,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._here = here
        self._within_s = within_s
        self._make_look = look
        self._clock = clock
        self._looks: dict[str, ClusterLook] = {}
        #: `[address]`: what was said of it, until the task has ended.
        self._silent: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._local: Cluster | None = None

    async def of(self, key: str, settings: PoolSettings) -> Cluster:
        """The cluster as it is now.

        Args:
            key: the address of its dashboard; empty for the nodes of runs that name none.
            settings: of the work pool: its table of nodes, and which nodes are drained.

        Raises: NoCapacity.
        """
        if key:
            cluster = _cluster_of(key, await self._look(key))
        elif settings.nodes:
            cluster = _table_of(settings)
        elif self._here:
            # The GPUs of a machine stay the same.
            cluster = self._local = self._local or await local_cluster()
        else:
            raise NoCapacity(
                "the work pool lists none: a run without a Ray cluster (ray.address) is placed on "
                "the nodes in the settings of its pool"
            )
        return _drained(cluster, settings)

    async def close(self) -> None:
        silent, self._silent = self._silent, {}
        for _, task in silent.values():
            task.cancel()
        looks, self._looks = self._looks, {}
        for look in looks.values():
            await look.close()

    async def _look(self, address: str) -> ClusterUse:
        if address in self._silent:
            why, task = self._silent[address]
            if not task.done():
                raise NoCapacity(why)
            del self._silent[address]
        if address not in self._looks:
            self._looks[address] = self._make_look(address)
        look = self._looks[address]
        began = self._clock()
        try:
            return await look.look(within_s=self._within_s)
        except (NoAnswer, Denied) as error:
            if self._clock() - began >= self._within_s and address not in self._silent:
                self._silent[address] = str(error), asyncio.create_task(_answered(look))
            raise NoCapacity(str(error)) from error
        except Exception as error:  # An address is a user's: whatever stands there may answer.
            raise NoCapacity(f"{address} is no Ray cluster that Muster knows: {error!r}") from error


async def _answered(look: ClusterLook) -> None:
    """Return once there is an answer, whatever it is."""
    while True:
        try:
            await look.look(within_s=_PATIENT_S)
        except NoAnswer:
            await asyncio.sleep(_ASK_EACH_S)
        except Exception:  # Whoever looks next is told.
            return
        else:
            return


async def local_cluster() -> Cluster:
    """This machine as one node, with the GPUs that NVIDIA's driver sees; without one, with none.

    Who uses them is not told, and CPUs are not counted.

    Raises: NoCapacity, where there is a driver that does not answer.
    """
    seen = await asyncio.to_thread(gpus_seen)
    if seen["problem"]:
        raise NoCapacity(
            f"the GPUs of this machine can't be counted: {seen['problem']}. "
            "Mend the driver, or list the machine in the nodes of the work pool"
        )
    return Cluster(key="", nodes=(Node(name=host_name(), gpus=len(seen["gpus"])),))


def _cluster_of(key: str, use: ClusterUse) -> Cluster:
    return Cluster(
        key=key,
        nodes=tuple(
            Node(
                name=node.name,
                gpus=math.floor(node.gpus),
                cpus=node.cpus,
                others_gpus=node.others_gpus,
                others_cpus=node.others_cpus,
                resources=node.resources,
                is_drained=node.is_draining,
            )
            for node in use.nodes
        ),
        taken=use.taken,
        is_live=True,
        accelerator=use.accelerator,
    )


def _table_of(settings: PoolSettings) -> Cluster:
    return Cluster(
        key="",
        nodes=tuple(Node(name=n.name, gpus=n.gpus, cpus=n.cpus) for n in settings.nodes),
    )


def _drained(cluster: Cluster, settings: PoolSettings) -> Cluster:
    """With the nodes marked that an operator has drained; the name of a host stands for all of its
    nodes."""
    drained = set(settings.drained)
    if not drained:
        return cluster
    nodes = tuple(
        replace(node, is_drained=True) if {node.name, bare_name(node.name)} & drained else node
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)
