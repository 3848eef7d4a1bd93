"""One component of a running attempt: its start, its readiness, its liveness, its end.

What runs it is for the subclasses: a process of this machine, or a job of a cluster.

What a supervisor is to do with one attempt: frozen data, resolved to the last port.

What supervision asks of a job that a cluster runs for a component, whatever the cluster is.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Never, Protocol
from urllib.parse import urlsplit

import httpx

from tasks.processes.child_watch import Loss
from tasks.processes.containment import Containment, Level
from tasks.processes.guarded import Command
from tasks.processes.probes import (
    AliveProbe,
    FileProbe,
    HttpProbe,
    LogProbe,
    Probe,
    TcpProbe,
    until_yes,
)
from tasks.record.causes import read_tail
from tasks.record.events import Emit
from tasks.record.outcome import Exit, JobLoss, JobRefused
from tasks.spec.probes import LiveProbe, ReadyProbe
from tasks.spec.run import OnExitZero, Progress

__all__ = ["JobLoss", "JobRefused", "RemoteJob"]


class RemoteJob(Protocol):
    """One submission to a cluster, from before it is submitted until nothing of it is left.

    Lives in one asyncio loop. Nothing in it blocks that loop.
    """

    #: Resolves once the job is final by the cluster's word, and is never rejected. A signal or an
    #: exit code where the cluster knows it, else neither, with the cluster's reason as the note.
    #: `at_monotonic_s` is the earliest moment at which the job can have ended: what died of its
    #: end must not look as if it had died first.
    exited: asyncio.Future[Exit]

    @property
    def submission_id(self) -> str:
        """By which the cluster knows it."""

    def last_words(self, log_end: str) -> str:
        """What is known of what the job said at its end: the end of its log without what the
        cluster itself wrote there, and the cluster's own word on the end."""

    @property
    def place(self) -> str:
        """Where its driver runs, in words: `node 10.0.0.2`; empty while it runs nowhere."""

    async def launch(self) -> None:
        """Submit it, or attach to it where it was submitted before, and wait until it runs.

        Returns once its driver runs, or it is final. Raises: JobRefused. A cancel leaves it to
        `end`.
        """

    async def until_lost(self) -> JobLoss:
        """Watch a job that was launched, for ever: contact with its cluster, the GPUs that it is
        to take by its start deadline.

        Returns: why it is given up. A cancel ends it.
        """

    def stop(self) -> None:
        """Ask it to end, in its grace period. Returns at once; any number of times."""

    def kill(self) -> None:
        """End it now, without a grace period. Returns at once."""

    async def end(self) -> tuple[str, ...]:
        """Stop it and wait until it is final, its actors are gone, its GPUs are free, no process
        of it is left on any node, and its log is whole.

        Returns: what did not come free in time, by node and pid; empty when all is free. Safe
        after a `launch` that failed or was cancelled, and before any.
        """

    async def let_go(self) -> None:
        """Leave the job running, and stop watching it: the next process attaches to it."""


def _as_it_is(text: str) -> str:
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentPlan:
    """One component: what to start, how to tell that it is ready, what its end means."""

    name: str
    command: Command
    #: None: ready as soon as the program runs.
    ready: ReadyProbe | None
    live: LiveProbe | None
    on_exit_zero: OnExitZero
    #: Makes the job that runs it on a cluster, told where to say what happens to it; None: a
    #: process of this machine runs it.
    make_job: Callable[[Emit], RemoteJob] | None = None
    #: An earlier process of the run may have started it: then it is gone on with.
    is_adopted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
    """One try at a run."""

    run_id: str
    #: From 1.
    number: int
    #: Where relative paths of the run begin; absolute.
    cwd: Path
    #: In the order of their start.
    components: tuple[ComponentPlan, ...]
    progress: Progress | None = None
    #: The step without which the run has not succeeded; None: exit 0 is enough.
    success_step: float | None = None
    #: Seconds without progress and output after which the run has failed; None: never.
    stall_after_s: float | None = None
    #: When it began, UTC epoch seconds; None: now.
    began_at: float | None = None
    #: What holds the attempt's processes.
    containment: Containment = field(default_factory=lambda: Containment(level=Level.L2))
    #: Takes secrets out of a text, before it is written down.
    mask: Callable[[str], str] = _as_it_is

    @property
    def own_questions(self) -> list[str]:
        """What we ask of components, as it stands in the log of one: `GET /health`."""
        asked = [self.progress.http] if self.progress else []
        asked += [component.live.http for component in self.components if component.live]
        return [f"GET {urlsplit(url).path or '/'}" for url in asked if url]

    @property
    def tag(self) -> dict[str, str]:
        """What every process of the attempt carries in its environment."""
        return {"MUSTER_RUN_ID": self.run_id, "MUSTER_ATTEMPT": str(self.number)}


