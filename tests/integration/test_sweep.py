"""The check of a Ray cluster's nodes for leftover processes of a run.

Agents, which are actors of Muster on the nodes of a real cluster, kill these processes.
"""

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
from tests.support.supervised_components import becomes_true

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def ray_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process the environment variables that the test clusters need."""
    for name, value in RAY_ENV.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def start_daemon() -> Iterator[Callable[[str], int]]:
    """Yield a function that starts a daemon of an ended run, and returns the daemon's pid.

    All daemons are ended after the test.
    """
    processes: list[subprocess.Popen[bytes]] = []

    def start_process(run_id: str) -> int:
        env = {**os.environ, "MUSTER_RUN_ID": run_id}
        processes.append(subprocess.Popen(["sleep", "600"], start_new_session=True, env=env))
        return processes[-1].pid

    yield start_process
    for process in processes:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


@pytest.fixture
def run_id() -> str:
    """Return a run id that no other test uses."""
    return f"swept-{uuid.uuid4().hex[:8]}"


def list_drivers() -> list[int]:
    """Return the pids of the living drivers of this process.

    A driver is a Ray program that starts Muster's agents on the nodes of a cluster and sends them
    orders.
    """
    pids = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if "tasks.ray.node_agent" in child.cmdline():
                pids.append(child.pid)
    return pids


def test_sweep_kills_escaped_processes_of_the_run_and_counts_each_once(
    ray_cluster: RayCluster, start_daemon: Callable[[str], int], run_id: str
) -> None:
    pid, other = start_daemon(run_id), start_daemon(f"{run_id}-2")

    report = asyncio.run(sweep(ray_cluster.gcs_address, run_id=run_id))

    assert report.is_clean, report
    assert [(process.pid, process.command) for process in report.killed] == [(pid, "sleep 600")]
    assert Path(f"/proc/{other}").exists()
    assert list_drivers() == []


@pytest.mark.thorough
def test_unreachable_cluster_is_reported_by_the_deadline(run_id: str) -> None:
    report = asyncio.run(sweep("127.0.0.1:9", run_id=run_id, within_s=8))

    assert [node.name for node in report.unreached] == ["127.0.0.1:9"]
    assert not report.is_clean


def test_cancelled_sweep_leaves_no_driver(
    ray_cluster: RayCluster, run_id: str, muster_home: Path
) -> None:
    async def cancel_sweep() -> None:
        task = asyncio.create_task(sweep(ray_cluster.gcs_address, run_id=run_id))
        while not list_drivers():
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_sweep())

    assert list_drivers() == []


def list_agents(cluster: RayCluster) -> dict[int, str]:
    """Return a mapping from pid to command line of the cluster's living agents.

    An agent is a Ray actor that kills leftover processes of Muster's runs on a node.
    """
    agents = {}
    for pid in cluster.pids():
        with suppress(psutil.NoSuchProcess):
            if (command := " ".join(psutil.Process(pid).cmdline())).startswith("ray::NodeAgent"):
                agents[pid] = command
    return agents


@pytest.fixture
def own_cluster(muster_home: Path) -> Iterator[RayCluster]:
    """Yield a Ray cluster whose nodes run agents for this test's MUSTER_HOME.

    An agent is a Ray actor that kills leftover processes of Muster's runs on a node.
    """
    with RayCluster.run(nodes=1) as cluster:
        assert asyncio.run(sweep(cluster.gcs_address, run_id="nobody")).is_clean
        yield cluster


def prevent_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every start of a driver fail, so that only existing agents can check the nodes.

    A driver is a Ray program that starts Muster's agents on the nodes of a cluster.
    """

    async def start_no_driver(*_: object) -> None:
        raise NoAnswer("no driver here")

    monkeypatch.setattr(NodeClient, "_start_driver", start_no_driver)


