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

from tasks.train.finding_runs import ENDED_STATES
from tasks.train.finding_runs import Run as Listed
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
    *_, ran, on = log.splitlines()
    node = on.removeprefix("on 127.0.0.1/")
    submitted = run.record()["attempts"][0]["ray"]["submission_id"]
    job = ask("GET", f"{ray_cluster.address}/api/jobs/{submitted}")
    assert (ran, job["driver_node_id"][:8]) == ("ran old", node), log


#: Each verb of the client, in a process that knows nothing else of Muster.
CLIENT = """
import json, sys
from tasks.client import find, submit
from tasks.spec.errors import BadArgument

run = submit(sys.argv[1], overrides=["tags=[mine]"], queue="urgent")
found = {"id": run.run_id, "state": run.wait(within_s=200), "tags": run.seen.tags}
found |= {"rows": run.metrics(), "logs": run.logs(), "first": run.logs("trainer", attempt=1)}
found |= {"record": run.record(), "story": run.explain(), "latest": find().run_id}
other = submit(json.loads(sys.argv[2]))
found["named"] = find(other.run_id[:-1]).run_id == other.run_id
try:
    other.wait(within_s=0.1)
except TimeoutError:
    found["waits"] = other.state
other.cancel()
found["cancelled"] = other.wait(within_s=100)
try:
    other.cancel()
except BadArgument as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""
FIGURES = """
import os
with open(os.environ["FIGURES"], "w") as f:
    f.write('{"step": 1, "reward": 0.5, "time/step": 2.0}\\n')
"""


@pytest.mark.thorough
def test_each_verb_of_the_client_and_of_json_does_what_is_documented(
    pool: GangPool, project: Path, tmp_path: Path
) -> None:
    (project / "train.py").write_text(FIGURES + TRAIN)
    file = "${attempt.dir}/figures.jsonl"
    figures = {"env": {"FIGURES": file}, "progress": {"jsonl": file, "step": "step"}}
    spec = project / "muster.yaml"
    spec.write_text(yaml.safe_dump({**SPEC, **figures}))
    sleeper = {**SPEC, "components": {"trainer": {"command": ["sleep", "7000"]}}}
    pool.start_worker()

    command = (sys.executable, "-c", CLIENT, str(spec), json.dumps(sleeper))
    done = subprocess.run(
        command, cwd=ROOT, env=pool.ground.env, capture_output=True, text=True, timeout=280
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["state"], found["tags"], found["latest"]) == ("completed", ["mine"], found["id"])
    assert [(row["step"], row["attempt"]) for row in found["rows"]] == [(1, 2)]
    assert found["logs"] == found["first"] == {"trainer": ["ran old data"]}
    assert found["record"]["run_id"] == found["id"] and found["id"] in found["story"]
    assert found["named"] and found["waits"] not in ENDED_STATES
    assert found["cancelled"] == "cancelled" and "has ended" in found["refused"]

    run, other = found["id"], json.loads(muster(pool.ground, "ls", "--json"))[0]["run_id"]
    listed = {*Listed.__dataclass_fields__}
    slow = {"step", "parts", "gpus", "requests", "said"}
    for words, keys in (
        (("show", run), {*found["record"]}),
        (("show", "--diff", run, other), None),
        (("why", run), {*listed, "failure", "slow"}),
        (("explain", run), {*listed, "story"}),
        (("submit", str(spec)), {"run_id", "flow_run_id", "page"}),
        (("cancel", "latest"), listed),
        (("queue", "--pool", "code"), {"line", "nodes", "troubles"}),
    ):
        said = json.loads(muster(pool.ground, *words, "--json"))
        assert keys is None or keys <= said.keys(), (words, said)
        assert words[0] != "why" or slow == said["slow"].keys()
    assert [
        json.loads(line)["step"] for line in muster(pool.ground, "metrics", run).split("\n")[:-1]
    ] == [1]
