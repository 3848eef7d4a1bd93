"""The gang queue on a real Prefect server, with real workers, real runs and made-up nodes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import Popen
from uuid import UUID, uuid4

import pytest

from tasks.pipeline.stage_runs import cancel_stage_run, create_stage_run, list_stage_runs
from tasks.processes.identity import ProcessId
from tasks.queue.grants import Grant, SchedulerProcess
from tasks.record.states import RunState
from tasks.server.flow_runs import connect_to_server
from tasks.spec.pipeline import Stage
from tests.support.gang_pool import POOL, GangPool, Host, host
from tests.support.host_environment import ROOT, Run, Server, wait_for
from tests.support.prefect_api import send_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ALL = {"n1": 16}
#: Time limit for a decision of the scheduler, in seconds. Even on a busy machine, a correct
#: scheduler decides within this time.
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a Prefect server without a work pool, for all tests of the module."""
    server = Server(tmp_path_factory.mktemp("server"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def served(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GangPool]:
    """Yield a pool with a node of 16 GPUs and a worker, for all tests of the module."""
    home = tmp_path_factory.mktemp("served")
    pool = GangPool(host_env=host("n1", home, server.api), server=server)
    try:
        pool.set_up()
        pool.start_worker()
        yield pool
    finally:
        pool.host_env.clear()


@pytest.fixture
def pool(served: GangPool) -> Iterator[GangPool]:
    """Yield the pool of the module, without runs and with its original settings."""
    served.change()
    yield served
    served.patch(is_paused=False)
    served.cancel_all()


def wait_for_message(run: Run, *texts: str) -> str:
    """Wait until a run is queued with a message that contains all texts, and return the message."""

    def find_message() -> str:
        state = run.flow_run()["state"]
        message = state["message"] or ""
        is_complete = state["name"] == "PendingResources" and all(text in message for text in texts)
        return message if is_complete else ""

    try:
        return wait_for(find_message, f"{run.flow_run_id} waits", WITHIN_S)
    except AssertionError as error:
        raise AssertionError(f"{error}; its state is {run.flow_run()['state']}") from None


def read_grant(run: Run) -> str:
    """Return the granted nodes of a run with their numbers of GPUs, as "n1:8,n2:8"."""
    grant = json.loads(run.flow_run()["labels"]["muster.gang.grant"])
    return ",".join(f"{node}:{gpus}" for node, gpus in grant["nodes"].items())


def wait_for_grant(run: Run) -> str:
    """Wait until a run is admitted, and return its granted nodes."""
    wait_for(lambda: run.state()[0] in ("PENDING", "RUNNING"), f"{run.name} is admitted", WITHIN_S)
    return read_grant(run)


def read_state_types(run: Run) -> list[str]:
    """Return the types of all states of the run, oldest first."""
    state_history = run.host_env.get(f"/flow_run_states/?flow_run_id={run.flow_run_id}")
    return [state["type"] for state in sorted(state_history, key=lambda state: state["timestamp"])]


@pytest.mark.thorough
def test_infeasible_run_fails_at_once_and_the_message_has_the_numbers(pool: GangPool) -> None:
    run = pool.submit(pool.spec(gpus=24))

    message = run.wait_for_state("FAILED")

    assert message.startswith("INFEASIBLE: ")
    assert "1 node with 24 GPUs" in message and "1 with 16 GPUs" in message
    assert read_state_types(run) == ["SCHEDULED", "FAILED"]
    assert run.processes() == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("more", "has_spec", "fault"),
    [({"seed": 1}, True, "unknown parameter seed"), ({}, False, "missing parameter spec")],
)
def test_run_with_wrong_parameters_fails_with_their_names(
    more: dict[str, int], has_spec: bool, fault: str, pool: GangPool
) -> None:
    deployment = pool.host_env.get(f"/deployments/name/train/{POOL}")["id"]
    flow_run = pool.host_env.post(
        f"/deployments/{deployment}/create_flow_run",
        parameters={**({"spec": pool.spec()} if has_spec else {}), **more},
        enforce_parameter_schema=False,
    )
    run = Run(host_env=pool.host_env, flow_run_id=flow_run["id"])

    message = run.wait_for_state("FAILED")

    assert message.startswith(f"USER_ERROR: {fault}: the flow train accepts only")
    wait_for(lambda: run.processes() == [], "the process of the run ends", WITHIN_S)
    assert read_state_types(run)[-1] == "FAILED"


def test_message_of_a_queued_run_names_request_free_gpus_and_blocker(pool: GangPool) -> None:
    holder = pool.hold({"n1": 11})
    run = pool.submit(pool.spec(gpus=12))
    queued_behind = pool.submit(pool.spec(gpus=1))

    message = wait_for_message(run, "free now")
    message_behind = wait_for_message(queued_behind, "behind")

    assert message.startswith("needs 1 node with 12 GPUs; waits for holder-n1 to end")
    assert "free now: 5 on 1 node" in message
    assert f"waits behind {run.name}" in message_behind
    assert run.processes() == queued_behind.processes() == []
    assert holder.state()[0] == "RUNNING"


#: Program of a training with 100,000 steps of 0.2 seconds. Its argument is the metrics file.
STEADY_TRAINING = """
import json, sys, time
for step in range(1, 100_001):
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps({"step": step}) + "\\n")
    time.sleep(0.2)
"""


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_expected_start_of_a_queued_run_follows_from_the_steps_of_the_active_run(
    pool: GangPool,
) -> None:
    metrics = "${attempt.dir}/metrics.jsonl"
    command = [sys.executable, "-I", "-S", "-c", STEADY_TRAINING, metrics]
    active = pool.submit(
        pool.spec(
            gpus=16,
            components={"trainer": {"command": command, "stop": {"grace_s": 2}}},
            progress={"jsonl": metrics, "step": "step", "total": 100_000},
        )
    )
    wait_for_grant(active)
    run = pool.submit(pool.spec(gpus=16))

    wait_for_message(run, "a guess, because at least one of these runs has no `gang.hours`")
    # At first, the scheduler assumes that the active run takes 24 hours. Once a minute, the
    # scheduler estimates the duration from the steps of the active run: about 6 hours.
    wait_for(
        lambda: "assumed" not in wait_for_message(run, " to end, expected "),
        "the expected start follows from the steps",
        4 * WITHIN_S,
    )


def test_cancelled_queued_run_stays_cancelled(pool: GangPool) -> None:
    pool.hold(ALL)
    run = pool.submit(pool.spec())
    second = pool.submit(pool.spec(gpus=8))
    last = pool.submit(pool.spec(gpus=8))
    wait_for_message(run, "holder")
    wait_for_message(second, run.name)

    pool.cancel(run)
    # After the cancellation, `second` is the first run in the queue. So the message of `second`
    # must name the run `holder`, which has the GPUs, and no longer the cancelled run.
    wait_for_message(second, "holder")
    pool.cancel(second)
    wait_for_message(last, "holder")

    assert run.state()[0] == second.state()[0] == "CANCELLED"
    assert "PENDING" not in read_state_types(run) + read_state_types(second)


@pytest.mark.thorough
def test_run_of_a_higher_queue_starts_first(pool: GangPool) -> None:
    holder = pool.hold(ALL)
    idle = pool.submit(pool.spec(gpus=16), queue="idle")
    usual = pool.submit(pool.spec(gpus=16))
    urgent = pool.submit(pool.spec(gpus=16, lasts_s=60), queue="urgent")
    wait_for_message(urgent, "waits for holder")
    wait_for_message(usual, f"behind {urgent.name}")
    wait_for_message(idle, f"behind {urgent.name}")

    pool.set_state(holder, "COMPLETED")

    assert wait_for_grant(urgent) == "n1:16"
    wait_for_message(usual, f"waits for {urgent.name} to end")
    wait_for_message(idle, f"behind {usual.name}")


@pytest.mark.parametrize(
    "has_begun",
    [
        # True: the killed worker had started a process for the run, and this process is dead, too.
        # False: the worker had not started a process for the run.
        True,
        pytest.param(False, marks=pytest.mark.thorough),
    ],
)
def test_run_whose_worker_was_killed_keeps_its_place(pool: GangPool, has_begun: bool) -> None:
    dead_worker = make_dead_process_id()
    pool.hold({"n1": 8})
    pool.patch(is_paused=True)
    run = pool.submit(pool.spec(gpus=8, lasts_s=60))
    younger_run = pool.submit(pool.spec(gpus=8))
    wait_for_message(run, "paused")
    wait_for_message(younger_run, "paused")
    write_grant(run, {"n1": 8}, giver_process=dead_worker)
    pool.set_state(run, "PENDING")
    if has_begun:
        path = f"{run.host_env.api}/flow_runs/{run.flow_run_id}"
        send_request("PATCH", path, {"infrastructure_pid": str(dead_worker.pid)})

    pool.patch(is_paused=False)

    wait_for(
        lambda: read_state_types(run).count("PENDING") > 1, "the run is admitted again", WITHIN_S
    )
    assert "PENDING" not in read_state_types(younger_run)
    assert wait_for_grant(run) == "n1:8"
    wait_for_message(younger_run, "waits for holder-n1 to end")


def make_dead_process_id() -> ProcessId:
    """Return the identity of a process that was killed."""
    with Popen(["sleep", "60"]) as process:
        process_id = ProcessId.of(process.pid)
        process.kill()
    return process_id


def write_grant(run: Run, nodes: dict[str, int], *, giver_process: ProcessId) -> None:
    """Record on the server that the scheduler process `giver_process` granted nodes to a run."""
    giver = SchedulerProcess(host="n1", **giver_process.model_dump())
    state = run.flow_run()["state"]["id"]
    grant = Grant(nodes=nodes, state_id=state, at=time.time(), by=giver)
    send_request("PATCH", f"{run.host_env.api}/flow_runs/{run.flow_run_id}/labels", grant.label())


@pytest.mark.thorough
def test_directly_started_run_waits_in_the_queue(pool: GangPool) -> None:
    pool.hold(ALL)
    first = pool.submit(pool.spec(gpus=16))
    wait_for_message(first, "waits for holder")
    process, run = pool.start(pool.spec())
    wait_for_message(run, f"behind {first.name}")

    process.send_signal(signal.SIGINT)

    assert process.wait(60) == 130, pool.host_env.log("train")
    assert "position 2 of 2 in the queue" in pool.host_env.log("train")
    assert run.state()[0] == "CANCELLED"
    assert pool.read_lines_of(run) == []
    wait_for_message(first, "waits for holder")


@pytest.mark.thorough
def test_run_started_by_a_worker_without_the_queue_waits_in_its_process(
    server: Server, tmp_path: Path
) -> None:
    """A worker of Prefect's type "process" serves the pool, and starts a scheduled run at once."""
    host_env = host("p1", tmp_path, server.api)
    pool = GangPool(host_env=host_env, server=server, name="past", nodes={"p1": 8})
    pool.set_up()
    try:
        holder = pool.hold({"p1": 8})
        pool.start_worker(type="process")
        run = pool.submit(pool.spec(gpus=8))
        # A scheduler may write the same message before the run starts. So wait for RUNNING first.
        run.wait_for_state("RUNNING")
        wait_for_message(run, "waits for holder-p1 to end")
        assert (run.state()[0], pool.read_lines_of(run)) == ("RUNNING", [])

        pool.set_state(holder, "COMPLETED")

        run.wait_for_state("COMPLETED")
        assert [line["what"] for line in pool.read_lines_of(run)] == ["start", "placed", "end"]
        assert read_grant(run) == "p1:8"
    finally:
        pool.cancel_all()
        host_env.clear()


@pytest.mark.thorough
def test_repeated_creation_of_a_pipeline_stage_makes_one_run(pool: GangPool) -> None:
    """The pipeline's process may be killed after it creates a run and before it records the run.

    Two processes may also create the run of a stage at the same time.
    """
    pool.patch(is_paused=True)
    flow = pool.host_env.post("/flows/", name="pipeline")["id"]
    pipeline = UUID(pool.host_env.post("/flow_runs/", flow_id=flow)["id"])
    stage = Stage.model_validate({"name": "sft", "deployment": f"train/{POOL}"})

    with connect_to_server(pool.host_env.api) as client:
        created_runs = [
            create_stage_run(client, pipeline, stage, number, spec=pool.spec(), tags=["mine"])
            for number in (1, 1, 2, 1)
        ]
        for run in created_runs:
            pool.record_run(run.flow_run_id, pool.spec())
        cancel_stage_run(client, created_runs[0])
        listed_runs = list_stage_runs(client, pipeline)

    # The test does not compare the names and states of the runs, because a scheduler may change the
    # names and states at any time.
    assert [run.number for run in created_runs] == [1, 1, 2, 1]
    assert (
        created_runs[0].flow_run_id
        == created_runs[1].flow_run_id
        == created_runs[3].flow_run_id
        != created_runs[2].flow_run_id
    )
    assert {(run.number, run.ending) for run in listed_runs} == {(1, RunState.CANCELLED), (2, None)}
    pipeline_filter = {"id": {"any_": [str(pipeline)]}}
    tasks = pool.host_env.post("/task_runs/filter", flow_runs=pipeline_filter)
    assert {(task["name"], task["state"]["type"]) for task in tasks} == {
        ("sft", "CANCELLED"),
        ("sft, try 2", "SCHEDULED"),
    }


@pytest.mark.thorough
def test_worker_starts_a_run_that_the_scheduler_of_another_pool_found(
    pool: GangPool, tmp_path: Path
) -> None:
    """One worker finds the due runs of all pools. Each run is started by a worker of its own pool.

    In this test, the worker `n1` of the pool `gang` finds a run of the pool `other`. The worker
    `n9` of the pool `other` must start this run.
    """
    other_host = host("n9", tmp_path, pool.host_env.api)
    other_pool = GangPool(host_env=other_host, server=pool.server, name="other", nodes={"n9": 2})
    other_pool.set_up()
    try:
        other_pool.start_worker()
        run = other_pool.submit(other_pool.spec(gpus=2, lasts_s=0.2))

        run.wait_for_state("COMPLETED")

        assert [
            line["host"] for line in other_pool.read_lines_of(run) if line["what"] == "start"
        ] == ["n9"]
        assert other_host.events(run.flow_run_id, "muster.run.offered")
    finally:
        other_pool.cancel_all()
        other_host.clear()


@pytest.mark.thorough
def test_runs_of_one_schedule_have_different_ids_and_records(
    pool: GangPool,
) -> None:
    """The ids of flow runs that are created together begin with the same eight digits.

    Each run must still get its own record.
    """
    deployment = pool.host_env.get(f"/deployments/name/train/{pool.name}")["id"]
    spec = pool.spec(lasts_s=0.2)
    api = f"{pool.host_env.api}/deployments/{deployment}"
    schedule = {"interval": 3600, "anchor_date": "2026-01-01T00:00:00Z"}
    ids_before = {run["id"] for run in pool.host_env.flow_runs()}
    now = datetime.now(UTC)
    schedules = [{"active": True, "schedule": schedule, "parameters": {"spec": spec}}]
    [created_schedule] = send_request("POST", f"{api}/schedules", schedules)
    try:
        span = {"start_time": str(now - timedelta(hours=5)), "end_time": str(now)}
        send_request("POST", f"{api}/schedule", {**span, "min_runs": 4, "max_runs": 4})
        ids = {run["id"] for run in pool.host_env.flow_runs()} - ids_before
        for flow_run_id in ids:
            pool.record_run(flow_run_id, spec)
        pool.wait_until_all_end(WITHIN_S)
    finally:
        send_request("DELETE", f"{api}/schedules/{created_schedule['id']}")

    runs = [Run(host_env=pool.host_env, flow_run_id=flow_run_id) for flow_run_id in ids]
    assert len(ids) >= 4 and len({flow_run_id[:8] for flow_run_id in ids}) == 1
    records = [json.loads(run.record_path().read_text()) for run in runs]
    assert {record["flow_run_id"] for record in records} == ids
    assert [len(record["attempts"]) for record in records] == [1] * len(ids)
    started = [
        line["run"] for run in runs for line in pool.read_lines_of(run) if line["what"] == "start"
    ]
    assert len(started) == len(set(started)) == len(ids)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_devices_of_a_killed_direct_run_are_free_within_a_minute(tmp_path: Path) -> None:
    # This server has no work pool. The host has neither a worker nor a maintenance process.
    server = Server(tmp_path / "server")
    variables = {"MUSTER_HOST": "lone", "MUSTER_GPUS": "0,1"}
    lone_host = Host(home=tmp_path / "lone", api=server.api, variables=variables)
    pool = GangPool(host_env=lone_host, server=server)
    lone_host.home.mkdir()
    try:
        server.start()
        killed, first = pool.start(pool.spec(gpus=2, lasts_s=600.0))
        wait_for(lambda: pool.read_lines_of(first), "the first run holds the GPUs", WITHIN_S)
        killed.kill()
        killed.wait()

        next_process, _ = pool.start(pool.spec(gpus=2, lasts_s=0.2))

        assert next_process.wait(WITHIN_S) == 0
        assert first.state()[0] == "CRASHED"
        assert first.processes() == []
    finally:
        lone_host.clear()
        server.kill()


#: Line of the kernel log in which NVIDIA's driver reports a lost GPU.
XID = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."


@pytest.mark.thorough
def test_failing_node_is_avoided_and_drained_after_a_second_failed_run(
    server: Server, tmp_path: Path
) -> None:
    first_host = host("a1", tmp_path / "a1", server.api)
    second_host = host("a2", tmp_path / "a2", server.api)
    pool = GangPool(host_env=first_host, server=server, name="hosts", nodes={"a1": 8, "a2": 8})
    pool.set_up()
    command_that_fails_on_a1 = f'case "$MUSTER_NODES" in a1*) echo "{XID}" >&2; exit 1;; esac'
    spec = pool.spec(
        gpus=8,
        components={"trainer": {"command": ["sh", "-c", command_that_fails_on_a1]}},
        retry={"GPU_HARDWARE": {"attempts": 2, "delay_s": 1}},
    )

    def wait_for_nodes(run: Run) -> str:
        """Wait until the run has completed, and return its granted nodes."""
        run.wait_for_state("COMPLETED")
        return read_grant(run)

    def count_requeues(run: Run) -> int:
        """Return how often the run was returned to the queue."""
        read_state_types = first_host.get(f"/flow_run_states/?flow_run_id={run.flow_run_id}")
        return sum(state["name"] == "PendingResources" for state in read_state_types)

    try:
        pool.start_worker()
        pool.start_worker(on=second_host)
        first = pool.submit(spec)
        assert wait_for_nodes(first) == "a2:8"
        assert count_requeues(first) == 1
        second = pool.submit(spec)
        assert wait_for_nodes(second) == "a2:8"
        third = pool.submit(spec)

        assert wait_for_nodes(third) == "a2:8"

        assert count_requeues(third) == 0
        event_filter = {"event": {"name": ["muster.node.drained"]}}
        [drain_event] = first_host.post("/events/filter", filter=event_filter)["events"]
        assert drain_event["payload"]["node"] == "a1"
        assert drain_event["payload"]["by"] == second.name
        assert "GPU_HARDWARE" in drain_event["payload"]["reason"]
        output = subprocess.run(
            [sys.executable, "-m", "tasks.command", "queue", "--pool", "hosts"],
            env=first_host.env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "a1 is drained until " in output and f"the failure of {second.name}" in output
    finally:
        pool.cancel_all()
        first_host.clear()
        second_host.clear()


#: Code of a fake of NVIDIA's library `libnvidia-ml.so.1`, in C. The fake library reads the number
#: of GPUs from a file.
#:
#: A fake of the Python module `pynvml` would not suffice. Muster's own processes ignore PYTHONPATH,
#: so these processes would import the real module.
DRIVER = """
#include <stdio.h>
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    FILE *file = fopen("COUNT", "r");
    int fields = file ? fscanf(file, "%u", count) : 0;
    if (file) fclose(file);
    return fields == 1 ? 0 : 999;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) {
    *gpu = (void *)(unsigned long)(index + 1);
    return 0;
}
int nvmlDeviceGetUUID(void *gpu, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-TAG-%lu", (unsigned long)gpu - 1);
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *gpu, void *memory) { return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *count, void *processes) {
    *count = 0;
    return 0;
}
"""


def build_driver(directory: Path, gpu_count_file: Path) -> None:
    """Compile a fake of NVIDIA's driver library into a directory.

    The fake library reads the number of GPUs from `gpu_count_file`.
    """
    source = directory / "driver.c"
    source.write_text(DRIVER.replace("COUNT", str(gpu_count_file)).replace("TAG", str(uuid4())))
    library = directory / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_run_is_requeued_before_start_if_its_node_lost_a_gpu(
    server: Server, tmp_path: Path
) -> None:
    gpu_count_file = tmp_path / "gpus"
    build_driver(tmp_path, gpu_count_file)
    gpu_count_file.write_text("8")
    gpu_host = host("b1", tmp_path / "b1", server.api)
    gpu_host.variables = {**gpu_host.variables, "LD_LIBRARY_PATH": str(tmp_path)}
    pool = GangPool(host_env=gpu_host, server=server, name="driver", nodes={"b1": 8})
    pool.set_up()
    try:
        pool.start_worker()
        pool.submit(pool.spec(gpus=8, lasts_s=0.1)).wait_for_state("COMPLETED")
        gpu_count_file.write_text("7")
        run = pool.submit(pool.spec(gpus=8, lasts_s=0.1))
        wait_for(
            lambda: (run.flow_run()["run_count"] or 0) and run.state()[0] == "SCHEDULED",
            "the run is queued again",
        )
        assert pool.read_lines_of(run) == []
        gpu_count_file.write_text("8")

        run.wait_for_state("COMPLETED")
    finally:
        pool.cancel_all()
        gpu_host.clear()

    first_attempt = json.loads(run.record_path().read_text())["attempts"][0]
    assert first_attempt["failure"]["kind"] == "INSUFFICIENT_RESOURCES"
    assert "GPU 7 of b1 is missing or unhealthy" in first_attempt["failure"]["message"]
    assert not any(component["started_at"] for component in first_attempt["components"].values())
