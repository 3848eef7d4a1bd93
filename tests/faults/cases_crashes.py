"""Fault cases in which components die: by a signal, before readiness, or two together."""

from __future__ import annotations

import functools
import os
import signal
import sys

from tasks.spec.run import RunSpec
from tasks.train.plan import component_env
from tests.faults.fault_run import NAMES, STARTING, Case, FaultRun, Phase, failed, phases_with
from tests.faults.injections import memory_cgroup, why_no_cgroup_v1
from tests.support.supervised_components import python, sh, wait_until

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


def _prepare_victim(fault_run: FaultRun, victim: str, end: str) -> None:
    fault_run.components[victim]["argv"] = print_up_then(end)


def _let_trainer_end(fault_run: FaultRun) -> None:
    fault_run.touch("die")
    if fault_run.phase is Phase.STOPPING:
        fault_run.until("component.exited", "trainer")


def _kill(fault_run: FaultRun, victim: str) -> None:
    fault_run.signal(victim)
    if fault_run.phase is Phase.STOPPING:
        fault_run.until("component.exited", victim)


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


def _prepare_early_exit(fault_run: FaultRun) -> None:
    fault_run.components[fault_run.phase.starting]["argv"] = sh("exit 7")


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


def _prepare_gate(fault_run: FaultRun) -> None:
    fault_run.components[fault_run.phase.starting]["ready"] = None
    fault_run.witness_arguments["gates"] = (fault_run.phase.starting,)


def _kill_dependency_at_gate(fault_run: FaultRun) -> None:
    """Kill a ready component while the test still delays the start of the next component.

    The next component depends on the killed component, so the next component must not start.
    """
    dependent = fault_run.phase.starting
    fault_run.until("gate.reached", dependent)
    dependency = NAMES[NAMES.index(dependent) - 1]
    fault_run.signal(dependency)
    fault_run.until("component.exited", dependency)
    fault_run.touch(f"gate-{dependent}")


def _check_dependent_was_not_started(fault_run: FaultRun) -> None:
    assert fault_run.observed_flow.list_events("component.starting", fault_run.phase.starting) == []


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


def _prepare_unflushed_output(fault_run: FaultRun) -> None:
    spec = RunSpec.model_validate(
        {"name": "a", "workload": "sft", "components": {"trainer": {"command": ["true"]}}}
    )
    # Use the environment variables that Muster sets for each component. PYTHONUNBUFFERED disables
    # Python's output buffer, because a crash would lose the lines in the buffer.
    fault_run.components["trainer"]["env"] = component_env(spec, "trainer", "a-run", 1)
    fault_run.components["trainer"]["argv"] = (sys.executable, "-c", _PRINTS_AND_KILLS_ITSELF)


def _check_all_lines_are_logged(fault_run: FaultRun) -> None:
    lines = (fault_run.directory / "trainer.log").read_text().splitlines()
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


def _crash_together(fault_run: FaultRun) -> None:
    """Kill two components while the flow process is suspended.

    So the flow process notices both deaths at the same time.
    """
    fault_run.observed_flow.kill(signal.SIGSTOP)
    wait_until(lambda: fault_run.observed_flow.state() == "T", "the flow is stopped")
    for victim in ("api", "trainer"):
        pid = fault_run.pid(victim)
        os.kill(pid, signal.SIGSEGV if victim == "api" else signal.SIGKILL)
        fault_run.until_gone(pid)
    fault_run.observed_flow.kill(signal.SIGCONT)


def _check_one_teardown(fault_run: FaultRun) -> None:
    assert len(fault_run.observed_flow.list_events("teardown.begun")) == 1


TOGETHER = Case(
    number=33,
    title="two crash together",
    phases=phases_with("trainer"),
    inject=_crash_together,
    check=_check_one_teardown,
    expect=failed("api", signal="SIGSEGV"),
)


def _prepare_memory_limit(fault_run: FaultRun) -> None:
    cgroup = fault_run.stack.enter_context(memory_cgroup(64 << 20))
    enter_cgroup = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
    fault_run.components["trainer"]["argv"] = (*sh(enter_cgroup), "sh", *python(_ALLOCATES))


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
