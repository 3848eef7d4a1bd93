"""`python -m flows.train` on a terminal, in a pipe, and where either goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.pseudo_terminal import GO_KEY, STOP_KEY, PseudoTerminal

ROOT = Path(__file__).parents[2]
#: Goes on step by step until a file is there, and says what a terminal would obey.
TRAINER = """
import json, os, sys, time
metrics, stop, code = open(sys.argv[1], "a"), sys.argv[2], int(sys.argv[3])
print("\\x1b[31mloading\\x1b[0m 10 %\\rloaded", flush=True)
step = 0
while not os.path.exists(stop):
    step += 1
    print(json.dumps({"step": step, "reward": step / 100}), file=metrics, flush=True)
    time.sleep(0.02)
raise SystemExit(code)
"""
TERMINAL = {"TERM": "xterm-256color", "CI": "", "NO_COLOR": ""}


def until(found: Callable[[], Any], what: Callable[[], str], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not found():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def unspaced(text: str) -> str:
    return "".join(text.split())


def ignored_signals_of(pid: int) -> set[int]:
    """Source: proc(5), SigIgn."""
    status = Path(f"/proc/{pid}/status").read_text()
    [bits] = (int(line.split()[1], 16) for line in status.splitlines() if "SigIgn" in line)
    return {number for number in range(1, 65) if bits >> (number - 1) & 1}


@pytest.fixture
def stop(tmp_path: Path) -> Path:
    """Once it is there, the trainer ends."""
    return tmp_path / "stop"


@pytest.fixture
def spec_of(stop: Path) -> Callable[..., dict[str, Any]]:
    """An api that stays, and a trainer whose steps are seen until it is told to end."""

    def make(exit_code: int = 0) -> dict[str, Any]:
        metrics = "${attempt.dir}/metrics.jsonl"
        stay = "import time\nprint('up', flush=True)\ntime.sleep(600)"
        trainer = ["python", "-c", TRAINER, metrics, str(stop), str(exit_code)]
        return {
            "name": "trial",
            "workload": "grpo",
            "components": {
                "api": {"command": ["python", "-c", stay], "ready": {"log": "up"}},
                "trainer": {"command": trainer, "ready": {"log": "load"}},
            },
            "progress": {"jsonl": metrics, "step": "step", "total": 1000},
        }

    return make


@pytest.fixture
def terminal() -> Iterator[Callable[..., PseudoTerminal]]:
    made: list[PseudoTerminal] = []

    def make(columns: int, lines: int = 24) -> PseudoTerminal:
        made.append(PseudoTerminal(columns, lines))
        return made[-1]

    yield make


def test_on_a_narrow_terminal_a_run_is_seen_live_and_its_failure_at_the_end(
    start_run: Callable[..., Any],
    spec_of: Callable[..., dict[str, Any]],
    stop: Path,
    terminal: Callable[..., PseudoTerminal],
    api: str,
) -> None:
    tty = terminal(40)
    run = start_run(spec_of(exit_code=3), terminal=tty, **TERMINAL)
    until(lambda: "trainer    ready" in tty.text() and "of 1000" in tty.text(), tty.text)
    tty.resize(120, 4)
    tty.resize(40, 24)
    until(lambda: " a step" in tty.text(), tty.text)
    during = tty.text()

    stop.touch()
    code = run.wait()
    tty.until_read()

    assert code == 1, tty.text()
    assert "api        ready" in during
    # Its lines break where the terminal ends, whatever stands there.
    block = unspaced(tty.text())
    for part in (
        "failed: ",
        f"run {run.directory.name}",
        "1 attempt",
        "what failed first trainer: exit code 3",
        f"its log {run.directory}/attempt-01/trainer.log",
        "| loaded",
        f"record {run.directory}/run.json",
        f"page {api.removesuffix('/api')}/runs/flow-run/{run.record()['flow_run_id']}",
    ):
        assert unspaced(part) in block
    # The region is gone, and nothing was written that such a terminal does not know.
    assert "component  state" not in tty.text()
    assert tty.emulator().unknown == []


@pytest.mark.thorough
def test_whoever_reads_may_leave_and_the_run_goes_on(
    spec_of: Callable[..., dict[str, Any]], stop: Path, tmp_path: Path, api: str
) -> None:
    home, path = tmp_path / "home", tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec_of(), sort_keys=False))
    run = subprocess.Popen(
        [sys.executable, "-m", "flows.train", str(path)],
        cwd=ROOT,
        env=os.environ | {"MUSTER_HOME": str(home), "PREFECT_API_URL": api},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None and run.stderr is not None

    first = run.stdout.readline()
    run.stdout.close()
    stop.touch()

    errors = run.stderr.read()
    assert (run.wait(60), errors) == (0, "")
    assert "connecting to Prefect" in first
    [record] = home.glob("runs/*/run.json")
    assert '"state": "completed"' in record.read_text()


@pytest.mark.thorough
def test_a_terminal_that_goes_away_ends_the_run_as_cancelled(
    start_run: Callable[..., Any],
    spec_of: Callable[..., dict[str, Any]],
    terminal: Callable[..., PseudoTerminal],
) -> None:
    tty = terminal(80)
    run = start_run(spec_of(), terminal=tty, **TERMINAL)
    run.until_event("attempt.ready")

    tty.close()

    assert run.wait() == 130
    assert run.record()["state"] == "cancelled"
    assert "nohup muster train" in run.record()["message"]
    assert run.pids() == []


@pytest.mark.parametrize(
    "shell",
    [
        'exec nohup "$@" > "$OUTPUT" 2>&1',
        # Without nohup's redirection: what the run prints meets a terminal that is gone.
        pytest.param('trap "" HUP; exec "$@"', marks=pytest.mark.thorough),
    ],
)
def test_a_run_that_ignores_sighup_outlives_its_terminal(
    start_run: Callable[..., Any],
    spec_of: Callable[..., dict[str, Any]],
    stop: Path,
    terminal: Callable[..., PseudoTerminal],
    shell: str,
    tmp_path: Path,
) -> None:
    tty = terminal(80)
    under = ["sh", "-c", shell, "sh"]
    output = str(tmp_path / "nohup.txt")
    run = start_run(spec_of(), terminal=tty, under=under, OUTPUT=output, **TERMINAL)
    run.until_event("attempt.ready")
    trainer = run.until_event("component.spawned", "trainer")["pid"]

    tty.close()
    run.process.send_signal(signal.SIGHUP)
    ignored_by_trainer = ignored_signals_of(trainer)
    stop.touch()

    assert run.wait() == 0
    # A component may have SIGHUP as its stop signal.
    assert signal.SIGHUP not in ignored_by_trainer
    assert run.record()["state"] == "completed"


@pytest.mark.parametrize(
    "signum",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.thorough),
        pytest.param(signal.SIGHUP, marks=pytest.mark.thorough),
    ],
)
def test_a_signal_after_the_verdict_changes_nothing(
    start_run: Callable[..., Any],
    spec_of: Callable[..., dict[str, Any]],
    stop: Path,
    terminal: Callable[..., PseudoTerminal],
    signum: signal.Signals,
) -> None:
    tty = terminal(120)
    stop.touch()
    run = start_run(spec_of(exit_code=3), terminal=tty, **TERMINAL)
    until(lambda: "failed:" in tty.text(), tty.text)

    while run.process.poll() is None:
        run.process.send_signal(signum)
        time.sleep(0.005)
    tty.until_read()

    assert run.process.returncode == 1, tty.text()
    assert "Traceback" not in tty.text() and "Interrupted" not in tty.text()


@pytest.mark.thorough
def test_a_terminal_that_is_stopped_holds_up_nobody(
    start_run: Callable[..., Any],
    spec_of: Callable[..., dict[str, Any]],
    stop: Path,
    terminal: Callable[..., PseudoTerminal],
) -> None:
    tty = terminal(80)
    run = start_run(spec_of(), terminal=tty, **TERMINAL)
    run.until_event("attempt.ready")

    tty.press(STOP_KEY)
    stop.touch()
    run.until_event("run.state")
    until(lambda: run.record()["state"] == "completed", tty.text)
    before = tty.text()
    tty.press(GO_KEY)

    assert run.wait() == 0
    tty.until_read()
    assert "completed" not in before
    assert "\ncompleted: " in tty.text()
