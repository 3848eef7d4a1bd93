"""Of all that could decide an attempt, what came first holds, whoever was told first."""

from __future__ import annotations

import asyncio
import itertools
import socket
from subprocess import Popen
from typing import Any, cast

import pytest

from tasks.processes.attempt import Decision, EarliestDecision
from tasks.processes.guarded import GuardedProcess
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


class NoGuardian:
    pid = 0


@pytest.mark.asyncio
async def test_who_the_kernel_told_of_first_died_first_however_late_both_were_heard_of() -> None:
    gone: list[GuardedProcess] = []
    ends = socket.socketpair()
    api, trainer = (
        GuardedProcess(
            name,
            cast("Popen[bytes]", NoGuardian()),
            end,
            mark=0,
            is_in_namespace=False,
            gone=gone,
        )
        for name, end in zip(("api", "trainer"), ends, strict=True)
    )

    def report(process: GuardedProcess, at_monotonic_s: float) -> None:
        ended: dict[str, Any] = {"event": "exited", "code": 1}
        process._on_event({**ended, "at_monotonic_s": at_monotonic_s})

    api._on_leader_gone()
    trainer._on_leader_gone()
    report(trainer, 1.0)
    report(api, 300.0)

    assert api.exited.result().at_monotonic_s < trainer.exited.result().at_monotonic_s == 1.0
    for end in ends:
        asyncio.get_running_loop().remove_reader(end)
        end.close()
