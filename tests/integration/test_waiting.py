"""A run that needs another attempt is handed over to its next flow process.

The tests use a real Prefect server. The server may accept or refuse the handover, or the user may
cancel at the same time. The last test starts the next process while the server itself is starting.
"""

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
from tests.support.host_environment import HostEnvironment, Run

pytestmark = pytest.mark.slow

TOO_FEW_GPUS = "raise ValueError('Total available GPUs 0 is less than total desired GPUs 16')"
SPEC = {
    "name": "trial",
    "workload": "grpo",
    "components": {"trainer": {"command": ["python", "-c", TOO_FEW_GPUS]}},
    "retry": {"INSUFFICIENT_RESOURCES": {"delay_s": 0.1, "max_delay_s": 0.1}},
}

MakeFailedRun = Callable[..., tuple[RunSession, Run]]


@pytest.fixture(scope="module")
def api(prefect_url: str) -> Iterator[str]:
    """Yield the address of the Prefect server that all clients in this process use."""
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        yield prefect_url


@pytest.fixture
def make_failed_run(
    api: str, muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeFailedRun]:
    """Yield a function that makes a run whose first attempt has failed for lack of GPUs.

    The fixture replaces `find_worker_flow_run`, so that a worker seems to have started the run. The
    function returns the `RunSession` that executes the run, and the run.
    """
    sessions = []

    def make_run(pid: str = "812", **changes: Any) -> tuple[RunSession, Run]:
        host_env = HostEnvironment(home=muster_home, api=api)
        flow = host_env.post("/flows/", name="train")["id"]
        flow_run = host_env.post("/flow_runs/", flow_id=flow, state={"type": "RUNNING"})["id"]
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(flow_run), infrastructure_pid=pid)
        monkeypatch.setattr(
            waiting, "find_worker_flow_run", lambda: SimpleNamespace(id=UUID(flow_run))
        )
        spec = RunSpec.model_validate({**SPEC, **changes})
        session = RunSession(
            spec, run_id=f"run-{len(sessions)}", flow_run_id=UUID(flow_run), api_url=api
        )
        sessions.append(session)
        session.begin_attempt()
        with suppress(RunEnded):  # The component may end before `start` returns.
            session.supervisor.start("trainer")
        session.supervisor.wait_decided()
        session.end_attempt()
        return session, Run(host_env=host_env, flow_run_id=flow_run)

    yield make_run
    for session in sessions:
        session.interrupt("the test has ended")
        session.close()
        session.leave()


def list_waiting_runs(home: Path) -> list[str]:
    """Return the ids of this host's runs that wait for their next attempt and have no process."""
    folder = home / "parked"
    return sorted(path.stem for path in folder.iterdir()) if folder.exists() else []


def read_recorded_state(session: RunSession) -> str:
    """Return the state in the record of the run."""
    return session.record.state.value


def test_run_is_handed_over_to_its_next_process(
    make_failed_run: MakeFailedRun, muster_home: Path
) -> None:
    session, run = make_failed_run()

    with pytest.raises(Pause) as pause:
        next_attempt(session)
    session.close()

    flow_run = run.flow_run()
    assert flow_run["state"]["name"] == "PendingResources"
    assert pause.value.state is not None
    assert flow_run["state"]["message"] == pause.value.state.message
    assert flow_run["infrastructure_pid"] is None
    assert read_recorded_state(session) == "pending_resources"
    assert list_waiting_runs(muster_home) == [session.run_id]
    assert not (muster_home / "live" / session.run_id).exists()


def test_run_that_is_cancelled_during_its_handover_is_not_handed_over(
    make_failed_run: MakeFailedRun, muster_home: Path
) -> None:
    session, run = make_failed_run()
    run.host_env.post(f"/flow_runs/{run.flow_run_id}/set_state", state={"type": "CANCELLING"})

    assert not next_attempt(session)
    verdict = session.close()

    # The flow run is not CANCELLED yet, because the flow has not returned its final state.
    assert run.state()[0] == "CANCELLING"
    assert (verdict.state.value, verdict.message) == ("cancelled", "cancelled from Prefect")
    assert read_recorded_state(session) == "cancelled"
    assert list_waiting_runs(muster_home) == []


