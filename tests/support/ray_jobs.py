"""Ray jobs for one test, and a proxy of the Ray dashboard that can break its connections."""

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

#: Time limit of each wait, in seconds.
WITHIN_S = 60.0


@dataclass(kw_only=True)
class JobEvents:
    """Records the events of a Ray job, and the calls of `sweep`.

    A real job calls `tasks.ray.nodes.sweep`, which searches the nodes for leftover processes. The
    method `sweep` of this class searches no node.
    """

    #: Names and fields of the emitted events, in order.
    events: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    #: Recorded requests to search a cluster for leftover processes. Each item is the address of the
    #: cluster's control store (GCS).
    swept: list[str] = field(default_factory=list)

    def emit(self, name: str, **fields: object) -> None:
        """Record an event."""
        self.events.append((name, fields))

    async def sweep(self, gcs_address: str, **_: object) -> SweepReport:
        """Record the address of the cluster's control store, and check no node."""
        self.swept.append(gcs_address)
        return SweepReport()

    @property
    def names(self) -> list[str]:
        """Names of the recorded events, apart from the events of components."""
        return [name for name, _ in self.events if not name.startswith("component.")]


async def skip_node_preparation(address: str) -> None:
    """Do nothing. Replacement for `tasks.ray.nodes.make_nodes_ready` in tests."""


def make_job(
    plan: JobPlan,
    emit: Callable[..., None],
    sweep: Callable[..., Awaitable[SweepReport]] | None = None,
) -> RayJob:
    """Return a job as the only component of an attempt.

    Args:
        plan: Plan of the job.
        emit: Called with each event of the job.
        sweep: Replacement for the function that checks the nodes for leftover processes after the
            end of the job. With a replacement, the job also skips the preparation of the nodes for
            this check. If None, the job checks the nodes as usual.
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
        job._take_down.sweep = sweep
        job._take_down.make_ready = skip_node_preparation
    return job


class Jobs:
    """Creates the Ray jobs of one test, and finds the processes of their commands."""

    def __init__(self, address: str, directory: Path) -> None:
        """
        Args:
            address: URL of the Ray dashboard.
            directory: Directory for the files of the jobs.
        """
        self.address = address
        self.directory = directory
        #: Records the events of all jobs. Also records when a job asks to search nodes for
        #: leftover processes.
        self.told = JobEvents()
        #: Random value of the environment variable MARK in each job's command. With this value, the
        #: test finds the processes of the commands. Ray's own processes lack the variable.
        self.mark = uuid.uuid4().hex
        self.working_dir = directory / "code"
        self.working_dir.mkdir()
        #: The jobs that were created.
        self._created: list[RayJob] = []

    def plan(self, *argv: str, **fields: Any) -> JobPlan:
        """Return the plan of a job.

        Args:
            *argv: Command line of the job.
            **fields: Fields of `JobPlan` and of its `Command`, in place of the defaults.
        """
        run_id = fields.pop("run_id", f"t-{uuid.uuid4().hex[:8]}")
        place = self.directory / run_id
        defaults: dict[str, Any] = {
            "address": self.address,
            "submission_id": f"{run_id}--a01",
            "run_id": run_id,
            "attempt": 1,
            "component": "trainer",
            "command": Command(
                argv=("env", f"MARK={self.mark}", *argv),
                env=fields.pop("env", {}),
                cwd=self.working_dir,
                log=place / "trainer.log",
                stop_signal=fields.pop("stop_signal", signal.SIGTERM),
                grace_s=fields.pop("grace_s", 2.0),
                save_grace_s=fields.pop("save_grace_s", None),
            ),
            "submission_file": place / "submission.json",
        }
        return JobPlan(**(defaults | fields))

    def job(self, plan: JobPlan) -> RayJob:
        """Return a job with this plan, which is not launched yet."""
        self._created.append(make_job(plan, self.told.emit, self.told.sweep))
        return self._created[-1]

    async def state_of(self, plan: JobPlan) -> JobState | None:
        """Return the state of a job on the cluster, or None if the cluster has no such job."""
        dashboard = Dashboard(plan.address)
        try:
            return await dashboard.job(plan.submission_id)
        finally:
            await dashboard.aclose()

    async def launch(self, *argv: str, **fields: Any) -> tuple[JobPlan, RayJob]:
        """Launch a job, wait until it runs, and return its plan and the job.

        The arguments are those of `plan`.
        """
        plan = self.plan(*argv, **fields)
        job = self.job(plan)
        async with asyncio.timeout(WITHIN_S):
            await job.launch()
            await job.until_running()
        return plan, job

    async def run_to_end(self, *argv: str, **fields: Any) -> tuple[JobPlan, Exit]:
        """Launch a job, wait until it ends by itself, and return its plan and its result.

        The arguments are those of `plan`.
        """
        plan, job = await self.launch(*argv, **fields)
        exit_ = await asyncio.wait_for(job.exited, WITHIN_S)
        assert await job.end() == ()
        return plan, exit_

    def list_processes(self) -> list[int]:
        """Return the ids of all living processes that belong to the commands of the jobs."""
        pids = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    state = (entry / "stat").read_bytes().rpartition(b") ")[2][:1]
                    environ = (entry / "environ").read_bytes()
                    if f"MARK={self.mark}".encode() in environ.split(b"\0") and state != b"Z":
                        pids.append(int(entry.name))
        return pids

    async def clear(self) -> None:
        """End all created jobs that still run."""
        for job in self._created:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(20):
                    await job.end()
            await job.detach()


async def wait_until(condition: Callable[[], object], within_s: float = WITHIN_S) -> None:
    """Wait until a condition is true.

    Raises:
        AssertionError: The condition was not true within `within_s` seconds.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition was not true within {within_s:g} s"
        await asyncio.sleep(0.05)


