"""`muster preflight`, and the check of a cluster's handling of orphaned processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.command import main
from tests.support.ray_cluster import RAY_ENV, ROOT, RayCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def run_module(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python module with arguments and Ray's environment, and return its result."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, **RAY_ENV},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=220,
    )


@pytest.mark.thorough
def test_healthy_nodes_pass_and_the_shared_directory_stays_empty(
    ray_cluster: RayCluster, muster_home: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()

    done = run_module(
        "tasks.command",
        "preflight",
        "--address",
        ray_cluster.address,
        "--shared",
        str(shared),
        # Runs of other tests may fill the disk, so the test requires only little free space.
        "--free-gib",
        "0.001",
        "--ray-free-gib",
        "0.001",
    )

    assert "8 logical" in done.stdout, done.stdout + done.stderr
    assert list(shared.iterdir()) == []
    findings = [line for line in done.stdout.splitlines() if line.startswith("- ")]
    assert all("leftovers" in line for line in findings), done.stdout
    assert done.returncode == (1 if findings else 0)


@pytest.mark.thorough
def test_node_without_a_gpu_driver_is_named_with_the_reason(
    ray_cluster: RayCluster, muster_home: Path
) -> None:
    name = f"127.0.0.1/{ray_cluster.nodes[0].node_id[:8]}"

    done = run_module(
        "tasks.command",
        "preflight",
        "--address",
        ray_cluster.address,
        "--gpus",
        "real",
        "--skew-s",
        "60",
    )

    assert done.returncode == 1
    assert f"{name}: gpus: Ray counts 8 GPUs, but the node has no GPU driver" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--address", "127.0.0.1:6379"),
        ("--address", "http://127.0.0.1:9", "--skew-s", "0"),
        ("--address", "http://127.0.0.1:9", "--gpus", "some"),
        (),
    ],
)
def test_wrong_arguments_are_rejected_before_a_check_starts(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # `main` sets PYTHONSAFEPATH in the process of the tests. Because of this call of `setenv`,
    # pytest restores the variable after the test.
    monkeypatch.setenv("PYTHONSAFEPATH", "1")

    assert main(["preflight", *arguments]) == 2


@pytest.mark.thorough
def test_unreachable_cluster_is_a_failure_that_names_its_address(muster_home: Path) -> None:
    done = run_module("tasks.command", "preflight", "--address", "http://127.0.0.1:9")

    assert done.returncode == 1
    assert "http://127.0.0.1:9" in done.stdout + done.stderr


@pytest.mark.thorough
def test_cluster_check_reports_ended_and_leaked_processes(ray_cluster: RayCluster) -> None:
    done = run_module(
        "deployments.cluster_check", "--address", ray_cluster.address, "--within-s", "3"
    )

    assert done.returncode == 0, done.stdout + done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert sum(line.startswith("bash -c 'sleep 10000' gone after") for line in lines) == 3
    assert sum(line.startswith("child and grandchild gone after") for line in lines) == 3
    assert sum(line.startswith("setsid leaks (ended") for line in lines) == 3
    assert "exit 7 seen as 7" in lines
