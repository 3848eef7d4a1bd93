"""Pipelines on a real server, whose stages are real runs of a real gang worker."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.processes.identity import host_name
from tasks.server import flow_runs
from tasks.upkeep.reconcile import reconcile_host
from tests.support.gang_pool import GangPool, host, left_of
from tests.support.ground import FINAL, ROOT, Ground, Run, Server
from tests.support.ground import until as until_within
from tests.support.prefect_api import ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.thorough]

#: How long anything may take: each stage is a process of Prefect's, and so is each pipeline.
WITHIN_S = 300.0
until = partial(until_within, within_s=WITHIN_S)
#: A component: what it was given goes to a file, a checkpoint is left, and it ends when it may.
PART = """
import os, pathlib, sys, time
given, out, go, code = sys.argv[1:5]
folder = pathlib.Path(out) / "checkpoints"
folder.mkdir(exist_ok=True)
(folder / "step-000003.txt").write_text("weights of " + os.environ["MUSTER_RUN_ID"])
(pathlib.Path(out) / "given.txt").write_text(pathlib.Path(given).read_text() if given else "none")
print("up", flush=True)
while go and not os.path.exists(go):
    time.sleep(0.05)
sys.exit(int(code))
"""


@dataclass(kw_only=True)
class Pipelines:
    """The pool of a test, with a worker, and pipelines on it."""

    pool: GangPool
    #: A file: stages that wait for it may end once it is there.
    go: Path

    @property
    def ground(self) -> Ground:
        return self.pool.ground

    def stage(
        self, name: str, given: str = "", *, waits: bool = False, code: int = 0, **more: Any
    ) -> dict[str, Any]:
        """One stage.

        Args:
            waits: it ends only once `go` is there.
            code: its exit code.
        """
        go = str(self.go) if waits else ""
        command = [sys.executable, "-I", "-c", PART, given, "${run.dir}", go, str(code)]
        trainer = {
            "command": command,
            "checkpoints": "${run.dir}/checkpoints",
            "ready": {"log": "up"},
            "stop": {"grace_s": 2},
        }
        spec = {"name": name, "workload": "sft", "components": {"trainer": trainer}, **more}
        return {"name": name, "deployment": "train/gang", "spec": spec}

    def written(self, *stages: Mapping[str, Any]) -> Path:
        path = self.ground.home / "pipeline.yaml"
        content = {"name": "two", "tags": ["mine"], "stages": list(stages)}
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    def start(self, *arguments: str | Path) -> tuple[Popen[bytes], str]:
        """`python -m flows.pipeline`, and the id of its flow run."""
        seen = {run["id"] for run in self.known()}
        process = self.ground.start("-m", "flows.pipeline", *map(str, arguments), log="pipeline")

        def new() -> str:
            assert process.poll() is None, self.ground.log("pipeline")
            return next((run["id"] for run in self.known() if run["id"] not in seen), "")

        return process, until(new, "a flow run of the pipeline")

    def command(self, *arguments: str | Path) -> int:
        """The exit code of `python -m flows.pipeline`."""
        started = self.ground.start("-m", "flows.pipeline", *map(str, arguments), log="pipeline")
        return started.wait(WITHIN_S)

    def submit(self, *stages: Mapping[str, Any]) -> str:
        """As a deployment of the pool `pipelines`; the id of the flow run."""
        deployment = self.ground.get("/deployments/name/pipeline/two")["id"]
        spec = {"name": "two", "stages": list(stages)}
        path = f"/deployments/{deployment}/create_flow_run"
        return str(self.ground.post(path, parameters={"spec": spec})["id"])

    def known(self) -> list[dict[str, Any]]:
        """Flow runs of pipelines, the youngest first."""
        flows = {"name": {"any_": ["pipeline"]}}
        found: list[dict[str, Any]] = self.ground.post(
            "/flow_runs/filter", flows=flows, sort="EXPECTED_START_TIME_DESC"
        )
        return found

    def state(self, flow_run_id: str) -> tuple[str, str]:
        state = self.ground.get(f"/flow_runs/{flow_run_id}")["state"]
        return state["type"], state["message"] or ""

    def until_state(self, flow_run_id: str, *types: str) -> str:
        """The message of the state."""
        until(lambda: self.state(flow_run_id)[0] in types, f"{flow_run_id} is {types}")
        return self.state(flow_run_id)[1]

    def runs(self, flow_run_id: str, stage: str = "") -> list[dict[str, Any]]:
        """Those of a stage; of all, where none is named."""
        children = {"parent_flow_run_id": {"any_": [flow_run_id]}}
        found = self.ground.post("/flow_runs/filter", flow_runs=children)
        return [run for run in found if f"-{stage}" in run["idempotency_key"]]

    def until_running(self, flow_run_id: str, stage: str) -> Run:
        """The run of the stage, once its components are up."""

        def running() -> Run | None:
            for run in self.runs(flow_run_id, stage):
                if (run["state"]["message"] or "").startswith("running:"):
                    return Run(ground=self.ground, flow_run_id=run["id"])
            return None

        found = until(running, f"stage {stage} runs:\n{self.ground.log('pipeline')}")
        assert found is not None
        return found

    def given(self, run: Mapping[str, Any]) -> str:
        return (self.ground.home / "runs" / run["name"] / "given.txt").read_text()

    def let_go(self) -> None:
        self.go.touch()

    def start_worker(self) -> Popen[bytes]:
        """Of the pool `pipelines`. Returns: once it takes them."""
        before = self.ground.log("pipelines").count("started!")
        options = ("--pool", "pipelines", "--name", host_name(), "--install-policy", "never")
        worker = self.ground.start("-m", "deployments.worker", *options, log="pipelines")
        until(lambda: self.ground.log("pipelines").count("started!") > before, "a worker")
        return worker

    def pid_of(self, flow_run_id: str) -> int:
        """Of the process that a worker has started for a pipeline."""

        def found() -> int:
            pids = Run(ground=self.ground, flow_run_id=flow_run_id).processes()
            programs = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
            engines = [pid for pid, line in programs.items() if b"prefect" in line]
            return max(engines, default=0)

        return until(found, "a process of the pipeline")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GangPool]:
    """A server with both pools, and a worker for runs."""
    server = Server(tmp_path_factory.mktemp("server"))
    ground = host("n1", tmp_path_factory.mktemp("home"), server.api)
    pool = GangPool(ground=ground, server=server)
    try:
        server.start()
        pool.set_up()
        _set_up_pipelines(ground)
        pool.start_worker()
        yield pool
    finally:
        pool.ground.clear()
        server.kill()


def _set_up_pipelines(ground: Ground) -> None:
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    ground.post("/work_pools/", name="pipelines", type="process", base_job_template=template)
    flow = ground.post("/flows/", name="pipeline")["id"]
    here = {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}
    deployment = {
        "name": "two",
        "flow_id": flow,
        "work_pool_name": "pipelines",
        "entrypoint": "flows/pipeline.py:pipeline",
        "path": str(ROOT),
        "pull_steps": [here],
    }
    ask("POST", f"{ground.api}/deployments/", deployment)


@pytest.fixture
def pipelines(served: GangPool, tmp_path: Path) -> Iterator[Pipelines]:
    """Nothing of a test's pipelines is left after it."""
    pipelines = Pipelines(pool=served, go=tmp_path / "go")
    yield pipelines
    for run in pipelines.known():
        if run["state_type"] not in FINAL:
            path = f"/flow_runs/{run['id']}/set_state"
            served.ground.post(path, state={"type": "CANCELLED"}, force=True)
        for stage in pipelines.runs(run["id"]):
            served.note(stage["id"], stage["parameters"]["spec"])
    # Prefect's own last words on a run are a process, too.
    until(lambda: not left_of(served) or not all_ended(served), "nothing is left")
    served.empty()


