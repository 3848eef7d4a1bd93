"""A component that a cluster runs as a job.

What runs a component, by its plan: a process of this machine, or a job of a cluster.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

import httpx

from tasks.processes.component import ComponentPlan, JobLoss, Member, RemoteJob
from tasks.processes.ports import PortsReserved
from tasks.processes.process_component import Holds, ProcessMember
from tasks.record.events import Emit
from tasks.record.outcome import Exit

#: A log that is on its way from another node comes later than the news of its job's end.
_LOG_WITHIN_S = 5.0
_LOOK_EVERY_S = 0.2


class JobMember(Member):
    """A component and its job, from before its submission until its GPUs are free again."""

    def __init__(
        self,
        plan: ComponentPlan,
        job: RemoteJob,
        *,
        holds: Holds,
        ports: PortsReserved,
        client: httpx.AsyncClient,
        emit: Emit,
    ) -> None:
        super().__init__(plan, client=client, emit=emit)
        self.job = job
        self._holds = holds
        self._ports = ports
        self._launching: asyncio.Task[None] | None = None
        self._runs = False

    def __str__(self) -> str:
        return f"{self.name} (job {self.job.submission_id})"

    @property
    def exited(self) -> asyncio.Future[Exit]:
        return self.job.exited

    @property
    def pid(self) -> int | None:
        return None

    @property
    def is_pending(self) -> bool:
        return self.is_launched and not self._runs and self.exit is None

    async def launch(self) -> None:
        """Have it submitted, or attached to; `until_running` tells what came of it.

        Raises: OSError, when the registry can't be written: nothing is submitted then.
        """
        self._emit("component.starting", self.name)
        self._ports.release(self.name)
        self._holds.enter_job(self.plan, self.job.submission_id)
        self.is_launched = True
        self._launched_at, self._launched_monotonic_s = time.time(), time.monotonic()
        self._emit(
            "component.spawned",
            self.name,
            pid=None,
            submission_id=self.job.submission_id,
            argv=list(self.plan.command.argv),
            is_adopted=self.plan.is_adopted,
        )
        self._launching = asyncio.create_task(self.job.launch())

    async def until_running(self) -> None:
        assert self._launching is not None
        await self._launching
        self._runs = True
        # What is asked of its age counts from here: it may have waited for long.
        self._launched_monotonic_s = time.monotonic()

    async def has_last_word(self) -> bool:
        deadline = time.monotonic() + _LOG_WITHIN_S
        while not await super().has_last_word():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_LOOK_EVERY_S)
        return True

    async def until_job_lost(self) -> JobLoss:
        return await self.job.until_lost()

    def last_words(self) -> str:
        return self.job.last_words(super().last_words())

    def stop(self) -> None:
        self.job.stop()

    def kill(self) -> None:
        self.job.kill()

    async def let_go(self) -> None:
        """Leave the job to the run's next process."""
        await self._stop_launching()
        await self.job.let_go()

    async def end(self) -> tuple[int | str, ...]:
        if not self.is_launched:
            return ()
        await self._stop_launching()
        left = await self.job.end()
        if left:
            self._emit("component.stuck", self.name, pid=None, pids=left)
            return left
        self._holds.release(self.name)
        self._emit("component.stopped", self.name, pid=None)
        return ()

    async def _stop_launching(self) -> None:
        if self._launching is not None:
            self._launching.cancel()
            await asyncio.wait([self._launching])
            if not self._launching.cancelled():
                # Why it was refused is known by now to whoever waited for it.
                self._launching.exception()


def make_member(
    plan: ComponentPlan,
    *,
    holds: Holds,
    ports: PortsReserved,
    client: httpx.AsyncClient,
    emit: Emit,
    own_pids: Callable[[], set[int]],
    mask: Callable[[str], str],
) -> Member:
    """A component that is ready to start.

    Args:
        own_pids: every process of the attempt on this machine.
        mask: takes secrets out of a text.

    Raises: OSError, when its guardian can't be started.
    """
    if plan.make_job is not None:
        job = plan.make_job(partial(emit, component=plan.name))
        return JobMember(plan, job, holds=holds, ports=ports, client=client, emit=emit)
    return ProcessMember(
        plan,
        holds.prepare(plan),
        holds=holds,
        ports=ports,
        client=client,
        emit=emit,
        own_pids=own_pids,
        mask=mask,
    )
