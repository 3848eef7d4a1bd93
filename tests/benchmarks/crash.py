"""Benchmark of the reaction to a crash: from SIGKILL of a component to SIGTERM at all others.

The benchmark reads the clock right before the kill. Each component reads the same clock in its
SIGTERM handler.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from tasks.server.server import prefect_server
from tasks.spec.probes import LiveProbe, ReadyProbe
from tests.benchmarks import models, peers, sglang_watchdog
from tests.benchmarks.harness import (
    NAMES,
    FlowProcess,
    folder,
    part,
    recorded_ns,
    supervisor_of,
    wait_until,
)
from tests.benchmarks.part import wait as wait_for_sigterm
from tests.benchmarks.report import Missing, NotHere, Result, Row, Sample, interleaved, say

#: Name of the component that is killed.
_VICTIM = "trainer"
#: Polling period, in seconds, of each launcher that checks its components rarely. "Hermes" is
#: Hermes' RL training tool, and "the plan" is the first design of Muster. Each sample takes a
#: whole period, so all samples are taken in parallel to save time.
_PERIODS_S = {"Hermes": 30.0, "the plan": 60.0}
#: Name of the feature with which each supervisor ends all components when one component dies.
_MEANS = {"supervisord": "event listener", "circus": "hook"}
#: Longest time to wait until a supervisor exits, in seconds.
_WITHIN_S = 60.0


def measure(*, quick: bool) -> Result:
    """Measure how soon Muster and other supervisors react to a component's crash."""
    rounds, triples = (2, 0) if quick else (20, 20)
    installed_peers, missing = peers.find_installed()
    notice_times_ms: dict[str, list[float]] = {peer.name: [] for peer in installed_peers}
    with prefect_server(password="") as url, ExitStack() as stack:
        ways: dict[str, Sample] = {
            "train flow": partial(_by_flow, url),
            "Supervisor": _by_supervisor,
            "grandchild": _by_process_probe,
            "is_alive": _by_is_alive_loop,
            "prime-rl": _by_error_queue_loop,
        }
        try:
            watchdog = stack.enter_context(sglang_watchdog.source())
            ways["SGLang"] = partial(_by_watchdog, watchdog.path)
        except NotHere as reason:
            missing.append(Missing(way="SGLang's SubprocessWatchdog", why=str(reason)))
        ways |= {
            peer.name: partial(_by_peer, peer, notice_times_ms[peer.name])
            for peer in installed_peers
        }
        taken = interleaved(
            ways,
            rounds,
            per_round=dict.fromkeys(("Supervisor", "grandchild"), 1 if quick else 3),
        )
    rows = [
        Row(way="Muster: the flow `train`", values=taken["train flow"]),
        Row(way="Muster: Supervisor alone", values=taken["Supervisor"]),
        Row(way="Muster: grandchild death to reaction", values=taken["grandchild"]),
    ]
    if "SGLang" in taken:
        title = f"SGLang {watchdog.version}, SubprocessWatchdog"
        note = "its class alone; it sends SIGTERM instead of killing"
        rows.append(Row(way=title, values=taken["SGLang"], note=note))
    rows += [
        Row(way="is_alive every 1 s (SGLang)", values=taken["is_alive"], how="modelled"),
        Row(way="error queue every 1 s (prime-rl)", values=taken["prime-rl"], how="modelled"),
    ]
    for peer in installed_peers:
        means = _MEANS.get(peer.name)
        note = f"ended by its {means}" if means else "with its defaults"
        rows.append(Row(way=peer.name, values=taken[peer.name], note=note))
        if notice_times_ms[peer.name]:
            way = f"{peer.name}, until its {means} is notified"
            rows.append(Row(way=way, values=notice_times_ms[peer.name], is_detail=True))
    rows += _by_slow_polls(triples) if triples else map(_computed, _PERIODS_S)
    return Result(
        name="crash",
        question="Time from the death of one component (a program of a run, killed by SIGKILL) "
        "until Muster sends SIGTERM to the first of the run's remaining components",
        rows=rows,
        missing=missing,
    )


