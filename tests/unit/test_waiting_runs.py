"""Runs that wait without a process, and end on another host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.states import Cancelled

from tasks.record.outcome import Failure, Verdict
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson, RunRecord
from tasks.record.states import RunState
from tasks.spec.failure_kinds import FailureKind
from tasks.upkeep import waiting_runs

RUN, FLOW_RUN = "a-run", "1b4e28ba-2fa1-4d3b-a3f5-ef19b5a7633b"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A server on which the run is Cancelled, with a copy of its record."""

    @contextmanager
    def talking_to(_api_url: str) -> Iterator[None]:
        yield None

    there = SimpleNamespace(record=None)
    monkeypatch.setattr(waiting_runs, "talking_to", talking_to)
    monkeypatch.setattr(waiting_runs, "state_of", lambda _client, _id: Cancelled())
    monkeypatch.setattr(waiting_runs, "read_page_record", lambda _client, _id: there.record)
    monkeypatch.setattr(waiting_runs, "update_page_of_closed_run", lambda *_what: None)
    return there


def record_at(path: Path, **more: Any) -> RunRecord:
    path.parent.mkdir(parents=True, exist_ok=True)
    return RunRecord(path, run_id=RUN, flow_run_id=FLOW_RUN, **more)


def parked_here() -> Path:
    """A run that waits for its second attempt."""
    path = RunPlace.of(RUN).record
    record = record_at(path)
    record.begin_attempt(1, host="here")
    for state in (RunState.ADMITTED, RunState.STARTING, RunState.STOPPING):
        record.move(state)
    failure = Failure(kind=FailureKind.INSUFFICIENT_RESOURCES, message="no room")
    record.end_attempt(Verdict.failed(failure, 3.0))
    record.move(RunState.PENDING_RESOURCES)
    waiting_runs.note_waiting_run(RUN, FLOW_RUN, "http://127.0.0.1:9/api")
    return path


def test_attempts_on_a_lost_host_stay_in_the_record(
    muster_home: Path, tmp_path: Path, kept: SimpleNamespace
) -> None:
    here = parked_here()
    there = record_at(tmp_path / "there" / "run.json", earlier=RunJson.read(here))
    there.begin_attempt(2, host="there")
    there.move(RunState.ADMITTED)
    kept.record = there.content

    [closed] = waiting_runs.close_ended_waiting_runs()

    content = json.loads(here.read_text())
    assert closed.record == content["state"] == "cancelled"
    assert [attempt["host"] for attempt in content["attempts"]] == ["here", "there"]
    assert content["attempts"][1]["failure"]["rule"] == "host-lost"
    assert waiting_runs.list_waiting_runs() == []


def test_run_is_closed_by_its_own_record_if_no_other_host_knows_more(
    muster_home: Path, kept: SimpleNamespace
) -> None:
    here = parked_here()
    kept.record = RunJson.read(here)

    list(waiting_runs.close_ended_waiting_runs())

    content = json.loads(here.read_text())
    assert content["state"] == "cancelled" and len(content["attempts"]) == 1


def test_end_of_an_attempt_that_moved_is_taken_from_the_other_host(
    muster_home: Path, kept: SimpleNamespace
) -> None:
    here = parked_here()
    there = RunJson.read(here).with_changes(state=RunState.COMPLETED, message="done there")
    kept.record = there

    list(waiting_runs.close_ended_waiting_runs())

    assert json.loads(here.read_text()) == there.as_json()
    assert waiting_runs.list_waiting_runs() == []
