"""Run one component of an attempt: start it, check it with probes, and end it.

`ComponentPlan` describes a component, with all its ports and variables filled in. A
`RunningComponent` runs a component: one subclass as a process of this machine, another as a job of
a Ray cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from pathlib import Path
from typing import Never

import httpx

from tasks.processes import probes, registry
from tasks.processes.containment import Containment, Level
from tasks.processes.descendant_watch import DeathEvidence
from tasks.processes.guarded import Command, GuardianTemplate
from tasks.processes.guards import Guards
from tasks.processes.owned_tasks import OwnedTasks
from tasks.processes.place_reader import PlaceReader, PlaceReaders
from tasks.processes.planned_end import PlannedEnd
from tasks.processes.ports import PortsReserved
from tasks.processes.probes import ComponentProbe, make_client, wait_for_success
from tasks.processes.shared_memory_scan import SharedMemoryScan
from tasks.processes.shortage import NotChecked
from tasks.processes.warning_signal import StopWarning
from tasks.record.causes import read_since_step
from tasks.record.disk import DiskThread
from tasks.record.events import Emit
from tasks.record.log_file import HeldLog
from tasks.record.metrics_file import FileFingerprint
from tasks.record.outcome import ComponentFailed, Exit, GiveUpReason
from tasks.record.run_json import ResumeRecord
from tasks.spec.component import OnExitZero
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.probes import LiveProbe, ReadyProbe
from tasks.spec.run import Progress
from tasks.spec.watch import WatchRule

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentPlan:
    """Plan of one component: its command, its probes, and the meaning of its exit."""

    name: str
    command: Command
    #: Readiness probe. None if the component is ready as soon as its program runs.
    ready: ReadyProbe | None
    #: Liveness probe. None if the component counts as alive until its process ends.
    live: LiveProbe | None
    #: Effect on the run if the component ends with exit code 0.
    on_exit_zero: OnExitZero
    #: True if the component itself starts and watches the servers on its ports. Muster then checks
    #: only the port `NAME.port`.
    manages_ports: bool = False
    #: Folder or URL of the checkpoints that the component writes. Empty if unknown.
    checkpoints: str = ""
    #: Function that returns True while the component writes a checkpoint. The function may block.
    #: The attribute is None if it is unknown whether the component writes checkpoints.
    is_saving: Callable[[], bool] | None = None
    #: Function that returns the seconds since a checkpoint last grew, or None if no checkpoint has
    #: grown since the last call. The function may block. The attribute is None if it is unknown
    #: whether the component writes checkpoints.
    seconds_since_growth: Callable[[], float | None] | None = None
    #: Function that returns the step and the time of the newest complete checkpoint. The function
    #: may block and may raise OSError. The attribute is None if the component has no checkpoints.
    find_checkpoint: Callable[[], tuple[int | None, float] | None] | None = None
    #: Signal that warns the component before Muster ends the attempt. None for no warning.
    warning: StopWarning | None = None
    #: Largest size of the component's log on the disk, in bytes. None if the log has no bound.
    log_max_bytes: int | None = None
    #: Function that creates the `RunningComponent` for a component on a Ray cluster. None if the
    #: component runs as a process of this machine.
    make_component: Callable[[ComponentPlan, AttemptContext], RunningComponent] | None = None

    def is_same_start(self, other: ComponentPlan) -> bool:
        """Return True if both plans have the same command and the same probes."""
        return (self.command, self.ready, self.live) == (other.command, other.ready, other.live)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
    """Plan of one attempt at a run: its components and settings."""

    run_id: str
    #: Number of this attempt at the run, from 1.
    number: int
    #: Absolute path of the directory from which relative paths of the run are resolved.
    cwd: Path
    #: The components in the order of their start.
    components: tuple[ComponentPlan, ...]
    progress: Progress | None = None
    #: Fingerprint of the `progress.jsonl` file at the start of the attempt. Used to skip the lines
    #: of earlier attempts. None if the attempt has not started yet.
    metrics: FileFingerprint | None = None
    #: Mapping from the name of an alarm to the rule that triggers the alarm.
    alarms: Mapping[str, WatchRule] = field(default_factory=dict)
    #: Step that must be reached for success. None if exit code 0 is enough.
    success_step: float | None = None
    #: Record of the checkpoint from which the attempt starts. None if it is unknown.
    resume: ResumeRecord | None = None
    #: Highest step that earlier attempts have reached; None if they have reached no step.
    best_step_before: float | None = None
    #: Longest time in seconds from the last step of the training to the end of the attempt. None if
    #: there is no limit.
    finish_within_s: float | None = None
    #: Longest time in seconds without a sign of work, such as a new step or new output. None if
    #: there is no limit.
    stall_after_s: float | None = None
    #: Time limit of the run in seconds. A run that takes longer fails with the kind TIME_LIMIT.
    #: None if there is no limit.
    time_limit_s: float | None = None
    #: Text for messages, such as `time limit of 60 seconds (timeout_s)`. Empty if another key of
    #: the run spec sets the time limit, such as `gang.max_hours`.
    time_limit_text: str = ""
    #: Start of the attempt in UTC epoch seconds. None if the attempt starts now.
    began_at: float | None = None
    #: GPUs of this machine that the run may use, as indices in the numbering of the GPU driver.
    devices: tuple[int, ...] = ()
    #: Coroutine function that returns the GPU utilisation of each node of the run's cluster, from 0
    #: to 1. None if the run uses no cluster.
    gpu_use: Callable[[], Awaitable[Mapping[str, float]]] | None = None
    #: Mechanisms which ensure that all processes of the attempt can be ended.
    containment: Containment = field(default_factory=lambda: Containment(level=Level.L2))
    #: Function that masks the secrets in a text. Every text is masked before it is written to disk.
    mask: Callable[[str], str] = str

    @property
    def last_step(self) -> float | None:
        """The step at which the training is finished, or None if unknown."""
        total = self.progress.total if self.progress else None
        # The training must reach `success_step` for success, but may continue until `total`, the
        # last step according to the spec. So the training is finished at the larger of the two.
        return max((step for step in (self.success_step, total) if step is not None), default=None)

    @property
    def starts_finished(self) -> bool:
        """True if an earlier attempt reached the last step, and this attempt starts from there."""
        last = self.last_step
        loaded = self.resume.step if self.resume else None
        before = self.best_step_before
        if last is None or loaded is None or before is None:
            return False
        return loaded >= last and before >= last


#: Time limit in seconds for the last check of a probe, after the end of a component or at the
#: readiness deadline.
_LAST_ASK_S = 1.0
#: Before a component with the readiness probe `file: PATH` is started, Muster reads the state of
#: the file. This read may take at most this number of seconds.
_FILE_WITHIN_S = 5.0
#: Value of `Failure.rule` if a process outside the run listens on a port of the run.
PORT_TAKEN = "port-taken"


def _log_error(error: BaseException) -> None:
    _log.error("the supervision of a component has failed", exc_info=error)


@dataclass
class AttemptContext:
    """Resources that the components of one attempt share.

    The containment level in the plan decides which of the resources are used. For example, only
    level L4 uses a PID namespace.

    Call `begin` before the components are created, and `settle` after all components were created.
    Call `close` at the end of the attempt.
    """

    plan: AttemptPlan
    ports: PortsReserved
    emit: Emit
    #: Registry of the run on disk; None if the run is not registered.
    register: registry.RunRegistration | None
    #: Helper process that forks the guardian processes. Each component runs under its own guardian
    #: process. If None, `begin` starts the helper process when it is needed.
    template: InitVar[GuardianTemplate | None] = None
    #: Called with each error that a background task of a component raises.
    on_error: Callable[[BaseException], None] = _log_error
    client: httpx.AsyncClient = field(default_factory=make_client)
    #: Object that starts and ends all processes of the attempt on this machine.
    guards: Guards = field(init=False)
    #: Mapping from component name to log. Each log file stays open from the start of its component
    #: until `release_logs` closes the file.
    logs: Mapping[str, HeldLog] = field(init=False)
    #: Objects that read the attempt's files and folders in threads, because a read may block.
    readers: PlaceReaders = field(default_factory=PlaceReaders)
    #: Object that reads the logs of all components in one thread.
    log_reader: PlaceReader = field(init=False)
    _shared_memory: SharedMemoryScan | None = None

    def __post_init__(self, template: GuardianTemplate | None) -> None:
        self.guards = Guards(
            self.plan.run_id,
            self.plan.number,
            self.register,
            containment=self.plan.containment,
            template=template,
        )
        self.logs = {part.name: HeldLog(part.command.log) for part in self.plan.components}
        self.log_reader = self.readers.of(f"the logs of {self.plan.run_id}")

    @property
    def disk(self) -> DiskThread | None:
        """Thread that writes the files of the run; None if the run is not registered."""
        return self.register.disk if self.register is not None else None

    def begin(self) -> None:
        """Start the helper processes that later fork a guardian process for each component.

        Raises:
            OSError: A process could not be started.
        """
        self.guards.begin(sum(part.make_component is None for part in self.plan.components))

    def settle(self) -> None:
        """Begin to scan for the shared memory segments of the run.

        Call this method once, after the `RunningComponent` of each component was created.
        """
        self.guards.settle()
        if self.register is not None:
            note = self.register.note_leftovers
            try:
                self._shared_memory = SharedMemoryScan(self.guards.own_pids, note)
            except RuntimeError as error:  # for example: can't start new thread
                _log.warning("shared memory of run %s is not watched: %s", self.plan.run_id, error)

    async def enter_job(self, component: ComponentPlan, **about: object) -> None:
        """Write an entry for a Ray job into this machine's registry of active runs.

        Await this before the job is submitted. If this process is killed, `muster reconcile` finds
        the job by this entry.

        Args:
            component: The component that the job runs.
            about: Further fields of the entry, see `JobEntry`.

        Raises:
            OSError: The entry could not be written.
        """
        if self.register is not None:
            own = {
                "run_id": self.plan.run_id,
                "attempt": self.plan.number,
                "component": component.name,
                "grace_s": component.command.grace_s,
                "save_grace_s": component.command.saves_within_s,
            }
            await self.register.enter(registry.JobEntry.model_validate(own | about))

    async def hold_log(self, component: str) -> None:
        """Open the log of a component. Await this before the component's program is started.

        Raises:
            OSError: The log cannot be opened or created.
        """
        log = self.logs[component]
        if self.register is None:
            log.hold()
        else:
            # Open the log in the thread that writes the registry entries. The thread for the run's
            # record may be busy with an fsync, which would delay the start of the component.
            await asyncio.wrap_future(self.register.entry_disk.do(log.hold))

    def read_first_bytes_of_logs(self) -> None:
        """Read a byte of each log, to notice a file system that does not answer. May block."""
        for log in self.logs.values():
            self.read_first_byte(log)

    def read_first_byte(self, log: HeldLog) -> None:
        """Read a byte of a log, to notice a file system that does not answer. May block."""
        self.log_reader.place = str(log.path)
        with contextlib.suppress(OSError), log.source.open("rb") as file:
            file.read(1)

    def release_logs(self) -> None:
        """Close the logs of all components. Call this when the logs have been read to their end."""
        for log in self.logs.values():
            log.release()

    def leave_job(self, component: str) -> None:
        """Remove the entry of a Ray job that `enter_job` wrote.

        Call this only when all processes of the job have ended.
        """
        if self.register is not None:
            self.register.leave(component)

    def hurry(self) -> None:
        """Request a scan of /dev/shm at once. Call this before processes of the attempt are ended.

        The scan finds the shared memory segments that these processes have made, so that the
        segments can be removed later.
        """
        if self._shared_memory is not None:
            self._shared_memory.hurry()

    async def close(self) -> dict[str, tuple[str, ...]]:
        """End all processes of the attempt that still run, and close the shared resources.

        If closing one resource raises an error, all other resources are closed before the error is
        raised.

        Returns:
            Mapping from the name of a component to descriptions of its processes that could not be
            ended. Empty if all processes have ended.
        """
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.ports.close)
            stack.push_async_callback(self.client.aclose)
            if self._shared_memory is not None:
                stack.push_async_callback(asyncio.to_thread, self._shared_memory.close)
            return await self.guards.close()


class RunningComponent(ABC):
    """A component of an attempt, from its preparation until none of its processes remains."""

    #: Future that resolves with the component's exit. The attribute exists after `launch`.
    exited: asyncio.Future[Exit]

    def __init__(self, plan: ComponentPlan, context: AttemptContext) -> None:
        """Prepare a component.

        Raises:
            OSError: A needed resource is not available.
        """
        self.plan = plan
        #: Pid of the component's first process; None if the component has not started or runs on
        #: another machine.
        self.pid: int | None = None
        #: True until the component runs. A pending component writes no output, so missing output is
        #: no sign of a stall.
        self.is_pending = True
        #: True after the launch was begun. `end` must then end a process or a job.
        self.is_launched = False
        #: asyncio event that is set after the component was reported as ready.
        self.became_ready = asyncio.Event()
        #: asyncio event that is set if another process took the component's port before the
        #: component was ready. The event is set only if the component can be started again on
        #: another port.
        self.lost_port = asyncio.Event()
        #: Message about the taken port; valid after `lost_port` was set.
        self.port_loss = GiveUpReason(kind=FailureKind.PORT_CONFLICT, rule=PORT_TAKEN, message="")
        #: True if the component has finished with exit code 0 while the run continues.
        self.is_drained = False
        #: True if the component made no progress for too long. Muster then writes a report on the
        #: component's processes before it stops the component.
        self.is_hung = False
        #: Place in the code where the component hangs. Empty if unknown, or if no hang report was
        #: written yet.
        self.hangs_in = ""
        #: Exit code or signal of the component, with the time; None if it has not ended.
        self.exit: Exit | None = None
        #: Descriptions of machines that could not be checked for leftover processes after the
        #: component's end.
        self.unseen: tuple[str, ...] = ()
        #: Background tasks that watch the component. `end` cancels them.
        self.tasks = OwnedTasks(context.on_error)
        self._context = context
        self._emit = context.emit
        #: Log of the component. Read the log through `log.source`, because the file may be moved or
        #: removed.
        self.log = context.logs[plan.name]
        #: Mapping from the path of a file to the state of the file before the component's start
        #: (see `probes.identity_of`). The readiness probe `file: PATH` succeeds only if this state
        #: has changed since the start.
        self._files: dict[Path, object] = {}
        self._launched_monotonic_s = 0.0
        #: Size of the log in bytes before the launch. The bytes before this offset were written by
        #: earlier processes, so they are not read.
        self._log_since = 0

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def is_ready(self) -> bool:
        """True after the component was reported as ready."""
        return self.became_ready.is_set()

    def mark_ready(self) -> None:
        """Report that the component is ready. Further calls do nothing."""
        if not self.is_ready:
            self.became_ready.set()
            self._emit("component.ready", self.name, pid=self.pid, after_s=self.seconds_alive())

    async def _note_start(self) -> None:
        """Record the start time and, if the readiness probe checks a file, the state of this file.

        The probe succeeds only if the file changes after this call.

        Raises:
            PlaceTimeout: The file system of the file does not answer.
        """
        ready = self.plan.ready
        if ready is not None and ready.file is not None:
            path = self.plan.command.cwd / ready.file
            reader = self._context.readers.of(path)
            self._files[path] = await reader.ask(partial(probes.identity_of, path), _FILE_WITHIN_S)
        self._launched_monotonic_s = time.monotonic()

    def explain_death(self, exit: Exit) -> DeathEvidence:
        """Return the facts about the deaths of the component's processes. The call may block.

        Args:
            exit: Exit of the component, or exit of one process that the component needs.
        """
        return DeathEvidence()

    def seconds_alive(self) -> float:
        return time.monotonic() - self._launched_monotonic_s

    @abstractmethod
    async def launch(self) -> None:
        """Start the component. Do not cancel this coroutine.

        Raises:
            OSError: The component could not be started. No process remains.
            ComponentFailed: Another process listens on a port of the component. No process remains.
        """

    async def until_running(self) -> None:
        """Wait until the component runs. If the wait is cancelled, `end` must still be called.

        Raises:
            ComponentFailed: The component will not run.
        """
        self.is_pending = False

    async def until_ready(self) -> None:
        """Wait until the readiness probe succeeds, and report the component as ready.

        If the component ends first, the coroutine waits until the caller cancels it. The caller
        then decides with `was_ready_before_end` whether the component was ready.

        Raises:
            ComponentFailed: The probe did not succeed in time, or a process that is not part of
                this run listens on a port of the component.
        """
        ready = self.plan.ready
        if ready is not None and ready.exit is not None:
            await self._until_exit(ready.limit_s)
        elif ready is not None:
            probe = self._probe(ready)
            assert probe is not None

            def on_no(reason: str) -> None:
                self._emit("probe.failed", self.name, reason=reason)

            try:
                async with asyncio.timeout(ready.limit_s):
                    await wait_for_success(probe, every_s=ready.every_s, on_no=on_no)
            except TimeoutError:
                # Check the component once more. It may have become ready shortly before the time
                # limit, while this process had no CPU time for a check.
                if (reason := await probe.ask(_LAST_ASK_S)) is not None:
                    on_no(reason)
                    message = f"not ready after {self.seconds_alive():.0f} s: {reason}"
                    kind = FailureKind.NOT_READY
                    loss = GiveUpReason(kind=kind, rule="not-ready", message=message)
                    raise ComponentFailed(loss) from None
            await self._refuse_foreign([probe.local_port])
        await self.refuse_foreign_ports()
        if self.exited.done():
            # Do not report the component as ready, because it has already ended. The caller decides
            # whether the component was ready before its end, and then cancels this task. So wait
            # here until the cancellation.
            await forever()
        self.mark_ready()

    async def _until_exit(self, limit_s: float | None) -> None:
        """Wait until a preparation step has ended, with any exit code.

        Args:
            limit_s: Time limit in seconds. None if there is no limit.

        Raises:
            ComponentFailed: The step did not end in time.
        """
        await asyncio.wait([self.exited], timeout=limit_s)
        if not self.exited.done():
            message = (
                "the component must end within the time limit `ready.within_s` of the spec, but "
                f"is still running after {self.seconds_alive():.0f} s"
            )
            kind = FailureKind.NOT_READY
            raise ComponentFailed(GiveUpReason(kind=kind, rule="not-ready", message=message))

    async def until_empty(self) -> None:
        """Wait until all processes of this component on this machine have ended."""
        return

    async def was_ready_before_end(self) -> bool:
        """Return True if a component that has ended was ready before its end.

        The result depends on the readiness probe:

        - `log`, `file` or `notify`: the result of the probe, which is checked once more.
        - `exit: 0`: True. The method first waits until all processes of the component have ended.
        - Another probe: False, because the probe cannot succeed after the end.
        - No probe: True.

        Call this only after exit code 0.
        """
        ready = self.plan.ready
        if ready is None:
            return True
        if ready.exit is not None:
            await self.until_empty()
            return True
        if not (ready.log or ready.file or ready.notify):
            return False
        probe = self._probe(ready)
        return probe is not None and await probe.ask(_LAST_ASK_S) is None

    async def until_unresponsive(self) -> GiveUpReason:
        """Check the liveness probe repeatedly until it fails several times in a row.

        Without a liveness probe, or after the end of the component, the coroutine waits forever.

        Returns:
            A description of the failure.
        """
        live = self.plan.live
        probe = self._probe(live) if live is not None else None
        if live is None or probe is None:
            return await forever()
        misses = 0
        while True:
            await asyncio.sleep(live.every_s)
            if self.exit is not None:
                return await forever()
            reason = await probe.ask(live.timeout_s)
            if reason is None:
                misses = 0
                continue
            if isinstance(reason, NotChecked):
                # The component was not checked, because this process lacked resources. So emit the
                # event, but do not increase `misses`.
                self._emit("probe.failed", self.name, reason=reason, misses=misses, probe="live")
                continue
            misses += 1
            self._emit("probe.failed", self.name, reason=reason, misses=misses, probe="live")
            if misses >= live.misses:
                message = f"the liveness probe failed {misses} times in a row: {reason}"
                return GiveUpReason(kind=FailureKind.STALLED, rule="live", message=message)

    async def until_process_lost(self) -> GiveUpReason:
        """Wait until a process that the component needs (`live.processes`) has ended.

        Returns:
            A description of the ended process.
        """
        return await forever()

    async def until_job_lost(self) -> GiveUpReason:
        """Wait until the component's Ray job is lost or gets no GPUs, and return the reason.

        Without a Ray job, the coroutine waits until it is cancelled.
        """
        return await forever()

    def read_log_end(self, since: int = 0, until: int | None = None) -> str:
        """Return the end of the component's log, to find the reason why the component ended.

        The call may block. Call it in the thread of `AttemptContext.log_reader`.

        Args:
            since: Offset in bytes at which reading begins: the size of the log at one of the last
                training steps, or 0 if unknown.
            until: Offset in bytes at which reading ends. If None, reading ends at the end of the
                log.
        """
        since = max(since, self._log_since)
        self._context.log_reader.place = str(self.log.path)
        return read_since_step(self.log.source, since=since, until=until)

    async def examine(self) -> None:
        """Write a report on a component that hangs, with the call stacks of its processes.

        Call this before the component is ended, because an ended process has no call stacks.
        """
        return

    async def warn(self, signum: int) -> list[str]:
        """Send a signal to the processes of the component that handle the signal.

        Each process gets the signal only once, even if this method is called several times.

        Args:
            signum: Number of the signal.

        Returns:
            Descriptions of the processes that got the signal now.
        """
        return []

    def forget_warnings(self) -> None:
        """Let the next call of `warn` send the signal again to processes that have already got it.

        Call this method if `warn` announced the end of the component, but the end was then
        cancelled.
        """
        return

    async def read_planned_end(self) -> PlannedEnd | None:
        """Return the time at which the component's machine will end the component, and the reason.

        An example is a shutdown that an administrator has scheduled on the machine.

        Returns:
            The time and the reason, or None if no planned end is known.
        """
        return None

    def delay_kill(self, for_s: float) -> None:
        """Request that SIGKILL is sent no sooner than `for_s` seconds from now. Return at once.

        The request has an effect only between the stop signal and SIGKILL.
        """
        return

    @abstractmethod
    def stop(self) -> None:
        """Request the end of the component. Returns at once."""

    @abstractmethod
    def kill(self) -> None:
        """Request that the component is killed without a grace period. Returns at once."""

    @abstractmethod
    async def end(self) -> tuple[str, ...]:
        """Stop the component and wait until none of its processes remains.

        Returns:
            Descriptions of the processes that could not be ended. Empty if no process remains.
        """

    async def detach(self) -> None:
        """Leave the component running if it can continue without this process.

        Otherwise end the component.
        """
        await self.end()

    def _probe(self, spec: ReadyProbe | LiveProbe) -> ComponentProbe | None:
        """Return the probe for a readiness or liveness setting of the run spec.

        Returns:
            None if the setting needs no check by a probe.
        """
        if spec.http is not None:
            return probes.HttpProbe(spec.http, self._context.client, spec.json_)
        if spec.address is not None:
            return probes.TcpProbe(*spec.address)
        if spec.log is not None:
            reader = self._context.log_reader
            return probes.LogProbe(self.log, spec.log, self._log_since, reader)
        if spec.file is not None:
            path = self.plan.command.cwd / spec.file
            if isinstance(spec, LiveProbe):
                return probes.FileChangeProbe(path, self._context.readers.of(path))
            return probes.FileProbe(path, self._files.get(path), self._context.readers.of(path))
        if spec.alive_s is not None:
            return probes.AliveProbe(spec.alive_s, self._launched_monotonic_s)
        return None

    async def refuse_foreign_ports(self, suspected: Iterable[int] | None = None) -> None:
        """Raise an error if a process outside this run listens on a port of this component.

        Args:
            suspected: The ports to check. If None, all ports of the component are checked.

        Raises:
            ComponentFailed: A process that is not part of this run listens on one of the ports.
        """
        return

    async def _refuse_foreign(self, ports: Sequence[int | None]) -> None:
        """Raise an error if a process outside this run listens on one of the ports.

        Args:
            ports: The ports. Entries that are None are ignored.

        Raises:
            ComponentFailed: A process that is not part of this run listens on the port.
        """
        return


async def forever() -> Never:
    """Wait until this coroutine is cancelled."""
    await asyncio.Event().wait()
    raise AssertionError
