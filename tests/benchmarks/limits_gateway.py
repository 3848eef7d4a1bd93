"""Series of the gateway: memory by its servers and requests in flight; time of a health sweep."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from tests.benchmarks.fleet import SingleServerProber, dummy_running, sweep_ms
from tests.benchmarks.footprint import fds, memory_mb
from tests.benchmarks.limits_series import By
from tests.benchmarks.report import Row, say

_SERVERS, _QUICK_SERVERS = (10, 100, 1_000), (5, 20)
_IN_FLIGHT, _QUICK_IN_FLIGHT = (100, 400, 1_600), (10, 40)
#: Numbers of servers in a health sweep, which is one check of all servers.
_SWEPT, _QUICK_SWEPT = (10, 100, 1_000, 3_000), (10, 50)
#: Number of health sweeps that are measured for each number of servers.
_SWEEPS, _QUICK_SWEEPS = 5, 1
#: Time limit, in seconds, for each of two waits: for one answer of the fake server, and for the
#: arrival of all requests at the fake server.
_WITHIN_S = 60.0
_BODY = b'{"model": "m", "messages": [{"role": "user", "content": "What is 6 x 7?"}]}'
_REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


def rows(*, quick: bool) -> list[Row]:
    """Measure the gateway's memory, and its health checks of all servers, at different loads."""
    measured: list[Row] = []
    for count in _QUICK_SERVERS if quick else _SERVERS:
        say(f"    a gateway before {count:,} servers")
        with _gateway([f"http://127.0.0.1:{1 + number}" for number in range(count)]) as (pid, _):
            by = By(what="servers", count=count)
            measured.append(by.row("gateway, RSS", memory_mb(pid)[0], "MB"))
    measured += asyncio.run(_in_flight(_QUICK_IN_FLIGHT if quick else _IN_FLIGHT))
    sweeps = _QUICK_SWEEPS if quick else _SWEEPS
    measured += asyncio.run(_sweeps(_QUICK_SWEPT if quick else _SWEPT, sweeps))
    return measured


@contextmanager
def _gateway(urls: list[str]) -> Iterator[tuple[int, int]]:
    """Start a gateway for the servers; yield the gateway's process id and port; end the gateway."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.gateway_process", *urls],
        cwd=Path.cwd(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


async def _in_flight(counts: tuple[int, ...]) -> list[Row]:
    """Measure the memory of a gateway while its requests wait for answers of a server.

    Args:
        counts: Numbers of waiting requests. Each number is measured with a new gateway.
    """
    measured: list[Row] = []
    async with dummy_running() as url:
        _set_misbehaviour(url, kind="hang")
        for count in counts:
            say(f"    {count:,} requests in flight")
            by = By(what="requests in flight", count=count)
            async with _requests(url, count) as pid:
                measured.append(by.row("gateway, RSS", memory_mb(pid)[0], "MB"))
                measured.append(by.row("gateway, file descriptors", fds(pid), "fds"))
    return measured


@asynccontextmanager
async def _requests(url: str, count: int) -> AsyncIterator[int]:
    """Send requests through a new gateway, and wait until the server has received all requests.

    Yields the process id of the gateway.

    Args:
        url: URL of the fake server.
        count: Number of requests.
    """
    async with AsyncExitStack() as stack:
        pid, port = stack.enter_context(_gateway([url]))
        count_before = await asyncio.to_thread(_count_requests, url)
        for _ in range(count):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(_REQUEST)
        async with asyncio.timeout(_WITHIN_S):
            while await asyncio.to_thread(_count_requests, url) < count_before + count:
                await asyncio.sleep(0.1)
        yield pid


async def _sweeps(counts: tuple[int, ...], sweeps: int) -> list[Row]:
    """Measure the duration of a health check of all servers.

    Args:
        counts: Numbers of servers to measure.
        sweeps: How often all servers are checked, for each value of `counts`.
    """
    measured: list[Row] = []
    async with dummy_running() as url:
        prober = SingleServerProber(url)
        for count in counts:
            say(f"    sweeps of {count:,} servers")
            by = By(what="servers swept", count=count)
            used_before = time.process_time()
            values = [await sweep_ms(prober, count) for _ in range(sweeps)]
            cpu_ms = 1000 * (time.process_time() - used_before) / sweeps
            measured.append(by.row("health, a sweep", values, "ms"))
            measured.append(
                by.row("health, CPU of a sweep and of creating the fleet", cpu_ms, "ms")
            )
    return measured


def _set_misbehaviour(url: str, **order: str) -> None:
    """Let the fake server misbehave from now on. `order` has fields of `dummy_server.Fault`."""
    body = json.dumps(order).encode()
    request = urllib.request.Request(f"{url}/misbehave", data=body, method="POST")
    urllib.request.urlopen(request, timeout=_WITHIN_S).close()


def _count_requests(url: str) -> int:
    """Return the number of requests that the fake server has received."""
    with urllib.request.urlopen(f"{url}/counts", timeout=_WITHIN_S) as answer:
        return int(json.load(answer)["total"])
