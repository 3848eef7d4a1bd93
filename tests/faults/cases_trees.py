"""Fault cases of process trees that are hard to end, and of runs that are stopped twice."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

from tasks.processes.signals import ONE_PRESS_S
from tasks.spec.probes import LiveProbe
from tests.faults.cases_crashes import print_up_then
from tests.faults.fault_run import ALIVE, CANCELLED, Case, FaultRun, Phase, failed, phases_with
from tests.faults.injections import pids_cgroup, server, why_no_cgroup_v1
from tests.support.process_trees import SHAPES
from tests.support.supervised_components import DEADLINE_S, free_port, python, sh, wait_until

#: Program that ignores SIGTERM, and forks until the kernel refuses a further process. The program
#: then continues to try, so that it takes the place of each process or thread that ends.
_FORKS_UP_TO_LIMIT = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
is_full = False
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
    except BlockingIOError:
        if not is_full:
            os.write(1, b"up\\n")
            is_full = True
        time.sleep(0.001)
"""
#: Limit on the number of processes of the run.
_MAX_PROCESSES = 150


def _prepare_shape(shape: str, fault_run: FaultRun) -> None:
    fault_run.components["trainer"]["argv"] = SHAPES[shape]


def _kill_leader_while_stopping(fault_run: FaultRun) -> None:
    """Kill the trainer's first process if the phase of the test is STOPPING.

    In this phase, the environment component is in its grace period. In all other phases, the
    function does nothing.
    """
    if fault_run.phase is Phase.STOPPING:
        fault_run.signal("trainer")
        fault_run.until("component.exited", "trainer")


