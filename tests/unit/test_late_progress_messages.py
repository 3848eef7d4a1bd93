"""A delayed progress message never replaces the final state of a run (`set_running_message`)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.server.flow_runs import set_running_message

FLOW_RUN = UUID("1b4e28ba-2fa1-4d3b-a3f5-ef19b5a7633b")


class Server:
    """A fake Prefect server with the states of one flow run.

    During an outage, the server answers with status 503.
    """

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        #: Number of further requests that the server answers with status 503.
        self.remaining_refusals = 0
        #: State type that the flow run gets after the last answer with status 503. If empty, the
        #: state does not change.
        self.state_after_refusals = ""
        #: Event that is set when the server answers a request with status 503.
        self.has_refused = threading.Event()
        self.set("RUNNING", "step 1")

    def set(self, type: str, message: str) -> None:
        self.states.append({"id": str(uuid4()), "type": type, "name": type, "message": message})

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path.endswith("/set_state"):
            if self.remaining_refusals:
                self.remaining_refusals -= 1
                self.has_refused.set()
                if not self.remaining_refusals and self.state_after_refusals:
                    self.set(self.state_after_refusals, "how it ended")
                return 503, {"detail": "database is locked"}
            self.set(body["state"]["type"], body["state"]["message"])
            details = {"type": "accept_details"}
            return 201, {"status": "ACCEPT", "details": details, "state": self.states[-1]}
        if "csrf" in path:
            return 404, {"detail": "it has none"}
        return 200, {"id": str(FLOW_RUN), "flow_id": str(uuid4()), "state": self.states[-1]}


@pytest.fixture
def server() -> Iterator[Server]:
    """Start a fake Prefect server, and set its URL in Prefect's settings."""
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


def states_of(server: Server) -> list[tuple[str, str]]:
    """Return the type and the message of each state of the flow run, in order."""
    return [(state["type"], state["message"]) for state in server.states]


def test_message_is_set_after_a_short_outage(server: Server) -> None:
    server.remaining_refusals = 1

    set_running_message(FLOW_RUN, "step 2", threading.Event())

    assert states_of(server) == [("RUNNING", "step 1"), ("RUNNING", "step 2")]


@pytest.mark.parametrize("end", ["COMPLETED", "FAILED", "CANCELLED", "CANCELLING", "SCHEDULED"])
def test_message_delayed_by_an_outage_does_not_replace_a_later_state(
    server: Server, end: str
) -> None:
    server.remaining_refusals = 1
    server.state_after_refusals = end

    set_running_message(FLOW_RUN, "step 2", threading.Event())

    assert states_of(server) == [("RUNNING", "step 1"), (end, "how it ended")]


def test_no_message_is_set_after_the_end_of_the_flow(server: Server) -> None:
    is_over = threading.Event()
    is_over.set()
    server.remaining_refusals = 1

    set_running_message(FLOW_RUN, "step 2", is_over)

    assert states_of(server) == [("RUNNING", "step 1")]


def test_requests_are_not_repeated_after_the_end_of_the_flow(server: Server) -> None:
    server.remaining_refusals = 1000

    set_running_message(FLOW_RUN, "step 2", server.has_refused)

    assert states_of(server) == [("RUNNING", "step 1")]
    assert server.remaining_refusals == 999
