"""The deployment `prune/<host>` of the upkeep process deletes old files and flow runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.processes.identity import host_name
from tests.support.ground import Ground, Server, until

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(600)]

OLD = "old-grpo-20260101-000000-abcd91c2"
WANTED = "wanted-grpo-20260101-000000-abcd91c2"


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """Yield a simulated host with a Prefect server, and an upkeep process that runs `prune`."""
    server = Server(tmp_path_factory.mktemp("server"))
    ground = Ground(home=tmp_path_factory.mktemp("home"), api=server.api)
    try:
        server.start()
        ground.start_upkeep()
        until(lambda: "'prune' is being served" in ground.log("upkeep"), "prune is served")
        yield ground
    finally:
        ground.clear()
        server.kill()


def make_run(home: Path, run_id: str) -> Path:
    """Write the record and the log of a run that ended 100 days ago; return the log's path."""
    attempt = home / "runs" / run_id / "attempt-01"
    attempt.mkdir(parents=True)
    (attempt / "trainer.log").write_text("a line\n" * 100)
    record = {"state": "completed", "ended_at": time.time() - 100 * 24 * 3600, "attempts": []}
    (attempt.parent / "run.json").write_text(json.dumps(record))
    return attempt / "trainer.log"


def list_completed(ground: Ground, flow: str) -> list[dict[str, Any]]:
    """Return the completed flow runs of a flow."""
    states = {"state": {"type": {"any_": ["COMPLETED"]}}}
    flows = {"name": {"any_": [flow]}}
    return list(ground.post("/flow_runs/filter", flows=flows, flow_runs=states))


def test_prune_deletes_old_files_and_reports_their_number(ground: Ground) -> None:
    log = make_run(ground.home, OLD)
    wanted_log = make_run(ground.home, WANTED)
    flow = ground.post("/flows/", name="train")["id"]
    resume = {"spec": {"env": {"FROM": f"{ground.home}/runs/{WANTED}/checkpoints/step-1"}}}
    ground.post("/flow_runs/", flow_id=flow, parameters=resume, state={"type": "SCHEDULED"})
    deployment = ground.get(f"/deployments/name/prune/{host_name()}")

    run = ground.post(f"/deployments/{deployment['id']}/create_flow_run")
    state = until(lambda: _read_final_state(ground, run["id"]), "the flow run of prune ends", 300)

    assert state["type"] == "COMPLETED"
    assert state["message"].startswith("removed the files of 1 run")
    assert not log.exists()
    assert log.parent.parent.joinpath("run.json").exists()
    # A scheduled flow run will resume from a checkpoint of this run.
    assert wanted_log.exists()


def test_old_flow_runs_of_the_upkeep_are_deleted_but_not_trainings(ground: Ground) -> None:
    flow = ground.post("/flows/", name="train")["id"]
    training = ground.post("/flow_runs/", flow_id=flow, state={"type": "COMPLETED"})["id"]
    deployment = ground.get(f"/deployments/name/reconcile/{host_name()}")
    ground.post(f"/deployments/{deployment['id']}/create_flow_run")
    until(lambda: list_completed(ground, "reconcile"), "a flow run of reconcile has completed", 300)

    output = ground._python(
        "from tasks.upkeep import prune; prune._UPKEEP_DAYS = 0; print(prune.prune_host().summary)"
    )

    assert "flow runs of the upkeep" in output
    assert training in {run["id"] for run in list_completed(ground, "train")}


def _read_final_state(ground: Ground, flow_run_id: str) -> dict[str, Any]:
    """Return the state of the flow run if it is a final state; otherwise an empty dictionary."""
    state: dict[str, Any] = ground.get(f"/flow_runs/{flow_run_id}")["state"]
    return state if state["type"] in ("COMPLETED", "FAILED", "CRASHED") else {}
