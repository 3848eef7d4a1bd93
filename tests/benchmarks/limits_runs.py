"""What a run takes: its flow process by its components, and many runs that start at once."""

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
from tests.benchmarks.limits_series import By, database_mb, server_pid
from tests.benchmarks.report import Row, say
from tests.benchmarks.stage import FlowProcess, await_sleepers, folder, sleepers
from tests.support.ground import Server

_COMPONENTS, _QUICK_COMPONENTS = (1, 10, 100, 1_000), (1, 5)
_AT_ONCE, _QUICK_AT_ONCE = (1, 4, 16), (1, 2)
_WINDOW_S, _QUICK_WINDOW_S = 30.0, 2.0
_STARTED_WITHIN_S = 900.0
_STEPS = 20
#: Writes a step each half second, and then ends.
_STEPPING = """\
import json, sys, time
with open(sys.argv[1], "a") as f:
    for step in range(1, int(sys.argv[2]) + 1):
        print(json.dumps({"step": step}), file=f, flush=True)
        time.sleep(0.5)
"""


def rows(*, quick: bool) -> list[Row]:
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        server = Server(Path(name))
        server.start()
        try:
            for count in _QUICK_COMPONENTS if quick else _COMPONENTS:
                say(f"    a run of {count:,} components")
                found += _components(server, count, quick=quick)
            for count in _QUICK_AT_ONCE if quick else _AT_ONCE:
                say(f"    {count} runs at once")
                found += _at_once(server, Path(name), count)
            found += _steps(server)
        finally:
            server.kill()
    return found


def _components(server: Server, count: int, *, quick: bool) -> Iterator[Row]:
    by = By(what="components", count=count)
    with folder() as place:
        began = time.monotonic()
        with FlowProcess(place, _spec(sleepers(place, count)), server.api) as flow:
            flow.components(_STARTED_WITHIN_S)
            await_sleepers(place, count)
            yield by.row("flow process, start of all", time.monotonic() - began, "s")
            pid = flow.popen.pid
            below = tree.descendants(pid)
            guardians = [one for one in below if _runs_guardian(one)]
            groups = {"flow": [pid], "guardians": guardians}
            used = cpu_percent(groups, _QUICK_WINDOW_S if quick else _WINDOW_S)
            yield by.row("flow process, CPU", used["flow"], "%")
            yield by.row("guardians, CPU", used["guardians"], "%")
            yield by.row("flow process, RSS", memory_mb(pid)[0], "MB")
            yield by.row("guardians, memory (PSS)", shared_memory_mb(guardians), "MB")
            yield by.row("flow process, file descriptors", fds(pid), "fds")
            yield by.row("flow process, threads", threads(pid), "threads")
            yield by.row("a run, its own processes", len(below) + 1 - count, "processes")
            yield by.row("events.jsonl, a start", _events_kb(place), "kB")
            began = time.monotonic()
        yield by.row("flow process, stop of all", time.monotonic() - began, "s")
        yield by.row("events.jsonl, a whole attempt", _events_kb(place), "kB")


def _at_once(server: Server, home: Path, count: int) -> Iterator[Row]:
    """So many runs of three components, each a process of its own, started in the same moment."""
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
        pss = [shared_memory_mb([pid for pid in one if _is_musters(pid)]) for one in trees]
        yield by.row("a run, memory (PSS)", sum(pss) / count, "MB")
        yield by.row("server, RSS", memory_mb(server_pid(server.api))[0], "MB")
    yield by.row("server, database a run", 1000 * (database_mb(home) - before_mb) / count, "kB")


def _steps(server: Server) -> Iterator[Row]:
    """What a step adds to a run's events."""
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
    components = {
        name: {"command": list(argv), "stop": {"grace_s": 5}} for name, argv in commands.items()
    }
    return {"name": "bench", "workload": "grpo", "components": components}


def _events(place: Path) -> list[str]:
    [path] = place.glob("muster/runs/*/attempt-01/events.jsonl")
    return path.read_text().splitlines(keepends=True)


def _events_kb(place: Path) -> float:
    return sum(map(len, _events(place))) / 1000


def _runs_guardian(pid: int) -> bool:
    return b"guardian.py" in _command_line(pid)


def _is_musters(pid: int) -> bool:
    """A flow process or a guardian; the components are the user's."""
    return b"guardian.py" in _command_line(pid) or b"flows.train" in _command_line(pid)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
