"""A Ray job whose node is drained with a deadline, on a real cluster that the test may change."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.ray_cluster import RayCluster
from tests.support.ray_jobs import Jobs

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.thorough]

RAY = str(Path(sys.executable).with_name("ray"))
#: Time from the start of the drain of a Ray node to the drain's deadline, in seconds. After the
#: deadline, the node may be removed from the cluster.
NOTICE_S = 600


async def test_job_on_a_drained_node_knows_its_deadline(tmp_path: Path, muster_home: Path) -> None:
    with RayCluster.run() as cluster:
        jobs = Jobs(cluster.address, tmp_path)
        _, job = await jobs.launch("sleep", "3600")
        assert job._state is not None
        before = await job.read_planned_end()

        await asyncio.to_thread(
            subprocess.run,
            [
                *(RAY, "drain-node", "--address", await job._dashboard.gcs_address()),
                *("--node-id", job._state.driver_node_id),
                *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "maintenance"),
                *("--deadline-remaining-seconds", str(NOTICE_S)),
            ],
            check=True,
            timeout=120,
        )
        end = await job.read_planned_end()
        await jobs.clear()

    assert before is None
    assert end is not None and end.reason == "Ray drains a node of the job"
    assert end.at == pytest.approx(time.time() + NOTICE_S, abs=120)
