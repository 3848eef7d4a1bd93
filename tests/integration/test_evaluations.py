"""Evaluations of checkpoints during a training, on a real Prefect server with a real worker."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.gang_pool import GangPool, gang_pool, list_leftovers
from tests.support.host_environment import Run
from tests.support.host_environment import wait_for as until_within
from tests.support.prefect_api import send_request
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.thorough]

#: Function that waits until a condition is true. The time limit is long, because each evaluation
#: starts a process that imports Prefect.
until = partial(until_within, within_s=240.0)
#: Program of the training. Its arguments are a folder, a file and steps. The program saves a
#: checkpoint of each step in the folder, and exits as soon as the file exists.
TRAINER = """
import os, pathlib, sys, time
folder, go, *steps = sys.argv[1:]
pathlib.Path(folder).mkdir(exist_ok=True)
for step in steps:
    (pathlib.Path(folder) / f"step-{int(step):06}.txt").write_text("weights " + step)
print("up", flush=True)
while not os.path.exists(go):
    time.sleep(0.05)
"""
#: Program of an evaluation. The program writes a line to a trace file, and waits until the file in
#: its last argument exists. The program then writes the accuracy as its result.
EVALUATION = """
import json, os, pathlib, sys, time
trace, checkpoint, step, end = sys.argv[1:]
content = pathlib.Path(checkpoint).read_text()
line = {"step": int(step), "content": content, "devices": os.environ.get("CUDA_VISIBLE_DEVICES")}
with open(trace, "a") as file:
    file.write(json.dumps(line) + "\\n")
while end and not os.path.exists(end):
    time.sleep(0.05)
pathlib.Path(os.environ["MUSTER_RESULT"]).write_text(json.dumps({"accuracy": int(step) / 100}))
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GangPool]:
    """Yield a pool with a worker, and with the deployment that creates runs of evaluations."""
    with gang_pool(tmp_path_factory.mktemp("pool"), nodes={"n1": 2}) as pool:
        create_step_deployment(pool)
        pool.start_worker()
        yield pool


def create_step_deployment(pool: GangPool) -> None:
    """Create the deployment that a training uses to create the runs of its evaluations."""
    step_deployment = {
        "name": "any",
        "flow_id": pool.host_env.post("/flows/", name="train")["id"],
        "work_pool_name": "gang",
        "entrypoint": "flows.train.train",
        "pull_steps": [],
    }
    send_request("POST", f"{pool.host_env.api}/deployments/", step_deployment)


@pytest.fixture
def pool(served: GangPool) -> Iterator[GangPool]:
    """Yield the pool, and end all its runs after the test."""
    yield served
    served.cancel_all()


def make_spec(files: Path, *steps: int, waits: bool = False, **more: Any) -> dict[str, Any]:
    """Return the spec of a training that saves checkpoints, and that has the evaluation `math`.

    Args:
        files: Folder of the evaluations' trace file, and of the file `go`, which ends the training.
        steps: Steps of the checkpoints.
        waits: True if each evaluation ends only after the file `end` exists.
        more: Further keys of the evaluation.
    """
    folder = "${run.dir}/checkpoints"
    words = [sys.executable, "-I", "-c", TRAINER, folder, files / "go", *steps]
    evaluation = [sys.executable, "-I", "-c", EVALUATION, files / "trace"]
    placeholders = ["${checkpoint}", "${checkpoint.step}", files / "end" if waits else ""]
    return {
        "name": "x",
        "workload": "sft",
        "gang": {"gpus_per_node": 1},
        "components": {
            "trainer": {
                "command": [str(word) for word in words],
                "checkpoints": folder,
                "ready": {"log": "up"},
                "stop": {"grace_s": 2},
            }
        },
        "evals": {
            "math": {
                "command": [str(word) for word in (*evaluation, *placeholders)],
                "resources": {"gpus": 1},
                **more,
            }
        },
    }


def list_evaluations(pool: GangPool, training: Run) -> list[dict[str, Any]]:
    """Return the flow runs of the evaluations of a training.

    The function also stores these runs in the pool, so that they are cancelled after the test.
    """
    children = {"parent_flow_run_id": {"any_": [training.flow_run_id]}}
    flow_runs: list[dict[str, Any]] = pool.host_env.post("/flow_runs/filter", flow_runs=children)
    for flow_run in flow_runs:
        if flow_run["id"] not in pool.asked:
            pool.record_run(flow_run["id"], flow_run["parameters"]["spec"])
    return flow_runs


def read_page(pool: GangPool, training: Run) -> str:
    """Return the artifact with the list of a training's evaluations, or "" if there is none."""
    flow_run = {"id": {"any_": [training.flow_run_id]}}
    found = pool.host_env.post(
        "/artifacts/filter", flow_runs=flow_run, artifacts={"key": {"any_": ["evaluations"]}}
    )
    pages = [artifact["data"] for artifact in found]
    return pages[0] if pages else ""


