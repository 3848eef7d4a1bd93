"""Benchmark of a run with many components: start, stop, kill, and the CPU use while all are idle.

The run has `stall_after_s`, so the supervisor checks that the components write to their logs.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

from tasks.processes import guarded, tree
from tasks.processes.supervisor import Supervisor
from tests.benchmarks import models
from tests.benchmarks.footprint import cpu_ns, shared_memory_mb, thread_cpu_ns
from tests.benchmarks.harness import folder, sleepers, supervisor_of
from tests.benchmarks.report import Result, Row, interleaved, say

_STALL_AFTER_S = 1800.0


def measure(*, quick: bool) -> Result:
    """Measure the start, the stop, the kill and the CPU use of runs with many idle components."""
    idle, windows, window_s = (20, 2, 1.0) if quick else (1000, 3, 20.0)
    counts, rounds = ((10,), 1) if quick else ((30, 100, 300), 2)
    rows = [*_start_and_stop(idle), *_idle(idle, windows, window_s)]
    for count in counts:
        taken = interleaved(
            {
                "Muster": lambda count=count: _kill(count),
                "listing": lambda count=count: _kill_with_listing(count),
            },
            rounds,
        )
        group = f"kill of {count:,}"
        rows += [
            Row(way=f"Muster: {group} components", values=taken["Muster"], group=group, at=count),
            Row(
                way=f"guardians that list all of /proc, {group}",
                values=taken["listing"],
                group=group,
                at=count,
                how="modelled",
            ),
        ]
    return Result(
        name="many",
        question="Runs with many idle components: time to start and to stop all components, and "
        "memory of the guardians, the small processes that own the components. The CPU use, in % "
        "of one core, is measured with `stall_after_s: 1800`, so that Muster also checks the logs "
        "of the components. The last rows show the time from SIGKILL of a whole run until no "
        "process of the run is alive",
        rows=rows,
    )


def _start_and_stop(count: int) -> list[Row]:
    """Measure the start and the stop of components, for two ways to start guardian processes.

    A guardian is the process that starts and ends a component. Muster forks the guardians from a
    template process. For comparison, a new Python program is started for each guardian.
    """
    rows = []
    for way, guardians in (
        ("Muster", nullcontext),
        ("a separate start for each", _guardians_started),
    ):
        say(f"  {way}: start and stop of {count:,} components")
        with guardians(), folder() as place:
            commands = sleepers(place, count)
            began = time.monotonic()
            with supervisor_of(place, commands, dict.fromkeys(commands)) as supervisor:
                for name in commands:
                    supervisor.start(name)
                started = time.monotonic()
                memory_mb = shared_memory_mb(
                    [tree.read_parent(pid) for pid in _pids(supervisor, commands)]
                )
                stopping = time.monotonic()
                supervisor.teardown()
                stopped = time.monotonic()
        for figure, value, unit in (
            ("start", (started - began) * 1000, "ms"),
            ("guardians' memory (PSS)", memory_mb, "MB"),
            ("stop", (stopped - stopping) * 1000, "ms"),
        ):
            group = f"{count:,}: {figure}"
            rows.append(Row(way=f"{way}, {group}", values=[value], unit=unit, group=group))
    return rows


def _pids(supervisor: Supervisor, names: Iterable[str]) -> list[int]:
    """Return the process ids of components that a supervisor has started."""
    descriptions = (supervisor.describe(name) for name in names)
    return [int(description.partition("pid ")[2].rstrip(")")) for description in descriptions]


@contextmanager
def _guardians_started() -> Iterator[None]:
    """Let Muster start a new program for each guardian process until the context ends.

    Normally, Muster forks the guardians from a template process. Muster starts new programs only if
    the template process has died.
    """
    with mock.patch.object(guarded.GuardianTemplate, "fork", side_effect=OSError):
        yield


def _idle(count: int, windows: int, window_s: float) -> list[Row]:
    """Measure the CPU use of the supervisor and the guardian processes with idle components.

    Args:
        count: Number of components.
        windows: Number of time windows.
        window_s: Length of a window, in seconds.
    """
    say(f"  starting {count} components")
    with folder() as place, ExitStack() as stack:
        commands = sleepers(place, count)
        other_threads = set(threading.enumerate())
        supervisor = stack.enter_context(
            supervisor_of(place, commands, dict.fromkeys(commands), stall_after_s=_STALL_AFTER_S)
        )
        new_threads = set(threading.enumerate()) - other_threads
        [watch] = [thread for thread in new_threads if thread.name == "supervisor"]
        for name in commands:
            supervisor.start(name)
        guardians = [tree.read_parent(pid) for pid in _pids(supervisor, commands)]
        is_over = threading.Event()
        logs = [place / f"{name}.log" for name in commands]
        model = threading.Thread(target=models.open_logs, args=(logs, is_over.is_set))
        model.start()
        stack.callback(model.join)
        stack.callback(is_over.set)
        used: dict[str, list[float]] = {"Muster": [], "guardians": [], "model": []}
        say(f"  {windows} windows of {window_s:g} s")
        for _ in range(windows):
            cpu_before = (thread_cpu_ns(watch), cpu_ns(guardians), thread_cpu_ns(model))
            began_ns = time.monotonic_ns()
            time.sleep(window_s)
            took_ns = time.monotonic_ns() - began_ns
            cpu_after = (thread_cpu_ns(watch), cpu_ns(guardians), thread_cpu_ns(model))
            for way, after_ns, before_ns in zip(used, cpu_after, cpu_before, strict=True):
                used[way].append(100 * (after_ns - before_ns) / took_ns)
        supervisor.hurry()
    group = f"{count:,} idle"
    sums = [sum(shares) for shares in zip(used["Muster"], used["guardians"], strict=True)]
    row = Row(way=f"Muster: {group}, supervisor and guardians", values=sums, unit="%", group=group)
    return [
        row,
        replace(
            row,
            way=f"each log opened twice a second, {group}",
            values=used["model"],
            how="modelled",
        ),
    ]


def _kill(count: int) -> float:
    """Kill a run with `count` components; return the milliseconds until all components ended."""
    with folder() as place:
        commands = sleepers(place, count)
        with supervisor_of(place, commands, dict.fromkeys(commands)) as supervisor:
            for name in commands:
                supervisor.start(name)
            began = time.monotonic()
            supervisor.hurry()
            supervisor.teardown()
            return (time.monotonic() - began) * 1000


def _kill_with_listing(count: int) -> float:
    """Kill a run with `count` components; return the milliseconds until all components ended.

    The guardian processes find their descendants in a list of all processes. Normally, guardian
    processes ask the kernel for child processes instead.
    """
    with _guardians_that_list():
        return _kill(count)


@contextmanager
def _guardians_that_list() -> Iterator[None]:
    """Let guardian processes find their descendants in a list of all processes in /proc.

    Normally, guardians ask the kernel for the child processes of a process. Guardians read the list
    of all processes only if the kernel has no list of a process's children.
    """
    source_folder = Path(guarded.__file__).parent
    original_command = guarded._GUARDIAN
    with folder() as place:
        for name in ("guardian.py", "cgroup.py", "tree.py"):
            shutil.copy(source_folder / name, place)
        text = (place / "tree.py").read_text()
        changed_text, changes = re.subn(
            r"^_CHILDREN = .*$", '_CHILDREN = "/no/such/file"', text, flags=re.M
        )
        assert changes == 1
        (place / "tree.py").write_text(changed_text)
        guarded._GUARDIAN = (*original_command[:-1], str(place / "guardian.py"))
        try:
            yield
        finally:
            guarded._GUARDIAN = original_command
