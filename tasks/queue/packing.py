"""What a gang asks for, and what is free on nodes, by their index, while gangs are placed on them.

A node suffices for a gang if it has the GPUs and the CPUs of one of its nodes free.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from tasks.spec.words import counted

#: How gangs pass each other: not at all; or where the first of the line is not delayed by that.
Policy = Literal["fifo", "backfill"]

#: Fractions of CPUs do not add up exactly: 0.1 + 0.2 > 0.3.
_CPU_SLACK = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A gang: so many GPUs on each of so many nodes, all at once."""

    nodes: int
    gpus_per_node: int
    #: CPUs that go with each GPU.
    cpus_per_gpu: float

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def cpus_per_node(self) -> float:
        return self.gpus_per_node * self.cpus_per_gpu

    def in_words(self, accelerator: str = "GPU") -> str:
        """`2 nodes with 8 GPUs and 24 CPUs each`; `accelerator` is what the cluster calls them."""
        gpus = counted(self.gpus_per_node, accelerator)
        of_node = f"{gpus} and {counted(self.cpus_per_node, 'CPU')}"
        return f"{counted(self.nodes, 'node')} with {of_node}{'' if self.nodes == 1 else ' each'}"


class FreeNodes:
    """The nodes by what is free on them, so that a place is found without looking at each."""

    def __init__(self, gpus: Sequence[int], cpus: Sequence[float | None]) -> None:
        """
        Args:
            gpus: free per node; below 0 where more is held than there is.
            cpus: free per node; None: not counted there.
        """
        self.gpus = list(gpus)
        self.cpus = [math.inf if free is None else free + _CPU_SLACK for free in cpus]
        self._counts_cpus = any(free is not None for free in cpus)
        self._most = max(self.gpus, default=0)
        #: `[free GPUs]`: the nodes with just so many, by index.
        self._nodes: list[list[int]] = [[] for _ in range(self._most + 1)]
        for node, free in enumerate(self.gpus):
            if free >= 0:
                self._nodes[free].append(node)
        #: `[GPUs]`: how many nodes have as many free, or more.
        self._at_least = [0] * (self._most + 1)
        more = 0
        for free in range(self._most, -1, -1):
            more += len(self._nodes[free])
            self._at_least[free] = more

    def find(self, demand: Demand, among: Collection[int] | None = None) -> list[int] | None:
        """The nodes that the gang gets now, by free GPUs and index: those with the fewest free GPUs
        that suffice, so that the large gaps are left for large gangs. None where it does not fit.

        Args:
            among: the nodes that it may have; None: any.
        """
        wanted, least = demand.nodes, demand.gpus_per_node
        if least > self._most or self._at_least[least] < wanted:
            return None
        found: list[int] = []
        free_cpus, cpus = self.cpus, demand.cpus_per_node
        for free in range(least, self._most + 1):
            nodes: Iterable[int] = self._nodes[free]
            if among is not None:
                nodes = (node for node in nodes if node in among)
            if self._counts_cpus:
                nodes = (node for node in nodes if free_cpus[node] >= cpus)
            found += islice(nodes, wanted - len(found))
            if len(found) == wanted:
                return found
        return None

    def take(self, nodes: Iterable[int], demand: Demand) -> None:
        """Give the gang these nodes, on each of which it must fit."""
        taken, cpus = demand.gpus_per_node, demand.cpus_per_node
        for node in nodes:
            free = self.gpus[node]
            left = free - taken
            column = self._nodes[free]
            del column[bisect_left(column, node)]
            insort(self._nodes[left], node)
            for level in range(left + 1, free + 1):
                self._at_least[level] -= 1
            self.gpus[node] = left
            self.cpus[node] -= cpus


class NodesAhead:
    """Whether one gang fits at a later time, which the ends of other gangs make room for, and those
    that are let in before it take room from."""

    def __init__(
        self, nodes: FreeNodes, demand: Demand, among: Collection[int] | None = None
    ) -> None:
        """
        Args:
            nodes: what is free now.
            among: the nodes that the gang may have.
        """
        # No end makes room for it elsewhere, and nobody takes any from it there.
        self._gpus = [
            gpus if among is None or index in among else -math.inf
            for index, gpus in enumerate(nodes.gpus)
        ]
        self._cpus = list(nodes.cpus)
        self._least, self._least_cpus = demand.gpus_per_node, demand.cpus_per_node
        #: So many nodes more than it needs suffice for the gang; below 0 it does not fit.
        self._spare = sum(map(self._suffices, self._gpus, self._cpus)) - demand.nodes

    @property
    def fits(self) -> bool:
        return self._spare >= 0

    def suffices(self, node: int) -> bool:
        return self._suffices(self._gpus[node], self._cpus[node])

    def give_back(self, node: int, gpus: int, cpus: float) -> None:
        """What a gang that ends had on a node."""
        did = self.suffices(node)
        self._gpus[node] += gpus
        self._cpus[node] += cpus
        self._spare += self.suffices(node) - did

    def allows(self, nodes: Sequence[int], demand: Demand) -> bool:
        """Whether the gang still fits with another one on these nodes."""
        if len(nodes) <= self._spare:
            return True
        least, least_cpus = self._least, self._least_cpus
        enough, enough_cpus = least + demand.gpus_per_node, least_cpus + demand.cpus_per_node
        lost = 0
        for node in nodes:
            gpus, cpus = self._gpus[node], self._cpus[node]
            stays = gpus >= enough and cpus >= enough_cpus
            lost += not stays and gpus >= least and cpus >= least_cpus
        return lost <= self._spare

    def take(self, nodes: Iterable[int], demand: Demand) -> None:
        """Let another gang in on these nodes."""
        for node in nodes:
            self.give_back(node, -demand.gpus_per_node, -demand.cpus_per_node)

    def _suffices(self, gpus: float, cpus: float) -> bool:
        return gpus >= self._least and cpus >= self._least_cpus
