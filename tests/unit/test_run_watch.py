"""The display of `muster submit --watch`, which follows the files of a run on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import Artifact
from prefect.states import Completed, Running, Scheduled

from tasks.record.events import Event
from tasks.record.places import RunPlace
from tasks.show.screen import Screen
from tasks.show.terminal import Terminal
from tasks.spec.run import RunSpec
from tasks.train.run_watch import RunEvents, RunWatch

RUN = "trial-sft-20260102-000000-bbbbbbbb"
SPEC = RunSpec.model_validate(
    {
        "name": "trial",
        "workload": "sft",
        "components": {"trainer": {"command": ["true"]}},
        "progress": {"jsonl": "metrics.jsonl", "step": "step", "total": 60},
    }
)


class StepServer:
    """A fake Prefect client that returns the artifact `summary` of a run."""

    def __init__(self) -> None:
        self.step = 0

    def read_artifacts(self, **_filter: Any) -> list[Artifact]:
        headline = f"**running**: training\n\nstep {self.step} of 60"
        return [Artifact(id=uuid4(), key="summary", description=headline)]


def write_events(place: RunPlace, number: int, *events: Event) -> None:
    """Append events to the event log of an attempt."""
    attempt = place.attempt(number)
    attempt.directory.mkdir(parents=True, exist_ok=True)
    with attempt.events.open("a") as file:
        file.writelines(f"{event.as_line()}\n" for event in events)


def begin(number: int) -> Event:
    return Event(at=1.0, name="attempt.begun", fields={"attempt": number, "run_id": RUN})


def progress(step: int) -> Event:
    return Event(at=2.0, name="run.progress", fields={"step": step})


def lines_of_output(written: list[str]) -> list[str]:
    """Return the printed lines without the seconds at their beginning."""
    return [line.rpartition("s ")[2] for line in "".join(written).splitlines()]


def test_events_of_all_attempts_are_read_once_and_in_order(muster_home: Path) -> None:
    place = RunPlace.of(RUN)
    events = RunEvents(place, after_attempt=0)
    before = [*events.read_new()]
    write_events(place, 1, begin(1), progress(1))
    first = [*events.read_new()]
    write_events(place, 1, progress(2))
    write_events(place, 2, begin(2))

    second = [*events.read_new()]

    assert before == []
    assert [(event.name, event.step) for event in first] == [
        ("attempt.begun", 0.0),
        ("run.progress", 1.0),
    ]
    assert [(event.name, event.step) for event in second] == [
        ("run.progress", 2.0),
        ("attempt.begun", 0.0),
    ]
    assert [*events.read_new()] == []


def test_run_on_this_machine_is_shown_as_train_shows_it(muster_home: Path) -> None:
    written: list[str] = []
    place = RunPlace.of(RUN)
    client: Any = StepServer()
    screen = Screen(written.append, is_live=False, size=lambda: os.terminal_size((200, 30)))

    with Terminal(SPEC, screen) as terminal:
        watch = RunWatch(client, uuid4(), RUN, terminal)
        watch.show_state(Scheduled(message="needs 8 GPUs"))
        ready = Event(at=3.0, name="component.ready", component="trainer", fields={"after_s": 2.5})
        write_events(place, 1, begin(1), ready, progress(30))
        watch.show_news(Running())
        watch.show_state(Running(message="running: trainer"))
        record = {"run_id": RUN, "state": "completed", "started_at": 1.0, "ended_at": 9.0}
        place.record.write_text(json.dumps({**record, "attempts": []}))
        watch.end(Completed(message="step 60 of 60"), "http://h/page")

    text = "".join(written)
    assert "Scheduled: needs 8 GPUs\n" in text
    assert "trainer: ready after 2.50 s\n" in text
    assert "step 30 of 60\n" in text
    assert "running: trainer" not in text
    assert "\ncompleted: step 60 of 60\n" in text
    assert text.splitlines()[-1].split() == ["page", "http://h/page"]


def test_step_of_a_run_on_another_host_is_read_from_the_server(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.train.run_watch._ASK_STEP_EVERY_S", 0.0)
    written: list[str] = []
    client: Any = StepServer()
    screen = Screen(written.append, is_live=False, size=lambda: os.terminal_size((200, 30)))

    with Terminal(SPEC, screen) as terminal:
        watch = RunWatch(client, uuid4(), RUN, terminal)
        for client.step in (10, 11, 13, 60, 60):
            watch.show_news(Running())

    assert lines_of_output(written) == ["step 10 of 60", "step 13 of 60", "step 60 of 60"]
