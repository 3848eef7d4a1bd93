"""The policy of the queue: which of the waiting gangs start now, and why the others do not.

`plan` is pure: no I/O, no clock. The gate of the work pool and the simulation call the very same.

How long a gang is expected to hold its GPUs is its hours, rounded up to a class. That estimate lets
shorter runs pass; it never ends a run. Classes are coarse on purpose: exact estimates make the
waits hardly shorter, and nobody can give them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter

from tasks.queue.packing import Demand, FreeNodes, NodesAhead, Policy
from tasks.ray.usage import ClusterNode

_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86400.0

#: In seconds, ascending.
CLASSES_S = (
    *(10 * _MINUTE_S, _HOUR_S, 4 * _HOUR_S, 12 * _HOUR_S),
    *(_DAY_S, 3 * _DAY_S, 7 * _DAY_S, 14 * _DAY_S, 60 * _DAY_S),
)


class Quota:
    """GPUs per tag: what the gangs with it hold of the limit that an operator has set."""

    def __init__(self, limits: Mapping[str, int], used: Mapping[str, int] | None = None) -> None:
        self._limits = dict(limits)
        self._used = dict.fromkeys(limits, 0) | dict(used or {})

    def copy(self) -> Quota:
        return Quota(self._limits, self._used)

    def exceeded(self, tags: Iterable[str], gpus: int) -> str:
        """The tag that would go over its limit with so many more, the first by name; or empty."""
        if not self._limits:
            return ""
        limited = self._limits.keys() & tags
        over = (tag for tag in limited if self._used[tag] + gpus > self._limits[tag])
        return min(over, default="")

    def take(self, tags: Iterable[str], gpus: int) -> None:
        """Count so many more; with less than 0, so many fewer."""
        for tag in self._limits.keys() & tags:
            self._used[tag] += gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A gang that waits."""

    id: str
    demand: Demand
    #: Where it stands in the line: smaller is earlier, and no two are equal, held gangs included.
    place: tuple[float | int | str, ...]
    #: How long it is expected to run, in seconds: a walltime class.
    estimate_s: float
    #: Not to start before this time (s): a run that was sent back waits a little, and holds the
    #: line meanwhile.
    not_before: float = 0.0
    #: Its teams; each may have a limit of GPUs.
    tags: frozenset[str] = frozenset()
    #: The names of the nodes that it may have; None: any.
    among: frozenset[str] | None = None
    #: The names of those that it gets only where others would not do.
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A gang that has its GPUs."""

    id: str
    #: `gpus[node name]`.
    gpus: Mapping[str, int]
    cpus_per_gpu: float
    #: Where it stood in the line.
    place: tuple[float | int | str, ...]
    #: When it is expected to end (s), by the clock of `now`.
    ends_at: float
    tags: frozenset[str] = frozenset()


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
    #: All may pass it.
    is_passed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one pass decides."""

    #: `nodes[id]`, in the order of admission: the names of the nodes it gets, in their order.
    admitted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: For every other one, in the order of the line.
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    #: GPUs free on each node after the pass, by name.
    free: Mapping[str, int] = field(default_factory=dict)


