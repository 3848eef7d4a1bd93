"""Tests of the report on faulty specs before the import of Prefect."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tasks.command import VERBS
from tasks.show.early_check import SpecArguments, find_spec_arguments, report_spec_faults
from tests.support.documents import ROOT

pytestmark = pytest.mark.usefixtures("muster_home")

#: Packages that the check of a spec must not import, because their import takes longer than the
#: whole check.
SLOW_PACKAGES = ("prefect", "ray", "fastapi", "sqlalchemy", "plotext")
FAULTY = "name: trial\nworkload: sft\ncomponents: {trainer: {command: python train.py}}\n"
#: A valid spec whose program does not exist.
WITHOUT_PROGRAM = (
    "name: trial\nworkload: sft\ncomponents: {trainer: {command: [no-such-program]}}\n"
)
PIPELINE = "name: trial\nstages: 3\n"
#: Start of a program that prints the imported slow packages at its end.
PRINT_SLOW_PACKAGES = (
    "import atexit, sys\n"
    "def print_slow_packages():\n"
    f"    print([name for name in {SLOW_PACKAGES} if name in sys.modules], flush=True)\n"
    "atexit.register(print_slow_packages)\n"
)


@pytest.mark.parametrize("name", ["-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"])
def test_standard_input_is_not_read_before_the_command_reads_the_spec_from_it(
    tmp_path: Path, name: str
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(FAULTY)
    program = (
        "import sys\n"
        "from tasks.show.early_check import find_spec_arguments\n"
        "print(find_spec_arguments(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, name]

    with spec.open() as spec_file:
        done = subprocess.run(command, stdin=spec_file, capture_output=True, text=True, cwd=ROOT)

    assert done.stdout == "None\n", done.stderr


@pytest.mark.parametrize("name", ["-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"])
def test_valid_spec_from_standard_input_is_read_once(tmp_path: Path, name: str) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("name: trial\nworkload: sft\ncomponents: {trainer: {command: [python, -V]}}\n")
    program = "import sys\nfrom tasks.command import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "check", name]

    with spec.open() as spec_file:
        done = subprocess.run(command, stdin=spec_file, capture_output=True, text=True, cwd=ROOT)

    assert done.returncode == 0, done.stderr
    assert "The spec of trial is valid." in done.stdout


@pytest.mark.parametrize(
    ("verb", "text", "fault"),
    [
        ("check", FAULTY, "components.trainer.command: must be a list"),
        ("check", PIPELINE, "stages: must be a list"),
        ("train", FAULTY, "components.trainer.command: must be a list"),
        ("submit", FAULTY, "components.trainer.command: must be a list"),
        ("deploy", FAULTY, "components.trainer.command: must be a list"),
        ("pipeline", PIPELINE, "stages: must be a list"),
        ("train", WITHOUT_PROGRAM, "the program 'no-such-program' does not exist"),
    ],
)
def test_fault_of_a_spec_is_reported_without_slow_imports(
    tmp_path: Path, verb: str, text: str, fault: str
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(text)
    program = f"{PRINT_SLOW_PACKAGES}from tasks.command import main\nsys.exit(main(sys.argv[1:]))"

    done = subprocess.run(
        [sys.executable, "-c", program, verb, spec], capture_output=True, text=True, cwd=ROOT
    )

    assert (done.returncode, done.stdout) == (2, "[]\n"), done.stderr
    assert fault in done.stderr
    assert done.stderr.endswith("Nothing was started.\n")


def test_module_of_the_training_flow_reports_faults_without_slow_imports(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(PRINT_SLOW_PACKAGES)
    spec = tmp_path / "spec.yaml"
    spec.write_text(FAULTY)

    done = subprocess.run(
        [sys.executable, "-m", "flows.train", spec],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )

    assert (done.returncode, done.stdout) == (2, "[]\n"), done.stderr
    assert "components.trainer.command: must be a list" in done.stderr


@pytest.mark.parametrize(
    ("words", "path", "overrides"),
    [
        (["spec.yaml"], "spec.yaml", ()),
        (["missing.yaml"], "missing.yaml", ()),
        (["--set", "a=1", "spec.yaml", "--set=b=2"], "spec.yaml", ("a=1", "b=2")),
        (["spec.yaml", "--queue", "idle"], "spec.yaml", ()),
        (["--queue=idle", "spec.yaml"], "spec.yaml", ()),
        (["--queue", "idle", "--set", "a=1", "spec.yaml"], "spec.yaml", ("a=1",)),
        # the argument SPEC is required, so `spec.yaml` is SPEC and not the value of `--watch`
        (["--watch", "spec.yaml"], "spec.yaml", ()),
    ],
)
def test_spec_is_read_from_the_arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    path: str,
    overrides: tuple[str, ...],
) -> None:
    (tmp_path / "spec.yaml").touch()
    monkeypatch.chdir(tmp_path)

    arguments = find_spec_arguments(words)

    assert arguments == SpecArguments(path=Path(path), overrides=overrides)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--resume", "some-pipeline"],
        ["spec.yaml", "--help"],
        ["spec.yaml", "other.yaml"],
        # standard input and a pipe can be read only once, so the early check must not read these
        # inputs
        ["-"],
        ["pipe"],
    ],
)
def test_uncertain_arguments_are_left_to_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    (tmp_path / "spec.yaml").touch()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)

    assert find_spec_arguments(words) is None


@pytest.mark.parametrize("path", sorted((ROOT / "deployments" / "pipelines").glob("*.yaml")))
def test_early_check_of_muster_check_accepts_the_example_pipelines(path: Path) -> None:
    check = next(verb for verbs in VERBS.values() for verb in verbs if verb.name == "check")
    module, _, function = check.checks[0].partition(":")
    load = getattr(import_module(module), function)

    assert report_spec_faults(load, [str(path)]) == 0
