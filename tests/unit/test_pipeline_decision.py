"""The next step of a pipeline, derived from the earlier runs of its stages."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.pipeline.decision import (
    WAITING_AT_MOST,
    Begin,
    PipelineDecision,
    StagePlan,
    StageRun,
    StageState,
    completed_run,
    decide,
    find_last_request,
)
from tasks.pipeline.stage_runs import idempotency_key, parse_key
from tasks.record.checkpoints import describe_stage_unrecognised, find_stage_checkpoint
from tasks.record.places import RunPlace
from tasks.record.states import RunState
from tasks.spec.run import RunSpec

START = datetime(2026, 1, 1, tzinfo=UTC)
#: Two stages in sequence.
STAGES = (
    StagePlan(name="a", needs=(), units=("a",)),
    StagePlan(name="b", needs=("a",), units=("b",)),
)


def at(second: float) -> datetime:
    return START + timedelta(seconds=second)


def run(
    stage: str, number: int, ending: RunState | None, ended_at: float | None = None
) -> StageRun:
    return StageRun(
        stage=stage,
        number=number,
        flow_run_id=f"{stage}{number}",
        name=f"{stage}-run-{number}",
        state=(ending or RunState.FAILED).value.title() if ending else "Running",
        message="",
        ending=ending,
        ended_at=at(ended_at) if ended_at is not None else None,
    )


DONE, FAILED, CANCELLED = RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED
A_DONE = run("a", 1, DONE, 10)
A_OPEN = run("a", 1, None)
A_FAILED = run("a", 1, FAILED, 10)
B_FAILED = run("b", 1, FAILED, 20)
B_CANCELLED = run("b", 1, CANCELLED, 20)


@pytest.mark.parametrize(
    ("runs", "requested_at", "step"),
    [
        ([], 0, Begin(stage="a", number=1)),
        # the run of stage a is waiting or running, so the pipeline continues to wait for this run
        ([A_OPEN], 0, A_OPEN),
        # a user has started the pipeline again while the run of stage a is waiting or running: the
        # pipeline continues to wait for this run
        ([A_OPEN], 99, A_OPEN),
        # a complete stage is not repeated: the next stage begins, or the pipeline ends
        ([A_DONE], 0, Begin(stage="b", number=1)),
        ([A_DONE], 99, Begin(stage="b", number=1)),
        ([A_DONE, run("b", 1, DONE, 20)], 0, None),
        # a failed or cancelled stage is run again only if a user starts the pipeline after the end
        # of the stage. No user has done so here, so the pipeline ends
        ([A_FAILED], 0, A_FAILED),
        ([A_DONE, B_FAILED], 19.9, B_FAILED),
        ([A_DONE, B_FAILED], 20, B_FAILED),
        ([A_DONE, B_CANCELLED], 0, B_CANCELLED),
        # the stage failed before the last start of the pipeline, so the stage is run again
        ([A_DONE, B_FAILED], 20.1, Begin(stage="b", number=2)),
        ([A_DONE, B_CANCELLED], 21, Begin(stage="b", number=2)),
        ([A_DONE, B_FAILED, run("b", 2, FAILED, 30)], 31, Begin(stage="b", number=3)),
        (
            [A_DONE, B_FAILED, run("b", 2, FAILED, 30)],
            21,
            run("b", 2, FAILED, 30),
        ),
        # a user has retried the first run of stage b, so only the result of this run counts, and
        # the second run of stage b is ignored
        ([A_DONE, run("b", 1, None), run("b", 2, FAILED, 30)], 99, run("b", 1, None)),
        ([A_DONE, run("b", 1, DONE, 40), run("b", 2, FAILED, 30)], 99, None),
        # the order of the runs does not matter
        ([run("b", 2, None), B_FAILED, A_DONE], 21, run("b", 2, None)),
        # the run of a stage that is no longer in the pipeline is ignored
        ([run("z", 1, FAILED, 5), A_DONE], 0, Begin(stage="b", number=1)),
    ],
)
def test_next_step_follows_from_the_runs(
    runs: list[StageRun], requested_at: float, step: Begin | StageRun | None
) -> None:
    assert only_step(decide(STAGES, runs, at(requested_at))) == step


def stopped(stage: str) -> StageRun:
    """Return a run that the pipeline has stopped early."""
    return replace(run(stage, 1, CANCELLED, 10), stop_reason="reward 0.1 is below the median 0.4")


def test_run_that_was_stopped_early_is_no_failure_and_is_not_repeated() -> None:
    grid = StagePlan(name="a", needs=(), units=("a.1", "a.2"))
    stages = (grid, STAGES[1])
    runs = [stopped("a.1"), run("a.2", 1, DONE, 20)]

    active = decide(stages, [stopped("a.1"), run("a.2", 1, None)], at(0))
    ended = decide(stages, runs, at(0))
    retried = decide(stages, runs, at(99))

    assert active.states["a"] is StageState.ACTIVE and not active.begins
    assert ended.states["a"] is StageState.COMPLETED and ended.ended_by is None
    assert ended.begins == retried.begins == (Begin(stage="b", number=1),)


def test_run_that_fails_while_it_is_stopped_early_is_a_failure() -> None:
    failed = replace(stopped("a"), ending=FAILED)

    assert decide(STAGES, [failed], at(0)).ended_by == failed


def only_step(decision: PipelineDecision) -> Begin | StageRun | None:
    """Return the run that a decision contains: a run to begin, an active run or a failed run.

    Returns:
        The run, or None if the decision contains no run. The test fails if there are several runs.
    """
    steps = [*decision.begins, *decision.active]
    if decision.ended_by is not None:
        steps.append(decision.ended_by)
    assert len(steps) <= 1
    return steps[0] if steps else None


def plan(name: str, *needs: str, points: int = 0, **further: Any) -> StagePlan:
    """Return the plan of a stage. If `points` is not 0, the stage has a matrix of this size."""
    units = tuple(f"{name}.{number + 1}" for number in range(points)) or (name,)
    return StagePlan(name=name, needs=needs, units=units, **further)


def begun(decision: PipelineDecision) -> list[str]:
    return [step.stage for step in decision.begins]


def test_stages_of_a_graph_begin_when_their_needs_have_ended() -> None:
    stages = [plan("join", "x", "y"), plan("x", "a"), plan("y", "a"), plan("a"), plan("other")]

    first = decide(stages, [], at(0))
    second = decide(stages, [A_DONE, run("other", 1, None)], at(0))
    third = decide(stages, [A_DONE, run("x", 1, DONE, 20), run("y", 1, None)], at(0))

    assert begun(first) == ["a", "other"]
    assert begun(second) == ["x", "y"]
    assert begun(third) == ["other"]
    assert third.states["join"] is StageState.WAITING


def test_no_stage_begins_after_a_failure_and_active_runs_are_kept() -> None:
    stages = [plan("a"), plan("b"), plan("c")]

    decision = decide(stages, [A_FAILED, run("b", 1, None)], at(0))

    assert decision.begins == ()
    assert decision.active == (run("b", 1, None),)
    assert decision.ended_by == A_FAILED
    assert not decision.is_over


def test_pipeline_continues_after_a_failure_that_is_allowed() -> None:
    stages = [plan("a", continues=True), plan("b", "a")]

    decision = decide(stages, [A_FAILED], at(0))

    assert begun(decision) == ["b"]
    assert decision.ended_by is None
    assert decision.states == {"a": StageState.FAILED, "b": StageState.ACTIVE}


def test_skipped_stage_lets_later_stages_begin() -> None:
    stages = [plan("a"), plan("b", "a"), plan("c", "b")]
    reasons = {"b": "the condition of the stage is false: 1 > 2"}

    decision = decide(stages, [A_DONE], at(0), lambda name, _states: reasons.get(name, ""))

    assert begun(decision) == ["c"]
    assert decision.skipped == reasons
    assert decision.states["b"] is StageState.SKIPPED


def test_condition_of_a_stage_that_has_begun_is_not_evaluated_again() -> None:
    decision = decide([plan("a")], [A_OPEN], at(0), lambda _name, _states: "no longer true")

    assert decision.active == (A_OPEN,)


@pytest.mark.parametrize(
    ("runs", "begins"),
    [
        ([], ["g.1", "g.2"]),
        ([run("g.1", 1, None)], ["g.2"]),
        ([run("g.1", 1, None), run("g.2", 1, None)], []),
        ([run("g.1", 1, DONE, 5), run("g.2", 1, None)], ["g.3"]),
    ],
)
def test_matrix_has_at_most_the_allowed_active_points(
    runs: list[StageRun], begins: list[str]
) -> None:
    decision = decide([plan("g", points=4, at_most=2)], runs, at(0))

    assert begun(decision) == begins


@pytest.mark.parametrize(
    ("waiting", "running", "begins"),
    [
        (0, 0, WAITING_AT_MOST),
        (WAITING_AT_MOST, 0, 0),
        (WAITING_AT_MOST - 3, 3, 3),
        (0, 100, WAITING_AT_MOST),
        (0, 190, 10),
    ],
)
def test_only_some_points_of_a_large_matrix_wait_at_the_same_time(
    waiting: int, running: int, begins: int
) -> None:
    runs = [
        replace(run(f"g.{number}", 1, None), is_waiting=number > running)
        for number in range(1, running + waiting + 1)
    ]

    decision = decide([plan("g", points=200)], runs, at(0))

    assert len(decision.begins) == begins
    assert not decision.is_over


def test_matrix_is_complete_when_all_points_are_complete() -> None:
    runs = [run("g.1", 1, DONE, 5), run("g.2", 1, FAILED, 6), run("g.2", 2, DONE, 9)]

    decision = decide([plan("g", points=2), plan("after", "g")], runs, at(7))

    assert decision.states["g"] is StageState.COMPLETED
    assert begun(decision) == ["after"]


def test_failed_points_do_not_stop_a_matrix_that_continues() -> None:
    runs = [run("g.1", 1, FAILED, 5)]

    stopping = decide([plan("g", points=2)], runs, at(0))
    continuing = decide([plan("g", points=2, continues=True)], runs, at(0))

    assert begun(stopping) == [] and stopping.is_over
    assert begun(continuing) == ["g.2"]
    assert continuing.states["g"] is StageState.ACTIVE


@pytest.mark.parametrize(
    ("states", "requested_at"),
    [
        # each pair describes a state: its time in seconds, and True if the state is final. First
        # case: the run was submitted at 0 s, became pending at 1 s, and ran from 2 s
        ([(0, False), (1, False), (2, False)], 0),
        # the pipeline failed at 9 s, and a user retried it at 20 s
        ([(0, False), (2, False), (9, True), (20, False), (21, False)], 20),
        # the pipeline failed twice, and a user retried it each time: the result is the time of the
        # last retry
        ([(0, False), (9, True), (20, False), (29, True), (40, False), (41, False)], 40),
        # a user submitted the pipeline at 0 s, and `muster reconcile` scheduled the lost pipeline
        # again at 30 s: only requests of users count, so the result is 0 s
        ([(0, False), (2, False), (30, False), (31, False)], 0),
        # the order of the states does not matter
        ([(20, False), (0, False), (9, True)], 20),
        # the last state is final, and no state follows: the result is the time of the final state
        ([(0, False), (9, True)], 9),
    ],
)
def test_pipeline_was_last_requested_at_the_first_state_after_the_last_final_state(
    states: list[tuple[float, bool]], requested_at: float
) -> None:
    assert find_last_request([(at(when), is_final) for when, is_final in states]) == at(
        requested_at
    )


@pytest.mark.parametrize("stage", ["a", "a-2", "sft_1"])
def test_key_contains_stage_and_number(stage: str) -> None:
    key = idempotency_key("the-pipeline", stage, 12)

    assert parse_key("the-pipeline", key) == (stage, 12)


@pytest.mark.parametrize(
    "key", ["", "the-pipeline", "the-pipeline-a", "other-a-1", "the-pipeline-1"]
)
def test_other_keys_are_not_parsed(key: str) -> None:
    assert parse_key("the-pipeline", key) is None


def test_last_completed_run_is_used_by_later_stages() -> None:
    runs = [run("a", 2, DONE, 20), run("a", 1, DONE, 10), run("a", 3, FAILED, 30), A_OPEN]

    found = completed_run("a", runs)

    assert found is not None and found.number == 2
    assert completed_run("b", runs) is None


@pytest.mark.parametrize(
    ("checkpoint", "found"),
    [
        # by default, the checkpoint of a stage is the newest checkpoint from which its run could
        # resume
        (None, "trainer/step-9"),
        # the stage names its checkpoint with a path, or with a file name pattern
        ("${run.dir}/hf", "hf/model-3"),
        ("${attempt.dir}/export-*", "attempt-02/export-1"),
        ("${run.dir}/${run.id}.bin", "one.bin"),
        ("${run.dir}/nothing", None),
    ],
)
def test_checkpoint_is_found_as_configured(
    tmp_path: Path, checkpoint: str | None, found: str | None
) -> None:
    place = RunPlace(directory=tmp_path / "one")
    files = "trainer/step-1 trainer/step-9 hf/model-3 attempt-02/export-1 one.bin"
    for name in files.split():
        path = place.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("weights")
    attempts = [{"number": 1, "state": "failed"}, {"number": 2, "state": "completed"}]
    place.record.write_text(json.dumps({"state": "completed", "attempts": attempts}))
    trainer = {"command": ["true"], "checkpoints": "${run.dir}/trainer"}
    spec = {"name": "one", "workload": "sft", "components": {"trainer": trainer}}
    text = yaml.safe_dump(spec).replace("${run.dir}", str(place.directory))
    place.attempt(2).spec.write_text(text)

    path = find_stage_checkpoint(checkpoint, RunSpec.model_validate(spec), place)

    assert path == (place.directory / found if found else None)


def test_unrecognised_checkpoints_of_a_stage_are_named(tmp_path: Path) -> None:
    place = RunPlace(directory=tmp_path / "one")
    path = place.directory / "trainer" / "it5" / "weights.bin"
    path.parent.mkdir(parents=True)
    path.write_text("weights")
    attempts = [{"number": 1, "state": "completed"}]
    place.record.write_text(json.dumps({"state": "completed", "attempts": attempts}))
    trainer = {"command": ["true"], "checkpoints": "${run.dir}/trainer"}
    spec = RunSpec.model_validate(
        {"name": "one", "workload": "sft", "components": {"trainer": trainer}}
    )

    assert find_stage_checkpoint(None, spec, place) is None
    assert '`checkpoints: "${run.dir}/trainer/it*"`' in describe_stage_unrecognised(
        None, spec, place
    )
    assert describe_stage_unrecognised("${run.dir}/hf", spec, place) == ""


def test_run_without_files_has_no_checkpoint(tmp_path: Path) -> None:
    trainer = {"command": ["true"], "checkpoints": "${run.dir}/x"}
    spec = {"name": "one", "workload": "sft", "components": {"trainer": trainer}}

    assert (
        find_stage_checkpoint(None, RunSpec.model_validate(spec), RunPlace(directory=tmp_path))
        is None
    )
