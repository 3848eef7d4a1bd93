"""Tests of runs whose Ray cluster partly fails: the head, a node, a job supervisor, the dashboard.

No Ray job is lost and no job runs twice. If the state of a job is unknown, the message of the run
says that it is unknown, and `muster reconcile` asks the cluster again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import yaml

from tasks.ray.dashboard import Dashboard
from tests.support.host_environment import (
    ROOT,
    HostEnvironment,
    Run,
    Server,
    wait_for,
    with_absolute_cwd,
)
from tests.support.ray_cluster import RayCluster
from tests.support.ray_jobs import BreakableProxy, run_proxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

#: Program that runs `flows.train`. If a Ray cluster does not answer, the program waits only some
#: seconds, instead of minutes.
IMPATIENT = """
import functools, sys
from tasks.ray import job, nodes
from tasks.train import plan
plan.JobPlan = functools.partial(plan.JobPlan, lost_after_s=5.0)
sweep = functools.partial(nodes.sweep, within_s=30.0)
job.TakeDown = functools.partial(job.TakeDown, unknown_after_s=5.0, sweep=sweep)
from flows.train import command
from tasks.show.arguments import run_alone
raise SystemExit(run_alone(command, "train"))
"""
#: Program of a Ray job that counts until the file in its first argument exists.
COUNTING = """
import os, sys, time
step = 0
while not os.path.exists(sys.argv[1]):
    print("step", step, flush=True)
    step += 1
    time.sleep(0.2)
print("done after", step, flush=True)
"""
#: Program of a Ray job with one actor on each of two nodes. The actors and the driver each start a
#: helper process in its own session.
SPREAD = """
import subprocess, sys, time
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Strategy
def helper():
    return subprocess.Popen(["sleep", "7000"], start_new_session=True).pid
ray.init(log_to_driver=False)
group = placement_group([{"GPU": 8, "CPU": 8}] * 2, strategy="STRICT_SPREAD")
ray.get(group.ready())
@ray.remote(num_gpus=8, num_cpus=1, scheduling_strategy=Strategy(group))
class Worker:
    def begin(self):
        return helper()
workers = [Worker.remote() for _ in range(2)]
print("helpers", helper(), *ray.get([worker.begin.remote() for worker in workers]), flush=True)
print("step 1", flush=True)
time.sleep(7000)
"""
#: Program of a Ray job whose driver waits for an actor that never returns.
BLOCKED = """
import threading
import ray
ray.init(log_to_driver=False)
@ray.remote(num_gpus=8, runtime_env={"env_vars": {"RANK": "3"}})
class Rank:
    def ready(self):
        return True
    def stuck_in_all_reduce(self):
        threading.Event().wait()
rank = Rank.remote()
ray.get(rank.ready.remote())
print("step 1", flush=True)
ray.get(rank.stuck_in_all_reduce.remote())
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def host_env(server: Server, tmp_path: Path) -> Iterator[HostEnvironment]:
    host_env = HostEnvironment(home=tmp_path / "home", api=server.api)
    yield host_env
    host_env.clear()


@pytest.fixture
def own_cluster() -> Iterator[RayCluster]:
    """Return a Ray cluster that a test may break. The cluster notices dead nodes quickly."""
    with RayCluster.run(is_fast_to_notice=True) as cluster:
        yield cluster


@pytest.fixture
def patient_cluster() -> Iterator[RayCluster]:
    """Return a Ray cluster that a test may break. The cluster does not declare nodes as dead."""
    patience = {"RAY_health_check_failure_threshold": "100"}
    with RayCluster.run(head_env=patience) as cluster:
        yield cluster


@pytest_asyncio.fixture
async def dashboard_proxy(ray_cluster: RayCluster) -> AsyncIterator[BreakableProxy]:
    async with run_proxy(ray_cluster.address) as dashboard_proxy:
        yield dashboard_proxy


def spec_of(address: str, directory: Path, code: str, *arguments: str, **fields: Any) -> dict:
    """Return the spec of a run whose trainer is a Ray job.

    Args:
        address: Address of the Ray dashboard.
        directory: Directory in which the folder with the program is created.
        code: Python program of the job.
        arguments: Arguments of the program.
        fields: Further fields of the spec.
    """
    code_folder = directory / "code"
    code_folder.mkdir()
    (code_folder / "train.py").write_text(code)
    trainer = {
        "launcher": "ray_job",
        "command": ["python", "train.py", *arguments],
        "ready": {"log": "step 1", "within_s": 120},
        "stop": {"grace_s": 1},
    }
    return {
        "name": "trial",
        "workload": "sft",
        "cwd": str(code_folder),
        "ray": {"address": address},
        "components": {"trainer": trainer},
        **fields,
    }