class BreakableProxy:
    """A TCP proxy in front of a Ray dashboard. A test can stop the proxy and start it again."""

    def __init__(self, target: str) -> None:
        """
        Args:
            target: URL of the dashboard.
        """
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._server: asyncio.Server | None = None
        #: The open connections, both from clients to the proxy and from the proxy to the dashboard.
        self._open: set[asyncio.StreamWriter] = set()
        #: Port of the proxy. 0 before its first start.
        self._port = 0
        #: First bytes of the requests whose answers the proxy drops. The proxy passes these
        #: requests to the dashboard, and then breaks the connection of the client. Empty if the
        #: proxy drops no answers.
        self.swallows = b""
        #: Mapping from method and path to the number of requests that reached the dashboard.
        self.passed: dict[bytes, int] = {}

    @property
    def address(self) -> str:
        """URL of the proxy."""
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Start the proxy. After `stop`, the proxy starts again on the same port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop the proxy: refuse new connections, and break the open connections."""
        assert self._server is not None
        self._server.close()
        for writer in tuple(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass data between one client and the dashboard until one of them disconnects."""
        dashboard_reader, dashboard_writer = await asyncio.open_connection(*self._target)
        self._open |= {writer, dashboard_writer}
        is_answer_lost = False

        async def forward_requests() -> None:
            nonlocal is_answer_lost
            while data := await reader.read(1 << 16):
                line = data.split(b" HTTP", 1)[0]
                self.passed[line] = self.passed.get(line, 0) + 1
                if self.swallows and line.startswith(self.swallows):
                    is_answer_lost = True
                dashboard_writer.write(data)
                await dashboard_writer.drain()

        async def forward_answers() -> None:
            while data := await dashboard_reader.read(1 << 16):
                if is_answer_lost:
                    writer.transport.abort()
                    return
                writer.write(data)
                await writer.drain()

        tasks = [asyncio.create_task(forward_requests()), asyncio.create_task(forward_answers())]
        with contextlib.suppress(OSError):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for open_writer in (writer, dashboard_writer):
            open_writer.transport.abort()
            self._open.discard(open_writer)


@contextlib.asynccontextmanager
async def run_proxy(target: str) -> AsyncIterator[BreakableProxy]:
    """Run a TCP proxy of a Ray dashboard while the context is open.

    Args:
        target: URL of the dashboard.
    """
    wire = BreakableProxy(target)
    await wire.start()
    try:
        yield wire
    finally:
        await wire.stop()


def kill(pid: int) -> None:
    """Send SIGKILL to a process, if it is alive."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)
