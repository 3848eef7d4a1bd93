"""Random histories of a folder of checkpoints: every resume and every removal is right.

A history consists of saves, kills during a save, truncations, deletions, moved pointer files,
foreign files, and a second run in the same folder. The test keeps its own account of the truth.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.record.checkpoint_claims import claim_folder
from tasks.record.checkpoints import (
    find_foreign_checkpoints,
    find_superfluous_checkpoints,
    plan_resume,
    remove_checkpoint,
)
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord
from tasks.spec.run import RunSpec
from tests.support import checkpoint_files as files
from tests.support.checkpoint_files import Write

#: Functions that write a checkpoint, one for each layout. In each of these layouts, the files of a
#: checkpoint show whether the checkpoint is complete.
LAYOUTS: tuple[Write, ...] = (
    files.distributed,
    files.hugging_face,
    files.plain_torch,
    files.plain_npz,
    files.verl,
    files.megatron_distributed,
)


def files_of(checkpoint: Path) -> list[Path]:
    if checkpoint.is_file():
        return [checkpoint]
    return sorted(file for file in checkpoint.rglob("*") if file.is_file())


def report_step(place: RunPlace, attempt: int, step: int) -> None:
    """Write the event of a training step to the event log, as the supervisor of a run does."""
    event = {"at": time.time(), "event": "run.progress", "step": step}
    with place.attempt(attempt).events.open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


@dataclass
class History:
    """A folder of checkpoints, the run that writes them, and the checkpoints that are correct."""

    folder: Path
    write: Write
    place: RunPlace
    spec: RunSpec
    foreign: dict[str, str] = field(default_factory=dict)
    attempts: list[AttemptRecord] = field(default_factory=list)
    #: Complete checkpoints of the run, which were not damaged after they were saved.
    whole: set[Path] = field(default_factory=set)
    #: Checkpoints of another run.
    of_others: set[Path] = field(default_factory=set)
    step: int = 0
    #: Step of the newest checkpoint that another run saved in the folder. None if there is none.
    rival_step: int | None = None

    def newest(self) -> Path | None:
        return max(self.whole, key=self.step_of, default=None)

    def step_of(self, checkpoint: Path) -> int:
        digits = "".join(char for char in checkpoint.stem if char.isdigit())
        return int(digits)

    def save(self) -> None:
        self.step += 10
        report_step(self.place, len(self.attempts), self.step)
        checkpoint = self.write(self.folder, self.step)
        self.whole.add(checkpoint)

    def rival_saves(self) -> None:
        """Let another run claim this run's checkpoint folder, and save a checkpoint there."""
        rival = RunPlace.of("rival")
        if self.rival_step is None:
            rival.attempt(1).directory.mkdir(parents=True)
            claim_folder(str(self.folder), "rival")
            self.rival_step = 20_000
        self.rival_step += 10
        report_step(rival, 1, self.rival_step)
        self.of_others.add(self.write(self.folder, self.rival_step))

    def killed_save(self, choice: int) -> None:
        """Write an incomplete checkpoint, as if the run were killed while it saves.

        Args:
            choice: Random number that selects the missing part of the checkpoint.
        """
        self.step += 10
        report_step(self.place, len(self.attempts), self.step)
        checkpoint = self.write(self.folder, self.step)
        self.damage(checkpoint, choice)

    def damage(self, checkpoint: Path, choice: int) -> None:
        """Truncate a file of a checkpoint, or remove the files that were written last.

        Args:
            checkpoint: Path of the checkpoint.
            choice: Random number that selects the kind of damage and the file.
        """
        in_order = sorted(files_of(checkpoint), key=lambda file: file.stat().st_mtime_ns)
        large = [file for file in in_order if file.stat().st_size >= 64]
        match choice % 3:
            case 0 if large:
                large[choice % len(large)].write_bytes(b"")
            case 1 if large:
                file = large[choice % len(large)]
                content = file.read_bytes()
                file.write_bytes(content[: len(content) // 2])
            case _ if checkpoint.is_dir():
                for file in in_order[-3:]:
                    file.unlink()
            case _:
                checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
        self.whole.discard(checkpoint)

    def delete(self, choice: int) -> None:
        if existing := sorted(self.whole):
            checkpoint = existing[choice % len(existing)]
            shutil.rmtree(checkpoint) if checkpoint.is_dir() else checkpoint.unlink()
            self.whole.discard(checkpoint)

    def move_pointer(self, choice: int) -> None:
        step = choice % (self.step + 20)
        text = ["", str(step), f"global_step_{step}", "nonsense"][choice % 4]
        name = ["latest", "latest_checkpointed_iteration.txt"][choice % 2]
        files.write_text(self.folder / name, text)

    def add_foreign_file(self, choice: int) -> None:
        step = 10_000 + choice % 100
        names = [
            f"step_{step}_hf/model.safetensors",
            f"eval_{step}/result.json",
            f".step_{step}.tmp",
            f"events.out.tfevents.{step}",
            f"step_{step}.log",
        ]
        files.write_text(self.folder / names[choice % len(names)], "{}")

    def keep(self) -> None:
        for path in find_superfluous_checkpoints(
            self.spec, self.place, self.attempts, self.foreign
        ):
            remove_checkpoint(path)

    def resume(self) -> None:
        """Start the next attempt, and check that it starts from the newest correct checkpoint."""
        plan = plan_resume(self.spec, self.place, self.attempts, self.foreign)
        newest = self.newest()
        refused = {Path(one.path): one.why for one in plan.refused}

        assert plan.path is None or plan.path in self.whole, f"damaged: {plan}"
        assert plan.path not in self.of_others
        if plan.path != newest:
            assert newest is not None
            assert refused.get(newest), f"{newest} was passed over: {plan}"
            raise AssertionError(f"{newest} is whole, but was refused: {refused[newest]}")
        self.begin_attempt(plan.path)

    def begin_attempt(self, checkpoint: Path | None) -> None:
        number = len(self.attempts) + 1
        self.attempts.append(
            AttemptRecord.model_validate(
                {
                    "number": number,
                    "state": "failed",
                    "resume_from": str(checkpoint) if checkpoint else None,
                    "failure": {"kind": "UNKNOWN", "signal": "SIGKILL", "message": "killed"},
                }
            )
        )
        attempt = self.place.attempt(number)
        attempt.directory.mkdir(parents=True)
        attempt.spec.write_text(json.dumps(self.spec.model_dump(mode="json", exclude_none=True)))


def begin(root: Path, write: Write, keep: int, earlier: int) -> History:
    folder = root / "shared"
    folder.mkdir()
    command = ["python", "${attempt.resume_from}"]
    trainer: dict[str, Any] = {"command": command, "checkpoints": str(folder), "keep": keep}
    data = {"name": "x", "workload": "sft", "components": {"trainer": trainer}}
    history = History(
        folder=folder,
        write=write,
        place=RunPlace.of("history"),
        spec=RunSpec.model_validate(data),
    )
    for number in range(earlier):
        history.of_others.add(write(folder, 5001 + number))
    history.foreign = find_foreign_checkpoints(history.spec, history.spec, history.place, 1)
    history.begin_attempt(None)
    return history


OPERATIONS = (
    "save",
    "killed_save",
    "damage",
    "delete",
    "pointer",
    "foreign",
    "rival",
    "keep",
    "resume",
)


@settings(
    max_examples=int(os.environ.get("RESUME_HISTORIES", "40")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    write=st.sampled_from(LAYOUTS),
    keep=st.integers(1, 3),
    earlier=st.integers(0, 2),
    operations=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 10_000)), min_size=3, max_size=14
    ),
)
def test_attempts_start_from_the_newest_correct_checkpoint_and_removals_keep_it(
    monkeypatch: pytest.MonkeyPatch,
    write: Write,
    keep: int,
    earlier: int,
    operations: list[tuple[str, int]],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("MUSTER_HOME", f"{name}/home")
        history = begin(Path(name), write, keep, earlier)
        for operation, choice in (*operations, ("resume", 0)):
            match operation:
                case "save":
                    history.save()
                case "killed_save":
                    history.killed_save(choice)
                    history.resume()
                case "damage":
                    if existing := sorted(history.whole):
                        history.damage(existing[choice % len(existing)], choice)
                case "delete":
                    history.delete(choice)
                case "pointer":
                    history.move_pointer(choice)
                case "foreign":
                    history.add_foreign_file(choice)
                case "rival":
                    history.rival_saves()
                case "keep":
                    before = history.newest()
                    history.keep()
                    assert before is None or before.exists()
                    assert all(other.exists() for other in history.of_others)
                    history.whole = {path for path in history.whole if path.exists()}
                case "resume":
                    history.resume()
