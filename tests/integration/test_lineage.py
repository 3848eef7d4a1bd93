"""The lineage of runs on a real Prefect server: asset events, artifacts and `muster lineage`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tasks.spec.step import build_run_spec
from tests.support.host_environment import HostEnvironment, Run, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

REFERENCED = "prefect.asset.referenced"
MADE = "prefect.asset.materialization.succeeded"
#: Training program that saves one checkpoint in its folder.
TRAIN = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
(folder / "step-000003.txt").write_text("weights")
"""
#: Program of a step that evaluates and exports a checkpoint.
SCORE = """
import json, os, pathlib, sys
export = os.path.dirname(os.environ["MUSTER_RESULT"]) + "/model.txt"
pathlib.Path(export).write_text(pathlib.Path(sys.argv[1]).read_text())
result = {"score": 0.5, "model": export}
pathlib.Path(os.environ["MUSTER_RESULT"]).write_text(json.dumps(result))
"""
TOKEN = "secret-of-the-data-0011"


@pytest.fixture
def host_env(prefect_url: str, tmp_path: Path) -> Iterator[HostEnvironment]:
    host = HostEnvironment(home=tmp_path / "home", api=prefect_url)
    yield host
    host.clear()


def complete_run(host: HostEnvironment, spec: Mapping[str, Any]) -> Run:
    """Execute a run until it is completed and its process has exited, and return the run."""
    run = host.start_run(spec)
    run.wait_for_state("COMPLETED")
    wait_for(lambda: host._started[-1].poll() is not None, "the flow process has exited")
    return run


def read_asset_events(run: Run) -> list[dict[str, Any]]:
    """Return the asset events of the run's flow run from the Prefect server, the oldest first."""
    event_filter = {
        "event": {"prefix": ["prefect.asset."]},
        "related": {"id": [f"prefect.flow-run.{run.flow_run_id}"]},
        "order": "ASC",
    }
    return list(run.host_env.post("/events/filter", filter=event_filter)["events"])


def wait_for_asset_events(run: Run, count: int) -> list[dict[str, Any]]:
    def find_events() -> list[dict[str, Any]]:
        events = read_asset_events(run)
        return events if len(events) >= count else []

    return wait_for(find_events, f"the server has {count} asset events")


def list_pairs(events: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """Return the name and the asset key of each event."""
    return {(event["event"], event["resource"]["prefect.resource.id"]) for event in events}


def list_related(event: dict[str, Any], role: str) -> list[str]:
    resources = event["related"]
    return [
        resource["prefect.resource.id"]
        for resource in resources
        if resource["prefect.resource.role"] == role
    ]


def test_server_knows_which_run_made_which_checkpoint_from_which_data(
    host_env: HostEnvironment, tmp_path: Path
) -> None:
    trainer = {
        "command": [sys.executable, "-c", TRAIN, "${run.dir}/checkpoints"],
        "checkpoints": "${run.dir}/checkpoints",
        "env": {"DATA_TOKEN": TOKEN},
    }
    training = complete_run(
        host_env,
        {
            "name": "tune",
            "workload": "sft",
            "inputs": ["/data/train.jsonl", f"hf://datasets/{TOKEN}"],
            "components": {"trainer": trainer},
        },
    )
    directory = host_env.home / "runs" / training.name
    checkpoint = directory / "checkpoints" / "step-000003.txt"
    step = {"name": "score", "command": [sys.executable, "-c", SCORE, str(checkpoint)]}
    scoring = complete_run(host_env, build_run_spec({**step, "on": "host"}))
    attempt = host_env.home / "runs" / scoring.name / "attempt-01"

    training_events = wait_for_asset_events(training, 3)
    scoring_events = wait_for_asset_events(scoring, 3)

    assert list_pairs(training_events) == {
        (REFERENCED, "file:///data/train.jsonl"),
        # The secret is masked.
        (REFERENCED, "hf://datasets/***"),
        (MADE, f"file://{checkpoint}"),
    }
    assert list_pairs(scoring_events) == {
        (REFERENCED, f"file://{checkpoint}"),
        (MADE, f"muster://runs/{scoring.name}/result"),
        (MADE, f"file://{attempt}/model.txt"),
    }
    [saved] = [event for event in training_events if event["event"] == MADE]
    assert list_related(saved, "asset") == ["file:///data/train.jsonl", "hf://datasets/***"]
    assert saved["payload"]["step"] == 3
    [scored] = [event for event in scoring_events if event["payload"].get("figures")]
    assert list_related(scored, "asset") == [f"file://{checkpoint}"]
    assert (scored["payload"]["kind"], scored["payload"]["figures"]) == (
        "evaluation",
        {"score": 0.5},
    )
    assert TOKEN not in json.dumps([training_events, scoring_events])

    # The other host has no files of these runs, so the command must ask the Prefect server.
    other_host = HostEnvironment(home=tmp_path / "other-home", api=host_env.api)
    content = json.loads(other_host.run_module("tasks.command", "lineage", training.name, "--json"))
    tree = host_env.run_module("tasks.command", "lineage", scoring.name)

    assert next(data["uri"] for data in content["inputs"]) == "/data/train.jsonl"
    [output] = content["outputs"]
    assert (output["uri"], output["step"]) == (str(checkpoint), 3)
    [user] = content["used_by"]
    assert (user["run_id"], user["state"]) == (scoring.name, "completed")
    assert {made["kind"] for made in user["outputs"]} == {"evaluation", "export"}
    lines = [line.lstrip("│├└─ ") for line in tree.splitlines()]
    assert lines[1:5] == [
        "made from",
        f"checkpoint {checkpoint} (step 3)",
        f"made by {training.name} completed",
        "data /data/train.jsonl",
    ]
    assert f"evaluation score=0.5 {attempt}/result.json" in lines
