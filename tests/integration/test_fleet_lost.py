"""Runs whose fleet process dies: Muster retries them with a new fleet.

The servers of the old fleet must end before that.
"""

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
from tests.support.host_environment import DEADLINE_S, HostEnvironment, Run, wait_for
from tests.support.ray_cluster import RayCluster
from tests.support.supervised_components import is_alive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SERVER = Path(__file__).parents[1] / "support" / "dummy_server.py"
COMMAND = [sys.executable, str(SERVER), "--port", "${server.port}", "--rank", "${server.rank}"]
#: A trainer. Its arguments are the number of the current attempt and the number of the last
#: attempt. The trainer completes in the last attempt. In earlier attempts, the trainer runs until a
#: test kills the trainer.
TRAINER = "import sys, time; time.sleep(600 if int(sys.argv[1]) < int(sys.argv[2]) else 0)"


@pytest.fixture
def host_env(prefect_url: str, tmp_path: Path) -> Iterator[HostEnvironment]:
    host_env = HostEnvironment(home=tmp_path / "home", api=prefect_url)
    yield host_env
    host_env.clear()


def build_spec(last_attempt: int, **fleet: Any) -> dict[str, Any]:
    """Return the spec of a run with two engines.

    The run completes in the attempt with the number `last_attempt`. The spec has no key "retry", so
    the default retries apply.
    """
    rollout = {"backend": "command", "engines": 2, "command": COMMAND, "stop": {"grace_s": 1}}
    arguments = ["${attempt.number}", str(last_attempt), "${rollout.url}"]
    trainer = {"command": [sys.executable, "-c", TRAINER, *arguments]}
    return {
        "name": "trial",
        "workload": "grpo",
        "components": {"rollout": {**rollout, **fleet}, "trainer": trainer},
    }


class Attempt:
    """One attempt at a run, with data from the run's files and from the gateway."""

    def __init__(self, run: Run, number: int) -> None:
        self.number = number
        # The path changes when the run gets its name, so each check must ask for the path again.
        wait_for(lambda: run.record_path().exists(), "the run has a record")
        self._run = run
        self._directory = run.record_path().parent / f"attempt-{number:02d}"
        wait_for(lambda: self.events("attempt.ready"), f"attempt {number} is ready: {self._log()}")

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self._directory / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = self._run.record()["attempts"][self.number - 1]
        return record

    def servers(self) -> dict[int, int]:
        """Return a mapping from server rank to the pid that listens on the server's port."""
        spec = yaml.safe_load((self._directory / "spec.yaml").read_text())
        url = spec["components"]["trainer"]["command"][-1]
        answer = httpx.get(f"{url}/muster/rollout", trust_env=False, timeout=DEADLINE_S)
        listeners_by_rank = {
            server["rank"]: listeners(server["port"]) for server in answer.json()["servers"]
        }
        return {rank: listener.pid for rank, [listener] in listeners_by_rank.items()}

    def kill_fleet(self) -> None:
        os.kill(self.record()["components"]["rollout"]["pid"], signal.SIGKILL)

    def _log(self) -> str:
        return self._run.host_env.log("train")


@pytest.mark.thorough
def test_run_with_a_killed_fleet_is_retried_with_a_new_fleet(host_env: HostEnvironment) -> None:
    run = host_env.start_run(build_spec(last_attempt=2))
    first = Attempt(run, 1)
    servers = first.servers()

    first.kill_fleet()
    wait_for(lambda: len(run.record()["attempts"]) == 2, "the run is retried")
    remaining_pids = [pid for pid in servers.values() if is_alive(pid)]
    run.wait_for_state("COMPLETED")

    assert remaining_pids == []
    lost_attempt, last_attempt = run.record()["attempts"]
    assert (lost_attempt["failure"]["kind"], lost_attempt["failure"]["signal"]) == (
        "FLEET_LOST",
        "SIGKILL",
    )
    assert lost_attempt["failure"]["message"].endswith(
        "; when the process ended, 2 of 2 engines served requests"
    )
    assert lost_attempt["decision"].startswith("requeued: FLEET_LOST, next try (2 of 4) in ")
    assert last_attempt["state"] == "completed"
    run.wait_until_gone()


