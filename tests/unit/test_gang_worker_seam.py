"""The internals of Prefect's worker that the gang worker overrides still exist.

A minor release of Prefect may change them without notice. Runs would then start without the
scheduler.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections import deque
from collections.abc import Iterator
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import httpx
import prefect
import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.runner._cancellation_manager import CancellationManager
from prefect.runner._flow_run_executor import FlowRunExecutorContext
from prefect.runner._process_manager import ProcessManager
from prefect.settings import PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from prefect.workers.base import BaseWorker
from prefect.workers.process import ProcessWorker

from tasks.queue import worker as gang
from tasks.queue.worker import GangWorker
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord, RunJson
from tasks.record.states import RunState
from tests.support.scripted_prefect import ScriptedPrefect

#: Method of Prefect's worker that the gang worker overrides to decide which runs start.
METHOD = "_get_scheduled_flow_runs"
REQUEST = httpx.Request("GET", "http://a/api")
#: Private attributes of Prefect's worker that the scheduler uses, each with its expected type.
KINDS: dict[str, type | tuple[type, ...]] = {
    "_submitting_flow_run_ids": set,
    "_exit_stack": AsyncExitStack,
    "_runs_task_group": object,
    "_work_queues": set,
    "_work_pool_name": str,
    "_prefetch_seconds": (int, float),
    "_limiter": object,
}


def private_names(source: str) -> set[str]:
    """Return the private attributes of `self` that a module uses, but neither sets nor defines."""
    used_names = set()
    defined_names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            defined_names.add(node.name)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined_names.add(node.target.id)
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            continue
        if node.value.id == "self" and node.attr.startswith("_"):
            names = used_names if isinstance(node.ctx, ast.Load) else defined_names
            names.add(node.attr)
    return used_names - defined_names


def find_changed_internals(base: type[Any]) -> Iterator[str]:
    """Yield a message for each private method or attribute of a worker that is not as expected.

    A missing method or attribute is also reported.

    Args:
        base: Prefect's worker class.
    """
    class_name = f"Prefect {prefect.__version__}: {base.__name__}"
    method = getattr(base, METHOD, None)
    if method is None or list(inspect.signature(method).parameters) != ["self"]:
        yield f"{class_name} has no {METHOD}() any more"
    elif "list" not in str(annotation := inspect.signature(method).return_annotation) or (
        WorkerFlowRunResponse.__name__ not in str(annotation)
    ):
        yield f"{class_name}.{METHOD} returns {annotation}, not a list of WorkerFlowRunResponse"
    worker = base(work_pool_name="any")
    for name, kind in KINDS.items():
        if not hasattr(worker, name):
            yield f"{class_name} has no {name} any more"
        elif not isinstance(value := getattr(worker, name), kind):
            yield f"{class_name}.{name} is a {type(value).__name__}"
    yield from asyncio.run(_check_submission(base, class_name))


async def _check_submission(base: type[Any], class_name: str) -> list[str]:
    """Let a worker poll the server once, and return a message for each unexpected behaviour.

    The worker must call the method that the gang worker overrides, and must submit exactly the flow
    runs that this method returns.

    Args:
        base: Prefect's worker class.
        class_name: Name of the class in the messages.
    """
    run = FlowRun(id=uuid4(), flow_id=uuid4(), name="a-run")
    calls: list[bool] = []
    submitted: list[UUID] = []

    class Overridden(base):
        # Prefect registers worker classes under their types, so the type of each class must be
        # unique.
        type = f"overridden-{run.id}"

        async def _get_scheduled_flow_runs(self) -> list[WorkerFlowRunResponse]:
            calls.append(True)
            return [
                WorkerFlowRunResponse(work_pool_id=uuid4(), work_queue_id=uuid4(), flow_run=run)
            ]

    class TaskGroup:
        def start_soon(self, _submit: object, flow_run: FlowRun) -> None:
            submitted.append(flow_run.id)

    worker = Overridden(work_pool_name="any")
    worker._runs_task_group = TaskGroup()
    worker._has_successfully_synced = True
    with temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: False}):
        try:
            await worker.get_and_submit_flow_runs()
        except Exception as error:
            return [f"{class_name}.get_and_submit_flow_runs raises {error!r}"]
    if not calls:
        return [f"{class_name}.get_and_submit_flow_runs does not call {METHOD}() any more"]
    if submitted != [run.id]:
        return [f"{class_name} does not submit the result of {METHOD}(): {submitted}"]
    if worker._submitting_flow_run_ids != {run.id}:
        return [f"{class_name} does not keep the submitted run in _submitting_flow_run_ids"]
    return []


def test_prefect_calls_the_overridden_methods() -> None:
    problems = list(find_changed_internals(ProcessWorker))

    assert problems == [], "Prefect has changed internals that tasks/queue/worker.py overrides"


def test_every_private_prefect_name_in_use_is_checked_here() -> None:
    source = inspect.getsource(gang)

    assert private_names(source) - {METHOD, "_logger"} <= KINDS.keys()


def test_gang_worker_overrides_only_checked_methods() -> None:
    """Check which methods of Prefect's worker the gang worker overrides.

    The following overrides are safe:

    - The private method in `METHOD`, because other tests check this method.
    - `run`, because every worker class may define this public method.
    - `__aenter__`, because Muster's method calls Prefect's `__aenter__` as well.
    """
    overridden = {
        name
        for name, value in vars(GangWorker).items()
        if inspect.isfunction(value) and hasattr(ProcessWorker, name)
    }

    assert overridden == {METHOD, "__init__", "__aenter__", "run", "sync_with_backend"}
    own_parameters = list(inspect.signature(GangWorker.run).parameters)
    assert own_parameters == list(inspect.signature(ProcessWorker.run).parameters)


@pytest.mark.parametrize(
    ("error", "is_raised"),
    [
        (httpx.ConnectError("refused"), False),
        (httpx.HTTPStatusError("", request=REQUEST, response=httpx.Response(503)), False),
        (httpx.HTTPStatusError("", request=REQUEST, response=httpx.Response(401)), True),
    ],
    ids=["no answer", "503", "401"],
)
def test_worker_survives_an_unreachable_server_but_not_http_401(
    monkeypatch: pytest.MonkeyPatch, error: httpx.HTTPError, is_raised: bool
) -> None:
    async def fail(_self: object) -> None:
        raise error

    monkeypatch.setattr(ProcessWorker, "sync_with_backend", fail)
    worker = GangWorker("gang", "a")

    with pytest.raises(httpx.HTTPError) if is_raised else nullcontext():
        asyncio.run(worker.sync_with_backend())


@pytest.mark.parametrize(
    ("has_lost_lease", "states", "events"),
    [
        (True, ["Scheduled", "Pending", "PendingResources"], ["muster.run.requeued"]),
        (False, ["Scheduled", "Pending"], []),
    ],
)
def test_run_whose_lease_was_lost_waits_again_after_its_process_has_ended(
    monkeypatch: pytest.MonkeyPatch, has_lost_lease: bool, states: list[str], events: list[str]
) -> None:
    server = ScriptedPrefect({})
    spec = {"name": "trial", "workload": "sft", "components": {"trainer": {"command": ["true"]}}}
    flow_run_id = server.submit(spec)
    server.set(flow_run_id, State(type=StateType.PENDING))
    monkeypatch.setattr(gang, "has_lost_lease", lambda _: has_lost_lease)
    worker = GangWorker("gang", "a")
    monkeypatch.setattr(GangWorker, "client", server)
    announced: list[str] = []
    worker._announce = lambda name, *_, **__: announced.append(name)

    asyncio.run(worker._complete_end(flow_run_id, 0.0))

    assert server.history(flow_run_id) == states
    assert announced == events


@pytest.mark.parametrize(
    ("cancel", "name"),
    [
        (StateType.CANCELLING, "Cancelled"),
        (StateType.CANCELLED, "Cancelled"),
        (StateType.CRASHED, "Crashed"),
    ],
)
@pytest.mark.parametrize(
    ("record_state", "age_s", "expected"),
    [
        ("completed", 0.0, "Completed"),
        ("failed", 0.0, "Failed"),
        ("cancelled", 0.0, None),
        ("running", 0.0, None),
        # The record is older than this process, so an earlier process of the flow run wrote it.
        ("completed", 60.0, None),
    ],
)
def test_server_gets_the_result_of_a_run_that_ended_before_its_cancel(
    muster_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    cancel: StateType,
    name: str,
    record_state: str,
    age_s: float,
    expected: str | None,
) -> None:
    server = ScriptedPrefect({})
    flow_run_id = server.submit({"name": "trial", "workload": "sft"})
    server.set(flow_run_id, State(type=StateType.RUNNING))
    server.set(flow_run_id, State(type=cancel))
    monkeypatch.setattr(GangWorker, "client", server)
    began_at = 1000.0
    place = RunPlace.of(server.run(flow_run_id).name)
    place.directory.mkdir(parents=True)
    record = RunJson(
        run_id=place.run_id,
        flow_run_id=str(flow_run_id),
        state=RunState(record_state),
        message="the result",
        attempts=(AttemptRecord(number=1, state=RunState(record_state)),),
        ended_at=began_at + 5.0 - age_s,
    )
    place.record.write_text(record.model_dump_json())

    asyncio.run(GangWorker("gang", "a")._complete_end(flow_run_id, began_at))

    state = server.run(flow_run_id).state
    assert state is not None
    assert state.name == (expected or name)
    assert (state.message == "the result") is (expected is not None)


def test_worker_type_is_found_by_name() -> None:
    assert BaseWorker.get_worker_class_from_type("gang") is GangWorker


class SchedulerOfAnotherLeader:
    """A fake scheduler of the worker `b`. The leader is another worker, `a`.

    Each scheduling pass returns runs that the worker `b` must start.
    """

    def __init__(self, *granted: int) -> None:
        """Set the number of runs that each scheduling pass returns.

        Args:
            granted: One number for each scheduling pass, in the order of the passes.
        """
        self.granted = list(granted)
        #: Number of scheduling passes until now.
        self.passes = 0

    async def decide(self, *_: object, **_options: object) -> tuple[Any, list[Any]]:
        self.passes += 1
        scheduling_pass = SimpleNamespace(
            ledger=SimpleNamespace(leader=("gang", "a"), pools={}), queue=[], admitted=[], stuck=[]
        )
        return scheduling_pass, [object()] * self.granted.pop(0)


def test_worker_runs_a_pass_only_if_it_is_offered_a_run_or_the_leader_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = GangWorker(work_pool_name="gang", name="b")
    scheduler = SchedulerOfAnotherLeader(0, 0, 1, 0)
    worker._scheduler = scheduler  # type: ignore[assignment]
    worker._granted = deque()
    worker._offered_at = {}
    monkeypatch.setattr(worker, "_publish_queue", lambda *_: None)

    async def scenario() -> list[tuple[int, bool]]:
        now = [0.0]
        clock = SimpleNamespace(time=lambda: now[0])
        monkeypatch.setattr(gang.asyncio, "get_running_loop", lambda: clock)
        passes_and_leaders = []
        for at, is_offered in (
            (0, False),
            (10, False),
            (20, True),
            (40, False),
            (55, False),
            (58, False),
        ):
            now[0] = at
            if is_offered:
                assert worker._should_wake("muster.run.offered")
            assert worker._should_wake("prefect.flow-run.Completed") is worker._is_leader
            await worker._run_pass()
            passes_and_leaders.append((scheduler.passes, worker._is_leader))
        return passes_and_leaders

    results = asyncio.run(scenario())

    # There are three scheduling passes:
    # - At the start.
    # - At 20 s, because Prefect offered a run to the worker.
    # - At 55 s, because the last pass was more than 30 s ago. The leader's event about a run was
    #   lost, so only this pass starts the run.
    assert results == [
        (1, False),
        (1, False),
        (2, False),
        (2, False),
        (3, False),
        (3, False),
    ]


def test_run_not_taken_by_a_worker_is_offered_again() -> None:
    worker = GangWorker(work_pool_name="gang", name="a")
    events: list[str] = []
    worker._offered_at = {}
    worker._announce = lambda name, *_, **__: events.append(name)
    run = SimpleNamespace(
        id=uuid4(),
        is_scheduled=True,
        has_gang_without_ray=True,
        pool="gang",
        queue="default",
        flow_run=None,
        request=SimpleNamespace(name="run", demand=None),
    )
    messages = []
    for at in (0.0, 5.0, 10.0):
        scheduling_pass: Any = SimpleNamespace(admitted=[(run, {"elsewhere": 1})], messages={})
        worker._offer_runs(scheduling_pass, at)
        messages.append([message.text for message in scheduling_pass.messages.values()])

    assert events == ["muster.run.offered"] * 2
    assert messages[:2] == [[], []]
    assert "waits for the worker of elsewhere to start it" in messages[2][0]


class Process:
    """Fake process of a flow run. The process ends after `is_alive` was called five times."""

    pid = 4711

    def __init__(self) -> None:
        #: Number of checks until the process has ended.
        self.checks_left = 5
        #: Signals and states that the process and its flow run received, in order.
        self.actions: list[str] = []

    def is_alive(self) -> bool:
        self.checks_left -= 1
        return self.checks_left > 0

    def graceful_kill(self) -> None:
        self.actions.append("SIGTERM")

    def hard_kill(self) -> None:
        self.actions.append("SIGKILL")

    def close(self) -> None:
        pass


class StateProposer:
    """Fake of the function with which Prefect proposes states for flow runs.

    The fake records the state of a cancelled flow run.
    """

    def __init__(self, actions: list[str]) -> None:
        self.actions = actions

    async def propose_cancelled(self, *_: object) -> bool:
        self.actions.append("Cancelled")
        return True


class EventEmitter:
    """Fake of Prefect's event emitter. The fake emits no events."""

    async def get_flow_and_deployment(self, *_: object) -> tuple[None, None]:
        return None, None

    async def emit_flow_run_cancelled(self, **_: object) -> None:
        pass


