"""The nodes with logical GPUs that a stack can have: how many, and what each offers to Ray."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: More nodes than that one machine hardly carries: each is a raylet with its agents.
MOST_NODES = 16
#: No machine of today has more.
MOST_GPUS = 16
#: What every node has much of and the head nothing: a job that asks for 1 lands on a node.
NODE_RESOURCE = "worker_node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Equal nodes on this machine. Their GPUs are numbers in Ray's books; there is no device."""

    nodes: int
    #: Of each node.
    gpus: int

    @property
    def cpus(self) -> int:
        """Logical CPUs of each node: verl asks for up to 3 a GPU, and for 24 on a node of 8."""
        return max(24, 4 * self.gpus)

    @classmethod
    def parsed(cls, text: str) -> Fleet:
        """From `2x8`, two nodes with 8 GPUs each; `8` is short for `1x8`.

        Raises: ValueError, with what is wrong and what could be written.
        """
        found = re.fullmatch(r"(?:([0-9]{1,4})x)?([0-9]{1,4})", text)
        if found is None:
            raise ValueError(
                f"not nodes and GPUs: {text!r}; write 2x8 for two nodes with 8 GPUs each"
            )
        nodes, gpus = int(found[1] or 1), int(found[2])
        if not 1 <= nodes <= MOST_NODES or not 1 <= gpus <= MOST_GPUS:
            raise ValueError(
                f"{text}: this machine can play 1 to {MOST_NODES} nodes, with 1 to {MOST_GPUS} "
                "GPUs each"
            )
        return cls(nodes=nodes, gpus=gpus)

    def __str__(self) -> str:
        return f"{self.nodes}x{self.gpus}"
