"""Benchmark of the start of a component: from the call until its program runs.

The kernel reports the successful `exec` of the program to the guardian. `subprocess.Popen` without
a guardian returns at the same moment.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from tasks.processes import tree
from tasks.processes.guarded import Command, GuardedProcess
from tests.benchmarks.harness import folder
from tests.benchmarks.report import Result, Row, interleaved

_SLEEP_S = "60"


def measure(*, quick: bool) -> Result:
    """Measure the start of a component in three ways.

    A guardian is the process of Muster that starts and ends a component. The three ways are: a
    guardian that already runs, a guardian that must be started first, and no guardian.
    """
    rounds = 10 if quick else 100
    taken = interleaved(
        {
            "prewarmed": partial(_guarded, _launch_prewarmed),
            "cold": partial(_guarded, _launch_cold),
            "popen": _by_popen,
        },
        rounds,
    )
    return Result(
        name="starting",
        question="Time from the call that starts a component until the component's program runs",
        rows=[
            Row(way="Muster: prewarmed guardian", values=taken["prewarmed"]),
            Row(way="Muster: cold guardian", values=taken["cold"]),
            Row(way="bare subprocess.Popen", values=taken["popen"]),
        ],
    )


def _command(place: Path) -> Command:
    sleep = shutil.which("sleep")
    assert sleep is not None
    return Command(
        argv=(sleep, _SLEEP_S), env=dict(os.environ), cwd=place, log=place / "component.log"
    )


def _guarded(launch: Callable[[Command], Awaitable[tuple[GuardedProcess, float]]]) -> float:
    async def sample() -> float:
        with folder() as place:
            process, took_ms = await launch(_command(place))
            process.kill()
            await process.empty
            # Wait until the guardian process is reaped. Otherwise the process would disturb the
            # next sample.
            while tree.read_parent(process.guardian_pid):
                await asyncio.sleep(0.005)
            return took_ms

    return asyncio.run(sample())


async def _launch_prewarmed(command: Command) -> tuple[GuardedProcess, float]:
    process = GuardedProcess.prepare("component", tag={})
    await asyncio.sleep(0.3)
    began = time.monotonic()
    await process.launch(command)
    return process, (time.monotonic() - began) * 1000


async def _launch_cold(command: Command) -> tuple[GuardedProcess, float]:
    began = time.monotonic()
    process = GuardedProcess.prepare("component", tag={})
    await process.launch(command)
    return process, (time.monotonic() - began) * 1000


def _by_popen() -> float:
    with folder() as place:
        command = _command(place)
        with command.log.open("ab") as log:
            began = time.monotonic()
            popen = subprocess.Popen(
                command.argv,
                env=dict(command.env),
                cwd=command.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            took_ms = (time.monotonic() - began) * 1000
        popen.kill()
        popen.wait()
        return took_ms
