"""Ray jobs of a run whose flow process was killed are kept for the run's next process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Completed, Running

from tasks.processes.identity import host_name
from tasks.processes.registry import LostRun
from tasks.record.final_record import FlowLoss
from tasks.upkeep import lost_run
from tasks.upkeep.lost_run import keep_jobs
from tests.support.lost_runs import make_lost_run

FLOW_RUN = uuid4()


@pytest.fixture
def lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LostRun:
    """A run that a worker of this host started, and whose flow process was killed."""
    monkeypatch.setattr(lost_run, "has_adoptable_attempt", lambda _lost: True)
    return make_lost_run(tmp_path, FLOW_RUN, directory=tmp_path, adopts=True)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Fake Prefect server with one flow run. The server records the changes of this flow run."""
    server = SimpleNamespace(run=None, changes=[])

    @contextmanager
    def connect_to_server(_api_url: str) -> Iterator[None]:
        yield None

    def propose(_client: None, _id: str, _before: State[Any], after: State[Any]) -> bool:
        server.changes.append(after.name)
        return True

    monkeypatch.setattr(lost_run, "connect_to_server", connect_to_server)
    monkeypatch.setattr(lost_run, "find_flow_run", lambda _client, _id: server.run)
    monkeypatch.setattr(lost_run, "clear_process", lambda *_: server.changes.append("no process"))
    monkeypatch.setattr(lost_run, "propose_state", propose)
    return server


def flow_run(state: State[Any], worker: str) -> FlowRun:
    labels = {"prefect.worker.name": worker, "prefect.worker.type": "gang"}
    return FlowRun(id=FLOW_RUN, flow_id=uuid4(), deployment_id=uuid4(), state=state, labels=labels)


def test_run_of_this_host_is_scheduled_again(lost: LostRun, server: SimpleNamespace) -> None:
    server.run = flow_run(Running(), worker=host_name())

    report = keep_jobs(lost, FlowLoss(pid=7))

    assert report is not None and (report.server, report.open) == ("AwaitingRetry", "")
    assert server.changes == ["no process", "AwaitingRetry"]


def test_run_on_another_host_is_not_changed(lost: LostRun, server: SimpleNamespace) -> None:
    server.run = flow_run(Running(), worker="another-host")

    report = keep_jobs(lost, FlowLoss(pid=7))

    assert report is not None and (report.server, report.open) == ("", "")
    assert server.changes == []


def test_jobs_are_ended_if_the_run_ended_on_another_host(
    lost: LostRun, server: SimpleNamespace
) -> None:
    server.run = flow_run(Completed(), worker="another-host")

    report = keep_jobs(lost, FlowLoss(pid=7))

    assert report is None
    assert server.changes == []
