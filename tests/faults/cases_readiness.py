"""Fault cases of probes: a component is not ready, or another process answers its probe."""

from __future__ import annotations

import os
from functools import partial
from urllib.parse import urlsplit

from tasks.spec.probes import LiveProbe, ReadyProbe
from tests.faults.fault_run import CANCELLED, STARTING, Case, FaultRun, Phase, failed
from tests.faults.injections import helper, server
from tests.support.supervised_components import DEADLINE_S, FOREVER, free_port, wait_until


def _prepare_never_ready(fault_run: FaultRun) -> None:
    fault_run.components[fault_run.phase.starting]["ready"] = ReadyProbe(log="never", within_s=0.5)


def _prepare_hanging_server(fault_run: FaultRun) -> None:
    """Start a server that accepts the connection of the readiness probe and never answers."""
    port = free_port()
    ready = ReadyProbe(http=f"http://127.0.0.1:{port}/ready", within_s=1.0)
    fault_run.components[fault_run.phase.starting] |= {"argv": server(port, "-"), "ready": ready}


NEVER_READY = [
    Case(
        number=number,
        title=title,
        phases=(phase,),
        prepare=prepare,
        is_at_once=True,
        expect=failed(phase.starting, kind="NOT_READY"),
    )
    for number, title, prepare in (
        (4, "never ready", _prepare_never_ready),
        (20, "hung at its start", _prepare_hanging_server),
    )
    for phase in STARTING
]


def _prepare_flapping_readiness(fault_run: FaultRun) -> None:
    port = free_port()
    ready = ReadyProbe(http=f"http://127.0.0.1:{port}/ready", every_s=0.02, within_s=DEADLINE_S)
    fault_run.components[fault_run.phase.starting] |= {"argv": server(port, "nnyn"), "ready": ready}


def _wait_until_ready(fault_run: FaultRun) -> None:
    fault_run.until("attempt.ready")


FLAPPING_AT_START = Case(
    number=6,
    title="readiness flaps before and after its first yes",
    phases=STARTING,
    prepare=_prepare_flapping_readiness,
    inject=_wait_until_ready,
    is_at_once=True,
    expect=CANCELLED,
)


def _prepare_liveness(answers: str, fault_run: FaultRun) -> None:
    port = free_port()
    live = LiveProbe(
        http=f"http://127.0.0.1:{port}/live", every_s=0.02, timeout_s=DEADLINE_S, misses=3
    )
    fault_run.components["trainer"] |= {"argv": server(port, answers), "live": live}


def _wait_for_many_probes(fault_run: FaultRun) -> None:
    log = fault_run.directory / "trainer.log"
    wait_until(lambda: log.read_text().count("/live") > 12, "the probe has asked often")


def _set_server_down(fault_run: FaultRun) -> None:
    fault_run.touch("down")


FLAPPING = [
    Case(
        number=6,
        title="liveness flaps, within its misses",
        phases=(Phase.RUNNING,),
        prepare=partial(_prepare_liveness, "nny"),
        inject=_wait_for_many_probes,
        expect=CANCELLED,
    ),
    Case(
        number=6,
        title="liveness goes and stays away",
        phases=(Phase.START_ENVIRONMENT, Phase.RUNNING, Phase.STOPPING),
        prepare=partial(_prepare_liveness, "y"),
        inject=_set_server_down,
        expect=failed("trainer", kind="STALLED"),
    ),
]


def _prepare_taken_port(fault_run: FaultRun) -> None:
    port = free_port()
    foreign = fault_run.stack.enter_context(helper(*server(port, "y"), cwd=fault_run.directory))
    fault_run.bystanders.append(((foreign,), "the foreign server"))
    _probe_port(fault_run, port)


def _prepare_gate(fault_run: FaultRun) -> None:
    fault_run.witness_arguments["gates"] = (fault_run.phase.starting,)
    _probe_port(fault_run, free_port())


def _start_stale_instance(fault_run: FaultRun) -> None:
    """Start a process that looks like a leftover of an earlier attempt.

    The process answers the readiness probe of the component that the new attempt starts.
    """
    fault_run.until("gate.reached", fault_run.phase.starting)
    env = {**os.environ, "MUSTER_RUN_ID": fault_run.observed_flow.run_id, "MUSTER_ATTEMPT": "0"}
    port = urlsplit(fault_run.components[fault_run.phase.starting]["ready"].http).port
    stale = fault_run.stack.enter_context(
        helper(*server(port, "y"), cwd=fault_run.directory, env=env)
    )
    fault_run.bystanders.append(((stale,), "the stale instance"))
    fault_run.touch(f"gate-{fault_run.phase.starting}")


def _probe_port(fault_run: FaultRun, port: int) -> None:
    """Give the starting component a readiness probe of this port.

    The component itself does not listen on the port.
    """
    ready = ReadyProbe(http=f"http://127.0.0.1:{port}/ready", within_s=DEADLINE_S)
    fault_run.components[fault_run.phase.starting] |= {"argv": FOREVER, "ready": ready}


def _check_component_was_not_started(fault_run: FaultRun) -> None:
    assert fault_run.observed_flow.list_events("component.spawned", fault_run.phase.starting) == []
    assert fault_run.observed_flow.list_events("component.ready", fault_run.phase.starting) == []


PORTS = [
    Case(
        number=number,
        title=title,
        phases=(phase,),
        prepare=prepare,
        inject=inject,
        check=_check_component_was_not_started,
        is_at_once=True,
        expect=failed(phase.starting, kind="PORT_CONFLICT"),
    )
    for number, title, prepare, inject in (
        (7, "port taken by a foreign server", _prepare_taken_port, lambda fault_run: None),
        (8, "HTTP 200 from a stale instance", _prepare_gate, _start_stale_instance),
    )
    for phase in STARTING
]

CASES = [*NEVER_READY, FLAPPING_AT_START, *FLAPPING, *PORTS]
