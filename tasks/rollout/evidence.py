"""What the answers of a server, and those that are missing, say about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


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
