"""Tests of the sentences about a resume, for the terminal, the page and summaries."""

from __future__ import annotations

from tasks.record.events import Event
from tasks.record.run_json import AttemptRecord, ResumeRecord
from tasks.show.lines import lines_of
from tasks.show.resume import describe_attempt, describe_resume

REFUSED = [
    {"path": "/c/step_20", "why": "the file .metadata, which the trainer writes last, is missing"}
]


def record_of(passed: str | None, **fields: object) -> ResumeRecord:
    return ResumeRecord(**{"from": passed, "rule": "the rule", **fields})


def test_choice_and_refused_checkpoints_are_named() -> None:
    resume = record_of("/c/step_10", refused=REFUSED, notes=["the pointer is newer"])

    assert [*describe_resume(resume, attempt=2)] == [
        "starts from /c/step_10: the rule",
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

    assert "starts from /c/step_10: the rule" in lines
    assert (
        "refused checkpoint /c/step_20: the file .metadata, which the trainer writes last, "
        "is missing" in lines
    )


def test_warnings_follow_the_choice() -> None:
    attempt = AttemptRecord.model_validate(
        {
            "number": 2,
            "state": "failed",
            "resume": record_of("/c/step_10").as_json(),
            "warnings": ["the first step is 1"],
        }
    )

    assert [*describe_attempt(attempt)] == [
        "starts from /c/step_10: the rule",
        "the first step is 1",
    ]


def test_record_names_the_resumed_checkpoint_in_the_key_from() -> None:
    written = record_of("/c/step_10", refused=REFUSED).as_json()

    assert written == {"from": "/c/step_10", "rule": "the rule", "refused": REFUSED}
