"""A lasting stack of a test's own, from the checkout, whose parts can be killed."""

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
from tests.support.ground import ROOT, until
from tests.support.prefect_api import ask

#: A training that writes all that it does into a file of its own: FILE STEPS SECONDS_A_STEP.
TRAINING = """
import json, os, signal, sys, time
marks, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
def mark(word, **more):
    line = {"word": word, "pid": os.getpid(), "at": time.time(), **more}
    with open(marks, "a") as f:
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
_UP_WITHIN_S = 400.0


def free_port() -> int:
    with closing(PortsReserved(["server"])) as ports:
        return ports.numbers["server"]


@dataclass(kw_only=True)
class OwnStack:
    """One stack, in a MUSTER_HOME below `place`."""

    place: Path
    #: Variables beside the test's own.
    variables: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)

    @property
    def home(self) -> Path:
        return self.place / "home"

    @property
    def project(self) -> Path:
        return self.place / "project"

    @property
    def env(self) -> dict[str, str]:
        foreign = ("PREFECT_", "RAY_", "MUSTER_")
        mine = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        mine.pop("PREFECT_API_URL", None)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**mine, "PATH": path, "MUSTER_HOME": str(self.home), **self.variables}

    @property
    def stack(self) -> Stack:
        return Stack.model_validate_json((self.home / "stack" / "stack.json").read_bytes())

    def part(self, name: str) -> StackPart | None:
        """The part as the stack last described it; None before it does."""
        try:
            return self.stack.part(name)
        except FileNotFoundError:
            return None

    def begin_up(self, *options: str) -> subprocess.Popen[str]:
        """Start `muster up`, and do not wait for it."""
        self.project.mkdir(parents=True, exist_ok=True)
        (self.project / "pyproject.toml").touch()
        (self.project / "training.py").write_text(TRAINING)
        words = ("up", "--port", str(self.port), "--ray-dashboard", "0", *options)
        return self.begin(*words)

    def up(self, *options: str) -> str:
        """Returns: the output of `muster up`, once all answers."""
        with self.begin_up(*options) as up:
            output, _ = up.communicate(timeout=_UP_WITHIN_S)
        assert up.returncode == 0, output
        return output

    def down(self) -> None:
        """Stop it, whatever has become of it."""
        self.muster("down", within_s=_UP_WITHIN_S)

    def begin(self, *words: str) -> subprocess.Popen[str]:
        """Start a verb of `muster`."""
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
        """Exit code and output of a verb."""
        with self.begin(*words) as process:
            output, _ = process.communicate(timeout=within_s)
        return process.returncode, output

    def submit(self, name: str, steps: int, pause_s: float, **spec: Any) -> str:
        """Submit a training. Returns: its run id."""
        command = ["python", "training.py", str(self.marks_file(name)), str(steps), str(pause_s)]
        stop = {"signal": "SIGTERM", "grace_s": 10}
        trainer = {"command": command, "stop": stop}
        content = {"name": name, "workload": "sft", "components": {"trainer": trainer}, **spec}
        path = self.project / f"{name}.yaml"
        path.write_text(json.dumps(content))
        code, output = self.muster("submit", str(path))
        assert code == 0, output
        found = re.search(rf"\b{name}-sft-\d{{8}}-\d{{6}}-[0-9a-f]{{8}}\b", output)
        assert found is not None, output
        return found[0]

    def marks_file(self, name: str) -> Path:
        return self.place / f"{name}.jsonl"

    def marks(self, name: str) -> list[dict[str, Any]]:
        """What the training has written down."""
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in self.marks_file(name).read_text().splitlines()]
        return []

    def record(self, run_id: str) -> dict[str, Any]:
        """Its run.json."""
        found: dict[str, Any] = json.loads((self.home / "runs" / run_id / "run.json").read_text())
        return found

    def api(self, method: str, path: str, content: Any = None) -> Any:
        """Ask the Prefect server. Raises: httpx.HTTPError, while it is away."""
        password = (self.home / "password").read_text().strip()
        url = f"http://127.0.0.1:{self.port}/api{path}"
        return ask(method, url, content, password=password)

    def states(self) -> dict[str, str]:
        """`states[run id]` of the flow runs of trainings, as the server has them; empty while it is
        away."""
        try:
            found = self.api("POST", "/flow_runs/filter", {"flows": {"name": {"any_": ["train"]}}})
        except httpx.HTTPError:
            return {}
        return {one["name"]: one["state"]["type"] for one in found}

    def admissions(self, run_id: str) -> list[str]:
        """When the run was admitted, each time, by the history of its flow run on the server."""
        found = self.api("POST", "/flow_runs/filter", {"flow_runs": {"name": {"any_": [run_id]}}})
        states = self.api("GET", f"/flow_run_states/?flow_run_id={found[0]['id']}")
        return [state["timestamp"] for state in states if state["name"] == "Pending"]

    def kill(self, name: str, *, guardian: bool = False) -> bool:
        """SIGKILL a part, or its guardian; False if it has no process now."""
        part = self.part(name)
        if part is None or part.pid is None:
            return False
        victim = part.guardians[-1].pid if guardian else part.pid
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def until_back(self, name: str, deaths: int) -> None:
        """The part has died so often, and is there again."""

        def is_back() -> bool:
            part = self.part(name)
            return part is not None and part.deaths >= deaths and part.state in ("ready", "done")

        until(is_back, f"{name} is back after {deaths} deaths", within_s=200)

    def leftovers(self, stack_id: str) -> list[int]:
        return processes_of(stack_id)


def faults_of(
    stack: OwnStack, name: str, run_id: str, steps: int, states: Mapping[str, str]
) -> list[str]:
    """What is wrong with a training that should have completed once; empty if nothing is.

    Its own file says what it did; that has to agree with run.json and with the Prefect server.
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


def plan_of_kills(parts: Sequence[str], each: int, chance: random.Random) -> list[tuple[str, bool]]:
    """`(part, whether its guardian is killed)` in random order, each part so often: of the last of
    two kills of a part the guardian is killed."""
    kills = [(part, number % 2 == 1) for part in parts for number in range(each)]
    chance.shuffle(kills)
    return kills
