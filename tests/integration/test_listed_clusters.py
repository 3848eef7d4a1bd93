"""A Ray cluster behind a proxy that requires a header and uses a private TLS certificate.

Muster sends the header and the token only to clusters that the pool lists. No file of a run
contains them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gang_pool import GangPool, gang_pool
from tests.support.guarded_dashboard import (
    GuardedDashboard,
    create_certificate,
    run_guarded_dashboard,
)
from tests.support.host_environment import FINAL, wait_for
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(300)]

KEY = "opensesame-4711"
TOKEN = "f" * 40
CODE = "import ray\nray.init()\nprint('GPUs', ray.cluster_resources()['GPU'])"


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Return the paths of two files.

    The first file has the server's key and certificate. The second file has the CA certificate.
    """
    return create_certificate(tmp_path)


@pytest.fixture
def listed(ray_cluster: RayCluster, certificate: tuple[Path, Path]) -> Iterator[GuardedDashboard]:
    """Yield a proxy of the Ray dashboard. The work pool of the tests lists the proxy's address.

    The proxy uses TLS and accepts only requests with the header `X-Key`.
    """
    with run_guarded_dashboard(
        ray_cluster.address, wants=("X-Key", KEY), certificate=certificate[0]
    ) as dashboard:
        yield dashboard


@pytest.fixture
def unlisted_cluster(ray_cluster: RayCluster) -> Iterator[GuardedDashboard]:
    """Yield a proxy of the Ray dashboard.

    The work pool of the tests does not list the proxy's address.
    """
    with run_guarded_dashboard(ray_cluster.address) as dashboard:
        yield dashboard


@pytest.fixture
def pool(
    listed: GuardedDashboard, certificate: tuple[Path, Path], tmp_path: Path
) -> Iterator[GangPool]:
    """Yield a pool that uses one Ray cluster, at the address of the proxy `listed`.

    Two secrets are in the environment of the host: the token for Ray, and the key for the proxy.
    """
    cluster = {
        "address": listed.address,
        "headers": {"X-Key": "${env.CLUSTER_KEY}"},
        "ca": str(certificate[1]),
    }
    with gang_pool(tmp_path / "pool", nodes={}, clusters=[cluster]) as pool:
        secrets = {"CLUSTER_KEY": KEY, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        pool.host_env.extra_env.update(secrets)
        yield pool


def build_spec(directory: Path, **ray: Any) -> dict[str, Any]:
    """Write a training program, and return the spec of a Ray job with this program."""
    code = directory / "code"
    code.mkdir()
    (code / "train.py").write_text(CODE)
    return {
        "name": "trial",
        "workload": "grpo",
        "gang": {"gpus_per_node": 1},
        "cwd": str(code),
        "ray": ray,
        "components": {"trainer": {"launcher": "ray_job", "command": ["python", "train.py"]}},
    }


def test_run_without_ray_address_uses_the_only_listed_cluster(
    pool: GangPool, listed: GuardedDashboard, tmp_path: Path
) -> None:
    pool.start_worker()

    run = pool.submit(build_spec(tmp_path))

    wait_for(lambda: run.flow_run()["state_type"] in FINAL, "the run ends", within_s=200)
    run_directory = pool.host_env.home / "runs" / run.flow_run()["name"]
    [attempt] = json.loads((run_directory / "run.json").read_text())["attempts"]
    assert run.flow_run()["state_type"] == "COMPLETED", run.flow_run()["state"]
    assert "GPUs 16.0" in (run_directory / "attempt-01" / "trainer.log").read_text()
    assert attempt["ray"]["address"] == listed.address
    assert listed.address in (run_directory / "attempt-01" / "spec.yaml").read_text()
    assert listed.values("x-key") == {KEY}
    assert listed.values("authorization") == {f"Bearer {TOKEN}"}
    files_of_run = [path for path in run_directory.rglob("*") if path.is_file()]
    assert files_of_run
    assert not [path for path in files_of_run if KEY in path.read_text(errors="replace")]


def test_queue_command_sends_no_secret_to_an_unlisted_cluster(
    pool: GangPool, listed: GuardedDashboard, unlisted_cluster: GuardedDashboard, tmp_path: Path
) -> None:
    pool.submit(build_spec(tmp_path, address=unlisted_cluster.address))

    with pool.host_env.start("-m", "tasks.command", "queue", "--json", log="queue") as process:
        assert process.wait() == 0, pool.host_env.log("queue")

    view = json.loads(pool.host_env.log("queue"))
    # Both proxies lead to the same Ray cluster, and return the same cluster id. So Muster treats
    # their addresses as one cluster.
    assert {node["cluster"] for node in view["nodes"]} == {listed.address}
    assert [trouble for trouble in view["troubles"] if "http" in trouble] == []
    assert (listed.values("x-key"), unlisted_cluster.values("x-key")) == ({KEY}, {""})
    assert listed.values("authorization") == {f"Bearer {TOKEN}"}
    assert unlisted_cluster.values("authorization") == {""}
