"""From the end of one gang to the next: Muster's gang worker, and a process worker with a limit.

The gang worker forks its runs from what has everything imported; cold, it starts a program for one.

Each run takes all GPUs, and the next ones wait: from the final state of one to PENDING of the next,
to its RUNNING and to the first line of its component. The other way is a process pool with a
concurrency limit of 1, which does the same where every run takes everything; and a loop that asks
once a minute, without a server and a flow, so at its best. Then what each worker uses of a core
while nothing happens.
"""

from __future__ import annotations

import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.benchmarks import models
from tests.benchmarks.report import Result, Row, say
from tests.benchmarks.stage import folder, noted_ns, part, wait_until
from tests.support.gang_pool import GangPool, Host
from tests.support.gang_referee import FINAL, History
from tests.support.ground import Server

_ROUNDS, _QUICK_ROUNDS = 2, 1
#: Hand-overs in a round.
_LENGTH, _QUICK_LENGTH = 6, 1
_IDLE_S, _QUICK_IDLE_S = 60.0, 2.0
#: What a worker does as it starts is over by then.
_SETTLE_S = 5.0
_LASTS_S = 0.3
_WITHIN_S = 300.0
_WAITING = 10
#: Loops side by side, each with a phase of its own.
_LOOPS = 20
_PLAN_S = 60.0
_AT_ITS_BEST = "no server, no flow"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    name: str
    type: str
    #: Seconds between two polls; 10 is Prefect's default.
    poll_s: int
    limit: int | None = None


_WAYS = (
    _Way(name="Muster: gang worker", type="gang", poll_s=10),
    _Way(name="process worker, each 10 s", type="process", poll_s=10, limit=1),
    _Way(name="process worker, each 1 s", type="process", poll_s=1, limit=1),
)
_MUSTER = _WAYS[0].name
#: On the same pool: a variable of Python's can't be given to what is forked.
_COLD, _COLD_ENV = "Muster: gang worker, cold", {"PYTHON_COLD": "1"}
_STEPS = ("to PENDING", "to RUNNING", "to its first line")


def measure(*, quick: bool) -> Result:
    rounds, length = (_QUICK_ROUNDS, _QUICK_LENGTH) if quick else (_ROUNDS, _LENGTH)
    took: dict[str, dict[str, list[float]]] = {step: {} for step in _STEPS}
    with (
        tempfile.TemporaryDirectory(prefix="muster-bench-") as directory,
        _served(Path(directory)) as pools,
    ):
        idle = _idle({name: worker for name, (_, worker) in pools.items()}, quick=quick)
        waiting = _busy_waiting(*pools[_MUSTER], quick=quick)
        for number in range(rounds):
            say(f"  round {number + 1} of {rounds}")
            for name in (*pools, _COLD):
                pool, env = pools.get(name, pools[_MUSTER])[0], _COLD_ENV if name == _COLD else {}
                for step, seconds in _hand_overs(pool, length, env):
                    took[step].setdefault(name, []).append(1000 * seconds)
    rows = [
        Row(way=f"{name}, {step}", values=values, group=step, note=_note(name))
        for step, ways in took.items()
        for name, values in ways.items()
    ]
    rows.append(_by_plan(quick=quick))
    rows += [
        Row(way=f"{name}, idle", values=[share], unit="%", group="idle", note="of a core")
        for name, share in idle.items()
    ]
    note = f"of a core, {_WAITING} runs wait"
    rows.append(
        Row(way=f"{_MUSTER}, a line", values=[waiting], unit="%", is_detail=True, note=note)
    )
    return Result(
        name="release",
        question="from the end of a gang to the next one's start, and the worker's CPU meanwhile",
        rows=rows,
    )


