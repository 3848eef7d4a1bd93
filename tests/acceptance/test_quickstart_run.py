"""The quickstart as shipped: a real training with three processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.prefect_api import send_request

ROOT = Path(__file__).parents[2]


@pytest.fixture
def quickstart() -> dict:
    """Return the content of the quickstart's spec."""
    return yaml.safe_load((ROOT / "deployments" / "runs" / "quickstart.yaml").read_text())


@pytest.mark.timeout(300)
@pytest.mark.thorough
def test_two_simultaneous_runs_both_learn_on_different_ports(
    start_run: Callable, quickstart: dict
) -> None:
    runs = [start_run(quickstart), start_run(quickstart)]

    for run in runs:
        assert run.wait(240) == 0, run.text()
    for run in runs:
        metrics = (run.directory / "attempt-01" / "metrics.jsonl").read_text().splitlines()
        rewards = [json.loads(line)["reward"] for line in metrics]
        assert len(rewards) == 60
        assert rewards[0] < 0.2 and rewards[-1] > 0.9
        assert "reward by step" in run.text()
        assert run.record()["state"] == run.flow_run()["state"]["type"].lower() == "completed"
        assert run.pids() == []
        story = _run_muster(run, "explain", run.directory.name)
        slow = json.loads(_run_muster(run, "why", run.directory.name, "--json"))["slow"]
        assert {"waiting", "training", "weight sync"} <= slow["parts"].keys()
        assert sum(part["now"] for part in slow["parts"].values()) >= slow["step"]["now"] > 0
        assert "A training step takes" in slow["said"] and slow["said"] in story.replace("\n", " ")
        query = {"flow_run_id": {"any_": [run.record()["flow_run_id"]]}, "key": {"any_": ["time"]}}
        [page] = send_request("POST", f"{run.api}/artifacts/filter", {"artifacts": query})
        assert "A training step takes" in page["data"]
    ports = [_read_ports(run.directory) for run in runs]
    assert not ports[0] & ports[1]


@pytest.mark.thorough
@pytest.mark.parametrize("component", ["api", "environment"])
def test_killed_component_is_the_cause_of_the_failure(
    start_run: Callable, quickstart: dict, component: str
) -> None:
    run = start_run(quickstart, "--set", "progress.total=5000", "--set", "success.step=5000")
    run.until_event("run.progress")

    os.kill(run.record()["attempts"][0]["components"][component]["pid"], signal.SIGKILL)

    assert run.wait() == 1, run.text()
    failure = run.record()["attempts"][0]["failure"]
    assert (failure["component"], failure["signal"]) == (component, "SIGKILL")
    assert run.pids() == []


def _run_muster(run: Any, *arguments: str) -> str:
    """Run `muster` with these arguments and the run's MUSTER_HOME, and return the output."""
    env = {**os.environ, "MUSTER_HOME": str(run.home), "PREFECT_API_URL": run.api}
    command = (sys.executable, "-m", "tasks.command", *arguments)
    return subprocess.check_output(command, cwd=ROOT, env=env, text=True)


def _read_ports(directory: Path) -> set[str]:
    """Return the values of `--port` in the file `spec.yaml` of the first attempt."""
    spec = yaml.safe_load((directory / "attempt-01" / "spec.yaml").read_text())
    commands = [component["command"] for component in spec["components"].values()]
    return {command[command.index("--port") + 1] for command in commands if "--port" in command}
