"""A Ray cluster behind a proxy that wants a header and speaks TLS by a certificate of its own: what
goes along with each question goes to listed clusters only, and stands in no file of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gang_pool import GangPool, gang_pool
from tests.support.ground import FINAL, until
from tests.support.guarded_dashboard import GuardedDashboard, guarded, own_certificate
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(300)]

KEY, TOKEN = "opensesame-4711", "f" * 40
CODE = "import ray\nray.init()\nprint('GPUs', ray.cluster_resources()['GPU'])"


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    return own_certificate(tmp_path)


@pytest.fixture
def listed(ray_cluster: RayCluster, certificate: tuple[Path, Path]) -> Iterator[GuardedDashboard]:
    with guarded(ray_cluster.address, wants=("X-Key", KEY), certificate=certificate[0]) as one:
        yield one


@pytest.fixture
def unlisted(ray_cluster: RayCluster) -> Iterator[GuardedDashboard]:
    with guarded(ray_cluster.address) as one:
        yield one


@pytest.fixture
def pool(
    listed: GuardedDashboard, certificate: tuple[Path, Path], tmp_path: Path
) -> Iterator[GangPool]:
    """It lists the one cluster, and its host has Ray's token and the key."""
    cluster = {
        "address": listed.address,
        "headers": {"X-Key": "${env.CLUSTER_KEY}"},
        "ca": str(certificate[1]),
    }
    with gang_pool(tmp_path / "pool", nodes={}, clusters=[cluster]) as pool:
        secrets = {"CLUSTER_KEY": KEY, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        pool.ground.variables = {**pool.ground.variables, **secrets}
        yield pool


def spec_of(directory: Path, **ray: Any) -> dict[str, Any]:
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


def test_a_run_without_an_address_runs_on_the_one_cluster_that_is_listed(
    pool: GangPool, listed: GuardedDashboard, tmp_path: Path
) -> None:
    pool.start_worker()

    run = pool.submit(spec_of(tmp_path))

    until(lambda: run.flow_run()["state_type"] in FINAL, "the run ends", within_s=200)
    place = pool.ground.home / "runs" / run.flow_run()["name"]
    [attempt] = json.loads((place / "run.json").read_text())["attempts"]
    assert run.flow_run()["state_type"] == "COMPLETED", run.flow_run()["state"]
    assert "GPUs 16.0" in (place / "attempt-01" / "trainer.log").read_text()
    assert attempt["ray"]["address"] == listed.address
    assert listed.address in (place / "attempt-01" / "spec.yaml").read_text()
    assert listed.values("x-key") == {KEY}
    assert listed.values("authorization") == {f"Bearer {TOKEN}"}
    kept = [path for path in place.rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept if KEY in path.read_text(errors="replace")]


def test_a_look_at_the_queue_gives_nothing_away_to_what_is_not_listed(
    pool: GangPool, listed: GuardedDashboard, unlisted: GuardedDashboard, tmp_path: Path
) -> None:
    pool.submit(spec_of(tmp_path, address=unlisted.address))

    with pool.ground.start("-m", "tasks.command", "queue", "--json", log="queue") as look:
        assert look.wait() == 0, pool.ground.log("queue")

    view = json.loads(pool.ground.log("queue"))
    # Ray's own id says that the two are one.
    assert {node["cluster"] for node in view["nodes"]} == {listed.address}
    assert [trouble for trouble in view["troubles"] if "http" in trouble] == []
    assert (listed.values("x-key"), unlisted.values("x-key")) == ({KEY}, {""})
    assert listed.values("authorization") == {f"Bearer {TOKEN}"}
    assert unlisted.values("authorization") == {""}
