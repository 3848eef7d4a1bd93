"""Services: processes of this machine that are started again, in place, when they die.

The parts of a stack are services, and so is the temporary Prefect server of a run. A service keeps
its command, its log and its ports. `Services` watches them from a thread of its own.
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
from tasks.processes.attempt import failure_of
from tasks.processes.component import AttemptContext, AttemptPlan, ComponentPlan
from tasks.processes.identity import ProcessId
from tasks.processes.loop_thread import LoopThread
from tasks.processes.ports import PortsReserved
from tasks.processes.process_component import ProcessMember
from tasks.processes.registry import RunRegister
from tasks.record.events import Emit
from tasks.record.outcome import Exit, Failure, GivenUp
from tasks.spec.errors import RunEnded
from tasks.spec.failure_kinds import FailureKind

_log = logging.getLogger(__name__)

_OPEN_FILES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When a service that has died is started again."""

    #: Seconds from the first death to the restart. Each further death doubles them.
    first_delay_s: float = 0.5
    #: The longest delay, in seconds.
    most_delay_s: float = 30.0
    #: A service that was ready for so many seconds has recovered: its next delay is the first one.
    steady_s: float = 30.0
    #: A service that was not ready once in so many seconds is given up.
    give_up_after_s: float = 300.0


class Restarts:
    """The restarts of one service. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        #: Deaths since it was last steady.
        self._deaths = 0
        #: When it died after it was last ready; None: it has not died since.
        self._failing_since_s: float | None = None

    def delay_after_death(self, now_s: float, ready_for_s: float | None) -> float | None:
        """Seconds until the service is to be started again; None: give it up.

        Args:
            ready_for_s: for how long it was ready before it died; None: it was not ready.
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
    """What a service does."""

    #: Not started yet.
    WAITING = "waiting"
    #: Its process runs and is not ready yet.
    STARTING = "starting"
    READY = "ready"
    #: It has died, and will be started again.
    DOWN = "down"
    #: It has done its work and left with exit code 0.
    DONE = "done"
    #: It has died, and will not be started again.
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReport:
    """One service as it is now."""

    name: str
    state: ServiceState = ServiceState.WAITING
    #: Of its process; None: it has none.
    pid: int | None = None
    #: The guardians of its process and of what earlier processes of it have left running.
    guardians: tuple[ProcessId, ...] = ()
    #: How often it has died.
    deaths: int = 0
    #: When it died last, UTC epoch seconds; None: never.
    died_at: float | None = None
    #: Why it died last; empty: it never has.
    reason: str = ""


class _Guarded(Protocol):
    """Of a member's process: who guards it, and whether anything is left of it."""

    guardian: ProcessId
    empty: asyncio.Future[None]


class ServiceMember(Protocol):
    """One process of a service, from its guardian to its end; see `ProcessMember`."""

    pid: int | None
    exited: asyncio.Future[Exit]

    @property
    def process(self) -> _Guarded: ...
    async def launch(self) -> None: ...
    async def until_ready(self) -> None: ...
    async def has_last_word(self) -> bool: ...
    def last_words(self) -> str: ...
    async def end(self) -> tuple[int | str, ...]: ...


MakeMember = Callable[[ComponentPlan, AttemptContext], ServiceMember]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Death:
    """One end of a service that should have gone on."""

    #: None: it was stopped because the service that it needs had died.
    failure: Failure | None
    #: Seconds for which it was ready; None: it was not.
    ready_for_s: float | None = None
    #: Somebody outside killed it: the program itself may be in order.
    was_killed: bool = False


def _since(began_s: float | None, now_s: float) -> float | None:
    return now_s - began_s if began_s is not None else None


