"""Test all changes that a person can make to runs in the Prefect UI or by the API of the server.

    make by-hand MUSTER_SEED=1 MUSTER_DATABASE=postgresql

Each change hits runs in six phases, from waiting to stopping. /proc and the files of the runs' own
programs show which runs work. The records of Muster and of the Prefect server must agree with this.

The seed is printed. It determines the order of the changes, and the delay before each change.
MUSTER_DATABASE is `sqlite` (default) or `postgresql`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasks.queue.grants import requeue_labels
from tests.support.gang_pool import GangPool, Host, gang_pool, list_leftovers
from tests.support.gang_referee import FINAL
from tests.support.host_environment import ROOT, Run, Server, wait_for
from tests.support.postgres import explain_missing_postgres, postgres
from tests.support.prefect_api import send_request
from tests.support.production import migrate
from tests.support.supervised_components import processes_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

SEED = int(os.environ.get("MUSTER_SEED") or time.time())
DATABASE = os.environ.get("MUSTER_DATABASE") or "sqlite"
#: Number of GPUs of the only node.
GPUS = 16
#: Time limit for the reaction of a run to a change, in seconds. The limit is high because a waiting
#: run that the test sets to Running needs up to two minutes, or more on a busy machine.
SETTLED_WITHIN_S = 240.0
#: Time that a stopping component needs to save its state, in seconds.
SAVING_S = 45.0
#: Code of the component of each run. Its arguments are `FILE SECONDS SAVING_S IS_READY GPUS_FILE`.
#:
#: The component appends one line to FILE for each of its actions. The component prints `ready` if
#: IS_READY is 1. After SIGTERM, the component saves its state for SAVING_S seconds.
#:
#: The component waits until the file GPUS_FILE or the file GPUS_FILE.none exists. If GPUS_FILE
#: exists, the component works for SECONDS seconds. If GPUS_FILE.none exists, the component fails
#: for lack of GPUs.
PROGRAM = """
import json, os, signal, sys, time
file, lasts_s, saving_s, is_ready, gpus_file = sys.argv[1:]
attempt = int(os.environ["MUSTER_ATTEMPT"])
def note(what):
    line = {"run": os.environ["MUSTER_RUN_ID"], "attempt": attempt, "pid": os.getpid(),
            "what": what, "at": time.time(), "devices": os.environ.get("CUDA_VISIBLE_DEVICES")}
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, (json.dumps(line) + chr(10)).encode())
    os.close(descriptor)
def stop(*_):
    note("saving")
    end = time.time() + float(saving_s)
    while time.time() < end:
        time.sleep(0.1)
    note("saved")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
note("start")
while not os.path.exists(gpus_file) and not os.path.exists(gpus_file + ".none"):
    time.sleep(0.1)
if not os.path.exists(gpus_file):
    print("Total available GPUs 0 is less than total desired GPUs 16", flush=True)
    os._exit(1)
if is_ready == "1":
    print("ready", flush=True)
end = time.time() + float(lasts_s)
while time.time() < end:
    time.sleep(0.1)
note("end")
"""
#: Code of a component that fails as soon as a file exists. Its argument is the path of this file.
FAILING = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.1)
raise ValueError("the data is broken")
"""

