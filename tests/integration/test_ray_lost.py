"""Runs of Ray jobs whose flow process is killed: the jobs are ended, or go on for the next one."""

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
from tests.support.ground import Ground, Run, host_with_worker, until
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

#: Counts until a file is there, and may be seen to count by nobody twice.
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
GONE = ProcessId(pid=1 << 22, start_ticks=1, boot_id=boot_id())
LOSS = FlowLoss(pid=GONE.pid)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """A host with a worker."""
    home = tmp_path_factory.mktemp("host") / "home"
    with host_with_worker(tmp_path_factory.mktemp("server"), home) as ground:
        yield ground


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The trainer ends once this file is there."""
    return tmp_path / "finished"


def counting(cluster: RayCluster, finished: Path, on_lost_flow: str) -> dict[str, Any]:
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


def log_of(run: Run) -> str:
    return (run.record_path().parent / "attempt-01" / "trainer.log").read_text()


def steps_of(run: Run) -> list[int]:
    return [int(line.split()[1]) for line in log_of(run).splitlines() if line.startswith("step ")]


def status_of(cluster: RayCluster, submission_id: str) -> str:
    url = f"{cluster.address}/api/jobs/{submission_id}"
    return str(httpx.get(url, trust_env=False, timeout=30).json()["status"])


def jobs_of(cluster: RayCluster, run: Run) -> list[str]:
    jobs = httpx.get(f"{cluster.address}/api/jobs/", trust_env=False, timeout=30).json()
    return [job["submission_id"] for job in jobs if (job["submission_id"] or "")[:-5] == run.name]


def until_next_process(run: Run, before: int) -> None:
    """Another flow process has taken the run over."""

    def is_there() -> bool:
        kind, message = run.state()
        assert kind in ("RUNNING", "PENDING", "SCHEDULED", "CRASHED"), (kind, message)
        try:
            return run.flow_pid() not in (0, before) and run.is_running()
        except (OSError, ValueError, AssertionError):
            return False

    until(is_there, "the run's next process goes on with it")


def until_finished(run: Run) -> None:
    """Reconciled, as each minute: what a worker has started for the run leaves a moment later."""

    def is_gone() -> bool:
        run.ground.reconcile_without_flow()
        return not (run.ground.home / "live" / run.name).exists()

    until(is_gone, "nothing of the run is registered")


@pytest.mark.thorough
def test_jobs_of_a_killed_flow_go_on_and_its_next_process_attaches_to_them(
    ground: Ground, ray_cluster: RayCluster, finished: Path
) -> None:
    run = ground.submit(counting(ray_cluster, finished, "adopt")).until_running()
    submission_id = f"{run.name}--a01"

    # As the upgrade of a worker ends it: no cancel stands on the server.
    first = run.flow_pid()
    os.kill(first, signal.SIGTERM)
    until_next_process(run, first)
    second = run.flow_pid()
    os.kill(second, signal.SIGKILL)
    until(lambda: run.state()[0] == "CRASHED", "the worker has seen the loss")
    # Not at once: what the worker has started for it leaves first.
    put_back = "1 of 1 lost runs reconciled"
    until(lambda: put_back in ground.reconcile_without_flow(), "the flow run is put back")
    until_next_process(run, second)
    assert status_of(ray_cluster, submission_id) == "RUNNING"
    finished.touch()
    run.until_state("COMPLETED")

    [attempt] = run.record()["attempts"]
    assert (attempt["number"], attempt["state"]) == (1, "completed")
    assert jobs_of(ray_cluster, run) == [submission_id]
    steps = steps_of(run)
    assert steps == list(range(len(steps)))
    assert log_of(run).rstrip().endswith(f"done after {len(steps)}")
    names = [event["event"] for event in run.events()]
    assert names.count("attempt.begun") == 1
    assert names.count("attempt.adopted") == 2
    assert names.count("job.submitted") == 1
    until(lambda: not (ground.home / "live" / run.name).exists(), "the registry is empty")


@pytest.mark.thorough
def test_jobs_of_a_host_that_is_given_up_are_ended_from_another_one(
    ground: Ground, ray_cluster: RayCluster, finished: Path
) -> None:
    run = ground.start_run(counting(ray_cluster, finished, "stop")).until_running()
    submission_id = f"{run.name}--a01"
    run.kill_flow()
    owner = ground.home / "live" / run.name / "owner.json"
    here = json.loads(owner.read_text())
    there = {"host": "lost-host", "process": here["process"] | {"boot_id": "another"}}
    owner.write_text(json.dumps(here | there))

    said = ground.ask("tasks.command", "reconcile", "--lost-host", "lost-host")

    assert said.splitlines()[-1] == "lost-host: 1 of 1 lost runs reconciled"
    assert status_of(ray_cluster, submission_id) == "STOPPED"
    assert run.state()[0] == "CRASHED"
    record = run.record()
    failure = record["attempts"][0]["failure"]
    assert (record["state"], failure["rule"]) == ("failed", "flow-lost")
    assert f"job {submission_id}" in failure["message"]
    assert not owner.exists()
    run.until_gone()


@pytest.mark.thorough
def test_a_cancel_while_no_process_is_there_ends_the_jobs_that_went_on(
    ground: Ground, ray_cluster: RayCluster, finished: Path
) -> None:
    run = ground.submit(counting(ray_cluster, finished, "adopt")).until_running()
    submission_id = f"{run.name}--a01"

    run.kill_flow()
    until(lambda: run.state()[0] == "CRASHED", "the worker has seen the loss")
    ground.post(f"/flow_runs/{run.flow_run_id}/set_state", state={"type": "CANCELLED"}, force=True)
    until_finished(run)

    assert status_of(ray_cluster, submission_id) == "STOPPED"
    assert run.state()[0] == "CANCELLED"
    assert run.record()["state"] == "cancelled"
    run.until_gone()


@pytest.fixture
def lost(tmp_path: Path) -> Iterator[LostRun]:
    """A run that left a job behind, of which the cluster may know."""
    directory, attempt = tmp_path / "live", tmp_path / "attempt-01"
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


def submission(lost: LostRun, address: str, **known: float) -> Path:
    path = lost.jobs[0].log.parent / "submission.json"
    own = {"address": address, "submission_id": "r--a01", "submit_began_at": time.time()}
    its = {"run_id": "r", "attempt": 1, "component": "trainer"}
    path.write_text(json.dumps(own | its | known))
    return path


def test_a_job_whose_cluster_does_not_answer_is_asked_about_again(lost: LostRun) -> None:
    file = submission(lost, "http://127.0.0.1:9")

    first = stop_jobs(lost, LOSS, unknown_after_s=0.1)
    again = stop_jobs(lost, LOSS, unknown_after_s=0.1)

    assert first.jobs == again.jobs == ()
    assert "nobody can say what is left" in first.jobs_left
    assert [entry.submission_id for entry in lost.jobs] == ["r--a01"]
    assert json.loads(file.read_text())["status"] == "unknown"


def test_a_job_that_was_never_submitted_is_nothing_to_end(lost: LostRun) -> None:
    done = stop_jobs(lost, LOSS, unknown_after_s=0.1)

    assert (done.jobs, done.jobs_left) == ((), "")
    assert lost.jobs == []


def test_what_a_forgotten_job_has_left_is_swept(lost: LostRun, ray_cluster: RayCluster) -> None:
    submission(lost, ray_cluster.address, submitted_at=time.time())
    named = {"MUSTER_RUN_ID": "r", "MUSTER_ATTEMPT": "1", "MUSTER_COMPONENT": "trainer"}
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **named}) as helper:
        try:
            done = stop_jobs(lost, LOSS, unknown_after_s=10.0)
            code = helper.wait(WITHIN_S)
        finally:
            helper.kill()

    assert done.jobs_left == ""
    assert code == -signal.SIGKILL
    assert lost.jobs == []


def test_a_job_that_nobody_knows_has_ended(lost: LostRun, ray_cluster: RayCluster) -> None:
    submission(lost, ray_cluster.address)

    done = stop_jobs(lost, LOSS, unknown_after_s=10.0)

    assert done.jobs_left == ""
    assert lost.jobs == []