def test_run_that_gets_a_signal_during_its_handover_is_not_handed_over(
    make_failed_run: MakeFailedRun, muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _run = make_failed_run()
    clear = flow_process.clear_process

    def clear_and_interrupt(*arguments: Any) -> None:
        clear(*arguments)
        session.interrupt("interrupted by SIGTERM")

    monkeypatch.setattr(flow_process, "clear_process", clear_and_interrupt)

    assert not next_attempt(session)

    assert session.close().state.value == "cancelled"
    assert list_waiting_runs(muster_home) == []


@pytest.mark.thorough
def test_run_keeps_its_process_while_the_server_is_unreachable(
    make_failed_run: MakeFailedRun, muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, run = make_failed_run()
    monkeypatch.setattr(waiting, "_MIN_ABSENCE_S", 0.1)

    unreachable_server = {
        PREFECT_API_URL: "http://127.0.0.1:9/api",
        PREFECT_WORKER_PREFETCH_SECONDS: 0,
    }
    with temporary_settings(unreachable_server):
        continues = next_attempt(session)

    assert continues
    assert read_recorded_state(session) == "pending_resources"
    assert run.state()[0] == "RUNNING"
    assert list_waiting_runs(muster_home) == []


@pytest.mark.thorough
def test_handover_succeeds_if_the_response_of_the_server_is_lost(
    make_failed_run: MakeFailedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server hands the run over to a new process, but the old process gets an error.

    If the old process then continued the run, two processes would execute the run.
    """
    session, run = make_failed_run()
    original = flow_process.clear_process

    class LosingClient:
        """A Prefect client that sets the new state, and then fails as if the response was lost."""

        def __init__(self, client: Any) -> None:
            self._client = client

        def set_flow_run_state(self, *arguments: Any, **options: Any) -> None:
            self._client.set_flow_run_state(*arguments, **options)
            raise waiting.ServerAway("the answer was lost")

    talking_to = waiting.connect_to_server

    def open_losing_client(api_url: str) -> Any:
        monkeypatch.setattr(waiting, "connect_to_server", talking_to)
        return Wrapped(talking_to(api_url), LosingClient)

    monkeypatch.setattr(waiting, "connect_to_server", open_losing_client)
    monkeypatch.setattr(
        flow_process,
        "clear_process",
        lambda client, flow_run_id: original(client._client, flow_run_id),
    )

    with pytest.raises(Pause):
        next_attempt(session)

    assert run.flow_run()["state"]["name"] == "PendingResources"


class Wrapped:
    """A context manager that enters the context manager `inner`, and changes its result.

    The function `wrap` makes the new result from the result of `inner`.
    """

    def __init__(self, inner: Any, wrap: Callable[[Any], Any]) -> None:
        self._inner = inner
        self._wrap = wrap

    def __enter__(self) -> Any:
        return self._wrap(self._inner.__enter__())

    def __exit__(self, *error: Any) -> Any:
        return self._inner.__exit__(*error)


def test_failure_kind_without_retries_ends_the_run(make_failed_run: MakeFailedRun) -> None:
    session, _run = make_failed_run(
        components={"trainer": {"command": ["python", "-c", "import no_such_module"]}}
    )

    assert not next_attempt(session)

    assert session.close().state.value == "failed"
    [entry] = session.record.content.attempts
    assert entry.decision == "final: the key `retry` of the spec does not list USER_ERROR"


@pytest.mark.parametrize(
    ("state", "final_state"),
    [
        ({"type": "CANCELLED"}, "cancelled"),
        ({"type": "FAILED", "message": "set by hand"}, "failed"),
        # The run has not ended, because the process of the next attempt has started.
        ({"type": "PENDING"}, "pending_resources"),
        # A person has set the state by hand. No attempt has completed the run, so the run counts as
        # cancelled.
        ({"type": "COMPLETED"}, "cancelled"),
    ],
)
def test_record_of_a_run_that_ended_while_waiting_gets_the_final_state(
    make_failed_run: MakeFailedRun, muster_home: Path, state: dict[str, str], final_state: str
) -> None:
    session, run = make_failed_run()
    with pytest.raises(Pause):
        next_attempt(session)
    assert list(waiting_runs.close_ended_waiting_runs()) == []

    run.host_env.post(f"/flow_runs/{run.flow_run_id}/set_state", state=state, force=True)
    closed = list(waiting_runs.close_ended_waiting_runs())

    assert [record.record for record in closed] == (
        [final_state] if final_state in ("cancelled", "failed") else []
    )
    assert f'"state": "{final_state}"' in session.place.record.read_text()[:200]
    assert list_waiting_runs(muster_home) == (
        [session.run_id] if state["type"] == "PENDING" else []
    )


def test_reconcile_does_not_close_a_run_that_has_a_process(
    make_failed_run: MakeFailedRun, muster_home: Path
) -> None:
    session, run = make_failed_run()
    with pytest.raises(Pause):
        next_attempt(session)
    new_session = RunSession(session.spec, run_id=session.run_id, flow_run_id=UUID(run.flow_run_id))

    run.host_env.post(f"/flow_runs/{run.flow_run_id}/set_state", state={"type": "CANCELLED"})

    assert list(waiting_runs.close_ended_waiting_runs()) == []
    assert read_recorded_state(new_session) == "pending_resources"
    new_session.interrupt("over")
    new_session.close()
    new_session.leave()


def test_flow_process_waits_for_a_server_that_is_still_starting(tmp_path: Path) -> None:
    requested_paths: list[str] = []

    class NotFound(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested_paths.append(self.path)
            self.send_error(404)

    flow_run = "7712f819-7b19-4723-bcbf-b5067028ec50"
    with ThreadingHTTPServer(("127.0.0.1", 0), NotFound, bind_and_activate=False) as server:
        # The server has bound its port, but does not listen yet. So the kernel refuses connections,
        # as during the start of a server.
        server.server_bind()
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
            retry_line = next((line for line in output if "Another attempt" in line), "")
            server.server_activate()
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            remaining_output = output.read()
        server.shutdown()
        thread.join()

    assert retry_line
    assert f"/api/flow_runs/{flow_run}" in requested_paths, remaining_output
