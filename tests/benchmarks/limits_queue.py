"""The queue on a real server: a gate's look, and what the server and a worker take.

The line does not move: one run holds the only node whose host has workers. On SQLite, and where it
is installed on PostgreSQL.
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

from tasks.queue.gate import Gate
from tasks.queue.grants import Grant
from tasks.queue.nodes import Capacity
from tests.benchmarks.footprint import cpu_ns, memory_mb, tree_of
from tests.benchmarks.limits_series import By, database_mb, server_pid
from tests.benchmarks.report import Missing, Row, say
from tests.support.gang_pool import GangPool, gang_pool
from tests.support.ground import Server, until
from tests.support.postgres import postgres, why_no_postgres

_WAITING, _QUICK_WAITING = (200, 1_000, 5_000), (20, 60)
_RUNNING, _QUICK_RUNNING = (10, 100, 500), (5, 20)
_LOOKS, _QUICK_LOOKS = 20, 3
_HIDING, _QUICK_HIDING = 1_000, 60
_NODES = 512
_SERVED = "n000"
_GPUS = 8
#: By then a worker has told the runs that are looked at why they wait.
_SETTLE_S, _QUICK_SETTLE_S = 30.0, 5.0
_BUSY_AGAIN_S = 0.2
_SQLITE, _POSTGRES = "SQLite", "PostgreSQL"


def rows(*, quick: bool) -> tuple[list[Row], list[Missing]]:
    found = [*_on(_SQLITE, quick=quick), *_not_held_up(quick=quick)]
    missing = []
    if why := why_no_postgres():
        missing.append(Missing(way=f"the queue on {_POSTGRES}", why=why))
    else:
        found += _on(_POSTGRES, quick=quick)
    return found, missing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A queue on a server of its own."""

    pool: GangPool
    #: The server's database.
    database: str
    #: What that takes on disk now.
    database_mb: Callable[[], float]
    quick: bool

    @property
    def server_pid(self) -> int:
        return server_pid(self.pool.ground.api)


def _on(database: str, *, quick: bool) -> Iterator[Row]:
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        if database == _POSTGRES:
            postgres_server = stack.enter_context(postgres())
            url = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": postgres_server.url}
            server = Server(place / "server", settings=url)
            size = "select pg_database_size(current_database())"

            def taken_mb() -> float:
                return int(postgres_server.query(size)) / 1e6
        else:
            server = Server(place / "server")

            def taken_mb() -> float:
                return database_mb(place)

        nodes = {f"n{number:03}": _GPUS for number in range(_NODES)}
        pool = stack.enter_context(gang_pool(place, nodes=nodes, server=server))
        client = httpx.Client(base_url=pool.ground.api, trust_env=False, timeout=90)
        line = Line(pool, stack.enter_context(client))
        yield from _series(
            _Stage(pool=pool, database=database, database_mb=taken_mb, quick=quick), line
        )


def _series(stage: _Stage, line: Line) -> Iterator[Row]:
    line.hold(_SERVED)
    for count in _QUICK_WAITING if stage.quick else _WAITING:
        say(f"    {count:,} waiting, {stage.database}")
        by = By(what=f"runs waiting on {stage.database}", count=count)
        yield by.row("server, runs submitted", line.grown_to(count), "a second")
        yield from _looks(stage, by)
        yield by.row("server, RSS", memory_mb(stage.server_pid)[0], "MB")
        yield by.row("server, database", stage.database_mb(), "MB")
        yield from _worker(stage, by)
    held = 1
    for count in _QUICK_RUNNING if stage.quick else _RUNNING:
        say(f"    {count:,} running, {stage.database}")
        for number in range(held, count):
            line.hold(f"n{number:03}")
        held = count
        yield from _looks(stage, By(what=f"runs running on {stage.database}", count=count))


class Line:
    """Flow runs, made as fast as the server takes them."""

    def __init__(self, pool: GangPool, client: httpx.Client, **more: Any) -> None:
        self._client = client
        self._flow = self._ask("POST", "/flows/", {"name": "train"})["id"]
        self._deployment = self._ask("GET", f"/deployments/name/train/{pool.name}")["id"]
        self._spec = pool.spec(gpus=_GPUS, **more)
        self._count = 0

    def grown_to(self, count: int) -> float:
        """How many a second were taken meanwhile."""
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

    def is_told(self) -> bool:
        """Whether each of them says why it waits."""
        waits = {"state": {"name": {"any_": ["PendingResources"]}}}
        return bool(self._ask("POST", "/flow_runs/count", {"flow_runs": waits}) >= self._count)

    def hold(self, node: str) -> None:
        """A run that has a node, as far as the server can tell."""
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
        """See tests/support/prefect_api.py, which makes a client each time."""
        while True:
            answer = self._client.request(method, path, json=content)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                answer.raise_for_status()
                return answer.json()
            time.sleep(_BUSY_AGAIN_S)


