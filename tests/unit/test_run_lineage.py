"""Tests of the thread that records the lineage of a run while it runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.events.schemas.events import Event as PrefectEvent
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.record.events import Event, event_listeners
from tasks.record.lineage import DataKind, Lineage, LineageOutput, read_lineage, write_lineage
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord, RunJson
from tasks.record.states import RunState
from tasks.server.events import current_announcer
from tasks.spec.run import RunSpec
from tasks.train import run_lineage
from tasks.train.run_lineage import record_lineage

RUN = "own-sft-20260102-000000-00000001"
FLOW_RUN = FlowRun(id=UUID(int=7), flow_id=UUID(int=8), name=RUN, run_count=1)
SECRET = "s3cret-value-0011"
WITHIN_S = 20.0


@pytest.fixture(autouse=True)
def no_server(muster_home: Path) -> Iterator[None]:
    with temporary_settings(set_defaults={PREFECT_API_URL: None}):
        yield


@pytest.fixture
def announced() -> Iterator[list[PrefectEvent]]:
    """Yield the list of the events that the run sends to its Prefect server."""
    events: list[PrefectEvent] = []
    announcer: Any = SimpleNamespace(announce=lambda event, _flow_run: events.append(event))
    token = current_announcer.set(announcer)
    yield events
    current_announcer.reset(token)


def make_run(**keys: Any) -> Any:
    """Return a run in its first attempt, with a folder of checkpoints."""
    place = RunPlace.of(RUN)
    place.attempt(1).directory.mkdir(parents=True)
    trainer = {"command": ["python", "train.py"]}
    content = {"name": "own", "workload": "sft", "components": {"trainer": trainer}, **keys}
    spec = RunSpec.model_validate(content)
    attempts = (AttemptRecord(number=1, state=RunState.RUNNING, started_at=1.0),)
    record = RunJson(run_id=RUN, state=RunState.RUNNING, workload="sft", attempts=attempts)
    return SimpleNamespace(
        run_id=RUN,
        spec=spec,
        resolved_spec=spec,
        place=place,
        attempt=place.attempt(1),
        record=SimpleNamespace(content=record),
        mask=lambda text: text.replace(SECRET, "***"),
    )


@contextmanager
def recorded(run: Any) -> Iterator[None]:
    with record_lineage(run, FLOW_RUN):
        yield


def notify(name: str) -> None:
    """Emit an event with this name, as a run does: pass it to the current event listeners."""
    for listener in event_listeners.get():
        listener(Event(at=1.0, name=name))


def read_recorded() -> Lineage:
    recorded_lineage = read_lineage(RunPlace.of(RUN))
    assert recorded_lineage is not None
    return recorded_lineage


def test_inputs_are_recorded_without_secrets(announced: list[PrefectEvent]) -> None:
    run = make_run(inputs=["/data/a", f"/data/{SECRET}"])

    with recorded(run):
        notify("attempt.begun")

    assert [data.uri for data in read_recorded().inputs] == ["/data/a", "/data/***"]
    assert [event.resource.id for event in announced] == ["file:///data/a", "file:///data/***"]
    assert SECRET not in run.place.lineage.read_text()


def test_run_that_never_began_an_attempt_has_no_lineage() -> None:
    run = make_run(inputs=["/data/a"])
    run.attempt = None

    with recorded(run):
        notify("run.opened")

    assert not run.place.lineage.exists()


def test_events_of_an_earlier_process_are_not_sent_again(
    announced: list[PrefectEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    known = LineageOutput(uri="/a/step_2", kind=DataKind.CHECKPOINT, at=1.0, signature="x")
    new = LineageOutput(uri="/a/step_4", kind=DataKind.CHECKPOINT, at=2.0, signature="y")
    write_lineage(run.place, Lineage(run_id=RUN, outputs=(known,)).as_json())
    present = Lineage(run_id=RUN, outputs=(known, new))
    monkeypatch.setattr(run_lineage, "describe_lineage", lambda *_, **__: present)

    with recorded(run):
        notify("attempt.begun")

    assert [event.resource.id for event in announced] == ["file:///a/step_4"]
    assert read_recorded().outputs == (known, new)


def test_error_of_the_lineage_does_not_reach_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run()

    def fail(*_: Any, **__: Any) -> Lineage:
        raise OSError("the folder cannot be read")

    monkeypatch.setattr(run_lineage, "describe_lineage", fail)

    with recorded(run):
        notify("attempt.begun")

    assert not run.place.lineage.exists()
    assert "the folder cannot be read" in caplog.text


def test_run_ends_although_the_folder_of_the_checkpoints_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_run()
    answers = threading.Event()
    has_asked = threading.Event()

    def block(*_: Any, **__: Any) -> Lineage:
        has_asked.set()
        answers.wait(WITHIN_S)
        return Lineage(run_id=RUN)

    monkeypatch.setattr(run_lineage, "describe_lineage", block)
    monkeypatch.setattr(run_lineage, "_END_TIMEOUT_S", 0.05)

    with recorded(run):
        notify("attempt.begun")
        assert has_asked.wait(WITHIN_S)

    # The `with` block has ended, although the blocked call has not returned.
    assert not answers.is_set()
    answers.set()


def test_file_that_cannot_be_written_is_written_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_run(inputs=["/data/a"])
    problems = [OSError("disk full")]
    has_failed = threading.Event()
    write = run_lineage.write_lineage

    def write_unless_full(place: RunPlace, content: dict[str, Any]) -> None:
        if problems:
            has_failed.set()
            raise problems.pop()
        write(place, content)

    monkeypatch.setattr(run_lineage, "write_lineage", write_unless_full)

    with recorded(run):
        notify("attempt.begun")
        assert has_failed.wait(WITHIN_S)

    assert json.loads(run.place.lineage.read_text())["inputs"][0]["uri"] == "/data/a"
