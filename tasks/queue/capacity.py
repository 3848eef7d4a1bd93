"""What the queue places gangs on: Ray clusters, a pool's table of nodes, or this machine.

What the nodes of a cluster have for gangs, by what the ledger grants and what the cluster shows.

The ledger knows what each run of ours was promised; the cluster knows what it has really taken,
which may be on other nodes than promised, as Ray places its groups by itself, or not yet. Where the
two differ, more is counted as held rather than less: no GPU is promised twice.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tasks.processes.identity import host_name
from tasks.processes.machine import gpus_seen
from tasks.queue.nodes import Cluster, Demand, Node
from tasks.queue.policy import NodeFree
from tasks.queue.settings import PoolSettings
from tasks.ray.dashboard import Denied, NoAnswer
from tasks.ray.usage import ClusterLook, ClusterUse

#: Ray counts in ten-thousandths.
_SLACK = 1e-4
#: The end of the name of a node that shares it with another one.
_SUFFIX = re.compile(r"/[0-9a-f]{8}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class GangHold:
    """A run of ours that was given a gang."""

    run_id: str
    demand: Demand
    #: `gpus[node name]`, as it was promised; empty where nobody promised it anything.
    gpus: Mapping[str, int] = field(default_factory=dict)


def free_of(
    cluster: Cluster, holds: Sequence[GangHold]
) -> tuple[tuple[NodeFree, ...], dict[str, dict[str, int]]]:
    """What is there for gangs, as `plan` takes it.

    A run of ours that is none of `holds` is one of the others: it belongs to another server, or
    has left something behind.

    Returns: what each node has, as if no gang held anything: nothing on a drained one, so that
    what ends there does not make room; and `held[run id][node name]` GPUs. A promise on a node that
    is not there any more stays in `held`: it takes no room, and counts for limits.
    """
    ours = {hold.run_id for hold in holds}
    foreign: dict[str, float] = {}
    for run_id, taken in cluster.taken.items():
        if run_id not in ours:
            for name, gpus in taken.items():
                foreign[name] = foreign.get(name, 0.0) + gpus
    free = tuple(
        NodeFree(
            name=node.name,
            gpus=_free_gpus(node, foreign.get(node.name, 0.0)),
            cpus=None if node.cpus is None else max(0.0, node.cpus - node.others_cpus),
        )
        for node in cluster.nodes
    )
    names = [node.name for node in cluster.nodes]
    held = {
        hold.run_id: _held(
            hold.demand, _present(hold.gpus, names), cluster.taken.get(hold.run_id, {})
        )
        for hold in holds
    }
    return free, held


def as_promised(
    cluster: Cluster,
    nodes: Sequence[NodeFree],
    held: Mapping[str, Mapping[str, int]],
    holds: Sequence[GangHold],
) -> tuple[NodeFree, ...]:
    """The same nodes with no more free than by the promises alone.

    A run that is being taken down has given its GPUs back to Ray already, and Ray may have put a
    later run there, which was promised others. Until the first one has ended, both count.

    Args:
        nodes: of `free_of`, as is `held`.
    """
    names = [node.name for node in cluster.nodes]
    promised: dict[str, int] = {}
    for hold in holds:
        for name, gpus in _present(hold.gpus, names).items():
            promised[name] = promised.get(name, 0) + gpus
    taken: dict[str, int] = {}
    for of_run in held.values():
        for name, gpus in of_run.items():
            taken[name] = taken.get(name, 0) + gpus
    most = {
        node.name: node.gpus - promised.get(node.name, 0) + taken.get(node.name, 0)
        for node in cluster.nodes
    }
    return tuple(replace(node, gpus=min(node.gpus, most[node.name])) for node in nodes)


def moved(
    cluster: Cluster, held: Mapping[str, Mapping[str, int]], holds: Sequence[GangHold]
) -> dict[str, dict[str, int]]:
    """`moved[run id][node name]` GPUs: runs that are wholly elsewhere than they were promised, as
    soon as their promise can be changed to that without promising any GPU twice."""
    names = [node.name for node in cluster.nodes]
    total = {node.name: node.gpus for node in cluster.nodes}
    promises = {hold.run_id: _present(hold.gpus, names) for hold in holds}
    found: dict[str, dict[str, int]] = {}
    for hold in holds:
        now = dict(held[hold.run_id])
        is_whole = sum(cluster.taken.get(hold.run_id, {}).values()) >= hold.demand.gpus - _SLACK
        if not hold.gpus or not is_whole or now == promises[hold.run_id]:
            continue
        others = [one for run_id, one in promises.items() if run_id != hold.run_id]
        if all(
            sum(one.get(name, 0) for one in others) + gpus <= total.get(name, 0)
            for name, gpus in now.items()
        ):
            found[hold.run_id] = promises[hold.run_id] = now
    return found


def bare_name(name: str) -> str:
    """A node's name without what tells it from others of the same name."""
    return _SUFFIX.sub("", name)


def _free_gpus(node: Node, foreign: float) -> int:
    if node.is_drained:
        return 0
    return max(0, math.floor(node.gpus - node.others_gpus - foreign + _SLACK))


def _held(
    demand: Demand, promised: Mapping[str, int], taken: Mapping[str, float]
) -> dict[str, int]:
    whole = {name: math.ceil(gpus - _SLACK) for name, gpus in taken.items() if gpus > _SLACK}
    if sum(taken.values()) >= demand.gpus - _SLACK:
        return whole
    # It may still take the rest where it was promised.
    return {
        name: max(promised.get(name, 0), whole.get(name, 0))
        for name in dict.fromkeys((*promised, *whole))
    }


def _present(promised: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """The promise by the names that the nodes have now.

    A name gets its suffix when a second node of that name comes, and loses it when the other one
    goes, as in the seconds in which a node that was restarted is there twice.
    """
    there = set(names)
    found: dict[str, int] = {}
    for name, gpus in promised.items():
        bare = bare_name(name)
        if name in there:
            now = [name]
        elif name == bare:
            now = [other for other in there if bare_name(other) == bare]
        else:
            now = [bare] if bare in there else []
        for one in now or [name]:
            found[one] = found.get(one, 0) + gpus
    return found


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
