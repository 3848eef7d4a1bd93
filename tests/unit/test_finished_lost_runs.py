"""The end of a run after its flow process was killed: `finish_run`, with a fake Prefect server.

`finish_run` must write the final message of the run into the log of the run's flow run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import yaml
from prefect.client.schemas.actions import LogCreate
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import SetStateStatus
from prefect.states import Cancelling, Crashed, Running, Scheduled

from tasks.processes.identity import host_name
from tasks.processes.registry import LostRun
from tasks.record.events import EventLog
from tasks.record.final_record import FlowLoss, describe_cleanup_after_loss
from tasks.record.run_json import RunJson, RunRecord
from tasks.record.states import RunState
from tasks.upkeep import lost_run
from tasks.upkeep.lost_run import finish_run
from tests.support.lost_runs import make_lost_run

FLOW_RUN = uuid4()
RUN_ID = "a-run"
ANNOUNCED = f"The flow process of this run was killed. {describe_cleanup_after_loss(RUN_ID)}"
FINAL = (
    "the flow process (pid 7) of this run was killed or lost; the run had no leftover processes. "
    f"To continue the run: muster retry {RUN_ID}"
)


@dataclass
class FakeServer:
    """Fake Prefect client with one flow run, which records the state changes and the logs."""

    states: list[State[Any]]
    logs: list[LogCreate] = field(default_factory=list)

    def read_flow_run(self, flow_run_id: UUID) -> FlowRun:
        labels = {"prefect.worker.name": host_name(), "prefect.worker.type": "gang"}
        return FlowRun(id=flow_run_id, flow_id=uuid4(), state=self.states[-1], labels=labels)

    def set_flow_run_state(
        self, flow_run_id: UUID, state: State[Any], *, force: bool = False
    ) -> Any:
        # The server refuses to replace Crashed by Crashed, unless the change is forced.
        is_refused = self.states[-1].is_crashed() and state.is_crashed() and not force
        status = SetStateStatus.ABORT if is_refused else SetStateStatus.ACCEPT
        self.states += [] if is_refused else [state]
        return type("Answer", (), {"status": status, "state": state})()

    def read_flow_run_states(self, flow_run_id: UUID) -> list[State[Any]]:
        return self.states

    def create_logs(self, logs: list[LogCreate]) -> None:
        self.logs += logs


@pytest.fixture
def lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LostRun:
    """A run whose flow process was killed during the first attempt."""
    record = RunRecord(tmp_path / "run.json", run_id=RUN_ID, flow_run_id=str(FLOW_RUN))
    record.begin_attempt(1)
    record.move(RunState.ADMITTED)
    (tmp_path / "attempt-01").mkdir()
    monkeypatch.setattr(LostRun, "forget", lambda _self: None)
    monkeypatch.setattr(lost_run, "update_page_of_closed_run", lambda *_: None)
    monkeypatch.setattr(lost_run, "cancel_evaluations_of_closed_run", lambda *_: None)
    return make_lost_run(tmp_path / "live", FLOW_RUN, run_id=RUN_ID, directory=tmp_path)


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the fake server, whose flow run has the given state."""

    def make_server(state: State[Any]) -> FakeServer:
        server = FakeServer(states=[state])

        @contextmanager
        def connect_to_server(_api_url: str) -> Iterator[FakeServer]:
            yield server

        monkeypatch.setattr(lost_run, "connect_to_server", connect_to_server)
        return server

    return make_server


@pytest.mark.parametrize(
    ("state", "new_states"),
    [
        # A worker has already set Crashed. A second state would cause a second notification.
        (Crashed(message=ANNOUNCED), []),
        (Running(message="running: step 3"), [("Crashed", FINAL)]),
    ],
)
def test_log_of_a_killed_run_gets_the_final_message_once(
    state: State[Any], new_states: list[tuple[str, str]], lost: LostRun, connect: Any
) -> None:
    server = connect(state)

    finish_run(lost, FlowLoss(pid=7))
    second = finish_run(lost, FlowLoss(pid=7))

    assert [(state.name, state.message) for state in server.states[1:]] == new_states
    [line] = server.logs
    assert (line.message, line.level) == (FINAL, logging.ERROR)
    # The second call finds nothing to change, and logs nothing.
    assert (second.server, second.record) == ("", "")


@pytest.mark.parametrize(
    ("lines", "step"),
    [
        (['{"step": 131}', '{"step": 132}'], 132),
        # The trainer was killed while it wrote the last line.
        (['{"step": 132}', '{"step": 13'], 132),
        # The trainer has written no further line.
        (['{"step": 131}'], 131),
        (["no JSON"], 131),
        ([], 131),
    ],
)
def test_step_of_a_killed_run_is_the_last_step_of_its_metrics_file(
    lines: list[str], step: float, lost: LostRun, connect: Any
) -> None:
    connect(Crashed(message=ANNOUNCED))
    directory = lost.owner.directory
    assert directory is not None
    events = EventLog(directory / "attempt-01" / "events.jsonl")
    events.emit("run.progress", step=131, total=200)
    progress = {"jsonl": "metrics.jsonl", "step": "step"}
    spec = {"cwd": str(directory), "progress": progress}
    (directory / "attempt-01" / "spec.yaml").write_text(yaml.safe_dump(spec))
    if lines:
        (directory / "metrics.jsonl").write_text("\n".join(lines))

    finish_run(lost, FlowLoss(pid=7))

    attempt = RunJson.read(directory / "run.json").attempt
    assert attempt is not None and (attempt.step, attempt.best_step) == (step, step)


def test_cancelled_run_is_logged_without_an_error(lost: LostRun, connect: Any) -> None:
    server = connect(Cancelling())

    finish_run(lost, FlowLoss(pid=7))

    (line,) = server.logs
    assert line.message.startswith("cancelled; the flow process (pid 7)")
    assert line.level == logging.INFO


def test_state_and_log_of_a_retried_run_are_not_changed(lost: LostRun, connect: Any) -> None:
    server = connect(Scheduled(message="retried by muster"))

    finish_run(lost, FlowLoss(pid=7))

    assert len(server.states) == 1 and server.logs == []
    assert lost.owner.directory is not None
    record = RunJson.read(lost.owner.directory / "run.json")
    assert record.state is RunState.PENDING_RESOURCES
