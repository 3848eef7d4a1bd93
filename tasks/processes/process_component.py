"""Run a component as a process of this machine, together with all its descendants."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from functools import partial

from tasks.processes.child_watch import ProcessWatch
from tasks.processes.component import (
    PORT_TAKEN,
    AttemptContext,
    ComponentPlan,
    RunningComponent,
    forever,
)
from tasks.processes.descendant_watch import DeathEvidence, DescendantWatch
from tasks.processes.hang_report import Diagnosis, call_with_time_limit
from tasks.processes.owned_tasks import cancel_tasks
from tasks.processes.place_reader import PlaceTimeout
from tasks.processes.planned_end import PlannedEnd, read_scheduled_shutdown
from tasks.processes.ports import Listener, has_listener, listeners
from tasks.processes.probes import ComponentProbe, NotifyProbe, WatchdogProbe
from tasks.processes.survivors import describe_survivors
from tasks.processes.torch_error_file import ErrorFile
from tasks.processes.warning_signal import ProcessKey, send_warning
from tasks.record.outcome import ComponentFailed, Exit, GiveUpReason
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.probes import LiveProbe, ReadyProbe

#: Largest number of command lines in the warning about processes that a component left behind.
_MAX_STRAGGLERS_NAMED = 5
#: Seconds within which a component must end after its own worker processes have ended. If the
#: component runs longer, the end of the workers counts as a failure.
_LEAVES_WITHIN_S = 1.0
#: Time limit in seconds for sending the warning signal to the processes of a component.
_WARN_WITHIN_S = 5.0
#: Time limit in seconds for opening the log of a component.
_HOLD_LOG_WITHIN_S = 30.0
#: Time limit in seconds of the search for the processes that listen on a port.
_LISTENERS_WITHIN_S = 10.0
#: Pause between two published status messages of a component, as a share of the time since the
#: component's start.
_STATUS_PART = 0.01
#: Smallest pause between two published status messages, in seconds.
_STATUS_AT_LEAST_S = 1.0
#: Largest pause between two published status messages, in seconds.
_STATUS_AT_MOST_S = 60.0


class ProcessComponent(RunningComponent):
    """A component that runs as a process of this machine, owned by its own guardian process."""

    def __init__(self, plan: ComponentPlan, context: AttemptContext) -> None:
        """Start the guardian process of the component. The guardian executes no command yet.

        Raises:
            OSError: The guardian could not be started.
        """
        super().__init__(plan, context)
        self.process = context.guards.prepare(plan.name)
        self.exited = self.process.exited
        #: Context in which the process runs, from `launch` to `end`.
        self._running = AsyncExitStack()
        #: asyncio event that is set when a call of `launch` has returned or raised an error.
        self._launch_is_over = asyncio.Event()
        self._notify: NotifyProbe | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._diagnosis: Diagnosis | None = None
        #: True after Muster has checked that no other process listens on the component's ports.
        self._may_listen = False
        #: Task that opens the log of the component. `launch` starts it, and it may still run after
        #: `launch` if the file system of the log does not answer.
        self._holding_log: asyncio.Task[int] | None = None
        self._descendants: DescendantWatch | None = None
        self._error_file = ErrorFile(plan.command)
        #: Processes of the component that got the warning signal.
        self._warned: set[ProcessKey] = set()

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})" if self.pid else self.name

    async def warn(self, signum: int) -> list[str]:
        nobody: list[ProcessKey] = []
        warned = await call_with_time_limit(
            _WARN_WITHIN_S, lambda: self._send_warning(signum), nobody
        )
        return [f"pid {pid}" for pid, _ in warned]

    def _send_warning(self, signum: int) -> list[ProcessKey]:
        if self.pid is None or not self.process.guardian.is_alive():
            return []
        warned = send_warning([self.process.guardian_pid], signum, skip=self._warned)
        self._warned.update(warned)
        return warned

    def forget_warnings(self) -> None:
        self._warned.clear()

    async def read_planned_end(self) -> PlannedEnd | None:
        return await asyncio.to_thread(read_scheduled_shutdown)

    def delay_kill(self, for_s: float) -> None:
        self.process.delay_kill(for_s)

    def stop(self) -> None:
        self.process.stop()

    def kill(self) -> None:
        self.process.kill()

    async def launch(self) -> None:
        try:
            await self._launch()
        finally:
            self._launch_is_over.set()

    async def _launch(self) -> None:
        self._emit("component.starting", self.name)
        command = self.plan.command
        if any(spec is not None and spec.notify for spec in (self.plan.ready, self.plan.live)):
            self._notify = NotifyProbe(lambda pid: pid in self.process.processes())
            self._publishing = asyncio.create_task(self._publish_statuses(self._notify))
            env = {**command.env, "NOTIFY_SOCKET": self._notify.address}
            if self.plan.live is not None and self.plan.live.notify:
                env["WATCHDOG_USEC"] = str(round(self.plan.live.every_s * 1e6))
            command = replace(command, env=env)
        command = self._error_file.prepare(command)
        self._context.ports.release(self.name)
        # The method `end` waits for the end of a launch if this attribute is True.
        self.is_launched = True
        try:
            await self._refuse_foreign(
                [
                    probe.local_port
                    for spec in (self.plan.ready, self.plan.live)
                    if spec is not None and (probe := self._probe(spec)) is not None
                ]
            )
            await self.refuse_foreign_ports()
            await self._note_start()
        except BaseException:
            self.is_launched = False
            raise
        self._may_listen = True
        self._holding_log = asyncio.create_task(self._hold_log())
        self._log_since = await self._finish_holding_log()
        descendants = DescendantWatch(self.process)
        self._descendants = descendants
        running = self._context.guards.running(self.name, "", command)
        await self._running.enter_async_context(running)
        self.pid = self.process.pid
        self.tasks.start(descendants.watch())
        self.exited.add_done_callback(lambda exited: descendants.note_end())
        self._emit("component.spawned", self.name, pid=self.pid, argv=list(command.argv))

    async def until_empty(self) -> None:
        await asyncio.wait([self.process.empty])

    async def _hold_log(self) -> int:
        """Open the log, and return its size in bytes. Call this before the program is executed."""
        await self._context.hold_log(self.name)
        return await self._context.log_reader.ask(self.log.size, _HOLD_LOG_WITHIN_S)

    async def _finish_holding_log(self) -> int:
        """Wait until `_hold_log` has opened the log, and return the size of the log in bytes.

        A call of `end` interrupts the wait.

        Raises:
            OSError: The log cannot be opened, or its file system does not answer.
        """
        holding = self._holding_log
        assert holding is not None
        _, pending = await asyncio.wait({holding}, timeout=_HOLD_LOG_WITHIN_S)
        if pending or holding.cancelled():
            holding.cancel()
            raise PlaceTimeout(
                f"the log {self.log.path} cannot be opened: its disk does not answer"
            )
        return holding.result()

    def explain_death(self, exit: Exit) -> DeathEvidence:
        evidence = self._descendants.explain(exit) if self._descendants else DeathEvidence()
        return replace(evidence, traceback=self._error_file.read_traceback())

    async def until_process_lost(self) -> GiveUpReason:
        live = self.plan.live
        if live is None or live.processes is None:
            return await forever()
        loss = await ProcessWatch(self.process, live, self._emit).until_lost()
        if self.plan.on_exit_zero != "fail":
            # When a component has done its work, it may end its worker processes before it ends
            # itself. So wait a moment for the end of the component. If the component ends with exit
            # code 0, the end of a worker is no failure.
            if loss.exit and (loss.exit.is_zero or loss.exit.signal == signal.SIGTERM):
                await asyncio.wait([self.exited], timeout=_LEAVES_WITHIN_S)
            if self.exited.done() and self.exited.result().is_zero:
                return await forever()
        return loss

    async def examine(self) -> None:
        """Write a report on a component that hangs.

        `end` later adds the component's last output to the report.
        """
        self._diagnosis = Diagnosis(
            process=self.process,
            command=self.plan.command,
            log=self.log,
            mask=self._context.plan.mask,
        )
        if (report := await self._diagnosis.examine()) is not None:
            self._emit("component.diagnosed", self.name, pid=self.pid, path=str(report))

    async def end(self) -> tuple[str, ...]:
        if self.pid is not None and self._diagnosis is None:
            # This component does not hang. Request its stop now, because the next steps take about
            # a millisecond. If a component hangs, its stop is requested only below, after its call
            # stacks have been collected.
            self.process.stop()
        await self.tasks.cancel()
        if self._descendants is not None:
            self._descendants.note_end()
        if not self.is_launched:
            await self._close_notify()
            await self._context.guards.dismiss(self.name)
            return ()
        if self._holding_log is not None:
            self._holding_log.cancel()
        async with self._diagnosis.collecting_output() if self._diagnosis else nullcontext():
            self.process.stop()
            await self._context.guards.end(self.process, self.plan.command.ends_within_s)
            # If a call of `launch` is still active, it returns now, because the process has ended.
            # Wait for its return.
            await self._launch_is_over.wait()
            await self._running.aclose()
            pids = self.process.leftover_pids
            left = await describe_survivors(pids) if pids else ()
            await self._close_notify()
            self._report_stragglers()
            if pids:
                message = "; ".join(left)
                self._emit("component.stuck", self.name, pid=self.pid, pids=pids, message=message)
            else:
                self._emit("component.stopped", self.name, pid=self.pid)
        if self._diagnosis is not None:
            self.hangs_in = self._diagnosis.hangs_in
        return left

    def _report_stragglers(self) -> None:
        """Report the processes that the component left behind when it ended by itself."""
        commands = self.process.stragglers
        if not commands:
            return
        how = "ended"
        if self.process.was_killed:
            how = f"killed after the grace period of {self.plan.command.grace_s:g} s"
        is_one = len(commands) == 1
        count, pronoun = ("1 process", "it") if is_one else (f"{len(commands)} processes", "them")
        names = "; ".join(commands[:_MAX_STRAGGLERS_NAMED])
        message = f"{self.name} ended, but left {count} running. Muster {how} {pronoun}: {names}"
        self._emit("run.warning", message=message)

    async def _publish_statuses(self, notify: NotifyProbe) -> None:
        """Publish each new status message of the component as an event, with pauses in between.

        Args:
            notify: Probe that receives the status messages.
        """
        while True:
            await notify.has_news.wait()
            self._publish_status(notify)
            pause_s = max(_STATUS_AT_LEAST_S, _STATUS_PART * self.seconds_alive())
            await asyncio.sleep(min(pause_s, _STATUS_AT_MOST_S))

    def _publish_status(self, notify: NotifyProbe) -> None:
        notify.has_news.clear()
        self._emit("component.status", self.name, message=notify.status)

    async def _close_notify(self) -> None:
        if self._notify is None or self._publishing is None:
            return
        await cancel_tasks(self._publishing)
        self._notify.glance()
        if self._notify.has_news.is_set():
            self._publish_status(self._notify)
        self._notify.close()

    def _probe(self, spec: ReadyProbe | LiveProbe) -> ComponentProbe | None:
        if spec.notify and self._notify is not None:
            return WatchdogProbe(self._notify) if isinstance(spec, LiveProbe) else self._notify
        return super()._probe(spec)

    async def _refuse_foreign(self, ports: Sequence[int | None]) -> None:
        # Read /proc in another thread, because a read can block. For example, the kernel may have
        # locked the memory of a process whose command line is read.
        reader = self._context.readers.of("/proc")
        for port in dict.fromkeys(ports):
            if port is None:
                continue
            try:
                # Pass the pids of all components: it is no failure if a process of another
                # component of this run listens on the port.
                check = partial(self._check_listeners, port, self._context.guards.own_pids())
                try:
                    await reader.ask(check, _LISTENERS_WITHIN_S)
                except ComponentFailed:
                    # A process that is not in the list of pids listens on the port. Check again
                    # with a new list: the run may have started the process after the first list.
                    check = partial(self._check_listeners, port, self._context.guards.own_pids())
                    await reader.ask(check, _LISTENERS_WITHIN_S)
            except PlaceTimeout as error:
                raise _unknown_listener(port, error) from error

    def _check_listeners(self, port: int, ours: set[int]) -> None:
        """Raise ComponentFailed if a process outside this run listens on a port. May block.

        Args:
            port: The port.
            ours: Pids of the processes of the run.
        """
        for listener in self._listeners(port, ours):
            if listener.pid not in ours and self._is_foreign(listener):
                holder = "a process of another user"
                if listener.pid:
                    holder = f"pid {listener.pid} ({listener.command})"
                message = (
                    f"port {port} is already used by {holder}, which is not part of this run. End "
                    "that process, or write ${NAME.port} into the spec, so that Muster chooses a "
                    "free port"
                )
                kind = FailureKind.PORT_CONFLICT
                raise ComponentFailed(GiveUpReason(kind=kind, rule=PORT_TAKEN, message=message))

    async def refuse_foreign_ports(self, suspected: Iterable[int] | None = None) -> None:
        wanted = None if suspected is None else set(suspected)
        ports = [
            port
            for name, port in self._context.ports.of(self.name).items()
            if (not self.plan.manages_ports or name == f"{self.name}.port")
            and (wanted is None or port in wanted)
        ]
        await self._refuse_foreign(ports)

    def _listeners(self, port: int, likely: set[int]) -> list[Listener]:
        """Return the processes that listen on a port.

        Args:
            port: The TCP port.
            likely: Pids that are checked first, to save time.

        Raises:
            ComponentFailed: The kernel's table of TCP sockets cannot be read.
        """
        try:
            return listeners(port, likely) if has_listener(port) else []
        except OSError as error:
            raise _unknown_listener(port, error) from error

    def _is_foreign(self, listener: Listener) -> bool:
        """Return True if a listener outside the component's process tree is not part of this run.

        A component may start a container or a daemon, which listens outside its process tree. After
        the launch of the component, a listener counts as part of this run in two cases:

        - The listener belongs to this user or root, and one of these conditions holds: the listener
          runs in a container, listens on behalf of a container, has the run id in its environment,
          or is hidden from this user.
        - The listener belongs to another user, but runs in a PID namespace that root has created.
          Containers of root may contain programs of other users, and no other user can create such
          a namespace.

        Args:
            listener: A process outside the component's process tree.
        """
        if not self._may_listen:
            return True
        if listener.uid not in (0, os.getuid()):
            return not listener.is_roots_container
        if listener.pid == 0:
            return False
        carries_name = listener.run_id == self.plan.command.env.get("MUSTER_RUN_ID")
        return not (carries_name or listener.is_containers)


def _unknown_listener(port: int, error: OSError) -> ComponentFailed:
    """Return the error for a port whose listening process cannot be determined."""
    message = f"the process that listens on port {port} cannot be determined: {error}"
    kind = FailureKind.UNKNOWN
    return ComponentFailed(GiveUpReason(kind=kind, rule="port-unknown", message=message))
