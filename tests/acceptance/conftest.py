"""Fixtures that start runs as a user does: `python -m flows.train SPEC.yaml` in its own process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.host_environment import wait_for, with_absolute_cwd
from tests.support.prefect_api import send_request
from tests.support.pseudo_terminal import PseudoTerminal
from tests.support.supervised_components import processes_with

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0


@dataclass
class Run:
    """A run that a test has started, with access to its process, its files and its flow run."""

    process: subprocess.Popen[str]
    home: Path
    api: str
    output: Path
    left_alone: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        """Directory of the run's record and logs. Waits until the run has created the directory."""
        return wait_for(self._directory, f"a run's directory; so far:\n{self.text()}")

    def _directory(self) -> Path | None:
        records = list((self.home / "runs").glob("*/run.json"))
        return records[0].parent if records else None

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def record(self) -> dict[str, Any]:
        return json.loads((self.directory / "run.json").read_text())

    def events(self, attempt: int = 1) -> list[dict[str, Any]]:
        path = self.directory / f"attempt-{attempt:02d}" / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def until_event(self, name: str, component: str | None = None, attempt: int = 1) -> dict:
        """Wait for an event in `events.jsonl` of an attempt, and return the first such event."""

        def find_event() -> dict | None:
            for event in self.events(attempt):
                if event["event"] == name and event.get("component") == component:
                    return event
            return None

        return wait_for(find_event, f"event {name} of {component}; so far:\n{self.text()}")

    def wait(self, within_s: float = DEADLINE_S) -> int:
        """Wait until the run's process has ended, and return its exit code."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end within {within_s:g} s:\n{self.text()}")

    def flow_run(self) -> dict[str, Any]:
        """Return the run's flow run as JSON, from the Prefect server."""
        flow_run: dict[str, Any] = send_request(
            "GET", f"{self.api}/flow_runs/{self.record()['flow_run_id']}"
        )
        return flow_run

    def task_runs(self) -> list[dict[str, Any]]:
        """Return the task runs of the flow run, sorted by their expected start time."""
        query = {
            "flow_runs": {"id": {"any_": [self.record()["flow_run_id"]]}},
            "sort": "EXPECTED_START_TIME_ASC",
        }
        task_runs: list[dict[str, Any]] = send_request(
            "POST", f"{self.api}/task_runs/filter", query
        )
        return task_runs

    def pids(self) -> list[int]:
        """Return the pids of all processes whose environment contains the id of the run.

        These are the components of the run, and the guardian processes that own the components.
        """
        return processes_with("MUSTER_RUN_ID", self.directory.name)


@pytest.fixture(scope="session")
def api(prefect_url: str) -> str:
    """Return the address of the Prefect server of the tests."""
    return prefect_url


@pytest.fixture
def start_run(api: str, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Yield a function that starts a run. Runs that have not ended are stopped after the test."""
    runs: list[Run] = []

    def start(
        spec: dict[str, Any],
        *arguments: str,
        server: str | None = api,
        terminal: PseudoTerminal | None = None,
        under: Sequence[str] = (),
        **environ: str,
    ) -> Run:
        """Start a run.

        Args:
            spec: Content of the spec file.
            arguments: Further arguments of the command.
            server: Address of the Prefect server, or None to let the run start its own server.
            terminal: Terminal in which the command runs. By default, the output of the command goes
                to a file.
            under: Words before the command: a program that executes the command, for example
                `nohup`, and the arguments of this program.
            environ: Additional environment variables.
        """
        number = len(runs)
        home = tmp_path / f"home-{number}"
        path = tmp_path / f"spec-{number}.yaml"
        path.write_text(yaml.safe_dump(with_absolute_cwd(spec), sort_keys=False))
        output = tmp_path / f"output-{number}.txt"
        env = {**os.environ, "MUSTER_HOME": str(home), **environ}
        if server:
            env["PREFECT_API_URL"] = server
        with output.open("w") as stdout:
            stdio = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(
                [*under, sys.executable, "-m", "flows.train", str(path), *arguments],
                cwd=ROOT,
                env=env,
                text=True,
                start_new_session=True,
                **(terminal.as_stdio() if terminal else stdio),
            )
        if terminal:
            terminal.close_device()
        runs.append(Run(process=process, home=home, api=server or "", output=output))
        return runs[-1]

    with ExitStack():
        yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            try:
                run.process.wait(30)
            except subprocess.TimeoutExpired:
                run.process.kill()
                run.process.wait()


def python(code: str) -> list[str]:
    """Return the command that runs the Python code."""
    return ["python", "-c", code]


@pytest.fixture
def build_gang_spec() -> Callable[..., dict[str, Any]]:
    """Return a function that makes a spec with the components api, trainer and environment.

    The function's argument `trainer` is the Python code of the trainer. The other components run
    until Muster stops them.
    """

    def build_spec(trainer: str, **further_keys: Any) -> dict[str, Any]:
        stay = "import time\nprint('up', flush=True)\ntime.sleep(600)"
        return {
            "name": "trial",
            "workload": "grpo",
            "components": {
                "api": {"command": python(stay), "ready": {"log": "up"}},
                "trainer": {"command": python(trainer)},
                "environment": {"command": python(stay), "ready": {"log": "up"}},
            },
            **further_keys,
        }

    return build_spec
