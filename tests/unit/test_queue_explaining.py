"""`muster why` for a run whose worker may be silent."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling, Completed, Running, Scheduled

from tasks.queue.grants import Grant
from tasks.queue.reasons import no_answer_message
from tasks.queue.scheduling_pass import QueuedRun, QueueView
from tasks.queue.tables import explain

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
SILENT = (
    "  host           the run's worker there last reported 14 min ago; if its host is permanently "
    "lost, run: muster reconcile --lost-host there"
)
#: Labels of a flow run that holds two GPUs of the node `n1`.
GRANTED = Grant(nodes={"n1": 2}, state_id="", at=NOW.timestamp(), by=None).label()


class Server:
    """Fake Prefect server with a flow run and the workers of its pool.

    Each worker is a pair: its name, and the seconds since its last heartbeat (None if unknown).
    """

    def __init__(self, state: Any, workers: list[tuple[str, float | None]]) -> None:
        labels = {"prefect.worker.name": "there", "prefect.worker.type": "gang"}
        fields = {"name": "a-run", "flow_id": uuid4(), "work_pool_name": "gang", "labels": labels}
        self.run = FlowRun(id=uuid4(), state=state, **fields)
        self._workers = workers

    async def read_flow_run(self, _id: UUID) -> FlowRun:
        return self.run

    async def read_workers_for_work_pool(self, pool: str) -> list[Any]:
        heartbeats = [(name, ago and NOW - timedelta(seconds=ago)) for name, ago in self._workers]
        return [SimpleNamespace(name=name, last_heartbeat_time=at) for name, at in heartbeats]


async def read_view(pool: str) -> QueueView:
    return QueueView(
        at=NOW.timestamp(),
        pool=pool,
        policy="fifo",
        is_paused=False,
        limit=None,
        running=1,
        line=(),
        nodes=(),
    )


@pytest.mark.parametrize(
    ("state", "workers", "is_warned"),
    [
        (Running(), [("there", 840.0)], True),
        (Cancelling(), [("other", 1.0), ("there", 840.0)], True),
        (Running(), [("there", 119.0)], False),
        # of two workers with the same name, the newer worker sends heartbeats, so there is no
        # warning
        (Running(), [("there", 840.0), ("there", 3.0)], False),
        # the time of the last heartbeat of the run's worker is unknown, so there is no warning
        (Running(), [("there", None)], False),
        (Running(), [("other", 840.0)], False),
        # the run has no process, so a missing heartbeat of the worker causes no warning
        (Scheduled(), [("there", 840.0)], False),
        (Completed(), [("there", 840.0)], False),
    ],
)
def test_silent_host_of_a_run_is_reported(
    state: Any, workers: list[tuple[str, float | None]], is_warned: bool
) -> None:
    server: Any = Server(state, workers)

    output = asyncio.run(explain(server, str(server.run.id), "gang", read_view))

    assert (SILENT in output.splitlines()) == is_warned


@pytest.mark.parametrize(
    "error",
    ["the work pool lists no nodes: muster queue set node.NAME=GPUS", "timed out " + "x" * 300],
)
@pytest.mark.parametrize("address", ["", "http://10.0.0.1:8265"])
def test_reason_of_a_waiting_run_is_printed_once(address: str, error: str) -> None:
    state = Scheduled()
    server: Any = Server(state, [])
    message = no_answer_message(None, address, error)
    queued = QueuedRun(
        number=1,
        name="a-run",
        flow_run_id=str(server.run.id),
        demand=None,
        cluster=address,
        queue="default",
        reason=message.reason,
        waiting_since=NOW.timestamp(),
    )
    troubles = (f"{address or 'the nodes'}: {error}", "http://10.0.0.2:8265: timed out after 5 s")

    async def read_view_with_run(pool: str) -> QueueView:
        return replace(await read_view(pool), line=(queued,), troubles=troubles)

    output = asyncio.run(explain(server, str(server.run.id), "gang", read_view_with_run))

    assert output.count(error[:40]) == 1
    assert "10.0.0.2:8265: timed out after 5 s" in output


@pytest.mark.parametrize(
    ("state", "labels", "is_shown"),
    [
        (Completed(), GRANTED, False),
        (Running(), GRANTED, True),
        # a running run without granted GPUs uses no GPUs; a scheduled run waits for GPUs
        (Running(), {}, False),
        (Scheduled(), {}, True),
    ],
)
def test_problems_of_the_nodes_are_shown_only_for_runs_that_need_nodes(
    state: Any, labels: dict[str, Any], is_shown: bool
) -> None:
    server: Any = Server(state, [("there", 1)])
    server.run.labels |= labels

    async def read_view_with_problem(pool: str) -> QueueView:
        return replace(await read_view(pool), troubles=("the nodes: the work pool lists no nodes",))

    output = asyncio.run(explain(server, str(server.run.id), "gang", read_view_with_problem))

    assert ("lists no nodes" in output) is is_shown
