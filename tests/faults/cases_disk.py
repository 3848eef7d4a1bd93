"""Fault cases of disks and logs: a full or hung disk, a deleted log, a log that grows fast."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.faults.cases_crashes import print_up_then
from tests.faults.injections import (
    freezable_disk,
    in_mounts,
    mounted,
    why_no_disks,
    why_no_mounts,
)
from tests.faults.scene import STARTING, Case, Phase, Scene, failed, phases_with
from tests.support.stage import sh

#: Number of bytes that a component writes to its log at once.
_BURST_BYTES = 1 << 30
#: Shell command that mounts a disk of 256 KiB at a directory.
_MOUNT_DISK = "mount -t tmpfs -o size=256k none %s"


def _prepare_log_on_small_disk(scene: Scene) -> None:
    disk = scene.directory / "disk"
    disk.mkdir()
    scene.witness_arguments["wrapper"] = in_mounts(_MOUNT_DISK % disk)
    scene.components["trainer"] |= {
        "argv": print_up_then("head -c 1000000 /dev/zero || exit 5"),
        "log": disk / "trainer.log",
    }
    # The test cannot read the log, because only the run sees the disk. So no probe reads the log.
    scene.components["trainer"]["ready"] = None


def _fill_log(scene: Scene) -> None:
    scene.touch("die")
    scene.until("component.exited", "trainer")


LOG_ON_FULL_DISK = Case(
    number=28,
    title="disk full while a component writes its log",
    phases=(Phase.START_ENVIRONMENT, Phase.RUNNING, Phase.STOPPING),
    prepare=_prepare_log_on_small_disk,
    inject=_fill_log,
    expect=failed("trainer", exit_code=5),
    obstacle=why_no_mounts,
)


def _mount_small_disk(place: Path) -> contextlib.AbstractContextManager[None]:
    return mounted(place, "-t", "tmpfs", "-o", "size=256k", "none")


def _prepare_home_on_disk(
    disk: Callable[[Path], contextlib.AbstractContextManager[None]], scene: Scene
) -> None:
    """Put MUSTER_HOME on a new disk that the function `disk` mounts."""
    mount_point = scene.directory / "disk"
    scene.stack.enter_context(disk(mount_point))
    scene.witness_arguments |= {
        "env": {"MUSTER_HOME": str(mount_point / "home")},
        # The run's record must be larger than the disk space that becomes free when the registry
        # entries are deleted.
        "record_bytes": 1 << 16,
    }


def _fill_disk(scene: Scene) -> None:
    with contextlib.suppress(OSError), _filler_path(scene).open("wb", buffering=0) as f:
        while f.write(b"x" * 4096):
            pass


def _filler_path(scene: Scene) -> Path:
    return scene.directory / "disk" / "filler"


def _fill_disk_at_gate(scene: Scene) -> None:
    starting = scene.phase.starting
    scene.until("gate.reached", starting)
    _fill_disk(scene)
    scene.touch(f"gate-{starting}")


def _prepare_registry_on_small_disk(scene: Scene) -> None:
    _prepare_home_on_disk(_mount_small_disk, scene)
    scene.witness_arguments["gates"] = (scene.phase.starting,)


def _check_component_was_not_started(scene: Scene) -> None:
    """Check that the component was not started.

    The full disk has no room for the component's registry entry, and without an entry
    `muster reconcile` could not find the component.
    """
    assert scene.witness.seen("component.spawned", scene.phase.starting) == []
    _check_record_is_closed_later(scene)


def _check_record_is_closed_later(scene: Scene) -> None:
    """Check that the run stays registered while the disk is full.

    Then free space on the disk and run `muster reconcile`, which must close the run's record.
    """
    assert not scene.witness.record().state.is_final
    assert any(scene.witness.home.glob("live/*")), "no reconcile would close the record"
    _filler_path(scene).unlink()
    scene.reconcile()


REGISTRY_ON_FULL_DISK = [
    Case(
        number=28,
        title="disk full when a component is to be registered",
        phases=(phase,),
        prepare=_prepare_registry_on_small_disk,
        inject=_fill_disk_at_gate,
        check=_check_component_was_not_started,
        is_at_once=True,
        expect=failed(phase.starting, kind="STORAGE"),
        obstacle=partial(why_no_disks, _mount_small_disk),
    )
    for phase in STARTING
]


def _fill_and_kill(scene: Scene) -> None:
    _fill_disk(scene)
    scene.signal("trainer")


def _fill_kill_and_make_room(scene: Scene) -> None:
    _fill_and_kill(scene)
    scene.until("component.exited", "trainer")
    _filler_path(scene).unlink()


HOME_ON_FULL_DISK = [
    Case(
        number=28,
        title=f"MUSTER_HOME full when a component dies, {how}",
        phases=phases_with("trainer"),
        prepare=partial(_prepare_home_on_disk, _mount_small_disk),
        inject=inject,
        check=check,
        expect=failed("trainer", signal="SIGKILL"),
        obstacle=partial(why_no_disks, _mount_small_disk),
    )
    for how, inject, check in (
        ("and after", _fill_and_kill, _check_record_is_closed_later),
        ("with room before the end", _fill_kill_and_make_room, lambda scene: None),
    )
]


def _freeze_and_kill(scene: Scene) -> None:
    """Kill the trainer while the file system is frozen, and unfreeze it after the teardown."""
    disk = str(scene.directory / "disk")
    subprocess.run(["fsfreeze", "-f", disk], check=True)
    scene.signal("trainer")
    if scene.phase is Phase.STOPPING:
        scene.touch("release")
    scene.until("teardown.ended")
    subprocess.run(["fsfreeze", "-u", disk], check=True)


HOME_ON_HUNG_DISK = Case(
    number=28,
    title="MUSTER_HOME does not answer when a component dies",
    phases=phases_with("trainer"),
    prepare=partial(_prepare_home_on_disk, freezable_disk),
    inject=_freeze_and_kill,
    expect=failed("trainer", signal="SIGKILL"),
    obstacle=partial(why_no_disks, freezable_disk),
)


def _prepare_steady_output(scene: Scene) -> None:
    scene.components["trainer"]["argv"] = sh(
        "echo up; while [ ! -e die ]; do echo noise; sleep 0.02; done; exit 4"
    )


def _delete_log(scene: Scene) -> None:
    (scene.directory / "trainer.log").unlink()
    scene.touch("die")
    if scene.phase is Phase.STOPPING:
        scene.until("component.exited", "trainer")


LOG_DELETED = Case(
    number=28,
    title="log deleted",
    phases=phases_with("trainer"),
    prepare=_prepare_steady_output,
    inject=_delete_log,
    expect=failed("trainer", exit_code=4),
)


def _prepare_log_burst(scene: Scene) -> None:
    scene.components["trainer"]["argv"] = print_up_then(
        f"yes a line of some length | head -c {_BURST_BYTES}; echo the end; exit 5"
    )


def _check_log_is_complete(scene: Scene) -> None:
    log = scene.directory / "trainer.log"
    size = log.stat().st_size
    log.unlink()
    assert size > _BURST_BYTES


LOG_BURST = Case(
    number=28,
    title="1 GB burst into the log",
    phases=(Phase.RUNNING,),
    prepare=_prepare_log_burst,
    inject=lambda scene: scene.touch("die"),
    check=_check_log_is_complete,
    expect=failed("trainer", exit_code=5),
)

CASES = [
    LOG_ON_FULL_DISK,
    *REGISTRY_ON_FULL_DISK,
    *HOME_ON_FULL_DISK,
    HOME_ON_HUNG_DISK,
    LOG_DELETED,
    LOG_BURST,
]
