"""Pipelines on a real Prefect server; their stages are real runs of a real worker."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any
from urllib.request import urlopen

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.processes.identity import host_name
from tasks.server import flow_runs
from tasks.upkeep.reconcile import reconcile_host
from tests.support.gang_pool import GangPool, gang_pool, host, list_leftovers
from tests.support.host_environment import FINAL, ROOT, HostEnvironment, Run, Server
from tests.support.host_environment import wait_for as until_within
from tests.support.prefect_api import send_request
from tests.support.ray_cluster import RayCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.thorough]

#: Time limit of each wait, in seconds. The limit is long because each stage and each pipeline
#: starts a process that imports Prefect.
WITHIN_S = 300.0
until = partial(until_within, within_s=WITHIN_S)
#: A training program.
#:
#: The program copies its input file, writes a checkpoint, and then waits until a file exists. The
#: third argument is the path of this file.
PART = """
import os, pathlib, sys, time
checkpoint, run_directory, go, code = sys.argv[1:5]
folder = pathlib.Path(run_directory) / "checkpoints"
folder.mkdir(exist_ok=True)
(folder / "step-000003.txt").write_text("weights of " + os.environ["MUSTER_RUN_ID"])
content = pathlib.Path(checkpoint).read_text() if checkpoint else "none"
(pathlib.Path(run_directory) / "given.txt").write_text(content)
print("up", flush=True)
while go and not os.path.exists(go):
    time.sleep(0.05)
sys.exit(int(code))
"""


@dataclass(kw_only=True)
class Pipelines:
    """A pool with a worker, and pipelines that run on the pool."""

    pool: GangPool
    #: The stages with `waits=True` run until this file exists.
    go: Path

    @property
    def host_env(self) -> HostEnvironment:
        return self.pool.host_env

    def stage(
        self,
        name: str,
        checkpoint: str = "",
        *,
        waits: bool = False,
        code: int = 0,
        **further_keys: Any,
    ) -> dict[str, Any]:
        """Return a stage of a pipeline spec.

        Args:
            name: Name of the stage.
            checkpoint: Path of the checkpoint that the stage reads, or an empty string.
            waits: True if the stage ends only after the file `go` exists.
            code: Exit code of the stage.
            further_keys: Further keys of the spec.
        """
        go = str(self.go) if waits else ""
        command = [sys.executable, "-I", "-c", PART, checkpoint, "${run.dir}", go, str(code)]
        trainer = {
            "command": command,
            "checkpoints": "${run.dir}/checkpoints",
            "ready": {"log": "up"},
            "stop": {"grace_s": 2},
        }
        spec = {"name": name, "workload": "sft", "components": {"trainer": trainer}, **further_keys}
        return {"name": name, "deployment": "train/gang", "spec": spec}

    def write_spec(self, *stages: Mapping[str, Any]) -> Path:
        """Write the spec of a pipeline with these stages, and return the path of the file."""
        path = self.host_env.home / "pipeline.yaml"
        content = {"name": "two", "tags": ["mine"], "stages": list(stages)}
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    def start(self, *arguments: str | Path) -> tuple[Popen[bytes], str]:
        """Start `python -m flows.pipeline`; return its process and the id of its flow run."""
        ids_before = {run["id"] for run in self.list_pipelines()}
        process = self.host_env.start("-m", "flows.pipeline", *map(str, arguments), log="pipeline")

        def find_new_flow_run() -> str:
            assert process.poll() is None, self.host_env.log("pipeline")
            return next(
                (run["id"] for run in self.list_pipelines() if run["id"] not in ids_before), ""
            )

        return process, until(find_new_flow_run, "the pipeline has a flow run")

    def run_to_end(self, *arguments: str | Path) -> int:
        """Run `python -m flows.pipeline` to its end, and return its exit code."""
        process = self.host_env.start("-m", "flows.pipeline", *map(str, arguments), log="pipeline")
        return process.wait(WITHIN_S)

    def submit(self, *stages: Mapping[str, Any]) -> str:
        """Submit the stages to the pool `pipelines`; return the id of the flow run."""
        deployment = self.host_env.get("/deployments/name/pipeline/two")["id"]
        spec = {"name": "two", "stages": list(stages)}
        path = f"/deployments/{deployment}/create_flow_run"
        return str(self.host_env.post(path, parameters={"spec": spec})["id"])

    def list_pipelines(self) -> list[dict[str, Any]]:
        """Return the flow runs of pipelines, newest first."""
        flows = {"name": {"any_": ["pipeline"]}}
        flow_runs_of_pipelines: list[dict[str, Any]] = self.host_env.post(
            "/flow_runs/filter", flows=flows, sort="EXPECTED_START_TIME_DESC"
        )
        return flow_runs_of_pipelines

    def state(self, flow_run_id: str) -> tuple[str, str]:
        """Return the type and the message of a flow run's state."""
        state = self.host_env.get(f"/flow_runs/{flow_run_id}")["state"]
        return state["type"], state["message"] or ""

    def until_state(self, flow_run_id: str, *types: str) -> str:
        """Wait until a flow run has a state of one of these types; return the state's message."""
        until(lambda: self.state(flow_run_id)[0] in types, f"{flow_run_id} is {types}")
        return self.state(flow_run_id)[1]

    def runs(self, flow_run_id: str, stage: str = "") -> list[dict[str, Any]]:
        """Return the runs of a stage of the pipeline, or of all its stages if `stage` is empty."""
        children = {"parent_flow_run_id": {"any_": [flow_run_id]}}
        child_runs = self.host_env.post("/flow_runs/filter", flow_runs=children)
        return [run for run in child_runs if f"-{stage}" in run["idempotency_key"]]

    def until_running(self, flow_run_id: str, stage: str) -> Run:
        """Wait until the components of a stage are running, and return the run of the stage."""

        def find_running_stage() -> Run | None:
            for run in self.runs(flow_run_id, stage):
                if (run["state"]["message"] or "").startswith("running:"):
                    return Run(host_env=self.host_env, flow_run_id=run["id"])
            return None

        stage_run = until(
            find_running_stage, f"stage {stage} runs:\n{self.host_env.log('pipeline')}"
        )
        assert stage_run is not None
        return stage_run

    def read_given(self, run: Mapping[str, Any]) -> str:
        """Return the content of the checkpoint that a run has read; "none" without a checkpoint."""
        return (self.host_env.home / "runs" / run["name"] / "given.txt").read_text()

    def hand_over(self) -> None:
        """Create the file `go`, so that all stages that wait for this file end."""
        self.go.touch()

    def start_worker(self) -> Popen[bytes]:
        """Start a worker of the pool `pipelines`, and return the process of the ready worker."""
        starts_before = self.host_env.log("pipelines").count("started!")
        options = ("--pool", "pipelines", "--name", host_name(), "--install-policy", "never")
        worker = self.host_env.start("-m", "deployments.worker", *options, log="pipelines")
        until(
            lambda: self.host_env.log("pipelines").count("started!") > starts_before,
            "the worker of the pool `pipelines` has started",
        )
        return worker

    def pid_of(self, flow_run_id: str) -> int:
        """Wait until a worker has started a process for the pipeline; return the process id."""

        def find_engine() -> int:
            pids = Run(host_env=self.host_env, flow_run_id=flow_run_id).processes()
            programs = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
            engines = [pid for pid, line in programs.items() if b"prefect" in line]
            return max(engines, default=0)

        return until(find_engine, "the pipeline has a process")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GangPool]:
    """Yield a pool with a worker, on a server that also has the pool `pipelines`."""
    server = Server(tmp_path_factory.mktemp("server"))
    host_env = host("n1", tmp_path_factory.mktemp("home"), server.api)
    pool = GangPool(host_env=host_env, server=server)
    try:
        server.start()
        pool.set_up()
        _set_up_pipelines(host_env)
        pool.start_worker()
        yield pool
    finally:
        pool.host_env.clear()
        server.kill()


