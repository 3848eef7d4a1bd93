"""Ray jobs of a test's own, and a wire to their dashboard that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tasks.processes.component import AttemptContext, AttemptPlan, ComponentPlan
from tasks.processes.guarded import Command
from tasks.processes.ports import PortsReserved
from tasks.ray.dashboard import Dashboard, JobState
from tasks.ray.job import RayJob
from tasks.ray.nodes import SweepReport
from tasks.ray.submission import JobPlan
from tasks.record.outcome import Exit

WITHIN_S = 60.0


@dataclass(kw_only=True)
class Told:
    """What a job has told, in order."""

    events: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    #: The control stores that were given to the sweep.
    swept: list[str] = field(default_factory=list)

    def emit(self, name: str, **fields: object) -> None:
        self.events.append((name, fields))

    async def sweep(self, gcs_address: str, **_: object) -> SweepReport:
        self.swept.append(gcs_address)
        return SweepReport()

    @property
    def names(self) -> list[str]:
        """Of what is told of the job itself."""
        return [name for name, _ in self.events if not name.startswith("component.")]


async def as_they_are(address: str) -> None:
    """Makes no nodes ready."""


def make_job(
    plan: JobPlan,
    emit: Callable[..., None],
    sweep: Callable[..., Awaitable[SweepReport]] | None = None,
) -> RayJob:
    """The member of an attempt that has nothing but this job.

    Args:
        sweep: in place of its own; nodes are not made ready for it.
    """
    component = ComponentPlan(
        name=plan.component, command=plan.command, ready=None, live=None, on_exit_zero="complete"
    )
    attempt = AttemptPlan(
        run_id=plan.run_id, number=plan.attempt, cwd=plan.command.cwd, components=(component,)
    )
    context = AttemptContext(attempt, PortsReserved([]), emit, None)
    job = RayJob(component, context, job=plan)
    if sweep is not None:
        job._take_down.sweep, job._take_down.make_ready = sweep, as_they_are
    return job


class Jobs:
    """Makes plans and jobs, whose processes are found by a mark of the test's own."""

    def __init__(self, address: str, directory: Path) -> None:
        self.address = address
        self.directory = directory
        self.told = Told()
        #: In the environment of each command, and not in that of Ray's own processes.
        self.mark = uuid.uuid4().hex
        self.working_dir = directory / "code"
        self.working_dir.mkdir()
        self._made: list[RayJob] = []

    def plan(self, *argv: str, **more: Any) -> JobPlan:
        run_id = more.pop("run_id", f"t-{uuid.uuid4().hex[:8]}")
        place = self.directory / run_id
        wanted: dict[str, Any] = {
            "address": self.address,
            "submission_id": f"{run_id}--a01",
            "run_id": run_id,
            "attempt": 1,
            "component": "trainer",
            "command": Command(
                argv=("env", f"MARK={self.mark}", *argv),
                env=more.pop("env", {}),
                cwd=self.working_dir,
                log=place / "trainer.log",
                stop_signal=more.pop("stop_signal", signal.SIGTERM),
                grace_s=more.pop("grace_s", 2.0),
            ),
            "submission_file": place / "submission.json",
        }
        return JobPlan(**(wanted | more))

    def job(self, plan: JobPlan) -> RayJob:
        self._made.append(make_job(plan, self.told.emit, self.told.sweep))
        return self._made[-1]

    async def state_of(self, plan: JobPlan) -> JobState | None:
        """What the cluster says of a job."""
        dashboard = Dashboard(plan.address)
        try:
            return await dashboard.job(plan.submission_id)
        finally:
            await dashboard.aclose()

    async def launched(self, *argv: str, **more: Any) -> tuple[JobPlan, RayJob]:
        plan = self.plan(*argv, **more)
        job = self.job(plan)
        async with asyncio.timeout(WITHIN_S):
            await job.launch()
            await job.until_running()
        return plan, job

    async def ended(self, *argv: str, **more: Any) -> tuple[JobPlan, Exit]:
        """A job that ends by itself, and how it did."""
        plan, job = await self.launched(*argv, **more)
        exit_ = await asyncio.wait_for(job.exited, WITHIN_S)
        assert await job.end() == ()
        return plan, exit_

    def marked(self) -> list[int]:
        """The living processes of the commands."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    state = (entry / "stat").read_bytes().rpartition(b") ")[2][:1]
                    environ = (entry / "environ").read_bytes()
                    if f"MARK={self.mark}".encode() in environ.split(b"\0") and state != b"Z":
                        found.append(int(entry.name))
        return found

    async def clear(self) -> None:
        """End what a test has left."""
        for job in self._made:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(20):
                    await job.end()
            await job.let_go()


async def until(is_so: Callable[[], object], within_s: float = WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.05)


class Wire:
    """A TCP proxy before a dashboard."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._port = 0
        #: While set, what begins so reaches the dashboard, and its answer is lost.
        self.swallows = b""
        #: How often a request reached the dashboard that begins so.
        self.passed: dict[bytes, int] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Refuse connections, and break those that are open."""
        assert self._server is not None
        self._server.close()
        for writer in tuple(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._open |= {writer, far_writer}
        is_swallowed = False

        async def there() -> None:
            nonlocal is_swallowed
            while data := await reader.read(1 << 16):
                line = data.split(b" HTTP", 1)[0]
                self.passed[line] = self.passed.get(line, 0) + 1
                if self.swallows and line.startswith(self.swallows):
                    is_swallowed = True
                far_writer.write(data)
                await far_writer.drain()

        async def back() -> None:
            while data := await far_reader.read(1 << 16):
                if is_swallowed:
                    writer.transport.abort()
                    return
                writer.write(data)
                await writer.drain()

        tasks = [asyncio.create_task(there()), asyncio.create_task(back())]
        with contextlib.suppress(OSError):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in (writer, far_writer):
            end.transport.abort()
            self._open.discard(end)


@contextlib.asynccontextmanager
async def wire_to(target: str) -> AsyncIterator[Wire]:
    wire = Wire(target)
    await wire.mend()
    try:
        yield wire
    finally:
        await wire.cut()


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)
