"""Runs of Ray jobs whose flow process is killed.

Depending on the spec, the jobs are ended or continue for the next flow process of the run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasks.processes.identity import ProcessId, boot_id, host_name
from tasks.processes.registry import JobEntry, LostRun, Owner
from tasks.record.disk import write_json
from tasks.record.final_record import FlowLoss
from tasks.upkeep.lost_run import stop_jobs
from tests.support.host_environment import HostEnvironment, Run, host_with_worker, wait_for
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

#: A trainer that prints increasing steps until a file exists.
#:
#: If a step is twice in the log, then a second job has run, or Muster has read a part of the log
#: twice.
TRAINER = """
import os, sys, time
step = 0
while not os.path.exists(sys.argv[1]):
    print("step", step, flush=True)
    step += 1
    time.sleep(0.2)
print("done after", step, flush=True)
"""
WITHIN_S = 30.0
#: Identity of a process that does not exist.
GONE = ProcessId(pid=1 << 22, start_ticks=1, boot_id=boot_id())
LOSS = FlowLoss(pid=GONE.pid)


@pytest.fixture(scope="module")
def host_env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostEnvironment]:
    """Yield a `HostEnvironment`: a simulated host with a Prefect server and a worker."""
    home = tmp_path_factory.mktemp("host") / "home"
    with host_with_worker(tmp_path_factory.mktemp("server"), home) as host_env:
        yield host_env


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """Return a path where no file exists. The trainer ends when a test creates a file there."""
    return tmp_path / "finished"


def build_spec(cluster: RayCluster, finished: Path, on_lost_flow: str) -> dict[str, Any]:
    """Return the spec of a run whose trainer is a Ray job.

    Args:
        cluster: Ray cluster of the job.
        finished: The job ends when this file exists.
        on_lost_flow: Value of the spec key `on_lost_flow`, for example "adopt".
    """
    directory = finished.parent / "code"
    directory.mkdir(exist_ok=True)
    (directory / "train.py").write_text(TRAINER)
    return {
        "name": "trial",
        "workload": "sft",
        "cwd": str(directory),
        "ray": {"address": cluster.address},
        "on_lost_flow": on_lost_flow,
        "components": {
            "trainer": {
                "launcher": "ray_job",
                "command": ["python", "train.py", str(finished)],
                "ready": {"log": "step 1", "within_s": 120},
            }
        },
    }


def read_log(run: Run) -> str:
    """Return the log of the trainer's first attempt."""
    return (run.record_path().parent / "attempt-01" / "trainer.log").read_text()


def read_steps(run: Run) -> list[int]:
    """Return the steps in the trainer's log, in the order of the log."""
    return [int(line.split()[1]) for line in read_log(run).splitlines() if line.startswith("step ")]


def read_job_status(cluster: RayCluster, submission_id: str) -> str:
    """Return the status that Ray reports for a job."""
    url = f"{cluster.address}/api/jobs/{submission_id}"
    return str(httpx.get(url, trust_env=False, timeout=30).json()["status"])


def list_jobs(cluster: RayCluster, run: Run) -> list[str]:
    """Ask Ray for all jobs, and return the submission ids of the jobs that belong to the run."""
    jobs = httpx.get(f"{cluster.address}/api/jobs/", trust_env=False, timeout=30).json()
    return [job["submission_id"] for job in jobs if (job["submission_id"] or "")[:-5] == run.name]


def until_next_process(run: Run, old_pid: int) -> None:
    """Wait until another flow process has taken over the run."""

    def has_next_process() -> bool:
        state_type, message = run.state()
        assert state_type in ("RUNNING", "PENDING", "SCHEDULED", "CRASHED"), (state_type, message)
        try:
            return run.flow_pid() not in (0, old_pid) and run.is_running()
        except (OSError, ValueError, AssertionError):
            return False

    wait_for(has_next_process, "the next flow process has taken over the run")


def until_finished(run: Run) -> None:
    """Run `reconcile` repeatedly until the run is no longer in the registry.

    A single call may not suffice, because other processes that a worker started for the run may
    still be running.
    """

    def is_gone() -> bool:
        run.host_env.reconcile_without_flow()
        return not (run.host_env.home / "live" / run.name).exists()

    wait_for(is_gone, "the run is no longer registered")


@pytest.mark.thorough
def test_jobs_continue_after_a_killed_flow_and_the_next_process_attaches_to_them(
    host_env: HostEnvironment, ray_cluster: RayCluster, finished: Path
) -> None:
    run = host_env.submit(build_spec(ray_cluster, finished, "adopt")).wait_until_running()
    submission_id = f"{run.name}--a01"

    # Send SIGTERM to the flow process, but do not cancel the flow run. The same happens when a
    # worker is upgraded.
    first = run.flow_pid()
    os.kill(first, signal.SIGTERM)
    until_next_process(run, first)
    second = run.flow_pid()
    os.kill(second, signal.SIGKILL)
    wait_for(lambda: run.state()[0] == "CRASHED", "the worker has reported the loss")
    # The worker has started further processes for the run. `reconcile` reschedules the run only
    # after these processes have ended, so call `reconcile` repeatedly.
    expected_summary = "1 of 1 lost runs reconciled"
    wait_for(
        lambda: expected_summary in host_env.reconcile_without_flow(),
        "the flow run is scheduled again",
    )
    until_next_process(run, second)
    assert read_job_status(ray_cluster, submission_id) == "RUNNING"
    finished.touch()
    run.wait_for_state("COMPLETED")

    [attempt] = run.record()["attempts"]
    assert (attempt["number"], attempt["state"]) == (1, "completed")
    assert list_jobs(ray_cluster, run) == [submission_id]
    steps = read_steps(run)
    assert steps == list(range(len(steps)))
    assert read_log(run).rstrip().endswith(f"done after {len(steps)}")
    names = [event["event"] for event in run.events()]
    assert names.count("attempt.begun") == 1
    assert names.count("attempt.adopted") == 2
    assert names.count("job.submitted") == 1
    wait_for(lambda: not (host_env.home / "live" / run.name).exists(), "the registry is empty")