class _Service:
    """One service: a process at a time, and what earlier processes have left running."""

    def __init__(
        self, plan: ComponentPlan, owner: Services, needed: _Service | None, policy: RestartPolicy
    ) -> None:
        self.plan = plan
        self.report = ServiceReport(name=plan.name)
        #: Set while it is ready or done.
        self.is_up = asyncio.Event()
        #: Set once the process that is ready now is gone; another event for each process.
        self.is_gone = asyncio.Event()
        #: Set once it was ready or done for the first time.
        self.was_up = asyncio.Event()
        self.keeper: asyncio.Task[None] | None = None
        #: The present process, and earlier ones of which something lives on.
        self.members: list[ServiceMember] = []
        self._owner = owner
        self._needed = needed
        self._restarts = Restarts(policy)

    async def keep(self) -> None:
        """Start it, and again after each death, until its work is done or it is given up."""
        while (death := await self._live()) is not None:
            self.is_up.clear()
            self.is_gone.set()
            failure = death.failure
            if failure is None:
                self._note(state=ServiceState.DOWN, pid=None)
                continue
            self._note(
                state=ServiceState.DOWN,
                pid=None,
                deaths=self.report.deaths + 1,
                died_at=time.time(),
                reason=failure.message,
            )
            delay_s = self._restarts.delay_after_death(self._owner.clock(), death.ready_for_s)
            if not self.was_up.is_set() and not death.was_killed:
                # It can't do its work here: whoever waits for it shall hear why at once.
                delay_s = None
            if delay_s is None:
                if self.was_up.is_set():
                    message = f"{self.plan.name} could not be started again: {failure.message}"
                    failure = failure.with_changes(message=message)
                self._note(state=ServiceState.GIVEN_UP)
                self._owner.give_up(failure)
                return
            _log.warning("%s; started again in %.1f s", failure.message, delay_s)
            await self._owner.sleep(delay_s)

    async def end(self) -> tuple[int | str, ...]:
        """End all of its processes. Returns: what can't be ended."""
        if self.keeper is not None:
            self.keeper.cancel()
            await asyncio.wait([self.keeper])
        ended = await asyncio.gather(*(member.end() for member in self.members))
        return tuple(left for one in ended for left in one)

    async def _live(self) -> _Death | None:
        """One process of the service, from its start to its end; None: its work is done."""
        needed_is_gone = asyncio.Event()
        if self._needed is not None:
            await self._needed.is_up.wait()
            needed_is_gone = self._needed.is_gone
        try:
            member = self._owner.make_member(self.plan, self._owner.context)
        except OSError as error:
            return self._death(None, f"can't be started: {error.strerror or error}", None)
        self._keep_member(member)
        self.is_gone = asyncio.Event()
        self._note(state=ServiceState.STARTING)
        try:
            return await self._watch(member, needed_is_gone)
        finally:
            # Whoever has been cancelled here leaves that to `end`.
            if (task := asyncio.current_task()) is None or not task.cancelling():
                await self._leave(member)

    async def _watch(self, member: ServiceMember, needed_is_gone: asyncio.Event) -> _Death | None:
        began_s = self._owner.clock()
        try:
            await member.launch()
        except GivenUp as error:
            return self._death(member, str(error), None, kind=error.loss.kind)
        except OSError as error:  # TimeoutError is one.
            why = error.strerror or str(error) or "its guardian does not answer"
            return self._death(member, f"can't be started: {why}", None)
        self._note(pid=member.pid)
        ready_at_s: float | None = None
        getting_ready = asyncio.create_task(member.until_ready())
        following = asyncio.create_task(needed_is_gone.wait())
        try:
            watched: set[asyncio.Future[Any]] = {getting_ready, following, member.exited}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if getting_ready.done() and not member.exited.done():
                try:
                    getting_ready.result()
                except GivenUp as error:
                    return self._death(member, str(error), None, kind=error.loss.kind)
                ready_at_s = self._owner.clock()
                self._be_up(ServiceState.READY)
                watched.remove(getting_ready)
                await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            getting_ready.cancel()
            following.cancel()
        if not member.exited.done():
            return _Death(failure=None)
        exit = member.exited.result()
        self._owner.emit(
            "component.exited",
            self.plan.name,
            pid=member.pid,
            exit_code=exit.exit_code,
            signal=exit.signal_name,
        )
        is_done = exit.is_zero and self.plan.on_exit_zero == "drain"
        if is_done and (ready_at_s is not None or await member.has_last_word()):
            self._be_up(ServiceState.DONE)
            return None
        now_s = self._owner.clock()
        ended = f"was {exit}" if exit.signal is not None else f"ended with {exit}"
        before = "" if ready_at_s is not None else " before it was ready"
        why = f"{ended}{before}, {now_s - began_s:.0f} s after its start"
        return self._death(member, why, _since(ready_at_s, now_s), exit=exit)

    def _death(
        self,
        member: ServiceMember | None,
        why: str,
        ready_for_s: float | None,
        *,
        kind: FailureKind | None = None,
        exit: Exit | None = None,
    ) -> _Death:
        # A guardian that was killed takes its process along, whose status nobody learns.
        killed = exit is not None and (exit.signal == signal.SIGKILL or exit.exit_code is None)
        # The log of a process that was killed from outside says nothing about that.
        words = member.last_words() if member is not None and not killed else ""
        pid = f" (pid {member.pid})" if member is not None and member.pid is not None else ""
        failure = failure_of(
            self.plan.name,
            words,
            message=f"{self.plan.name}{pid} {why}",
            rule="exit" if exit is not None else "start",
            kind=kind,
            exit=exit,
        )
        return _Death(failure=failure, ready_for_s=ready_for_s, was_killed=killed)

    async def _leave(self, member: ServiceMember) -> None:
        """End what a process has left, unless that is to live on."""
        outlives = self.plan.command.children_grace_s is not None
        if outlives and member.exited.done():
            return
        if left := await member.end():
            _log.warning("%s: these processes outlived SIGKILL: %s", self.plan.name, left)
            return
        self.members.remove(member)

    def _keep_member(self, member: ServiceMember) -> None:
        self.members = [one for one in self.members if not one.process.empty.done()]
        self.members.append(member)

    def _be_up(self, state: ServiceState) -> None:
        self._note(state=state)
        self.is_up.set()
        self.was_up.set()

    def _note(self, **changes: object) -> None:
        guardians = tuple(member.process.guardian for member in self.members)
        self.report = replace(self.report, guardians=guardians, **changes)  # type: ignore[arg-type]
        self._owner.on_change(self.report)


