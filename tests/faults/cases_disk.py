"""Fault cases of disks and logs: a full or hung disk, a deleted log, a log that grows fast."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.faults.cases_crashes import print_up_then
from tests.faults.fault_run import STARTING, Case, FaultRun, Phase, failed, phases_with
from tests.faults.injections import (
    freezable_disk,
    in_mounts,
    mounted,
    why_no_disks,
    why_no_mounts,
)
from tests.support.supervised_components import sh

#: Number of bytes that a component writes to its log at once.
_BURST_BYTES = 1 << 30
#: Shell command that mounts a disk of 256 KiB at a directory.
_MOUNT_DISK = "mount -t tmpfs -o size=256k none %s"


def _prepare_log_on_small_disk(fault_run: FaultRun) -> None:
    disk = fault_run.directory / "disk"
    disk.mkdir()
    fault_run.witness_arguments["wrapper"] = in_mounts(_MOUNT_DISK % disk)
    fault_run.components["trainer"] |= {
        "argv": print_up_then("head -c 1000000 /dev/zero || exit 5"),
        "log": disk / "trainer.log",
    }
    # The readiness probe reads the log, but the disk with the log is mounted only in the mount
    # namespace of the run. So this case has no readiness probe.
    fault_run.components["trainer"]["ready"] = None


def _fill_log(fault_run: FaultRun) -> None:
    fault_run.touch("die")
    fault_run.until("component.exited", "trainer")


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
    disk: Callable[[Path], contextlib.AbstractContextManager[None]], fault_run: FaultRun
) -> None:
    """Put MUSTER_HOME on a new disk that the function `disk` mounts."""
    mount_point = fault_run.directory / "disk"
    fault_run.stack.enter_context(disk(mount_point))
    fault_run.witness_arguments |= {
        "env": {"MUSTER_HOME": str(mount_point / "home")},
        # Enlarge the record of the run, so that the record does not fit on the full disk. A small
        # record would fit into the space that becomes free when registry entries are deleted.
        "record_bytes": 1 << 16,
    }


def _fill_disk(fault_run: FaultRun) -> None:
    with contextlib.suppress(OSError), _filler_path(fault_run).open("wb", buffering=0) as f:
        while f.write(b"x" * 4096):
            pass


def _filler_path(fault_run: FaultRun) -> Path:
    return fault_run.directory / "disk" / "filler"


def _fill_disk_at_gate(fault_run: FaultRun) -> None:
    starting = fault_run.phase.starting
    fault_run.until("gate.reached", starting)
    _fill_disk(fault_run)
    fault_run.touch(f"gate-{starting}")


def _prepare_registry_on_small_disk(fault_run: FaultRun) -> None:
    _prepare_home_on_disk(_mount_small_disk, fault_run)
    fault_run.witness_arguments["gates"] = (fault_run.phase.starting,)


def _check_component_was_not_started(fault_run: FaultRun) -> None:
    """Check that the component was not started.

    The full disk has no room for the component's registry entry. `muster reconcile` finds
    components by their registry entries, so Muster must not start a component without an entry.
    """
    assert fault_run.observed_flow.list_events("component.spawned", fault_run.phase.starting) == []
    _check_record_is_closed_later(fault_run)


def _check_record_is_closed_later(fault_run: FaultRun) -> None:
    """Check that the run stays registered while the disk is full.

    Then free space on the disk and run `muster reconcile`, which must close the run's record.
    """
    assert not fault_run.observed_flow.record().state.is_final
    assert any(fault_run.observed_flow.home.glob("live/*")), "no reconcile would close the record"
    _filler_path(fault_run).unlink()
    fault_run.reconcile()


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


def _fill_and_kill(fault_run: FaultRun) -> None:
    _fill_disk(fault_run)
    fault_run.signal("trainer")


def _fill_kill_and_make_room(fault_run: FaultRun) -> None:
    _fill_and_kill(fault_run)
    fault_run.until("component.exited", "trainer")
    _filler_path(fault_run).unlink()


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
        ("with room before the end", _fill_kill_and_make_room, lambda fault_run: None),
    )
]


def _freeze_and_kill(fault_run: FaultRun) -> None:
    """Freeze the disk of MUSTER_HOME, kill the trainer, and end the freeze after the teardown."""
    disk = str(fault_run.directory / "disk")
    subprocess.run(["fsfreeze", "-f", disk], check=True)
    fault_run.signal("trainer")
    if fault_run.phase is Phase.STOPPING:
        fault_run.touch("release")
    fault_run.until("teardown.ended")
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


def _prepare_steady_output(fault_run: FaultRun) -> None:
    fault_run.components["trainer"]["argv"] = sh(
        "echo up; while [ ! -e die ]; do echo noise; sleep 0.02; done; exit 4"
    )


def _delete_log(fault_run: FaultRun) -> None:
    (fault_run.directory / "trainer.log").unlink()
    fault_run.touch("die")
    if fault_run.phase is Phase.STOPPING:
        fault_run.until("component.exited", "trainer")


LOG_DELETED = Case(
    number=28,
    title="log deleted",
    phases=phases_with("trainer"),
    prepare=_prepare_steady_output,
    inject=_delete_log,
    expect=failed("trainer", exit_code=4),
)


def _prepare_log_burst(fault_run: FaultRun) -> None:
    fault_run.components["trainer"]["argv"] = print_up_then(
        f"yes a line of some length | head -c {_BURST_BYTES}; echo the end; exit 5"
    )


def _check_log_is_complete(fault_run: FaultRun) -> None:
    log = fault_run.directory / "trainer.log"
    size = log.stat().st_size
    log.unlink()
    assert size > _BURST_BYTES


LOG_BURST = Case(
    number=28,
    title="1 GB burst into the log",
    phases=(Phase.RUNNING,),
    prepare=_prepare_log_burst,
    inject=lambda fault_run: fault_run.touch("die"),
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
