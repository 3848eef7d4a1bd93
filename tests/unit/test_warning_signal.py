"""Tests of the choice of the processes that get a warning signal, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray import cloudpickle

import tasks
from tasks.processes import tree
from tasks.processes.hang_report import handles_signal
from tasks.processes.warning_signal import send_warning, warn_carriers
from tasks.ray.node_agent import execute_order
from tests.support.supervised_components import wait_until

#: Program of a trainer. For each SIGUSR1, the trainer writes its name to the file `warned`. If its
#: second argument is "fork", the trainer also forks a child with the same signal handler.
TRAINER = """
import os, signal, sys, time
name, kind = sys.argv[1:3]
signal.signal(signal.SIGUSR1, lambda *_: open("warned", "a").write(name + "\\n"))
if kind == "fork" and os.fork() == 0:
    name = "child of " + name
open("up-" + name, "w").close()
while True:
    time.sleep(0.05)
"""
#: Program of a launcher, which has no handler for SIGUSR1. The launcher starts two trainers, each
#: in its own session.
LAUNCHER = """
import subprocess, sys
commands = [[sys.executable, "-I", "-S", "-c", sys.argv[1], f"rank-{n}", "fork"] for n in (0, 1)]
workers = [subprocess.Popen(command, start_new_session=True) for command in commands]
for worker in workers:
    worker.wait()
"""

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts a command in the test's directory.

    All descendants of the command are killed after the test.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(*argv: str, **variables: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(argv, cwd=tmp_path, env={**os.environ, **variables}))
        return started[-1]

    yield start
    for process in started:
        for pid in reversed([process.pid, *tree.descendants(process.pid)]):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code, *arguments]


def test_worker_of_a_launcher_without_a_handler_gets_the_signal(
    start: Start, tmp_path: Path
) -> None:
    launcher = start(*python(LAUNCHER, TRAINER))
    names = ["rank-0", "rank-1", "child of rank-0", "child of rank-1"]
    wait_until(lambda: all((tmp_path / f"up-{name}").exists() for name in names), "both train")

    warned = send_warning([launcher.pid], signal.SIGUSR1)
    again = send_warning([launcher.pid], signal.SIGUSR1, skip=warned)

    assert sorted(pid for pid, _ in warned) == sorted(tree.children(launcher.pid))
    assert again == []
    lines = tmp_path / "warned"
    wait_until(lambda: lines.exists() and len(lines.read_text().splitlines()) == 2, "both got it")
    assert sorted(lines.read_text().splitlines()) == ["rank-0", "rank-1"]
    assert launcher.poll() is None


def test_program_below_a_shell_gets_the_signal(start: Start, tmp_path: Path) -> None:
    command = 'python="$0"; "$python" -I -S -c "$1" trainer plain; exit $?'
    shell = start("sh", "-c", command, sys.executable, TRAINER)
    wait_until((tmp_path / "up-trainer").exists, "the trainer is up")

    send_warning([shell.pid], signal.SIGUSR1)

    wait_until((tmp_path / "warned").exists, "the trainer got the signal")
    assert shell.poll() is None


def test_process_without_a_handler_gets_no_signal(start: Start) -> None:
    process = start("sleep", "600")

    assert send_warning([process.pid], signal.SIGUSR1) == []
    assert process.poll() is None


def test_processes_of_a_run_on_a_node_are_found_by_their_variables(
    start: Start, tmp_path: Path
) -> None:
    run_id = f"run-{os.urandom(4).hex()}"
    trainer = start(*python(TRAINER, "trainer", "fork"), MUSTER_RUN_ID=run_id)
    other = start(*python(TRAINER, "other", "plain"), MUSTER_RUN_ID="another-run")
    wait_until((tmp_path / "up-child of trainer").exists, "the trainer is up")
    wait_until(lambda: handles_signal(other.pid, signal.SIGUSR1), "the other is up")

    result = warn_carriers({"MUSTER_RUN_ID": run_id}, signal.SIGUSR1, {})
    skip = {result["machine"]: result["processes"]}
    again = warn_carriers({"MUSTER_RUN_ID": run_id}, signal.SIGUSR1, skip)

    assert [pid for pid, _ in result["processes"]] == [trainer.pid]
    assert again["processes"] == []
    wait_until((tmp_path / "warned").exists, "the trainer got the signal")
    assert (tmp_path / "warned").read_text() == "trainer\n"


#: Program that simulates a Ray node without Muster, where the import of `tasks` fails. The program
#: receives a function as cloudpickle bytes, and executes the function.
ON_A_NODE = """
import json, sys
sys.modules["tasks"] = None
from ray import cloudpickle
function, arguments = cloudpickle.load(sys.stdin.buffer)
print(json.dumps(function(*arguments)))
"""


def test_order_is_executed_on_a_node_without_muster(start: Start, tmp_path: Path) -> None:
    run_id = f"run-{os.urandom(4).hex()}"
    trainer = start(*python(TRAINER, "trainer", "plain"), MUSTER_RUN_ID=run_id)
    wait_until((tmp_path / "up-trainer").exists, "the trainer is up")
    arguments = {"wanted": {"MUSTER_RUN_ID": run_id}, "signum": signal.SIGUSR1.value, "skip": {}}
    cloudpickle.register_pickle_by_value(tasks)
    try:
        sent = cloudpickle.dumps((execute_order, ("warn", arguments)))
    finally:
        cloudpickle.unregister_pickle_by_value(tasks)

    done = subprocess.run([sys.executable, "-I", "-c", ON_A_NODE], input=sent, capture_output=True)

    assert done.returncode == 0, done.stderr.decode()
    answer = json.loads(done.stdout)["answer"]
    assert [pid for pid, _ in answer["processes"]] == [trainer.pid]
