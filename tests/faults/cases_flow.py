"""Fault cases of the flow process and the guardians: killed, stopped, or in an unusual state."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

from tasks.spec.probes import ReadyProbe
from tests.faults.fault_run import (
    ALIVE,
    CANCELLED,
    KILLED,
    NAMES,
    STARTING,
    UP,
    Case,
    FaultRun,
    Phase,
    failed,
    phases_with,
)
from tests.support.observed_flow import ObservedFlow
from tests.support.process_trees import SHAPES
from tests.support.supervised_components import ComponentHarness, sh, wait_until

#: Unusual conditions of the flow process. The key is the number of the fault case. The value is a
#: pair: the title of the case, and a key of `CONDITIONS` in `tests.support.supervising`.
_ODDITIES = {
    21: ("SIGCHLD ignored, inherited", "sigchld-ignored"),
    22: ("blocked signal mask, inherited", "signals-blocked"),
    23: ("spawned from a short-lived thread", "short-lived-thread"),
    24: ("a foreign waitpid(-1) in the flow", "foreign-wait"),
}


def _prepare_daemons(fault_run: FaultRun) -> None:
    """Let each component start a daemon.

    Only the guardian, the process that starts and ends the component, can find this daemon.
    """
    for name in NAMES if fault_run.phase is not Phase.STOPPING else NAMES[:-1]:
        fault_run.components[name]["argv"] = SHAPES["scrubbed-daemon"]


def _kill_flow(fault_run: FaultRun) -> None:
    fault_run.observed_flow.kill()


def _prepare_first_gate(fault_run: FaultRun) -> None:
    fault_run.witness_arguments["gates"] = ("api",)


def _prepare_death_before_registration(fault_run: FaultRun) -> None:
    """Let the flow process die between the fork of a guardian and the component's registration.

    The guardian is the process that starts and ends the component.

    The component's program must not start. If the program starts by mistake, it writes to its log.
    The program ignores its stop signal SIGWINCH, so it has enough time to write before it is
    killed.
    """
    fault_run.components[fault_run.phase.starting] |= {
        "argv": sh("echo ran; exec sleep 600"),
        "stop_signal": signal.SIGWINCH,
    }
    fault_run.witness_arguments |= {"oddity": "dies-registering", "at": fault_run.phase.starting}


def _check_program_never_ran(fault_run: FaultRun) -> None:
    assert fault_run.observed_flow.list_events("component.spawned", fault_run.phase.starting) == []
    log = fault_run.directory / f"{fault_run.phase.starting}.log"
    assert not log.exists() or log.read_text() == ""


FLOW_KILLED = [
    Case(
        number=16,
        title="flow SIGKILLed, nothing started",
        phases=(Phase.IDLE,),
        prepare=_prepare_first_gate,
        inject=_kill_flow,
        expect=KILLED,
    ),
    Case(
        number=16,
        title="flow SIGKILLed",
        phases=ALIVE,
        prepare=_prepare_daemons,
        inject=_kill_flow,
        expect=KILLED,
        expect_stopping=KILLED,
    ),
    Case(
        number=16,
        title="flow SIGKILLed between fork and registry",
        phases=STARTING,
        prepare=_prepare_death_before_registration,
        is_at_once=True,
        check=_check_program_never_ran,
        expect=KILLED,
    ),
]


def _kill_guardian(fault_run: FaultRun, component: str) -> None:
    os.kill(fault_run.guardian(component), signal.SIGKILL)
    if fault_run.phase is Phase.STOPPING:
        fault_run.until("component.exited", component)


GUARDIAN_KILLED = [
    Case(
        number=17,
        title=f"guardian of {victim} SIGKILLed",
        phases=phases_with(victim),
        prepare=_prepare_daemons,
        inject=partial(_kill_guardian, component=victim),
        expect=failed(victim, message_part="its guardian"),
    )
    for victim in NAMES
]


def _kill_outer_guardian(fault_run: FaultRun) -> None:
    """Kill the trainer's outer guardian.

    A guardian is the process that starts and ends a component. At level L4, a component has two
    guardians: the outer guardian waits outside the PID namespace for the guardian inside.
    """
    inner = fault_run.guardian("trainer")
    [outer] = set(fault_run.guardians("trainer")) - {inner}
    os.kill(outer, signal.SIGKILL)
    if fault_run.phase is Phase.STOPPING:
        fault_run.until("component.exited", "trainer")


OUTER_GUARDIAN = Case(
    number=17,
    title="outer part of a guardian SIGKILLed",
    phases=phases_with("trainer"),
    levels=("L4",),
    prepare=_prepare_daemons,
    inject=_kill_outer_guardian,
    expect=failed("trainer", message_part="its guardian"),
)


def _prepare_readiness_file(fault_run: FaultRun) -> None:
    _prepare_daemons(fault_run)
    fault_run.components["trainer"]["ready"] = ReadyProbe(file="trainer-is-ready")


def _kill_idle_guardian(fault_run: FaultRun) -> None:
    idle = fault_run.guardian("environment")
    os.kill(idle, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{idle}").exists(), "the guardian is reaped")
    fault_run.touch("trainer-is-ready")


IDLE_GUARDIAN = Case(
    number=17,
    title="idle guardian SIGKILLed",
    phases=(Phase.START_TRAINER,),
    prepare=_prepare_readiness_file,
    inject=_kill_idle_guardian,
    expect=failed("environment", message_part="its guardian"),
)


def _prepare_template_loss(fault_run: FaultRun, how: str) -> None:
    _prepare_daemons(fault_run)
    fault_run.witness_arguments |= {"oddity": "template", "at": how}


TEMPLATE_LOST = [
    Case(
        number=17,
        title=f"template of the guardians {how} it forks one",
        phases=(Phase.RUNNING,),
        prepare=partial(_prepare_template_loss, how=how),
        expect=CANCELLED,
    )
    for how in ("killed before", "stopped before", "killed while")
] + [
    Case(
        number=18,
        title="flow and template of the guardians SIGKILLed while it forks one",
        phases=(Phase.IDLE,),
        prepare=partial(_prepare_template_loss, how="killed while, and the flow"),
        is_at_once=True,
        expect=KILLED,
    ),
    Case(
        number=16,
        title="flow SIGKILLed while a guardian is forked",
        phases=(Phase.IDLE,),
        prepare=partial(_prepare_template_loss, how="the flow"),
        is_at_once=True,
        expect=KILLED,
    ),
]


def _kill_flow_and_guardians(fault_run: FaultRun) -> None:
    """Kill the flow process and the guardians of all components, then run `muster reconcile`.

    All these processes are suspended before the kills, so that no guardian reacts to the end of the
    flow process.
    """
    guardians = [pid for name in NAMES for pid in fault_run.guardians(name)]
    for pid in (fault_run.observed_flow.pid, *guardians):
        os.kill(pid, signal.SIGSTOP)
    for pid in (*guardians, fault_run.observed_flow.pid):
        os.kill(pid, signal.SIGKILL)
    if fault_run.level == "L4":
        # The guardian is the first process of the PID namespace. When the guardian dies, the kernel
        # kills all other processes of the namespace.
        assert fault_run.observed_flow.oracle_result().left == ()
    else:
        wait_until(lambda: not fault_run.observed_flow.exists(), "the flow is gone")
    results = fault_run.reconcile()
    assert results[fault_run.observed_flow.run_id]["is_clean"], results


def _check_second_reconcile_does_nothing(fault_run: FaultRun) -> None:
    assert not any(fault_run.observed_flow.home.glob("live/*")), "the registry entry still exists"
    # At level L4 (PID namespace), the list of remaining cgroups was made before `muster reconcile`.
    # So this list does not show whether `muster reconcile` removes the cgroups.
    if fault_run.level != "L4":
        assert fault_run.observed_flow.oracle_result().cgroups == ()
    assert fault_run.reconcile() == {}


BOTH_KILLED = Case(
    number=18,
    title="flow and guardians SIGKILLed, then reconcile",
    phases=ALIVE,
    prepare=_prepare_daemons,
    inject=_kill_flow_and_guardians,
    check=_check_second_reconcile_does_nothing,
    expect=KILLED,
    expect_stopping=KILLED,
)


def _stop_flow(fault_run: FaultRun) -> None:
    fault_run.observed_flow.kill(signal.SIGSTOP)
    wait_until(lambda: fault_run.observed_flow.state() == "T", "the flow is stopped")


def _kill_api_while_flow_is_stopped(fault_run: FaultRun) -> None:
    _stop_flow(fault_run)
    pid = fault_run.pid("api")
    os.kill(pid, signal.SIGSEGV)
    fault_run.until_gone(pid)
    fault_run.observed_flow.kill(signal.SIGCONT)


def _stop_then_kill_flow(fault_run: FaultRun) -> None:
    _stop_flow(fault_run)
    fault_run.observed_flow.kill()


FLOW_STOPPED = [
    Case(
        number=19,
        title="flow SIGSTOPped, a component dies, flow goes on",
        phases=ALIVE,
        inject=_kill_api_while_flow_is_stopped,
        expect=failed("api", signal="SIGSEGV"),
    ),
    Case(
        number=19,
        title="flow SIGSTOPped, then SIGKILLed",
        phases=ALIVE,
        prepare=_prepare_daemons,
        inject=_stop_then_kill_flow,
        expect=KILLED,
        expect_stopping=KILLED,
    ),
]


def _prepare_oddity(fault_run: FaultRun, oddity: str) -> None:
    _prepare_daemons(fault_run)
    fault_run.witness_arguments["oddity"] = oddity


def _kill_trainer(fault_run: FaultRun) -> None:
    """Check that the trainer started without blocked or ignored signals, then kill it."""
    lines = Path(f"/proc/{fault_run.pid('trainer')}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines)
    assert int(status["SigBlk"], 16) == 0
    # The trainer may ignore only three signals: SIGTERM, which its script ignores, and 32 and 33,
    # which the C library reserves for itself.
    ignored_by_script = 1 << (signal.SIGTERM - 1)
    reserved_by_c_library = 0b11 << 31
    ignored = int(status["SigIgn"], 16)
    assert ignored & ~reserved_by_c_library & ~ignored_by_script == 0
    fault_run.signal("trainer")
    if fault_run.phase is Phase.STOPPING:
        fault_run.until("component.exited", "trainer")


ODD = [
    Case(
        number=number,
        title=title,
        phases=phases_with("trainer"),
        prepare=partial(_prepare_oddity, oddity=oddity),
        inject=_kill_trainer,
        expect=failed("trainer", signal="SIGKILL"),
    )
    for number, (title, oddity) in _ODDITIES.items()
] + [
    Case(
        number=number,
        title=f"{title}; guardian SIGKILLed",
        phases=(Phase.RUNNING,),
        prepare=partial(_prepare_oddity, oddity=oddity),
        inject=partial(_kill_guardian, component="trainer"),
        expect=failed("trainer", message_part="its guardian"),
    )
    for number, (title, oddity) in _ODDITIES.items()
]


def _prepare_second_run(fault_run: FaultRun) -> None:
    """Start a second run with the same commands.

    The processes of the two runs differ only in the environment variables with the run id.
    """
    _prepare_daemons(fault_run)
    directory = fault_run.directory / "neighbour"
    directory.mkdir()
    component = ComponentHarness(directory).component(
        "trainer", SHAPES["scrubbed-daemon"], ready=UP
    )
    second_run = ObservedFlow(fault_run.forkserver, directory, component, level=fault_run.level)
    fault_run.stack.callback(second_run.clear)
    second_run.wait_for_event("attempt.ready")
    pids = second_run.list_descendants()
    assert len(pids) >= 4, "flow, guardian, component and daemon"
    fault_run.bystanders.append((tuple(pids), "another run"))


def _check_second_run_is_unchanged(fault_run: FaultRun) -> None:
    assert fault_run.reconcile().keys() <= {fault_run.observed_flow.run_id}


SECOND_RUN = [
    Case(
        number=37,
        title=f"another run lives on, ours ends by {how}",
        phases=(Phase.START_ENVIRONMENT, Phase.RUNNING, Phase.STOPPING),
        prepare=_prepare_second_run,
        inject=inject,
        check=_check_second_run_is_unchanged,
        expect=expect,
        expect_stopping=KILLED if expect is KILLED else CANCELLED,
    )
    for how, inject, expect in (
        ("SIGKILL of its flow", _kill_flow, KILLED),
        (
            "SIGKILL of its guardian",
            partial(_kill_guardian, component="trainer"),
            failed("trainer", message_part="its guardian"),
        ),
        ("a double kill", _kill_flow_and_guardians, KILLED),
    )
]

OWN_CHILD = Case(
    number=37,
    title="a process of the flow's own lives on, guardian SIGKILLed",
    phases=phases_with("trainer"),
    prepare=partial(_prepare_oddity, oddity="own-child"),
    inject=partial(_kill_guardian, component="trainer"),
    expect=failed("trainer", message_part="its guardian"),
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
    *SECOND_RUN,
    OWN_CHILD,
]
