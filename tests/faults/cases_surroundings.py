"""Fault cases of the surroundings: file descriptors, memory, cgroups, unkillable processes."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from functools import partial

from tasks.spec.probes import ReadyProbe
from tests.faults.fault_run import (
    ANYTHING,
    CANCELLED,
    LEVELS,
    STARTING,
    Case,
    Expected,
    FaultRun,
    Phase,
    failed,
    phases_with,
)
from tests.faults.injections import (
    frozen,
    helper,
    in_mounts,
    traced,
    why_no_cgroup_v1,
    why_no_mounts,
    why_not,
)
from tests.support.process_trees import SHAPES
from tests.support.supervised_components import free_port, sh, wait_until


def _prepare_leaky_flow(fault_run: FaultRun) -> None:
    fault_run.witness_arguments["oddity"] = "leaky-descriptors"


def _wait_for_three_descriptors(fault_run: FaultRun) -> None:
    for event in fault_run.observed_flow.list_events("component.spawned"):
        directory = f"/proc/{event['pid']}/fd"
        # At its start, the program has a fourth open descriptor for a moment: its dynamic loader
        # reads a library.
        wait_until(
            lambda directory=directory: sorted(os.listdir(directory)) == ["0", "1", "2"],
            f"{event['component']} has its three descriptors and no other",
        )


DESCRIPTORS = Case(
    number=30,
    title="fd leak between siblings",
    phases=(*STARTING, Phase.RUNNING, Phase.STOPPING),
    prepare=_prepare_leaky_flow,
    inject=_wait_for_three_descriptors,
    expect=CANCELLED,
)


def _prepare_missing_program(fault_run: FaultRun) -> None:
    fault_run.components[fault_run.phase.starting]["argv"] = ("/no/such/program",)


def _prepare_gate(fault_run: FaultRun) -> None:
    fault_run.witness_arguments["gates"] = (fault_run.phase.starting,)


def _limit_guardian(fault_run: FaultRun, limit: int, value: int) -> None:
    """Set a resource limit of the guardian process that will start the component.

    Args:
        fault_run: The run. The test delays the start of the component until the limit is set.
        limit: Number of the limit, for example `resource.RLIMIT_NOFILE`.
        value: New soft and hard limit.
    """
    starting = fault_run.phase.starting
    fault_run.until("gate.reached", starting)
    # A guardian is the process that starts and ends a component. At level L4, the guardian outside
    # the PID namespace starts a second guardian inside the namespace.
    expected = 2 if fault_run.level == "L4" else 1
    wait_until(lambda: len(fault_run.guardians(starting)) == expected, "its guardians are there")
    for guardian in fault_run.guardians(starting):
        resource.prlimit(guardian, limit, (value, value))
    fault_run.touch(f"gate-{starting}")


def _spawn_cases(
    title: str,
    prepare: Callable[[FaultRun], None],
    inject: Callable[[FaultRun], None] = lambda fault_run: None,
    kind: str | None = None,
) -> list[Case]:
    """Return one case for each component: the process of the component cannot be started.

    Args:
        title: Short description of the fault.
        prepare: Changes the run before it starts.
        inject: Injects the fault.
        kind: Expected failure kind. None if the kind is not checked.
    """
    return [
        Case(
            number=34,
            title=title,
            phases=(phase,),
            prepare=prepare,
            inject=inject,
            is_at_once=True,
            expect=failed(phase.starting, kind=kind),
        )
        for phase in STARTING
    ]


SPAWN = [
    *_spawn_cases("ENOENT at spawn", _prepare_missing_program, kind="USER_ERROR"),
    *_spawn_cases(
        "EMFILE in a guardian at spawn",
        _prepare_gate,
        partial(_limit_guardian, limit=resource.RLIMIT_NOFILE, value=4),
    ),
    *_spawn_cases(
        "ENOMEM in a guardian at spawn",
        _prepare_gate,
        partial(_limit_guardian, limit=resource.RLIMIT_AS, value=1 << 20),
    ),
]


def _freeze(fault_run: FaultRun) -> None:
    """Keep the trainer in uninterruptible sleep until the run has reported its final state."""
    with frozen(fault_run.pid("trainer")):
        _stop_and_wait_for_verdict(fault_run)


def _trace(fault_run: FaultRun) -> None:
    """Trace the trainer until the run has reported its final state.

    A parent cannot reap a child that is being traced, so the killed trainer stays a zombie.
    """
    with traced(fault_run.pid("trainer"), fault_run.directory):
        _stop_and_wait_for_verdict(fault_run)


def _stop_and_wait_for_verdict(fault_run: FaultRun) -> None:
    if not fault_run.has_stopped:
        fault_run.stop()
    fault_run.touch("release")
    fault_run.until("teardown.ended")
    fault_run.until_verdict()


def _check_trainer_is_not_reported_as_stopped(fault_run: FaultRun) -> None:
    assert fault_run.observed_flow.verdict()["failure"]["rule"] == "teardown-incomplete"
    assert fault_run.observed_flow.list_events("component.stopped", "trainer") == []


def _check_verdict_names_pid(fault_run: FaultRun) -> None:
    """Check that the run's reported failure names the pid of the process that did not end.

    With this pid, a person can read in /proc/PID/stack why the process does not end.
    """
    _check_trainer_is_not_reported_as_stopped(fault_run)
    [survivor] = fault_run.observed_flow.verdict()["left"]["trainer"]
    assert survivor.startswith(f"pid {fault_run.pid('trainer')} ("), survivor


def _unkillable(
    title: str,
    inject: Callable[[FaultRun], None],
    check: Callable[[FaultRun], None],
    survivor: str = "trainer",
    levels: tuple[str, ...] = LEVELS,
    obstacle: Callable[[], str] = lambda: "",
) -> Case:
    """Return a case in which a process survives SIGKILL.

    Args:
        title: Short description of the fault.
        inject: Injects the fault into the run.
        check: Checks the result of the run.
        survivor: Name of the component with the surviving process, or `ANYTHING`.
        levels: Containment levels ("L2" to "L4") at which the fault is injected.
        obstacle: Returns the reason why this machine cannot inject the fault, or an empty string
            if it can.
    """
    expected = Expected(state="failed", survivor=survivor, message_part="could not be ended")
    return Case(
        number=38,
        title=title,
        phases=(Phase.START_ENVIRONMENT, Phase.RUNNING, Phase.STOPPING),
        inject=inject,
        expect=expected,
        expect_stopping=expected,
        check=check,
        levels=levels,
        is_tidy=False,
        obstacle=obstacle,
    )


UNKILLABLE = [
    _unkillable(
        "a process in D state",
        _freeze,
        _check_verdict_names_pid,
        obstacle=partial(why_no_cgroup_v1, "freezer"),
    ),
    _unkillable(
        "a process that cannot be reaped", _trace, _check_verdict_names_pid, levels=LEVELS[:-1]
    ),
    # At level L4, Muster only notices that the run's PID namespace does not end. The reported
    # failure may then name the wrong component, so this case accepts any component.
    _unkillable(
        "a process that cannot be reaped",
        _trace,
        lambda fault_run: None,
        survivor=ANYTHING,
        levels=LEVELS[-1:],
    ),
]


def _check_reason_of_lower_level(fault_run: FaultRun, reason: str) -> None:
    """Check that the run uses a lower containment level than requested, and reports the reason."""
    missing = fault_run.until("containment")["missing"]
    assert reason in missing[fault_run.level], missing


def _prepare_read_only_cgroups(fault_run: FaultRun) -> None:
    mount_points = "$(awk '/ - cgroup2 /{print $5}' /proc/self/mountinfo)"
    script = f"for m in {mount_points}; do mount -o remount,ro,bind $m; done"
    fault_run.witness_arguments["wrapper"] = in_mounts(script)


#: Command prefix that runs a command in a new user namespace. The command has no capability in this
#: namespace, and cannot create a further user namespace.
_WITHOUT_NAMESPACES = (
    *("unshare", "-Ur"),
    *sh(
        "echo 0 > /proc/sys/user/max_user_namespaces"
        ' && exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
    ),
    "sh",
)


def _prepare_user_without_namespaces(fault_run: FaultRun) -> None:
    fault_run.witness_arguments["wrapper"] = _WITHOUT_NAMESPACES


def _prepare_level_limit(fault_run: FaultRun) -> None:
    fault_run.witness_arguments["env"] = {"MUSTER_MAX_CONTAINMENT": "L2"}


DROPS = [
    Case(
        number=36,
        title="read-only cgroup",
        phases=(Phase.RUNNING,),
        levels=("L3",),
        drops=True,
        prepare=_prepare_read_only_cgroups,
        inject=partial(_check_reason_of_lower_level, reason="Read-only file system"),
        expect=CANCELLED,
        obstacle=why_no_mounts,
    ),
    Case(
        number=36,
        title="no user namespaces",
        phases=(Phase.RUNNING,),
        levels=("L4",),
        drops=True,
        prepare=_prepare_user_without_namespaces,
        inject=partial(_check_reason_of_lower_level, reason="the kernel refuses a PID namespace"),
        expect=CANCELLED,
        obstacle=lambda: why_not(*_WITHOUT_NAMESPACES, "true"),
    ),
    Case(
        number=36,
        title="the machine's keeper allows no more than L2",
        phases=(Phase.RUNNING,),
        levels=("L3", "L4"),
        drops=True,
        prepare=_prepare_level_limit,
        inject=partial(_check_reason_of_lower_level, reason="MUSTER_MAX_CONTAINMENT is L2"),
        expect=CANCELLED,
    ),
]


def _starve_flow(fault_run: FaultRun) -> None:
    """Leave the flow process without free file descriptors when it starts the component.

    The component fails to start, or it starts and then fails its readiness probe. In both cases, no
    process may survive the run.
    """
    fault_run.components[fault_run.phase.starting]["ready"] = ReadyProbe(
        http=f"http://127.0.0.1:{free_port()}/", within_s=0.5
    )
    fault_run.witness_arguments |= {"oddity": "no-descriptors", "at": fault_run.phase.starting}


STARVED = [
    Case(
        number=34,
        title="EMFILE in the flow at spawn",
        phases=(phase,),
        prepare=_starve_flow,
        is_at_once=True,
        expect=Expected(state="failed"),
        # Some directories of the run remain, because the flow process has no free file descriptor
        # to list these directories.
        is_tidy=False,
    )
    for phase in STARTING
]

#: Command prefix that runs a command with a /proc that hides other users' processes. The command
#: has no capabilities, because /proc hides nothing from a privileged process.
_WITH_HIDDEN_PROC = (
    "unshare",
    "-m",
    *sh(
        "mount -t proc -o hidepid=1,gid=54321 proc /proc"
        ' && exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
    ),
    "sh",
)
#: Command prefix that runs a command as another user.
_OTHER_USER = ("setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=-all")


def _prepare_hidden_processes(fault_run: FaultRun) -> None:
    fault_run.witness_arguments["wrapper"] = _WITH_HIDDEN_PROC
    fault_run.components["api"]["argv"] = SHAPES["polite-leader-stubborn-child"]
    fault_run.stack.enter_context(
        helper(*_OTHER_USER, *sh("echo up; cat; exec sleep 600"), cwd=fault_run.directory)
    )


HIDEPID = Case(
    number=36,
    title="/proc hides other users' processes (hidepid)",
    phases=phases_with("trainer"),
    levels=("L2",),
    prepare=_prepare_hidden_processes,
    inject=lambda fault_run: fault_run.signal("trainer"),
    expect=failed("trainer", signal="SIGKILL"),
    obstacle=lambda: why_not(*_WITH_HIDDEN_PROC, *_OTHER_USER[:1], "true"),
)

CASES = [HIDEPID, *STARVED, DESCRIPTORS, *SPAWN, *UNKILLABLE, *DROPS]
