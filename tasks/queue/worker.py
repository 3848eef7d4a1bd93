"""The Prefect worker type `gang`: a process worker that starts a run only when its GPUs are free.

`prefect worker start --pool POOL` chooses this worker type by the type of the work pool.

The worker runs a scheduling pass after certain events of the Prefect server: it decides which of
the waiting runs start. The worker also runs a pass at regular intervals, so a lost event delays a
pass but does not prevent the pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
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
from tasks.processes.stop_notes import describe_stopped_worker, write_stop_notes
from tasks.processes.temporary import use_own_temporary_folder
from tasks.queue.crash_messages import CrashReporter
from tasks.queue.decision import SchedulingPass
from tasks.queue.fork_server import ENGINE, ForkServer, find_own_flow
from tasks.queue.grants import requeue_unstarted, state_of
from tasks.queue.lease import LeaseLost
from tasks.queue.ledger import TYPE, QueueEntry, parse_request
from tasks.queue.nodes import Capacity
from tasks.queue.pool_copies import PoolCopies
from tasks.queue.reasons import offered_message
from tasks.queue.scheduler import Scheduler
from tasks.queue.scheduling_pass import make_queue_view
from tasks.queue.settings import PoolSettings
from tasks.queue.tables import QueueArtifacts
from tasks.queue.worker_names import WorkerName
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.server.concurrency_lease import has_lost_lease, set_state_and_release_lease_async
from tasks.server.events import Announcer
from tasks.server.flow_process import share_ssl_contexts
from tasks.server.flow_runs import UPKEEP_FLOWS, ServerAway, get_recorded_result
from tasks.server.trusted_clients import UNPLUGGED_PREFECT

_log = logging.getLogger(__name__)

#: Names of the states in which a flow run has ended.
_END_STATES = ("Completed", "Failed", "Crashed", "Cancelled", "TimedOut")
#: Names of the states in which a flow run waits for its start. The server emits an event with the
#: name of the state, even if only the message of the state has changed.
_WAITING_STATES = ("Scheduled", "Late", "PendingResources", "AwaitingRetry")
#: Name of the event that tells a worker to start a run now. The leader emits the event. The leader
#: is the worker that decides for all workers which runs start.
_OFFERED = "muster.run.offered"
#: Last parts of the names of Prefect events about changes of a work pool or of a queue. An example
#: of a whole name is `prefect.work-pool.paused`.
_OPERATOR_CHANGES = ("created", "deleted", "updated", "paused", "ready", "not-ready")
#: Names of the events that cause a scheduling pass of the leader. After such an event, a waiting
#: run may be able to start.
_WAKING = {
    *(f"prefect.flow-run.{state}" for state in (*_END_STATES, *_WAITING_STATES)),
    *(f"prefect.work-pool.{change}" for change in _OPERATOR_CHANGES),
    *(f"prefect.work-queue.{change}" for change in _OPERATOR_CHANGES),
}
#: Names of events that this worker receives, but that do not cause a scheduling pass. If the
#: event concerns a flow run, the next pass reads this flow run again. If the event concerns a
#: worker, the next pass reads the whole queue again.
_CHANGING = {
    "muster.run.admitted",
    "prefect.worker.started",
    "prefect.worker.stopped",
    "prefect.flow-run.Pending",
    "prefect.flow-run.Running",
    "prefect.flow-run.Cancelling",
}
#: Delay, in seconds, from an event to the scheduling pass. Several events that arrive within this
#: time cause only one pass.
_SETTLE_S = 0.03
#: Delay, in seconds, from the first loss of the event stream to the next connection. Each further
#: loss doubles the delay.
_RECONNECT_S = 1.0
#: Longest delay, in seconds, from a loss of the event stream to the next connection.
_RECONNECT_AT_MOST_S = 30.0

#: Time, in seconds, between two scheduling passes while runs wait. Passes are repeated because some
#: changes cause no event, such as the loss of a worker or the end of another program's Ray job.
_PASS_AGAIN_S = 2.0
#: Longest time, in seconds, that the worker waits until a submitted run leaves the state Scheduled.
#: After that time the worker submits the next run.
_SUBMITTED_WITHIN_S = 5.0
#: Time, in seconds, between two reads of the state of a submitted run.
_READ_STATE_EVERY_S = 0.02
#: Time, in seconds, between two requests of the worker for the flow runs of its queues. The time
#: must be shorter than 60 seconds, because the server shows the queues as ready for 60 seconds
#: after a request. Each request writes to the server's database, so the time should not be very
#: short.
_SERVED_EVERY_S = 25.0
#: A time that is earlier than the scheduled start of every run. A request for the flow runs that
#: are scheduled before this time returns no flow run.
_NEVER = datetime.fromtimestamp(0, UTC)
#: Time, in seconds, between two scheduling passes of a worker that is not the leader. Such a worker
#: normally waits until the leader offers a run. Regular passes are needed, too, because the leader
#: may have ended.
_PASS_ANYWAY_S = 30.0
#: Time, in seconds, between two complete reads of the queue by the leader. A complete read also
#: finds changes that cause no event, for example deleted flow runs.
_READ_EVERY_S = 60.0
#: Time, in seconds, between two complete reads of the queue by a worker that is not the leader.
_READ_ANYWAY_S = 300.0
#: Longest time, in seconds, that the process of a flow run may continue after the grace periods of
#: the run's components. After that time, the process is killed.
_ENDS_WITHIN_S = 60.0
#: Time, in seconds, between two checks whether the process of a flow run has ended.
_CHECK_EVERY_S = 0.2
#: Time, in seconds, between two events that offer the same run to the workers, if no worker has
#: started the run.
_OFFERED_AGAIN_S = 10.0


class Waker:
    """Calls a function after events of the Prefect server and after delays, one call at a time."""

    def __init__(
        self, wake: Callable[[], Awaitable[object]], should_wake: Callable[[str], bool]
    ) -> None:
        """
        Args:
            wake: The function to call. If it raises an error, the error is logged, and the next
                call is made as usual.
            should_wake: Function that returns True if an event with the given name must cause a
                call.
        """
        self._wake = wake
        self._should_wake = should_wake
        #: asyncio event that is set when the function `wake` must be called.
        self._woken = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        #: Ids of the flow runs in the events since the last call of `take_changed_flow_runs`. None
        #: if events may have been missed.
        self._changed: set[UUID] | None = None
        #: True while this object receives the events of the server.
        self._is_listening = False

    def take_changed_flow_runs(self) -> set[UUID] | None:
        """Return the ids of the flow runs that events have named since the last call.

        Returns:
            The ids, or None if events may have been missed.
        """
        changed = self._changed
        self._changed = set() if self._is_listening else None
        return changed

    async def __aenter__(self) -> Waker:
        self._tasks = [
            asyncio.create_task(self._listen()),
            asyncio.create_task(self._call_when_woken()),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def wake_within(self, delay_s: float) -> None:
        """Plan a call of `wake` after a delay, unless a call is planned for an earlier time.

        Args:
            delay_s: The delay in seconds.
        """
        loop = asyncio.get_running_loop()
        wake_at = loop.time() + delay_s
        timer = self._timer
        if timer is None or timer.when() < loop.time() or wake_at < timer.when():
            if timer is not None:
                timer.cancel()
            self._timer = loop.call_at(wake_at, self._woken.set)

    async def _call_when_woken(self) -> None:
        """Call `wake` each time the asyncio event `_woken` is set, until this task is cancelled."""
        while True:
            await self._woken.wait()
            await asyncio.sleep(_SETTLE_S)
            self._woken.clear()
            called_at = asyncio.get_running_loop().time()
            try:
                await self._wake()
            except Exception as error:
                # Log the error only at level DEBUG, because it may be temporary. A persistent error
                # also occurs in the regular poll of Prefect's worker, which logs the error.
                _log.debug(
                    "An extra check of the queue, between two regular checks, has failed: %r", error
                )
            # If the queue is long, calls of `wake` are slow. To leave the worker time for its other
            # tasks, pause for the duration of the last call, but at most 2 seconds.
            await asyncio.sleep(min(2.0, asyncio.get_running_loop().time() - called_at))

    async def _listen(self) -> None:
        """Read events of the Prefect server, until this task is cancelled.

        If the event stream breaks, it is opened again.
        """
        reconnect_s = _RECONNECT_S
        while True:
            try:
                names = sorted({_OFFERED} | _WAKING | _CHANGING)
                event_filter = EventFilter(event=EventNameFilter(name=names))
                async with get_events_subscriber(filter=event_filter) as subscriber:
                    reconnect_s = _RECONNECT_S
                    self._is_listening = True
                    # The new connection does not deliver earlier events. So start a scheduling
                    # pass, which reads the waiting runs from the server.
                    self._woken.set()
                    async for event in subscriber:
                        flows = {
                            resource.name for resource in event.related if resource.role == "flow"
                        }
                        if flows & {*UPKEEP_FLOWS}:
                            continue
                        kind, _, id = event.resource.id.rpartition(".")
                        if kind != "prefect.flow-run":
                            self._changed = None
                        elif self._changed is not None:
                            self._changed.add(UUID(id))
                        if self._should_wake(event.event):
                            self._woken.set()
            except Exception as error:
                _log.debug(
                    "the connection for events of the Prefect server broke. Muster connects "
                    "again in %.0f s: %r",
                    reconnect_s,
                    error,
                )
            self._is_listening = False
            self._changed = None
            await asyncio.sleep(reconnect_s)
            reconnect_s = min(2 * reconnect_s, _RECONNECT_AT_MOST_S)


class GangVariables(ProcessVariables):
    """Variables in the base job template of a work pool of type `gang`."""

    gang: PoolSettings = Field(
        default_factory=PoolSettings,
        title="Gang queue",
        description="Settings of the queue of this work pool. Muster ignores this key in the job "
        "variables of a deployment.",
    )


class GangJobConfiguration(ProcessJobConfiguration):
    """Prefect's configuration of the process of a flow run, together with the run's deployment.

    The deployment is stored here, so that `GangWorker.run` need not request it from the server.
    """

    _deployment: DeploymentResponse | None = PrivateAttr(default=None)

    def prepare_for_flow_run(
        self,
        flow_run: FlowRun,
        deployment: DeploymentResponse | None = None,
        *arguments: Any,
        **options: Any,
    ) -> None:
        """Fill in the configuration for a flow run, and store its deployment in this object."""
        self._deployment = deployment
        super().prepare_for_flow_run(flow_run, deployment, *arguments, **options)


class _NoHooks:
    """Replaces Prefect's runner of flow hooks, and runs no hooks.

    Muster's flows have no hooks. To search for hooks, Prefect's own runner would import the flow
    into the worker process.
    """

    async def run_cancellation_hooks(self, *_: object) -> None: ...

    async def run_crashed_hooks(self, *_: object) -> None: ...


async def _end_process(process: ProcessHandle) -> None:
    """Send SIGTERM to the process of a flow run, and wait for its end.

    The process is killed if it is still running 60 seconds after the end of the grace periods of
    the run's components.
    """
    assert process.pid is not None
    # Read the grace periods before sending the signal, because the grace period of a component is
    # no longer recorded after the end of the component.
    within_s = _ENDS_WITHIN_S + await asyncio.to_thread(teardown_s, process.pid)
    with contextlib.suppress(ProcessLookupError):
        process.graceful_kill()
    with anyio.move_on_after(within_s):
        while process.is_alive():
            await anyio.sleep(_CHECK_EVERY_S)
        return
    _log.error(
        "the process %s of a flow run did not end within %.0f s after SIGTERM, so the worker "
        "kills it",
        process.pid,
        within_s,
    )
    with contextlib.suppress(OSError):
        process.hard_kill()


def _keep_grace_periods(processes: ProcessManager) -> None:
    """Make Prefect wait for the grace periods of a cancelled run before it kills the run's process.

    This function replaces the method `kill` of Prefect's process manager. The original method kills
    the process 30 seconds after SIGTERM. Prefect has no setting for this time.

    Args:
        processes: Prefect's manager of the processes of flow runs.
    """

    kill_at_once = partial(processes.kill, force=True)

    async def kill(flow_run_id: UUID, grace_seconds: float = 30, *, force: bool = False) -> None:
        process = processes.get(flow_run_id)
        if force:
            await kill_at_once(flow_run_id)
        elif process is not None and process.pid is not None:
            await _end_process(process)

    processes.kill = kill  # type: ignore[method-assign]


async def _end_with_worker(process: ProcessHandle, done: asyncio.Future[Any]) -> None:
    """End the process of a flow run when the worker stops.

    The stopping worker cancels the task of this coroutine. Until then, the coroutine only waits.

    Args:
        process: The process of the flow run.
        done: Future that is done when the process has ended. The function sends no signal to an
            ended process.
    """
    try:
        await anyio.sleep_forever()
    finally:
        if not done.done():
            with anyio.CancelScope(shield=True):
                await asyncio.to_thread(
                    write_stop_notes,
                    describe_stopped_worker(),
                    lambda owner: owner.process.pid == process.pid,
                )
                await _end_process(process)


def _read_result(flow_run: FlowRun, began_at: float) -> State[Any] | None:
    """Return the Prefect state that corresponds to the result in a run's `run.json`.

    Args:
        flow_run: The flow run of the run.
        began_at: Time in UTC epoch seconds. A result before this time is ignored.

    Returns:
        The state. None if the run has neither completed nor failed since `began_at`.
    """
    try:
        run = RunJson.read_for_flow_run(RunPlace.of(flow_run.name).record, str(flow_run.id))
    except (OSError, ValueError) as error:
        _log.debug("the record of the run %s cannot be read: %r", flow_run.name, error)
        return None
    is_new = run is not None and run.ended_at is not None and run.ended_at >= began_at
    return get_recorded_result(run) if is_new else None


class GangWorker(ProcessWorker):
    """Prefect worker that starts each run of a work pool as soon as all of its GPUs are free."""

    type = TYPE
    # In Prefect's class the attribute `type` hides Python's builtin `type`. Therefore mypy cannot
    # read the annotation of `job_configuration_variables`, and `type: ignore` is necessary below.
    job_configuration = GangJobConfiguration
    job_configuration_variables = GangVariables  # type: ignore[assignment]

    _description = (
        "Start flow runs as processes, in the order of a queue. Each flow run starts as soon as "
        "all its GPUs are free."
    )
    _display_name = "Gang"

    #: Scheduler of this worker. It decides which waiting runs of all work pools start.
    _scheduler: Scheduler
    #: Object that starts scheduling passes after events. None before the first poll.
    _waker: Waker | None = None
    #: Time at which this worker last requested flow runs from the server, by the clock of the event
    #: loop. The server shows the worker's queues as ready only for 60 seconds after a request.
    _served_at = -math.inf
    #: True if this worker is the leader. The leader decides which runs start, for all workers of
    #: the server.
    _is_leader = True
    #: Earliest time of the next regular scheduling pass of this worker, by the clock of the event
    #: loop. After an offer of the leader, a pass starts without waiting for this time.
    _next_pass_at = -math.inf
    #: True if the leader has offered a run to the workers since the last scheduling pass.
    _was_offered = False

    def __init__(self, work_pool_name: str, name: str | None = None, **options: Any) -> None:
        # By default, a worker is named after its host. From this name, other programs learn which
        # hosts have a worker and on which host a run is running.
        super().__init__(work_pool_name, name=name or host_name(), **options)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        process = f"process {os.getpid()} on {socket.gethostname()}, started at {started_at}"
        self._worker_name = WorkerName(work_pool_name, self.name, process)

    async def run(
        self, flow_run: FlowRun, configuration: ProcessJobConfiguration, task_status: Any = None
    ) -> ProcessWorkerResult:
        """Run the process of a flow run, and return its exit code.

        If possible, the process is forked from the worker's fork server. Muster's own flows are
        imported directly. For other flows, the process first runs the pull steps of the deployment.

        Unlike Prefect's worker, this method does not add the working directory to the import path.
        Otherwise a file `tasks.py` in the user's project would replace Muster's package `tasks`.

        When the worker stops, Prefect cancels this method. The process then gets SIGTERM and may
        use the grace periods of its run.
        """
        began_at = time.time()
        assert isinstance(configuration, GangJobConfiguration)
        deployment = configuration._deployment
        assert deployment is not None

        default_command = command_to_string([*ENGINE, str(flow_run.id)])
        command = configuration.command if configuration._command_configured else None
        entrypoint, project = (None, None) if command else find_own_flow(deployment)

        async with contextlib.AsyncExitStack() as stack:
            working_directory = (
                project or configuration.working_dir or stack.enter_context(TemporaryDirectory())
            )
            context = await stack.enter_async_context(FlowRunExecutorContext())
            _keep_grace_periods(context.process_manager)
            # Replace the object that proposes states to the server. `FlowRunExecutorContext` has no
            # parameter for this object.
            context._state_proposer = CrashReporter(client=context.client, entrypoint=entrypoint)
            starter = EngineCommandStarter(
                command=command or default_command,
                entrypoint=entrypoint,
                cwd=Path(working_directory).resolve(),
                env={**configuration.env, **UNPLUGGED_PREFECT},
                stream_output=configuration.stream_output,
                control_channel=context.control_channel,
                # Start the run in its own process group. Otherwise, Ctrl-C in the worker's terminal
                # would also send SIGINT to the run.
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
                # When the worker stops, this method is cancelled. The shield keeps the task of
                # `execute` alive, which waits for the end of the process. The task of
                # `_end_with_worker` is outside the shield: its cancellation ends the process.
                with anyio.CancelScope(shield=True):
                    async with anyio.create_task_group() as group:
                        handle = await group.start(execute)
                        until_ended.start_soon(_end_with_worker, handle, done)
                        if task_status is not None:
                            task_status.started(handle.pid)
                until_ended.cancel_scope.cancel()
        exit_code = done.result().status_code
        if exit_code is None:
            raise RuntimeError("the process of the flow run was not started")

        with contextlib.suppress(httpx.HTTPError, PrefectException):
            await self._complete_end(flow_run.id, began_at)
        return ProcessWorkerResult(status_code=exit_code, identifier=str(handle.pid))

    async def _complete_end(self, flow_run_id: UUID, began_at: float) -> None:
        """Correct the state of a flow run whose process has ended without setting a final state.

        - If the run's `run.json` says completed or failed, the flow run gets the same state.
        - Otherwise, if the flow run is being cancelled, it becomes Cancelled.
        - If the flow run lost its concurrency lease before its start, it returns to the queue.

        Args:
            flow_run_id: Id of the flow run.
            began_at: Time before the start of the process, in UTC epoch seconds. An older result of
                the run does not count.

        Raises:
            httpx.HTTPError, PrefectException: The server did not answer.
        """
        flow_run = await self.client.read_flow_run(flow_run_id)
        state = state_of(flow_run)
        result = None
        if state.is_cancelling() or state.is_cancelled() or state.is_crashed():
            # A user may have cancelled the run after its result was recorded in `run.json`. The
            # server then rejects the result, and Prefect's engine exits with an error. So read the
            # recorded result.
            result = await asyncio.to_thread(_read_result, flow_run, began_at)
        if result is not None:
            await set_state_and_release_lease_async(self.client, flow_run_id, result, force=True)
        elif state.is_cancelling():
            # Prefect's worker cannot end a flow run that was cancelled before its process had a
            # pid. The flow run would stay in the state Cancelling, so set Cancelled now.
            final_state: State[Any] = Cancelled(
                message="the run was cancelled, and its process has ended"
            )
            await set_state_and_release_lease_async(self.client, flow_run_id, final_state)
        elif state.is_pending() and await asyncio.to_thread(has_lost_lease, flow_run_id):
            # The process of a flow run that has lost its concurrency lease exits before the flow
            # starts, see `flows/__main__.py`.
            message = (
                "the deployment allows only a limited number of runs at once, and this run lost "
                "its place before it started"
            )
            if await requeue_unstarted(self.client, flow_run, message):
                name = parse_request(flow_run).name
                self._announce("muster.run.requeued", flow_run, name, message=message)

    async def __aenter__(self) -> GangWorker:
        # This call sets the folder of Python's `tempfile`. It must come first, because the next
        # line lets Prefect create files in that folder.
        use_own_temporary_folder()
        await super().__aenter__()
        return self

    async def sync_with_backend(self) -> None:
        """Send a heartbeat to the server, and read the work pool.

        If the server does not answer, a warning is logged, and the next heartbeat is sent as usual.
        In contrast, Prefect's own worker would exit after about ten minutes and end its flow runs.
        """
        try:
            await super().sync_with_backend()
        except httpx.TransportError as error:
            self._logger.warning(
                "The worker could not send its heartbeat, because the Prefect server does not "
                "answer (%r).",
                error,
            )
        except httpx.HTTPStatusError as error:
            if error.response.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                raise
            self._logger.warning(
                "The worker could not send its heartbeat, because the Prefect server answered with "
                "an error: %s",
                error,
            )
        else:
            await self._warn_of_same_name()

    async def _warn_of_same_name(self) -> None:
        """Log a warning if another live worker of the work pool has the name of this worker."""
        try:
            other = await self._worker_name.find_other(self.client)
        except (httpx.HTTPError, PrefectException) as error:
            self._logger.debug(
                "Muster could not check whether another worker has the name of this worker: %r",
                error,
            )
            return
        if other:
            self._logger.warning(
                "Another worker of the work pool %s is also named %s (%s). Muster and Prefect "
                "cannot tell the two workers apart. Stop one of them, or start one of them with "
                "another --name or MUSTER_HOST.",
                self._work_pool_name,
                self.name,
                other,
            )

    async def _get_scheduled_flow_runs(self) -> list[WorkerFlowRunResponse]:
        """Return a list with the next flow run that this worker must start, or an empty list.

        Prefect's worker calls this method at each poll. A process worker of Prefect would return
        all scheduled flow runs here.
        """
        now = asyncio.get_running_loop().time()
        if now - self._served_at >= _SERVED_EVERY_S:
            # Request the flow runs of the work queues, only so that the server shows the queues as
            # ready. Because of the time `_NEVER`, the request returns no flow run.
            self._served_at = now
            with contextlib.suppress(ObjectNotFound):
                await self.client.get_scheduled_flow_runs_for_work_pool(
                    self._work_pool_name, [*self._work_queues] or None, scheduled_before=_NEVER
                )
        if self._waker is None:
            await self._open()
        async with self._pass_lock:
            try:
                return await self._next_flow_run()
            except (httpx.HTTPError, PrefectException, LeaseLost) as error:
                self._logger.warning(
                    "Muster's check of the queue failed. Muster will repeat the check: %r", error
                )
                return []

    async def _open(self) -> None:
        """Create the `Scheduler`, the `ForkServer` and the `Waker` of this worker.

        They are closed when the worker stops.
        """
        #: Lock that is held during a scheduling pass, so that the regular poll and an event do not
        #: start two passes at the same time.
        self._pass_lock = asyncio.Lock()
        #: Runs that have a grant and that this worker must start. The worker submits these runs one
        #: after the other, in the order of the queue.
        self._granted: deque[QueueEntry] = deque()
        #: Id of the flow run that was submitted last. None if `_wait_for_submission` has already
        #: waited for this flow run.
        self._submitted_last: UUID | None = None
        #: Task that writes the state messages and the artifacts of the queue to the server. None
        #: before the first scheduling pass.
        self._publishing: asyncio.Task[None] | None = None
        self._artifacts = QueueArtifacts(str(self.client.api_url))
        self._pool_copies = PoolCopies(self.client)
        capacity = Capacity()
        self._exit_stack.push_async_callback(capacity.close)
        announcer = self._exit_stack.enter_context(Announcer(str(self.client.api_url)))
        self._announce = announcer.announce_run
        #: Runs that this worker, as the leader, has offered to the other workers: a mapping from
        #: flow run id to the time of the last offer, by the clock of the event loop.
        self._offered_at: dict[UUID, float] = {}
        self._scheduler = Scheduler(
            self.client,
            capacity=capacity,
            announce=self._announce,
            worker=(self._work_pool_name, self.name),
        )
        share_ssl_contexts()
        fork_server = ForkServer()
        # Prefect's class `EngineCommandStarter` has no parameter for the function that starts
        # processes. So this line replaces the function in Prefect's module.
        run_process = fork_server.run_process
        _starter_engine.run_process = run_process  # type: ignore[attr-defined, assignment]
        fork_server.start()
        self._exit_stack.callback(fork_server.close)
        self._waker = Waker(self.get_and_submit_flow_runs, self._should_wake)
        await self._exit_stack.enter_async_context(self._waker)
        self._exit_stack.push_async_callback(self._stop_publishing)

    def _should_wake(self, event: str) -> bool:
        """Return True if an event with the given name must start a scheduling pass.

        If the event says that the leader offers a run to the workers, the method sets
        `_was_offered`.
        """
        if event == _OFFERED:
            self._was_offered = True
        return event in _WAKING if self._is_leader else event == _OFFERED

    async def _next_flow_run(self) -> list[WorkerFlowRunResponse]:
        """Return a list with the next flow run that this worker must start, or an empty list.

        Each list has at most one flow run, because Prefect starts all flow runs of a list at the
        same time. The next call waits until this flow run is no longer Scheduled.
        """
        await self._wait_for_submission()
        if not self._granted:
            await self._run_pass()
        if self._is_full():
            self._wake_within(_PASS_AGAIN_S)
            return []
        while self._granted:
            entry = self._granted.popleft()
            if await self._scheduler.is_granted(entry):
                self._submitted_last = entry.id
                flow_run = entry.flow_run
                # Wake Prefect's worker, so that it calls this method again at once, for the next
                # granted run or for a new scheduling pass.
                self._wake_within(0.0)
                # If the queue of a run was deleted, the server stores no queue for the run. Such a
                # run counts as a run in the default queue of this worker's pool.
                pool_id = flow_run.work_pool_id or self.work_pool.id
                queue_id = flow_run.work_queue_id or self.work_pool.default_queue_id
                assert queue_id is not None
                return [
                    WorkerFlowRunResponse(
                        work_pool_id=pool_id, work_queue_id=queue_id, flow_run=flow_run
                    )
                ]
        return []

    async def _run_pass(self) -> None:
        """Run a scheduling pass if a pass is due, and add the runs that must start to `_granted`.

        One worker, the leader, decides which runs start, for all workers. The leader sends an event
        to offer a run to another worker. That worker then grants free GPU devices of its host to
        the run, in its own scheduling pass.
        """
        now = asyncio.get_running_loop().time()
        if self._is_full() and not self._is_leader:
            return
        if now < self._next_pass_at and not self._was_offered:
            return

        self._was_offered = False
        changed = self._waker.take_changed_flow_runs() if self._waker is not None else None
        scheduling_pass, granted = await self._scheduler.decide(
            self._may_start,
            self._submitting_flow_run_ids,
            changed=changed,
            full_read_interval_s=_READ_EVERY_S if self._is_leader else _READ_ANYWAY_S,
        )
        self._granted.extend(granted)

        leader = scheduling_pass.ledger.leader
        self._is_leader = leader in (None, (self._work_pool_name, self.name))
        if self._is_leader:
            self._next_pass_at = -math.inf
            self._offer_runs(scheduling_pass, now)
            self._publish_queue(scheduling_pass)
        else:
            self._next_pass_at = now + _PASS_ANYWAY_S
            self._wake_within(_PASS_ANYWAY_S)

    def _offer_runs(self, scheduling_pass: SchedulingPass, now: float) -> None:
        """Offer admitted runs to the other workers, except the runs that this worker can start.

        If no worker starts an offered run within 10 seconds, the run is offered again. The message
        of the run then says that the run waits for a worker.

        Args:
            scheduling_pass: The last scheduling pass.
            now: Time of the pass, by the clock of the event loop.
        """
        runs_of_others = [
            (entry, nodes)
            for entry, nodes in scheduling_pass.admitted
            if entry.is_scheduled and not self._may_start(entry, nodes)
        ]
        ids = {entry.id for entry, _nodes in runs_of_others}
        self._offered_at = {id: at for id, at in self._offered_at.items() if id in ids}

        for entry, nodes in runs_of_others:
            if now - self._offered_at.get(entry.id, -math.inf) >= _OFFERED_AGAIN_S:
                if entry.id in self._offered_at:
                    message = offered_message(entry.request.demand, nodes)
                    scheduling_pass.messages[entry.id] = message
                self._offered_at[entry.id] = now
                fields = {"pool": entry.pool, "queue": entry.queue, "nodes": dict(nodes)}
                self._announce(_OFFERED, entry.flow_run, entry.request.name, **fields)

    async def _wait_for_submission(self) -> None:
        """Wait until the flow run that was submitted last is no longer in the state Scheduled.

        The wait ends after 5 seconds, even if the flow run is still in that state.
        """
        flow_run_id = self._submitted_last
        self._submitted_last = None
        if flow_run_id is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SUBMITTED_WITHIN_S):
                while flow_run_id in self._submitting_flow_run_ids:
                    if not state_of(await self.client.read_flow_run(flow_run_id)).is_scheduled():
                        return
                    await asyncio.sleep(_READ_STATE_EVERY_S)

    def _may_start(self, entry: QueueEntry, nodes: Mapping[str, int]) -> bool:
        """Return True if this worker may start a run on the given nodes.

        Args:
            entry: The run.
            nodes: Mapping from node name to the number of GPUs that the run gets on the node.
        """
        if entry.has_gang_without_ray and {*nodes} - {host_name()}:
            # A run without Ray starts its processes on the host of its worker. So only a worker on
            # the host with the GPUs may start the run.
            return False
        if entry.pool != self._work_pool_name or not entry.is_scheduled or self._is_full():
            return False
        return not self._work_queues or entry.queue in self._work_queues

    def _is_full(self) -> bool:
        """Return True if this worker has reached its limit of simultaneous flow runs."""
        return self._limiter is not None and self._limiter.available_tokens < 1

    def _wake_within(self, delay_s: float) -> None:
        """Make sure that this worker polls again within the given number of seconds."""
        if self._waker is not None:
            self._waker.wake_within(delay_s)

    def _publish_queue(self, scheduling_pass: SchedulingPass) -> None:
        """Write the results of a scheduling pass to the server, in a background task.

        If the task of an earlier pass is still writing, the results of this pass are skipped,
        because a later pass will write newer results.
        """
        if scheduling_pass.queue or scheduling_pass.stuck:
            self._wake_within(_PASS_AGAIN_S)
        if self._publishing is None or self._publishing.done():
            self._publishing = asyncio.create_task(self._write_queue(scheduling_pass))

    async def _write_queue(self, scheduling_pass: SchedulingPass) -> None:
        """Write the results of a scheduling pass to the Prefect server.

        The results are the state messages of the waiting runs and the artifacts of the work pools.
        The method also updates the stored copies of the work pools' settings. Errors are only
        logged.
        """
        pools = scheduling_pass.ledger.pools
        try:
            await self._pool_copies.update(pool.work_pool for pool in pools.values())
            if await self._scheduler.publish_reasons(scheduling_pass):
                self._wake_within(0.1)
            for pool in pools:
                await self._artifacts.show(make_queue_view(scheduling_pass, pool))
        except (httpx.HTTPError, PrefectException, LeaseLost, ServerAway) as error:
            self._logger.debug(
                "Muster could not write the new state of the queue to the Prefect server: %r", error
            )

    async def _stop_publishing(self) -> None:
        """Cancel the task that writes to the server in the background, and wait for its end."""
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.gather(self._publishing, return_exceptions=True)
