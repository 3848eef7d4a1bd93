"""Tests that a run neither uses nor removes checkpoints of another run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks.record.checkpoint_claims import claim_folder
from tasks.record.checkpoints import (
    find_foreign_checkpoints,
    find_superfluous_checkpoints,
    list_output_folders,
    plan_resume,
    remove_checkpoint,
)
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import parse_spec
from tasks.spec.run import RunSpec
from tests.support import checkpoint_files as files


class Run:
    """A run with one attempt. The checkpoint folder may also contain checkpoints of other runs."""

    def __init__(self, run_id: str, checkpoints: str, *, keep: int | None = None) -> None:
        self.place = RunPlace.of(run_id)
        trainer: dict[str, Any] = {"command": ["python"], "checkpoints": checkpoints}
        if keep is not None:
            trainer["keep"] = keep
        data = {"name": "x", "workload": "sft", "components": {"trainer": trainer}}
        self.spec = RunSpec.model_validate(data)
        self.attempts = [AttemptRecord.model_validate({"number": 1, "state": "failed"})]
        attempt = self.place.attempt(1)
        attempt.directory.mkdir(parents=True)
        attempt.spec.write_text(json.dumps(data))
        self.foreign = find_foreign_checkpoints(self.spec, self.spec, self.place, 1)

    def report_steps(self, *steps: tuple[float, int]) -> None:
        """Write a progress event for each pair of time and step."""
        with self.place.attempt(1).events.open("a") as file:
            for at, step in steps:
                file.write(json.dumps({"at": at, "event": "run.progress", "step": step}) + "\n")

    def resume(self) -> tuple[str, dict[str, str]]:
        """Return the checkpoint to resume from, and the checkpoints that the run must not use.

        Returns:
            The name of the checkpoint to resume from, and a mapping from the name of each forbidden
            checkpoint to the reason.
        """
        plan = plan_resume(self.spec, self.place, self.attempts, self.foreign)
        refused = {Path(one.path).name: one.why for one in plan.refused}
        return plan.path.name if plan.path else "", refused

    def keep(self) -> None:
        for path in find_superfluous_checkpoints(
            self.spec, self.place, self.attempts, self.foreign
        ):
            remove_checkpoint(path)


@pytest.fixture
def folder(tmp_path: Path, muster_home: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("pattern", ["", "/step_*"])
def test_checkpoints_from_before_the_run_are_never_used_or_removed(
    folder: Path, pattern: str
) -> None:
    for step in (800, 900, 1000):
        files.plain_torch(folder, step)
    run = Run("b", f"{folder}{pattern}", keep=2)
    assert run.resume()[0] == ""

    for step in (10, 20, 30, 40):
        files.plain_torch(folder, step)
    run.keep()
    chosen, refused = run.resume()

    assert chosen == "step_40.pt"
    assert set(refused) == {"step_800.pt", "step_900.pt", "step_1000.pt"}
    assert "belongs to another run" in refused["step_1000.pt"]
    assert names_in(folder) == {*refused, "step_30.pt", "step_40.pt"}


def test_checkpoint_in_the_copy_of_the_project_is_never_used(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A submitted run works in a copy of the project, in the folder of the run.
    code = RunPlace.of("b").code
    folder = code / "checkpoints"
    folder.mkdir(parents=True)
    files.plain_torch(folder, 900)
    monkeypatch.chdir(code)
    run = Run("b", "checkpoints")
    assert run.resume()[0] == ""

    files.plain_torch(folder, 10)
    files.plain_torch(folder, 20)
    chosen, refused = run.resume()

    assert chosen == "step_20.pt"
    assert "belongs to another run" in refused["step_900.pt"]


@pytest.mark.parametrize(
    ("cwd", "checkpoints", "folders"),
    [
        (".", "out", ("out",)),
        ("lib", "./out/step-*", ("lib/out",)),
        ("lib", "../out", ("out",)),
        (".", "ROOT/out", ("out",)),
        (".", "..out/step-*", ("..out",)),
        (".", "../out", ()),
        (".", ".", ()),
        (".", "/elsewhere/out", ()),
        (".", "${run.dir}/out", ()),
        (".", "s3://bucket/out", ()),
    ],
)
def test_folders_of_a_project_in_which_a_run_saves_checkpoints_are_listed(
    tmp_path: Path, cwd: str, checkpoints: str, folders: tuple[str, ...]
) -> None:
    trainer = {"command": ["x"], "checkpoints": checkpoints.replace("ROOT", str(tmp_path))}
    data = {"name": "x", "workload": "sft", "cwd": cwd, "components": {"trainer": trainer}}

    assert list_output_folders(RunSpec.model_validate(data), tmp_path) == folders


@pytest.mark.parametrize(
    ("checkpoints", "folders"),
    [
        ("other/project/out", ("out",)),
        ("other/project/scratch", ("scratch",)),
        ("other/project/scratch/out", ("scratch/out",)),
        ("runs/out", ("data/runs/out",)),
        ("project/scratch", ("scratch",)),
        # The command names a file in this folder.
        ("other/project/data", ()),
        ("other/project", ()),
        ("other/out", ()),
    ],
)
def test_folder_of_checkpoints_is_found_in_the_project_through_symbolic_links(
    tmp_path: Path, checkpoints: str, folders: tuple[str, ...]
) -> None:
    project = tmp_path / "project"
    (project / "data/runs").mkdir(parents=True)
    (project / "data/train.py").touch()
    (tmp_path / "elsewhere").mkdir()
    (project / "scratch").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "other").symlink_to(tmp_path)
    (tmp_path / "runs").symlink_to(project / "data/runs")
    trainer = {"command": ["python", "data/train.py"], "checkpoints": f"{tmp_path}/{checkpoints}"}
    data = {"name": "x", "workload": "sft", "components": {"trainer": trainer}}

    assert list_output_folders(RunSpec.model_validate(data), project) == folders


@pytest.mark.parametrize(
    ("cwd", "checkpoints"), [("lib", "."), ("lib", "step-*.pt"), (".", "lib"), (".", "lib/step-*")]
)
@pytest.mark.parametrize("argument", ["train.py", "--config=train.py"])
def test_folder_with_checkpoints_and_the_script_of_the_run_is_part_of_the_project(
    tmp_path: Path, cwd: str, checkpoints: str, argument: str
) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "train.py").touch()
    name = argument if cwd == "lib" else argument.replace("train.py", "lib/train.py")
    trainer = {"command": ["python", name, "x" * 5000], "checkpoints": checkpoints}
    data = {"name": "x", "workload": "sft", "cwd": cwd, "components": {"trainer": trainer}}

    assert list_output_folders(RunSpec.model_validate(data), tmp_path) == ()


def test_overwritten_checkpoint_belongs_to_the_run_that_wrote_it_last(folder: Path) -> None:
    files.distributed(folder, 10)
    run = Run("b", str(folder))

    shutil.rmtree(folder / "step-10")
    files.distributed(folder, 10)

    assert run.resume()[0] == "step-10"


def test_half_overwritten_checkpoint_is_refused(folder: Path) -> None:
    checkpoint = files.verl(folder, 10)
    run = Run("b", str(folder))

    files.write_torch(checkpoint / "actor" / "model_world_size_2_rank_0.pt")

    chosen, refused = run.resume()
    assert chosen == ""
    assert "existed before this run started" in refused["global_step_10"]


def test_touched_checkpoint_stays_foreign(folder: Path) -> None:
    checkpoint = files.plain_torch(folder, 10)
    run = Run("b", str(folder))

    os.chmod(checkpoint, 0o600)

    assert run.resume()[0] == ""


def test_folder_below_the_run_has_no_foreign_checkpoints(muster_home: Path) -> None:
    place = RunPlace.of("a")
    files.plain_torch(place.directory / "c", 10)

    run = Run("a", str(place.directory / "c"))

    assert run.foreign == {}
    assert run.resume()[0] == "step_10.pt"


def save_at(folder: Path, step: int, at: float) -> None:
    path = files.plain_torch(folder, step)
    os.utime(path, (at, at))


def test_checkpoints_of_two_runs_at_the_same_time_are_told_apart_by_their_steps(
    folder: Path,
) -> None:
    claim_folder(str(folder), "one", lambda: 0.0)
    claim_folder(str(folder), "other", lambda: 1000.0)
    one = Run("one", str(folder), keep=2)
    one.report_steps((100.0, 500), (1050.0, 900), (1200.0, 1000))
    other = Run("other", str(folder), keep=2)
    other.report_steps((1050.0, 10), (1200.0, 40))
    for step, at in ((800, 500.0), (900, 1050.0), (1000, 1100.0)):
        save_at(folder, step, at)
    for step, at in ((10, 1050.0), (20, 1100.0), (30, 1150.0)):
        save_at(folder, step, at)

    other.keep()

    assert other.resume()[0] == "step_30.pt"
    assert one.resume()[0] == "step_1000.pt"
    assert "belongs to the run one" in other.resume()[1]["step_1000.pt"]
    kept = {f"step_{step}.pt" for step in (800, 900, 1000, 20, 30)}
    assert kept <= names_in(folder)


def test_checkpoint_that_two_runs_may_have_written_is_neither_used_nor_removed(
    folder: Path,
) -> None:
    one = Run("one", str(folder))
    other = Run("other", str(folder), keep=1)
    for step in (10, 20, 30, 40):
        files.plain_torch(folder, step)

    other.keep()

    assert len(names_in(folder)) == 4
    for run, rival in ((one, "other"), (other, "one")):
        chosen, refused = run.resume()
        assert chosen == ""
        assert f"may belong to the run {rival}" in refused["step_40.pt"]


@pytest.mark.parametrize(
    ("checkpoints", "cwd"),
    [
        ("${run.dir}", None),
        ("${attempt.dir}", None),
        ("${run.dir}/", None),
        ("${run.dir}/.", None),
        ("${run.dir}/*", None),
        ("${run.dir}/checkpoints/..", None),
        ("${attempt.dir}/..", None),
        (".", "${run.dir}"),
    ],
)
def test_directories_of_muster_are_refused(checkpoints: str, cwd: str | None) -> None:
    trainer = {"command": ["python"], "checkpoints": checkpoints}
    if cwd is not None:
        trainer["cwd"] = cwd

    with pytest.raises(InvalidSpec, match="but Muster itself writes other files into"):
        parse_spec({"name": "x", "workload": "sft", "components": {"trainer": trainer}})


@pytest.mark.parametrize("checkpoints", ["${run.dir}/c", "c", "/data/${run.id}", "${run.dir}/s_*"])
def test_folders_of_a_run_are_accepted(checkpoints: str) -> None:
    trainer = {"command": ["python"], "checkpoints": checkpoints}

    spec = parse_spec({"name": "x", "workload": "sft", "components": {"trainer": trainer}})

    assert spec.processes["trainer"].checkpoints == checkpoints
