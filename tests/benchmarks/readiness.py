"""Benchmark of the readiness lag: the time that a start of three components takes beyond their own.

Each component needs half a second to become ready. It starts when the previous component is ready.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tasks.processes.ports import PortsReserved
from tasks.server.server import prefect_server
from tasks.spec.probes import ReadyProbe
from tests.benchmarks import models
from tests.benchmarks.harness import (
    NAMES,
    FlowProcess,
    folder,
    part,
    recorded_ns,
    supervisor_of,
    wait_until,
)
from tests.benchmarks.report import Result, Row, interleaved

#: Seconds that each component needs to become ready, and the sum of this time for all components.
_NEED_S = 0.5
_OWN_S = _NEED_S * len(NAMES)
#: Ways in which a component shows that it is ready. With `warming`, the component listens at once,
#: and answers HTTP 503 until it is ready, as inference servers do.
_KINDS = ("http", "tcp", "log", "notify", "warming")
_TITLES = {"warming": "http probe, 503 until ready"}
#: Seconds that Hermes' RL training tool sleeps after the start of each component, in the order of
#: the start: api, trainer, environment. After the start of the trainer, the tool sleeps for 30 s
#: and then for 90 s.
_HERMES_SLEEPS_S = (5.0, 30.0 + 90.0, 10.0)

Started = subprocess.Popen[bytes]


def measure(*, quick: bool) -> Result:
    """Measure the readiness lag of Muster for each kind of readiness probe.

    Also measure imitations of other launchers, for example of a launcher that only sleeps.

    The readiness lag is the time to start three components and to notice that they are ready, minus
    the time that the components themselves need to become ready.
    """
    rounds = 1 if quick else 8
    # Durations in ms, for each element of `_KINDS`: "making" is the creation of the supervisor,
    # "first line" is the start of the three programs, and "seen" is the time until the supervisor
    # notices that the programs are ready.
    parts: dict[str, dict[str, list[float]]] = {
        kind: {"making": [], "first line": [], "seen": []} for kind in _KINDS
    }
    with prefect_server(password="") as url:
        taken = interleaved(
            {
                **{kind: partial(_by_supervisor, kind, parts[kind]) for kind in _KINDS},
                "flow": partial(_by_flow, url),
                "pipe": _by_pipe,
                "health": _by_health,
                "sleep": _by_sleep,
            },
            rounds,
        )
    rows = []
    for kind in _KINDS:
        rows.append(Row(way=f"Muster: {_TITLES.get(kind, f'{kind} probe')}", values=taken[kind]))
        for phase, text in (
            ("making", "creating the Supervisor"),
            ("first line", "start order to the program's first line, x3"),
            ("seen", "ready to detected, x3"),
        ):
            rows.append(Row(way=text, values=parts[kind][phase], is_detail=True))
    rows += [
        Row(way="Muster: the flow `train`, http", values=taken["flow"], note="from run.json"),
        Row(way="Popen, notified through a pipe", values=taken["pipe"], note="the lower bound"),
        Row(way="/health every 1 s (prime-rl)", values=taken["health"], how="modelled"),
        Row(
            way="fixed sleeps of 1 s",
            values=taken["sleep"],
            how="modelled",
            note="Hermes' way, scaled",
        ),
        Row(
            way="fixed sleeps (Hermes)",
            values=[1000 * (sum(_HERMES_SLEEPS_S) - _OWN_S)],
            samples=0,
            how="computed",
            note="5 + 30 + 90 + 10 s",
        ),
    ]
    return Result(
        name="readiness",
        question="Time from the start of a run until its three components are ready, without the "
        "0.5 s that each component itself needs to become ready",
        rows=rows,
    )


def _lag_ms(began: float) -> float:
    """Return the readiness lag, in ms, of a start that has just ended.

    The lag is the duration of the start minus the time that the components themselves need.

    Args:
        began: Monotonic time of the beginning of the start, in seconds.
    """
    return (time.monotonic() - began - _OWN_S) * 1000


def _probe(kind: str, port: int) -> ReadyProbe:
    """Return the readiness probe for a kind of readiness."""
    match kind:
        case "http" | "warming":
            return ReadyProbe(http=f"http://127.0.0.1:{port}/health")
        case "tcp":
            return ReadyProbe(tcp=f"127.0.0.1:{port}")
        case "log":
            return ReadyProbe(log="^ready")
        case _:
            return ReadyProbe(notify=True)


def _by_supervisor(kind: str, parts: dict[str, list[float]]) -> float:
    """Start three components with Muster's supervisor, and return the readiness lag in ms.

    The lag is the duration of the start minus the time that the components themselves need.

    Args:
        kind: Kind of readiness.
        parts: Mapping from a phase of the start to its durations in ms. This function appends one
            duration to each list.
    """
    ports = PortsReserved([f"{name}.port" for name in NAMES])
    numbers = {name: ports.numbers[f"{name}.port"] for name in NAMES}
    with folder() as place:
        commands = {name: part("need", _NEED_S, kind, name, place, numbers[name]) for name in NAMES}
        ready = {name: _probe(kind, numbers[name]) for name in NAMES}
        began_ns = time.monotonic_ns()
        with supervisor_of(place, commands, ready, ports) as supervisor:
            made_ns = time.monotonic_ns()
            first_line_ns = seen_ns = 0
            for name in NAMES:
                ordered_ns = time.monotonic_ns()
                supervisor.start(name)
                returned_ns = time.monotonic_ns()
                first_line_ns += _wait_for_record(place, name, "began") - ordered_ns
                seen_ns += returned_ns - _wait_for_record(place, name, "ready")
            lag_ms = (returned_ns - began_ns) / 1e6 - _OWN_S * 1000
        parts["making"].append((made_ns - began_ns) / 1e6)
        parts["first line"].append(first_line_ns / 1e6)
        parts["seen"].append(seen_ns / 1e6)
    return lag_ms


def _wait_for_record(place: Path, name: str, event: str) -> int:
    """Return the time of an event of a component, in nanoseconds.

    The component writes the time to a file shortly after the event, so this function waits for the
    file.
    """
    at_ns: int = wait_until(lambda: recorded_ns(place, name, event), f"{name}.{event}")
    return at_ns


def _by_flow(url: str) -> float:
    """Run a flow with three components, and return the readiness lag in ms.

    The lag is the duration of the start minus the time that the components themselves need. The lag
    is computed from the times in `run.json`.
    """
    with folder() as place:
        spec = {
            "name": "bench",
            "workload": "grpo",
            "components": {
                name: {
                    "command": list(
                        part("need", _NEED_S, "http", name, place, f"${{{name}.port}}")
                    ),
                    "ready": {"http": f"http://127.0.0.1:${{{name}.port}}/health"},
                }
                for name in NAMES
            },
        }
        with FlowProcess(place, spec, url) as flow:
            components = flow.components()
        first = components[NAMES[0]]
        last = components[NAMES[-1]]
        return (float(last["ready_at"]) - float(first["started_at"]) - _OWN_S) * 1000


def _by_popen(kind: str, await_ready: Callable[[Started, int], None]) -> float:
    """Start three components without a supervisor, and return the readiness lag in ms.

    The lag is the duration of the start minus the time that the components themselves need.

    Args:
        kind: Kind of readiness.
        await_ready: Function that waits until a component is ready. The arguments are the process
            and the port of the component.
    """
    ports = PortsReserved([f"{name}.port" for name in NAMES])
    started: list[Started] = []
    with folder() as place:
        try:
            began = time.monotonic()
            for name in NAMES:
                ports.release(name)
                port = ports.numbers[f"{name}.port"]
                command = part("need", _NEED_S, kind, name, place, port)
                started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
                await_ready(started[-1], port)
            return _lag_ms(began)
        finally:
            for popen in started:
                popen.kill()
                popen.communicate()
            ports.close()


def _by_pipe() -> float:
    def await_ready(popen: Started, port: int) -> None:
        assert popen.stdout is not None
        popen.stdout.readline()

    return _by_popen("log", await_ready)


def _by_health() -> float:
    return _by_popen(
        "http", lambda popen, port: models.await_health(f"http://127.0.0.1:{port}/health")
    )


def _by_sleep() -> float:
    return _by_popen("http", lambda popen, port: models.sleep_then_poll(popen, 2 * _NEED_S))
