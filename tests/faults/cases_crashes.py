"""Fault cases in which components die: by a signal, before readiness, or two together."""

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

#: Number of lines that a program has printed, but not flushed, when it is killed.
_LINES_PRINTED = 100
_PRINTS_AND_KILLS_ITSELF = f"""
import os, signal, sys, time
os.write(1, b"up\\n")
while not os.path.exists("die"):
    time.sleep(0.01)
for i in range({_LINES_PRINTED}):
    print("line", i)
os.kill(os.getpid(), signal.SIGKILL)
"""
#: Program that allocates 500 MiB after the file `die` was created.
_ALLOCATES = """
import os, time
os.write(1, b"up\\n")
while not os.path.exists("die"):
    time.sleep(0.01)
blocks = [b"x" * (1 << 20) for _ in range(500)]
"""


def print_up_then(end: str) -> tuple[str, ...]:
    """Return a command that prints `up`, waits for the file `die`, and then runs a script.

    Args:
        end: Shell script that ends the program, for example "exit 3".
    """
    return sh(f"echo up; while [ ! -e die ]; do sleep 0.02; done; {end}")


def _prepare_victim(scene: Scene, victim: str, end: str) -> None:
    scene.components[victim]["argv"] = print_up_then(end)


def _let_trainer_end(scene: Scene) -> None:
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
        prepare=functools.partial(_prepare_victim, victim="trainer", end=end),
        inject=_let_trainer_end,
        expect=expected,
    )
    for title, end, expected in (
        ("SIGSEGV", "kill -SEGV $$", failed("trainer", kind="RUNTIME_ERROR", signal="SIGSEGV")),
        ("SIGABRT", "kill -ABRT $$", failed("trainer", kind="RUNTIME_ERROR", signal="SIGABRT")),
        ("early exit 0", "exit 0", failed("trainer", exit_code=0)),
    )
]


def _prepare_early_exit(scene: Scene) -> None:
    scene.components[scene.phase.starting]["argv"] = sh("exit 7")


BEFORE_READY = [
    Case(
        number=3,
        title="exit before ready",
        phases=(phase,),
        prepare=_prepare_early_exit,
        is_at_once=True,
        expect=failed(phase.starting, exit_code=7, message_part="before it was ready"),
    )
    for phase in STARTING
]


def _prepare_gate(scene: Scene) -> None:
    scene.components[scene.phase.starting]["ready"] = None
    scene.witness_arguments["gates"] = (scene.phase.starting,)


def _kill_dependency_at_gate(scene: Scene) -> None:
    """Kill a ready component while the test still delays the start of the next component.

    The next component depends on the killed component, so it must not be started.
    """
    dependent = scene.phase.starting
    scene.until("gate.reached", dependent)
    dependency = NAMES[NAMES.index(dependent) - 1]
    scene.signal(dependency)
    scene.until("component.exited", dependency)
    scene.touch(f"gate-{dependent}")


def _check_dependent_was_not_started(scene: Scene) -> None:
    assert scene.witness.seen("component.starting", scene.phase.starting) == []


BEFORE_DEPENDENTS = [
    Case(
        number=5,
        title="ready, then dead before its dependents start",
        phases=(phase,),
        prepare=_prepare_gate,
        inject=_kill_dependency_at_gate,
        is_at_once=True,
        check=_check_dependent_was_not_started,
        expect=failed(NAMES[NAMES.index(phase.starting) - 1], signal="SIGKILL"),
    )
    for phase in STARTING[1:]
]


def _prepare_unflushed_output(scene: Scene) -> None:
    spec = RunSpec.model_validate(
        {"name": "a", "workload": "sft", "components": {"trainer": {"command": ["true"]}}}
    )
    # Muster sets these variables for all components. They disable Python's output buffer, whose
    # lines would otherwise be lost.
    scene.components["trainer"]["env"] = component_env(spec, "trainer", "a-run", 1)
    scene.components["trainer"]["argv"] = (sys.executable, "-c", _PRINTS_AND_KILLS_ITSELF)


def _check_all_lines_are_logged(scene: Scene) -> None:
    lines = (scene.directory / "trainer.log").read_text().splitlines()
    assert len(lines) == 1 + _LINES_PRINTED


UNFLUSHED = Case(
    number=29,
    title="crash with an unflushed buffer",
    phases=phases_with("trainer"),
    prepare=_prepare_unflushed_output,
    inject=_let_trainer_end,
    check=_check_all_lines_are_logged,
    expect=failed("trainer", signal="SIGKILL"),
)


def _crash_together(scene: Scene) -> None:
    """Kill two components while the flow process is stopped, so that it notices both at once."""
    scene.witness.kill(signal.SIGSTOP)
    wait_until(lambda: scene.witness.state() == "T", "the flow is stopped")
    for victim in ("api", "trainer"):
        pid = scene.pid(victim)
        os.kill(pid, signal.SIGSEGV if victim == "api" else signal.SIGKILL)
        scene.until_gone(pid)
    scene.witness.kill(signal.SIGCONT)


def _check_one_teardown(scene: Scene) -> None:
    assert len(scene.witness.seen("teardown.begun")) == 1


TOGETHER = Case(
    number=33,
    title="two crash together",
    phases=phases_with("trainer"),
    inject=_crash_together,
    check=_check_one_teardown,
    expect=failed("api", signal="SIGSEGV"),
)


def _prepare_memory_limit(scene: Scene) -> None:
    cgroup = scene.stack.enter_context(memory_cgroup(64 << 20))
    enter_cgroup = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
    scene.components["trainer"]["argv"] = (*sh(enter_cgroup), "sh", *python(_ALLOCATES))


OOM = Case(
    number=35,
    title="OOM kill",
    phases=phases_with("trainer"),
    prepare=_prepare_memory_limit,
    inject=_let_trainer_end,
    expect=failed("trainer", signal="SIGKILL"),
    obstacle=lambda: why_no_cgroup_v1("memory"),
)

CASES = [*KILLED, *CRASHES, *BEFORE_READY, *BEFORE_DEPENDENTS, UNFLUSHED, TOGETHER, OOM]
