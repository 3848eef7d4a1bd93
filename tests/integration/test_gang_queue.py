"""The gang queue on a real server, with real workers and real runs on a table of nodes."""

from __future__ import annotations

import json
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
from tasks.queue.grants import Giver, Grant
from tasks.record.states import RunState
from tasks.server.flow_runs import talking_to
from tasks.spec.pipeline import Stage
from tests.support.gang_pool import POOL, GangPool, host
from tests.support.ground import ROOT, Run, Server, until
from tests.support.prefect_api import ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ALL = {"n1": 16}
#: No answer of the gate takes longer, unless it never comes.
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that has no pool yet, for all of the module."""
    server = Server(tmp_path_factory.mktemp("server"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def served(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GangPool]:
    """A pool with a node of 16 GPUs, and its worker."""
    home = tmp_path_factory.mktemp("served")
    pool = GangPool(ground=host("n1", home, server.api), server=server)
    try:
        pool.set_up()
        pool.start_worker()
        yield pool
    finally:
        pool.ground.clear()


@pytest.fixture
def pool(served: GangPool) -> Iterator[GangPool]:
    """The same without any run, and as it was first set."""
    served.change()
    yield served
    served.patch(is_paused=False)
    served.empty()


def says(run: Run, *texts: str) -> str:
    """The message of a run that waits, once it has all these texts."""

    def found() -> str:
        state = run.flow_run()["state"]
        message = state["message"] or ""
        is_it = state["name"] == "PendingResources" and all(text in message for text in texts)
        return message if is_it else ""

    try:
        return until(found, f"{run.flow_run_id} waits", WITHIN_S)
    except AssertionError as error:
        raise AssertionError(f"{error}; it says {run.flow_run()['state']}") from None


def placed(run: Run) -> str:
    grant = json.loads(run.flow_run()["labels"]["muster.gang.grant"])
    return ",".join(f"{node}:{gpus}" for node, gpus in grant["nodes"].items())


def given(run: Run) -> str:
    """The nodes of a run, once it has been admitted."""
    until(lambda: run.state()[0] in ("PENDING", "RUNNING"), f"{run.name} is admitted", WITHIN_S)
    return placed(run)


def states(run: Run) -> list[str]:
    """All that it has been in, in order."""
    found = run.ground.get(f"/flow_run_states/?flow_run_id={run.flow_run_id}")
    return [state["type"] for state in sorted(found, key=lambda state: state["timestamp"])]


@pytest.mark.thorough
def test_gang_that_can_never_fit_fails_at_once_with_the_numbers(pool: GangPool) -> None:
    run = pool.submit(pool.spec(gpus=24))

    message = run.until_state("FAILED")

    assert message.startswith("INFEASIBLE: ")
    assert "1 node with 24 GPUs" in message and "1 with 16 GPUs" in message
    assert states(run) == ["SCHEDULED", "FAILED"]
    assert run.processes() == []


def test_waiting_run_says_what_it_asks_what_is_free_and_what_it_waits_for(pool: GangPool) -> None:
    holder = pool.hold({"n1": 11})
    run = pool.submit(pool.spec(gpus=12))
    behind = pool.submit(pool.spec(gpus=1))

    first, second = says(run, "free now"), says(behind, "behind")

    assert first.startswith("asks for 1 node with 12 GPUs; waits for holder-n1 to end")
    assert "free now: 5 on 1 node" in first
    assert f"waits behind {run.name}" in second
    assert run.processes() == behind.processes() == []
    assert holder.state()[0] == "RUNNING"


def test_cancel_of_a_waiting_run_sticks(pool: GangPool) -> None:
    pool.hold(ALL)
    run = pool.submit(pool.spec())
    behind, last = pool.submit(pool.spec(gpus=8)), pool.submit(pool.spec(gpus=8))
    says(run, "holder")
    says(behind, run.name)

    pool.cancel(run)
    # By then the gate has decided twice again.
    says(behind, "holder")
    pool.cancel(behind)
    says(last, "holder")

    assert run.state()[0] == behind.state()[0] == "CANCELLED"
    assert "PENDING" not in states(run) + states(behind)


@pytest.mark.thorough
def test_run_of_a_higher_queue_goes_first(pool: GangPool) -> None:
    holder = pool.hold(ALL)
    idle = pool.submit(pool.spec(gpus=16), queue="idle")
    usual = pool.submit(pool.spec(gpus=16))
    urgent = pool.submit(pool.spec(gpus=16, lasts_s=60), queue="urgent")
    says(urgent, "waits for holder")
    says(usual, f"behind {urgent.name}")
    says(idle, f"behind {urgent.name}")

    pool.set_state(holder, "COMPLETED")

    assert given(urgent) == "n1:16"
    says(usual, f"waits for {urgent.name} to end")
    says(idle, f"behind {usual.name}")


@pytest.mark.parametrize(
    "has_begun",
    [
        # A process was there to prepare the flow's, and went with the worker.
        True,
        pytest.param(False, marks=pytest.mark.thorough),
    ],
)
def test_run_whose_worker_was_killed_keeps_its_place(pool: GangPool, has_begun: bool) -> None:
    gone = killed_process()
    pool.hold({"n1": 8})
    pool.patch(is_paused=True)
    run, younger = pool.submit(pool.spec(gpus=8, lasts_s=60)), pool.submit(pool.spec(gpus=8))
    says(run, "paused")
    says(younger, "paused")
    give(run, {"n1": 8}, by=gone)
    pool.set_state(run, "PENDING")
    if has_begun:
        path = f"{run.ground.api}/flow_runs/{run.flow_run_id}"
        ask("PATCH", path, {"infrastructure_pid": str(gone.pid)})

    pool.patch(is_paused=False)

    until(lambda: states(run).count("PENDING") > 1, "it is admitted again", WITHIN_S)
    assert "PENDING" not in states(younger)
    assert given(run) == "n1:8"
    says(younger, "waits for holder-n1 to end")


def killed_process() -> ProcessId:
    with Popen(["sleep", "60"]) as process:
        found = ProcessId.of(process.pid)
        process.kill()
    return found


def give(run: Run, nodes: dict[str, int], *, by: ProcessId) -> None:
    """A grant, as that process would have noted it."""
    giver = Giver(host="n1", **by.model_dump())
    state = run.flow_run()["state"]["id"]
    grant = Grant(nodes=nodes, state_id=state, at=time.time(), by=giver)
    ask("PATCH", f"{run.ground.api}/flow_runs/{run.flow_run_id}/labels", grant.label())


@pytest.mark.thorough
def test_run_that_is_started_directly_waits_in_line(pool: GangPool) -> None:
    pool.hold(ALL)
    first = pool.submit(pool.spec(gpus=16))
    says(first, "waits for holder")
    process, run = pool.start(pool.spec())
    says(run, f"behind {first.name}")

    process.send_signal(signal.SIGINT)

    assert process.wait(60) == 130, pool.ground.log("train")
    assert "place 2 of 2 in line" in pool.ground.log("train")
    assert run.state()[0] == "CANCELLED"
    assert pool.noted(run) == []
    says(first, "waits for holder")


@pytest.mark.thorough
def test_run_past_the_gate_waits_in_its_own_process(server: Server, tmp_path: Path) -> None:
    """A worker of another type serves the pool: it starts whatever is due."""
    ground = host("p1", tmp_path, server.api)
    pool = GangPool(ground=ground, server=server, name="past", nodes={"p1": 8})
    pool.set_up()
    try:
        holder = pool.hold({"p1": 8})
        pool.start_worker(type="process")
        run = pool.submit(pool.spec(gpus=8))
        # Until it is started, another pool's worker may say the same of it.
        run.until_state("RUNNING")
        says(run, "waits for holder-p1 to end")
        assert (run.state()[0], pool.noted(run)) == ("RUNNING", [])

        pool.set_state(holder, "COMPLETED")

        run.until_state("COMPLETED")
        assert [line["what"] for line in pool.noted(run)] == ["start", "placed", "end"]
        assert placed(run) == "p1:8"
    finally:
        pool.empty()
        ground.clear()


@pytest.mark.thorough
def test_a_stage_of_a_pipeline_has_one_run_however_often_it_is_created(pool: GangPool) -> None:
    """Its process may be killed between creating and noting, and two may do it at once."""
    pool.patch(is_paused=True)
    flow = pool.ground.post("/flows/", name="pipeline")["id"]
    pipeline = UUID(pool.ground.post("/flow_runs/", flow_id=flow)["id"])
    stage = Stage.model_validate({"name": "sft", "deployment": f"train/{POOL}"})

    with talking_to(pool.ground.api) as client:
        made = [
            create_stage_run(client, pipeline, stage, number, spec=pool.spec(), tags=["mine"])
            for number in (1, 1, 2, 1)
        ]
        for run in made:
            pool.note(run.flow_run_id, pool.spec())
        cancel_stage_run(client, made[0])
        found = list_stage_runs(client, pipeline)

    # Its name and its state change meanwhile: a worker's gate looks after the paused pool.
    assert [run.number for run in made] == [1, 1, 2, 1]
    assert made[0].flow_run_id == made[1].flow_run_id == made[3].flow_run_id != made[2].flow_run_id
    assert {(run.number, run.ending) for run in found} == {(1, RunState.CANCELLED), (2, None)}
    some = {"id": {"any_": [str(pipeline)]}}
    tasks = pool.ground.post("/task_runs/filter", flow_runs=some)
    assert {(task["name"], task["state"]["type"]) for task in tasks} == {
        ("sft", "CANCELLED"),
        ("sft, try 2", "SCHEDULED"),
    }


@pytest.mark.thorough
def test_another_pools_worker_starts_what_the_worker_that_looks_has_found(
    pool: GangPool, tmp_path: Path
) -> None:
    """`n1` of the pool `gang` is the first by pool and name: it looks for this host too."""
    there = host("n9", tmp_path, pool.ground.api)
    other = GangPool(ground=there, server=pool.server, name="other", nodes={"n9": 2})
    other.set_up()
    try:
        other.start_worker()
        run = other.submit(other.spec(gpus=2, lasts_s=0.2))

        run.until_state("COMPLETED")

        assert [line["host"] for line in other.noted(run) if line["what"] == "start"] == ["n9"]
        assert there.events(run.flow_run_id, "muster.run.offered")
    finally:
        other.empty()
        there.clear()


@pytest.mark.thorough
def test_runs_that_the_scheduler_makes_in_one_go_have_ids_and_records_of_their_own(
    pool: GangPool,
) -> None:
    """Their flow runs' ids begin alike: they are made in one go, and a clock comes first."""
    deployment = pool.ground.get(f"/deployments/name/train/{pool.name}")["id"]
    spec, api = pool.spec(lasts_s=0.2), f"{pool.ground.api}/deployments/{deployment}"
    schedule = {"interval": 3600, "anchor_date": "2026-01-01T00:00:00Z"}
    known, now = {run["id"] for run in pool.ground.flow_runs()}, datetime.now(UTC)
    schedules = [{"active": True, "schedule": schedule, "parameters": {"spec": spec}}]
    [made] = ask("POST", f"{api}/schedules", schedules)
    try:
        span = {"start_time": str(now - timedelta(hours=5)), "end_time": str(now)}
        ask("POST", f"{api}/schedule", {**span, "min_runs": 4, "max_runs": 4})
        ids = {run["id"] for run in pool.ground.flow_runs()} - known
        for id_ in ids:
            pool.note(id_, spec)
        pool.until_all_end(WITHIN_S)
    finally:
        ask("DELETE", f"{api}/schedules/{made['id']}")

    runs = [Run(ground=pool.ground, flow_run_id=id_) for id_ in ids]
    assert len(ids) >= 4 and len({id_[:8] for id_ in ids}) == 1
    records = [json.loads(run.record_path().read_text()) for run in runs]
    assert {record["flow_run_id"] for record in records} == ids
    assert [len(record["attempts"]) for record in records] == [1] * len(ids)
    started = [line["run"] for run in runs for line in pool.noted(run) if line["what"] == "start"]
    assert len(started) == len(set(started)) == len(ids)


