"""What the answers of a server, and those that are missing, say about it. Pure.

Which servers answer questions and fail requests, unlike the others of their fleet. Pure.

What a client sends may fail wherever it is sent: that is no server's fault. One whose requests all
fail while those to the others are answered is sick, whatever it says of itself.

What belongs together: failures of many groups with one cause, and cuts of the network.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from tasks.record.events import Emit


class Silence(str):
    """Why no answer came: a timeout, a refused connection. Any other text is a bad answer's.

    Only silence may be the network's fault, and only a silence may be excused.
    """

    __slots__ = ()


class Verdict(Enum):
    """What follows from the evidence."""

    #: Nothing is missing.
    WELL = "well"
    #: Something is missing, not enough yet.
    SUSPECT = "suspect"
    #: Enough is missing, and it answers: it is the server.
    SICK = "sick"
    #: Enough is missing, and no answer came at last: the server, or the network before it.
    SILENT = "silent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Of one incarnation of a server, since its last good answer."""

    #: Probes and requests that failed in a row.
    misses: int = 0
    #: How many of those were requests.
    requests: int = 0
    #: How many were probes that were answered with something else than yes.
    refusals: int = 0
    #: What the last miss was; empty: none.
    reason: str = ""

    def after_yes(self) -> Evidence:
        """A probe was answered with yes: what was before is forgotten."""
        return Evidence()

    def after_answer(self) -> Evidence:
        """A request was answered: the server is not silent, whatever it says to probes."""
        return self if self.refusals else Evidence()

    def after_probe(self, reason: str, *, is_excused: bool = False) -> Evidence:
        """A probe that failed.

        Args:
            is_excused: a request was answered while it was outstanding. A server that prefills a
                long prompt lets a probe time out. Source: sgl-project/sglang#22511.
        """
        is_silence = isinstance(reason, Silence)
        if is_excused and is_silence:
            return self
        refusals = self.refusals if is_silence else self.refusals + 1
        return replace(self, misses=self.misses + 1, refusals=refusals, reason=reason)

    def after_request(self, reason: str, *, threshold: int) -> Evidence:
        """A request that failed in a way that tells of the server, never a 4xx.

        Requests alone never reach the threshold: all those on one lost connection fail at once,
        and a probe, which each of them brings about, has the last word.
        """
        if self.requests >= threshold - 1 or self.misses >= threshold - 1:
            return self
        return replace(self, misses=self.misses + 1, requests=self.requests + 1, reason=reason)

    def verdict(self, threshold: int) -> Verdict:
        """
        Args:
            threshold: so many misses in a row are enough; at least 1.
        """
        if self.misses == 0:
            return Verdict.WELL
        if self.misses < threshold:
            return Verdict.SUSPECT
        return Verdict.SILENT if isinstance(self.reason, Silence) else Verdict.SICK


#: Fewer failed requests in a row say nothing.
REQUESTS_AT_LEAST = 5


@dataclass(slots=True)
class _Requests:
    """What became of the requests to one incarnation of a server."""

    #: In a row, to the last one that ended.
    failed: int = 0
    #: When the first of those did, in monotonic seconds.
    since_s: float = 0.0
    #: When a request was last answered there.
    answered_s: float = float("-inf")


class Outliers:
    """Counts the requests of the servers that are watched."""

    def __init__(self, *, for_s: float) -> None:
        """
        Args:
            for_s: how long the requests to a server must have failed.
        """
        self._for_s = for_s
        self._of: dict[int, _Requests] = {}

    def begin(self, rank: int) -> None:
        """A new incarnation of it serves, of which nothing is known."""
        self._of[rank] = _Requests()

    def forget(self, rank: int) -> None:
        """It serves no more."""
        self._of.pop(rank, None)

    def answered(self, rank: int, now_s: float) -> None:
        if (requests := self._of.get(rank)) is not None:
            requests.failed = 0
            requests.answered_s = now_s

    def failed(self, rank: int, now_s: float) -> str:
        """One more request failed there.

        Returns: why the server is sick; empty: it is not known to be.
        """
        requests = self._of.get(rank)
        if requests is None:
            return ""
        if not requests.failed:
            requests.since_s = now_s
        requests.failed += 1
        lasts_s = now_s - requests.since_s
        if requests.failed < REQUESTS_AT_LEAST or lasts_s < self._for_s:
            return ""
        others = [other for at, other in self._of.items() if at != rank]
        well = [one for one in others if not one.failed and one.answered_s >= requests.since_s]
        if not others or 2 * len(well) <= len(others):
            return ""
        return (
            f"its last {requests.failed} requests failed, for {lasts_s:.0f} s, "
            f"while {len(well)} of {len(others)} others answer theirs"
        )


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
