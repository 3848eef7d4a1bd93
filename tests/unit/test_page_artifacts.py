"""Tests of the artifacts of a flow run: one artifact per key, updated when its content changes."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest

from tasks.record.events import Event
from tasks.record.final_record import FlowLoss, write_final_record
from tasks.record.places import RunPlace
from tasks.record.run_json import RunRecord
from tasks.record.states import RunState
from tasks.server.artifacts import Artifacts
from tasks.show.page import parse_record
from tasks.show.run_view import Shown
from tasks.spec.loading import dump_spec, parse_spec, resolve
from tasks.spec.run import RunSpec
from tasks.train import page_writer
from tasks.train.page_writer import RunPage
from tasks.upkeep.waiting_runs import update_page_of_closed_run

FLOW_RUN = UUID(int=7)


class Server:
    """A fake Prefect server that stores artifacts and records the requests."""

    def __init__(self) -> None:
        self.stored: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.is_away = False

    def request(
        self,
        method: str,
        path: str,
        json: dict[str, Any],
        path_params: dict[str, str] | None = None,
    ) -> httpx.Response:
        request = httpx.Request(method, "http://server" + path)
        self.requests.append(f"{method} {json.get('key', '')}".strip())
        if self.is_away:
            raise httpx.ConnectError("away", request=request)
        if method == "POST":
            new_id = str(uuid4())
            self.stored[new_id] = dict(json)
            return httpx.Response(201, json={"id": new_id}, request=request)
        artifact_id = (path_params or {})["id"]
        if artifact_id not in self.stored:
            response = httpx.Response(404, request=request)
            raise httpx.HTTPStatusError("gone", request=request, response=response)
        self.stored[artifact_id] |= json
        return httpx.Response(204, request=request)

    def read_artifacts(self, **_filter: object) -> list[SimpleNamespace]:
        if self.is_away:
            raise httpx.ConnectError("away")
        self.requests.append("READ")
        return [
            SimpleNamespace(id=UUID(artifact_id), key=artifact["key"])
            for artifact_id, artifact in self.stored.items()
        ]

    def shown(self, key: str) -> dict[str, Any]:
        """Return the artifact with this key."""
        [artifact] = [artifact for artifact in self.stored.values() if artifact["key"] == key]
        return artifact


def artifacts(secret: str = "hunter2") -> Artifacts:
    """Return the artifacts of a flow run. Their texts contain a mask instead of `secret`."""
    return Artifacts(FLOW_RUN, ["summary"], lambda text: text.replace(secret, "***"))


def test_artifact_is_created_once_and_then_updated() -> None:
    server = Server()
    ours = artifacts()

    for data in ("a", "b"):
        ours.show(server, "summary", Shown(headline="now", data=data))  # type: ignore[arg-type]

    assert server.shown("summary")["data"] == "b"
    assert server.shown("summary")["flow_run_id"] == str(FLOW_RUN)
    assert server.requests == ["READ", "POST summary", "PATCH"]


def test_later_process_of_the_flow_run_updates_the_same_artifact() -> None:
    server = Server()
    artifacts().show(server, "summary", Shown(headline="", data="a"))  # type: ignore[arg-type]

    artifacts().show(server, "summary", Shown(headline="", data="b"))  # type: ignore[arg-type]

    assert [artifact["data"] for artifact in server.stored.values()] == ["b"]


def test_deleted_artifact_is_created_again() -> None:
    server = Server()
    ours = artifacts()
    ours.show(server, "summary", Shown(headline="", data="a"))  # type: ignore[arg-type]
    server.stored.clear()

    ours.show(server, "summary", Shown(headline="", data="b"))  # type: ignore[arg-type]

    assert server.shown("summary")["data"] == "b"


def test_secrets_are_masked_in_texts_and_pictures() -> None:
    server = Server()
    shown = Shown(headline="hunter2", data="hunter2", picture="<svg>hunter2</svg>")

    artifacts().show(server, "summary", shown)  # type: ignore[arg-type]

    summary = server.shown("summary")
    picture = base64.b64decode(summary["description"].partition("base64,")[2][:-1])
    assert (summary["data"], picture) == ("***", b"<svg>***</svg>")
    assert summary["description"].startswith("![***]")


class Clock:
    """A fake clock. The test sets its time, in seconds."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """The fake server that a `RunPage` sends its artifacts to."""
    server = Server()

    @contextmanager
    def client(sync_client: bool) -> Iterator[Server]:
        yield server

    monkeypatch.setattr(page_writer, "get_client", client)
    return server


@pytest.fixture
def run(tmp_path: Path) -> SimpleNamespace:
    """A run that has a record on disk, but no attempt yet."""
    spec = RunSpec.model_validate(
        {
            "name": "x",
            "workload": "grpo",
            "components": {"trainer": {"command": ["true"]}},
            "progress": {"jsonl": str(tmp_path / "m.jsonl"), "step": "step", "total": 10},
        }
    )
    place = RunPlace(directory=tmp_path)
    record = RunRecord(place.record, run_id="x-1", flow_run_id=str(FLOW_RUN))
    return SimpleNamespace(
        record=record,
        resolved_spec=spec,
        place=place,
        attempt=None,
        verdict=SimpleNamespace(message="it failed"),
        mask=lambda text: text,
    )


def begin_attempt(run: SimpleNamespace, page: RunPage) -> None:
    """Begin the first attempt of the run, and notify `page`, which writes the run's artifacts."""
    run.record.begin_attempt(1)
    run.attempt = run.place.attempt(1)
    page.observe(Event(at=1.0, name="attempt.begun", fields={"attempt": 1}))


