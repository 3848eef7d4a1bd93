"""Tests of the summary and the metrics of a run, which are read from its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tasks.record.evaluations import (
    CheckpointNote,
    EvaluationNote,
    EvaluationsJson,
    EvaluationState,
    locate_evaluation_result,
)
from tasks.record.metrics_file import FileFingerprint
from tasks.record.places import RunPlace
from tasks.spec.errors import BadArgument
from tasks.train.finding_runs import find_run
from tasks.train.logs_command import logs
from tasks.train.run_metrics import read_metrics
from tasks.train.run_records import require_record
from tasks.train.run_story import tell_story
from tasks.train.run_verbs import metrics

RUN = "trial-grpo-20260102-000000-bbbbbbbb"


@pytest.fixture
def place(muster_home: Path) -> RunPlace:
    """Write the files of a run with two attempts, and return their paths.

    The first attempt trained the steps 1 to 3, and the second attempt trained the steps 3 and 4.
    """
    place = RunPlace.of(RUN)
    for number, steps in ((1, (1, 2, 3)), (2, (3, 4))):
        attempt = place.attempt(number)
        attempt.directory.mkdir(parents=True)
        progress = {"jsonl": str(attempt.directory / "metrics.jsonl"), "step": "at.step"}
        attempt.spec.write_text(yaml.safe_dump({"cwd": ".", "progress": progress}))
        took = {"time/step": 2.0, "time/forward_backward": 2.0}
        lines = (json.dumps({"at": {"step": n}, "reward": n / number, **took}) for n in steps)
        (attempt.directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    failure = {"kind": "STORAGE", "component": "trainer", "message": "disk full", "exit_code": 1}
    components = {"trainer": {"pid": 1, "started_at": 1.0, "ended_at": 2.0, "exit_code": 1}}
    common = {"state": "failed", "started_at": 1.0, "ended_at": 61.0, "components": components}
    record = {
        "run_id": RUN,
        "state": "failed",
        "name": "trial",
        "workload": "grpo",
        "message": "STORAGE: disk full\nmore",
        "started_at": 1.0,
        "ended_at": 121.0,
        "attempts": [
            {
                "number": 1,
                **common,
                "step": 3,
                "alarms": [{"rule": "kl", "message": "kl: kl is 20"}],
                "failure": {"kind": "NODE_LOST", "component": "trainer", "message": "gone"},
                "decision": "retried: NODE_LOST, next try (2 of 2) in 0 s",
            },
            {
                "number": 2,
                **common,
                "failure": {**failure, "log_tail": "Traceback\nOSError: 28"},
                "decision": "final: STORAGE is not retried",
            },
        ],
    }
    place.record.write_text(json.dumps(record))
    return place


def test_metrics_of_a_step_are_from_the_last_attempt_with_the_step(place: RunPlace) -> None:
    rows = read_metrics(find_run("latest"))

    assert [(row["at"]["step"], row["reward"], row["attempt"]) for row in rows] == [
        (1, 1.0, 1),
        (2, 2.0, 1),
        (3, 1.5, 2),
        (4, 2.0, 2),
    ]


def test_only_rows_written_after_the_start_of_an_attempt_are_counted(place: RunPlace) -> None:
    shared, record = place.directory / "shared.jsonl", json.loads(place.record.read_text())
    spec = yaml.safe_dump({"progress": {"jsonl": str(shared), "step": "step"}})
    for number, steps in ((0, (1, 2, 3, 9)), (1, (1, 2, 3)), (2, (3, 4))):
        if number:
            place.attempt(number).spec.write_text(spec)
            record["attempts"][number - 1]["metrics"] = FileFingerprint.of(shared).as_json()
        with shared.open("a") as file:
            file.writelines(json.dumps({"step": n, "of": number}) + "\n" for n in steps)
    place.record.write_text(json.dumps(record))

    rows = [(row["step"], row["of"], row["attempt"]) for row in read_metrics(find_run("latest"))]

    assert rows == [(1, 1, 1), (2, 1, 1), (3, 2, 2), (4, 2, 2)]


def test_infinite_and_nan_metrics_are_printed_as_null(
    place: RunPlace, capsys: pytest.CaptureFixture[str]
) -> None:
    with (place.attempt(2).directory / "metrics.jsonl").open("a") as file:
        file.write('{"at": {"step": 5}, "loss": NaN, "time/step": 1%s}\n' % ("0" * 400))

    metrics()

    assert json.loads(capsys.readouterr().out.splitlines()[-1])["loss"] is None
    assert "A training step takes 2.0 s" in tell_story(find_run("latest"))


def test_missing_log_is_rejected_with_the_existing_logs(place: RunPlace) -> None:
    (place.attempt(2).directory / "trainer.log").write_text("hello\n")

    with pytest.raises(BadArgument, match=r"attempt 2 of .* has no log of api .*: trainer"):
        logs("latest", "api")
    with pytest.raises(
        BadArgument, match=r"attempt 9 of .* has no log on this machine; existing logs: none"
    ):
        logs("latest", attempt=9)


def test_metrics_file_shared_by_attempts_yields_each_step_once(place: RunPlace) -> None:
    for number in (1, 2):
        progress = {"jsonl": str(place.directory / "shared.jsonl"), "step": "step"}
        place.attempt(number).spec.write_text(yaml.safe_dump({"progress": progress}))
    (place.directory / "shared.jsonl").write_text('{"step": 1}\n{"step": 2}\n')

    assert [row["step"] for row in read_metrics(find_run("latest"))] == [1, 2]


def test_attempt_without_a_spec_file_is_skipped(place: RunPlace) -> None:
    place.attempt(3).directory.mkdir()

    assert [row["reward"] for row in read_metrics(find_run("latest"))] == [1.0, 2.0, 1.5, 2.0]


def write_evaluations(place: RunPlace, *steps: int) -> None:
    """Write the record and the results of the evaluation `math` for checkpoints of these steps."""
    numbers = {step: number for number, step in enumerate(steps, start=1)}
    EvaluationsJson(
        checkpoints=tuple(
            CheckpointNote(number=number, path=f"/c/{step}", step=step, attempt=2)
            for step, number in numbers.items()
        ),
        evaluations=tuple(
            EvaluationNote(name="math", checkpoint=number, state=EvaluationState.COMPLETED)
            for number in numbers.values()
        ),
    ).write(place)
    for step, number in numbers.items():
        path = locate_evaluation_result(place, "math", number)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"accuracy": step / 10}))
        path.chmod(0o600)


def test_figures_of_evaluations_are_in_the_rows_of_their_steps(place: RunPlace) -> None:
    write_evaluations(place, 2, 7)

    rows = read_metrics(find_run("latest"))

    figures = [(row["attempt"], row.get("reward"), row.get("math.accuracy")) for row in rows]
    assert figures == [
        (1, 1.0, None),
        (1, 2.0, 0.2),
        (2, 1.5, None),
        (2, 2.0, None),
        (2, None, 0.7),
    ]
    assert rows[-1]["at.step"] == 7


def test_run_with_evaluations_needs_no_metrics_file(place: RunPlace) -> None:
    for number in (1, 2):
        place.attempt(number).spec.write_text("evals: {math: {command: [evaluate]}}")
    write_evaluations(place, 2)

    rows = read_metrics(find_run("latest"))

    assert rows == [{"step": 2, "attempt": 2, "math.accuracy": 0.2}]


def test_run_without_a_metrics_file_is_rejected(place: RunPlace) -> None:
    place.attempt(1).spec.write_text("progress: {http: 'http://127.0.0.1', step: step}")

    with pytest.raises(BadArgument, match=r"has no metrics file, because .*`progress\.jsonl`"):
        read_metrics(find_run("latest"))


def test_summary_contains_attempts_alarms_failure_metrics_and_files(place: RunPlace) -> None:
    text = tell_story(find_run("latest"))

    first, *more = text.splitlines()
    assert first == f"{RUN} is failed: STORAGE: disk full"
    for part in (
        "2 attempts (NODE_LOST and STORAGE)",
        "attempt 1: NODE_LOST, 1 min 00 s, step 3",
        "alarm: kl: kl is 20",
        "retried: NODE_LOST, next try (2 of 2)",
        "first failure: trainer: exit code 1",
        "  | OSError: 28",
        "reward: first 1, last 2, range 1 to 2",
        "A training step takes 2.0 s: training 100%.",
        f"files: {place.directory}",
    ):
        assert any(part in line for line in more), (part, text)


def test_summary_contains_nested_metrics(place: RunPlace) -> None:
    line = {"at": {"step": 5}, "train": {"loss": 0.5}, "data": {"kl": 2.0, "a": {"b": 7}}}
    with (place.attempt(2).directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")

    lines = tell_story(find_run("latest")).splitlines()

    assert "train.loss: first 0.5, last 0.5, range 0.5 to 0.5" in lines
    assert "kl: first 2, last 2, range 2 to 2" in lines
    assert "a.b: first 7, last 7, range 7 to 7" in lines
    assert not any(line.startswith("at.step") for line in lines)


def test_summary_does_not_cut_the_reason_for_a_checkpoint(place: RunPlace) -> None:
    reason = "the checkpoint has not changed since the trainer ended (unknown layout)"
    checkpoint = f"/srv/{'long/' * 30}it000070"
    record = json.loads(place.record.read_text())
    resume = {"from": checkpoint, "step": 70, "rule": reason}
    record["attempts"][1]["resume"] = resume
    place.record.write_text(json.dumps(record))

    text = tell_story(find_run("latest"))

    assert reason in text and checkpoint in text


def test_summary_contains_each_warning_once(place: RunPlace) -> None:
    record = json.loads(place.record.read_text())
    record["message"] = "warning: no checkpoint was found\nwarning: the log is cut"
    record["attempts"][1]["warnings"] = ["no checkpoint was found", "a probe was slow"]
    place.record.write_text(json.dumps(record | {"state": "completed"}))

    text = tell_story(find_run("latest"))

    assert text.count("no checkpoint was found") == 1
    assert text.count("the log is cut") == 1
    assert "  a probe was slow" in text


def test_summary_of_a_thousand_attempts_has_less_than_sixty_lines(place: RunPlace) -> None:
    record = json.loads(place.record.read_text())
    attempts = [{**record["attempts"][0], "number": number} for number in range(1, 1001)]
    place.record.write_text(json.dumps({**record, "attempts": attempts}))

    assert len(tell_story(find_run("latest")).splitlines()) < 60
    components = {f"actor-{n}": attempts[0]["components"]["trainer"] for n in range(60)}
    wide = {**attempts[0], "alarms": attempts[0]["alarms"] * 40, "components": components}
    place.record.write_text(json.dumps({**record, "attempts": [wide]}))
    assert "and 52 more components" in tell_story(find_run("latest"))
    assert len(tell_story(find_run("latest")).splitlines()) < 60
    place.record.write_text(json.dumps({**record, "attempts": attempts}))
    assert require_record(find_run("latest")).attempts[-1].number == 1000
