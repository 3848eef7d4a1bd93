"""Benchmark of `muster logs` with a large log of a run on this machine, beside `cat`.

The run has a second component with a short log. So `muster logs` without a component writes the
name of the component before each line.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tasks.record.places import RunPlace
from tests.benchmarks.harness import folder
from tests.benchmarks.report import Result, Row, Sample, interleaved

_RUN = "trial-sft-20260102-000000-bbbbbbbb"
#: One line of the log.
_LINE = b"step 1234 loss 0.123456 reward 0.4 tokens/s 12345.6 and more text of a usual log line\n"
#: Size of the log in bytes.
_LOG_BYTES = 4 << 30
#: Size of the log in a quick run, in bytes.
_QUICK_LOG_BYTES = 1 << 26
#: The memory use of a command is read each time the command has written this number of bytes.
_READ_BYTES = 1 << 24
#: Number of bytes in one read from the pipe of a command whose duration is measured.
_PIPE_READ_BYTES = 1 << 16
#: Matches the line `VmHWM` of /proc/PID/status. This line has the largest resident memory that the
#: process has used so far.
_PEAK = re.compile(r"VmHWM:\s+(\d+) kB")


def measure(*, quick: bool) -> Result:
    """Compare `muster logs` with `cat`: CPU time, duration, memory, and time to the first line."""
    with folder() as place:
        log = _write_log(place, _QUICK_LOG_BYTES if quick else _LOG_BYTES)
        env = {**os.environ, "MUSTER_HOME": str(place)}
        logs = (sys.executable, "-m", "tasks.command", "logs", _RUN)
        cat = ("cat", str(log))
        ways: dict[str, Sample] = {
            "whole": partial(_measure_cpu_ms, (*logs, "trainer"), env),
            "whole, cat": partial(_measure_cpu_ms, cat, env),
            "prefixed": partial(_measure_cpu_ms, logs, env),
            "wall": partial(_measure_wall_ms, (*logs, "trainer"), env),
            "wall, cat": partial(_measure_wall_ms, cat, env),
            "wall, prefixed": partial(_measure_wall_ms, logs, env),
            "last": partial(_measure_cpu_ms, (*logs, "--tail", "1"), env),
            "first": partial(_measure_first_line_ms, (*logs, "trainer"), env),
            "first, cat": partial(_measure_first_line_ms, cat, env),
            "memory": partial(_measure_memory_mb, (*logs, "trainer"), env),
            "memory, cat": partial(_measure_memory_mb, cat, env),
        }
        taken = interleaved(ways, 1 if quick else 5)
    cpu = "user and system CPU time, output to /dev/null"
    wall = "from the start of the command to its end; a reader discards the output"
    rows = [
        Row(way="Muster: whole log of a component", values=taken["whole"], note=cpu, group="whole"),
        Row(way="cat: whole log", values=taken["whole, cat"], note=cpu, group="whole"),
        Row(
            way="Muster: whole log with the name of the component before each line",
            values=taken["prefixed"],
            note=cpu,
            group="whole",
        ),
        Row(
            way="Muster: whole log of a component, to a pipe",
            values=taken["wall"],
            note=wall,
            group="pipe",
        ),
        Row(way="cat: whole log, to a pipe", values=taken["wall, cat"], note=wall, group="pipe"),
        Row(
            way="Muster: whole log with the name of the component before each line, to a pipe",
            values=taken["wall, prefixed"],
            note=wall,
            group="pipe",
        ),
        Row(way="Muster: last line", values=taken["last"], note=cpu, group="last"),
        Row(way="Muster: start to first line", values=taken["first"], group="first"),
        Row(way="cat: start to first line", values=taken["first, cat"], group="first"),
        Row(way="Muster: peak memory", values=taken["memory"], unit="MB", group="memory"),
        Row(way="cat: peak memory", values=taken["memory, cat"], unit="MB", group="memory"),
    ]
    return Result(
        name="logs",
        question="Output of a log of 4 GiB by `muster logs`, for a run with files on this machine",
        rows=rows,
    )


def _write_log(home: Path, size: int) -> Path:
    """Write the logs of a run's first attempt, and return the path of the large log.

    Args:
        home: The MUSTER_HOME of the run.
        size: Approximate size of the large log, in bytes.
    """
    place = RunPlace.of(_RUN, home).attempt(1)
    place.directory.mkdir(parents=True)
    log = place.log("trainer")
    block = _LINE * ((1 << 20) // len(_LINE))
    with log.open("wb") as file:
        for _ in range(size >> 20):
            file.write(block)
    place.log("environment").write_bytes(_LINE)
    return log


def _measure_cpu_ms(command: Sequence[str], env: dict[str, str]) -> float:
    """Run a command without output, and return its user and system CPU time in milliseconds.

    Raises:
        RuntimeError: The command failed.
    """
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    _pid, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} exited with {process.returncode}")
    return 1000 * (usage.ru_utime + usage.ru_stime)


def _measure_wall_ms(command: Sequence[str], env: dict[str, str]) -> float:
    """Run a command whose output goes to a pipe, and return the milliseconds until its end.

    Raises:
        RuntimeError: The command failed.
    """
    began = time.monotonic()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        buffer = bytearray(_PIPE_READ_BYTES)
        while process.stdout.readinto(buffer):  # type: ignore[attr-defined]
            pass
    if process.returncode:
        raise RuntimeError(f"{command} exited with {process.returncode}")
    return 1000 * (time.monotonic() - began)


def _measure_memory_mb(command: Sequence[str], env: dict[str, str]) -> float:
    """Run a command, and return its largest resident memory in megabytes.

    The value comes from /proc/PID/status. `getrusage` would also count the memory of this process,
    from which the command was forked.
    """
    peak_kb = 0
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while process.stdout.read(_READ_BYTES):
            # The status file of an ended process has no line about memory, so the last value is
            # kept.
            status = Path(f"/proc/{process.pid}/status").read_text()
            if match := _PEAK.search(status):
                peak_kb = int(match[1])
    return peak_kb * 1024 / 1e6


def _measure_first_line_ms(command: Sequence[str], env: dict[str, str]) -> float:
    """Return the milliseconds from the start of a command to its first line of output."""
    began = time.monotonic()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        took_s = time.monotonic() - began
        process.kill()
    return 1000 * took_s
