"""A full file system as the cause of a failure, and the disk space reserved for the record."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tasks.processes import reserved_space
from tasks.processes.full_disks import (
    FileSystem,
    describe_storage_error,
    is_storage_error,
    measure,
    name_full_disk,
)
from tasks.processes.registry import RunRegistration, registered_runs
from tasks.record.outcome import Failure
from tasks.spec.failure_kinds import FailureKind

FULL_DISK = FileSystem(path=Path("/data"), size_bytes=3145728, free_bytes=0)
FULL_MEMORY = FileSystem(path=Path("/dev/shm"), size_bytes=67108864, free_bytes=4096)
FREE_DISK = FileSystem(path=Path("/data"), size_bytes=3145728, free_bytes=1 << 20)


def make_failure(rule: str = "exit", kind: str = "UNKNOWN", **fields: object) -> Failure:
    return Failure.model_validate({"kind": kind, "rule": rule, "message": "it ended", **fields})


@pytest.mark.parametrize(
    ("failure", "file_system", "kind"),
    [
        # The full disk is the cause. The log cannot show this cause, because the log is on the same
        # disk.
        (make_failure(exit_code=1), FULL_DISK, "STORAGE"),
        (make_failure(signal="SIGABRT", kind="RUNTIME_ERROR"), FULL_DISK, "STORAGE"),
        (make_failure(exit_code=134), FULL_DISK, "STORAGE"),
        (make_failure("storage", "STORAGE", exit_code=1), FULL_DISK, "STORAGE"),
        (make_failure(signal="SIGBUS", kind="RUNTIME_ERROR"), FULL_MEMORY, "HOST_OOM"),
        (make_failure("bus-error", "RUNTIME_ERROR", exit_code=135), FULL_MEMORY, "HOST_OOM"),
    ],
)
def test_full_file_system_is_named_as_the_cause(
    failure: Failure, file_system: FileSystem, kind: str
) -> None:
    named = name_full_disk(failure, [file_system])

    assert named.kind is FailureKind(kind)
    assert str(file_system.path) in named.message
    assert f"{file_system.free_bytes} of {file_system.size_bytes} bytes free" in named.message
    assert str(file_system.path) in named.hint


@pytest.mark.parametrize(
    ("failure", "file_system"),
    [
        (make_failure(exit_code=1), FREE_DISK),
        # The log shows another cause, so the full disk is not blamed.
        (make_failure("value-error", "USER_ERROR", exit_code=1), FULL_DISK),
        # SIGKILL, exit code 143 (SIGTERM) and exit code 0 are not consequences of a failed write.
        (make_failure(signal="SIGKILL"), FULL_DISK),
        (make_failure(exit_code=143), FULL_DISK),
        (make_failure(exit_code=0), FULL_DISK),
        # Full shared memory ends a program with SIGBUS, and does not explain an exit code of 1.
        (make_failure(exit_code=1), FULL_MEMORY),
    ],
)
def test_other_failures_are_not_blamed_on_a_file_system(
    failure: Failure, file_system: FileSystem
) -> None:
    assert name_full_disk(failure, [file_system]) == failure


def test_file_system_of_a_directory_that_does_not_exist_is_measured(tmp_path: Path) -> None:
    file_system = measure(tmp_path / "a" / "b")

    assert file_system is not None
    assert tmp_path.is_relative_to(file_system.path)
    assert 0 < file_system.free_bytes < file_system.size_bytes


def test_storage_error_is_described_with_its_file_and_file_system(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "file"))

    text = describe_storage_error(error, Path("/"))

    assert is_storage_error(error)
    assert not is_storage_error(FileNotFoundError(errno.ENOENT, "no such file"))
    assert f"No space left on device: {tmp_path / 'file'}; the file system /" in text
    assert " bytes free" in text


def test_run_that_finds_a_full_disk_is_not_registered(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(directory))

    monkeypatch.setattr(reserved_space, "reserve", refuse)

    with pytest.raises(OSError, match="No space left"):
        RunRegistration.opened("a-run", flow_run_id="a-flow-run")

    assert [*registered_runs()] == []


def test_reserved_space_becomes_free_for_the_record(tmp_path: Path) -> None:
    reserved_space.reserve(tmp_path)
    before = sum(path.stat().st_blocks for path in tmp_path.iterdir())

    reserved_space.make_room(tmp_path)

    after = sum(path.stat().st_blocks for path in tmp_path.iterdir())
    assert (before - after) * 512 >= 32768
