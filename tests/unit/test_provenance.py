"""The record of a run names a copy of the project's files, also without a submission."""

from __future__ import annotations

import subprocess
from pathlib import Path
from uuid import uuid4

import pytest

from tasks.record.code_store import read_files
from tasks.record.run_json import RunRecord
from tasks.spec.run import RunSpec
from tasks.train.background_work import record_provenance
from tasks.train.run_secrets import RunSecrets

SPEC = RunSpec.model_validate(
    {"name": "a", "workload": "sft", "components": {"trainer": {"command": ["true"]}}}
)


def record_project(project: Path, record_file: Path) -> dict[str, object]:
    """Record the code version of a project for a run; return the record's section `provenance`."""
    record = RunRecord(
        record_file, run_id="a-sft-20260101-000000-aaaa91c2", flow_run_id=str(uuid4())
    )
    record.begin_attempt(1)
    record_provenance(record, None, SPEC, project, RunSecrets(SPEC))
    return dict(record.content.provenance or {})


def test_direct_run_keeps_files_that_git_does_not_track(muster_home: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    (project / ".gitignore").write_text("ignored.py\n")
    for name in ("train.py", "untracked.py", "ignored.py"):
        (project / name).write_text(name)

    provenance = record_project(project, tmp_path / "run.json")

    files = read_files(str(provenance["tree"]))
    assert files.keys() == {".gitignore", "train.py", "untracked.py"}
    assert files["untracked.py"][1] == b"untracked.py"


def test_direct_run_keeps_files_of_a_folder_without_git(muster_home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "training"
    folder.mkdir()
    (folder / "train.py").write_text("text")

    provenance = record_project(folder, tmp_path / "run.json")

    assert read_files(str(provenance["tree"])).keys() == {"train.py"}


def test_direct_run_keeps_no_files_of_the_home_folder(
    muster_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "train.py").write_text("text")
    monkeypatch.setenv("HOME", str(home))

    assert record_project(home, tmp_path / "run.json")["tree"] is None
    assert record_project(tmp_path, tmp_path / "run2.json")["tree"] is None


@pytest.mark.parametrize("is_project", [False, True])
def test_files_that_cannot_be_stored_do_not_disturb_the_run(
    muster_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_project: bool
) -> None:
    monkeypatch.setenv("MUSTER_CODE_MIB", "0.000001")
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("text")
    if is_project:
        (project / "pyproject.toml").touch()

    provenance = record_project(project, tmp_path / "run.json")

    assert provenance["tree"] is None
    assert provenance["project"] == str(project)