@pytest.mark.thorough
def test_sweep_works_without_a_dead_agent_and_restarts_it(
    own_cluster: RayCluster,
    start_daemon: Callable[[str], int],
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agents_before = list_agents(own_cluster)
    for pid in agents_before:
        os.kill(pid, signal.SIGKILL)
    first, second = start_daemon(run_id), start_daemon(f"{run_id}-2")

    first_report = asyncio.run(sweep(own_cluster.gcs_address, run_id=run_id))
    agents_after = list_agents(own_cluster)
    prevent_drivers(monkeypatch)
    second_report = asyncio.run(sweep(own_cluster.gcs_address, run_id=f"{run_id}-2"))

    assert (
        len(agents_before) == len(agents_after) == 2
        and not agents_before.keys() & agents_after.keys()
    )
    assert first_report.is_clean and [process.pid for process in first_report.killed] == [first]
    assert second_report.is_clean and [process.pid for process in second_report.killed] == [second]


@pytest.mark.thorough
def test_agent_with_an_unreachable_address_is_reached_through_ray(
    own_cluster: RayCluster,
    start_daemon: Callable[[str], int],
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pid = start_daemon(run_id)

    async def open_nothing(*_: object) -> None:
        """Fail to connect, as with a firewall between the nodes."""

    monkeypatch.setattr(AgentConnection, "open", open_nothing)
    report = asyncio.run(sweep(own_cluster.gcs_address, run_id=run_id))

    assert report.is_clean and [process.pid for process in report.killed] == [pid]


@pytest.mark.thorough
def test_agents_of_an_old_code_version_end_and_hold_no_gpus(
    own_cluster: RayCluster, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = list_agents(own_cluster)
    free = asyncio.run(free_gpus(own_cluster.gcs_address))

    monkeypatch.setattr(nodes, "digest_code", lambda: {"digest": "another"})
    AgentKey.of.cache_clear()
    report = asyncio.run(sweep(own_cluster.gcs_address, run_id=run_id))
    both = list_agents(own_cluster)
    assert becomes_true(lambda: not old.keys() & list_agents(own_cluster).keys(), within_s=120)
    new = list_agents(own_cluster)

    AgentKey.of.cache_clear()
    assert report.is_clean
    assert len(both) == 4 and both.keys() - old.keys() == new.keys()
    assert free == asyncio.run(free_gpus(own_cluster.gcs_address))
    assert list(free.values()) == [8.0]


@pytest.mark.thorough
def test_sweeps_of_a_running_job_and_from_another_home_are_refused(
    own_cluster: RayCluster, run_id: str, tmp_path: Path
) -> None:
    client = JobSubmissionClient(own_cluster.address)
    run_variables = {"MUSTER_RUN_ID": run_id, "MUSTER_ATTEMPT": "1", "MUSTER_COMPONENT": "trainer"}
    job = client.submit_job(
        entrypoint="sleep 600",
        submission_id=f"{run_id}--a01",
        runtime_env={"env_vars": run_variables},
        entrypoint_num_cpus=1,
    )
    assert becomes_true(lambda: client.get_job_status(job) is JobStatus.RUNNING, within_s=60)

    async def sweep_from_another_home() -> set[str]:
        own_key = AgentKey.of(muster_home())
        other_key = AgentKey.of(tmp_path)
        address_by_node = await control_store.read_entries(
            own_cluster.gcs_address, NAMESPACE, own_key.prefix
        )
        connections = [
            await AgentConnection.open(node, address) for node, address in address_by_node.items()
        ]
        replies = [
            await connection.order(other_key, "sweep", {"wanted": run_variables}, 20)
            for connection in connections
            if connection
        ]
        return {reply["why"] for reply in replies}

    refused = asyncio.run(sweep(own_cluster.gcs_address, run_id=run_id))
    forged = asyncio.run(sweep_from_another_home())
    status = client.get_job_status(job)
    client.stop_job(job)
    assert becomes_true(lambda: client.get_job_status(job) is JobStatus.STOPPED, within_s=60)

    assert {node.why for node in refused.unreached} == {
        f"refused: job {job} of the run is still RUNNING"
    }
    assert refused.killed == () and status is JobStatus.RUNNING
    assert forged == {
        "refused: the request is not signed with the key of Muster's agent on this node"
    }
    assert asyncio.run(sweep(own_cluster.gcs_address, run_id=run_id)).is_clean


@pytest.mark.thorough
def test_leftovers_of_a_killed_raylet_are_killed_and_its_agent_ends(
    own_cluster: RayCluster, start_daemon: Callable[[str], int], run_id: str
) -> None:
    pid = start_daemon(run_id)
    agents_before = list_agents(own_cluster)

    own_cluster.kill_node(0)
    report = asyncio.run(sweep(own_cluster.gcs_address, run_id=run_id, within_s=60))

    assert [process.pid for process in report.killed] == [pid]
    # The report lists the killed node as unreached, unless Ray has already removed this node from
    # the cluster.
    assert {node.node_id for node in report.unreached} <= {own_cluster.nodes[0].node_id}
    assert len(agents_before) == 2
    assert becomes_true(lambda: len(list_agents(own_cluster)) == 1, within_s=60)


@pytest.mark.thorough
def test_agents_end_with_their_cluster(muster_home: Path) -> None:
    with RayCluster.run(nodes=1) as cluster:
        assert asyncio.run(sweep(cluster.gcs_address, run_id="nobody")).is_clean
        agents = list_agents(cluster)
        cluster.kill_head()
        cluster.kill_node(0)
        assert becomes_true(lambda: not any(map(psutil.pid_exists, agents)), within_s=60)

    assert len(agents) == 2
