"""A disk that is full, a log that is deleted, a log that grows fast."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.faults.cases_crashes import until_told
from tests.faults.injections import (
    freezable_disk,
    in_mounts,
    mounted,
    why_no_disks,
    why_no_mounts,
)
from tests.faults.scene import STARTING, Case, Phase, Scene, failed, phases_with
from tests.support.stage import sh

_BURST_BYTES = 1 << 30
_DISK = "mount -t tmpfs -o size=256k none %s"


def _log_on_a_small_disk(scene: Scene) -> None:
    disk = scene.directory / "disk"
    disk.mkdir()
    scene.more["wrapper"] = in_mounts(_DISK % disk)
    scene.cast["trainer"] |= {
        "argv": until_told("head -c 1000000 /dev/zero || exit 5"),
        "log": disk / "trainer.log",
    }
    # Its log is on a disk that only its run sees.
    scene.cast["trainer"]["ready"] = None


def _fill(scene: Scene) -> None:
    scene.touch("die")
    scene.until("component.exited", "trainer")


LOG_ON_FULL_DISK = Case(
    number=28,
    title="disk full while a component writes its log",
    phases=(Phase.START_ENVIRONMENT, Phase.RUNNING, Phase.STOPPING),
    cast=_log_on_a_small_disk,
    inject=_fill,
    expect=failed("trainer", exit_code=5),
    obstacle=why_no_mounts,
)


def _small(place: Path) -> contextlib.AbstractContextManager[None]:
    return mounted(place, "-t", "tmpfs", "-o", "size=256k", "none")


def _home_on(disk: Callable[[Path], contextlib.AbstractContextManager[None]], scene: Scene) -> None:
    place = scene.directory / "disk"
    scene.stack.enter_context(disk(place))
    # More than the registry gives back when its entries go.
    scene.more |= {"env": {"MUSTER_HOME": str(place / "home")}, "record_bytes": 1 << 16}


def _fill_disk(scene: Scene) -> None:
    with contextlib.suppress(OSError), _filler(scene).open("wb", buffering=0) as f:
        while f.write(b"x" * 4096):
            pass


def _filler(scene: Scene) -> Path:
    return scene.directory / "disk" / "filler"


def _fill_at_a_gate(scene: Scene) -> None:
    starting = scene.phase.starting
    scene.until("gate.reached", starting)
    _fill_disk(scene)
    scene.touch(f"gate-{starting}")


def _registry_on_a_small_disk(scene: Scene) -> None:
    _home_on(_small, scene)
    scene.more["gates"] = (scene.phase.starting,)


def _was_not_started(scene: Scene) -> None:
    """What can't be registered must not run: nobody could find it again."""
    assert scene.witness.seen("component.spawned", scene.phase.starting) == []
    _record_waits_for_room(scene)


def _record_waits_for_room(scene: Scene) -> None:
    """The run stays registered, and a reconcile has the record say how it ended."""
    assert not scene.witness.record().state.is_final
    assert any(scene.witness.home.glob("live/*")), "nobody would close its record"
    _filler(scene).unlink()
    scene.reconcile()


REGISTRY_ON_FULL_DISK = [
    Case(
        number=28,
        title="disk full when a component is to be registered",
        phases=(phase,),
        cast=_registry_on_a_small_disk,
        inject=_fill_at_a_gate,
        check=_was_not_started,
        is_at_once=True,
        expect=failed(phase.starting, kind="STORAGE"),
        obstacle=partial(why_no_disks, _small),
    )
    for phase in STARTING
]


def _fill_and_kill(scene: Scene) -> None:
    _fill_disk(scene)
    scene.signal("trainer")


def _fill_kill_and_make_room(scene: Scene) -> None:
    _fill_and_kill(scene)
    scene.until("component.exited", "trainer")
    _filler(scene).unlink()


HOME_ON_FULL_DISK = [
    Case(
        number=28,
        title=f"MUSTER_HOME full when a component dies, {how}",
        phases=phases_with("trainer"),
        cast=partial(_home_on, _small),
        inject=inject,
        check=check,
        expect=failed("trainer", signal="SIGKILL"),
        obstacle=partial(why_no_disks, _small),
    )
    for how, inject, check in (
        ("and after", _fill_and_kill, _record_waits_for_room),
        ("with room before the end", _fill_kill_and_make_room, lambda scene: None),
    )
]


def _freeze_and_kill(scene: Scene) -> None:
    """All is taken down while the disk does not answer."""
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
    cast=partial(_home_on, freezable_disk),
    inject=_freeze_and_kill,
    expect=failed("trainer", signal="SIGKILL"),
    obstacle=partial(why_no_disks, freezable_disk),
)


def _writes_on(scene: Scene) -> None:
    scene.cast["trainer"]["argv"] = sh(
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
    cast=_writes_on,
    inject=_delete_log,
    expect=failed("trainer", exit_code=4),
)


def _bursts(scene: Scene) -> None:
    scene.cast["trainer"]["argv"] = until_told(
        f"yes a line of some length | head -c {_BURST_BYTES}; echo the end; exit 5"
    )


def _log_is_whole(scene: Scene) -> None:
    log = scene.directory / "trainer.log"
    size = log.stat().st_size
    log.unlink()
    assert size > _BURST_BYTES


LOG_BURST = Case(
    number=28,
    title="1 GB burst into the log",
    phases=(Phase.RUNNING,),
    cast=_bursts,
    inject=lambda scene: scene.touch("die"),
    check=_log_is_whole,
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
