"""Components that are not ready, or whose answer is not theirs."""

from __future__ import annotations

import os
from functools import partial
from urllib.parse import urlsplit

from tasks.spec.probes import LiveProbe, ReadyProbe
from tests.faults.injections import helper, server
from tests.faults.scene import CANCELLED, STARTING, Case, Phase, Scene, failed
from tests.support.stage import DEADLINE_S, FOREVER, free_port, wait_until


def _never_ready(scene: Scene) -> None:
    scene.cast[scene.phase.starting]["ready"] = ReadyProbe(log="never", within_s=0.5)


def _hangs_at_start(scene: Scene) -> None:
    """It takes the connection, and never answers."""
    port = free_port()
    ready = ReadyProbe(http=f"http://127.0.0.1:{port}/ready", within_s=1.0)
    scene.cast[scene.phase.starting] |= {"argv": server(port, "-"), "ready": ready}


NEVER_READY = [
    Case(
        number=number,
        title=title,
        phases=(phase,),
        cast=cast,
        is_at_once=True,
        expect=failed(phase.starting, kind="NOT_READY"),
    )
    for number, title, cast in (
        (4, "never ready", _never_ready),
        (20, "hung at its start", _hangs_at_start),
    )
    for phase in STARTING
]


def _flaps_at_start(scene: Scene) -> None:
    port = free_port()
    ready = ReadyProbe(http=f"http://127.0.0.1:{port}/ready", every_s=0.02, within_s=DEADLINE_S)
    scene.cast[scene.phase.starting] |= {"argv": server(port, "nnyn"), "ready": ready}


def _until_ready(scene: Scene) -> None:
    scene.until("attempt.ready")


FLAPPING_AT_START = Case(
    number=6,
    title="readiness flaps before and after its first yes",
    phases=STARTING,
    cast=_flaps_at_start,
    inject=_until_ready,
    is_at_once=True,
    expect=CANCELLED,
)


def _lives_by(answers: str, scene: Scene) -> None:
    port = free_port()
    live = LiveProbe(
        http=f"http://127.0.0.1:{port}/live", every_s=0.02, timeout_s=DEADLINE_S, misses=3
    )
    scene.cast["trainer"] |= {"argv": server(port, answers), "live": live}


def _until_asked_often(scene: Scene) -> None:
    log = scene.directory / "trainer.log"
    wait_until(lambda: log.read_text().count("/live") > 12, "the probe has asked often")


def _goes_down(scene: Scene) -> None:
    scene.touch("down")


FLAPPING = [
    Case(
        number=6,
        title="liveness flaps, within its misses",
        phases=(Phase.RUNNING,),
        cast=partial(_lives_by, "nny"),
        inject=_until_asked_often,
        expect=CANCELLED,
    ),
    Case(
        number=6,
        title="liveness goes and stays away",
        phases=(Phase.START_ENVIRONMENT, Phase.RUNNING, Phase.STOPPING),
        cast=partial(_lives_by, "y"),
        inject=_goes_down,
        expect=failed("trainer", kind="STALLED"),
    ),
]


def _port_is_taken(scene: Scene) -> None:
    port = free_port()
    foreign = scene.stack.enter_context(helper(*server(port, "y"), cwd=scene.directory))
    scene.bystanders.append(((foreign,), "the foreign server"))
    _asks(scene, port)


def _waits_at_gate(scene: Scene) -> None:
    scene.more["gates"] = (scene.phase.starting,)
    _asks(scene, free_port())


def _stale_instance(scene: Scene) -> None:
    """What an earlier attempt of this very run has left answers for the new one."""
    scene.until("gate.reached", scene.phase.starting)
    env = {**os.environ, "MUSTER_RUN_ID": scene.witness.run_id, "MUSTER_ATTEMPT": "0"}
    port = urlsplit(scene.cast[scene.phase.starting]["ready"].http).port
    stale = scene.stack.enter_context(helper(*server(port, "y"), cwd=scene.directory, env=env))
    scene.bystanders.append(((stale,), "the stale instance"))
    scene.touch(f"gate-{scene.phase.starting}")


def _asks(scene: Scene, port: int) -> None:
    ready = ReadyProbe(http=f"http://127.0.0.1:{port}/ready", within_s=DEADLINE_S)
    scene.cast[scene.phase.starting] |= {"argv": FOREVER, "ready": ready}


def _was_not_started(scene: Scene) -> None:
    assert scene.witness.seen("component.spawned", scene.phase.starting) == []
    assert scene.witness.seen("component.ready", scene.phase.starting) == []


PORTS = [
    Case(
        number=number,
        title=title,
        phases=(phase,),
        cast=cast,
        inject=inject,
        check=_was_not_started,
        is_at_once=True,
        expect=failed(phase.starting, kind="PORT_CONFLICT"),
    )
    for number, title, cast, inject in (
        (7, "port taken by a foreign server", _port_is_taken, lambda scene: None),
        (8, "HTTP 200 from a stale instance", _waits_at_gate, _stale_instance),
    )
    for phase in STARTING
]

CASES = [*NEVER_READY, FLAPPING_AT_START, *FLAPPING, *PORTS]
