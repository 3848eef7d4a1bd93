"""A run executes the code that was submitted, even if the user edits the project afterwards.

The tests use a real Prefect server and real workers.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tasks.train.runs import ENDED_STATES
from tasks.train.runs import Run as Listed
from tests.support.gang_pool import GangPool, host
from tests.support.host_environment import ROOT, HostEnvironment, Run, Server, wait_for
from tests.support.prefect_api import send_request
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = """
import os, sys
import lib.words
print("ran", lib.words.WORD, *(open("data/set.txt") if os.path.exists("data") else ""), flush=True)
sys.exit(int(os.environ["MUSTER_ATTEMPT"] == "1"))
"""
SPEC = {
    "name": "trial",
    "workload": "sft",
    "components": {"trainer": {"command": [sys.executable, "train.py"]}},
    "retry": {"UNKNOWN": {"attempts": 2, "delay_s": 1}},
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a user's project: a package, a program that imports it, and data that git ignores."""
    root = tmp_path / "project"
    for folder in ("lib", "data"):
        (root / folder).mkdir(parents=True)
    (root / ".gitignore").write_text("data/\n")
    (root / "data" / "set.txt").write_text("data")
    (root / "train.py").write_text(TRAIN)
    (root / "muster.yaml").write_text(yaml.safe_dump(SPEC))
    subprocess.run(("git", "init", "-q", str(root)), check=True)
    write_word(root, "old")
    return root


def write_word(project: Path, word: str) -> None:
    """Change the project's package, so that the training program prints the given word."""
    (project / "lib" / "words.py").write_text(f"WORD = {word!r}\n")


@pytest.fixture
def pool(prefect_url: str, tmp_path: Path) -> Iterator[GangPool]:
    """Yield a pool without a worker; runs are submitted from a host with its own MUSTER_HOME."""
    host_env = host("n1", tmp_path / "home", prefect_url)
    pool = GangPool(host_env=host_env, server=Server(tmp_path), name="code", nodes={})
    pool.set_up()
    flow = host_env.post("/flows/", name="train")["id"]
    any_spec = {"name": "any", "flow_id": flow, "work_pool_name": "code", "pull_steps": []}
    host_env.post("/deployments/", **any_spec, entrypoint="flows.train.train")
    yield pool
    pool.cancel_all()
    host_env.clear()
    send_request("DELETE", f"{host_env.api}/work_pools/code")