def cancel_flow_run(process: Process, monkeypatch: pytest.MonkeyPatch, grace_s: float) -> list[int]:
    """Cancel a flow run as Prefect's worker does.

    Args:
        process: Process of the flow run.
        grace_s: Grace period of the run, in seconds.

    Returns:
        The pids of the processes for which the worker has looked up the grace period.
    """
    read_pids: list[int] = []

    def teardown_s(pid: int) -> float:
        read_pids.append(pid)
        return grace_s

    monkeypatch.setattr(gang, "teardown_s", teardown_s)
    monkeypatch.setattr(gang, "_CHECK_EVERY_S", 0.001)
    run = FlowRun(id=uuid4(), flow_id=uuid4(), name="a-run")

    async def scenario() -> None:
        processes = ProcessManager()
        gang._keep_grace_periods(processes)
        await processes.add(run.id, process)  # type: ignore[arg-type]
        manager = CancellationManager(
            process_manager=processes,
            hook_runner=gang._NoHooks(),  # type: ignore[arg-type]
            state_proposer=StateProposer(process.actions),  # type: ignore[arg-type]
            event_emitter=EventEmitter(),  # type: ignore[arg-type]
            client=SimpleNamespace(),  # type: ignore[arg-type]
        )
        await manager.cancel(run)

    asyncio.run(scenario())
    return read_pids


def test_cancelled_flow_run_has_the_grace_periods_of_its_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process()

    read_pids = cancel_flow_run(process, monkeypatch, grace_s=3600.0)

    assert read_pids == [process.pid]
    assert process.actions == ["SIGTERM", "Cancelled"]


def test_cancelled_flow_run_that_exceeds_its_grace_periods_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process()
    process.checks_left = 10**9
    monkeypatch.setattr(gang, "_ENDS_WITHIN_S", 0.0)

    cancel_flow_run(process, monkeypatch, grace_s=0.05)

    assert process.actions == ["SIGTERM", "SIGKILL", "Cancelled"]


def test_prefect_cancels_through_the_process_manager_that_the_gang_worker_changes() -> None:
    source = inspect.getsource(FlowRunExecutorContext)

    assert source.count("ProcessManager(") == 1
    assert "process_manager=self.process_manager" in source