#: Mapping from state name to state type, for the states that a person can set.
STATES = {
    "Scheduled": "SCHEDULED",
    "AwaitingRetry": "SCHEDULED",
    "Pending": "PENDING",
    "Running": "RUNNING",
    "Completed": "COMPLETED",
    "Failed": "FAILED",
    "Crashed": "CRASHED",
    "Cancelling": "CANCELLING",
    "Cancelled": "CANCELLED",
    "Paused": "PAUSED",
    "Suspended": "PAUSED",
}
#: Name of the change that deletes the flow run.
DELETE = "delete the run"
CHANGES = (*STATES, DELETE)
#: Changes after which a run must end. After the other changes, a working run continues.
ENDING = frozenset({"Completed", "Failed", "Crashed", "Cancelling", "Cancelled", DELETE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Processes, recorded states and actions of a run at one moment."""

    #: Ids of the living processes of the run, from /proc.
    pids: tuple[int, ...]
    #: Type of the state on the Prefect server, or an empty string if the flow run was deleted.
    state: str
    #: Message of the state on the Prefect server.
    message: str
    #: Value of `state` in `run.json`, or an empty string if there is no `run.json`.
    record: str
    #: Actions that the run's program has written to a file, such as `start` and `saved`.
    actions: tuple[str, ...]

    @property
    def has_ended(self) -> bool:
        """True if no process of the run lives, and all records say that the run has ended."""
        is_final = self.state in (*FINAL, "")
        is_closed = self.record in ("", "completed", "failed", "cancelled")
        return not self.pids and is_final and is_closed

    @property
    def works(self) -> bool:
        """True if the run has living processes, and its state on the Prefect server is RUNNING."""
        return bool(self.pids) and self.state == "RUNNING"

    @property
    def waits(self) -> bool:
        """True if the run has no process and waits for GPUs, as its record and its flow run say."""
        is_waiting = self.record in ("", "pending_resources")
        return not self.pids and self.state in ("SCHEDULED", "PAUSED") and is_waiting


@dataclass(kw_only=True)
class Row:
    """One run of the test, the change of this run, and the phase in which the run is changed."""

    run: Run
    phase: str
    change: str
    #: Name of the run before the change. The name stays known after a deletion of the flow run.
    name: str = ""
    #: Facts about the run just before the change. None until the run has reached the phase in
    #: the field `phase`.
    before: Fact | None = None

    def __str__(self) -> str:
        return f"{self.phase} x {self.change} ({self.name})"


@dataclass(kw_only=True)
class Matrix:
    """The runs of one test, the changes that are made to these runs, and the work pool.

    The pool has a worker and an upkeep process.
    """

    pool: GangPool
    random: random.Random
    rows: list[Row] = field(default_factory=list)

    def observe(self, row: Row) -> Fact:
        """Return the present processes, recorded states and actions of a run."""
        try:
            state = row.run.flow_run()["state"]
        except httpx.HTTPStatusError as error:
            assert error.response.status_code == 404, error
            state = {"type": "", "message": ""}
        record = self.pool.host_env.home / "runs" / row.name / "run.json"
        record_state = json.loads(record.read_text())["state"] if record.exists() else ""
        actions = [line["what"] for line in self.pool.read_lines() if line["run"] == row.name]
        pids = {
            *processes_with("MUSTER_RUN_ID", row.name),
            *processes_with("PREFECT__FLOW_RUN_ID", row.run.flow_run_id),
        }
        return Fact(
            pids=tuple(sorted(pids)),
            state=state["type"],
            message=state["message"] or "",
            record=record_state,
            actions=tuple(actions),
        )

    def observe_all(self) -> str:
        """Return a text that describes the present state of all runs, one run per line."""
        return "\n".join(f"{row}: {self.observe(row)}" for row in self.rows)

    def spec(self, phase: str, number: int) -> dict[str, Any]:
        """Return the spec of a run that can reach a phase.

        Args:
            phase: Key in `EXPECTED`, such as `starting`.
            number: Number of the run in this test, from 0. A run of the phase `failing` fails as
                soon as the file `trigger(number)` exists.
        """
        is_waiting = phase == "waiting"
        arguments = [
            str(self.pool.lines),
            "0.2" if is_waiting or phase == "requeued" else "3000",
            str(SAVING_S if phase in ("stopping", "failing") else 0.5),
            "0" if phase == "starting" else "1",
            str(self.gpus_file if phase == "requeued" else "/"),
        ]
        trainer = {
            "command": [sys.executable, "-I", "-S", "-c", PROGRAM, *arguments],
            "ready": {"log": "^ready", "within_s": 3000},
            "stop": {"grace_s": 120},
        }
        components: dict[str, Any] = {"trainer": trainer}
        if phase == "failing":
            command = [sys.executable, "-I", "-S", "-c", FAILING, str(self.trigger(number))]
            components["environment"] = {"command": command}
        return {
            "name": phase,
            "workload": "sft",
            "gang": {"gpus_per_node": GPUS if is_waiting else 1},
            "components": components,
            "retry": {"INSUFFICIENT_RESOURCES": {"delay_s": 1800, "max_delay_s": 1800}},
        }

    @property
    def gpus_file(self) -> Path:
        """Path of the file that the test creates so that the requeued runs get GPUs."""
        return self.pool.host_env.home / "gpus"

    @property
    def no_gpus_file(self) -> Path:
        """Path of the file that the test creates so that some runs get no GPUs and are requeued."""
        return self.pool.host_env.home / "gpus.none"

    def trigger(self, number: int) -> Path:
        """Return the path of a file. The run with this number fails as soon as the file exists."""
        return self.pool.host_env.home / f"fail-{number}"

    def submit(self, phase: str, change: str, **options: Any) -> Row:
        """Submit a run, and return a row with the run and the change that will be made to it.

        Args:
            phase: Phase that the run must reach before the change.
            change: Name of the change.
            options: Further arguments of `GangPool.submit`.
        """
        spec = self.spec(phase, len(self.rows))
        row = Row(run=self.pool.submit(spec, **options), phase=phase, change=change)
        self.rows.append(row)
        return row

    def reach_phases(self) -> None:
        """Bring each run into the phase in which it will be changed, such as `stopping`.

        Wait until all runs have reached their phases. Then store the facts about each run in the
        field `before` of its `Row`.
        """
        for row in self.rows:
            if row.phase != "waiting":
                reached = partial(self._has_begun, row)
                wait_for(reached, f"{row.phase} begins", SETTLED_WITHIN_S)
        for number, row in enumerate(self.rows):
            if row.phase == "stopping":
                self.pool.cancel(row.run)
            elif row.phase == "failing":
                self.trigger(number).touch()
        # This file makes some runs fail for lack of GPUs, so that these runs are requeued. Create
        # the file only now: an earlier requeue would delay the start of the other runs.
        self.no_gpus_file.touch()
        for row in self.rows:
            wait_for(partial(self._is_in_phase, row), f"{row} is in its phase", SETTLED_WITHIN_S)
            row.before = self.observe(row)

    def _has_begun(self, row: Row) -> bool:
        """Return True if the run's component has started and, in most phases, is ready.

        In the phases `starting` and `requeued`, the component need not be ready.
        """
        flow_run = row.run.flow_run()
        assert flow_run["state"]["type"] not in FINAL, flow_run["state"]
        row.name = flow_run["name"]
        if "start" not in self.observe(row).actions:
            return False
        is_ready = str(flow_run["state"]["message"] or "").startswith("running:")
        return is_ready or row.phase in ("starting", "requeued")

    def _is_in_phase(self, row: Row) -> bool:
        """Return True if a run of the test has reached the phase in which it will be changed.

        Args:
            row: The run, its phase and the change.
        """
        flow_run = row.run.flow_run()
        row.name = flow_run["name"]
        facts = self.observe(row)
        match row.phase:
            case "waiting":
                return flow_run["state"]["name"] == "PendingResources"
            case "requeued":
                is_waiting = facts.waits and facts.record == "pending_resources"
                return is_waiting and "start" in facts.actions
            case "stopping" | "failing":
                assert "saved" not in facts.actions, f"{row} has stopped before the change"
                return "saving" in facts.actions
        return True

    def change(self, row: Row) -> None:
        """Set the state of a run, or delete its flow run, as the row's `change` says."""
        time.sleep(self.random.uniform(0.0, 0.2))
        address = f"{self.pool.host_env.api}/flow_runs/{row.run.flow_run_id}"
        if row.change == DELETE:
            send_request("DELETE", address)
            return
        state = {"type": STATES[row.change], "name": row.change}
        send_request("POST", f"{address}/set_state", {"force": True, "state": state})

    def read_holders(self) -> dict[str, float]:
        """Return the mapping from holder to number of used GPUs that `muster queue` shows.

        A holder is a run of Muster, or another program, that holds GPUs.
        """
        holders: dict[str, float] = {}
        for node in json.loads(self.muster("queue", "--json"))["nodes"]:
            holders |= {**node["held"], **node["other_holders"]}
        return holders

    def muster(self, *words: str) -> str:
        """Run a `muster` command, and return its standard output."""
        done = subprocess.run(
            [sys.executable, "-m", "tasks.command", *words],
            cwd=ROOT,
            env=self.pool.host_env.env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def find_unnamed_holders(self) -> list[str]:
        """Return the runs that have a living component, but that `muster queue` does not list.

        A run with a living component holds GPUs, so `muster queue` should list the run.
        """
        before = {row.name for row in self.rows if self._has_component(row)}
        holders = self.read_holders()
        after = {row.name for row in self.rows if self._has_component(row)}
        return sorted((before & after) - holders.keys())

    def _has_component(self, row: Row) -> bool:
        """Return True if a component of the run has started with GPUs, and still runs."""
        lines = [line for line in self.pool.read_lines() if line["run"] == row.name]
        pids = {line["pid"] for line in lines if line["what"] == "start" and line["devices"]}
        return not pids.isdisjoint(processes_with("MUSTER_RUN_ID", row.name))

    def wait_until_settled(self, expected: Callable[[Row, Fact], bool]) -> list[str]:
        """Wait until all runs are as expected, or until a time limit, and return the errors.

        An error is a run that was still not as expected at the time limit, or a living run that
        `muster queue` did not list.

        Args:
            expected: Returns True if the facts about the run of a row are as expected.
        """
        faults: set[str] = set()
        deadline = time.monotonic() + SETTLED_WITHIN_S
        open_rows = list(self.rows)
        while open_rows and time.monotonic() < deadline:
            unnamed = self.find_unnamed_holders()
            faults |= {f"{name} works, but `muster queue` does not name it" for name in unnamed}
            open_rows = [row for row in open_rows if not expected(row, self.observe(row))]
            time.sleep(1.0)
        return [*sorted(faults), *(f"{row}: {self.observe(row)}" for row in open_rows)]

    def finish(self) -> list[str]:
        """End all runs, and return a text for each run that does not end.

        `muster cancel` cancels the running runs. Their GPUs become free, so that the waiting runs
        can start and end. Paused runs do not end by themselves, so the method skips paused runs.

        At last, a further run that needs all GPUs must complete. The completion of this run shows
        that no other run still holds a GPU.
        """
        faults = []
        self.start_requeued_runs()
        for row in self.rows:
            if self.observe(row).works:
                self.muster("cancel", row.run.flow_run_id)
        last = self.pool.submit(self.spec("waiting", -1))
        for row in self.rows:
            if self.observe(row).state == "PAUSED":
                continue
            try:
                wait_for(
                    lambda row=row: self.observe(row).has_ended, f"{row} ends", SETTLED_WITHIN_S
                )
            except AssertionError:
                faults.append(f"{row} does not end: {self.observe(row)}")
        try:
            wait_for(lambda: last.state()[0] == "COMPLETED", "a later run", SETTLED_WITHIN_S)
        except AssertionError:
            faults.append(f"a later run of all GPUs does not start: {last.state()}")
        return faults

    def start_requeued_runs(self) -> None:
        """Let the next attempts of all requeued runs find GPUs, and start these attempts now."""
        self.gpus_file.touch()
        for row in self.rows:
            if row.phase == "requeued" and self.observe(row).waits:
                address = f"{self.pool.host_env.api}/flow_runs/{row.run.flow_run_id}/labels"
                send_request("PATCH", address, requeue_labels(not_before=0.0))

    def end_paused_runs(self) -> None:
        """Cancel the suspended runs, schedule the paused runs again, and wait until all end."""
        for row in self.rows:
            if self.observe(row).state != "PAUSED":
                continue
            if row.change == "Suspended":
                self.muster("cancel", row.run.flow_run_id)
            else:
                path = f"/flow_runs/{row.run.flow_run_id}/set_state"
                self.pool.host_env.post(path, force=True, state={"type": "SCHEDULED"})
        for row in self.rows:
            wait_for(lambda row=row: self.observe(row).has_ended, f"{row} ends", SETTLED_WITHIN_S)


@pytest.fixture(scope="module")
def shared_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GangPool]:
    print(f"\nMUSTER_SEED={SEED} MUSTER_DATABASE={DATABASE}", flush=True)
    directory = tmp_path_factory.mktemp("matrix")
    with ExitStack() as stack:
        settings = {}
        if DATABASE == "postgresql":
            if reason := explain_missing_postgres():
                pytest.skip(reason)
            url = stack.enter_context(postgres()).url
            settings["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = url
            migrate(settings, directory / "server")
        server = Server(directory / "server", settings=settings)
        pool = stack.enter_context(gang_pool(directory, nodes={"n1": GPUS}, server=server))
        assert isinstance(pool.host_env, Host)
        gpus = {"MUSTER_GPUS": f"0-{GPUS - 1}"}
        pool.host_env.variables = {**pool.host_env.variables, **gpus}
        pool.start_worker()
        pool.host_env.start_upkeep()
        yield pool


@pytest.fixture
def matrix(shared_pool: GangPool) -> Iterator[Matrix]:
    matrix = Matrix(pool=shared_pool, random=random.Random(SEED))
    yield matrix
    shared_pool.cancel_all()
    matrix.gpus_file.unlink(missing_ok=True)
    matrix.no_gpus_file.unlink(missing_ok=True)


def is_as_expected_while_working(row: Row, facts: Fact) -> bool:
    """Return True if a run that worked before the change `row.change` is now as expected."""
    if row.change in ENDING:
        is_cancelled = facts.state in ("CANCELLED", "") and facts.record == "cancelled"
        return facts.has_ended and is_cancelled and "saved" in facts.actions
    assert row.before is not None
    return facts.works and facts.pids == row.before.pids


def is_as_expected_while_stopping(row: Row, facts: Fact) -> bool:
    """Return True if a run that was stopping has saved its state, and has then ended correctly.

    `run.json` and the Prefect server must show the same final state. A run that was being cancelled
    must be cancelled. A run that was failing must be failed or cancelled.
    """
    ends = {"cancelled": "CANCELLED", "failed": "FAILED"}
    is_same = facts.state in (ends.get(facts.record), "")
    is_true = facts.record == "cancelled" or row.phase == "failing"
    return facts.has_ended and "saved" in facts.actions and is_same and is_true


def is_as_expected_while_waiting(row: Row, facts: Fact) -> bool:
    """Return True if a run that was waiting is as expected after the change.

    If `ENDING` contains the change, the run must end, and its component must not start after the
    change. After every other change, the run must still wait.
    """
    assert row.before is not None
    if row.change in ENDING:
        return facts.has_ended and facts.actions == row.before.actions
    return facts.waits


EXPECTED = {
    "waiting": is_as_expected_while_waiting,
    "requeued": is_as_expected_while_waiting,
    "starting": is_as_expected_while_working,
    "running": is_as_expected_while_working,
    "stopping": is_as_expected_while_stopping,
    "failing": is_as_expected_while_stopping,
}


@pytest.mark.parametrize("phase", EXPECTED)
def test_each_state_set_by_hand_leaves_true_records_and_no_orphan(
    matrix: Matrix, phase: str
) -> None:
    changes = matrix.random.sample(CHANGES, len(CHANGES))
    if phase == "waiting":
        # This run holds one GPU. The waiting runs need all GPUs, so no waiting run can start.
        matrix.submit("running", "Running")
        matrix.reach_phases()
    for change in changes:
        matrix.submit(phase, change)
    matrix.reach_phases()

    for row in matrix.rows:
        matrix.change(row)

    faults = matrix.wait_until_settled(lambda row, facts: EXPECTED[row.phase](row, facts))
    faults += matrix.finish()
    print(f"{phase}: {faults or 'all is well'}", flush=True)
    assert faults == []
    matrix.end_paused_runs()
    # The state of a run becomes final shortly before the end of its flow process.
    wait_for(lambda: not list_leftovers(matrix.pool), "the end of all processes", 60.0)
    assert matrix.read_holders() == {}


@dataclass(frozen=True, slots=True, kw_only=True)
class WiderChange:
    """A change of a deployment, a work queue or a work pool. The change affects many runs."""

    apply: Callable[[GangPool], object]
    undo: Callable[[GangPool], object]
    #: True if the change prevents new runs of the queue `idle` from starting.
    holds_queue: bool = False
    #: True if the change prevents new runs of the deployment from starting.
    holds_deployment: bool = False
    #: True if the change prevents new runs of the pool from starting.
    holds_pool: bool = False
    #: True if the change deletes the deployment. The Prefect server then also deletes the runs of
    #: the deployment that have never started. A requeued run has started before, so the server
    #: keeps the run. When the run is due again, Prefect's worker finds no deployment and cancels
    #: the run.
    deletes_deployment: bool = False


def change_queue(pool: GangPool, **content: Any) -> None:
    """Change fields of the work queue `idle`."""
    send_request("PATCH", f"{pool.host_env.api}/work_pools/{pool.name}/queues/idle", content)


def delete_queue(pool: GangPool) -> None:
    send_request("DELETE", f"{pool.host_env.api}/work_pools/{pool.name}/queues/idle")


def create_queue(pool: GangPool) -> None:
    pool.host_env.post(f"/work_pools/{pool.name}/queues", name="idle", priority=3)


def find_deployment(pool: GangPool) -> str:
    """Return the URL of the deployment of the runs."""
    id_ = pool.host_env.get(f"/deployments/name/train/{pool.name}")["id"]
    return f"{pool.host_env.api}/deployments/{id_}"


def change_deployment(pool: GangPool, **content: Any) -> None:
    send_request("PATCH", find_deployment(pool), content)


def limit_deployment_to_nothing(pool: GangPool) -> None:
    """Set the deployment's concurrency limit to 0, so that no run of the deployment starts.

    The API accepts 0 only for the global concurrency limit that belongs to the deployment.
    """
    change_deployment(pool, concurrency_limit=1)
    limit = pool.host_env.get(f"/deployments/name/train/{pool.name}")["global_concurrency_limit"]
    send_request("PATCH", f"{pool.host_env.api}/v2/concurrency_limits/{limit['id']}", {"limit": 0})


def pause_schedule(pool: GangPool) -> None:
    """Give the deployment a schedule that is paused."""
    schedule = {"schedule": {"interval": 86400.0}, "active": False}
    send_request("POST", f"{find_deployment(pool)}/schedules", [schedule])


def delete_pool(pool: GangPool) -> None:
    send_request("DELETE", f"{pool.host_env.api}/work_pools/{pool.name}")


def restore_pool(pool: GangPool) -> None:
    """Set up the pool as `muster up` does, and attach the deployments of the test again."""
    set_up = pool.host_env.start("-m", "deployments.stack.setup", log="set-up")
    assert set_up.wait(300) == 0, pool.host_env.log("set-up")
    create_queue_if_missing(pool)
    for name in (pool.name, "other"):
        pool.create_deployment(name)


def create_queue_if_missing(pool: GangPool) -> None:
    queues = pool.host_env.post(f"/work_pools/{pool.name}/queues/filter")
    if all(queue["name"] != "idle" for queue in queues):
        create_queue(pool)


WIDER_CHANGES = {
    "the deployment is paused": WiderChange(
        apply=partial(change_deployment, paused=True),
        undo=partial(change_deployment, paused=False),
    ),
    "its schedule is paused": WiderChange(apply=pause_schedule, undo=lambda pool: None),
    "the deployment has the limit 1": WiderChange(
        apply=partial(change_deployment, concurrency_limit=1),
        undo=partial(change_deployment, concurrency_limit=None),
    ),
    "the deployment has the limit 0": WiderChange(
        apply=limit_deployment_to_nothing,
        undo=partial(change_deployment, concurrency_limit=None),
        holds_deployment=True,
    ),
    "the deployment is deleted": WiderChange(
        apply=lambda pool: send_request("DELETE", find_deployment(pool)),
        undo=lambda pool: pool.create_deployment(pool.name),
        deletes_deployment=True,
    ),
    "the queue is paused": WiderChange(
        apply=partial(change_queue, is_paused=True),
        undo=partial(change_queue, is_paused=False),
        holds_queue=True,
    ),
    "the queue has the limit 0": WiderChange(
        apply=partial(change_queue, concurrency_limit=0),
        undo=partial(change_queue, concurrency_limit=None),
        holds_queue=True,
    ),
    "the queue is deleted": WiderChange(apply=delete_queue, undo=create_queue),
    "the pool is paused": WiderChange(
        apply=lambda pool: pool.patch(is_paused=True),
        undo=lambda pool: pool.patch(is_paused=False),
        holds_pool=True,
    ),
    "the pool has the limit 0": WiderChange(
        apply=lambda pool: pool.patch(concurrency_limit=0),
        undo=lambda pool: pool.patch(concurrency_limit=50),
        holds_pool=True,
    ),
    "the limit of the pool is removed": WiderChange(
        apply=lambda pool: pool.patch(concurrency_limit=None),
        undo=lambda pool: pool.patch(concurrency_limit=50),
    ),
    "the pool is deleted": WiderChange(apply=delete_pool, undo=restore_pool, holds_pool=True),
}


@pytest.mark.parametrize("name", WIDER_CHANGES)
def test_each_change_of_deployment_queue_or_pool_leaves_true_records_and_no_orphan(
    matrix: Matrix, name: str
) -> None:
    change = WIDER_CHANGES[name]
    pool = matrix.pool
    pool.create_deployment("other")
    for phase in ("starting", "running", "stopping"):
        matrix.submit(phase, name)
    for phase in ("requeued", "waiting"):
        matrix.submit(phase, name, queue="idle")
    matrix.reach_phases()

    change.apply(pool)

    faults = matrix.wait_until_settled(
        lambda row, facts: is_as_expected_after_wider_change(change, row, facts)
    )
    for row in matrix.rows:
        if row.phase in ("starting", "running") and matrix.observe(row).works:
            matrix.muster("cancel", row.run.flow_run_id)
    matrix.start_requeued_runs()
    if change.holds_pool:
        change.undo(pool)
    later = pool.submit(matrix.spec("waiting", -1), deployment="other")
    try:
        wait_for(lambda: later.state()[0] == "COMPLETED", "a later run", SETTLED_WITHIN_S)
    except AssertionError:
        faults.append(f"a later run waits behind a run that cannot start: {later.state()}")
    faults += [
        f"{row} has started, although {name}: {facts}"
        for row, facts in ((row, matrix.observe(row)) for row in matrix.rows)
        if (change.holds_queue or change.holds_deployment)
        and row.phase == "waiting"
        and not facts.waits
    ]
    if not change.holds_pool:
        change.undo(pool)
    for row in matrix.rows:
        try:
            wait_for(lambda row=row: matrix.observe(row).has_ended, f"{row}", SETTLED_WITHIN_S)
        except AssertionError:
            faults.append(f"{row} does not end: {matrix.observe(row)}")

    print(f"{name}: {faults or 'all is well'}", flush=True)
    assert faults == []
    ends = {row.phase: matrix.observe(row).state for row in matrix.rows}
    assert ends == {
        "starting": "CANCELLED",
        "running": "CANCELLED",
        "stopping": "CANCELLED",
        "requeued": "CANCELLED" if change.deletes_deployment else "COMPLETED",
        "waiting": "" if change.deletes_deployment else "COMPLETED",
    }
    # The state of a run becomes final shortly before the end of its flow process.
    wait_for(lambda: not list_leftovers(pool), "the end of all processes", 60.0)
    assert matrix.read_holders() == {}


def is_as_expected_after_wider_change(change: WiderChange, row: Row, facts: Fact) -> bool:
    """Return True if a run is as expected after a change of a deployment, queue or pool.

    - A working run must still work.
    - A stopping run must end.
    - A requeued run must still wait.
    - A waiting run must be deleted if the change deletes the deployment. Otherwise, the run must
      still wait.
    """
    assert row.before is not None
    if row.phase == "stopping":
        return is_as_expected_while_stopping(row, facts)
    if row.phase in ("starting", "running"):
        return facts.works and facts.pids == row.before.pids
    if change.deletes_deployment and row.phase == "waiting":
        return facts.has_ended and facts.state == ""
    return facts.waits
