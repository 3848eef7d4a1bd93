"""The referee of the gang queue finds what must not be, in histories that were written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from tests.support.gang_referee import History, Judgement, Part, State, holds_of, judge

NODES = {"n1": 8, "n2": 8}


def run(
    number: int,
    *,
    pending: float,
    ends: float,
    gpus: int = 8,
    on: Sequence[str] = ("n1",),
    rank: int = 1,
    parts: Sequence[Part] | None = None,
    end: str = "COMPLETED",
) -> History:
    """A run that was submitted at `number` / 100 s, whose one component wrote down all it should.

    Args:
        pending: when it was admitted, seconds.
    """
    placed = dict.fromkeys(on, gpus)
    life = Part(attempt=1, pid=100 + number, began=pending + 1, ended=ends - 0.5, nodes=placed)
    return History(
        name=f"r{number}",
        nodes=len(on),
        gpus=gpus,
        place=(rank, number),
        placed=placed,
        parts=[life] if parts is None else parts,
        states=[
            State(at=number / 100, type="SCHEDULED", name="Scheduled"),
            State(at=number / 100 + 0.5, type="SCHEDULED", name="PendingResources"),
            State(at=pending, type="PENDING", name="Pending"),
            State(at=pending + 0.1, type="PENDING", name="Submitting"),
            State(at=pending + 0.5, type="RUNNING", name="Running"),
            State(at=pending + 0.7, type="RUNNING", name="Running"),
            State(at=ends, type=end, name=end.title()),
        ],
    )


def requeued(number: int, *, back: float, again: float, ends: float) -> History:
    """A run on n1 that was sent back to the line, and admitted a second time."""
    first = run(number, pending=1, ends=back)
    second = run(number, pending=again, ends=ends)
    [part] = second.parts
    return replace(
        second,
        parts=[*first.parts, replace(part, attempt=2, pid=200 + number)],
        states=[
            *first.states[:-1],
            State(at=back, type="SCHEDULED", name="PendingResources", due=back + 1),
            *second.states[2:],
        ],
    )


def faults(*runs: History, nodes: Mapping[str, int] = NODES) -> str:
    return "\n".join(judge(runs, nodes).faults)


def test_nothing_is_wrong_with_a_line_that_was_kept() -> None:
    runs = [
        run(1, pending=1, ends=5),
        run(2, pending=1.2, ends=9, on=["n2"]),
        run(3, pending=9.1, ends=12, on=["n1", "n2"]),
        run(4, pending=12.1, ends=14, gpus=3),
    ]

    judgement = judge(runs, NODES)

    assert judgement.faults == ()
    assert judgement.peak == {"GPUs": 16, "runs": 2, "n1": 8, "n2": 8}
    assert (judgement.admitted, judgement.admissions, judgement.late) == (4, 4, 0)


def test_more_gpus_than_a_node_has_are_found() -> None:
    runs = [run(1, pending=1, ends=5, gpus=5), run(2, pending=4.9, ends=8, gpus=4)]

    found = judge(runs, NODES).faults

    assert found == ("by their states: 9 of 8 n1 at 4.900: r1, r2",)


def test_more_gpus_than_there_are_are_found_though_nobody_knows_the_nodes() -> None:
    runs = [replace(run(number, pending=1, ends=5), placed=None, parts=[]) for number in (1, 2, 3)]

    assert "24 of 16 GPUs at 1.000: r1, r2, r3" in faults(*runs)


def test_components_that_are_on_one_node_at_once_are_found_by_their_own_word() -> None:
    """Whatever the states say: the gang was given back while the component still ran."""
    early = run(1, pending=1, ends=5)
    late = replace(early, parts=[replace(early.parts[0], ended=7)])

    found = faults(late, run(2, pending=5.1, ends=9))

    assert "by the components: 16 of 8 n1 at 6.100: r1, r2" in found
    assert "a component of r1 ran 2.00 s after its gang was given back" in found


def test_gang_that_is_given_back_and_taken_in_the_same_instant_is_in_order() -> None:
    assert faults(run(1, pending=1, ends=5), run(2, pending=5, ends=9)) == ""


def test_more_runs_at_once_than_the_limit_are_found() -> None:
    runs = [run(1, pending=1, ends=5, gpus=1), run(2, pending=2, ends=5, gpus=1)]

    judgement = judge(runs, NODES, most_runs=1)

    assert judgement.faults == ("by their states: 2 of 1 runs at 2.000: r1, r2",)


def test_run_that_is_admitted_twice_is_found() -> None:
    one = run(1, pending=1, ends=5)
    states = [*one.states[:4], State(at=1.4, type="PENDING", name="Pending"), *one.states[4:]]

    assert "r1 was admitted again 0.30 s after it had been" in faults(replace(one, states=states))


def test_second_admission_of_a_running_run_is_found() -> None:
    one = run(1, pending=1, ends=5)
    states = [*one.states[:6], State(at=3, type="PENDING", name="Pending"), *one.states[6:]]

    assert "r1 was admitted again 1.90 s after it had been" in faults(replace(one, states=states))


@pytest.mark.parametrize(
    ("second", "told"),
    [
        # of the same attempt: somebody else has started the flow, too
        (Part(attempt=1, pid=7, began=4.7, ended=4.8), "attempt 1 of r1 ran twice: 101, 7"),
        # of the next one, while the first lives
        (Part(attempt=2, pid=7, began=3, ended=4), "r1 ran twice at once: 101, 7"),
        # before its first admission
        (Part(attempt=2, pid=7, began=0.5, ended=0.6), "(pid 7) ran without a gang"),
        # after its end
        (Part(attempt=2, pid=7, began=6, ended=6.1), "(pid 7) ran without a gang"),
    ],
)
def test_component_that_runs_when_it_should_not_is_found(second: Part, told: str) -> None:
    one = run(1, pending=1, ends=5)

    assert told in faults(replace(one, parts=[*one.parts, second]))


def test_component_that_never_ended_is_found_where_its_run_completed() -> None:
    one = run(1, pending=1, ends=5)
    parts = [replace(one.parts[0], ended=None)]

    assert "r1 completed, and its component (pid 101) never ended" in faults(
        replace(one, parts=parts)
    )
    cancelled = replace(run(1, pending=1, ends=5, end="CANCELLED"), parts=parts)
    assert faults(replace(cancelled, may_end=frozenset({"CANCELLED"}))) == ""


def test_younger_run_that_took_what_an_older_one_needed_is_found() -> None:
    holder = run(1, pending=1, ends=9, on=["n1"])
    older = run(2, pending=9.1, ends=12, on=["n1", "n2"])
    younger = run(3, pending=2, ends=5, gpus=2, on=["n2"])

    assert faults(holder, older, younger) == "r3 passed r2, for which there was no room"


def test_runs_of_one_pass_may_be_told_in_any_order() -> None:
    judgement = judge([run(1, pending=1.3, ends=5), run(2, pending=1, ends=5, on=["n2"])], NODES)

    assert judgement.faults == ()
    assert (judgement.late, round(judgement.late_s, 2)) == (1, 0.3)


def test_run_that_was_forgotten_though_it_fitted_is_found() -> None:
    found = faults(run(1, pending=30, ends=35), run(2, pending=1, ends=5, on=["n2"]))

    assert found == "r1 was admitted 29.00 s after r2"


def test_run_that_was_passed_and_then_cancelled_is_found_too() -> None:
    holder = run(1, pending=1, ends=9)
    older = run(2, pending=7, ends=8, on=["n1", "n2"])
    states = [*older.states[:2], State(at=7, type="CANCELLED", name="Cancelled")]
    cancelled = replace(
        older, states=states, parts=[], placed=None, may_end=frozenset({"CANCELLED"})
    )

    found = faults(holder, cancelled, run(3, pending=3, ends=5, on=["n2"]))

    assert found == "r3 passed r2, for which there was no room"


def test_higher_queue_goes_first_and_so_did_nobody_pass() -> None:
    holder = run(1, pending=1, ends=5)
    urgent = run(3, pending=5.1, ends=9, rank=0)
    older = run(2, pending=9.1, ends=12)

    assert faults(holder, urgent, older, nodes={"n1": 8}) == ""
    wrong = faults(
        holder,
        replace(urgent, place=(2, 3)),
        older,
        nodes={"n1": 8},
    )
    assert wrong == "r3 passed r2, for which there was no room"


def test_run_that_was_started_just_before_an_urgent_one_came_has_passed_nobody() -> None:
    """The pass that admitted it had begun before."""
    urgent = run(200, pending=5.1, ends=9, rank=0)

    assert faults(run(1, pending=2.1, ends=5), urgent, nodes={"n1": 8}) == ""


def test_requeued_run_keeps_its_place() -> None:
    sent_back = requeued(1, back=5, again=6.5, ends=9)
    behind = run(2, pending=9.1, ends=12)
    judgement = judge([sent_back, behind], {"n1": 8})

    assert judgement.faults == ()
    assert (judgement.admitted, judgement.admissions) == (2, 3)
    assert [(hold.since, hold.until) for hold in holds_of(sent_back)] == [(1, 5), (6.5, 9)]


def test_run_that_passed_a_requeued_one_is_found() -> None:
    sent_back = requeued(1, back=5, again=9.5, ends=12)

    found = faults(sent_back, run(2, pending=5.5, ends=9), nodes={"n1": 8})

    assert found == "r2 passed r1, for which there was no room"


def test_where_ray_places_only_what_the_components_say_of_nodes_counts() -> None:
    """The first run had its GPUs on another node than it was promised, and not up to its end."""
    first = run(1, pending=1, ends=9)
    part = replace(first.parts[0], ended=3, nodes={"n2": 8})
    first = replace(first, parts=[part])
    second = run(2, pending=2, ends=8, on=["n1"])

    assert judge([first, second, run(3, pending=4, ends=8, on=["n2"])], NODES, by_states=False) == (
        Judgement(faults=(), peak={"n1": 8, "n2": 8}, admitted=3, admissions=3)
    )
    assert "by the components: 16 of 8 n2" in "\n".join(
        judge([first, run(2, pending=1.5, ends=8, on=["n2"])], NODES, by_states=False).faults
    )


def test_run_that_never_ends_is_found() -> None:
    one = run(1, pending=1, ends=5)

    assert faults(replace(one, states=one.states[:2], parts=[])) == (
        "r1 never ended: it is SCHEDULED PendingResources"
    )
    assert "r1 never ended: it is RUNNING Running" in faults(replace(one, states=one.states[:5]))
    assert "r1 ended as CRASHED" in faults(run(1, pending=1, ends=5, end="CRASHED"))


def test_run_whose_cancel_is_not_carried_out_is_found() -> None:
    one = run(1, pending=1, ends=305, end="CANCELLED")
    states = [*one.states[:3], State(at=2, type="CANCELLING", name="Cancelling"), one.states[-1]]
    stuck = replace(one, states=states, parts=[], may_end=frozenset({"CANCELLED"}))

    assert faults(stuck) == "r1 was Cancelling for 303 s"


def test_gang_of_another_shape_is_found() -> None:
    one = run(1, pending=1, ends=5, gpus=8, on=["n1"])

    assert "r1 asks for 2 x 4 GPUs and was given {'n1': 8}" in faults(replace(one, nodes=2, gpus=4))


def test_run_that_waits_in_its_own_process_holds_nothing_meanwhile() -> None:
    direct = replace(
        run(1, pending=9, ends=12),
        states=[
            State(at=0.1, type="PENDING", name="Pending"),
            State(at=0.5, type="RUNNING", name="Running"),
            State(at=1.5, type="RUNNING", name="PendingResources"),
            State(at=9, type="RUNNING", name="Running"),
            State(at=12, type="COMPLETED", name="Completed"),
        ],
    )

    assert [(hold.since, hold.until) for hold in holds_of(direct)] == [(9, 12)]
    assert faults(replace(direct, place=(1, 3)), run(2, pending=1, ends=9), nodes={"n1": 8}) == ""
