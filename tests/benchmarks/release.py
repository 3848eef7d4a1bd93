"""Benchmark of the time from the end of one run to the start of the next, and of idle workers.

Each run takes all GPUs, and the other runs wait. The benchmark measures three times from the final
state of one run: to the state PENDING of the next run, to its state RUNNING, and to the first line
of its component. Then it measures the CPU use of each worker while no run starts or ends.

The ways are:

- Muster's gang worker, which forks each run from a process that has imported everything;
- Muster's gang worker with a cold start: it starts a new program for each run;
- Prefect's process worker on a pool with a concurrency limit of 1, which has the same effect if
  each run takes all GPUs;
- a loop that checks once a minute. It has no server and no flow, so a real launcher would be
  slower.
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
from tests.benchmarks.harness import folder, part, recorded_ns, wait_until
from tests.benchmarks.report import Result, Row, say
from tests.support.gang_pool import GangPool, Host
from tests.support.gang_referee import FINAL, History
from tests.support.host_environment import Server

_ROUNDS, _QUICK_ROUNDS = 2, 1
#: Number of measurements in each round. A measurement is the time from the end of a run to the
#: start of the next run.
_LENGTH, _QUICK_LENGTH = 6, 1
#: Length of the time window in which the CPU use is measured, in seconds.
_IDLE_S, _QUICK_IDLE_S = 60.0, 2.0
#: Seconds that a worker needs to finish its start.
_SETTLE_S = 5.0
#: Duration of a run, in seconds.
_LASTS_S = 0.3
#: Time limit on all runs of a round, in seconds.
_WITHIN_S = 300.0
#: Number of runs that wait in the queue while the CPU use of the worker is measured.
_WAITING = 10
#: Number of polling loops that are measured at the same time. For each loop, the benchmark chooses
#: a random time at which the GPUs become free.
_LOOPS = 20
#: Interval at which the first design of Muster would have polled for free GPUs, in seconds.
_PLAN_S = 60.0
#: Note about the measured polling loop, for the table of results. The loop imitates the first
#: design of Muster, but without a server and a flow. The first design would have been slower.
_AT_ITS_BEST = "no server, no flow"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """Kind of worker that starts the runs."""

    #: Name of this kind of worker in the printed results.
    name: str
    #: Type of the work pool, "gang" or "process".
    type: str
    #: Seconds between two polls of the worker. Prefect's default is 10.
    poll_s: int
    #: Concurrency limit of the work pool, or None for no limit.
    limit: int | None = None


_WAYS = (
    _Way(name="Muster: gang worker", type="gang", poll_s=10),
    _Way(name="process worker, every 10 s", type="process", poll_s=10, limit=1),
    _Way(name="process worker, every 1 s", type="process", poll_s=1, limit=1),
)
_MUSTER = _WAYS[0].name
#: Title (for the results) and environment variables of runs with a cold start. Usually, the gang
#: worker forks a process for a run. If a variable of the run begins with PYTHON, the worker starts
#: a new Python program instead, because Python reads these variables only when a program starts.
_COLD, _COLD_ENV = "Muster: gang worker, cold", {"PYTHON_COLD": "1"}
_STEPS = ("to PENDING", "to RUNNING", "to its first line")


def measure(*, quick: bool) -> Result:
    """Measure the time from the end of a run to the start of the next run.

    Also measure the CPU use of idle workers.
    """
    rounds, length = (_QUICK_ROUNDS, _QUICK_LENGTH) if quick else (_ROUNDS, _LENGTH)
    times_ms: dict[str, dict[str, list[float]]] = {step: {} for step in _STEPS}
    with (
        tempfile.TemporaryDirectory(prefix="muster-bench-") as directory,
        _served(Path(directory)) as pools,
    ):
        idle = _idle({name: worker for name, (_, worker) in pools.items()}, quick=quick)
        waiting = _busy_waiting(*pools[_MUSTER], quick=quick)
        for number in range(rounds):
            say(f"  round {number + 1} of {rounds}")
            for name in (*pools, _COLD):
                pool, _worker = pools.get(name, pools[_MUSTER])
                env = _COLD_ENV if name == _COLD else {}
                for step, seconds in _time_successors(pool, length, env):
                    times_ms[step].setdefault(name, []).append(1000 * seconds)
    rows = [
        Row(way=f"{name}, {step}", values=values, group=step, note=_note(name))
        for step, ways in times_ms.items()
        for name, values in ways.items()
    ]
    rows.append(_by_plan(quick=quick))
    rows += [
        Row(way=f"{name}, idle", values=[share], unit="%", group="idle", note="of a core")
        for name, share in idle.items()
    ]
    note = f"of a core, {_WAITING} runs wait"
    rows.append(
        Row(way=f"{_MUSTER}, with a queue", values=[waiting], unit="%", is_detail=True, note=note)
    )
    return Result(
        name="release",
        question="Time from the end of a run that holds all GPUs until the next run in the queue "
        "starts, and the CPU use of a worker while no run starts or ends",
        rows=rows,
    )


def _by_plan(*, quick: bool) -> Row:
    """Measure a polling loop that starts the next run as soon as a poll finds free GPUs.

    The loop polls once a minute. The measured time is the time from the end of a run to the first
    line that the component of the next run prints. With `--quick`, this time is computed, because
    a measurement takes a minute.

    Args:
        quick: True to compute the time.
    """
    title, step = f"a loop every {_PLAN_S:g} s (the plan), {_STEPS[-1]}", _STEPS[-1]
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
    say(f"  {_LOOPS} loops that ask every {_PLAN_S:g} s, side by side")
    took_ms: list[float] = []

    def sample(free_after_s: float) -> None:
        free_at = time.monotonic() + free_after_s
        with folder() as place, ExitStack() as stack:

            def start() -> None:
                popen = stack.enter_context(subprocess.Popen(part("wait", "next", place)))
                stack.callback(popen.kill)

            models.resource_loop(lambda: time.monotonic() >= free_at, start, _PLAN_S)
            began_ns = wait_until(lambda: recorded_ns(place, "next", "began"), "the next run")
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
    return "" if name in (_MUSTER, _COLD) else "one run at a time, with any number of GPUs"


@contextmanager
def _served(directory: Path) -> Iterator[Mapping[str, tuple[GangPool, subprocess.Popen[bytes]]]]:
    """Start a Prefect server, and yield a work pool and its worker for each kind of worker."""
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
                host_env=host, server=server, type=way.type, name=f"pool-{number}", nodes=nodes
            )
            pool.set_up(limit=way.limit)
            pools[way.name] = (pool, pool.start_worker(f"worker-{number}"))
        yield pools


def _time_successors(
    pool: GangPool, count: int, env: Mapping[str, str]
) -> Iterator[tuple[str, float]]:
    """Run several runs one after the other, and measure how soon each run follows the previous run.

    Args:
        pool: Work pool of the runs.
        count: Number of runs after the first.
        env: Environment variables of the runs, in addition to the variables of the worker.

    Yields:
        The name of a step, such as "to RUNNING", and the seconds from the end of the previous run
        to this step. Each run after the first has three steps.
    """
    pool.asked.clear()
    for number in range(count + 1):
        spec = pool.spec(gpus=8, lasts_s=_LASTS_S)
        if pool.type != "gang":
            # Prefect's process worker cannot grant GPUs, so the spec must not request any.
            del spec["gang"]
        pool.submit({**spec, "name": f"r{number}"}, env=env)
    pool.wait_until_all_end(_WITHIN_S)
    runs = sorted(pool.histories(), key=_pending_at)
    for previous, successor in pairwise(runs):
        ended_at = previous.states[-1].at
        running_at = next(state.at for state in successor.states if state.type == "RUNNING")
        step_times = (_pending_at(successor), running_at, successor.parts[0].began)
        yield from zip(_STEPS, (at - ended_at for at in step_times), strict=True)


def _pending_at(run: History) -> float:
    """Return the time of the first PENDING state of an ended run."""
    assert run.states[-1].type in FINAL, run
    return next(state.at for state in run.states if state.type == "PENDING")


def _idle(workers: Mapping[str, subprocess.Popen[bytes]], *, quick: bool) -> dict[str, float]:
    """Return the CPU use of each idle worker, in percent of a core.

    All workers are measured in the same time window.
    """
    time.sleep(_SETTLE_S)
    say("  nothing to do")
    return _cpu_percent({name: worker.pid for name, worker in workers.items()}, quick=quick)


def _busy_waiting(pool: GangPool, worker: subprocess.Popen[bytes], *, quick: bool) -> float:
    """Return the CPU use of the gang worker while runs wait, in percent of a core."""
    pool.hold(pool.nodes)
    for _ in range(_WAITING):
        pool.submit(pool.spec(gpus=8))
    time.sleep(_SETTLE_S)
    say("  a line that does not move")
    percent = _cpu_percent({_MUSTER: worker.pid}, quick=quick)[_MUSTER]
    pool.cancel_all()
    return percent


def _cpu_percent(pids: Mapping[str, int], *, quick: bool) -> dict[str, float]:
    """Return the CPU use of each process, in percent of a core.

    All processes are measured in the same time window.
    """
    before = {name: _cpu_ns(pid) for name, pid in pids.items()}
    began = time.monotonic_ns()
    time.sleep(_QUICK_IDLE_S if quick else _IDLE_S)
    took_ns = time.monotonic_ns() - began
    return {name: 100 * (_cpu_ns(pid) - before[name]) / took_ns for name, pid in pids.items()}


def _cpu_ns(pid: int) -> int:
    """Return the CPU time of a process in nanoseconds. See `footprint.cpu_ns`."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(schedstat.read_text().split()[0]) for schedstat in tasks)
