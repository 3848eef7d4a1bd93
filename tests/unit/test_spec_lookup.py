"""Tests of the check that the files and programs named in a spec exist."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.spec.errors import Fault
from tasks.spec.programs import build_component_path, find_missing_programs
from tasks.spec.run import RunSpec

BINARIES = (
    "python",
    "python3.11",
    "sh",
    "bash",
    "node",
    "torchrun",
    "accelerate",
    "env",
    "docker",
    "nohup",
    "run-api",
)
#: Files of two packages of the project. `plain` has no __init__.py.
PACKAGE = ("lib/__init__.py", "lib/train.py", "lib/jobs/eval.py", "lib/fast.so", "plain/train.py")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with a few files, next to a directory of programs."""
    project = tmp_path / "project"
    for name in (
        "train.py",
        "conf/env.yaml",
        "sub/job.py",
        "run.sh",
        "app.js",
        "data/x.bin",
        *PACKAGE,
    ):
        file = project / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    (project / "run.sh").chmod(0o755)
    (tmp_path / "bin").mkdir()
    for name in (*BINARIES, "on-the-path.sh"):
        (tmp_path / "bin" / name).write_text("")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "bin" / "readable-only").write_text("")
    return project


def faults_of(root: Path, component: dict[str, Any], **keys: object) -> list[Fault]:
    """Return the faults of a component `x` in a project whose programs are in `../bin`."""
    spec = RunSpec.model_validate(
        {"name": "a", "workload": "grpo", "components": {"x": component}, **keys}
    )
    return list(find_missing_programs(spec, root=root, path=f"/nowhere:{root.parent / 'bin'}"))


@pytest.mark.parametrize(
    "command",
    [
        ["run-api", "--port", "1"],
        ["./run.sh"],
        ["sub/../run.sh"],
        ["python", "train.py", "--config", "conf/env.yaml"],
        ["python", "-u", "-X", "dev", "-Wignore", "train.py"],
        ["python3.11", "-uB", "sub"],  # a directory may contain a __main__.py
        ["python", "-m", "no.such.module"],  # a library may have this module
        ["python", "-m", "lib.train"],
        ["python", "-m", "lib.jobs.eval"],
        ["python", "-m", "lib.jobs.none"],  # lib/jobs has no __init__.py
        ["python", "-m", "lib.fast"],
        ["python", "-m", "lib"],
        ["python", "-m", "plain.none"],  # a library named `plain` may have this module
        ["python", "-m", "trian"],
        ["python", "-Im", "lib.none"],  # Python does not search in the working directory
        ["python", "-m", "${run.dir}"],
        ["python", "-m"],
        ["python", "-m", "torch.distributed.run", "--standalone", "train.py"],
        ["torchrun", "-m", "lib.train"],
        ["torchrun", "--module", "no.such.module"],
        ["torchrun", "--standalone"],
        ["torchrun", "--no-python", "none.py"],  # `none.py` is a program on the PATH
        ["torchrun", "--unknown-option", "none.py"],  # `none.py` may be the value of the option
        ["torchrun", "${run.dir}", "none.py"],
        ["python", "train.py", "--config=${run.dir}/none.yaml"],
        ["accelerate", "launch", "--config_file=conf/env.yaml", "train.py"],
        ["accelerate", "config", "none.py"],
        ["python", "-um", "no.such.module", "x.py"],
        ["python", "-c", "open('none.py')", "none.py", "--config", "none.yaml"],
        ["python", "-", "none.py"],
        ["python", "--unknown-option", "none.py"],  # `none.py` may be the value of the option
        ["python"],
        ["python", "${run.dir}/none.py", "--config", "${attempt.dir}/none.yaml"],
        ["python", "${run.dir}", "none.py"],
        ["python", "${run.dir}", "--config", "none.yaml"],  # ${run.dir} may stand for the option -c
        ["${attempt.dir}/program", "none.py"],
        ["sh", "-c", "none.sh --config none.yaml", "none.sh"],
        ["bash", "-euc", "none"],
        ["bash", "-eo", "pipefail", "run.sh"],
        ["bash", "+x", "none.sh"],  # `none.sh` may be the value of the option
        ["bash", "on-the-path.sh"],  # bash also searches PATH
        ["sh", "run.sh", "--config", "none.yaml"],  # the script may change its directory first
        ["node", "app.js"],
        ["torchrun", "--standalone", "--nproc_per_node=8", "--rdzv-id", "none.py", "train.py"],
        # Muster does not know which arguments of these programs are files, so no file is checked
        ["env", "--chdir", "/nowhere", "python", "none.py", "--config", "none.yaml"],
        ["run-api", "--config", "none.yaml"],
        ["python", "-m", "module", "--config", "none.yaml"],
        ["python", "train.py", "--config", "none"],  # `none` is not a file name
        ["python", "train.py", "--config", "none.bin"],
        ["python", "train.py", "--config", "http://host/none.yaml"],
        ["python", "train.py", "--config", "a.yaml,b.yaml"],
        ["python", "train.py", "--config", "~/none.yaml"],
        ["python", "train.py", "--config"],
        # the value of this option of Hydra is not a path
        [
            "python",
            "train.py",
            "--config-name",
            "none.yaml",
        ],
        ["python", "train.py", "--output", "none.yaml"],
    ],
)
def test_commands_without_a_certain_fault_are_accepted(root: Path, command: list[str]) -> None:
    assert faults_of(root, {"command": command}) == []