SHAPED = [
    Case(
        number=number,
        title=title,
        phases=phases_with("trainer"),
        prepare=partial(_prepare_shape, shape),
        inject=_kill_leader_while_stopping,
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


def _prepare_burst(fault_run: FaultRun) -> None:
    """Let the trainer fork until the process limit of the whole run is reached.

    Then the flow process, and the guardian processes that own the components, cannot fork either.
    """
    cgroup = fault_run.stack.enter_context(pids_cgroup(_MAX_PROCESSES))
    enter_cgroup = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
    fault_run.witness_arguments["wrapper"] = (*sh(enter_cgroup), "sh")
    fault_run.components["trainer"]["argv"] = python(_FORKS_UP_TO_LIMIT)


BURST = [
    Case(
        number=15,
        title="fork burst under a pids limit",
        # The trainer forks processes until the limit of the run's cgroup is reached (pids.max). So
        # the process of the next component cannot be started.
        phases=phases,
        prepare=_prepare_burst,
        is_at_once=is_at_once,
        expect=expect,
        obstacle=lambda: why_no_cgroup_v1("pids"),
    )
    for phases, is_at_once, expect in (
        ((Phase.START_TRAINER,), False, CANCELLED),
        ((Phase.START_ENVIRONMENT,), True, failed("environment")),
    )
]


def _prepare_late_burst(fault_run: FaultRun) -> None:
    """Let the trainer wait for the file `burst`, and then start processes up to the limit."""
    _prepare_burst(fault_run)
    wait_for_file = "import os, time\nos.write(1, b'up\\n')\nwhile not os.path.exists('burst'):"
    code = f"{wait_for_file}\n    time.sleep(0.01)\n{_FORKS_UP_TO_LIMIT.replace('up', 'full')}"
    fault_run.components["trainer"]["argv"] = python(code)


def _start_burst(fault_run: FaultRun) -> None:
    fault_run.touch("burst")
    fault_run.until_log("trainer", "full")


LATE_BURST = Case(
    number=15,
    title="fork burst under a pids limit",
    phases=(Phase.RUNNING, Phase.STOPPING),
    prepare=_prepare_late_burst,
    inject=_start_burst,
    expect=CANCELLED,
    obstacle=lambda: why_no_cgroup_v1("pids"),
)


def _prepare_liveness(fault_run: FaultRun) -> None:
    port = free_port()
    live = LiveProbe(http=f"http://127.0.0.1:{port}/live", every_s=0.05, timeout_s=0.3, misses=3)
    fault_run.components["trainer"] |= {"argv": server(port, "y"), "live": live}


def _freeze_trainer(fault_run: FaultRun) -> None:
    fault_run.signal("trainer", signal.SIGSTOP)


def _prepare_goodbye(fault_run: FaultRun) -> None:
    fault_run.components["trainer"] |= {
        "argv": sh("trap 'echo bye; exit' TERM; echo up; while :; do sleep 0.02; done"),
        "grace_s": DEADLINE_S,
    }


def _check_goodbye_was_printed(fault_run: FaultRun) -> None:
    """Check that Muster resumed the suspended trainer, which prints `bye` when it gets SIGTERM."""
    assert "bye" in (fault_run.directory / "trainer.log").read_text()


STOPPED = [
    Case(
        number=20,
        title="component SIGSTOPped",
        phases=(Phase.START_ENVIRONMENT, Phase.RUNNING, Phase.STOPPING),
        prepare=_prepare_liveness,
        inject=_freeze_trainer,
        expect=failed("trainer", kind="STALLED"),
    ),
    Case(
        number=20,
        title="component SIGSTOPped, then told to end",
        phases=phases_with("trainer"),
        prepare=_prepare_goodbye,
        inject=_freeze_trainer,
        check=_check_goodbye_was_printed,
        expect=CANCELLED,
    ),
]


def _prepare_holders(fault_run: FaultRun) -> None:
    argv = print_up_then("exit 3")
    fault_run.components["trainer"]["argv"] = (
        *argv[:-1],
        f"(sleep 600 &); (setsid sleep 600 &); {argv[-1]}",
    )


def _let_trainer_end(fault_run: FaultRun) -> None:
    fault_run.touch("die")
    if fault_run.phase is Phase.STOPPING:
        fault_run.until("component.exited", "trainer")


HOLDERS = Case(
    number=27,
    title="grandchild holds stdout open",
    phases=phases_with("trainer"),
    prepare=_prepare_holders,
    inject=_let_trainer_end,
    expect=failed("trainer", exit_code=3),
)


def _prepare_endless_components(fault_run: FaultRun) -> None:
    for name in ("api", "trainer"):
        fault_run.components[name] |= {"argv": SHAPES["leader-ignores-term"], "grace_s": 600.0}
    if fault_run.phase is Phase.STOPPING:
        # In this phase, the component `environment` is in its grace period. The second Ctrl-C must
        # end this component long before the end of the grace period.
        fault_run.components["environment"]["grace_s"] = 600.0


def _press_ctrl_c(fault_run: FaultRun) -> None:
    # A terminal sends the signal of Ctrl-C to the whole process group.
    os.killpg(fault_run.observed_flow.pid, signal.SIGINT)
    fault_run.until("teardown.begun")


def _press_ctrl_c_twice(fault_run: FaultRun) -> None:
    fault_run.has_stopped = True
    _press_ctrl_c(fault_run)
    # SIGINTs that arrive within ONE_PRESS_S count as a single press of Ctrl-C.
    second_press_at = time.monotonic() + 2 * ONE_PRESS_S
    wait_until(lambda: time.monotonic() > second_press_at, "time for a second press")
    _press_ctrl_c(fault_run)


def _prepare_components_that_save(fault_run: FaultRun) -> None:
    for name in ("api", "trainer"):
        fault_run.components[name] |= {
            "argv": sh(
                "trap 'echo saving; sleep 0.5; echo saved; exit' TERM;"
                " echo up; while :; do sleep 0.02; done"
            ),
            "grace_s": DEADLINE_S,
        }


def _terminate_group_twice(fault_run: FaultRun) -> None:
    fault_run.has_stopped = True
    for _ in range(2):
        os.killpg(fault_run.observed_flow.pid, signal.SIGTERM)
        fault_run.until("teardown.begun")


def _check_all_have_saved(fault_run: FaultRun) -> None:
    """Check that each component that began to save its state has finished saving."""
    for name in ("api", "trainer"):
        log = fault_run.directory / f"{name}.log"
        lines = log.read_text().splitlines() if log.exists() else []
        if "saving" in lines:
            assert "saved" in lines, f"{name} was killed while it saved"


TWICE = [
    Case(
        number=31,
        title="Ctrl-C to the foreground group, twice",
        phases=ALIVE,
        prepare=_prepare_endless_components,
        inject=_press_ctrl_c_twice,
        expect=CANCELLED,
    ),
    Case(
        number=32,
        title="second SIGTERM during the grace",
        phases=ALIVE,
        prepare=_prepare_components_that_save,
        inject=_terminate_group_twice,
        check=_check_all_have_saved,
        expect=CANCELLED,
    ),
]

CASES = [*SHAPED, *BURST, LATE_BURST, *STOPPED, HOLDERS, *TWICE]
