"""Runs that wait without a process, and are cancelled or end on another host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from tasks.record.evaluations import EvaluationNote, EvaluationsJson, EvaluationState
from tasks.record.outcome import Failure, Verdict
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson, RunRecord
from tasks.record.states import RunState
from tasks.spec.failure_kinds import FailureKind
from tasks.upkeep import waiting_runs

RUN, FLOW_RUN = "a-run", "1b4e28ba-2fa1-4d3b-a3f5-ef19b5a7633b"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Fake Prefect server on which the run has the state Cancelled.

    The attribute `record` is the server's copy of the run's record.
    """

    @contextmanager
    def connect_to_server(_api_url: str) -> Iterator[None]:
        yield None

    server = SimpleNamespace(record=None)
    monkeypatch.setattr(waiting_runs, "connect_to_server", connect_to_server)
    monkeypatch.setattr(waiting_runs, "read_state", lambda _client, _id: Cancelled())
    monkeypatch.setattr(waiting_runs, "read_page_record", lambda _client, _id: server.record)
    monkeypatch.setattr(waiting_runs, "update_page_of_closed_run", lambda *_what: None)
    return server


def make_record(path: Path, **arguments: Any) -> RunRecord:
    path.parent.mkdir(parents=True, exist_ok=True)
    return RunRecord(path, run_id=RUN, flow_run_id=FLOW_RUN, **arguments)


def make_waiting_run() -> Path:
    """Create a run that waits for its second attempt, and return the path of its record."""
    path = RunPlace.of(RUN).record
    record = make_record(path)
    record.begin_attempt(1, host="here")
    for state in (RunState.ADMITTED, RunState.STARTING, RunState.STOPPING):
        record.move(state)
    failure = Failure(kind=FailureKind.INSUFFICIENT_RESOURCES, message="no room")
    record.end_attempt(Verdict.failed(failure, 3.0))
    record.move(RunState.PENDING_RESOURCES)
    waiting_runs.note_waiting_run(RUN, FLOW_RUN, "http://127.0.0.1:9/api")
    return path


def test_attempts_on_a_lost_host_stay_in_the_record(
    muster_home: Path, tmp_path: Path, server: SimpleNamespace
) -> None:
    local_path = make_waiting_run()
    other_record = make_record(tmp_path / "there" / "run.json", earlier=RunJson.read(local_path))
    other_record.begin_attempt(2, host="there")
    other_record.move(RunState.ADMITTED)
    server.record = other_record.content

    [closed] = waiting_runs.close_ended_waiting_runs()

    content = json.loads(local_path.read_text())
    assert closed.record == content["state"] == "cancelled"
    assert [attempt["host"] for attempt in content["attempts"]] == ["here", "there"]
    assert content["attempts"][1]["failure"]["rule"] == "host-lost"
    assert waiting_runs.list_waiting_runs() == []


def test_local_record_is_closed_if_no_other_host_had_a_later_attempt(
    muster_home: Path, server: SimpleNamespace
) -> None:
    local_path = make_waiting_run()
    server.record = RunJson.read(local_path)

    list(waiting_runs.close_ended_waiting_runs())

    content = json.loads(local_path.read_text())
    assert content["state"] == "cancelled" and len(content["attempts"]) == 1


def test_final_record_of_another_host_replaces_the_local_record(
    muster_home: Path, server: SimpleNamespace
) -> None:
    local_path = make_waiting_run()
    other_record = RunJson.read(local_path).with_changes(
        state=RunState.COMPLETED, message="done there"
    )
    server.record = other_record

    list(waiting_runs.close_ended_waiting_runs())

    assert json.loads(local_path.read_text()) == other_record.as_json()
    assert waiting_runs.list_waiting_runs() == []


@pytest.mark.parametrize("has_page_record", [True, False])
def test_record_of_a_waiting_run_that_was_set_to_completed_is_closed(
    muster_home: Path,
    server: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    has_page_record: bool,
) -> None:
    local_path = make_waiting_run()
    server.record = RunJson.read(local_path) if has_page_record else None
    monkeypatch.setattr(waiting_runs, "read_state", lambda _client, _id: Completed())

    [closed] = waiting_runs.close_ended_waiting_runs()

    content = json.loads(local_path.read_text())
    assert closed.record == content["state"] == "cancelled"
    assert "set the flow run to Completed" in content["message"]


def test_record_stays_if_the_run_completed_in_a_later_attempt_on_another_host(
    muster_home: Path,
    tmp_path: Path,
    server: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local_path = make_waiting_run()
    other_record = make_record(tmp_path / "there" / "run.json", earlier=RunJson.read(local_path))
    other_record.begin_attempt(2, host="there")
    server.record = other_record.content
    monkeypatch.setattr(waiting_runs, "read_state", lambda _client, _id: Completed())

    assert [*waiting_runs.close_ended_waiting_runs()] == []
    assert json.loads(local_path.read_text())["state"] == "pending_resources"


@pytest.mark.parametrize(("state", "count"), [(Cancelled(), 1), (Failed(), 0)])
def test_cancel_of_a_waiting_training_cancels_its_evaluations(
    muster_home: Path,
    server: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    state: State[Any],
    count: int,
) -> None:
    make_waiting_run()
    monkeypatch.setattr(waiting_runs, "read_state", lambda _client, _id: state)
    cancelled: list[UUID] = []
    monkeypatch.setattr(waiting_runs, "cancel", lambda _client, id_, _why: cancelled.append(id_))
    running, ended = uuid4(), uuid4()
    notes = (
        EvaluationNote(
            name="math", checkpoint=1, state=EvaluationState.COMPLETED, flow_run_id=str(ended)
        ),
        EvaluationNote(
            name="math", checkpoint=2, state=EvaluationState.RUNNING, flow_run_id=str(running)
        ),
    )
    EvaluationsJson(evaluations=notes).write(RunPlace.of(RUN))

    [_closed] = waiting_runs.close_ended_waiting_runs()

    assert cancelled == [running][:count]
