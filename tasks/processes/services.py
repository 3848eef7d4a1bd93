"""Run services: processes of this machine that are started again after they die.

The temporary Prefect server of a run is a service, and so are the Prefect server and the other
programs of a stack (`deployments/stack`). After a restart, a service has the same command, log and
ports. `Services` watches all services in a separate thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

from tasks.processes import tree
from tasks.processes.attempt import make_failure
from tasks.processes.component import AttemptContext, AttemptPlan, ComponentPlan
from tasks.processes.identity import ProcessId
from tasks.processes.loop_thread import LoopThread
from tasks.processes.owned_tasks import cancel_tasks
from tasks.processes.ports import PortsReserved
from tasks.processes.process_component import ProcessComponent
from tasks.processes.registry import RunRegistration
from tasks.record.events import Emit
from tasks.record.outcome import ComponentFailed, Exit, Failure
from tasks.spec.errors import RunEnded
from tasks.spec.failure_kinds import FailureKind

_log = logging.getLogger(__name__)

#: Limit of open files that this process requests. This process keeps several files open for each
#: service.
_OPEN_FILES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Rules for the restart of a service that has died."""

    #: Seconds from the first death of a service to its restart. Each further death doubles this
    #: delay.
    first_delay_s: float = 0.5
    #: Longest delay before a restart, in seconds.
    most_delay_s: float = 30.0
    #: If a service was ready for at least this number of seconds, the delay after its next death
    #: is `first_delay_s` again.
    steady_s: float = 30.0
    #: A service that dies again and again without becoming ready is given up after this number of
    #: seconds. The time begins at the first of these deaths.
    give_up_after_s: float = 300.0


