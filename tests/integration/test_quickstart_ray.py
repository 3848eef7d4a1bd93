"""The quickstart with its trainer as a Ray job, on a real Ray cluster with logical GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray._raylet import GcsClient

from tests.support.ray_cluster import RayCluster

ROOT = Path(__file__).resolve().parents[2]
SPEC = "deployments/runs/quickstart-ray.yaml"
WITHIN_S = 240


def count_used_gpus(cluster: RayCluster) -> float:
    """Return the number of GPUs of the cluster that Ray jobs use."""
    usage = GcsClient(address=cluster.gcs_address).get_all_resource_usage(timeout=10)
    return sum(
        node.resources_total.get("GPU", 0.0) - node.resources_available.get("GPU", 0.0)
        for node in usage.resource_usage_data.batch
    )


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(WITHIN_S + 60)
def test_quickstart_learns_as_a_ray_job_with_a_gpu(
    ray_cluster: RayCluster, muster_home: Path
) -> None:
    environment = {key: text for key, text in os.environ.items() if key != "PREFECT_API_URL"}
    command = (sys.executable, "-m", "flows.train", SPEC, "--set")

    done = subprocess.run(
        (*command, f"ray.address={ray_cluster.address}"),
        cwd=ROOT,
        env=environment | ray_cluster.env | {"MUSTER_HOME": str(muster_home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WITHIN_S,
    )

    assert done.returncode == 0, done.stdout
    [run] = (muster_home / "runs").iterdir()
    record = json.loads((run / "run.json").read_text())
    attempt = run / "attempt-01"
    rewards = [
        json.loads(line)["reward"] for line in (attempt / "metrics.jsonl").read_text().splitlines()
    ]
    assert record["state"] == "completed" and len(record["attempts"]) == 1
    assert len(rewards) == 60
    assert rewards[0] < 0.2 and rewards[-1] > 0.9
    # The trainer prints the index of the GPU that Ray assigned to it.
    assert "GPUs 0" in (attempt / "trainer.log").read_text()
    assert count_used_gpus(ray_cluster) == 0
