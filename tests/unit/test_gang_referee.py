"""The referee of the gang queue can fail: each promise, broken in a history written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.gang_referee import History, Part, State, holds_of, judge

ALONE, PAIR = {"n1": 8}, {"n1": 8, "n2": 8}


def run(
    number: int,
    pending: float,
    ends: float,
    gpus: int = 8,
    on: Sequence[str] = ("n1",),
    rank: int = 1,
    end: str = "COMPLETED",
    **changes: Any,
) -> History:
    """A run that was submitted at `number` / 100 s and admitted at `pending`, whose one component
    wrote down all it should."""
    placed = dict.fromkeys(on, gpus)
    life = Part(attempt=1, pid=100 + number, began=pending + 1, ended=ends - 0.5, nodes=placed)
    states = [
        State(at=number / 100, type="SCHEDULED", name="Scheduled"),
        State(at=number / 100 + 0.5, type="SCHEDULED", name="PendingResources"),
        State(at=pending, type="PENDING", name="Pending"),
        State(at=pending + 0.1, type="PENDING", name="Submitting"),
        State(at=pending + 0.5, type="RUNNING", name="Running"),
        State(at=ends, type=end, name=end.title()),
    ]
    given = {"name": f"r{number}", "nodes": len(on), "gpus": gpus, "place": (rank, number)}
    return History(**{**given, "placed": placed, "parts": [life], "states": states, **changes})


def requeued(back: float, again: float, ends: float) -> History:
    """The first run, sent back to the line, and admitted a second time."""
    first, second = run(1, 1, back), run(1, again, ends)
    waits = State(at=back, type="SCHEDULED", name="PendingResources", due=back + 1)
    parts = [*first.parts, replace(second.parts[0], attempt=2, pid=201)]
    return replace(second, parts=parts, states=[*first.states[:-1], waits, *second.states[2:]])


ONE, BOTH = run(1, 1, 5), ("n1", "n2")
#: It waits in its own process from 1.5 s on.
IN_PROCESS = replace(
    run(1, 9, 12, place=(1, 3)),
    states=[
        State(at=0.1, type="PENDING", name="Pending"),
        State(at=0.5, type="RUNNING", name="Running"),
        State(at=1.5, type="RUNNING", name="PendingResources"),
        State(at=9, type="RUNNING", name="Running"),
        State(at=12, type="COMPLETED", name="Completed"),
    ],
)


def with_state(at: float, type: str, name: str) -> History:
    states = [*ONE.states, State(at=at, type=type, name=name)]
    return replace(ONE, states=sorted(states, key=lambda state: state.at))


def with_part(attempt: int, began: float, ended: float) -> History:
    return replace(ONE, parts=[*ONE.parts, Part(attempt=attempt, pid=7, began=began, ended=ended)])


def cancelled(history: History, *states: State) -> History:
    may_end = frozenset({"CANCELLED"})
    return replace(history, may_end=may_end, parts=[], placed=None, states=[*states])


@pytest.mark.parametrize(
    ("runs", "nodes"),
    [
        ([ONE, run(2, 1.2, 9, on=["n2"]), run(3, 9.1, 12, on=BOTH), run(4, 12.1, 14, 3)], PAIR),
        # given back and taken in the same instant
        ([ONE, run(2, 5, 9)], ALONE),
        # those of one pass may be told in any order
        ([run(1, 1.3, 5), run(2, 1, 5, on=["n2"])], PAIR),
        # a higher queue goes first, but for what a pass has started just before it came
        ([ONE, run(3, 5.1, 9, rank=0), run(2, 9.1, 12)], ALONE),
        ([run(1, 2.1, 5), run(200, 5.1, 9, rank=0)], ALONE),
        # it keeps its place, and holds nothing meanwhile
        ([requeued(5, 6.5, 9), run(2, 9.1, 12)], ALONE),
        ([IN_PROCESS, run(2, 1, 9)], ALONE),
    ],
)
def test_nothing_is_wrong_with_a_line_that_was_kept(
    runs: list[History], nodes: dict[str, int]
) -> None:
    assert judge(runs, nodes).faults == ()


@pytest.mark.parametrize(
    ("runs", "fault"),
    [
        # more than there is: on a node, in all, by the components' own word
        ([run(1, 1, 5, 5), run(2, 4.9, 8, 4)], "by their states: 9 of 8 n1 at 4.900: r1, r2"),
        (
            [run(n, 1, 5, placed=None, parts=[]) for n in (1, 2, 3)],
            "24 of 16 GPUs at 1.000: r1, r2, r3",
        ),
        (
            [replace(ONE, parts=[replace(ONE.parts[0], ended=7)]), run(2, 5.1, 9)],
            "by the components: 16 of 8 n1 at 6.100: r1, r2",
        ),
        (
            [replace(ONE, parts=[replace(ONE.parts[0], ended=7)])],
            "a component of r1 ran 2.00 s after its gang was given back",
        ),
        # started twice, or without a gang
        ([with_state(1.4, "PENDING", "Pending")], "r1 was admitted again 0.30 s after it had been"),
        ([with_state(3, "PENDING", "Pending")], "r1 was admitted again 1.90 s after it had been"),
        ([with_part(1, 4.7, 4.8)], "attempt 1 of r1 ran twice: 101, 7"),
        ([with_part(2, 3, 4)], "r1 ran twice at once: 101, 7"),
        ([with_part(2, 0.5, 0.6)], "(pid 7) ran without a gang"),
        ([with_part(2, 6, 6.1)], "(pid 7) ran without a gang"),
        (
            [replace(ONE, parts=[replace(ONE.parts[0], ended=None)])],
            "r1 completed, and its component (pid 101) never ended",
        ),
        # passed by a younger one, also where it was sent back or cancelled in the end
        (
            [run(1, 1, 9), run(2, 9.1, 12, on=BOTH), run(3, 2, 5, 2, on=["n2"])],
            "r3 passed r2, for which there was no room",
        ),
        (
            [
                run(1, 1, 9),
                cancelled(
                    run(2, 7, 8, on=BOTH),
                    *run(2, 7, 8).states[:2],
                    State(at=7, type="CANCELLED", name="Cancelled"),
                ),
                run(3, 3, 5, on=["n2"]),
            ],
            "r3 passed r2, for which there was no room",
        ),
        (
            [requeued(5, 9.5, 12), run(2, 5.5, 9), run(3, 1, 20, on=["n2"], place=(0, 0))],
            "r2 passed r1, for which there was no room",
        ),
        # forgotten though it fitted
        ([run(1, 30, 35), run(2, 1, 5, on=["n2"])], "r1 was admitted 29.00 s after r2"),
        # an end that never came, or another one
        (
            [replace(ONE, states=ONE.states[:2], parts=[])],
            "r1 never ended: it is SCHEDULED PendingResources",
        ),
        ([replace(ONE, states=ONE.states[:5])], "r1 never ended: it is RUNNING Running"),
        ([run(1, 1, 5, end="CRASHED")], "r1 ended as CRASHED"),
        (
            [
                cancelled(
                    ONE,
                    *ONE.states[:3],
                    State(at=2, type="CANCELLING", name="Cancelling"),
                    State(at=305, type="CANCELLED", name="Cancelled"),
                )
            ],
            "r1 was Cancelling for 303 s",
        ),
        # another shape
        ([replace(ONE, nodes=2, gpus=4)], "r1 asks for 2 x 4 GPUs and was given {'n1': 8}"),
    ],
)
def test_a_broken_promise_is_found(runs: list[History], fault: str) -> None:
    assert fault in "\n".join(judge(runs, PAIR).faults)


def test_more_runs_at_once_than_the_limit_are_found() -> None:
    judgement = judge([run(1, 1, 5, 1), run(2, 2, 5, 1)], PAIR, most_runs=1)

    assert judgement.faults == ("by their states: 2 of 1 runs at 2.000: r1, r2",)
    assert judgement.peak == {"GPUs": 2, "runs": 2, "n1": 2, "n2": 0}


def test_where_ray_places_only_what_the_components_say_of_nodes_counts() -> None:
    """The first run had its GPUs on another node than it was promised, and not up to its end."""
    first = run(1, 1, 9)
    first = replace(first, parts=[replace(first.parts[0], ended=3, nodes={"n2": 8})])
    second, third, fourth = run(2, 2, 8), run(3, 4, 8, on=["n2"]), run(2, 1.5, 8, on=["n2"])

    kept = judge([first, second, third], PAIR, by_states=False)
    broken = judge([first, fourth], PAIR, by_states=False)

    assert (kept.faults, kept.peak, kept.admitted) == ((), {"n1": 8, "n2": 8}, 3)
    assert "by the components: 16 of 8 n2" in "\n".join(broken.faults)


@pytest.mark.parametrize(
    ("history", "held"), [(requeued(5, 6.5, 9), [(1, 5), (6.5, 9)]), (IN_PROCESS, [(9, 12)])]
)
def test_a_gang_is_held_from_its_admission_until_the_run_waits_again_or_ends(
    history: History, held: list[tuple[float, float]]
) -> None:
    assert [(hold.since, hold.until) for hold in holds_of(history)] == held
