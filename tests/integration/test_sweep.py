"""Sweeps of a real Ray cluster, from a process that is no part of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.ray.nodes import SweepReport, sweep
from tests.support.ray_cluster import RAY_ENV, RayCluster

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
            if "tasks.ray.visits" in child.cmdline():
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
def test_a_sweep_within_a_flow_run_is_seen_on_it_node_by_node(
    ray_cluster: RayCluster,
    prefect_url: str,
    escaped: Callable[[str], int],
    run_id: str,
    muster_home: Path,
) -> None:
    pid = escaped(run_id)

    @flow(name="with-a-sweep", persist_result=False)
    def sweeping() -> SweepReport:
        return asyncio.run(sweep(ray_cluster.gcs_address, run_id=run_id, within_s=120))

    with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as client:
        state = sweeping(return_state=True)
        flow_run_id = state.state_details.flow_run_id
        asked = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
        deadline = time.monotonic() + 30
        # What tasks say of themselves reaches the server a moment later.
        while True:
            found = client.read_task_runs(flow_run_filter=asked)
            if sum(run.state is not None and run.state.is_final() for run in found) >= 3:
                break
            assert time.monotonic() < deadline, found
            time.sleep(0.2)

    report = state.result()
    assert [one.pid for one in report.killed] == [pid]
    assert report.is_clean
    names = {f"sweep {node.node_id[:8]}" for node in ray_cluster.nodes}
    assert names <= {run.name for run in found}
    assert {run.state_name for run in found} == {"Completed"}


@pytest.mark.thorough
def test_a_cluster_that_is_away_is_said_by_the_deadline(run_id: str) -> None:
    report = asyncio.run(sweep("127.0.0.1:9", run_id=run_id, within_s=8))

    assert [node.name for node in report.unreached] == ["127.0.0.1:9"]
    assert not report.is_clean


def test_a_cancel_leaves_no_driver(ray_cluster: RayCluster, run_id: str) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(sweep(ray_cluster.gcs_address, run_id=run_id))
        while not drivers():
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())

    assert drivers() == []


@pytest.mark.thorough
def test_what_a_killed_raylet_leaves_is_ended(escaped: Callable[[str], int], run_id: str) -> None:
    pid = escaped(run_id)

    with RayCluster.started(nodes=1) as cluster:
        killed = cluster.kill_node(0)
        report = asyncio.run(sweep(cluster.gcs_address, run_id=run_id, within_s=60))

    assert [one.pid for one in report.killed] == [pid]
    # Ray may not have noticed yet: then it is named as one that could not be asked.
    assert {node.node_id for node in report.unreached} <= {killed.node_id}
