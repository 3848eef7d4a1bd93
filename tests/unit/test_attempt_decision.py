"""Of all that could decide an attempt, what came first holds, whoever was told first."""

from __future__ import annotations

import itertools

import pytest

from tasks.processes.attempt import Decision, EarliestDecision
from tasks.record.outcome import Verdict
from tasks.record.states import RunState


def decision(at: float, state: RunState = RunState.FAILED) -> Decision:
    return Decision(
        at_monotonic_s=at,
        state=state,
        reason=f"{state.value} at {at:g}",
        make_verdict=lambda: Verdict(state=state, message=""),
    )


@pytest.mark.parametrize("order", list(itertools.permutations([1.0, 2.0, 3.0])))
def test_earliest_decision_holds_in_whatever_order_they_come(order: tuple[float, ...]) -> None:
    earliest = EarliestDecision()

    for at in order:
        earliest.decide(decision(at))

    assert earliest.decision is not None and earliest.decision.at_monotonic_s == 1.0


def test_of_two_at_once_the_one_that_was_told_first_holds() -> None:
    earliest = EarliestDecision()

    assert earliest.decide(decision(1.0, RunState.COMPLETED))
    assert not earliest.decide(decision(1.0, RunState.FAILED))

    assert earliest.decision is not None and earliest.decision.state is RunState.COMPLETED


def test_what_comes_after_a_reserved_end_does_not_count_and_what_comes_before_does() -> None:
    earliest = EarliestDecision()
    earliest.reserve(2.0)

    assert not earliest.is_open_at(2.5) and not earliest.is_open_at(2.0)
    assert not earliest.decide(decision(2.5))
    assert earliest.decision is None
    assert earliest.decide(decision(2.0, RunState.COMPLETED))
    assert earliest.is_open_at(1.5)
    assert earliest.decide(decision(1.5))