def _set_up_pipelines(host_env: HostEnvironment) -> None:
    """Create the pool `pipelines` and its deployment on the Prefect server."""
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    host_env.post("/work_pools/", name="pipelines", type="process", base_job_template=template)
    flow = host_env.post("/flows/", name="pipeline")["id"]
    set_directory_step = {
        "prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}
    }
    deployment = {
        "name": "two",
        "flow_id": flow,
        "work_pool_name": "pipelines",
        "entrypoint": "flows/pipeline.py:pipeline",
        "path": str(ROOT),
        "pull_steps": [set_directory_step],
    }
    send_request("POST", f"{host_env.api}/deployments/", deployment)
    # Pipelines use the deployment `train/any` to create the runs of their steps. Outside of the
    # tests, prefect.yaml defines this deployment.
    step_deployment = {
        "name": "any",
        "flow_id": host_env.post("/flows/", name="train")["id"],
        "work_pool_name": "gang",
        "entrypoint": "flows.train.train",
        "pull_steps": [],
    }
    send_request("POST", f"{host_env.api}/deployments/", step_deployment)


@pytest.fixture
def pipelines(served: GangPool, tmp_path: Path) -> Iterator[Pipelines]:
    """Yield an object that runs pipelines. End all flow runs and processes after the test."""
    pipelines = Pipelines(pool=served, go=tmp_path / "go")
    yield pipelines
    for run in pipelines.list_pipelines():
        if run["state_type"] not in FINAL:
            path = f"/flow_runs/{run['id']}/set_state"
            served.host_env.post(path, state={"type": "CANCELLED"}, force=True)
        for stage in pipelines.runs(run["id"]):
            served.record_run(stage["id"], stage["parameters"]["spec"])
    # If all runs have ended, wait until the processes of the runs have ended, too.
    until(
        lambda: not list_leftovers(served) or not all_ended(served),
        "no process of the pool remains",
    )
    served.cancel_all()


