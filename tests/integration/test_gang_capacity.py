"""The queue reads from a real Ray cluster which run uses which GPUs, within a time limit."""

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

#: A Ray program that reserves 3 GPUs on each of two nodes in a placement group.
#:
#: The program also creates an actor that needs one more GPU and whose constructor sleeps for an
#: hour.
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
#: A Ray program that belongs to no run of Muster and takes 2 GPUs.
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
    """Yield an object that starts Ray jobs, and end all these jobs after the test."""
    jobs = Jobs(ray_cluster.address, tmp_path)
    yield jobs
    await jobs.clear()


@pytest_asyncio.fixture
async def capacity() -> AsyncIterator[Capacity]:
    """Yield an object that reads the capacity of Ray clusters, with a time limit of 20 s."""
    capacity = Capacity(within_s=20.0)
    yield capacity
    await capacity.close()


async def read_until(
    capacity: Capacity, cluster: RayCluster, meets_condition: Callable[[Cluster], object]
) -> Cluster:
    """Read the capacity of a Ray cluster repeatedly, until the capacity meets a condition.

    Returns:
        The capacity that meets the condition.
    """
    deadline = time.monotonic() + WITHIN_S
    while True:
        reading = await capacity.read_cluster(cluster.address, {})
        if meets_condition(reading):
            return reading
        assert time.monotonic() < deadline, f"not in time: {reading}"
        await asyncio.sleep(0.05)


def sum_gpus(cluster: Cluster) -> dict[str, float]:
    """Return the numbers of GPUs in use in the whole cluster.

    Returns:
        Two numbers: "taken" for the GPUs of Muster's runs, and "others" for all other programs.
    """
    return {
        "taken": sum(sum(gpus_by_node.values()) for gpus_by_node in cluster.used.values()),
        "others": sum(node.others_gpus for node in cluster.nodes),
    }


@pytest.mark.thorough
async def test_gpus_of_muster_runs_are_distinguished_from_gpus_of_other_users(
    jobs: Jobs, ray_cluster: RayCluster, capacity: Capacity
) -> None:
    run_id = f"trial-sft-20260102-030405-{uuid.uuid4().hex[-8:]}"
    (_, run_job), (_, other_job) = await asyncio.gather(
        jobs.launch("python", "-c", GANG, run_id=run_id),
        # The submission id of this job is not the id of a run. So Muster counts the GPUs of this
        # job as used by another program.
        jobs.launch("python", "-c", STRANGER),
    )

    reading = await read_until(
        capacity, ray_cluster, lambda cluster: sum_gpus(cluster) == {"taken": 7, "others": 2}
    )
    request = SimpleNamespace(name=run_id)
    gang: Any = SimpleNamespace(id=run_id, request=request, demand=GANG_OF_3, granted={})
    shares_with_run = compute_shares(reading, [gang])
    shares_without_run = compute_shares(reading, [])

    names = {f"127.0.0.1/{node.node_id[:8]}" for node in ray_cluster.nodes}
    assert {node.name for node in reading.nodes if node.gpus} == names
    assert sorted(reading.used[run_id].values()) == [3, 4]
    assert sum(node.others_cpus for node in reading.nodes) == 1
    assert {node.resources.get("worker_node") for node in reading.nodes if node.gpus} == {100}
    assert [*shares_with_run.held.values()] == [reading.used[run_id]]
    assert sum(node.usable_gpus for node in shares_with_run.nodes) == 14
    assert sum(node.usable_gpus for node in shares_without_run.nodes) == 7

    assert await run_job.end() == await other_job.end() == ()
    empty_cluster = await read_until(
        capacity, ray_cluster, lambda cluster: sum_gpus(cluster) == {"taken": 0, "others": 0}
    )
    assert sorted(node.usable_gpus for node in compute_shares(empty_cluster, []).nodes) == [0, 8, 8]


@contextlib.contextmanager
def suspend_program(cluster: RayCluster, program: str) -> Iterator[None]:
    """Suspend all processes of the head node that have `program` in their command line."""
    pids = [
        pid
        for pid in keeper.list_descendants(cluster.head)
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
async def test_suspended_head_node_is_an_error_until_it_resumes() -> None:
    with RayCluster.run(nodes=0) as cluster:
        capacity = Capacity(within_s=1.0)
        second_capacity = Capacity(within_s=1.0)
        try:
            await wait_until_answered(capacity, cluster)
            with suspend_program(cluster, "gcs_server"):
                # A second request must fail within the time limit, too.
                for _ in range(2):
                    with pytest.raises(NoCapacity, match=r"the control store of \S+ within 1 s"):
                        await capacity.read_cluster(cluster.address, {})
            await wait_until_answered(capacity, cluster)

            with suspend_program(cluster, "dashboard.py"):
                assert (await capacity.read_cluster(cluster.address, {})).nodes
                with pytest.raises(NoCapacity, match=r"the dashboard of \S+ within 1 s"):
                    await second_capacity.read_cluster(cluster.address, {})
            await wait_until_answered(second_capacity, cluster)
        finally:
            await capacity.close()
            await second_capacity.close()


async def wait_until_answered(capacity: Capacity, cluster: RayCluster) -> None:
    """Wait until a reading of the cluster's capacity succeeds and contains nodes."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            assert (await capacity.read_cluster(cluster.address, {})).nodes
            return
        except NoCapacity:
            assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
