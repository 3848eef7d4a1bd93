"""The project that a spec's file lies in: its root, its interpreter, and where its components
work."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tasks.record.places import muster_home
from tasks.server.flow_process import enter_project_of
from tasks.spec.loading import find_project_root, resolve
from tasks.spec.programs import find_python
from tasks.spec.run import RunSpec


@pytest.mark.parametrize(
    ("marks", "root"),
    [
        # none: the file's own folder
        ([], "outer/inner/runs"),
        (["outer/.git/"], "outer"),
        # of a work tree of git, `.git` is a file
        (["outer/.git"], "outer"),
        (["outer/pyproject.toml"], "outer"),
        # the nearest
        (["outer/.git/", "outer/inner/pyproject.toml"], "outer/inner"),
        (["outer/pyproject.toml", "outer/inner/.git/"], "outer/inner"),
        (["outer/.git/", "outer/inner/runs/pyproject.toml"], "outer/inner/runs"),
        # what lies below, or beside, marks nothing
        (["outer/.git/", "outer/inner/runs/deeper/pyproject.toml"], "outer"),
        (["outer/.git/", "outer/other/pyproject.toml"], "outer"),
    ],
)
def test_the_root_is_the_nearest_folder_with_a_mark_else_the_file_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marks: list[str], root: str
) -> None:
    folder = tmp_path / "outer" / "inner" / "runs"
    folder.mkdir(parents=True)
    for mark in marks:
        path = tmp_path / mark
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if mark.endswith("/") else path.touch()
    monkeypatch.chdir(folder)

    # The file need not be there; its name may be relative.
    found = [find_project_root(folder / "spec.yaml"), find_project_root(Path("spec.yaml"))]

    assert found == [tmp_path / root] * 2


def test_whoever_enters_a_project_keeps_the_muster_home_that_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project" / "runs").mkdir(parents=True)
    (tmp_path / "project" / ".git").mkdir()
    monkeypatch.setenv("MUSTER_HOME", "home")
    monkeypatch.chdir(tmp_path)

    enter_project_of(Path("project/runs/spec.yaml"))

    assert Path.cwd() == tmp_path / "project"
    assert muster_home() == tmp_path / "home"


@pytest.mark.parametrize("kind", ["program", "link", "no program", "folder", "nothing"])
def test_the_interpreter_is_that_of_the_project_s_venv_else_muster_s(
    tmp_path: Path, kind: str
) -> None:
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    match kind:
        case "program":
            own.write_text("#!/bin/sh\n")
            own.chmod(0o755)
        case "link":
            own.symlink_to(sys.executable)
        case "no program":
            own.symlink_to(tmp_path / "gone")
        case "folder":
            own.parent.rmdir()
            own.parent.touch()

    found = find_python(tmp_path)

    # The link is not followed: it leads out of the environment.
    assert found == (str(own) if kind in ("program", "link") else sys.executable)


@pytest.mark.parametrize(
    ("cwd", "own", "of_run", "of_component"),
    [
        # left out: the root; a component without one stays with the run's
        (None, None, "/project", None),
        (".", None, "/project", None),
        ("sub", None, "/project/sub", None),
        # that of a component starts from the root too, not from the run's
        ("sub", "other", "/project/sub", "/project/other"),
        (None, ".", "/project", "/project"),
        ("/else", "/where", "/else", "/where"),
        # as what is filled in says
        ("${run.dir}", "${run.dir}/x", "/runs/a", "/runs/a/x"),
        ("of-${run.id}", "of-${run.id}", "/project/of-a", "/project/of-a"),
    ],
)
def test_a_resolved_spec_has_only_absolute_directories(
    cwd: str | None, own: str | None, of_run: str, of_component: str | None
) -> None:
    component = {"command": ["true"], **({"cwd": own} if own else {})}
    fleet = {"backend": "vllm", "model": "m", **({"cwd": own} if own else {})}
    spec = RunSpec.model_validate(
        {
            "name": "a",
            "workload": "grpo",
            **({"cwd": cwd} if cwd else {}),
            "components": {"rollout": fleet, "trainer": component},
        }
    )

    resolved = resolve(spec, {"run.dir": "/runs/a", "run.id": "a"}, Path("/project"))

    assert resolved.cwd == of_run
    assert [part.cwd for part in resolved.components.values()] == [of_component] * 2
    assert all(os.path.isabs(part.cwd or resolved.cwd) for part in resolved.components.values())
