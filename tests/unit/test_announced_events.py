"""Tests of the events that the Prefect server receives, and of the tables in docs/events.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.record.events import PAYLOADS, SERVER_EVENT_NAMES, Event, build_payload
from tasks.record.outcome import Failure
from tasks.record.places import AttemptPlace
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.run import RunSpec
from tasks.train.run_events import RunAnnouncements
from tasks.upkeep.report import RunReport
from tests.support.events_page import CATALOGUE, find_code_words, read_table

ROOT = Path(__file__).resolve().parents[2]
COMMON = {"run_id": "trial-grpo-20260101-000000-abcd91c2", "workload": "grpo", "host": "gpu-1"}
FAILURE = Failure(
    kind=FailureKind.CUDA_OOM,
    component="trainer",
    message="trainer (pid 7) ended with exit code 1",
    exit_code=1,
    hint="a smaller batch",
    log_tail="\n".join(f"line {n}" for n in range(100)),
)

Tell = Callable[..., list[Event]]


@pytest.fixture
def announcements() -> RunAnnouncements:
    fleet = {"backend": "sglang", "model": "m", "engines": 3, "recovery": {"min_active": 2}}
    spec = {"name": "x", "workload": COMMON["workload"], "components": {"rollout": fleet}}
    run: Any = SimpleNamespace(
        run_id=COMMON["run_id"],
        spec=RunSpec.model_validate(spec),
        record=SimpleNamespace(attempts=0),
        attempt=AttemptPlace(directory=Path("/runs/a"), number=1),
        verdict=SimpleNamespace(failure=FAILURE),
    )
    return RunAnnouncements(run)


@pytest.fixture
def tell(announcements: RunAnnouncements) -> Tell:
    """Return a function that passes an event of the run to `announcements`.

    The function returns the Prefect events that follow from this event.
    """

    def one(name: str, component: str | None = None, **fields: Any) -> list[Event]:
        return list(
            announcements.observe(Event(at=5.0, name=name, component=component, fields=fields))
        )

    return one


def begun(tell: Tell, attempt: int = 1) -> list[Event]:
    where = {"run_id": "r", "directory": Path("/runs/a"), "resume_from": "/runs/step-20"}
    return tell("attempt.begun", attempt=attempt, **where)


def group(tell: Tell, index: int, before: str, after: str) -> list[str]:
    fields = {"group": index, "ranks": [index], "before": before, "after": after}
    events = tell("rollout.group.state", "rollout", cause="died", **fields)
    return [event.name for event in events]


def names(events: list[Event]) -> list[str]:
    return [event.name for event in events]


def test_document_lists_sender_time_and_payload_of_each_event() -> None:
    rows = read_table("| event | emitted by | emitted when | payload |")

    told = {name.strip("`"): find_code_words(keys) for name, _, _, keys in rows}

    assert told == dict(PAYLOADS)
    assert all(by and when for _, by, when, _ in rows)


def test_document_explains_each_payload_key() -> None:
    meanings = {key.strip("`"): meaning for key, meaning in read_table("| key | meaning |")}

    assert set(meanings) == {key for keys in PAYLOADS.values() for key in keys}
    assert all(meanings.values())


def test_documents_and_automations_name_only_existing_events() -> None:
    files = [ROOT / "docs" / "events.md", *(ROOT / "deployments" / "automations").glob("*.yaml")]

    text = "".join(path.read_text(encoding="utf-8") for path in files)
    named = set(re.findall(r"muster\.(?:run|component|rollout|gang|node)\.[a-z.]*[a-z]", text))

    assert named <= set(PAYLOADS)


def test_payload_has_exactly_the_defined_keys() -> None:
    assert build_payload("muster.run.ready", run_id="a") == {
        "run_id": "a",
        "workload": None,
        "attempt": None,
        "host": None,
    }
    with pytest.raises(KeyError, match="colour"):
        build_payload("muster.run.ready", colour="red")


def test_payload_of_reconcile_has_the_defined_keys() -> None:
    told = RunReport(name="a", found="the flow process was gone").as_payload()

    assert tuple(told) == PAYLOADS["muster.run.reconciled"]


def test_probe_and_progress_events_are_not_sent(tell: Tell) -> None:
    begun(tell)

    assert tell("probe.failed", "api", reason="refused", misses=1, probe="live") == []
    assert tell("run.progress", step=3, total=60) == []
    assert tell("rollout.probe.failed", "rollout", rank=1) == []
    assert tell("component.starting", "api") == []


def test_directory_is_sent_as_text_so_that_secrets_are_masked(tell: Tell) -> None:
    [started] = begun(tell)

    assert started.fields["directory"] == "/runs/a"


def test_successful_run_sends_all_its_events(tell: Tell, announcements: RunAnnouncements) -> None:
    told = [
        *begun(tell),
        *tell("component.spawned", "api", pid=7, argv=["api", "--secret", "x"]),
        *tell("component.ready", "api", pid=7, after_s=0.5),
        *tell("attempt.ready", step=None),
        *tell("teardown.begun", reason="step 60 of 60", cause="trainer"),
        *tell("component.exited", "api", pid=7, exit_code=None, signal="SIGTERM"),
        *tell("component.stopped", "api", pid=7),
        *tell("run.state", state="completed", message="step 60 of 60"),
    ]

    assert names(told) == [
        "muster.run.started",
        "muster.component.started",
        "muster.component.ready",
        "muster.run.ready",
        "muster.component.exited",
        "muster.component.stopped",
        "muster.run.completed",
    ]
    assert all(one.fields["run_id"] == COMMON["run_id"] and one.at == 5.0 for one in told)
    assert all(one.fields["attempt"] == 1 for one in told)
    assert told[0].fields["resume_from"] == "/runs/step-20"
    assert "argv" not in told[1].fields
    assert told[4].fields["signal"] == "SIGTERM"
    assert told[4].fields["log"] == "/runs/a/api.log"


def test_failure_event_has_kind_component_log_and_hint(tell: Tell) -> None:
    begun(tell)

    (failed,) = tell("run.state", state="failed", message="CUDA_OOM: trainer (pid 7) left ...")

    payload = failed.fields
    assert failed.name == "muster.run.failed"
    assert (payload["kind"], payload["component"], payload["exit_code"]) == (
        "CUDA_OOM",
        "trainer",
        1,
    )
    assert payload["message"] == FAILURE.message
    assert (payload["log"], payload["hint"]) == ("/runs/a/trainer.log", "a smaller batch")
    # Notifications show the log lines of the event. The event contains only the last 15 lines, so
    # that notifications stay short.
    assert payload["log_tail"].splitlines()[-1] == "line 99"
    assert len(payload["log_tail"].splitlines()) == 15


def test_failure_without_an_attempt_is_sent(tell: Tell) -> None:
    [told] = tell("run.state", state="failed", message="INFEASIBLE: 3 nodes are asked for")

    assert (told.name, told.fields["attempt"]) == ("muster.run.failed", 0)


def test_waiting_is_sent_once_even_if_the_reason_changes(tell: Tell) -> None:
    first = tell("run.waiting", message="position 2 of 2 in the queue")
    again = tell("run.waiting", message="position 1 of 2 in the queue")

    assert names(first) == ["muster.run.waiting"]
    assert again == []


def test_requeued_run_sends_its_failure_kind_and_no_waiting_event(tell: Tell) -> None:
    begun(tell)

    told = [
        *tell("run.state", state="pending_resources", message="attempt 2 in 60 s"),
        *tell("run.waiting", message="position 1 of 1 in the queue"),
    ]

    assert names(told) == ["muster.run.requeued"]
    assert told[0].fields["kind"] == "CUDA_OOM"
    assert names(begun(tell, 2)) == ["muster.run.started"]
    assert names(tell("run.state", state="pending_resources", message="once more")) == [
        "muster.run.requeued"
    ]


def test_hang_event_has_reason_and_path_of_the_report(tell: Tell) -> None:
    begun(tell)
    tell("teardown.begun", reason="trainer (pid 7): no progress for 1800 s", cause="trainer")

    (hung,) = tell("component.diagnosed", "trainer", pid=7, path="/runs/a/trainer.hang.txt")

    assert hung.name == "muster.component.hung"
    assert hung.fields["message"].endswith("no progress for 1800 s")
    assert hung.fields["report"] == "/runs/a/trainer.hang.txt"


def test_degraded_and_restored_are_sent_once(tell: Tell) -> None:
    begun(tell)
    for index in range(3):
        assert group(tell, index, "starting", "active") == []

    assert group(tell, 1, "active", "inactive") == [
        "muster.rollout.engine.failed",
        "muster.rollout.degraded",
    ]
    assert group(tell, 2, "suspect", "inactive") == ["muster.rollout.engine.failed"]
    assert group(tell, 2, "inactive", "recovering") == []
    # The engine is inactive again because its recovery failed. A failed recovery does not count as
    # a new failure, so no event is sent.
    assert group(tell, 2, "recovering", "inactive") == []
    assert group(tell, 1, "recovering", "active") == []
    assert group(tell, 2, "recovering", "stale") == ["muster.rollout.restored"]


def test_stale_engine_does_not_degrade_the_fleet(tell: Tell) -> None:
    begun(tell)
    group(tell, 0, "starting", "active")

    assert group(tell, 0, "active", "stale") == []
    assert group(tell, 0, "stale", "active") == []


def test_engines_stopped_by_the_teardown_have_not_failed(tell: Tell) -> None:
    begun(tell)
    group(tell, 0, "starting", "active")
    tell("teardown.begun", reason="step 60 of 60", cause="trainer")

    assert group(tell, 0, "active", "inactive") == []


def test_event_of_too_few_engines_has_the_numbers_of_engines(tell: Tell) -> None:
    begun(tell)
    for index in range(3):
        group(tell, index, "starting", "active")
    for index in (0, 1):
        group(tell, index, "active", "inactive")

    (floor,) = tell(
        "rollout.failed",
        "rollout",
        reason="only 1 of 3 engines serve requests, but recovery.min_active requires at least 2",
    )

    assert floor.name == "muster.rollout.floor"
    payload = floor.fields
    assert (payload["serving"], payload["engines"], payload["min_active"]) == (1, 3, 2)
    # The fleet has failed and stops its other engines. Muster sends no events about these engines.
    assert group(tell, 2, "active", "inactive") == []


def test_only_successful_recovery_is_sent(tell: Tell) -> None:
    begun(tell)
    fields = {"id": "r1", "group": 2, "ranks": [2], "took_s": 4.5, "message": ""}

    worked = tell("rollout.recovery.ended", "rollout", outcome="recovered", **fields)
    failed = tell("rollout.recovery.ended", "rollout", outcome="failed", **fields)

    assert [(one.name, one.fields["engine"], one.fields["took_s"]) for one in worked] == [
        ("muster.rollout.engine.recovered", 2, 4.5)
    ]
    assert failed == []


def test_directly_forwarded_events_are_in_the_catalogue() -> None:
    assert set(SERVER_EVENT_NAMES) <= set(CATALOGUE)
    for name in SERVER_EVENT_NAMES.values():
        assert "run_id" in PAYLOADS[name]
