"""Series of runs: resources of a flow process by its components, and runs that start together."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tasks.processes import tree
from tests.benchmarks.footprint import cpu_percent, fds, memory_mb, shared_memory_mb, threads
from tests.benchmarks.harness import FlowProcess, await_sleepers, folder, sleepers
from tests.benchmarks.limits_series import By, database_mb, server_pid
from tests.benchmarks.report import Row, say
from tests.support.host_environment import Server

#: Numbers of components of the measured runs.
_COMPONENTS, _QUICK_COMPONENTS = (1, 10, 100, 1_000), (1, 5)
#: Numbers of runs that start at the same moment.
_AT_ONCE, _QUICK_AT_ONCE = (1, 4, 16), (1, 2)
#: Length of the time window in which the CPU use is measured, in seconds.
_WINDOW_S, _QUICK_WINDOW_S = 30.0, 2.0
#: Time limit on the start of a run, in seconds.
_STARTED_WITHIN_S = 900.0
_STEPS = 20
#: Program that writes one training step each half second to a file, and then ends.
_STEPPING = """\
import json, sys, time
with open(sys.argv[1], "a") as f:
    for step in range(1, int(sys.argv[2]) + 1):
        print(json.dumps({"step": step}), file=f, flush=True)
        time.sleep(0.5)
"""


def rows(*, quick: bool) -> list[Row]:
    """Measure runs with different numbers of components, and runs that start together."""
    measured: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        server = Server(Path(name))
        server.start()
        try:
            for count in _QUICK_COMPONENTS if quick else _COMPONENTS:
                say(f"    a run of {count:,} components")
                measured += _components(server, count, quick=quick)
            for count in _QUICK_AT_ONCE if quick else _AT_ONCE:
                say(f"    {count} runs at once")
                measured += _at_once(server, Path(name), count)
            measured += _steps(server)
        finally:
            server.kill()
    return measured


def _components(server: Server, count: int, *, quick: bool) -> Iterator[Row]:
    """Measure the resources of one run with `count` components."""
    by = By(what="components", count=count)
    with folder() as place:
        began = time.monotonic()
        with FlowProcess(place, _spec(sleepers(place, count)), server.api) as flow:
            flow.components(_STARTED_WITHIN_S)
            await_sleepers(place, count)
            yield by.row("flow process, start of all", time.monotonic() - began, "s")
            pid = flow.popen.pid
            descendants = tree.descendants(pid)
            guardians = [descendant for descendant in descendants if _runs_guardian(descendant)]
            groups = {"flow": [pid], "guardians": guardians}
            used = cpu_percent(groups, _QUICK_WINDOW_S if quick else _WINDOW_S)
            yield by.row("flow process, CPU", used["flow"], "%")
            yield by.row("guardians, CPU", used["guardians"], "%")
            yield by.row("flow process, RSS", memory_mb(pid)[0], "MB")
            yield by.row("guardians, memory (PSS)", shared_memory_mb(guardians), "MB")
            yield by.row("flow process, file descriptors", fds(pid), "fds")
            yield by.row("flow process, threads", threads(pid), "threads")
            own_count = len(descendants) + 1 - count
            yield by.row("a run, its own processes", own_count, "processes")
            yield by.row("events.jsonl, a start", _events_kb(place), "kB")
            began = time.monotonic()
        yield by.row("flow process, stop of all", time.monotonic() - began, "s")
        yield by.row("events.jsonl, a whole attempt", _events_kb(place), "kB")


def _at_once(server: Server, home: Path, count: int) -> Iterator[Row]:
    """Start `count` runs at the same moment, each with three components.

    Measure the time until all components run, the memory, and the growth of the database.
    """
    by = By(what="runs at once", count=count)
    before_mb = database_mb(home)
    with ExitStack() as stack:
        places = [stack.enter_context(folder()) for _ in range(count)]
        began = time.monotonic()
        flows = [
            stack.enter_context(FlowProcess(place, _spec(sleepers(place, 3)), server.api))
            for place in places
        ]
        for flow in flows:
            flow.components(_STARTED_WITHIN_S)
        yield by.row("runs, start of all", time.monotonic() - began, "s")
        trees = [[flow.popen.pid, *tree.descendants(flow.popen.pid)] for flow in flows]
        memory_of_runs_mb = [
            shared_memory_mb([pid for pid in pids if _belongs_to_muster(pid)]) for pids in trees
        ]
        yield by.row("a run, memory (PSS)", sum(memory_of_runs_mb) / count, "MB")
        yield by.row("server, RSS", memory_mb(server_pid(server.api))[0], "MB")
    yield by.row("server, database per run", 1000 * (database_mb(home) - before_mb) / count, "kB")


def _steps(server: Server) -> Iterator[Row]:
    """Measure the bytes that a training step adds to the run's event log."""
    with folder() as place:
        steps = place / "steps.jsonl"
        spec = {
            **_spec({"trainer": (sys.executable, "-c", _STEPPING, str(steps), str(_STEPS))}),
            "progress": {"jsonl": str(steps), "step": "step", "total": _STEPS},
        }
        with FlowProcess(place, spec, server.api) as flow:
            flow.wait()
        lines = [line for line in _events(place) if json.loads(line)["event"] == "run.progress"]
    way = "events.jsonl, a step"
    yield Row(
        way=way,
        values=[float(len(line)) for line in lines],
        unit="bytes",
        group=way,
        is_detail=True,
        note=f"{len(lines)} lines for {_STEPS} steps",
    )


def _spec(commands: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return the spec of a run with one component per command."""
    components = {
        name: {"command": list(argv), "stop": {"grace_s": 5}} for name, argv in commands.items()
    }
    return {"name": "bench", "workload": "grpo", "components": components}


def _events(place: Path) -> list[str]:
    """Return the lines of the run's event log."""
    [path] = place.glob("muster/runs/*/attempt-01/events.jsonl")
    return path.read_text().splitlines(keepends=True)


def _events_kb(place: Path) -> float:
    """Return the size of the run's event log, in kilobytes."""
    return sum(map(len, _events(place))) / 1000


def _runs_guardian(pid: int) -> bool:
    return b"guardian.py" in _command_line(pid)


def _belongs_to_muster(pid: int) -> bool:
    """Return True if the process is a flow process or a guardian, and False for a component.

    A guardian is the process of Muster that starts a component and ends it.
    """
    return b"guardian.py" in _command_line(pid) or b"flows.train" in _command_line(pid)


def _command_line(pid: int) -> bytes:
    """Return the command line of a process, or empty bytes if it has exited."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