@pytest.mark.thorough
def test_fourth_lost_fleet_ends_the_run(host_env: HostEnvironment) -> None:
    run = host_env.start_run(build_spec(last_attempt=9))

    for number in (1, 2, 3, 4):
        Attempt(run, number).kill_fleet()
    message = run.wait_for_state("FAILED")

    assert message.startswith("FLEET_LOST: rollout (pid ")
    attempts = run.record()["attempts"]
    assert [attempt["failure"]["kind"] for attempt in attempts] == ["FLEET_LOST"] * 4
    assert attempts[-1]["decision"] == "final: FLEET_LOST, 4 of 4 attempts used"
    run.wait_until_gone()


@pytest.mark.thorough
def test_failure_of_a_fleet_killed_during_a_recovery_names_the_recovering_engine(
    host_env: HostEnvironment, tmp_path: Path
) -> None:
    # In each attempt, the first start of a server works. A restarted server only sleeps, and so
    # never becomes ready.
    once = f'test ! -e {tmp_path}/$0 || exec sleep 600; : > {tmp_path}/$0; exec "$@"'
    run = host_env.start_run(
        build_spec(
            last_attempt=2, command=["sh", "-c", once, "${attempt.number}-${server.rank}", *COMMAND]
        )
    )
    first = Attempt(run, 1)

    os.kill(first.servers()[1], signal.SIGKILL)
    wait_for(lambda: first.events("rollout.recovery.begun"), "the engine is being recovered")
    first.kill_fleet()
    run.wait_for_state("COMPLETED")

    failure = run.record()["attempts"][0]["failure"]
    assert failure["message"].endswith(
        "; when the process ended, 1 of 2 engines served requests, recovering: 1"
    )
    run.wait_until_gone()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "end",
    [
        # Another process sends SIGTERM to the fleet process.
        lambda pid: os.kill(pid, signal.SIGTERM),
        # The fleet process aborts and writes a stack dump.
        lambda pid: os.kill(pid, signal.SIGABRT),
    ],
)
def test_fleet_ended_by_any_signal_counts_as_lost(
    host_env: HostEnvironment, end: Callable[[int], None]
) -> None:
    run = host_env.start_run(build_spec(last_attempt=2))
    first = Attempt(run, 1)

    end(first.record()["components"]["rollout"]["pid"])
    run.wait_for_state("COMPLETED")

    failure = run.record()["attempts"][0]["failure"]
    assert failure["kind"] == "FLEET_LOST"
    assert failure["message"].endswith("; when the process ended, 2 of 2 engines served requests")


@pytest.mark.thorough
def test_fleet_below_min_active_is_not_retried(host_env: HostEnvironment) -> None:
    run = host_env.start_run(build_spec(last_attempt=2, recovery={"min_active": 2}))
    first = Attempt(run, 1)

    os.kill(first.servers()[0], signal.SIGKILL)
    message = run.wait_for_state("FAILED")

    assert not message.startswith("FLEET_LOST")
    assert (
        "FleetError: only 1 of 2 engines serve requests, but recovery.min_active requires at "
        "least 2" in message
    )
    assert len(run.record()["attempts"]) == 1


@pytest.mark.thorough
def test_lost_fleet_on_ray_is_retried(host_env: HostEnvironment, ray_cluster: RayCluster) -> None:
    spec = build_spec(last_attempt=2, placement="ray", gpus_per_node=1)
    run = host_env.start_run({**spec, "ray": {"address": ray_cluster.address}})
    first = Attempt(run, 1)
    servers = first.servers()

    first.kill_fleet()
    wait_for(lambda: len(run.record()["attempts"]) == 2, "the run is retried")
    remaining_pids = [pid for pid in servers.values() if is_alive(pid)]
    run.wait_for_state("COMPLETED")

    assert remaining_pids == []
    failure = run.record()["attempts"][0]["failure"]
    assert failure["kind"] == "FLEET_LOST"
    assert failure["message"].endswith("; when the process ended, 2 of 2 engines served requests")
