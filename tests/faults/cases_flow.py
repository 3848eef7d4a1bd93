"""The flow's process and the guardians: killed, stopped, and odd."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

from tasks.spec.probes import ReadyProbe
from tests.faults.scene import (
    ALIVE,
    CANCELLED,
    KILLED,
    NAMES,
    STARTING,
    UP,
    Case,
    Phase,
    Scene,
    failed,
    phases_with,
)
from tests.support.shapes import SHAPES
from tests.support.stage import Stage, sh, wait_until
from tests.support.witness import Witness

_ODDITIES = {
    21: ("SIGCHLD ignored, inherited", "sigchld-ignored"),
    22: ("blocked signal mask, inherited", "signals-blocked"),
    23: ("spawned from a short-lived thread", "short-lived-thread"),
    24: ("a foreign waitpid(-1) in the flow", "foreign-wait"),
}


def _leaves_a_daemon(scene: Scene) -> None:
    """Each component has a process that nothing but its guardian holds."""
    for name in NAMES if scene.phase is not Phase.STOPPING else NAMES[:-1]:
        scene.cast[name]["argv"] = SHAPES["scrubbed-daemon"]


def _kill_flow(scene: Scene) -> None:
    scene.witness.kill()


def _waits_at_first_gate(scene: Scene) -> None:
    scene.more["gates"] = ("api",)


def _dies_registering(scene: Scene) -> None:
    """A program that ran would have the whole grace period to say so."""
    scene.cast[scene.phase.starting] |= {
        "argv": sh("echo ran; exec sleep 600"),
        "stop_signal": signal.SIGWINCH,
    }
    scene.more |= {"oddity": "dies-registering", "at": scene.phase.starting}


def _program_never_ran(scene: Scene) -> None:
    assert scene.witness.seen("component.spawned", scene.phase.starting) == []
    log = scene.directory / f"{scene.phase.starting}.log"
    assert not log.exists() or log.read_text() == ""


FLOW_KILLED = [
    Case(
        number=16,
        title="flow SIGKILLed, nothing started",
        phases=(Phase.IDLE,),
        cast=_waits_at_first_gate,
        inject=_kill_flow,
        expect=KILLED,
    ),
    Case(
        number=16,
        title="flow SIGKILLed",
        phases=ALIVE,
        cast=_leaves_a_daemon,
        inject=_kill_flow,
        expect=KILLED,
        expect_stopping=KILLED,
    ),
    Case(
        number=16,
        title="flow SIGKILLed between fork and registry",
        phases=STARTING,
        cast=_dies_registering,
        is_at_once=True,
        check=_program_never_ran,
        expect=KILLED,
    ),
]


def _kill_guardian(scene: Scene, of: str) -> None:
    os.kill(scene.guardian(of), signal.SIGKILL)
    if scene.phase is Phase.STOPPING:
        scene.until("component.exited", of)


GUARDIAN_KILLED = [
    Case(
        number=17,
        title=f"guardian of {victim} SIGKILLed",
        phases=phases_with(victim),
        cast=_leaves_a_daemon,
        inject=partial(_kill_guardian, of=victim),
        expect=failed(victim, says="its guardian"),
    )
    for victim in NAMES
]


def _kill_outer_guardian(scene: Scene) -> None:
    """At L4 a guardian lives in the namespace, and a process of its own outside waits for it."""
    inner = scene.guardian("trainer")
    [outer] = set(scene.guardians("trainer")) - {inner}
    os.kill(outer, signal.SIGKILL)
    if scene.phase is Phase.STOPPING:
        scene.until("component.exited", "trainer")


OUTER_GUARDIAN = Case(
    number=17,
    title="outer part of a guardian SIGKILLed",
    phases=phases_with("trainer"),
    levels=("L4",),
    cast=_leaves_a_daemon,
    inject=_kill_outer_guardian,
    expect=failed("trainer", says="its guardian"),
)


def _ready_by_file(scene: Scene) -> None:
    _leaves_a_daemon(scene)
    scene.cast["trainer"]["ready"] = ReadyProbe(file="trainer-is-ready")


def _kill_idle_guardian(scene: Scene) -> None:
    idle = scene.guardian("environment")
    os.kill(idle, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{idle}").exists(), "the guardian is reaped")
    scene.touch("trainer-is-ready")


IDLE_GUARDIAN = Case(
    number=17,
    title="idle guardian SIGKILLed",
    phases=(Phase.START_TRAINER,),
    cast=_ready_by_file,
    inject=_kill_idle_guardian,
    expect=failed("environment", says="its guardian"),
)


def _template_is_lost(scene: Scene, how: str) -> None:
    _leaves_a_daemon(scene)
    scene.more |= {"oddity": "template", "at": how}


TEMPLATE_LOST = [
    Case(
        number=17,
        title=f"template of the guardians {how} it forks one",
        phases=(Phase.RUNNING,),
        cast=partial(_template_is_lost, how=how),
        expect=CANCELLED,
    )
    for how in ("killed before", "stopped before", "killed while")
] + [
    Case(
        number=18,
        title="flow and template of the guardians SIGKILLed while it forks one",
        phases=(Phase.IDLE,),
        cast=partial(_template_is_lost, how="killed while, and the flow"),
        is_at_once=True,
        expect=KILLED,
    ),
    Case(
        number=16,
        title="flow SIGKILLed while a guardian is forked",
        phases=(Phase.IDLE,),
        cast=partial(_template_is_lost, how="the flow"),
        is_at_once=True,
        expect=KILLED,
    ),
]


def _kill_both(scene: Scene) -> None:
    """All of them are stopped first, so that none can act on another's end."""
    guardians = [pid for name in NAMES for pid in scene.guardians(name)]
    for pid in (scene.witness.pid, *guardians):
        os.kill(pid, signal.SIGSTOP)
    for pid in (*guardians, scene.witness.pid):
        os.kill(pid, signal.SIGKILL)
    if scene.level == "L4":
        # The kernel alone ends it.
        assert scene.witness.testimony().left == ()
    else:
        wait_until(lambda: not scene.witness.is_there(), "the flow is gone")
    said = scene.reconcile()
    assert said[scene.witness.run_id]["is_clean"], said


