"""Each command explains its purpose, options, defaults and exit codes with `--help`."""

from __future__ import annotations

import os
import re
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from deployments import worker
from tasks.command import NAMES, main
from tasks.queue.command import app as queue
from tasks.train.secret_command import app as secret

ROOT = Path(__file__).parents[2]
#: Help texts of `muster queue` and `muster secret`. The texts are saved when this module is
#: imported, because `test_list_of_verbs_explains_each_verb` overwrites both texts.
HELP_OF_QUEUE = queue.help
HELP_OF_SECRET = secret.help
#: Programs that people start with `python -m`. A separate test covers `python -m
#: deployments.worker`, whose options come from Prefect.
COMMANDS = (
    "flows.train",
    "flows.pipeline",
    "tasks.rollout plan",
    "deployments.stack.setup",
    "deployments.upkeep",
    "deployments.cluster_check",
    "deployments.automations.apply",
    "tests.documents",
    "tests.peers.verl.check",
    "tests.peers.backends.check",
    "tests.benchmarks",
    "tests.benchmarks.queue",
    "tests.faults.soak",
    "tests.faults.gang_storm",
    "tests.faults.pipeline_kills",
    "tests.faults.ray_kills",
    "tests.faults.fleet_chaos",
    "tests.faults.gateway_fuzz",
    "tests.faults.llm",
)
#: Subcommands of `muster queue` and `muster secret`. The help of `queue` and `secret` lists the
#: exit codes of these subcommands.
SUBCOMMANDS = (
    *("queue drain", "queue undrain", "queue set", "queue unset"),
    *("secret set", "secret ls"),
)
#: Programs that only other programs of the project start.
INTERNAL = {
    "flows",
    "tasks.rollout.process",
    "tasks.server.sqlite_server",
    "tasks.train.group_mlflow_runs",
    "tasks.ray.node_agent",
    "tasks.processes.guardian",
    "tasks.processes.own_modules",
    "tasks.ray.wrapper",
    "tasks.rollout.lmdeploy_replica",
    "deployments.prefect_worker",
    "deployments.stack.supervisor",
    "deployments.stack.ray_node",
    "deployments.stack.runs",
    "tests.peers.verl.compose",
    "tests.faults.chaos_server",
    "tests.faults.llm_trainer",
    "tests.benchmarks.part",
    "tests.benchmarks.gateway_process",
    "tests.benchmarks.capacity",
    "tests.benchmarks.nodes",
    "tests.benchmarks.watched",
    "tests.benchmarks.stubborn",
    "tests.benchmarks.sglang_watchdog",
    "tests.benchmarks.sweep_point",
    "tests.benchmarks.sweep_tune",
}


def run(command: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """Run `python -m COMMAND ARGUMENT...` in this process and return its exit code.

    The arguments must make the program exit at once, as `--help` does.
    """
    module, *words = command.split()
    monkeypatch.setattr(sys, "argv", [module, *words, *arguments])
    monkeypatch.setenv("COLUMNS", "100")
    with warnings.catch_warnings():
        # Python warns if another test has already imported the module.
        warnings.simplefilter("ignore", RuntimeWarning)
        # cyclopts warns if it reads sys.argv in a test.
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(SystemExit) as exit_info:
            runpy.run_module(module, run_name="__main__")
    return exit_info.value.code


@pytest.mark.parametrize("command", COMMANDS)
def test_program_help_explains_purpose_options_and_exit_codes(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(command, "--help", monkeypatch=monkeypatch)

    output = capsys.readouterr().out
    assert code == 0
    assert output.lower().startswith(f"usage: python -m {command.split()[0]}")
    assert re.search(r"\bExit: 0 ", output), output
    # A sentence between the usage line and the arguments describes the purpose of the program.
    assert re.search(r"\n\n[A-Z][^\n]{20,}", output), output
    undocumented_options = re.findall(
        r"^  (--?[\w-]+(?: [A-Z]\w*)?)\n(?!  {6,})", output, re.MULTILINE
    )
    assert not undocumented_options, output


@pytest.mark.parametrize("verb", [*NAMES, *SUBCOMMANDS])
def test_verb_help_explains_purpose_options_and_exit_codes(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setattr(queue, "help", HELP_OF_QUEUE)
    monkeypatch.setattr(secret, "help", HELP_OF_SECRET)

    code = main([*verb.split(), "--help"])

    output = capsys.readouterr().out
    assert code == 0
    assert output.startswith(f"Usage: muster {verb}")
    assert verb in SUBCOMMANDS or re.search(r"\bExit: 0 ", output), output
    # A sentence between the usage line and the arguments describes the purpose of the command.
    assert re.search(r"\n\n[A-Z][^\n]{20,}", output), output
    row = r"^│ (?:[* ] {2})?(--[\w-]+|[A-Z][A-Z=]+)(?: [A-Z.]+)? *(?:\[.*)?│$"
    undocumented_options = re.findall(row, output, re.MULTILINE)
    assert not undocumented_options, output


def test_list_of_verbs_explains_each_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PYTHONSAFEPATH", "")

    code = main(["--help"])

    output = capsys.readouterr().out
    assert code == 0
    texts = dict(re.findall(r"^│ ([a-z]+) {2,}([a-z].{10,}?) *│$", output, re.MULTILINE))
    assert texts.keys() == {*NAMES}
    assert "muster VERB --help" in output


def test_worker_help_adds_to_prefect_s_help_and_reconciles_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    executed_commands: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *words: executed_commands.append(words))
    monkeypatch.setattr(worker, "reconcile_host", lambda: pytest.fail("it reconciles"))
    monkeypatch.setattr(sys, "argv", ["worker", "--help"])
    # The worker would otherwise change the signal handlers of this process.
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)

    worker.main()

    assert "python -m deployments.worker" in capsys.readouterr().out
    assert executed_commands[0][1][-2:] == ("deployments.prefect_worker", "--help")


def test_every_program_is_listed_here() -> None:
    programs = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for folder in ("flows", "tasks", "deployments", "tests/faults", "tests/benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"^if __name__ == .__main__.:", path.read_text(encoding="utf-8"), re.MULTILINE)
        # These programs are components of runs. Runs start them as scripts, not with `python -m`.
        and not {"quickstart", "quickstart-llm"} & {*path.parts}
    }

    listed = {command.split()[0] for command in COMMANDS} | INTERNAL

    assert not programs - listed - {"deployments.worker", "tasks.command"}


def test_former_name_of_a_verb_works_and_is_not_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))

    code = main(["sweep", "--help"])
    help_of_verb = capsys.readouterr().out
    main(["--help"])

    assert code == 0 and "muster cleanup" in help_of_verb
    assert "sweep" not in capsys.readouterr().out
