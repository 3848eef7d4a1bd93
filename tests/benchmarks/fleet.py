"""Benchmark of the rollout fleet: removal of a failed server from routing, and health sweeps.

Real servers run behind the real gateway. The benchmark kills or stops one server, and reads from
the gateway's status when no request is sent to the server any more. The other way is a launcher
that probes the servers one after the other in each interval. It has Muster's interval and timeout.
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
from tests.support.fleet_fakes import TOKEN, FakeHost, make_settings, make_topology

_KILLS, _QUICK_KILLS = 20, 1
_STOPS, _QUICK_STOPS = 5, 0
#: Number of servers in a sweep. A sweep is one health check of all servers of a fleet.
_SERVERS, _QUICK_SERVERS = 1_000, 20
_SWEEPS, _QUICK_SWEEPS = 5, 1
#: Pause between two reads of the gateway's status, in seconds.
_READ_EVERY_S = 0.001
#: Timeout of a health probe, in seconds.
_TIMEOUT_S = 2.0
#: Time limit, in seconds, on the removal of a failed server from the gateway's routing.
_WITHIN_S = 60.0


def measure(*, quick: bool) -> Result:
    """Measure how soon a failed server gets no more requests, and how long a health check takes."""
    rows = asyncio.run(_removals(quick=quick))
    rows += asyncio.run(_sweeps(quick=quick))
    return Result(
        name="fleet",
        question="Two times are measured for a fleet, a group of inference servers behind one HTTP "
        "gateway. The first is the time from the moment at which a server is killed or stopped "
        "until the gateway sends no more requests to this server. The second is the duration of a "
        "health check of all servers",
        rows=rows,
    )


async def _removals(*, quick: bool) -> list[Row]:
    """Measure the time until the gateway sends no more requests to a failed server.

    The benchmark kills the server with SIGKILL, or lets the server hang with SIGSTOP.
    """
    killed: list[float] = []
    stopped: list[float] = []
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        directory = Path(name)
        plan = plan_in(directory, directory / "ledger.jsonl")
        async with serving(plan):
            fleet = _Fleet(plan.port)
            for count, signum, times_ms in (
                (_QUICK_KILLS if quick else _KILLS, signal.SIGKILL, killed),
                (_QUICK_STOPS if quick else _STOPS, signal.SIGSTOP, stopped),
            ):
                for number in range(count):
                    say(f"  {signum.name} {number + 1} of {count}")
                    times_ms.append(await fleet.hit(number % 8, signum))
    health = plan.fleet.health
    limit_s = health.misses * health.interval_s + health.timeout_s
    note = f"interval {health.interval_s:g} s, {health.misses} misses"
    rows = [
        Row(way="Muster: killed, out of routing", values=killed, group="killed", note="limit 50"),
        Row(
            way="servers asked in turn, once per interval",
            values=[1000 * seconds for seconds in _compute_polling(health, len(killed))],
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


def _compute_polling(health: FleetHealth, count: int) -> list[float]:
    """Return the times in seconds until a polling launcher notices the death of a server.

    The times are computed, not measured. The server dies at a random moment of the polling
    interval. The launcher notices the death after `health.misses` failed probes in a row.

    Args:
        health: Interval of the probes, and number of failed probes.
        count: Number of times to return.
    """
    interval, misses = health.interval_s, health.misses
    return [interval * (misses - 1 + Random(number).random()) for number in range(count)]


class _Fleet:
    """Client that reads the status of a gateway, and sends signals to the gateway's servers."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/muster/rollout"
        self._client = httpx.Client(trust_env=False, timeout=_WITHIN_S)

    async def hit(self, rank: int, signum: int) -> float:
        """Send a signal to a server.

        Returns:
            The milliseconds until the gateway sends no more requests to the server.
        """
        await self._until(lambda snapshot: bool(snapshot["ready"]))
        server = self._snapshot()["servers"][rank]
        [pid] = (listener.pid for listener in listeners(server["port"]))
        began = time.perf_counter()
        os.kill(pid, signum)
        await self._until(lambda snapshot: _is_out(snapshot, rank, server["epoch"]))
        return 1000 * (time.perf_counter() - began)

    async def _until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until a condition is true for the gateway's status."""
        async with asyncio.timeout(_WITHIN_S):
            while True:
                snapshot = self._snapshot()
                if snapshot and condition(snapshot):
                    return
                await asyncio.sleep(_READ_EVERY_S)

    def _snapshot(self) -> dict[str, Any]:
        """Return the gateway's status, or an empty dict if the gateway does not answer."""
        try:
            snapshot: dict[str, Any] = self._client.get(self._url).json()
        except httpx.HTTPError:
            return {}
        return snapshot