def start_impatient(host_env: HostEnvironment, spec: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start a run that waits only some seconds for a Ray cluster that does not answer."""
    host_env.home.mkdir(parents=True, exist_ok=True)
    path = host_env.home / "spec.yaml"
    path.write_text(yaml.safe_dump(with_absolute_cwd(spec), sort_keys=False))
    return host_env.start("-c", IMPATIENT, str(path), log="train")


def only_run(host_env: HostEnvironment) -> Run:
    """Wait until a run has begun on the simulated host, and return the run."""

    def read_flow_run_id() -> str:
        paths = list((host_env.home / "live").glob("trial-*/owner.json"))
        return str(json.loads(paths[0].read_text())["flow_run_id"]) if paths else ""

    description = f"a run; so far:\n{host_env.log('train')}"
    return Run(host_env=host_env, flow_run_id=wait_for(read_flow_run_id, description))


def log_of(run: Run) -> list[str]:
    """Return the lines of the trainer's log, or an empty list if there is no log."""
    path = run.record_path().parent / "attempt-01" / "trainer.log"
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def steps_of(run: Run) -> list[int]:
    """Return the numbers of the steps in the trainer's log."""
    return [int(line.split()[1]) for line in log_of(run) if line.startswith("step ")]


def submission_of(run: Run) -> dict[str, Any]:
    """Return the content of `submission.json`, or an empty dict if there is none."""
    path = run.record_path().parent / "attempt-01" / "submission.json"
    submission: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return submission


def failure_of(run: Run) -> dict[str, Any]:
    """Check that the run has failed in its only attempt, and return the recorded failure."""
    record = run.record()
    [attempt] = record["attempts"]
    assert (record["state"], attempt["state"]) == ("failed", "failed"), record
    failure: dict[str, Any] = attempt["failure"]
    return failure


def event_names_of(run: Run) -> list[str]:
    """Return the names of the run's events, in their order."""
    return [event["event"] for event in run.events()]


def jobs_of(cluster: RayCluster) -> dict[str, str]:
    """Return a mapping from submission id to the status that Ray reports, for all jobs."""
    jobs = httpx.get(f"{cluster.address}/api/jobs/", trust_env=False, timeout=30).json()
    return {job["submission_id"]: job["status"] for job in jobs if job["submission_id"]}


def supervisor_of(cluster: RayCluster, submission_id: str) -> int:
    """Return the process id of the Ray actor that supervises a job."""

    async def ask() -> int:
        dashboard = Dashboard(cluster.address)
        try:
            supervisor = await dashboard.supervisor_of(submission_id)
        finally:
            await dashboard.aclose()
        assert supervisor is not None
        return supervisor.pid

    return asyncio.run(ask())


def reconciled(host_env: HostEnvironment) -> tuple[int, str]:
    """Run `muster reconcile`, and return its exit code and its output."""
    completed = subprocess.run(
        [sys.executable, "-m", "tasks.command", "reconcile"],
        cwd=ROOT,
        env=host_env.env,
        capture_output=True,
        text=True,
        timeout=180,
    )
    return completed.returncode, completed.stdout + completed.stderr


def living(pids: list[int]) -> list[int]:
    """Return the process ids whose processes still run. Zombies do not count as running."""
    return [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]


def is_stopped(pid: int) -> bool:
    """Return True if the process was stopped by SIGSTOP."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")


async def until_holds(condition: Any, description: str) -> None:
    """Wait in a thread until a condition holds.

    Meanwhile, the event loop of the test runs the proxy between Muster and the Ray dashboard.
    """
    await asyncio.to_thread(wait_for, condition, description)


def test_message_of_a_stalled_run_names_rank_node_and_frame_of_the_blocked_actor(
    host_env: HostEnvironment, ray_cluster: RayCluster, tmp_path: Path
) -> None:
    gang = {"nodes": 1, "gpus_per_node": 8}
    spec = spec_of(ray_cluster.address, tmp_path, BLOCKED, gang=gang, stall_after_s=5)
    process = start_impatient(host_env, spec)
    run = only_run(host_env)

    exit_code = process.wait(180)

    failure = failure_of(run)
    assert (exit_code, failure["kind"]) == (1, "STALLED"), host_env.log("train")
    actor_text = "it hangs in Rank.stuck_in_all_reduce (train.py:10), in "
    assert actor_text in failure["message"] and "(rank 3, node 127.0.0.1" in failure["message"]
    assert actor_text in run.state()[1]
    events = {event["event"]: event for event in run.events()}
    report = Path(events["component.diagnosed"]["path"]).read_text()
    _, lines, *_ = report.split("\n\n")
    assert lines.startswith("trainer, rank 3, node 127.0.0.1")


def test_job_of_a_killed_head_is_unknown_and_each_reconcile_asks_again(
    host_env: HostEnvironment, own_cluster: RayCluster, tmp_path: Path
) -> None:
    spec = spec_of(own_cluster.address, tmp_path, COUNTING, str(tmp_path / "never"))
    process = start_impatient(host_env, spec)
    run = only_run(host_env).wait_until_running()

    own_cluster.kill_head()
    exit_code = process.wait(120)
    first = host_env.reconcile_without_flow()
    second = host_env.reconcile_without_flow()

    failure = failure_of(run)
    assert exit_code == 1, host_env.log("train")
    assert (failure["kind"], failure["rule"]) == ("LOST_CONTACT", "contact-lost")
    assert own_cluster.address in failure["message"]
    assert f"the state of job {run.name}--a01 is unknown" in failure["message"]
    assert run.state()[0] == "FAILED"
    # The job stays registered, and its recorded status is `unknown`.
    assert submission_of(run)["status"] == "unknown"
    assert (host_env.home / "live" / run.name / "job-trainer.json").exists()
    for output in (first, second):
        assert "0 of 1 lost runs reconciled" in output


def test_killed_node_is_named_and_no_process_of_the_job_remains(
    host_env: HostEnvironment, own_cluster: RayCluster, tmp_path: Path
) -> None:
    gang = {"nodes": 2, "gpus_per_node": 8}
    run = host_env.start_run(spec_of(own_cluster.address, tmp_path, SPREAD, gang=gang))
    run.wait_until_running()
    [line] = [line for line in log_of(run) if line.startswith("helpers ")]
    helpers = [int(word) for word in line.split()[1:]]
    assert living(helpers) == helpers
    driver = submission_of(run)["driver_node_id"]
    [index] = [i for i, node in enumerate(own_cluster.nodes) if node.node_id == driver]

    own_cluster.kill_node(index)
    run.wait_for_state("FAILED")

    failure = failure_of(run)
    assert failure["kind"] == "NODE_LOST", failure
    assert "left the cluster" in failure["message"], failure
    assert f"node 127.0.0.1/{driver[:8]} left the cluster" in failure["message"], failure
    assert jobs_of(own_cluster) == {f"{run.name}--a01": "FAILED"}
    assert living(helpers) == []
    run.wait_until_gone()
    wait_for(lambda: not (host_env.home / "live" / run.name).exists(), "the registry is empty")


def test_node_that_does_not_answer_the_sweep_is_named_until_a_reconcile_reaches_it(
    host_env: HostEnvironment, patient_cluster: RayCluster, tmp_path: Path
) -> None:
    finished = tmp_path / "finished"
    spec = spec_of(patient_cluster.address, tmp_path, COUNTING, str(finished))
    process = start_impatient(host_env, spec)
    run = only_run(host_env).wait_until_running()
    driver = submission_of(run)["driver_node_id"]
    [silent_node] = [node for node in patient_cluster.nodes if node.node_id != driver]
    unseen_text = f"node 127.0.0.1/{silent_node.node_id[:8]} could not be checked"

    os.kill(silent_node.raylet, signal.SIGSTOP)
    try:
        finished.touch()
        exit_code = process.wait(180)
        result_while_stopped = reconciled(host_env)
        is_still_stopped = is_stopped(silent_node.raylet)
    finally:
        os.kill(silent_node.raylet, signal.SIGCONT)
    # The node answers again, but a process of the job may still run there. `sleep` takes the place
    # of this process: `sleep` has the environment variables of a process of the job.
    variables = {"MUSTER_RUN_ID": run.name, "MUSTER_ATTEMPT": "1", "MUSTER_COMPONENT": "trainer"}
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **variables}) as leftover:
        try:
            result_when_reached = reconciled(host_env)
            leftover_status = leftover.wait(30)
        finally:
            leftover.kill()
    last_result = reconciled(host_env)

    assert is_still_stopped
    kind, message = run.state()
    assert (exit_code, kind) == (0, "COMPLETED"), host_env.log("train")
    assert (
        unseen_text in message and "to check these nodes again, run `muster reconcile`" in message
    ), message
    assert run.record()["message"] == message
    [attempt] = run.record()["attempts"]
    assert unseen_text in attempt["ray"]["unseen"][0]
    assert unseen_text in host_env.log("train")
    status, output = result_while_stopped
    assert (status, unseen_text in output) == (1, True), result_while_stopped
    status, output = result_when_reached
    assert status == 0, result_when_reached
    assert f"checked node 127.0.0.1/{silent_node.node_id[:8]}" in output
    assert f"pid {leftover.pid}" in output
    assert leftover_status == -signal.SIGKILL
    assert last_result == (0, "nothing to do\n")


def test_run_with_a_killed_job_supervisor_fails_with_the_reason_of_ray(
    host_env: HostEnvironment, ray_cluster: RayCluster, tmp_path: Path
) -> None:
    gang = {"nodes": 2, "gpus_per_node": 8}
    run = host_env.start_run(spec_of(ray_cluster.address, tmp_path, SPREAD, gang=gang))
    run.wait_until_running()
    [line] = [line for line in log_of(run) if line.startswith("helpers ")]
    helpers = [int(word) for word in line.split()[1:]]

    os.kill(supervisor_of(ray_cluster, f"{run.name}--a01"), signal.SIGKILL)
    run.wait_for_state("FAILED")

    failure = failure_of(run)
    failure_text = f"{failure['message']} {failure['line']}".lower()
    assert "supervisor" in failure_text, failure
    assert jobs_of(ray_cluster)[f"{run.name}--a01"] == "FAILED"
    assert living(helpers) == []
    run.wait_until_gone()
    wait_for(lambda: not (host_env.home / "live" / run.name).exists(), "the registry is empty")


@pytest.mark.asyncio
async def test_run_survives_a_temporary_loss_of_the_dashboard(
    host_env: HostEnvironment,
    ray_cluster: RayCluster,
    dashboard_proxy: BreakableProxy,
    tmp_path: Path,
) -> None:
    finished = tmp_path / "finished"
    spec = spec_of(dashboard_proxy.address, tmp_path, COUNTING, str(finished))
    run = await asyncio.to_thread(host_env.start_run, spec)
    await asyncio.to_thread(run.wait_until_running)

    await dashboard_proxy.stop()
    await until_holds(lambda: "contact.lost" in event_names_of(run), "the cut is noticed")
    steps_before = len(steps_of(run))
    await asyncio.sleep(3.0)  # The network to the Ray dashboard is cut for 3 s.
    await dashboard_proxy.start()
    await until_holds(lambda: "contact.back" in event_names_of(run), "the contact is back")
    await until_holds(lambda: len(steps_of(run)) > steps_before + 20, "the log grows")
    finished.touch()
    await asyncio.to_thread(run.wait_for_state, "COMPLETED")

    steps = steps_of(run)
    assert steps == list(range(len(steps)))
    assert log_of(run)[-1] == f"done after {len(steps)}"
    assert event_names_of(run).count("job.submitted") == 1
    assert [a["number"] for a in run.record()["attempts"]] == [1]


@pytest.mark.asyncio
async def test_loss_of_the_dashboard_during_the_submit_creates_only_one_job(
    host_env: HostEnvironment,
    ray_cluster: RayCluster,
    dashboard_proxy: BreakableProxy,
    tmp_path: Path,
) -> None:
    finished = tmp_path / "finished"
    dashboard_proxy.swallows = b"POST /api/jobs/"
    spec = spec_of(dashboard_proxy.address, tmp_path, COUNTING, str(finished))
    run = await asyncio.to_thread(host_env.start_run, spec)

    await until_holds(lambda: b"POST /api/jobs/" in dashboard_proxy.passed, "the submit is sent")
    await dashboard_proxy.stop()
    await asyncio.sleep(3.0)  # The network to the Ray dashboard is cut for 3 s.
    await dashboard_proxy.start()
    await asyncio.to_thread(run.wait_until_running)
    finished.touch()
    await asyncio.to_thread(run.wait_for_state, "COMPLETED")

    steps = steps_of(run)
    assert steps == list(range(len(steps)))
    assert dashboard_proxy.passed[b"POST /api/jobs/"] == 1
    submission_ids = [job for job in jobs_of(ray_cluster) if job.startswith(run.name)]
    assert submission_ids == [f"{run.name}--a01"]
    assert [a["number"] for a in run.record()["attempts"]] == [1]
