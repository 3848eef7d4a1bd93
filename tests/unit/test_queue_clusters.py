"""Which Ray cluster a run is on whose spec leaves that to its pool, by the gate."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect.client.schemas.objects import State, StateType

from tasks.queue import gate, look
from tasks.queue.gate import Gate
from tasks.queue.ledger import QueueEntry
from tasks.queue.nodes import Capacity
from tasks.queue.settings import PoolSettings, with_settings
from tasks.queue.worker import GangWorker
from tasks.ray.dashboard import ListedCluster
from tasks.ray.usage import Cluster, ClusterNode
from tests.support.scripted_prefect import FreeLease, ScriptedPrefect

A, B = "http://a:8265", "http://b:8265"


def template(*addresses: str) -> dict[str, Any]:
    clusters = tuple(ListedCluster(address=address) for address in addresses)
    job = GangWorker.get_default_base_job_template()
    return with_settings(job, PoolSettings(clusters=clusters))


def spec(gpus: int | None = 8, **ray: Any) -> dict[str, Any]:
    return {
        "name": "trial",
        "workload": "grpo",
        **({"gang": {"gpus_per_node": gpus}} if gpus else {}),
        "ray": ray,
        "components": {"trainer": {"command": ["true"]}},
    }


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other gate, and no process of a flow run."""
    monkeypatch.setattr(gate, "GateLease", FreeLease)
    monkeypatch.setattr(look, "holders_of", lambda _variable: SimpleNamespace(pids={}))


class OneNode:
    """A cluster with 8 GPUs."""

    def __init__(self, address: str) -> None:
        self._name = f"node-of-{address[7]}"

    async def look(self, *, within_s: float) -> Cluster:
        return Cluster(nodes=(ClusterNode(name=self._name, gpus=8),))

    async def close(self) -> None: ...


def started(server: ScriptedPrefect, count: int = 1) -> list[QueueEntry]:
    """What the looks of one gate start."""

    async def look_on() -> list[QueueEntry]:
        client: Any = server
        one = Gate(client, capacity=Capacity(look=OneNode))  # type: ignore[arg-type]
        found: list[QueueEntry] = []
        for _ in range(count):
            seen, entries = await one.decide(lambda entry, nodes: True)
            found += entries
            await one.tell(seen)
        return found

    return asyncio.run(look_on())


def holds(server: ScriptedPrefect) -> None:
    """One run has all GPUs of the pool's cluster."""
    run = server.submit(spec())
    assert [entry.id for entry in started(server)] == [run]
    server.set(run, State(type=StateType.RUNNING))


def message(server: ScriptedPrefect, id: UUID) -> str:
    state = server.run(id).state
    return f"{state.name}: {state.message}" if state else ""


@pytest.mark.parametrize("gpus", [8, None])
def test_a_run_without_an_address_gets_that_of_the_pools_one_cluster(gpus: int | None) -> None:
    server = ScriptedPrefect(template(A))
    run = server.submit(spec(gpus))

    [entry] = started(server)

    assert entry.id == run
    assert entry.grant is not None
    assert dict(entry.grant.nodes) == ({"node-of-a": 8} if gpus else {})
    assert server.run(run).labels["muster.gang.cluster"] == A


@pytest.mark.parametrize("gpus", [8, None])
@pytest.mark.parametrize(
    ("addresses", "said"),
    [
        ((), "the work pool lists none; write ray: {address: URL}, or list it: muster queue set"),
        ((A, B), f"the work pool lists 2: {A}, {B}; write ray: {{address: URL}}"),
    ],
)
def test_a_run_without_an_address_is_refused_where_nobody_knows_which(
    addresses: tuple[str, ...], said: str, gpus: int | None
) -> None:
    server = ScriptedPrefect(template(*addresses))
    run = server.submit(spec(gpus))

    assert started(server) == []

    assert message(server, run).startswith("Failed: USER_ERROR: ray.address is left out, and ")
    assert said in message(server, run)


def test_a_granted_run_stays_on_its_cluster_whatever_the_pool_lists_then() -> None:
    server = ScriptedPrefect(template(A))
    holds(server)
    server.change(template(B))

    on_a, on_b = server.submit(spec(address=A)), server.submit(spec())

    # The GPUs of A are taken.
    assert [entry.id for entry in started(server)] == [on_b]
    assert message(server, on_a).startswith("PendingResources: asks for 1 node with 8 GPUs; waits")


def test_a_run_that_waits_is_not_refused_for_a_change_of_the_pool() -> None:
    server = ScriptedPrefect(template(A))
    holds(server)
    run = server.submit(spec())
    started(server)
    server.change(template(A, B))
    started(server)

    waits = message(server, run)
    server.change(template(B))

    assert "waits for its cluster, as ray.address is left out, and the work pool lists 2" in waits
    assert [entry.id for entry in started(server)] == [run]


def test_settings_that_can_not_be_read_refuse_no_run() -> None:
    server = ScriptedPrefect({"variables": {"properties": {"gang": {"default": {"colour": 1}}}}})
    run = server.submit(spec())

    started(server)
    server.change(template(A))

    assert [entry.id for entry in started(server)] == [run]
