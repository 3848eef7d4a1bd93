"""Ray's own parts fail under a run: no job is lost, none is doubled, and what nobody can know is
said to be unknown and asked about again.
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
from tests.support.ground import ROOT, Ground, Run, Server, in_checkout, until
from tests.support.ray_cluster import RayCluster
from tests.support.ray_jobs import Wire, wire_to

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

#: `flows.train`, which gives a cluster up after seconds in place of minutes.
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
#: Counts until a file is there.
COUNTING = """
import os, sys, time
step = 0
while not os.path.exists(sys.argv[1]):
    print("step", step, flush=True)
    step += 1
    time.sleep(0.2)
print("done after", step, flush=True)
"""
#: An actor on each node and the driver itself, all with a helper in a session of its own.
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
#: An actor that waits for ever, and a driver that waits for it.
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
def ground(server: Server, tmp_path: Path) -> Iterator[Ground]:
    ground = Ground(home=tmp_path / "home", api=server.api)
    yield ground
    ground.clear()


@pytest.fixture
def own_cluster() -> Iterator[RayCluster]:
    """One that a test may break."""
    with RayCluster.started(is_fast_to_notice=True) as cluster:
        yield cluster


@pytest.fixture
def patient_cluster() -> Iterator[RayCluster]:
    """One that a test may break, and that counts no node as dead while it does."""
    patience = {"RAY_health_check_failure_threshold": "100"}
    with RayCluster.started(head_env=patience) as cluster:
        yield cluster


@pytest_asyncio.fixture
async def wire(ray_cluster: RayCluster) -> AsyncIterator[Wire]:
    async with wire_to(ray_cluster.address) as wire:
        yield wire


def spec_of(address: str, directory: Path, code: str, *arguments: str, **more: Any) -> dict:
    """A run whose trainer is a Ray job that executes some code."""
    place = directory / "code"
    place.mkdir()
    (place / "train.py").write_text(code)
    trainer = {
        "launcher": "ray_job",
        "command": ["python", "train.py", *arguments],
        "ready": {"log": "step 1", "within_s": 120},
        "stop": {"grace_s": 1},
    }
    return {
        "name": "trial",
        "workload": "sft",
        "cwd": str(place),
        "ray": {"address": address},
        "components": {"trainer": trainer},
        **more,
    }


def start_impatient(ground: Ground, spec: dict[str, Any]) -> subprocess.Popen[bytes]:
    ground.home.mkdir(parents=True, exist_ok=True)
    path = ground.home / "spec.yaml"
    path.write_text(yaml.safe_dump(in_checkout(spec), sort_keys=False))
    return ground.start("-c", IMPATIENT, str(path), log="train")


def only_run(ground: Ground) -> Run:
    """The one that has begun on this ground."""

    def begun() -> str:
        found = list((ground.home / "live").glob("trial-*/owner.json"))
        return str(json.loads(found[0].read_text())["flow_run_id"]) if found else ""

    return Run(ground=ground, flow_run_id=until(begun, f"a run; so far:\n{ground.log('train')}"))


def log_of(run: Run) -> list[str]:
    path = run.record_path().parent / "attempt-01" / "trainer.log"
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def steps_of(run: Run) -> list[int]:
    return [int(line.split()[1]) for line in log_of(run) if line.startswith("step ")]


def submission_of(run: Run) -> dict[str, Any]:
    path = run.record_path().parent / "attempt-01" / "submission.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def failure_of(run: Run) -> dict[str, Any]:
    record = run.record()
    [attempt] = record["attempts"]
    assert (record["state"], attempt["state"]) == ("failed", "failed"), record
    found: dict[str, Any] = attempt["failure"]
    return found


def names_of(run: Run) -> list[str]:
    return [event["event"] for event in run.events()]


def jobs_of(cluster: RayCluster) -> dict[str, str]:
    """`status[submission id]`, by Ray's own word."""
    jobs = httpx.get(f"{cluster.address}/api/jobs/", trust_env=False, timeout=30).json()
    return {job["submission_id"]: job["status"] for job in jobs if job["submission_id"]}


def supervisor_of(cluster: RayCluster, submission_id: str) -> int:
    """The pid of Ray's own actor that runs a job."""

    async def ask() -> int:
        dashboard = Dashboard(cluster.address)
        try:
            found = await dashboard.supervisor_of(submission_id)
        finally:
            await dashboard.aclose()
        assert found is not None
        return found.pid

    return asyncio.run(ask())