class Services:
    """Keeps the services of a plan running, from a thread of its own, while the context is open.

    Whatever happens to this process, the guardians end what it has started. Makes this process a
    subreaper, for good.
    """

    def __init__(
        self,
        plan: AttemptPlan,
        ports: PortsReserved,
        emit: Emit,
        *,
        register: RunRegister | None = None,
        needs: Mapping[str, str] | None = None,
        policy: RestartPolicy | None = None,
        on_change: Callable[[ServiceReport], None] = lambda report: None,
        make_member: MakeMember = ProcessMember,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """
        Args:
            register: where running processes are noted on disk; None: nowhere.
            needs: `needs[service]`: the service that it can't live without: when that dies, both
                are started again, in this order.
            on_change: called in the services' thread with each change; before a process is
                launched, its guardian has been reported.
        """
        with contextlib.suppress(OSError):  # At level L1.
            tree.become_subreaper()
        tree.allow_files(_OPEN_FILES)
        self.context = AttemptContext(plan, ports, emit, register)
        self.emit = emit
        self.on_change = on_change
        self.make_member = make_member
        self.clock = clock
        self.sleep = sleep
        #: Why they can't be kept; None while they can.
        self.failure: Failure | None = None
        #: Why they were told to end; empty while they were not.
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
        """Start a service, and wait until it is ready, or has done its work.

        From then on it is kept. Raises: RunEnded, when it can't do its work here, or the services
        are to end; see `failure`.
        """
        self._loop.call(self._start(name))

    def wait_over(self) -> None:
        """Wait until the services are told to end, or one of them is given up."""
        self._loop.call(self._is_over.wait())

    def stop(self, why: str) -> None:
        """Tell the services to end. Returns at once; safe in any thread."""
        self._loop.soon(self._stop, why)

    def teardown(self) -> Mapping[str, tuple[int | str, ...]]:
        """End them in the reverse order of their start; any number of times.

        Returns: `left[service]`, what can't be ended.
        """
        if self._left is None:
            self._left = self._loop.call(self._teardown())
        return self._left

    def give_up(self, failure: Failure) -> None:
        """A service can't be kept. Only in the services' thread."""
        if not self._is_over.is_set():
            self.failure = failure
            self._is_over.set()

    def __enter__(self) -> Services:
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop.is_open:
            self.teardown()
            self._loop.close()

    async def _start(self, name: str) -> None:
        service = self._services[name]
        if not self._is_over.is_set():
            service.keeper = asyncio.create_task(service.keep())
            service.keeper.add_done_callback(self._on_kept)
        first = asyncio.create_task(service.was_up.wait())
        over = asyncio.create_task(self._is_over.wait())
        await asyncio.wait({first, over}, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        over.cancel()
        if self._is_over.is_set():
            why = self.failure.message if self.failure is not None else self.stopped_by
            raise RunEnded(f"{name} is not started: {why}")

    def _on_kept(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            self._crash(error)

    def _crash(self, error: BaseException) -> None:
        _log.error("the services can't be kept", exc_info=error)
        message = f"Muster's own supervision failed: {error!r}"
        self.give_up(Failure(kind=FailureKind.UNKNOWN, message=message, rule="internal-error"))

    def _stop(self, why: str) -> None:
        if not self._is_over.is_set():
            self.stopped_by = why
            self._is_over.set()

    async def _teardown(self) -> dict[str, tuple[int | str, ...]]:
        self._stop("its context was left")
        # None is started again while another one is ended.
        keepers = [one.keeper for one in self._services.values() if one.keeper is not None]
        for keeper in keepers:
            keeper.cancel()
        if keepers:
            await asyncio.wait(keepers)
        left: dict[str, tuple[int | str, ...]] = {}
        for name, service in reversed(self._services.items()):
            if remains := await service.end():
                left[name] = remains
        await self.context.close()
        return left
