"""Runs whose fleet loses its own process: they are tried again by themselves, with a new fleet,
and nothing of the old one serves any more."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tasks.processes.ports import listeners
from tests.support.ground import DEADLINE_S, Ground, Run, until
from tests.support.ray_cluster import RayCluster
from tests.support.stage import is_alive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SERVER = Path(__file__).parents[1] / "support" / "dummy_server.py"
COMMAND = [sys.executable, str(SERVER), "--port", "${server.port}", "--rank", "${server.rank}"]
#: Until the run has had this attempt, it stays.
TRAINER = "import sys, time; time.sleep(600 if int(sys.argv[1]) < int(sys.argv[2]) else 0)"


@pytest.fixture
def ground(prefect_url: str, tmp_path: Path) -> Iterator[Ground]:
    ground = Ground(home=tmp_path / "home", api=prefect_url)
    yield ground
    ground.clear()


def spec_of(last: int, **fleet: Any) -> dict[str, Any]:
    """A run with a fleet of two that completes in this attempt; no kind of failure is listed."""
    rollout = {"backend": "command", "engines": 2, "command": COMMAND, "stop": {"grace_s": 1}}
    words = ["${attempt.number}", str(last), "${rollout.url}"]
    trainer = {"command": [sys.executable, "-c", TRAINER, *words]}
    return {
        "name": "trial",
        "workload": "grpo",
        "components": {"rollout": {**rollout, **fleet}, "trainer": trainer},
    }


class Attempt:
    """One attempt at a run, seen from outside."""

    def __init__(self, run: Run, number: int) -> None:
        self.number = number
        until(run.record_path().exists, "the run has a record")
        self._run = run
        self._directory = run.record_path().parent / f"attempt-{number:02d}"
        until(lambda: self.events("attempt.ready"), f"attempt {number} is ready: {self._log()}")

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self._directory / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = self._run.record()["attempts"][self.number - 1]
        return found

    def servers(self) -> dict[int, int]:
        """By rank, the process that listens."""
        spec = yaml.safe_load((self._directory / "spec.yaml").read_text())
        url = spec["components"]["trainer"]["command"][-1]
        answer = httpx.get(f"{url}/muster/rollout", trust_env=False, timeout=DEADLINE_S)
        found = {one["rank"]: listeners(one["port"]) for one in answer.json()["servers"]}
        return {rank: listener.pid for rank, [listener] in found.items()}

    def kill_fleet(self) -> None:
        os.kill(self.record()["components"]["rollout"]["pid"], signal.SIGKILL)

    def _log(self) -> str:
        return self._run.ground.log("train")


def test_a_run_whose_fleet_is_killed_goes_on_with_another_one(ground: Ground) -> None:
    run = ground.start_run(spec_of(last=2))
    first = Attempt(run, 1)
    servers = first.servers()

    first.kill_fleet()
    until(lambda: len(run.record()["attempts"]) == 2, "it is tried again")
    left = [pid for pid in servers.values() if is_alive(pid)]
    run.until_state("COMPLETED")

    assert left == []
    lost, last = run.record()["attempts"]
    assert (lost["failure"]["kind"], lost["failure"]["signal"]) == ("FLEET_LOST", "SIGKILL")
    assert lost["failure"]["message"].endswith("; at its end 2 of 2 engines served")
    assert lost["decision"].startswith("requeued: FLEET_LOST, next try (2 of 4) in ")
    assert last["state"] == "completed"
    run.until_gone()


@pytest.mark.thorough
def test_the_fourth_loss_of_its_fleet_ends_a_run(ground: Ground) -> None:
    run = ground.start_run(spec_of(last=9))

    for number in (1, 2, 3, 4):
        Attempt(run, number).kill_fleet()
    message = run.until_state("FAILED")

    assert message.startswith("FLEET_LOST: rollout (pid ")
    attempts = run.record()["attempts"]
    assert [one["failure"]["kind"] for one in attempts] == ["FLEET_LOST"] * 4
    assert attempts[-1]["decision"] == "final: FLEET_LOST, 4 of 4 attempts used"
    run.until_gone()


@pytest.mark.thorough
def test_a_fleet_that_is_killed_in_a_recovery_says_so(ground: Ground, tmp_path: Path) -> None:
    # A server that was started before does not come up.
    once = f'test ! -e {tmp_path}/$0 || exec sleep 600; : > {tmp_path}/$0; exec "$@"'
    run = ground.start_run(
        spec_of(last=2, command=["sh", "-c", once, "${attempt.number}-${server.rank}", *COMMAND])
    )
    first = Attempt(run, 1)

    os.kill(first.servers()[1], signal.SIGKILL)
    until(lambda: first.events("rollout.recovery.begun"), "it is recovered")
    first.kill_fleet()
    run.until_state("COMPLETED")

    lost = run.record()["attempts"][0]["failure"]
    assert lost["message"].endswith("; at its end 1 of 2 engines served, recovering: 1")
    run.until_gone()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "end",
    [
        # told to end by somebody else
        lambda pid: os.kill(pid, signal.SIGTERM),
        # it ends by itself, and its process dumps where it was
        lambda pid: os.kill(pid, signal.SIGABRT),
    ],
)
def test_a_fleet_that_ends_otherwise_is_lost_too(
    ground: Ground, end: Callable[[int], None]
) -> None:
    run = ground.start_run(spec_of(last=2))
    first = Attempt(run, 1)

    end(first.record()["components"]["rollout"]["pid"])
    run.until_state("COMPLETED")

    lost = run.record()["attempts"][0]["failure"]
    assert lost["kind"] == "FLEET_LOST"
    assert lost["message"].endswith("; at its end 2 of 2 engines served")


@pytest.mark.thorough
def test_a_fleet_that_cannot_go_on_is_not_tried_again(ground: Ground) -> None:
    run = ground.start_run(spec_of(last=2, recovery={"min_active": 2}))
    first = Attempt(run, 1)

    os.kill(first.servers()[0], signal.SIGKILL)
    message = run.until_state("FAILED")

    assert not message.startswith("FLEET_LOST")
    assert "FleetError: 1 of 2 engines serve, min_active is 2" in message
    assert len(run.record()["attempts"]) == 1


@pytest.mark.thorough
def test_a_fleet_on_ray_is_lost_like_any_other(ground: Ground, ray_cluster: RayCluster) -> None:
    spec = spec_of(last=2, placement="ray", gpus_per_node=1)
    run = ground.start_run({**spec, "ray": {"address": ray_cluster.address}})
    first = Attempt(run, 1)
    servers = first.servers()

    first.kill_fleet()
    until(lambda: len(run.record()["attempts"]) == 2, "it is tried again")
    left = [pid for pid in servers.values() if is_alive(pid)]
    run.until_state("COMPLETED")

    assert left == []
    lost = run.record()["attempts"][0]["failure"]
    assert lost["kind"] == "FLEET_LOST"
    assert lost["message"].endswith("; at its end 2 of 2 engines served")
