"""Recognise a full file system as the cause of a failure, and name the file system.

A program whose log is on a full file system cannot write the reason for its end into the log. So
the free space is measured when the program has ended.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tasks.processes.shared_memory import DIRECTORY as SHARED_MEMORY
from tasks.record.outcome import Failure, signal_name
from tasks.spec.failure_kinds import FailureKind, find_kind_of_start_error

#: A file system with fewer free bytes than this number counts as full. A full file system may have
#: some free bytes left, if the last write needed more bytes.
_FULL_BELOW_BYTES = 1 << 16
#: Value of `Failure.rule` if a full file system has caused the failure.
RULE = "full-disk"
#: Values of `Failure.rule` if the log shows no specific cause of the failure.
_UNEXPLAINED_RULES = ("exit", "bus-error")
#: Signals that the kernel or the program itself sends after a failed write.
_SIGNALS_OF_FAILED_WRITES = frozenset({"SIGBUS", "SIGABRT", "SIGSEGV"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """The free space of a file system at one moment."""

    #: Directory at which the file system is mounted.
    path: Path
    #: Size of the file system in bytes.
    size_bytes: int
    #: Bytes that this user can still write.
    free_bytes: int
    #: True if no further file can be created, because all inodes are used.
    has_no_inodes: bool = False

    @property
    def is_full(self) -> bool:
        return self.free_bytes < _FULL_BELOW_BYTES or self.has_no_inodes

    def __str__(self) -> str:
        """Return a text such as `the file system /data has 0 of 3145728 bytes free`."""
        text = f"the file system {self.path} has {self.free_bytes} of {self.size_bytes} bytes free"
        return f"{text}, and no free inodes" if self.has_no_inodes else text


def measure(directory: Path) -> FileSystem | None:
    """Return the free space of the file system that contains a directory.

    Args:
        directory: The directory. If it does not exist, its nearest existing parent is used.

    Returns:
        None if the file system cannot be examined.
    """
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        stat = os.statvfs(directory)
        mount_point = _find_mount_point(directory)
    except OSError:
        return None
    free_blocks = stat.f_bfree if os.geteuid() == 0 else stat.f_bavail
    return FileSystem(
        path=mount_point,
        size_bytes=stat.f_blocks * stat.f_frsize,
        free_bytes=free_blocks * stat.f_frsize,
        has_no_inodes=stat.f_files > 0 and stat.f_ffree == 0,
    )


def describe_file_system(directory: Path) -> str:
    """Return a text that names the file system of a directory, such as `the nfs file system /data`.

    Raises:
        OSError: The directory or the table of mounts cannot be read.
    """
    mount_point = _find_mount_point(directory)
    kind = ""
    # The last matching line counts, because a later mount hides an earlier one.
    for line in Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines():
        _, place, type_name, *_ = line.split(" ")
        if place == str(mount_point).replace(" ", r"\040"):
            kind = f"{type_name} "
    return f"the {kind}file system {mount_point}"


def _find_mount_point(directory: Path) -> Path:
    mount_point = directory.resolve()
    while not os.path.ismount(mount_point):
        mount_point = mount_point.parent
    return mount_point


def measure_at_exit(log: Path) -> tuple[FileSystem, ...]:
    """Return the free space of the file systems of a component's log and of /dev/shm.

    A component that finds one of these file systems full may end without a log line. Call this
    directly after the end of the component, because shared memory may be removed later.

    Args:
        log: Log of the component.

    Returns:
        The file system of the log, and that of /dev/shm.
    """
    file_systems = (measure(log.parent), measure(SHARED_MEMORY))
    return tuple(file_system for file_system in file_systems if file_system is not None)


def name_full_disk(failure: Failure, file_systems: Iterable[FileSystem]) -> Failure:
    """Copy a failure, and name a full file system as the cause in the copy.

    The failure is returned unchanged if no file system is full, or if the log shows another cause.

    Args:
        failure: Failure of a component.
        file_systems: Result of `measure_at_exit`.
    """
    code = failure.exit_code or 0
    ending_signal = failure.signal or (signal_name(code - 128) if 128 < code < 192 else None)
    is_bus_error = ending_signal == signal.SIGBUS.name or failure.rule == "bus-error"
    is_storage = failure.kind is FailureKind.STORAGE
    is_failed_write = ending_signal is None or ending_signal in _SIGNALS_OF_FAILED_WRITES
    is_unexplained = (
        failure.rule in _UNEXPLAINED_RULES
        and (code != 0 or ending_signal is not None)
        and is_failed_write
    )
    for file_system in file_systems:
        is_memory = file_system.path == SHARED_MEMORY
        is_memory_failure = is_bus_error or failure.rule == "shared-memory"
        is_cause = is_memory_failure if is_memory else is_storage or is_unexplained
        if not file_system.is_full or not is_cause:
            continue
        remedy = (
            "Give the container or host more shared memory, or remove unused files from "
            f"{file_system.path}"
            if is_memory
            else "Remove files there, or use a larger disk"
        )
        return failure.with_changes(
            kind=FailureKind.HOST_OOM if is_memory else FailureKind.STORAGE,
            rule=RULE if is_unexplained else failure.rule,
            message=f"{failure.message}; {file_system}",
            hint=f"The file system {file_system.path} is full. {remedy}, then start the run again.",
        )
    return failure


def is_storage_error(error: BaseException) -> bool:
    """Return True if an error means that a file system accepts no data, for example if it is full.

    The causes of the error are checked, too.
    """
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        number = cause.errno if isinstance(cause, OSError) else None
        if find_kind_of_start_error(number) is FailureKind.STORAGE:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def describe_storage_error(error: BaseException, directory: Path) -> str:
    """Return a text that names the error, the file system and its free bytes.

    Args:
        error: A storage error, see `is_storage_error`.
        directory: Directory whose file system is measured if the error names no file.
    """
    reason = str(error) or type(error).__name__
    if isinstance(error, OSError):
        name = error.filename or error.filename2
        reason = error.strerror or os.strerror(error.errno or errno.ENOSPC)
        if isinstance(name, str):
            directory = Path(name).parent
            reason = f"{reason}: {name}"
    file_system = measure(directory)
    return f"{reason}; {file_system}" if file_system is not None else reason
