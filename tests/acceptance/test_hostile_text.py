"""Commands of `muster` on a pseudo-terminal, for runs with hostile messages, logs and names.

The tests check the bytes that arrive at the terminal.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.pseudo_terminal import PseudoTerminal

ROOT = Path(__file__).parents[2]
RUN_ID = "quickstart-grpo-20260102-130530-0a1b2c3d"
MARKUP = "[/__w/x/unbound_buffer.cc:78] [enforce fail at alloc_cpu.cpp:127] :smile: [red]no[/red]"
COMMANDS = (
    "\x1b[2J\x1b[H\x1b]0;owned\x07\x1b]52;c;aGk=\x07\x1b]8;;http://evil\x1b\\x\x1b]8;;\x1b\\"
    "\x9b31m\x9d0;owned\x9c\x08\x08\x07\u202e\u2066\x1bP+q\x1b\\\x1b[31m\x1bc\x1b]"
)
HOSTILE = f"{MARKUP} {COMMANDS} ends"
#: A program that executes several `muster` commands in one process, so that the slow imports happen
#: only once.
VERBS = (
    "import json, sys\n"
    "from tasks.command import do\n"
    "for arguments in json.loads(sys.argv[1]):\n"
    "    print('VERB', *arguments[:1], do(arguments), flush=True)\n"
)
#: Commands of `muster` that show the run with hostile text in its message, log and name. Hostile
#: text contains control sequences of terminals.
SHOWING_COMMANDS = (["ls"], ["show"], ["why"], ["explain"], ["overview"])
#: Commands that fail. Their error messages repeat hostile text from the arguments or from a file.
#: Hostile text contains control sequences of terminals.
FAILING_COMMANDS = (
    ["show", HOSTILE],
    ["ls", "--limit", HOSTILE],
    ["ls", HOSTILE],
    ["show", "--diff", RUN_ID, HOSTILE],
    ["plan", "spec.yaml"],
    ["train", "spec.yaml"],
    ["submit", f"{HOSTILE.replace('/', '')}.yaml"],
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a MUSTER_HOME with a failed run, and write an invalid spec next to this directory.

    The texts of the run and of the spec contain control sequences of terminals.
    """
    home = tmp_path / "home"
    directory = home / "runs" / RUN_ID
    (directory / "attempt-01").mkdir(parents=True)
    home.chmod(0o700)
    failure = {
        "kind": "UNKNOWN",
        "component": "trainer",
        "exit_code": 1,
        "message": HOSTILE,
        "line": HOSTILE,
        "hint": HOSTILE,
        "log_tail": f"first\n{HOSTILE}\nlast",
    }
    attempt = {
        "number": 1,
        "state": "failed",
        "failure": failure,
        "host": HOSTILE,
        "decision": HOSTILE,
        "alarms": [{"rule": "nan", "message": HOSTILE}],
    }
    record = {
        "run_id": RUN_ID,
        "state": "failed",
        "name": "quickstart",
        "workload": "grpo",
        "message": f"UNKNOWN: {HOSTILE}\nand more",
        "tags": [HOSTILE],
        "started_at": time.time() - 11_520,
        "ended_at": time.time(),
        "attempts": [attempt],
    }
    (directory / "run.json").write_text(json.dumps(record))
    log = f"\x1b[32mgreen\x1b[0m 10 %\r\x1b[31mred\x1b[0m {HOSTILE}\n"
    (directory / "attempt-01" / "trainer.log").write_text(log)
    invalid_spec = {"name": "x", "workload": HOSTILE, HOSTILE: 1, "components": {HOSTILE: {}}}
    (tmp_path / "spec.yaml").write_text(json.dumps(invalid_spec))
    return home


