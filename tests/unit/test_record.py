"""Tests of `run.json`: legal transitions, atomic replacement, and updates by events."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tasks.record.disk import write_json
from tasks.record.events import Event, EventLog
from tasks.record.metrics_file import FileFingerprint
from tasks.record.outcome import Failure, Verdict
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord, RunJson, RunRecord
from tasks.record.states import RunState
from tasks.spec.errors import IllegalTransition
from tasks.spec.failure_kinds import FailureKind


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.json"


def make_record(path: Path, **options: Any) -> RunRecord:
    """Open the record of a run, as each flow process of the run does.

    The clock of the record returns 1, 2, 3 and so on.
    """
    ticks = itertools.count(1)
    clock = options.pop("clock", lambda: float(next(ticks)))
    return RunRecord(path, run_id="a-run", flow_run_id="f", clock=clock, **options)


def adoptable(record: RunRecord, path: Path) -> AttemptRecord | None:
    """Return the attempt whose Ray jobs the next flow process may adopt (take over), or None."""
    return record.content.adoptable(RunPlace(directory=path.parent))


def content_of(path: Path) -> dict[str, Any]:
    """Return the content of a run's record file, which is JSON."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def event(name: str, component: str | None = None, at: float = 5.0, **fields: Any) -> Event:
    return Event(at=at, name=name, component=component, fields=fields)


def test_new_record_is_queued(path: Path) -> None:
    make_record(path, name="a", tags=["demo"])

    assert content_of(path) == {
        "run_id": "a-run",
        "flow_run_id": "f",
        "state": "queued",
        "started_at": 1.0,
        "ended_at": None,
        "name": "a",
        "workload": "",
        "tags": ["demo"],
        "containment": None,
        "attempts": [],
        "directory": str(path.parent),
    }


@pytest.mark.parametrize("end", [RunState.FAILED, RunState.CANCELLED])
def test_restarted_run_continues_with_its_next_attempt(path: Path, end: RunState) -> None:
    """A user can press Retry in the Prefect UI after a run has ended. The run then starts again."""
    first = make_record(path)
    first.begin_attempt(1)
    first.move(RunState.ADMITTED)
    first.move(end, "it ended")

    second = make_record(path)
    second.begin_attempt(second.attempts + 1)
    second.move(RunState.ADMITTED)

    assert content_of(path)["state"] == "admitted"
    assert content_of(path)["ended_at"] is None
    assert [attempt["number"] for attempt in content_of(path)["attempts"]] == [1, 2]


def test_run_passes_through_its_states(path: Path) -> None:
    notified: list[tuple[RunState, str]] = []
    record = make_record(path, on_move=lambda state, message: notified.append((state, message)))

    record.move(RunState.ADMITTED)
    record.move(RunState.ADMITTED)
    record.move(RunState.FAILED, "STORAGE: disk full")

    assert notified == [(RunState.ADMITTED, ""), (RunState.FAILED, "STORAGE: disk full")]
    content = content_of(path)
    assert (content["state"], content["message"]) == ("failed", "STORAGE: disk full")
    assert content["ended_at"] is not None


def test_illegal_transition_raises_and_changes_nothing(path: Path) -> None:
    notified: list[RunState] = []
    record = make_record(path, on_move=lambda state, message: notified.append(state))

    with pytest.raises(IllegalTransition):
        record.move(RunState.COMPLETED)

    assert content_of(path)["state"] == "queued"
    assert notified == []


def test_events_of_an_attempt_change_the_state_of_the_run(path: Path) -> None:
    record = make_record(path)
    record.begin_attempt(1)
    record.move(RunState.ADMITTED)
    states = []

    for name in ("attempt.begun", "attempt.ready", "teardown.begun"):
        record.observe(event(name))
        states.append((record.state, content_of(path)["attempts"][0]["state"]))

    assert states == [
        (RunState.STARTING, "starting"),
        (RunState.RUNNING, "running"),
        (RunState.STOPPING, "stopping"),
    ]


