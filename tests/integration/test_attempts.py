"""Runs that are retried by a real worker on a real Prefect server.

Between two attempts, a run waits without a process.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_environment import FINAL, HostEnvironment, Run, host_with_worker, wait_for
from tests.support.prefect_api import send_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Error message of the RL framework verl for a cluster with too few GPUs. Each trainer prints this
#: message and fails, until the test creates a file.
TEXT = "Total available GPUs 0 is less than total desired GPUs 16"
TRAINER = f"""
import os, sys
print("ports", *sys.argv[2:], flush=True)
if not os.path.exists(sys.argv[1]):
    raise ValueError("{TEXT}")
"""
API = "import time; print('up', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def host_env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostEnvironment]:
    """Yield a `HostEnvironment`: a simulated host with a Prefect server and a worker."""
    home = tmp_path_factory.mktemp("host") / "home"
    with host_with_worker(tmp_path_factory.mktemp("server"), home) as host_env:
        yield host_env


@pytest.fixture
def room_file(tmp_path: Path) -> Path:
    """Return the path of a missing file. The trainer succeeds after the test creates this file."""
    return tmp_path / "room"


def build_spec(room_file: Path, delay_s: float) -> dict[str, Any]:
    """Return the spec of a run whose trainer fails for lack of GPUs until a file exists.

    Args:
        room_file: Path of this file.
        delay_s: Wait before the next attempt, in seconds.
    """
    return {
        "name": "trial",
        "workload": "grpo",
        "components": {
            "api": {"command": ["python", "-c", API, "${api.port}"], "ready": {"log": "up"}},
            "trainer": {
                "command": [
                    "python",
                    "-c",
                    TRAINER,
                    str(room_file),
                    "${api.port}",
                    "${trainer.port}",
                ]
            },
        },
        "retry": {"INSUFFICIENT_RESOURCES": {"delay_s": delay_s, "max_delay_s": delay_s}},
    }


def wait_until_parked(run: Run) -> dict[str, Any]:
    """Wait until the run has the state PendingResources in Prefect, and return this state."""

    def find_parked_state() -> dict[str, Any] | None:
        state: dict[str, Any] = run.flow_run()["state"]
        assert state["type"] not in FINAL, state
        return state if state["name"] == "PendingResources" else None

    return wait_for(find_parked_state, "the run waits for its next attempt") or {}


def read_artifacts(run: Run) -> dict[str, dict[str, Any]]:
    """Return a mapping from key to Prefect artifact of the run; check that each key is unique."""
    artifacts = run.host_env.post(
        "/artifacts/filter", artifacts={"flow_run_id": {"any_": [run.flow_run_id]}}
    )
    assert len({artifact["key"] for artifact in artifacts}) == len(artifacts)
    return {artifact["key"]: artifact for artifact in artifacts}


def decode_picture(artifact: dict[str, Any]) -> str:
    """Return the SVG picture that an artifact contains."""
    picture = artifact["description"].partition("data:image/svg+xml;base64,")[2].rstrip(")")
    return base64.b64decode(picture).decode()


def read_ports(run: Run, attempt: int) -> set[str]:
    """Return the ports that the trainer printed in an attempt."""
    log = run.record_path().parent / f"attempt-{attempt:02d}" / "trainer.log"
    [line] = [line for line in log.read_text().splitlines() if line.startswith("ports ")]
    return set(line.split()[1:])


@pytest.mark.thorough
def test_run_without_gpus_is_retried_until_gpus_are_free(
    host_env: HostEnvironment, room_file: Path
) -> None:
    run = host_env.submit(build_spec(room_file, delay_s=3))
    state = wait_until_parked(run)

    room_file.touch()
    run.wait_for_state("COMPLETED")

    assert state["type"] == "SCHEDULED"
    assert state["message"].startswith("INSUFFICIENT_RESOURCES: ")
    assert f"{TEXT}; attempt " in state["message"]
    record = run.record()
    *requeued, last = record["attempts"]
    assert record["state"] == "completed"
    assert [a["number"] for a in record["attempts"]] == list(range(1, len(requeued) + 2))
    assert {a["failure"]["kind"] for a in requeued} == {"INSUFFICIENT_RESOURCES"}
    for attempt in requeued:
        assert attempt["decision"].startswith("requeued: INSUFFICIENT_RESOURCES, next try in ")
    assert (last["state"], last["decision"]) == ("completed", "final: completed")
    artifacts = read_artifacts(run)
    assert {*artifacts} == {"summary", "components", "timeline", "attempts", "record"}
    assert artifacts["summary"]["description"].startswith("**completed**")
    assert f"attempt {last['number']}: completed" in decode_picture(artifacts["timeline"])
    rows = json.loads(artifacts["attempts"]["data"])
    assert [row["decided"] for row in rows] == [a["decision"] for a in record["attempts"]]
    assert rows[0]["line"].endswith(TEXT)
    # The last attempt has a new api process, and each attempt has its own ports.
    assert requeued[-1]["components"]["api"]["pid"] != last["components"]["api"]["pid"]
    assert not read_ports(run, last["number"] - 1) & read_ports(run, last["number"])


@pytest.mark.thorough
def test_run_takes_its_record_to_another_host(
    host_env: HostEnvironment, room_file: Path, tmp_path: Path
) -> None:
    run = host_env.submit(build_spec(room_file, delay_s=3))
    wait_until_parked(run)
    elsewhere = replace(host_env, home=tmp_path / "elsewhere")
    job_variables = {"env": {"MUSTER_HOME": str(elsewhere.home)}}
    send_request(
        "PATCH", f"{host_env.api}/flow_runs/{run.flow_run_id}", {"job_variables": job_variables}
    )

    room_file.touch()
    run.wait_for_state("COMPLETED")
    record_here = run.record()
    host_env.reconcile()

    record_elsewhere = replace(run, host_env=elsewhere).record()
    numbers = [attempt["number"] for attempt in record_elsewhere["attempts"]]
    assert numbers == list(range(1, len(numbers) + 1))
    assert record_elsewhere["state"] == "completed"
    assert len(numbers) > len(record_here["attempts"]) > 0
    # Before `reconcile`, this host's record of the run lacked the attempts that ran on the other
    # host. `reconcile` has replaced the record with a complete record.
    assert record_elsewhere["attempts"][0] == record_here["attempts"][0]
    assert run.record() == record_elsewhere
    assert json.loads(read_artifacts(run)["attempts"]["data"])[-1]["state"] == "completed"


@pytest.mark.thorough
def test_run_between_attempts_has_no_process_and_can_be_cancelled(
    host_env: HostEnvironment, room_file: Path
) -> None:
    run = host_env.submit(build_spec(room_file, delay_s=600))
    state = wait_until_parked(run)
    wait_for(lambda: not run.processes() and not run.pids(), "no process of the run remains")
    record_before = run.record()
    page = read_artifacts(run)["summary"]["description"]

    registered = (host_env.home / "live" / run.name).exists()
    host_env.reconcile_without_flow()
    record_after_reconcile = run.record()
    state_after_reconcile = run.flow_run()["state"]
    host_env.post(f"/flow_runs/{run.flow_run_id}/set_state", state={"type": "CANCELLING"})
    state_type = run.state()[0]
    host_env.reconcile_without_flow()

    assert not registered
    assert page.startswith("**waiting**: INSUFFICIENT") and "next: requeued: INSUFF" in page
    assert (state_after_reconcile["id"], state_after_reconcile["name"]) == (
        state["id"],
        "PendingResources",
    )
    assert record_before["state"] == "pending_resources"
    assert record_after_reconcile == record_before
    assert state_type == "CANCELLED"
    record = run.record()
    assert record["state"] == "cancelled" and record["ended_at"] is not None
    assert record["attempts"] == record_before["attempts"]
    assert run.events()[-1]["state"] == "cancelled"
    assert not (host_env.home / "parked" / f"{run.name}.json").exists()


@pytest.mark.thorough
def test_directly_started_run_waits_for_its_next_attempt_in_its_process(
    host_env: HostEnvironment, room_file: Path
) -> None:
    run = host_env.start_run(build_spec(room_file, delay_s=1))
    wait_for(
        lambda: run.record_path().exists() and run.record()["attempts"], "the run has an attempt"
    )
    pid = run.flow_pid()

    wait_for(lambda: len(run.record()["attempts"]) > 2, "the run has three attempts")
    later_pid = run.flow_pid()
    room_file.touch()
    run.wait_for_state("COMPLETED")

    attempts = run.record()["attempts"]
    assert [attempt["number"] for attempt in attempts] == list(range(1, len(attempts) + 1))
    assert {attempt["state"] for attempt in attempts[:-1]} == {"failed"}
    assert attempts[-1]["state"] == "completed"
    assert pid == later_pid
    assert "waiting: INSUFFICIENT_RESOURCES: " in host_env.log("train")
    assert len(json.loads(read_artifacts(run)["attempts"]["data"])) == len(attempts)
