"""Many components of one run: what it costs to start them, to wait for the silence of all, and to
stop and to kill all.
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
from tests.benchmarks.report import Result, Row, interleaved, say
from tests.benchmarks.stage import folder, sleepers, supervisor_of

_STALL_AFTER_S = 1800.0


def measure(*, quick: bool) -> Result:
    idle, windows, window_s = (20, 2, 1.0) if quick else (1000, 3, 20.0)
    counts, rounds = ((10,), 1) if quick else ((30, 100, 300), 2)
    rows = [*_whole(idle), *_waiting(idle, windows, window_s)]
    for count in counts:
        taken = interleaved(
            {
                "Muster": lambda count=count: _kill(count),
                "listing": lambda count=count: _listing(count),
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
        question="components that do nothing: start of all, their guardians' memory, stop of all; "
        "with `stall_after_s: 1800`, CPU in % of one core; and SIGKILL to all of a run until "
        "nothing of it is left",
        rows=rows,
    )


def _whole(count: int) -> list[Row]:
    """A run from its start to its stop, with guardians forked from a template and started each."""
    rows = []
    for way, guardians in (("Muster", nullcontext), ("a start each", _guardians_started)):
        say(f"  {way}: start and stop of {count:,} components")
        with guardians(), folder() as place:
            commands = sleepers(place, count)
            began = time.monotonic()
            with supervisor_of(place, commands, dict.fromkeys(commands)) as supervisor:
                for name in commands:
                    supervisor.start(name)
                started = time.monotonic()
                memory_mb = shared_memory_mb(
                    [tree.parent_of(pid) for pid in _pids(supervisor, commands)]
                )
                stopping = time.monotonic()
                supervisor.teardown()
                stopped = time.monotonic()
        for what, value, unit in (
            ("start", (started - began) * 1000, "ms"),
            ("guardians' memory (PSS)", memory_mb, "MB"),
            ("stop", (stopped - stopping) * 1000, "ms"),
        ):
            group = f"{count:,}: {what}"
            rows.append(Row(way=f"{way}, {group}", values=[value], unit=unit, group=group))
    return rows


def _pids(supervisor: Supervisor, names: Iterable[str]) -> list[int]:
    said = (supervisor.describe(name) for name in names)
    return [int(one.partition("pid ")[2].rstrip(")")) for one in said]


@contextmanager
def _guardians_started() -> Iterator[None]:
    """As they are where the template is lost."""
    with mock.patch.object(guarded.GuardianTemplate, "fork", side_effect=OSError):
        yield


def _waiting(count: int, windows: int, window_s: float) -> list[Row]:
    say(f"  starting {count} components")
    with folder() as place, ExitStack() as stack:
        commands = sleepers(place, count)
        before = set(threading.enumerate())
        supervisor = stack.enter_context(
            supervisor_of(place, commands, dict.fromkeys(commands), stall_after_s=_STALL_AFTER_S)
        )
        [watch] = [one for one in set(threading.enumerate()) - before if one.name == "supervisor"]
        for name in commands:
            supervisor.start(name)
        guardians = [tree.parent_of(pid) for pid in _pids(supervisor, commands)]
        over = threading.Event()
        logs = [place / f"{name}.log" for name in commands]
        model = threading.Thread(target=models.open_logs, args=(logs, over.is_set))
        model.start()
        stack.callback(model.join)
        stack.callback(over.set)
        used: dict[str, list[float]] = {"Muster": [], "guardians": [], "model": []}
        say(f"  {windows} windows of {window_s:g} s")
        for _ in range(windows):
            spent = (thread_cpu_ns(watch), cpu_ns(guardians), thread_cpu_ns(model))
            began_ns = time.monotonic_ns()
            time.sleep(window_s)
            took_ns = time.monotonic_ns() - began_ns
            now = (thread_cpu_ns(watch), cpu_ns(guardians), thread_cpu_ns(model))
            for way, at, since in zip(used, now, spent, strict=True):
                used[way].append(100 * (at - since) / took_ns)
        supervisor.hurry()
    group = f"{count:,} idle"
    both = [sum(shares) for shares in zip(used["Muster"], used["guardians"], strict=True)]
    row = Row(way=f"Muster: {group}, supervisor and guardians", values=both, unit="%", group=group)
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
    with folder() as place:
        commands = sleepers(place, count)
        with supervisor_of(place, commands, dict.fromkeys(commands)) as supervisor:
            for name in commands:
                supervisor.start(name)
            began = time.monotonic()
            supervisor.hurry()
            supervisor.teardown()
            return (time.monotonic() - began) * 1000


def _listing(count: int) -> float:
    with _guardians_that_list():
        return _kill(count)


@contextmanager
def _guardians_that_list() -> Iterator[None]:
    """As they are where the kernel does not tell the children of a process."""
    ours = Path(guarded.__file__).parent
    kept = guarded._GUARDIAN
    with folder() as place:
        for name in ("guardian.py", "cgroup.py", "tree.py"):
            shutil.copy(ours / name, place)
        text = (place / "tree.py").read_text()
        listing, number = re.subn(
            r"^_CHILDREN = .*$", '_CHILDREN = "/no/such/file"', text, flags=re.M
        )
        assert number == 1
        (place / "tree.py").write_text(listing)
        guarded._GUARDIAN = (*kept[:-1], str(place / "guardian.py"))
        try:
            yield
        finally:
            guarded._GUARDIAN = kept
