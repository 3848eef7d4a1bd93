"""Series of the queue on a real Prefect server: scheduling passes, and the use of resources.

No waiting run can start: another run holds the only node whose host has a worker. The series are
measured on SQLite and, if it is installed, on PostgreSQL.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.queue.grants import Grant
from tasks.queue.nodes import Capacity
from tasks.queue.scheduler import Scheduler
from tests.benchmarks.footprint import cpu_ns, memory_mb, tree_of
from tests.benchmarks.limits_series import By, database_mb, server_pid
from tests.benchmarks.report import Missing, Row, say
from tests.support.gang_pool import GangPool, gang_pool
from tests.support.host_environment import Server, wait_for
from tests.support.postgres import explain_missing_postgres, postgres

_WAITING, _QUICK_WAITING = (200, 1_000, 5_000), (20, 60)
_RUNNING, _QUICK_RUNNING = (10, 100, 500), (5, 20)
#: Number of scheduling passes that are timed for each row of the results.
_PASSES, _QUICK_PASSES = 20, 3
#: Number of waiting runs that cannot start. Behind them in the queue is a run that can start.
_HIDING, _QUICK_HIDING = 1_000, 60
#: Number of nodes of the cluster.
_NODES = 512
#: Name of the only node with a worker.
_SERVED = "n000"
_GPUS = 8
#: Time that a new worker gets to read all waiting runs, in seconds. After this time, the memory of
#: the worker is measured.
_SETTLE_S, _QUICK_SETTLE_S = 30.0, 5.0
#: Pause before a rejected request is repeated, in seconds. A busy server rejects requests with
#: status 503.
_BUSY_AGAIN_S = 0.2
_SQLITE, _POSTGRES = "SQLite", "PostgreSQL"


def rows(*, quick: bool) -> tuple[list[Row], list[Missing]]:
    """Measure the queue at different loads.

    Returns:
        Rows for the table of results; rows that could not be measured, each with the reason.
    """
    measured = [*_on(_SQLITE, quick=quick), *_runs_behind_blocked_runs(quick=quick)]
    missing = []
    if reason := explain_missing_postgres():
        missing.append(Missing(way=f"the queue on {_POSTGRES}", why=reason))
    else:
        measured += _on(_POSTGRES, quick=quick)
    return measured, missing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Environment of a measurement: a queue with its own Prefect server."""

    #: Work pool with its server.
    pool: GangPool
    #: Name of the server's database.
    database: str
    #: Returns the current size of the database on disk, in MB.
    database_mb: Callable[[], float]
    #: True if only few samples are taken.
    quick: bool

    @property
    def server_pid(self) -> int:
        """Process id of the Prefect server."""
        return server_pid(self.pool.host_env.api)


