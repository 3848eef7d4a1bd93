"""Tests that the earliest event decides an attempt, even if it is reported later than others."""

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
    """Return a decision about the end of an attempt.

    Args:
        at: Monotonic time of the decision, in seconds.
        state: Final state of the attempt.
    """

    async def make_verdict() -> Verdict:
        return Verdict(state=state, message="")

    return Decision(
        at_monotonic_s=at,
        state=state,
        reason=f"{state.value} at {at:g}",
        make_verdict=make_verdict,
    )


@pytest.mark.parametrize("order", list(itertools.permutations([1.0, 2.0, 3.0])))
def test_earliest_decision_counts_in_any_order_of_reports(order: tuple[float, ...]) -> None:
    earliest = EarliestDecision()

    for at in order:
        earliest.decide(decision(at))

    assert earliest.decision is not None and earliest.decision.at_monotonic_s == 1.0


def test_first_report_counts_if_two_decisions_have_the_same_time() -> None:
    earliest = EarliestDecision()

    is_first_accepted = earliest.decide(decision(1.0, RunState.COMPLETED))
    is_second_accepted = earliest.decide(decision(1.0, RunState.FAILED))

    assert (is_first_accepted, is_second_accepted) == (True, False)
    assert earliest.decision is not None and earliest.decision.state is RunState.COMPLETED


def test_only_decisions_up_to_a_reserved_time_count() -> None:
    earliest = EarliestDecision()
    earliest.reserve(2.0)

    assert not earliest.is_open_at(2.5) and not earliest.is_open_at(2.0)
    assert not earliest.decide(decision(2.5))
    assert earliest.decision is None
    assert earliest.decide(decision(2.0, RunState.COMPLETED))
    assert earliest.is_open_at(1.5)
    assert earliest.decide(decision(1.5))


class NoGuardian:
    """A fake guardian process. A real guardian process starts and ends a component."""

    pid = 0


@pytest.mark.asyncio
async def test_exit_times_come_from_the_kernel_not_from_the_order_of_reports() -> None:
    ended_processes: list[GuardedProcess] = []
    sockets = socket.socketpair()
    api, trainer = (
        GuardedProcess(
            name,
            cast("Popen[bytes]", NoGuardian()),
            connection,
            mark=0,
            is_in_namespace=False,
            ended_processes=ended_processes,
        )
        for name, connection in zip(("api", "trainer"), sockets, strict=True)
    )

    def report(process: GuardedProcess, at_monotonic_s: float) -> None:
        exited: dict[str, Any] = {"event": "exited", "code": 1}
        process._on_event({**exited, "at_monotonic_s": at_monotonic_s})

    api._on_leader_gone()
    trainer._on_leader_gone()
    report(trainer, 1.0)
    report(api, 300.0)

    assert api.exited.result().at_monotonic_s < trainer.exited.result().at_monotonic_s == 1.0
    for connection in sockets:
        asyncio.get_running_loop().remove_reader(connection)
        connection.close()
