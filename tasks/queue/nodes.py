"""The nodes that gangs are placed on: what each has, and who holds what of it."""

from __future__ import annotations

from collections.abc import Mapping
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