def all_ended(pool: GangPool) -> bool:
    return all(run["state_type"] in FINAL for run in pool.flow_runs().values())


@pytest.fixture
def worker(pipelines: Pipelines) -> Iterator[Popen[bytes]]:
    """Of the pool of pipelines."""
    worker = pipelines.start_worker()
    yield worker
    if worker.poll() is None:
        worker.terminate()
        worker.wait(WITHIN_S)


def test_a_checkpoint_is_handed_from_one_run_to_the_next(pipelines: Pipelines) -> None:
    path = pipelines.written(
        pipelines.stage("first"), pipelines.stage("second", "${stage.first.checkpoint}")
    )

    code = pipelines.command(path)

    assert code == 0, pipelines.ground.log("pipeline")
    [flow_run, *_] = pipelines.known()
    [first] = pipelines.runs(flow_run["id"], "first")
    [second] = pipelines.runs(flow_run["id"], "second")
    assert pipelines.given(first) == "none"
    assert pipelines.given(second) == f"weights of {first['name']}"
    assert second["start_time"] >= first["end_time"]
    assert {"mine", "pipeline:two"} <= set(second["tags"]) & set(flow_run["tags"])
    # The UI links both ways: the pipeline has a task run for each, with the run as its child.
    some = {"flow_runs": {"id": {"any_": [flow_run["id"]]}}}
    tasks = pipelines.ground.post("/task_runs/filter", **some)
    children = {task["name"]: task["state"]["state_details"]["child_flow_run_id"] for task in tasks}
    assert children == {"first": first["id"], "second": second["id"]}