def _again_does_nothing(scene: Scene) -> None:
    assert not any(scene.witness.home.glob("live/*")), "the registry is left"
    # At L4 the oracle has spoken before the reconcile, and removed them itself.
    if scene.level != "L4":
        assert scene.witness.testimony().cgroups == ()
    assert scene.reconcile() == {}


BOTH_KILLED = Case(
    number=18,
    title="flow and guardians SIGKILLed, then reconcile",
    phases=ALIVE,
    cast=_leaves_a_daemon,
    inject=_kill_both,
    check=_again_does_nothing,
    expect=KILLED,
    expect_stopping=KILLED,
)


def _stop_flow(scene: Scene) -> None:
    scene.witness.kill(signal.SIGSTOP)
    wait_until(lambda: scene.witness.state() == "T", "the flow is stopped")


def _dies_while_flow_is_stopped(scene: Scene) -> None:
    _stop_flow(scene)
    pid = scene.pid("api")
    os.kill(pid, signal.SIGSEGV)
    scene.until_gone(pid)
    scene.witness.kill(signal.SIGCONT)


def _stop_then_kill_flow(scene: Scene) -> None:
    _stop_flow(scene)
    scene.witness.kill()


FLOW_STOPPED = [
    Case(
        number=19,
        title="flow SIGSTOPped, a component dies, flow goes on",
        phases=ALIVE,
        inject=_dies_while_flow_is_stopped,
        expect=failed("api", signal="SIGSEGV"),
    ),
    Case(
        number=19,
        title="flow SIGSTOPped, then SIGKILLed",
        phases=ALIVE,
        cast=_leaves_a_daemon,
        inject=_stop_then_kill_flow,
        expect=KILLED,
        expect_stopping=KILLED,
    ),
]


def _is_odd(scene: Scene, oddity: str) -> None:
    _leaves_a_daemon(scene)
    scene.more["oddity"] = oddity


def _kill_trainer(scene: Scene) -> None:
    """It began with clean signals, whoever started it."""
    lines = Path(f"/proc/{scene.pid('trainer')}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines)
    assert int(status["SigBlk"], 16) == 0
    # It ignores TERM by itself; the C library keeps 32 and 33.
    itself = 1 << (signal.SIGTERM - 1)
    assert int(status["SigIgn"], 16) & ~(0b11 << 31) & ~itself == 0
    scene.signal("trainer")
    if scene.phase is Phase.STOPPING:
        scene.until("component.exited", "trainer")


ODD = [
    Case(
        number=number,
        title=title,
        phases=phases_with("trainer"),
        cast=partial(_is_odd, oddity=oddity),
        inject=_kill_trainer,
        expect=failed("trainer", signal="SIGKILL"),
    )
    for number, (title, oddity) in _ODDITIES.items()
] + [
    Case(
        number=number,
        title=f"{title}; guardian SIGKILLed",
        phases=(Phase.RUNNING,),
        cast=partial(_is_odd, oddity=oddity),
        inject=partial(_kill_guardian, of="trainer"),
        expect=failed("trainer", says="its guardian"),
    )
    for number, (title, oddity) in _ODDITIES.items()
]


def _beside_another_run(scene: Scene) -> None:
    """It has the same shape, and its processes are told from ours by nothing but their marks."""
    _leaves_a_daemon(scene)
    place = scene.directory / "neighbour"
    place.mkdir()
    component = Stage(place).component("trainer", SHAPES["scrubbed-daemon"], ready=UP)
    neighbour = Witness(scene.forkserver, place, component, level=scene.level)
    scene.stack.callback(neighbour.clear)
    neighbour.until("attempt.ready")
    pids = neighbour.tree()
    assert len(pids) >= 4, "flow, guardian, component and daemon"
    scene.bystanders.append((tuple(pids), "another run"))


def _is_left_alone(scene: Scene) -> None:
    assert scene.reconcile().keys() <= {scene.witness.run_id}


BESIDE = [
    Case(
        number=37,
        title=f"another run lives on, ours ends by {how}",
        phases=(Phase.START_ENVIRONMENT, Phase.RUNNING, Phase.STOPPING),
        cast=_beside_another_run,
        inject=inject,
        check=_is_left_alone,
        expect=expect,
        expect_stopping=KILLED if expect is KILLED else CANCELLED,
    )
    for how, inject, expect in (
        ("SIGKILL of its flow", _kill_flow, KILLED),
        (
            "SIGKILL of its guardian",
            partial(_kill_guardian, of="trainer"),
            failed("trainer", says="its guardian"),
        ),
        ("a double kill", _kill_both, KILLED),
    )
]

OWN_CHILD = Case(
    number=37,
    title="a process of the flow's own lives on, guardian SIGKILLed",
    phases=phases_with("trainer"),
    cast=partial(_is_odd, oddity="own-child"),
    inject=partial(_kill_guardian, of="trainer"),
    expect=failed("trainer", says="its guardian"),
)

CASES = [
    *FLOW_KILLED,
    *GUARDIAN_KILLED,
    OUTER_GUARDIAN,
    IDLE_GUARDIAN,
    *TEMPLATE_LOST,
    BOTH_KILLED,
    *FLOW_STOPPED,
    *ODD,
    *BESIDE,
    OWN_CHILD,
]
