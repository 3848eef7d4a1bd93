"""Find nodes with enough free GPUs and CPUs for a run.

A run gets all of its GPUs at the same time, and the same number of GPUs on each of its nodes. Nodes
are identified by their index. A node is called sufficient for a run if its free GPUs and CPUs are
enough for the part of the run that one node gets.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from tasks.spec.formatting import format_count

#: Scheduling policy. With `fifo`, runs start strictly in the order of the queue. With `backfill`, a
#: later run may start before the first run of the queue, but must not delay the first run.
Policy = Literal["fifo", "backfill"]

#: Tolerance for comparing numbers of CPUs, because sums of floating-point numbers are not exact:
#: 0.1 + 0.2 > 0.3.
_CPU_SLACK = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The GPUs and CPUs that a run needs at the same time."""

    #: Number of nodes that the run needs.
    nodes: int
    #: Number of GPUs that the run needs on each node.
    gpus_per_node: int
    #: Number of CPUs that the run needs for each GPU.
    cpus_per_gpu: float

    @property
    def gpus(self) -> int:
        """Number of GPUs that the run needs on all nodes together."""
        return self.nodes * self.gpus_per_node

    @property
    def cpus_per_node(self) -> float:
        """Number of CPUs that the run needs on each node."""
        return self.gpus_per_node * self.cpus_per_gpu

    def describe(self, accelerator: str = "GPU") -> str:
        """Return a text about the demand, for example `2 nodes with 8 GPUs and 24 CPUs each`.

        Args:
            accelerator: Name of the accelerators of the cluster, for example `NPU`.
        """
        gpus = format_count(self.gpus_per_node, accelerator)
        cpus = format_count(self.cpus_per_node, "CPU")
        each = "" if self.nodes == 1 else " each"
        return f"{format_count(self.nodes, 'node')} with {gpus} and {cpus}{each}"