def reconciled(ground: Ground) -> tuple[int, str]:
    """The exit status of `muster reconcile`, and what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "tasks.command", "reconcile"],
        cwd=ROOT,
        env=ground.env,
        capture_output=True,
        text=True,
        timeout=180,
    )
    return done.returncode, done.stdout + done.stderr


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")


async def until_so(is_so: Any, what: str) -> None:
    """`until`, while the test's loop goes on to serve its wire."""
    await asyncio.to_thread(until, is_so, what)


def test_a_blocked_actor_is_named_by_rank_node_and_frame_in_the_runs_message(
    ground: Ground, ray_cluster: RayCluster, tmp_path: Path
) -> None:
    gang = {"nodes": 1, "gpus_per_node": 8}
    spec = spec_of(ray_cluster.address, tmp_path, BLOCKED, gang=gang, stall_after_s=5)
    process = start_impatient(ground, spec)
    run = only_run(ground)

    exit_code = process.wait(180)

    failure = failure_of(run)
    assert (exit_code, failure["kind"]) == (1, "STALLED"), ground.log("train")
    named = "it hangs in Rank.stuck_in_all_reduce (train.py:10), in "
    assert named in failure["message"] and "(rank 3, node 127.0.0.1" in failure["message"]
    assert named in run.state()[1]
    events = {event["event"]: event for event in run.events()}
    report = Path(events["component.diagnosed"]["path"]).read_text()
    _, lines, *_ = report.split("\n\n")
    assert lines.startswith("trainer, rank 3, node 127.0.0.1")


def test_a_head_that_is_killed_is_lost_contact_and_its_job_is_asked_about_again(
    ground: Ground, own_cluster: RayCluster, tmp_path: Path
) -> None:
    spec = spec_of(own_cluster.address, tmp_path, COUNTING, str(tmp_path / "never"))
    process = start_impatient(ground, spec)
    run = only_run(ground).until_running()

    own_cluster.kill_head()
    exit_code = process.wait(120)
    first = ground.reconcile_without_flow()
    again = ground.reconcile_without_flow()

    failure = failure_of(run)
    assert exit_code == 1, ground.log("train")
    assert (failure["kind"], failure["rule"]) == ("LOST_CONTACT", "contact-lost")
    assert own_cluster.address in failure["message"]
    assert f"what became of job {run.name}--a01 is not known" in failure["message"]
    assert run.state()[0] == "FAILED"
    # It is not forgotten, nor called ended.
    assert submission_of(run)["status"] == "unknown"
    assert (ground.home / "live" / run.name / "job-trainer.json").exists()
    for said in (first, again):
        assert "0 of 1 lost runs reconciled" in said


def test_a_node_that_is_killed_is_named_and_nothing_of_the_job_is_left(
    ground: Ground, own_cluster: RayCluster, tmp_path: Path
) -> None:
    gang = {"nodes": 2, "gpus_per_node": 8}
    run = ground.start_run(spec_of(own_cluster.address, tmp_path, SPREAD, gang=gang))
    run.until_running()
    [line] = [line for line in log_of(run) if line.startswith("helpers ")]
    helpers = [int(word) for word in line.split()[1:]]
    assert living(helpers) == helpers
    driver = submission_of(run)["driver_node_id"]
    [index] = [i for i, node in enumerate(own_cluster.nodes) if node.node_id == driver]

    own_cluster.kill_node(index)
    run.until_state("FAILED")

    failure = failure_of(run)
    assert failure["kind"] == "NODE_LOST", failure
    assert "has left the cluster" in failure["message"], failure
    assert f"node 127.0.0.1/{driver[:8]} has left the cluster" in failure["message"], failure
    assert jobs_of(own_cluster) == {f"{run.name}--a01": "FAILED"}
    assert living(helpers) == []
    run.until_gone()
    until(lambda: not (ground.home / "live" / run.name).exists(), "the registry is empty")


