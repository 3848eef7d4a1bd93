"""The scheduling policy: decides which waiting runs start now, and explains why the others wait.

A run starts only when it gets all of its GPUs at the same time. These GPUs are called its gang. The
function `plan` has no side effects and reads no clock, so the scheduler and the simulation of the
queue use the same function.

Users estimate in their specs how many `hours` a run holds its GPUs. The estimate is rounded up to
one of a few durations, because estimates are never exact, and exact values would hardly shorten the
waits. The estimates decide whether a later run may start earlier. A run that exceeds its estimate
is not ended.
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

#: Durations in seconds, in ascending order. A user's estimate of the duration of a run is rounded
#: up to one of these durations.
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


#: On each node, one run of a series may start early. Further runs may start early if the number of
#: GPUs that the node then lacks, times this factor, is at most the number of GPUs that the series
#: holds on the node.
_GPUS_PER_EARLY_GPU = 4


class Quota:
    """For each tag: the number of GPUs in use, and the largest allowed number of GPUs."""

    def __init__(self, limits: Mapping[str, int], used: Mapping[str, int] | None = None) -> None:
        """
        Args:
            limits: Mapping from a tag to the largest number of GPUs for all runs with the tag
                together.
            used: Mapping from a tag to the number of GPUs that runs with the tag already hold. None
                if runs hold no GPUs yet.
        """
        self._limits = dict(limits)
        self._used = dict.fromkeys(limits, 0) | dict(used or {})

    def copy(self) -> Quota:
        return Quota(self._limits, self._used)

    def find_exceeded_tag(self, tags: Iterable[str], gpus: int) -> str:
        """Return the tag whose limit a run would exceed if it started now.

        Args:
            tags: Tags of the run.
            gpus: Number of GPUs of the run.

        Returns:
            The first of these tags in alphabetical order, or "" if no limit would be exceeded.
        """
        if not self._limits:
            return ""
        limited = self._limits.keys() & tags
        exceeded = (tag for tag in limited if self._used[tag] + gpus > self._limits[tag])
        return min(exceeded, default="")

    def take(self, tags: Iterable[str], gpus: int) -> None:
        """For each tag of a run, add the GPUs of the run to the number of GPUs in use.

        Args:
            tags: The tags of the run.
            gpus: Number of GPUs that the run takes. A negative number means that the run releases
                GPUs.
        """
        for tag in self._limits.keys() & tags:
            self._used[tag] += gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A run that waits for its GPUs."""

    #: Id of the run.
    id: str
    #: GPUs and CPUs that the run needs.
    demand: Demand
    #: Sort key of the run in the queue. The run with the smallest key is first. All runs have
    #: different keys, including runs that already hold GPUs.
    place: tuple[float | int | str, ...]
    #: Expected time, in seconds, from the start of the run to its end. Estimates are
    #: rounded up to a value in CLASSES_S.
    estimate_s: float
    #: True if `estimate_s` is the default, because the spec of the run names no duration.
    is_estimate_assumed: bool = False
    #: Earliest start in seconds, by the same clock as the argument `now` of `plan`. A requeued run
    #: has a short delay, and keeps its position in the queue during the delay.
    not_before: float = 0.0
    #: Tags of the run. The total number of GPUs of all runs with a tag can have a limit.
    tags: frozenset[str] = frozenset()
    #: Names of the nodes that the run may use, or None for all nodes.
    among: frozenset[str] | None = None
    #: Names of nodes that the run should avoid. The run gets these nodes only if it does not fit on
    #: the other nodes.
    avoid: frozenset[str] = frozenset()
    #: Series of the run, see `tasks.queue.early_start`. Empty if the run must not start early, for
    #: example because the runs of its series are not short.
    series: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A run that holds its GPUs."""

    #: Id of the run.
    id: str
    #: Mapping from node name to the number of GPUs that the run holds on the node.
    gpus: Mapping[str, int]
    #: Number of CPUs that the run uses for each GPU.
    cpus_per_gpu: float
    #: Sort key that the run had in the queue before its start.
    place: tuple[float | int | str, ...]
    #: Expected end in seconds, by the same clock as the argument `now` of `plan`.
    ends_at: float
    #: True if `ends_at` is computed with a default duration, because the spec names no duration.
    is_end_assumed: bool = False
    #: Tags of the run. The total number of GPUs of all runs with a tag can have a limit.
    tags: frozenset[str] = frozenset()
    #: Series of the run, see `tasks.queue.early_start`. Empty if the run belongs to no series.
    series: str = ""


class Why(Enum):
    """The kind of reason why a waiting run does not start now."""

    #: The run is the first of the queue, and too few GPUs or CPUs are free.
    GPUS = "gpus"
    #: The run waits behind the first run of the queue.
    BEHIND = "behind"
    #: The run would fit, but its start would delay the first run of the queue.
    WOULD_DELAY = "would-delay"
    #: The run would exceed the limit of GPUs for one of its tags.
    LIMIT = "limit"
    #: The run was requeued, and the delay before its next start is not over.
    RETRY = "retry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The reason why a waiting run does not start now, and its expected start."""

    #: Kind of the reason why the run waits.
    why: Why
    #: Ids of the runs that this run waits for: either the first run of the queue, or the active
    #: runs that must end to free enough GPUs.
    waits_for: tuple[str, ...] = ()
    #: Expected start in seconds, by the same clock as the argument `now` of `plan`. None if
    #: unknown.
    starts_at: float | None = None
    #: True if the expected start is uncertain, because it depends on a run whose spec names no
    #: duration. A default duration was assumed for that run.
    is_start_assumed: bool = False
    #: Tag whose GPU limit the run would exceed. Empty if the run waits for another reason.
    tag: str = ""
    #: True if the run would not fit on the present nodes even if all their GPUs were free. Later
    #: runs need not wait for such a run.
    never_fits_now: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The decisions of the scheduling policy in one scheduling pass."""

    #: Mapping from the id of a run that starts to the names of its nodes, in the order of the
    #: starts.
    admitted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Mapping from run id to the reason why the run does not start, in the order of the queue.
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    #: Ids of the runs in `admitted` that start early, while other runs still use the granted GPUs.
    early: frozenset[str] = frozenset()
    #: Mapping from node name to the number of free GPUs after all starts of this scheduling pass.
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
    """Decide which runs start now and on which nodes, and why each other run waits.

    Runs are started in the order of the queue. The first run that does not fit is called the head.
    But if this run belongs to a series of short runs, it may start before its GPUs are free, see
    `tasks.queue.early_start`. The head is then the first later run that cannot start at all.

    - `fifo`: No later run starts before the head. But if the head would not fit even on empty
      nodes, later runs may start.
    - `backfill`: The head gets a reservation for the earliest time at which it will fit, according
      to the estimates. A later run may start now if it ends before that time, or if the head will
      fit beside the later run. If the head would not fit even on empty nodes, every later run that
      fits may start.

    A run whose `not_before` is in the future counts as not fitting. A run that would exceed the
    limit of a tag is skipped, and later runs may start.

    Args:
        waiting: The waiting runs, in any order.
        held: The runs that hold GPUs, in any order. GPUs on nodes that are not in `nodes` count
            only for the limits of tags.
        nodes: The nodes. If several nodes are equally good for a run, the first of these nodes are
            chosen. The field `held` of the nodes is ignored.
        now: Current time in seconds. All times of runs must come from the same clock.
        policy: The scheduling policy.
        limits: Mapping from a tag to the largest number of GPUs for all runs with the tag together.
            Other tags have no limit.
        used: Mapping from a tag to the number of GPUs that runs with the tag hold on other
            clusters.

    Source: EASY, D. Lifka, The ANL/IBM SP Scheduling System, JSSPP 1995.
    """
    return _Pass(held, nodes, now, Quota(limits or {}, used)).run(waiting, policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reservation:
    """The time and the resources that are reserved for the first run that does not fit now."""

    #: The first run of the queue that does not fit now.
    head: Waiting
    #: Reserved start: the earliest time at which the run will fit, according to the estimates.
    #: Infinite if the run never fits.
    at: float
    #: Forecast of the resources that will be free at the reserved start, before `head` takes GPUs.
    nodes: NodesAhead
    #: Forecast of the number of GPUs in use for each tag at the reserved start. The number includes
    #: the GPUs of `head`.
    quota: Quota
    #: Ids of the active runs that must end before the reserved start, to free enough GPUs.
    waits_for: tuple[str, ...]
    #: True if the reserved start is uncertain, because the spec of a run in `waits_for` names no
    #: duration. The end of that run is computed with a default duration.
    is_assumed: bool = False


_RETRY = Reason(why=Why.RETRY)


class _Pass:
    """Computes the `Plan` of one scheduling pass: which waiting runs start, and on which nodes.

    The object counts the free GPUs and CPUs of the nodes. Each started run decreases these numbers.
    """

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
        self._early: set[str] = set()
        self._reasons: dict[str, Reason] = {}

    def run(self, waiting: Sequence[Waiting], policy: Policy) -> Plan:
        """Return the plan for the waiting runs under the given scheduling policy."""
        # All steps below take runs from the same iterator, so each run of the queue is examined
        # only once.
        queue = self._skip_gangs_over_limit(sorted(waiting, key=attrgetter("place")))
        while (head := self._start_gangs_in_order(queue)) is not None:
            reservation = self._reserve(head)
            starts_at = None if math.isinf(reservation.at) else max(reservation.at, self._now)
            self._reasons[head.id] = Reason(
                why=Why.RETRY if head.not_before > self._now else Why.GPUS,
                waits_for=reservation.waits_for,
                starts_at=starts_at,
                is_start_assumed=reservation.is_assumed,
            )
            if policy == "backfill":
                self._backfill(queue, reservation)
            elif starts_at is None:
                # The first run (`head`) would not fit even on empty nodes. So later runs cannot
                # delay the first run, and may start.
                self._reasons[head.id] = replace(self._reasons[head.id], never_fits_now=True)
            else:
                behind = Reason(why=Why.BEHIND, waits_for=(head.id,))
                for run in queue:
                    self._reasons[run.id] = behind if run.not_before <= self._now else _RETRY

        free_gpus = zip(self._names, self._nodes.gpus, strict=True)
        free = {name: max(0, gpus) for name, gpus in free_gpus}
        return Plan(
            admitted=self._admitted, early=frozenset(self._early), reasons=self._reasons, free=free
        )

    def _skip_gangs_over_limit(self, queue: Sequence[Waiting]) -> Iterator[Waiting]:
        """Yield the runs of the queue, but skip each run that would exceed a tag's limit of GPUs.

        A run is checked only when the iterator reaches the run. So the check counts the GPUs of all
        runs that this scheduling pass has started until then. The reasons of the skipped runs are
        stored in `_reasons`.
        """
        over_limit: dict[str, Reason] = {}
        for run in queue:
            if tag := self._quota.find_exceeded_tag(run.tags, run.demand.gpus):
                if tag not in over_limit:
                    over_limit[tag] = Reason(why=Why.LIMIT, tag=tag)
                self._reasons[run.id] = over_limit[tag]
            else:
                yield run

    def _start_gangs_in_order(self, queue: Iterator[Waiting]) -> Waiting | None:
        """Start the runs of the queue in order, and return the first run that does not fit.

        Returns:
            The run, or None if all runs have started.
        """
        for run in queue:
            nodes = self._find(run) if run.not_before <= self._now else None
            if nodes is None and run.not_before <= self._now:
                nodes = self._find_for_early_start(run)
                if nodes is not None:
                    self._early.add(run.id)
            if nodes is None:
                return run
            self._start(run, nodes)
        return None

    def _find_for_early_start(self, run: Waiting) -> list[int] | None:
        """Choose a node for the early start of a run, before enough GPUs of the node are free.

        A run may start early only if its series is short, and only on a node on which other runs of
        the series hold GPUs. These other runs are short, so their GPUs become free soon.

        Returns:
            A list with the index of the node. None if the run must wait until its GPUs are free.
        """
        if not run.series:
            return None
        gpus = run.demand.gpus_per_node
        usable = self._find_usable_nodes(run)
        for index, name in enumerate(self._names):
            if name in run.avoid or (usable is not None and index not in usable):
                continue
            held_by_series = sum(
                held.gpus.get(name, 0) for held in self._running if held.series == run.series
            )
            # Number of GPUs that the node lacked before this run, because of earlier early starts.
            lacked_before = max(0, -self._nodes.gpus[index])
            # Number of GPUs that the node lacks if this run starts, too. The runs of the series
            # that already use GPUs must free at least this number of GPUs at their end.
            lacks = gpus - self._nodes.gpus[index]
            limit = max(gpus, held_by_series // _GPUS_PER_EARLY_GPU)
            if 0 < lacks <= min(limit, held_by_series - lacked_before):
                return [index]
        return None

    def _backfill(self, queue: Iterator[Waiting], reservation: _Reservation) -> None:
        """Start the remaining runs of the queue that do not delay the run with the reservation.

        The reasons why the other runs wait are stored in `_reasons`.
        """
        behind = Reason(why=Why.BEHIND, waits_for=(reservation.head.id,))
        would_delay = Reason(why=Why.WOULD_DELAY, waits_for=(reservation.head.id,))
        # Many runs of a long queue have the same demand. So remember the demands that do not fit
        # (`too_large`), and the demands that would delay `reservation.head` (`delaying`). A demand
        # in `too_large` will not fit later in the same pass. A demand in `delaying` is checked
        # again after another run has started.
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
            elif not is_short and reservation.quota.find_exceeded_tag(run.tags, demand.gpus):
                self._reasons[run.id] = would_delay
            else:
                self._start(run, nodes)
                delaying.clear()
                if not is_short:
                    reservation.nodes.take(nodes, demand)
                    reservation.quota.take(run.tags, demand.gpus)

    def _find(self, run: Waiting) -> list[int] | None:
        """Choose the nodes for a run.

        Nodes in `run.avoid` are chosen only if the run does not fit on the other nodes. In that
        case as few nodes of `run.avoid` as possible are chosen.

        Returns:
            The indexes of the nodes, or None if the run does not fit.
        """
        among = self._find_usable_nodes(run)
        avoid = sorted(self._index[name] for name in run.avoid & self._index.keys())
        for allowed_count in range(len(avoid)):
            candidates = set(self._index.values()) if among is None else among
            nodes = self._nodes.find(run.demand, candidates.difference(avoid[allowed_count:]))
            if nodes:
                return nodes
        return self._nodes.find(run.demand, among)

    def _find_usable_nodes(self, run: Waiting) -> set[int] | None:
        """Return the indexes of the nodes that a run may use, or None if it may use all nodes."""
        if run.among is None:
            return None
        return {self._index[name] for name in run.among if name in self._index}

    def _start(self, run: Waiting, nodes: Sequence[int]) -> None:
        """Start a run on the nodes with these indexes, and decrease the free GPUs and CPUs."""
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
                is_end_assumed=run.is_estimate_assumed,
                tags=run.tags,
                series=run.series,
            )
        )

    def _reserve(self, head: Waiting) -> _Reservation:
        """Compute the earliest time at which a waiting run will fit.

        The method assumes that the active runs end at their expected ends, and finds the time at
        which enough active runs have ended. The result is never earlier than the field `not_before`
        of the waiting run.

        Args:
            head: The waiting run.
        """
        ahead = NodesAhead(self._nodes, head.demand, self._find_usable_nodes(head))
        quota = self._quota.copy()
        quota.take(head.tags, head.demand.gpus)
        insufficient = {index for index in self._index.values() if not ahead.is_sufficient(index)}
        not_before = head.not_before if head.not_before > self._now else -math.inf
        at = not_before
        # Runs that must end before the waiting run fits, in the order of their ends. Each entry is
        # the id of a run, and the indexes of the nodes on which the run holds GPUs.
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
                ahead.release(index, gpus, gpus * gang.cpus_per_gpu)
            quota.take(gang.tags, -sum(gang.gpus.values()))
        if not ahead.fits:
            return _Reservation(head=head, at=math.inf, nodes=ahead, quota=quota, waits_for=())
        # A node is sufficient if it has enough free GPUs and CPUs for the waiting run. `waits_for`
        # contains only runs that hold GPUs on a node that becomes sufficient.
        became_sufficient = {index for index in insufficient if ahead.is_sufficient(index)}
        waits_for = tuple(id for id, nodes in ended if not became_sufficient.isdisjoint(nodes))
        is_assumed = any(gang.is_end_assumed and gang.id in waits_for for gang in self._running)
        return _Reservation(
            head=head,
            at=at,
            nodes=ahead,
            quota=quota,
            waits_for=waits_for,
            is_assumed=is_assumed,
        )


def duration_class_s(estimate_s: float) -> float:
    """Round an estimated duration up to the next value of CLASSES_S.

    Args:
        estimate_s: Estimated duration in seconds.

    Returns:
        The rounded duration in seconds. A duration above the largest value of CLASSES_S is rounded
        up to whole days.
    """
    classes = (limit for limit in CLASSES_S if estimate_s <= limit)
    return next(classes, math.ceil(estimate_s / _DAY_S) * _DAY_S)
