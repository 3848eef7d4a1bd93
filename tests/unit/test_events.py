"""Tests of the event log and its listeners."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tasks.record.events import Event, EventLog


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_event_is_a_line_with_its_time_name_and_component(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: 12.5)

    log.emit("component.ready", "trainer", pid=7, after_s=0.5)
    log.emit("teardown.begun", directory=tmp_path)

    assert lines_of(tmp_path / "events.jsonl") == [
        {"at": 12.5, "event": "component.ready", "component": "trainer", "pid": 7, "after_s": 0.5},
        {"at": 12.5, "event": "teardown.begun", "directory": str(tmp_path)},
    ]


def test_secrets_are_masked_for_the_file_and_the_listeners(tmp_path: Path) -> None:
    heard: list[Event] = []
    log = EventLog(
        tmp_path / "events.jsonl", (heard.append,), mask=lambda text: text.replace("hunter2", "***")
    )

    log.emit("component.spawned", "api", argv=["run", "--key", "hunter2"], why="got hunter2", pid=7)

    assert "hunter2" not in (tmp_path / "events.jsonl").read_text()
    assert heard[0].fields == {"argv": ["run", "--key", "***"], "why": "got ***", "pid": 7}


def test_failing_listener_does_not_affect_other_listeners(
    tmp_path: Path, listener_errors: list[str]
) -> None:
    heard: list[Event] = []

    def fail(event: Event) -> None:
        raise RuntimeError("listener is broken")

    EventLog(tmp_path / "events.jsonl", (fail, heard.append)).emit("run.state", state="running")

    assert [event.name for event in heard] == ["run.state"]
    # Remove the expected error. The fixture fails the test for every other error.
    assert "listener is broken" in listener_errors.pop()


@pytest.mark.parametrize("path", ["/dev/full", "/no/such/directory/events.jsonl"])
def test_unwritable_event_log_causes_a_warning(path: str, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []

    EventLog(Path(path), (heard.append,)).emit("component.ready", "api")

    assert len(heard) == 1
    assert "could not be written to" in caplog.text


def test_events_of_many_threads_keep_their_order(tmp_path: Path) -> None:
    heard: list[Event] = []
    numbers = itertools.count()
    log = EventLog(tmp_path / "events.jsonl", (heard.append,), clock=lambda: float(next(numbers)))
    threads = [
        threading.Thread(target=lambda: [log.emit("e", text="x" * 500) for _ in range(50)])
        for _ in range(4)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [line["at"] for line in lines_of(tmp_path / "events.jsonl")] == [
        float(i) for i in range(200)
    ]
    assert [event.at for event in heard] == [float(i) for i in range(200)]
