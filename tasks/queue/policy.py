"""The scheduling policy of the queue: which waiting gangs start now, and why the others do not.

`plan` has no side effects and reads no clock. The gate and the queue simulation call the same code.

The time that a gang is expected to hold its GPUs is the `hours` of its spec, rounded up to a class.
This estimate decides whether shorter runs may start first; it never ends a run. The classes are
coarse on purpose: nobody can give exact estimates, and they would hardly shorten the waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter

from tasks.queue.packing import Demand, FreeNodes, NodesAhead, Policy
from tasks.ray.usage import ClusterNode

_MINUTE_S = 60.0
_HOUR_S = 3600.0
_DAY_S = 86400.0

#: Classes of expected durations in seconds, in ascending order.
CLASSES_S = (
    10 * _MINUTE_S,
    _HOUR_S,
    4 * _HOUR_S,
    12 * _HOUR_S,
    _DAY_S,
    3 * _DAY_S,
    7 * _DAY_S,
    14 * _DAY_S,
    60 * _DAY_S,
)


class Quota:
    """Counts the GPUs that gangs with a tag hold, against the limit of the tag."""

    def __init__(self, limits: Mapping[str, int], used: Mapping[str, int] | None = None) -> None:
        self._limits = dict(limits)
        self._used = dict.fromkeys(limits, 0) | dict(used or {})

    def copy(self) -> Quota:
        return Quota(self._limits, self._used)

    def exceeded(self, tags: Iterable[str], gpus: int) -> str:
        """Return the first tag, by name, that would exceed its limit with `gpus` more, or ""."""
        if not self._limits:
            return ""
        limited = self._limits.keys() & tags
        over = (tag for tag in limited if self._used[tag] + gpus > self._limits[tag])
        return min(over, default="")

    def take(self, tags: Iterable[str], gpus: int) -> None:
        """Add GPUs to the tags; a negative number subtracts."""
        for tag in self._limits.keys() & tags:
            self._used[tag] += gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A gang that waits."""

    id: str
    demand: Demand
    #: Position in the queue; a smaller value comes first. No two gangs have the same value, and
    #: gangs that hold GPUs have values, too.
    place: tuple[float | int | str, ...]
    #: Expected duration in seconds: a value of CLASSES_S.
    estimate_s: float
    #: Earliest start in seconds, by the clock of `now`. A run that was sent back must wait a
    #: little. Meanwhile it keeps its position, and later runs do not pass it.
    not_before: float = 0.0
    #: Tags of the run. Each may have a limit of GPUs.
    tags: frozenset[str] = frozenset()
    #: Names of the nodes that the gang may use. None: all nodes.
    among: frozenset[str] | None = None
    #: Names of nodes that the gang gets only if it does not fit without them.
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A gang that holds its GPUs."""

    id: str
    #: `gpus[node name]`.
    gpus: Mapping[str, int]
    cpus_per_gpu: float
    #: Position in the queue before the gang started.
    place: tuple[float | int | str, ...]
    #: Expected end in seconds, by the clock of `now`.
    ends_at: float
    tags: frozenset[str] = frozenset()


class Why(Enum):
    """The reason why a gang does not start now."""

    #: It is the first of the queue, and its GPUs are not free.
    GPUS = "gpus"
    #: It waits behind the first of the queue.
    BEHIND = "behind"
    #: It would fit, but would delay the first of the queue.
    WOULD_DELAY = "would-delay"
    #: One of its tags has reached its limit of GPUs.
    LIMIT = "limit"
    #: It was sent back, and its waiting time is not over.
    RETRY = "retry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Reason why a gang waits, with the gangs that it waits for and its expected start."""

    why: Why
    #: Ids of the gangs that it waits for: the first of the queue, or gangs whose end makes room.
    waits_for: tuple[str, ...] = ()
    #: Expected start in seconds, by the clock of `now`. None if unknown.
    starts_at: float | None = None
    #: Tag whose limit is reached, or an empty string.
    tag: str = ""
    #: True if later gangs may start although this one waits.
    is_passed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of one scheduling pass."""

    #: `nodes[id]`: names of the nodes of each gang that starts, in the order of the starts.
    admitted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: `reason[id]` of every other gang, in the order of the queue.
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    #: `gpus[node name]` that are free after the pass.
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
    """Decide which gangs start now and on which nodes, and why each other gang waits.

    Gangs start from the front of the queue while they fit. The first one that does not fit is the
    head.

    - `fifo`: No gang passes the head, unless the head would not fit even on empty nodes.
    - `backfill`: The head gets a reservation, which is the earliest time at which it fits by the
      estimates. A later gang that fits now starts if it ends by then, or if the head still fits
      beside it at that time. All gangs may pass a head that never fits.

    A gang whose `not_before` lies ahead blocks later gangs like one that does not fit. A gang over
    the limit of a tag blocks nobody.

    Args:
        waiting: The waiting gangs, in any order.
        held: The gangs that hold GPUs, in any order. On a node that is not in `nodes` they take no
            room, but count for the limits.
        nodes: The nodes. If several nodes suit a gang equally well, the first ones are taken. Their
            field `held` is ignored.
        now: Current time in seconds, by the clock of `ends_at` and `not_before`.
        policy: The order of starts, see above.
        limits: `limits[tag]`: largest number of GPUs at once for the gangs with the tag. A tag
            without an entry has no limit.
        used: `used[tag]`: GPUs that gangs on other clusters hold, for the limits.

    Source: EASY, D. Lifka, The ANL/IBM SP Scheduling System, JSSPP 1995.
    """
    return _Pass(held, nodes, now, Quota(limits or {}, used)).run(waiting, policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reservation:
    """The head of the queue, and what must be left for it."""

    head: Waiting
    #: Earliest time at which the head fits, by the estimates. Infinite if it never fits.
    at: float
    #: Forecast of the free nodes at that time, before the head takes its nodes.
    nodes: NodesAhead
    #: Use of the limits at that time, with the head.
    quota: Quota
    #: Ids of the gangs whose ends make room for the head.
    waits_for: tuple[str, ...]


_RETRY = Reason(why=Why.RETRY)


class _Pass:
    """One scheduling pass over the queue. Free resources shrink while gangs start."""

    def __init__(
        self, held: Sequence[Held], nodes: Sequence[ClusterNode], now: float, quota: Quota
    ) -> None:
        self._now = now
        self._names = [node.name for node in nodes]
        self._index = {name: index for index, name in enumerate(self._names)}
        self._running = list(held)
        self._quota = quota
        gpus = [node.usable_gpus for node in nodes]
        cpus = [node.usable_cpus for node in nodes]
        for gang in held:
            self._quota.take(gang.tags, sum(gang.gpus.values()))
            for name, held_gpus in gang.gpus.items():
                index = self._index.get(name)
                if index is None:
                    continue
                gpus[index] -= held_gpus
                free_cpus = cpus[index]
                if free_cpus is not None:
                    cpus[index] = free_cpus - held_gpus * gang.cpus_per_gpu
        self._nodes = FreeNodes(gpus, cpus)
        self._admitted: dict[str, tuple[str, ...]] = {}
        self._reasons: dict[str, Reason] = {}

    def run(self, waiting: Sequence[Waiting], policy: Policy) -> Plan:
        # An iterator: gangs that were examined are not examined again by the next step.
        queue = self._within_limits(sorted(waiting, key=attrgetter("place")))
        while (head := self._start_front(queue)) is not None:
            reservation = self._reserve(head)
            starts_at = None if math.isinf(reservation.at) else max(reservation.at, self._now)
            self._reasons[head.id] = Reason(
                why=Why.RETRY if head.not_before > self._now else Why.GPUS,
                waits_for=reservation.waits_for,
                starts_at=starts_at,
            )
            if policy == "backfill":
                self._backfill(queue, reservation)
            elif starts_at is None:
                # The head would not fit even on empty nodes, so nobody can delay it.
                self._reasons[head.id] = replace(self._reasons[head.id], is_passed=True)
            else:
                behind = Reason(why=Why.BEHIND, waits_for=(head.id,))
                for run in queue:
                    self._reasons[run.id] = behind if run.not_before <= self._now else _RETRY

        free_gpus = zip(self._names, self._nodes.gpus, strict=True)
        free = {name: max(0, gpus) for name, gpus in free_gpus}
        return Plan(admitted=self._admitted, reasons=self._reasons, free=free)

    def _within_limits(self, queue: Sequence[Waiting]) -> Iterator[Waiting]:
        """Yield the gangs that no limit holds back, by the use of the limits at that moment."""
        over_limit: dict[str, Reason] = {}
        for run in queue:
            if tag := self._quota.exceeded(run.tags, run.demand.gpus):
                if tag not in over_limit:
                    over_limit[tag] = Reason(why=Why.LIMIT, tag=tag)
                self._reasons[run.id] = over_limit[tag]
            else:
                yield run

    def _start_front(self, queue: Iterator[Waiting]) -> Waiting | None:
        """Start gangs until one does not fit, and return that one."""
        for run in queue:
            nodes = self._find(run) if run.not_before <= self._now else None
            if nodes is None:
                return run
            self._start(run, nodes)
        return None

    def _backfill(self, queue: Iterator[Waiting], reservation: _Reservation) -> None:
        """Start later gangs that do not delay the head."""
        behind = Reason(why=Why.BEHIND, waits_for=(reservation.head.id,))
        would_delay = Reason(why=Why.WOULD_DELAY, waits_for=(reservation.head.id,))
        # A long queue has few different demands, so results are remembered by demand. Free room
        # only shrinks: a demand that did not fit will not fit later in this pass. A demand that
        # would have delayed the head still would, until another gang has started.
        too_large: set[object] = set()
        delaying: set[object] = set()
        for run in queue:
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
        """Return the nodes for a gang, with as few nodes of `run.avoid` as possible, or None."""
        among = self._among(run)
        avoid = sorted(self._index[name] for name in run.avoid & self._index.keys())
        for allowed_count in range(len(avoid)):
            candidates = set(self._index.values()) if among is None else among
            nodes = self._nodes.find(run.demand, candidates.difference(avoid[allowed_count:]))
            if nodes:
                return nodes
        return self._nodes.find(run.demand, among)

    def _among(self, run: Waiting) -> set[int] | None:
        """Return the indexes of the nodes that a gang may use, or None for all nodes."""
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
        """Forecast the earliest time at which the head fits.

        The running gangs give back their resources in the order of their expected ends, until the
        head fits and may start.
        """
        ahead = NodesAhead(self._nodes, head.demand, self._among(head))
        quota = self._quota.copy()
        quota.take(head.tags, head.demand.gpus)
        insufficient = {index for index in self._index.values() if not ahead.suffices(index)}
        not_before = head.not_before if head.not_before > self._now else -math.inf
        at = not_before
        #: Id and nodes of each gang that ended before the head fitted.
        ended: list[tuple[str, list[int]]] = []
        for gang in sorted(self._running, key=attrgetter("ends_at", "place")):
            if ahead.fits and gang.ends_at > not_before:
                break
            at = max(at, gang.ends_at)
            freed_gpus = {
                self._index[name]: gpus for name, gpus in gang.gpus.items() if name in self._index
            }
            if not ahead.fits:
                ended.append((gang.id, list(freed_gpus)))
            for index, gpus in freed_gpus.items():
                ahead.give_back(index, gpus, gpus * gang.cpus_per_gpu)
            quota.take(gang.tags, -sum(gang.gpus.values()))
        if not ahead.fits:
            return _Reservation(head=head, at=math.inf, nodes=ahead, quota=quota, waits_for=())
        # The head waits for the gangs whose end made a node large enough for it.
        became_sufficient = {index for index in insufficient if ahead.suffices(index)}
        waits_for = tuple(id for id, nodes in ended if not became_sufficient.isdisjoint(nodes))
        return _Reservation(head=head, at=at, nodes=ahead, quota=quota, waits_for=waits_for)


def duration_class_s(asked_s: float) -> float:
    """Return the expected duration of a gang in seconds: the class of the asked duration."""
    classes = (limit for limit in CLASSES_S if asked_s <= limit)
    return next(classes, math.ceil(asked_s / _DAY_S) * _DAY_S)
