"""The attempts at a run: what follows one that has ended, and all of them as a table."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from tasks.record.outcome import Verdict
from tasks.record.states import RunState
from tasks.spec.failure_kinds import REQUEUED, FailureKind
from tasks.spec.run import Retry

#: The delay grows by this factor with each try, and is spread by this part of it both ways, so that
#: runs which were sent back together do not come back together.
_GROWTH = 2.0
_JITTER = 0.1
#: Beyond this power the delay is at its longest anyway, and a float at its end.
_POWERS = 64

#: How a random number between two others is drawn.
Uniform = Callable[[float, float], float]


class Next(Enum):
    """What comes after an attempt."""

    #: The run waits for resources again; its user's attempts are not touched.
    REQUEUE = "requeue"
    #: Another of the user's attempts.
    RETRY = "retry"
    #: Nothing: this attempt's verdict is the run's.
    FINAL = "final"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequel:
    """What follows an attempt."""

    next: Next
    #: One line for people: `requeued: INSUFFICIENT_RESOURCES, next try in 61 s`.
    text: str
    #: Seconds until the next attempt; 0 where there is none.
    delay_s: float = 0.0
    #: The checkpoint that the next attempt starts from; empty for none.
    resume_from: str = ""

    @property
    def is_final(self) -> bool:
        return self.next is Next.FINAL


def decide(
    verdict: Verdict,
    before: Sequence[FailureKind | None],
    policy: Retry | None,
    *,
    resume_from: str = "",
    uniform: Uniform = random.uniform,
) -> Sequel:
    """What follows an attempt.

    INSUFFICIENT_RESOURCES and START_TIMEOUT say nothing about the run itself: such attempts are
    requeued, and count against no other kind's `attempts`. Their own, where a spec sets one, counts
    those of the same kind.

    Args:
        verdict: On the attempt.
        before: Why each earlier attempt of the run failed, in order; None for one that did not.
        policy: How the spec has this kind of failure tried again; None for not at all.
        resume_from: The checkpoint that the next attempt starts from; empty for none.
        uniform: Draws the jitter.
    """
    if verdict.state is not RunState.FAILED or verdict.failure is None:
        return Sequel(next=Next.FINAL, text=f"final: {verdict.state.value}")
    kind = verdict.failure.kind
    if policy is None:
        return Sequel(next=Next.FINAL, text=f"final: {kind.value} is not retried")
    if verdict.left:
        # What could not be ended holds its GPUs, its ports and its files.
        return Sequel(next=Next.FINAL, text=f"final: {kind.value}, and processes of it are left")
    is_requeue = kind in REQUEUED
    if is_requeue:
        used = 1 + sum(earlier is kind for earlier in before)
        step = 1 + _requeues_at_end(before)
    else:
        used = step = 1 + sum(earlier not in REQUEUED for earlier in before)
    if policy.attempts is not None and used >= policy.attempts:
        text = f"final: {kind.value}, {used} of {policy.attempts} attempts used"
        return Sequel(next=Next.FINAL, text=text)
    delay_s = _delay_s(policy, step, uniform)
    start = f", from {resume_from}" if resume_from else ""
    if is_requeue:
        cap = f" ({used + 1} of {policy.attempts})" if policy.attempts else ""
        text = f"requeued: {kind.value}, next try{cap} in {delay_s:.0f} s{start}"
        return Sequel(next=Next.REQUEUE, text=text, delay_s=delay_s, resume_from=resume_from)
    cap = f" of {policy.attempts}" if policy.attempts else ""
    text = f"retried: {kind.value}, attempt {used + 1}{cap} in {delay_s:.0f} s{start}"
    return Sequel(next=Next.RETRY, text=text, delay_s=delay_s, resume_from=resume_from)


def table_of(ledger: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """The attempts of `run.json` as rows for people, a column each key; empty cells are None."""
    return [_row(attempt) for attempt in ledger]


def _row(attempt: Mapping[str, Any]) -> dict[str, object]:
    failure, ray = attempt["failure"] or {}, attempt["ray"]
    nodes = ray.get("nodes")
    return {
        "attempt": attempt["number"],
        "submission": ray.get("submission_id"),
        "nodes": ", ".join(map(str, nodes)) if isinstance(nodes, Sequence) else nodes,
        "started": _when(attempt["started_at"]),
        "ended": _when(attempt["ended_at"]),
        "state": attempt["state"],
        "kind": failure.get("kind"),
        "line": failure.get("line") or failure.get("message"),
        "resumed from": attempt.get("resume_from"),
        "decided": attempt.get("decision"),
    }


def _when(at: float | None) -> str | None:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC" if at is not None else None


def _requeues_at_end(before: Sequence[FailureKind | None]) -> int:
    """How often the run was sent back since its last attempt that was not."""
    count = 0
    for kind in reversed(before):
        if kind not in REQUEUED:
            break
        count += 1
    return count


def _delay_s(policy: Retry, step: int, uniform: Uniform) -> float:
    grown = policy.delay_s * _GROWTH ** min(step - 1, _POWERS)
    return min(grown, policy.max_delay_s) * uniform(1 - _JITTER, 1 + _JITTER)
