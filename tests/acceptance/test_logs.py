"""`muster logs -f` beside a run: what its programs have written, each line once."""

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

from tests.support.ground import until

NAMES = ("api", "trainer", "environment", "reward")
LINES = 400
#: Writes lines in two halves, the second once it may; then the trainer fails in its first attempt,
#: and all others stay until they are ended.
WRITER = f"""
import os, pathlib, sys, time
name, place, gate = sys.argv[1], os.environ["MUSTER_ATTEMPT"], pathlib.Path(sys.argv[2])
def write(first):
    for number in range(first, first + {LINES // 2}):
        print(f"attempt {{place}} line {{number}} of {{name}}", flush=True)
write(0)
(gate / f"half-{{name}}-{{place}}").touch()
while not (gate / f"go-{{name}}-{{place}}").exists():
    time.sleep(0.01)
write({LINES // 2})
(gate / f"done-{{name}}-{{place}}").touch()
while name != "trainer" or not (gate / f"end-{{place}}").exists():
    time.sleep(0.01)
sys.exit(place == "1")
"""


def spec(gate: Path) -> dict[str, Any]:
    return {
        "name": "logs",
        "workload": "grpo",
        "components": {
            name: {"command": ["python", "-c", WRITER, name, str(gate)]} for name in NAMES
        },
        "retry": {"UNKNOWN": {"attempts": 2, "delay_s": 0.1}},
    }


def moved_away(log: Path) -> None:
    """Another file is begun in its place, and the program goes on with its own."""
    log.rename(log.with_name(f"{log.name}.1"))


def copied_and_cut(log: Path) -> None:
    shutil.copy2(log, log.with_name(f"{log.name}.1"))
    os.truncate(log, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rotate", [moved_away, pytest.param(copied_and_cut, marks=pytest.mark.thorough)]
)
def test_no_line_is_lost_or_repeated(
    start_run: Callable, tmp_path: Path, rotate: Callable[[Path], None]
) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    run = start_run(spec(gate))
    until((gate / "half-trainer-1").exists, "half of the lines are written")
    env = {**os.environ, "MUSTER_HOME": str(run.home), "PREFECT_API_URL": run.api}
    command = (sys.executable, "-m", "tasks.command", "logs", "latest", "--follow")
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        first = follower.stdout.readline()
        for attempt in (1, 2):
            place = run.directory / f"attempt-{attempt:02d}"
            for name in NAMES:
                until((gate / f"half-{name}-{attempt}").exists, f"half of the lines of {name}")
                rotate(place / f"{name}.log")
                (gate / f"go-{name}-{attempt}").touch()
            for name in NAMES:
                until((gate / f"done-{name}-{attempt}").exists, f"all of the lines of {name}")
            (gate / f"end-{attempt}").touch()
        output = follower.stdout.read()

    assert run.wait() == 0, run.text()
    lines = [line.partition(" | ")[2] for line in (first + output).splitlines()]
    written = {
        f"attempt {attempt} line {number} of {name}"
        for attempt in (1, 2)
        for name in NAMES
        for number in range(LINES)
    }
    assert Counter(lines) == Counter(written)
    for name in NAMES:
        assert [line for line in lines if line.endswith(f"of {name}")] == [
            f"attempt {attempt} line {number} of {name}"
            for attempt in (1, 2)
            for number in range(LINES)
        ]
