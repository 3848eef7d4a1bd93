"""What the registry on disk may be wrong about, and what a run leaves beside processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tasks.processes.identity import ProcessId
from tests.faults.injections import helper, pids_taken, why_no_pid_to_choose
from tests.faults.scene import CANCELLED, KILLED, Case, Phase, Scene, failed, phases_with
from tests.support.stage import python, sh, wait_until

#: Makes a segment of shared memory, holds it, and never removes it.
_LEAKER = """
import mmap, os, sys, time
f = open("/dev/shm/" + sys.argv[1], "w+b")
f.truncate(4096)
held = mmap.mmap(f.fileno(), 4096)
os.write(1, b"up\\n")
time.sleep(600)
"""


def _drains(scene: Scene) -> None:
    """One component leaves, its part done, and the run goes on."""
    scene.cast["trainer"] |= {
        "argv": sh("echo up; while [ ! -e die ]; do sleep 0.02; done"),
        "on_exit_zero": "drain",
    }


def _reuse_in_a_living_run(scene: Scene) -> None:
    pids = [scene.pid("trainer"), *scene.guardians("trainer")]
    scene.touch("die")
    scene.until("component.drained", "trainer")
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they are reaped")
    _give_to_others(scene, pids)


def _give_to_others(scene: Scene, pids: list[int]) -> None:
    scene.stack.enter_context(pids_taken(*pids, cwd=scene.directory))
    scene.bystanders.append((tuple(pids), "a process with a pid of the run's"))


def _entries(scene: Scene) -> list[Path]:
    found = list(scene.witness.home.glob("live/*/*.json"))
    assert len(found) == 4, "the owner and three components are registered"
    return found


def _lose(scene: Scene) -> None:
    """The flow is killed; its guardians end all, and the registry stays."""
    scene.witness.kill()
    assert scene.witness.testimony().left == ()


def _reuse_after_a_kill(scene: Scene) -> None:
    _lose(scene)
    recorded: set[int] = set()
    for path in _entries(scene):
        entry = json.loads(path.read_text())
        names = {"process", "guardian"} & entry.keys()
        recorded |= {entry[name]["pid"] for name in names}
    assert len(recorded) == 7
    _give_to_others(scene, sorted(recorded))
    _is_finished(scene)


def _is_finished(scene: Scene) -> None:
    said = scene.reconcile()[scene.witness.run_id]
    assert said["is_clean"] and said["killed"] == [], said
    assert not any(scene.witness.home.glob("live/*")), "the registry is left"


PID_REUSE = [
    Case(
        number=25,
        title="pid reuse in a run that goes on",
        phases=(Phase.RUNNING,),
        cast=_drains,
        inject=_reuse_in_a_living_run,
        expect=CANCELLED,
        obstacle=why_no_pid_to_choose,
    ),
    Case(
        number=25,
        title="pid reuse, then reconcile",
        phases=(Phase.AFTER,),
        inject=_reuse_after_a_kill,
        expect=KILLED,
        obstacle=why_no_pid_to_choose,
    ),
]


def _machine_was_started_anew(scene: Scene) -> None:
    """The registry names processes that are there now, but of another boot."""
    _lose(scene)
    pids = scene.bystanders[0][0]
    for path in _entries(scene):
        entry = json.loads(path.read_text())
        for name in {"process", "guardian"} & entry.keys():
            entry[name] = _of_another_boot(pids[name == "guardian"])
        path.write_text(json.dumps(entry))
    _is_finished(scene)


def _of_another_boot(pid: int) -> dict[str, Any]:
    identity = ProcessId.of(pid).model_dump(mode="json")
    return {**identity, "boot_id": "00000000-0000-0000-0000-000000000000/pid:[1]"}


REBOOT = Case(
    number=26,
    title="registry from before a reboot",
    phases=(Phase.AFTER,),
    inject=_machine_was_started_anew,
    expect=KILLED,
)


def _segments(scene: Scene) -> tuple[Path, Path]:
    """That of the run, that of another."""
    return tuple(  # type: ignore[return-value]
        Path(f"/dev/shm/muster-fault-{name}-{scene.tag}") for name in ("ours", "others")
    )


def _leaks_a_segment(scene: Scene) -> None:
    ours, others = _segments(scene)
    for path in (ours, others):
        scene.stack.callback(path.unlink, missing_ok=True)
    scene.cast["trainer"]["argv"] = (*python(_LEAKER), ours.name)


def _other_leaks_too(scene: Scene) -> None:
    """While the run is there; and its maker ends before the run does."""
    ours, others = _segments(scene)
    with helper(*python(_LEAKER), others.name, cwd=scene.directory):
        assert others.exists()
    wait_until(lambda: ours.name in _owner_of(scene), "the segment is noted")


def _owner_of(scene: Scene) -> str:
    [owner] = scene.witness.home.glob("live/*/owner.json")
    return owner.read_text()


def _kill_trainer(scene: Scene) -> None:
    _other_leaks_too(scene)
    scene.signal("trainer")


def _kill_flow_and_reconcile(scene: Scene) -> None:
    _other_leaks_too(scene)
    scene.witness.kill()
    scene.touch("release")
    assert scene.witness.testimony().left == ()
    assert scene.reconcile()[scene.witness.run_id]["is_clean"]


def _only_ours_is_gone(scene: Scene) -> None:
    ours, others = _segments(scene)
    assert not ours.exists(), "the run's segment is left"
    assert others.exists(), "another's segment was removed"


SHARED_MEMORY = [
    Case(
        number=39,
        title=f"leaked /dev/shm segment, {how}",
        phases=phases_with("trainer"),
        cast=_leaks_a_segment,
        inject=inject,
        check=_only_ours_is_gone,
        expect=expect,
        expect_stopping=KILLED if expect is KILLED else CANCELLED,
    )
    for how, inject, expect in (
        ("then stopped", _other_leaks_too, CANCELLED),
        ("its maker SIGKILLed", _kill_trainer, failed("trainer", signal="SIGKILL")),
        ("flow SIGKILLed, then reconcile", _kill_flow_and_reconcile, KILLED),
    )
]

CASES = [*PID_REUSE, REBOOT, *SHARED_MEMORY]
