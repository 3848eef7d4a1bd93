"""One component of a running attempt: its start, its readiness, its liveness, its end."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Never

import httpx

from tasks.run.outcome import Exit
from tasks.run.probes import LiveProbe, ReadyProbe
from tasks.supervise import tree
from tasks.supervise.diagnosis import Diagnosis, Hung
from tasks.supervise.holds import Holds
from tasks.supervise.identity import ProcessId
from tasks.supervise.notify import NotifySocket
from tasks.supervise.plan import ComponentPlan
from tasks.supervise.ports import Listener, PortsReserved, is_listened, listeners
from tasks.supervise.probe import (
    AliveProbe,
    FileProbe,
    HttpProbe,
    LogProbe,
    NotifyProbe,
    Probe,
    TcpProbe,
    until_yes,
)
from tasks.supervise.process import GuardedProcess
from tasks.supervise.vigil import Loss, Vigil

#: What a guardian needs after the grace period to kill, to reap, and to report what is stuck.
_KILL_WITHIN_S = 8.0
#: An idle guardian leaves in milliseconds, unless it is itself stopped.
_LEAVE_WITHIN_S = 2.0
_LAST_ASK_S = 1.0
#: From the end of the processes below it to that of a component that leaves in good order.
_LEAVES_WITHIN_S = 1.0

Emit = Callable[..., None]


class PortTaken(Exception):
    """A server that is not of this run listens where the component's answer is expected."""


