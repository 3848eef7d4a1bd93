"""Tests of sending events to a server that answers, is away, is slow, or rejects them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, WorkPool
from prefect.events.schemas.events import Event

from tasks.record.events import build_payload
from tasks.server.events import Announcer, make_pool_event, make_run_event
from tests.support.supervised_components import wait_until
from tests.support.web import serving

WITHIN_S = 20.0
FLOW = uuid4()
DEPLOYMENT = uuid4()


class PrefectServer:
    """A fake Prefect server that accepts events."""

    api = ""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.requested_paths: list[str] = []
        #: HTTP status codes of the server's next responses. After the last code in this list, each
        #: response has the status 204.
        self.answers: list[int] = []
        self.is_slow = threading.Event()
        self.may_continue = threading.Event()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if method == "POST":
            return self.take(json.loads(body)), None
        self.requested_paths.append(path)
        content = self.objects().get(path.removeprefix("/api"))
        return (200, content) if content else (404, None)

    def objects(self) -> dict[str, Any]:
        """Return a mapping from URL path to the object that this fake server has at the path."""
        return {
            f"/flows/{FLOW}": {"id": str(FLOW), "name": "train"},
            f"/deployments/{DEPLOYMENT}": {
                "id": str(DEPLOYMENT),
                "name": "quickstart",
                "flow_id": str(FLOW),
                "tags": ["demo"],
            },
        }

    def take(self, content: list[dict[str, Any]]) -> int:
        """Receive events, and return the HTTP status code of the server's response."""
        if self.is_slow.is_set():
            self.may_continue.wait(WITHIN_S)
        if self.answers:
            return self.answers.pop(0)
        self.received += content
        return 204

    def names(self) -> list[str]:
        return [event["event"] for event in self.received]


@pytest.fixture
def server() -> Iterator[PrefectServer]:
    """A fake Prefect server. The attribute `api` contains the URL of the server's API."""
    server = PrefectServer()
    with serving(server.answer) as url:
        server.api = f"{url}/api"
        yield server
        server.may_continue.set()


def flow_run(**fields: Any) -> FlowRun:
    defaults = {"id": uuid4(), "flow_id": FLOW, "name": "a-run", "tags": ["team-a"]}
    return FlowRun(**{**defaults, **fields})


def ready(run: FlowRun) -> Event:
    """Return the event that reports that the trainer of a run is ready."""
    name = "muster.component.ready"
    payload = build_payload(name, run_id="a-run", component="trainer", after_s=1.5)
    return make_run_event(name, run, "a-run", payload, at=1_700_000_000.0, tags=("demo",))


def named(name: str) -> Event:
    """Return an event with the name `name` about a work pool."""
    return make_pool_event(name, WorkPool(id=uuid4(), name="gang", type="gang"), by="me@here")


def test_event_has_its_flow_run_and_related_resources(server: PrefectServer) -> None:
    run = flow_run(deployment_id=DEPLOYMENT)

    with Announcer(server.api) as announcer:
        announcer.announce(ready(run), run)

    (event,) = server.received
    assert event["resource"]["prefect.resource.id"] == f"prefect.flow-run.{run.id}"
    assert event["occurred"].startswith("2023-11-14T22:13:20")
    assert event["payload"]["after_s"] == 1.5
    related = {
        (resource["prefect.resource.role"], resource["prefect.resource.id"])
        for resource in event["related"]
    }
    assert related == {
        ("component", "muster.component.a-run.trainer"),
        ("flow", f"prefect.flow.{FLOW}"),
        ("deployment", f"prefect.deployment.{DEPLOYMENT}"),
        ("tag", "prefect.tag.team-a"),
        ("tag", "prefect.tag.demo"),
    }


def test_related_resources_are_read_once(server: PrefectServer) -> None:
    run = flow_run(deployment_id=DEPLOYMENT)

    with Announcer(server.api) as announcer:
        for _ in range(3):
            announcer.announce(ready(run), run)

    assert len(server.received) == 3
    assert server.requested_paths.count(f"/api/deployments/{DEPLOYMENT}") == 1


def test_event_of_a_deleted_deployment_is_sent_without_the_deployment(
    server: PrefectServer,
) -> None:
    run = flow_run(deployment_id=uuid4())

    with Announcer(server.api) as announcer:
        announcer.announce(ready(run), run)

    assert server.names() == ["muster.component.ready"]


def test_events_are_sent_when_the_server_accepts_requests_again(server: PrefectServer) -> None:
    server.answers = [503, 500, 429]

    with Announcer(server.api, again_s=0.01) as announcer:
        announcer.announce(named("muster.node.drained"))
        announcer.announce(named("muster.node.undrained"))
        wait_for_events(server, 2)

    assert server.names() == ["muster.node.drained", "muster.node.undrained"]


def test_rejected_event_does_not_block_later_events(
    server: PrefectServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.answers = [422]

    with Announcer(server.api) as announcer:
        announcer.announce(named("muster.node.drained"))
        wait_until(lambda: "could not send 1 events" in caplog.text, "the event is rejected")
        announcer.announce(named("muster.node.undrained"))

    assert server.names() == ["muster.node.undrained"]


def test_close_does_not_wait_for_an_unreachable_server(caplog: pytest.LogCaptureFixture) -> None:
    announcer = Announcer("http://127.0.0.1:9/api")

    with announcer:
        announcer.announce(named("muster.node.drained"))
    announcer._thread.join(WITHIN_S)

    assert not announcer._thread.is_alive()
    assert "could not send 1 events" in caplog.text


def test_close_waits_for_a_slow_server_only_until_the_timeout(
    server: PrefectServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.is_slow.set()
    announcer = Announcer(server.api)
    announcer.__enter__()

    announcer.announce(named("muster.node.drained"))
    announcer.close(within_s=0.1)

    assert announcer._thread.is_alive()
    assert "could not send 1 events" in caplog.text


def test_oldest_events_are_dropped_first_while_the_server_is_unreachable(
    server: PrefectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.server.events._MAX_PENDING", 2)
    server.answers = [503]
    announcer = Announcer(server.api, again_s=0.05)

    for name in ("muster.node.drained", "muster.node.undrained", "muster.node.drained"):
        announcer.announce(named(name))
    with announcer:
        wait_for_events(server, 2)

    assert server.names() == ["muster.node.undrained", "muster.node.drained"]


def test_event_of_a_node_has_the_pool_as_related_resource() -> None:
    pool = WorkPool(id=UUID(int=1), name="gang", type="gang")

    event = make_pool_event("muster.node.drained", pool, node="gpu-1", by="me@here")

    assert event.resource.id == "muster.node.gpu-1"
    assert [resource.id for resource in event.related] == [f"prefect.work-pool.{pool.id}"]
    payload = {key: value for key, value in event.payload.items() if value is not None}
    assert payload == {"node": "gpu-1", "pool": "gang", "by": "me@here"}


def wait_for_events(server: PrefectServer, count: int) -> None:
    """Wait until the server has received this number of events."""
    wait_until(lambda: len(server.received) >= count, f"{count} events are received")