def reaction_ms(place: Path, pid: int, wait: Callable[[], object]) -> float:
    """Kill a process, and return the time until any component of the run receives SIGTERM.

    Args:
        place: Folder in which each component records when it received SIGTERM.
        pid: Process that is killed.
        wait: Function that waits until the components that survived the kill have been stopped.

    Returns:
        The time in milliseconds.
    """
    killed_ns = time.monotonic_ns()
    os.kill(pid, signal.SIGKILL)
    wait()
    sigterm_times_ns = [
        at_ns for name in NAMES if (at_ns := recorded_ns(place, name, "sigterm")) is not None
    ]
    return (min(sigterm_times_ns) - killed_ns) / 1e6


def _pause() -> None:
    """Wait a random time, so that the kill comes at a random moment between two checks.

    Some supervisors check their components only once a second.
    """
    time.sleep(random.uniform(0.2, 1.2))


def _by_supervisor() -> float:
    with folder() as place:
        ready = {name: ReadyProbe(file=f"{name}.ready") for name in NAMES}
        commands = {name: part("wait", name, place) for name in NAMES}
        with supervisor_of(place, commands, ready) as supervisor:
            for name in NAMES:
                supervisor.start(name)
            pid = int(supervisor.describe(_VICTIM).partition("pid ")[2].rstrip(")"))
            _pause()

            def wait() -> None:
                supervisor.wait_decided()
                supervisor.teardown()

            return reaction_ms(place, pid, wait)


def _by_process_probe() -> float:
    """Kill a child process of a component; return the milliseconds until the supervisor reacts.

    The component itself survives. A liveness probe of the component watches the child process.
    """
    with folder() as place:
        ready = {name: ReadyProbe(file=f"{name}.ready") for name in NAMES}
        commands = {name: part("wait", name, place) for name in NAMES}
        commands[_VICTIM] = ("sh", "-c", 'sleep 1800 & exec "$@"', "sh", *commands[_VICTIM])
        live = {_VICTIM: LiveProbe(processes="^sleep 1800$", every_s=1)}
        with supervisor_of(place, commands, ready, live=live) as supervisor:
            for name in NAMES:
                supervisor.start(name)
            events = wait_until(lambda: _events(place, "process.watched"), "the watch")
            _pause()

            def wait() -> None:
                supervisor.wait_decided()
                supervisor.teardown()

            return reaction_ms(place, events[0]["pid"], wait)


