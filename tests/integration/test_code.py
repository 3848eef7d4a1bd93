"""The code that was submitted is the code that runs: on a real server, through real workers, while
somebody goes on with the project."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.gang_pool import GangPool, host
from tests.support.ground import ROOT, Ground, Run, Server, until
from tests.support.prefect_api import ask
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
    """Of a user: a package, a program that uses it, and data that git ignores."""
    root = tmp_path / "project"
    for folder in ("lib", "data"):
        (root / folder).mkdir(parents=True)
    (root / ".gitignore").write_text("data/\n")
    (root / "data" / "set.txt").write_text("data")
    (root / "train.py").write_text(TRAIN)
    (root / "muster.yaml").write_text(yaml.safe_dump(SPEC))
    subprocess.run(("git", "init", "-q", str(root)), check=True)
    edit(root, "old")
    return root


def edit(project: Path, word: str) -> None:
    (project / "lib" / "words.py").write_text(f"WORD = {word!r}\n")


@pytest.fixture
def pool(prefect_url: str, tmp_path: Path) -> Iterator[GangPool]:
    """A pool without a worker, through which specs are submitted from a host of its own."""
    ground = host("n1", tmp_path / "home", prefect_url)
    pool = GangPool(ground=ground, server=Server(tmp_path), name="code", nodes={})
    pool.set_up()
    flow = ground.post("/flows/", name="train")["id"]
    any_spec = {"name": "any", "flow_id": flow, "work_pool_name": "code", "pull_steps": []}
    ground.post("/deployments/", **any_spec, entrypoint="flows.train.train")
    yield pool
    pool.empty()
    ground.clear()
    ask("DELETE", f"{ground.api}/work_pools/code")


def muster(ground: Ground, *words: str) -> str:
    done = subprocess.run(
        (sys.executable, "-m", "tasks.command", *words),
        cwd=ROOT,
        env=ground.env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def newest(pool: GangPool) -> Run:
    [run, *_] = pool.ground.post(
        "/flow_runs/filter",
        flows={"name": {"any_": ["train"]}},
        work_pools={"name": {"any_": ["code"]}},
        sort="EXPECTED_START_TIME_DESC",
    )
    pool.note(run["id"], run["parameters"]["spec"])
    return Run(ground=pool.ground, flow_run_id=run["id"])


def said(home: Path, run: Run) -> list[str]:
    """What each attempt of the run wrote."""
    name = run.flow_run()["name"]
    logs = sorted((home / "runs" / name).glob("attempt-*/trainer.log"))
    return [log.read_text().strip() for log in logs]


def test_a_run_has_the_code_of_its_submission_in_each_attempt_on_a_host_with_a_home_of_its_own(
    pool: GangPool, project: Path, tmp_path: Path
) -> None:
    there = host("n2", tmp_path / "other home", pool.ground.api)
    pool.patch(is_paused=True)
    muster(pool.ground, "submit", str(project / "muster.yaml"))
    run = newest(pool)
    edit(project, "new")
    pool.start_worker(on=there)
    try:
        pool.patch(is_paused=False)
        run.until_state("COMPLETED", "FAILED", "CRASHED")

        assert said(there.home, run) == ["ran old data"] * 2, there.log("worker-n2")
        record = json.loads((there.home / "runs" / run.name / "run.json").read_text())
        made_of = record["provenance"]
        assert (made_of["project"], made_of["host"]) == (str(project), "n2")
        assert run.flow_run()["labels"]["muster.code"] == made_of["tree"]
        assert not (pool.ground.home / "runs").exists()
    finally:
        there.clear()


@pytest.mark.thorough
def test_runs_of_a_deployment_have_its_code_on_each_host_of_one_home_and_without_the_project(
    pool: GangPool, project: Path, tmp_path: Path
) -> None:
    muster(pool.ground, "deploy", str(project / "muster.yaml"))
    shutil.rmtree(project)
    deployment = pool.ground.get("/deployments/name/train/trial")["id"]
    for name in ("n1", "n2"):
        other = host(name, pool.ground.home, pool.ground.api)
        pool.start_worker(on=other)
        try:
            run = pool.ground.post(f"/deployments/{deployment}/create_flow_run")
            pool.note(run["id"], run["parameters"]["spec"])
            started = Run(ground=pool.ground, flow_run_id=run["id"])
            started.until_state("COMPLETED", "FAILED", "CRASHED")

            assert said(other.home, started) == ["ran old"] * 2, other.log(f"worker-{name}")
            assert started.record()["provenance"]["host"] == name
            assert "muster.code" in started.flow_run()["labels"]
        finally:
            other.clear()


@pytest.mark.thorough
def test_the_second_stage_of_a_pipeline_has_the_code_of_its_start(
    pool: GangPool, project: Path
) -> None:
    stages = [{"name": name, "spec": "muster.yaml"} for name in ("first", "second")]
    (project / "two.yaml").write_text(yaml.safe_dump({"name": "two", "stages": stages}))
    pipeline = pool.ground.start("-m", "flows.pipeline", str(project / "two.yaml"), log="pipeline")

    def first() -> bool:
        assert pipeline.poll() is None, pool.ground.log("pipeline")
        return "stage first: queued" in pool.ground.log("pipeline")

    until(first, "the first stage is queued")
    edit(project, "new")
    pool.start_worker()

    assert pipeline.wait(200) == 0, pool.ground.log("pipeline")
    logs = sorted(pool.ground.home.glob("runs/*/attempt-*/trainer.log"))
    assert [log.read_text() for log in logs] == ["ran old data\n"] * 4


@pytest.mark.thorough
def test_a_ray_job_has_the_code_of_its_submission_and_starts_on_a_node_of_its_gang(
    pool: GangPool, project: Path, ray_cluster: RayCluster
) -> None:
    train = TRAIN.replace("sys.exit(", "print('on', os.environ['MUSTER_NODES']) # ")
    (project / "train.py").write_text(train)
    trainer = {"launcher": "ray_job", "command": ["python", "train.py"]}
    more = {"gang": {"gpus_per_node": 1}, "ray": {"address": ray_cluster.address}}
    spec = {**SPEC, **more, "components": {"trainer": trainer}}
    (project / "muster.yaml").write_text(yaml.safe_dump(spec))
    muster(pool.ground, "submit", str(project / "muster.yaml"))
    run = newest(pool)
    edit(project, "new")
    pool.start_worker()

    run.until_state("COMPLETED", "FAILED", "CRASHED")

    [log] = said(pool.ground.home, run)
    assert log.splitlines()[0] == "ran old", log
    node = log.rpartition("on 127.0.0.1/")[2].strip()
    submitted = run.record()["attempts"][0]["ray"]["submission_id"]
    job = ask("GET", f"{ray_cluster.address}/api/jobs/{submitted}")
    assert node and job["driver_node_id"].startswith(node)
