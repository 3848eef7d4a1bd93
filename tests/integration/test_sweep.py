"""Sweeps of a real Ray cluster by the agents of its nodes, from a process that is no part of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from tasks.ray import control_store, nodes
from tasks.ray.dashboard import NoAnswer
from tasks.ray.node_agent import NAMESPACE
from tasks.ray.nodes import AgentConnection, AgentKey, NodeClient, sweep
from tasks.record.places import muster_home
from tests.support.ray_cluster import RAY_ENV, RayCluster, free_gpus
from tests.support.stage import came

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def ray_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RAY_ENV.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def escaped() -> Iterator[Callable[[str], int]]:
    """Starts a daemon of a run, which belongs to nobody; it is gone after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(run_id: str) -> int:
        env = {**os.environ, "MUSTER_RUN_ID": run_id}
        started.append(subprocess.Popen(["sleep", "600"], start_new_session=True, env=env))
        return started[-1].pid

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


@pytest.fixture
def run_id() -> str:
    return f"swept-{uuid.uuid4().hex[:8]}"


def drivers() -> list[int]:
    """The visiting drivers that this process has started, alive."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if "tasks.ray.node_agent" in child.cmdline():
                found.append(child.pid)
    return found


def test_a_sweep_ends_what_escaped_and_counts_it_once(
    ray_cluster: RayCluster, escaped: Callable[[str], int], run_id: str
) -> None:
    pid, other = escaped(run_id), escaped(f"{run_id}-2")

    report = asyncio.run(sweep(ray_cluster.gcs_address, run_id=run_id))

    assert report.is_clean, report
    assert [(one.pid, one.command) for one in report.killed] == [(pid, "sleep 600")]
    assert Path(f"/proc/{other}").exists()
    assert drivers() == []


@pytest.mark.thorough
def test_a_cluster_that_is_away_is_said_by_the_deadline(run_id: str) -> None:
    report = asyncio.run(sweep("127.0.0.1:9", run_id=run_id, within_s=8))

    assert [node.name for node in report.unreached] == ["127.0.0.1:9"]
    assert not report.is_clean


def test_a_cancel_leaves_no_driver(ray_cluster: RayCluster, run_id: str, muster_home: Path) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(sweep(ray_cluster.gcs_address, run_id=run_id))
        while not drivers():
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())

    assert drivers() == []


def agents(cluster: RayCluster) -> dict[int, str]:
    """`command[pid]` of the living agents of a cluster."""
    found = {}
    for pid in cluster.pids():
        with suppress(psutil.NoSuchProcess):
            if (command := " ".join(psutil.Process(pid).cmdline())).startswith("ray::NodeAgent"):
                found[pid] = command
    return found


@pytest.fixture
def own_cluster(muster_home: Path) -> Iterator[RayCluster]:
    """One whose nodes have agents of an own home; no process of it is left."""
    with RayCluster.started(nodes=1) as cluster:
        assert asyncio.run(sweep(cluster.gcs_address, run_id="nobody")).is_clean
        yield cluster


def without_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(*_: object) -> None:
        raise NoAnswer("no driver here")

    monkeypatch.setattr(NodeClient, "_start_driver", none)


@pytest.mark.thorough
def test_a_dead_agent_is_done_without_and_put_back(
    own_cluster: RayCluster,
    escaped: Callable[[str], int],
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = agents(own_cluster)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    first, second = escaped(run_id), escaped(f"{run_id}-2")

    mended = asyncio.run(sweep(own_cluster.gcs_address, run_id=run_id))
    after = agents(own_cluster)
    without_driver(monkeypatch)
    again = asyncio.run(sweep(own_cluster.gcs_address, run_id=f"{run_id}-2"))

    assert len(before) == len(after) == 2 and not before.keys() & after.keys()
    assert mended.is_clean and [one.pid for one in mended.killed] == [first]
    assert again.is_clean and [one.pid for one in again.killed] == [second]


@pytest.mark.thorough
def test_an_agent_whose_address_is_out_of_reach_is_asked_by_ray(
    own_cluster: RayCluster,
    escaped: Callable[[str], int],
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pid = escaped(run_id)

    async def none(*_: object) -> None:
        """As with a firewall between the nodes."""

    monkeypatch.setattr(AgentConnection, "open", none)
    report = asyncio.run(sweep(own_cluster.gcs_address, run_id=run_id))

    assert report.is_clean and [one.pid for one in report.killed] == [pid]


@pytest.mark.thorough
def test_agents_of_other_code_end_and_nothing_is_held(
    own_cluster: RayCluster, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = agents(own_cluster)
    free = asyncio.run(free_gpus(own_cluster.gcs_address))

    monkeypatch.setattr(nodes, "code_here", lambda: {"digest": "another"})
    AgentKey.of.cache_clear()
    report = asyncio.run(sweep(own_cluster.gcs_address, run_id=run_id))
    both = agents(own_cluster)
    assert came(lambda: not old.keys() & agents(own_cluster).keys(), within_s=120)
    new = agents(own_cluster)

    AgentKey.of.cache_clear()
    assert report.is_clean
    assert len(both) == 4 and both.keys() - old.keys() == new.keys()
    assert free == asyncio.run(free_gpus(own_cluster.gcs_address))
    assert list(free.values()) == [8.0]


@pytest.mark.thorough
def test_a_sweep_of_what_runs_and_one_of_another_home_are_refused(
    own_cluster: RayCluster, run_id: str, tmp_path: Path
) -> None:
    client = JobSubmissionClient(own_cluster.address)
    tag = {"MUSTER_RUN_ID": run_id, "MUSTER_ATTEMPT": "1", "MUSTER_COMPONENT": "trainer"}
    job = client.submit_job(
        entrypoint="sleep 600",
        submission_id=f"{run_id}--a01",
        runtime_env={"env_vars": tag},
        entrypoint_num_cpus=1,
    )
    assert came(lambda: client.get_job_status(job) is JobStatus.RUNNING, within_s=60)

    async def of_another_home() -> set[str]:
        mine, other = AgentKey.of(muster_home()), AgentKey.of(tmp_path)
        at = await control_store.read_entries(own_cluster.gcs_address, NAMESPACE, mine.prefix)
        lines = [await AgentConnection.open(node, address) for node, address in at.items()]
        said = [await one.order(other, "sweep", {"wanted": tag}, 20) for one in lines if one]
        return {one["why"] for one in said}

    refused = asyncio.run(sweep(own_cluster.gcs_address, run_id=run_id))
    forged = asyncio.run(of_another_home())
    status = client.get_job_status(job)
    client.stop_job(job)
    assert came(lambda: client.get_job_status(job) is JobStatus.STOPPED, within_s=60)

    assert {node.why for node in refused.unreached} == {f"refused: job {job} is RUNNING"}
    assert refused.killed == () and status is JobStatus.RUNNING
    assert forged == {"refused: it is not signed with the key of this agent"}
    assert asyncio.run(sweep(own_cluster.gcs_address, run_id=run_id)).is_clean


@pytest.mark.thorough
def test_what_a_killed_raylet_leaves_is_ended_and_its_agent_goes_with_it(
    own_cluster: RayCluster, escaped: Callable[[str], int], run_id: str
) -> None:
    pid = escaped(run_id)
    before = agents(own_cluster)

    own_cluster.kill_node(0)
    report = asyncio.run(sweep(own_cluster.gcs_address, run_id=run_id, within_s=60))

    assert [one.pid for one in report.killed] == [pid]
    # Ray may have noticed already: then it is of the cluster no more.
    assert {node.node_id for node in report.unreached} <= {own_cluster.nodes[0].node_id}
    assert len(before) == 2
    assert came(lambda: len(agents(own_cluster)) == 1, within_s=60)


@pytest.mark.thorough
def test_no_agent_outlives_its_cluster(muster_home: Path) -> None:
    with RayCluster.started(nodes=1) as cluster:
        assert asyncio.run(sweep(cluster.gcs_address, run_id="nobody")).is_clean
        started = agents(cluster)
        cluster.kill_head()
        cluster.kill_node(0)
        assert came(lambda: not any(map(psutil.pid_exists, started)), within_s=60)

    assert len(started) == 2