def all_ended(pool: GangPool) -> bool:
    """Return True if all runs of the pool have a final state."""
    return all(run["state_type"] in FINAL for run in pool.flow_runs().values())


@pytest.fixture
def worker(pipelines: Pipelines) -> Iterator[Popen[bytes]]:
    """Yield a worker of the pool `pipelines`."""
    worker = pipelines.start_worker()
    yield worker
    if worker.poll() is None:
        worker.terminate()
        worker.wait(WITHIN_S)


def test_stage_reads_the_checkpoint_of_the_previous_stage(pipelines: Pipelines) -> None:
    path = pipelines.write_spec(
        pipelines.stage("first"), pipelines.stage("second", "${stage.first.checkpoint}")
    )

    code = pipelines.run_to_end(path)

    assert code == 0, pipelines.host_env.log("pipeline")
    [flow_run, *_] = pipelines.list_pipelines()
    [first] = pipelines.runs(flow_run["id"], "first")
    [second] = pipelines.runs(flow_run["id"], "second")
    assert pipelines.read_given(first) == "none"
    assert pipelines.read_given(second) == f"weights of {first['name']}"
    assert second["start_time"] >= first["end_time"]
    assert {"mine", "pipeline:two"} <= set(second["tags"]) & set(flow_run["tags"])
    # The run of each stage is a child of a task run of the pipeline, so that the UI links the
    # pipeline and the run.
    pipeline_filter = {"flow_runs": {"id": {"any_": [flow_run["id"]]}}}
    tasks = pipelines.host_env.post("/task_runs/filter", **pipeline_filter)
    children = {task["name"]: task["state"]["state_details"]["child_flow_run_id"] for task in tasks}
    assert children == {"first": first["id"], "second": second["id"]}


def test_resumed_pipeline_retries_only_the_corrected_stage(pipelines: Pipelines) -> None:
    checkpoint = "${stage.first.checkpoint}"
    path = pipelines.write_spec(
        pipelines.stage("first"), pipelines.stage("second", checkpoint, code=3)
    )
    first_code = pipelines.run_to_end(path)
    [flow_run, *_] = pipelines.list_pipelines()
    state_type, message = pipelines.state(flow_run["id"])
    [first] = pipelines.runs(flow_run["id"], "first")
    [second] = pipelines.runs(flow_run["id"], "second")

    correction = "second.components.trainer.command.7='0'"
    second_code = pipelines.run_to_end(path, "--set", correction, "--resume", flow_run["id"])

    assert (first_code, state_type) == (1, "FAILED")
    assert message.startswith("stage second: ") and "exit code 3" in message
    assert f"runs/flow-run/{second['id']}" in message
    assert second_code == 0, pipelines.host_env.log("pipeline")
    assert [run["id"] for run in pipelines.runs(flow_run["id"], "first")] == [first["id"]]
    second_runs = pipelines.runs(flow_run["id"], "second")
    assert sorted(run["state_type"] for run in second_runs) == ["COMPLETED", "FAILED"]
    assert {pipelines.read_given(run) for run in second_runs} == {f"weights of {first['name']}"}
    assert pipelines.state(flow_run["id"])[0] == "COMPLETED"


def test_resumed_pipeline_continues_with_the_run_of_a_killed_pipeline(pipelines: Pipelines) -> None:
    path = pipelines.write_spec(pipelines.stage("first", waits=True), pipelines.stage("second"))
    process, flow_run_id = pipelines.start(path)
    first = pipelines.until_running(flow_run_id, "first")

    process.kill()
    process.wait()
    run_survived = first.is_running()
    resumed_process = pipelines.host_env.start(
        "-m", "flows.pipeline", "--resume", flow_run_id, log="pipeline"
    )
    until(
        lambda: "the pipeline continues with the run" in pipelines.host_env.log("pipeline"),
        "the resumed pipeline has found the run",
    )
    pipelines.hand_over()

    assert run_survived
    assert resumed_process.wait(WITHIN_S) == 0, pipelines.host_env.log("pipeline")
    assert [run["id"] for run in pipelines.runs(flow_run_id, "first")] == [first.flow_run_id]
    assert len(pipelines.runs(flow_run_id, "second")) == 1


def test_pipeline_with_a_living_process_cannot_be_resumed(pipelines: Pipelines) -> None:
    path = pipelines.write_spec(pipelines.stage("first", waits=True))
    process, flow_run_id = pipelines.start(path)
    pipelines.until_running(flow_run_id, "first")

    code = pipelines.run_to_end("--resume", flow_run_id)

    assert code == 1
    assert "it may still be running. Cancel the pipeline first" in pipelines.host_env.log(
        "pipeline"
    )
    pipelines.hand_over()
    assert process.wait(WITHIN_S) == 0


