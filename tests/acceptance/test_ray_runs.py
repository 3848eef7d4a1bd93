"""Runs whose trainer is a Ray job, started as a user starts them, on a real cluster."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.ground import until
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WITHIN_S = 150.0
#: Takes GPUs as verl does, each worker with a helper in a session of its own, and trains for ever.
TAKE_ALL = """
import subprocess, sys, time
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Strategy
ray.init(log_to_driver=False)
group = placement_group([{"GPU": 8, "CPU": 8}] * 2, strategy="STRICT_SPREAD")
ray.get(group.ready())
@ray.remote(num_gpus=8, num_cpus=1, scheduling_strategy=Strategy(group))
class Worker:
    def begin(self):
        return subprocess.Popen(["sleep", "7000"], start_new_session=True).pid
workers = [Worker.remote() for _ in range(2)]
print("helpers", *ray.get([worker.begin.remote() for worker in workers]), flush=True)
time.sleep(7000)
"""
#: What verl, in the course of its releases, and others say when the cluster is full.
FULL = (
    "ValueError: Total available GPUs 0 is less than total desired GPUs 16",
    "ValueError: Resource pool global_pool: 8*2cannot be satisfied in this ray cluster",
    "ValueError: Cannot satisfy placement group requirement for pool 'global_pool' requiring "
    "8.0 GPUs and 24 CPUs on a single node. Max available on any single node: 3.0 GPUs",
)


@pytest.fixture
def job_of(ray_cluster: RayCluster, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A spec whose trainer is a Ray job that runs some code."""

    def spec(code: str, **more: Any) -> dict[str, Any]:
        directory = tmp_path / "code"
        directory.mkdir(exist_ok=True)
        (directory / "train.py").write_text(code)
        trainer = {"launcher": "ray_job", "command": ["python", "train.py"]}
        return {
            "name": "trial",
            "workload": "grpo",
            "cwd": str(directory),
            "components": {"trainer": trainer | more.pop("trainer", {})},
            **more,
            "ray": {"address": ray_cluster.address} | more.get("ray", {}),
        }

    return spec


def gpus_used(cluster: RayCluster) -> float:
    """By Ray's own word."""
    answer = httpx.get(f"{cluster.address}/api/cluster_status", trust_env=False, timeout=30).json()
    usage = answer["data"]["clusterStatus"]["loadMetricsReport"]["usage"]
    used, _ = usage["GPU"]
    return float(used)


def status_of(cluster: RayCluster, submission_id: str) -> str:
    url = f"{cluster.address}/api/jobs/{submission_id}"
    return str(httpx.get(url, trust_env=False, timeout=30).json()["status"])


def log_of(run: Any, attempt: int = 1) -> str:
    path = run.directory / f"attempt-{attempt:02d}" / "trainer.log"
    return path.read_text(errors="replace") if path.exists() else ""


def living(pids: list[str]) -> list[str]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def helpers_of(run: Any) -> list[str]:
    def told() -> list[str]:
        lines = [line.split() for line in log_of(run).splitlines()]
        return next((words[1:] for words in lines if words[:1] == ["helpers"]), [])

    found: list[str] = until(told, "the GPUs are taken")
    return found


@pytest.mark.thorough
def test_a_job_that_ends_well_completes_the_run(
    start_run: Callable, job_of: Callable, ray_cluster: RayCluster
) -> None:
    code = "import os\nprint('trains', os.environ['MUSTER_RUN_ID'], os.environ['SEED'])"

    run = start_run(job_of(code, env={"SEED": "7"}))

    assert run.wait(WITHIN_S) == 0, run.text()
    record = run.record()
    [attempt] = record["attempts"]
    submission_id = f"{record['run_id']}--a01"
    assert record["state"] == "completed"
    assert attempt["ray"]["submission_id"] == submission_id
    assert attempt["components"]["trainer"]["exit_code"] == 0
    assert f"trains {record['run_id']} 7" in log_of(run)
    assert status_of(ray_cluster, submission_id) == "SUCCEEDED"
    assert run.pids() == []


@pytest.mark.thorough
def test_a_users_error_fails_the_run_with_its_line(start_run: Callable, job_of: Callable) -> None:
    run = start_run(job_of("raise KeyError('actor.optim.lr')"))

    assert run.wait(WITHIN_S) == 1, run.text()
    [attempt] = run.record()["attempts"]
    failure = attempt["failure"]
    assert (failure["kind"], failure["component"]) == ("USER_ERROR", "trainer")
    assert failure["exit_code"] == 1
    assert failure["line"] == "KeyError: 'actor.optim.lr'"
    assert "Running entrypoint" not in failure["log_tail"]


@pytest.mark.thorough
@pytest.mark.parametrize("texts", [FULL[:1], FULL[1:]], ids=["now", "others"])
def test_a_job_that_finds_the_cluster_full_is_requeued_and_completes_when_there_is_room(
    start_run: Callable, job_of: Callable, texts: tuple[str, ...]
) -> None:
    code = f"import os\ntexts = {texts!r}\nattempt = int(os.environ['MUSTER_ATTEMPT'])\n"
    code += "if attempt <= len(texts): raise SystemExit(texts[attempt - 1])\nprint('there is room')"

    run = start_run(job_of(code, retry={"INSUFFICIENT_RESOURCES": {"delay_s": 0.2}}))

    assert run.wait(WITHIN_S) == 0, run.text()
    record = run.record()
    attempts = record["attempts"]
    kinds = [attempt["failure"]["kind"] for attempt in attempts if attempt["failure"]]
    assert kinds == ["INSUFFICIENT_RESOURCES"] * len(texts)
    ids = [attempt["ray"]["submission_id"] for attempt in attempts]
    assert ids == [f"{record['run_id']}--a0{n}" for n in range(1, len(texts) + 2)]
    assert attempts[-1]["state"] == "completed"


@pytest.mark.parametrize("phase", [pytest.param("pending", marks=pytest.mark.thorough), "running"])
def test_a_cancel_frees_everything(
    start_run: Callable, job_of: Callable, ray_cluster: RayCluster, phase: str
) -> None:
    nowhere = {"entrypoint_resources": {"a_node_that_is_not_there": 1}}
    spec = job_of(
        TAKE_ALL, ray=nowhere if phase == "pending" else {}, gang={"nodes": 2, "gpus_per_node": 8}
    )
    run = start_run(spec)
    helpers = []
    if phase == "pending":
        until(lambda: "job.state" in {e["event"] for e in run.events()}, "the job is pending")
    else:
        helpers = helpers_of(run)
        assert len(living(helpers)) == 2

    run.process.send_signal(signal.SIGINT)

    assert run.wait(WITHIN_S) == 130, run.text()
    record = run.record()
    assert record["state"] == "cancelled"
    assert status_of(ray_cluster, f"{record['run_id']}--a01") in ("STOPPED", "FAILED")
    assert living(helpers) == []
    assert run.pids() == []
    until(lambda: gpus_used(ray_cluster) == 0, "the GPUs are free by Ray's word")


def test_a_gang_that_never_fits_is_told_the_numbers(start_run: Callable, job_of: Callable) -> None:
    run = start_run(job_of("print('never')", gang={"nodes": 3, "gpus_per_node": 8}))

    assert run.wait(WITHIN_S) == 3, run.text()
    record = run.record()
    assert record["state"] == "failed"
    assert record["attempts"] == []
    assert "3 nodes with 8 GPUs" in run.text()
    assert "2 with 8 GPUs" in run.text()