_LAST_ASK_S = 1.0


class PortTaken(Exception):
    """A server that is not of this run listens where the component's answer is expected."""


class Member(ABC):
    """A component from before its start until nothing of it is left."""

    def __init__(self, plan: ComponentPlan, *, client: httpx.AsyncClient, emit: Emit) -> None:
        self.plan = plan
        #: The launch was ordered: from now on there is something to end.
        self.is_launched = False
        self.is_ready = False
        #: It left with exit 0, its part done, while the run goes on.
        self.is_drained = False
        #: It is to blame for a run that stalled, and is examined before it is ended.
        self.is_hung = False
        self.exit: Exit | None = None
        self._client = client
        self._emit = emit
        self._launched_at = 0.0
        self._launched_monotonic_s = 0.0

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    @abstractmethod
    def exited(self) -> asyncio.Future[Exit]:
        """Resolves with its end, once it is launched."""

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """Of its first process; None where that is not on this machine, or not there yet."""

    @property
    def is_pending(self) -> bool:
        """It was launched, and does not run yet: its silence means nothing."""
        return False

    def seconds_alive(self) -> float:
        return time.monotonic() - self._launched_monotonic_s

    @abstractmethod
    async def launch(self) -> None:
        """Start it; in moments, and never cut short.

        Raises: OSError, when it can't be started; PortTaken. Nothing is left then.
        """

    async def until_running(self) -> None:
        """Wait until it runs. Raises: JobRefused. A cancel leaves it to `end`."""
        return

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
        self._emit("component.ready", self.name, pid=self.pid, after_s=self.seconds_alive())

    async def has_last_word(self) -> bool:
        """What a component that has ended left behind, in a log or a file, says it was ready."""
        ready = self.plan.ready
        if ready is None:
            return True
        if not (ready.log or ready.file or ready.notify):
            return False
        probe = self._probe(ready)
        return probe is not None and await probe.ask(_LAST_ASK_S) is None

    async def until_unresponsive(self) -> str:
        """Ask the liveness probe for ever.

        Returns: why, once it has missed so often in a row. A cancel ends it.
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
            misses += 1
            self._emit("probe.failed", self.name, reason=reason, misses=misses, probe="live")
            if misses >= live.misses:
                return f"liveness probe missed {misses} times in a row: {reason}"

    async def until_process_lost(self) -> Loss:
        """Watch the processes below it that must stay alive, for ever. A cancel ends it."""
        return await forever()

    async def until_job_lost(self) -> JobLoss:
        """Watch what only a job can lose, for ever. A cancel ends it."""
        return await forever()

    def last_words(self) -> str:
        """The end of its log, and what else is known of its end."""
        return read_tail(self.plan.command.log)

    async def examine(self) -> None:
        """Write down what it hangs in."""
        return

    @abstractmethod
    def stop(self) -> None:
        """Ask it to end. Returns at once."""

    @abstractmethod
    def kill(self) -> None:
        """End it without a grace period. Returns at once."""

    @abstractmethod
    async def end(self) -> tuple[int | str, ...]:
        """Stop it and wait until nothing of it is left.

        Returns: what can't be ended: pids of this machine, and those of others with their node;
            empty when nothing is left.
        """

    async def let_go(self) -> None:
        """Leave it running, where it is able to without this process; else end it."""
        await self.end()

    def processes(self) -> list[int]:
        """Its processes on this machine."""
        return []

    def _probe(self, spec: ReadyProbe | LiveProbe) -> Probe | None:
        """The question of a spec; None for one that is not answered by asking."""
        if spec.http is not None:
            return HttpProbe(spec.http, self._client, spec.conditions)
        if spec.address is not None:
            return TcpProbe(*spec.address)
        if spec.log is not None:
            return LogProbe(self.plan.command.log, spec.log)
        if spec.file is not None:
            return FileProbe(self.plan.command.cwd / spec.file, self._launched_at)
        if spec.alive_s is not None:
            return AliveProbe(spec.alive_s, self._launched_monotonic_s)
        return None

    def _refuse_foreign(self, port: int | None) -> None:
        """Raises: PortTaken, when a server that is not of this run answers on the port."""
        return


async def forever() -> Never:
    """Wait until cancelled."""
    await asyncio.Event().wait()
    raise AssertionError
