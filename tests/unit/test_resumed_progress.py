"""Tests of the detection of progress in an attempt that resumes from a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tasks.processes.progress import Silence
from tasks.record.checkpoints import CheckpointGrowth
from tasks.record.log_file import HeldLog
from tests.support import checkpoint_files as files


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("steps", "silent_s"),
    [
        # the attempt resumes from the checkpoint of step 20, so a report of step 20 is no
        # progress, but a report of step 21 is progress
        ([20, 20, 20], 30.0),
        ([None, 20, 20], 30.0),
        ([20, 21, 21], 10.0),
        ([20, 21, 22], 0.0),
        # each new step counts as progress, except for step 20 of the loaded checkpoint
        ([1, 2, 3], 0.0),
        ([30, 31, 32], 0.0),
    ],
)
def test_step_of_the_checkpoint_is_no_progress(steps: list[float | None], silent_s: float) -> None:
    clock = Clock()
    silence = Silence([], clock, resumed_step=20)

    for step in steps:
        clock.now_s += 10.0
        lasted_s = silence.seconds_without_work(step)

    assert lasted_s == silent_s


def test_new_output_counts_until_the_training_has_made_a_step(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    log.write_text("")
    clock = Clock()
    silence = Silence([HeldLog(log)], clock, resumed_step=20)
    silence.seconds_without_work(20)

    clock.now_s = 10.0
    log.write_text("compiling the kernels\n")

    assert silence.seconds_without_work(20) == 0.0


def test_checkpoint_that_is_written_grows(tmp_path: Path) -> None:
    files.plain_torch(tmp_path, 10)
    growth = CheckpointGrowth(".", tmp_path)
    growth.seconds_since_growth()
    part = files.write_text(tmp_path / "step_20" / "model.bin", "x").parent / "model.bin"

    ages_s = [growth.seconds_since_growth(), growth.seconds_since_growth()]
    with part.open("a") as file:
        file.write("y")
    ages_s.append(growth.seconds_since_growth())

    assert [age_s is not None for age_s in ages_s] == [True, False, True]


@pytest.mark.parametrize("name", [".step_20.pt.tmp", "tmp-checkpoint-20/model.pt", "step_20.part"])
def test_temporary_files_grow_too(tmp_path: Path, name: str) -> None:
    growth = CheckpointGrowth(".", tmp_path)
    growth.seconds_since_growth()

    files.write_text(tmp_path / name, "x")

    assert growth.seconds_since_growth() is not None


def test_complete_checkpoint_does_not_grow(tmp_path: Path) -> None:
    checkpoint = files.plain_torch(tmp_path, 10)
    growth = CheckpointGrowth(".", tmp_path)
    growth.seconds_since_growth()

    os.utime(checkpoint)

    assert growth.seconds_since_growth() is None


def test_log_beside_the_checkpoints_is_no_save(tmp_path: Path) -> None:
    growth = CheckpointGrowth(".", tmp_path)
    growth.seconds_since_growth()

    files.write_text(tmp_path / "train_rank0.log", "step 3")
    files.write_text(tmp_path / "events.out.tfevents.1763900000", "x")

    assert growth.seconds_since_growth() is None