def test_later_attempts_record_only_changed_provenance(
    path: Path,
) -> None:
    record = make_record(path)
    provenance = {"tree": "a", "host": "one", "packages": {"torch": "2.7"}}
    for number, host in enumerate(("one", "one", "two"), 1):
        record.begin_attempt(number)
        record.describe({**provenance, "host": host})
        record.end_attempt(Verdict(state=RunState.FAILED, message=""))
    record.describe({"host": "late"})

    content = content_of(path)
    assert content["provenance"] == provenance
    changes = [attempt.get("provenance") for attempt in content["attempts"]]
    assert changes == [None, None, {"host": "two"}]


def test_component_events_update_the_record(path: Path) -> None:
    record = make_record(path)
    record.begin_attempt(1)

    record.observe(event("component.spawned", "api", at=1.5, pid=812))
    record.observe(event("component.ready", "api", at=2.5, pid=812, after_s=0.9))
    record.observe(
        event("component.exited", "api", at=3.5, pid=812, exit_code=None, signal="SIGSEGV")
    )

    assert content_of(path)["attempts"][0]["components"] == {
        "api": {
            "pid": 812,
            "started_at": 1.5,
            "ready_at": 2.5,
            "ready_after_s": 0.9,
            "ended_at": 3.5,
            "exit_code": None,
            "signal": "SIGSEGV",
        }
    }


def test_ended_attempt_has_its_failure(path: Path) -> None:
    record = make_record(path)
    record.begin_attempt(1)
    failure = Failure(kind=FailureKind.STALLED, component="trainer", message="silent", rule="live")

    record.end_attempt(Verdict.failed(failure, 1.0))

    [attempt] = content_of(path)["attempts"]
    assert attempt["state"] == "failed" and attempt["ended_at"] is not None
    assert attempt["failure"] == failure.as_json()
    assert attempt["failure"]["kind"] == "STALLED"


def test_next_flow_process_continues_the_record(path: Path) -> None:
    first = make_record(path)
    first.begin_attempt(1)
    first.move(RunState.ADMITTED)

    second = make_record(path, clock=lambda: 99.0)
    second.begin_attempt(2)

    assert second.state is RunState.ADMITTED
    assert second.attempts == 2
    assert content_of(path)["started_at"] == 1.0


def record_with_a_failed_attempt(path: Path) -> RunRecord:
    """Return the record of a run whose first attempt has failed."""
    record = make_record(path)
    record.begin_attempt(1)
    record.observe(event("component.spawned", "api", pid=812))
    failure = Failure(kind=FailureKind.NODE_LOST, message="gone")
    record.end_attempt(Verdict.failed(failure, 1.0))
    return record


def test_record_has_the_checkpoint_and_the_decision_of_an_attempt(path: Path) -> None:
    record = make_record(path)

    record.begin_attempt(1, resume_from="/ckpt/step-10")
    record.end_attempt(Verdict(state=RunState.COMPLETED, message=""))
    record.decide("final: completed")

    [entry] = record.content.attempts
    assert (entry.resume_from, entry.decision) == ("/ckpt/step-10", "final: completed")
    assert AttemptRecord.model_validate(content_of(path)["attempts"][0]) == entry


def test_ended_attempt_is_never_changed(path: Path) -> None:
    record = record_with_a_failed_attempt(path)
    [before] = record.content.attempts

    record.observe(event("component.exited", "api", at=9.0, pid=812, exit_code=0, signal=None))
    record.observe(event("teardown.begun"))
    record.end_attempt(Verdict(state=RunState.CANCELLED, message="late"))

    assert record.content.attempts == (before,)


def test_only_the_decision_is_added_to_an_ended_attempt(path: Path) -> None:
    record = record_with_a_failed_attempt(path)
    [before] = record.content.attempts

    record.decide("retried: NODE_LOST, next try (2 of 3) in 10 s")
    record.begin_attempt(2)

    decision = "retried: NODE_LOST, next try (2 of 3) in 10 s"
    assert record.content.attempts[0] == before.with_changes(decision=decision)


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        ("final: USER_ERROR is not retried", "final: USER_ERROR is not retried; begun again"),
        # the flow process was killed before it recorded whether the run is retried. So the next
        # process only records that the run was begun again
        (None, "begun again"),
        ("requeued: X, next try in 9 s", "requeued: X, next try in 9 s"),
    ],
)
def test_decision_says_that_the_run_was_begun_again(
    path: Path, decision: str | None, expected: str
) -> None:
    record = record_with_a_failed_attempt(path)
    if decision:
        record.decide(decision)

    record.begin_attempt(2)

    assert [entry.decision for entry in record.content.attempts] == [expected, None]


