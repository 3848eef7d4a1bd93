"""Tests that Muster imports its own modules, even if the user's import path has equal names."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.processes import own_modules
from tasks.processes.own_modules import make_own_command, select_own_path
from tests.support.house import ROOT

#: File that the wheel installs as the program `muster`.
PROGRAM = Path(own_modules.__file__)
#: Python interpreter outside of a virtual environment. Such an interpreter also imports packages
#: from the user's own site-packages directory.
BASE_PYTHON = str(Path(sys.base_prefix) / "bin" / "python3")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project whose packages have the same names as Muster's packages.

    The import of these packages fails.
    """
    root = tmp_path / "project"
    for name in ("tasks", "flows", "deployments"):
        (root / name).mkdir(parents=True)
        (root / name / "__init__.py").write_text("raise SystemExit('not of Muster')")
    return root


def run(*command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command with further environment variables, and return its exit code and output."""
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("python_path", [".", "", ":", "/no/such/folder:.", "{project}"])
def test_command_runs_from_its_own_modules(project: Path, python_path: str) -> None:
    variables = {"PYTHONPATH": python_path.format(project=project)}

    # The program is a copy in another folder, as in an installed wheel.
    program = project / "muster"
    program.write_text(PROGRAM.read_text())
    done = run(sys.executable, str(program), "--version", cwd=project, **variables)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("python_path", [".", "{project}", "{project}:{root}"])
def test_own_programs_run_from_muster_modules(project: Path, python_path: str) -> None:
    variables = {"PYTHONPATH": python_path.format(project=project, root=ROOT)}

    command = make_own_command("deployments.worker")
    done = run(*command, "--help", cwd=project, **variables)

    assert done.returncode == 0, done.stderr
    assert "prefect worker start" in done.stdout


@pytest.mark.parametrize("is_listed_in_pth", [False, True])
def test_own_programs_ignore_the_packages_of_the_user(
    project: Path, tmp_path: Path, is_listed_in_pth: bool
) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = tmp_path / "home" / "lib" / version / "site-packages"
    packages.parent.mkdir(parents=True)
    if is_listed_in_pth:
        packages.mkdir()
        (packages / "project.pth").write_text(f"# a comment\n{project}\n")
    else:
        project.rename(packages)
    variables = {"PYTHONUSERBASE": str(tmp_path / "home")}
    arguments = make_own_command("tasks.processes.cgroup")[1:]

    unprotected = run(BASE_PYTHON, "-P", "-c", "import tasks", cwd=tmp_path, **variables)
    done = run(BASE_PYTHON, *arguments, cwd=tmp_path, **variables)

    assert "not of Muster" in unprotected.stderr
    assert (done.returncode, done.stderr) == (0, "")


def test_folder_in_which_muster_is_installed_stays_on_the_import_path(tmp_path: Path) -> None:
    installed = tmp_path / "target"
    (installed / "muster-0.1.0.dist-info").mkdir(parents=True)
    project = tmp_path / "project"
    path = [str(project), str(installed), "/usr/lib/python3"]

    own_path = select_own_path(path, foreign=[str(project), str(installed)], own=[])

    assert own_path == [str(installed), "/usr/lib/python3"]


def test_modules_start_other_modules_of_muster_only_by_their_own_command() -> None:
    files = [
        path
        for folder in ("tasks", "flows", "deployments")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "quickstart" not in str(path) and path != PROGRAM
    ]
    commands: list[str] = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.List | ast.Tuple):
                continue
            words = [ast.unparse(element) for element in node.elts]
            if "sys.executable" in words and "'-m'" in words:
                commands.append(f"{path.relative_to(ROOT)}:{node.lineno}")

    assert commands == []
