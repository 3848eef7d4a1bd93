"""Tests of runs that start from a checkpoint that a person has chosen: forks and steps back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tasks.record import checkpoints
from tasks.record.checkpoint_pins import pin_checkpoint
from tasks.record.checkpoints import (
    ResumePlan,
    find_foreign_checkpoints,
    find_superfluous_checkpoints,
    judge_checkpoints,
    plan_resume,
    remove_checkpoint,
)
from tasks.record.places import RunPlace
from tasks.record.retries import list_counted_failures
from tasks.record.run_json import AttemptRecord, RunJson
from tasks.record.states import RunState
from tasks.spec.errors import InvalidSpec
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.loading import parse_spec
from tasks.spec.run import RunSpec
from tests.support import checkpoint_files as files

PARENT = "parent-sft-20260101-000000-00000000"
OWN = "own-sft-20260102-000000-00000001"


class Run:
    """A run that saves checkpoints in its own directory, with the files of its attempts."""

    def __init__(self, run_id: str, *, keep: int | None = None, **spec: Any) -> None:
        self.place = RunPlace.of(run_id)
        trainer = {
            "command": ["python", "train.py", "${attempt.resume_from}"],
            "checkpoints": "${run.dir}/checkpoints",
            **({"keep": keep} if keep is not None else {}),
        }
        self.data = {
            "name": "x",
            "workload": "sft",
            "components": {"trainer": trainer},
            **spec,
        }
        self.attempts: list[AttemptRecord] = []
        self.foreign: dict[str, str] = {}

    @property
    def spec(self) -> RunSpec:
        return parse_spec(self.data)

    @property
    def folder(self) -> Path:
        return self.place.directory / "checkpoints"

    def begin_attempt(self) -> ResumePlan:
        """Begin an attempt as the flow process does, and return the chosen checkpoint."""
        plan = plan_resume(self.spec, self.place, self.attempts, self.foreign)
        number = len(self.attempts) + 1
        attempt = self.place.attempt(number)
        attempt.directory.mkdir(parents=True)
        resolved = json.loads(
            json.dumps(self.data).replace("${run.dir}", str(self.place.directory))
        )
        attempt.spec.write_text(json.dumps(resolved))
        self.foreign |= find_foreign_checkpoints(
            self.spec, RunSpec.model_validate(resolved), self.place, number
        )
        self.attempts.append(
            AttemptRecord(
                number=number,
                state=RunState.RUNNING,
                resume_from=str(plan.passed) if plan.passed else None,
                resume=plan.as_record(),
            )
        )
        return plan

    def save(self, *steps: int) -> None:
        self.folder.mkdir(exist_ok=True)
        for step in steps:
            files.plain_torch(self.folder, step)

    def end_attempt(self, step: int, decision: str = "final: UNKNOWN") -> None:
        """Let the attempt report a step and then fail.

        Args:
            step: The step.
            decision: Decision about the next attempt, as in `run.json`.
        """
        failure = {"kind": FailureKind.UNKNOWN, "message": "killed", "signal": "SIGKILL"}
        ended = self.attempts[-1].as_json() | {
            "state": "failed",
            "step": step,
            "best_step": step,
            "failure": failure,
            "decision": decision,
        }
        self.attempts[-1] = AttemptRecord.model_validate(ended)

    def step_back(self, step: int) -> None:
        """Choose a checkpoint for the next attempt, as `muster retry --from-step` does."""
        self.data["start_from"] = {
            "run": self.place.run_id,
            "checkpoint": str(self.folder / f"step_{step}.pt"),
            "step": step,
            "attempt": len(self.attempts) + 1,
        }

    def remove_superfluous(self) -> set[str]:
        """Remove the superfluous checkpoints, and return the names of the remaining checkpoints."""
        for path in find_superfluous_checkpoints(
            self.spec, self.place, self.attempts, self.foreign
        ):
            remove_checkpoint(path)
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
def parent(muster_home: Path) -> Run:
    """A failed run with checkpoints of the steps 10, 20 and 30."""
    run = Run(PARENT, keep=2)
    run.begin_attempt()
    run.save(10, 20, 30)
    run.end_attempt(35)
    return run


def fork(parent: Run, step: int, *, keep: int | None = None, number: int = 1) -> Run:
    start = {
        "run": PARENT,
        "checkpoint": str(parent.folder / f"step_{step}.pt"),
        "step": step,
    }
    return Run(f"{OWN[:-1]}{number}", keep=keep, start_from=start)


def test_fork_starts_from_the_checkpoint_until_it_has_saved_a_checkpoint(parent: Run) -> None:
    run = fork(parent, 20)
    first = run.begin_attempt()
    run.end_attempt(25)
    second = run.begin_attempt()
    run.save(30)
    run.end_attempt(35)
    third = run.begin_attempt()

    assert first.passed == second.passed == parent.folder / "step_20.pt"
    assert f"step 20 of {PARENT}" in first.rule
    assert third.passed == run.folder / "step_30.pt"


def test_fork_whose_checkpoint_is_missing_does_not_start_from_the_beginning(parent: Run) -> None:
    run = fork(parent, 20)
    (parent.folder / "step_20.pt").unlink()

    with pytest.raises(FileNotFoundError, match=f"step 20 of {PARENT}.* is missing"):
        run.begin_attempt()


def test_fork_that_cannot_load_the_checkpoint_does_not_start_from_the_beginning(
    parent: Run,
) -> None:
    run = fork(parent, 20)
    run.begin_attempt()
    run.end_attempt(20)
    broken = {"kind": "RUNTIME_ERROR", "message": "PytorchStreamReader failed", "exit_code": 1}
    run.attempts[-1] = AttemptRecord.model_validate(
        run.attempts[-1].as_json() | {"failure": broken, "step": None, "best_step": None}
    )

    assert run.begin_attempt().passed == parent.folder / "step_20.pt"


def test_keep_of_parent_and_forks_never_removes_the_checkpoint_of_a_fork(parent: Run) -> None:
    checkpoint = parent.folder / "step_10.pt"
    pin_checkpoint(checkpoint, [checkpoint], parent.place.directory.parents[1])
    forks = [fork(parent, 10, keep=1, number=number) for number in (1, 2)]
    for run in forks:
        run.begin_attempt()
        run.save(20, 30, 40)
    parent.save(40, 50)

    left = [run.remove_superfluous() for run in forks]

    assert parent.remove_superfluous() == {"step_10.pt", "step_40.pt", "step_50.pt"}
    assert left == [{"step_30.pt", "step_40.pt"}] * 2


def test_checkpoint_that_is_pinned_during_its_removal_is_kept(
    parent: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = parent.folder / "step_10.pt"
    read_pinned_paths = checkpoints.read_pinned_paths

    def pin_first() -> frozenset[str]:
        monkeypatch.setattr(checkpoints, "read_pinned_paths", read_pinned_paths)
        return frozenset({os.path.realpath(checkpoint)})

    monkeypatch.setattr(checkpoints, "read_pinned_paths", pin_first)
    remove_checkpoint(checkpoint)

    assert checkpoint.exists()


def test_removed_checkpoint_cannot_be_pinned(parent: Run) -> None:
    home = parent.place.directory.parents[1]
    checkpoint = parent.folder / "step_10.pt"
    checkpoint.unlink()

    with pytest.raises(FileNotFoundError, match="was removed just now"):
        pin_checkpoint(checkpoint, [checkpoint], home)
    assert not [*(home / "claims" / "pinned").iterdir()]


def test_nothing_is_removed_if_a_pin_cannot_be_read(parent: Run) -> None:
    parent.save(40, 50)
    pins = parent.place.directory.parents[1] / "claims" / "pinned"
    pins.mkdir(parents=True)
    (pins / "damaged.json").write_text("{")

    with pytest.raises(ValueError):
        parent.remove_superfluous()
    with pytest.raises(ValueError):
        remove_checkpoint(parent.folder / "step_10.pt")
    assert len([*parent.folder.iterdir()]) == 5


def test_step_back_starts_from_the_chosen_step_and_sets_later_checkpoints_aside(
    parent: Run,
) -> None:
    parent.step_back(10)
    chosen = parent.begin_attempt()
    parent.end_attempt(15)
    without_new_checkpoint = parent.begin_attempt()
    (parent.folder / "step_20.pt").unlink()
    parent.save(20)
    parent.end_attempt(25)
    after_new_checkpoint = parent.begin_attempt()

    assert chosen.passed == without_new_checkpoint.passed == parent.folder / "step_10.pt"
    assert after_new_checkpoint.passed == parent.folder / "step_20.pt"
    [refused] = after_new_checkpoint.refused
    assert Path(refused.path).name == "step_30.pt"
    assert refused.why == "a person retried the run from step 10, so later checkpoints are not used"


def test_step_back_counts_progress_and_retries_from_the_new_attempt(parent: Run) -> None:
    parent.step_back(10)
    for step in (12, 14, 14):
        parent.begin_attempt()
        parent.end_attempt(step, decision="retried: UNKNOWN")

    record = RunJson(state=RunState.FAILED, attempts=tuple(parent.attempts))

    assert len(list_counted_failures(parent.spec, parent.attempts)) == 1
    assert record.find_best_step(before=4, since=2) == 14


def test_retry_of_an_ended_run_makes_all_tries_available_again(parent: Run) -> None:
    for decision in ("retried: UNKNOWN", "final: UNKNOWN; begun again", "retried: UNKNOWN", ""):
        parent.begin_attempt()
        parent.end_attempt(5, decision=decision)

    assert list_counted_failures(parent.spec, parent.attempts) == [FailureKind.UNKNOWN]


def test_reasons_to_keep_each_checkpoint_are_listed(parent: Run) -> None:
    parent.save(40, 50)
    (parent.folder / "step_60.pt").write_bytes(b"")
    (parent.folder / "last").symlink_to("step_20.pt")
    pin_checkpoint(
        parent.folder / "step_10.pt",
        [parent.folder / "step_10.pt"],
        parent.place.directory.parents[1],
    )

    judged = judge_checkpoints(parent.spec, parent.place, parent.attempts)

    reasons = {one.checkpoint.path.name: one.why_kept for one in judged}
    assert reasons == {
        "step_10.pt": ("another run was started from the checkpoint",),
        "step_20.pt": ("a symbolic link in the folder points to the checkpoint",),
        "step_30.pt": (),
        "step_40.pt": ("the second newest complete checkpoint",),
        "step_50.pt": ("the newest complete checkpoint",),
        "step_60.pt": ("the checkpoint is not known to be complete",),
    }


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"checkpoint": "step_20"}, "start_from.checkpoint: must be an absolute path"),
        ({"run": "../../x"}, "start_from.run: "),
    ],
)
def test_invalid_start_from_is_rejected(parent: Run, change: dict[str, str], fault: str) -> None:
    run = fork(parent, 20)
    run.data["start_from"] |= change

    with pytest.raises(InvalidSpec, match=fault):
        _ = run.spec


def test_start_checkpoint_that_no_program_gets_is_rejected(parent: Run) -> None:
    run = fork(parent, 20)
    run.data["components"]["trainer"]["command"] = ["python", "train.py"]

    with pytest.raises(InvalidSpec, match="does not use"):
        _ = run.spec