def run_muster(host_env: HostEnvironment, *arguments: str) -> str:
    """Run `muster` with the arguments on a host, and return its standard output."""
    done = subprocess.run(
        (sys.executable, "-m", "tasks.command", *arguments),
        cwd=ROOT,
        env=host_env.env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def find_newest_run(pool: GangPool) -> Run:
    """Return the most recently submitted run of the pool."""
    [run, *_] = pool.host_env.post(
        "/flow_runs/filter",
        flows={"name": {"any_": ["train"]}},
        work_pools={"name": {"any_": ["code"]}},
        sort="EXPECTED_START_TIME_DESC",
    )
    pool.record_run(run["id"], run["parameters"]["spec"])
    return Run(host_env=pool.host_env, flow_run_id=run["id"])


def read_trainer_logs(home: Path, run: Run) -> list[str]:
    """Return the text that the trainer of each attempt printed, in the order of the attempts."""
    name = run.flow_run()["name"]
    logs = sorted((home / "runs" / name).glob("attempt-*/trainer.log"))
    return [log.read_text().strip() for log in logs]


@pytest.mark.thorough
def test_each_attempt_on_another_host_has_the_code_of_the_submission(
    pool: GangPool, project: Path, tmp_path: Path
) -> None:
    other_host = host("n2", tmp_path / "other home", pool.host_env.api)
    pool.patch(is_paused=True)
    run_muster(pool.host_env, "submit", str(project / "muster.yaml"))
    run = find_newest_run(pool)
    write_word(project, "new")
    pool.start_worker(on=other_host)
    try:
        pool.patch(is_paused=False)
        run.wait_for_state("COMPLETED", "FAILED", "CRASHED")

        assert read_trainer_logs(other_host.home, run) == ["ran old data"] * 2, other_host.log(
            "worker-n2"
        )
        record = json.loads((other_host.home / "runs" / run.name / "run.json").read_text())
        provenance = record["provenance"]
        assert (provenance["project"], provenance["host"]) == (str(project), "n2")
        assert run.flow_run()["labels"]["muster.code"] == provenance["tree"]
        assert not (pool.host_env.home / "runs").exists()
    finally:
        other_host.clear()


@pytest.mark.thorough
def test_hosts_that_share_a_home_run_deployed_code_without_the_project(
    pool: GangPool, project: Path, tmp_path: Path
) -> None:
    run_muster(pool.host_env, "deploy", str(project / "muster.yaml"))
    shutil.rmtree(project)
    deployment = pool.host_env.get("/deployments/name/train/trial")["id"]
    for name in ("n1", "n2"):
        host_ground = host(name, pool.host_env.home, pool.host_env.api)
        pool.start_worker(on=host_ground)
        try:
            run = pool.host_env.post(f"/deployments/{deployment}/create_flow_run")
            pool.record_run(run["id"], run["parameters"]["spec"])
            started = Run(host_env=pool.host_env, flow_run_id=run["id"])
            started.wait_for_state("COMPLETED", "FAILED", "CRASHED")

            assert read_trainer_logs(host_ground.home, started) == ["ran old"] * 2, host_ground.log(
                f"worker-{name}"
            )
            assert started.record()["provenance"]["host"] == name
            assert "muster.code" in started.flow_run()["labels"]
        finally:
            host_ground.clear()


@pytest.mark.thorough
def test_second_stage_of_a_pipeline_has_the_code_of_the_pipelines_start(
    pool: GangPool, project: Path
) -> None:
    stages = [{"name": name, "spec": "muster.yaml"} for name in ("first", "second")]
    (project / "two.yaml").write_text(yaml.safe_dump({"name": "two", "stages": stages}))
    pipeline = pool.host_env.start(
        "-m", "flows.pipeline", str(project / "two.yaml"), log="pipeline"
    )

    def is_first_stage_queued() -> bool:
        assert pipeline.poll() is None, pool.host_env.log("pipeline")
        return "stage first: queued" in pool.host_env.log("pipeline")

    wait_for(is_first_stage_queued, "the first stage is queued")
    write_word(project, "new")
    pool.start_worker()

    assert pipeline.wait(200) == 0, pool.host_env.log("pipeline")
    logs = sorted(pool.host_env.home.glob("runs/*/attempt-*/trainer.log"))
    assert [log.read_text() for log in logs] == ["ran old data\n"] * 4


@pytest.mark.thorough
def test_ray_job_has_the_submitted_code_and_starts_on_a_node_of_its_gang(
    pool: GangPool, project: Path, ray_cluster: RayCluster
) -> None:
    train = TRAIN.replace("sys.exit(", "print('on', os.environ['MUSTER_NODES']) # ")
    (project / "train.py").write_text(train)
    trainer = {"launcher": "ray_job", "command": ["python", "train.py"]}
    overrides = {"gang": {"gpus_per_node": 1}, "ray": {"address": ray_cluster.address}}
    spec = {**SPEC, **overrides, "components": {"trainer": trainer}}
    (project / "muster.yaml").write_text(yaml.safe_dump(spec))
    run_muster(pool.host_env, "submit", str(project / "muster.yaml"))
    run = find_newest_run(pool)
    write_word(project, "new")
    pool.start_worker()

    run.wait_for_state("COMPLETED", "FAILED", "CRASHED")

    [log] = read_trainer_logs(pool.host_env.home, run)
    *_, ran, on = log.splitlines()
    node = on.removeprefix("on 127.0.0.1/")
    submission_id = run.record()["attempts"][0]["ray"]["submission_id"]
    job = send_request("GET", f"{ray_cluster.address}/api/jobs/{submission_id}")
    assert (ran, job["driver_node_id"][:8]) == ("ran old", node), log


#: A program that calls each function of Muster's Python client and prints the results as JSON.
CLIENT = """
import json, sys, time
from muster import BadArgument, find, submit
import tasks
assert tasks.OWNER == "project"
run = submit(sys.argv[1], overrides=["tags=[mine]"], queue="urgent")
results = {"id": run.run_id, "state": run.wait(within_s=200), "tags": run.seen.tags}
results |= {"rows": run.metrics(), "logs": run.logs(), "first": run.logs("trainer", attempt=1)}
results |= {"record": run.record(), "story": run.explain(), "latest": find().run_id}
other = submit(json.loads(sys.argv[2]))
results["named"] = find(other.run_id[:-1]).run_id == other.run_id
try:
    other.wait(within_s=0.1)
except TimeoutError:
    results["waits"] = other.state
# `muster show --diff` compares records, and a run has no record before it starts.
while other.state != "running":
    time.sleep(0.5)
other.cancel()
results["cancelled"] = other.wait(within_s=100)
try:
    other.cancel()
except BadArgument as error:
    results["refused"] = str(error)
print(json.dumps(results))
"""
FIGURES = """
import os
with open(os.environ["FIGURES"], "w") as f:
    f.write('{"step": 1, "reward": 0.5, "time/step": 2.0}\\n')
"""


@pytest.mark.thorough
def test_python_client_and_json_output_do_what_the_documents_say(
    pool: GangPool, project: Path, tmp_path: Path
) -> None:
    (project / "train.py").write_text(FIGURES + TRAIN)
    figures_file = "${attempt.dir}/figures.jsonl"
    figures = {
        "env": {"FIGURES": figures_file},
        "progress": {"jsonl": figures_file, "step": "step"},
    }
    spec = project / "muster.yaml"
    spec.write_text(yaml.safe_dump({**SPEC, **figures}))
    sleeper = {**SPEC, "components": {"trainer": {"command": ["sleep", "7000"]}}}
    pool.start_worker()

    (project / "tasks.py").write_text("OWNER = 'project'\n")
    package = tmp_path / "site-packages" / "muster"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "deployments" / "muster_package.py", package / "__init__.py")
    environment = {**pool.host_env.env, "PYTHONPATH": str(package.parent)}

    command = (sys.executable, "-c", CLIENT, str(spec), json.dumps(sleeper))
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=280
    )

    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout)
    assert (results["state"], results["tags"], results["latest"]) == (
        "completed",
        ["mine"],
        results["id"],
    )
    assert [(row["step"], row["attempt"]) for row in results["rows"]] == [(1, 2)]
    assert results["logs"] == results["first"] == {"trainer": ["ran old data"]}
    assert results["record"]["run_id"] == results["id"] and results["id"] in results["story"]
    assert results["named"] and results["waits"] not in ENDED_STATES
    assert results["cancelled"] == "cancelled" and "has ended" in results["refused"]

    run, other = results["id"], json.loads(run_muster(pool.host_env, "ls", "--json"))[0]["run_id"]
    listed_fields = {*Listed.__dataclass_fields__}
    slow_fields = {"step", "parts", "gpus", "requests", "said"}
    for arguments, keys in (
        (("show", run), {*results["record"]}),
        (("show", "--diff", run, other), None),
        (("why", run), {*listed_fields, "failure", "slow"}),
        (("explain", run), {*listed_fields, "story"}),
        (("submit", str(spec)), {"run_id", "flow_run_id", "page"}),
        (("cancel", "latest"), listed_fields),
        (("queue", "--pool", "code"), {"line", "nodes", "troubles"}),
    ):
        answer = json.loads(run_muster(pool.host_env, *arguments, "--json"))
        assert keys is None or keys <= answer.keys(), (arguments, answer)
        assert arguments[0] != "why" or slow_fields == answer["slow"].keys()
    assert [
        json.loads(line)["step"]
        for line in run_muster(pool.host_env, "metrics", run).split("\n")[:-1]
    ] == [1]