def _on(database: str, *, quick: bool) -> Iterator[Row]:
    """Measure the queue at different loads on a Prefect server with this database."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        if database == _POSTGRES:
            postgres_server = stack.enter_context(postgres())
            url = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": postgres_server.url}
            server = Server(place / "server", settings=url)
            size = "select pg_database_size(current_database())"

            def size_mb() -> float:
                return int(postgres_server.query(size)) / 1e6
        else:
            server = Server(place / "server")

            def size_mb() -> float:
                return database_mb(place)

        nodes = {f"n{number:03}": _GPUS for number in range(_NODES)}
        pool = stack.enter_context(gang_pool(place, nodes=nodes, server=server))
        client = httpx.Client(base_url=pool.host_env.api, trust_env=False, timeout=90)
        runs = WaitingRuns(pool, stack.enter_context(client))
        yield from _series(
            _Stage(pool=pool, database=database, database_mb=size_mb, quick=quick), runs
        )


def _series(stage: _Stage, runs: WaitingRuns) -> Iterator[Row]:
    """Measure how much time and memory the queue needs, and yield the rows of the results.

    The load is first a growing number of waiting runs, then a growing number of running runs.
    """
    runs.hold(_SERVED)
    for count in _QUICK_WAITING if stage.quick else _WAITING:
        say(f"    {count:,} waiting, {stage.database}")
        by = By(what=f"runs waiting on {stage.database}", count=count)
        yield by.row("server, runs submitted", runs.grow_to(count), "per second")
        yield from _passes(stage, by)
        yield by.row("server, RSS", memory_mb(stage.server_pid)[0], "MB")
        yield by.row("server, database", stage.database_mb(), "MB")
        yield from _worker(stage, by)
    held = 1
    for count in _QUICK_RUNNING if stage.quick else _RUNNING:
        say(f"    {count:,} running, {stage.database}")
        for number in range(held, count):
            runs.hold(f"n{number:03}")
        held = count
        yield from _passes(stage, By(what=f"runs running on {stage.database}", count=count))


class WaitingRuns:
    """Flow runs that are created on the Prefect server as fast as the server accepts them."""

    def __init__(self, pool: GangPool, client: httpx.Client, **fields: Any) -> None:
        """
        Args:
            pool: Work pool of the runs.
            client: HTTP client of the Prefect API.
            fields: Further arguments of `pool.spec` for all runs.
        """
        self._client = client
        self._flow = self._ask("POST", "/flows/", {"name": "train"})["id"]
        self._deployment = self._ask("GET", f"/deployments/name/train/{pool.name}")["id"]
        self._spec = pool.spec(gpus=_GPUS, **fields)
        self._count = 0

    def grow_to(self, count: int) -> float:
        """Submit runs until `count` runs exist.

        Returns:
            The number of runs that the server accepted per second.
        """
        began = time.monotonic()
        for _ in range(self._count, count):
            self._ask(
                "POST",
                f"/deployments/{self._deployment}/create_flow_run",
                {"parameters": {"spec": self._spec}, "enforce_parameter_schema": False},
            )
        rate = (count - self._count) / (time.monotonic() - began)
        self._count = count
        return rate

    def have_reasons(self) -> bool:
        """Return True if the state of each run gives the reason for waiting."""
        waits = {"state": {"name": {"any_": ["PendingResources"]}}}
        return bool(self._ask("POST", "/flow_runs/count", {"flow_runs": waits}) >= self._count)

    def hold(self, node: str) -> None:
        """Create a flow run in the state RUNNING that holds all GPUs of a node.

        The flow run has no process.
        """
        gang = {"nodes": 1, "gpus_per_node": _GPUS, "hours": 1}
        content = {
            "flow_id": self._flow,
            "name": f"holder-{node}",
            "parameters": {"spec": {"name": f"holder-{node}", "gang": gang}},
            "labels": Grant(nodes={node: _GPUS}).label(),
            "state": {"type": "RUNNING"},
        }
        self._ask("POST", "/flow_runs/", content)

    def _ask(self, method: str, path: str, content: Mapping[str, Any] | None = None) -> Any:
        """Send a request to the Prefect API, and repeat it while the server is too busy.

        The function in tests/support/prefect_api.py creates a new client for each request, which
        would be too slow here.
        """
        while True:
            response = self._client.request(method, path, json=content)
            if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                response.raise_for_status()
                return response.json()
            time.sleep(_BUSY_AGAIN_S)


def _passes(stage: _Stage, by: By) -> Iterator[Row]:
    """Measure scheduling passes that admit no run, so that each pass has the same queue."""
    server = tree_of(stage.server_pid)
    used_before = cpu_ns(server)
    with temporary_settings({PREFECT_API_URL: stage.pool.host_env.api}):
        count = _QUICK_PASSES if stage.quick else _PASSES
        each_ms, own_ms = asyncio.run(time_passes(stage.pool, count))
        server_ms = (cpu_ns(server) - used_before) / 1e6 / len(each_ms)
        each_with_events_ms, _own_ms = asyncio.run(time_passes(stage.pool, count, changed=()))
    yield by.row("scheduler, a pass", each_ms, "ms")
    yield by.row("scheduler, a pass, if events report no change", each_with_events_ms, "ms")
    yield by.row("scheduler, its own CPU per pass", own_ms, "ms")
    yield by.row("server, CPU per pass", server_ms, "ms")


async def time_passes(
    pool: GangPool, count: int, *, changed: tuple[UUID, ...] | None = None, every_s: float = 0.0
) -> tuple[list[float], float]:
    """Measure scheduling passes that admit no run, so that each pass has the same queue.

    Args:
        pool: Work pool of the queue.
        count: Number of passes.
        changed: Ids of the flow runs that have changed since the last pass, according to events.
            None if the scheduler gets no events. The scheduler then reads all runs in each pass.
        every_s: Shortest time from the beginning of a pass to the beginning of the next, in
            seconds.

    Returns:
        The duration of each pass, and the CPU time of this process per pass, in milliseconds.
    """
    each_ms = []
    capacity = Capacity()
    async with get_client() as client:
        worker = (pool.name, _SERVED)
        scheduler = Scheduler(client, capacity=capacity, home=pool.host_env.home, worker=worker)
        await scheduler.decide(lambda entry, nodes: True)
        used_before = time.process_time()
        for _ in range(count):
            began = time.perf_counter()
            result, granted = await scheduler.decide(lambda entry, nodes: True, changed=changed)
            each_ms.append(1000 * (time.perf_counter() - began))
            assert result.queue and not granted, (len(result.queue), granted)
            await asyncio.sleep(max(0.0, every_s - each_ms[-1] / 1000))
        own_ms = 1000 * (time.process_time() - used_before) / count
    await capacity.close()
    return each_ms, own_ms


def _worker(stage: _Stage, by: By) -> Iterator[Row]:
    """Start a worker that reads all waiting runs from the server, and measure its memory."""
    worker = stage.pool.start_worker(f"worker-{by.count}@{_SERVED}")
    try:
        time.sleep(_QUICK_SETTLE_S if stage.quick else _SETTLE_S)
        yield by.row("worker, RSS", memory_mb(worker.pid)[0], "MB")
    finally:
        worker.terminate()
        worker.wait()


def _runs_behind_blocked_runs(*, quick: bool) -> Iterator[Row]:
    """Measure how soon a run becomes PENDING if no run before it in the queue can start."""
    count = _QUICK_HIDING if quick else _HIDING
    by = By(what="runs of a tag at its limit before it", count=count)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        free = {_SERVED: 2 * _GPUS}
        pool = stack.enter_context(gang_pool(place, nodes=free, limits={"red": _GPUS}))
        client = httpx.Client(base_url=pool.host_env.api, trust_env=False, timeout=90)
        runs = WaitingRuns(pool, stack.enter_context(client), tags=["red"])
        pool.hold({_SERVED: _GPUS}, tags=["red"])
        worker = pool.start_worker()
        stack.callback(worker.wait)
        stack.callback(worker.terminate)
        spec = pool.spec(gpus=_GPUS, lasts_s=0.1)
        process, waiter = pool.start(pool.spec(gpus=2 * _GPUS))
        wait_for(lambda: "in line" in pool.host_env.log("train"), f"{waiter.name} waits")
        process.kill()
        times_s = [_wait_until_pending(pool, spec, time.monotonic())]
        yield by.row("a run behind a waiter that was killed, to PENDING", times_s, "s")
        pool.set_state(waiter, "CRASHED")
        runs.grow_to(count)
        wait_for(runs.have_reasons, "all waiting runs have a reason", 900)
        times_s = [_wait_until_pending(pool, spec, time.monotonic()) for _ in range(_QUICK_PASSES)]
        yield by.row("a run that may start, submitted to PENDING", times_s, "s")


def _wait_until_pending(pool: GangPool, spec: Mapping[str, Any], since: float) -> float:
    """Submit a run, and return the seconds from `since` until the run is PENDING.

    The function returns after the run has completed.
    """
    run = pool.submit(spec)
    wait_for(lambda: run.state()[0] != "SCHEDULED", f"{run.name} starts", 120)
    took_s = time.monotonic() - since
    run.wait_for_state("COMPLETED")
    return took_s
