"""The three processes of the quickstart together: API, trainer and environment.

They train, and each of them ends if a process that it needs has ended.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.supervised_components import free_port, wait_until

QUICKSTART = Path(__file__).parents[2] / "deployments" / "quickstart"

#: Time limit, in seconds, for a process to become ready or to end.
#:
#: A process usually needs only a fraction of this time.
DEADLINE_S = 90.0


class Stack:
    """The processes of one training; the log of each process is in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.api_port = free_port()
        self.trainer_port = free_port()
        self.api_url = f"http://127.0.0.1:{self.api_port}"
        self.trainer_url = f"http://127.0.0.1:{self.trainer_port}"

    def start_api(self) -> None:
        run_api = Path(sys.executable).with_name("run-api")
        self._spawn("api", run_api, "--host", "127.0.0.1", "--port", str(self.api_port))
        wait_until(lambda: read_json(f"{self.api_url}/info"), "the API answers")

    def start_trainer(self, *, steps: int, out: Path, arguments: tuple[str, ...] = ()) -> None:
        self._spawn(
            "trainer",
            sys.executable,
            QUICKSTART / "trainer.py",
            "--api",
            self.api_url,
            "--port",
            str(self.trainer_port),
            "--steps",
            str(steps),
            "--out",
            str(out),
            *arguments,
        )
        wait_until(self.trainer_is_registered, "the trainer is registered at the API")

    def start_environment(self) -> None:
        self._spawn(
            "environment",
            sys.executable,
            QUICKSTART / "environment.py",
            "serve",
            "--env.rollout_server_url",
            self.api_url,
            "--openai.base_url",
            f"{self.trainer_url}/v1",
        )

    def trainer_is_registered(self) -> bool:
        return bool(read_json(f"{self.api_url}/info")["batch_size"] != -1)

    def environment_is_registered(self) -> bool:
        return "environment registered" in self.log("environment").splitlines()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        self.processes[name].send_signal(number)

    def exit_status(self, name: str) -> int:
        return self.processes[name].wait(DEADLINE_S)

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def _spawn(self, name: str, *command: str | Path) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Create temporary files in the test's folder. The files that a killed process
                # leaves are then deleted together with this folder.
                env={**os.environ, "TMPDIR": str(self.folder)},
            )


def read_json(url: str) -> Any:
    """Return the JSON at the URL, or None if no server answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=10) as response:
            return json.load(response)
    except OSError:
        return None


def read_steps(out: Path) -> list[int]:
    """Return the numbers of the steps in the metrics file, in the order of the file."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.fixture
def start_stack(tmp_path: Path) -> Iterator[Callable[[], Stack]]:
    """Yield a function that makes `Stack` objects, and end their processes after the test."""
    stacks: list[Stack] = []

    def start() -> Stack:
        folder = tmp_path / f"attempt-{len(stacks) + 1}"
        folder.mkdir()
        stacks.append(Stack(folder))
        return stacks[-1]

    yield start
    for stack in stacks:
        stack.stop()


@pytest.fixture
def stack(start_stack: Callable[[], Stack]) -> Stack:
    """Return a `Stack`: the processes of one training, which are not started yet."""
    return start_stack()


@pytest.mark.thorough
@pytest.mark.slow
def test_terminated_training_can_be_resumed(
    start_stack: Callable[[], Stack], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = start_stack()
    first.start_api()
    first.start_trainer(steps=100_000, out=out)
    first.start_environment()
    wait_until(lambda: len(read_steps(out)) >= 3, "three steps are complete")

    first.kill("environment", signal.SIGTERM)
    assert first.exit_status("environment") == 128 + signal.SIGTERM
    first.kill("trainer", signal.SIGTERM)
    assert first.exit_status("trainer") == 128 + signal.SIGTERM
    checkpoint_line = re.search(r"^step (\d+) is checkpointed$", first.log("trainer"), re.M)
    assert checkpoint_line is not None and "complete" not in first.log("trainer")

    last_step = int(checkpoint_line[1]) + 3
    second = start_stack()
    second.start_api()
    second.start_trainer(steps=last_step, out=out, arguments=("--resume-from", str(out)))
    second.start_environment()
    assert second.exit_status("trainer") == 0, second.log("trainer")
    assert second.exit_status("environment") == 0, second.log("environment")

    assert read_steps(out) == list(range(1, last_step + 1))


@pytest.mark.thorough
def test_trainer_and_environment_fail_when_the_api_dies(stack: Stack, tmp_path: Path) -> None:
    stack.start_api()
    stack.start_trainer(steps=100_000, out=tmp_path / "out")
    stack.start_environment()
    wait_until(stack.environment_is_registered, "the environment is registered at the API")

    stack.kill("api")

    assert stack.exit_status("trainer") == 1
    assert stack.exit_status("environment") == 1
    assert "trainer: the Atropos API no longer answers" in stack.log("trainer")
    assert "complete" not in stack.log("trainer")
    assert "environment: the Atropos API no longer answers" in stack.log("environment")


def test_trainer_that_waits_for_a_hung_api_ends_on_sigterm(stack: Stack, tmp_path: Path) -> None:
    stack.start_api()
    stack.start_trainer(steps=5, out=tmp_path / "out")
    stack.kill("api", signal.SIGSTOP)

    stack.kill("trainer", signal.SIGTERM)

    assert stack.exit_status("trainer") == 128 + signal.SIGTERM


def test_second_trainer_on_a_used_api_is_refused(stack: Stack, tmp_path: Path) -> None:
    stack.start_api()
    stack.start_trainer(steps=5, out=tmp_path / "first")
    stack.kill("trainer")

    stack.start_trainer(steps=5, out=tmp_path / "second")

    assert stack.exit_status("trainer") == 1
    assert "another trainer has already registered" in stack.log("trainer")