def page_of(run: SimpleNamespace, clock: Clock) -> RunPage:
    return RunPage(run, SimpleNamespace(id=FLOW_RUN, run_count=1), clock=clock)  # type: ignore[arg-type]


def starting(pid: int) -> Event:
    return Event(at=1.0, name="component.spawned", component="trainer", fields={"pid": pid})


def test_no_request_is_sent_before_the_first_event(server: Server, run: SimpleNamespace) -> None:
    page = page_of(run, Clock())

    page.send()

    assert server.requests == []
    assert page.due_in_s() > 60


def test_events_at_the_start_of_an_attempt_are_sent_together(
    server: Server, run: SimpleNamespace
) -> None:
    page = page_of(run, Clock())

    begin_attempt(run, page)
    page.observe(starting(1))
    due_in_s = page.due_in_s()
    page.send()

    assert 0 < due_in_s <= 1
    # Each artifact is created with one request. The first process of a run does not search for
    # existing artifacts, because there are none.
    assert [request.partition(" ")[0] for request in server.requests] == ["POST"] * 5
    assert sorted(artifact["key"] for artifact in server.stored.values()) == [
        "attempts",
        "components",
        "record",
        "summary",
        "timeline",
    ]


def test_frequent_changes_are_sent_together(server: Server, run: SimpleNamespace) -> None:
    clock = Clock()
    page = page_of(run, clock)
    begin_attempt(run, page)
    page.send()
    server.requests.clear()

    for pid in range(100):
        page.observe(starting(pid))
        page.send()
    early_requests = list(server.requests)
    due_in_s = page.due_in_s()
    clock.now += due_in_s
    page.send()
    requests_after_first_interval = len(server.requests)
    clock.now += 10
    page.send()

    assert early_requests == []
    assert 0 < due_in_s <= 2
    # Each changed artifact is sent once: the summary after its short interval, and the components,
    # the timeline and the record after their longer intervals.
    assert requests_after_first_interval == 1
    assert len(server.requests) == 4


def test_reward_curve_is_updated_after_its_interval(
    server: Server, run: SimpleNamespace, tmp_path: Path
) -> None:
    clock = Clock()
    page = page_of(run, clock)
    begin_attempt(run, page)
    metrics = tmp_path / "m.jsonl"
    metrics.write_text('{"step": 1, "reward": 0.5}\n')
    page.observe(Event(at=2.0, name="run.progress", fields={"step": 1}))
    page.send()
    first = server.shown("reward")["description"]

    metrics.write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.6}\n')
    clock.now += 9
    page.send()
    page.observe(Event(at=3.0, name="run.progress", fields={"step": 2}))
    page.send()
    too_soon = server.shown("reward")["description"]
    clock.now += 2
    page.send()

    assert too_soon == first
    assert server.shown("reward")["description"] != first


