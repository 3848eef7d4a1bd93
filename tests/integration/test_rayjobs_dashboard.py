"""The dashboard of a Ray cluster stays usable after many jobs of Muster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.ray.dashboard import Dashboard
from tests.support.ray_cluster import RayCluster
from tests.support.ray_jobs import Jobs

#: Number of requests that the dashboard of the test's cluster answers at the same time. The default
#: of Ray is 100.
REQUESTS = 3


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.asyncio
async def test_ended_jobs_occupy_no_request_of_the_dashboard(
    tmp_path: Path, muster_home: Path
) -> None:
    head_env = {"RAY_STATE_SERVER_MAX_HTTP_REQUEST": str(REQUESTS)}
    with RayCluster.run(nodes=1, gpus_per_node=1, head_env=head_env) as cluster:
        jobs = Jobs(cluster.address, tmp_path)
        for number in range(REQUESTS + 1):
            plan, job = await jobs.launch("sh", "-c", f"echo job {number}; sleep 1; echo done")
            await job.exited
            assert await job.end() == ()
            assert plan.command.log.read_text().endswith(f"job {number}\ndone\n")

        dashboard = Dashboard(cluster.address)
        nodes = await dashboard.nodes()
        await dashboard.aclose()
        await jobs.clear()

    assert nodes
