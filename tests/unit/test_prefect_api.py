"""The tests' own way of asking a Prefect server outlasts a busy database, and nothing else."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from tests.support.prefect_api import ask


@contextmanager
def answering(*statuses: int) -> Iterator[tuple[str, list[str]]]:
    """A server that gives these answers in turn, the last one for ever: its URL, and what came."""
    left, heard = list(statuses), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(self.rfile.read(int(self.headers["content-length"])).decode())
            status = left.pop(0) if len(left) > 1 else left[0]
            body = b"" if status == 204 else json.dumps({"status": status}).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing is said on stderr."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", heard
        finally:
            server.shutdown()
            thread.join()


def test_a_busy_server_is_asked_again_with_the_same() -> None:
    with answering(503, 503, 201) as (url, heard):
        answer = ask("POST", url, {"a": 1})

    assert answer == {"status": 201}
    assert [json.loads(body) for body in heard] == [{"a": 1}] * 3


@pytest.mark.parametrize("status", [404, 409, 500])
def test_another_refusal_is_final(status: int) -> None:
    with answering(status, 200) as (url, heard), pytest.raises(httpx.HTTPStatusError):
        ask("POST", url, {})

    assert len(heard) == 1


def test_an_empty_answer_is_none() -> None:
    with answering(204) as (url, _):
        answer = ask("POST", url, {})

    assert answer is None


def test_a_server_that_stays_busy_is_given_up(patience: Callable[[float], None]) -> None:
    patience(0.0)

    with answering(503) as (url, _), pytest.raises(httpx.HTTPStatusError, match="503"):
        ask("POST", url, {})


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets for how long a busy server is asked, in seconds."""
    return lambda within_s: monkeypatch.setattr("tests.support.prefect_api._WITHIN_S", within_s)
