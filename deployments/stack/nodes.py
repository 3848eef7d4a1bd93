"""The Ray nodes with logical GPUs of a stack: their number and their resources."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Largest number of Ray nodes of a stack. Each node has several processes, so one machine can
#: hardly run more nodes.
MOST_NODES = 16
#: Largest number of logical GPUs of one node. No current machine has more GPUs.
MOST_GPUS = 16
#: Name of a Ray resource that every node has and the Ray head lacks. So a Ray task that requires
#: one unit of this resource never runs on the Ray head.
NODE_RESOURCE = "worker_node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Ray nodes on this machine, all with the same number of logical GPUs.

    Logical GPUs do not exist as devices. Ray uses only their number, for scheduling.
    """

    #: Number of Ray nodes.
    nodes: int
    #: Number of logical GPUs of each Ray node.
    gpus: int

    @property
    def cpus(self) -> int:
        """Number of logical CPUs of each node.

        A node has at least 4 CPUs per GPU, because verl requests up to 3 CPUs per GPU.
        """
        return max(24, 4 * self.gpus)

    @classmethod
    def parsed(cls, text: str) -> Fleet:
        """Return the fleet that a text like `2x8` describes: two nodes with 8 GPUs each.

        The short form `8` means `1x8`.

        Raises:
            ValueError: The text has another form or a number is out of range. The message gives a
                valid example or the limits.
        """
        match = re.fullmatch(r"(?:([0-9]{1,4})x)?([0-9]{1,4})", text)
        if match is None:
            raise ValueError(
                f"{text!r} is not a number of nodes and GPUs. For example, write 2x8 for two nodes "
                "with 8 GPUs each"
            )
        nodes = int(match[1] or 1)
        gpus = int(match[2])
        if not 1 <= nodes <= MOST_NODES or not 1 <= gpus <= MOST_GPUS:
            raise ValueError(
                f"{text}: this machine can simulate 1 to {MOST_NODES} nodes with 1 to {MOST_GPUS} "
                "GPUs each"
            )
        return cls(nodes=nodes, gpus=gpus)

    def __str__(self) -> str:
        return f"{self.nodes}x{self.gpus}"
