"""Tests of the search for the Python that runs a command, and for foreign launchers."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

import pytest

from tasks.record.run_json import RunRecord
from tasks.spec.command_python import find_command_python
from tasks.spec.run import RunSpec
from tasks.train.background_work import record_provenance
from tasks.train.interpreters import find_missing_files
from tasks.train.run_secrets import RunSecrets


def write_program(file: Path, text: str = "#!/bin/sh\n") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


def make_environment(folder: Path, *launchers: str) -> Path:
    """Create a Python environment with launchers such as torchrun, and return the folder."""
    python = write_program(folder / "bin" / "python")
    for name in launchers:
        write_program(folder / "bin" / name, f"#!{python}\nimport sys\n")
    return folder


def make_spec(*command: str, **keys: object) -> RunSpec:
    component = {"command": list(command)}
    return RunSpec.model_validate(
        {"name": "a", "workload": "sft", "components": {"trainer": component}, **keys}
    )


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment on the PATH that has torchrun and poetry."""
    environment = make_environment(tmp_path / "other", "torchrun", "accelerate", "poetry")
    monkeypatch.setenv("PATH", f"{environment / 'bin'}:/usr/bin:/bin")
    return environment


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with two scripts, and with a `.venv` that has no launcher such as torchrun."""
    folder = tmp_path / "project"
    make_environment(folder / ".venv")
    for name in ("train.py", "eval.py"):
        (folder / name).touch()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("launcher", "package"), [("torchrun", "torch"), ("accelerate", "accelerate")]
)
def test_launcher_of_another_environment_is_a_fault(
    project: Path, other: Path, launcher: str, package: str
) -> None:
    [fault] = find_missing_files(make_spec(launcher, "train.py"), project)

    assert fault.path == "components.trainer.command.0"
    assert str(fault) == (
        f"components.trainer.command.0: {launcher} would start {other}/bin/{launcher}, which runs "
        f"the training with {other}/bin/python. But the chosen Python is "
        f"{project}/.venv/bin/python (of the project's .venv), whose environment has no "
        f"{launcher} (install {package} in {project}/.venv. If the training uses "
        f"{other}/bin/python, write {other}/bin/{launcher} in place of {launcher})"
    )


@pytest.fixture
def without_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no launcher available on the PATH."""
    write_program(tmp_path / "plain" / "python")
    monkeypatch.setenv("PATH", str(tmp_path / "plain"))


@pytest.mark.usefixtures("without_launchers")
@pytest.mark.parametrize(
    ("launcher", "package"),
    [("torchrun", "torch"), ("accelerate", "accelerate"), ("deepspeed", "deepspeed")],
)
def test_missing_launcher_has_advice_with_its_package_and_the_environment(
    project: Path, launcher: str, package: str
) -> None:
    [fault] = find_missing_files(make_spec(launcher, "train.py"), project)

    assert str(fault) == (
        f"components.trainer.command.0: the program '{launcher}' does not exist or is not "
        f"executable (install {package} in {project}/.venv)"
    )


@pytest.mark.usefixtures("without_launchers")
def test_missing_launcher_is_not_expected_in_the_environment_if_the_spec_sets_the_path(
    project: Path, tmp_path: Path
) -> None:
    spec = make_spec("torchrun", "train.py").model_copy(
        update={"env": {"PATH": str(tmp_path / "plain")}}
    )

    [fault] = find_missing_files(spec, project)

    assert fault.remedy == "install the program"


def test_launcher_of_another_environment_is_a_fault_in_an_evaluation(
    project: Path, other: Path
) -> None:
    evaluation = {"command": ["torchrun", "eval.py"]}
    trainer = {"command": ["python"], "checkpoints": "${run.dir}/checkpoints"}
    spec = make_spec(evals={"a": evaluation}, components={"trainer": trainer})

    assert [fault.path for fault in find_missing_files(spec, project)] == ["evals.a.command.0"]


@pytest.mark.parametrize(
    "command",
    [
        ["{other}/bin/torchrun", "train.py"],  # the user has chosen the environment
        ["python"],
        ["poetry", "run", "python", "train.py"],  # poetry chooses the project's environment
    ],
)
def test_other_commands_are_accepted(project: Path, other: Path, command: list[str]) -> None:
    words = [word.format(other=other) for word in command]

    assert find_missing_files(make_spec(*words), project) == ()


def test_launcher_of_the_chosen_environment_is_accepted(project: Path, other: Path) -> None:
    make_environment(project / ".venv", "torchrun")

    assert find_missing_files(make_spec("torchrun", "train.py"), project) == ()


def test_launcher_is_accepted_if_the_spec_chooses_its_environment(
    project: Path, other: Path
) -> None:
    spec = make_spec("torchrun", "train.py")

    for env in ({"VIRTUAL_ENV": str(other)}, {"PATH": f"{other}/bin"}):
        assert find_missing_files(spec.model_copy(update={"env": env}), project) == ()


def test_launcher_is_accepted_if_no_environment_is_chosen(
    tmp_path: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)

    assert find_missing_files(make_spec("torchrun", "train.py"), tmp_path) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#!{python}\n", "{python}"),
        ("#! {python} -sE\n", "{python}"),
        ("#!/usr/bin/env python\n", "{python}"),
        ("#!/usr/bin/env -S python -u\n", "{python}"),
        # pip writes this form for long paths and for paths with spaces
        ("#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n", "{python}"),
        ("#!/bin/sh\n'''exec' {python} \"$0\" \"$@\"\n' '''\n", "{python}"),
        ("#!/bin/sh\nexec python train.py\n", None),
        ("\x7fELF", None),
        ("", None),
    ],
)
def test_python_of_a_script_is_in_its_first_lines(
    tmp_path: Path, text: str, expected: str | None
) -> None:
    python = write_program(tmp_path / ("a b" if '"{' in text else "ab") / "python")
    write_program(tmp_path / "bin" / "program", text.format(python=python))
    path = os.pathsep.join((str(tmp_path / "bin"), str(python.parent)))
    named = None if expected is None else Path(expected.format(python=python))

    assert find_command_python(["program"], path, tmp_path) == named


def test_record_names_the_python_that_runs_the_training(
    project: Path, other: Path, muster_home: Path
) -> None:
    package = other / "lib/python3.11/site-packages/torch-2.13.0.dist-info"
    package.mkdir(parents=True)
    spec = make_spec(f"{other}/bin/torchrun", "train.py")
    record = RunRecord(
        project / "run.json", run_id="a-sft-20260101-000000-aaaa91c2", flow_run_id=str(uuid4())
    )
    record.begin_attempt(1)

    record_provenance(record, None, spec, project, RunSecrets(spec))

    provenance = record.content.provenance or {}
    assert str(provenance["python"]).split()[0] == f"{other}/bin/python"
    assert provenance["packages"] == {"torch": "2.13.0"}
