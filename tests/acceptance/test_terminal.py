"""`python -m flows.train` on a terminal or in a pipe, also after either was closed."""

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
#: Code of a trainer that writes training steps to its metrics until a file exists, and prints
#: control sequences.
TRAINER = """
import json, os, sys, time
metrics = open(sys.argv[1], "a")
stop = sys.argv[2]
code = int(sys.argv[3])
print("\\x1b[31mloading\\x1b[0m 10 %\\rloaded", flush=True)
step = 0
while not os.path.exists(stop):
    step += 1
    print(json.dumps({"step": step, "reward": step / 100}), file=metrics, flush=True)
    time.sleep(0.02)
raise SystemExit(code)
"""
TERMINAL = {"TERM": "xterm-256color", "CI": "", "NO_COLOR": ""}


def until(
    condition: Callable[[], Any], describe: Callable[[], str], within_s: float = 60.0
) -> None:
    """Wait until the condition is true; fail with the description after the time limit."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.02)


def remove_spaces(text: str) -> str:
    """Return the text without white space, because a terminal breaks lines at any place."""
    return "".join(text.split())


def read_ignored_signals(pid: int) -> set[int]:
    """Return the numbers of the signals that a process ignores.

    Source: proc(5), the line `SigIgn` of /proc/PID/status.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    [bits] = (int(line.split()[1], 16) for line in status.splitlines() if "SigIgn" in line)
    return {number for number in range(1, 65) if bits >> (number - 1) & 1}


@pytest.fixture
def stop(tmp_path: Path) -> Path:
    """Return the path of a file that a test can create. The file makes the trainer end."""
    return tmp_path / "stop"


@pytest.fixture
def build_spec(stop: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that makes a spec whose trainer ends as soon as the file `stop` exists."""

    def make_spec(exit_code: int = 0) -> dict[str, Any]:
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

    return make_spec


@pytest.fixture
def terminal() -> Iterator[Callable[..., PseudoTerminal]]:
    """Yield a function that makes pseudo-terminals."""
    terminals: list[PseudoTerminal] = []

    def make_terminal(columns: int, lines: int = 24) -> PseudoTerminal:
        terminals.append(PseudoTerminal(columns, lines))
        return terminals[-1]

    yield make_terminal


def test_narrow_terminal_shows_the_live_run_and_then_its_failure(
    start_run: Callable[..., Any],
    build_spec: Callable[..., dict[str, Any]],
    stop: Path,
    terminal: Callable[..., PseudoTerminal],
    api: str,
) -> None:
    tty = terminal(40)
    run = start_run(build_spec(exit_code=3), terminal=tty, **TERMINAL)
    until(lambda: "trainer    ready" in tty.text() and "of 1000" in tty.text(), tty.text)
    tty.resize(120, 4)
    tty.resize(40, 24)
    until(lambda: "/step" in tty.text(), tty.text)
    during = tty.text()

    stop.touch()
    code = run.wait()
    tty.wait_until_read()

    assert code == 1, tty.text()
    assert "api        ready" in during
    # The terminal breaks lines at any place, so the test compares the texts without white space.
    block = remove_spaces(tty.text())
    for part in (
        "failed: ",
        f"run {run.directory.name}",
        "1 attempt",
        "first failure trainer: exit code 3",
        f"log {run.directory}/attempt-01/trainer.log",
        "| loaded",
        f"record {run.directory}/run.json",
        f"page {api.removesuffix('/api')}/v2/runs/flow-run/{run.record()['flow_run_id']}",
    ):
        assert remove_spaces(part) in block
    # The terminal shows the table of the components only during the run.
    assert "component  state" not in tty.text()
    # The terminal emulator knows all control sequences that were printed.
    assert tty.emulator().unknown == []


@pytest.mark.thorough
def test_run_continues_after_its_output_pipe_is_closed(
    build_spec: Callable[..., dict[str, Any]], stop: Path, tmp_path: Path, api: str
) -> None:
    home = tmp_path / "home"
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(build_spec(), sort_keys=False))
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

    first_line = run.stdout.readline()
    run.stdout.close()
    stop.touch()

    errors = run.stderr.read()
    assert (run.wait(60), errors) == (0, "")
    assert "connecting to Prefect" in first_line
    [record] = home.glob("runs/*/run.json")
    assert '"state": "completed"' in record.read_text()


@pytest.mark.thorough
def test_closed_terminal_ends_the_run_as_cancelled(
    start_run: Callable[..., Any],
    build_spec: Callable[..., dict[str, Any]],
    terminal: Callable[..., PseudoTerminal],
) -> None:
    tty = terminal(80)
    run = start_run(build_spec(), terminal=tty, **TERMINAL)
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
        # Unlike `nohup`, this command does not redirect the output. The command only ignores
        # SIGHUP, so the run continues to write to its terminal after the terminal was closed.
        pytest.param('trap "" HUP; exec "$@"', marks=pytest.mark.thorough),
    ],
)
def test_run_that_ignores_sighup_survives_its_terminal(
    start_run: Callable[..., Any],
    build_spec: Callable[..., dict[str, Any]],
    stop: Path,
    terminal: Callable[..., PseudoTerminal],
    shell: str,
    tmp_path: Path,
) -> None:
    tty = terminal(80)
    under = ["sh", "-c", shell, "sh"]
    output = str(tmp_path / "nohup.txt")
    run = start_run(build_spec(), terminal=tty, under=under, OUTPUT=output, **TERMINAL)
    run.until_event("attempt.ready")
    trainer = run.until_event("component.spawned", "trainer")["pid"]

    tty.close()
    run.process.send_signal(signal.SIGHUP)
    ignored_by_trainer = read_ignored_signals(trainer)
    stop.touch()

    assert run.wait() == 0
    # The run's own process ignores SIGHUP. The trainer must not ignore SIGHUP, because a spec may
    # set SIGHUP as the stop signal of a component.
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
def test_signal_after_the_verdict_has_no_effect(
    start_run: Callable[..., Any],
    build_spec: Callable[..., dict[str, Any]],
    stop: Path,
    terminal: Callable[..., PseudoTerminal],
    signum: signal.Signals,
) -> None:
    tty = terminal(120)
    stop.touch()
    run = start_run(build_spec(exit_code=3), terminal=tty, **TERMINAL)
    until(lambda: "failed:" in tty.text(), tty.text)

    while run.process.poll() is None:
        run.process.send_signal(signum)
        time.sleep(0.005)
    tty.wait_until_read()

    assert run.process.returncode == 1, tty.text()
    assert "Traceback" not in tty.text() and "Interrupted" not in tty.text()


@pytest.mark.thorough
def test_stopped_terminal_does_not_delay_the_run(
    start_run: Callable[..., Any],
    build_spec: Callable[..., dict[str, Any]],
    stop: Path,
    terminal: Callable[..., PseudoTerminal],
) -> None:
    tty = terminal(80)
    run = start_run(build_spec(), terminal=tty, **TERMINAL)
    run.until_event("attempt.ready")

    tty.press(STOP_KEY)
    stop.touch()
    run.until_event("run.state")
    until(lambda: run.record()["state"] == "completed", tty.text)
    text_while_stopped = tty.text()
    tty.press(GO_KEY)

    assert run.wait() == 0
    tty.wait_until_read()
    assert "completed" not in text_while_stopped
    assert "\ncompleted: " in tty.text()
