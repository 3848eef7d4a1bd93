"""Benchmark of the gateway: requests through Muster, through sglang-router and directly to servers.

The same load is sent through each way in turn, to two servers that need little CPU time. The most
reliable figure is the CPU time per request of the gateway process, because the load of the machine
changes it least.

sglang-router is not a dependency of Muster. It is measured if `import sglang_router` works in this
interpreter, or in the interpreter that the environment variable SGLANG_ROUTER_PYTHON names.
sglang-router takes 44 ms for a stream of 20 tokens, on a slow machine as on a fast machine. So the
streams' ratio of Muster to sglang-router depends on the machine; the ratio of Muster to direct
requests is the better measure.

The routing decision is also measured without HTTP, with a thousand servers and a hundred thousand
sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import importlib.util
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tasks.rollout.router import Entrypoint, Router
from tests.benchmarks.gateway_load import load
from tests.benchmarks.harness import folder, wait_until
from tests.benchmarks.report import Missing, Result, Row, say

_DUMMY = Path(__file__).parents[1] / "support" / "dummy_server.py"
_SERVERS = 2
_CONNECTIONS = 32
#: Number of rounds. In each round, requests of each kind are sent through each gateway for `_FOR_S`
#: seconds.
_ROUNDS, _FOR_S = 5, 2.0
_QUICK_ROUNDS, _QUICK_FOR_S = 1, 0.2
#: Environment variable with the path of a Python interpreter that has sglang-router.
_PYTHON = "SGLANG_ROUTER_PYTHON"
_ROUTER = "sglang-router"
_HOW_TO_ADD = (
    f"is not installed: `pip install 'sglang-router>=0.3,<0.4'`, or name a Python that has it by "
    f"{_PYTHON}"
)
#: Number of tokens in each streamed response.
_TOKENS = 20
#: Mapping from the kind of request to the body of the request.
_BODIES = {
    "plain": b'{"model": "m", "messages": [{"role": "user", "content": "What is 6 x 7?"}]}',
    f"stream of {_TOKENS}": b'{"model": "m", "messages": [{"role": "user", "content": "And 6 x 9?"}'
    b'], "stream": true, "max_tokens": %d}' % _TOKENS,
}
_DECISION_SERVERS, _DECISION_SESSIONS = 1_000, 100_000
#: Number of routing decisions that are timed together. A single decision is too short to be timed.
_BATCH = 100


@dataclass(slots=True, kw_only=True)
class _Way:
    """One way in which requests reach the servers: through a gateway, or directly.

    The measured values are stored separately for each kind of request.
    """

    #: Hosts and ports that receive the requests.
    addresses: Sequence[tuple[str, int]]
    #: Process id of the gateway, or None if the requests go directly to the servers.
    pid: int | None = None
    #: Mapping from the kind of request to the latencies of all requests, in milliseconds.
    latencies_ms: dict[str, list[float]] = field(default_factory=dict)
    #: Mapping from the kind of request to the requests per second in each round.
    per_second: dict[str, list[float]] = field(default_factory=dict)
    #: Mapping from the kind of request to the gateway's CPU time per request in each round, in
    #: microseconds.
    cpu_us: dict[str, list[float]] = field(default_factory=dict)

    def take(self, kind: str, for_s: float) -> None:
        """Send requests of one kind, and append the measured values to this object's lists.

        Args:
            kind: Kind of request, a key of `_BODIES`.
            for_s: Duration of the measurement, in seconds.
        """
        before_s = self._cpu_s()
        result = asyncio.run(
            load(self.addresses, _BODIES[kind], connections=_CONNECTIONS, for_s=for_s)
        )
        if result.failures or not result.latencies_ms:
            raise RuntimeError(f"{result.failures} requests failed, {kind}")
        used_s = self._cpu_s() - before_s
        self.latencies_ms.setdefault(kind, []).extend(result.latencies_ms)
        self.per_second.setdefault(kind, []).append(result.per_second)
        self.cpu_us.setdefault(kind, []).append(1e6 * used_s / len(result.latencies_ms))

    def _cpu_s(self) -> float:
        """Return the CPU time that the gateway has used, in seconds, or 0 without a gateway."""
        if self.pid is None:
            return 0.0
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)


def measure(*, quick: bool) -> Result:
    """Measure the latency and the rate of requests, and the duration of a routing decision.

    The requests go through each compared gateway, and directly to the servers.
    """
    rounds, for_s = (_QUICK_ROUNDS, _QUICK_FOR_S) if quick else (_ROUNDS, _FOR_S)
    with _ways() as ways:
        turns = [(name, kind) for name in ways for kind in _BODIES]
        for number in range(rounds):
            say(f"  round {number + 1} of {rounds}")
            random.shuffle(turns)
            for name, kind in turns:
                ways[name].take(kind, for_s)
    return Result(
        name="gateway",
        question=f"Time and CPU of requests over {_CONNECTIONS} connections to {_SERVERS} servers "
        "that answer at once: through Muster's gateway, through another router, and directly. All "
        "programs run on the same CPUs. The last rows show the time in which Muster's gateway "
        "chooses a server",
        rows=[*_rows(ways), *_decisions(20 if quick else 2_000)],
        missing=[] if _ROUTER in ways else [Missing(way=_ROUTER, why=_HOW_TO_ADD)],
    )


def _rows(ways: Mapping[str, _Way]) -> Iterator[Row]:
    for kind in _BODIES:
        for name, way in ways.items():
            yield Row(way=f"{name}, {kind}", values=way.latencies_ms[kind], group=kind)
        for name, way in ways.items():
            yield Row(
                way=f"{name}, {kind}, rate",
                values=way.per_second[kind],
                unit="req/s",
                group=f"{kind}, rate",
            )
        for name, way in ways.items():
            if way.pid is not None:
                yield Row(
                    way=f"{name}, {kind}, CPU per request",
                    values=way.cpu_us[kind],
                    unit="us",
                    group=f"{kind}, CPU",
                )


@contextlib.contextmanager
def _ways() -> Iterator[dict[str, _Way]]:
    """Start the inference servers and the gateways; yield a mapping from name to way.

    A way is a route for requests: directly to a server, or through a gateway.
    """
    with folder() as place, contextlib.ExitStack() as stack:

        def start(name: str, *argv: str) -> subprocess.Popen[bytes]:
            return stack.enter_context(_running(place / f"{name}.log", argv))

        ports = []
        for rank in range(_SERVERS):
            start(f"server-{rank}", sys.executable, "-I", "-S", str(_DUMMY), "--rank", str(rank))
            ports.append(_port_in(place / f"server-{rank}.log"))
        addresses = [("127.0.0.1", port) for port in ports]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        gateway = start("gateway", sys.executable, "-m", "tests.benchmarks.gateway_process", *urls)
        port = _port_in(place / "gateway.log")
        ways = {"Muster": _Way(addresses=[("127.0.0.1", port)], pid=gateway.pid)}
        if (python := _sglang_python()) is not None:
            port, metrics = _free_ports(2)
            router = start(
                *("sglang-router", python, "-m", "sglang_router.launch_router"),
                *("--worker-urls", *urls, "--policy", "round_robin", "--log-level", "error"),
                *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)),
            )
            wait_until(lambda: _answers(port), "the start of sglang-router")
            ways[_ROUTER] = _Way(addresses=[("127.0.0.1", port)], pid=router.pid)
        ways["no gateway"] = _Way(addresses=addresses)
        yield ways


@contextlib.contextmanager
def _running(log: Path, argv: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with its output in a log file; kill the process when the context ends."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            cwd=Path.cwd(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _port_in(log: Path) -> int:
    """Wait for the first line of a server's log, and return the port number in this line."""

    def first_line() -> str:
        return log.read_text().partition("\n")[0] if "\n" in log.read_text() else ""

    line: str = wait_until(first_line, f"the start of what writes {log.name}")
    return int(line)


