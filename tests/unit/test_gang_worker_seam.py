"""The internals of Prefect's worker that the gang worker overrides still exist.

A minor release of Prefect may change them without notice. Runs would then start without the gate.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections import deque
from collections.abc import Iterator
from contextlib import AsyncExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import httpx
import prefect
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.runner._cancellation_manager import CancellationManager
from prefect.runner._flow_run_executor import FlowRunExecutorContext
from prefect.runner._process_manager import ProcessManager
from prefect.settings import PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from prefect.workers.base import BaseWorker
from prefect.workers.process import ProcessWorker

from tasks.queue import worker as gang
from tasks.queue.worker import GangWorker

PLACE = "_get_scheduled_flow_runs"
REQUEST = httpx.Request("GET", "http://a/api")
#: Internals of Prefect's worker that the gate relies on, with a check of each.
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
    """Return the names `self._name` that a module uses but neither sets nor defines."""
    used, own = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own.add(node.name)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            continue
        if node.value.id == "self" and node.attr.startswith("_"):
            (used if isinstance(node.ctx, ast.Load) else own).add(node.attr)
    return used - own


def what_moved(base: type[Any]) -> Iterator[str]:
    """Return the internals that the gang worker needs and that are missing or changed."""
    where = f"Prefect {prefect.__version__}: {base.__name__}"
    place = getattr(base, PLACE, None)
    if place is None or list(inspect.signature(place).parameters) != ["self"]:
        yield f"{where} has no {PLACE}() any more"
    elif "list" not in str(answer := inspect.signature(place).return_annotation) or (
        WorkerFlowRunResponse.__name__ not in str(answer)
    ):
        yield f"{where}.{PLACE} returns {answer}, not a list of WorkerFlowRunResponse"
    worker = base(work_pool_name="any")
    for name, kind in KINDS.items():
        if not hasattr(worker, name):
            yield f"{where} has no {name} any more"
        elif not isinstance(found := getattr(worker, name), kind):
            yield f"{where}.{name} is a {type(found).__name__}"
    yield from asyncio.run(_not_submitted(base, where))


async def _not_submitted(base: type[Any], where: str) -> list[str]:
    """Check that a poll calls the overridden method, and submits exactly its result."""
    run = FlowRun(id=uuid4(), flow_id=uuid4(), name="a-run")
    asked: list[bool] = []
    submitted: list[UUID] = []

    class Overridden(base):
        # Each name must be unique.
        type = f"overridden-{run.id}"

        async def _get_scheduled_flow_runs(self) -> list[WorkerFlowRunResponse]:
            asked.append(True)
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
            return [f"{where}.get_and_submit_flow_runs raises {error!r}"]
    if not asked:
        return [f"{where}.get_and_submit_flow_runs does not ask {PLACE}() any more"]
    if submitted != [run.id]:
        return [f"{where} does not submit what {PLACE}() gives: {submitted}"]
    if worker._submitting_flow_run_ids != {run.id}:
        return [f"{where} does not keep what is being submitted in _submitting_flow_run_ids"]
    return []


def test_prefect_calls_the_overridden_methods() -> None:
    moved = list(what_moved(ProcessWorker))

    assert moved == [], "Prefect has moved what tasks/queue/worker.py overrides"


def test_every_private_prefect_name_in_use_is_checked_here() -> None:
    source = inspect.getsource(gang)

    assert private_names(source) - {PLACE, "_logger"} <= KINDS.keys()


def test_gang_worker_overrides_only_checked_methods() -> None:
    """`run` and the name are public, and every worker type has its own.

    `__aenter__` only chooses the folder for temporary files before Prefect's begins.
    """
    overridden = {
        name
        for name, value in vars(GangWorker).items()
        if inspect.isfunction(value) and hasattr(ProcessWorker, name)
    }

    assert overridden == {PLACE, "__init__", "__aenter__", "run", "sync_with_backend"}
    ours, theirs = (inspect.signature(one.run).parameters for one in (GangWorker, ProcessWorker))
    assert list(ours) == list(theirs)


@pytest.mark.parametrize(
    ("error", "is_raised"),
    [
        (httpx.ConnectError("refused"), False),
        (httpx.HTTPStatusError("", request=REQUEST, response=httpx.Response(503)), False),
        (httpx.HTTPStatusError("", request=REQUEST, response=httpx.Response(401)), True),
    ],
    ids=["no answer", "503", "401"],
)
def test_worker_survives_a_server_that_is_away(
    monkeypatch: pytest.MonkeyPatch, error: httpx.HTTPError, is_raised: bool
) -> None:
    async def fail(_self: object) -> None:
        raise error

    monkeypatch.setattr(ProcessWorker, "sync_with_backend", fail)
    worker = GangWorker("gang", "a")

    with pytest.raises(httpx.HTTPError) if is_raised else nullcontext():
        asyncio.run(worker.sync_with_backend())


def test_worker_type_is_found_by_name() -> None:
    assert BaseWorker.get_worker_class_from_type("gang") is GangWorker


class Looked:
    """A gate whose pass finds that worker `a` is the leader, and some runs to start."""

    def __init__(self, *granted: int) -> None:
        self.granted = [*granted]
        self.looks = 0

    async def decide(self, *_: object, **_more: object) -> tuple[Any, list[Any]]:
        self.looks += 1
        look = SimpleNamespace(
            ledger=SimpleNamespace(looker=("gang", "a"), pools={}), line=[], admitted=[], stuck=[]
        )
        return look, [object()] * self.granted.pop(0)


def test_worker_runs_a_pass_only_if_it_is_offered_a_run_or_the_leader_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, gate = GangWorker(work_pool_name="gang", name="b"), Looked(0, 0, 1, 0)
    worker._gate = gate  # type: ignore[assignment]
    worker._granted = deque()
    worker._offered_at = {}
    monkeypatch.setattr(worker, "_show_queue", lambda *_: None)

    async def looks() -> list[tuple[int, bool]]:
        now = [0.0]
        clock = SimpleNamespace(time=lambda: now[0])
        monkeypatch.setattr(gang.asyncio, "get_running_loop", lambda: clock)
        found = []
        for at, offered in (
            (0, False),
            (10, False),
            (20, True),
            (40, False),
            (55, False),
            (58, False),
        ):
            now[0] = at
            if offered:
                assert worker._should_wake("muster.run.offered")
            assert worker._should_wake("prefect.flow-run.Completed") is worker._is_leader
            await worker._run_pass()
            found.append((gate.looks, worker._is_leader))
        return found

    # At 55 s the worker finds a run that it was not offered.
    assert asyncio.run(looks()) == [
        *((1, False), (1, False), (2, False), (2, False), (3, False), (3, False)),
    ]


def test_run_not_taken_by_a_worker_is_offered_again() -> None:
    worker, told = GangWorker(work_pool_name="gang", name="a"), []
    worker._offered_at = {}
    worker._announce = lambda name, *_, **__: told.append(name)
    run = SimpleNamespace(
        id=uuid4(),
        is_scheduled=True,
        is_of_processes=True,
        pool="gang",
        queue="default",
        flow_run=None,
        request=SimpleNamespace(name="run", demand=None),
    )
    said = []
    for at in (0.0, 5.0, 10.0):
        look: Any = SimpleNamespace(admitted=[(run, {"elsewhere": 1})], messages={})
        worker._offer_runs(look, at)
        said.append([message.text for message in look.messages.values()])

    assert told == ["muster.run.offered"] * 2
    assert said[:2] == [[], []]
    assert "waits for the worker of elsewhere to start it" in said[2][0]


class Process:
    """A flow run's process that ends after it was looked at some times, once it is asked to."""

    pid = 4711

    def __init__(self) -> None:
        self.looks_left = 5
        self.told: list[str] = []

    def is_alive(self) -> bool:
        self.looks_left -= 1
        return self.looks_left > 0

    def graceful_kill(self) -> None:
        self.told.append("ask to end")

    def hard_kill(self) -> None:
        self.told.append("kill")

    def close(self) -> None:
        pass


