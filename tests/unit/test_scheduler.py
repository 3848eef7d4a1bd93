"""The scheduler with a scripted server: messages to runs, and cancels that must not be lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.schemas.objects import State, StateType

from tasks.processes.identity import boot_id, host_name
from tasks.queue import admission, scheduling_pass
from tasks.queue import scheduler as scheduler_module
from tasks.queue.decision import SchedulingPass
from tasks.queue.grants import Grant, SchedulerProcess, grant_of, no_grant_labels
from tasks.queue.ledger import QueueEntry
from tasks.queue.nodes import Capacity
from tasks.queue.scheduler import Scheduler
from tasks.queue.settings import PoolSettings, TableNode, with_settings
from tasks.queue.worker import GangWorker
from tasks.ray.dashboard import Credentials
from tasks.ray.usage import Cluster, ClusterNode
from tasks.record.outcome import Failure
from tasks.server.flow_runs import TYPED_NAME_LABEL
from tasks.spec.failure_kinds import FailureKind
from tests.support.scripted_prefect import FreeLease, ScriptedPrefect

GONE = SchedulerProcess(host=host_name(), pid=2**22, start_ticks=1, boot_id=boot_id())


class Killed(BaseException):
    """Exception that stands for the death of the scheduler's process."""


def template(*gpus: int, **settings: Any) -> dict[str, Any]:
    table = tuple(TableNode(name=f"n{n}", gpus=g) for n, g in enumerate(gpus, start=1))
    job = GangWorker.get_default_base_job_template()
    return with_settings(job, PoolSettings(nodes=table, **settings))


TWO_NODES = template(8, 8)


