"""Benchmark of leftover processes after a supervisor was stopped, and after it was killed.

The supervisor runs two components. One ends on SIGTERM. The other has five processes that ignore
SIGTERM (`stubborn.py`). The processes record their own ids, and /proc shows which of them still
run. The reports of the supervisors are not used.
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
from tests.benchmarks.harness import FlowProcess, folder, part, python_alone, wait_until
from tests.benchmarks.report import Result, Row, say
from tests.benchmarks.stubborn import ROLES

_ROUNDS, _QUICK_ROUNDS = 3, 1
_GRACE_S = 2.0
#: Time limit on the stop of a supervisor, in seconds.
_STOPPED_WITHIN_S = 15.0
#: Duration of the watch for leftover processes after the end of the supervisor, in seconds. A
#: process that still runs after this time is a leftover. The time is longer than the grace period
#: `_GRACE_S`, so that a process that is about to be killed is not counted.
_WATCHED_S, _QUICK_WATCHED_S = 10.0, 6.0
_SCRIPT = Path(__file__).with_name("stubborn.py")
_MUSTER = "Muster: the flow `train`"

#: Identity of a process: its id, and its start time in clock ticks since boot.
_Id = tuple[int, int]
#: Function that measures one supervisor. The function runs the components in the folder, sends the
#: signal to their supervisor, and then calls the `_Watch` function.
_Way = Callable[[Path, signal.Signals, "_Watch"], None]
#: Function that waits until all processes have ended, but only for a limited time. The argument is
#: the time at which the signal was sent to the supervisor, in monotonic seconds.
_Watch = Callable[[float], None]


def measure(*, quick: bool) -> Result:
    """Count the leftover processes after the end of Muster and of other supervisors."""
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    watched_s = _QUICK_WATCHED_S if quick else _WATCHED_S
    installed_peers, missing = peers.find_installed()
    leftover_counts: dict[tuple[str, str], list[float]] = {}
    end_times_ms: dict[str, list[float]] = {}
    with prefect_server(password="") as url:
        ways: dict[str, _Way] = {_MUSTER: partial(_by_flow, url)}
        ways |= {peer.name: partial(_by_peer, peer) for peer in installed_peers}
        for number in range(rounds):
            say(f"  round {number + 1} of {rounds}")
            for name in random.sample(list(ways), len(ways)):
                for end, signum in (("stopped", signal.SIGTERM), ("killed", signal.SIGKILL)):
                    count, took_ms = _sample(ways[name], signum, watched_s)
                    leftover_counts.setdefault((end, name), []).append(float(count))
                    if count == 0:
                        end_times_ms.setdefault(f"{name}, {end}", []).append(took_ms)
    unit = f"of {len(ROLES)}"
    rows = [
        Row(
            way=f"{name}, remaining after it was {end}",
            values=leftover_counts[end, name],
            unit=unit,
            group=end,
            note=f"watched for {watched_s:g} s" if leftover_counts[end, name][0] else "",
        )
        for end in ("stopped", "killed")
        for name in ways
    ]
    rows += [
        Row(
            way=f"{name}, until no process remained",
            values=values,
            is_detail=True,
            note=f"grace period {_GRACE_S:g} s",
        )
        for name, values in sorted(end_times_ms.items())
    ]
    return Result(
        name="orphans",
        question="Number of processes of a component that are still alive after the component was "
        "stopped, or after the process that supervises it was killed. The component has five "
        "processes that ignore SIGTERM. Among these processes are a child, a process in a new "
        "session, a daemon, and a daemon with an empty environment",
        rows=rows,
        missing=missing,
    )


def _sample(way: _Way, signum: signal.Signals, watched_s: float) -> tuple[int, float]:
    """Stop or kill a supervisor with its components, and count the leftover processes.

    Args:
        way: Function that runs the supervisor and sends the signal.
        signum: Signal to the supervisor.
        watched_s: Duration of the watch for leftover processes, in seconds.

    Returns:
        The number of processes that still run at the end of the watch, and the milliseconds from
        the signal to the end of the watch. The watch ends early if all processes have ended.
    """
    results: list[tuple[int, float]] = []
    with folder() as place:
        try:

            def watch(began: float) -> None:
                processes = _processes(place)
                deadline = time.monotonic() + watched_s
                while (leftovers := _alive(processes)) and time.monotonic() < deadline:
                    time.sleep(0.01)
                results.append((len(leftovers), 1000 * (time.monotonic() - began)))

            way(place, signum, watch)
        finally:
            for pid, _started in _alive(_processes(place)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return results[0]


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
    """Send a signal to the supervisor, wait until it has ended, and call `watch`."""
    began = time.monotonic()
    supervisor.send_signal(signum)
    # honcho does not end while a process of a component keeps the component's output open. So the
    # wait for honcho may reach the time limit.
    with suppress(subprocess.TimeoutExpired):
        supervisor.wait(_STOPPED_WITHIN_S)
    watch(began)


def _commands(place: Path) -> dict[str, tuple[str, ...]]:
    """Return the commands of the two components.

    One component ends on SIGTERM, so that honcho can be stopped: honcho kills the other components
    only after one component has ended.
    """
    return {"api": part("wait", "api", place), "trainer": python_alone(_SCRIPT, place)}


def _await_tree(place: Path) -> None:
    wait_until(lambda: len(_processes(place)) == len(ROLES), "the component's processes")


def _processes(place: Path) -> list[_Id]:
    """Return the processes that have written their own ids to files in the folder."""
    processes = []
    for path in place.glob("*.process"):
        with suppress(ValueError):
            pid, started = map(int, path.read_text().split())
            processes.append((pid, started))
    return processes


def _alive(processes: list[_Id]) -> list[_Id]:
    """Return the processes that still run. Zombies and reused process ids do not count."""
    return [
        (pid, started)
        for pid, started in processes
        if tree.start_ticks(pid) == started and not tree.is_zombie(pid)
    ]
