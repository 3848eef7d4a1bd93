"""Tests of writing the final state of a run whose flow process was killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.record.events import Event
from tasks.record.final_record import (
    FLOW_LOST,
    FlowLoss,
    finalize_record,
    has_failed_by_loss,
    write_final_record,
)
from tasks.record.outcome import Failure, Verdict
from tasks.record.run_json import RunJson, RunRecord
from tasks.record.states import LEGAL_TRANSITIONS, RunState, find_recovery_transitions
from tasks.show.failure import describe_next_step
from tasks.spec.errors import IllegalTransition
from tasks.spec.failure_kinds import FailureKind

NOW = 1000.0
STORAGE = Failure(kind=FailureKind.STORAGE, message="disk full", component="trainer")
VERDICTS = {
    "completed": Verdict(state=RunState.COMPLETED, message="60/60 steps"),
    "failed": Verdict.failed(STORAGE, 0.0),
    "cancelled": Verdict(state=RunState.CANCELLED, message="enough"),
}

#: States of a run in the order in which the flow process writes them to the record. The flow
#: process may be killed in each state.
HISTORY = ("queued", "admitted", "starting", "running", "stopping")


def record_of(directory: Path, until: str, verdict: str = "", retried: bool = False) -> Path:
    """Write the record of a run whose flow process was killed, and return the record's path.

    Args:
        directory: Directory of the run.
        until: State of the run when the flow process was killed, one of HISTORY.
        verdict: Result of the attempt in the record, a key of VERDICTS. Empty for an attempt
            without a result.
        retried: True if the run was waiting for its next attempt.
    """
    path = directory / "run.json"
    record = RunRecord(path, run_id="a-run", flow_run_id="f", clock=lambda: 1.0)
    points = HISTORY[: HISTORY.index(until) + 1]
    if "admitted" in points:
        record.begin_attempt(1)
        record.move(RunState.ADMITTED)
        (directory / "attempt-01").mkdir()
    if "starting" in points:
        record.observe(Event(at=2.0, name="attempt.begun"))
        record.observe(Event(at=3.0, name="component.spawned", component="api", fields={"pid": 7}))
    if "running" in points:
        record.observe(Event(at=4.0, name="attempt.ready"))
    if "stopping" in points:
        record.observe(Event(at=5.0, name="teardown.begun"))
    if verdict:
        record.end_attempt(VERDICTS[verdict])
    if retried:
        record.move(RunState.PENDING_RESOURCES, "attempt 2 in 60 s")
    return path


def content_of(path: Path) -> dict[str, Any]:
    """Return the content of a run's record file, which is JSON."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def events_of(directory: Path) -> list[dict[str, Any]]:
    """Return the events of the first attempt, or an empty list if no event was logged."""
    path = directory / "attempt-01" / "events.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("until", HISTORY)
def test_killed_run_has_failed_at_any_point(until: str, tmp_path: Path) -> None:
    path = record_of(tmp_path, until)

    record, is_changed = write_final_record(tmp_path, FlowLoss(pid=812), lambda: NOW)

    assert record is not None and is_changed
    assert record.state is RunState.FAILED and has_failed_by_loss(record)
    content = content_of(path)
    assert (content["state"], content["ended_at"]) == ("failed", NOW)
    assert content["message"] == (
        "UNKNOWN: the flow process (pid 812) of this run was killed or lost; "
        "the run had no leftover processes"
    )
    failure = record.attempt.failure if record.attempt is not None else None
    assert failure is None or "To continue the run: muster retry a-run" in failure.hint


@pytest.mark.parametrize(
    ("provenance", "has_button"),
    [({"spec_file": "/project/muster.yaml"}, False), ({"tree": "1f0a"}, True), (None, True)],
)
def test_button_retry_is_advised_only_for_runs_of_a_deployment(
    provenance: dict[str, Any] | None, has_button: bool, tmp_path: Path
) -> None:
    record = RunJson.read(record_of(tmp_path, "running")).with_changes(provenance=provenance)

    ended = finalize_record(record, FlowLoss(pid=812), NOW)

    assert ended.attempt is not None and ended.attempt.failure is not None
    hint = ended.attempt.failure.hint
    assert "muster retry a-run" in hint
    assert ("Retry on its page" in hint) is has_button