def test_a_mended_stage_is_tried_anew_and_what_was_done_is_not(pipelines: Pipelines) -> None:
    given = "${stage.first.checkpoint}"
    path = pipelines.written(pipelines.stage("first"), pipelines.stage("second", given, code=3))
    failed = pipelines.command(path)
    [flow_run, *_] = pipelines.known()
    kind, message = pipelines.state(flow_run["id"])
    [first] = pipelines.runs(flow_run["id"], "first")
    [second] = pipelines.runs(flow_run["id"], "second")

    mend = "second.components.trainer.command.7='0'"
    mended = pipelines.command(path, "--set", mend, "--resume", flow_run["id"])

    assert (failed, kind) == (1, "FAILED")
    assert message.startswith("stage second: ") and "exit code 3" in message
    assert f"runs/flow-run/{second['id']}" in message
    assert mended == 0, pipelines.ground.log("pipeline")
    assert [run["id"] for run in pipelines.runs(flow_run["id"], "first")] == [first["id"]]
    tries = pipelines.runs(flow_run["id"], "second")
    assert sorted(run["state_type"] for run in tries) == ["COMPLETED", "FAILED"]
    assert {pipelines.given(run) for run in tries} == {f"weights of {first['name']}"}
    assert pipelines.state(flow_run["id"])[0] == "COMPLETED"


def test_the_run_of_a_killed_pipeline_goes_on_and_is_taken_up(pipelines: Pipelines) -> None:
    path = pipelines.written(pipelines.stage("first", waits=True), pipelines.stage("second"))
    process, flow_run_id = pipelines.start(path)
    first = pipelines.until_running(flow_run_id, "first")

    process.kill()
    process.wait()
    still_runs = first.is_running()
    again = pipelines.ground.start("-m", "flows.pipeline", "--resume", flow_run_id, log="pipeline")
    until(lambda: "is taken up" in pipelines.ground.log("pipeline"), "it is taken up")
    pipelines.let_go()

    assert still_runs
    assert again.wait(WITHIN_S) == 0, pipelines.ground.log("pipeline")
    assert [run["id"] for run in pipelines.runs(flow_run_id, "first")] == [first.flow_run_id]
    assert len(pipelines.runs(flow_run_id, "second")) == 1


def test_a_pipeline_whose_process_lives_is_not_resumed(pipelines: Pipelines) -> None:
    path = pipelines.written(pipelines.stage("first", waits=True))
    process, flow_run_id = pipelines.start(path)
    pipelines.until_running(flow_run_id, "first")

    code = pipelines.command("--resume", flow_run_id)

    assert code == 1
    assert "may have a process: cancel it first" in pipelines.ground.log("pipeline")
    pipelines.let_go()
    assert process.wait(WITHIN_S) == 0


