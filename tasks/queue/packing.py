"""The free resources of nodes, and how gangs are packed onto them.

Nodes are named by their index. A node suffices for a gang if it has enough free GPUs and CPUs for
one node of the gang.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from tasks.spec.formatting import format_count

#: Order in which gangs start. `fifo`: strictly in order. `backfill`: a later gang may start earlier
#: if that does not delay the first one.
Policy = Literal["fifo", "backfill"]

#: Tolerance for sums of fractional CPUs: 0.1 + 0.2 > 0.3.
_CPU_SLACK = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The resources that a gang needs, all at once: some GPUs on each of some nodes."""

    nodes: int
    gpus_per_node: int
    #: Number of CPUs for each GPU.
    cpus_per_gpu: float

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def cpus_per_node(self) -> float:
        return self.gpus_per_node * self.cpus_per_gpu

    def describe(self, accelerator: str = "GPU") -> str:
        """Describe the demand: `2 nodes with 8 GPUs and 24 CPUs each`.

        Args:
            accelerator: The cluster's name for its GPUs.
        """
        gpus = format_count(self.gpus_per_node, accelerator)
        of_node = f"{gpus} and {format_count(self.cpus_per_node, 'CPU')}"
        return (
            f"{format_count(self.nodes, 'node')} with {of_node}{'' if self.nodes == 1 else ' each'}"
        )


class FreeNodes:
    """Free GPUs and CPUs of the nodes, indexed by free GPUs for a fast search."""

    def __init__(self, gpus: Sequence[int], cpus: Sequence[float | None]) -> None:
        """
        Args:
            gpus: Free GPUs of each node. Negative if more GPUs are held than the node has.
            cpus: Free CPUs of each node. None if its CPUs are not counted.
        """
        self.gpus = list(gpus)
        self.cpus = [math.inf if free is None else free + _CPU_SLACK for free in cpus]
        self._counts_cpus = any(free is not None for free in cpus)
        self._max_free = max(self.gpus, default=0)
        #: For each number of free GPUs: the sorted indexes of the nodes with exactly that many.
        self._nodes_by_free: list[list[int]] = [[] for _ in range(self._max_free + 1)]
        for node, free in enumerate(self.gpus):
            if free >= 0:
                self._nodes_by_free[free].append(node)
        #: For each number of GPUs: how many nodes have at least that many free.
        self._count_at_least = [0] * (self._max_free + 1)
        count = 0
        for free in range(self._max_free, -1, -1):
            count += len(self._nodes_by_free[free])
            self._count_at_least[free] = count

    def find(self, demand: Demand, among: Collection[int] | None = None) -> list[int] | None:
        """Return the nodes for a gang, or None if it does not fit.

        Nodes with the fewest free GPUs come first, so that large gaps stay free for large gangs.
        Among nodes with equally many free GPUs, the lower index comes first.

        Args:
            demand: What the gang needs.
            among: Nodes that the gang may use. None: all nodes.
        """
        node_count = demand.nodes
        min_gpus = demand.gpus_per_node
        if min_gpus > self._max_free or self._count_at_least[min_gpus] < node_count:
            return None

        chosen: list[int] = []
        free_cpus = self.cpus
        min_cpus = demand.cpus_per_node
        for free in range(min_gpus, self._max_free + 1):
            candidates: Iterable[int] = self._nodes_by_free[free]
            if among is not None:
                candidates = (node for node in candidates if node in among)
            if self._counts_cpus:
                candidates = (node for node in candidates if free_cpus[node] >= min_cpus)
            chosen += islice(candidates, node_count - len(chosen))
            if len(chosen) == node_count:
                return chosen
        return None

    def take(self, nodes: Iterable[int], demand: Demand) -> None:
        """Give these nodes to a gang. The gang must fit on each of them."""
        gpus = demand.gpus_per_node
        cpus = demand.cpus_per_node
        for node in nodes:
            free_before = self.gpus[node]
            free_after = free_before - gpus
            same_free = self._nodes_by_free[free_before]
            del same_free[bisect_left(same_free, node)]
            insort(self._nodes_by_free[free_after], node)
            for level in range(free_after + 1, free_before + 1):
                self._count_at_least[level] -= 1
            self.gpus[node] = free_after
            self.cpus[node] -= cpus


class NodesAhead:
    """Predict whether a waiting gang will fit on the nodes at a later time.

    Running gangs that end by that time free GPUs. Waiting gangs that start earlier use GPUs.
    """

    def __init__(
        self, nodes: FreeNodes, demand: Demand, among: Collection[int] | None = None
    ) -> None:
        """
        Args:
            nodes: What is free now.
            demand: What the gang needs.
            among: Nodes that the gang may use. None: all nodes.
        """
        # A node that the gang may not use never suffices, whatever becomes free there.
        self._gpus = [
            gpus if among is None or index in among else -math.inf
            for index, gpus in enumerate(nodes.gpus)
        ]
        self._cpus = list(nodes.cpus)
        self._min_gpus = demand.gpus_per_node
        self._min_cpus = demand.cpus_per_node
        #: Number of sufficient nodes beyond those that the gang needs. Negative: it does not fit.
        self._spare = sum(map(self._is_enough, self._gpus, self._cpus)) - demand.nodes

    @property
    def fits(self) -> bool:
        """True if the gang fits."""
        return self._spare >= 0

    def suffices(self, node: int) -> bool:
        """Return True if the node has room for one node of the gang."""
        return self._is_enough(self._gpus[node], self._cpus[node])

    def give_back(self, node: int, gpus: int, cpus: float) -> None:
        """Add what another gang holds on a node and gives back when it ends."""
        sufficed = self.suffices(node)
        self._gpus[node] += gpus
        self._cpus[node] += cpus
        self._spare += self.suffices(node) - sufficed

    def allows(self, nodes: Sequence[int], demand: Demand) -> bool:
        """Return True if the gang still fits after another gang has taken these nodes.

        Args:
            nodes: The nodes of the other gang.
            demand: What the other gang needs.
        """
        if len(nodes) <= self._spare:
            return True
        gpus_for_both = self._min_gpus + demand.gpus_per_node
        cpus_for_both = self._min_cpus + demand.cpus_per_node
        lost_nodes = 0
        for node in nodes:
            gpus = self._gpus[node]
            cpus = self._cpus[node]
            still_suffices = gpus >= gpus_for_both and cpus >= cpus_for_both
            lost_nodes += not still_suffices and self._is_enough(gpus, cpus)
        return lost_nodes <= self._spare

    def take(self, nodes: Iterable[int], demand: Demand) -> None:
        """Subtract what another gang takes on these nodes."""
        for node in nodes:
            self.give_back(node, -demand.gpus_per_node, -demand.cpus_per_node)

    def _is_enough(self, gpus: float, cpus: float) -> bool:
        return gpus >= self._min_gpus and cpus >= self._min_cpus