@pytest.mark.parametrize(
    ("verdict", "loss", "next_step"),
    [
        (
            "",
            FlowLoss(pid=812),
            "not retried: the flow process was lost, and Muster does not start it again",
        ),
        ("completed", FlowLoss(pid=812), "not retried: completed"),
        ("", FlowLoss(pid=812, is_cancelled=True), "not retried: cancelled"),
        ("", FlowLoss(pid=812, elsewhere="host-b"), "retried: host-b continues the run"),
        (
            "",
            FlowLoss(pid=812, is_waiting=True),
            "retried: a new flow process continues the run",
        ),
    ],
)
def test_record_of_a_lost_run_says_what_happens_next(
    verdict: str, loss: FlowLoss, next_step: str, tmp_path: Path
) -> None:
    path = record_of(tmp_path, "stopping", verdict)

    record, _ = write_final_record(tmp_path, loss, clock=lambda: NOW)

    assert record is not None
    assert record.attempt is not None
    assert describe_next_step(record.attempt) == next_step
    assert content_of(path)["attempts"][-1]["decision"] is not None


def test_current_attempt_and_components_get_an_end_time(tmp_path: Path) -> None:
    path = record_of(tmp_path, "running")

    write_final_record(tmp_path, FlowLoss(pid=812, killed=(7, 8)), lambda: NOW)

    attempt = content_of(path)["attempts"][-1]
    assert (attempt["state"], attempt["ended_at"]) == ("failed", NOW)
    assert attempt["failure"]["kind"] == "UNKNOWN"
    assert attempt["failure"]["rule"] == FLOW_LOST
    assert attempt["failure"]["component"] is None
    assert "(pid 812)" in attempt["failure"]["message"]
    assert (
        "ended leftover processes and jobs of the run (pids 7, 8)" in attempt["failure"]["message"]
    )
    api = attempt["components"]["api"]
    assert (api["ended_at"], api["exit_code"], api["signal"]) == (NOW, None, None)


@pytest.mark.parametrize(
    ("verdict", "retried", "loss", "state", "message"),
    [
        # only the attempt has its final state, so the run gets the state of the attempt
        ("completed", False, FlowLoss(pid=1), "completed", "completed; the flow process"),
        ("failed", False, FlowLoss(pid=1), "failed", "STORAGE: disk full"),
        ("cancelled", False, FlowLoss(pid=1), "cancelled", "cancelled; the flow process"),
        # the attempt has its final state, so a later cancellation does not change it
        ("completed", False, FlowLoss(pid=1, is_cancelled=True), "completed", "completed;"),
        ("failed", False, FlowLoss(pid=1, is_cancelled=True), "failed", "STORAGE: disk full"),
        # the attempt has no final state, and the run is being cancelled
        ("", False, FlowLoss(pid=1, is_cancelled=True), "cancelled", "cancelled;"),
        # the flow process was killed while the run waited for its next attempt
        ("failed", True, FlowLoss(pid=1), "failed", "STORAGE: disk full"),
        ("failed", True, FlowLoss(pid=1, is_cancelled=True), "cancelled", "cancelled;"),
        # the flow run is scheduled again on the server, so the run waits for its next attempt
        ("", False, FlowLoss(pid=1, is_waiting=True), "pending_resources", "waiting for its next"),
        ("failed", False, FlowLoss(pid=1, is_waiting=True), "pending_resources", "waiting for"),
    ],
)
def test_state_of_a_lost_run_follows_from_its_attempt_and_the_server(
    verdict: str, retried: bool, loss: FlowLoss, state: str, message: str, tmp_path: Path
) -> None:
    path = record_of(tmp_path, "stopping", verdict, retried)

    record, _ = write_final_record(tmp_path, loss, lambda: NOW)

    content = content_of(path)
    assert content["state"] == state
    assert content["message"].startswith(message)
    assert record is not None and not has_failed_by_loss(record)
    assert (content["ended_at"] is None) == (state == "pending_resources")


def test_failure_of_the_attempt_is_kept(tmp_path: Path) -> None:
    path = record_of(tmp_path, "stopping", "failed")
    attempt_before = content_of(path)["attempts"][-1]

    write_final_record(tmp_path, FlowLoss(pid=812), lambda: NOW)

    attempt_after = content_of(path)["attempts"][-1]
    assert attempt_after["failure"] == attempt_before["failure"]
    assert attempt_after["ended_at"] == attempt_before["ended_at"]


@pytest.mark.parametrize("state", [state for state in RunState if state.is_final])
def test_record_of_an_ended_run_is_not_touched(state: RunState, tmp_path: Path) -> None:
    path = record_of(tmp_path, "stopping", state.value)
    content = content_of(path)
    # Write the file with another indentation than Muster uses. If Muster writes the file again, the
    # content of the file changes, and the test fails.
    path.write_text(json.dumps({**content, "state": state.value}))
    content_before = path.read_bytes()

    record, is_changed = write_final_record(tmp_path, FlowLoss(pid=812), lambda: NOW)

    assert path.read_bytes() == content_before
    assert record is not None and (record.state, is_changed) == (state, False)
    assert events_of(tmp_path) == []


