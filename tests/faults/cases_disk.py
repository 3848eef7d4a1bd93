"""A disk that is full, a log that is deleted, a log that grows fast."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.faults.cases_crashes import until_told
from tests.faults.injections import in_mounts, why_no_mounts
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


def _registry_on_a_small_disk(scene: Scene) -> None:
    disk = scene.directory / "disk"
    disk.mkdir()
    scene.more |= {
        "wrapper": in_mounts(_DISK % disk),
        "env": {"MUSTER_HOME": str(disk / "home")},
        "gates": (scene.phase.starting,),
    }
    scene.cast[scene.phase.starting]["ready"] = None


def _fill_from_outside(scene: Scene) -> None:
    """Through the flow's own view of the files."""
    starting = scene.phase.starting
    scene.until("gate.reached", starting)
    disk = Path(f"/proc/{scene.witness.pid}/root{scene.directory}/disk")
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as f:
        while f.write(b"x" * 4096):
            pass
    scene.touch(f"gate-{starting}")


def _was_not_started(scene: Scene) -> None:
    """What can't be registered must not run: nobody could find it again."""
    assert scene.witness.seen("component.spawned", scene.phase.starting) == []


REGISTRY_ON_FULL_DISK = [
    Case(
        number=28,
        title="disk full when a component is to be registered",
        phases=(phase,),
        cast=_registry_on_a_small_disk,
        inject=_fill_from_outside,
        check=_was_not_started,
        is_at_once=True,
        expect=failed(phase.starting, kind="STORAGE"),
        obstacle=why_no_mounts,
    )
    for phase in STARTING
]


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

CASES = [LOG_ON_FULL_DISK, *REGISTRY_ON_FULL_DISK, LOG_DELETED, LOG_BURST]
