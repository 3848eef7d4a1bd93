"""The worker type `gang`: Prefect's process worker, which starts only what the gate admits.

`prefect worker start --pool POOL` finds it by the pool's type. Events of the server wake its gate;
they are a hint and no more: the gate looks at the ledger, and polls besides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID

import anyio
import httpx
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import DeploymentResponse, WorkerFlowRunResponse
from prefect.events.clients import get_events_subscriber
from prefect.events.filters import EventFilter, EventNameFilter
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.runner import _starter_engine
from prefect.runner._flow_run_executor import FlowRunExecutorContext
from prefect.runner._process_manager import ProcessHandle, ProcessManager
from prefect.runner._starter_engine import EngineCommandStarter
from prefect.states import Cancelled
from prefect.utilities.processutils import command_to_string
from prefect.workers.process import (
    ProcessJobConfiguration,
    ProcessVariables,
    ProcessWorker,
    ProcessWorkerResult,
)
from pydantic import Field, PrivateAttr

from tasks.processes.identity import host_name
from tasks.processes.registry import teardown_s
from tasks.processes.temporary import use_own_temporary_folder
from tasks.queue.decision import SchedulingPass
from tasks.queue.gate import Gate
from tasks.queue.grants import state_of
from tasks.queue.lease import LeaseLost
from tasks.queue.ledger import TYPE, QueueEntry
from tasks.queue.nodes import Capacity
from tasks.queue.reasons import offered_message
from tasks.queue.scheduling_pass import make_queue_view
from tasks.queue.settings import PoolSettings
from tasks.queue.tables import QueueArtifacts
from tasks.queue.zygote import ENGINE, Zygote, own_flow
from tasks.server.events import Announcer
from tasks.server.flow_process import trust_once
from tasks.server.flow_runs import UPKEEP_FLOWS, ServerAway
from tasks.server.trusted_clients import UNPLUGGED_PREFECT

_log = logging.getLogger(__name__)

#: Flow runs have ended, or are there to be started. That of a waiting run whose message was
#: rewritten is among them; rewrites are rare.
_ENDED = ("Completed", "Failed", "Crashed", "Cancelled", "TimedOut")
_SCHEDULED = ("Scheduled", "Late", "PendingResources", "AwaitingRetry")
#: The worker that looks for all has found room for a run that another one is to start.
_OFFERED = "muster.run.offered"
#: An operator has changed something.
_SET = ("created", "deleted", "updated", "paused", "ready", "not-ready")
#: A look is worth it.
_WAKING = {
    *(f"prefect.flow-run.{name}" for name in (*_ENDED, *_SCHEDULED)),
    *(f"prefect.work-{one}.{name}" for one in ("pool", "queue") for name in _SET),
}
#: The next look has to read it.
_TELLING = {
    *("muster.run.admitted", "prefect.worker.started", "prefect.worker.stopped"),
    *(f"prefect.flow-run.{name}" for name in ("Pending", "Running", "Cancelling")),
}
#: Events that come together are worth one look.
_SETTLE_S = 0.03
#: The stream was cut: it is opened again after so long, at most.
_WAKE_AGAIN_S, _WAKE_AGAIN_AT_MOST_S = 1.0, 30.0


class Waker:
    """Calls `wake` after events that `hears` says are worth it, by their names, and when `again_in`
    says so; one call at a time."""

    def __init__(self, wake: Callable[[], Awaitable[object]], hears: Callable[[str], bool]) -> None:
        self._wake = wake
        self._hears = hears
        self._woken = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        #: Flow runs that events told of; None: some may have been missed.
        self._changed: set[UUID] | None = None
        self._listens = False

    def changed(self) -> set[UUID] | None:
        """The flow runs that events told of since the last call; None: some may be missing."""
        changed, self._changed = self._changed, set() if self._listens else None
        return changed

    async def __aenter__(self) -> Waker:
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._work())]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def again_in(self, delay_s: float) -> None:
        """Wake after so many seconds at most."""
        loop = asyncio.get_running_loop()
        at, timer = loop.time() + delay_s, self._timer
        if timer is None or timer.when() < loop.time() or at < timer.when():
            if timer is not None:
                timer.cancel()
            self._timer = loop.call_at(at, self._woken.set)

    async def _work(self) -> None:
        while True:
            await self._woken.wait()
            await asyncio.sleep(_SETTLE_S)
            self._woken.clear()
            began = asyncio.get_running_loop().time()
            try:
                await self._wake()
            except Exception as error:
                # The poll, which comes anyway, says so aloud if that lasts.
                _log.debug("woken in vain: %r", error)
            # A long queue takes long to read: half of the time at most goes into that.
            await asyncio.sleep(min(2.0, asyncio.get_running_loop().time() - began))

    async def _listen(self) -> None:
        again_s = _WAKE_AGAIN_S
        while True:
            try:
                names = sorted({_OFFERED} | _WAKING | _TELLING)
                wanted = EventFilter(event=EventNameFilter(name=names))
                async with get_events_subscriber(filter=wanted) as subscriber:
                    again_s, self._listens = _WAKE_AGAIN_S, True
                    # What happened while nobody listened.
                    self._woken.set()
                    async for event in subscriber:
                        flows = {one.name for one in event.related if one.role == "flow"}
                        if flows & {*UPKEEP_FLOWS}:
                            continue
                        kind, _, id = event.resource.id.rpartition(".")
                        if kind != "prefect.flow-run":
                            self._changed = None
                        elif self._changed is not None:
                            self._changed.add(UUID(id))
                        if self._hears(event.event):
                            self._woken.set()
            except Exception as error:
                _log.debug("no events, again in %.0f s: %r", again_s, error)
            self._listens, self._changed = False, None
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, _WAKE_AGAIN_AT_MOST_S)


#: Something waits for what no event tells: others on the cluster, a delay, a lost worker.
_AGAIN_S = 2.0
#: A run that was handed over has left its Scheduled state by then, or never will.
_HANDED_OVER_WITHIN_S = 5.0
_ASKED_EVERY_S = 0.02
#: Each time is a write for the server, which counts a queue as served for 60 s after.
_SERVED_EVERY_S = 25.0
_NEVER = datetime.fromtimestamp(0, UTC)
#: A worker that another one looks for looks as seldom as that, should that one have gone.
_LOOK_ANYWAY_S = 30.0
#: What no event has told, such as a flow run that somebody deleted, the worker that looks for all
#: reads by then; and another one.
_READ_EVERY_S, _READ_ANYWAY_S = 60.0, 300.0
#: A flow process that was asked to end has ended by then, counted from the end of its run's grace
#: periods.
_ENDS_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.2
#: What was offered, and not taken, is offered again after so long.
_OFFERED_AGAIN_S = 10.0


class GangVariables(ProcessVariables):
    """What can be set on a work pool."""

    gang: PoolSettings = Field(
        default_factory=PoolSettings,
        title="Gang queue",
        description="How this pool admits runs. Set on the pool only: what a deployment says here "
        "is not read.",
    )


class GangJobConfiguration(ProcessJobConfiguration):
    """With the deployment, which need not be asked for again."""

    _deployment: DeploymentResponse | None = PrivateAttr(default=None)

    def prepare_for_flow_run(
        self, flow_run: FlowRun, deployment: DeploymentResponse | None = None, *more: Any, **ex: Any
    ) -> None:
        self._deployment = deployment
        super().prepare_for_flow_run(flow_run, deployment, *more, **ex)


class _NoHooks:
    """Our flows have none, and to look for them would import the flow into the worker."""

    async def run_cancellation_hooks(self, *_: object) -> None: ...

    async def run_crashed_hooks(self, *_: object) -> None: ...


async def _end(process: ProcessHandle) -> None:
    """Ask the process of a flow run to end, and kill it if it outlasts the grace periods of its
    run."""
    assert process.pid is not None
    # Asked first: a component that has ended is registered no more.
    within_s = _ENDS_WITHIN_S + await asyncio.to_thread(teardown_s, process.pid)
    with contextlib.suppress(ProcessLookupError):
        process.graceful_kill()
    with anyio.move_on_after(within_s):
        while process.is_alive():
            await anyio.sleep(_LOOK_EVERY_S)
        return
    _log.error("process %s has not ended in %.0f s and is killed", process.pid, within_s)
    with contextlib.suppress(OSError):
        process.hard_kill()


def _give_grace(processes: ProcessManager) -> None:
    """Have a flow run that is cancelled end within the grace periods of its run.

    Prefect kills it 30 s after SIGTERM, whatever it is told, and calls it Cancelled then.
    """

    kill_at_once = partial(processes.kill, force=True)

    async def kill(flow_run_id: UUID, grace_seconds: float = 30, *, force: bool = False) -> None:
        process = processes.get(flow_run_id)
        if force:
            await kill_at_once(flow_run_id)
        elif process is not None and process.pid is not None:
            await _end(process)

    processes.kill = kill  # type: ignore[method-assign]


async def _end_with_worker(process: ProcessHandle, done: asyncio.Future[Any]) -> None:
    """Wait until cancelled; end the process of a flow run if it has not ended by then."""
    try:
        await anyio.sleep_forever()
    finally:
        if not done.done():
            with anyio.CancelScope(shield=True):
                await _end(process)


class GangWorker(ProcessWorker):
    """Starts the runs of a work pool, each when its whole gang of GPUs is free."""

    type = TYPE
    # Within Prefect's class, too, `type` is that name: its annotation can't be read.
    job_configuration = GangJobConfiguration
    job_configuration_variables = GangVariables  # type: ignore[assignment]

    _description = (
        "Execute flow runs as processes, each when its whole gang of GPUs is free, in order."
    )
    _display_name = "Gang"

    _gate: Gate
    _waker: Waker | None = None
    _served_at = -math.inf
    #: Whether it is this worker that looks for all workers of the server.
    _is_looker = True
    #: Not to look before, by the loop's clock, unless something was offered.
    _look_at = -math.inf
    _was_offered = False

    def __init__(self, work_pool_name: str, name: str | None = None, **more: Any) -> None:
        # By it others know which host has a worker, and whose runs are whose.
        super().__init__(work_pool_name, name=name or host_name(), **more)

    async def run(
        self, flow_run: FlowRun, configuration: ProcessJobConfiguration, task_status: Any = None
    ) -> ProcessWorkerResult:
        """One process, forked or started, which does the pull steps itself unless it has the flow.

        Prefect's own worker has a process before it, for a workspace, and puts the working
        directory on the path: a project's `tasks.py` would be taken for Muster's.

        Cancelled, as the worker ends, it asks the process to end and waits for the grace periods of
        the run: Prefect's own worker kills the processes of its flow runs.
        """
        assert isinstance(configuration, GangJobConfiguration)
        deployment = configuration._deployment
        assert deployment is not None
        own = command_to_string([*ENGINE, str(flow_run.id)])
        command = configuration.command if configuration._command_configured else None
        entrypoint, entered = (None, None) if command else own_flow(deployment)
        async with contextlib.AsyncExitStack() as stack:
            place = (
                entered or configuration.working_dir or stack.enter_context(TemporaryDirectory())
            )
            context = await stack.enter_async_context(FlowRunExecutorContext())
            _give_grace(context.process_manager)
            starter = EngineCommandStarter(
                command=command or own,
                entrypoint=entrypoint,
                cwd=Path(place).resolve(),
                env={**configuration.env, **UNPLUGGED_PREFECT},
                stream_output=configuration.stream_output,
                control_channel=context.control_channel,
                # A signal to the worker's group is none to its runs.
                isolate_process_group=True,
                env_overrides_settings=True,
            )
            executor = context.create_executor(
                flow_run, starter, hook_runner=_NoHooks(), propose_submitting=False
            )
            done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

            async def execute(*, task_status: Any) -> None:
                done.set_result(await executor.submit(task_status=task_status))

            async with anyio.create_task_group() as until_ended:
                # The worker's end reaches `_end_with_worker`, and not what watches the process.
                with anyio.CancelScope(shield=True):
                    async with anyio.create_task_group() as group:
                        handle = await group.start(execute)
                        until_ended.start_soon(_end_with_worker, handle, done)
                        if task_status is not None:
                            task_status.started(handle.pid)
                until_ended.cancel_scope.cancel()
        code = done.result().status_code
        if code is None:
            raise RuntimeError("the flow run's process was not started")
        # Cancelled before its process had begun, a flow run would be Cancelling until the next look
        # at it: Prefect's worker can't end what has no pid yet.
        with contextlib.suppress(httpx.HTTPError, PrefectException):
            if state_of(await self.client.read_flow_run(flow_run.id)).is_cancelling():
                ended: State[Any] = Cancelled(message="cancelled; its process has ended")
                await self.client.set_flow_run_state(flow_run.id, ended)
        return ProcessWorkerResult(status_code=code, identifier=str(handle.pid))

    async def __aenter__(self) -> GangWorker:
        # Before Prefect's worker makes its runner, which keeps files where `tempfile` does.
        use_own_temporary_folder()
        await super().__aenter__()
        return self

    async def sync_with_backend(self) -> None:
        """Send a heartbeat to the server and read the work pool.

        If the server is away, the next heartbeat tries again. Prefect's worker would end after
        about ten minutes without a server, and end the flow runs that it has started.
        """
        try:
            await super().sync_with_backend()
        except httpx.TransportError as error:
            self._logger.warning("No heartbeat: the server does not answer (%r).", error)
        except httpx.HTTPStatusError as error:
            if error.response.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                raise
            self._logger.warning("No heartbeat: the server answered %s.", error)

    async def _get_scheduled_flow_runs(self) -> list[WorkerFlowRunResponse]:
        """What is to be started now: the one place where this differs from a process worker."""
        now = asyncio.get_running_loop().time()
        if now - self._served_at >= _SERVED_EVERY_S:
            # The server takes queues as served that somebody asks for their runs: any at all.
            self._served_at = now
            with contextlib.suppress(ObjectNotFound):
                await self.client.get_scheduled_flow_runs_for_work_pool(
                    self._work_pool_name, [*self._work_queues] or None, scheduled_before=_NEVER
                )
        if self._waker is None:
            await self._open()
        async with self._deciding:
            try:
                return await self._next()
            except (httpx.HTTPError, PrefectException, LeaseLost) as error:
                self._logger.warning("The queue can't be looked at: %r", error)
                return []

    async def _open(self) -> None:
        self._deciding = asyncio.Lock()
        #: Granted, and to be handed over one after the other, so that they start in order.
        self._granted: deque[QueueEntry] = deque()
        self._last: UUID | None = None
        self._telling: asyncio.Task[None] | None = None
        self._artifacts = QueueArtifacts(str(self.client.api_url))
        capacity = Capacity()
        self._exit_stack.push_async_callback(capacity.close)
        announcer = self._exit_stack.enter_context(Announcer(str(self.client.api_url)))
        self._announce = announcer.tell_run
        #: By flow run: when it was last offered to other workers.
        self._offered: dict[UUID, float] = {}
        self._gate = Gate(
            self.client,
            capacity=capacity,
            announce=self._announce,
            worker=(self._work_pool_name, self.name),
        )
        trust_once()
        zygote = Zygote()
        # By this name Prefect's starter finds it.
        _starter_engine.run_process = zygote.run_process  # type: ignore[attr-defined, assignment]
        zygote.make()
        self._exit_stack.callback(zygote.close)
        self._waker = Waker(self.get_and_submit_flow_runs, self._hears)
        await self._exit_stack.enter_async_context(self._waker)
        self._exit_stack.push_async_callback(self._stop_telling)

    def _hears(self, event: str) -> bool:
        if event == _OFFERED:
            self._was_offered = True
        return event in _WAKING if self._is_looker else event == _OFFERED

    async def _next(self) -> list[WorkerFlowRunResponse]:
        await self._handed_over()
        if not self._granted:
            await self._look()
        if self._is_full():
            self._again(_AGAIN_S)
            return []
        while self._granted:
            entry = self._granted.popleft()
            if await self._gate.is_granted(entry):
                self._last, run = entry.id, entry.flow_run
                # The next one, as soon as this one is on its way; or what the next look finds.
                self._again(0.0)
                pool, queue = run.work_pool_id, run.work_queue_id
                assert pool is not None and queue is not None
                found = WorkerFlowRunResponse(work_pool_id=pool, work_queue_id=queue, flow_run=run)
                return [found]
        return []

    async def _look(self) -> None:
        """Of the workers of a server one looks for all, and offers the others what is theirs to
        start: they know the devices of their hosts, and grant it."""
        now = asyncio.get_running_loop().time()
        if self._is_full() and not self._is_looker:
            return
        if now < self._look_at and not self._was_offered:
            return
        self._was_offered = False
        changed = self._waker.changed() if self._waker is not None else None
        look, granted = await self._gate.decide(
            self._may_start,
            self._submitting_flow_run_ids,
            changed=changed,
            whole_every_s=_READ_EVERY_S if self._is_looker else _READ_ANYWAY_S,
        )
        self._granted.extend(granted)
        self._is_looker = look.ledger.looker in (None, (self._work_pool_name, self.name))
        if self._is_looker:
            self._look_at = -math.inf
            self._offer(look, now)
            self._tell(look)
        else:
            self._look_at = now + _LOOK_ANYWAY_S
            self._again(_LOOK_ANYWAY_S)

    def _offer(self, look: SchedulingPass, now: float) -> None:
        theirs = [
            (entry, nodes)
            for entry, nodes in look.admitted
            if entry.is_scheduled and not self._may_start(entry, nodes)
        ]
        ids = {entry.id for entry, _nodes in theirs}
        self._offered = {id: at for id, at in self._offered.items() if id in ids}
        for entry, nodes in theirs:
            if now - self._offered.get(entry.id, -math.inf) >= _OFFERED_AGAIN_S:
                if entry.id in self._offered:
                    look.messages[entry.id] = offered_message(entry.request.demand, nodes)
                self._offered[entry.id] = now
                where = {"pool": entry.pool, "queue": entry.queue, "nodes": dict(nodes)}
                self._announce(_OFFERED, entry.flow_run, entry.request.name, **where)

    async def _handed_over(self) -> None:
        """Once the run that was handed over last has left its Scheduled state: Prefect submits what
        it is given all at once, and runs would start in any order."""
        last, self._last = self._last, None
        if last is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HANDED_OVER_WITHIN_S):
                while last in self._submitting_flow_run_ids:
                    if not state_of(await self.client.read_flow_run(last)).is_scheduled():
                        return
                    await asyncio.sleep(_ASKED_EVERY_S)

    def _may_start(self, entry: QueueEntry, nodes: Mapping[str, int]) -> bool:
        if entry.is_of_processes and {*nodes} - {host_name()}:
            # Where its GPUs are is where its processes start: that host's worker does it.
            return False
        if entry.pool != self._work_pool_name or not entry.is_scheduled or self._is_full():
            return False
        return not self._work_queues or entry.queue in self._work_queues

    def _is_full(self) -> bool:
        return self._limiter is not None and self._limiter.available_tokens < 1

    def _again(self, delay_s: float) -> None:
        if self._waker is not None:
            self._waker.again_in(delay_s)

    def _tell(self, look: SchedulingPass) -> None:
        """Show the queue, aside from what starts."""
        if look.line or look.stuck:
            self._again(_AGAIN_S)
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._told(look))

    async def _told(self, look: SchedulingPass) -> None:
        try:
            if await self._gate.tell(look):
                self._again(0.1)
            for pool in look.ledger.pools:
                await self._artifacts.show(make_queue_view(look, pool))
        except (httpx.HTTPError, PrefectException, LeaseLost, ServerAway) as error:
            self._logger.debug("The queue is not shown: %r", error)

    async def _stop_telling(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
