"""Fault cases of the surroundings: file descriptors, memory, cgroups, unkillable processes."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from functools import partial

from tasks.spec.probes import ReadyProbe
from tests.faults.injections import (
    frozen,
    helper,
    in_mounts,
    traced,
    why_no_cgroup_v1,
    why_no_mounts,
    why_not,
)
from tests.faults.scene import (
    ANYTHING,
    CANCELLED,
    LEVELS,
    STARTING,
    Case,
    Expected,
    Phase,
    Scene,
    failed,
    phases_with,
)
from tests.support.shapes import SHAPES
from tests.support.stage import free_port, sh, wait_until


def _prepare_leaky_flow(scene: Scene) -> None:
    scene.witness_arguments["oddity"] = "leaky-descriptors"


def _wait_for_three_descriptors(scene: Scene) -> None:
    for event in scene.witness.seen("component.spawned"):
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


def _prepare_missing_program(scene: Scene) -> None:
    scene.components[scene.phase.starting]["argv"] = ("/no/such/program",)


def _prepare_gate(scene: Scene) -> None:
    scene.witness_arguments["gates"] = (scene.phase.starting,)


def _limit_guardian(scene: Scene, limit: int, value: int) -> None:
    """Set a resource limit of the guardian process that will start the component.

    Args:
        scene: The run. The test delays the start of its component until the limit is set.
        limit: Number of the limit, for example `resource.RLIMIT_NOFILE`.
        value: New soft and hard limit.
    """
    starting = scene.phase.starting
    scene.until("gate.reached", starting)
    # At level L4, the guardian outside the PID namespace starts a second guardian inside.
    expected = 2 if scene.level == "L4" else 1
    wait_until(lambda: len(scene.guardians(starting)) == expected, "its guardians are there")
    for guardian in scene.guardians(starting):
        resource.prlimit(guardian, limit, (value, value))
    scene.touch(f"gate-{starting}")


def _spawn_cases(
    title: str,
    prepare: Callable[[Scene], None],
    inject: Callable[[Scene], None] = lambda scene: None,
    kind: str | None = None,
) -> list[Case]:
    """Return one case per component in which the start of the component's process fails."""
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


def _freeze(scene: Scene) -> None:
    """Keep the trainer in uninterruptible sleep until the run has reported its final state."""
    with frozen(scene.pid("trainer")):
        _stop_and_wait_for_verdict(scene)


def _trace(scene: Scene) -> None:
    """Trace the trainer until the run has reported its final state.

    The parent of a traced process cannot reap it, so the killed trainer stays a zombie.
    """
    with traced(scene.pid("trainer"), scene.directory):
        _stop_and_wait_for_verdict(scene)


def _stop_and_wait_for_verdict(scene: Scene) -> None:
    if not scene.has_stopped:
        scene.stop()
    scene.touch("release")
    scene.until("teardown.ended")
    scene.until_verdict()


def _check_trainer_is_not_reported_as_stopped(scene: Scene) -> None:
    assert scene.witness.verdict()["failure"]["rule"] == "teardown-incomplete"
    assert scene.witness.seen("component.stopped", "trainer") == []


def _check_verdict_names_pid(scene: Scene) -> None:
    """Check that the run's reported failure names the pid of the process that did not end.

    With this pid, a person can read /proc/PID/stack.
    """
    _check_trainer_is_not_reported_as_stopped(scene)
    assert scene.pid("trainer") in scene.witness.verdict()["left"]["trainer"]


def _unkillable(
    title: str,
    inject: Callable[[Scene], None],
    check: Callable[[Scene], None],
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
    expected = Expected(state="failed", survivor=survivor, message_part="survived SIGKILL")
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
    # At level L4, the PID namespace itself survives. The reported failure names no component for
    # this survivor.
    _unkillable(
        "a process that cannot be reaped",
        _trace,
        lambda scene: None,
        survivor=ANYTHING,
        levels=LEVELS[-1:],
    ),
]


def _check_reason_of_lower_level(scene: Scene, reason: str) -> None:
    """Check that the run uses a lower containment level than it requested, and reports why."""
    missing = scene.until("containment")["missing"]
    assert reason in missing[scene.level], missing


def _prepare_read_only_cgroups(scene: Scene) -> None:
    mount_points = "$(awk '/ - cgroup2 /{print $5}' /proc/self/mountinfo)"
    script = f"for m in {mount_points}; do mount -o remount,ro,bind $m; done"
    scene.witness_arguments["wrapper"] = in_mounts(script)


#: Command prefix that runs a command in a user namespace that allows no further user namespace.
#: The command has no capability in it.
_WITHOUT_NAMESPACES = (
    *("unshare", "-Ur"),
    *sh(
        "echo 0 > /proc/sys/user/max_user_namespaces"
        ' && exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
    ),
    "sh",
)


def _prepare_user_without_namespaces(scene: Scene) -> None:
    scene.witness_arguments["wrapper"] = _WITHOUT_NAMESPACES


def _prepare_level_limit(scene: Scene) -> None:
    scene.witness_arguments["env"] = {"MUSTER_MAX_CONTAINMENT": "L2"}


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
        inject=partial(_check_reason_of_lower_level, reason="unshare is refused"),
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


def _starve_flow(scene: Scene) -> None:
    """Leave the flow process without free file descriptors when it starts the component.

    The flow process may then fail to start the component. If it already has all descriptors for
    the start, the component starts and then fails its readiness probe. In both cases no process may
    survive the run.
    """
    scene.components[scene.phase.starting]["ready"] = ReadyProbe(
        http=f"http://127.0.0.1:{free_port()}/", within_s=0.5
    )
    scene.witness_arguments |= {"oddity": "no-descriptors", "at": scene.phase.starting}


STARVED = [
    Case(
        number=34,
        title="EMFILE in the flow at spawn",
        phases=(phase,),
        prepare=_starve_flow,
        is_at_once=True,
        expect=Expected(state="failed"),
        # Without a free file descriptor, the flow process cannot list the directories that must be
        # removed after the run.
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


def _prepare_hidden_processes(scene: Scene) -> None:
    scene.witness_arguments["wrapper"] = _WITH_HIDDEN_PROC
    scene.components["api"]["argv"] = SHAPES["polite-leader-stubborn-child"]
    scene.stack.enter_context(
        helper(*_OTHER_USER, *sh("echo up; cat; exec sleep 600"), cwd=scene.directory)
    )


HIDEPID = Case(
    number=36,
    title="/proc hides other users' processes (hidepid)",
    phases=phases_with("trainer"),
    levels=("L2",),
    prepare=_prepare_hidden_processes,
    inject=lambda scene: scene.signal("trainer"),
    expect=failed("trainer", signal="SIGKILL"),
    obstacle=lambda: why_not(*_WITH_HIDDEN_PROC, *_OTHER_USER[:1], "true"),
)

CASES = [HIDEPID, *STARVED, DESCRIPTORS, *SPAWN, *UNKILLABLE, *DROPS]
