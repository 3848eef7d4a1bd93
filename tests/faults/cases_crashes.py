"""Components that die: by a signal, too early, together, without a word."""

from __future__ import annotations

import functools
import os
import signal
import sys

from tasks.spec.run import RunSpec
from tasks.train.plan import component_env
from tests.faults.injections import memory_cgroup, why_no_cgroup_v1
from tests.faults.scene import NAMES, STARTING, Case, Phase, Scene, failed, phases_with
from tests.support.stage import python, sh, wait_until

#: Lines that a program has printed and not flushed when it is killed.
_PRINTED = 100
_PRINTS_AND_DIES = f"""
import os, signal, sys, time
os.write(1, b"up\\n")
while not os.path.exists("die"):
    time.sleep(0.01)
for i in range({_PRINTED}):
    print("line", i)
os.kill(os.getpid(), signal.SIGKILL)
"""
_ALLOCATES = """
import os, time
os.write(1, b"up\\n")
while not os.path.exists("die"):
    time.sleep(0.01)
hoard = [b"x" * (1 << 20) for _ in range(500)]
"""


def until_told(end: str) -> tuple[str, ...]:
    """Says `up`, and ends so once the file `die` is there."""
    return sh(f"echo up; while [ ! -e die ]; do sleep 0.02; done; {end}")


def _dies(scene: Scene, victim: str, end: str) -> None:
    scene.cast[victim]["argv"] = until_told(end)


def _tell_to_die(scene: Scene) -> None:
    scene.touch("die")
    if scene.phase is Phase.STOPPING:
        scene.until("component.exited", "trainer")


def _kill(scene: Scene, victim: str) -> None:
    scene.signal(victim)
    if scene.phase is Phase.STOPPING:
        scene.until("component.exited", victim)


KILLED = [
    Case(
        number=1,
        title=f"SIGKILL of {victim}",
        phases=phases_with(victim),
        inject=functools.partial(_kill, victim=victim),
        expect=failed(victim, signal="SIGKILL"),
    )
    for victim in NAMES
]

CRASHES = [
    Case(
        number=2,
        title=title,
        phases=phases_with("trainer"),
        cast=functools.partial(_dies, victim="trainer", end=end),
        inject=_tell_to_die,
        expect=expected,
    )
    for title, end, expected in (
        ("SIGSEGV", "kill -SEGV $$", failed("trainer", kind="RUNTIME_ERROR", signal="SIGSEGV")),
        ("SIGABRT", "kill -ABRT $$", failed("trainer", kind="RUNTIME_ERROR", signal="SIGABRT")),
        ("early exit 0", "exit 0", failed("trainer", exit_code=0)),
    )
]


def _exits_before_ready(scene: Scene) -> None:
    scene.cast[scene.phase.starting]["argv"] = sh("exit 7")


BEFORE_READY = [
    Case(
        number=3,
        title="exit before ready",
        phases=(phase,),
        cast=_exits_before_ready,
        is_at_once=True,
        expect=failed(phase.starting, exit_code=7, says="before it was ready"),
    )
    for phase in STARTING
]


def _waits_at_gate(scene: Scene) -> None:
    scene.cast[scene.phase.starting]["ready"] = None
    scene.more["gates"] = (scene.phase.starting,)


def _dies_at_gate(scene: Scene) -> None:
    """What is ready dies; only then is its dependent's turn."""
    starting = scene.phase.starting
    scene.until("gate.reached", starting)
    before = NAMES[NAMES.index(starting) - 1]
    scene.signal(before)
    scene.until("component.exited", before)
    scene.touch(f"gate-{starting}")


def _nothing_started_later(scene: Scene) -> None:
    assert scene.witness.seen("component.starting", scene.phase.starting) == []


BEFORE_DEPENDENTS = [
    Case(
        number=5,
        title="ready, then dead before its dependents start",
        phases=(phase,),
        cast=_waits_at_gate,
        inject=_dies_at_gate,
        is_at_once=True,
        check=_nothing_started_later,
        expect=failed(NAMES[NAMES.index(phase.starting) - 1], signal="SIGKILL"),
    )
    for phase in STARTING[1:]
]


def _prints_unflushed(scene: Scene) -> None:
    spec = RunSpec.model_validate(
        {"name": "a", "workload": "sft", "components": {"trainer": {"command": ["true"]}}}
    )
    # What every component of a run gets: without it the lines are lost.
    scene.cast["trainer"]["env"] = component_env(spec, "trainer", "a-run", 1)
    scene.cast["trainer"]["argv"] = (sys.executable, "-c", _PRINTS_AND_DIES)


def _all_lines_are_there(scene: Scene) -> None:
    lines = (scene.directory / "trainer.log").read_text().splitlines()
    assert len(lines) == 1 + _PRINTED


UNFLUSHED = Case(
    number=29,
    title="crash with an unflushed buffer",
    phases=phases_with("trainer"),
    cast=_prints_unflushed,
    inject=_tell_to_die,
    check=_all_lines_are_there,
    expect=failed("trainer", signal="SIGKILL"),
)


def _crash_together(scene: Scene) -> None:
    """The flow process is stopped meanwhile, and learns of both at once."""
    scene.witness.kill(signal.SIGSTOP)
    wait_until(lambda: scene.witness.state() == "T", "the flow is stopped")
    for victim in ("api", "trainer"):
        pid = scene.pid(victim)
        os.kill(pid, signal.SIGSEGV if victim == "api" else signal.SIGKILL)
        scene.until_gone(pid)
    scene.witness.kill(signal.SIGCONT)


def _one_cause(scene: Scene) -> None:
    assert len(scene.witness.seen("teardown.begun")) == 1


TOGETHER = Case(
    number=33,
    title="two crash together",
    phases=phases_with("trainer"),
    inject=_crash_together,
    check=_one_cause,
    expect=failed("api", signal="SIGSEGV"),
)


def _in_little_memory(scene: Scene) -> None:
    place = scene.stack.enter_context(memory_cgroup(64 << 20))
    enter = f'echo $$ > {place}/cgroup.procs && exec "$@"'
    scene.cast["trainer"]["argv"] = (*sh(enter), "sh", *python(_ALLOCATES))


OOM = Case(
    number=35,
    title="OOM kill",
    phases=phases_with("trainer"),
    cast=_in_little_memory,
    inject=_tell_to_die,
    expect=failed("trainer", signal="SIGKILL"),
    obstacle=lambda: why_no_cgroup_v1("memory"),
)

CASES = [*KILLED, *CRASHES, *BEFORE_READY, *BEFORE_DEPENDENTS, UNFLUSHED, TOGETHER, OOM]
