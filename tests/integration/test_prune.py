"""The deployment `prune/<host>` of the upkeep process deletes old files and flow runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.processes.identity import host_name
from tests.support.host_environment import HostEnvironment, Server, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(600)]

OLD = "old-grpo-20260101-000000-abcd91c2"
WANTED = "wanted-grpo-20260101-000000-abcd91c2"


@pytest.fixture(scope="module")
def host_env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostEnvironment]:
    """Yield a simulated host with a Prefect server, and an upkeep process that runs `prune`."""
    server = Server(tmp_path_factory.mktemp("server"))
    host_env = HostEnvironment(home=tmp_path_factory.mktemp("home"), api=server.api)
    try:
        server.start()
        host_env.start_upkeep()
        wait_for(lambda: "'prune' is being served" in host_env.log("upkeep"), "prune is served")
        yield host_env
    finally:
        host_env.clear()
        server.kill()


def make_run(home: Path, run_id: str) -> Path:
    """Write the record and the log of a run that ended 100 days ago; return the log's path."""
    attempt = home / "runs" / run_id / "attempt-01"
    attempt.mkdir(parents=True)
    (attempt / "trainer.log").write_text("a line\n" * 100)
    record = {"state": "completed", "ended_at": time.time() - 100 * 24 * 3600, "attempts": []}
    (attempt.parent / "run.json").write_text(json.dumps(record))
    return attempt / "trainer.log"


def list_completed(host_env: HostEnvironment, flow: str) -> list[dict[str, Any]]:
    """Return the completed flow runs of a flow."""
    states = {"state": {"type": {"any_": ["COMPLETED"]}}}
    flows = {"name": {"any_": [flow]}}
    return list(host_env.post("/flow_runs/filter", flows=flows, flow_runs=states))


def test_prune_deletes_old_files_and_reports_their_number(host_env: HostEnvironment) -> None:
    log = make_run(host_env.home, OLD)
    wanted_log = make_run(host_env.home, WANTED)
    flow = host_env.post("/flows/", name="train")["id"]
    resume = {"spec": {"env": {"FROM": f"{host_env.home}/runs/{WANTED}/checkpoints/step-1"}}}
    host_env.post("/flow_runs/", flow_id=flow, parameters=resume, state={"type": "SCHEDULED"})
    deployment = host_env.get(f"/deployments/name/prune/{host_name()}")

    run = host_env.post(f"/deployments/{deployment['id']}/create_flow_run")
    state = wait_for(
        lambda: _read_final_state(host_env, run["id"]), "the flow run of prune ends", 300
    )

    assert state["type"] == "COMPLETED"
    assert state["message"].startswith("removed the files of 1 run")
    assert not log.exists()
    assert log.parent.parent.joinpath("run.json").exists()
    # The log of this run is kept, because a scheduled flow run will resume from a checkpoint of
    # this run.
    assert wanted_log.exists()


def test_old_flow_runs_of_the_upkeep_are_deleted_but_not_trainings(
    host_env: HostEnvironment,
) -> None:
    flow = host_env.post("/flows/", name="train")["id"]
    training = host_env.post("/flow_runs/", flow_id=flow, state={"type": "COMPLETED"})["id"]
    deployment = host_env.get(f"/deployments/name/reconcile/{host_name()}")
    host_env.post(f"/deployments/{deployment['id']}/create_flow_run")
    wait_for(
        lambda: list_completed(host_env, "reconcile"), "a flow run of reconcile has completed", 300
    )

    output = host_env._python(
        "from tasks.upkeep import prune; prune._UPKEEP_DAYS = 0; print(prune.prune_host().summary)"
    )

    assert "flow runs of the upkeep" in output
    assert training in {run["id"] for run in list_completed(host_env, "train")}


def _read_final_state(host_env: HostEnvironment, flow_run_id: str) -> dict[str, Any]:
    """Return the final state of the flow run, or {} if the flow run has not ended."""
    state: dict[str, Any] = host_env.get(f"/flow_runs/{flow_run_id}")["state"]
    return state if state["type"] in ("COMPLETED", "FAILED", "CRASHED") else {}
