"""Runs of a deployment with a concurrency limit, on a real Prefect server that is restarted."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.gang_pool import POOL, GangPool, host
from tests.support.gang_referee import FINAL
from tests.support.host_environment import Run, Server, wait_for
from tests.support.postgres import explain_missing_postgres, postgres
from tests.support.prefect_api import send_request
from tests.support.production import migrate

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(600)]

#: Time limit for a decision of the scheduler, in seconds.
WITHIN_S = 60.0
#: Setting that makes the server keep its concurrency leases in memory, as Prefect does by default.
LEASES_IN_MEMORY = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.memory"
}
#: Name of the server setting that contains the address of the database. The fixture `pool` sets the
#: address.
DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
#: Settings of a server that uses PostgreSQL. The server keeps its concurrency leases in memory.
WITH_POSTGRESQL = {**LEASES_IN_MEMORY, DATABASE: "postgresql"}


def read_deployment(pool: GangPool) -> dict[str, Any]:
    deployment: dict[str, Any] = pool.host_env.get(f"/deployments/name/train/{POOL}")
    return deployment


def read_active_slots(pool: GangPool) -> int:
    """Return how many runs the server counts as active for the deployment's concurrency limit."""
    return int(read_deployment(pool)["global_concurrency_limit"]["active_slots"])


def limit_deployment(pool: GangPool, strategy: str = "ENQUEUE") -> None:
    """Allow only one run of the deployment at a time.

    Args:
        pool: Pool of the deployment.
        strategy: Prefect's collision strategy for a second run. "ENQUEUE" lets the run wait.
    """
    address = f"{pool.host_env.api}/deployments/{read_deployment(pool)['id']}"
    options = {"collision_strategy": strategy}
    send_request("PATCH", address, {"concurrency_limit": 1, "concurrency_options": options})