def test_curve_of_a_training_without_reward_has_the_key_loss(
    server: Server, run: SimpleNamespace, tmp_path: Path
) -> None:
    page = page_of(run, Clock())
    begin_attempt(run, page)
    (tmp_path / "m.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    page.observe(Event(at=2.0, name="run.progress", fields={"step": 1}))

    page.send()

    keys = {artifact["key"] for artifact in server.stored.values()}
    assert "loss" in keys
    assert "reward" not in keys


def test_last_update_contains_all_changes(server: Server, run: SimpleNamespace) -> None:
    page = page_of(run, Clock())
    begin_attempt(run, page)
    page.send()
    page.observe(Event(at=2.0, name="teardown.begun", fields={"reason": "it is done"}))

    page.send(is_last=True)

    assert "stopping: it is done" in server.shown("summary")["data"]


def test_update_is_retried_after_a_pause_if_the_server_is_unreachable(
    server: Server, run: SimpleNamespace
) -> None:
    clock = Clock()
    page = page_of(run, clock)
    server.is_away = True
    begin_attempt(run, page)

    with pytest.raises(httpx.ConnectError):
        page.send()
    pause_s = page.due_in_s()
    server.is_away = False
    clock.now += pause_s
    page.send()

    assert 1 < pause_s < 60
    assert server.shown("summary")["data"].startswith("### ")
    assert page.due_in_s() > 1


def test_interrupted_update_is_completed_by_the_next_call(
    server: Server, run: SimpleNamespace
) -> None:
    page = page_of(run, Clock())
    begin_attempt(run, page)

    page.send(is_enough=lambda: bool(server.stored))
    count_before = len(server.stored)
    page.send()

    assert (count_before, len(server.stored)) == (1, 5)


def test_run_without_an_attempt_has_a_summary(server: Server, run: SimpleNamespace) -> None:
    page = page_of(run, Clock())
    run.verdict.message = "USER_ERROR: components.trainer: no such program"
    run.record.move(RunState.FAILED)

    page.send(is_last=True)

    assert "no such program" in server.shown("summary")["data"]


@pytest.mark.parametrize("argument", ["true", "a shell's own ${HOME} and ${"])
def test_summary_of_a_lost_run_names_its_failure(
    run: SimpleNamespace, tmp_path: Path, argument: str
) -> None:
    spec = run.resolved_spec.written()
    spec["components"]["trainer"]["command"] = [argument.replace("${", "$${")]
    run.resolved_spec = resolve(parse_spec(spec), {}, tmp_path)
    run.record.begin_attempt(1)
    run.record.move(RunState.ADMITTED)
    place = run.place.attempt(1)
    place.directory.mkdir()
    place.spec.write_text(dump_spec(run.resolved_spec))
    write_final_record(tmp_path, FlowLoss(pid=812))
    server = Server()

    update_page_of_closed_run(server, str(FLOW_RUN), tmp_path)  # type: ignore[arg-type]

    shown = server.shown("summary")
    assert shown["description"].startswith("**failed**: UNKNOWN")
    assert "812" in shown["data"] and "not retried" in shown["data"]
    assert len(server.stored) == 5
    # The artifact contains a copy of the record, with which another host can resume the run.
    copy = parse_record(server.shown("record")["data"])
    record = json.loads(run.place.record.read_text())
    assert copy is not None and copy.attempts[0].decision == (
        "final: the flow process was lost, and Muster does not start it again"
    )
    assert {**copy.as_json(), "attempts": []} == {**record, "attempts": []}


@pytest.mark.parametrize(
    "data",
    [
        "",
        "no fence",
        "```\n{}\n```",
        "```\n[1]\n```",
        "```\n{\n```",
        # the JSON has no state, or an unknown state, so the JSON is not a valid record
        '```\n{"state": "***", "attempts": []}\n```',
        '```\n{"attempts": []}\n```',
        # the list of attempts is invalid, so the JSON is not a valid record
        '```\n{"state": "running", "attempts": {"a": 1}}\n```',
        '```\n{"state": "running", "attempts": [7]}\n```',
        '```\n{"state": "running", "attempts": [{"number": 1}]}\n```',
    ],
)
def test_invalid_record_is_not_parsed(data: str) -> None:
    assert parse_record(data) is None


def test_failed_update_of_artifacts_raises_no_error(tmp_path: Path) -> None:
    update_page_of_closed_run(Server(), str(FLOW_RUN), tmp_path / "none")  # type: ignore[arg-type]
