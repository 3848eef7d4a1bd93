"""Tests that code and `docs/events.md` agree, and that event logs of other versions are read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.record.events import Event
from tasks.record.states import GroupState
from tasks.show.lines import lines_of
from tasks.show.run_view import ObservedRun, Standing
from tasks.spec.run import RunSpec
from tests.support.events_page import CATALOGUE

ROOT = Path(__file__).resolve().parents[2]
#: Event log of a run of an earlier version of Muster.
WRITTEN = ROOT / "tests" / "data" / "records" / "events.jsonl"
#: Matches the name of an event: words joined by dots, such as `component.ready`, or `containment`.
IS_NAME = re.compile(r"containment|[a-z]+(\.[a-z]+)+").fullmatch
CODE = sorted((ROOT / "tasks").rglob("*.py"))


def emits() -> Iterator[tuple[str, str, str, set[str]]]:
    """Yield the place, function, event name and fields of each call that emits an event.

    The place has the form `FILE:LINE`.
    """
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = ast.unparse(node.func)
            first = node.args[0]
            if called.rpartition(".")[2] not in ("emit", "_emit", "_emit_event", "_say", "tell"):
                continue
            names = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
            fields = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
            for name in names:
                if isinstance(name, ast.Constant) and IS_NAME(str(name.value)):
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    yield where, called, name.value, fields - {"at"}


def read_names() -> Iterator[tuple[str, str]]:
    """Yield `FILE:LINE` and the event name for each `case` clause with an event name."""
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Match) and ast.unparse(node.subject).endswith("event.name"):
                for pattern in ast.walk(node):
                    if isinstance(pattern, ast.MatchValue):
                        where = f"{path.relative_to(ROOT)}:{pattern.lineno}"
                        yield where, ast.literal_eval(pattern.value)


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_terminal_can_describe_each_event(name: str) -> None:
    # The test fails if `lines_of` reads a property that `Event` does not have. In a real run,
    # `EventLog` only logs such an error, and the terminal shows no line.
    for fields in ((), CATALOGUE[name]):
        nulls = dict.fromkeys(fields)
        event = Event(at=0.0, name=name, component="trainer", fields=nulls)
        assert len(list(lines_of(event))) <= 3


def test_emitted_events_are_in_the_catalogue() -> None:
    emitted = list(emits())

    assert {name for _, _, name, _ in emitted} == set(CATALOGUE)
    for where, _, name, fields in emitted:
        assert fields <= set(CATALOGUE[name]), where


def test_read_events_are_in_the_catalogue() -> None:
    names = list(read_names())

    assert names
    assert [(where, name) for where, name in names if name not in CATALOGUE] == []


def test_readable_fields_are_in_the_catalogue() -> None:
    readable = {name for name, value in vars(Event).items() if type(value).__name__ == "_Field"}
    documented = {field for fields in CATALOGUE.values() for field in fields}

    # The documented key `try` is read into the field `tried`, because `try` is a Python keyword.
    assert readable - {"tried"} <= documented


def test_event_log_of_an_earlier_version_survives_a_round_trip() -> None:
    lines = WRITTEN.read_text(encoding="utf-8").splitlines()

    events = [Event.from_line(line) for line in lines]

    assert [event.as_line() for event in events] == lines
    assert {event.name for event in events} <= set(CATALOGUE)
    begun = next(event for event in events if event.name == "attempt.begun")
    assert (begun.attempt, begun.run_id[:15], begun.resume_from) == (1, "quickstart-grpo", None)


def test_missing_or_invalid_field_has_its_default() -> None:
    event = Event(at=1.0, name="a.new.one", fields={"step": None, "pid": 7, "after": "elsewhere"})

    assert (event.step, event.pid, event.reason, event.ranks) == (0.0, 7, "", ())
    assert event.after is GroupState.STARTING


@pytest.mark.parametrize(
    "line", ["", "[1]", '"x"', '{"event": "a"}', '{"at": "noon", "event": "a"}']
)
def test_unknown_events_are_rejected(line: str) -> None:
    with pytest.raises(ValueError):
        Event.from_line(line)


def spec_of(*names: str) -> RunSpec:
    """Return a spec with components of these names."""
    components = {name: {"command": ["true"]} for name in names}
    return RunSpec.model_validate({"name": "x", "workload": "grpo", "components": components})


def test_event_log_of_an_earlier_version_can_be_shown() -> None:
    run_seen = ObservedRun(spec_of("api", "trainer", "environment"))

    for line in WRITTEN.read_text(encoding="utf-8").splitlines():
        run_seen.observe(Event.from_line(line))

    assert (run_seen.attempt, run_seen.pace.step, run_seen.doing) == (
        1,
        60,
        "stopping: step 60 of 60",
    )
    assert {name: (row.stage, row.note) for name, row in run_seen.rows.items()} == {
        "api": (Standing.ENDED, "SIGTERM"),
        "trainer": (Standing.ENDED, "exit code 0"),
        "environment": (Standing.ENDED, "SIGTERM"),
    }
    assert run_seen.failure is None


def test_slow_step_is_shown_until_the_next_step() -> None:
    run_seen = ObservedRun(spec_of("trainer"))
    earlier_events = [("attempt.ready", {}), ("run.slow", {"message": "no step for 90 s"})]
    doing = []

    for name, fields in [*earlier_events, ("run.progress", {"step": 13.0})]:
        run_seen.observe(Event(at=1.0, name=name, fields=fields))
        doing.append(run_seen.doing)

    assert doing == ["running: trainer", "no step for 90 s", "running: trainer"]