@pytest.fixture
def pool(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[GangPool]:
    """Yield a pool without a worker. The fixture's parameter contains settings of the server."""
    settings = dict(getattr(request, "param", {}))
    with ExitStack() as stack:
        if DATABASE in settings:
            if reason := explain_missing_postgres():
                pytest.skip(reason)
            settings[DATABASE] = stack.enter_context(postgres()).url
            migrate(settings, tmp_path / "server")
        server = Server(tmp_path / "server", settings=settings)
        pool = GangPool(host_env=host("n1", tmp_path / "n1", server.api), server=server)
        try:
            server.start()
            pool.set_up()
            yield pool
        finally:
            pool.host_env.clear()
            server.kill()


def restart_server(pool: GangPool) -> None:
    pool.server.kill()
    pool.server.start()


def find_waiting_message(run: Run) -> str:
    """Return the message of a run that waits in the queue, or an empty string."""
    state = run.flow_run()["state"]
    return state["message"] or "" if state["name"] == "PendingResources" else ""


@pytest.mark.parametrize(
    "pool", [LEASES_IN_MEMORY, WITH_POSTGRESQL], ids=["sqlite", "postgresql"], indirect=True
)
def test_run_completes_after_its_deployments_lease_is_lost(pool: GangPool) -> None:
    limit_deployment(pool)
    pool.start_worker()
    # The restart of the server deletes the run's lease of the concurrency limit. Without Muster's
    # change of Prefect's engine, the engine would try to renew this lease after 225 s, fail, and
    # end the run. So the run of this test takes longer than 225 s.
    run = pool.submit(pool.spec(lasts_s=260.0))
    next_run = pool.submit(pool.spec(lasts_s=0.2))
    wait_for(lambda: run.state()[0] == "RUNNING", "the first run is running", WITHIN_S)

    restart_server(pool)

    message = wait_for(lambda: find_waiting_message(next_run), "the next run waits", WITHIN_S)
    assert (
        message
        == "needs 1 node with 1 GPU; waits because its deployment has reached its limit of 1 run"
    )
    assert read_active_slots(pool) == 1
    wait_for(lambda: run.state()[0] == "COMPLETED", "the first run is completed", 330.0)
    wait_for(lambda: next_run.state()[0] == "COMPLETED", "the next run is completed", WITHIN_S)
    assert json.loads(run.record_path().read_text())["state"] == "completed"
    assert read_active_slots(pool) == 0
    ends = [line["at"] for line in pool.read_lines_of(run) if line["what"] == "end"]
    starts = [line["at"] for line in pool.read_lines_of(next_run) if line["what"] == "start"]
    assert max(ends) <= min(starts)


@pytest.mark.parametrize("pool", [LEASES_IN_MEMORY], indirect=True)
def test_run_is_cancelled_in_order_after_its_deployments_lease_is_lost(pool: GangPool) -> None:
    limit_deployment(pool)
    pool.start_worker()
    # The restart of the server deletes the run's lease of the concurrency limit. Without Muster's
    # change of Prefect's engine, the engine would try to renew this lease after 225 s, fail, and
    # end the run. So the run of this test takes longer than 225 s.
    run = pool.submit(pool.spec(lasts_s=900.0))
    wait_for(lambda: run.state()[0] == "RUNNING", "the run is running", WITHIN_S)
    [start] = [line["at"] for line in wait_for(lambda: pool.read_lines_of(run), "it starts")][:1]
    restart_server(pool)
    wait_for(lambda: time.time() - start > 240.0, "Prefect's renewal would fail", 300.0)
    state_after_renewal = run.state()[0]

    pool.cancel(run)

    wait_for(lambda: run.state()[0] == "CANCELLED", "the run is cancelled", WITHIN_S)
    assert state_after_renewal == "RUNNING"
    assert run.record()["state"] == "cancelled"
    assert run.pids() == []
    assert read_active_slots(pool) == 0


def test_run_that_is_starting_survives_a_restart_of_the_server(pool: GangPool) -> None:
    limit_deployment(pool)
    run = pool.submit(pool.spec())
    assert pool.set_state(run, "PENDING") == "PENDING"

    restart_server(pool)

    assert pool.set_state(run, "RUNNING") == "RUNNING"
    assert read_active_slots(pool) == 1
    assert pool.set_state(run, "COMPLETED") == "COMPLETED"
    assert read_active_slots(pool) == 0


@pytest.mark.parametrize("pool", [LEASES_IN_MEMORY], indirect=True)
def test_run_whose_lease_is_lost_before_its_start_waits_again_and_completes(
    pool: GangPool, tmp_path: Path
) -> None:
    limit_deployment(pool)
    begun, may_go_on = tmp_path / "begun", tmp_path / "may-go-on"
    wait = f"touch {begun}; while [ ! -e {may_go_on} ]; do sleep 0.1; done"
    start = f"exec {sys.executable} -P -m flows $PREFECT__FLOW_RUN_ID"
    command = shlex.join(["sh", "-c", f"{wait}; {start}"])
    address = f"{pool.host_env.api}/deployments/{read_deployment(pool)['id']}"
    send_request("PATCH", address, {"job_variables": {"command": command}})
    pool.start_worker()
    run = pool.submit(pool.spec(lasts_s=0.2))
    wait_for(begun.exists, "the process of the run begins", WITHIN_S)

    restart_server(pool)
    state_before = run.state()[0]
    may_go_on.touch()

    wait_for(lambda: run.state()[0] in FINAL, "the run ends", WITHIN_S)
    assert (state_before, run.state()[0]) == ("PENDING", "COMPLETED")
    assert read_active_slots(pool) == 0


def test_run_without_worker_blocks_no_run_after_its_deployments_limit_was_removed(
    pool: GangPool,
) -> None:
    limit_deployment(pool)
    run = pool.submit(pool.spec(lasts_s=0.2))
    assert pool.set_state(run, "PENDING") == "PENDING"
    address = f"{pool.host_env.api}/deployments/{read_deployment(pool)['id']}"
    send_request("PATCH", address, {"concurrency_limit": None})

    pool.start_worker()
    # If the worker does not start the run within a minute, the scheduler returns the run to the
    # queue.
    wait_for(lambda: run.state()[0] == "COMPLETED", "the run is completed", 60.0 + WITHIN_S)
    next_run = pool.submit(pool.spec(lasts_s=0.2))

    wait_for(lambda: next_run.state()[0] == "COMPLETED", "the next run is completed", WITHIN_S)


def test_overlapping_run_is_skipped_while_the_last_run_is_going(pool: GangPool) -> None:
    limit_deployment(pool, "CANCEL_NEW")
    pool.start_worker()
    run = pool.submit(pool.spec(lasts_s=15.0))
    overlapping_run = pool.submit(pool.spec())

    message = overlapping_run.wait_for_state("CANCELLED")
    state_of_first = run.state()[0]
    run.wait_for_state("COMPLETED")
    later_run = pool.submit(pool.spec(lasts_s=0.2))
    later_run.wait_for_state("COMPLETED")

    assert message.startswith("skipped: the deployment allows 1 run at a time, and gang-grpo-")
    assert state_of_first != "COMPLETED"
    assert pool.read_lines_of(overlapping_run) == []


def test_run_ends_after_the_limit_of_its_deployment_was_removed(pool: GangPool) -> None:
    limit_deployment(pool)
    pool.start_worker()
    pool.host_env.start_upkeep()
    run = pool.submit(pool.spec(lasts_s=20.0))
    wait_for(lambda: pool.read_lines_of(run), "the run works", WITHIN_S)

    address = f"{pool.host_env.api}/deployments/{read_deployment(pool)['id']}"
    send_request("PATCH", address, {"concurrency_limit": None})

    wait_for(lambda: run.state()[0] == "COMPLETED", "the run is completed", 240.0)
    assert run.record()["state"] == "completed"
