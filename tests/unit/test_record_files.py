"""Tests that `run.json` is byte for byte the same as the files of earlier versions.

`older` is a record of a version with fewer keys, which are added. `newer` is a record of a version
with more keys, which are kept.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.record.events import Event
from tasks.record.final_record import FlowLoss, write_final_record
from tasks.record.outcome import Failure, Verdict
from tasks.record.run_json import RunJson, RunRecord
from tasks.record.states import RunState
from tasks.spec.failure_kinds import FailureKind

DATA = Path(__file__).parents[1] / "data" / "records"
CONTAINMENT = {"level": "L3", "promise": "all", "missing": {"L4": "no namespace"}}
KILLED = {"exit_code": None, "signal": "SIGSEGV"}
FAILURE = Failure(
    kind=FailureKind.RUNTIME_ERROR,
    message="trainer (pid 8) killed by SIGSEGV: \u201cno\u201d",
    component="trainer",
    signal="SIGSEGV",
    rule="segfault",
    log_tail="caf\u00e9\n\ttail",
)


def record_at(path: Path, **options: Any) -> RunRecord:
    """Open the record at a path. The record's clock shows 100.25, 101.25 and so on."""
    ticks = itertools.count(100)
    return RunRecord(
        path,
        run_id="a-run",
        flow_run_id="f",
        clock=lambda: next(ticks) + 0.25,
        name="a",
        workload="grpo",
        tags=["demo", "nightly"],
        **options,
    )


def play(record: RunRecord, *events: tuple[str, str | None, dict[str, Any]]) -> None:
    """Send events to the record of a run. An event is a tuple of its name, component and fields."""
    for number, (name, component, fields) in enumerate(events):
        record.observe(Event(at=200.5 + number, name=name, component=component, fields=fields))


def local_run(path: Path) -> None:
    """Write the record of a run that fails once, is retried from a checkpoint, and completes."""
    record = record_at(path)
    record.begin_attempt(1, CONTAINMENT, ports={"api.port": 4100, "api.ports.a": 4101}, host="h")
    record.move(RunState.ADMITTED)
    play(
        record,
        ("attempt.begun", None, {"attempt": 1}),
        ("component.spawned", "api", {"pid": 7}),
        ("component.ready", "api", {"after_s": 0.5}),
        ("component.spawned", "trainer", {"pid": 8}),
        ("component.ready", "trainer", {"after_s": 0.5}),
        ("attempt.ready", None, {}),
        ("component.exited", "trainer", KILLED),
        ("teardown.begun", None, {"reason": "trainer ended"}),
        ("component.exited", "api", {"exit_code": 0, "signal": None}),
    )
    record.end_attempt(Verdict.failed(FAILURE, 1.0))
    record.decide("retried: RUNTIME_ERROR, next try (2 of 3) in 10 s, from /ckpt/step-10")
    record.move(RunState.PENDING_RESOURCES, "RUNTIME_ERROR: \u2026; attempt 2 in 10 s")
    record.begin_attempt(2, CONTAINMENT, resume_from="/ckpt/step-10", host="h")
    record.move(RunState.ADMITTED)
    play(record, ("attempt.begun", None, {}), ("attempt.ready", None, {}))
    play(record, ("teardown.begun", None, {}))
    record.end_attempt(Verdict(state=RunState.COMPLETED, message="60/60 steps"))
    record.move(RunState.COMPLETED, "60/60 steps")


