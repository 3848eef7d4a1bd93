"""Tests that a completed run without further steps ends at once when a worker starts it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun

from tasks.processes.registry import RunRegistration
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.spec.run import RunSpec
from tasks.train import completed_run
from tasks.train.completed_run import end_completed_run, has_steps_left

RUN_ID = "a-sft-20260101-000000-aaaa91c2"
#: Checkpoint that a person has chosen for the next attempt of the run.
STEP_BACK = {"run": RUN_ID, "checkpoint": "/checkpoints/step_20", "step": 20}
FLOW_RUN_ID = UUID("11111111-0000-4000-8000-000000000000")


def make_spec(**keys: Any) -> RunSpec:
    progress = {"jsonl": "m.jsonl", "step": "step", "total": 60}
    trainer = {"command": ["train", "${attempt.resume_from}"]}
    keys = {"progress": progress, "components": {"trainer": trainer}, **keys}
    return RunSpec.model_validate({"name": "a", "workload": "sft", **keys})


def make_record(state: str = "completed", *steps: float | None) -> RunJson:
    attempts = [
        {"number": number, "state": "completed", "step": step}
        for number, step in enumerate(steps or (60,), start=1)
    ]
    content = {"run_id": RUN_ID, "flow_run_id": str(FLOW_RUN_ID), "message": "step 60 of 60"}
    return RunJson.model_validate({**content, "state": state, "attempts": attempts})


def write_record(record: RunJson) -> Path:
    path = RunPlace.of(RUN_ID).record
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(record.model_dump_json())
    return path


@pytest.fixture
def flow_run(muster_home: Path, monkeypatch: pytest.MonkeyPatch) -> FlowRun:
    """A flow run whose second process is this process. No Prefect server is used."""
    flow_run = FlowRun(id=FLOW_RUN_ID, flow_id=uuid4(), name=RUN_ID, run_count=2)
    monkeypatch.setattr(completed_run, "find_worker_flow_run", lambda: flow_run)
    monkeypatch.setattr(completed_run, "find_lasting_api_url", lambda: None)
    return flow_run


@pytest.mark.parametrize(
    ("steps", "keys", "expected"),
    [
        ((60,), {}, False),
        ((59,), {}, False),
        ((58,), {}, True),
        ((60, 30), {}, False),
        ((None,), {}, None),
        ((60,), {"progress": None}, None),
        ((50,), {"success": {"step": 50}}, True),
        ((60,), {"start_from": {**STEP_BACK, "attempt": 2}}, None),
    ],
)
def test_steps_are_left_if_the_highest_step_is_at_least_two_below_the_last_step(
    steps: tuple[float | None, ...], keys: dict[str, Any], expected: bool | None
) -> None:
    assert has_steps_left(make_spec(**keys), make_record("completed", *steps)) is expected


def test_completed_run_ends_at_once_and_keeps_its_record(flow_run: FlowRun) -> None:
    path = write_record(make_record())
    before = path.read_bytes()

    state = end_completed_run(make_spec(), RUN_ID)

    assert state is not None and state.is_completed()
    assert state.message == (
        "the run was already complete, so no attempt was started: step 60 of 60"
    )
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "record",
    [
        make_record("failed", 60),
        make_record("running", 60),
        make_record("completed", 30),
        make_record("completed", None),
        make_record().with_changes(flow_run_id=str(uuid4())),
    ],
)
def test_run_that_may_be_unfinished_is_started(flow_run: FlowRun, record: RunJson) -> None:
    write_record(record)

    assert end_completed_run(make_spec(), RUN_ID) is None


def test_run_without_a_record_is_started(flow_run: FlowRun) -> None:
    assert end_completed_run(make_spec(), RUN_ID) is None


def test_first_start_of_a_flow_run_is_not_a_retry(flow_run: FlowRun) -> None:
    write_record(make_record())
    flow_run.run_count = 1

    assert end_completed_run(make_spec(), RUN_ID) is None


def test_run_is_not_ended_while_another_process_owns_it(flow_run: FlowRun) -> None:
    path = write_record(make_record())
    registration = RunRegistration.opened(
        RUN_ID, flow_run_id=str(FLOW_RUN_ID), api_url=None, worker=None, directory=path.parent
    )

    try:
        assert end_completed_run(make_spec(), RUN_ID) is None
    finally:
        registration.close()
