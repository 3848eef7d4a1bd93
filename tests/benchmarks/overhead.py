"""Benchmark of the flow's overhead: `train` with three short components, and a flow of six tasks.

The components of `train` end at once. The tasks of the other flow do nothing.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from flows.train import train
from tasks.server.server import prefect_server
from tasks.spec.run import RunSpec
from tasks.train.reporter import await_last_artifacts
from tests.benchmarks.footprint import cpu_percent, tree_of
from tests.benchmarks.harness import NAMES
from tests.benchmarks.report import Result, Row, Sample, interleaved

_ROUNDED = "Prefect rounds it up to a second"
#: CPU use, in percent of a core, below which the Prefect server counts as idle.
_IDLE_PERCENT = 10.0
#: Length of the time window in which the CPU use is measured, in seconds.
_WINDOW_S = 0.2
#: Time limit, in seconds, on the wait until the Prefect server is idle.
_IDLE_WITHIN_S = 30.0
_TASKS = ("admit", *(f"start-{name}" for name in NAMES), "monitor", "teardown")


def measure(*, quick: bool) -> Result:
    """Compare the durations of the flow `train` and of a Prefect flow with the same six tasks.

    Both flows are measured with and without Prefect's heartbeats.
    """
    rounds = 2 if quick else 20
    _quieten()
    with prefect_server():
        ways = {
            "train": _without_heartbeats(_train),
            "bare": _without_heartbeats(_bare),
            "bare with processes": _without_heartbeats(_bare_with_processes),
            "train, default": _train,
            "bare, default": _bare,
        }
        for warm_up in ("train", "bare with processes"):
            ways[warm_up]()
        taken = interleaved({way: _once_idle(sample) for way, sample in ways.items()}, rounds)
    return Result(
        name="overhead",
        question="Duration of a Prefect flow run with six tasks, from the call to the return",
        rows=[
            Row(way="Muster: `train`, three instant components", values=taken["train"]),
            Row(way="bare flow, six no-op tasks", values=taken["bare"]),
            Row(way="the same, running three processes", values=taken["bare with processes"]),
            Row(
                way="`train` with heartbeats, the default",
                values=taken["train, default"],
                note=_ROUNDED,
                is_detail=True,
            ),
            Row(
                way="bare flow with heartbeats, the default",
                values=taken["bare, default"],
                note=_ROUNDED,
                is_detail=True,
            ),
        ],
    )


def _once_idle(sample: Sample) -> Sample:
    """Return a measuring function that first waits until the Prefect server is idle.

    The server is busy for a second after a flow has returned. Without the wait, the next sample
    would be slower.
    """

    def measure_when_idle() -> float:
        deadline = time.monotonic() + _IDLE_WITHIN_S
        while cpu_percent({"all": tree_of(os.getpid())}, _WINDOW_S)["all"] > _IDLE_PERCENT:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server is still busy after {_IDLE_WITHIN_S:g} s")
        return sample()

    return measure_when_idle


def _without_heartbeats(sample: Sample) -> Sample:
    """Return a measuring function that switches Prefect's heartbeats off.

    With heartbeats, a flow run waits at its end for the heartbeat thread, which sleeps for whole
    seconds. This wait would hide Muster's overhead.
    """

    def measure_without_heartbeats() -> float:
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            return sample()

    return measure_without_heartbeats


def _train() -> float:
    true = shutil.which("true")
    spec = RunSpec.model_validate(
        {
            "name": "bench",
            "workload": "grpo",
            "components": {name: {"command": [true], "on_exit_zero": "drain"} for name in NAMES},
        }
    )
    began = time.monotonic()
    state = train(spec, return_state=True)
    took_ms = (time.monotonic() - began) * 1000
    # Wait until the server has received the last artifacts. Otherwise their transfer would slow
    # down the next sample.
    await_last_artifacts()
    if not state.is_completed():
        raise RuntimeError(f"the flow `train` did not complete: {state.message}")
    return took_ms


@task(cache_policy=NO_CACHE, persist_result=False)
def _nothing() -> None:
    pass


@task(cache_policy=NO_CACHE, persist_result=False)
def _process() -> None:
    subprocess.run(["true"], check=True)


@flow(persist_result=False)
def _bare_flow(processes: bool) -> None:
    for name in _TASKS:
        body = _process if processes and name.startswith("start-") else _nothing
        body.with_options(name=name, task_run_name=name)()


def _bare(*, processes: bool = False) -> float:
    began = time.monotonic()
    _bare_flow(processes)
    return (time.monotonic() - began) * 1000


def _bare_with_processes() -> float:
    return _bare(processes=True)


def _quieten() -> None:
    """Stop Prefect from printing the logs of the flows. The logs still go to the server."""
    for name in list(logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, PrefectConsoleHandler):
                handler.setLevel(logging.CRITICAL)
