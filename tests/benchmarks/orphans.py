"""What is left of a component after its supervisor was stopped, and after it was killed.

The component, beside another one that does as it is told, has five processes that ignore SIGTERM;
see `stubborn.py`. The evidence is what they wrote of themselves and what the kernel says of them:
no supervisor's word counts.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from tasks.processes import tree
from tasks.server.server import prefect_server
from tests.benchmarks import peers
from tests.benchmarks.report import Result, Row, say
from tests.benchmarks.stage import FlowProcess, folder, part, python_alone, wait_until
from tests.benchmarks.stubborn import ROLES

_ROUNDS, _QUICK_ROUNDS = 3, 1
_GRACE_S = 2.0
_STOPPED_WITHIN_S = 15.0
#: What is still there then stays; a grace period, and more.
_WATCHED_S, _QUICK_WATCHED_S = 10.0, 6.0
_SCRIPT = Path(__file__).with_name("stubborn.py")
_MUSTER = "Muster: the flow `train`"

#: Of a process: its pid, and when it started.
_Id = tuple[int, int]
#: Makes a component in the folder, does to its supervisor what the signal says, and calls back.
_Way = Callable[[Path, signal.Signals, "_Watch"], None]
#: Told when the order was given, in monotonic seconds.
_Watch = Callable[[float], None]


def measure(*, quick: bool) -> Result:
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    watched_s = _QUICK_WATCHED_S if quick else _WATCHED_S
    found, missing = peers.present()
    left: dict[tuple[str, str], list[float]] = {}
    gone_ms: dict[str, list[float]] = {}
    with prefect_server(password="") as url:
        ways: dict[str, _Way] = {_MUSTER: partial(_by_flow, url)}
        ways |= {peer.name: partial(_by_peer, peer) for peer in found}
        for number in range(rounds):
            say(f"  round {number + 1} of {rounds}")
            for name in random.sample(list(ways), len(ways)):
                for what, signum in (("stopped", signal.SIGTERM), ("killed", signal.SIGKILL)):
                    count, took_ms = _sample(ways[name], signum, watched_s)
                    left.setdefault((what, name), []).append(float(count))
                    if count == 0:
                        gone_ms.setdefault(f"{name}, {what}", []).append(took_ms)
    unit = f"of {len(ROLES)}"
    rows = [
        Row(
            way=f"{name}, left after it was {what}",
            values=left[what, name],
            unit=unit,
            group=what,
            note=f"looked for {watched_s:g} s" if left[what, name][0] else "",
        )
        for what in ("stopped", "killed")
        for name in ways
    ]
    rows += [
        Row(
            way=f"{name}, until nothing was left",
            values=values,
            is_detail=True,
            note=f"grace period {_GRACE_S:g} s",
        )
        for name, values in sorted(gone_ms.items())
    ]
    return Result(
        name="orphans",
        question="processes left of a component whose five ignore SIGTERM: its child, a session, a "
        "daemon and a daemon with an empty environment among them",
        rows=rows,
        missing=missing,
    )


def _sample(way: _Way, signum: signal.Signals, watched_s: float) -> tuple[int, float]:
    """How many are left, and how long the last of them took to go."""
    seen: list[tuple[int, float]] = []
    with folder() as place:
        try:

            def watch(began: float) -> None:
                everybody = _processes(place)
                deadline = time.monotonic() + watched_s
                while (left := _alive(everybody)) and time.monotonic() < deadline:
                    time.sleep(0.01)
                seen.append((len(left), 1000 * (time.monotonic() - began)))

            way(place, signum, watch)
        finally:
            for pid, _started in _alive(_processes(place)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return seen[0]


def _by_flow(url: str, place: Path, signum: signal.Signals, watch: _Watch) -> None:
    spec = {
        "name": "bench",
        "workload": "grpo",
        "components": {
            name: {"command": list(argv), "stop": {"grace_s": _GRACE_S}}
            for name, argv in _commands(place).items()
        },
    }
    with FlowProcess(place, spec, url) as flow:
        flow.components()
        _await_tree(place)
        _end(flow.popen, signum, watch)


def _by_peer(peer: peers.Peer, place: Path, signum: signal.Signals, watch: _Watch) -> None:
    job = peers.Job(
        place=place,
        commands=_commands(place),
        ends_together=False,
        grace_s=_GRACE_S,
    )
    with peers.running(peer, job) as popen:
        _await_tree(place)
        _end(popen, signum, watch)


def _end(supervisor: subprocess.Popen[bytes], signum: signal.Signals, watch: _Watch) -> None:
    """A stop is over when the supervisor has ended; a SIGKILL is that."""
    began = time.monotonic()
    supervisor.send_signal(signum)
    # honcho waits for as long as something of the component holds its output.
    with suppress(subprocess.TimeoutExpired):
        supervisor.wait(_STOPPED_WITHIN_S)
    watch(began)


def _commands(place: Path) -> dict[str, tuple[str, ...]]:
    """Beside the stubborn one there is one that ends when it is told: only after the first end does
    honcho kill anybody."""
    return {"api": part("wait", "api", place), "trainer": python_alone(_SCRIPT, place)}


def _await_tree(place: Path) -> None:
    wait_until(lambda: len(_processes(place)) == len(ROLES), "the component's processes")


def _processes(place: Path) -> list[_Id]:
    found = []
    for path in place.glob("*.process"):
        with suppress(ValueError):
            pid, started = map(int, path.read_text().split())
            found.append((pid, started))
    return found


def _alive(processes: list[_Id]) -> list[_Id]:
    return [
        (pid, started)
        for pid, started in processes
        if tree.start_ticks(pid) == started and not tree.is_zombie(pid)
    ]