def test_an_interrupt_ends_the_stage_and_no_later_one_begins(pipelines: Pipelines) -> None:
    path = pipelines.written(pipelines.stage("first", waits=True), pipelines.stage("second"))
    process, flow_run_id = pipelines.start(path)
    first = pipelines.until_running(flow_run_id, "first")

    process.send_signal(signal.SIGINT)

    assert process.wait(WITHIN_S) == 130, pipelines.ground.log("pipeline")
    assert first.state()[0] == "CANCELLED"
    assert pipelines.runs(flow_run_id, "second") == []
    kind, message = pipelines.state(flow_run_id)
    assert kind == "CANCELLED"
    assert message == "interrupted by SIGINT; stage first: Cancelled"


def cancel(pipelines: Pipelines, flow_run_id: str) -> None:
    """As the button of the UI does."""
    path = f"/flow_runs/{flow_run_id}/set_state"
    pipelines.ground.post(path, state={"type": "CANCELLING", "name": "Cancelling"})


def test_a_cancel_while_it_waits_cancels_both(pipelines: Pipelines, worker: Popen[bytes]) -> None:
    pipelines.pool.hold({"n1": 16})
    first = pipelines.stage("first", gang={"nodes": 1, "gpus_per_node": 8})
    flow_run_id = pipelines.submit(first, pipelines.stage("second"))
    until(lambda: "PendingResources" in pipelines.state(flow_run_id)[1], "its stage waits")

    cancel(pipelines, flow_run_id)

    pipelines.until_state(flow_run_id, "CANCELLED")
    [run] = pipelines.runs(flow_run_id, "first")
    assert run["state_type"] == "CANCELLED"
    assert pipelines.runs(flow_run_id, "second") == []


def test_a_cancel_while_it_runs_cancels_both(pipelines: Pipelines, worker: Popen[bytes]) -> None:
    stages = (pipelines.stage("first", waits=True), pipelines.stage("second"))
    flow_run_id = pipelines.submit(*stages)
    first = pipelines.until_running(flow_run_id, "first")

    cancel(pipelines, flow_run_id)

    pipelines.until_state(flow_run_id, "CANCELLED")
    first.until_state("CANCELLED")
    first.until_gone()
    assert pipelines.runs(flow_run_id, "second") == []


def test_a_retry_from_the_ui_begins_where_due(pipelines: Pipelines, worker: Popen[bytes]) -> None:
    # It fails until the file is there.
    second = pipelines.stage("second")
    code = (
        f"import pathlib, sys; sys.exit(0 if pathlib.Path({str(pipelines.go)!r}).exists() else 3)"
    )
    second["spec"]["components"] = {"trainer": {"command": [sys.executable, "-c", code]}}
    flow_run_id = pipelines.submit(pipelines.stage("first"), second)
    pipelines.until_state(flow_run_id, "FAILED")

    pipelines.let_go()
    path = f"/flow_runs/{flow_run_id}/set_state"
    pipelines.ground.post(path, state={"type": "SCHEDULED", "name": "AwaitingRetry"}, force=True)

    pipelines.until_state(flow_run_id, "COMPLETED")
    assert len(pipelines.runs(flow_run_id, "first")) == 1
    assert len(pipelines.runs(flow_run_id, "second")) == 2


def test_a_killed_process_of_a_deployment_is_followed_by_another_one(
    pipelines: Pipelines, worker: Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = (pipelines.stage("first", waits=True), pipelines.stage("second"))
    flow_run_id = pipelines.submit(*stages)
    pipelines.until_running(flow_run_id, "first")

    # With its worker, which would call it Crashed.
    os.kill(worker.pid, signal.SIGKILL)
    os.kill(pipelines.pid_of(flow_run_id), signal.SIGKILL)
    monkeypatch.setenv("MUSTER_HOME", str(pipelines.ground.home))
    monkeypatch.setattr(flow_runs, "_SETTLED_AFTER", flow_runs._SETTLED_AFTER * 0)
    with temporary_settings({PREFECT_API_URL: pipelines.ground.api}):
        until(lambda: reconcile_host().acted, "it is found")
    kind, message = pipelines.state(flow_run_id)
    pipelines.start_worker()
    pipelines.let_go()

    assert kind == "SCHEDULED" and "its next process goes on where it was" in message
    pipelines.until_state(flow_run_id, "COMPLETED")
    assert len(pipelines.runs(flow_run_id, "first")) == 1
