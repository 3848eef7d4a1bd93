"""What a run says of itself while it runs never takes the place of how it ended."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.server.flow_runs import say_running

FLOW_RUN = UUID("1b4e28ba-2fa1-4d3b-a3f5-ef19b5a7633b")


class Server:
    """One flow run's states; a server that is out for a while answers 503."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        #: What becomes of requests that would give it a state: how many are refused, and what its
        #: state is after that.
        self.refuses, self.then = 0, ""
        #: Set when it refuses one.
        self.refused = threading.Event()
        self.set("RUNNING", "step 1")

    def set(self, type: str, message: str) -> None:
        self.states.append({"id": str(uuid4()), "type": type, "name": type, "message": message})

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path.endswith("/set_state"):
            if self.refuses:
                self.refuses -= 1
                self.refused.set()
                if not self.refuses and self.then:
                    self.set(self.then, "how it ended")
                return 503, {"detail": "database is locked"}
            self.set(body["state"]["type"], body["state"]["message"])
            details = {"type": "accept_details"}
            return 201, {"status": "ACCEPT", "details": details, "state": self.states[-1]}
        if "csrf" in path:
            return 404, {"detail": "it has none"}
        return 200, {"id": str(FLOW_RUN), "flow_id": str(uuid4()), "state": self.states[-1]}


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def do_GET(self) -> None:
            self.answer(None)

        def answer(self, body: Any) -> None:
            status, content = server.answer(self.path, body)
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("retry-after", "0")
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{listening.server_port}/api"
        with temporary_settings({PREFECT_API_URL: url}):
            yield server
        listening.shutdown()


def said(server: Server) -> list[tuple[str, str]]:
    return [(state["type"], state["message"]) for state in server.states]


def test_a_run_says_what_it_does_once_the_server_answers(server: Server) -> None:
    server.refuses = 1

    say_running(FLOW_RUN, "step 2", threading.Event())

    assert said(server) == [("RUNNING", "step 1"), ("RUNNING", "step 2")]


@pytest.mark.parametrize("end", ["COMPLETED", "FAILED", "CANCELLED", "CANCELLING", "SCHEDULED"])
def test_what_was_delayed_by_an_outage_leaves_the_end_as_it_is(server: Server, end: str) -> None:
    server.refuses, server.then = 1, end

    say_running(FLOW_RUN, "step 2", threading.Event())

    assert said(server) == [("RUNNING", "step 1"), (end, "how it ended")]


def test_nothing_is_said_once_the_flow_is_over(server: Server) -> None:
    over = threading.Event()
    over.set()
    server.refuses = 1

    say_running(FLOW_RUN, "step 2", over)

    assert said(server) == [("RUNNING", "step 1")]


def test_a_server_that_stays_away_is_not_asked_once_the_flow_is_over(server: Server) -> None:
    server.refuses = 1000

    say_running(FLOW_RUN, "step 2", server.refused)

    assert said(server) == [("RUNNING", "step 1")]
    assert server.refuses == 999