@pytest.mark.parametrize(
    ("command", "item", "problem", "remedy"),
    [
        (["run-apy"], 0, "the program 'run-apy' does not exist", "did you mean `run-api`?"),
        (
            ["zzz"],
            0,
            "'zzz' does not exist or is not executable",
            "install the program",
        ),
        (
            ["train.py"],
            0,
            "'train.py' does not exist or is not executable",
            "write ./train.py, and make the file executable with `chmod +x ",
        ),
        (
            ["python train.py"],
            0,
            "'python train.py' does not exist or is not executable",
            "write each argument as a separate list item",
        ),
        (["readable-only"], 0, "'readable-only' does not exist or is not executable", ""),
        (["./train.py"], 0, "'./train.py' does not exist or is not executable", "chmod +x"),
        (["./sub"], 0, "'./sub' does not exist or is not executable", ""),
        (
            ["./ruun.sh"],
            0,
            "'./ruun.sh' does not exist or is not executable",
            "did you mean `run.sh`?",
        ),
        (
            ["/nowhere/zzz"],
            0,
            "'/nowhere/zzz' does not exist or is not executable",
            "install the program",
        ),
        (["python", "tran.py"], 1, "there is no such script: tran.py", "did you mean `train.py`?"),
        (
            ["python", "zzz/a.py"],
            1,
            "there is no such script: zzz/a.py",
            "Muster looked in the folder ",
        ),
        (["python", "-u", "none.py"], 2, "there is no such script: none.py", ""),
        (
            ["torchrun", "tran.py"],
            1,
            "there is no such script: tran.py",
            "did you mean `train.py`?",
        ),
        (["torchrun", "--standalone", "-t", "3", "--nproc_per_node=2", "none.py"], 5, "script", ""),
        (["torchrun", "--nproc-per-node", "${gang.nodes}", "none.py"], 3, "script", ""),
        (["torchrun", "--nproc-per-node=${gang.nodes}", "none.py"], 2, "script", ""),
        (["torchrun", "train.py", "--config", "no.yaml"], 3, "there is no such config file", ""),
        (["python", "-m", "torch.distributed.run", "none.py"], 3, "no such script: none.py", ""),
        (["accelerate", "launch", "--num_processes", "2", "none.py"], 4, "no such script", ""),
        (
            ["python", "-m", "lib.trian", "--config", "none.yaml"],
            2,
            "there is no such module: lib.trian",
            "did you mean `lib.train`?",
        ),
        (["python", "-um", "lib.zzz"], 2, "there is no such module: lib.zzz", "/lib"),
        (["python", "-m", "lib.zzz.eval"], 2, "there is no such module: lib.zzz", "/lib"),
        (["torchrun", "--standalone", "-m", "lib.trian"], 3, "no such module: lib.trian", ""),
        (["sh", "-e", "none.sh"], 2, "there is no such script: none.sh", ""),
        # the script is a path with a slash, so it is not searched for on PATH
        (
            ["sh", "./on-the-path.sh"],
            1,
            "there is no such script",
            "",
        ),
        (["python", "train.py", "--config", "conf/evn.yaml"], 3, "config file", "`env.yaml`"),
        (["python", "train.py", "--config=none.yaml"], 2, "no such config file: none.yaml", ""),
        (["python", "train.py", "--env-file", ".env"], 3, "no such config file: .env", ""),
        (["python", "train.py", "--config_file", "none.toml"], 3, "no such config file", ""),
        (["python", "-E", "train.py", "--config", "no.yaml"], 4, "there is no such config", ""),
        # `$${` stands for a literal `${`, so the script has the name `${x}.py`
        (
            ["python", "$${x}.py"],
            1,
            "there is no such script: ${x}.py",
            "",
        ),
    ],
)
def test_missing_file_is_reported_at_its_item_of_the_command(
    root: Path, command: list[str], item: int, problem: str, remedy: str
) -> None:
    [fault] = faults_of(root, {"command": command})

    assert fault.path == f"components.x.command.{item}"
    assert problem in fault.problem
    assert remedy in fault.remedy


def test_module_of_a_package_that_extends_its_search_path_is_not_checked(root: Path) -> None:
    (root / "lib" / "__init__.py").write_text("__path__ = extend_path(__path__, __name__)\n")

    assert faults_of(root, {"command": ["python", "-m", "lib.none"]}) == []


def test_faults_have_the_order_of_the_file(root: Path) -> None:
    spec = RunSpec.model_validate(
        {
            "name": "a",
            "workload": "grpo",
            "components": {
                "b": {"command": ["none"]},
                "c": {"command": ["python", "train.py", "--config", "no.yaml"]},
                "a": {"command": ["python", "none.py"], "cwd": "none"},
            },
        }
    )

    faults = find_missing_programs(spec, root=root, path=str(root.parent / "bin"))

    # If a directory is missing, the missing files in this directory are not reported separately.
    assert [fault.path for fault in faults] == [
        "components.b.command.0",
        "components.c.command.3",
        "components.a.cwd",
    ]


