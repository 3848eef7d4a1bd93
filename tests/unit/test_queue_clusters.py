"""The scheduler and the Ray clusters of a work pool.

The tests check the cluster of a run whose spec names no address, and the demand that the scheduler
sends to autoscalers.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from prefect.client.schemas.objects import State, StateType

from tasks.queue import scheduler as scheduler_module
from tasks.queue import scheduling_pass
from tasks.queue.ledger import QueueEntry
from tasks.queue.nodes import Capacity
from tasks.queue.scheduler import Scheduler
from tasks.queue.settings import PoolSettings, with_settings
from tasks.queue.worker import GangWorker
from tasks.ray.dashboard import Credentials, ListedCluster
from tasks.ray.usage import Cluster, ClusterNode
from tests.support.scripted_prefect import FreeLease, ScriptedPrefect

A, B = "http://a:8265", "http://b:8265"


def template(*addresses: str, **more: Any) -> dict[str, Any]:
    clusters = tuple(ListedCluster(address=address, **more) for address in addresses)
    job = GangWorker.get_default_base_job_template()
    return with_settings(job, PoolSettings(clusters=clusters))


def spec(gpus: int | None = 8, nodes: int = 1, **ray: Any) -> dict[str, Any]:
    return {
        "name": "trial",
        "workload": "grpo",
        **({"gang": {"gpus_per_node": gpus, "nodes": nodes}} if gpus else {}),
        "ray": ray,
        "components": {"trainer": {"command": ["true"]}},
    }


@pytest.fixture(autouse=True)
def no_other_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the scheduling lease by a fake, so that the test's scheduler always holds the lease.

    Also replace the search for processes of runs on this machine: the fake search finds none.
    """
    monkeypatch.setattr(scheduler_module, "SchedulingLease", FreeLease)
    monkeypatch.setattr(scheduling_pass, "find_holders", lambda _variable: SimpleNamespace(pids={}))


class OneNode:
    """Fake reader of a Ray cluster with one node, which has 8 GPUs."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.credentials = credentials
        self._name = f"node-of-{address[7]}"

    async def look(self, *, within_s: float) -> Cluster:
        return Cluster(nodes=(ClusterNode(name=self._name, gpus=8),))

    async def close(self) -> None: ...


def started(server: ScriptedPrefect, count: int = 1) -> list[QueueEntry]:
    """Run a number of scheduling passes, and return the runs that the scheduler starts."""

    async def run_passes() -> list[QueueEntry]:
        client: Any = server
        scheduler = Scheduler(client, capacity=Capacity(make_reader=OneNode))  # type: ignore[arg-type]
        started_runs: list[QueueEntry] = []
        for _ in range(count):
            scheduling_pass_, entries = await scheduler.decide(lambda entry, nodes: True)
            started_runs += entries
            await scheduler.publish_reasons(scheduling_pass_)
        return started_runs

    return asyncio.run(run_passes())


def start_holder(server: ScriptedPrefect) -> None:
    """Start a run that holds all GPUs of the pool's cluster."""
    run = server.submit(spec())
    assert [entry.id for entry in started(server)] == [run]
    server.set(run, State(type=StateType.RUNNING))


def message(server: ScriptedPrefect, id: UUID) -> str:
    state = server.run(id).state
    return f"{state.name}: {state.message}" if state else ""


@pytest.mark.parametrize("gpus", [8, None])
def test_run_without_an_address_gets_the_pools_only_cluster(gpus: int | None) -> None:
    server = ScriptedPrefect(template(A))
    run = server.submit(spec(gpus))

    [entry] = started(server)

    assert entry.id == run
    assert entry.grant is not None
    assert dict(entry.grant.nodes) == ({"node-of-a": 8} if gpus else {})
    assert server.run(run).labels["muster.gang.grant"].count(A) == 1


@pytest.mark.parametrize("gpus", [8, None])
@pytest.mark.parametrize(
    ("addresses", "said"),
    [
        (
            (),
            "(it lists: none). Write `ray: {address: URL}` into the spec, or list one cluster: "
            "`muster queue set",
        ),
        ((A, B), f"(it lists: {A}, {B}). Write `ray: {{address: URL}}`"),
    ],
)
def test_run_without_an_address_is_refused_if_the_cluster_is_ambiguous(
    addresses: tuple[str, ...], said: str, gpus: int | None
) -> None:
    server = ScriptedPrefect(template(*addresses))
    run = server.submit(spec(gpus))

    assert started(server) == []

    assert message(server, run).startswith("Failed: USER_ERROR: the spec has no ray.address, so ")
    assert said in message(server, run)


