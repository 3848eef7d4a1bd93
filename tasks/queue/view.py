"""The queue as one look at the server and the cluster shows it, for people: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tasks.queue.demand import Demand


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRun:
    """A run that waits."""

    #: From 1 on, in the order of the line.
    number: int
    flow_run_id: str
    #: Its flow run's name.
    name: str
    #: None where it asks for no GPUs.
    demand: Demand | None
    #: Of its Ray cluster; empty where it names none.
    cluster: str
    #: The pool's queue; empty for a run that was started directly.
    queue: str
    #: UTC epoch seconds.
    waiting_since: float
    #: One line: what it waits for.
    reason: str
    #: UTC epoch seconds; None: nobody can say.
    starts_at: float | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """One node, and who holds what of it."""

    cluster: str
    name: str
    gpus: int
    #: For new gangs; 0 on a drained node.
    free: int
    #: `held[name of the flow run]` GPUs.
    held: Mapping[str, int] = field(default_factory=dict)
    #: In use by others than our runs.
    others: float = 0.0
    is_drained: bool = False
    cpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """The line and the nodes of a work pool."""

    #: UTC epoch seconds.
    at: float
    #: Name of the work pool; empty where the server has none.
    pool: str
    policy: str
    is_paused: bool
    #: How many runs may run at once; None: any number.
    limit: int | None
    #: How many do: pending and running.
    running: int
    line: tuple[QueuedRun, ...]
    nodes: tuple[NodeUse, ...]
    #: `used[tag]` and the limit of each tag that has one: `(used, limit)` GPUs.
    tags: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: Names of the pool's queues that are paused.
    paused_queues: tuple[str, ...] = ()
    #: What is wrong: a cluster that does not answer, settings that can't be read.
    troubles: tuple[str, ...] = ()
