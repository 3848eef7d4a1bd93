"""How soon a failed server of a fleet is out of routing, and what a sweep of many servers takes.

Real servers behind the real gateway: one is killed, or stopped, and the gateway's own word says
when nothing is sent there any more. The other way asks each server in turn, each interval, as the
launchers that came before do; here with Muster's own interval and timeout.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tasks.processes.ports import listeners
from tasks.rollout.backends import Ask
from tasks.rollout.health import Health
from tasks.rollout.probing import FleetParts, HttpProber
from tasks.rollout.registry import Registry
from tasks.spec.rollout import FleetHealth
from tests.benchmarks.report import Result, Row, say
from tests.faults.fleet_chaos import plan_in, serving
from tests.support import dummy_server
from tests.support.fleet_fakes import TOKEN, FakeHost, plan_of, settings_of

_KILLS, _QUICK_KILLS = 20, 1
_STOPS, _QUICK_STOPS = 5, 0
_SERVERS, _QUICK_SERVERS = 1_000, 20
_SWEEPS, _QUICK_SWEEPS = 5, 1
_LOOK_EVERY_S = 0.001
_TIMEOUT_S = 2.0
_WITHIN_S = 60.0


def measure(*, quick: bool) -> Result:
    rows = asyncio.run(_removals(quick=quick))
    rows += asyncio.run(_sweeps(quick=quick))
    return Result(
        name="fleet",
        question="from a server's end to its last request, and a sweep of all servers",
        rows=rows,
    )


async def _removals(*, quick: bool) -> list[Row]:
    killed: list[float] = []
    stopped: list[float] = []
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        directory = Path(name)
        plan = plan_in(directory, directory / "ledger.jsonl")
        async with serving(plan):
            fleet = _Fleet(plan.port)
            for count, signum, took in (
                (_QUICK_KILLS if quick else _KILLS, signal.SIGKILL, killed),
                (_QUICK_STOPS if quick else _STOPS, signal.SIGSTOP, stopped),
            ):
                for number in range(count):
                    say(f"  {signum.name} {number + 1} of {count}")
                    took.append(await fleet.hit(number % 8, signum))
    health = plan.fleet.health
    limit_s = health.misses * health.interval_s + health.timeout_s
    note = f"interval {health.interval_s:g} s, {health.misses} misses"
    rows = [
        Row(way="Muster: killed, out of routing", values=killed, group="killed", note="limit 50"),
        Row(
            way="asked in turn, each interval",
            values=[1000 * at for at in _polled(health, len(killed))],
            group="killed",
            how="computed",
            note=note,
            samples=0,
        ),
    ]
    if stopped:
        limit = f"{note}; limit {1000 * limit_s:g}"
        rows.append(
            Row(way="Muster: stopped, out of routing", values=stopped, group="stop", note=limit)
        )
    return rows


def _polled(health: FleetHealth, count: int) -> list[float]:
    """Seconds to the last of so many misses, for deaths at random moments of the interval."""
    interval, misses = health.interval_s, health.misses
    return [interval * (misses - 1 + Random(number).random()) for number in range(count)]


class _Fleet:
    """The gateway's word on its servers."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/muster/rollout"
        self._client = httpx.Client(trust_env=False, timeout=_WITHIN_S)

    async def hit(self, rank: int, signum: int) -> float:
        """Milliseconds from the signal until nothing is sent there any more."""
        await self._until(lambda seen: bool(seen["ready"]))
        server = self._snapshot()["servers"][rank]
        [pid] = (one.pid for one in listeners(server["port"]))
        began = time.perf_counter()
        os.kill(pid, signum)
        await self._until(lambda seen: _is_out(seen, rank, server["epoch"]))
        return 1000 * (time.perf_counter() - began)

    async def _until(self, is_so: Callable[[dict[str, Any]], bool]) -> None:
        async with asyncio.timeout(_WITHIN_S):
            while True:
                seen = self._snapshot()
                if seen and is_so(seen):
                    return
                await asyncio.sleep(_LOOK_EVERY_S)

    def _snapshot(self) -> dict[str, Any]:
        try:
            seen: dict[str, Any] = self._client.get(self._url).json()
        except httpx.HTTPError:
            return {}
        return seen


def _is_out(seen: dict[str, Any], rank: int, epoch: int) -> bool:
    server = seen["servers"][rank]
    serves = server["state"] in ("active", "suspect") and server["reachable"]
    return not serves or server["epoch"] != epoch


async def _sweeps(*, quick: bool) -> list[Row]:
    count = _QUICK_SERVERS if quick else _SERVERS
    rounds = _QUICK_SWEEPS if quick else _SWEEPS
    async with dummy_running() as url:
        prober = ToOne(url)
        say(f"  {count:,} healthy servers")
        healthy = [await swept(prober, count) for _ in range(rounds)]
        in_turn = [await _asked_in_turn(prober, count) for _ in range(rounds)]
        say(f"  {count:,} servers that hang")
        httpx.post(f"{url}/misbehave", json={"kind": "hang", "health": True}, trust_env=False)
        hung = [await swept(prober, count) for _ in range(rounds)]
    name = f"{count:,} servers"
    limit = f"limit {1100 * _TIMEOUT_S:g}"
    return [
        Row(way=f"Muster: {name}, healthy", values=healthy, group="sweep", note="limit 1,000"),
        Row(way=f"{name} in turn, healthy", values=in_turn, group="sweep"),
        Row(way=f"Muster: {name}, hung", values=hung, group="hung", note=limit),
    ]


@asynccontextmanager
async def dummy_running() -> AsyncIterator[str]:
    """A server's address. It is a process of its own, so that its work is not counted as
    Muster's."""
    dummy = await asyncio.create_subprocess_exec(
        sys.executable, dummy_server.__file__, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert dummy.stdout is not None
        yield f"http://127.0.0.1:{int(await dummy.stdout.readline())}"
    finally:
        dummy.kill()
        await dummy.wait()


class ToOne(HttpProber):
    """Asks one server in the place of all: that it is one makes no question cheaper."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    def ask(self, url: str, question: Ask, timeout_s: float) -> Coroutine[Any, Any, str | None]:
        return super().ask(self._url, question, timeout_s)


async def swept(prober: HttpProber, count: int) -> float:
    """Milliseconds for one sweep of a fleet whose servers all serve."""
    plan, host = plan_of(count), FakeHost()
    registry = Registry(plan)
    health = Health(
        FleetParts(
            states=registry,
            settings=settings_of(timeout_s=_TIMEOUT_S),
            questions=plan.questions,
            host=host,
            prober=prober,
            emit=lambda name, **fields: None,
            random=Random(0),
        )
    )
    await health.rest()
    for group, slot in enumerate(plan.servers):
        epoch = registry.begin(group)
        registry.mark_started(group, epoch)
        host[slot.rank].is_alive = True
        # At home it refuses at once: what is measured is the sweep.
        host[slot.rank].at_home = "refuse"
        health.watch(group, epoch)
    began = time.perf_counter()
    await health.sweep()
    took_ms = 1000 * (time.perf_counter() - began)
    await health.stop()
    return took_ms


async def _asked_in_turn(prober: HttpProber, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        await prober.ask("", TOKEN, _TIMEOUT_S)
    return 1000 * (time.perf_counter() - began)