def test_interrupt_ends_the_stage_and_starts_no_later_stage(pipelines: Pipelines) -> None:
    path = pipelines.write_spec(pipelines.stage("first", waits=True), pipelines.stage("second"))
    process, flow_run_id = pipelines.start(path)
    first = pipelines.until_running(flow_run_id, "first")

    process.send_signal(signal.SIGINT)

    assert process.wait(WITHIN_S) == 130, pipelines.host_env.log("pipeline")
    assert first.state()[0] == "CANCELLED"
    assert pipelines.runs(flow_run_id, "second") == []
    state_type, message = pipelines.state(flow_run_id)
    assert state_type == "CANCELLED"
    assert message == "interrupted by SIGINT; stage first: Cancelled"


def cancel(pipelines: Pipelines, flow_run_id: str) -> None:
    """Cancel a flow run as the button "Cancel" in the Prefect UI does."""
    path = f"/flow_runs/{flow_run_id}/set_state"
    pipelines.host_env.post(path, state={"type": "CANCELLING", "name": "Cancelling"})


def test_cancel_of_a_pipeline_cancels_its_queued_stage(
    pipelines: Pipelines, worker: Popen[bytes]
) -> None:
    pipelines.pool.hold({"n1": 16})
    first = pipelines.stage("first", gang={"nodes": 1, "gpus_per_node": 8})
    flow_run_id = pipelines.submit(first, pipelines.stage("second"))
    until(
        lambda: "PendingResources" in pipelines.state(flow_run_id)[1], "the first stage is queued"
    )

    cancel(pipelines, flow_run_id)

    pipelines.until_state(flow_run_id, "CANCELLED")
    [run] = pipelines.runs(flow_run_id, "first")
    assert run["state_type"] == "CANCELLED"
    assert pipelines.runs(flow_run_id, "second") == []


def test_cancel_of_a_pipeline_cancels_its_running_stage(
    pipelines: Pipelines, worker: Popen[bytes]
) -> None:
    stages = (pipelines.stage("first", waits=True), pipelines.stage("second"))
    flow_run_id = pipelines.submit(*stages)
    first = pipelines.until_running(flow_run_id, "first")

    cancel(pipelines, flow_run_id)

    pipelines.until_state(flow_run_id, "CANCELLED")
    first.wait_for_state("CANCELLED")
    first.wait_until_gone()
    assert pipelines.runs(flow_run_id, "second") == []


def test_retry_in_the_ui_starts_at_the_failed_stage(
    pipelines: Pipelines, worker: Popen[bytes]
) -> None:
    # The second stage fails until the file `go` exists.
    second = pipelines.stage("second")
    code = (
        f"import pathlib, sys; sys.exit(0 if pathlib.Path({str(pipelines.go)!r}).exists() else 3)"
    )
    second["spec"]["components"] = {"trainer": {"command": [sys.executable, "-c", code]}}
    flow_run_id = pipelines.submit(pipelines.stage("first"), second)
    pipelines.until_state(flow_run_id, "FAILED")

    pipelines.hand_over()
    path = f"/flow_runs/{flow_run_id}/set_state"
    pipelines.host_env.post(path, state={"type": "SCHEDULED", "name": "AwaitingRetry"}, force=True)

    pipelines.until_state(flow_run_id, "COMPLETED")
    assert len(pipelines.runs(flow_run_id, "first")) == 1
    assert len(pipelines.runs(flow_run_id, "second")) == 2