def test_ended_run_has_a_decision_for_its_last_attempt(path: Path) -> None:
    record = make_record(path)
    record.begin_attempt(1)
    record.move(RunState.ADMITTED)

    record.move(RunState.FAILED, "UNKNOWN: could not go on")

    assert [entry.decision for entry in record.content.attempts] == ["final: failed"]


def test_reader_never_sees_a_partial_record(path: Path) -> None:
    record = make_record(path)
    record.begin_attempt(1)
    stop = threading.Event()

    def write() -> None:
        for pid in itertools.count():
            if stop.is_set():
                return
            record.observe(event("component.spawned", f"c{pid % 50}", pid=pid))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            assert content_of(path)["run_id"] == "a-run"
    finally:
        stop.set()
        writer.join()

    assert [entry.name for entry in path.parent.iterdir()] == ["run.json"]


def test_full_disk_causes_only_a_warning(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = make_record(path)

    def full(path: Path, text: str, **_: bool) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tasks.record.run_json.replace_file", full)
    record.move(RunState.ADMITTED)

    assert record.state is RunState.ADMITTED
    assert content_of(path)["state"] == "queued"
    assert "could not be written" in caplog.text


def test_file_that_cannot_be_replaced_stays_unchanged(tmp_path: Path) -> None:
    # A folder with content cannot be replaced by a file.
    folder = tmp_path / "taken"
    (folder / "within").mkdir(parents=True)

    with pytest.raises(OSError):
        write_json(folder, {})

    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


def test_record_and_event_log_cannot_deadlock(path: Path, tmp_path: Path) -> None:
    """One thread changes the state of the record, which emits an event into the event log.

    At the same time, another thread emits an event, which changes the state of the record.
    """
    log: EventLog

    def emit_state(state: RunState, message: str) -> None:
        log.emit("run.state", state=state.value)

    record = make_record(path, on_move=emit_state)
    record.begin_attempt(1)
    log = EventLog(tmp_path / "events.jsonl", (record.observe,))

    def emit() -> None:
        for pid in range(300):
            log.emit("component.spawned", "api", pid=pid)

    emitter = threading.Thread(target=emit, daemon=True)
    emitter.start()
    for _ in range(300):
        record.move(RunState.ADMITTED)
        record.move(RunState.PENDING_RESOURCES)
    emitter.join(60)

    assert not emitter.is_alive()


@pytest.mark.parametrize(
    ("events", "submission", "is_adoptable"),
    [
        # the attempt has no final state yet, so the next flow process can take over the job
        ((), None, True),
        (("attempt.begun",), {}, True),
        (("attempt.begun", "attempt.ready"), {}, True),
        # the teardown has begun, but Muster has not requested the stop of the job, so the next flow
        # process can take over the job
        (("attempt.begun", "attempt.ready", "teardown.begun"), {}, True),
        # Muster has already requested the stop of the job, so the next flow process cannot take
        # over the job
        (("attempt.begun", "teardown.begun"), {"stop_asked_at": 7.0}, False),
    ],
)
def test_attempt_of_a_killed_flow_process_can_be_adopted(
    path: Path, events: tuple[str, ...], submission: dict[str, Any] | None, is_adoptable: bool
) -> None:
    record = make_record(path)
    record.begin_attempt(1)
    record.move(RunState.ADMITTED)
    for name in events:
        record.observe(event(name))
    if submission is not None:
        (path.parent / "attempt-01").mkdir()
        write_json(path.parent / "attempt-01" / "submission.json", submission)

    attempt = adoptable(make_record(path), path)

    assert (attempt is not None) == is_adoptable


def test_ended_attempt_cannot_be_adopted(path: Path) -> None:
    record = make_record(path)
    record.begin_attempt(1)
    record.move(RunState.ADMITTED)
    record.observe(event("attempt.begun"))
    record.end_attempt(Verdict(state=RunState.COMPLETED, message="done"))

    assert adoptable(make_record(path), path) is None


def record_of_another_host(tmp_path: Path, *, ended: bool) -> RunJson:
    """Return the record of a run with one attempt that was started on another host.

    Args:
        ended: True if the attempt has ended.
    """
    path = tmp_path / "elsewhere.json"
    record = make_record(path)
    record.begin_attempt(1, host="node-7")
    record.move(RunState.ADMITTED)
    record.move(RunState.STARTING)
    if ended:
        record.move(RunState.STOPPING)
        failure = Failure(kind=FailureKind.INSUFFICIENT_RESOURCES, message="no room")
        record.end_attempt(Verdict.failed(failure, 3.0))
    return RunJson.read(path)


def test_record_of_another_host_is_continued(path: Path, tmp_path: Path) -> None:
    earlier = record_of_another_host(tmp_path, ended=True)

    record = make_record(path, earlier=earlier)
    record.begin_attempt(2, host="node-8")

    attempts = RunJson.read(path).attempts
    assert attempts[0] == earlier.attempts[0].with_changes(decision="begun again")
    assert [(attempt.number, attempt.host) for attempt in attempts] == [
        (1, "node-7"),
        (2, "node-8"),
    ]
    # The change to ADMITTED is legal, because the new record has the state PENDING_RESOURCES. The
    # other host's record still has the state STOPPING.
    record.move(RunState.ADMITTED)


def test_open_attempt_of_another_host_is_closed_as_lost(path: Path, tmp_path: Path) -> None:
    record = make_record(path, earlier=record_of_another_host(tmp_path, ended=False))

    [attempt] = record.content.attempts
    assert attempt.state is RunState.FAILED and attempt.ended_at is not None
    assert attempt.failure is not None and "on node-7" in attempt.failure.message
    assert adoptable(record, path) is None
    assert record.state is RunState.PENDING_RESOURCES


@pytest.mark.parametrize("last", ["attempt.ready", "teardown.begun"])
def test_attempt_with_running_jobs_stays_open_on_another_host(
    path: Path, tmp_path: Path, last: str
) -> None:
    other = make_record(tmp_path / "elsewhere.json")
    other.begin_attempt(1, host="node-7")
    other.move(RunState.ADMITTED)
    for name in ("attempt.begun", last):
        other.observe(event(name))

    record = make_record(path, earlier=other.content, adopts=True)

    assert adoptable(record, path) == other.content.attempts[0]
    assert record.state is other.state


def test_attempt_that_never_started_is_not_adopted(path: Path, tmp_path: Path) -> None:
    earlier = record_of_another_host(tmp_path, ended=False).with_changes(
        state=RunState.PENDING_RESOURCES
    )

    record = make_record(path, earlier=earlier, adopts=True)

    assert adoptable(record, path) is None
    assert record.content.attempts[0].state is RunState.FAILED


def test_record_with_more_attempts_wins(path: Path, tmp_path: Path) -> None:
    local = make_record(path)
    for number in (1, 2):
        local.begin_attempt(number, host="here")
        local.end_attempt(Verdict(state=RunState.FAILED, message=""))

    record = make_record(path, earlier=record_of_another_host(tmp_path, ended=True))

    assert [attempt.host for attempt in record.content.attempts] == ["here", "here"]


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ({"attempts": [{"state": "failed"}]}, "attempts.0.number"),
        ({"attempts": [{"number": 1, "state": "suspended"}]}, "attempts.0.state"),
        ({"attempts": None}, "attempts"),
        ({"state": ["a"]}, "state"),
        ({"ended_at": "?"}, "ended_at"),
    ],
)
def test_invalid_record_is_rejected(fault: dict[str, Any], where: str) -> None:
    with pytest.raises(ValueError, match=where):
        RunJson.model_validate_json(json.dumps({"run_id": "a-run", "state": "failed", **fault}))


def test_fingerprint_of_the_metrics_file_survives_the_flow_process(path: Path) -> None:
    metrics = path.with_name("metrics.jsonl")
    metrics.write_text('{"step": 60}\n')
    make_record(path).begin_attempt(1, metrics=FileFingerprint.of(metrics))

    [attempt] = RunJson.read(path).attempts

    assert attempt.metrics == FileFingerprint.of(metrics)
