"""What surrounds a run: descriptors, memory, cgroups, processes that can't be ended."""

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


def _leaks(scene: Scene) -> None:
    scene.more["oddity"] = "leaky-descriptors"


def _look_at_descriptors(scene: Scene) -> None:
    for event in scene.witness.seen("component.spawned"):
        place = f"/proc/{event['pid']}/fd"
        # The program's own loader has a fourth for a moment.
        wait_until(
            lambda place=place: sorted(os.listdir(place)) == ["0", "1", "2"],
            f"{event['component']} has its three descriptors and no other",
        )


DESCRIPTORS = Case(
    number=30,
    title="fd leak between siblings",
    phases=(*STARTING, Phase.RUNNING, Phase.STOPPING),
    cast=_leaks,
    inject=_look_at_descriptors,
    expect=CANCELLED,
)


def _is_not_there(scene: Scene) -> None:
    scene.cast[scene.phase.starting]["argv"] = ("/no/such/program",)


def _waits_at_gate(scene: Scene) -> None:
    scene.more["gates"] = (scene.phase.starting,)


def _limit_guardian(scene: Scene, limit: int, value: int) -> None:
    """The guardian that is about to start the component."""
    starting = scene.phase.starting
    scene.until("gate.reached", starting)
    # In a namespace there are two: the one outside starts the one that does the work.
    expected = 2 if scene.level == "L4" else 1
    wait_until(lambda: len(scene.guardians(starting)) == expected, "its guardians are there")
    for guardian in scene.guardians(starting):
        resource.prlimit(guardian, limit, (value, value))
    scene.touch(f"gate-{starting}")


def _spawn_case(
    title: str,
    cast: Callable[[Scene], None],
    inject: Callable[[Scene], None] = lambda scene: None,
    kind: str | None = None,
) -> list[Case]:
    return [
        Case(
            number=34,
            title=title,
            phases=(phase,),
            cast=cast,
            inject=inject,
            is_at_once=True,
            expect=failed(phase.starting, kind=kind),
        )
        for phase in STARTING
    ]


SPAWN = [
    *_spawn_case("ENOENT at spawn", _is_not_there, kind="USER_ERROR"),
    *_spawn_case(
        "EMFILE in a guardian at spawn",
        _waits_at_gate,
        partial(_limit_guardian, limit=resource.RLIMIT_NOFILE, value=4),
    ),
    *_spawn_case(
        "ENOMEM in a guardian at spawn",
        _waits_at_gate,
        partial(_limit_guardian, limit=resource.RLIMIT_AS, value=1 << 20),
    ),
]


def _freeze(scene: Scene) -> None:
    """It stays so until the run has given its verdict."""
    with frozen(scene.pid("trainer")):
        _end_and_wait(scene)


def _trace(scene: Scene) -> None:
    with traced(scene.pid("trainer"), scene.directory):
        _end_and_wait(scene)


def _end_and_wait(scene: Scene) -> None:
    if not scene.has_stopped:
        scene.stop()
    scene.touch("release")
    scene.until("teardown.ended")
    scene.until_verdict()


def _is_never_called_stopped(scene: Scene) -> None:
    assert scene.witness.verdict()["failure"]["rule"] == "teardown-incomplete"
    assert scene.witness.seen("component.stopped", "trainer") == []


def _its_pid_is_named(scene: Scene) -> None:
    """As seen from the flow: with it a person looks into /proc/PID/stack."""
    _is_never_called_stopped(scene)
    assert scene.pid("trainer") in scene.witness.verdict()["left"]["trainer"]


def _unkillable(
    title: str,
    inject: Callable[[Scene], None],
    check: Callable[[Scene], None],
    left: str = "trainer",
    levels: tuple[str, ...] = LEVELS,
    obstacle: Callable[[], str] = lambda: "",
) -> Case:
    expected = Expected(state="failed", left=left, says="outlived SIGKILL")
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
        _its_pid_is_named,
        obstacle=partial(why_no_cgroup_v1, "freezer"),
    ),
    _unkillable("a process that cannot be reaped", _trace, _its_pid_is_named, levels=LEVELS[:-1]),
    # What is left then is the namespace, which is no component's.
    _unkillable(
        "a process that cannot be reaped",
        _trace,
        lambda scene: None,
        left=ANYTHING,
        levels=LEVELS[-1:],
    ),
]


