"""Components start in the order of the spec file on a Prefect server with PostgreSQL.

PostgreSQL does not keep the order of JSON keys.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tasks.train.deploying import load_run_spec
from tests.support.gang_pool import GangPool, gang_pool
from tests.support.host_environment import Run, Server, with_absolute_cwd
from tests.support.postgres import explain_missing_postgres, postgres
from tests.support.prefect_api import send_request
from tests.support.production import migrate, read_settings

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(600)]


def run_deployment(pool: GangPool, spec: Path) -> Run:
    """Create a deployment with a spec, as `prefect deploy` does, and run the deployment."""
    deployment = pool.host_env.get(f"/deployments/name/train/{pool.name}")["id"]
    parameters = load_run_spec(str(spec))
    send_request(
        "PATCH", f"{pool.host_env.api}/deployments/{deployment}", {"parameters": parameters}
    )
    flow_run = pool.host_env.post(f"/deployments/{deployment}/create_flow_run")["id"]
    pool.record_run(flow_run, parameters["spec"])
    return Run(host_env=pool.host_env, flow_run_id=flow_run)


@pytest.mark.skipif(
    bool(explain_missing_postgres()), reason=explain_missing_postgres() or "PostgreSQL is available"
)
def test_run_of_a_deployment_starts_in_the_order_of_the_spec_file_on_postgresql(
    tmp_path: Path,
) -> None:
    names = ["environment", "sandbox", "judge", "trainer"]
    sleeping_component = {"command": ["sleep", "600"]}
    components = {name: sleeping_component for name in names} | {"trainer": {"command": ["true"]}}
    spec = tmp_path / "spec.yaml"
    spec_content = {"name": "x", "workload": "grpo", "components": components}
    spec.write_text(yaml.safe_dump(with_absolute_cwd(spec_content), sort_keys=False))

    with postgres() as database:
        settings = {
            **read_settings("server.env"),
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": database.url,
        }
        migrate(settings, tmp_path / "server")
        server = Server(tmp_path / "server", settings=settings)
        with gang_pool(tmp_path, server=server) as pool:
            pool.start_worker()
            run = run_deployment(pool, spec)
            pool.wait_until_all_end(120)
            ended = run.flow_run()
            events = run.events()

    stored_order = list(ended["parameters"]["spec"]["components"])
    assert stored_order == ["judge", "sandbox", "trainer", "environment"]
    assert ended["state_type"] == "COMPLETED"
    assert [event["component"] for event in events if event["event"] == "component.ready"] == names
