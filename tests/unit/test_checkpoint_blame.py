"""Tests of the decision whether a checkpoint is to blame for a failed attempt."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.record.checkpoint_blame import (
    Blame,
    blame_attempts,
    find_attempts_failed_by_checkpoint,
)
from tasks.record.retries import list_counted_failures
from tasks.record.run_json import AttemptRecord
from tasks.spec.run import RunSpec

#: Traceback of a trainer that could not load its checkpoint.
LOADING = """Traceback (most recent call last):
  File "/w/train.py", line 9, in <module>
    main()
  File "/w/train.py", line 5, in load_checkpoint
    state = unpack(path)
ValueError: bad header"""
#: Log with an error during training. The path of the program contains the word checkpoint.
TRAINING = """loading checkpoint step_20
Traceback (most recent call last):
  File "/w/hangs_on_a_checkpoint.py", line 9, in <module>
    trainer.train(resume_from_checkpoint=path)
  File "/w/loop.py", line 5, in run
    step()
  File "/w/loop.py", line 7, in step
    loss.backward()
  File "/w/model.py", line 8, in backward
    raise ValueError("negative count")
ValueError: negative count"""


def spec_of(*, with_progress: bool = True, by: str = "jsonl") -> RunSpec:
    data: dict[str, Any] = {
        "name": "x",
        "workload": "sft",
        "components": {
            "trainer": {"command": ["python"], "checkpoints": "/c"},
            "api": {"command": ["python"]},
        },
    }
    if with_progress:
        source = "http://127.0.0.1:1/step" if by == "http" else "m.jsonl"
        data["progress"] = {by: source, "step": "step"}
    return RunSpec.model_validate(data)


def attempt_of(
    kind: str | None = "RUNTIME_ERROR",
    checkpoint: str | None = "/c/step_20",
    *,
    log_tail: str = "",
    step: float | None = None,
    lifetime_s: float = 5.0,
    **failure: object,
) -> dict[str, Any]:
    """Return the fields of an attempt that started from a checkpoint and failed.

    Args:
        kind: Failure kind. None for an attempt without a failure.
        checkpoint: Path of the checkpoint. None for a start without a checkpoint.
        log_tail: Last lines of the trainer's log.
        step: Last step of the attempt. None if no step was reported.
        lifetime_s: Duration of the attempt, in seconds.
        **failure: Further fields of the failure.
    """
    fields: dict[str, Any] = {"resume_from": checkpoint, "started_at": 0.0, "ended_at": lifetime_s}
    if step is not None:
        fields["step"] = step
    if kind is not None:
        fields["failure"] = {
            "kind": kind,
            "component": "trainer",
            "message": "it happened",
            "log_tail": log_tail,
            **failure,
        }
    return fields


def recorded(*attempts: dict[str, Any]) -> list[AttemptRecord]:
    return [
        AttemptRecord.model_validate({"number": number, "state": "failed", **attempt})
        for number, attempt in enumerate(attempts, 1)
    ]


def blames(spec: RunSpec, *attempts: dict[str, Any]) -> list[str]:
    return [blame.value for blame in blame_attempts(spec, recorded(*attempts))]


@pytest.mark.parametrize(
    ("attempt", "blame"),
    [
        (attempt_of(log_tail=LOADING), Blame.GIVEN_UP),
        (attempt_of(message="size mismatch for layers.0"), Blame.GIVEN_UP),
        (attempt_of("STORAGE", rule="checkpoint-cut-short"), Blame.GIVEN_UP),
        (attempt_of("STALLED"), Blame.GIVEN_UP),
        # the attempt got no further than step 20, the step of its checkpoint. So nothing was
        # trained, and the checkpoint is given up
        (attempt_of("STALLED", step=20), Blame.GIVEN_UP),
        (attempt_of("TIME_LIMIT", component=None), Blame.GIVEN_UP),
        (attempt_of("NOT_READY"), Blame.GIVEN_UP),
        # the log does not show if the attempt failed to load the checkpoint, so the checkpoint is
        # only suspected
        (attempt_of(), Blame.SUSPECTED),
        (attempt_of(log_tail=TRAINING), Blame.SUSPECTED),
        (attempt_of(message="No CUDA GPUs are available"), Blame.SUSPECTED),
        # the failure has another cause, so the checkpoint is not blamed
        (attempt_of("PORT_CONFLICT"), Blame.NONE),
        (attempt_of("NETWORK"), Blame.NONE),
        (attempt_of("GPU_HARDWARE"), Blame.NONE),
        (attempt_of("HOST_OOM", signal="SIGKILL"), Blame.NONE),
        (attempt_of("UNKNOWN", signal="SIGKILL"), Blame.NONE),
        (attempt_of("UNKNOWN", signal="SIGTERM"), Blame.NONE),
        (attempt_of(component="api"), Blame.NONE),
        (attempt_of(exit_code=0, rule="success-not-reached"), Blame.NONE),
        # training continued after the attempt had loaded the checkpoint, so the checkpoint is not
        # blamed
        (attempt_of("STALLED", step=21), Blame.NONE),
        (attempt_of(log_tail=LOADING, step=25), Blame.NONE),
        # step 3 is progress here, because this trainer counts its steps from zero in each attempt
        (attempt_of("STALLED", step=3), Blame.NONE),
        (attempt_of(checkpoint=None), Blame.NONE),
        (attempt_of(kind=None), Blame.NONE),
    ],
)
def test_checkpoint_is_blamed_only_for_a_failed_load(attempt: dict[str, Any], blame: Blame) -> None:
    assert blames(spec_of(), attempt) == [blame.value]


@pytest.mark.parametrize(
    ("attempt", "blame"),
    [
        (attempt_of(log_tail=LOADING), Blame.GIVEN_UP),
        (attempt_of("STALLED"), Blame.GIVEN_UP),
        # the attempt ran until its time limit, so the trainer may have loaded the checkpoint and
        # trained: the checkpoint is not blamed
        (attempt_of("TIME_LIMIT", component=None), Blame.NONE),
        (attempt_of(lifetime_s=60.0), Blame.SUSPECTED),
        (attempt_of(lifetime_s=7200.0), Blame.NONE),
    ],
)
def test_checkpoint_is_blamed_without_known_steps(attempt: dict[str, Any], blame: Blame) -> None:
    assert blames(spec_of(with_progress=False), attempt) == [blame.value]


def test_server_that_reports_an_old_step_shows_no_training() -> None:
    assert blames(spec_of(by="http"), attempt_of("STALLED", step=12)) == ["given up"]


def test_second_death_for_an_unknown_reason_gives_the_checkpoint_up() -> None:
    assert blames(spec_of(), attempt_of(), attempt_of()) == ["suspected", "given up"]


def test_second_death_for_a_known_other_reason_keeps_the_checkpoint() -> None:
    no_gpu = attempt_of(message="RuntimeError: No CUDA GPUs are available")

    assert blames(spec_of(), no_gpu, no_gpu, no_gpu) == ["suspected", "none", "none"]


def test_checkpoint_is_given_up_after_two_hangs_in_a_collective_operation() -> None:
    hung = attempt_of("STALLED", message="no step for 20 s; it hangs in all_reduce (d.py:5)")

    assert blames(spec_of(), hung, hung) == ["suspected", "given up"]


def test_checkpoint_is_given_up_once() -> None:
    found = blames(spec_of(), *[attempt_of("STALLED")] * 4)

    assert found == ["given up", "none", "none", "none"]


def test_failures_with_four_different_checkpoints_are_not_blamed_on_them() -> None:
    attempts = [attempt_of("STALLED", f"/c/step_{step}") for step in (50, 40, 30, 20)]

    assert blames(spec_of(), *attempts[:3]) == ["given up"] * 3
    assert blames(spec_of(), *attempts) == ["none"] * 4


def test_new_step_ends_a_series_of_failed_loads() -> None:
    before = [attempt_of("STALLED", f"/c/step_{step}") for step in (50, 40)]
    after = [attempt_of("STALLED", f"/c/step_{step}") for step in (60, 55)]
    trained = attempt_of("NODE_LOST", "/c/step_30", step=61)

    found = blames(spec_of(), *before, trained, *after)

    assert found == ["given up", "given up", "none", "given up", "given up"]


def test_attempt_that_used_up_its_time_counts_as_a_try() -> None:
    spec = spec_of()
    attempts = recorded(attempt_of("TIME_LIMIT", component=None), attempt_of("STALLED"))

    excused = find_attempts_failed_by_checkpoint(spec, attempts)

    assert excused == []


@pytest.mark.parametrize(
    ("steps", "counted"),
    [
        # each number in a list is the last step of an attempt. The failure of an attempt counts
        # against the retry limit until a later attempt reaches a step beyond all earlier steps. The
        # last attempt of the list is not counted
        ([24, 20], 1),
        ([24, 24], 1),
        ([24, 12, 12], 2),
        ([24, 25], 0),
        ([24, 25, 25], 1),
    ],
)
def test_only_a_step_beyond_all_attempts_is_net_progress(steps: list[int], counted: int) -> None:
    attempts = [attempt_of("NODE_LOST", None, step=step) for step in steps]

    found = list_counted_failures(spec_of(), recorded(*attempts))

    assert len(found) == counted