#: As the driver tells of a GPU that is gone.
XID = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."


@pytest.mark.thorough
def test_a_node_that_fails_is_avoided_and_drained_once_it_fails_another_run(
    server: Server, tmp_path: Path
) -> None:
    here, there = (host(name, tmp_path / name, server.api) for name in ("a1", "a2"))
    pool = GangPool(ground=here, server=server, name="hosts", nodes={"a1": 8, "a2": 8})
    pool.set_up()
    breaks = f'case "$MUSTER_NODES" in a1*) echo "{XID}" >&2; exit 1;; esac'
    spec = pool.spec(
        gpus=8,
        components={"trainer": {"command": ["sh", "-c", breaks]}},
        retry={"GPU_HARDWARE": {"attempts": 2, "delay_s": 1}},
    )

    def nodes_of(run: Run) -> str:
        run.until_state("COMPLETED")
        return placed(run)

    def waits_of(run: Run) -> int:
        """How often it was sent back to wait."""
        states = here.get(f"/flow_run_states/?flow_run_id={run.flow_run_id}")
        return sum(state["name"] == "PendingResources" for state in states)

    try:
        pool.start_worker()
        pool.start_worker(on=there)
        first = pool.submit(spec)
        assert nodes_of(first) == "a2:8"
        assert waits_of(first) == 1
        second = pool.submit(spec)
        assert nodes_of(second) == "a2:8"
        third = pool.submit(spec)

        assert nodes_of(third) == "a2:8"

        assert waits_of(third) == 0
        wanted = {"event": {"name": ["muster.node.drained"]}}
        [told] = here.post("/events/filter", filter=wanted)["events"]
        assert told["payload"]["node"] == "a1"
        assert told["payload"]["by"] == second.name
        assert "GPU_HARDWARE" in told["payload"]["reason"]
        shown = subprocess.run(
            [sys.executable, "-m", "tasks.command", "queue", "--pool", "hosts"],
            env=here.env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "a1 is drained until " in shown and f"by {second.name}" in shown
    finally:
        pool.empty()
        here.clear()
        there.clear()


#: A driver that shows as many GPUs as a file says.
DRIVER = """
from pathlib import Path
class NVMLError(Exception): pass
class NVMLError_LibraryNotFound(NVMLError): pass
nvmlMemory_v2 = 2
class Memory: used = 0
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return int(Path({file!r}).read_text())
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(index): return f"GPU-{tag}-{{index}}"
def nvmlDeviceGetMemoryInfo(index, version): return Memory
def nvmlDeviceGetComputeRunningProcesses(index): return []
def __getattr__(name):
    raise (AttributeError if name.startswith("__") else NVMLError)(name)
"""


@pytest.mark.thorough
def test_a_run_whose_node_has_lost_a_gpu_goes_back_before_a_component_starts(
    server: Server, tmp_path: Path
) -> None:
    shown = tmp_path / "gpus"
    (tmp_path / "pynvml.py").write_text(DRIVER.format(file=str(shown), tag=uuid4()))
    shown.write_text("8")
    here = host("b1", tmp_path / "b1", server.api)
    here.variables = {**here.variables, "PYTHONPATH": str(tmp_path)}
    pool = GangPool(ground=here, server=server, name="driver", nodes={"b1": 8})
    pool.set_up()
    try:
        pool.start_worker()
        pool.submit(pool.spec(gpus=8, lasts_s=0.1)).until_state("COMPLETED")
        shown.write_text("7")
        run = pool.submit(pool.spec(gpus=8, lasts_s=0.1))
        until(lambda: (run.flow_run()["run_count"] or 0) and run.state()[0] == "SCHEDULED", "back")
        assert pool.noted(run) == []
        shown.write_text("8")

        run.until_state("COMPLETED")
    finally:
        pool.empty()
        here.clear()

    first = json.loads(run.record_path().read_text())["attempts"][0]
    assert first["failure"]["kind"] == "INSUFFICIENT_RESOURCES"
    assert "b1 shows no fit GPU 7" in first["failure"]["message"]
    assert not any(one["started_at"] for one in first["components"].values())