@pytest.fixture(autouse=True)
def no_other_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the scheduling lease by a fake, so that the test's scheduler always holds the lease.

    Also replace the search for processes of runs on this machine: the fake search finds none.
    """
    monkeypatch.setattr(scheduler_module, "SchedulingLease", FreeLease)
    monkeypatch.setattr(scheduling_pass, "find_holders", lambda _variable: SimpleNamespace(pids={}))


@pytest.fixture
def server() -> ScriptedPrefect:
    return ScriptedPrefect(TWO_NODES)


def spec(gpus: int = 8, nodes: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "name": "trial",
        "workload": "grpo",
        "gang": {"nodes": nodes, "gpus_per_node": gpus},
        "components": {"trainer": {"command": ["true"]}},
        **more,
    }


def granted(**nodes: int) -> dict[str, Any]:
    return Grant(nodes=nodes, state_id="", at=0.0, by=GONE).label()


def hold(server: ScriptedPrefect, **nodes: int) -> UUID:
    id = server.submit(spec(), labels=granted(**nodes), run_count=1)
    server.set(id, State(type=StateType.RUNNING))
    return id


def run_passes(
    server: ScriptedPrefect, count: int = 1, scheduler: Scheduler | None = None
) -> list[QueueEntry]:
    """Run a number of scheduling passes, and return the runs that the scheduler starts."""

    async def run_all() -> list[QueueEntry]:
        capacity = Capacity()
        client: Any = server
        used_scheduler = scheduler or Scheduler(client, capacity=capacity)
        started: list[QueueEntry] = []
        for _ in range(count):
            last_pass, new_runs = await used_scheduler.decide(lambda entry, nodes: True)
            started += new_runs
            await used_scheduler.publish_reasons(last_pass)
        await capacity.close()
        return started

    return asyncio.run(run_all())


def test_message_names_a_new_awaited_run() -> None:
    server = ScriptedPrefect(template(8))
    hold(server, n1=4)
    other = hold(server, n1=4)
    run = server.submit(spec())
    run_passes(server)
    before = server.history(run)
    server.set(other, State(type=StateType.COMPLETED))

    run_passes(server, 2)

    assert server.history(run) == [*before, "PendingResources"]


def test_log_of_a_waiting_run_has_each_reason_once() -> None:
    server = ScriptedPrefect(template(8))
    hold(server, n1=4)
    other = hold(server, n1=4)
    run = server.submit(spec())

    run_passes(server, 3)
    first_logs = [*server.logs]
    server.set(other, State(type=StateType.COMPLETED))
    run_passes(server, 3)

    assert [run_id for run_id, _ in first_logs] == [run]
    assert first_logs[0][1].startswith("waiting: needs 1 node with 8 GPUs; waits for")
    assert [run_id for run_id, _ in server.logs] == [run, run]
    assert server.logs[0] != server.logs[1]


def test_missing_log_does_not_stop_the_scheduler(server: ScriptedPrefect) -> None:
    def fail() -> None:
        raise httpx.ConnectError("away")

    hold(server, n1=8, n2=8)
    run = server.submit(spec())
    server.ahead["create_logs"] = fail

    run_passes(server)

    assert server.history(run)[-1] == "PendingResources"


def test_deleted_run_does_not_stop_the_scheduler(server: ScriptedPrefect) -> None:
    hold(server, n1=8, n2=8)
    run = server.submit(spec())
    server.ahead["read_flow_run_states"] = lambda: server.delete(run)

    assert run_passes(server) == []


def test_refused_run_lists_every_fault(server: ScriptedPrefect) -> None:
    large = server.submit(spec(nodes=3))
    faulty = server.submit(spec(workload="dance", colour="red"))

    run_passes(server)

    infeasible, invalid = (str(server.run(run).state) for run in (large, faulty))
    assert "INFEASIBLE: " in infeasible and "Request fewer GPUs" in infeasible
    assert "USER_ERROR: " in invalid and "workload" in invalid and "colour" in invalid


@pytest.mark.parametrize(
    ("changed_keys", "beginning", "name"),
    [
        # only the workload is invalid, so the run id contains the valid name `trial`
        ({"workload": "dance"}, "the spec of trial has ", "trial-dance-"),
        # without a workload, no run id can be made, so the name of the flow run is used
        ({"workload": None}, "the spec of trial has ", "idealistic-harrier"),
        # the spec's name is invalid, so the run id contains the name of the flow run
        ({"name": 7}, "the spec has ", "idealistic-harrier"),
        # only the key `gang` is invalid, so the run id contains the valid name `trial`
        ({"gang": {"gpus": 8}}, "the spec of trial has ", "trial-grpo-"),
    ],
)
def test_faulty_spec_is_named_by_its_own_name(
    server: ScriptedPrefect, changed_keys: dict[str, Any], beginning: str, name: str
) -> None:
    run = server.submit({**spec(), **changed_keys})

    run_passes(server)

    failed = server.run(run)
    assert failed.state is not None and failed.state.message is not None
    assert failed.state.message.startswith(f"USER_ERROR: {beginning}")
    assert "idealistic-harrier" not in failed.state.message
    assert failed.name.startswith(name)


def add_deployment(server: ScriptedPrefect, strategy: str) -> UUID:
    """Create a deployment that allows one active run, and return its id.

    `strategy` is Prefect's collision strategy for a second run: "ENQUEUE" or "CANCEL_NEW".
    """
    deployment_id = uuid4()
    server.deployments.append(
        {
            "id": str(deployment_id),
            "global_concurrency_limit": {"limit": 1, "active_slots": 0},
            "concurrency_options": {"collision_strategy": strategy},
        }
    )
    return deployment_id


def test_run_waits_for_the_limit_of_its_deployment(server: ScriptedPrefect) -> None:
    deployment_id = add_deployment(server, "ENQUEUE")
    first, second = (server.submit(spec(gpus=1), deployment_id=deployment_id) for _ in range(2))

    started = run_passes(server)
    run_passes(server)

    assert [entry.id for entry in started] == [first]
    state = server.run(second).state
    assert state is not None and state.name == "PendingResources"
    assert "waits because its deployment has reached its limit of 1 run" in (state.message or "")


def test_overlapping_run_of_a_skipping_deployment_is_cancelled(server: ScriptedPrefect) -> None:
    deployment_id = add_deployment(server, "CANCEL_NEW")
    first, second = (server.submit(spec(gpus=1), deployment_id=deployment_id) for _ in range(2))

    started = run_passes(server)

    assert [entry.id for entry in started] == [first]
    state = server.run(second).state
    assert state is not None and state.is_cancelled()
    assert (state.message or "").startswith("skipped: the deployment allows 1 run at a time")


def waiting(server: ScriptedPrefect) -> UUID:
    hold(server, n1=8, n2=8)
    return server.submit(spec())


def waiting_with_old_message(server: ScriptedPrefect) -> UUID:
    """Return a waiting run whose state message will change in the next scheduling pass."""
    run = waiting(server)
    run_passes(server)
    hold(server, n2=1)
    server.patch(run, name="renamed")
    server.set(run, State(type=StateType.SCHEDULED, name="PendingResources", message="other"))
    return run


def about_to_start(server: ScriptedPrefect) -> UUID:
    return server.submit(spec())


def run_of_a_lost_worker(server: ScriptedPrefect) -> UUID:
    """Return a PENDING run whose worker and whose process have ended.

    The process ended before it started the flow.
    """
    hold(server, n1=8)
    run = server.submit(spec(), labels=granted(n2=8), infrastructure_pid="7")
    server.set(run, State(type=StateType.PENDING))
    return run


def run_of_a_lost_worker_without_process(server: ScriptedPrefect) -> UUID:
    run = run_of_a_lost_worker(server)
    server.patch(run, infrastructure_pid=None)
    return run


@pytest.mark.parametrize(
    "scene",
    [
        waiting,
        waiting_with_old_message,
        about_to_start,
        run_of_a_lost_worker,
        run_of_a_lost_worker_without_process,
    ],
)
def test_cancel_survives_every_timing_and_every_kill_of_the_scheduler(
    scene: Callable[[ScriptedPrefect], UUID],
) -> None:
    count = count_requests(scene)
    assert count > 8

    lost = [
        (cancelled, killed)
        for cancelled in range(1, count + 2)
        for killed in (None, *range(cancelled, cancelled + 4))
        if find_final_state(scene, cancelled, killed) != "CANCELLED"
    ]

    assert lost == []


def count_requests(scene: Callable[[ScriptedPrefect], UUID]) -> int:
    """Return the number of requests that the scheduler sends to the server in two passes.

    Args:
        scene: Function that adds a run to the server.
    """
    server = ScriptedPrefect(TWO_NODES)
    scene(server)
    before = server.requests
    run_passes(server, 2)
    return server.requests - before


def find_final_state(
    scene: Callable[[ScriptedPrefect], UUID], cancelled: int, killed: int | None
) -> str:
    """Return the type of the final state of a run that is cancelled during a scheduling pass.

    Args:
        scene: Function that prepares the server, and returns the id of the run.
        cancelled: The run is cancelled just before the scheduler's request with this number.
        killed: The scheduler is killed just before its request with this number. None if the
            scheduler is not killed.
    """
    server = ScriptedPrefect(TWO_NODES)
    run = scene(server)
    began = server.requests

    def cancel() -> None:
        server.cancel(run)
        if killed == cancelled:
            raise Killed

    def kill() -> None:
        raise Killed

    if killed is not None:
        server.before[began + killed] = kill
    server.before[began + cancelled] = cancel
    with suppress(Killed):
        run_passes(server, 2)
    server.before.clear()
    # If the scheduler sent too few requests, the function `cancel` above was not called. In this
    # case, cancel the run now.
    if "Cancelled" not in server.history(run) and "Cancelling" not in server.history(run):
        server.cancel(run)
    run_passes(server, 2)
    state = server.run(run).state
    assert state is not None
    return state.type.value


def test_run_retried_after_its_cancel_waits_again(server: ScriptedPrefect) -> None:
    hold(server, n1=8, n2=8)
    run = server.submit(spec())
    run_passes(server)
    server.cancel(run)
    server.set(run, State(type=StateType.SCHEDULED, name="AwaitingRetry"))

    run_passes(server, 3)

    assert server.history(run)[-2:] == ["AwaitingRetry", "PendingResources"]


def test_message_does_not_void_a_grant_of_another_scheduler(server: ScriptedPrefect) -> None:
    holder = hold(server, n1=8, n2=8)
    run = server.submit(spec())

    async def use_two_schedulers() -> None:
        capacity, client = Capacity(), server
        slow, fast = (Scheduler(client, capacity=capacity) for _ in range(2))  # type: ignore[arg-type]
        old_pass, _none = await slow.decide(lambda entry, nodes: True)
        server.set(holder, State(type=StateType.COMPLETED))
        _pass, started = await fast.decide(lambda entry, nodes: True)
        assert [entry.id for entry in started] == [run]
        await slow.publish_reasons(old_pass)
        await capacity.close()

    asyncio.run(use_two_schedulers())

    assert server.history(run) == ["Scheduled"]


def test_cancelled_run_that_has_begun_is_left_to_its_process(server: ScriptedPrefect) -> None:
    run = hold(server, n1=8)
    begun = server.run(run).state
    assert begun is not None
    server.patch(run, start_time=begun.timestamp)
    server.cancel(run)

    run_passes(server, 2)

    assert server.history(run)[-1] == "Cancelling"


def test_lost_pending_run_waits_again_although_its_deployments_limit_was_removed(
    server: ScriptedPrefect,
) -> None:
    lost_run = server.submit(spec(), labels=granted(n1=8))
    pending: State[Any] = State(type=StateType.PENDING)
    pending.state_details.deployment_concurrency_lease_id = uuid4()
    server.set(lost_run, pending)
    server.leases_without_limit.add(pending.state_details.deployment_concurrency_lease_id)
    next_run = server.submit(spec())

    started = run_passes(server)

    assert server.history(lost_run) == ["Scheduled", "Pending", "PendingResources"]
    assert [entry.id for entry in started] == [lost_run, next_run]


def test_long_queue_at_its_limit_hides_no_run_behind_it() -> None:
    server = ScriptedPrefect(template(8, 8, limits={"red": 8}))
    held = server.submit(spec(tags=["red"]), labels=granted(n1=8), run_count=1)
    server.set(held, State(type=StateType.RUNNING))
    for _ in range(450):
        server.submit(spec(tags=["red"]))
    free = server.submit(spec())

    assert [entry.id for entry in run_passes(server)] == [free]


def test_run_with_a_silent_process_reserves_no_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = ScriptedPrefect(template(8))
    clock = [1000.0]
    monkeypatch.setattr(scheduling_pass.time, "monotonic", lambda: clock[0])
    gone = server.submit(spec(), labels={"muster.gang.beat": 1.0, "muster.gang.host": "n1"})
    server.set(gone, State(type=StateType.RUNNING, name="PendingResources"))
    later = server.submit(spec())

    async def started(scheduler: Scheduler) -> list[UUID]:
        _pass, new_runs = await scheduler.decide(lambda entry, nodes: entry.id == later, changed=())
        return [entry.id for entry in new_runs]

    async def passes() -> list[list[UUID]]:
        capacity, client = Capacity(), cast(Any, server)
        scheduler = Scheduler(client, capacity=capacity)
        started_runs = [await started(scheduler)]
        clock[0] += 30
        server.patch(gone, labels={"muster.gang.beat": 2.0, "muster.gang.host": "n1"})
        started_runs.append(await started(scheduler))
        clock[0] += 41
        return [*started_runs, await started(scheduler)]

    assert asyncio.run(passes()) == [[], [], [later]]


def test_only_runs_too_large_for_the_largest_seen_cluster_are_refused() -> None:
    server = ScriptedPrefect(template(8))
    run = server.submit(spec(nodes=2, ray={"address": "http://ray:8265"}))
    nodes = [(), ("n1", "n2"), ("n1",), ()]

    class Growing:
        def __init__(self, _address: str, credentials: Credentials) -> None:
            self.credentials = credentials

        async def look(self, *, within_s: float) -> Cluster:
            return Cluster(nodes=tuple(ClusterNode(name=name, gpus=8) for name in nodes.pop(0)))

        async def close(self) -> None: ...

    async def passes(count: int) -> list[str]:
        client: Any = server
        scheduler = Scheduler(client, capacity=Capacity(make_reader=Growing))  # type: ignore[arg-type]
        for _ in range(count):
            await scheduler.decide(lambda entry, nodes: False)
        return server.history(run)

    assert asyncio.run(passes(4)) == ["Scheduled"]

    nodes = [("n1",)] * 3

    assert asyncio.run(passes(1)) == ["Scheduled", "Failed"]


def test_late_grant_promises_no_gpu_twice() -> None:
    server = ScriptedPrefect(template(8))
    early, late = server.submit(spec()), server.submit(spec())
    client: Any = server

    async def passes() -> list[UUID]:
        capacity = Capacity()
        slow, fast = (Scheduler(client, capacity=capacity) for _ in range(2))
        _pass, granted = await fast.decide(lambda entry, nodes: True)
        assert [entry.id for entry in granted] == [early]
        # The slow scheduler has lost the scheduling lease. Now its delayed request to write a grant
        # arrives at the server.
        state = server.run(late).state
        assert state is not None
        written = Grant(
            nodes={"n1": 8},
            devices={"n1": tuple(range(8))},
            state_id=str(state.id),
            at=time.time() + 1,
            by=slow.process,
        )
        server.patch(late, labels=written.label())
        started = []
        for scheduler in (slow, fast, slow):
            _pass, new_runs = await scheduler.decide(lambda entry, nodes: True, in_flight=[early])
            started += [entry.id for entry in new_runs]
        return started

    assert asyncio.run(passes()) == []
    assert grant_of(server.run(late)) is None
    assert grant_of(server.run(early)) is not None


@pytest.mark.parametrize("is_passed", [False, True])
def test_run_requeued_during_a_reading_keeps_its_position(
    is_passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FreeLease, "is_passed", is_passed)

    class TwoNodes:
        credentials = Credentials(has_token=False)

        def __init__(self, *_: object) -> None: ...

        async def look(self, *, within_s: float) -> Cluster:
            return Cluster(nodes=(ClusterNode(name="n1", gpus=8), ClusterNode(name="n2", gpus=8)))

        async def close(self) -> None: ...

    def starts_first_if_requeued_before(reading: int) -> bool:
        server = ScriptedPrefect(TWO_NODES)
        asks = {"ray": {"address": "http://ray:8265"}}
        first = server.submit(spec(nodes=2, **asks), labels=granted(n1=8))
        server.set(first, State(type=StateType.RUNNING))
        server.submit(spec(**asks))

        def requeue() -> None:
            if server.asked.count("read_flow_runs") == reading:
                server.set(first, State(type=StateType.SCHEDULED, name="PendingResources"))

        server.ahead["read_flow_runs"] = requeue
        client: Any = server
        scheduler = Scheduler(client, capacity=Capacity(make_reader=TwoNodes))  # type: ignore[arg-type]
        _pass, started = asyncio.run(scheduler.decide(lambda entry, nodes: True))
        return [entry.id for entry in started] == [first]

    # A scheduling pass sends several requests with the name `read_flow_runs`. In each iteration
    # below, the run `first` is requeued just before a different one of these requests.
    holds_again = 3 + 1 + 3 + is_passed + 1
    assert all(starts_first_if_requeued_before(reading) for reading in range(1, holds_again + 1))


def behind_a_limit(count: int) -> ScriptedPrefect:
    """Return a server with a free node and with waiting runs that may not start yet.

    The runs have the tag `red`. Another run uses all GPUs that the limit of this tag allows.

    Args:
        count: Number of waiting runs.
    """
    server = ScriptedPrefect(template(8, 8, limits={"red": 8}))
    hold = server.submit(spec(tags=["red"]), labels=granted(n1=8), run_count=1)
    server.set(hold, State(type=StateType.RUNNING))
    for _ in range(count):
        server.submit(spec(tags=["red"]))
    return server


def test_waiting_runs_are_read_once_if_no_other_scheduler_decides() -> None:
    server = behind_a_limit(450)
    free = server.submit(spec())
    client: Any = server
    scheduler = Scheduler(client, capacity=Capacity())
    asyncio.run(scheduler.decide(lambda entry, nodes: False))
    before = server.asked.count("read_flow_runs")

    _pass, started = asyncio.run(scheduler.decide(lambda entry, nodes: True))

    assert [entry.id for entry in started] == [free]
    windows, holding, due, again = 3, 3, 1, 1
    assert server.asked.count("read_flow_runs") - before == windows + 2 * holding + due + again


async def run_pass_after(
    server: ScriptedPrefect, scheduler: Scheduler, *changed: UUID
) -> SchedulingPass:
    """Run a scheduling pass after the scheduler has received events about some flow runs."""
    last_pass, _started = await scheduler.decide(lambda entry, nodes: True, changed=changed)
    return last_pass


@pytest.mark.asyncio
async def test_scheduler_reads_only_new_and_changed_runs() -> None:
    server = behind_a_limit(450)
    client: Any = server
    scheduler = Scheduler(client, capacity=Capacity())
    await scheduler.decide(lambda entry, nodes: True)
    first, second = (entry.id for entry in (await run_pass_after(server, scheduler)).queue[:2])
    before = server.requests
    assert len((await run_pass_after(server, scheduler)).queue) == 450
    # Without changed flow runs, a scheduling pass sends no request to the server.
    assert server.requests == before
    new_run = server.submit(spec(tags=["red"]), due=datetime.now(UTC))
    before = server.asked.count("read_flow_runs")
    server.cancel(second)

    last_pass = await run_pass_after(server, scheduler, second)

    ids = [entry.id for entry in last_pass.queue]
    assert len(ids) == 450 and ids[0] == first and ids[-1] == new_run and second not in ids
    due, holding, again = 1, 3, 1
    assert server.asked.count("read_flow_runs") - before == due + holding + again


@pytest.mark.asyncio
@pytest.mark.parametrize("missed", ["events", "a decision", "minutes", "a failure"])
async def test_scheduler_reads_everything_after_missed_events(
    missed: str, server: ScriptedPrefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(server, n1=8, n2=8)
    runs = [server.submit(spec()) for _ in range(2)]
    client: Any = server
    scheduler = Scheduler(client, capacity=Capacity())
    await scheduler.decide(lambda entry, nodes: True)
    # The scheduler receives no event about this cancellation.
    server.cancel(runs[0])
    assert [entry.id for entry in (await run_pass_after(server, scheduler)).queue] == runs
    changed = [runs[1]]
    match missed:
        case "a decision":
            monkeypatch.setattr(FreeLease, "is_passed", True)
        case "minutes":
            now = time.monotonic()
            monkeypatch.setattr(scheduler_module.time, "monotonic", lambda: now + 61)
            changed = []
        case "a failure":

            def refuse() -> None:
                raise httpx.ConnectError("refused")

            server.ahead["read_work_pools"] = refuse
            with pytest.raises(httpx.ConnectError):
                await run_pass_after(server, scheduler, runs[1])
            server.ahead.clear()
            changed = []

    last_pass, _started = await scheduler.decide(
        lambda entry, nodes: True, changed=None if missed == "events" else changed
    )

    assert [entry.id for entry in last_pass.queue] == runs[1:]


@pytest.mark.asyncio
async def test_scheduled_run_is_read_before_it_is_due(
    server: ScriptedPrefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = datetime.now(UTC) + timedelta(seconds=30)
    cancelled, run = (server.submit(spec(), due=due) for _ in range(2))
    client: Any = server
    scheduler = Scheduler(client, capacity=Capacity())
    assert not (await run_pass_after(server, scheduler)).queue
    server.cancel(cancelled)
    monkeypatch.setattr(scheduling_pass.time, "time", lambda: due.timestamp() + 1)

    _pass, started = await scheduler.decide(lambda entry, nodes: True, changed=())

    assert [entry.id for entry in started] == [run]


@pytest.mark.asyncio
async def test_scheduler_reads_its_own_changes(server: ScriptedPrefect) -> None:
    holder = hold(server, n1=8, n2=8)
    run, behind = server.submit(spec()), server.submit(spec())
    client: Any = server
    scheduler = Scheduler(client, capacity=Capacity())
    last_pass, _started = await scheduler.decide(lambda entry, nodes: True)
    await scheduler.publish_reasons(last_pass)
    assert [
        await scheduler.publish_reasons(await run_pass_after(server, scheduler)) for _ in range(2)
    ] == [
        False,
        False,
    ]
    assert server.history(run).count("PendingResources") == 1
    server.set(holder, State(type=StateType.COMPLETED))

    last_pass, started = await scheduler.decide(lambda entry, nodes: True, changed=[holder])

    assert [entry.id for entry in started] == [run, behind]
    # The two started runs are no longer in the queue, and the next pass does not start them again.
    last_pass, started = await scheduler.decide(
        lambda entry, nodes: True, in_flight=[run, behind], changed=()
    )
    assert not last_pass.queue and not started


@pytest.mark.parametrize("action", ["grants", "cancels"])
def test_changes_before_the_lease_is_taken_are_seen(
    action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FreeLease, "is_passed", action == "grants")
    server = ScriptedPrefect(template(8))
    first, second = (server.submit(spec()) for _ in range(2))

    class LeaseAfterChange(FreeLease):
        @asynccontextmanager
        async def acquire(self, *, within_s: float) -> AsyncIterator[Any]:
            if action == "grants":
                state = server.run(second).state
                assert state is not None
                other = GONE.model_copy(update={"host": "elsewhere"})
                grant = Grant(nodes={"n1": 8}, state_id=str(state.id), at=time.time(), by=other)
                server.patch(second, labels=grant.label())
            else:
                server.cancel(first)
            yield SimpleNamespace(check=lambda: None)

    monkeypatch.setattr(scheduler_module, "SchedulingLease", LeaseAfterChange)
    client: Any = server
    scheduler = Scheduler(client, capacity=Capacity())

    _pass, started = asyncio.run(scheduler.decide(lambda entry, nodes: True))

    assert [entry.id for entry in started] == ([] if action == "grants" else [second])


def test_run_is_not_started_without_its_grant(server: ScriptedPrefect) -> None:
    client: Any = server
    kept, cancelled, requeued = (server.submit(spec(gpus=2)) for _ in range(3))

    async def find_granted() -> list[UUID]:
        scheduler = Scheduler(client, capacity=Capacity())
        _pass, granted = await scheduler.decide(lambda entry, nodes: True)
        server.cancel(cancelled)
        server.patch(requeued, labels=no_grant_labels())
        return [entry.id for entry in granted if await scheduler.is_granted(entry)]

    assert asyncio.run(find_granted()) == [kept]


@asynccontextmanager
async def client_of(server: ScriptedPrefect) -> AsyncIterator[Any]:
    yield server


def test_retry_avoids_failed_nodes_and_second_failure_drains_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = ScriptedPrefect(template(8, 8, 8, 8))
    monkeypatch.setattr(admission, "get_client", lambda: client_of(server))
    broken = Failure(kind=FailureKind.GPU_HARDWARE, message="Xid 79 on n1")

    def fail_on_first_node() -> UUID:
        run = server.submit(spec())
        [entry] = run_passes(server)
        assert entry.grant is not None and list(entry.grant.nodes) == ["n1"]
        server.set(run, State(type=StateType.RUNNING))
        asyncio.run(admission.note_failure(run, f"run-{run}", broken))
        return run

    first = fail_on_first_node()
    server.set(first, State(type=StateType.SCHEDULED, name="PendingResources"))
    [retried] = run_passes(server)
    assert retried.grant is not None and list(retried.grant.nodes) == ["n2"]
    server.set(first, State(type=StateType.COMPLETED))
    assert not server.events
    second = fail_on_first_node()
    server.set(second, State(type=StateType.FAILED))
    third = server.submit(spec())

    [entry] = run_passes(server)

    assert entry.id == third
    assert entry.grant is not None and list(entry.grant.nodes) == ["n2"]
    [event] = server.events
    assert event["event"] == "muster.node.drained"
    assert (event["payload"]["node"], event["payload"]["by"]) == ("n1", f"run-{second}")


@pytest.mark.parametrize("queue_name", ["urgent", None])
def test_run_whose_work_queue_was_deleted_starts_in_the_default_queue(
    queue_name: str | None,
) -> None:
    server = ScriptedPrefect(template(8))
    holder = hold(server, n1=8)
    run = server.submit(spec())
    later_run = server.submit(spec())
    run_passes(server)
    server.delete_queue(run)
    server.patch(run, work_queue_name=queue_name)
    server.set(holder, State(type=StateType.COMPLETED))

    started = run_passes(server)

    assert [(entry.id, entry.pool, entry.queue) for entry in started] == [(run, "gang", "default")]
    assert server.history(later_run)[-1] == "PendingResources"


def test_run_of_a_deleted_queue_is_found_by_a_new_scheduler_after_other_runs() -> None:
    server = ScriptedPrefect(template(8, 8))
    run = server.submit(spec(), work_queue_name="urgent")
    server.delete_queue(run)
    other_run = server.submit(spec())

    started = run_passes(server)

    assert {entry.id for entry in started} == {run, other_run}


def test_run_of_a_served_deployment_is_not_started() -> None:
    server = ScriptedPrefect(template(8))
    run = server.submit(spec())
    server.delete_queue(run)

    assert run_passes(server) == []
    assert server.history(run) == ["Scheduled"]


def set_time_of_state(server: ScriptedPrefect, id: UUID, age_s: float) -> None:
    """Set the time of a flow run's current state to `age_s` seconds ago."""
    state = server.run(id).state
    assert state is not None
    timestamp = datetime.now(UTC) - timedelta(seconds=age_s)
    server.patch(id, state=state.model_copy(update={"timestamp": timestamp}))