class StateProposer:
    def __init__(self, told: list[str]) -> None:
        self.told = told

    async def propose_cancelled(self, *_: object) -> bool:
        self.told.append("Cancelled")
        return True


class EventEmitter:
    async def get_flow_and_deployment(self, *_: object) -> tuple[None, None]:
        return None, None

    async def emit_flow_run_cancelled(self, **_: object) -> None:
        pass


def cancelled(process: Process, monkeypatch: pytest.MonkeyPatch, grace_s: float) -> list[int]:
    """Cancel a flow run as Prefect's worker does; the processes whose grace periods were read."""
    asked: list[int] = []

    def teardown_s(pid: int) -> float:
        asked.append(pid)
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
            state_proposer=StateProposer(process.told),  # type: ignore[arg-type]
            event_emitter=EventEmitter(),  # type: ignore[arg-type]
            client=SimpleNamespace(),  # type: ignore[arg-type]
        )
        await manager.cancel(run)

    asyncio.run(scenario())
    return asked


def test_a_cancelled_flow_run_has_the_grace_periods_of_its_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process()

    asked = cancelled(process, monkeypatch, grace_s=3600.0)

    assert asked == [process.pid]
    assert process.told == ["ask to end", "Cancelled"]


def test_a_cancelled_flow_run_that_outlasts_its_grace_periods_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process()
    process.looks_left = 10**9
    monkeypatch.setattr(gang, "_ENDS_WITHIN_S", 0.0)

    cancelled(process, monkeypatch, grace_s=0.05)

    assert process.told == ["ask to end", "kill", "Cancelled"]


def test_prefect_cancels_by_the_process_manager_that_the_gang_worker_changes() -> None:
    source = inspect.getsource(FlowRunExecutorContext)

    assert source.count("ProcessManager(") == 1
    assert "process_manager=self.process_manager" in source
