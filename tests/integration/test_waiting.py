"""Leaving a run to its next process, on a real server: accepted, refused, raced by a cancel; and
that next process, which a server that is being started can't end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.exceptions import Pause
from prefect.settings import PREFECT_API_URL, PREFECT_WORKER_PREFETCH_SECONDS, temporary_settings

from tasks.server import flow_process
from tasks.spec.errors import RunEnded
from tasks.spec.run import RunSpec
from tasks.train import waiting
from tasks.train.session import RunSession
from tasks.train.waiting import next_attempt
from tasks.upkeep import waiting_runs
from tests.support.ground import Ground, Run

pytestmark = pytest.mark.slow

NO_ROOM = "raise ValueError('Total available GPUs 0 is less than total desired GPUs 16')"
SPEC = {
    "name": "trial",
    "workload": "grpo",
    "components": {"trainer": {"command": ["python", "-c", NO_ROOM]}},
    "retry": {"INSUFFICIENT_RESOURCES": {"delay_s": 0.1, "max_delay_s": 0.1}},
}

Refused = Callable[..., tuple[RunSession, Run]]


@pytest.fixture(scope="module")
def api(prefect_url: str) -> Iterator[str]:
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        yield prefect_url


@pytest.fixture
def refused(api: str, muster_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Refused]:
    """Makes a run whose attempt found too few GPUs, as under a worker, and its flow run."""
    sessions = []

    def make(pid: str = "812", **changes: Any) -> tuple[RunSession, Run]:
        ground = Ground(home=muster_home, api=api)
        flow = ground.post("/flows/", name="train")["id"]
        flow_run = ground.post("/flow_runs/", flow_id=flow, state={"type": "RUNNING"})["id"]
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(flow_run), infrastructure_pid=pid)
        monkeypatch.setattr(
            waiting, "started_by_others", lambda: SimpleNamespace(id=UUID(flow_run))
        )
        spec = RunSpec.model_validate({**SPEC, **changes})
        session = RunSession(
            spec, run_id=f"run-{len(sessions)}", flow_run_id=UUID(flow_run), api_url=api
        )
        sessions.append(session)
        session.begin_attempt()
        with suppress(RunEnded):  # It may have ended before its start is told.
            session.supervisor.start("trainer")
        session.supervisor.wait_decided()
        session.end_attempt()
        return session, Run(ground=ground, flow_run_id=flow_run)

    yield make
    for session in sessions:
        session.interrupt("the test has ended")
        session.close()
        session.leave()


def notes(home: Path) -> list[str]:
    folder = home / "parked"
    return sorted(path.stem for path in folder.iterdir()) if folder.exists() else []


def state_in_record(session: RunSession) -> str:
    return session.record.state.value


def test_run_is_left_to_its_next_process(refused: Refused, muster_home: Path) -> None:
    session, run = refused()

    with pytest.raises(Pause) as raised:
        next_attempt(session)
    session.close()

    flow_run = run.flow_run()
    assert flow_run["state"]["name"] == "PendingResources"
    assert raised.value.state is not None
    assert flow_run["state"]["message"] == raised.value.state.message
    assert flow_run["infrastructure_pid"] is None
    assert state_in_record(session) == "pending_resources"
    assert notes(muster_home) == [session.run_id]
    assert not (muster_home / "live" / session.run_id).exists()


def test_cancel_that_races_with_the_leaving_wins(refused: Refused, muster_home: Path) -> None:
    session, run = refused()
    run.ground.post(f"/flow_runs/{run.flow_run_id}/set_state", state={"type": "CANCELLING"})

    assert not next_attempt(session)
    verdict = session.close()

    assert run.state()[0] == "CANCELLING"  # until the flow returns its state
    assert (verdict.state.value, verdict.message) == ("cancelled", "cancelled from Prefect")
    assert state_in_record(session) == "cancelled"
    assert notes(muster_home) == []


def test_signal_that_comes_while_it_is_left_wins(
    refused: Refused, muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _run = refused()
    clear = flow_process.clear_process

    def interrupted(*arguments: Any) -> None:
        clear(*arguments)
        session.interrupt("interrupted by SIGTERM")

    monkeypatch.setattr(flow_process, "clear_process", interrupted)

    assert not next_attempt(session)

    assert session.close().state.value == "cancelled"
    assert notes(muster_home) == []


@pytest.mark.thorough
def test_run_waits_with_its_process_while_the_server_is_away(
    refused: Refused, muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, run = refused()
    monkeypatch.setattr(waiting, "_AWAY_AT_LEAST_S", 0.1)

    nobody = {PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_WORKER_PREFETCH_SECONDS: 0}
    with temporary_settings(nobody):
        goes_on = next_attempt(session)

    assert goes_on
    assert state_in_record(session) == "pending_resources"
    assert run.state()[0] == "RUNNING"
    assert notes(muster_home) == []


@pytest.mark.thorough
def test_state_whose_answer_is_lost(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two processes would go on with one run."""
    session, run = refused()
    original = flow_process.clear_process

    class Deaf:
        """Hands the state on and loses the answer."""

        def __init__(self, client: Any) -> None:
            self._client = client

        def set_flow_run_state(self, *arguments: Any) -> None:
            self._client.set_flow_run_state(*arguments)
            raise waiting.ServerAway("the answer was lost")

    talking_to = waiting.talking_to

    def deaf_once(api_url: str) -> Any:
        monkeypatch.setattr(waiting, "talking_to", talking_to)
        return Wrapped(talking_to(api_url), Deaf)

    monkeypatch.setattr(waiting, "talking_to", deaf_once)
    monkeypatch.setattr(
        flow_process,
        "clear_process",
        lambda client, flow_run_id: original(client._client, flow_run_id),
    )

    with pytest.raises(Pause):
        next_attempt(session)

    assert run.flow_run()["state"]["name"] == "PendingResources"


