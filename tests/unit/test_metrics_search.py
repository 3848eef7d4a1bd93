"""Tests that the file with the steps is found if `progress.jsonl` names another file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.processes.component import AttemptPlan, ComponentPlan
from tasks.processes.guarded import Command
from tasks.processes.metrics_search import find_metrics
from tasks.spec.run import Progress

#: Start of the attempt, in UTC epoch seconds.
BEGAN_AT = 1000.0


def plan(
    directory: Path, *argv: str, env: Mapping[str, str] | None = None, jsonl: str = "/no/m.jsonl"
) -> AttemptPlan:
    """Return the plan of an attempt with one component, `trainer`.

    The working directory is `project`, and the run's directory is `run`.
    """
    attempt = directory / "run" / "attempt-01"
    attempt.mkdir(parents=True, exist_ok=True)
    project = directory / "project"
    project.mkdir(exist_ok=True)
    trainer = ComponentPlan(
        name="trainer",
        command=Command(argv=argv, env=env or {}, cwd=project, log=attempt / "trainer.log"),
        ready=None,
        live=None,
        on_exit_zero="complete",
    )
    return AttemptPlan(
        run_id="r",
        number=1,
        cwd=project,
        components=(trainer,),
        progress=Progress(jsonl=jsonl, step="step", total=12),
        began_at=BEGAN_AT,
    )


def write_steps(path: Path, line: str = '{"step": 3}\n', *, at: float = BEGAN_AT + 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line)
    os.utime(path, (at, at))
    return path


@pytest.mark.parametrize(
    ("file", "argument", "path_in_spec"),
    [
        ("run/attempt-01/m.jsonl", "ROOT/run/attempt-01/m.jsonl", "${attempt.dir}/m.jsonl"),
        ("run/out/m.jsonl", "--metrics=ROOT/run/out/m.jsonl", "${run.dir}/out/m.jsonl"),
        ("project/out/m.jsonl", "out/m.jsonl", "out/m.jsonl"),
        ("project/out/m.jsonl", "./out", "out/m.jsonl"),
        ("project/a b/m.jsonl", "a b/m.jsonl", "a b/m.jsonl"),
        ("project/m.jsonl", "python train.py --metrics 'm.jsonl' | cat", "m.jsonl"),
        ("elsewhere/m.ndjson", "ROOT/elsewhere/m.ndjson", "ROOT/elsewhere/m.ndjson"),
    ],
)
def test_file_that_the_command_names_is_found(
    tmp_path: Path, file: str, argument: str, path_in_spec: str
) -> None:
    path = write_steps(tmp_path / file)
    write_steps(tmp_path / "project" / "a-file-that-no-argument-names.jsonl")

    found = find_metrics(plan(tmp_path, "train", argument.replace("ROOT", str(tmp_path))))

    assert found is not None
    assert found.path == path
    assert found.path_in_spec == path_in_spec.replace("ROOT", str(tmp_path))
    assert found.named_by == "the command of trainer"


def test_file_that_the_environment_names_is_found(tmp_path: Path) -> None:
    path = write_steps(tmp_path / "elsewhere" / "m.jsonl")

    found = find_metrics(plan(tmp_path, "train", env={"OUT": str(path), "HOME": str(tmp_path)}))

    assert found is not None
    assert (found.path, found.named_by) == (path, "the environment of trainer")


@pytest.mark.parametrize("folder", ["run/attempt-01", "run/logs", "project", "project/out/logs"])
def test_file_in_a_folder_of_the_run_is_found(tmp_path: Path, folder: str) -> None:
    path = write_steps(tmp_path / folder / "m.jsonl")

    found = find_metrics(plan(tmp_path, "train"))

    assert found is not None
    assert (found.path, found.named_by) == (path, "")


@pytest.mark.parametrize(
    "line", ["", "step 3\n", '{"iter": 3}\n', '{"step": "3"}\n', '{"step": 0.5}\n', "[3]\n"]
)
def test_file_without_steps_is_not_found(tmp_path: Path, line: str) -> None:
    write_steps(tmp_path / "project" / "m.jsonl", line)

    assert find_metrics(plan(tmp_path, "train", "m.jsonl")) is None


def test_file_from_before_the_attempt_is_not_found(tmp_path: Path) -> None:
    write_steps(tmp_path / "project" / "m.jsonl", at=BEGAN_AT - 1)

    assert find_metrics(plan(tmp_path, "train", "m.jsonl")) is None


@pytest.mark.parametrize("jsonl", ["m.jsonl", "./m.jsonl"])
def test_file_that_the_spec_names_is_not_found(tmp_path: Path, jsonl: str) -> None:
    write_steps(tmp_path / "project" / "m.jsonl")

    assert find_metrics(plan(tmp_path, "train", "m.jsonl", jsonl=jsonl)) is None


def test_file_of_muster_is_not_found(tmp_path: Path) -> None:
    write_steps(tmp_path / "run" / "attempt-01" / "events.jsonl")

    assert find_metrics(plan(tmp_path, "train")) is None


def test_search_skips_hidden_folders_and_folders_that_are_too_deep(tmp_path: Path) -> None:
    write_steps(tmp_path / "project" / ".venv" / "m.jsonl")
    write_steps(tmp_path / "project" / "a" / "b" / "c" / "m.jsonl")

    assert find_metrics(plan(tmp_path, "train")) is None


def test_folder_above_the_working_directory_is_not_searched(tmp_path: Path) -> None:
    write_steps(tmp_path / "m.jsonl")

    write_steps(tmp_path / "other" / "m.jsonl")

    assert find_metrics(plan(tmp_path, "train", "/", f"{tmp_path}/", "../", "./../")) is None


@pytest.mark.parametrize(
    "argument",
    ["../", "./..", "../../", "out/../../", "--root=../", "./", "link/", "link/project/", "ROOT/"],
)
@pytest.mark.parametrize("is_relative", [False, True])
def test_other_path_of_a_folder_above_the_working_directory_is_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, is_relative: bool
) -> None:
    parent = tmp_path / "a"
    parent.mkdir()
    attempt_plan = plan(parent, "python", "train.py", argument.replace("ROOT", str(tmp_path)))
    if is_relative:
        # The plan of a run has the working directory of the spec, such as `.`.
        monkeypatch.chdir(parent / "project")
        [trainer] = attempt_plan.components
        command = replace(trainer.command, cwd=Path())
        trainer = replace(trainer, command=command)
        attempt_plan = replace(attempt_plan, cwd=Path(), components=(trainer,))
    (parent / "project" / "out").mkdir()
    (parent / "project" / "link").symlink_to(parent)
    write_steps(tmp_path / "m.jsonl")
    write_steps(parent / "other" / "m.jsonl")

    assert find_metrics(attempt_plan) is None


class CountingListing:
    """Lists a folder like `os.scandir`, and counts the entries of all listings."""

    count = 0

    def __init__(self, entries: Iterator[os.DirEntry[str]]) -> None:
        self._entries = entries

    def __iter__(self) -> CountingListing:
        return self

    def __next__(self) -> os.DirEntry[str]:
        entry = next(self._entries)
        CountingListing.count += 1
        return entry

    def __enter__(self) -> CountingListing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries.close()  # type: ignore[attr-defined]


def test_search_stops_reading_a_folder_with_too_many_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt_plan = plan(tmp_path, "train")
    for number in range(3000):
        (tmp_path / "project" / f"{number}.txt").touch()
    scandir = os.scandir
    monkeypatch.setattr(CountingListing, "count", 0)
    monkeypatch.setattr(os, "scandir", lambda path: CountingListing(scandir(path)))

    found = find_metrics(attempt_plan)

    assert found is None
    assert 2000 < CountingListing.count < 2100


def test_subfolders_are_searched_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_steps(tmp_path / "project" / "b" / "m.jsonl")
    first = write_steps(tmp_path / "project" / "a" / "z" / "m.jsonl")

    found = find_metrics(plan(tmp_path, "train"))

    assert found is not None
    assert found.path == first
