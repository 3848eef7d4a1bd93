"""How a fleet becomes a component of a run: its plan, its events, its words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.fleet_events import FleetTail, FleetWords
from tasks.run.events import Event, EventLog


class Seen:
    """What was emitted: `(name, component, at, fields)` each."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str | None, float, dict[str, Any]]] = []

    def emit(
        self, name: str, component: str | None = None, *, at: float = 0.0, **fields: Any
    ) -> None:
        self.events.append((name, component, at, fields))


def line(event: str, **fields: Any) -> str:
    return json.dumps({"at": 12.5, "event": event, **fields}) + "\n"


def test_a_line_of_the_fleet_is_an_event_of_the_component_rollout(tmp_path: Path) -> None:
    file, seen = tmp_path / "rollout.jsonl", Seen()
    file.write_text(line("rollout.server.died", rank=1, why="exit code 1"))

    FleetTail(file, seen.emit).look()

    assert seen.events == [
        ("rollout.server.died", "rollout", 12.5, {"rank": 1, "why": "exit code 1"})
    ]


def test_each_line_is_told_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    file, seen = tmp_path / "rollout.jsonl", Seen()
    whole = line("a") + line("b")
    tail = FleetTail(file, seen.emit)

    tail.look()
    for end in (5, len(line("a")), len(whole) - 1, len(whole)):
        file.write_text(whole[:end])
        tail.look()
    tail.look()

    assert [name for name, *_ in seen.events] == ["a", "b"]


@pytest.mark.parametrize(
    "text",
    [
        "what a library has printed\n",
        "[1]\n",
        '{"event": "a"}\n',  # without its time
        '{"at": "noon", "event": "a"}\n',
    ],
)
def test_a_line_that_is_no_event_costs_a_warning_and_no_other_line(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file, seen = tmp_path / "rollout.jsonl", Seen()
    file.write_text(text + line("good"))

    FleetTail(file, seen.emit).look()

    assert [name for name, *_ in seen.events] == ["good"]
    assert "not an event" in caplog.text


def test_a_field_cannot_stand_in_for_the_events_own(tmp_path: Path) -> None:
    file, seen = tmp_path / "rollout.jsonl", Seen()
    file.write_text(line("a", component="api", name="other", rank=0))

    FleetTail(file, seen.emit).look()

    assert seen.events == [("a", "rollout", 12.5, {"rank": 0})]


def test_what_is_written_last_is_told_by_the_close(tmp_path: Path) -> None:
    file, seen = tmp_path / "rollout.jsonl", Seen()
    tail = FleetTail(file, seen.emit)
    tail.start()

    file.write_text(line("last"))
    tail.close()
    tail.close()

    assert [name for name, *_ in seen.events] == ["last"]


def test_an_event_keeps_the_time_at_which_it_was_seen(tmp_path: Path) -> None:
    events: list[Event] = []
    log = EventLog(tmp_path / "events.jsonl", (events.append,), clock=lambda: 99.0)

    log.emit("rollout.weights", "rollout", at=12.5, version=3)
    log.emit("run.progress")

    assert [event.at for event in events] == [12.5, 99.0]
    first = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[0])
    assert first == {"at": 12.5, "event": "rollout.weights", "component": "rollout", "version": 3}


@pytest.mark.parametrize(
    ("states", "words"),
    [
        # nothing is known, and all is well
        ({}, ""),
        ({0: "active", 1: "suspect", 2: "active"}, ""),
        # one that is not heard of has not begun to serve
        ({0: "active", 1: "active"}, "rollout 2 of 3 engines serve"),
        ({0: "active", 1: "stale", 2: "recovering"}, "rollout 1 of 3 engines serve"),
        ({0: "retired", 1: "inactive", 2: "starting"}, "rollout 0 of 3 engines serve"),
    ],
)
def test_a_fleet_says_how_many_of_its_engines_serve(states: dict[int, str], words: str) -> None:
    fleet = FleetWords(3)

    for group, after in states.items():
        fields = {"group": group, "before": "starting", "after": after}
        assert fleet.observe(Event(at=0.0, name="rollout.group.state", fields=fields))

    assert str(fleet) == words


def test_a_new_attempt_begins_with_a_fleet_of_which_nothing_is_known() -> None:
    fleet = FleetWords(1)
    fleet.observe(
        Event(at=0.0, name="rollout.group.state", fields={"group": 0, "after": "inactive"})
    )

    fleet.observe(Event(at=1.0, name="attempt.begun", fields={}))

    assert str(fleet) == ""
