"""Trainers that are killed, hang or fail, each in a whole run without a Prefect server.

The programs in `tests/data/resume` log steps and write checkpoints. The comment at the top of each
program describes the expected result of the run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import pytest

from tasks.record.run_json import AttemptRecord, ResumeCheck, RunJson
from tasks.record.states import RunState
from tasks.server.flow_runs import ServerAway
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.loading import parse_spec
from tasks.train.session import RunSession
from tasks.train.waiting import next_attempt

CASES = Path(__file__).parents[1] / "data" / "resume"
RUN_ID = "resume-sft-20260101-000000-abcd91c2"

RunCase = Callable[..., RunJson]


@pytest.fixture
def run_case(muster_home: Path, monkeypatch: pytest.MonkeyPatch) -> RunCase:
    """Return a function that executes a run to its end, and returns the record of the run."""

    def refuse(address: str) -> NoReturn:
        raise ServerAway("there is no Prefect server in this test")

    monkeypatch.setattr("tasks.train.waiting.connect_to_server", refuse)

    def run(program: str, *, keep: int | None = None, **changes: Any) -> RunJson:
        """Run one of the test's training programs to its end, and return the record of the run.

        Args:
            program: File in `tests/data/resume`.
            keep: Number of checkpoints to keep, or None for all.
            changes: Keys of the spec. None removes a key.
        """
        command = [sys.executable, program, "${run.dir}/c", "${attempt.resume_from}"]
        trainer = {"command": command, "checkpoints": "${run.dir}/c", "stop": {"grace_s": 1}}
        if keep is not None:
            trainer["keep"] = keep
        retry = {"attempts": 3, "delay_s": 0.1}
        data = {
            "name": "resume",
            "workload": "sft",
            "cwd": str(CASES),
            "env": {"METRICS": "${attempt.dir}/m.jsonl", "PAUSE_S": "0.25"},
            "components": {"trainer": trainer},
            "progress": {"jsonl": "${attempt.dir}/m.jsonl", "step": "step", "total": 30},
            "success": {"step": 30},
            "retry": {"UNKNOWN": retry, "STALLED": retry},
            **changes,
        }
        spec = parse_spec({key: value for key, value in data.items() if value is not None})
        session = RunSession(spec, run_id=RUN_ID, flow_run_id=uuid4())
        session.open()
        try:
            while next_attempt(session):
                session.begin_attempt()
                try:
                    session.supervisor.start("trainer")
                    session.supervisor.wait_decided()
                finally:
                    session.end_attempt()
        finally:
            session.close()
        return RunJson.read(session.place.record)

    return run


def resume_names(attempts: tuple[AttemptRecord, ...]) -> list[str]:
    """Return the names of the checkpoints from which the attempts started."""
    passed = [attempt.resume.passed if attempt.resume else None for attempt in attempts]
    return [Path(path).name if path else "" for path in passed]


def steps_of(muster_home: Path, attempt: int) -> list[int]:
    """Return the steps that an attempt has logged."""
    file = muster_home / "runs" / RUN_ID / f"attempt-{attempt:02}" / "m.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_run_killed_after_its_last_checkpoint_is_completed(run_case: RunCase) -> None:
    record = run_case("finished_is_trained_again.py")

    assert record.state is RunState.COMPLETED
    assert "step 30 of 30 reached" in record.message
    assert len(record.attempts) == 1


@pytest.mark.thorough
def test_run_steps_back_from_a_checkpoint_on_which_it_hangs(run_case: RunCase) -> None:
    record = run_case("hangs_on_a_checkpoint.py", stall_after_s=2)

    assert record.state is RunState.COMPLETED
    assert resume_names(record.attempts) == ["", "step_20", "step_10"]
    last = record.attempts[-1].resume
    assert last is not None and "attempt 2 failed while it loaded" in last.refused[0].why


def test_keep_leaves_the_last_complete_checkpoint(
    run_case: RunCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.train.background_work._CHECKPOINTS_EVERY_S", 0.05)

    record = run_case("keep_deletes_good.py", keep=1)

    assert record.state is RunState.COMPLETED
    assert resume_names(record.attempts) == ["", "step_10"]
    resume = record.attempts[1].resume
    assert resume is not None
    assert [Path(refused.path).name for refused in resume.refused] == ["step_20"]
    assert "the pointer file latest says 'step_20'" in resume.notes[0]


def test_long_save_is_no_stall(run_case: RunCase) -> None:
    record = run_case("long_save.py", stall_after_s=1)

    assert record.state is RunState.COMPLETED
    assert len(record.attempts) == 1


def test_trainer_that_never_exits_is_completed(run_case: RunCase, muster_home: Path) -> None:
    record = run_case("never_exits.py", stall_after_s=1, finish_within_s=2)

    assert record.state is RunState.COMPLETED
    assert "step 30 of 30 reached; trainer did not end within 2 s" in record.message
    [attempt] = record.attempts
    assert (muster_home / "runs" / RUN_ID / "attempt-01" / "trainer.hang.txt").exists()
    assert attempt.components["trainer"].ended_at is not None


def test_folders_without_a_pointer_file_are_used_or_refused_with_a_reason(
    run_case: RunCase,
) -> None:
    record = run_case("no_pointer.py")

    assert record.state is RunState.COMPLETED
    assert resume_names(record.attempts) == ["", "global_step_5"]
    resume = record.attempts[1].resume
    assert resume is not None
    assert "no pointer file points to this checkpoint" in resume.refused[0].why


def test_transient_failure_does_not_return_a_run_to_an_earlier_checkpoint(
    run_case: RunCase, muster_home: Path
) -> None:
    record = run_case("thrown_back_by_a_passing_fault.py")

    assert record.state is RunState.COMPLETED
    assert resume_names(record.attempts) == ["", "step_20", "step_20"]
    assert steps_of(muster_home, 3)[0] == 21


def test_checkpoint_that_cannot_be_loaded_is_given_up_at_once(run_case: RunCase) -> None:
    record = run_case("fails_to_load.py")

    assert record.state is RunState.COMPLETED
    assert resume_names(record.attempts) == ["", "step_20", "step_10"]


def test_busy_port_never_counts_against_a_checkpoint(run_case: RunCase) -> None:
    retry = {"attempts": 5, "delay_s": 0.1}

    record = run_case("port_is_taken.py", retry={"UNKNOWN": retry, "PORT_CONFLICT": retry})

    assert record.state is RunState.COMPLETED
    assert resume_names(record.attempts) == ["", "step_20", "step_20", "step_20"]


def test_exit_zero_before_the_last_step_is_a_warning(run_case: RunCase) -> None:
    record = run_case("ends_early.py", success=None)

    assert record.state is RunState.COMPLETED
    warning = (
        "trainer ended with exit code 0 at step 12 of 30. If a run that ends before step 30 should "
        "count as failed, write `success: {step: 30}` into the spec"
    )
    first, second = record.message.split("\n")
    assert first == f"warning: {warning}"
    assert second.startswith("warning: no checkpoint was found in ")
    assert record.attempts[0].warnings[0] == warning


def test_sigterm_that_a_trainer_turns_into_exit_zero_is_no_success(run_case: RunCase) -> None:
    record = run_case("heeds_sigterm.py", success=None)

    first, second = record.attempts
    assert first.failure is not None and first.failure.rule == "ended-from-outside"
    assert resume_names(record.attempts) == ["", "step_12"]
    assert (second.state, record.state) == (RunState.COMPLETED, RunState.COMPLETED)


def test_crash_at_the_exit_after_the_last_step_loses_nothing(run_case: RunCase) -> None:
    record = run_case("crashes_at_exit.py")

    assert record.state is RunState.COMPLETED
    assert "step 30 of 30 reached; trainer was killed by SIGSEGV at its exit" in record.message


def test_trainer_that_ignores_its_checkpoint_is_reported(run_case: RunCase) -> None:
    record = run_case("starts_over.py")

    assert record.state is RunState.COMPLETED
    [warning] = record.attempts[1].warnings
    assert "step_5, but the trainer's first step is 1" in warning
    resume = record.attempts[1].resume
    assert resume is not None and resume.check is ResumeCheck.CONTRADICTED


def test_record_claims_no_checkpoint_that_was_not_passed(run_case: RunCase) -> None:
    trainer = {
        "command": [sys.executable, "starts_over.py", "${run.dir}/c", ""],
        "checkpoints": "${run.dir}/c",
        "stop": {"grace_s": 1},
    }

    record = run_case("", components={"trainer": trainer})

    resume = record.attempts[1].resume
    assert resume is not None
    assert resume.passed is None
    assert Path(resume.expected or "").name == "step_5"
    assert "does not use ${attempt.resume_from}" in resume.notes[0]
    assert "Muster expected" in record.attempts[1].warnings[0]


def test_run_killed_before_its_last_checkpoint_trains_the_rest_again(
    run_case: RunCase, muster_home: Path
) -> None:
    record = run_case("killed_before_its_last_save.py")

    first = record.attempts[0].failure
    assert first is not None and first.message.endswith("step 30 of 30 reached")
    assert record.state is RunState.COMPLETED
    assert resume_names(record.attempts) == ["", "step_20"]
    assert steps_of(muster_home, 2)[0] == 21


def test_trainer_that_goes_on_beyond_its_last_step_is_not_stopped(
    run_case: RunCase, muster_home: Path
) -> None:
    progress = {"jsonl": "${attempt.dir}/m.jsonl", "step": "step", "total": 10}

    record = run_case("trains_on.py", progress=progress, success=None, finish_within_s=1)

    assert record.state is RunState.COMPLETED
    assert "reached step 100, but `progress.total` in the spec is 10" in record.message
    assert steps_of(muster_home, 1)[-1] == 100


def test_success_before_the_last_step_is_no_reason_to_stop(run_case: RunCase) -> None:
    record = run_case("trains_on.py", success={"step": 5}, finish_within_s=1)

    assert record.state is RunState.COMPLETED
    assert "reached step 100, but `progress.total` in the spec is 30" in record.message


def limit_time(program: str, hours_s: float, **stop: Any) -> dict[str, Any]:
    """Return the keys of a spec that stops each attempt at a time limit and then retries the run.

    Args:
        program: Training program, a file in `tests/data/resume`.
        hours_s: Time limit of each attempt, in seconds. The key `max_hours` gets this limit,
            converted to hours.
        stop: Further keys of the section `stop` of the trainer.
    """
    trainer = {
        "command": [sys.executable, program, "${run.dir}/c", "${attempt.resume_from}"],
        "checkpoints": "${run.dir}/c",
        "stop": {"grace_s": 0.5, **stop},
    }
    return {
        "gang": {"gpus_per_node": 1, "max_hours": hours_s / 3600},
        "components": {"trainer": trainer},
        "retry": {"TIME_LIMIT": {"attempts": 2, "delay_s": 0.1}},
    }


def test_warning_before_the_time_limit_lets_the_trainer_save(
    run_case: RunCase, muster_home: Path
) -> None:
    program = "saves_when_warned.py"

    record = run_case(program, **limit_time(program, 4, warn="SIGUSR1", warn_s=2))

    first, second = record.attempts
    assert first.failure is not None and first.failure.kind is FailureKind.TIME_LIMIT
    saved = resume_names(record.attempts)[1]
    last_step = steps_of(muster_home, 1)[-1]
    # The trainer got a warning before the time limit, saved the checkpoint, and continued.
    assert 1 < int(saved.removeprefix("step_")) <= last_step
    assert steps_of(muster_home, 2)[0] == int(saved.removeprefix("step_")) + 1
    assert (second.state, record.state) == (RunState.COMPLETED, RunState.COMPLETED)
    deadline = float((muster_home / "runs" / RUN_ID / "deadline-1").read_text())
    assert deadline == pytest.approx(first.started_at + 4, abs=2)


@pytest.mark.parametrize("program", ["is_stopped_during_a_save.py", "saves_on_sigterm.py"])
def test_save_longer_than_the_grace_period_is_completed(run_case: RunCase, program: str) -> None:
    record = run_case(program, **limit_time(program, 2, save_grace_s=30))

    assert record.state is RunState.COMPLETED
    assert resume_names(record.attempts) == ["", "step_10"]


def test_save_longer_than_save_grace_s_is_cut_off(run_case: RunCase) -> None:
    program = "is_stopped_during_a_save.py"

    record = run_case(program, **limit_time(program, 2, save_grace_s=1))

    assert resume_names(record.attempts) == ["", ""]
    resume = record.attempts[1].resume
    assert resume is not None and [Path(one.path).name for one in resume.refused] == ["step_10"]


def test_attempts_without_a_checkpoint_are_counted(run_case: RunCase) -> None:
    program = "saves_too_seldom.py"

    record = run_case(program, **limit_time(program, 2))

    first, second = record.attempts
    advice = "save a checkpoint more often than every 11 steps"
    expected = f"ended before their first checkpoint; {advice}"
    [warning] = second.warnings
    assert warning.startswith("2 attempts of ") and warning.endswith(expected)
    assert (first.fruitless_attempts, second.fruitless_attempts) == (1, 2)
    assert first.warnings == ()


def test_completed_run_without_a_recognised_checkpoint_has_a_warning(
    run_case: RunCase, muster_home: Path
) -> None:
    record = run_case("unrecognised_checkpoints.py")

    assert record.state is RunState.COMPLETED
    [attempt] = record.attempts
    folder = muster_home / "runs" / RUN_ID / "c"
    assert attempt.saved_checkpoint is False
    assert record.message.startswith("warning: step 30 of 30, but the attempt ended without a")
    assert attempt.warnings == (
        "the attempt ended without a checkpoint. Muster does not recognise it000020, it000030 in "
        f"{folder} as checkpoints. If they are checkpoints, write a pattern into the spec: "
        '`checkpoints: "${run.dir}/c/it*"`',
    )


def test_completed_run_without_any_checkpoint_has_a_warning(
    run_case: RunCase, muster_home: Path
) -> None:
    progress = {"jsonl": "${attempt.dir}/m.jsonl", "step": "step", "total": 100}

    record = run_case(
        "trains_on.py", components=trainer_without_saves("trains_on.py"), progress=progress
    )

    folder = muster_home / "runs" / RUN_ID / "elsewhere"
    text = (
        f"no checkpoint was found in {folder}, which does not exist. If the training saves "
        "checkpoints in another folder, name this folder in the key `checkpoints` of the spec. If "
        "it saves no checkpoints, remove this key"
    )
    [attempt] = record.attempts
    assert record.state is RunState.COMPLETED
    assert attempt.warnings == (text,)
    assert record.message == f"warning: step 100 of 100, but {text}"


def test_retry_names_the_folder_in_which_no_checkpoint_was_found(
    run_case: RunCase, muster_home: Path
) -> None:
    program = "killed_before_its_last_save.py"

    record = run_case(program, components=trainer_without_saves(program))

    resume = record.attempts[1].resume
    folder = muster_home / "runs" / RUN_ID / "elsewhere"
    assert resume is not None
    assert resume.rule == f"no checkpoint was found in {folder}, which does not exist"
    assert record.attempts[0].warnings == ()


def trainer_without_saves(program: str) -> dict[str, Any]:
    """Return the component of a trainer that saves in another folder than the spec says.

    Args:
        program: Training program, a file in `tests/data/resume`.
    """
    command = [sys.executable, program, "${run.dir}/c", "${attempt.resume_from}"]
    return {"trainer": {"command": command, "checkpoints": "${run.dir}/elsewhere"}}


@pytest.mark.thorough
def test_run_without_known_steps_also_returns_to_an_earlier_checkpoint(run_case: RunCase) -> None:
    record = run_case("hangs_on_a_checkpoint.py", progress=None, success=None, stall_after_s=3)

    assert record.state is RunState.COMPLETED
    assert resume_names(record.attempts) == ["", "step_20", "step_10"]