def _says_why(scene: Scene, why: str) -> None:
    """The level drops, and the run says so; it runs all the same."""
    missing = scene.until("containment")["missing"]
    assert why in missing[scene.level], missing


def _cgroups_are_read_only(scene: Scene) -> None:
    places = "$(awk '/ - cgroup2 /{print $5}' /proc/self/mountinfo)"
    script = f"for m in {places}; do mount -o remount,ro,bind $m; done"
    scene.more["wrapper"] = in_mounts(script)


#: In a user namespace that allows no further one, without a capability in it.
_NO_NAMESPACES = (
    *("unshare", "-Ur"),
    *sh(
        "echo 0 > /proc/sys/user/max_user_namespaces"
        ' && exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
    ),
    "sh",
)


def _no_namespaces(scene: Scene) -> None:
    scene.more["wrapper"] = _NO_NAMESPACES


def _level_is_capped(scene: Scene) -> None:
    scene.more["env"] = {"MUSTER_MAX_CONTAINMENT": "L2"}


DROPS = [
    Case(
        number=36,
        title="read-only cgroup",
        phases=(Phase.RUNNING,),
        levels=("L3",),
        drops=True,
        cast=_cgroups_are_read_only,
        inject=partial(_says_why, why="Read-only file system"),
        expect=CANCELLED,
        obstacle=why_no_mounts,
    ),
    Case(
        number=36,
        title="no user namespaces",
        phases=(Phase.RUNNING,),
        levels=("L4",),
        drops=True,
        cast=_no_namespaces,
        inject=partial(_says_why, why="unshare is refused"),
        expect=CANCELLED,
        obstacle=lambda: why_not(*_NO_NAMESPACES, "true"),
    ),
    Case(
        number=36,
        title="the machine's keeper allows no more than L2",
        phases=(Phase.RUNNING,),
        levels=("L3", "L4"),
        drops=True,
        cast=_level_is_capped,
        inject=partial(_says_why, why="MUSTER_MAX_CONTAINMENT is L2"),
        expect=CANCELLED,
    ),
]


def _starve_flow(scene: Scene) -> None:
    """It may have all it needs already, or fail; what it must not is leave something."""
    scene.cast[scene.phase.starting]["ready"] = ReadyProbe(
        http=f"http://127.0.0.1:{free_port()}/", within_s=0.5
    )
    scene.more |= {"oddity": "no-descriptors", "at": scene.phase.starting}


STARVED = [
    Case(
        number=34,
        title="EMFILE in the flow at spawn",
        phases=(phase,),
        cast=_starve_flow,
        is_at_once=True,
        expect=Expected(state="failed"),
        # To look into a directory takes a descriptor, and so does to remove it.
        is_tidy=False,
    )
    for phase in STARTING
]

#: /proc hides what other users run; root sees it all the same, but for one without capabilities.
_HIDDEN = (
    "unshare",
    "-m",
    *sh(
        "mount -t proc -o hidepid=1,gid=54321 proc /proc"
        ' && exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
    ),
    "sh",
)
_OTHER_USER = ("setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=-all")


def _proc_hides(scene: Scene) -> None:
    scene.more["wrapper"] = _HIDDEN
    scene.cast["api"]["argv"] = SHAPES["polite-leader-stubborn-child"]
    scene.stack.enter_context(
        helper(*_OTHER_USER, *sh("echo up; cat; exec sleep 600"), cwd=scene.directory)
    )


HIDEPID = Case(
    number=36,
    title="/proc hides other users' processes (hidepid)",
    phases=phases_with("trainer"),
    levels=("L2",),
    cast=_proc_hides,
    inject=lambda scene: scene.signal("trainer"),
    expect=failed("trainer", signal="SIGKILL"),
    obstacle=lambda: why_not(*_HIDDEN, *_OTHER_USER[:1], "true"),
)

CASES = [HIDEPID, *STARVED, DESCRIPTORS, *SPAWN, *UNKILLABLE, *DROPS]
