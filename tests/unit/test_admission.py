"""Tests of a run that waits for its GPUs in its own process.

They check the messages of the run, and the Ray cluster of a run that requests no gang.
"""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType, WorkPool
from prefect.exceptions import ObjectNotFound

from tasks.queue import admission
from tasks.queue.admission import _Admission
from tasks.queue.grants import Grant
from tasks.queue.lease import LeaseLost
from tasks.queue.settings import (
    FaultyNode,
    MissingFromServer,
    PoolSettings,
    TableNode,
    with_settings,
)
from tasks.ray.dashboard import ListedCluster
from tasks.record.outcome import Failure, FailureKind

GPU_1, GPU_2, GPU_3, GPU_4 = (TableNode(name=f"gpu-{number}", gpus=8) for number in range(1, 5))


def make_faulty_node(name: str) -> FaultyNode:
    """Return the entry of a node that Muster has drained until the year 2096."""
    return FaultyNode(node=name, until=4e9)


class Server:
    """A fake Prefect server that accepts new states of flow runs."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    async def set_flow_run_state(self, flow_run_id: UUID, state: Any) -> None:
        self.messages.append(state.message)


def make_pass(run: UUID, *, place: int, length: int, reason: str) -> Any:
    """Return a fake scheduling pass in which a run waits in the queue.

    Args:
        run: Id of the flow run.
        place: Position of the run in the queue. The first position is 1.
        length: Number of runs in the queue.
        reason: Reason why the run waits.
    """
    ids = [uuid4() for _ in range(length)]
    ids[place - 1] = run
    message = SimpleNamespace(text=f"needs 1 GPU; {reason}")
    return SimpleNamespace(messages={run: message}, queue=[SimpleNamespace(id=id) for id in ids])


@pytest.mark.parametrize(
    ("second", "expected", "states"),
    [
        # position and reason are unchanged, so nothing is printed
        ({"place": 3, "length": 3, "reason": "waits"}, [], 0),
        # another run has joined the queue behind this run, so nothing is printed
        ({"place": 3, "length": 4, "reason": "waits"}, [], 0),
        # the position of the run changes, so the new position is printed. The state on the server
        # stays the same, because the message of the state does not contain the position
        (
            {"place": 2, "length": 2, "reason": "waits"},
            ["position 2 of 2 in the queue; needs 1 GPU; waits"],
            0,
        ),
        # the reason for waiting changes: the new reason is printed, and the state on the server is
        # updated
        (
            {"place": 3, "length": 3, "reason": "is first"},
            ["position 3 of 3 in the queue; needs 1 GPU; is first"],
            1,
        ),
    ],
)
def test_position_and_reason_are_reported_when_they_change(
    second: dict[str, Any], expected: list[str], states: int
) -> None:
    run = uuid4()
    server = Server()
    reports: list[str] = []
    waiting = _Admission(run, True, False, reports.append, lambda seconds: True)
    asyncio.run(waiting._report_pass(server, make_pass(run, place=3, length=3, reason="waits")))
    first = list(reports)

    asyncio.run(waiting._report_pass(server, make_pass(run, **second)))

    assert first == ["position 3 of 3 in the queue; needs 1 GPU; waits"]
    assert reports[1:] == expected
    assert len(server.messages) == 1 + states


@pytest.mark.parametrize(
    ("state", "messages"),
    [
        # The waiting run has lost the state PendingResources, for example because a user changed
        # the state. A run with the state Running is not in the queue. So the run's process sets the
        # state PendingResources again, with a message.
        (State(type=StateType.RUNNING), ["waits for the GPUs of the run (`gang`)"]),
        (State(type=StateType.RUNNING, name="PendingResources"), []),
        (State(type=StateType.CANCELLING), []),
        (State(type=StateType.COMPLETED), []),
    ],
)
def test_run_that_waits_in_its_process_returns_to_the_queue(
    state: State[Any], messages: list[str]
) -> None:
    run = uuid4()
    server: Any = Server()
    waiting = _Admission(run, True, False, lambda _message: None, lambda _seconds: True)
    flow_run = FlowRun(id=run, flow_id=uuid4(), state=state)

    asyncio.run(waiting._return_to_queue(server, flow_run))

    assert server.messages == messages


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            httpx.ConnectError("refused"),
            "waits for the Prefect server, which does not answer: ConnectError('refused')",
        ),
        (
            ObjectNotFound(Exception()),
            "waits, because somebody deleted the flow run, its work pool or its deployment from "
            "the Prefect server",
        ),
        (
            LeaseLost("the lease is over"),
            "waits, because Muster's last check of the queue failed. Muster will repeat the "
            "check: the lease is over",
        ),
    ],
)
def test_failed_scheduling_pass_is_reported_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail_to_connect() -> Any:
        raise error

    monkeypatch.setattr(admission, "get_client", fail_to_connect)
    reports: list[str] = []
    waiting = _Admission(uuid4(), True, False, reports.append, lambda _seconds: False)

    admitted = asyncio.run(waiting.wait())

    assert (admitted, reports) == (None, [message])


@pytest.mark.parametrize(
    ("pool", "labels", "address"),
    [
        # no GPUs were granted to the run: the run uses the only Ray cluster of its work pool
        ("other", {}, "http://b:8265"),
        # no gang worker started the run: the run uses the only Ray cluster of the work pool `gang`
        ("", {}, "http://a:8265"),
        ("process", {}, "http://a:8265"),
        # GPUs of a Ray cluster were granted to the run: the run uses this cluster, although its
        # work pool now lists another cluster
        ("gang", Grant(nodes={}, cluster="http://c:8265").label(), "http://c:8265"),
    ],
)
def test_run_without_a_gang_uses_its_pools_only_cluster(
    monkeypatch: pytest.MonkeyPatch, pool: str, labels: dict[str, Any], address: str
) -> None:
    pools = {"gang": ["http://a:8265"], "other": ["http://b:8265"]}
    monkeypatch.setattr(admission, "get_client", lambda: Pools(pools, pool, labels))

    assert admission.find_cluster(uuid4()) == address


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ({}, "(it lists: none). Write `ray: {address: URL}` into the spec, or list one cluster"),
        (
            {"gang": []},
            "(it lists: none). Write `ray: {address: URL}` into the spec, or list one cluster",
        ),
        (
            {"gang": ["http://a:8265", "http://b:8265"]},
            "(it lists: http://a:8265, http://b:8265). Write `ray: {address: URL}`",
        ),
    ],
)
def test_pool_without_exactly_one_cluster_is_explained(
    monkeypatch: pytest.MonkeyPatch, pools: dict[str, list[str]], message: str
) -> None:
    monkeypatch.setattr(admission, "get_client", lambda: Pools(pools, "", {}))

    with pytest.raises(MissingFromServer, match=re.escape(message)):
        admission.find_cluster(uuid4())


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        # The only other node of the work pool is drained already.
        (
            PoolSettings(nodes=(GPU_1, GPU_2), faulty=(make_faulty_node("gpu-2"),)),
            "the work pool has no other node for new runs",
        ),
        (
            PoolSettings(
                nodes=(GPU_1, GPU_2, GPU_3, GPU_4),
                faulty=(make_faulty_node("gpu-2"), make_faulty_node("gpu-3")),
            ),
            "2 faulty nodes are already drained, and Muster drains at most 2 faulty nodes at "
            "the same time",
        ),
    ],
)
def test_faulty_node_that_is_not_drained_is_reported_with_the_cause(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: PoolSettings,
    cause: str,
) -> None:
    async def find_pool(*_: object) -> WorkPool:
        return WorkPool(name="gang", type="gang", base_job_template=with_settings({}, settings))

    async def read_other_runs(*_: object) -> list[FlowRun]:
        return [FlowRun(id=uuid4(), flow_id=uuid4(), name="earlier")]

    monkeypatch.setattr(admission, "get_client", lambda: Pools({}, "gang", {}))
    monkeypatch.setattr(admission, "find_blamed_nodes", lambda *_: ("gpu-1",))
    monkeypatch.setattr(admission, "_find_gang_pool", find_pool)
    monkeypatch.setattr(admission, "_read_other_failed_runs", read_other_runs)
    failure = Failure(kind=FailureKind.GPU_HARDWARE, message="the GPU fell off the bus")

    asyncio.run(admission.note_failure(uuid4(), "sft-1", failure))

    expected = f"the node gpu-1 seems faulty, but Muster does not drain it, because {cause}"
    assert expected in caplog.messages


class Pools:
    """A fake Prefect server that has one flow run and several work pools.

    Each work pool lists the addresses of Ray clusters.
    """

    def __init__(self, pools: dict[str, list[str]], pool: str, labels: dict[str, Any]) -> None:
        self._pools = pools
        self._pool = pool
        self._labels = labels

    async def __aenter__(self) -> Pools:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def read_flow_run(self, id: UUID) -> FlowRun:
        state: State[Any] = State(type=StateType.RUNNING)
        pool = self._pool or None
        return FlowRun(
            id=id, flow_id=uuid4(), work_pool_name=pool, labels=self._labels, state=state
        )

    async def read_work_pools(self, *, work_pool_filter: object) -> list[WorkPool]:
        return [
            WorkPool(
                name=name,
                type="gang",
                base_job_template=with_settings(
                    {},
                    PoolSettings(
                        clusters=tuple(ListedCluster(address=address) for address in addresses)
                    ),
                ),
            )
            for name, addresses in self._pools.items()
        ]

    async def update_flow_run_labels(self, flow_run_id: UUID, labels: dict[str, Any]) -> None: ...
