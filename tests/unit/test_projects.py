"""Tests of a spec's project: its root folder, its interpreter and its working directories."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tasks.record.places import muster_home
from tasks.server.flow_process import enter_project
from tasks.spec.loading import find_project_root, resolve
from tasks.spec.programs import find_active_environment, find_interpreter
from tasks.spec.run import RunSpec


@pytest.mark.parametrize(
    ("markers", "root"),
    [
        # no file marks the root of the project: the root is the folder of the spec file
        ([], "outer/inner/runs"),
        (["outer/.git/"], "outer"),
        # in a linked work tree of git, `.git` is a file
        (["outer/.git"], "outer"),
        (["outer/pyproject.toml"], "outer"),
        # two folders have a file that marks the root of a project: the nearest folder is used
        (["outer/.git/", "outer/inner/pyproject.toml"], "outer/inner"),
        (["outer/pyproject.toml", "outer/inner/.git/"], "outer/inner"),
        (["outer/.git/", "outer/inner/runs/pyproject.toml"], "outer/inner/runs"),
        # files in a subfolder or a sibling folder do not mark the root of the project
        (["outer/.git/", "outer/inner/runs/deeper/pyproject.toml"], "outer"),
        (["outer/.git/", "outer/other/pyproject.toml"], "outer"),
    ],
)
def test_root_is_the_nearest_folder_with_a_marker_or_the_folder_of_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, markers: list[str], root: str
) -> None:
    folder = tmp_path / "outer" / "inner" / "runs"
    folder.mkdir(parents=True)
    for marker in markers:
        path = tmp_path / marker
        path.parent.mkdir(parents=True, exist_ok=True)
        if marker.endswith("/"):
            path.mkdir()
        else:
            path.touch()
    monkeypatch.chdir(folder)

    # The spec file does not have to exist. The path may be absolute or relative.
    roots = [find_project_root(folder / "spec.yaml"), find_project_root(Path("spec.yaml"))]

    assert roots == [tmp_path / root] * 2


def test_folder_before_two_dots_is_not_above_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("first/.git", "first/deep", "second"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "link").symlink_to("first/deep")
    monkeypatch.chdir(tmp_path / "first")
    paths = [
        Path("../second/spec.yaml"),
        tmp_path / "first" / ".." / "second" / "spec.yaml",
        # `link` leads to `first/deep`, so `link/..` is the folder `first`
        tmp_path / "link" / ".." / ".." / "second" / "spec.yaml",
    ]

    roots = [find_project_root(path) for path in paths]

    assert roots == [tmp_path / "second"] * 3


def test_relative_muster_home_is_kept_when_a_project_is_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project" / "runs").mkdir(parents=True)
    (tmp_path / "project" / ".git").mkdir()
    monkeypatch.setenv("MUSTER_HOME", "home")
    monkeypatch.chdir(tmp_path)

    enter_project(Path("project/runs/spec.yaml"))

    assert Path.cwd() == tmp_path / "project"
    assert muster_home() == tmp_path / "home"


@pytest.mark.parametrize("kind", ["program", "link", "no program", "folder", "nothing"])
def test_interpreter_of_the_project_s_venv_is_preferred_to_muster_s(
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

    interpreter = find_interpreter(tmp_path, {})

    # The link to the interpreter is not resolved, because its target belongs to another Python
    # environment.
    assert interpreter.path == (str(own) if kind in ("program", "link") else sys.executable)


def make_environment(place: Path) -> Path:
    """Create a Python environment with an interpreter that does nothing, and return its path."""
    python = place / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    return place


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_environment_of_the_spec_is_preferred(tmp_path: Path, variable: str) -> None:
    project = tmp_path / "project"
    make_environment(project / ".venv")
    environment = make_environment(tmp_path / "environment")

    interpreter = find_interpreter(project, {variable: str(environment)})

    assert str(interpreter) == f"{environment}/bin/python (of {variable})"
    assert interpreter.environment == environment


def test_reason_for_the_own_interpreter_names_environments_that_no_longer_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "deleted"))
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    (tmp_path / ".venv").symlink_to(tmp_path / "moved")

    interpreter = find_interpreter(tmp_path, {})

    assert interpreter.path == sys.executable
    assert interpreter.reason == (
        f"Muster's own Python, because VIRTUAL_ENV is {tmp_path}/deleted, which has no bin/python; "
        f"the project's .venv is {tmp_path}/.venv, which has no bin/python"
    )


@pytest.mark.parametrize(
    ("shell", "env", "has_venv", "expected"),
    [
        # If a virtual environment and a conda environment are activated, the virtual environment is
        # used.
        ({"VIRTUAL_ENV": "venv", "CONDA_PREFIX": "conda"}, {}, False, {"VIRTUAL_ENV": "venv"}),
        ({"CONDA_PREFIX": "conda"}, {}, False, {"CONDA_PREFIX": "conda"}),
        ({}, {}, False, {}),
        # An activated environment that no longer exists is ignored.
        ({"VIRTUAL_ENV": "gone"}, {}, False, {}),
        ({"VIRTUAL_ENV": "gone", "CONDA_PREFIX": "conda"}, {}, False, {"CONDA_PREFIX": "conda"}),
        # Muster's own environment is the default, so no variable is set.
        ({"VIRTUAL_ENV": "own", "CONDA_PREFIX": "conda"}, {}, False, {}),
        # The project has its own environment in the folder `.venv`, so no variable is set.
        ({"VIRTUAL_ENV": "venv"}, {}, True, {}),
        # The spec already sets PATH or CONDA_PREFIX, so no further variable is set.
        ({"VIRTUAL_ENV": "venv"}, {"PATH": "/usr/bin"}, False, {}),
        ({"VIRTUAL_ENV": "venv"}, {"CONDA_PREFIX": "/conda"}, False, {}),
    ],
)
def test_run_uses_the_environment_that_is_activated_in_the_shell(
    tmp_path: Path,
    shell: dict[str, str],
    env: dict[str, str],
    has_venv: bool,
    expected: dict[str, str],
) -> None:
    places = {
        "venv": str(make_environment(tmp_path / "venv")),
        "conda": str(make_environment(tmp_path / "conda")),
        "gone": str(tmp_path / "gone"),
        "own": sys.prefix,
    }
    project = tmp_path / "project"
    project.mkdir()
    if has_venv:
        make_environment(project / ".venv")

    shell_variables = {name: places[place] for name, place in shell.items()}
    added = find_active_environment(project, env, shell_variables)

    assert added == {name: places[place] for name, place in expected.items()}


@pytest.mark.parametrize(
    ("cwd", "own", "of_run", "of_component"),
    [
        # without `cwd` in the spec, a run uses the root of the project, and a component uses the
        # directory of the run
        (None, None, "/project", None),
        (".", None, "/project", None),
        ("sub", None, "/project/sub", None),
        # the directory of a component is relative to the root, not to the run's directory
        ("sub", "other", "/project/sub", "/project/other"),
        (None, ".", "/project", "/project"),
        ("/else", "/where", "/else", "/where"),
        # placeholders in a directory are replaced by their values
        ("${run.dir}", "${run.dir}/x", "/runs/a", "/runs/a/x"),
        ("of-${run.id}", "of-${run.id}", "/project/of-a", "/project/of-a"),
    ],
)
def test_resolved_spec_has_only_absolute_directories(
    cwd: str | None, own: str | None, of_run: str, of_component: str | None
) -> None:
    own_cwd = {"cwd": own} if own else {}
    component = {"command": ["true"], **own_cwd}
    fleet = {"backend": "vllm", "model": "m", **own_cwd}
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