def _looks(stage: _Stage, by: By) -> Iterator[Row]:
    """Of a gate that finds nothing to do."""
    server = tree_of(stage.server_pid)
    used_before = cpu_ns(server)
    with temporary_settings({PREFECT_API_URL: stage.pool.ground.api}):
        looks = _QUICK_LOOKS if stage.quick else _LOOKS
        each_ms, own_ms = asyncio.run(looked(stage.pool, looks))
        server_ms = (cpu_ns(server) - used_before) / 1e6 / len(each_ms)
        told_ms, _own_ms = asyncio.run(looked(stage.pool, looks, changed=()))
    yield by.row("gate, a look", each_ms, "ms")
    yield by.row("gate, a look, where events tell of no change", told_ms, "ms")
    yield by.row("gate, its own CPU of a look", own_ms, "ms")
    yield by.row("server, CPU of a look", server_ms, "ms")


async def looked(
    pool: GangPool, looks: int, *, changed: tuple[UUID, ...] | None = None, every_s: float = 0.0
) -> tuple[list[float], float]:
    """How long each took, in ms, and this process's own CPU of each.

    Args:
        changed: None: the line is read each time.
    """
    each_ms = []
    capacity = Capacity()
    async with get_client() as client:
        worker = (pool.name, _SERVED)
        gate = Gate(client, capacity=capacity, home=pool.ground.home, worker=worker)
        await gate.decide(lambda entry, nodes: True)
        used_before = time.process_time()
        for _ in range(looks):
            began = time.perf_counter()
            look, granted = await gate.decide(lambda entry, nodes: True, changed=changed)
            each_ms.append(1000 * (time.perf_counter() - began))
            assert look.line and not granted, (len(look.line), granted)
            await asyncio.sleep(max(0.0, every_s - each_ms[-1] / 1000))
        own_ms = 1000 * (time.process_time() - used_before) / looks
    await capacity.close()
    return each_ms, own_ms


def _worker(stage: _Stage, by: By) -> Iterator[Row]:
    worker = stage.pool.start_worker(f"worker-{by.count}@{_SERVED}")
    try:
        time.sleep(_QUICK_SETTLE_S if stage.quick else _SETTLE_S)
        yield by.row("worker, RSS", memory_mb(worker.pid)[0], "MB")
    finally:
        worker.terminate()
        worker.wait()


def _not_held_up(*, quick: bool) -> Iterator[Row]:
    """How long a run that may start waits behind others that may not, until it is PENDING."""
    count = _QUICK_HIDING if quick else _HIDING
    by = By(what="runs of a tag at its limit before it", count=count)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        free = {_SERVED: 2 * _GPUS}
        pool = stack.enter_context(gang_pool(place, nodes=free, limits={"red": _GPUS}))
        client = httpx.Client(base_url=pool.ground.api, trust_env=False, timeout=90)
        line = Line(pool, stack.enter_context(client), tags=["red"])
        pool.hold({_SERVED: _GPUS}, tags=["red"])
        worker = pool.start_worker()
        stack.callback(worker.wait)
        stack.callback(worker.terminate)
        spec = pool.spec(gpus=_GPUS, lasts_s=0.1)
        process, waiter = pool.start(pool.spec(gpus=2 * _GPUS))
        until(lambda: "in line" in pool.ground.log("train"), f"{waiter.name} waits")
        process.kill()
        took = [_until_pending(pool, spec, time.monotonic())]
        yield by.row("a run behind a waiter that was killed, to PENDING", took, "s")
        pool.set_state(waiter, "CRASHED")
        line.grown_to(count)
        until(line.is_told, "all that are looked at know why they wait", 900)
        took = [_until_pending(pool, spec, time.monotonic()) for _ in range(_QUICK_LOOKS)]
        yield by.row("a run that may start, submitted to PENDING", took, "s")


def _until_pending(pool: GangPool, spec: Mapping[str, Any], since: float) -> float:
    run = pool.submit(spec)
    until(lambda: run.state()[0] != "SCHEDULED", f"{run.name} starts", 120)
    took = time.monotonic() - since
    run.until_state("COMPLETED")
    return took