@pytest.mark.parametrize(
    ("states", "age_s", "starts"),
    [
        # A user set the state to Scheduled a second ago, while the run had a process. This process
        # may still exist, so the scheduler does not start another process.
        ([StateType.RUNNING, StateType.SCHEDULED], 1.0, False),
        ([StateType.RUNNING, StateType.SCHEDULED, StateType.SCHEDULED], 1.0, False),
        # A user set the state to Scheduled a minute ago. A living process would have corrected the
        # state. So the process has ended, and the scheduler starts the run.
        ([StateType.RUNNING, StateType.SCHEDULED], 61.0, True),
        # A user has retried a failed run. The run has no process, so the scheduler starts the run.
        ([StateType.RUNNING, StateType.FAILED, StateType.SCHEDULED], 1.0, True),
    ],
)
def test_run_that_was_set_back_gets_no_second_process(
    states: list[StateType], age_s: float, starts: bool
) -> None:
    server = ScriptedPrefect(template(8))
    run = server.submit(spec(), infrastructure_pid="n1:123")
    for type in states:
        server.set(run, State(type=type), force=True)
    set_time_of_state(server, run, age_s)

    started = run_passes(server)

    assert [entry.id for entry in started] == ([run] if starts else [])


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_name_that_a_user_typed_is_kept_in_a_label(
    server: ScriptedPrefect, is_scheduled: bool
) -> None:
    run = server.submit(spec(), auto_scheduled=is_scheduled)

    run_passes(server)

    typed_name = server.run(run).labels.get(TYPED_NAME_LABEL)
    assert typed_name == (None if is_scheduled else "idealistic-harrier")