@pytest.mark.parametrize(
    ("cwd", "problem", "remedy"),
    [
        ("subb", "there is no such directory: subb", "did you mean `sub`?"),
        ("train.py", "must be a directory, found a file: train.py", ""),
        ("none/none", "there is no such directory", "starts at the project's root"),
    ],
)
def test_a_missing_directory_is_a_fault(root: Path, cwd: str, problem: str, remedy: str) -> None:
    [of_run] = faults_of(root, {"command": ["python", "train.py"]}, cwd=cwd)
    [of_component] = faults_of(root, {"command": ["python", "train.py"], "cwd": cwd})

    assert (of_run.path, of_component.path) == ("cwd", "components.x.cwd")
    assert problem in of_run.problem and remedy in of_run.remedy


@pytest.mark.parametrize(
    ("run", "component", "script"),
    [
        (".", None, "sub/job.py"),
        ("sub", None, "job.py"),  # relative to the directory of the run
        (".", "sub", "job.py"),  # relative to the directory of the component
        # the component's directory is relative to the project's root, not to the run's directory
        ("data", "sub", "job.py"),
        ("${run.dir}", None, "anything.py"),  # the directory does not exist yet
        (".", "${attempt.dir}", "./anything.py"),
    ],
)
def test_scripts_are_searched_in_the_directory_of_the_component(
    root: Path, run: str, component: str | None, script: str
) -> None:
    found = faults_of(root, {"command": ["python", script], "cwd": component}, cwd=run)

    assert found == []


def test_path_variable_of_a_component_is_used(root: Path) -> None:
    command = {"command": ["train.py"]}
    (root / "train.py").chmod(0o755)

    assert faults_of(root, {**command, "env": {"PATH": str(root)}}) == []
    # A relative PATH is relative to the directory of the component.
    assert faults_of(root, command, env={"PATH": "."}) == []
    # `${run.dir}` is unknown before the start of the run, so the program is not searched for.
    assert faults_of(root, command, env={"PATH": "${run.dir}/bin"}) == []
    assert len(faults_of(root, {"command": ["python"], "env": {"PATH": "/nowhere"}})) == 1


@pytest.mark.parametrize("cwd", ["missing", "${run.dir}"])
def test_program_is_checked_although_the_working_directory_is_unknown(root: Path, cwd: str) -> None:
    faults = faults_of(root, {"command": ["no-such-program"], "cwd": cwd})

    assert "components.x.command.0" in [fault.path for fault in faults]


@pytest.mark.parametrize("program", ["./run.sh", "run-api", "${run.dir}/program"])
def test_relative_program_is_not_checked_without_a_working_directory(
    root: Path, program: str
) -> None:
    faults = faults_of(root, {"command": [program], "cwd": "missing"})

    assert [fault.path for fault in faults] == ["components.x.cwd"]


def test_commands_of_ray_jobs_are_not_checked(root: Path) -> None:
    component = {"launcher": "ray_job", "command": ["none", "none.py"]}

    assert faults_of(root, component, ray={"address": "http://127.0.0.1:8265"}) == []


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/usr/bin:/bin", "/venv/bin:/usr/bin:/bin"),
        ("/venv/bin:/usr/bin", "/venv/bin:/usr/bin"),  # /venv/bin already comes first
        ("/usr/bin:/venv/bin", "/venv/bin:/usr/bin:/venv/bin"),  # /venv/bin must come first
        ("", "/venv/bin"),
    ],
)
def test_programs_of_the_virtual_environment_come_first(path: str, expected: str) -> None:
    assert build_component_path("/venv/bin/python", path) == expected


def test_programs_beside_the_interpreter_are_found() -> None:
    path = build_component_path(sys.executable, os.environ.get("PATH", ""))
    program = Path(sys.executable).name

    spec = RunSpec.model_validate(
        {"name": "a", "workload": "grpo", "components": {"x": {"command": [program]}}}
    )

    assert find_missing_programs(spec, root=Path.cwd(), path=path) == ()


@pytest.mark.parametrize(
    ("placement", "paths"),
    [
        ("local", ["components.rollout.command.0"]),
        # the program of a Ray job is not checked, because it must exist on the nodes of the cluster
        ("ray", []),
    ],
)
def test_command_of_a_local_fleet_is_checked(root: Path, placement: str, paths: list[str]) -> None:
    fleet = {
        "backend": "command",
        "command": ["no-server", "--port", "${server.port}"],
        "placement": placement,
    }
    spec = RunSpec.model_validate(
        {
            "name": "a",
            "workload": "grpo",
            "ray": {"address": "http://127.0.0.1:8265"},
            "components": {"rollout": fleet},
        }
    )

    faults = find_missing_programs(spec, root=root, path=str(root.parent / "bin"))

    assert [fault.path for fault in faults] == paths
