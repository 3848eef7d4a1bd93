"""A pipeline is woken by the events about the ends of its runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.pipeline import run_ends
from tasks.pipeline.run_ends import listen_for_run_ends
from tasks.pipeline.server_requests import ServerRequests

#: Time limit of each wait, in seconds.
WITHIN_S = 20.0


class FakeEvents:
    """Event streams of a fake Prefect server. Each stream yields its events and then waits."""

    def __init__(self, *streams: list[str] | Exception) -> None:
        """Create fake event streams, one for each connection.

        Args:
            streams: For each connection, the ids of the flow runs that end, or the error that the
                connection raises.
        """
        self._streams = [*streams]
        self.connections = 0

    @asynccontextmanager
    async def subscribe(self, filter: Any) -> AsyncIterator[AsyncIterator[Any]]:
        assert "prefect.flow-run.Completed" in filter.event.name
        self.connections += 1
        stream = self._streams.pop(0)
        if isinstance(stream, Exception):
            raise stream
        yield self._send(stream)

    async def _send(self, ids: list[str]) -> AsyncIterator[Any]:
        for id in ids:
            yield SimpleNamespace(resource=SimpleNamespace(id=f"prefect.flow-run.{id}"))
        await asyncio.sleep(3600)


@contextmanager
def listening(events: FakeEvents, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Listen for the ends of the runs `a` and `b`, until `b` ends. Yield a list of ended runs."""
    monkeypatch.setattr(run_ends, "get_events_subscriber", events.subscribe)
    monkeypatch.setattr(run_ends, "_RECONNECT_S", 0.01)
    asked: list[str] = []
    has_ended = threading.Event()

    def is_own_run(flow_run_id: str) -> bool:
        asked.append(flow_run_id)
        return flow_run_id in ("a", "b")

    ended: list[str] = []

    def wake() -> None:
        ended.append(asked[-1])
        if asked[-1] == "b":
            has_ended.set()

    with listen_for_run_ends(is_own_run, wake):
        assert has_ended.wait(WITHIN_S)
        yield ended


def test_pipeline_is_woken_by_the_end_of_its_own_runs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(FakeEvents(["a", "other", "b"]), monkeypatch) as ended:
        assert ended == ["a", "b"]

    assert "run-ends" not in [thread.name for thread in threading.enumerate()]


def test_broken_event_stream_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    events = FakeEvents(OSError("refused"), ["b"])

    with listening(events, monkeypatch) as ended:
        assert ended == ["b"]

    assert events.connections == 2


def test_wait_ends_when_a_run_has_ended() -> None:
    requests = ServerRequests("http://127.0.0.1:9/api")
    requests.wake()

    assert requests.wait(3600)
    assert not requests.wait(0.01)


def test_wait_ends_when_the_pipeline_must_end() -> None:
    requests = ServerRequests("http://127.0.0.1:9/api")
    threading.Timer(0.05, requests.end_soon).start()

    requests.wait(3600)

    assert requests.ending.is_set()
