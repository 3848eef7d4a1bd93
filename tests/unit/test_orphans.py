"""The processes of a run are ended if its flow run has ended or was deleted."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound

from tasks.processes.identity import ProcessId, host_name
from tasks.processes.registry import Owner
from tasks.record.cancellation_note import take_note
from tasks.record.places import RunPlace
from tasks.upkeep import orphans

RUN = "by-hand-sft-20260101-000000-aaaa91c2"
FLOW_RUN = str(uuid4())


class Server:
    """Fake Prefect server with one flow run."""

    def __init__(self) -> None:
        self.state: State[Any] | None = State(type=StateType.RUNNING)

    def read_flow_run(self, id: UUID) -> FlowRun:
        if self.state is not None:
            return FlowRun(id=id, flow_id=uuid4(), state=self.state)
        request = httpx.Request("GET", "http://server/api")
        response = httpx.Response(404, json={"detail": "Flow run not found"}, request=request)
        raise ObjectNotFound(http_exc=httpx.HTTPStatusError("", request=request, response=response))

    def hello(self) -> Any:
        return SimpleNamespace(headers={})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()

    @contextmanager
    def connect_to_server(_api_url: str) -> Iterator[Server]:
        yield server

    monkeypatch.setattr(orphans, "connect_to_server", connect_to_server)
    return server


@pytest.fixture
def process(muster_home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that simulates the flow process of a registered run."""
    process = subprocess.Popen(["sleep", "60"])
    place = RunPlace.of(RUN)
    owner = Owner(
        run_id=RUN,
        host=host_name(),
        process=ProcessId.of(process.pid),
        flow_run_id=FLOW_RUN,
        api_url="http://server/api",
        directory=place.directory,
    )
    registered = muster_home / "live" / RUN
    registered.mkdir(parents=True)
    (registered / "owner.json").write_text(owner.model_dump_json())
    write_record("running")
    yield process
    process.kill()
    process.wait()


def write_record(state: str) -> None:
    place = RunPlace.of(RUN)
    place.directory.mkdir(parents=True, exist_ok=True)
    content = {"run_id": RUN, "flow_run_id": FLOW_RUN, "state": state, "attempts": []}
    place.record.write_text(json.dumps({**content, "started_at": 1.0, "ended_at": None}))


def completed(age_s: float) -> State[Any]:
    timestamp = datetime.now(UTC) - timedelta(seconds=age_s)
    return State(type=StateType.COMPLETED, timestamp=timestamp)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (None, "cancelled, because the flow run was deleted on the Prefect server"),
        (completed(60.0), "cancelled, because the flow run is Completed on the Prefect server"),
    ],
)
def test_process_of_an_orphan_gets_sigterm_and_the_reason(
    server: Server, process: subprocess.Popen[bytes], state: State[Any] | None, reason: str
) -> None:
    server.state = state

    [report] = orphans.end_orphans()

    assert process.wait(timeout=10) == -signal.SIGTERM
    assert report.name == RUN and str(process.pid) in report.found
    assert take_note(RunPlace.of(RUN).directory) == reason


@pytest.mark.parametrize("is_running", [True, False])
def test_process_of_another_run_gets_no_signal(
    server: Server, process: subprocess.Popen[bytes], is_running: bool
) -> None:
    # The run is still running, or has completed 1 s ago, so its processes may still be ending.
    server.state = State(type=StateType.RUNNING) if is_running else completed(1.0)

    assert [*orphans.end_orphans()] == []
    assert process.poll() is None


@pytest.mark.parametrize("record_state", ["stopping", "completed"])
def test_ending_run_gets_no_signal(
    server: Server, process: subprocess.Popen[bytes], record_state: str
) -> None:
    server.state = None
    write_record(record_state)

    assert [*orphans.end_orphans()] == []
    assert process.poll() is None
