"""The program `muster` of a wheel, in a venv of its own, from a project that is not Muster's, on a
machine without a server of one's own."""

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
from tests.support.wheel import each

SCRIPT = """
import json, os, sys
print("python", sys.executable, flush=True)
print("argv", sys.argv[1:], flush=True)
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
    """Somebody's terminal."""

    program: Path
    #: Where he is: a project with a script, and with folders of our packages' names.
    project: Path
    home: Path

    @property
    def env(self) -> dict[str, str]:
        mine = {key: text for key, text in os.environ.items() if not key.startswith("PREFECT_")}
        return {**mine, "MUSTER_HOME": str(self.home), "PREFECT_HOME": str(self.home / "prefect")}

    def muster(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (self.program, *words),
            cwd=cwd or self.project,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=100,
        )

    def on_terminal(self, *words: str, columns: int, **environ: str) -> PseudoTerminal:
        terminal = PseudoTerminal(columns=columns)
        process = subprocess.Popen(
            (self.program, *words),
            cwd=self.project,
            env={**self.env, "TERM": "xterm-256color", **environ},
            start_new_session=True,
            **terminal.as_stdio(),
        )
        terminal.started()
        assert process.wait(100) == 0, terminal.text()
        terminal.until_read()
        return terminal


@pytest.fixture(scope="module")
def shell(muster: Path, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """Where a run was trained already, from its draft on."""
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
    drafted = shell.muster("init")
    assert drafted.returncode == 0, drafted.stderr
    done = shell.muster("train", "muster.yaml", "--set", "name=mine")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"project {project.parent}, python " in done.stdout
    return shell


@pytest.mark.slow
def test_the_records_of_this_machine_answer(shell: Shell, tmp_path: Path) -> None:
    words = [
        *(("ls", "--json"), ("ls",), ("show", "mine"), ("show", "--json"), ("why",)),
        *(("logs", "latest", "trainer"), ()),
    ]
    found = each(shell.program, words, cwd=tmp_path, env=shell.env)
    said = {line: out for line, (_, out, _) in zip(words, found, strict=True)}
    [run] = json.loads(said["ls", "--json"])

    assert re.fullmatch(r"mine-sft-\d{8}-\d{6}-[0-9a-f]+", run["run_id"])
    assert (run["state"], run["attempts"]) == ("completed", 1)
    assert run["run_id"] in said["ls",]
    assert run["run_id"] in said["show", "mine"]
    assert json.loads(said["show", "--json"])["flow_run_id"] == run["flow_run_id"]
    assert "completed" in said["why",]
    assert "argv []\n" in said["logs", "latest", "trainer"]
    assert "Failed last: none" in said[()]


#: Words, the exit code, and of what is said.
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
    (("preflight", "--address", "127.0.0.1:1"), 2, "the dashboard's URL"),
    (("sweep", "--address", "http://127.0.0.1:1", "--run-id", "x"), 1, "127.0.0.1:1"),
    (("status",), 1, "muster up"),
    (("down",), 0, "No stack"),
    (("reconcile",), 0, "nothing to do"),
    (("prune",), 0, ""),
    (("--version",), 0, "0."),
]


def test_each_verb_says_what_it_did_or_what_to_do(shell: Shell) -> None:
    lines = [words for words, _, _ in VERBS]
    found = each(shell.program, lines, cwd=shell.project, env=shell.env)

    for (words, code, said), (exited, out, err) in zip(VERBS, found, strict=True):
        assert (exited, said in out + err) == (code, True), (words, exited, out, err)
        assert "Traceback" not in err, (words, err)


def test_a_fleet_is_planned(shell: Shell) -> None:
    plan = json.loads(shell.muster("plan", "fleet.yaml", "--json").stdout)

    assert len(plan["engines"]) == 2


def test_a_narrow_terminal_is_respected_and_no_color(shell: Shell) -> None:
    plain = shell.on_terminal("ls", columns=50, NO_COLOR="1")
    colored = shell.on_terminal("logs", columns=50)

    assert not re.search(r"\x1b\[[0-9;]*[34][0-7]m", plain.written)
    assert "mine-sft-" in plain.text()
    assert "\x1b[36mtrainer | " in colored.written


def test_a_reader_that_goes_is_no_fault(shell: Shell) -> None:
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
def test_the_shell_completes_verbs(shell: Shell, name: str, tmp_path: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    env = {**shell.env, "HOME": str(tmp_path), "PS1": "READY"}
    install = (shell.program, "--install-completion", "--shell", name)
    subprocess.run(install, env=env, check=True, capture_output=True, timeout=60)
    asked = {
        "bash": "source ~/.bashrc; COMP_WORDS=(muster qu); COMP_CWORD=1; _muster; "
        "echo ${COMPREPLY[@]}",
        # A terminal of its own, on which the key is pressed once its prompt is there.
        "zsh": "zmodload zsh/zpty; zpty z zsh -f -i; "
        "zpty -w z 'source ~/.zshrc; autoload -U compinit; compinit -u -D; PS1=SET; echo'; "
        "zpty -r z out '*SET*SET*'; zpty -w -n z $'muster que\\t'; zpty -r z out '*queue*'; "
        "print -r -- $out",
    }

    done = subprocess.run(
        [name, "-c", asked[name]], env=env, capture_output=True, text=True, timeout=60
    )

    assert "queue" in done.stdout, done.stdout + done.stderr
