"""Cancelling a pipeline also cancels the run of its current stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import SetStateStatus

from tasks.pipeline import progress_report, run_cancellation, server_requests
from tasks.pipeline.decision import StageRun
from tasks.pipeline.progress_report import ProgressReport
from tasks.pipeline.session import PipelineSession
from tasks.server.flow_runs import CANCELLING_NOW
from tasks.spec.pipeline import parse_pipeline


class FakeServer:
    """Fake Prefect server with one run.

    The run ends after its state has been read `reads` times. If the run is cancelled without a
    grace period, the run ends at the next read.
    """

    def __init__(self, reads: int) -> None:
        self.reads_left = reads
        self.state_names: list[str | None] = []

    def set_flow_run_state(
        self, _id: UUID, state: State[Any], *, force: bool = False
    ) -> SimpleNamespace:
        self.state_names.append(state.name)
        if state.name == CANCELLING_NOW:
            self.reads_left = 0
        return SimpleNamespace(status=SetStateStatus.ACCEPT, state=state)

    def read_flow_run(self, id: UUID) -> FlowRun:
        self.reads_left -= 1
        kind = StateType.CANCELLING if self.reads_left > 0 else StateType.CANCELLED
        return FlowRun(id=id, flow_id=uuid4(), name="a-run", state=State(type=kind))


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> PipelineSession:
    monkeypatch.setattr(run_cancellation, "POLL_INTERVAL_S", 0.001)
    monkeypatch.setattr(ProgressReport, "say", lambda *_: None)
    monkeypatch.setattr(progress_report.flow_runs, "set_running_message", lambda *_: None)
    spec = {"name": "x", "workload": "sft", "components": {"trainer": {"command": ["true"]}}}
    stages = [{"name": "only", "spec": spec}]
    pipeline = parse_pipeline({"name": "line", "stages": stages})
    return PipelineSession(pipeline, flow_run_id=uuid4(), api_url="http://a/api")


def cancel_stage(
    session: PipelineSession, reads: int, monkeypatch: pytest.MonkeyPatch, *requests: str
) -> list[str | None]:
    """Interrupt a pipeline, and return the states that the pipeline sets for the stage's run.

    Args:
        session: The pipeline.
        reads: The run ends after its state has been read this number of times.
        monkeypatch: Replaces the Prefect server.
        requests: Reasons to interrupt the pipeline. "hurry" skips the grace periods.
    """
    server = FakeServer(reads)

    @contextmanager
    def connect(_connection: object) -> Iterator[FakeServer]:
        yield server

    monkeypatch.setattr(server_requests.PrefectConnection, "client", connect)
    run = StageRun(
        stage="only",
        number=1,
        flow_run_id=str(uuid4()),
        name="a-run",
        state="Running",
        message="",
        ending=None,
        ended_at=None,
    )
    for request in requests:
        if request == "hurry":
            session.hurry()
        else:
            session.interrupt(request)
    monkeypatch.setattr(session, "_read_progress", lambda _client: ([run], datetime.now(UTC)))
    session.cancel_runs()
    return server.state_names


def test_cancel_that_arrives_twice_keeps_the_grace_periods_of_the_stage(
    session: PipelineSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = ("interrupted by SIGTERM", "interrupted by SIGTERM", "cancelled from Prefect")

    states = cancel_stage(session, 20, monkeypatch, *requests)

    assert states == ["Cancelling"]
    assert session.cancel_reason == "interrupted by SIGTERM; stage only: Cancelled"


def test_second_interrupt_skips_the_grace_periods_of_the_stage(
    session: PipelineSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = cancel_stage(session, 10**9, monkeypatch, "interrupted by SIGINT", "hurry")

    assert states == ["Cancelling", "Cancelling", CANCELLING_NOW]
    assert session.cancel_reason == "interrupted by SIGINT; stage only: Cancelled"
