"""The quickstart with a fleet learns although servers are killed at random."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tasks.processes.ports import listeners
from tests.acceptance.conftest import Run
from tests.support.host_environment import wait_for

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

#: Seconds between two kills of servers.
EVERY_S = 2.0


@pytest.fixture
def quickstart() -> dict[str, Any]:
    """Return the content of the quickstart's spec."""
    text = (ROOT / "deployments" / "runs" / "quickstart-fleet.yaml").read_text()
    spec: dict[str, Any] = yaml.safe_load(text)
    return spec


class RunFleet:
    """The fleet of a run, as the run's gateway describes it."""

    def __init__(self, run: Run) -> None:
        run.until_event("component.ready", "rollout")
        spec = yaml.safe_load((run.directory / "attempt-01" / "spec.yaml").read_text())
        command = spec["components"]["trainer"]["command"]
        self.url = command[command.index("--fleet") + 1]

    def servers(self) -> list[dict[str, Any]]:
        """Return the servers of the fleet, or an empty list if the gateway has ended."""
        with suppress(httpx.HTTPError):
            answer = httpx.get(f"{self.url}/muster/rollout", trust_env=False, timeout=10.0)
            servers: list[dict[str, Any]] = answer.json()["servers"]
            return servers
        return []

    def kill(self, server: dict[str, Any]) -> bool:
        """Send SIGKILL to the process of a server; return False if the server had no process."""
        for listener in listeners(server["port"]):
            with suppress(ProcessLookupError):
                os.kill(listener.pid, signal.SIGKILL)
                return True
        return False