class Restarts:
    """Calculates the delay before each restart of a service, based on the service's earlier deaths.

    Times are CLOCK_MONOTONIC seconds.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        #: Number of deaths since the service was last ready for `steady_s` seconds.
        self._deaths = 0
        #: Time of the first death since the service was last ready; None if there was none.
        self._failing_since_s: float | None = None

    def delay_after_death(self, now_s: float, ready_for_s: float | None) -> float | None:
        """Record a death of the service, and return the seconds until its restart.

        Args:
            now_s: Time of the death.
            ready_for_s: Time in seconds during which the service was ready before its death. None
                if it was not ready.

        Returns:
            None if the service must not be started again.
        """
        if ready_for_s is not None and ready_for_s >= self._policy.steady_s:
            self._deaths = 0
        if ready_for_s is not None or self._failing_since_s is None:
            self._failing_since_s = now_s
        elif now_s - self._failing_since_s > self._policy.give_up_after_s:
            return None
        delay_s = min(self._policy.first_delay_s * 2.0**self._deaths, self._policy.most_delay_s)
        self._deaths += 1
        return delay_s


class ServiceState(Enum):
    """State of a service."""

    #: The service was not started yet.
    WAITING = "waiting"
    #: The service is being started and is not ready yet.
    STARTING = "starting"
    #: The service is ready.
    READY = "ready"
    #: The service has died and will be started again.
    DOWN = "down"
    #: The service has done its work and has ended with exit code 0.
    DONE = "done"
    #: The service has died and will not be started again.
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReport:
    """State of one service at one moment."""

    name: str
    state: ServiceState = ServiceState.WAITING
    #: Pid of the service's process; None if the process does not run.
    pid: int | None = None
    #: Guardian processes. One owns the service's current process. The others own earlier
    #: processes of the service, whose children still run.
    guardians: tuple[ProcessId, ...] = ()
    #: Number of times that the service has died.
    deaths: int = 0
    #: Time of the last death in UTC epoch seconds; None if the service has never died.
    died_at: float | None = None
    #: Reason for the last death; empty if the service has never died.
    reason: str = ""


class _Guarded(Protocol):
    """The attributes and methods of `GuardedProcess` that services use."""

    guardian: ProcessId
    empty: asyncio.Future[None]


class ServiceProcess(Protocol):
    """One process of a service, with the members of `ProcessComponent` that services use."""

    pid: int | None
    exited: asyncio.Future[Exit]

    @property
    def process(self) -> _Guarded: ...
    async def launch(self) -> None: ...
    async def until_ready(self) -> None: ...
    async def was_ready_before_end(self) -> bool: ...
    def read_log_end(self) -> str: ...
    async def end(self) -> tuple[int | str, ...]: ...


MakeServiceProcess = Callable[[ComponentPlan, AttemptContext], ServiceProcess]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Death:
    """End of a process of a service, before the service has done its work."""

    #: Failure of the process. None if Muster has ended the process, because another service that
    #: this service needs has died.
    failure: Failure | None
    #: Time in seconds during which the process was ready; None if it was not ready.
    ready_for_s: float | None = None
    #: True if SIGKILL from outside has ended the process, for example from the OOM killer. The
    #: program may have no fault, so a restart can help even if the service was never ready.
    was_killed: bool = False


def _seconds_since(began_s: float | None, now_s: float) -> float | None:
    return now_s - began_s if began_s is not None else None


class _Service:
    """One service: its current process, and earlier processes whose children still run."""

    def __init__(
        self, plan: ComponentPlan, owner: Services, needed: _Service | None, policy: RestartPolicy
    ) -> None:
        self.plan = plan
        self.report = ServiceReport(name=plan.name)
        #: asyncio event that is set while the service is ready or done. Services that need this
        #: service wait for the event before they start.
        self.is_up = asyncio.Event()
        #: asyncio event that is set when the current process has died. A new process gets a new
        #: event.
        self.is_gone = asyncio.Event()
        #: asyncio event that is set as soon as the service is ready or has done its work. The event
        #: is never cleared.
        self.was_up = asyncio.Event()
        self.keeper: asyncio.Task[None] | None = None
        #: The current process, and earlier processes whose children still run.
        self.processes: list[ServiceProcess] = []
        self._owner = owner
        self._needed = needed
        self._restarts = Restarts(policy)

    async def keep(self) -> None:
        """Start the service, and start it again after each death.

        Returns when the service has done its work or must not be started again.
        """
        while (death := await self._run_process()) is not None:
            self.is_up.clear()
            self.is_gone.set()
            failure = death.failure
            if failure is None:
                self._note(state=ServiceState.DOWN, pid=None)
                continue
            delay_s = self._restarts.delay_after_death(self._owner.clock(), death.ready_for_s)
            if not self.was_up.is_set() and not death.was_killed:
                # The service has died by itself before it was ever ready. A restart would probably
                # fail, too. So do not start the service again, and let `start` report the failure
                # at once.
                delay_s = None
            self._note(
                state=ServiceState.GIVEN_UP if delay_s is None else ServiceState.DOWN,
                pid=None,
                deaths=self.report.deaths + 1,
                died_at=time.time(),
                reason=failure.message,
            )
            if delay_s is None:
                if self.was_up.is_set():
                    message = f"{self.plan.name} could not be started again: {failure.message}"
                    failure = failure.with_changes(message=message)
                self._owner.give_up(failure)
                return
            _log.warning("%s. It will be started again in %.1f s", failure.message, delay_s)
            await self._owner.sleep(delay_s)

    async def end(self) -> tuple[int | str, ...]:
        """End all processes of the service.

        Returns:
            Descriptions of processes that could not be ended, and of errors in Muster's own code.
        """
        if self.keeper is not None:
            self.keeper.cancel()
            await asyncio.wait([self.keeper])
        results = await asyncio.gather(
            *(service_process.end() for service_process in self.processes), return_exceptions=True
        )
        left: list[int | str] = []
        for result in results:
            if isinstance(result, BaseException):
                _log.error("service %s could not be ended", self.plan.name, exc_info=result)
                left.append(f"{self.plan.name} could not be ended: {result!r}")
            else:
                left += result
        return tuple(left)

    async def _run_process(self) -> _Death | None:
        """Run one process of the service, from its start to its end.

        Returns:
            A description of the process's death; None if the service has done its work.
        """
        needed_is_gone = asyncio.Event()
        if self._needed is not None:
            await self._needed.is_up.wait()
            needed_is_gone = self._needed.is_gone
        try:
            service_process = self._owner.make_process(self.plan, self._owner.context)
        except OSError as error:
            return self._make_death(None, f"can't be started: {error.strerror or error}", None)
        self._keep_process(service_process)
        self.is_gone = asyncio.Event()
        self._note(state=ServiceState.STARTING)
        try:
            return await self._watch(service_process, needed_is_gone)
        finally:
            # After the end of the process, end its leftover processes. But if this task was
            # cancelled, do nothing, because the method `end` of this class ends all processes of
            # the service.
            if (task := asyncio.current_task()) is None or not task.cancelling():
                await self._end_leftovers(service_process)

    async def _watch(
        self, service_process: ServiceProcess, needed_is_gone: asyncio.Event
    ) -> _Death | None:
        began_s = self._owner.clock()
        try:
            await service_process.launch()
        except ComponentFailed as error:
            return self._make_death(service_process, str(error), None, kind=error.reason.kind)
        except OSError as error:  # includes TimeoutError
            why = error.strerror or str(error) or "its guardian process does not answer"
            return self._make_death(service_process, f"can't be started: {why}", None)
        self._note(pid=service_process.pid)
        ready_at_s: float | None = None
        getting_ready = asyncio.create_task(service_process.until_ready())
        following = asyncio.create_task(needed_is_gone.wait())
        try:
            watched: set[asyncio.Future[Any]] = {getting_ready, following, service_process.exited}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if getting_ready.done() and not service_process.exited.done():
                try:
                    getting_ready.result()
                except ComponentFailed as error:
                    return self._make_death(
                        service_process, str(error), None, kind=error.reason.kind
                    )
                ready_at_s = self._owner.clock()
                self._mark_up(ServiceState.READY)
                watched.remove(getting_ready)
                await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_tasks(getting_ready, following)
        if not service_process.exited.done():
            # This service needs another service, which has died. So this service will be ended,
            # too. Report the new state now, because it may take some seconds to end this service.
            self._note(state=ServiceState.DOWN, pid=None)
            return _Death(failure=None)
        exit = service_process.exited.result()
        self._owner.emit(
            "component.exited",
            self.plan.name,
            pid=service_process.pid,
            exit_code=exit.exit_code,
            signal=exit.signal_name,
        )
        is_done = exit.is_zero and self.plan.on_exit_zero == "drain"
        if is_done and (ready_at_s is not None or await service_process.was_ready_before_end()):
            self._mark_up(ServiceState.DONE)
            return None
        now_s = self._owner.clock()
        ended = f"was {exit}" if exit.signal is not None else f"ended with {exit}"
        before = "" if ready_at_s is not None else " before it was ready"
        why = f"{ended}{before}, {now_s - began_s:.0f} s after its start"
        return self._make_death(service_process, why, _seconds_since(ready_at_s, now_s), exit=exit)

    def _make_death(
        self,
        service_process: ServiceProcess | None,
        why: str,
        ready_for_s: float | None,
        *,
        kind: FailureKind | None = None,
        exit: Exit | None = None,
    ) -> _Death:
        # The exit status is unknown if the guardian process, the parent of the process, was killed.
        # When a guardian ends, the kernel sends SIGKILL to its child.
        killed = exit is not None and (exit.signal == signal.SIGKILL or exit.exit_code is None)
        # Do not read the log of a process that was killed from outside: the log cannot contain the
        # reason for the kill.
        words = service_process.read_log_end() if service_process is not None and not killed else ""
        pid = (
            f" (pid {service_process.pid})"
            if service_process is not None and service_process.pid is not None
            else ""
        )
        failure = make_failure(
            self.plan.name,
            words,
            message=f"{self.plan.name}{pid} {why}",
            rule="exit" if exit is not None else "start",
            kind=kind,
            exit=exit,
        )
        return _Death(failure=failure, ready_for_s=ready_for_s, was_killed=killed)

    async def _end_leftovers(self, service_process: ServiceProcess) -> None:
        """End the remaining children of a service's process that has died.

        Does nothing if the children may outlive the process (`Command.children_grace_s`).
        """
        outlives = self.plan.command.children_grace_s is not None
        if outlives and service_process.exited.done():
            return
        if left := await service_process.end():
            _log.warning(
                "these processes of service %s could not be ended: %s", self.plan.name, left
            )
            return
        self.processes.remove(service_process)

    def _keep_process(self, service_process: ServiceProcess) -> None:
        self.processes = [other for other in self.processes if not other.process.empty.done()]
        self.processes.append(service_process)

    def _mark_up(self, state: ServiceState) -> None:
        self._note(state=state)
        self.is_up.set()
        self.was_up.set()

    def _note(self, **changes: object) -> None:
        """Update `report`, and pass the new report to `on_change`.

        Args:
            changes: New values of fields of the report.
        """
        guardians = tuple(service_process.process.guardian for service_process in self.processes)
        self.report = replace(self.report, guardians=guardians, **changes)  # type: ignore[arg-type]
        self._owner.on_change(self.report)


class Services:
    """Runs the services of a plan in a separate thread, while the context is open.

    Each service has a guardian process, which ends the service if the calling process dies. The
    calling process becomes a subreaper and stays one.
    """

    def __init__(
        self,
        plan: AttemptPlan,
        ports: PortsReserved,
        emit: Emit,
        *,
        register: RunRegistration | None = None,
        needs: Mapping[str, str] | None = None,
        policy: RestartPolicy | None = None,
        on_change: Callable[[ServiceReport], None] = lambda report: None,
        make_process: MakeServiceProcess = ProcessComponent,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """
        Args:
            plan: The services; each is one component of the plan.
            ports: The ports of the services.
            emit: Publishes events.
            register: Registry on disk for the processes. None if they are not registered.
            needs: `needs[service]`: name of another service that the service needs. If the needed
                service dies, both services are ended and started again in the right order.
            policy: Rules for restarts. If None, the defaults of `RestartPolicy` apply.
            on_change: Called in the thread of the services after each change of a service. The
                guardian of each new process is reported before the process is launched.
            make_process: Creates the object for one process of a service.
            clock: Returns the time in CLOCK_MONOTONIC seconds.
            sleep: Waits for a number of seconds.
        """
        # A kernel without subreapers refuses this call. Continue in that case with the weakest
        # containment, level L1 of `containment.Level`.
        with contextlib.suppress(OSError):
            tree.become_subreaper()
        tree.allow_files(_OPEN_FILES)
        self.context = AttemptContext(plan, ports, emit, register)
        self.emit = emit
        self.on_change = on_change
        self.make_process = make_process
        self.clock = clock
        self.sleep = sleep
        #: Failure of the service that could not be started again; None if there is no such service.
        self.failure: Failure | None = None
        #: Reason that was passed to `stop`; empty if `stop` was not called.
        self.stopped_by = ""
        self._is_over = asyncio.Event()
        self._services: dict[str, _Service] = {}
        for component in plan.components:
            needed = self._services.get((needs or {}).get(component.name, ""))
            service = _Service(component, self, needed, policy or RestartPolicy())
            self._services[component.name] = service
        self._left: dict[str, tuple[int | str, ...]] | None = None
        self._loop = LoopThread("services", self._crash)

    def start(self, name: str) -> None:
        """Start a service, and wait until it is ready or has done its work.

        If the service dies later, it is started again.

        Raises:
            RunEnded: The service died before it was ready (see `failure`), or `stop` was called.
        """
        self._loop.call(self._start(name))

    def wait_over(self) -> None:
        """Wait until `stop` is called or a service cannot be started again."""
        self._loop.call(self._is_over.wait())

    def stop(self, why: str) -> None:
        """Request the end of all services. Returns at once. May be called from any thread.

        Args:
            why: Reason for the end.
        """
        self._loop.soon(self._stop, why)

    def teardown(self) -> Mapping[str, tuple[int | str, ...]]:
        """End the services in the reverse order of their start. May be called any number of times.

        Returns:
            Mapping from the name of a service to descriptions of its processes that could not be
            ended, and of errors in Muster's own code. Empty if all processes have ended.
        """
        if self._left is None:
            self._left = self._loop.call(self._teardown())
        return self._left

    def give_up(self, failure: Failure) -> None:
        """Record that a service cannot be started again, so that all services end.

        Call this only in the thread of the services.
        """
        if not self._is_over.is_set():
            self.failure = failure
            self._is_over.set()

    def __enter__(self) -> Services:
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop.is_open:
            try:
                self.teardown()
            finally:
                self._loop.close()

    async def _start(self, name: str) -> None:
        service = self._services[name]
        if not self._is_over.is_set():
            service.keeper = asyncio.create_task(service.keep())
            service.keeper.add_done_callback(self._on_kept)
        first = asyncio.create_task(service.was_up.wait())
        over = asyncio.create_task(self._is_over.wait())
        await asyncio.wait({first, over}, return_when=asyncio.FIRST_COMPLETED)
        await cancel_tasks(first, over)
        if self._is_over.is_set():
            why = self.failure.message if self.failure is not None else self.stopped_by
            raise RunEnded(f"{name} is not started: {why}")

    def _on_kept(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            self._crash(error)

    def _crash(self, error: BaseException) -> None:
        _log.error("the supervision of the services has failed", exc_info=error)
        message = f"an error in Muster ended the supervision of the services: {error!r}"
        self.give_up(Failure(kind=FailureKind.UNKNOWN, message=message, rule="internal-error"))

    def _stop(self, why: str) -> None:
        if not self._is_over.is_set():
            self.stopped_by = why
            self._is_over.set()

    async def _teardown(self) -> dict[str, tuple[int | str, ...]]:
        self._stop("the services are ending")
        # Cancel all restarts before the first service is ended. Otherwise the end of one service
        # would restart the services that need it.
        services = self._services.values()
        keepers = [service.keeper for service in services if service.keeper is not None]
        for keeper in keepers:
            keeper.cancel()
        if keepers:
            await asyncio.wait(keepers)
        left: dict[str, tuple[int | str, ...]] = {}
        for name, service in reversed(self._services.items()):
            if leftovers := await service.end():
                left[name] = leftovers
        # If the method `end` of a service has failed, processes of the service may still run.
        # `context.close` kills these processes.
        left_by_context = await self.context.close()
        self.context.release_logs()
        return {**left_by_context, **left}
