"""The gang queue on a Ray cluster whose autoscaler adds nodes for queued runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.objects import State, StateType

from tasks.queue import scheduler as scheduler_module
from tasks.queue import scheduling_pass
from tasks.queue.nodes import Capacity
from tasks.queue.scheduler import Scheduler
from tasks.queue.settings import PoolSettings, with_settings
from tasks.queue.worker import GangWorker
from tasks.ray.dashboard import ListedCluster
from tests.support.ray_cluster import RAY_ENV, RayCluster
from tests.support.scripted_prefect import FreeLease, ScriptedPrefect

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(600)]

WITHIN_S = 240.0


@contextmanager
def start_autoscaled_cluster(version: int, max_nodes: int) -> Iterator[RayCluster]:
    cluster = RayCluster(most_nodes=max_nodes, autoscaler=version)
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.mark.parametrize("version", [1, 2])
def test_nodes_are_added_for_a_queued_gang_and_removed_after_its_end(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "SchedulingLease", FreeLease)
    monkeypatch.setattr(scheduling_pass, "find_holders", lambda _variable: SimpleNamespace(pids={}))
    for name, value in RAY_ENV.items():
        monkeypatch.setenv(name, value)
    with start_autoscaled_cluster(version, max_nodes=2) as cluster:
        listed = ListedCluster(address=cluster.address, max_nodes=2)
        job = GangWorker.get_default_base_job_template()
        server = ScriptedPrefect(with_settings(job, PoolSettings(clusters=(listed,))))
        run = server.submit(
            {
                "name": "trial",
                "workload": "grpo",
                "gang": {"nodes": 2, "gpus_per_node": 8},
                "ray": {},
                "components": {"trainer": {"command": ["true"]}},
            }
        )

        asyncio.run(_run_passes_until_nodes_are_gone(server, run))

    assert server.history(run)[-1] == "Completed"


async def _run_passes_until_nodes_are_gone(server: ScriptedPrefect, run: Any) -> None:
    """Run scheduling passes until the run has completed and the cluster has no GPU node left."""
    client: Any = server
    capacity = Capacity(within_s=30.0)
    scheduler = Scheduler(client, capacity=capacity)
    deadline = time.monotonic() + WITHIN_S
    counts: list[int] = []
    try:
        while True:
            assert time.monotonic() < deadline, f"nodes with GPUs in each pass: {counts}"
            queue_state, started = await scheduler.decide(lambda entry, nodes: True)
            await scheduler.publish_reasons(queue_state)
            for cluster in queue_state.clusters.values():
                counts.append(sum(node.gpus == 8 for node in cluster.nodes))
            if started:
                server.set(run, State(type=StateType.RUNNING))
            elif server.history(run)[-1] == "Running":
                server.set(run, State(type=StateType.COMPLETED))
            elif server.history(run)[-1] == "Completed" and counts[-1] == 0:
                return
            await asyncio.sleep(0.5)
    finally:
        await capacity.close()
