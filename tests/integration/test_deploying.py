"""`muster deploy` and the setup of a stack against a real Prefect server: its own API tells what
became of a person's changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule
from prefect.runner import Runner
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.stack.deploying import deploy_project
from deployments.stack.env import PROJECT_FILE, ROOT
from deployments.upkeep import SERVED, deployment_options
from tasks.command import do
from tasks.spec.pipeline import STAGE_DEPLOYMENT
from tests.support.prefect_api import ask

SPEC = {
    "name": f"kept-{uuid4().hex[:6]}",
    "workload": "sft",
    "tags": ["demo"],
    "components": {"trainer": {"command": ["true"]}},
}
#: As the UI sends them, which gives no slug.
SCHEDULES = [
    {"schedule": {"interval": 18000.0, "timezone": "Asia/Tokyo"}, "active": True},
    {"schedule": {"rrule": "FREQ=WEEKLY;BYDAY=SA", "timezone": "UTC"}, "active": False},
]
CHANGES = {
    "paused": True,
    "tags": ["demo", "of-the-team"],
    "description": "Ask Ada before you touch it.",
    "concurrency_limit": 3,
    "concurrency_options": {"collision_strategy": "CANCEL_NEW"},
    "job_variables": {"env": {"HF_HOME": "/scratch"}},
    "enforce_parameter_schema": False,
}
#: A person changed them, or the server keeps them for a person.
KEPT = (*CHANGES, "schedules", "global_concurrency_limit", "work_pool_name", "work_queue_name")


@pytest.fixture
def client(prefect_url: str, muster_home: Path) -> Iterator[SyncPrefectClient]:
    """A client of a server that has the deployment by which any spec is run."""
    flow_name, name = STAGE_DEPLOYMENT.split("/")
    with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as client:
        flow_id = client.create_flow_from_name(flow_name)
        any_id = client.create_deployment(flow_id, name, entrypoint="flows.train.train")
        yield client
        client.delete_deployment(any_id)


def change_in_the_ui(prefect_url: str, named: str) -> Any:
    """Return a deployment that has one schedule, after a person changed it."""
    made = ask("GET", named)
    place = f"{prefect_url}/deployments/{made['id']}"
    ask("PATCH", place, CHANGES)
    ask("POST", f"{place}/schedules", SCHEDULES)
    schedule = f"{place}/schedules/{made['schedules'][0]['id']}"
    ask("PATCH", schedule, {"active": not made["schedules"][0]["active"]})
    return ask("GET", named)


def test_renewed_deployment_keeps_what_a_person_changed_in_the_ui(
    client: SyncPrefectClient, prefect_url: str, tmp_path: Path
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(SPEC))
    named = f"{prefect_url}/deployments/name/train/{SPEC['name']}"
    assert do(["deploy", str(spec), "--cron", "0 3 * * *"]) == 0
    before = change_in_the_ui(prefect_url, named)

    code = do(["deploy", str(spec), "--set", "components.trainer.command=[sleep]"])

    after = ask("GET", named)
    assert code == 0
    assert after["parameters"]["spec"]["components"]["trainer"]["command"] == ["sleep"]
    assert {name: after[name] for name in KEPT} == {name: before[name] for name in KEPT}

    assert do(["deploy", str(spec), "--no-cron"]) == 0

    left = {one["id"]: one for one in ask("GET", named)["schedules"]}
    assert left == {one["id"]: one for one in before["schedules"] if one["slug"] is None}


def test_setup_of_a_stack_keeps_what_a_person_changed_in_the_ui(
    client: SyncPrefectClient, prefect_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    project = yaml.safe_load(PROJECT_FILE.read_text(encoding="utf-8"))
    [entry] = [one for one in project["deployments"] if one["name"] == "quickstart"]
    entry["name"] = f"set-up-{uuid4().hex[:6]}"
    project_file = tmp_path / "prefect.yaml"
    project_file.write_text(yaml.safe_dump({**project, "deployments": [entry]}))
    client.create_deployment(
        client.create_flow_from_name("train"),
        entry["name"],
        entrypoint="old.py:train",
        parameters={"spec": {"name": "old"}},
        schedules=[nightly(entry)],
    )
    named = f"{prefect_url}/deployments/name/train/{entry['name']}"
    before = change_in_the_ui(prefect_url, named)

    deploy_project(client, project_file)

    after = ask("GET", named)
    assert after["entrypoint"] == entry["entrypoint"]
    assert after["parameters"]["spec"]["name"] == "quickstart"
    assert {name: after[name] for name in KEPT} == {name: before[name] for name in KEPT}


def nightly(entry: dict[str, Any]) -> DeploymentScheduleCreate:
    """Return the one schedule of an entry, as `prefect deploy` makes it."""
    [written] = entry["schedules"]
    rule = CronSchedule(cron=written["cron"], timezone=written["timezone"])
    return DeploymentScheduleCreate(schedule=rule, active=written["active"], slug=written["slug"])


def test_restart_of_the_upkeep_keeps_schedules_of_a_person(
    client: SyncPrefectClient, prefect_url: str
) -> None:
    [served] = [one for one in SERVED if one.flow.name == "prune"]
    host = f"host-{uuid4().hex[:6]}"
    named = f"{prefect_url}/deployments/name/prune/{host}"
    runner = Runner(name=host)
    runner.add_flow(served.flow, name=host, **deployment_options(client, served, host))
    before = change_in_the_ui(prefect_url, named)

    runner.add_flow(served.flow, name=host, **deployment_options(client, served, host))

    after = ask("GET", named)
    assert schedules_of(after) == schedules_of(before)
    assert (after["tags"], after["description"]) == (CHANGES["tags"], CHANGES["description"])


def schedules_of(deployment: dict[str, Any]) -> list[Any]:
    """Return the schedules without their ids and times of writing, in a fixed order."""
    kept = ("schedule", "active", "parameters", "slug")
    found = [{name: one[name] for name in kept} for one in deployment["schedules"]]
    return sorted(found, key=str)