class Killer:
    """A thread that kills a random inference server every few seconds, once the run is ready."""

    def __init__(self, run: Run, seed: int) -> None:
        self.kills = 0
        self._fleet = RunFleet(run)
        self._random = random.Random(seed)
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._is_stopped.wait(EVERY_S):
            if servers := self._fleet.servers():
                self.kills += self._fleet.kill(self._random.choice(servers))

    def stop(self) -> None:
        self._is_stopped.set()
        self._thread.join()


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_quickstart_learns_although_a_server_is_killed_every_few_seconds(
    start_run: Callable[..., Run], quickstart: dict[str, Any]
) -> None:
    # The number of recoveries must be unlimited, because many servers may be killed during a long
    # training.
    quickstart["components"]["rollout"]["recovery"]["budget"] = "unlimited"
    run = start_run(quickstart)
    killer = Killer(run, seed=6)
    status = run.wait(240)
    killer.stop()

    assert status == 0, run.text()
    metrics = (run.directory / "attempt-01" / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward"] for line in metrics]
    assert len(rewards) == 60
    assert rewards[-1] > 0.9
    assert killer.kills >= 2
    death_events = [event for event in run.events() if event["event"] == "rollout.server.died"]
    assert death_events and all(event["component"] == "rollout" for event in death_events)
    assert "server" in run.text() and "died: killed by SIGKILL" in run.text()
    recoveries = [
        task_run for task_run in run.task_runs() if task_run["name"].startswith("recover-rollout-")
    ]
    assert recoveries
    # A recovery fails if the server is killed again during its start. But at least one recovery
    # must have succeeded.
    assert "COMPLETED" in {task_run["state"]["type"] for task_run in recoveries}
    assert any("killed by SIGKILL" in task_run["state"]["message"] for task_run in recoveries)
    assert run.pids() == []
    assert list((run.home / "live").iterdir()) == []


@pytest.mark.thorough
def test_flow_run_shows_the_number_of_active_engines_and_each_recovery(
    start_run: Callable[..., Run], quickstart: dict[str, Any], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    fleet = quickstart["components"]["rollout"]
    # From its second start on, each server waits until the test creates the file `gate`.
    wait_script = (
        f'test ! -e {gate}-$0 || until test -e {gate}; do sleep 0.1; done; : > {gate}-$0; "$@"'
    )
    fleet["command"] = ["sh", "-c", wait_script, "${server.rank}", *fleet["command"]]
    run = start_run(quickstart, "--set", "progress.total=5000", "--set", "success.step=5000")
    run.until_event("attempt.ready")
    [server] = [candidate for candidate in RunFleet(run).servers() if candidate["rank"] == 1]

    RunFleet(run).kill(server)
    wait_for(
        lambda: "2 of 3 inference engines serve" in read_message(run),
        "the flow run names the number of active engines",
    )
    running_recoveries = wait_for(
        lambda: list_recoveries(run, "RUNNING"), "the recovery is running"
    )
    gate.touch()
    wait_for(lambda: list_recoveries(run, "COMPLETED"), "the recovery is over")
    wait_for(
        lambda: read_message(run).endswith("trainer, environment"),
        "the flow run names all components as running",
    )
    run.process.send_signal(signal.SIGTERM)

    assert run.wait() == 130, run.text()
    assert [task_run["name"] for task_run in running_recoveries] == ["recover-rollout-1"]
    [recovery] = list_recoveries(run, "COMPLETED")
    assert "ranks 1: the server of rank 1 died: " in recovery["state"]["message"]
    assert run.pids() == []


def read_message(run: Run) -> str:
    """Return the message of the flow run's state."""
    return str(run.flow_run()["state"]["message"])


def list_recoveries(run: Run, state: str) -> list[dict[str, Any]]:
    """Return the task runs that recover an engine and are in this state, such as `COMPLETED`."""
    recoveries = [
        task_run for task_run in run.task_runs() if task_run["name"].startswith("recover-rollout-")
    ]
    return [task_run for task_run in recoveries if task_run["state"]["type"] == state]


@pytest.mark.thorough
def test_recovery_that_is_interrupted_by_the_end_of_the_run_is_cancelled(
    start_run: Callable[..., Run], quickstart: dict[str, Any], tmp_path: Path
) -> None:
    marker = tmp_path / "first"
    fleet = quickstart["components"]["rollout"]
    wait_script = f'test ! -e {marker}-$0 || sleep 600; : > {marker}-$0; "$@"'
    fleet["command"] = ["sh", "-c", wait_script, "${server.rank}", *fleet["command"]]
    run = start_run(quickstart, "--set", "progress.total=5000", "--set", "success.step=5000")
    run.until_event("attempt.ready")

    RunFleet(run).kill(RunFleet(run).servers()[0])
    wait_for(lambda: list_recoveries(run, "RUNNING"), "the recovery is running")
    run.process.send_signal(signal.SIGTERM)

    assert run.wait() == 130, run.text()
    [recovery] = list_recoveries(run, "CANCELLED")
    assert recovery["state"]["message"].startswith("abandoned")


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_next_attempt_has_a_new_fleet_with_the_weights_of_the_checkpoint(
    start_run: Callable[..., Run], quickstart: dict[str, Any]
) -> None:
    run = start_run(quickstart)
    first_attempt = run.directory / "attempt-01"
    wait_for((first_attempt / "checkpoints" / "latest").exists, "there is a checkpoint")

    os.kill(run.record()["attempts"][0]["components"]["rollout"]["pid"], signal.SIGKILL)

    assert run.wait(240) == 0, run.text()
    second_attempt = run.record()["attempts"][1]
    assert second_attempt["state"] == "completed"
    assert "checkpoints" in second_attempt["resume_from"]
    metrics = (run.directory / "attempt-02" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[-1])["reward"] > 0.9
    synced_versions = [
        event["version"] for event in run.events(2) if event["event"] == "rollout.sync.ended"
    ]
    assert synced_versions[0] >= 10, "the first version must come from the checkpoint"
    assert run.pids() == []


@pytest.mark.thorough
def test_components_have_the_token_of_a_gateway_that_other_hosts_can_reach(
    start_run: Callable[..., Run], quickstart: dict[str, Any]
) -> None:
    quickstart["components"]["rollout"]["host"] = "0.0.0.0"

    run = start_run(quickstart, "--set", "progress.total=3", "--set", "success.step=3")

    assert run.wait(120) == 0, run.text()


@pytest.mark.thorough
def test_failure_of_a_fleet_that_cannot_serve_quotes_its_server(
    start_run: Callable[..., Run], quickstart: dict[str, Any]
) -> None:
    code = "import sys; print('no such model'); sys.exit(3)  # ${server.port}"
    quickstart["components"]["rollout"]["command"] = ["python", "-c", code]

    run = start_run(quickstart)

    assert run.wait() == 1, run.text()
    failure = run.record()["attempts"][0]["failure"]
    assert failure["component"] == "rollout"
    assert "exit code 3" in failure["message"]
    assert "no such model" in failure["log_tail"]
    assert run.pids() == []
