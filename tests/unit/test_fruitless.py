"""Tests of the count of attempts that ended without a checkpoint or without net progress."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.record.fruitless import describe_fruitless_attempts, list_fruitless_attempts
from tasks.record.outcome import Failure
from tasks.record.run_json import AttemptRecord, ResumeRecord
from tasks.record.states import RunState
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.run import RunSpec

HOUR_S = 3600.0


def spec_with(**trainer: Any) -> RunSpec:
    command = {"command": ["true"]}
    components = {"trainer": {**command, **trainer}}
    return RunSpec.model_validate({"name": "x", "workload": "sft", "components": components})


WITH_CHECKPOINTS = spec_with(checkpoints="saved")
WITHOUT_CHECKPOINTS = spec_with()


def attempt(
    hours: float,
    step: float | None,
    saved: bool | None,
    *,
    start: float | None = None,
    kind: FailureKind | None = FailureKind.TIME_LIMIT,
) -> AttemptRecord:
    """Return an attempt that has ended.

    Args:
        hours: Duration of the attempt.
        step: Highest step that the attempt reported.
        saved: True if the attempt saved a checkpoint. The checkpoint from which the attempt
            started does not count. None if unknown.
        start: Step of the checkpoint from which the attempt started.
        kind: Kind of the failure. None if the attempt did not fail.
    """
    return AttemptRecord(
        number=1,
        state=RunState.FAILED if kind else RunState.COMPLETED,
        started_at=1000.0,
        ended_at=1000.0 + hours * HOUR_S,
        failure=Failure(kind=kind, message="it ended") if kind else None,
        best_step=step,
        saved_checkpoint=saved,
        resume=ResumeRecord(step=start),
    )


@pytest.mark.parametrize(
    ("attempts", "text"),
    [
        (
            [attempt(10, 100, False), attempt(10.003, 97, False), attempt(10, 99, False)],
            "3 attempts of 10 h ended before their first checkpoint; save a checkpoint more often "
            "than every 100 steps",
        ),
        (
            [attempt(10, 100, False)],
            "1 attempt of 10 h ended before its first checkpoint; save a checkpoint more often "
            "than every 100 steps",
        ),
        (
            [attempt(1, None, False), attempt(4, None, False)],
            "2 attempts of 1 h to 4 h ended before their first checkpoint; save a checkpoint more "
            "often than every 4 h",
        ),
        (
            [attempt(10, 220, True), attempt(10, 250, False, start=200)],
            "1 attempt of 10 h ended without a checkpoint after step 200; save a checkpoint more "
            "often than every 50 steps",
        ),
        # An attempt that found no free GPUs has not run, so the text counts only the other
        # two attempts.
        (
            [
                attempt(2, 10, False),
                attempt(0, None, False, kind=FailureKind.INSUFFICIENT_RESOURCES),
                attempt(2, 12, False),
            ],
            "2 attempts of 2 h ended before their first checkpoint; save a checkpoint more often "
            "than every 12 steps",
        ),
        # A single short attempt without a checkpoint has lost little, so nothing is reported.
        ([attempt(0.01, 3, False)], ""),
        # The last attempt has saved a newer checkpoint, or has completed the run. So nothing is
        # reported.
        ([attempt(10, 100, False), attempt(10, 100, True)], ""),
        ([attempt(10, 100, False), attempt(10, 100, False, kind=None)], ""),
        ([], ""),
    ],
)
def test_attempts_without_a_checkpoint_are_named(attempts: list[AttemptRecord], text: str) -> None:
    assert describe_fruitless_attempts(WITH_CHECKPOINTS, attempts) == text


def test_unrecognised_checkpoints_replace_the_advice_to_save_more_often() -> None:
    attempts = [attempt(10, 100, False), attempt(10, 97, False)]

    text = describe_fruitless_attempts(WITH_CHECKPOINTS, attempts, "Muster does not recognise it5")

    assert text == (
        "2 attempts of 10 h ended before their first checkpoint. Muster does not recognise it5"
    )


def test_attempts_without_net_progress_are_named() -> None:
    attempts = [attempt(1, 40, None), attempt(1, 40, None), attempt(1, 30, None)]

    text = describe_fruitless_attempts(WITHOUT_CHECKPOINTS, attempts)

    assert text == (
        "2 attempts of 1 h ended without progress: the highest step of the run is still 40. To "
        "resume from a checkpoint, write `checkpoints` into the spec"
    )
    assert list_fruitless_attempts(attempts) == attempts[1:]


def test_net_progress_without_checkpoints_is_a_result() -> None:
    attempts = [attempt(1, 40, None), attempt(1, 41, None)]

    assert list_fruitless_attempts(attempts) == []
