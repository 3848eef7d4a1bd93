"""Process trees that are hard to end, and ends that come twice."""

from __future__ import annotations

import os
import signal
from functools import partial

from tasks.spec.probes import LiveProbe
from tests.faults.cases_crashes import until_told
from tests.faults.injections import pids_cgroup, server, why_no_cgroup_v1
from tests.faults.scene import ALIVE, CANCELLED, Case, Phase, Scene, failed, phases_with
from tests.support.shapes import SHAPES
from tests.support.stage import DEADLINE_S, free_port, python, sh

#: Forks until it may not any more, and ends for nobody.
_BURST = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    while True:
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
except BlockingIOError:
    os.write(1, b"up\\n")
time.sleep(600)
"""
_PIDS = 150


def _has_shape(shape: str, scene: Scene) -> None:
    scene.cast["trainer"]["argv"] = SHAPES[shape]


def _leader_dies_meanwhile(scene: Scene) -> None:
    """While another is in its grace period; in other phases the run is only told to end."""
    if scene.phase is Phase.STOPPING:
        scene.signal("trainer")
        scene.until("component.exited", "trainer")


SHAPED = [
    Case(
        number=number,
        title=title,
        phases=phases_with("trainer"),
        cast=partial(_has_shape, shape),
        inject=_leader_dies_meanwhile,
        expect=CANCELLED,
    )
    for number, title, shape in (
        (9, "leader ignores TERM", "leader-ignores-term"),
        (10, "polite leader, stubborn child", "polite-leader-stubborn-child"),
        (11, "setsid grandchild", "setsid-grandchild"),
        (12, "double-fork daemon", "double-fork-daemon"),
        (13, "daemon with a scrubbed environment", "scrubbed-daemon"),
        (14, "flicker of 2 ms", "flicker-2ms"),
        (14, "flicker of 0.2 ms", "flicker-0.2ms"),
    )
]


def _bursts(scene: Scene) -> None:
    """The limit holds for the whole run: its flow and its guardians can't fork either."""
    place = scene.stack.enter_context(pids_cgroup(_PIDS))
    scene.more["wrapper"] = (*sh(f'echo $$ > {place}/cgroup.procs && exec "$@"'), "sh")
    scene.cast["trainer"]["argv"] = python(_BURST)


BURST = [
    Case(
        number=15,
        title="fork burst under a pids limit",
        # After it nothing more can be started: the next component's start fails.
        phases=phases,
        cast=_bursts,
        is_at_once=is_at_once,
        expect=expect,
        obstacle=lambda: why_no_cgroup_v1("pids"),
    )
    for phases, is_at_once, expect in (
        ((Phase.START_TRAINER,), False, CANCELLED),
        ((Phase.START_ENVIRONMENT,), True, failed("environment")),
    )
]


def _slow_to_burst(scene: Scene) -> None:
    """Only once all are started."""
    _bursts(scene)
    wait = "import os, time\nos.write(1, b'up\\n')\nwhile not os.path.exists('burst'):"
    code = f"{wait}\n    time.sleep(0.01)\n{_BURST.replace('up', 'full')}"
    scene.cast["trainer"]["argv"] = python(code)


def _burst(scene: Scene) -> None:
    scene.touch("burst")
    scene.until_log("trainer", "full")


LATE_BURST = Case(
    number=15,
    title="fork burst under a pids limit",
    phases=(Phase.RUNNING, Phase.STOPPING),
    cast=_slow_to_burst,
    inject=_burst,
    expect=CANCELLED,
    obstacle=lambda: why_no_cgroup_v1("pids"),
)


def _answers(scene: Scene) -> None:
    port = free_port()
    live = LiveProbe(http=f"http://127.0.0.1:{port}/live", every_s=0.05, timeout_s=0.3, misses=3)
    scene.cast["trainer"] |= {"argv": server(port, "y"), "live": live}


def _freeze_trainer(scene: Scene) -> None:
    scene.signal("trainer", signal.SIGSTOP)


def _says_goodbye(scene: Scene) -> None:
    scene.cast["trainer"] |= {
        "argv": sh("trap 'echo bye; exit' TERM; echo up; while :; do sleep 0.02; done"),
        "grace_s": DEADLINE_S,
    }


def _goodbye_was_said(scene: Scene) -> None:
    """A stopped process is told to go on, so that it can end as it should."""
    assert "bye" in (scene.directory / "trainer.log").read_text()


STOPPED = [
    Case(
        number=20,
        title="component SIGSTOPped",
        phases=(Phase.START_ENVIRONMENT, Phase.RUNNING, Phase.STOPPING),
        cast=_answers,
        inject=_freeze_trainer,
        expect=failed("trainer", kind="STALLED"),
    ),
    Case(
        number=20,
        title="component SIGSTOPped, then told to end",
        phases=phases_with("trainer"),
        cast=_says_goodbye,
        inject=_freeze_trainer,
        check=_goodbye_was_said,
        expect=CANCELLED,
    ),
]


def _leaves_holders(scene: Scene) -> None:
    argv = until_told("exit 3")
    scene.cast["trainer"]["argv"] = (*argv[:-1], f"(sleep 600 &); (setsid sleep 600 &); {argv[-1]}")


def _leave(scene: Scene) -> None:
    scene.touch("die")
    if scene.phase is Phase.STOPPING:
        scene.until("component.exited", "trainer")


HOLDERS = Case(
    number=27,
    title="grandchild holds stdout open",
    phases=phases_with("trainer"),
    cast=_leaves_holders,
    inject=_leave,
    expect=failed("trainer", exit_code=3),
)


def _never_ends(scene: Scene) -> None:
    for name in ("api", "trainer"):
        scene.cast[name] |= {"argv": SHAPES["leader-ignores-term"], "grace_s": 600.0}
    if scene.phase is Phase.STOPPING:
        # Each is told twice: what holds the phase as well.
        scene.cast["environment"]["grace_s"] = 600.0


def _stop_twice(signum: signal.Signals, scene: Scene) -> None:
    scene.has_stopped = True
    for _ in range(2):
        # To the flow's whole group, as a terminal does.
        os.killpg(scene.witness.pid, signum)
        scene.until("teardown.begun")


TWICE = [
    Case(
        number=number,
        title=title,
        phases=ALIVE,
        cast=_never_ends,
        inject=partial(_stop_twice, signum),
        expect=CANCELLED,
    )
    for number, title, signum in (
        (31, "Ctrl-C to the foreground group, twice", signal.SIGINT),
        (32, "second stop during the grace", signal.SIGTERM),
    )
]

CASES = [*SHAPED, *BURST, LATE_BURST, *STOPPED, HOLDERS, *TWICE]