def test_pipeline_continues_after_its_process_was_killed(
    pipelines: Pipelines, worker: Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = (pipelines.stage("first", waits=True), pipelines.stage("second"))
    flow_run_id = pipelines.submit(*stages)
    pipelines.until_running(flow_run_id, "first")

    # Kill the worker first. Otherwise the worker would set the flow run to Crashed.
    os.kill(worker.pid, signal.SIGKILL)
    os.kill(pipelines.pid_of(flow_run_id), signal.SIGKILL)
    monkeypatch.setenv("MUSTER_HOME", str(pipelines.host_env.home))
    monkeypatch.setattr(flow_runs, "_SETTLED_AFTER", flow_runs._SETTLED_AFTER * 0)
    with temporary_settings({PREFECT_API_URL: pipelines.host_env.api}):
        until(lambda: reconcile_host().changed_runs, "the lost pipeline is found")
    state_type, message = pipelines.state(flow_run_id)
    pipelines.start_worker()
    pipelines.hand_over()

    assert (
        state_type == "SCHEDULED"
        and "a new process of the pipeline will continue at the current stage" in message
    )
    pipelines.until_state(flow_run_id, "COMPLETED")
    assert len(pipelines.runs(flow_run_id, "first")) == 1


#: Source code of the step functions. Each function appends a line to the file in its argument
#: `trace`, so this file shows how often each step ran.
STEP_FUNCTIONS = """
import os
import time


def note(trace, name):
    with open(trace, "a") as file:
        file.write(name + "\\n")


def prepare(trace):
    note(trace, "prepare")
    return {"path": "/data/x", "rows": [1, 2, 3], "token": os.environ["API_TOKEN"]}


def score(trace, name, rows, go):
    note(trace, f"score {name} {sum(rows)}")
    while not os.path.exists(go):
        time.sleep(0.05)
    return {"score": {"a": 0.4, "b": 0.9}[name]}


async def choose(trace, first, second):
    note(trace, f"choose {first} {second}")
    return max(first, second)
"""


def write_step_pipeline(pipelines: Pipelines, folder: Path, trace: Path) -> Path:
    """Write a project with a pipeline of steps, and return the path of the pipeline's file."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text("")
    (folder / "steps.py").write_text(STEP_FUNCTIONS)
    common = {"on": "host"}
    score = {
        "call": "steps:score",
        "needs": ["prepare"],
        "args": {
            "trace": str(trace),
            "rows": "${stage.prepare.result.rows}",
            "go": str(pipelines.go),
        },
        **common,
    }
    command = (
        f"echo export ${{stage.prepare.result.path}} >>{trace}; "
        "echo '{\"done\": true}' >$MUSTER_RESULT"
    )
    stages = [
        {
            "name": "prepare",
            "call": "steps:prepare",
            "args": {"trace": str(trace)},
            "env": {"API_TOKEN": "s3cret-value"},
            **common,
        },
        {"name": "score_a", **score, "args": {**score["args"], "name": "a"}},
        {"name": "score_b", **score, "args": {**score["args"], "name": "b"}},
        {
            "name": "choose",
            "needs": ["score_a", "score_b"],
            "call": "steps:choose",
            "args": {
                "trace": str(trace),
                "first": "${stage.score_a.result.score}",
                "second": "${stage.score_b.result.score}",
            },
            **common,
        },
        {
            "name": "again",
            "when": "${stage.choose.result} < 0.6",
            "command": ["sh", "-c", f"echo again >>{trace}"],
            **common,
        },
        {
            "name": "export",
            "when": "${stage.choose.result} >= 0.6 and ${stage.again.state} == 'skipped'",
            "command": ["sh", "-c", command],
            **common,
        },
    ]
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump({"name": "steps", "stages": stages}, sort_keys=False))
    return path


def test_each_step_runs_once_although_the_pipeline_is_killed(
    pipelines: Pipelines, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    path = write_step_pipeline(pipelines, tmp_path / "project", trace)
    process, flow_run_id = pipelines.start(path)
    until(
        lambda: trace.exists() and trace.read_text().count("score") == 2,
        f"both steps run at the same time:\n{pipelines.host_env.log('pipeline')}",
    )

    process.kill()
    process.wait()
    resumed_process = pipelines.host_env.start(
        "-m", "flows.pipeline", "--resume", flow_run_id, log="pipeline"
    )
    lines = [
        f"stage {name}: the pipeline continues with the run" for name in ("score_a", "score_b")
    ]
    until(
        lambda: all(line in pipelines.host_env.log("pipeline") for line in lines),
        "the resumed pipeline has found both steps",
    )
    pipelines.hand_over()

    assert resumed_process.wait(WITHIN_S) == 0, pipelines.host_env.log("pipeline")
    assert sorted(trace.read_text().splitlines()) == [
        "choose 0.4 0.9",
        "export /data/x",
        "prepare",
        "score a 6",
        "score b 6",
    ]
    message = pipelines.state(flow_run_id)[1]
    assert "stage again: skipped, because the condition of the stage is false" in message
    pipeline_filter = {"flow_runs": {"id": {"any_": [flow_run_id]}}}
    tasks = pipelines.host_env.post("/task_runs/filter", **pipeline_filter)
    states = {task["name"]: task["state"]["name"] for task in tasks}
    completed = dict.fromkeys(("prepare", "score_a", "score_b", "choose", "export"), "Completed")
    assert states == {**completed, "again": "Skipped"}
    [prepare] = pipelines.runs(flow_run_id, "prepare")
    results = [*(pipelines.host_env.home / "runs" / prepare["name"]).glob("*/result.json")]
    assert [result.read_text().count("s3cret") for result in results] == [0]


def test_each_point_of_a_matrix_runs_once_although_the_pipeline_is_killed(
    pipelines: Pipelines, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    program = (
        f"echo $N >>{trace}; "
        f"while [ $N -gt 2 ] && [ ! -e {pipelines.go} ]; do sleep 0.1; done; "
        'echo "{\\"score\\": $N}" >$MUSTER_RESULT'
    )
    grid = {
        "name": "grid",
        "on": "host",
        "command": ["sh", "-c", program],
        "matrix": {"env.N": [1, 2, 3, 4, 5]},
        "at_most": 2,
        "best": {"by": "score"},
    }
    best = {
        "name": "best",
        "on": "host",
        "command": ["sh", "-c", f"echo best ${{stage.grid.best.point.env.N}} >>{trace}"],
    }
    path = pipelines.write_spec(grid, best)
    process, flow_run_id = pipelines.start(path)
    until(lambda: trace.exists() and len(trace.read_text().split()) == 4, "points 3 and 4 run")

    process.kill()
    process.wait()
    resumed_process = pipelines.host_env.start(
        "-m", "flows.pipeline", "--resume", flow_run_id, log="pipeline"
    )
    pipelines.hand_over()

    assert resumed_process.wait(WITHIN_S) == 0, pipelines.host_env.log("pipeline")
    assert sorted(trace.read_text().splitlines()) == ["1", "2", "3", "4", "5", "best 5"]
    artifact_filter = {"flow_run_id": {"any_": [flow_run_id]}, "key": {"any_": ["points-grid"]}}
    [table] = pipelines.host_env.post("/artifacts/filter", artifacts=artifact_filter)
    rows = json.loads(table["data"])
    assert [(row["env.N"], row["state"], row["best"]) for row in rows] == [
        *((str(number), "Completed", "") for number in range(1, 5)),
        ("5", "Completed", "best"),
    ]


#: A training program whose reward at each step is the value of the environment variable N.
#:
#: The program ends at SIGTERM, or as soon as the file in its third argument exists. The program
#: then appends "N stopped" or "N completed" to the file in its second argument.
REWARDS = """
import json, os, signal, sys, time
metrics, trace, go = sys.argv[1:4]
number = int(os.environ["N"])

def write(text):
    with open(trace, "a") as file:
        file.write(f"{number} {text}\\n")

def stop(*_):
    write("stopped")
    sys.exit(0)

signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
step = 0
while not os.path.exists(go):
    step += 1
    with open(metrics, "a") as file:
        file.write(json.dumps({"step": step, "reward": number}) + "\\n")
    time.sleep(0.1)
write("completed")
"""


def test_points_below_the_median_are_stopped_early(pipelines: Pipelines, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    metrics = "${attempt.dir}/metrics.jsonl"
    trainer = {
        "command": [sys.executable, "-I", "-c", REWARDS, metrics, str(trace), str(pipelines.go)],
        "ready": {"log": "up"},
        "stop": {"grace_s": 20},
    }
    spec = {
        "name": "rewards",
        "workload": "sft",
        "env": {"N": "0"},
        "components": {"trainer": trainer},
        "progress": {"jsonl": metrics, "step": "step"},
    }
    grid = {
        "name": "grid",
        "deployment": "train/gang",
        "spec": spec,
        "matrix": {"env.N": ["1", "2", "3", "4"]},
        "stop_early": {"by": "reward", "rule": "median", "after_step": 3},
        "best": {"by": "reward"},
    }
    best = {
        "name": "best",
        "on": "host",
        "command": ["sh", "-c", f"echo ${{stage.grid.best.point.env.N}} best >>{trace}"],
    }
    path = pipelines.write_spec(grid, best)
    process, flow_run_id = pipelines.start(path)
    until(
        lambda: trace.exists() and len(trace.read_text().splitlines()) == 2,
        "two points were stopped",
    )
    pipelines.hand_over()

    code = process.wait(WITHIN_S)

    assert code == 0, pipelines.host_env.log("pipeline")
    lines = trace.read_text().splitlines()
    assert sorted(lines[:2]) == ["1 stopped", "2 stopped"]
    assert sorted(lines[2:4]) == ["3 completed", "4 completed"]
    assert lines[4:] == ["4 best"]
    runs = {run["idempotency_key"][-3]: run for run in pipelines.runs(flow_run_id, "grid")}
    assert [runs[number]["state_type"] for number in "1234"] == ["CANCELLED"] * 2 + [
        "COMPLETED"
    ] * 2
    assert "grid.1: stopped early, because " in pipelines.host_env.log("pipeline")
    artifact_filter = {"flow_run_id": {"any_": [flow_run_id]}, "key": {"any_": ["points-grid"]}}
    [artifact] = pipelines.host_env.post("/artifacts/filter", artifacts=artifact_filter)
    rows = json.loads(artifact["data"])
    assert [(row["state"], row["figure"], row["best"]) for row in rows] == [
        ("stopped early", "1", ""),
        ("stopped early", "2", ""),
        ("Completed", "3", ""),
        ("Completed", "4", "best"),
    ]
    assert "data:image/svg+xml" in artifact["description"]


def test_equal_step_of_an_earlier_pipeline_is_reused(pipelines: Pipelines, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    step = {
        "name": "count",
        "on": "host",
        "cache": "inputs",
        "command": ["sh", "-c", f"echo ran >>{trace}; echo 7 >$MUSTER_RESULT"],
    }
    use = {
        "name": "use",
        "on": "host",
        "command": ["sh", "-c", f"echo ${{stage.count.result}} >>{trace}"],
    }
    path = pipelines.write_spec(step, use)

    codes = [pipelines.run_to_end(path), pipelines.run_to_end(path)]

    assert codes == [0, 0], pipelines.host_env.log("pipeline")
    assert trace.read_text().split() == ["ran", "7", "7"]


def test_example_with_steps_completes(pipelines: Pipelines) -> None:
    code = pipelines.run_to_end(ROOT / "deployments/pipelines/quickstart-evaluate.yaml")

    assert code == 0, pipelines.host_env.log("pipeline")
    [flow_run, *_] = pipelines.list_pipelines()
    export = pipelines.runs(flow_run["id"], "export")
    directories = [pipelines.host_env.home / "runs" / run["name"] for run in export]
    assert [(directory / "policy.npz").exists() for directory in directories] == [True]


#: Source code of the step functions for Ray. Each function appends lines to the file in its
#: argument `trace`, so this file shows when each step ran, and with which GPUs.
RAY_FUNCTIONS = """
import os
import subprocess
import time


def prepare(trace):
    with open(trace, "a") as file:
        file.write(f"prepare {os.path.basename(os.getcwd()) != 'project'}\\n")
    return {"part": "x"}


def use_gpus(trace, part, number):
    devices = os.environ["CUDA_VISIBLE_DEVICES"]
    with open(trace, "a") as file:
        file.write(f"begin {number} {part} {len(devices.split(','))} {time.time()}\\n")
    time.sleep(2)
    with open(trace, "a") as file:
        file.write(f"end {number} {part} {len(devices.split(','))} {time.time()}\\n")
    return number


def use_gpus_until(trace, go, number):
    with open(trace, "a") as file:
        file.write(f"begin {number}\\n")
    while number > 2 and not os.path.exists(go):
        time.sleep(0.05)
    with open(trace, "a") as file:
        file.write(f"end {number}\\n")
    return number


def hang(trace):
    subprocess.Popen(["setsid", "sleep", "4711.5"])
    with open(trace, "a") as file:
        file.write("hangs\\n")
    time.sleep(600)
"""


@pytest.fixture
def ray_pipelines(ray_cluster: RayCluster, tmp_path: Path) -> Iterator[Pipelines]:
    """Yield pipelines on a pool with a Ray cluster, which has two nodes with 8 GPUs each."""
    cluster = {"address": ray_cluster.address}
    with gang_pool(tmp_path / "pool", nodes={}, clusters=[cluster]) as pool:
        _set_up_pipelines(pool.host_env)
        pool.start_worker()
        yield Pipelines(pool=pool, go=tmp_path / "go")


def write_ray_pipeline(folder: Path, *stages: Mapping[str, Any]) -> Path:
    """Write a project with a pipeline of Ray steps, and return the path of the pipeline's file."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text("")
    (folder / "steps.py").write_text(RAY_FUNCTIONS)
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump({"name": "steps", "stages": list(stages)}, sort_keys=False))
    return path