def _sglang_python() -> str | None:
    """Return the path of a Python interpreter with sglang-router, or None if there is none."""
    if python := os.environ.get(_PYTHON):
        return python
    return sys.executable if importlib.util.find_spec("sglang_router") else None


def _free_ports(count: int) -> list[int]:
    """Return the numbers of `count` TCP ports on which no program listens now."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def _answers(port: int) -> bool:
    """Return True if the gateway on this port forwards a request and returns a server's answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            _BODIES["plain"],
            {"Content-Type": "application/json"},
        )
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _decisions(batches: int) -> Iterator[Row]:
    """Measure how long the router takes to choose a server for a request.

    After each decision, the function ends an earlier request, so that the number of running
    requests stays the same.
    """
    dice = random.Random(0)
    names = [f"session-{i}" for i in range(_DECISION_SESSIONS)]
    router = Router(max_sessions=_DECISION_SESSIONS)
    router.set(
        Entrypoint(rank=rank, epoch=1, url=f"http://node-{rank}:8000")
        for rank in range(_DECISION_SERVERS)
    )
    for name in names:
        router.done(router.pick(name))
    outstanding = [router.pick(None) for _ in range(10 * _DECISION_SERVERS)]

    def decision_times_us(draw_session: Callable[[], str | None]) -> list[float]:
        """Return the mean time of a routing decision in each batch, in microseconds.

        Args:
            draw_session: Function that returns the session of the next request, or None for a
                request without a session.
        """
        times_us = []
        for _ in range(batches):
            sessions = [draw_session() for _ in range(_BATCH)]
            began = time.perf_counter()
            for session in sessions:
                picked = router.pick(session)
                at = dice.randrange(len(outstanding))
                router.done(outstanding[at])
                outstanding[at] = picked
            times_us.append(1e6 * (time.perf_counter() - began) / _BATCH)
        return times_us

    note = f"{_DECISION_SERVERS:,} servers, {_DECISION_SESSIONS:,} sessions; mean of {_BATCH}"
    gc.collect()
    for way, draw_session in (
        ("known session", lambda: dice.choice(names)),
        ("new session", lambda: f"new-{dice.random()}"),
        ("no session", lambda: None),
    ):
        yield Row(
            way=f"Muster, decision, {way}",
            values=decision_times_us(draw_session),
            unit="us",
            group=way,
            is_detail=True,
            note=note,
        )
