"""The nodes that the queue places gangs on: of Ray clusters, of a pool's table, or this machine.

The ledger knows what each run of ours was promised; the cluster knows what it has really taken,
which may be on other nodes than promised, as Ray places its groups by itself, or not yet. Where the
two differ, more is counted as held rather than less: no GPU is promised twice.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar
from uuid import UUID

from tasks.processes.devices import BadDevices, Devices, leased
from tasks.processes.identity import host_name
from tasks.queue.ledger import QueueEntry
from tasks.queue.packing import Demand
from tasks.queue.settings import DEFAULT_POOL, PoolSettings, TableNode, merged
from tasks.ray.dashboard import Credentials, Denied, NoAnswer
from tasks.ray.usage import Cluster, ClusterLook, ClusterNode
from tasks.spec.words import commas, counted

_log = logging.getLogger(__name__)

#: Ray counts in ten-thousandths.
_SLACK = 1e-4
#: The end of the name of a node that shares it with another one.
_SUFFIX = re.compile(r"/[0-9a-f]{8}$")

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Who has what of a cluster, as `plan` takes it."""

    #: With all that gangs can't have among what others use.
    nodes: tuple[ClusterNode, ...]
    #: `held[flow run id][node name]` GPUs. A promise on a node that is not there any more stays: it
    #: takes no room, and counts for limits.
    held: Mapping[UUID, Mapping[str, int]]
    #: `moved[flow run id][node name]` GPUs: runs that are wholly elsewhere than they were promised,
    #: as soon as their promise can be changed to that without promising any GPU twice.
    moved: Mapping[UUID, Mapping[str, int]]


def shares_of(cluster: Cluster, gangs: Sequence[QueueEntry]) -> Shares:
    """Who has what of a cluster.

    A run of ours that is none of `gangs` is one of the others: it belongs to another server, or has
    left something behind. No node has more free than by the promises alone: a run that is being
    taken down has given its GPUs back to Ray already, and Ray may have put a later run there, which
    was promised others. Until the first one has ended, both count.
    """
    names = [node.name for node in cluster.nodes]
    names, ours = [node.name for node in cluster.nodes], {gang.request.name for gang in gangs}
    promised = {gang.id: _present(gang.promised, names) for gang in gangs}
    taken = {gang.id: cluster.taken.get(gang.request.name, {}) for gang in gangs}
    held = {one.id: _held(one.demand, promised[one.id], taken[one.id]) for one in gangs}
    total, moved = {node.name: node.gpus for node in cluster.nodes}, {}
    for gang in gangs:
        id, now = gang.id, held[gang.id]
        if gang.promised and _has_all(gang.demand, taken[id]) and now != promised[id]:
            others = _sum(one for other, one in promised.items() if other != id)
            if all(others.get(name, 0) + gpus <= total.get(name, 0) for name, gpus in now.items()):
                # Its promise is changed in this very look: what it had been promised is free.
                moved[id] = promised[id] = now
    foreign = _sum(on for run_id, on in cluster.taken.items() if run_id not in ours)
    promised_on, held_on = _sum(promised.values()), _sum(held.values())
    flow_runs = {*map(str, promised)}

    def others_on(node: ClusterNode) -> float:
        leased = sum(owner not in flow_runs for owner in node.leased.values())
        used = node.others_gpus + foreign.get(node.name, 0.0) + leased
        return max(used, promised_on.get(node.name, 0) - held_on.get(node.name, 0))

    nodes = tuple(replace(node, others_gpus=others_on(node)) for node in cluster.nodes)
    return Shares(nodes=nodes, held=held, moved=moved)


def bare_name(name: str) -> str:
    """A node's name without what tells it from others of the same name."""
    return _SUFFIX.sub("", name)


def _held(
    demand: Demand, promised: Mapping[str, int], taken: Mapping[str, float]
) -> dict[str, int]:
    whole = {name: math.ceil(gpus - _SLACK) for name, gpus in taken.items() if gpus > _SLACK}
    if _has_all(demand, taken):
        return whole
    # It may still take the rest where it was promised.
    names = dict.fromkeys((*promised, *whole))
    return {name: max(promised.get(name, 0), whole.get(name, 0)) for name in names}


def _has_all(demand: Demand, taken: Mapping[str, float]) -> bool:
    return sum(taken.values()) >= demand.gpus - _SLACK


def _sum(shares: Iterable[Mapping[str, _Number]]) -> dict[str, _Number]:
    """GPUs by node."""
    found: dict[str, _Number] = {}
    for share in shares:
        for name, gpus in share.items():
            found[name] = found.get(name, 0) + gpus
    return found


def _present(promised: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """The promise by the names that the nodes have now: one gets its suffix when a second node of
    that name comes, as one that was restarted, and loses it when the other one goes."""
    there = set(names)
    found: dict[str, int] = {}
    for name, gpus in promised.items():
        bare = bare_name(name)
        now = [name]
        if name not in there:
            others = [bare] if name != bare else there
            now = [one for one in others if one in there and bare_name(one) == bare] or now
        for one in now:
            found[one] = found.get(one, 0) + gpus
    return found


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

    def marked(node: ClusterNode) -> ClusterNode:
        is_drained = node.name in names or bare_name(node.name) in names
        return replace(node, is_drained=True) if is_drained else node

    return replace(cluster, nodes=tuple(map(marked, cluster.nodes)))
