"""Fault cases of probes: a component is not ready, or another process answers its probe."""

from __future__ import annotations

import os
from functools import partial
from urllib.parse import urlsplit

from tasks.spec.probes import LiveProbe, ReadyProbe
from tests.faults.injections import helper, server
from tests.faults.scene import CANCELLED, STARTING, Case, Phase, Scene, failed
from tests.support.stage import DEADLINE_S, FOREVER, free_port, wait_until


def _prepare_never_ready(scene: Scene) -> None:
    scene.components[scene.phase.starting]["ready"] = ReadyProbe(log="never", within_s=0.5)


def _prepare_hanging_server(scene: Scene) -> None:
    """Start a server that accepts the connection of the readiness probe and never answers."""
    port = free_port()
    ready = ReadyProbe(http=f"http://127.0.0.1:{port}/ready", within_s=1.0)
    scene.components[scene.phase.starting] |= {"argv": server(port, "-"), "ready": ready}


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


def _prepare_flapping_readiness(scene: Scene) -> None:
    port = free_port()
    ready = ReadyProbe(http=f"http://127.0.0.1:{port}/ready", every_s=0.02, within_s=DEADLINE_S)
    scene.components[scene.phase.starting] |= {"argv": server(port, "nnyn"), "ready": ready}


def _wait_until_ready(scene: Scene) -> None:
    scene.until("attempt.ready")


FLAPPING_AT_START = Case(
    number=6,
    title="readiness flaps before and after its first yes",
    phases=STARTING,
    prepare=_prepare_flapping_readiness,
    inject=_wait_until_ready,
    is_at_once=True,
    expect=CANCELLED,
)


def _prepare_liveness(answers: str, scene: Scene) -> None:
    port = free_port()
    live = LiveProbe(
        http=f"http://127.0.0.1:{port}/live", every_s=0.02, timeout_s=DEADLINE_S, misses=3
    )
    scene.components["trainer"] |= {"argv": server(port, answers), "live": live}


def _wait_for_many_probes(scene: Scene) -> None:
    log = scene.directory / "trainer.log"
    wait_until(lambda: log.read_text().count("/live") > 12, "the probe has asked often")


def _set_server_down(scene: Scene) -> None:
    scene.touch("down")


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


def _prepare_taken_port(scene: Scene) -> None:
    port = free_port()
    foreign = scene.stack.enter_context(helper(*server(port, "y"), cwd=scene.directory))
    scene.bystanders.append(((foreign,), "the foreign server"))
    _probe_port(scene, port)


def _prepare_gate(scene: Scene) -> None:
    scene.witness_arguments["gates"] = (scene.phase.starting,)
    _probe_port(scene, free_port())


def _start_stale_instance(scene: Scene) -> None:
    """Start a leftover process of an earlier attempt.

    The process answers the readiness probe of the component that the new attempt starts.
    """
    scene.until("gate.reached", scene.phase.starting)
    env = {**os.environ, "MUSTER_RUN_ID": scene.witness.run_id, "MUSTER_ATTEMPT": "0"}
    port = urlsplit(scene.components[scene.phase.starting]["ready"].http).port
    stale = scene.stack.enter_context(helper(*server(port, "y"), cwd=scene.directory, env=env))
    scene.bystanders.append(((stale,), "the stale instance"))
    scene.touch(f"gate-{scene.phase.starting}")


def _probe_port(scene: Scene, port: int) -> None:
    """Give the starting component a readiness probe of this port, on which it does not listen."""
    ready = ReadyProbe(http=f"http://127.0.0.1:{port}/ready", within_s=DEADLINE_S)
    scene.components[scene.phase.starting] |= {"argv": FOREVER, "ready": ready}


def _check_component_was_not_started(scene: Scene) -> None:
    assert scene.witness.seen("component.spawned", scene.phase.starting) == []
    assert scene.witness.seen("component.ready", scene.phase.starting) == []


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
        (7, "port taken by a foreign server", _prepare_taken_port, lambda scene: None),
        (8, "HTTP 200 from a stale instance", _prepare_gate, _start_stale_instance),
    )
    for phase in STARTING
]

CASES = [*NEVER_READY, FLAPPING_AT_START, *FLAPPING, *PORTS]