class Wrapped:
    """A context manager whose value is wrapped."""

    def __init__(self, inner: Any, wrap: Callable[[Any], Any]) -> None:
        self._inner, self._wrap = inner, wrap

    def __enter__(self) -> Any:
        return self._wrap(self._inner.__enter__())

    def __exit__(self, *error: Any) -> Any:
        return self._inner.__exit__(*error)


def test_kind_that_is_final_is_not_waited_for(refused: Refused) -> None:
    session, _run = refused(
        components={"trainer": {"command": ["python", "-c", "import no_such_module"]}}
    )

    assert not next_attempt(session)

    assert session.close().state.value == "failed"
    [entry] = session.record.content.attempts
    assert entry.decision == "final: USER_ERROR is not retried"


@pytest.mark.parametrize(
    ("state", "after"),
    [
        ({"type": "CANCELLED"}, "cancelled"),
        ({"type": "FAILED", "message": "set by hand"}, "failed"),
        ({"type": "PENDING"}, "pending_resources"),  # its next process is on its way
        ({"type": "COMPLETED"}, "pending_resources"),  # by another machine, which knows more
    ],
)
def test_record_of_a_run_that_ended_while_it_waited_is_closed(
    refused: Refused, muster_home: Path, state: dict[str, str], after: str
) -> None:
    session, run = refused()
    with pytest.raises(Pause):
        next_attempt(session)
    assert list(waiting_runs.close_ended_waiting_runs()) == []

    run.ground.post(f"/flow_runs/{run.flow_run_id}/set_state", state=state, force=True)
    closed = list(waiting_runs.close_ended_waiting_runs())

    assert [one.record for one in closed] == ([after] if after in ("cancelled", "failed") else [])
    assert f'"state": "{after}"' in session.place.record.read_text()[:200]
    assert notes(muster_home) == ([session.run_id] if state["type"] == "PENDING" else [])


def test_run_with_a_process_is_none_of_reconcile_s(refused: Refused, muster_home: Path) -> None:
    session, run = refused()
    with pytest.raises(Pause):
        next_attempt(session)
    again = RunSession(session.spec, run_id=session.run_id, flow_run_id=UUID(run.flow_run_id))

    run.ground.post(f"/flow_runs/{run.flow_run_id}/set_state", state={"type": "CANCELLED"})

    assert list(waiting_runs.close_ended_waiting_runs()) == []
    assert state_in_record(again) == "pending_resources"
    again.interrupt("over")
    again.close()
    again.leave()


def test_a_process_that_starts_while_its_server_does_waits_for_it(tmp_path: Path) -> None:
    asked: list[str] = []

    class NotFound(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

    flow_run = "7712f819-7b19-4723-bcbf-b5067028ec50"
    with ThreadingHTTPServer(("127.0.0.1", 0), NotFound, bind_and_activate=False) as server:
        server.server_bind()  # Until it listens, who connects is refused.
        environment = {
            **os.environ,
            "PREFECT_API_URL": f"http://127.0.0.1:{server.socket.getsockname()[1]}/api",
            "PREFECT_HOME": str(tmp_path),
            "PREFECT_LOGGING_LEVEL": "DEBUG",
            "PREFECT__FLOW_RUN_ID": flow_run,
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "flows"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        with process, process.stdout as output:
            said = next((line for line in output if "Another attempt" in line), "")
            server.server_activate()
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            rest = output.read()
        server.shutdown()
        thread.join()

    assert said
    assert f"/api/flow_runs/{flow_run}" in asked, rest
