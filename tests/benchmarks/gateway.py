"""The gateway against sglang-router and against no gateway, before the same servers.

Two servers that cost little themselves, one load, each way in turn. What a request costs the way
itself is its CPU time, which a busy machine changes least. sglang-router is no dependency: where
`python -c 'import sglang_router'` works, in this interpreter or in the one that
SGLANG_ROUTER_PYTHON names, it is measured too. A stream of 20 takes it 44 ms on a slow machine as
on a fast one: against it the streams' ratio tells the machine, and is bound by that of no gateway.

The time of the router's decision is taken without HTTP, with a thousand servers and a hundred
thousand sessions.
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
from tests.benchmarks.report import Missing, Result, Row, say
from tests.benchmarks.stage import folder, wait_until

_DUMMY = Path(__file__).parents[1] / "support" / "dummy_server.py"
_SERVERS = 2
_CONNECTIONS = 32
_ROUNDS, _FOR_S = 5, 2.0
_QUICK_ROUNDS, _QUICK_FOR_S = 1, 0.2
_PYTHON = "SGLANG_ROUTER_PYTHON"
_ROUTER = "sglang-router"
_HOW_TO_ADD = (
    f"is not installed: `pip install 'sglang-router>=0.3,<0.4'`, or name a Python that has it by "
    f"{_PYTHON}"
)
_TOKENS = 20
_BODIES = {
    "plain": b'{"model": "m", "messages": [{"role": "user", "content": "What is 6 x 7?"}]}',
    f"stream of {_TOKENS}": b'{"model": "m", "messages": [{"role": "user", "content": "And 6 x 9?"}'
    b'], "stream": true, "max_tokens": %d}' % _TOKENS,
}
_DECISION_SERVERS, _DECISION_SESSIONS = 1_000, 100_000
#: Decisions that are timed together; one alone is as short as a look at the clock.
_BATCH = 100


@dataclass(slots=True, kw_only=True)
class _Way:
    """How requests reach the servers."""

    addresses: Sequence[tuple[str, int]]
    #: Whose CPU time is counted; None: nobody's is in between.
    pid: int | None = None
    latencies_ms: dict[str, list[float]] = field(default_factory=dict)
    per_second: dict[str, list[float]] = field(default_factory=dict)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)

    def take(self, kind: str, for_s: float) -> None:
        before_s = self._cpu_s()
        found = asyncio.run(
            load(self.addresses, _BODIES[kind], connections=_CONNECTIONS, for_s=for_s)
        )
        if found.failures or not found.latencies_ms:
            raise RuntimeError(f"{found.failures} requests failed, {kind}")
        used_s = self._cpu_s() - before_s
        self.latencies_ms.setdefault(kind, []).extend(found.latencies_ms)
        self.per_second.setdefault(kind, []).append(found.per_second)
        self.cpu_us.setdefault(kind, []).append(1e6 * used_s / len(found.latencies_ms))

    def _cpu_s(self) -> float:
        if self.pid is None:
            return 0.0
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)


def measure(*, quick: bool) -> Result:
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
        question=f"requests over {_CONNECTIONS} connections to {_SERVERS} servers that answer at "
        "once, on the CPUs of all; and the router's decision alone",
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
                    way=f"{name}, {kind}, CPU a request",
                    values=way.cpu_us[kind],
                    unit="us",
                    group=f"{kind}, CPU",
                )


@contextlib.contextmanager
def _ways() -> Iterator[dict[str, _Way]]:
    """Servers, and everything that can stand before them."""
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
    """What a server has written as its first line."""

    def first_line() -> str:
        return log.read_text().partition("\n")[0] if "\n" in log.read_text() else ""

    line: str = wait_until(first_line, f"the start of what writes {log.name}")
    return int(line)


def _sglang_python() -> str | None:
    if python := os.environ.get(_PYTHON):
        return python
    return sys.executable if importlib.util.find_spec("sglang_router") else None


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _answers(port: int) -> bool:
    """Whether requests reach a server through this port."""
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
    """Of the router, each with the end of another request, so that what is outstanding stays."""
    dice = random.Random(0)
    names = [f"session-{i}" for i in range(_DECISION_SESSIONS)]
    router = Router(max_sessions=_DECISION_SESSIONS)
    router.set(
        Entrypoint(rank=rank, epoch=1, url=f"http://node-{rank}:8000")
        for rank in range(_DECISION_SERVERS)
    )
    for name in names:
        router.done(router.pick(name))
    held = [router.pick(None) for _ in range(10 * _DECISION_SERVERS)]

    def took_us(session: Callable[[], str | None]) -> list[float]:
        found = []
        for _ in range(batches):
            sessions = [session() for _ in range(_BATCH)]
            began = time.perf_counter()
            for one in sessions:
                taken = router.pick(one)
                at = dice.randrange(len(held))
                router.done(held[at])
                held[at] = taken
            found.append(1e6 * (time.perf_counter() - began) / _BATCH)
        return found

    note = f"{_DECISION_SERVERS:,} servers, {_DECISION_SESSIONS:,} sessions; mean of {_BATCH}"
    gc.collect()
    for way, session in (
        ("known session", lambda: dice.choice(names)),
        ("new session", lambda: f"new-{dice.random()}"),
        ("no session", lambda: None),
    ):
        yield Row(
            way=f"Muster, decision, {way}",
            values=took_us(session),
            unit="us",
            group=way,
            is_detail=True,
            note=note,
        )
