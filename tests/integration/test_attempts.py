"""Runs that are tried again, on a real Prefect server with a real worker: a run that waits for its
next attempt holds no process, and goes on where it was.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.ground import FINAL, Ground, Run, host_with_worker, until
from tests.support.prefect_api import ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: As verl says it, until a file is there.
TEXT = "Total available GPUs 0 is less than total desired GPUs 16"
TRAINER = f"""
import os, sys
print("ports", *sys.argv[2:], flush=True)
if not os.path.exists(sys.argv[1]):
    raise ValueError("{TEXT}")
"""
API = "import time; print('up', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """A host with a worker."""
    home = tmp_path_factory.mktemp("host") / "home"
    with host_with_worker(tmp_path_factory.mktemp("server"), home) as ground:
        yield ground


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """There is room for the run once this file is there."""
    return tmp_path / "room"


def waiting_for(room: Path, delay_s: float) -> dict[str, Any]:
    return {
        "name": "trial",
        "workload": "grpo",
        "components": {
            "api": {"command": ["python", "-c", API, "${api.port}"], "ready": {"log": "up"}},
            "trainer": {
                "command": ["python", "-c", TRAINER, str(room), "${api.port}", "${trainer.port}"]
            },
        },
        "retry": {"INSUFFICIENT_RESOURCES": {"delay_s": delay_s, "max_delay_s": delay_s}},
    }


def until_parked(run: Run) -> dict[str, Any]:
    """Its state on the server, once it waits there."""

    def parked() -> dict[str, Any] | None:
        state: dict[str, Any] = run.flow_run()["state"]
        assert state["type"] not in FINAL, state
        return state if state["name"] == "PendingResources" else None

    return until(parked, "it waits") or {}


def artifacts(run: Run) -> dict[str, dict[str, Any]]:
    """What its page shows, by key: one artifact each, however many processes have told of it."""
    found = run.ground.post(
        "/artifacts/filter", artifacts={"flow_run_id": {"any_": [run.flow_run_id]}}
    )
    assert len({one["key"] for one in found}) == len(found)
    return {one["key"]: one for one in found}


def drawn(artifact: dict[str, Any]) -> str:
    """The picture of an artifact."""
    picture = artifact["description"].partition("data:image/svg+xml;base64,")[2].rstrip(")")
    return base64.b64decode(picture).decode()


def ports_of(run: Run, attempt: int) -> set[str]:
    log = run.record_path().parent / f"attempt-{attempt:02d}" / "trainer.log"
    [line] = [line for line in log.read_text().splitlines() if line.startswith("ports ")]
    return set(line.split()[1:])


@pytest.mark.thorough
def test_run_without_room_is_tried_again_until_there_is(ground: Ground, room: Path) -> None:
    run = ground.submit(waiting_for(room, delay_s=3))
    state = until_parked(run)

    room.touch()
    run.until_state("COMPLETED")

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
    shown = artifacts(run)
    assert {*shown} == {"summary", "components", "timeline", "attempts", "record"}
    assert shown["summary"]["description"].startswith("**completed**")
    assert f"attempt {last['number']}: completed" in drawn(shown["timeline"])
    rows = json.loads(shown["attempts"]["data"])
    assert [row["decided"] for row in rows] == [a["decision"] for a in record["attempts"]]
    assert rows[0]["line"].endswith(TEXT)
    # A fresh api, on ports of its own.
    assert requeued[-1]["components"]["api"]["pid"] != last["components"]["api"]["pid"]
    assert not ports_of(run, last["number"] - 1) & ports_of(run, last["number"])


@pytest.mark.thorough
def test_run_takes_its_record_to_another_host(ground: Ground, room: Path, tmp_path: Path) -> None:
    run = ground.submit(waiting_for(room, delay_s=3))
    until_parked(run)
    elsewhere = replace(ground, home=tmp_path / "elsewhere")
    to = {"env": {"MUSTER_HOME": str(elsewhere.home)}}
    ask("PATCH", f"{ground.api}/flow_runs/{run.flow_run_id}", {"job_variables": to})

    room.touch()
    run.until_state("COMPLETED")
    here = run.record()
    ground.reconcile()

    there = replace(run, ground=elsewhere).record()
    numbers = [attempt["number"] for attempt in there["attempts"]]
    assert numbers == list(range(1, len(numbers) + 1))
    assert there["state"] == "completed"
    assert len(numbers) > len(here["attempts"]) > 0
    # All but what was decided after it had left.
    assert there["attempts"][0] == here["attempts"][0]
    assert run.record() == there
    assert json.loads(artifacts(run)["attempts"]["data"])[-1]["state"] == "completed"


@pytest.mark.thorough
def test_run_that_waits_has_no_process_and_can_be_cancelled(ground: Ground, room: Path) -> None:
    run = ground.submit(waiting_for(room, delay_s=600))
    state = until_parked(run)
    until(lambda: not run.processes() and not run.pids(), "no process is left")
    waiting = run.record()
    page = artifacts(run)["summary"]["description"]

    registered = (ground.home / "live" / run.name).exists()
    ground.reconcile_without_flow()
    while_waiting = run.record()
    still = run.flow_run()["state"]
    ground.post(f"/flow_runs/{run.flow_run_id}/set_state", state={"type": "CANCELLING"})
    cancelled = run.state()[0]
    ground.reconcile_without_flow()

    assert not registered
    assert page.startswith("**waiting**: INSUFFICIENT") and "next: requeued: INSUFF" in page
    assert (still["id"], still["name"]) == (state["id"], "PendingResources")
    assert waiting["state"] == "pending_resources"
    assert while_waiting == waiting
    assert cancelled == "CANCELLED"
    record = run.record()
    assert record["state"] == "cancelled" and record["ended_at"] is not None
    assert record["attempts"] == waiting["attempts"]
    assert run.events()[-1]["state"] == "cancelled"
    assert not (ground.home / "parked" / f"{run.name}.json").exists()


@pytest.mark.thorough
def test_run_that_was_started_directly_waits_in_its_process(ground: Ground, room: Path) -> None:
    run = ground.start_run(waiting_for(room, delay_s=1))
    until(lambda: run.record_path().exists() and run.record()["attempts"], "its first attempt")
    pid = run.flow_pid()

    until(lambda: len(run.record()["attempts"]) > 2, "its third attempt")
    kept = run.flow_pid()
    room.touch()
    run.until_state("COMPLETED")

    attempts = run.record()["attempts"]
    assert [attempt["number"] for attempt in attempts] == list(range(1, len(attempts) + 1))
    assert {attempt["state"] for attempt in attempts[:-1]} == {"failed"}
    assert attempts[-1]["state"] == "completed"
    assert pid == kept
    assert "waiting: INSUFFICIENT_RESOURCES: " in ground.log("train")
    assert len(json.loads(artifacts(run)["attempts"]["data"])) == len(attempts)
