"""Tests of the states that `muster reconcile` proposes for flow runs without a process."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.schemas.actions import LogCreate
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Running, Scheduled

from tasks.processes import tree
from tasks.processes.ending import Holders
from tasks.record.final_record import FLOW_LOST
from tasks.record.outcome import Failure
from tasks.record.run_json import AttemptRecord, RunJson
from tasks.record.states import RunState
from tasks.server.flow_runs import (
    Host,
    decide_closed_state,
    decide_lost_state,
    find_host,
    find_new_worker,
    log_end,
    propose_state,
    read_held_flow_runs,
    read_server_time,
)
from tasks.spec.failure_kinds import FailureKind

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FLOW_RUN = UUID("1b4e28ba-2fa1-4d3b-a3f5-ef19b5a7633b")
DEPLOYMENT = uuid4()
#: Id of the flow `pipeline` on the Prefect server.
PIPELINE = uuid4()
HERE = {"prefect.worker.name": "here"}
THERE = {"prefect.worker.name": "there"}


def flow_run(state: StateType, age_s: float, **fields: Any) -> FlowRun:
    """Return a flow run that entered the state `age_s` seconds before NOW."""
    server_state = State(type=state, timestamp=NOW - timedelta(seconds=age_s))
    values = {"id": FLOW_RUN, "name": "a-run", "flow_id": uuid4(), "labels": HERE, **fields}
    return FlowRun(**values, state=server_state, state_type=state)


def host(
    *,
    alive: dict[str, tuple[int, ...]] | None = None,
    hidden: dict[int, str] | None = None,
    registered: tuple[str, ...] = (),
    waiting: tuple[str, ...] = (),
    is_lost: bool = False,
) -> Host:
    """Return the host `here`, in the state in which `muster reconcile` finds it.

    Args:
        alive: Mapping from flow run id to the pids of the living processes that have this id in
            their environment.
        hidden: Processes with an unreadable environment: mapping from process id to program.
        registered: Ids or names of the flow runs in the process registry.
        waiting: Names of the flow runs that have no process until their next attempt.
        is_lost: True if `here` is another machine, which is permanently lost.
    """
    processes = Holders(pids=alive or {}, hidden=hidden or {})
    return Host(
        name="here",
        is_lost=is_lost,
        upkeep_deployments=frozenset({DEPLOYMENT}),
        processes=processes,
        registered=frozenset(registered),
        waiting=frozenset(waiting),
        pipeline_flow=PIPELINE,
    )


PENDING = StateType.PENDING
RUNNING = StateType.RUNNING
CANCELLING = StateType.CANCELLING
ALIVE = host(alive={str(FLOW_RUN): (7,)})
GONE = host(is_lost=True)
ADOPTS = {"spec": {"on_lost_flow": "adopt"}}
ENGINE = "python -m prefect.flow_engine"
LIVING_TAG = f"process:here:{os.getpid()}:{tree.start_ticks(os.getpid())}"
GONE_TAG = f"process:here:{os.getpid()}:1"


@pytest.mark.parametrize(
    ("run", "here", "state"),
    [
        # the flow run has no process, so the state of the flow run is replaced
        (flow_run(PENDING, 60), host(), "Scheduled"),
        (flow_run(RUNNING, 60), host(), "Crashed"),
        (flow_run(CANCELLING, 60), host(), "Cancelled"),
        # the flow run has a process, so the state of the flow run stays unchanged
        (flow_run(PENDING, 60), ALIVE, None),
        (flow_run(RUNNING, 60), ALIVE, None),
        (flow_run(CANCELLING, 60), ALIVE, None),
        # the process on the host belongs to another flow run, so this flow run has crashed
        (flow_run(RUNNING, 60), host(alive={str(uuid4()): (7,)}), "Crashed"),
        # a state of less than 30 s is too new for a decision; a state of exactly 30 s is old enough
        (flow_run(PENDING, 29.9), host(), None),
        (flow_run(PENDING, 30), host(), "Scheduled"),
        (flow_run(RUNNING, 29.9), host(), None),
        # the time of the state is in the future, for example because the clock was changed: the
        # state stays unchanged
        (flow_run(RUNNING, -3600), host(), None),
        # scheduled, paused and finished flow runs keep their states
        (flow_run(StateType.SCHEDULED, 9000), host(), None),
        (flow_run(StateType.PAUSED, 9000), host(), None),
        (flow_run(StateType.COMPLETED, 9000), host(), None),
        (flow_run(StateType.CRASHED, 9000), host(), None),
        # a worker of another host executes the flow run. So no process of this host belongs to the
        # flow run, and the state of the flow run stays unchanged
        (flow_run(PENDING, 60, labels=THERE), host(), None),
        (flow_run(RUNNING, 60, labels=THERE, infrastructure_pid="7"), host(), None),
        # the flow run was started without a worker, and has no tag with the id of its process. So
        # the process may be on any host, and the state of the flow run stays unchanged
        (flow_run(RUNNING, 9000, labels={}), host(), None),
        (flow_run(PENDING, 9000, labels={}), host(), None),
        # the flow run was started without a worker, and is not in the host's process registry yet.
        # But a tag of the flow run contains the id of its process, so Muster can find the process
        (flow_run(RUNNING, 60, labels={}, tags=[GONE_TAG]), host(), "Crashed"),
        (flow_run(PENDING, 60, labels={}, tags=[GONE_TAG]), host(), "Crashed"),
        (flow_run(RUNNING, 29, labels={}, tags=[GONE_TAG]), host(), None),
        (flow_run(RUNNING, 60, labels={}, tags=[LIVING_TAG]), host(), None),
        (flow_run(PENDING, 60, labels={}, tags=["demo", "process:there:7:7"]), host(), None),
        (flow_run(RUNNING, 60, labels={}, tags=["process:here:x:7", "process:"]), host(), None),
        # a worker took the flow run from a work pool, and was killed before the flow run got the
        # label with the name of the worker
        (flow_run(PENDING, 60, labels={}, work_pool_name="gang"), host(), "Scheduled"),
        (flow_run(PENDING, 59, labels={}, work_pool_name="gang"), host(), None),
        # a user has set a waiting flow run to Running, although the flow run never had a process
        (flow_run(RUNNING, 60, labels={}, work_pool_name="gang"), host(), "Scheduled"),
        (flow_run(RUNNING, 59, labels={}, work_pool_name="gang"), host(), None),
        (
            flow_run(RUNNING, 60, labels={}, work_pool_name="gang", infrastructure_pid="7"),
            host(),
            None,
        ),
        (flow_run(PENDING, 9000, labels={}, work_pool_name="push"), host(), None),
        # a user has set a requeued flow run to Running, although the flow run has no process
        (flow_run(RUNNING, 60), host(waiting=("a-run",)), "Scheduled"),
        (flow_run(RUNNING, 29.9), host(waiting=("a-run",)), None),
        # the next process of the requeued flow run was killed, so the flow run has crashed
        (flow_run(RUNNING, 60, infrastructure_pid="7"), host(waiting=("a-run",)), "Crashed"),
        # flow runs of a worker of type gang are processes of this host, but flow runs of a worker
        # of type kubernetes are not
        (flow_run(RUNNING, 60, labels=HERE | {"prefect.worker.type": "gang"}), host(), "Crashed"),
        (flow_run(RUNNING, 60, labels=HERE | {"prefect.worker.type": "kubernetes"}), host(), None),
        # a maintenance flow run, for example of `muster reconcile`, has no worker label. The
        # deployment of the flow run shows if the flow run belongs to this host
        (flow_run(RUNNING, 60, labels={}, deployment_id=DEPLOYMENT), host(), "Crashed"),
        (flow_run(RUNNING, 60, labels={}, deployment_id=uuid4()), host(), None),
        # a pipeline with a deployment: a worker can start another process that continues the
        # pipeline
        (flow_run(RUNNING, 60, flow_id=PIPELINE, deployment_id=uuid4()), host(), "AwaitingRetry"),
        (flow_run(RUNNING, 29, flow_id=PIPELINE, deployment_id=uuid4()), host(), None),
        (flow_run(RUNNING, 60, flow_id=PIPELINE, deployment_id=uuid4()), ALIVE, None),
        (flow_run(CANCELLING, 60, flow_id=PIPELINE, deployment_id=uuid4()), host(), "Cancelled"),
        # a person started the pipeline without a worker, so no worker starts another process for
        # the pipeline. GONE_TAG shows that the pipeline's process has ended, so the pipeline has
        # crashed
        (flow_run(RUNNING, 60, flow_id=PIPELINE, labels={}, tags=[GONE_TAG]), host(), "Crashed"),
        (
            flow_run(RUNNING, 60, flow_id=PIPELINE, deployment_id=uuid4(), tags=[GONE_TAG]),
            host(),
            "Crashed",
        ),
        (flow_run(PENDING, 60, labels={}, work_pool_name="pipelines"), host(), "Scheduled"),
        # this host's process registry contains the id or the name of the flow run, so the state of
        # the flow run stays unchanged
        (flow_run(RUNNING, 60), host(registered=(str(FLOW_RUN),)), None),
        (flow_run(PENDING, 60), host(registered=("a-run",)), None),
        # a process whose environment is unreadable may belong to the flow run, so nothing changes
        (flow_run(PENDING, 60), host(hidden={7: ENGINE}), None),
        (flow_run(RUNNING, 60, infrastructure_pid="7"), host(hidden={7: ENGINE}), None),
        # a process with another pid, or of another program, cannot belong to the flow run
        (flow_run(RUNNING, 60, infrastructure_pid="8"), host(hidden={7: ENGINE}), "Crashed"),
        (flow_run(PENDING, 60), host(hidden={7: "sshd"}), "Scheduled"),
        # the flow run's machine is lost. The processes that Muster finds are on another machine, so
        # they do not belong to the flow run, and the state becomes Crashed
        (flow_run(RUNNING, 60), host(is_lost=True, hidden={7: ENGINE}), "Crashed"),
        (flow_run(RUNNING, 60, tags=[LIVING_TAG]), host(is_lost=True), "Crashed"),
        # the host of the flow run is lost, so the flow run gets a final state or returns to the
        # queue. This also holds for a flow run whose state is only 1 s old
        (flow_run(CANCELLING, 1), host(is_lost=True), "Cancelled"),
        (flow_run(PENDING, 60), host(is_lost=True), "Scheduled"),
        (flow_run(RUNNING, 60), host(is_lost=True, alive={str(FLOW_RUN): (7,)}), None),
        (flow_run(RUNNING, 60, labels=THERE), host(is_lost=True), None),
        # the flow run's Ray jobs still run. If the flow run has a deployment, a worker can start a
        # new process, and this process continues with the Ray jobs
        (flow_run(RUNNING, 60, deployment_id=uuid4(), parameters=ADOPTS), GONE, "AwaitingRetry"),
        (flow_run(RUNNING, 60, parameters=ADOPTS), GONE, "Crashed"),
    ],
)
def test_lost_flow_run_gets_its_true_state(run: FlowRun, here: Host, state: str | None) -> None:
    proposed = decide_lost_state(run, here, NOW)

    assert (proposed and proposed.name) == state


# In the second case, only the work pool contains the Ray address, and the spec does not.
@pytest.mark.parametrize("ray", [{"address": "http://127.0.0.1:8265"}, {}])
def test_message_mentions_ray_jobs_left_by_a_lost_host(ray: dict[str, str]) -> None:
    run = flow_run(RUNNING, 60, parameters={"spec": {"ray": ray}})

    proposed = decide_lost_state(run, GONE, NOW)

    assert proposed is not None and proposed.name == "Crashed"
    assert (proposed.message or "").endswith("may still run; check with `ray job list`")


@pytest.mark.parametrize(
    ("run", "worker", "elsewhere"),
    [
        (flow_run(RUNNING, 60), "here", ""),
        (flow_run(RUNNING, 60, labels=THERE), "here", "there"),
        (flow_run(RUNNING, 60, labels=THERE), None, "there"),
        # the label still names the worker `there`, so no other worker took the flow run over
        (flow_run(RUNNING, 60, labels=THERE), "there", ""),
        (flow_run(RUNNING, 60, labels={}), None, ""),
        # the flow run is a Kubernetes job and not a process of a host, so no worker is named
        (flow_run(RUNNING, 60, labels=THERE | {"prefect.worker.type": "kubernetes"}), None, ""),
    ],
)
def test_worker_on_another_host_that_took_over_is_named(
    run: FlowRun, worker: str | None, elsewhere: str
) -> None:
    assert find_new_worker(run, "here", worker) == elsewhere


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (flow_run(RUNNING, 60, labels=THERE), "there"),
        (flow_run(RUNNING, 60, labels={}, tags=["demo", "process:there:7:7"]), "there"),
        (flow_run(RUNNING, 60, labels={}), None),
    ],
)
def test_host_of_a_flow_run_is_read_from_labels_or_tags(run: FlowRun, name: str | None) -> None:
    assert find_host(run) == name


def closed(state: RunState, by_loss: bool = False) -> RunJson:
    """Return the record of an ended run.

    If `by_loss` is True, the failure in the record is the loss of the flow process.
    """
    rule = FLOW_LOST if by_loss else "of its own"
    failure = Failure(kind=FailureKind.UNKNOWN, message="m", rule=rule)
    attempt = AttemptRecord(number=1, state=state, failure=failure)
    return RunJson(run_id="a-run", state=state, message="the run's own", attempts=(attempt,))


@pytest.mark.parametrize(
    ("judged_state", "record", "name", "message"),
    [
        (
            RUNNING,
            closed(RunState.FAILED, by_loss=True),
            "Crashed",
            "the cause. To continue the run: muster retry a-run",
        ),
        # the record has a final state, but the run's process was killed before it sent this state
        # to the server
        (RUNNING, closed(RunState.COMPLETED), "Completed", "the run's own"),
        (RUNNING, closed(RunState.FAILED), "Failed", "the run's own"),
        (RUNNING, closed(RunState.CANCELLED), "Cancelled", "the run's own"),
        # the run has no record, so its state becomes Crashed
        (RUNNING, None, "Crashed", "the cause"),
        # the run had ended before the user cancelled it, so the server gets the result of the run
        (CANCELLING, closed(RunState.COMPLETED), "Completed", "the run's own"),
        (CANCELLING, closed(RunState.FAILED), "Failed", "the run's own"),
        (CANCELLING, closed(RunState.CANCELLED), "Cancelled", "cancelled; the cause"),
        (CANCELLING, closed(RunState.FAILED, by_loss=True), "Cancelled", "cancelled; the cause"),
        (CANCELLING, None, "Cancelled", "cancelled; the cause"),
        # the server gets no new state if the flow run is scheduled, pending or finished, or if the
        # flow run does not exist on the server
        (StateType.SCHEDULED, closed(RunState.PENDING_RESOURCES), None, None),
        (PENDING, closed(RunState.PENDING_RESOURCES), None, None),
        (StateType.CRASHED, closed(RunState.FAILED, by_loss=True), None, None),
        (StateType.COMPLETED, closed(RunState.COMPLETED), None, None),
        (None, closed(RunState.FAILED, by_loss=True), None, None),
    ],
)
def test_closed_record_decides_the_state_on_the_server(
    judged_state: StateType | None, record: RunJson | None, name: str | None, message: str | None
) -> None:
    state = decide_closed_state(
        State(type=judged_state) if judged_state else None, record, "the cause"
    )

    assert (state and state.name, state and state.message) == (name, message)


@dataclass
class FakeServer:
    """Fake Prefect client that returns scripted states and records the proposed states."""

    states: list[State[Any]] = field(default_factory=list)
    accepts: bool = True
    date: str | None = "Thu, 01 Jan 2026 00:00:00 GMT"
    held: int = 0
    proposed_states: list[State[Any]] = field(default_factory=list)
    forced_states: list[State[Any]] = field(default_factory=list)
    logs: list[LogCreate] = field(default_factory=list)
    #: True if the server refuses logs.
    is_log_full: bool = False

    def read_flow_run(self, flow_run_id: UUID) -> FlowRun:
        return FlowRun(id=flow_run_id, name="a-run", flow_id=uuid4(), state=self.states.pop(0))

    def read_flow_runs(self, *, limit: int, offset: int, **filters: Any) -> list[FlowRun]:
        return [flow_run(RUNNING, 60) for _ in range(min(limit, self.held - offset))]

    def set_flow_run_state(
        self, flow_run_id: UUID, state: State[Any], *, force: bool = False
    ) -> Any:
        self.proposed_states.append(state)
        self.forced_states += [state] if force else []
        status = SetStateStatus.ACCEPT if self.accepts else SetStateStatus.ABORT
        return type("Answer", (), {"status": status})()

    def create_logs(self, logs: list[LogCreate]) -> None:
        if self.is_log_full:
            raise httpx.ConnectError("All connection attempts failed")
        self.logs += logs

    def hello(self) -> Any:
        headers = {"date": self.date} if self.date else {}
        return type("Response", (), {"headers": headers})()


def test_state_is_proposed_if_the_server_still_has_the_judged_state() -> None:
    judged_state = Running()
    server = FakeServer(states=[judged_state])

    is_accepted = propose_state(server, str(FLOW_RUN), judged_state, Crashed())  # type: ignore[arg-type]

    assert is_accepted
    assert [state.name for state in server.proposed_states] == ["Crashed"]


@pytest.mark.parametrize(
    ("before", "after", "is_forced"),
    [
        # After Cancelling, the server accepts a state other than Cancelled only if `force` is True.
        (Cancelling(), Completed(), True),
        (Cancelling(), Cancelled(), False),
        (Running(), Completed(), False),
    ],
)
def test_result_of_a_run_replaces_a_late_cancel(
    before: State[Any], after: State[Any], is_forced: bool
) -> None:
    server = FakeServer(states=[before])

    assert propose_state(server, str(FLOW_RUN), before, after)  # type: ignore[arg-type]

    assert server.proposed_states == [after]
    assert bool(server.forced_states) is is_forced


@pytest.mark.parametrize("current_state", [Running(), Completed(), Cancelled(), Scheduled()])
def test_flow_run_with_a_new_state_is_not_changed(current_state: State[Any]) -> None:
    server = FakeServer(states=[current_state])

    is_accepted = propose_state(server, str(FLOW_RUN), Running(), Crashed())  # type: ignore[arg-type]

    assert not is_accepted
    assert server.proposed_states == []


def test_state_rejected_by_the_server_counts_as_not_set() -> None:
    judged_state = Running()
    server = FakeServer(states=[judged_state], accepts=False)

    is_accepted = propose_state(server, str(FLOW_RUN), judged_state, Crashed())  # type: ignore[arg-type]

    assert not is_accepted


@pytest.mark.parametrize(("is_failure", "level"), [(True, logging.ERROR), (False, logging.INFO)])
def test_end_of_a_lost_run_is_one_line_in_the_logs_of_its_flow_run(
    is_failure: bool, level: int
) -> None:
    server = FakeServer()

    log_end(server, str(FLOW_RUN), "the cause", is_failure=is_failure)  # type: ignore[arg-type]

    (line,) = server.logs
    assert (line.flow_run_id, line.level, line.message) == (FLOW_RUN, level, "the cause")
    assert line.name == "muster.reconcile"


def test_end_of_a_lost_run_may_be_missing_in_the_logs(caplog: pytest.LogCaptureFixture) -> None:
    log_end(FakeServer(is_log_full=True), str(FLOW_RUN), "the cause", is_failure=True)  # type: ignore[arg-type]

    assert "could not write the end of the run" in caplog.text


@pytest.mark.parametrize(
    ("date", "now"), [("Thu, 01 Jan 2026 00:00:00 GMT", NOW), ("soon", None), (None, None)]
)
def test_server_time_is_read_from_the_date_header(date: str | None, now: datetime | None) -> None:
    assert read_server_time(FakeServer(date=date)) == now  # type: ignore[arg-type]


@pytest.mark.parametrize("held", [0, 1, 199, 200, 201, 400])
def test_every_page_of_flow_runs_is_read(held: int) -> None:
    assert len(read_held_flow_runs(FakeServer(held=held))) == held  # type: ignore[arg-type]
