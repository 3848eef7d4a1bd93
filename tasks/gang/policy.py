"""The policy of the queue: which of the waiting gangs start now, and why the others do not.

`plan` is pure: no I/O, no clock. The gate of the work pool and the simulation call the very same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from tasks.gang.demand import Demand

#: How gangs pass each other: not at all; or where the first of the line is not delayed by that.
Policy = Literal["fifo", "backfill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A gang that waits."""

    id: str
    demand: Demand
    #: Where it stands in the line: smaller is earlier, and no two are equal.
    place: tuple[float | int | str, ...]
    #: How long it is expected to run, in seconds: a walltime class.
    estimate_s: float
    #: Not to start before this time (s): a run that was sent back waits a little, and holds the
    #: line meanwhile.
    not_before: float = 0.0
    #: Its teams; each may have a limit of GPUs.
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A gang that has its GPUs."""

    id: str
    #: `gpus[node name]`.
    gpus: Mapping[str, int]
    cpus_per_gpu: float
    place: tuple[float | int | str, ...]
    #: When it is expected to end (s), by the clock of `now`.
    ends_at: float
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFree:
    """What is there for gangs on one node, as if none of ours held anything.

    A drained node has none. Nodes are told apart by name; their index in the sequence is that of
    the packing rule.
    """

    name: str
    gpus: int
    #: None: CPUs are not counted.
    cpus: float | None = None


class Why(Enum):
    """Why a gang does not start now."""

    #: It is the first of the line, and its GPUs are not free.
    GPUS = "gpus"
    #: It stands behind the first of the line.
    BEHIND = "behind"
    #: It would fit, but would delay the first of the line.
    WOULD_DELAY = "would-delay"
    #: A tag of it has reached its limit of GPUs.
    LIMIT = "limit"
    #: It was sent back, and waits a little.
    RETRY = "retry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why one gang waits."""

    why: Why
    #: Ids of the gangs it waits for: the first of the line; or the ones whose end makes room.
    waits_for: tuple[str, ...] = ()
    #: When it is expected to start (s); None: nobody can say.
    starts_at: float | None = None
    #: The tag whose limit is reached.
    tag: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one pass decides."""

    #: `nodes[id]`, in the order of admission: the names of the nodes it gets.
    admitted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: For every other one, in the order of the line.
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    #: GPUs free on each node after the pass, by name.
    free: Mapping[str, int] = field(default_factory=dict)


def plan(
    waiting: Sequence[Waiting],
    held: Sequence[Held],
    nodes: Sequence[NodeFree],
    now: float,
    *,
    policy: Policy = "fifo",
    limits: Mapping[str, int] | None = None,
) -> Plan:
    raise NotImplementedError
