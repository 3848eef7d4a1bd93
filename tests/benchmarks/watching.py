"""Benchmark of watching 10, 100 and 1,000 idle components: CPU use and memory.

All ways watch the same number of components at the same time, so that they are measured in the same
time window.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from tasks.processes import tree
from tests.benchmarks import peers
from tests.benchmarks.footprint import cpu_percent, memory_mb, program, shared_memory_mb
from tests.benchmarks.harness import await_sleepers, folder, sleepers
from tests.benchmarks.report import Missing, Result, Row, say

#: Methods of watching processes, as arguments of the program `watched.py`: Muster's method, and two
#: polling loops. `_MODELS` maps the name of a polling loop to its title in the printed table.
_MUSTER = "muster"
_MODELS = {"psutil": "psutil every 1 s", "poll": "Popen.poll every 1 s"}
#: Seconds from the start of the last component to the first time window of the CPU measurement.
_SETTLE_S = 1.0


def measure(*, quick: bool) -> Result:
    """Measure CPU use, memory and start time of Muster and other supervisors.

    The supervised components are idle, and their number grows.
    """
    counts, windows, window_s = ((10,), 2, 1.0) if quick else ((1000, 100, 10), 5, 10.0)
    installed_peers, missing = peers.find_installed()
    rows: list[Row] = []
    for count in counts:
        rows += _watch(count, windows, window_s, installed_peers, missing)
    return Result(
        name="watching",
        question="Supervision of idle components (programs of a run): CPU use of the supervision "
        "in % of one core, its memory, and the time to start all components. The number in each "
        "row is the number of components",
        rows=rows,
        missing=missing,
    )


def _watch(
    count: int,
    windows: int,
    window_s: float,
    installed_peers: list[peers.Peer],
    missing: list[Missing],
) -> list[Row]:
    """Measure Muster's supervisor, the polling loops, and the supervisors of other projects.

    Args:
        count: Number of components that each supervisor and each polling loop watches.
        windows: Number of time windows.
        window_s: Length of a window, in seconds.
        installed_peers: Installed supervisors of other projects.
        missing: This function appends the supervisors that do not start in time.
    """
    say(f"  starting {1 + len(_MODELS) + len(installed_peers)} x {count} components")
    with ExitStack() as stack:
        pids: dict[str, int] = {}
        took_s: dict[str, float] = {}
        for way in (_MUSTER, *_MODELS):
            pids[way], took_s[way] = stack.enter_context(_watcher(way, count))
        for peer in installed_peers:
            try:
                pids[peer.name], took_s[peer.name] = stack.enter_context(_peer(peer, count))
            except TimeoutError as late:
                missing.append(Missing(way=f"{peer.name}, {count:,}", why=str(late)))
        groups = {name: _supervising(pid) for name, pid in pids.items()}
        guardians = groups[_MUSTER][1:]
        if len(guardians) != count:
            raise RuntimeError(f"{len(guardians)} guardians for {count} components")
        say(f"  {count} components each: {windows} windows of {window_s:g} s")
        time.sleep(_SETTLE_S)
        used: dict[str, list[float]] = {name: [] for name in (*groups, "guardians")}
        for _ in range(windows):
            for name, share in cpu_percent({**groups, "guardians": guardians}, window_s).items():
                used[name].append(share)
        memory = {name: shared_memory_mb(group) for name, group in groups.items()}
        guardian_rss, guardian_pss = (
            statistics.mean(column) for column in zip(*map(memory_mb, guardians), strict=True)
        )
    titles = {_MUSTER: "Muster: Supervisor and guardians", **_MODELS}
    n = f"{count:,}"
    rows = []
    for figure, unit, values in (
        ("CPU", "%", used),
        ("memory (PSS)", "MB", {name: [mb] for name, mb in memory.items()}),
        ("start of all", "s", {name: [seconds] for name, seconds in took_s.items()}),
    ):
        for name in groups:
            row = Row(
                way=f"{titles.get(name, name)}, {n}, {figure}",
                values=values[name],
                unit=unit,
                how="modelled" if name in _MODELS else "measured",
                group=f"{n}, {figure}",
                at=count,
            )
            rows.append(row)
    details = [
        Row(way=f"the guardians of {n}, CPU", values=used["guardians"], unit="%"),
        Row(way=f"a guardian of {n}, its share of memory (PSS)", values=[guardian_pss], unit="MB"),
        Row(way=f"a guardian of {n}, RSS", values=[guardian_rss], unit="MB"),
    ]
    return rows + [replace(row, group=row.way, is_detail=True, at=count) for row in details]


@contextmanager
def _watcher(way: str, count: int) -> Iterator[tuple[int, float]]:
    """Start the program `watched.py` with its components.

    Args:
        way: Name of the method to watch the components, an argument of `watched.py`.
        count: Number of components.

    Yields:
        The process id of the program, and the seconds until all components were running.
    """
    with folder() as place:
        began = time.monotonic()
        popen = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.watched", way, str(count), str(place)],
            cwd=Path.cwd(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert popen.stdout is not None
            if popen.stdout.readline() != b"up\n":
                raise RuntimeError(f"{way} did not start {count} components")
            await_sleepers(place, count)
            yield popen.pid, time.monotonic() - began
        finally:
            popen.communicate()


@contextmanager
def _peer(peer: peers.Peer, count: int) -> Iterator[tuple[int, float]]:
    """Start a supervisor of another project, with its components.

    Args:
        peer: The supervisor.
        count: Number of components.

    Yields:
        The process id of the supervisor, and the seconds until all components ran.
    """
    with folder() as place:
        job = peers.Job(place=place, commands=sleepers(place, count), ends_together=False)
        began = time.monotonic()
        with peers.running(peer, job) as popen:
            try:
                await_sleepers(place, count)
            except TimeoutError as late:
                raise TimeoutError(f"{late}; it said: {peers.read_output(job)}") from None
            yield popen.pid, time.monotonic() - began


def _supervising(pid: int) -> list[int]:
    """Return the process ids of a supervisor and of its descendants that are not components."""
    component_programs = ("sh", "sleep", "")
    return [
        pid,
        *(
            descendant
            for descendant in tree.descendants(pid)
            if program(descendant) not in component_programs
        ),
    ]
