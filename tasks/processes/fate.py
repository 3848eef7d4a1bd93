"""The fate of an attempt: of all that could decide it, what came first holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tasks.record.outcome import Verdict
from tasks.record.states import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Something that ends an attempt."""

    #: When it happened, CLOCK_MONOTONIC seconds, by the kernel's account and not by when we heard.
    at_monotonic_s: float
    #: COMPLETED, FAILED or CANCELLED; RUNNING where the run goes on without this process.
    state: RunState
    #: One line for people.
    reason: str
    #: Called once all has ended and every log is whole.
    make_verdict: Callable[[], Verdict]
    #: The component to blame.
    component: str | None = None

    @staticmethod
    def of(verdict: Verdict, at_monotonic_s: float | None = None) -> Decision:
        """One whose verdict is known at once; by default it happened just now."""
        return Decision(
            at_monotonic_s=time.monotonic() if at_monotonic_s is None else at_monotonic_s,
            state=verdict.state,
            reason=verdict.message,
            make_verdict=lambda: verdict,
        )


class Fate:
    """Keeps the earliest decision, whatever the order in which decisions are heard of.

    A process that dies because another did, or because the teardown stopped it, dies later than
    what it is a victim of: so victims are never blamed.
    """

    def __init__(self) -> None:
        #: The earliest decision; None while the attempt goes on.
        self.decision: Decision | None = None
        #: What happened later does not count.
        self.horizon_s = float("inf")

    def is_open_at(self, at_monotonic_s: float) -> bool:
        """Nothing that happened earlier has decided, or is about to decide, the attempt."""
        return at_monotonic_s < self.horizon_s

    def reserve(self, at_monotonic_s: float) -> None:
        """What happened then decides, once it is known how: what came later does not count."""
        self.horizon_s = min(self.horizon_s, at_monotonic_s)

    def decide(self, decision: Decision) -> bool:
        """Take in a decision; whether it holds, for now."""
        if decision.at_monotonic_s > self.horizon_s:
            return False
        if self.decision and decision.at_monotonic_s >= self.decision.at_monotonic_s:
            return False
        self.decision = decision
        self.reserve(decision.at_monotonic_s)
        return True