def test_a_node_that_does_not_answer_the_sweep_is_named_and_asked_again_until_it_does(
    ground: Ground, patient_cluster: RayCluster, tmp_path: Path
) -> None:
    finished = tmp_path / "finished"
    spec = spec_of(patient_cluster.address, tmp_path, COUNTING, str(finished))
    process = start_impatient(ground, spec)
    run = only_run(ground).until_running()
    driver = submission_of(run)["driver_node_id"]
    [silent] = [node for node in patient_cluster.nodes if node.node_id != driver]
    named = f"node 127.0.0.1/{silent.node_id[:8]} was not seen"

    os.kill(silent.raylet, signal.SIGSTOP)
    try:
        finished.touch()
        exit_code = process.wait(180)
        meanwhile = reconciled(ground)
        still_stopped = is_stopped(silent.raylet)
    finally:
        os.kill(silent.raylet, signal.SIGCONT)
    # What it may have gone on to run there.
    tag = {"MUSTER_RUN_ID": run.name, "MUSTER_ATTEMPT": "1", "MUSTER_COMPONENT": "trainer"}
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **tag}) as straggler:
        try:
            at_last = reconciled(ground)
            ended_by = straggler.wait(30)
        finally:
            straggler.kill()
    after = reconciled(ground)

    assert still_stopped
    kind, message = run.state()
    assert (exit_code, kind) == (0, "COMPLETED"), ground.log("train")
    assert named in message and "`muster reconcile` asks again" in message, message
    assert run.record()["message"] == message
    [attempt] = run.record()["attempts"]
    assert named in attempt["ray"]["unseen"][0]
    assert named in ground.log("train")
    assert (meanwhile[0], named in meanwhile[1]) == (1, True), meanwhile
    assert at_last[0] == 0, at_last
    assert f"node 127.0.0.1/{silent.node_id[:8]} was seen" in at_last[1]
    assert f"pid {straggler.pid}" in at_last[1]
    assert ended_by == -signal.SIGKILL
    assert after == (0, "nothing to do\n")


def test_a_job_supervisor_that_is_killed_fails_the_run_with_rays_own_reason(
    ground: Ground, ray_cluster: RayCluster, tmp_path: Path
) -> None:
    gang = {"nodes": 2, "gpus_per_node": 8}
    run = ground.start_run(spec_of(ray_cluster.address, tmp_path, SPREAD, gang=gang))
    run.until_running()
    [line] = [line for line in log_of(run) if line.startswith("helpers ")]
    helpers = [int(word) for word in line.split()[1:]]

    os.kill(supervisor_of(ray_cluster, f"{run.name}--a01"), signal.SIGKILL)
    run.until_state("FAILED")

    failure = failure_of(run)
    said = f"{failure['message']} {failure['line']}".lower()
    assert "supervisor" in said, failure
    assert jobs_of(ray_cluster)[f"{run.name}--a01"] == "FAILED"
    assert living(helpers) == []
    run.until_gone()
    until(lambda: not (ground.home / "live" / run.name).exists(), "the registry is empty")


@pytest.mark.asyncio
async def test_a_dashboard_that_is_cut_off_for_a_while_costs_the_run_nothing(
    ground: Ground, ray_cluster: RayCluster, wire: Wire, tmp_path: Path
) -> None:
    finished = tmp_path / "finished"
    spec = spec_of(wire.address, tmp_path, COUNTING, str(finished))
    run = await asyncio.to_thread(ground.start_run, spec)
    await asyncio.to_thread(run.until_running)

    await wire.cut()
    await until_so(lambda: "contact.lost" in names_of(run), "the cut is noticed")
    before = len(steps_of(run))
    await asyncio.sleep(3.0)  # How long the cut lasts.
    await wire.mend()
    await until_so(lambda: "contact.back" in names_of(run), "the contact is back")
    await until_so(lambda: len(steps_of(run)) > before + 20, "the log goes on")
    finished.touch()
    await asyncio.to_thread(run.until_state, "COMPLETED")

    steps = steps_of(run)
    assert steps == list(range(len(steps)))
    assert log_of(run)[-1] == f"done after {len(steps)}"
    assert names_of(run).count("job.submitted") == 1
    assert [a["number"] for a in run.record()["attempts"]] == [1]


@pytest.mark.asyncio
async def test_a_dashboard_that_is_cut_off_during_the_submit_gets_one_job(
    ground: Ground, ray_cluster: RayCluster, wire: Wire, tmp_path: Path
) -> None:
    finished = tmp_path / "finished"
    wire.swallows = b"POST /api/jobs/"
    spec = spec_of(wire.address, tmp_path, COUNTING, str(finished))
    run = await asyncio.to_thread(ground.start_run, spec)

    await until_so(lambda: b"POST /api/jobs/" in wire.passed, "the submit is on its way")
    await wire.cut()
    await asyncio.sleep(3.0)  # How long the cut lasts.
    await wire.mend()
    await asyncio.to_thread(run.until_running)
    finished.touch()
    await asyncio.to_thread(run.until_state, "COMPLETED")

    steps = steps_of(run)
    assert steps == list(range(len(steps)))
    assert wire.passed[b"POST /api/jobs/"] == 1
    found = [job for job in jobs_of(ray_cluster) if job.startswith(run.name)]
    assert found == [f"{run.name}--a01"]
    assert [a["number"] for a in run.record()["attempts"]] == [1]