def test_steps_on_ray_take_their_gpus_from_the_queue(
    ray_pipelines: Pipelines, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    prepare = {"name": "prepare", "call": "steps:prepare", "args": {"trace": str(trace)}}
    args = {"trace": str(trace), "part": "${stage.prepare.result.part}"}
    grid = {
        "name": "grid",
        "call": "steps:use_gpus",
        "args": args,
        "resources": {"gpus": 8},
        "matrix": {"number": [1, 2, 3]},
    }
    check = {
        "name": "check",
        "when": "${stage.grid.results} != []",
        "command": ["sh", "-c", f"echo checked >>{trace}"],
        "resources": {"cpus": 0.5},
    }
    path = write_ray_pipeline(tmp_path / "project", prepare, grid, check)

    code = ray_pipelines.run_to_end(path)

    assert code == 0, ray_pipelines.host_env.log("pipeline")
    lines = [line.split() for line in trace.read_text().splitlines()]
    assert lines[0] == ["prepare", "True"] and lines[-1] == ["checked"]
    moments = sorted((float(line[4]), line[0], int(line[3])) for line in lines[1:-1])
    assert sorted(line[1] for line in lines if line[0] == "begin") == ["1", "2", "3"]
    in_use = 0
    for _, event, gpus in moments:
        in_use += gpus if event == "begin" else -gpus
        assert in_use <= 16


def start_grid_and_wait_for_early_point(
    pipelines: Pipelines, cluster: RayCluster, tmp_path: Path
) -> tuple[Popen[bytes], str, Path]:
    """Start a pipeline with five points, and wait until the fifth point has started early.

    Each point needs a whole node, and the cluster has two nodes. Points 1 and 2 end immediately.
    The other points run until the test creates the file `pipelines.go`. So points 3 and 4 use all
    GPUs when point 5 starts.

    Returns:
        The process of the pipeline, the id of its flow run, and the path of the trace. The program
        of each point appends a line to the trace at its start and at its end.
    """
    trace = tmp_path / "trace"
    grid = {
        "name": "grid",
        "call": "steps:use_gpus_until",
        "args": {"trace": str(trace), "go": str(pipelines.go)},
        "resources": {"gpus": 8},
        "matrix": {"number": [1, 2, 3, 4, 5]},
    }
    path = write_ray_pipeline(tmp_path / "project", grid)
    process, flow_run_id = pipelines.start(path)

    def is_early() -> bool:
        runs = pipelines.runs(flow_run_id, "grid.5")
        has_started = bool(runs) and runs[0]["state_type"] == "RUNNING"
        jobs = sorted(list_open_jobs(cluster, "grid"))
        is_waiting_in_ray = jobs == ["PENDING", "RUNNING", "RUNNING"]
        return has_started and is_waiting_in_ray and len(read_started_points(trace)) == 4

    until(is_early, f"the fifth point has started:\n{pipelines.host_env.log('pipeline')}")
    return process, flow_run_id, trace


def read_started_points(trace: Path) -> list[str]:
    """Return the numbers of the points whose programs have started."""
    return [line.split()[1] for line in trace.read_text().splitlines() if line.startswith("begin")]


def test_point_starts_early_and_its_program_begins_when_gpus_are_free(
    ray_pipelines: Pipelines, ray_cluster: RayCluster, tmp_path: Path
) -> None:
    process, flow_run_id, trace = start_grid_and_wait_for_early_point(
        ray_pipelines, ray_cluster, tmp_path
    )

    ray_pipelines.go.touch()

    assert process.wait(WITHIN_S) == 0, ray_pipelines.host_env.log("pipeline")
    assert sorted(read_started_points(trace)) == ["1", "2", "3", "4", "5"]
    lines = trace.read_text().splitlines()
    # When the program of point 5 started, at most one other point was still running.
    before = lines[: lines.index("begin 5")]
    assert sum(line.startswith("end") for line in before) >= 3
    assert ray_pipelines.runs(flow_run_id, "grid.5")[0]["state_type"] == "COMPLETED"


def test_cancel_ends_a_point_that_waits_in_ray_for_its_gpus(
    ray_pipelines: Pipelines, ray_cluster: RayCluster, tmp_path: Path
) -> None:
    process, flow_run_id, trace = start_grid_and_wait_for_early_point(
        ray_pipelines, ray_cluster, tmp_path
    )

    process.send_signal(signal.SIGINT)

    assert process.wait(WITHIN_S) == 130, ray_pipelines.host_env.log("pipeline")
    assert sorted(read_started_points(trace)) == ["1", "2", "3", "4"]
    assert list_open_jobs(ray_cluster, "grid") == []
    states = {n: ray_pipelines.runs(flow_run_id, f"grid.{n}")[0]["state_type"] for n in (3, 4, 5)}
    assert states == dict.fromkeys((3, 4, 5), "CANCELLED")


def list_open_jobs(cluster: RayCluster, name: str) -> list[str]:
    """Return the states of a stage's jobs on a Ray cluster, without ended jobs.

    Args:
        cluster: The Ray cluster. The jobs are read from its own API, not from Muster.
        name: Name of the stage.
    """
    with urlopen(f"{cluster.address}/api/jobs/", timeout=WITHIN_S) as response:
        jobs = json.load(response)
    states = [job["status"] for job in jobs if str(job.get("submission_id")).startswith(f"{name}-")]
    return [state for state in states if state in ("PENDING", "RUNNING")]


def test_step_that_fits_no_node_is_refused_before_any_step_starts(
    ray_pipelines: Pipelines, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    prepare = {"name": "prepare", "call": "steps:prepare", "args": {"trace": str(trace)}}
    large = {"name": "large", "command": ["true"], "resources": {"gpus": 9}}
    wide = {"name": "wide", "command": ["true"], "resources": {"cpus": 999}}
    path = write_ray_pipeline(tmp_path / "project", prepare, large, wide)

    code = ray_pipelines.run_to_end(path)

    [flow_run, *_] = ray_pipelines.list_pipelines()
    message = ray_pipelines.state(flow_run["id"])[1]
    assert (code, trace.exists()) == (3, False), message
    assert "stages.1.resources.gpus: " in message and "stages.2.resources.cpus: " in message


def find_sleepers() -> list[str]:
    """Return the command lines of the processes that the step function `hang` has started."""
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return [line.decode() for line in lines if b"4711.5" in line]


def test_cancel_of_a_step_on_ray_leaves_no_process(
    ray_pipelines: Pipelines, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    hang = {"name": "hang", "call": "steps:hang", "args": {"trace": str(trace)}}
    path = write_ray_pipeline(tmp_path / "project", hang, {"name": "b", "command": ["true"]})
    process, flow_run_id = ray_pipelines.start(path)
    until(trace.exists, f"the step runs:\n{ray_pipelines.host_env.log('pipeline')}")

    process.send_signal(signal.SIGINT)

    assert process.wait(WITHIN_S) == 130, ray_pipelines.host_env.log("pipeline")
    until(lambda: not find_sleepers(), "no process of the step remains")
    assert ray_pipelines.runs(flow_run_id, "b") == []
    [run] = ray_pipelines.runs(flow_run_id, "hang")
    assert run["state_type"] == "CANCELLED"
