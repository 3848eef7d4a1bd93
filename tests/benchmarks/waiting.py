"""Benchmark of the CPU use of the Prefect server and of workers while no waiting run can start."""

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
from tests.benchmarks.limits_queue import WaitingRuns, time_passes
from tests.benchmarks.limits_series import server_pid
from tests.benchmarks.report import Result, Row, say
from tests.support.gang_pool import gang_pool

_SERVED, _GPUS, _WORKERS = "n000", 8, 4
#: Number of time windows in which the CPU use is measured for each row of the results.
_WINDOWS = 3
#: Seconds between two scheduling passes of a worker.
_PASS_EVERY_S = 2.0


def measure(*, quick: bool) -> Result:
    """Measure the CPU use of the Prefect server with no worker, one worker and several workers."""
    count, settle_s, window_s = (60, 5.0, 2.0) if quick else (1_000, 45.0, 20.0)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        nodes = {f"n{number:03}": _GPUS for number in range(512)}
        pool = stack.enter_context(gang_pool(place, nodes=nodes))
        client = httpx.Client(base_url=pool.host_env.api, trust_env=False, timeout=90)
        runs = WaitingRuns(pool, stack.enter_context(client))
        runs.hold(_SERVED)
        runs.grow_to(count)
        server = tree_of(server_pid(pool.host_env.api))

        def measure_server() -> list[float]:
            """Return the CPU use of the server in each window, in percent of a core."""
            return [cpu_percent({"": server}, window_s)[""] for _ in range(_WINDOWS)]

        say("  without a worker")
        without_worker = measure_server()
        with ExitStack() as workers:
            used: dict[int, list[float]] = {}
            for number in range(1, _WORKERS + 1):
                worker = pool.start_worker(f"worker-{number}@{_SERVED}")
                workers.callback(worker.wait)
                workers.callback(worker.terminate)
                if number in (1, _WORKERS):
                    say(f"  {number} workers")
                    time.sleep(settle_s)
                    used[number] = measure_server()
                if number == 1:
                    worker_percent = cpu_percent({"": tree_of(worker.pid)}, window_s)[""]
                    worker_mb = memory_mb(worker.pid)[1]
                    fork_server_mb = sum(memory_mb(pid)[1] for pid in tree.children(worker.pid))
        say("  all runs read in each pass")
        with_full_reads = []
        with temporary_settings({PREFECT_API_URL: pool.host_env.api}):
            for _ in range(_WINDOWS):
                cpu_before_ns = cpu_ns(server)
                began_ns = time.monotonic_ns()
                passes = max(1, int(window_s / _PASS_EVERY_S))
                asyncio.run(time_passes(pool, passes, every_s=_PASS_EVERY_S))
                used_ns = cpu_ns(server) - cpu_before_ns
                with_full_reads.append(100 * used_ns / (time.monotonic_ns() - began_ns))
    server_title = f"the server, {count:,} waiting"
    return Result(
        name="waiting",
        question="CPU use of the Prefect server and of a worker, in % of one core, while runs wait "
        "in the queue and cannot start",
        rows=[
            Row(way=f"Muster: {server_title}, one worker", values=used[1], unit="%"),
            Row(
                way=f"{server_title}, read at each pass",
                values=with_full_reads,
                unit="%",
                how="modelled",
            ),
            Row(
                way=f"Muster: {server_title}, {_WORKERS} workers",
                values=used[_WORKERS],
                unit="%",
            ),
            Row(
                way=f"{server_title}, no worker",
                values=without_worker,
                unit="%",
                is_detail=True,
            ),
            Row(way="Muster: the worker", values=[worker_percent], unit="%", is_detail=True),
            Row(way="the worker, memory (PSS)", values=[worker_mb], unit="MB", is_detail=True),
            Row(
                way="the fork server, memory (PSS)",
                values=[fork_server_mb],
                unit="MB",
                is_detail=True,
            ),
        ],
    )