def _is_out(snapshot: dict[str, Any], rank: int, epoch: int) -> bool:
    """Return True if the gateway no longer sends requests to a server.

    Args:
        snapshot: Status document of the gateway.
        rank: Rank of the server.
        epoch: Number of starts of the server before its failure. A higher number in the snapshot
            means that the server was restarted.
    """
    server = snapshot["servers"][rank]
    serves = server["state"] in ("active", "suspect") and server["reachable"]
    return not serves or server["epoch"] != epoch


async def _sweeps(*, quick: bool) -> list[Row]:
    """Measure how long a check of the health of all servers takes.

    Measure this for healthy servers, and for servers that hang and send no answer.
    """
    count = _QUICK_SERVERS if quick else _SERVERS
    rounds = _QUICK_SWEEPS if quick else _SWEEPS
    async with dummy_running() as url:
        prober = SingleServerProber(url)
        say(f"  {count:,} healthy servers")
        healthy = [await sweep_ms(prober, count) for _ in range(rounds)]
        in_turn = [await _probe_in_turn_ms(prober, count) for _ in range(rounds)]
        say(f"  {count:,} servers that hang")
        httpx.post(f"{url}/misbehave", json={"kind": "hang", "health": True}, trust_env=False)
        hung = [await sweep_ms(prober, count) for _ in range(rounds)]
    name = f"{count:,} servers"
    limit = f"limit {1100 * _TIMEOUT_S:g}"
    return [
        Row(way=f"Muster: {name}, healthy", values=healthy, group="sweep", note="limit 1,000"),
        Row(way=f"{name} in turn, healthy", values=in_turn, group="sweep"),
        Row(way=f"Muster: {name}, hung", values=hung, group="hung", note=limit),
    ]


@asynccontextmanager
async def dummy_running() -> AsyncIterator[str]:
    """Start a fake inference server, and yield its URL.

    The server is a separate process, so that its CPU time is not counted as Muster's.
    """
    dummy = await asyncio.create_subprocess_exec(
        sys.executable, dummy_server.__file__, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert dummy.stdout is not None
        yield f"http://127.0.0.1:{int(await dummy.stdout.readline())}"
    finally:
        dummy.kill()
        await dummy.wait()


class SingleServerProber(HttpProber):
    """Prober for a large fake fleet. All probes go to one real server.

    Each probe opens a new connection. So the probes take as long as probes of different servers.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    def ask(self, url: str, question: Ask, timeout_s: float) -> Coroutine[Any, Any, str | None]:
        return super().ask(self._url, question, timeout_s)


async def sweep_ms(prober: HttpProber, count: int) -> float:
    """Check the health of all servers of a fleet once; return the time in milliseconds.

    Args:
        prober: Sends the probes.
        count: Number of active servers of the fleet.
    """
    plan = make_topology(count)
    host = FakeHost()
    registry = Registry(plan)
    health = Health(
        FleetParts(
            states=registry,
            settings=make_settings(timeout_s=_TIMEOUT_S),
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
        # A server that does not answer is probed again from its own host. This second probe fails
        # at once here, so that only the first probes are measured.
        host[slot.rank].at_home = "refuse"
        health.watch(group, epoch)
    began = time.perf_counter()
    await health.sweep()
    took_ms = 1000 * (time.perf_counter() - began)
    await health.stop()
    return took_ms


async def _probe_in_turn_ms(prober: HttpProber, count: int) -> float:
    """Probe `count` servers, one after the other; return the total time in milliseconds."""
    began = time.perf_counter()
    for _ in range(count):
        await prober.ask("", TOKEN, _TIMEOUT_S)
    return 1000 * (time.perf_counter() - began)