def plan(
    waiting: Sequence[Waiting],
    held: Sequence[Held],
    nodes: Sequence[ClusterNode],
    now: float,
    *,
    policy: Policy = "fifo",
    limits: Mapping[str, int] | None = None,
    used: Mapping[str, int] | None = None,
) -> Plan:
    """Which gangs start now and where, and why each other one waits.

    Those at the front of the line start while they fit; the first that does not is the head. With
    `fifo` nobody passes it, unless the nodes that are there could not hold it even if they were
    empty. With `backfill` it has a reservation, the earliest time at which it fits by the
    estimates, and a later gang that fits now may start if it ends by then, or if the head still
    fits then beside it; all may pass a head that never fits.

    A gang that is not to start yet holds the line as one that does not fit. A gang over a limit
    blocks nobody.

    Args:
        waiting: in any order; it is sorted by `place`.
        held: what has been given, in any order. On a node that is not among `nodes` it takes no
            room, and still counts for the limits.
        nodes: in the order of the packing rule: a gang gets the nodes with the fewest free GPUs
            that suffice, the first of equal ones. CPUs count where they are known. What they say
            is held is not looked at.
        now: by the clock of `ends_at` and `not_before` (s).
        limits: `limits[tag]` GPUs at once for the gangs with a tag; a tag that is missing has none.
        used: `used[tag]` GPUs of the gangs that are elsewhere, and count for the limits.

    Source: EASY, D. Lifka, The ANL/IBM SP Scheduling System, JSSPP 1995.
    """
    return _Pass(held, nodes, now, Quota(limits or {}, used)).over(waiting, policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reservation:
    """The head of the line, and what must be left for it."""

    head: Waiting
    #: The shadow time: when it fits, by the estimates (s); infinite where it never does.
    at: float
    #: What is free then, before it takes its nodes.
    nodes: NodesAhead
    #: What is used of the limits then, with it.
    quota: Quota
    #: Whose ends make its room.
    waits_for: tuple[str, ...]


_RETRY = Reason(why=Why.RETRY)


class _Pass:
    """One pass over the line: room shrinks and limits fill as gangs start."""

    def __init__(
        self, held: Sequence[Held], nodes: Sequence[ClusterNode], now: float, quota: Quota
    ) -> None:
        self._now = now
        self._names = [node.name for node in nodes]
        self._index = {name: index for index, name in enumerate(self._names)}
        self._running = list(held)
        self._quota = quota
        gpus, cpus = [node.usable_gpus for node in nodes], [node.usable_cpus for node in nodes]
        for gang in held:
            self._quota.take(gang.tags, sum(gang.gpus.values()))
            for name, taken in gang.gpus.items():
                if (index := self._index.get(name)) is not None:
                    gpus[index] -= taken
                    if (free := cpus[index]) is not None:
                        cpus[index] = free - taken * gang.cpus_per_gpu
        self._nodes = FreeNodes(gpus, cpus)
        self._admitted: dict[str, tuple[str, ...]] = {}
        self._reasons: dict[str, Reason] = {}

    def over(self, waiting: Sequence[Waiting], policy: Policy) -> Plan:
        line = self._within_limits(sorted(waiting, key=attrgetter("place")))
        while (head := self._start_front(line)) is not None:
            reservation = self._reserve(head)
            starts_at = None if math.isinf(reservation.at) else max(reservation.at, self._now)
            self._reasons[head.id] = Reason(
                why=Why.RETRY if head.not_before > self._now else Why.GPUS,
                waits_for=reservation.waits_for,
                starts_at=starts_at,
            )
            if policy == "backfill":
                self._backfill(line, reservation)
            elif starts_at is None:
                # The nodes that are there could not hold it if they were empty: nobody delays it.
                self._reasons[head.id] = replace(self._reasons[head.id], is_passed=True)
            else:
                behind = Reason(why=Why.BEHIND, waits_for=(head.id,))
                for run in line:
                    self._reasons[run.id] = behind if run.not_before <= self._now else _RETRY
        gpus = zip(self._names, self._nodes.gpus, strict=True)
        free = {name: max(0, free) for name, free in gpus}
        return Plan(admitted=self._admitted, reasons=self._reasons, free=free)

    def _within_limits(self, line: Sequence[Waiting]) -> Iterator[Waiting]:
        """Pass over those that a limit holds back, by what is used when it is their turn."""
        over_limit: dict[str, Reason] = {}
        for run in line:
            if tag := self._quota.exceeded(run.tags, run.demand.gpus):
                if tag not in over_limit:
                    over_limit[tag] = Reason(why=Why.LIMIT, tag=tag)
                self._reasons[run.id] = over_limit[tag]
            else:
                yield run

    def _start_front(self, line: Iterator[Waiting]) -> Waiting | None:
        """Start gangs until one does not fit; that one."""
        for run in line:
            nodes = self._find(run) if run.not_before <= self._now else None
            if nodes is None:
                return run
            self._start(run, nodes)
        return None

    def _backfill(self, line: Iterator[Waiting], reservation: _Reservation) -> None:
        behind = Reason(why=Why.BEHIND, waits_for=(reservation.head.id,))
        would_delay = Reason(why=Why.WOULD_DELAY, waits_for=(reservation.head.id,))
        # A long line asks for few demands, and room only shrinks: what did not fit will not, and
        # what would have delayed the head still would until another gang has started.
        too_large: set[object] = set()
        delaying: set[object] = set()
        for run in line:
            if run.not_before > self._now:
                self._reasons[run.id] = _RETRY
                continue
            demand = run.demand
            shape = (demand.nodes, demand.gpus_per_node, demand.cpus_per_gpu, run.among, run.avoid)
            is_short = self._now + run.estimate_s <= reservation.at
            if shape in too_large:
                self._reasons[run.id] = behind
            elif not is_short and shape in delaying:
                self._reasons[run.id] = would_delay
            elif (nodes := self._find(run)) is None:
                too_large.add(shape)
                self._reasons[run.id] = behind
            elif not is_short and not reservation.nodes.allows(nodes, demand):
                delaying.add(shape)
                self._reasons[run.id] = would_delay
            elif not is_short and reservation.quota.exceeded(run.tags, demand.gpus):
                self._reasons[run.id] = would_delay
            else:
                self._start(run, nodes)
                delaying.clear()
                if not is_short:
                    reservation.nodes.take(nodes, demand)
                    reservation.quota.take(run.tags, demand.gpus)

    def _find(self, run: Waiting) -> list[int] | None:
        among = self._among(run)
        avoid = sorted(self._index[name] for name in run.avoid & self._index.keys())
        # One more of them at a time: no more than are needed.
        for number in range(len(avoid)):
            rest = {*self._index.values()} if among is None else among
            if found := self._nodes.find(run.demand, rest.difference(avoid[number:])):
                return found
        return self._nodes.find(run.demand, among)

    def _among(self, run: Waiting) -> set[int] | None:
        if run.among is None:
            return None
        return {self._index[name] for name in run.among if name in self._index}

    def _start(self, run: Waiting, nodes: Sequence[int]) -> None:
        self._nodes.take(nodes, run.demand)
        self._quota.take(run.tags, run.demand.gpus)
        names = tuple(self._names[index] for index in sorted(nodes))
        self._admitted[run.id] = names
        self._running.append(
            Held(
                id=run.id,
                gpus=dict.fromkeys(names, run.demand.gpus_per_node),
                cpus_per_gpu=run.demand.cpus_per_gpu,
                place=run.place,
                ends_at=self._now + run.estimate_s,
                tags=run.tags,
            )
        )

    def _reserve(self, head: Waiting) -> _Reservation:
        """Add back what runs, in the order of its ends, until the head fits and may start."""
        ahead, quota = NodesAhead(self._nodes, head.demand, self._among(head)), self._quota.copy()
        quota.take(head.tags, head.demand.gpus)
        short = {index for index in self._index.values() if not ahead.suffices(index)}
        not_before = head.not_before if head.not_before > self._now else -math.inf
        at = not_before
        needed: list[tuple[str, list[int]]] = []
        for gang in sorted(self._running, key=attrgetter("ends_at", "place")):
            if ahead.fits and gang.ends_at > not_before:
                break
            at = max(at, gang.ends_at)
            there = {
                self._index[name]: gpus for name, gpus in gang.gpus.items() if name in self._index
            }
            if not ahead.fits:
                needed.append((gang.id, list(there)))
            for index, gpus in there.items():
                ahead.give_back(index, gpus, gpus * gang.cpus_per_gpu)
            quota.take(gang.tags, -sum(gang.gpus.values()))
        if not ahead.fits:
            return _Reservation(head=head, at=math.inf, nodes=ahead, quota=quota, waits_for=())
        # An end on a node that is too small even so made no room for it.
        made = {index for index in short if ahead.suffices(index)}
        waits_for = tuple(id for id, nodes in needed if not made.isdisjoint(nodes))
        return _Reservation(head=head, at=at, nodes=ahead, quota=quota, waits_for=waits_for)


def class_s(asked_s: float) -> float:
    """How long a gang is expected to hold its GPUs, in seconds from its start: the class of what
    the run's spec says."""
    classes = (limit for limit in CLASSES_S if asked_s <= limit)
    return next(classes, math.ceil(asked_s / _DAY_S) * _DAY_S)