def jobs_of_ray(path: Path) -> None:
    """Write the record of a run with two Ray jobs and a fleet of inference servers.

    Events of the first job and of the second job alternate.
    """
    record = record_at(path)
    record.begin_attempt(1)
    record.move(RunState.ADMITTED)
    play(
        record,
        ("attempt.begun", None, {}),
        ("component.spawned", "rollout", {"pid": 9}),
        ("job.submitted", "trainer", {"submission_id": "a-run--a01", "address": "http://h:8265"}),
        ("component.spawned", "trainer", {"pid": None, "submission_id": "a-run--a01"}),
        ("component.spawned", "trainer", {"pid": None, "is_adopted": True, "submission_id": "x"}),
        ("job.state", "trainer", {"status": "pending", "place": ""}),
        ("job.attached", "environment", {"submission_id": "a-run--a01-environment"}),
        ("job.state", "environment", {"status": "running", "place": "node 10.0.0.8"}),
        ("job.state", "trainer", {"status": "running", "place": "node 10.0.0.7"}),
        ("job.state", "trainer", {"status": "running", "nodes": ["a", "b"], "gpus": 8}),
        ("job.swept", "environment", {"killed": [], "left": []}),
        ("job.final", "trainer", {"status": "failed", "message": "exit code 1"}),
    )


def killed_run(path: Path) -> None:
    """Write the record of a run whose flow process is killed; `reconcile` then ends the run."""
    record = record_at(path)
    record.begin_attempt(1, CONTAINMENT, host="h")
    record.move(RunState.ADMITTED)
    play(record, ("attempt.begun", None, {}), ("component.spawned", "api", {"pid": 7}))
    path.parent.joinpath("attempt-01").mkdir()
    write_final_record(
        path.parent, FlowLoss(pid=812, killed=(7, 8), jobs=("a-run--a01",)), lambda: 300.5
    )


def cancelled_run(path: Path) -> None:
    """Write the record of a run whose second flow process is killed during a cancellation."""
    killed_run(path)
    record = record_at(path)
    record.begin_attempt(2, host="h")
    write_final_record(path.parent, FlowLoss(pid=813, is_cancelled=True), lambda: 300.5)


def opened_again(path: Path) -> None:
    """Open the record of a run again, and begin attempt 2, as the run's next process does."""
    record = record_at(path)
    record.begin_attempt(2, host="h")
    play(record, ("component.spawned", "api", {"pid": 11}))


def older(path: Path) -> None:
    """Copy a record of an older version of Muster, and begin the next attempt in the copy."""
    shutil.copyfile(DATA / "older.json", path)
    opened_again(path)


def newer(path: Path) -> None:
    """Copy a record of a newer version of Muster. In the copy, end attempt 1 and begin attempt 2.

    The record contains keys that this version of Muster does not know.
    """
    shutil.copyfile(DATA / "newer.json", path)
    record = record_at(path)
    play(record, ("component.exited", "api", KILLED), ("job.state", "trainer", {"status": "ok"}))
    record.end_attempt(Verdict.failed(FAILURE, 1.0))
    record.begin_attempt(2, host="h")


def newer_lost(path: Path) -> None:
    """Copy a record of a newer version of Muster. In the copy, record the kill of the flow process.

    The run is scheduled again after the kill. The record contains keys that this version of Muster
    does not know.
    """
    shutil.copyfile(DATA / "newer.json", path)
    path.parent.joinpath("attempt-01").mkdir()
    write_final_record(path.parent, FlowLoss(pid=812, is_waiting=True), lambda: 300.5)


def lost_with_its_host(path: Path) -> None:
    """Open another host's record of a run, without taking over the Ray jobs of the run."""
    record_at(path, earlier=RunJson.read(DATA / "newer.json"))


def gone_on_with_after_its_host(path: Path) -> None:
    """Open the record of a run that another host started, and take over the run's Ray jobs."""
    record_at(path, earlier=RunJson.read(DATA / "newer.json"), adopts=True)


#: Functions that write a record. The result of each function is compared with the saved file of the
#: same name.
HISTORIES: tuple[Callable[[Path], None], ...] = (
    local_run,
    jobs_of_ray,
    killed_run,
    cancelled_run,
    older,
    newer,
    newer_lost,
    lost_with_its_host,
    gone_on_with_after_its_host,
)


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.__name__)
def test_record_is_identical_to_the_saved_file(
    history: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "run.json"

    history(path)

    # The expected files contain the word DIRECTORY instead of the path of the test's folder.
    written = path.read_text().replace(str(tmp_path), "DIRECTORY")
    assert written == (DATA / "written" / f"{history.__name__}.json").read_text()
