"""The nodes that gangs are placed on: what each has, and who holds what of it.

What a run asks of a cluster, and whether the cluster could ever give it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a cluster, as it is now.

    GPU stands for the accelerator of the cluster, be it Ray's resource `GPU` or `NPU`.
    """

    #: Unique within the cluster, the same for as long as the node lives.
    name: str
    gpus: int
    #: None where nobody says.
    cpus: float | None = None
    #: GPUs that are in use by others than our runs.
    others_gpus: float = 0.0
    others_cpus: float = 0.0
    #: Other resources, all of each: `{"worker_node": 100}`.
    resources: Mapping[str, float] = field(default_factory=dict)
    #: An operator wants no new gang on it.
    is_drained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One look at a cluster, or at a static table of nodes."""

    #: The address of its dashboard; empty for a table of nodes.
    key: str
    nodes: tuple[Node, ...]
    #: What the runs of ours have really taken: `taken[run id][node name]` GPUs. A run that has not
    #: taken its GPUs yet is missing, or has too few. Empty for a table.
    taken: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    #: It tells what is in use; a table does not.
    is_live: bool = False
    #: `GPU`, `NPU`: what its accelerators are called.
    accelerator: str = "GPU"


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

    def in_words(self, accelerator: str = "GPU") -> str:
        """`2 nodes with 8 GPUs and 24 CPUs each`.

        Args:
            accelerator: what the cluster calls them.
        """
        cpus = self.gpus_per_node * self.cpus_per_gpu
        of_node = f"{_number(self.gpus_per_node, accelerator)} and {_number(cpus, 'CPU')}"
        if self.nodes == 1:
            return f"1 node with {of_node}"
        return f"{self.nodes} nodes with {of_node} each"

    def __str__(self) -> str:
        return self.in_words()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTotal:
    """All that one node has, free or not."""

    name: str
    gpus: float
    #: None where nobody says.
    cpus: float | None
    #: Other resources; empty where nobody says.
    resources: Mapping[str, float] = field(default_factory=dict)


def why_never(
    demand: Demand,
    nodes: Sequence[NodeTotal | Node],
    *,
    accelerator: str = "GPU",
    entrypoint: Mapping[str, float] | None = None,
) -> str:
    """Why the demand can't be met even by a cluster that is free; empty where it can.

    A node too small in GPUs or in CPUs counts as none: the GPUs of two can't be added up. CPUs that
    nobody knows are not counted. A drained node counts as one that is there: it will be back.

    Args:
        nodes: of the cluster, or of a table of nodes.
        accelerator: what the cluster calls its GPUs.
        entrypoint: resources that one node must have for the driver of the run's job. Not asked
            of nodes of which nobody knows such resources.
    """
    return _why_no_gang(demand, nodes, accelerator) or _why_no_driver(entrypoint or {}, nodes)


def _why_no_gang(demand: Demand, nodes: Sequence[NodeTotal | Node], accelerator: str) -> str:
    cpus = demand.gpus_per_node * demand.cpus_per_gpu
    fitting = [
        node
        for node in nodes
        if node.gpus >= demand.gpus_per_node and (node.cpus is None or node.cpus >= cpus)
    ]
    if len(fitting) >= demand.nodes:
        return ""
    there = _counted(
        _number(node.gpus, accelerator)
        + ("" if node.cpus is None else f" and {_number(node.cpus, 'CPU')}")
        for node in nodes
    )
    return (
        f"the run asks for {demand.in_words(accelerator)}, and {len(fitting)} of the cluster's "
        f"nodes are that large; there are: {there}. Ask for less, or for another cluster"
    )


def _why_no_driver(entrypoint: Mapping[str, float], nodes: Sequence[NodeTotal | Node]) -> str:
    known = [node.resources for node in nodes if node.resources]
    if not entrypoint or not known:
        return ""
    if any(all(has.get(name, 0) >= wanted for name, wanted in entrypoint.items()) for has in known):
        return ""
    there = _counted(_listed({name: has.get(name, 0) for name in entrypoint}) for has in known)
    return (
        f"the driver of the run's job asks for a node with {_listed(entrypoint)}, and no node of "
        f"the cluster has that; there are: {there}. Mend ray.entrypoint_resources of the run, or "
        "start nodes with them"
    )


def _number(amount: float, what: str) -> str:
    return f"{amount:g} {what}" if amount == 1 else f"{amount:g} {what}s"


def _counted(shapes: Iterable[str]) -> str:
    """`2 with 8 GPUs and 32 CPUs, 1 with 0 GPUs and 0 CPUs`."""
    counts: dict[str, int] = {}
    for shape in shapes:
        counts[shape] = counts.get(shape, 0) + 1
    return ", ".join(f"{count} with {shape}" for shape, count in counts.items()) or "none"


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