class FreeNodes:
    """The free GPUs and CPUs of all nodes, stored so that the search for nodes is fast."""

    def __init__(self, gpus: Sequence[int], cpus: Sequence[float | None]) -> None:
        """
        Args:
            gpus: Number of free GPUs of each node. The number is negative if runs hold more GPUs
                than the node has.
            cpus: Number of free CPUs of each node, or None if unknown. None counts as enough for
                every run.
        """
        self.gpus = list(gpus)
        self.cpus = [math.inf if free is None else free + _CPU_SLACK for free in cpus]
        self._counts_cpus = any(free is not None for free in cpus)
        self._max_free = max(self.gpus, default=0)
        #: `_nodes_by_free[n]` are the indexes of the nodes with exactly n free GPUs, in ascending
        #: order.
        self._nodes_by_free: list[list[int]] = [[] for _ in range(self._max_free + 1)]
        for node, free in enumerate(self.gpus):
            if free >= 0:
                self._nodes_by_free[free].append(node)
        #: `_count_at_least[n]` is the number of nodes with at least n free GPUs.
        self._count_at_least = [0] * (self._max_free + 1)
        count = 0
        for free in range(self._max_free, -1, -1):
            count += len(self._nodes_by_free[free])
            self._count_at_least[free] = count

    def find(self, demand: Demand, among: Collection[int] | None = None) -> list[int] | None:
        """Choose the nodes for a run.

        Nodes with fewer free GPUs are chosen first, so that nodes with many free GPUs remain for
        large runs. Among nodes with the same number of free GPUs, the lowest indexes are chosen.

        Args:
            demand: GPUs and CPUs that the run needs.
            among: Indexes of the nodes that the run may use, or None for all nodes.

        Returns:
            The indexes of the nodes, or None if too few nodes have enough free GPUs and CPUs.
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
        """Subtract the GPUs and CPUs of a run from the free resources of its nodes.

        Args:
            nodes: Indexes of the nodes. The number of free GPUs or CPUs of a node becomes negative
                if the run needs more than the node has free.
            demand: GPUs and CPUs that the run needs.
        """
        gpus = demand.gpus_per_node
        cpus = demand.cpus_per_node
        for node in nodes:
            free_before = self.gpus[node]
            free_after = free_before - gpus
            if free_before >= 0:
                same_free = self._nodes_by_free[free_before]
                del same_free[bisect_left(same_free, node)]
            if free_after >= 0:
                insort(self._nodes_by_free[free_after], node)
            for level in range(max(free_after + 1, 0), free_before + 1):
                self._count_at_least[level] -= 1
            self.gpus[node] = free_after
            self.cpus[node] -= cpus


class NodesAhead:
    """A forecast of the free resources at a later time, for one waiting run.

    The caller adds the resources of active runs that will have ended by that time, and subtracts
    the resources of other waiting runs that start earlier. The property `fits` is True if the
    remaining resources are enough for the waiting run.
    """

    def __init__(
        self, nodes: FreeNodes, demand: Demand, among: Collection[int] | None = None
    ) -> None:
        """
        Args:
            nodes: The resources that are free now.
            demand: GPUs and CPUs that the waiting run needs.
            among: Indexes of the nodes that the waiting run may use, or None for all nodes.
        """
        # For a node that the run may not use, the number of free GPUs is minus infinity. So the
        # node never counts as sufficient, even after GPUs have become free.
        self._gpus = [
            gpus if among is None or index in among else -math.inf
            for index, gpus in enumerate(nodes.gpus)
        ]
        self._cpus = list(nodes.cpus)
        self._min_gpus = demand.gpus_per_node
        self._min_cpus = demand.cpus_per_node
        #: Number of nodes with enough free GPUs and CPUs, minus the number of nodes that the run
        #: needs. The difference is negative if the run does not fit.
        self._spare = sum(map(self._is_enough, self._gpus, self._cpus)) - demand.nodes

    @property
    def fits(self) -> bool:
        """True if enough nodes have enough free GPUs and CPUs for the waiting run."""
        return self._spare >= 0

    def is_sufficient(self, node: int) -> bool:
        """Return True if a node has enough free GPUs and CPUs to be a node of the waiting run."""
        return self._is_enough(self._gpus[node], self._cpus[node])

    def release(self, node: int, gpus: int, cpus: float) -> None:
        """Add the GPUs and CPUs that an ended run releases to the free resources of a node.

        Args:
            node: Index of the node.
            gpus: Number of GPUs. A negative number subtracts GPUs.
            cpus: Number of CPUs. A negative number subtracts CPUs.
        """
        was_sufficient = self.is_sufficient(node)
        self._gpus[node] += gpus
        self._cpus[node] += cpus
        self._spare += self.is_sufficient(node) - was_sufficient

    def allows(self, nodes: Sequence[int], demand: Demand) -> bool:
        """Return True if the waiting run still fits after the start of another run.

        Args:
            nodes: Indexes of the nodes on which the other run would start.
            demand: GPUs and CPUs that the other run needs.
        """
        if len(nodes) <= self._spare:
            return True
        gpus_for_both = self._min_gpus + demand.gpus_per_node
        cpus_for_both = self._min_cpus + demand.cpus_per_node
        lost_nodes = 0
        for node in nodes:
            gpus = self._gpus[node]
            cpus = self._cpus[node]
            has_room_for_both = gpus >= gpus_for_both and cpus >= cpus_for_both
            lost_nodes += not has_room_for_both and self._is_enough(gpus, cpus)
        return lost_nodes <= self._spare

    def take(self, nodes: Iterable[int], demand: Demand) -> None:
        """Subtract the GPUs and CPUs of another run, which starts earlier, from the free resources.

        Args:
            nodes: Indexes of the nodes of the other run.
            demand: GPUs and CPUs that the other run needs.
        """
        for node in nodes:
            self.release(node, -demand.gpus_per_node, -demand.cpus_per_node)

    def _is_enough(self, gpus: float, cpus: float) -> bool:
        """Return True if a node with these free GPUs and CPUs is sufficient for the waiting run."""
        return gpus >= self._min_gpus and cpus >= self._min_cpus
