"""`prune/<host>`, as the upkeep serves it on a real Prefect server, and what it deletes there."""

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

OLD, WANTED = (f"{name}-grpo-20260101-000000-abcd91c2" for name in ("old", "wanted"))


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """A host whose upkeep is served."""
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
    attempt = home / "runs" / run_id / "attempt-01"
    attempt.mkdir(parents=True)
    (attempt / "trainer.log").write_text("a line\n" * 100)
    record = {"state": "completed", "ended_at": time.time() - 100 * 24 * 3600, "attempts": []}
    (attempt.parent / "run.json").write_text(json.dumps(record))
    return attempt / "trainer.log"


def completed(ground: Ground, flow: str) -> list[dict[str, Any]]:
    states = {"state": {"type": {"any_": ["COMPLETED"]}}}
    flows = {"name": {"any_": [flow]}}
    return list(ground.post("/flow_runs/filter", flows=flows, flow_runs=states))


def test_the_upkeep_prunes_and_says_what_it_did(ground: Ground) -> None:
    log, wanted = make_run(ground.home, OLD), make_run(ground.home, WANTED)
    flow = ground.post("/flows/", name="train")["id"]
    resume = {"spec": {"env": {"FROM": f"{ground.home}/runs/{WANTED}/checkpoints/step-1"}}}
    ground.post("/flow_runs/", flow_id=flow, parameters=resume, state={"type": "SCHEDULED"})
    deployment = ground.get(f"/deployments/name/prune/{host_name()}")

    run = ground.post(f"/deployments/{deployment['id']}/create_flow_run")
    state = until(lambda: _ended(ground, run["id"]), "the flow run of prune ends", 300)

    assert state["type"] == "COMPLETED"
    assert state["message"].startswith("removed the files of 1 run")
    assert not log.exists()
    assert log.parent.parent.joinpath("run.json").exists()
    # a flow run that waits is to start from it
    assert wanted.exists()


def test_flow_runs_of_the_upkeep_are_deleted_and_trainings_are_not(ground: Ground) -> None:
    flow = ground.post("/flows/", name="train")["id"]
    training = ground.post("/flow_runs/", flow_id=flow, state={"type": "COMPLETED"})["id"]
    deployment = ground.get(f"/deployments/name/reconcile/{host_name()}")
    ground.post(f"/deployments/{deployment['id']}/create_flow_run")
    until(lambda: completed(ground, "reconcile"), "a reconcile has completed", 300)

    done = ground._python(
        "from tasks.upkeep import prune; prune._UPKEEP_DAYS = 0; print(prune.prune_host().summary)"
    )

    assert "flow runs of the upkeep" in done
    assert training in {run["id"] for run in completed(ground, "train")}


def _ended(ground: Ground, flow_run_id: str) -> dict[str, Any]:
    state: dict[str, Any] = ground.get(f"/flow_runs/{flow_run_id}")["state"]
    return state if state["type"] in ("COMPLETED", "FAILED", "CRASHED") else {}
