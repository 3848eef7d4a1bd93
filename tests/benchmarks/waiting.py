"""What a line of waiting runs that does not move costs the Prefect server, and a worker."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.processes import tree
from tests.benchmarks.footprint import cpu_ns, cpu_percent, memory_mb, tree_of
from tests.benchmarks.limits_queue import Line, looked
from tests.benchmarks.limits_series import server_pid
from tests.benchmarks.report import Result, Row, say
from tests.support.gang_pool import gang_pool

_SERVED, _GPUS, _WORKERS = "n000", 8, 4
_WINDOWS = 3
#: As a worker does.
_LOOK_EVERY_S = 2.0


def measure(*, quick: bool) -> Result:
    count, settle_s, window_s = (60, 5.0, 2.0) if quick else (1_000, 45.0, 20.0)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        nodes = {f"n{number:03}": _GPUS for number in range(512)}
        pool = stack.enter_context(gang_pool(place, nodes=nodes))
        client = httpx.Client(base_url=pool.ground.api, trust_env=False, timeout=90)
        line = Line(pool, stack.enter_context(client))
        line.hold(_SERVED)
        line.grown_to(count)
        server = tree_of(server_pid(pool.ground.api))

        def windows() -> list[float]:
            return [cpu_percent({"": server}, window_s)[""] for _ in range(_WINDOWS)]

        say("  without a worker")
        alone = windows()
        with ExitStack() as workers:
            used: dict[int, list[float]] = {}
            for number in range(1, _WORKERS + 1):
                worker = pool.start_worker(f"worker-{number}@{_SERVED}")
                workers.callback(worker.wait)
                workers.callback(worker.terminate)
                if number in (1, _WORKERS):
                    say(f"  {number} workers")
                    time.sleep(settle_s)
                    used[number] = windows()
                if number == 1:
                    own = cpu_percent({"": tree_of(worker.pid)}, window_s)[""]
                    memory = memory_mb(worker.pid)[1]
                    zygote = sum(memory_mb(pid)[1] for pid in tree.children(worker.pid))
        say("  read at each look")
        read = []
        with temporary_settings({PREFECT_API_URL: pool.ground.api}):
            for _ in range(_WINDOWS):
                before, began = cpu_ns(server), time.monotonic_ns()
                looks = max(1, int(window_s / _LOOK_EVERY_S))
                asyncio.run(looked(pool, looks, every_s=_LOOK_EVERY_S))
                read.append(100 * (cpu_ns(server) - before) / (time.monotonic_ns() - began))
    what = f"the server, {count:,} waiting"
    return Result(
        name="waiting",
        question="a line of runs that does not move: the server's CPU and a worker's, of a core",
        rows=[
            Row(way=f"Muster: {what}, one worker", values=used[1], unit="%"),
            Row(way=f"{what}, read at each look", values=read, unit="%", how="modelled"),
            Row(way=f"Muster: {what}, {_WORKERS} workers", values=used[_WORKERS], unit="%"),
            Row(way=f"{what}, no worker", values=alone, unit="%", is_detail=True),
            Row(way="Muster: the worker", values=[own], unit="%", is_detail=True),
            Row(way="the worker, memory (PSS)", values=[memory], unit="MB", is_detail=True),
            Row(way="its zygote, memory (PSS)", values=[zygote], unit="MB", is_detail=True),
        ],
    )