def _events(place: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of this name that a supervisor has recorded so far."""
    lines = (place / "events.jsonl").read_text().splitlines(keepends=True)
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in events if event["event"] == name]


def _by_flow(url: str) -> float:
    with folder() as place:
        spec = {
            "name": "bench",
            "workload": "grpo",
            "components": {
                name: {
                    "command": list(part("wait", name, place)),
                    "ready": {"file": str(place / f"{name}.ready")},
                }
                for name in NAMES
            },
        }
        with FlowProcess(place, spec, url) as flow:
            pid = flow.components()[_VICTIM]["pid"]
            _pause()
            return reaction_ms(place, pid, flow.wait)


def _by_is_alive_loop() -> float:
    context = multiprocessing.get_context("spawn")
    with folder() as place:
        processes = [
            context.Process(target=wait_for_sigterm, args=(name, str(place)), daemon=True)
            for name in NAMES
        ]
        with ExitStack() as stack:
            for process in processes:
                process.start()
                stack.callback(process.join)
                stack.callback(process.kill)
            _await_ready(place)
            watch = _in_thread(models.is_alive_loop, processes)
            _pause()
            pid = processes[NAMES.index(_VICTIM)].pid
            assert pid is not None

            def wait() -> None:
                watch.join()
                for process in processes:
                    process.join()

            return reaction_ms(place, pid, wait)


def _by_error_queue_loop() -> float:
    with folder() as place, _Popened(place) as processes:
        watch = _in_thread(models.error_queue_loop, processes)
        _pause()
        return reaction_ms(place, processes[NAMES.index(_VICTIM)].pid, watch.join)


def _by_watchdog(source: Path) -> float:
    with folder() as place:
        host = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.sglang_watchdog", str(source), str(place)],
            cwd=Path.cwd(),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _await_ready(place)
            _pause()
            return reaction_ms(place, _victim_in(place), partial(host.wait, _WITHIN_S))
        finally:
            for name in NAMES:
                if (pid := recorded_ns(place, name, "pid")) is not None:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            host.kill()
            host.wait()


def _by_peer(peer: peers.Peer, notice_times_ms: list[float]) -> float:
    """Return the milliseconds that another supervisor needs to react to a killed component.

    Args:
        peer: The supervisor.
        notice_times_ms: This function appends the milliseconds until the supervisor noticed the
            death. If the supervisor does not record this moment, the list stays unchanged.
    """
    with folder() as place:
        commands = {name: part("wait", name, place) for name in NAMES}
        job = peers.Job(place=place, commands=commands, ends_together=True)
        with peers.running(peer, job) as supervisor:
            _await_ready(place)
            _pause()
            pid = _victim_in(place)
            killed_ns = time.monotonic_ns()
            took_ms = reaction_ms(place, pid, partial(supervisor.wait, _WITHIN_S))
        if (at_ns := recorded_ns(place, *peers.DEATH_NOTICE)) is not None:
            notice_times_ms.append((at_ns - killed_ns) / 1e6)
        return took_ms


def _victim_in(place: Path) -> int:
    """Read, from a file in the folder, the process id of the component that will be killed."""
    pid = recorded_ns(place, _VICTIM, "pid")
    assert pid is not None
    return pid


def _by_slow_polls(triples: int) -> list[Row]:
    """Measure the reaction to a crash for launchers that check every 30 or 60 s.

    A polling loop imitates each launcher. A sample takes up to a minute, so all samples run at the
    same time. In each sample, a component is killed at a random time within the polling period.

    Args:
        triples: Number of samples for each launcher. Each sample has its own three components.
    """
    say(f"  {triples} runs polled every 30 s and {triples} every 60 s, side by side")
    values: dict[str, list[float]] = {launcher: [] for launcher in _PERIODS_S}

    def sample(launcher: str, delay_s: float) -> None:
        with folder() as place, _Popened(place) as processes:
            watch = _in_thread(models.poll_loop, processes, _PERIODS_S[launcher])
            time.sleep(delay_s)
            victim = processes[NAMES.index(_VICTIM)]
            values[launcher].append(reaction_ms(place, victim.pid, watch.join))

    threads = [
        _in_thread(sample, launcher, random.uniform(0.1, period_s - 0.1))
        for launcher, period_s in _PERIODS_S.items()
        for _ in range(triples)
    ]
    for thread in threads:
        thread.join()
    return [
        Row(way=_title_of_poll(launcher), values=values[launcher], how="modelled")
        for launcher in _PERIODS_S
    ]


def _computed(launcher: str) -> Row:
    """Return the result row of a launcher, computed from its polling period instead of measured.

    The reaction time is distributed uniformly between 0 and the period.
    """
    values = [_PERIODS_S[launcher] * 1000 * share for share in (0.5, 0.99, 1.0)]
    quantiles = [values[0]] * 98 + values[1:]
    return Row(
        way=_title_of_poll(launcher),
        values=quantiles,
        samples=0,
        how="computed",
        note="uniform over the period",
    )


def _title_of_poll(launcher: str) -> str:
    """Return the title of a launcher's row in the table of results."""
    return f"poll every {_PERIODS_S[launcher]:g} s ({launcher})"


class _Popened:
    """Context manager that runs the three measured components without a supervisor."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Sequence[subprocess.Popen[bytes]]:
        for name in NAMES:
            self._processes.append(subprocess.Popen(part("wait", name, self._place)))
        _await_ready(self._place)
        return self._processes

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _await_ready(place: Path) -> None:
    """Wait until all components have recorded that they are ready."""
    wait_until(
        lambda: all(recorded_ns(place, name, "ready") for name in NAMES), "the components' start"
    )


def _in_thread(body: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=body, args=arguments, daemon=True)
    thread.start()
    return thread
