"""A Muster stack (`muster up`) that a test starts from the sources, and whose parts it can kill."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from deployments.stack.state import Stack, StackPart, processes_of
from tasks.processes.ports import PortsReserved
from tests.support.host_environment import ROOT, wait_for
from tests.support.prefect_api import send_request

#: Code of a training program that writes each of its actions to a file. Its arguments are the path
#: of the file, the number of steps, and the seconds per step.
TRAINING = """
import json, os, signal, sys, time
marks_file, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
def mark(word, **fields):
    line = {"word": word, "pid": os.getpid(), "at": time.time(), **fields}
    with open(marks_file, "a") as f:
        f.write(json.dumps(line) + "\\n")
def stop(*_):
    mark("saving")
    time.sleep(1)
    mark("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
mark("begin")
for step in range(1, steps + 1):
    time.sleep(pause_s)
    mark("step", step=step)
    print("step", step, flush=True)
mark("end")
"""
#: Time limit of `muster up` and of `muster down`, in seconds.
_UP_WITHIN_S = 400.0


def free_port() -> int:
    """Return a TCP port that is free now."""
    with closing(PortsReserved(["server"])) as ports:
        return ports.numbers["server"]


@dataclass(kw_only=True)
class OwnStack:
    """A stack with its own MUSTER_HOME below `place`.

    A stack is the set of processes that `muster up` starts on a machine, such as the Prefect server
    and a worker. Each of these processes is called a part of the stack.
    """

    #: Directory for all files of the processes that `muster up` starts.
    place: Path
    #: Environment variables for `muster` commands, in addition to those of the test's process.
    variables: Mapping[str, str] = field(default_factory=dict)
    #: TCP port of the Prefect server.
    port: int = field(default_factory=free_port)

    @property
    def home(self) -> Path:
        """MUSTER_HOME of the processes that `muster up` starts."""
        return self.place / "home"

    @property
    def project(self) -> Path:
        """Directory of the user's project, with the training program `training.py`."""
        return self.place / "project"

    @property
    def env(self) -> dict[str, str]:
        """Environment variables for `muster` commands.

        The settings of Prefect, Ray and Muster in the test's own environment are left out.
        """
        foreign = ("PREFECT_", "RAY_", "MUSTER_")
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**inherited, "PATH": path, "MUSTER_HOME": str(self.home), **self.variables}

    @property
    def stack(self) -> Stack:
        """Content of `stack.json`, which describes the processes that `muster up` has started."""
        return Stack.model_validate_json((self.home / "stack" / "stack.json").read_bytes())

    def part(self, name: str) -> StackPart | None:
        """Return the entry of a process in `stack.json`, such as `worker`.

        Return None if `stack.json` does not exist yet.
        """
        try:
            return self.stack.part(name)
        except FileNotFoundError:
            return None

    def begin_up(self, *options: str) -> subprocess.Popen[str]:
        """Create the user's project, start `muster up`, and return the process without waiting."""
        self.project.mkdir(parents=True, exist_ok=True)
        (self.project / "pyproject.toml").touch()
        (self.project / "training.py").write_text(TRAINING)
        words = ("up", "--port", str(self.port), "--ray-dashboard", "0", *options)
        return self.begin(*words)

    def up(self, *options: str) -> str:
        """Run `muster up`, and return its output.

        The command starts background processes, and ends when all of these processes are ready.
        """
        with self.begin_up(*options) as up:
            output, _ = up.communicate(timeout=_UP_WITHIN_S)
        assert up.returncode == 0, output
        return output

    def down(self) -> None:
        """Stop all processes of `muster up` with `muster down`, even if some of them are dead."""
        self.muster("down", within_s=_UP_WITHIN_S)

    def begin(self, *words: str) -> subprocess.Popen[str]:
        """Start a `muster` command with these arguments, and return the process."""
        return subprocess.Popen(
            [sys.executable, "-m", "tasks.command", *words],
            cwd=self.project,
            env={**self.env, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def muster(self, *words: str, within_s: float = 120.0) -> tuple[int, str]:
        """Run a `muster` command with these arguments, and return its exit code and its output."""
        with self.begin(*words) as process:
            output, _ = process.communicate(timeout=within_s)
        return process.returncode, output

    def submit(self, name: str, steps: int, pause_s: float, **spec: Any) -> str:
        """Submit a training, and return its run id.

        Args:
            name: Name of the run.
            steps: Number of steps of the training.
            pause_s: Duration of a step, in seconds.
            **spec: Further keys of the spec.
        """
        command = ["python", "training.py", str(self.marks_file(name)), str(steps), str(pause_s)]
        stop = {"signal": "SIGTERM", "grace_s": 10}
        trainer = {"command": command, "stop": stop}
        content = {"name": name, "workload": "sft", "components": {"trainer": trainer}, **spec}
        return self.submit_spec(content)

    def submit_spec(self, spec: Mapping[str, Any]) -> str:
        """Write a run spec into the project, submit it, and return the id of its run."""
        name = spec["name"]
        path = self.project / f"{name}.yaml"
        path.write_text(json.dumps(spec))
        code, output = self.muster("submit", str(path))
        assert code == 0, output
        pattern = rf"\b{name}-{spec['workload']}-\d{{8}}-\d{{6}}-[0-9a-f]{{8}}\b"
        match = re.search(pattern, output)
        assert match is not None, output
        return match[0]

    def marks_file(self, name: str) -> Path:
        """Return the path of the file in which a training records its actions, such as steps."""
        return self.place / f"{name}.jsonl"

    def marks(self, name: str) -> list[dict[str, Any]]:
        """Return the actions that a training has recorded in its file, in order.

        The list is empty before the first action.
        """
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in self.marks_file(name).read_text().splitlines()]
        return []

    def record(self, run_id: str) -> dict[str, Any]:
        """Return the content of `run.json` of a run."""
        path = self.home / "runs" / run_id / "run.json"
        record: dict[str, Any] = json.loads(path.read_text())
        return record

    def api(self, method: str, path: str, content: Any = None) -> Any:
        """Send a request to the Prefect server of `muster up`, and return the JSON of its answer.

        Raises:
            httpx.HTTPError: The server does not answer, or answers with an error.
        """
        password = (self.home / "password").read_text().strip()
        url = f"http://127.0.0.1:{self.port}/api{path}"
        return send_request(method, url, content, password=password)

    def states(self) -> dict[str, str]:
        """Return the type of the state of each training on the Prefect server, by run id.

        The dict is empty if the server does not answer.
        """
        train_flow = {"flows": {"name": {"any_": ["train"]}}}
        try:
            flow_runs = self.api("POST", "/flow_runs/filter", train_flow)
        except httpx.HTTPError:
            return {}
        return {flow_run["name"]: flow_run["state"]["type"] for flow_run in flow_runs}

    def admissions(self, run_id: str) -> list[str]:
        """Return the times at which a run was admitted, from its states on the Prefect server."""
        with_name = {"flow_runs": {"name": {"any_": [run_id]}}}
        flow_runs = self.api("POST", "/flow_runs/filter", with_name)
        states = self.api("GET", f"/flow_run_states/?flow_run_id={flow_runs[0]['id']}")
        return [state["timestamp"] for state in states if state["name"] == "Pending"]

    def kill(self, name: str, *, guardian: bool = False) -> bool:
        """Send SIGKILL to a process that `muster up` started, or to the guardian of this process.

        Returns:
            False if no process with this name runs now.
        """
        part = self.part(name)
        if part is None or part.pid is None:
            return False
        victim = part.guardians[-1].pid if guardian else part.pid
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def wait_until_back(self, name: str, deaths: int) -> None:
        """Wait until a process of `muster up` has died `deaths` times and is ready again."""

        def is_back() -> bool:
            part = self.part(name)
            return part is not None and part.deaths >= deaths and part.state in ("ready", "done")

        wait_for(is_back, f"{name} is back after {deaths} deaths", within_s=200)

    def leftovers(self, stack_id: str) -> list[int]:
        """Return the ids of the living processes of a stack: the processes of one `muster up`."""
        return processes_of(stack_id)


def find_faults(
    stack: OwnStack, name: str, run_id: str, steps: int, states: Mapping[str, str]
) -> list[str]:
    """Return the errors of a training that should have completed in one attempt.

    The lines that the training wrote must agree with `run.json` and with the Prefect server.

    Args:
        stack: The stack on which the training ran.
        name: Name of the run.
        run_id: Id of the run.
        steps: Number of steps of the training.
        states: Mapping from run id to the state type of the run on the Prefect server.
    """
    marks = stack.marks(name)
    faults = []
    words = [mark["word"] for mark in marks]
    if words != ["begin", *["step"] * steps, "end"]:
        counted = {word: words.count(word) for word in dict.fromkeys(words)}
        faults.append(f"{name} wrote {counted}, not begin, {steps} steps and end, once each")
    if [mark["step"] for mark in marks if mark["word"] == "step"] != [*range(1, steps + 1)]:
        faults.append(f"the steps of {name} are not 1 to {steps} in order")
    if len({mark["pid"] for mark in marks}) != 1:
        faults.append(f"{name} was run by several processes")
    record = stack.record(run_id)
    if record["state"] != "completed" or len(record["attempts"]) != 1:
        faults.append(f"run.json of {name} says {record['state']}, {len(record['attempts'])} tries")
    trainer = record["attempts"][-1]["components"]["trainer"]
    if marks and (trainer["pid"], trainer["exit_code"]) != (marks[0]["pid"], 0):
        faults.append(f"run.json of {name} names pid {trainer['pid']}, exit {trainer['exit_code']}")
    if states.get(run_id) != "COMPLETED":
        faults.append(f"the server says that {name} is {states.get(run_id)}")
    return faults


def plan_kills(parts: Sequence[str], each: int, chance: random.Random) -> list[tuple[str, bool]]:
    """Return the processes of `muster up` that a test kills one after the other, in random order.

    Args:
        parts: Names of the processes.
        each: Number of kills of each process. Every second kill hits the guardian process that owns
            the process.
        chance: Source of the random order.

    Returns:
        Pairs of the name of a process, and True if its guardian process must be killed instead.
    """
    kills = [(part, number % 2 == 1) for part in parts for number in range(each)]
    chance.shuffle(kills)
    return kills
