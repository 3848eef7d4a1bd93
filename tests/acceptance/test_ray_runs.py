"""Runs whose trainer is a Ray job, started as a user starts them, on a real Ray cluster."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.host_environment import wait_for
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WITHIN_S = 150.0
#: Code of a trainer that takes all GPUs with a placement group, as verl does, and then runs until
#: Muster stops the trainer.
#:
#: Each Ray worker of the trainer starts a helper process in a separate session.
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
#: Error messages about too few free GPUs, from several releases of verl and from other programs.
FULL = (
    "ValueError: Total available GPUs 0 is less than total desired GPUs 16",
    "ValueError: Resource pool global_pool: 8*2cannot be satisfied in this ray cluster",
    "ValueError: Cannot satisfy placement group requirement for pool 'global_pool' requiring "
    "8.0 GPUs and 24 CPUs on a single node. Max available on any single node: 3.0 GPUs",
)


@pytest.fixture
def build_job_spec(ray_cluster: RayCluster, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that makes a spec whose trainer is a Ray job with the given code."""

    def build_spec(code: str, **further_keys: Any) -> dict[str, Any]:
        directory = tmp_path / "code"
        directory.mkdir(exist_ok=True)
        (directory / "train.py").write_text(code)
        trainer = {"launcher": "ray_job", "command": ["python", "train.py"]}
        return {
            "name": "trial",
            "workload": "grpo",
            "cwd": str(directory),
            "components": {"trainer": trainer | further_keys.pop("trainer", {})},
            **further_keys,
            "ray": {"address": ray_cluster.address} | further_keys.get("ray", {}),
        }

    return build_spec


def count_used_gpus(cluster: RayCluster) -> float:
    """Return the number of GPUs that Ray reports as used."""
    answer = httpx.get(f"{cluster.address}/api/cluster_status", trust_env=False, timeout=30).json()
    usage = answer["data"]["clusterStatus"]["loadMetricsReport"]["usage"]
    used, _ = usage["GPU"]
    return float(used)


def read_job_status(cluster: RayCluster, submission_id: str) -> str:
    """Return the status that Ray reports for a job."""
    url = f"{cluster.address}/api/jobs/{submission_id}"
    return str(httpx.get(url, trust_env=False, timeout=30).json()["status"])


def read_log(run: Any, attempt: int = 1) -> str:
    """Return the trainer's log of an attempt, or an empty string if there is no log."""
    path = run.directory / f"attempt-{attempt:02d}" / "trainer.log"
    return path.read_text(errors="replace") if path.exists() else ""


def filter_living(pids: list[str]) -> list[str]:
    """Return the pids whose process still exists."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def wait_for_helpers(run: Any) -> list[str]:
    """Return the pids of the helper processes that the trainer's Ray workers have started.

    Wait until the trainer has its GPUs and has printed the pids.
    """

    def find_helpers() -> list[str]:
        lines = [line.split() for line in read_log(run).splitlines()]
        return next((words[1:] for words in lines if words[:1] == ["helpers"]), [])

    helpers: list[str] = wait_for(find_helpers, "the GPUs are taken")
    return helpers


@pytest.mark.thorough
def test_successful_job_completes_the_run(
    start_run: Callable, build_job_spec: Callable, ray_cluster: RayCluster
) -> None:
    code = "import os\nprint('trains', os.environ['MUSTER_RUN_ID'], os.environ['SEED'])"

    run = start_run(build_job_spec(code, env={"SEED": "7"}))

    assert run.wait(WITHIN_S) == 0, run.text()
    record = run.record()
    [attempt] = record["attempts"]
    submission_id = f"{record['run_id']}--a01"
    assert record["state"] == "completed"
    assert attempt["ray"]["submission_id"] == submission_id
    assert attempt["components"]["trainer"]["exit_code"] == 0
    assert f"trains {record['run_id']} 7" in read_log(run)
    assert read_job_status(ray_cluster, submission_id) == "SUCCEEDED"
    assert run.pids() == []


@pytest.mark.thorough
def test_user_error_of_a_job_fails_the_run_with_the_error_line(
    start_run: Callable, build_job_spec: Callable
) -> None:
    run = start_run(build_job_spec("raise KeyError('actor.optim.lr')"))

    assert run.wait(WITHIN_S) == 1, run.text()
    [attempt] = run.record()["attempts"]
    failure = attempt["failure"]
    assert (failure["kind"], failure["component"]) == ("USER_ERROR", "trainer")
    assert failure["exit_code"] == 1
    assert failure["line"] == "KeyError: 'actor.optim.lr'"
    assert "Running entrypoint" not in failure["log_tail"]


@pytest.mark.thorough
@pytest.mark.parametrize("texts", [FULL[:1], FULL[1:]], ids=["now", "others"])
def test_job_without_free_gpus_is_requeued_until_gpus_are_free(
    start_run: Callable, build_job_spec: Callable, texts: tuple[str, ...]
) -> None:
    code = f"import os\ntexts = {texts!r}\nattempt = int(os.environ['MUSTER_ATTEMPT'])\n"
    code += "if attempt <= len(texts): raise SystemExit(texts[attempt - 1])\nprint('there is room')"

    run = start_run(build_job_spec(code, retry={"INSUFFICIENT_RESOURCES": {"delay_s": 0.2}}))

    assert run.wait(WITHIN_S) == 0, run.text()
    record = run.record()
    attempts = record["attempts"]
    kinds = [attempt["failure"]["kind"] for attempt in attempts if attempt["failure"]]
    assert kinds == ["INSUFFICIENT_RESOURCES"] * len(texts)
    ids = [attempt["ray"]["submission_id"] for attempt in attempts]
    assert ids == [f"{record['run_id']}--a0{n}" for n in range(1, len(texts) + 2)]
    assert attempts[-1]["state"] == "completed"


@pytest.mark.parametrize("phase", [pytest.param("pending", marks=pytest.mark.thorough), "running"])
def test_cancel_ends_the_job_and_frees_its_gpus(
    start_run: Callable, build_job_spec: Callable, ray_cluster: RayCluster, phase: str
) -> None:
    impossible_resources = {"entrypoint_resources": {"a_node_that_is_not_there": 1}}
    spec = build_job_spec(
        TAKE_ALL,
        ray=impossible_resources if phase == "pending" else {},
        gang={"nodes": 2, "gpus_per_node": 8},
    )
    run = start_run(spec)
    helpers = []
    if phase == "pending":
        wait_for(
            lambda: "job.state" in {event["event"] for event in run.events()}, "the job is pending"
        )
    else:
        helpers = wait_for_helpers(run)
        assert len(filter_living(helpers)) == 2

    run.process.send_signal(signal.SIGINT)

    assert run.wait(WITHIN_S) == 130, run.text()
    record = run.record()
    assert record["state"] == "cancelled"
    assert read_job_status(ray_cluster, f"{record['run_id']}--a01") in ("STOPPED", "FAILED")
    assert filter_living(helpers) == []
    assert run.pids() == []
    wait_for(lambda: count_used_gpus(ray_cluster) == 0, "Ray reports the GPUs as free")


def test_message_about_an_infeasible_gang_has_the_numbers(
    start_run: Callable, build_job_spec: Callable
) -> None:
    run = start_run(build_job_spec("print('never')", gang={"nodes": 3, "gpus_per_node": 8}))

    assert run.wait(WITHIN_S) == 3, run.text()
    record = run.record()
    assert record["state"] == "failed"
    assert record["attempts"] == []
    assert "3 nodes with 8 GPUs" in run.text()
    assert "2 with 8 GPUs" in run.text()
