"""The advice about a missing Python package names the `python` of the run, and the choices."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tasks.record.causes import find_cause
from tasks.record.outcome import Failure, Verdict
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.run import RunSpec
from tasks.train.interpreters import describe_interpreters
from tasks.train.running_attempt import name_interpreter

#: Last log line of a component that imports a package missing in its Python environment.
MISSING = "ModuleNotFoundError: No module named 'torch'"


def make_spec(**trainer: object) -> RunSpec:
    components = {"trainer": {"command": ["python", "train.py"], **trainer}}
    content = {"name": "a", "workload": "sft", "components": components}
    if trainer.get("launcher") == "ray_job":
        content["ray"] = {"address": "http://127.0.0.1:8265"}
    return RunSpec.model_validate(content)


def make_verdict(text: str) -> Verdict:
    """Return the result of an attempt whose trainer has printed the text."""
    cause = find_cause(text)
    assert cause is not None
    failure = Failure(
        kind=FailureKind.USER_ERROR,
        component="trainer",
        message="trainer ended with exit code 1",
        rule=cause.rule.id,
        hint=cause.rule.hint,
    )
    return Verdict.failed(failure, 0.0)


def test_advice_about_a_missing_package_names_the_python_and_the_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    verdict = name_interpreter(make_verdict(MISSING), make_spec())

    assert verdict.failure is not None
    assert sys.executable in verdict.failure.hint
    assert "the project has no .venv and no Python environment is activated" in verdict.failure.hint
    assert "activated in your shell" in verdict.failure.hint


def test_advice_names_the_environment_of_the_spec(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)

    spec = make_spec(env={"VIRTUAL_ENV": str(tmp_path)})
    verdict = name_interpreter(make_verdict(MISSING), spec)

    assert verdict.failure is not None
    assert f"{python} (of VIRTUAL_ENV)" in verdict.failure.hint


@pytest.mark.parametrize("argument", ["train.py", "-m torch.distributed.run train.py"])
def test_advice_names_the_interpreter_in_the_command(tmp_path: Path, argument: str) -> None:
    named = tmp_path / "other" / "bin" / "python3"
    chosen = tmp_path / "venv" / "bin" / "python"
    for python in (named, chosen):
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)

    spec = make_spec(
        env={"VIRTUAL_ENV": str(tmp_path / "venv")}, command=[str(named), *argument.split()]
    )
    verdict = name_interpreter(make_verdict(MISSING), spec)

    assert verdict.failure is not None
    used, _, rest = verdict.failure.hint.partition("The chosen interpreter of the project is")
    assert f"used the Python interpreter {named} (in the command of trainer)" in used
    assert str(chosen) not in used and str(chosen) in rest
    assert describe_interpreters(spec, tmp_path) == f"{named} (in the command of trainer)"


def make_environment(folder: Path) -> Path:
    """Create a folder with a `python` in `bin`, and return the path of this `python`."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    return python


@pytest.mark.parametrize(
    "program", [".venv/bin/python", "./.venv/bin/python", "../a/.venv/bin/python", "lnk/python"]
)
@pytest.mark.parametrize("is_submitted", [False, True])
def test_advice_recognises_the_python_of_the_project_by_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, is_submitted: bool
) -> None:
    project = tmp_path / "a"
    python = make_environment(project / ".venv")
    folder = project
    if is_submitted:
        # A submitted run works in a copy of the project. The copy has a link to `.venv`.
        folder = tmp_path / "run" / "a"
        folder.mkdir(parents=True)
        (folder / ".venv").symlink_to(project / ".venv")
        monkeypatch.setenv("MUSTER_PROJECT", str(project))
    (folder / "lnk").symlink_to(project / ".venv" / "bin")
    monkeypatch.chdir(folder)

    verdict = name_interpreter(make_verdict(MISSING), make_spec(command=[program, "t.py"]))

    assert verdict.failure is not None
    assert f"interpreter {python} (of the project's .venv)" in verdict.failure.hint
    assert "The chosen interpreter" not in verdict.failure.hint


def test_advice_names_another_python_in_the_folder_of_the_chosen_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = make_environment(tmp_path / ".venv")
    other = chosen.with_name("python3.9")
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.chdir(tmp_path)

    spec = make_spec(command=[".venv/bin/python3.9", "t.py"])
    verdict = name_interpreter(make_verdict(MISSING), spec)

    assert verdict.failure is not None
    assert f"interpreter {other} (in the command of trainer)" in verdict.failure.hint
    assert f"The chosen interpreter of the project is {chosen}" in verdict.failure.hint
    assert describe_interpreters(spec, tmp_path) == f"{other} (in the command of trainer)"


@pytest.mark.parametrize("is_copy", [False, True])
def test_advice_recognises_another_name_of_the_chosen_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_copy: bool
) -> None:
    chosen = make_environment(tmp_path / ".venv")
    other = chosen.with_name("python3")
    if is_copy:
        # `python -m venv --copies` writes several copies of the interpreter.
        shutil.copy(chosen, other)
    else:
        other.symlink_to("python")
    monkeypatch.chdir(tmp_path)

    spec = make_spec(command=[".venv/bin/python3", "t.py"])
    verdict = name_interpreter(make_verdict(MISSING), spec)

    assert verdict.failure is not None
    assert f"interpreter {chosen} (of the project's .venv)" in verdict.failure.hint


def test_advice_names_the_python_of_another_environment_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = make_environment(tmp_path / ".venv")
    used = make_environment(tmp_path / "sub" / "other")
    monkeypatch.chdir(tmp_path)

    spec = make_spec(command=["other/bin/python", "t.py"], cwd="sub")
    verdict = name_interpreter(make_verdict(MISSING), spec)

    assert verdict.failure is not None
    assert f"interpreter {used} (in the command of trainer)" in verdict.failure.hint
    assert f"The chosen interpreter of the project is {chosen}" in verdict.failure.hint


@pytest.mark.parametrize(
    ("text", "trainer"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory.", {}),
        (MISSING, {"launcher": "ray_job"}),
    ],
)
def test_other_advice_stays_unchanged(text: str, trainer: dict[str, object]) -> None:
    verdict = make_verdict(text)

    assert name_interpreter(verdict, make_spec(**trainer)) == verdict
