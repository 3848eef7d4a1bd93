"""The quickstart with a fleet: servers are killed at random, and it learns all the same."""

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
from tests.support.ground import until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

#: Between two kills.
EVERY_S = 2.0


@pytest.fixture
def quickstart() -> dict[str, Any]:
    text = (ROOT / "deployments" / "runs" / "quickstart-fleet.yaml").read_text()
    spec: dict[str, Any] = yaml.safe_load(text)
    return spec


class FleetOf:
    """The fleet of a run, as its gateway shows it."""

    def __init__(self, run: Run) -> None:
        run.until_event("component.ready", "rollout")
        spec = yaml.safe_load((run.directory / "attempt-01" / "spec.yaml").read_text())
        command = spec["components"]["trainer"]["command"]
        self.url = command[command.index("--fleet") + 1]

    def servers(self) -> list[dict[str, Any]]:
        """Empty once the gateway is gone."""
        with suppress(httpx.HTTPError):
            answer = httpx.get(f"{self.url}/muster/rollout", trust_env=False, timeout=10.0)
            found: list[dict[str, Any]] = answer.json()["servers"]
            return found
        return []

    def kill(self, server: dict[str, Any]) -> bool:
        """Whether there was a process to be killed."""
        for listener in listeners(server["port"]):
            with suppress(ProcessLookupError):
                os.kill(listener.pid, signal.SIGKILL)
                return True
        return False


class Killer:
    """SIGKILLs a server at random every few seconds, from the moment the run trains."""

    def __init__(self, run: Run, seed: int) -> None:
        self.kills = 0
        self._fleet = FleetOf(run)
        self._random = random.Random(seed)
        self._told = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._told.wait(EVERY_S):
            if servers := self._fleet.servers():
                self.kills += self._fleet.kill(self._random.choice(servers))

    def stop(self) -> None:
        self._told.set()
        self._thread.join()


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_it_learns_although_a_server_is_killed_every_few_seconds(
    start_run: Callable[..., Run], quickstart: dict[str, Any]
) -> None:
    # However long it takes, and so however often one is killed.
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
    died = [event for event in run.events() if event["event"] == "rollout.server.died"]
    assert died and all(event["component"] == "rollout" for event in died)
    assert "server" in run.text() and "died: killed by SIGKILL" in run.text()
    recoveries = [one for one in run.task_runs() if one["name"].startswith("recover-rollout-")]
    assert recoveries
    # One whose server is killed while it starts has failed, and the next try recovers it.
    assert "COMPLETED" in {one["state"]["type"] for one in recoveries}
    assert any("killed by SIGKILL" in one["state"]["message"] for one in recoveries)
    assert run.pids() == []
    assert list((run.home / "live").iterdir()) == []


@pytest.mark.thorough
def test_the_flow_run_says_how_many_engines_serve_and_shows_each_recovery(
    start_run: Callable[..., Run], quickstart: dict[str, Any], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    fleet = quickstart["components"]["rollout"]
    # A server that was started before waits at the gate.
    wait = f'test ! -e {gate}-$0 || until test -e {gate}; do sleep 0.1; done; : > {gate}-$0; "$@"'
    fleet["command"] = ["sh", "-c", wait, "${server.rank}", *fleet["command"]]
    run = start_run(quickstart, "--set", "progress.total=5000", "--set", "success.step=5000")
    run.until_event("attempt.ready")
    [server] = [one for one in FleetOf(run).servers() if one["rank"] == 1]

    FleetOf(run).kill(server)
    until(lambda: "rollout 2 of 3 engines serve" in message_of(run), "it says so")
    under_way = until(lambda: recoveries_of(run, "RUNNING"), "the recovery is under way")
    gate.touch()
    until(lambda: recoveries_of(run, "COMPLETED"), "the recovery is over")
    until(lambda: message_of(run).endswith("trainer, environment"), "it says so no more")
    run.process.send_signal(signal.SIGTERM)

    assert run.wait() == 130, run.text()
    assert [one["name"] for one in under_way] == ["recover-rollout-1"]
    [over] = recoveries_of(run, "COMPLETED")
    assert "ranks 1: rank 1 died: " in over["state"]["message"]
    assert run.pids() == []


def message_of(run: Run) -> str:
    return str(run.flow_run()["state"]["message"])


def recoveries_of(run: Run, state: str) -> list[dict[str, Any]]:
    """Task runs of the flow run that are in this state now."""
    found = [one for one in run.task_runs() if one["name"].startswith("recover-rollout-")]
    return [one for one in found if one["state"]["type"] == state]


@pytest.mark.thorough
def test_a_recovery_that_the_runs_end_cuts_short_is_closed(
    start_run: Callable[..., Run], quickstart: dict[str, Any], tmp_path: Path
) -> None:
    first = tmp_path / "first"
    fleet = quickstart["components"]["rollout"]
    wait = f'test ! -e {first}-$0 || sleep 600; : > {first}-$0; "$@"'
    fleet["command"] = ["sh", "-c", wait, "${server.rank}", *fleet["command"]]
    run = start_run(quickstart, "--set", "progress.total=5000", "--set", "success.step=5000")
    run.until_event("attempt.ready")

    FleetOf(run).kill(FleetOf(run).servers()[0])
    until(lambda: recoveries_of(run, "RUNNING"), "the recovery is under way")
    run.process.send_signal(signal.SIGTERM)

    assert run.wait() == 130, run.text()
    [cut] = recoveries_of(run, "CANCELLED")
    assert cut["state"]["message"].startswith("abandoned")


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_next_attempt_has_a_fleet_of_its_own_with_the_weights_of_the_checkpoint(
    start_run: Callable[..., Run], quickstart: dict[str, Any]
) -> None:
    run = start_run(quickstart)
    first = run.directory / "attempt-01"
    until((first / "checkpoints" / "latest").exists, "there is a checkpoint")

    os.kill(run.record()["attempts"][0]["components"]["rollout"]["pid"], signal.SIGKILL)

    assert run.wait(240) == 0, run.text()
    second = run.record()["attempts"][1]
    assert second["state"] == "completed"
    assert "checkpoints" in second["resume_from"]
    metrics = (run.directory / "attempt-02" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[-1])["reward"] > 0.9
    pushed = [event["version"] for event in run.events(2) if event["event"] == "rollout.sync.ended"]
    assert pushed[0] >= 10, "before the trainer asks for a batch"
    assert run.pids() == []


@pytest.mark.thorough
def test_all_components_have_the_token_of_a_gateway_that_others_reach(
    start_run: Callable[..., Run], quickstart: dict[str, Any]
) -> None:
    quickstart["components"]["rollout"]["host"] = "0.0.0.0"

    run = start_run(quickstart, "--set", "progress.total=3", "--set", "success.step=3")

    assert run.wait(120) == 0, run.text()


@pytest.mark.thorough
def test_a_fleet_that_cannot_serve_fails_the_run_with_its_servers_last_words(
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
