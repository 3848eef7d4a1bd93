"""`muster deploy` and the setup of a stack keep the changes that a person made in the UI."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
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
from prefect.states import Running, Scheduled

from deployments.stack.deploying import deploy_project
from deployments.stack.env import PROJECT_FILE, ROOT
from deployments.upkeep import SERVED, deployment_options
from tasks.command import do
from tasks.server.deployments import find_deployment
from tasks.spec.pipeline import STAGE_DEPLOYMENT
from tests.support.prefect_api import send_request

SPEC = {
    "name": f"kept-{uuid4().hex[:6]}",
    "workload": "sft",
    "tags": ["demo"],
    "components": {"trainer": {"command": ["true"]}},
}
#: Schedules without a slug, as Prefect's UI creates them.
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
#: Fields of a deployment that must keep the values that a person has set in the UI.
KEPT = (*CHANGES, "schedules", "global_concurrency_limit", "work_pool_name", "work_queue_name")


@pytest.fixture
def client(prefect_url: str, muster_home: Path) -> Iterator[SyncPrefectClient]:
    """Yield a client of a server that has the general deployment, which can run any spec."""
    flow_name, name = STAGE_DEPLOYMENT.split("/")
    with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as client:
        flow_id = client.create_flow_from_name(flow_name)
        deployment_id = client.create_deployment(flow_id, name, entrypoint="flows.train.train")
        yield client
        client.delete_deployment(deployment_id)


def make_changes_of_a_person(prefect_url: str, deployment_url: str) -> Any:
    """Change a deployment as a person does in the UI, and return the changed deployment.

    The deployment must have a single schedule.
    """
    deployment = send_request("GET", deployment_url)
    address = f"{prefect_url}/deployments/{deployment['id']}"
    send_request("PATCH", address, CHANGES)
    send_request("POST", f"{address}/schedules", SCHEDULES)
    schedule = f"{address}/schedules/{deployment['schedules'][0]['id']}"
    send_request("PATCH", schedule, {"active": not deployment["schedules"][0]["active"]})
    return send_request("GET", deployment_url)


def test_renewed_deployment_keeps_what_a_person_changed_in_the_ui(
    client: SyncPrefectClient, prefect_url: str, tmp_path: Path
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(SPEC))
    deployment_url = f"{prefect_url}/deployments/name/train/{SPEC['name']}"
    assert do(["deploy", str(spec), "--cron", "0 3 * * *"]) == 0
    before = make_changes_of_a_person(prefect_url, deployment_url)

    code = do(["deploy", str(spec), "--set", "components.trainer.command=[sleep]"])

    after = send_request("GET", deployment_url)
    assert code == 0
    assert after["parameters"]["spec"]["components"]["trainer"]["command"] == ["sleep"]
    assert {name: after[name] for name in KEPT} == {name: before[name] for name in KEPT}

    assert do(["deploy", str(spec), "--no-cron"]) == 0

    remaining_schedules = {
        schedule["id"]: schedule for schedule in send_request("GET", deployment_url)["schedules"]
    }
    assert remaining_schedules == {
        schedule["id"]: schedule for schedule in before["schedules"] if schedule["slug"] is None
    }


def deploy_every_night(name: str, folder: Path) -> None:
    """Deploy a spec under a name, with a schedule at 03:00 UTC of each day."""
    spec = folder / "spec.yaml"
    spec.write_text(yaml.safe_dump(SPEC))
    assert do(["deploy", str(spec), "--name", name, "--cron", "0 3 * * *"]) == 0


def test_deployments_lists_spec_schedule_and_next_start(
    client: SyncPrefectClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"listed-{uuid4().hex[:6]}"
    deploy_every_night(name, tmp_path)
    capsys.readouterr()

    code = do(["deployments", "--json"])

    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    row = rows[f"train/{name}"]
    assert code == 0
    assert STAGE_DEPLOYMENT in rows
    assert row["spec"] == SPEC["name"]
    assert row["schedules"] == ['cron "0 3 * * *" in UTC']
    assert datetime.fromtimestamp(row["next_start"], UTC).hour == 3
    assert row["next_start"] > time.time()
    assert row["paused"] is False
    assert do(["undeploy", name]) == 0


def test_undeploy_cancels_waiting_runs_and_keeps_running_runs(
    client: SyncPrefectClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"removed-{uuid4().hex[:6]}"
    deploy_every_night(name, tmp_path)
    deployment = client.read_deployment_by_name(f"train/{name}")
    states = {"waiting": Scheduled(), "running": Running()}
    runs = {
        state_name: client.create_flow_run_from_deployment(deployment.id, state=state)
        for state_name, state in states.items()
    }
    capsys.readouterr()

    code = do(["undeploy", f"train/{name}"])

    output = capsys.readouterr().out
    ends = {state_name: client.read_flow_run(run.id).state for state_name, run in runs.items()}
    assert code == 0
    assert find_deployment(client, f"train/{name}") is None
    assert ends["waiting"] is not None and ends["waiting"].is_cancelled()
    assert f"the deployment train/{name} of the run was removed" in (ends["waiting"].message or "")
    assert ends["running"] is not None and ends["running"].is_running()
    assert re.search(r"-sft-\S+ was waiting, and was cancelled", output)
    assert re.search(r"-sft-\S+ is running, and continues", output)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nightl", "there is no deployment nightl. Deployments on the Prefect server: "),
        ("ani", "did you mean `any`? Deployments on the Prefect server: "),
        ("any", "train/any cannot be removed, because `muster submit`"),
    ],
)
def test_undeploy_refuses_unknown_and_required_deployments(
    client: SyncPrefectClient, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = do(["undeploy", name])

    assert code == 2
    assert message in capsys.readouterr().err
    assert find_deployment(client, STAGE_DEPLOYMENT) is not None


def test_overlap_sets_the_concurrency_limit_on_the_server(
    client: SyncPrefectClient, prefect_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"overlap-{uuid4().hex[:6]}"
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump({**SPEC, "name": name}))

    def deploy(overlap: str) -> tuple[int | None, str | None]:
        """Deploy the spec with the option `--overlap`. An empty `overlap` leaves the option out.

        Returns:
            The concurrency limit and the collision strategy of the deployment on the server.
        """
        options = ["--overlap", overlap] if overlap else []
        assert do(["deploy", str(spec), *options]) == 0
        deployment = send_request("GET", f"{prefect_url}/deployments/name/train/{name}")
        limit = deployment["global_concurrency_limit"]
        strategy = deployment["concurrency_options"]
        return limit and limit["limit"], strategy and strategy["collision_strategy"]

    settings = [deploy(overlap) for overlap in ("skip", "", "allow", "queue", "skip", "allow")]

    assert settings == [
        (1, "CANCEL_NEW"),
        (1, "CANCEL_NEW"),
        (None, None),
        (1, "ENQUEUE"),
        (1, "CANCEL_NEW"),
        (None, None),
    ]
    assert "overlap   skip: at most 1 run at a time" in capsys.readouterr().out


def test_setup_of_a_stack_keeps_what_a_person_changed_in_the_ui(
    client: SyncPrefectClient, prefect_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    project = yaml.safe_load(PROJECT_FILE.read_text(encoding="utf-8"))
    [entry] = [
        deployment for deployment in project["deployments"] if deployment["name"] == "quickstart"
    ]
    entry["name"] = f"set-up-{uuid4().hex[:6]}"
    project_file = tmp_path / "prefect.yaml"
    project_file.write_text(yaml.safe_dump({**project, "deployments": [entry]}))
    client.create_deployment(
        client.create_flow_from_name("train"),
        entry["name"],
        entrypoint="old.py:train",
        parameters={"spec": {"name": "old"}},
        schedules=[build_schedule(entry)],
    )
    deployment_url = f"{prefect_url}/deployments/name/train/{entry['name']}"
    before = make_changes_of_a_person(prefect_url, deployment_url)

    deploy_project(client, project_file)

    after = send_request("GET", deployment_url)
    assert after["entrypoint"] == entry["entrypoint"]
    assert after["parameters"]["spec"]["name"] == "quickstart"
    assert {name: after[name] for name in KEPT} == {name: before[name] for name in KEPT}


def build_schedule(entry: dict[str, Any]) -> DeploymentScheduleCreate:
    """Return the schedule that `prefect deploy` creates for an entry of prefect.yaml.

    The entry must have exactly one schedule.
    """
    [schedule] = entry["schedules"]
    rule = CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"])
    return DeploymentScheduleCreate(schedule=rule, active=schedule["active"], slug=schedule["slug"])


def test_restart_of_the_upkeep_keeps_schedules_of_a_person(
    client: SyncPrefectClient, prefect_url: str
) -> None:
    [served_flow] = [flow for flow in SERVED if flow.flow.name == "prune"]
    host = f"host-{uuid4().hex[:6]}"
    deployment_url = f"{prefect_url}/deployments/name/prune/{host}"
    runner = Runner(name=host)
    runner.add_flow(served_flow.flow, name=host, **deployment_options(client, served_flow, host))
    before = make_changes_of_a_person(prefect_url, deployment_url)

    runner.add_flow(served_flow.flow, name=host, **deployment_options(client, served_flow, host))

    after = send_request("GET", deployment_url)
    assert schedules_of(after) == schedules_of(before)
    assert (after["tags"], after["description"]) == (CHANGES["tags"], CHANGES["description"])


def schedules_of(deployment: dict[str, Any]) -> list[Any]:
    """Return the schedules of a deployment in a fixed order, without ids and creation times."""
    fields = ("schedule", "active", "parameters", "slug")
    schedules = [{name: schedule[name] for name in fields} for schedule in deployment["schedules"]]
    return sorted(schedules, key=str)