def read_trace(files: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of the trace file, to which the evaluation programs write."""
    trace = files / "trace"
    return [json.loads(line) for line in trace.read_text().splitlines()] if trace.exists() else []


def all_completed(pool: GangPool, training: Run, count: int) -> bool:
    types = [flow_run["state"]["type"] for flow_run in list_evaluations(pool, training)]
    return types == ["COMPLETED"] * count


def test_each_checkpoint_is_evaluated_once_and_a_failure_does_not_fail_the_training(
    pool: GangPool, tmp_path: Path
) -> None:
    spec = make_spec(tmp_path, 10, 20, 30, late="all")
    broken = {"command": [sys.executable, "-c", "raise SystemExit(3)"], "late": "skip"}
    spec["evals"]["broken"] = broken

    training = pool.submit(spec, tags=["mine"])
    until(lambda: len(read_trace(tmp_path)) == 2, "the complete checkpoints are evaluated")
    until(
        lambda: "FAILED" in {one["state"]["type"] for one in list_evaluations(pool, training)},
        "the broken evaluation has failed",
    )
    (tmp_path / "go").touch()
    message = training.wait_for_state("COMPLETED", "FAILED", "CRASHED")
    until(lambda: len(read_trace(tmp_path)) == 3, "the last checkpoint is evaluated")
    until(
        lambda: all(
            one["state"]["type"] in ("COMPLETED", "FAILED")
            for one in list_evaluations(pool, training)
        ),
        "all evaluations have ended",
    )

    assert training.state()[0] == "COMPLETED", message
    trace = read_trace(tmp_path)
    assert Counter(line["step"] for line in trace) == {10: 1, 20: 1, 30: 1}
    assert all(line["content"] == f"weights {line['step']}" for line in trace)
    # Each evaluation during the training sees only one of the node's two GPUs.
    assert {line["devices"] for line in trace[:2]} <= {"0", "1"}
    tags = {tag for one in list_evaluations(pool, training) for tag in one["tags"]}
    assert {f"evaluation-of:{training.name}"} <= tags
    output = pool.host_env.run_module("tasks.command", "metrics", training.name)
    rows = [json.loads(line) for line in output.splitlines()]
    assert {row["step"]: row["math.accuracy"] for row in rows} == {10: 0.1, 20: 0.2, 30: 0.3}
    last_row = r"step 30 \| math \| completed \| accuracy 0\.3"
    # The evaluation of step 30 ended after the training, and has updated the training's page.
    until(
        lambda: re.search(last_row, read_page(pool, training)),
        "the page of the training shows the last evaluation",
    )


def test_evaluation_of_a_killed_training_continues_and_is_recorded(
    pool: GangPool, tmp_path: Path
) -> None:
    training = pool.submit(make_spec(tmp_path, 10, 20, waits=True))
    until(lambda: len(read_trace(tmp_path)) == 1, "the first checkpoint is evaluated")

    training.kill_flow()
    pool.host_env.reconcile()
    (tmp_path / "end").touch()
    until(lambda: all_completed(pool, training, 1), "the evaluation has completed")

    record = training.record_path().with_name("evaluations.json")
    until(
        lambda: json.loads(record.read_text())["evaluations"][0]["state"] == "completed",
        "the end of the evaluation is recorded",
    )
    assert [line["step"] for line in read_trace(tmp_path)] == [10]
    assert training.state()[0] in ("CRASHED", "FAILED")


def test_cancelled_training_cancels_its_evaluations(pool: GangPool, tmp_path: Path) -> None:
    training = pool.submit(make_spec(tmp_path, 10, 20, waits=True))
    until(lambda: len(read_trace(tmp_path)) == 1, "the first checkpoint is evaluated")
    [evaluation] = list_evaluations(pool, training)

    pool.cancel(training)
    training.wait_for_state("CANCELLED")
    until(
        lambda: pool.host_env.get(f"/flow_runs/{evaluation['id']}")["state"]["type"] == "CANCELLED",
        "the evaluation is cancelled",
    )

    until(lambda: not list_leftovers(pool), "no process of the evaluation remains")
    assert len(list_evaluations(pool, training)) == 1


def test_evaluations_of_a_ray_job_run_on_the_cluster_with_their_own_gpus(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    spec = make_spec(tmp_path, 10, 20, late="all")
    spec["ray"] = {"entrypoint_gpus": 1}
    spec["components"]["trainer"]["launcher"] = "ray_job"
    clusters = [{"address": ray_cluster.address}]
    with gang_pool(tmp_path / "pool", nodes={}, clusters=clusters) as pool:
        create_step_deployment(pool)
        pool.start_worker()

        training = pool.submit(spec)
        until(lambda: len(read_trace(tmp_path)) == 1, "the complete checkpoint is evaluated")
        (tmp_path / "go").touch()
        message = training.wait_for_state("COMPLETED", "FAILED", "CRASHED")
        until(lambda: all_completed(pool, training, 2), "all evaluations have completed")

        assert training.state()[0] == "COMPLETED", message
        specs = [one["parameters"]["spec"] for one in list_evaluations(pool, training)]
        trace = read_trace(tmp_path)
        output = pool.host_env.run_module("tasks.command", "metrics", training.name)
    assert [one["components"]["step"]["launcher"] for one in specs] == ["ray_job"] * 2
    assert sorted(line["step"] for line in trace) == [10, 20]
    # Each evaluation sees a single GPU of its node.
    assert all(re.fullmatch("[0-7]", line["devices"]) for line in trace)
    rows = [json.loads(line) for line in output.splitlines()]
    assert {row["step"]: row["math.accuracy"] for row in rows} == {10: 0.1, 20: 0.2}
