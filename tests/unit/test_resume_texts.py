"""Tests of the sentences about a resume, for the terminal, the page and summaries."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.record.events import Event
from tasks.record.run_json import AttemptRecord, ResumeCheck, ResumeRecord
from tasks.show.lines import lines_of
from tasks.show.resume import describe_attempt, describe_resume, describe_resume_of
from tasks.spec.run import RunSpec

REFUSED = [
    {"path": "/c/step_20", "why": "the file .metadata, which the trainer writes last, is missing"}
]

PASSED = "Muster passes /c/step_10 to the trainer: the rule"
CONSISTENT = (
    "Muster passed /c/step_10 to the trainer: the rule. The first step that the trainer reported "
    "does not contradict a start from this checkpoint"
)
CANNOT_CHECK = "Muster cannot check whether the trainer loads the checkpoint that RESUME_FROM names"


def record_of(passed: str | None, **fields: object) -> ResumeRecord:
    check = ResumeCheck.POSSIBLE
    return ResumeRecord(**{"from": passed, "rule": "the rule", "check": check, **fields})


def test_choice_and_refused_checkpoints_are_named() -> None:
    resume = record_of("/c/step_10", refused=REFUSED, notes=["the pointer is newer"])

    assert [*describe_resume(resume, attempt=2)] == [
        "Muster passes /c/step_10 to the trainer: the rule",
        "refused checkpoint /c/step_20: the file .metadata, which the trainer writes last, "
        "is missing",
        "the pointer is newer",
    ]


def test_start_without_a_checkpoint_is_explained_although_checkpoints_exist() -> None:
    resume = record_of(None, refused=REFUSED)

    first, second = describe_resume(resume, attempt=2)

    assert first == "starts from the beginning, although checkpoints exist: the rule"
    assert second.startswith("refused checkpoint /c/step_20")


def test_checkpoint_that_is_not_passed_is_not_claimed() -> None:
    [sentence] = describe_resume(record_of(None, expected="/c/step_10"), attempt=2)

    assert sentence == (
        "Muster passes no checkpoint to the trainer. The trainer itself probably loads /c/step_10 "
        "(the rule)"
    )


def test_first_attempt_without_a_checkpoint_is_not_explained() -> None:
    assert [*describe_resume(record_of(None), attempt=1)] == []


def test_long_list_of_refused_checkpoints_is_cut() -> None:
    refused = [{"path": f"/c/step_{step}", "why": "is empty"} for step in range(9)]

    sentences = [*describe_resume(record_of(None, refused=refused), attempt=2)]

    assert sentences[-1] == "run.json lists 4 more refused checkpoints"


def test_terminal_shows_the_choice_at_the_start_of_an_attempt() -> None:
    resume = record_of("/c/step_10", refused=REFUSED).as_json()
    fields = {"run_id": "r", "attempt": 2, "directory": "/d", "resume": resume}

    lines = [line.plain for line in lines_of(Event(at=0.0, name="attempt.begun", fields=fields))]

    assert "Muster passes /c/step_10 to the trainer: the rule" in lines
    assert (
        "refused checkpoint /c/step_20: the file .metadata, which the trainer writes last, "
        "is missing" in lines
    )


def test_warnings_follow_the_choice() -> None:
    attempt = AttemptRecord.model_validate(
        {
            "number": 2,
            "state": "failed",
            "step": 12,
            "resume": record_of("/c/step_10", step=10).as_json(),
            "warnings": ["the disk is nearly full"],
        }
    )

    assert [*describe_attempt(attempt)] == [
        CONSISTENT,
        "the disk is nearly full",
    ]


@pytest.mark.parametrize(
    ("resume", "attempt", "sentences"),
    [
        # The first step of the attempt does not contradict the checkpoint.
        ({"step": 10}, {"step": 11}, [CONSISTENT]),
        # The trainer ignored the checkpoint.
        (
            {"step": 10, "check": "contradicted"},
            {"step": 1},
            [PASSED],
        ),
        # The record of an earlier version does not say whether the trainer ignored the checkpoint.
        ({"step": 10, "check": None}, {"step": 11}, [PASSED]),
        (
            {"step": 10},
            {},
            [PASSED, f"{CANNOT_CHECK}, because the attempt has reported no step yet"],
        ),
        (
            {"step": 10},
            {"ended_at": 9.0},
            [PASSED, f"{CANNOT_CHECK}, because the attempt reported no step"],
        ),
        # A note from the start of the attempt already says that Muster cannot check it.
        (
            {"notes": ["the reason"], "check": "impossible", "step": 10},
            {"step": 5},
            [PASSED, "the reason"],
        ),
        (
            {"notes": ["the reason"], "check": "impossible", "step": 10},
            {},
            [PASSED, "the reason"],
        ),
    ],
)
def test_sentence_claims_no_more_about_a_passed_checkpoint_than_the_steps_show(
    resume: dict[str, Any], attempt: dict[str, Any], sentences: list[str]
) -> None:
    record = AttemptRecord.model_validate(
        {
            "number": 2,
            "state": "running",
            "resume": record_of("/c/step_10", **resume).as_json(),
            **attempt,
        }
    )
    spec = RunSpec(
        name="r",
        workload="sft",
        env={"RESUME_FROM": "/c/step_10"},
        components={"trainer": {"command": ["train"]}},
    )

    assert [*describe_resume_of(record, spec)] == sentences


def test_record_names_the_resumed_checkpoint_in_the_key_from() -> None:
    written = record_of("/c/step_10", refused=REFUSED, check=None).as_json()

    assert written == {"from": "/c/step_10", "rule": "the rule", "refused": REFUSED}


def test_warning_about_the_first_step_is_recorded_as_a_contradiction() -> None:
    attempt = AttemptRecord(number=2, state="running", resume=record_of("/c/step_10", step=10))
    fields = {"message": "the trainer started over", "contradicts_resume": True}

    observed = attempt.observed(Event(at=1.0, name="run.warning", fields=fields))
    read_again = AttemptRecord.model_validate(observed.as_json())

    assert read_again.resume is not None
    assert read_again.resume.check is ResumeCheck.CONTRADICTED
    assert read_again.warnings == ("the trainer started over",)
