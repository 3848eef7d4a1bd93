"""Verbs of `muster` at a real pseudo-terminal, over runs with hostile messages, logs and names.

The judge is what arrived at the terminal, byte by byte.
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
#: Does several verbs in one process, which saves the imports.
VERBS = (
    "import json, sys\n"
    "from tasks.command import do\n"
    "for words in json.loads(sys.argv[1]):\n"
    "    print('VERB', *words[:1], do(words), flush=True)\n"
)
TOLD = (["ls"], ["show"], ["why"], ["explain"], ["overview"])
#: Words of a person, or of a file, that come back in an error.
REFUSED = (
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
    """A MUSTER_HOME with one failed run, and a spec beside it whose faults are hostile."""
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
    fault = {"name": "x", "workload": HOSTILE, HOSTILE: 1, "components": {HOSTILE: {}}}
    (tmp_path / "spec.yaml").write_text(json.dumps(fault))
    return home


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a colour terminal without a Prefect server."""
    unset = ("COLUMNS", "LINES", "CI", "NO_COLOR", "PREFECT_API_URL")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    mine = {"MUSTER_HOME": str(home), "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    return kept | mine | {"PREFECT_HOME": str(home / "prefect")}


def typed(home: Path, columns: int, *verbs: list[str]) -> PseudoTerminal:
    """Return a terminal of that width after the verbs were done on it."""
    terminal = PseudoTerminal(columns)
    process = subprocess.Popen(
        [sys.executable, "-c", VERBS, json.dumps(verbs)],
        cwd=home.parent,
        env=environment(home),
        start_new_session=True,
        **terminal.as_stdio(),
    )
    terminal.started()
    assert process.wait(90) == 0, terminal.text()
    terminal.until_read()
    return terminal


def verbs_done(terminal: PseudoTerminal) -> dict[str, str]:
    """Return what each verb printed, with the lines that a terminal made of it joined."""
    parts = re.split(r"VERB (\w+) (\d+)\s", terminal.text())
    return {parts[i + 1]: "".join(parts[i].split()) for i in range(0, len(parts) - 1, 3)}


def assert_harmless(terminal: PseudoTerminal) -> None:
    """The emulator knows colours and ends of lines, and no other control character."""
    assert terminal.emulator().unknown == []
    assert not set("\x1b\x07\x08\x9b\x9d\u202e\u2066") & set(_COLOURS.sub("", terminal.written))
    assert "owned" not in terminal.text().replace("0;owned", "")
    assert "Traceback" not in terminal.text()


@pytest.mark.parametrize("columns", [40, 80, 240])
def test_verbs_show_hostile_text_whole_and_harmless(home: Path, columns: int) -> None:
    terminal = typed(home, columns, *TOLD)

    assert_harmless(terminal)
    said = verbs_done(terminal)
    assert set(said) == {"ls", "show", "why", "explain", "overview"}
    # The list cuts the message only.
    assert RUN_ID in said["ls"] and "failed3h12min" in said["ls"]
    assert "UNKNOWN:[/__w/x/" in said["ls"]
    for verb in ("show", "why", "explain"):
        assert "".join(MARKUP.split()) in said[verb], verb


def test_logs_keep_their_colours_on_a_terminal_and_their_bytes_in_a_pipe(home: Path) -> None:
    terminal = typed(home, 240, ["logs", RUN_ID, "trainer"])
    piped = subprocess.run(
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
    assert piped.stdout == log.read_bytes()


def test_errors_repeat_hostile_words_harmlessly(home: Path) -> None:
    terminal = typed(home, 80, *REFUSED)

    assert_harmless(terminal)
    codes = re.findall(r"VERB \w+ (\d+)", terminal.text())
    assert codes == ["2"] * (len(REFUSED) - 1) + ["2"]


def test_pipe_gets_one_harmless_line_a_run(home: Path) -> None:
    verbs: list[Any] = [["ls"]]

    done = subprocess.run(
        [sys.executable, "-c", VERBS, json.dumps(verbs)],
        env=environment(home),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )

    line, verb = done.stdout.splitlines()
    run_id, state, age, _host, message = line.split("\t")
    assert (run_id, state, age) == (RUN_ID, "failed", "3 h 12 min")
    assert message.startswith(f"UNKNOWN: {MARKUP}") and message.isprintable()
    assert verb == "VERB ls 0"