class Member:
    """A component and its process, from an idle guardian to an empty tree."""

    def __init__(
        self,
        plan: ComponentPlan,
        process: GuardedProcess,
        *,
        holds: Holds,
        ports: PortsReserved,
        client: httpx.AsyncClient,
        emit: Emit,
        own_pids: Callable[[], set[int]],
        mask: Callable[[str], str],
    ) -> None:
        """
        Args:
            own_pids: every process of the attempt, this component's and the others'.
            mask: takes secrets out of a text.
        """
        self.plan = plan
        self.process = process
        #: The launch was ordered: from now on there is something to end.
        self.is_launched = False
        self.is_ready = False
        #: It left with exit 0, its part done, while the run goes on.
        self.is_drained = False
        #: It is to blame for a run that stalled, and is examined before it is ended.
        self.is_hung = False
        self.exit: Exit | None = None
        self._holds = holds
        self._ports = ports
        self._client = client
        self._emit = emit
        self._own_pids = own_pids
        self._mask = mask
        self._guardian = ProcessId.of(process.guardian_pid)
        self._parent_pid = 0
        self._launched_at = 0.0
        self._launched_monotonic_s = 0.0
        self._notify: NotifySocket | None = None
        self._diagnosis: Diagnosis | None = None

    @property
    def name(self) -> str:
        return self.plan.name

    def __str__(self) -> str:
        return f"{self.name} (pid {self.process.pid})" if self.process.pid else self.name

    def seconds_alive(self) -> float:
        return time.monotonic() - self._launched_monotonic_s

    async def launch(self) -> None:
        """Start the process.

        Raises: OSError, when the program can't be started; PortTaken. Nothing is left then.
        """
        self._emit("component.starting", self.name)
        command = self.plan.command
        if self.plan.ready is not None and self.plan.ready.notify:
            self._notify = NotifySocket(self._is_ours)
            env = {**command.env, "NOTIFY_SOCKET": self._notify.address}
            command = replace(command, env=env)
        self._ports.release(self.name)
        for spec in (self.plan.ready, self.plan.live):
            if spec is not None and (probe := self._probe(spec)) is not None:
                self._refuse_foreign(probe.local_port)
        self.is_launched = True
        self._launched_at, self._launched_monotonic_s = time.time(), time.monotonic()
        pid = await self._holds.launch(self.plan, self.process, command)
        self._parent_pid = tree.parent_of(pid)
        self._emit("component.spawned", self.name, pid=pid, argv=list(command.argv))

    async def until_ready(self) -> None:
        """Wait for the readiness probe's yes.

        Raises: TimeoutError, with the last reason, at the probe's deadline; PortTaken.
        """
        if (ready := self.plan.ready) is not None:
            probe = self._probe(ready)
            assert probe is not None
            reasons = ["no answer yet"]

            def on_no(reason: str) -> None:
                reasons.append(reason)
                self._emit("probe.failed", self.name, reason=reason)

            try:
                async with asyncio.timeout(ready.within_s):
                    await until_yes(probe, every_s=ready.every_s, on_no=on_no)
            except TimeoutError:
                # This process may have been stopped, or starved, when the answer became yes.
                if await probe.ask(_LAST_ASK_S) is not None:
                    raise TimeoutError(reasons[-1]) from None
            self._refuse_foreign(probe.local_port)
        self.is_ready = True
        self._emit("component.ready", self.name, pid=self.process.pid, after_s=self.seconds_alive())

    async def has_last_word(self) -> bool:
        """What a component that has ended left behind, in a log or a file, says it was ready."""
        ready = self.plan.ready
        if ready is None:
            return True
        if not (ready.log or ready.file or ready.notify):
            return False
        probe = self._probe(ready)
        return probe is not None and await probe.ask(1.0) is None

    async def until_unresponsive(self) -> str:
        """Ask the liveness probe for ever.

        Returns: why, once it has missed so often in a row. A cancel ends it.
        """
        live = self.plan.live
        probe = self._probe(live) if live is not None else None
        if live is None or probe is None:
            return await _forever()
        misses = 0
        while True:
            await asyncio.sleep(live.every_s)
            if self.exit is not None:
                return await _forever()
            reason = await probe.ask(live.timeout_s)
            if reason is None:
                misses = 0
                continue
            misses += 1
            self._emit("probe.failed", self.name, reason=reason, misses=misses, probe="live")
            if misses >= live.misses:
                return f"liveness probe missed {misses} times in a row: {reason}"

    async def until_process_lost(self) -> Loss:
        """Watch the processes below it that must stay alive, for ever.

        Returns: the loss of one. A cancel ends it.
        """
        live = self.plan.live
        if live is None or live.processes is None:
            return await _forever()
        loss = await Vigil(
            str(self),
            live.processes,
            lambda: [pid for pid in self._processes() if pid != self.process.pid],
            every_s=live.every_s,
            misses=live.misses,
            on_watched=lambda pid, command: self._emit(
                "process.watched", self.name, pid=pid, command=command
            ),
        ).until_lost()
        exited = self.process.exited
        if self.plan.on_exit_zero != "fail":
            # A component that may leave in good order ends its own processes first.
            if loss.is_orderly:
                await asyncio.wait([exited], timeout=_LEAVES_WITHIN_S)
            if exited.done() and exited.result().is_zero:
                return await _forever()
        return loss

    async def examine(self) -> None:
        """Write down what it hangs in; `end` adds to that what it says at its end."""
        command = self.plan.command
        hung = Hung(
            name=self.name,
            pid=self.process.pid,
            log=command.log,
            stop_signal=command.stop_signal,
            grace_s=command.grace_s,
            processes=self._processes,
            mask=self._mask,
        )
        self._diagnosis = Diagnosis(hung)
        if (report := await self._diagnosis.examine()) is not None:
            self._emit("component.diagnosed", self.name, pid=self.process.pid, path=str(report))

    async def end(self) -> tuple[int, ...]:
        """Stop the process and wait until its whole tree is gone.

        Returns: the pids that SIGKILL did not end; empty when the tree is.
        """
        if not self.is_launched:
            self.process.dismiss()
            if not await self._is_empty_within(_LEAVE_WITHIN_S):
                self.process.abandon_guardian()
                await self._is_empty_within(_KILL_WITHIN_S)
            return ()
        if self._diagnosis is None:
            return await self._end()
        async with self._diagnosis:
            return await self._end()

    async def _end(self) -> tuple[int, ...]:
        self.process.stop()
        is_empty = await self._is_empty_within(self.plan.command.grace_s + _KILL_WITHIN_S)
        # A guardian that works has reported what is stuck by now. One that is itself stopped
        # reports nothing: without it, what it guarded comes to this process, and is ended.
        if not is_empty and not self.process.stuck:
            self.process.abandon_guardian()
            await self._is_empty_within(_KILL_WITHIN_S)
        if self._notify is not None:
            self._notify.close()
        if self.process.empty.done():
            self._holds.release(self.name)
            self._emit("component.stopped", self.name, pid=self.process.pid)
            return ()
        left = self.process.stuck or tuple(tree.descendants(self.process.guardian_pid))
        self._emit("component.stuck", self.name, pid=self.process.pid, pids=left)
        return left or (self.process.guardian_pid,)

    def _processes(self) -> list[int]:
        """Its whole tree; nothing once the guardian is gone, whose pid may be another's then."""
        if not self._guardian.is_alive():
            return []
        # In a PID namespace the guardian is a child of the process that we started.
        found = tree.descendants(self._guardian.pid)
        return [pid for pid in found if pid != self._parent_pid]

    async def _is_empty_within(self, limit_s: float) -> bool:
        done, _ = await asyncio.wait([self.process.empty], timeout=limit_s)
        return bool(done)

    def _probe(self, spec: ReadyProbe | LiveProbe) -> Probe | None:
        """The question of a spec; None for one that watches processes alone."""
        if spec.http is not None:
            return HttpProbe(spec.http, self._client, spec.conditions)
        if spec.address is not None:
            return TcpProbe(*spec.address)
        if spec.log is not None:
            return LogProbe(self.plan.command.log, spec.log)
        if spec.file is not None:
            return FileProbe(self.plan.command.cwd / spec.file, self._launched_at)
        if spec.notify and self._notify is not None:
            return NotifyProbe(self._notify)
        if spec.alive_s is not None:
            return AliveProbe(spec.alive_s, self._launched_monotonic_s)
        return None

    def _refuse_foreign(self, port: int | None) -> None:
        """Raises: PortTaken, when a server that is not of this run answers on the port."""
        if port is None or not is_listened(port):
            return
        # A port that was reserved for another component is that one's to answer on.
        ours = self._own_pids()
        for listener in listeners(port, ours):
            if listener.pid not in ours and self._is_foreign(listener):
                who = (
                    f"pid {listener.pid} ({listener.command})"
                    if listener.pid
                    else "a process of another user"
                )
                raise PortTaken(
                    f"port {port} is held by {who}, which is not of this run: "
                    "end it, or use ${NAME.port} for a free port"
                )

    def _is_foreign(self, listener: Listener) -> bool:
        """Whether a listener outside our tree can't be one that the component has started.

        A container runtime, or a daemon that was asked to, may listen for a component from outside
        its tree. Such a process is younger than the component; and it is in a container, or works
        for one, or carries the run's name. Whatever else is there has taken the port.
        """
        if not self.is_launched:
            return True
        if listener.pid == 0:
            return listener.uid not in (0, os.getuid())
        if listener.start_ticks < tree.start_ticks(self.process.pid or 0):
            return True
        carries_name = listener.run_id == self.plan.command.env.get("MUSTER_RUN_ID")
        return not (carries_name or listener.is_containers)

    def _is_ours(self, pid: int) -> bool:
        return pid in tree.descendants(self.process.guardian_pid)


async def _forever() -> Never:
    """Wait until cancelled."""
    await asyncio.Event().wait()
    raise AssertionError
