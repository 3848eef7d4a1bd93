"""Components start in the order of their file, by way of a Prefect server that keeps no order of
keys: one on PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tasks.train.deploying import load_run_spec
from tests.support.gang_pool import GangPool, gang_pool
from tests.support.ground import Run, Server, in_checkout
from tests.support.postgres import postgres, why_no_postgres
from tests.support.prefect_api import ask
from tests.support.production import migrate, settings_of

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(600)]


def deployed_and_run(pool: GangPool, spec: Path) -> Run:
    """A run of the deployment that has the spec as its parameter, as `prefect deploy` gives it."""
    deployment = pool.ground.get(f"/deployments/name/train/{pool.name}")["id"]
    parameters = load_run_spec(str(spec))
    ask("PATCH", f"{pool.ground.api}/deployments/{deployment}", {"parameters": parameters})
    flow_run = pool.ground.post(f"/deployments/{deployment}/create_flow_run")["id"]
    pool.note(flow_run, parameters["spec"])
    return Run(ground=pool.ground, flow_run_id=flow_run)


@pytest.mark.skipif(bool(why_no_postgres()), reason=why_no_postgres() or "it is there")
def test_a_deployment_s_run_starts_in_the_order_of_its_file_on_postgresql(tmp_path: Path) -> None:
    names = ["environment", "sandbox", "judge", "trainer"]
    serves = {"command": ["sleep", "600"]}
    components = {name: serves for name in names} | {"trainer": {"command": ["true"]}}
    spec = tmp_path / "spec.yaml"
    written = {"name": "x", "workload": "grpo", "components": components}
    spec.write_text(yaml.safe_dump(in_checkout(written), sort_keys=False))

    with postgres() as database:
        settings = {
            **settings_of("server.env"),
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": database.url,
        }
        migrate(settings, tmp_path / "server")
        server = Server(tmp_path / "server", settings=settings)
        with gang_pool(tmp_path, server=server) as pool:
            pool.start_worker()
            run = deployed_and_run(pool, spec)
            pool.until_all_end(120)
            ended = run.flow_run()
            events = run.events()

    kept = list(ended["parameters"]["spec"]["components"])
    assert kept == ["judge", "sandbox", "trainer", "environment"]
    assert ended["state_type"] == "COMPLETED"
    assert [one["component"] for one in events if one["event"] == "component.ready"] == names
