"""What a run asks of a cluster, and whether the cluster could ever give it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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

    def __str__(self) -> str:
        per_node = f"{self.gpus_per_node} GPUs and {self.gpus_per_node * self.cpus_per_gpu:g} CPUs"
        return f"{self.nodes} nodes with {per_node} each"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTotal:
    """All that one node has, free or not."""

    name: str
    gpus: float
    cpus: float


def why_never(demand: Demand, nodes: Sequence[NodeTotal]) -> str:
    """Why the demand can't be met even by a cluster that is free; empty where it can.

    A node too small in GPUs or in CPUs counts as none: the GPUs of two can't be added up.
    """
    cpus = demand.gpus_per_node * demand.cpus_per_gpu
    fitting = [node for node in nodes if node.gpus >= demand.gpus_per_node and node.cpus >= cpus]
    if len(fitting) >= demand.nodes:
        return ""
    shapes: dict[str, int] = {}
    for node in nodes:
        shape = f"{node.gpus:g} GPUs and {node.cpus:g} CPUs"
        shapes[shape] = shapes.get(shape, 0) + 1
    there = ", ".join(f"{count} with {shape}" for shape, count in shapes.items()) or "none"
    return (
        f"the run asks for {demand}, and {len(fitting)} of the cluster's nodes are that large; "
        f"there are: {there}. Ask for less, or for another cluster"
    )
