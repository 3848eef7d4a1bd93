"""`muster logs -f` during a run shows each line of the components' logs exactly once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_environment import wait_for

NAMES = ("api", "trainer", "environment", "reward")
LINES = 400
#: A component that prints half of its lines, waits for a file, and then prints the other half.
#:
#: In the first attempt of the run, the trainer then fails. All other components run until Muster
#: stops them.
WRITER = f"""
import os, pathlib, sys, time
name = sys.argv[1]
attempt = os.environ["MUSTER_ATTEMPT"]
gate = pathlib.Path(sys.argv[2])
def write(first):
    for number in range(first, first + {LINES // 2}):
        print(f"attempt {{attempt}} line {{number}} of {{name}}", flush=True)
write(0)
(gate / f"half-{{name}}-{{attempt}}").touch()
while not (gate / f"go-{{name}}-{{attempt}}").exists():
    time.sleep(0.01)
write({LINES // 2})
(gate / f"done-{{name}}-{{attempt}}").touch()
while name != "trainer" or not (gate / f"end-{{attempt}}").exists():
    time.sleep(0.01)
sys.exit(attempt == "1")
"""


def build_spec(gate: Path) -> dict[str, Any]:
    """Return a spec with four components that run the program WRITER.

    The components wait for files that the test creates in the folder `gate`.
    """
    return {
        "name": "logs",
        "workload": "grpo",
        "components": {
            name: {"command": ["python", "-c", WRITER, name, str(gate)]} for name in NAMES
        },
        "retry": {"UNKNOWN": {"attempts": 2, "delay_s": 0.1}},
    }


def move_log(log: Path) -> None:
    """Rename the log as a log rotation does; the program continues to write to the renamed file."""
    log.rename(log.with_name(f"{log.name}.1"))


def copy_and_truncate_log(log: Path) -> None:
    """Copy the log and truncate the original, as logrotate does with the option `copytruncate`."""
    shutil.copy2(log, log.with_name(f"{log.name}.1"))
    os.truncate(log, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rotate", [move_log, pytest.param(copy_and_truncate_log, marks=pytest.mark.thorough)]
)
def test_no_line_is_lost_or_repeated(
    start_run: Callable, tmp_path: Path, rotate: Callable[[Path], None]
) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    run = start_run(build_spec(gate))
    wait_for((gate / "half-trainer-1").exists, "half of the lines are written")
    env = {**os.environ, "MUSTER_HOME": str(run.home), "PREFECT_API_URL": run.api}
    command = (sys.executable, "-m", "tasks.command", "logs", "latest", "--follow")
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        first_line = follower.stdout.readline()
        for attempt in (1, 2):
            directory = run.directory / f"attempt-{attempt:02d}"
            for name in NAMES:
                wait_for((gate / f"half-{name}-{attempt}").exists, f"half of the lines of {name}")
                rotate(directory / f"{name}.log")
                (gate / f"go-{name}-{attempt}").touch()
            for name in NAMES:
                wait_for((gate / f"done-{name}-{attempt}").exists, f"all of the lines of {name}")
            (gate / f"end-{attempt}").touch()
        output = follower.stdout.read()

    assert run.wait() == 0, run.text()
    lines = [line.partition(" | ")[2] for line in (first_line + output).splitlines()]
    expected_lines = {
        f"attempt {attempt} line {number} of {name}"
        for attempt in (1, 2)
        for name in NAMES
        for number in range(LINES)
    }
    assert Counter(lines) == Counter(expected_lines)
    for name in NAMES:
        assert [line for line in lines if line.endswith(f"of {name}")] == [
            f"attempt {attempt} line {number} of {name}"
            for attempt in (1, 2)
            for number in range(LINES)
        ]
