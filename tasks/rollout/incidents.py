"""What belongs together: failures of many groups with one cause, and cuts of the network."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tasks.rollout.clock import Emit


@dataclass(slots=True, kw_only=True, eq=False)
class Incident:
    """Groups that failed within seconds of each other, and count as one failure."""

    #: Of the first of them, which stands for all.
    why: str
    #: Until then it takes in others.
    closes_s: float
    #: Groups that were ever in it.
    groups: set[int] = field(default_factory=set)
    #: Of all of them; more than one group's make it known as an incident.
    ranks: set[int] = field(default_factory=set)
    #: Groups whose end, recovered or not, is yet to come.
    open: set[int] = field(default_factory=set)
    #: Which tries the budget has paid for, counted from 0, the same for all its groups.
    paid: set[int] = field(default_factory=set)
    is_told: bool = False


class Incidents:
    """Puts each failure into an incident, and charges the budget by incident."""

    def __init__(self, *, budget: int | None, emit: Emit) -> None:
        self._left = budget
        self._emit = emit
        self._last: Incident | None = None

    def failed(
        self, group: int, ranks: Sequence[int], why: str, *, now_s: float, window_s: float
    ) -> Incident:
        """The incident that the failure of a group belongs to: the last, or a new one.

        A group that was in the last one has been recovered since, so it opens a new one.

        Args:
            window_s: how long a new one takes in others.
        """
        one = self._last
        if one is None or now_s > one.closes_s or group in one.groups:
            one = self._last = Incident(why=why, closes_s=now_s + window_s)
        one.groups.add(group)
        one.open.add(group)
        one.ranks.update(ranks)
        if len(one.groups) > 1 and not one.is_told:
            one.is_told = True
            self._emit("rollout.incident.begun", ranks=sorted(one.ranks), why=one.why)
        return one

    def pay(self, one: Incident, attempt: int) -> bool:
        """Whether the budget allows this try, which counts once for all groups of the incident."""
        if attempt in one.paid:
            return True
        if self._left is not None:
            if self._left <= 0:
                return False
            self._left -= 1
        one.paid.add(attempt)
        return True

    def over(self, one: Incident, group: int) -> bool:
        """The recovery of a group has ended for good, one way or the other.

        Returns: whether it was the last of them; call `end` once the incident takes in no others.
        """
        one.open.discard(group)
        return not one.open

    def end(self, one: Incident) -> None:
        """Any number of times; nothing where another group has failed meanwhile."""
        if one.is_told and not one.open:
            one.is_told = False
            self._emit("rollout.incident.ended", ranks=sorted(one.ranks), why=one.why)


class NetworkCut:
    """Servers that work and cannot be reached: one incident, from the first to the last of them."""

    def __init__(self, *, emit: Emit) -> None:
        self._emit = emit
        self._cut: set[int] = set()
        self._ranks: set[int] = set()
        self._why = ""

    @property
    def ranks(self) -> Collection[int]:
        """That cannot be reached just now."""
        return frozenset(self._cut)

    def begun(self, rank: int, why: str) -> None:
        """Any number of times."""
        if not self._cut:
            self._why, self._ranks = why, set()
            self._emit("rollout.incident.begun", ranks=[rank], why=why)
        self._cut.add(rank)
        self._ranks.add(rank)

    def over(self, rank: int) -> None:
        """It answers again, or is no more; nothing for one that was not cut off."""
        if rank not in self._cut:
            return
        self._cut.discard(rank)
        if not self._cut:
            self._emit("rollout.incident.ended", ranks=sorted(self._ranks), why=self._why)
