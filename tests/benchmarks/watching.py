"""CPU of watching 10, 100 and 1,000 components, none of which does anything.

The ways watch as many components each, side by side, so all are measured over the same seconds.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from tasks.run.layout import project_root
from tasks.supervise import tree
from tests.benchmarks.report import Result, Row, say
from tests.benchmarks.stage import folder

_WAYS = ("supervisor", "psutil", "poll")
_SETTLE_S = 1.0


def measure(*, quick: bool) -> Result:
    counts, windows, window_s = ((10,), 2, 1.0) if quick else ((1000, 100, 10), 5, 10.0)
    rows: list[Row] = []
    for count in counts:
        rows += _watch(count, windows, window_s)
    return Result(
        name="watching",
        question="CPU of watching components that do nothing, in % of one core",
        rows=rows,
    )


def _watch(count: int, windows: int, window_s: float) -> list[Row]:
    say(f"  starting {len(_WAYS)} x {count} components")
    with ExitStack() as stack:
        pids, took_s = {}, {}
        for way in _WAYS:
            began = time.monotonic()
            pids[way] = stack.enter_context(_watcher(way, count))
            took_s[way] = time.monotonic() - began
        guardians = _guardians_of(pids["supervisor"])
        if len(guardians) != count:
            raise RuntimeError(f"{len(guardians)} guardians for {count} components")
        say(f"  {count} components each: {windows} windows of {window_s:g} s")
        time.sleep(_SETTLE_S)
        groups = {**{way: [pid] for way, pid in pids.items()}, "guardians": guardians}
        used: dict[str, list[float]] = {group: [] for group in groups}
        for _ in range(windows):
            for group, percent in _cpu_percent(groups, window_s).items():
                used[group].append(percent)
        memory = [_memory_mb(pid) for pid in guardians]
    both = [a + b for a, b in zip(used["supervisor"], used["guardians"], strict=True)]
    n = f"{count:,}"
    rss, pss = (statistics.mean(column) for column in zip(*memory, strict=True))
    rows = [
        Row(way=f"Muster, {n}: Supervisor and guardians", values=both, unit="%"),
        Row(way="its guardians", values=used["guardians"], unit="%", is_detail=True),
        Row(way="memory of a guardian, its share (PSS)", values=[pss], unit="MB", is_detail=True),
        Row(way="memory of a guardian, RSS", values=[rss], unit="MB", is_detail=True),
        Row(way="starting them all", values=[took_s["supervisor"]], unit="s", is_detail=True),
        Row(way=f"psutil each 1 s, {n} (circus)", values=used["psutil"], unit="%", note="model"),
        Row(way=f"Popen.poll each 1 s, {n}", values=used["poll"], unit="%", note="model"),
        Row(way="starting them all", values=[took_s["poll"]], unit="s", is_detail=True),
    ]
    return [replace(row, group=n) for row in rows]


@contextmanager
def _watcher(way: str, count: int) -> Iterator[int]:
    """A watching process, by its pid."""
    with folder() as place:
        popen = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.watched", way, str(count), str(place)],
            cwd=project_root(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert popen.stdout is not None
            if popen.stdout.readline() != b"up\n":
                raise RuntimeError(f"{way} did not start {count} components")
            yield popen.pid
        finally:
            popen.communicate()


def _guardians_of(pid: int) -> list[int]:
    return [
        child
        for child in tree.children(pid)
        if b"guardian.py" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def _cpu_percent(groups: dict[str, list[int]], window_s: float) -> dict[str, float]:
    before = {group: _cpu_ns(pids) for group, pids in groups.items()}
    began = time.monotonic_ns()
    time.sleep(window_s)
    took_ns = time.monotonic_ns() - began
    return {
        group: 100 * (_cpu_ns(pids) - before[group]) / took_ns for group, pids in groups.items()
    }


def _cpu_ns(pids: Sequence[int]) -> int:
    """Time on a CPU, user and system, to the nanosecond.

    Source: Documentation/scheduler/sched-stats.rst, /proc/<pid>/schedstat; in /proc/<pid>/stat it
    has a resolution of 10 ms, in which an idle guardian can't be told from none.
    """
    return sum(
        int(schedstat.read_text().split()[0])
        for pid in pids
        for schedstat in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


def _memory_mb(pid: int) -> tuple[float, float]:
    """RSS, and the share that would be free if it ended (PSS)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kb = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
    return kb["Rss"] / 1024, kb["Pss"] / 1024
