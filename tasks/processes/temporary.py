"""Use a private temporary folder, which no other user can enter or create.

Prefect's runner keeps files in the folder `runner_storage` in Python's temporary folder, which
usually is `/tmp`. On a shared machine, only the user who first creates `/tmp/runner_storage` can
write to it, and that may be any user.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from tasks.processes.identity import host_name
from tasks.record.places import muster_home

#: Name of the lock file in each temporary folder. The process that uses the folder holds the lock
#: until it ends.
_LOCK = "held"
#: Temporary folder of this process, with the file descriptor of its lock. Empty until
#: `use_own_temporary_folder` is called.
_own: dict[Path, int] = {}


def use_own_temporary_folder() -> Path:
    """Create a private folder for Python's `tempfile` in this process, and return it.

    The folder is in MUSTER_HOME and is removed when this process ends. If this process is killed,
    the next process that calls this function on this host removes the folder. Child processes are
    not affected: they use TMPDIR of the user. A second call returns the same folder.

    Raises:
        UntrustedPath: Another user can change MUSTER_HOME.
        OSError: The folder cannot be created.
    """
    for folder in _own:
        return folder
    host_folder = muster_home() / "temp" / host_name()
    host_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Hold the lock of `host_folder` until the new folder is locked. Otherwise another process could
    # remove the new folder, because `_remove_abandoned` removes every folder that is not locked.
    host_lock = _open_and_lock(host_folder, fcntl.LOCK_EX)
    try:
        _remove_abandoned(host_folder)
        folder = Path(tempfile.mkdtemp(dir=host_folder))
        _own[folder] = _open_and_lock(folder, fcntl.LOCK_EX)
    finally:
        os.close(host_lock)
    tempfile.tempdir = str(folder)
    atexit.register(_remove_own, folder, os.getpid())
    return folder


def _remove_own(folder: Path, owner_pid: int) -> None:
    # A forked process inherits this exit handler from its parent. The forked process must not
    # remove the folder, because the parent still uses the folder.
    if os.getpid() == owner_pid:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(host_folder: Path) -> None:
    """Remove the temporary folders whose lock no living process holds."""
    for folder in host_folder.iterdir():
        # Do not remove `folder` if an OSError occurs. The error means that a living process holds
        # the lock of `folder`, or that `folder` is no folder but the lock file in `host_folder`.
        with suppress(OSError):
            fd = _open_and_lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(fd)


def _open_and_lock(folder: Path, operation: int) -> int:
    """Open and lock the lock file of a folder, and return its file descriptor.

    Args:
        folder: The folder.
        operation: Operation for flock(2), such as LOCK_EX.

    Raises:
        BlockingIOError: Another process holds the lock, and `operation` does not wait.
        OSError: The lock file cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(folder / _LOCK, flags, 0o600)
    try:
        fcntl.flock(fd, operation)
    except OSError:
        os.close(fd)
        raise
    return fd
