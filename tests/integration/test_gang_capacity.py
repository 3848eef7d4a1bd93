"""What the queue is told of a real Ray cluster: who has what, and in time or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from tasks.queue.decision import compute_shares
from tasks.queue.nodes import Capacity, NoCapacity
from tasks.queue.packing import Demand
from tasks.ray.usage import Cluster
from tests.support import keeper
from tests.support.ray_cluster import RayCluster
from tests.support.ray_jobs import WITHIN_S, Jobs

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]

#: 3 GPUs of each node in a placement group, and one more for an actor that is about to come.
GANG = """
import time, ray
from ray.util.placement_group import placement_group
ray.init(log_to_driver=False)
group = placement_group([{"GPU": 3, "CPU": 9}] * 2, strategy="STRICT_SPREAD")
@ray.remote(num_gpus=1, num_cpus=3)
class Slow:
    def __init__(self):
        time.sleep(3600)
slow = Slow.remote()
time.sleep(3600)
"""
STRANGER = """
import time, ray
ray.init(log_to_driver=False)
@ray.remote(num_gpus=2, num_cpus=1)
class Stranger:
    pass
stranger = Stranger.remote()
time.sleep(3600)
"""
GANG_OF_3 = Demand(nodes=2, gpus_per_node=3, cpus_per_gpu=3)


@pytest_asyncio.fixture
async def jobs(ray_cluster: RayCluster, tmp_path: Path, muster_home: Path) -> AsyncIterator[Jobs]:
    jobs = Jobs(ray_cluster.address, tmp_path)
    yield jobs
    await jobs.clear()


@pytest_asyncio.fixture
async def capacity() -> AsyncIterator[Capacity]:
    capacity = Capacity(within_s=20.0)
    yield capacity
    await capacity.close()


async def seen(
    capacity: Capacity, cluster: RayCluster, is_so: Callable[[Cluster], object]
) -> Cluster:
    """The first look that shows it."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        found = await capacity.of(cluster.address, {})
        if is_so(found):
            return found
        assert time.monotonic() < deadline, f"not in time: {found}"
        await asyncio.sleep(0.05)


def of_all(cluster: Cluster) -> dict[str, float]:
    """Sums over the cluster."""
    return {
        "taken": sum(sum(taken.values()) for taken in cluster.taken.values()),
        "others": sum(node.others_gpus for node in cluster.nodes),
    }


@pytest.mark.thorough
async def test_what_a_run_of_ours_has_taken_is_told_from_what_others_use(
    jobs: Jobs, ray_cluster: RayCluster, capacity: Capacity
) -> None:
    run_id = f"trial-sft-20260102-030405-{uuid.uuid4().hex[-8:]}"
    (_, ours), (_, theirs) = await asyncio.gather(
        jobs.launched("python", "-c", GANG, run_id=run_id),
        # Its id is none that a run has.
        jobs.launched("python", "-c", STRANGER),
    )

    found = await seen(capacity, ray_cluster, lambda now: of_all(now) == {"taken": 7, "others": 2})
    request = SimpleNamespace(name=run_id)
    gang: Any = SimpleNamespace(id=run_id, request=request, demand=GANG_OF_3, promised={})
    known = compute_shares(found, [gang])
    unknown = compute_shares(found, [])

    names = {f"127.0.0.1/{node.node_id[:8]}" for node in ray_cluster.nodes}
    assert {node.name for node in found.nodes if node.gpus} == names
    assert sorted(found.taken[run_id].values()) == [3, 4]
    assert sum(node.others_cpus for node in found.nodes) == 1
    assert {node.resources.get("worker_node") for node in found.nodes if node.gpus} == {100}
    assert [*known.held.values()] == [found.taken[run_id]]
    assert sum(node.usable_gpus for node in known.nodes) == 14
    assert sum(node.usable_gpus for node in unknown.nodes) == 7

    assert await ours.end() == await theirs.end() == ()
    freed = await seen(capacity, ray_cluster, lambda now: of_all(now) == {"taken": 0, "others": 0})
    assert sorted(node.usable_gpus for node in compute_shares(freed, []).nodes) == [0, 8, 8]


@contextlib.contextmanager
def suspended(cluster: RayCluster, program: str) -> Iterator[None]:
    """A process of the head stands still meanwhile."""
    pids = [
        pid
        for pid in keeper.below(cluster.head)
        if program in Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    ]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.thorough
async def test_a_head_that_stands_still_is_no_answer_in_time_and_answers_when_it_goes_on() -> None:
    with RayCluster.started(nodes=0) as cluster:
        capacity, fresh = Capacity(within_s=1.0), Capacity(within_s=1.0)
        try:
            await answers(capacity, cluster)
            with suspended(cluster, "gcs_server"):
                # The second time it holds nobody up.
                for _ in range(2):
                    with pytest.raises(NoCapacity, match=r"the control store of \S+ within 1 s"):
                        await capacity.of(cluster.address, {})
            await answers(capacity, cluster)

            with suspended(cluster, "dashboard.py"):
                assert (await capacity.of(cluster.address, {})).nodes
                with pytest.raises(NoCapacity, match=r"the dashboard of \S+ within 1 s"):
                    await fresh.of(cluster.address, {})
            await answers(fresh, cluster)
        finally:
            await capacity.close()
            await fresh.close()


async def answers(capacity: Capacity, cluster: RayCluster) -> None:
    """Wait until it does."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            assert (await capacity.of(cluster.address, {})).nodes
            return
        except NoCapacity:
            assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
