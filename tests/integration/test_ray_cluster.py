"""The cluster that tests of Ray stand on is real, is on loopback only, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.support.ray_cluster import RayCluster


@pytest.mark.slow
def test_two_nodes_stand_beside_a_head_that_runs_no_work(ray_cluster: RayCluster) -> None:
    listed = httpx.get(f"{ray_cluster.address}/api/v0/nodes", trust_env=False).json()

    nodes = {node["node_id"]: node for node in listed["data"]["result"]["result"]}
    assert {node["state"] for node in nodes.values()} == {"ALIVE"}
    for mine in ray_cluster.nodes:
        totals = nodes.pop(mine.node_id)["resources_total"]
        assert (totals["GPU"], totals["CPU"], totals["worker_node"]) == (8, 32, 100)
    [head] = nodes.values()
    assert head["is_head_node"]
    assert not {"GPU", "CPU", "worker_node"} & set(head["resources_total"])


@pytest.mark.slow
def test_nothing_of_a_cluster_outlives_an_owner_that_was_killed(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from tests.support.ray_cluster import RayCluster\n"
        "cluster = RayCluster()\n"
        "print(cluster.temp_dir, *cluster.pids(), flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen(
        (sys.executable, "-c", program),
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with owner:
        assert owner.stdout is not None
        directory, *pids = owner.stdout.readline().split()

        owner.send_signal(signal.SIGKILL)

    assert len(pids) > 5
    deadline = time.monotonic() + 30
    while Path(directory).exists() or any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"left of {directory}: {pids}"
        time.sleep(0.05)