@pytest.mark.thorough
def test_jobs_of_a_lost_host_are_ended_from_another_host(
    host_env: HostEnvironment, ray_cluster: RayCluster, finished: Path
) -> None:
    run = host_env.start_run(build_spec(ray_cluster, finished, "stop")).wait_until_running()
    submission_id = f"{run.name}--a01"
    run.kill_flow()
    owner = host_env.home / "live" / run.name / "owner.json"
    owner_content = json.loads(owner.read_text())
    owner_on_lost_host = {
        "host": "lost-host",
        "process": owner_content["process"] | {"boot_id": "another"},
    }
    owner.write_text(json.dumps(owner_content | owner_on_lost_host))

    output = host_env.run_module("tasks.command", "reconcile", "--lost-host", "lost-host")

    assert output.splitlines()[-1] == "lost-host: 1 of 1 lost runs reconciled"
    assert read_job_status(ray_cluster, submission_id) == "STOPPED"
    assert run.state()[0] == "CRASHED"
    record = run.record()
    failure = record["attempts"][0]["failure"]
    assert (record["state"], failure["rule"]) == ("failed", "flow-lost")
    assert f"job {submission_id}" in failure["message"]
    assert not owner.exists()
    run.wait_until_gone()


@pytest.mark.thorough
def test_cancel_without_a_flow_process_ends_the_continued_jobs(
    host_env: HostEnvironment, ray_cluster: RayCluster, finished: Path
) -> None:
    run = host_env.submit(build_spec(ray_cluster, finished, "adopt")).wait_until_running()
    submission_id = f"{run.name}--a01"

    run.kill_flow()
    wait_for(lambda: run.state()[0] == "CRASHED", "the worker has reported the loss")
    host_env.post(
        f"/flow_runs/{run.flow_run_id}/set_state", state={"type": "CANCELLED"}, force=True
    )
    until_finished(run)

    assert read_job_status(ray_cluster, submission_id) == "STOPPED"
    assert run.state()[0] == "CANCELLED"
    assert run.record()["state"] == "cancelled"
    run.wait_until_gone()


@pytest.fixture
def lost_run(tmp_path: Path) -> Iterator[LostRun]:
    """Yield a run whose flow process has died, with a Ray job in the registry.

    This fixture only writes the registry entry, and submits no job to Ray.
    """
    directory = tmp_path / "live"
    attempt = tmp_path / "attempt-01"
    directory.mkdir()
    attempt.mkdir()
    entry = JobEntry(
        run_id="r",
        attempt=1,
        component="trainer",
        submission_id="r--a01",
        log=attempt / "trainer.log",
        grace_s=1.0,
    )
    write_json(directory / "job-trainer.json", entry.model_dump(mode="json"))
    yield LostRun(directory, Owner(run_id="r", host=host_name(), process=GONE))


def write_submission(lost_run: LostRun, address: str, **times: float) -> Path:
    """Write the file in which Muster records the submission of a job; return the file's path."""
    path = lost_run.jobs[0].log.parent / "submission.json"
    job_fields = {"address": address, "submission_id": "r--a01", "submit_began_at": time.time()}
    run_fields = {"run_id": "r", "attempt": 1, "component": "trainer"}
    path.write_text(json.dumps(job_fields | run_fields | times))
    return path


def test_job_of_an_unreachable_cluster_stays_registered(lost_run: LostRun) -> None:
    file = write_submission(lost_run, "http://127.0.0.1:9")

    first = stop_jobs(lost_run, LOSS, unknown_after_s=0.1)
    second = stop_jobs(lost_run, LOSS, unknown_after_s=0.1)

    assert first.jobs == second.jobs == ()
    assert "is unknown, and its processes may still run" in first.jobs_left
    assert [entry.submission_id for entry in lost_run.jobs] == ["r--a01"]
    assert json.loads(file.read_text())["status"] == "unknown"


def test_job_that_was_never_submitted_is_removed_without_a_stop(lost_run: LostRun) -> None:
    result = stop_jobs(lost_run, LOSS, unknown_after_s=0.1)

    assert (result.jobs, result.jobs_left) == ((), "")
    assert lost_run.jobs == []


def test_leftover_processes_of_a_job_that_ray_forgot_are_killed(
    lost_run: LostRun, ray_cluster: RayCluster
) -> None:
    write_submission(lost_run, ray_cluster.address, submitted_at=time.time())
    run_variables = {"MUSTER_RUN_ID": "r", "MUSTER_ATTEMPT": "1", "MUSTER_COMPONENT": "trainer"}
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **run_variables}) as helper:
        try:
            result = stop_jobs(lost_run, LOSS, unknown_after_s=10.0)
            code = helper.wait(WITHIN_S)
        finally:
            helper.kill()

    assert result.jobs_left == ""
    assert code == -signal.SIGKILL
    assert lost_run.jobs == []


def test_job_that_ray_does_not_know_counts_as_ended(
    lost_run: LostRun, ray_cluster: RayCluster
) -> None:
    write_submission(lost_run, ray_cluster.address)

    result = stop_jobs(lost_run, LOSS, unknown_after_s=10.0)

    assert result.jobs_left == ""
    assert lost_run.jobs == []