def _by_plan(*, quick: bool) -> Row:
    """From the moment in which the GPUs are free to the first line of the next run's component."""
    title, step = f"a loop each {_PLAN_S:g} s (the plan), {_STEPS[-1]}", _STEPS[-1]
    if quick:
        values = [1000 * _PLAN_S * share for share in (0.5, 0.99, 1.0)]
        quantiles = [values[0]] * 98 + values[1:]
        return Row(
            way=title,
            values=quantiles,
            samples=0,
            how="computed",
            group=step,
            note=f"uniform over the period; {_AT_ITS_BEST}",
        )
    say(f"  {_LOOPS} loops that ask each {_PLAN_S:g} s, side by side")
    took_ms: list[float] = []

    def sample(free_after_s: float) -> None:
        free_at = time.monotonic() + free_after_s
        with folder() as place, ExitStack() as stack:

            def start() -> None:
                popen = stack.enter_context(subprocess.Popen(part("wait", "next", place)))
                stack.callback(popen.kill)

            models.resource_loop(lambda: time.monotonic() >= free_at, start, _PLAN_S)
            began_ns = wait_until(lambda: noted_ns(place, "next", "began"), "the next run")
            took_ms.append(began_ns / 1e6 - 1000 * free_at)

    threads = [
        threading.Thread(target=sample, args=(random.uniform(0.1, _PLAN_S - 0.1),))
        for _ in range(_LOOPS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Row(way=title, values=took_ms, how="modelled", group=step, note=_AT_ITS_BEST)


def _note(name: str) -> str:
    return "" if name in (_MUSTER, _COLD) else "one run at a time, whatever it asks"


@contextmanager
def _served(directory: Path) -> Iterator[Mapping[str, tuple[GangPool, subprocess.Popen[bytes]]]]:
    """A pool with its worker for each way, all on one server."""
    server = Server(directory / "server")
    with ExitStack() as stack:
        stack.callback(server.kill)
        server.start()
        pools = {}
        for number, way in enumerate(_WAYS):
            name = f"{way.type}-{number}"
            variables = {"PREFECT_WORKER_QUERY_SECONDS": str(way.poll_s), "MUSTER_HOST": name}
            home = directory / f"home-{number}"
            host = Host(home=home, api=server.api, variables=variables)
            stack.callback(host.clear)
            nodes = {name: 8}
            pool = GangPool(
                ground=host, server=server, type=way.type, name=f"pool-{number}", nodes=nodes
            )
            pool.set_up(limit=way.limit)
            pools[way.name] = (pool, pool.start_worker(f"worker-{number}"))
        yield pools


def _hand_overs(pool: GangPool, count: int, env: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """Each step of so many hand-overs, in seconds since the one before had ended.

    Args:
        env: of the jobs, beyond the worker's.
    """
    pool.asked.clear()
    for number in range(count + 1):
        spec = pool.spec(gpus=8, lasts_s=_LASTS_S)
        if pool.type != "gang":
            # Nobody there gives it a gang.
            del spec["gang"]
        pool.submit({**spec, "name": f"r{number}"}, env=env)
    pool.until_all_end(_WITHIN_S)
    line = sorted(pool.histories(), key=_pending_at)
    for before, after in pairwise(line):
        ended = before.states[-1].at
        running = next(state.at for state in after.states if state.type == "RUNNING")
        moments = (_pending_at(after), running, after.parts[0].began)
        yield from zip(_STEPS, (at - ended for at in moments), strict=True)


def _pending_at(run: History) -> float:
    assert run.states[-1].type in FINAL, run
    return next(state.at for state in run.states if state.type == "PENDING")


def _idle(workers: Mapping[str, subprocess.Popen[bytes]], *, quick: bool) -> dict[str, float]:
    """What each uses of a core, in %, over the same seconds."""
    time.sleep(_SETTLE_S)
    say("  nothing to do")
    return _cpu_percent({name: worker.pid for name, worker in workers.items()}, quick=quick)


def _busy_waiting(pool: GangPool, worker: subprocess.Popen[bytes], *, quick: bool) -> float:
    """What the gang worker uses of a core, in %, while runs wait in line."""
    pool.hold(pool.nodes)
    for _ in range(_WAITING):
        pool.submit(pool.spec(gpus=8))
    time.sleep(_SETTLE_S)
    say("  a line that does not move")
    percent = _cpu_percent({_MUSTER: worker.pid}, quick=quick)[_MUSTER]
    pool.empty()
    return percent


def _cpu_percent(pids: Mapping[str, int], *, quick: bool) -> dict[str, float]:
    before = {name: _cpu_ns(pid) for name, pid in pids.items()}
    began = time.monotonic_ns()
    time.sleep(_QUICK_IDLE_S if quick else _IDLE_S)
    took_ns = time.monotonic_ns() - began
    return {name: 100 * (_cpu_ns(pid) - before[name]) / took_ns for name, pid in pids.items()}


def _cpu_ns(pid: int) -> int:
    """See tests/benchmarks/watching.py."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(schedstat.read_text().split()[0]) for schedstat in tasks)