def environment(home: Path) -> dict[str, str]:
    """Return the environment variables of a colour terminal, without a Prefect server's URL."""
    unset = ("COLUMNS", "LINES", "CI", "NO_COLOR", "PREFECT_API_URL")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    overrides = {"MUSTER_HOME": str(home), "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    return inherited | overrides | {"PREFECT_HOME": str(home / "prefect")}


def run_on_terminal(home: Path, columns: int, *verbs: list[str]) -> PseudoTerminal:
    """Run `muster` commands on a terminal with this number of columns; return the terminal."""
    terminal = PseudoTerminal(columns)
    process = subprocess.Popen(
        [sys.executable, "-c", VERBS, json.dumps(verbs)],
        cwd=home.parent,
        env=environment(home),
        start_new_session=True,
        **terminal.as_stdio(),
    )
    terminal.close_device()
    assert process.wait(90) == 0, terminal.text()
    terminal.wait_until_read()
    return terminal


def split_output(terminal: PseudoTerminal) -> dict[str, str]:
    """Return a mapping from command name to the command's output without white space."""
    parts = re.split(r"VERB (\w+) (\d+)\s", terminal.text())
    return {
        parts[index + 1]: "".join(parts[index].split()) for index in range(0, len(parts) - 1, 3)
    }


def assert_harmless(terminal: PseudoTerminal) -> None:
    """Check that the terminal received no control characters except colours and line ends."""
    assert terminal.emulator().unknown == []
    assert not set("\x1b\x07\x08\x9b\x9d\u202e\u2066") & set(_COLOURS.sub("", terminal.written))
    assert "owned" not in terminal.text().replace("0;owned", "")
    assert "Traceback" not in terminal.text()


@pytest.mark.parametrize("columns", [40, 80, 240])
def test_commands_show_hostile_text_completely_and_harmlessly(home: Path, columns: int) -> None:
    terminal = run_on_terminal(home, columns, *SHOWING_COMMANDS)

    assert_harmless(terminal)
    outputs = split_output(terminal)
    assert set(outputs) == {"ls", "show", "why", "explain", "overview"}
    # In the output of `ls`, only the message of the run is shortened.
    assert RUN_ID in outputs["ls"] and "failed3h12min" in outputs["ls"]
    assert "UNKNOWN:[/__w/x/" in outputs["ls"]
    for last_line in ("show", "why", "explain"):
        assert "".join(MARKUP.split()) in outputs[last_line], last_line


def test_logs_keep_colours_on_a_terminal_and_all_bytes_in_a_pipe(home: Path) -> None:
    terminal = run_on_terminal(home, 240, ["logs", RUN_ID, "trainer"])
    pipe_result = subprocess.run(
        [sys.executable, "-m", "tasks.command", "logs", RUN_ID, "trainer"],
        env=environment(home),
        cwd=ROOT,
        capture_output=True,
        timeout=90,
    )

    assert_harmless(terminal)
    assert "\x1b[31mred\x1b[0m" in terminal.written
    assert "green" not in terminal.text()
    log = home / "runs" / RUN_ID / "attempt-01" / "trainer.log"
    assert pipe_result.stdout == log.read_bytes()


def test_error_messages_repeat_hostile_text_harmlessly(home: Path) -> None:
    terminal = run_on_terminal(home, 80, *FAILING_COMMANDS)

    assert_harmless(terminal)
    codes = re.findall(r"VERB \w+ (\d+)", terminal.text())
    assert codes == ["2"] * (len(FAILING_COMMANDS) - 1) + ["2"]


def test_pipe_gets_one_harmless_line_per_run(home: Path) -> None:
    verbs: list[Any] = [["ls"]]

    result = subprocess.run(
        [sys.executable, "-c", VERBS, json.dumps(verbs)],
        env=environment(home),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )

    line, last_line = result.stdout.splitlines()
    run_id, state, age, _host, message, _step, _metric = line.split("\t")
    assert (run_id, state, age) == (RUN_ID, "failed", "3 h 12 min")
    assert message.startswith(f"UNKNOWN: {MARKUP}") and message.isprintable()
    assert last_line == "VERB ls 0"
