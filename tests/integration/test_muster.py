"""The program `muster` from a wheel, in its own virtual environment.

The tests run it in a project that is not Muster's, on a machine without a Prefect server.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.pseudo_terminal import PseudoTerminal
from tests.support.wheel import run_each

SCRIPT = """
import json, os, sys
print("python", sys.executable, flush=True)
print("argv", sys.argv[1:], flush=True)
print("PYTHONPATH", os.environ["PYTHONPATH"], flush=True)
"""
FLEET = """
name: fleet
workload: grpo
gang: {nodes: 1, gpus_per_node: 2}
components:
  rollout: {backend: sglang, model: some/model, engines: 2}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shell:
    """A user's terminal: the path of `muster`, the working directory and the environment."""

    program: Path
    #: Working directory: a user's project. Some of its packages have the same names as packages of
    #: Muster.
    project: Path
    home: Path

    @property
    def env(self) -> dict[str, str]:
        environment = {
            key: text for key, text in os.environ.items() if not key.startswith("PREFECT_")
        }
        return {
            **environment,
            "MUSTER_HOME": str(self.home),
            "PREFECT_HOME": str(self.home / "prefect"),
        }

    def run_muster(
        self, *arguments: str, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `muster` with the arguments, and return its exit code and output.

        PYTHONPATH contains the working directory, where some packages have the same names as
        packages of Muster. `muster` must still import its own packages.
        """
        return subprocess.run(
            (self.program, *arguments),
            cwd=cwd or self.project,
            env={**self.env, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            timeout=100,
        )

    def on_terminal(self, *arguments: str, columns: int, **environ: str) -> PseudoTerminal:
        """Run `muster` on a pseudo-terminal with this number of columns; return the terminal."""
        terminal = PseudoTerminal(columns=columns)
        process = subprocess.Popen(
            (self.program, *arguments),
            cwd=self.project,
            env={**self.env, "TERM": "xterm-256color", **environ},
            start_new_session=True,
            **terminal.as_stdio(),
        )
        terminal.close_device()
        assert process.wait(100) == 0, terminal.text()
        terminal.wait_until_read()
        return terminal


@pytest.fixture(scope="module")
def shell(muster: Path, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """Return a terminal in a project with a spec from `muster init` and one completed run."""
    project = tmp_path_factory.mktemp("My Project") / "sub"
    project.mkdir()
    (project.parent / "pyproject.toml").touch()
    (project / "train.py").write_text(SCRIPT)
    (project / "fleet.yaml").write_text(FLEET)
    for name in ("tasks", "flows", "deployments"):
        (project.parent / name).mkdir()
        (project.parent / name / "__init__.py").write_text("raise SystemExit('not Muster')")
        (project / f"{name}.py").write_text("raise SystemExit('not Muster')")
    shell = Shell(program=muster, project=project, home=tmp_path_factory.mktemp("home"))
    init_result = shell.run_muster("init")
    assert init_result.returncode == 0, init_result.stderr
    train_result = shell.run_muster("train", "muster.yaml", "--set", "name=mine")
    assert train_result.returncode == 0, train_result.stdout + train_result.stderr
    assert f"project {project.parent}, python " in train_result.stdout
    return shell


@pytest.mark.slow
def test_commands_read_the_records_without_a_server(shell: Shell, tmp_path: Path) -> None:
    arguments = [
        ("ls", "--json"),
        ("ls",),
        ("show", "mine"),
        ("show", "--json"),
        ("why",),
        ("logs", "latest", "trainer"),
        (),
    ]
    results = run_each(shell.program, arguments, cwd=tmp_path, env=shell.env)
    outputs = {line: output for line, (_, output, _) in zip(arguments, results, strict=True)}
    [run] = json.loads(outputs["ls", "--json"])

    assert re.fullmatch(r"mine-sft-\d{8}-\d{6}-[0-9a-f]+", run["run_id"])
    assert (run["state"], run["attempts"]) == ("completed", 1)
    assert run["run_id"] in outputs["ls",]
    assert run["run_id"] in outputs["show", "mine"]
    assert json.loads(outputs["show", "--json"])["flow_run_id"] == run["flow_run_id"]
    assert "completed" in outputs["why",]
    assert "argv []\n" in outputs["logs", "latest", "trainer"]
    assert "PYTHONPATH .\n" in outputs["logs", "latest", "trainer"]
    assert "Failed last: none" in outputs[()]


#: For each command: the arguments of `muster`, the expected exit code, and a part of the expected
#: output.
VERBS = [
    (("trian", "muster.yaml"), 2, "did you mean `train`?"),
    (("train",), 2, "SPEC"),
    (("train", "no.yaml"), 2, "No such file or directory"),
    (("init",), 1, "--force"),
    (("show", "nothing"), 2, "muster ls"),
    (("logs", "mine", "api"), 2, "trainer"),
    (("cancel", "mine"), 2, "has ended"),
    (("submit", "muster.yaml"), 1, "muster up"),
    (("deploy", "muster.yaml"), 1, "muster up"),
    (("queue",), 1, "muster up"),
    (("pipeline", "no.yaml"), 2, "No such file or directory"),
    (("preflight", "--address", "127.0.0.1:1"), 2, "is not a URL"),
    (("cleanup", "--address", "http://127.0.0.1:1", "--run-id", "x"), 1, "127.0.0.1:1"),
    (("sweep", "--address", "http://127.0.0.1:1", "--run-id", "x"), 1, "127.0.0.1:1"),
    (("status",), 1, "muster up"),
    (("down",), 0, "No Muster stack"),
    (("reconcile",), 0, "nothing to do"),
    (("prune",), 0, ""),
    (("--version",), 0, "0."),
]


def test_each_command_reports_its_result_or_the_remedy(shell: Shell) -> None:
    argument_lists = [arguments for arguments, _, _ in VERBS]
    results = run_each(shell.program, argument_lists, cwd=shell.project, env=shell.env)

    for (arguments, code, expected_text), (actual_code, output, errors) in zip(
        VERBS, results, strict=True
    ):
        assert (actual_code, expected_text in output + errors) == (code, True), (
            arguments,
            actual_code,
            output,
            errors,
        )
        assert "Traceback" not in errors, (arguments, errors)


def test_plan_lists_the_engines_of_a_fleet(shell: Shell) -> None:
    plan = json.loads(shell.run_muster("plan", "fleet.yaml", "--json").stdout)

    assert len(plan["engines"]) == 2


def test_output_respects_the_terminal_width_and_no_color(shell: Shell) -> None:
    # Add a second log, so that `muster logs` begins each line with the name of a component.
    (attempt,) = shell.home.glob("runs/mine-sft-*/attempt-01")
    (attempt / "api.log").write_text("ready\n")

    plain = shell.on_terminal("ls", columns=50, NO_COLOR="1")
    colored = shell.on_terminal("logs", columns=50)

    assert not re.search(r"\x1b\[[0-9;]*[34][0-7]m", plain.written)
    assert "mine-sft-" in plain.text()
    assert "\x1b[36mapi     | " in colored.written


def test_closed_output_pipe_causes_no_error_message(shell: Shell) -> None:
    done = subprocess.run(
        ["bash", "-c", f"'{shell.program}' --help | head -1"],
        cwd=shell.project,
        env=shell.env,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert (done.stdout.split()[0], done.stderr) == ("Usage:", "")


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_shell_completes_the_names_of_commands(shell: Shell, name: str, tmp_path: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    env = {**shell.env, "HOME": str(tmp_path), "PS1": "READY"}
    install = (shell.program, "--install-completion", "--shell", name)
    subprocess.run(install, env=env, check=True, capture_output=True, timeout=60)
    completion_scripts = {
        "bash": "source ~/.bashrc; COMP_WORDS=(muster qu); COMP_CWORD=1; _muster; "
        "echo ${COMPREPLY[@]}",
        # zsh completes words only on a terminal, so this code runs zsh on a pseudo-terminal. The
        # code sends the Tab key after the prompt has appeared.
        "zsh": "zmodload zsh/zpty; zpty z zsh -f -i; "
        "zpty -w z 'source ~/.zshrc; autoload -U compinit; compinit -u -D; PS1=SET; echo'; "
        "zpty -r z out '*SET*SET*'; zpty -w -n z $'muster que\\t'; zpty -r z out '*queue*'; "
        "print -r -- $out",
    }

    done = subprocess.run(
        [name, "-c", completion_scripts[name]], env=env, capture_output=True, text=True, timeout=60
    )

    assert "queue" in done.stdout, done.stdout + done.stderr
