"""Every command says by `--help` what it does, its options and defaults, and its exit codes."""

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

ROOT = Path(__file__).parents[2]
#: Another test's list of verbs may have given this group its words in that list.
HELP_OF_QUEUE = queue.help
#: What people run beside `muster`, and verbs that are programs too. `python -m deployments.worker`
#: has a test of its own: its options are Prefect's.
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
    "tests.faults.ray_kills",
    "tests.faults.fleet_chaos",
    "tests.faults.gateway_fuzz",
    "tests.faults.llm",
)
#: Verbs of verbs; what goes for them all stands with `muster queue`.
PARTS = ("queue drain", "queue undrain", "queue set", "queue unset")
#: What other programs of the project start, and nobody else.
INTERNAL = {
    *("flows", "tasks.rollout.process", "tasks.server.sqlite_server", "tasks.ray.node_agent"),
    *("tasks.processes.guardian", "tasks.ray.wrapper", "tasks.rollout.lmdeploy_replica"),
    "deployments.prefect_worker",
    *("deployments.stack.supervisor", "deployments.stack.ray_node"),
    *("deployments.stack.runs", "tests.peers.verl.compose"),
    *(
        "tests.faults.chaos_server",
        "tests.faults.llm_trainer",
        "tests.benchmarks.part",
        "tests.benchmarks.gateway_process",
    ),
    *("tests.benchmarks.capacity", "tests.benchmarks.nodes", "tests.benchmarks.watched"),
    *("tests.benchmarks.stubborn", "tests.benchmarks.sglang_watchdog"),
}


def run(command: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """The exit code of `python -m COMMAND ARGUMENT...`, which ends as soon as it has read them."""
    module, *words = command.split()
    monkeypatch.setattr(sys, "argv", [module, *words, *arguments])
    monkeypatch.setenv("COLUMNS", "100")
    with warnings.catch_warnings():
        # That another test has imported it.
        warnings.simplefilter("ignore", RuntimeWarning)
        # That cyclopts reads sys.argv in a test.
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_it_does_its_options_and_its_exit_codes(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(command, "--help", monkeypatch=monkeypatch)

    said = capsys.readouterr().out
    assert code == 0
    assert said.lower().startswith(f"usage: python -m {command.split()[0]}")
    assert re.search(r"\bExit: 0 ", said), said
    # Between the usage and the arguments stands what it is for.
    assert re.search(r"\n\n[A-Z][^\n]{20,}", said), said
    without_words = re.findall(r"^  (--?[\w-]+(?: [A-Z]\w*)?)\n(?!  {6,})", said, re.MULTILINE)
    assert not without_words, said


@pytest.mark.parametrize("verb", [*NAMES, *PARTS])
def test_a_verb_s_help_says_what_it_does_its_options_and_its_exit_codes(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setattr(queue, "help", HELP_OF_QUEUE)

    code = main([*verb.split(), "--help"])

    said = capsys.readouterr().out
    assert code == 0
    assert said.startswith(f"Usage: muster {verb}")
    assert verb in PARTS or re.search(r"\bExit: 0 ", said), said
    # Between the usage and the arguments stands what it is for.
    assert re.search(r"\n\n[A-Z][^\n]{20,}", said), said
    row = r"^│ (?:[* ] {2})?(--[\w-]+|[A-Z][A-Z=]+)(?: [A-Z.]+)? *(?:\[.*)?│$"
    without_words = re.findall(row, said, re.MULTILINE)
    assert not without_words, said


def test_the_list_of_verbs_says_what_each_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PYTHONSAFEPATH", "")

    code = main(["--help"])

    said = capsys.readouterr().out
    assert code == 0
    texts = dict(re.findall(r"^│ ([a-z]+) {2,}([a-z].{10,}?) *│$", said, re.MULTILINE))
    assert texts.keys() == {*NAMES}
    assert "muster VERB --help" in said


def test_a_worker_s_help_says_what_it_adds_to_prefect_s_and_reconciles_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    became: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *words: became.append(words))
    monkeypatch.setattr(worker, "reconcile_host", lambda: pytest.fail("it reconciles"))
    monkeypatch.setattr(sys, "argv", ["worker", "--help"])
    # What it sets aside before it becomes the other program.
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)

    worker.main()

    assert "python -m deployments.worker" in capsys.readouterr().out
    assert became[0][1][-2:] == ("deployments.prefect_worker", "--help")


def test_no_command_is_forgotten() -> None:
    programs = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for folder in ("flows", "tasks", "deployments", "tests/faults", "tests/benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"^if __name__ == .__main__.:", path.read_text(encoding="utf-8"), re.MULTILINE)
        # A run's own programs: started by a spec, as scripts.
        and not {"quickstart", "quickstart-llm"} & {*path.parts}
    }

    known = {command.split()[0] for command in COMMANDS} | INTERNAL

    assert not programs - known - {"deployments.worker", "tasks.command"}