@pytest.mark.parametrize(("until", "retried"), [("queued", False), ("stopping", True)])
def test_record_of_a_waiting_run_is_not_touched(until: str, retried: bool, tmp_path: Path) -> None:
    path = record_of(tmp_path, until, "failed" if retried else "", retried)
    content_before = path.read_bytes()

    write_final_record(tmp_path, FlowLoss(pid=812, is_waiting=True), lambda: NOW)

    assert path.read_bytes() == content_before


def test_events_are_logged_once(tmp_path: Path) -> None:
    record_of(tmp_path, "running")
    loss = FlowLoss(pid=812, killed=(7,), removed=(Path("/dev/shm/x"),))

    for _ in range(2):
        write_final_record(tmp_path, loss, lambda: NOW)

    first, *transitions = events_of(tmp_path)
    assert first == {
        "at": NOW,
        "event": "reconcile.ended",
        "flow_pid": 812,
        "killed": [7],
        "removed": ["/dev/shm/x"],
    }
    assert [(event["event"], event["state"]) for event in transitions] == [
        ("run.state", "stopping"),
        ("run.state", "failed"),
    ]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"state": "of mind", "attempts": []}'])
def test_invalid_record_is_not_touched(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)

    result = write_final_record(tmp_path, FlowLoss(pid=812), lambda: NOW)

    assert result == (None, False)
    assert path.read_text() == text


def test_run_without_a_record_is_ignored(tmp_path: Path) -> None:
    result = write_final_record(tmp_path, FlowLoss(pid=812), lambda: NOW)

    assert result == (None, False)
    assert list(tmp_path.iterdir()) == []


def test_original_record_is_not_changed(tmp_path: Path) -> None:
    record = RunJson.read(record_of(tmp_path, "running"))
    json_before = record.as_json()

    finalize_record(record, FlowLoss(pid=812), NOW)

    assert record.as_json() == json_before


@pytest.mark.parametrize("before", [state for state in RunState if not state.is_final])
@pytest.mark.parametrize("after", [RunState.FAILED, RunState.CANCELLED, RunState.COMPLETED])
def test_recovery_makes_only_legal_transitions(before: RunState, after: RunState) -> None:
    if before in (RunState.QUEUED, RunState.PENDING_RESOURCES) and after is RunState.COMPLETED:
        with pytest.raises(IllegalTransition):
            find_recovery_transitions(before, after)
        return

    transitions = find_recovery_transitions(before, after)

    assert transitions[-1] is after
    states = (before, *transitions)
    assert all(
        target in LEGAL_TRANSITIONS[source]
        for source, target in zip(states, transitions, strict=False)
    )


@pytest.mark.parametrize("until", ["running", "stopping"])
@pytest.mark.parametrize("verdict", VERDICTS)
def test_final_state_that_could_not_be_written_is_restored(
    tmp_path: Path, until: str, verdict: str
) -> None:
    (tmp_path / "whole").mkdir()
    whole = RunJson.read(record_of(tmp_path / "whole", "stopping", verdict))
    state = VERDICTS[verdict].state
    end = whole.with_changes(state=state, message="as it was told", ended_at=9.0)

    closed, _ = write_final_record(record_of(tmp_path, until).parent, FlowLoss(pid=7, end=end))

    record = RunJson.read(tmp_path / "run.json")
    attempt = record.attempt
    failure = end.attempts[0].failure
    assert closed is not None and closed.state is state and not has_failed_by_loss(closed)
    assert (record.state, record.message, record.ended_at) == (state, "as it was told", 9.0)
    assert attempt is not None and attempt.state is state and attempt.failure == failure
    assert attempt.components["api"].ended_at is not None


def test_attempt_that_could_not_be_written_is_restored(tmp_path: Path) -> None:
    end = RunJson.read(record_of(tmp_path, "stopping", "failed"))
    end = end.with_changes(state=RunState.FAILED, message=str(STORAGE), ended_at=9.0)
    (tmp_path / "run").mkdir()
    record_of(tmp_path / "run", "queued")

    write_final_record(tmp_path / "run", FlowLoss(pid=7, end=end))

    record = RunJson.read(tmp_path / "run" / "run.json")
    assert record.attempt is not None and record.attempt.failure == STORAGE