def test_granted_run_stays_on_its_cluster_if_the_pool_changes() -> None:
    server = ScriptedPrefect(template(A))
    start_holder(server)
    server.change(template(B))

    on_a, on_b = server.submit(spec(address=A)), server.submit(spec())

    # The run of `start_holder` still holds all GPUs of cluster A, so the run `on_a` waits.
    assert [entry.id for entry in started(server)] == [on_b]
    assert message(server, on_a).startswith("PendingResources: needs 1 node with 8 GPUs; waits")


def test_waiting_run_is_not_refused_if_the_pool_changes() -> None:
    server = ScriptedPrefect(template(A))
    start_holder(server)
    run = server.submit(spec())
    started(server)
    server.change(template(A, B))
    started(server)

    waits = message(server, run)
    server.change(template(B))

    assert "waits for a Ray cluster: the spec has no ray.address, so the work pool" in waits
    assert [entry.id for entry in started(server)] == [run]


def test_invalid_settings_refuse_no_run() -> None:
    server = ScriptedPrefect({"variables": {"properties": {"gang": {"default": {"colour": 1}}}}})
    run = server.submit(spec())

    started(server)
    server.change(template(A))

    assert [entry.id for entry in started(server)] == [run]


class Autoscaled:
    """A fake cluster with an autoscaler, which records the nodes that the scheduler requests."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = [*nodes]
        self.demands: list[list[dict[str, float]]] = []
        self.credentials = Credentials(has_token=True)

    async def look(self, *, within_s: float) -> Cluster:
        nodes = (ClusterNode(name=name, gpus=8, cpus=32.0) for name in self.nodes)
        return Cluster(nodes=tuple(nodes))

    async def show_demand(self, bundles: Any, *, within_s: float) -> None:
        self.demands.append(bundles)

    async def close(self) -> None: ...


NODE, NEW = {"GPU": 8.0}, {"GPU": 8.0, "CPU": 24.0}


def test_autoscaler_gets_the_demand_until_no_run_waits() -> None:
    server, cluster = ScriptedPrefect(template(A, max_nodes=3)), Autoscaled("n1")
    run = server.submit(spec(nodes=3))

    async def passes() -> list[str]:
        client, capacity = cast(Any, server), Capacity(make_reader=lambda *_: cast(Any, cluster))
        scheduler = Scheduler(client, capacity=capacity)
        for _ in range(2):
            await scheduler.publish_reasons((await scheduler.decide(lambda entry, nodes: True))[0])
        before = message(server, run)
        cluster.nodes += ["n2", "n3"]
        last_pass, started = await scheduler.decide(lambda entry, nodes: True)
        await scheduler.publish_reasons(last_pass)
        server.set(run, State(type=StateType.COMPLETED))
        await scheduler.publish_reasons((await scheduler.decide(lambda entry, nodes: True))[0])
        return [before, *(entry.request.name for entry in started)]

    before, name = asyncio.run(passes())

    assert before.startswith(
        "PendingResources: needs 3 nodes with 8 GPUs each; waits for missing nodes"
    )
    assert name.startswith("trial-grpo-")
    # The demand is the list of nodes that the scheduler requests from the autoscaler. A node stays
    # in the list until the run on this node has ended.
    assert cluster.demands == [[NODE, NEW, NEW], [NODE, NODE, NODE], []]


@pytest.mark.parametrize(
    ("nodes", "max_nodes", "is_refused"), [(3, 3, False), (4, 3, True), (2, None, True)]
)
def test_run_that_fits_the_largest_possible_cluster_waits(
    nodes: int, max_nodes: int | None, is_refused: bool
) -> None:
    server, cluster = ScriptedPrefect(template(A, max_nodes=max_nodes)), Autoscaled("n1")
    run = server.submit(spec(nodes=nodes))

    async def one_pass() -> None:
        client, capacity = cast(Any, server), Capacity(make_reader=lambda *_: cast(Any, cluster))
        await Scheduler(client, capacity=capacity).decide(lambda entry, nodes: True)

    asyncio.run(one_pass())

    assert ("INFEASIBLE" in message(server, run)) is is_refused
