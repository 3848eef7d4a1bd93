"""A folder for temporary files that no other user can reach or make first.

Prefect's runner keeps files in `runner_storage` of the folder that Python's `tempfile` names. In
`/tmp`, the first user's umask shuts out all other users, and anybody can make that folder first.
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

#: In each folder: the file that its process holds locked for as long as the process lives.
_LOCK = "held"
#: The folder of this process, and its open lock. Empty until there is one.
_own: dict[Path, int] = {}


def use_own_temporary_folder() -> Path:
    """Have Python's `tempfile` in this process work in a folder of its own; return the folder.

    The folder lies in the home and is removed when this process ends. If this process was killed,
    the next process on this host removes it. The environment stays as it is, so the processes that
    this one starts keep the user's TMPDIR. A second call returns the same folder.

    Raises: UntrustedPath; OSError, if the folder can't be made.
    """
    for folder in _own:
        return folder
    all_of_host = muster_home() / "temp" / host_name()
    all_of_host.mkdir(mode=0o700, parents=True, exist_ok=True)
    # One process at a time: a folder that is not locked yet would seem abandoned.
    turn = _locked(all_of_host, fcntl.LOCK_EX)
    try:
        _remove_abandoned(all_of_host)
        folder = Path(tempfile.mkdtemp(dir=all_of_host))
        _own[folder] = _locked(folder, fcntl.LOCK_EX)
    finally:
        os.close(turn)
    tempfile.tempdir = str(folder)
    atexit.register(_remove_own, folder, os.getpid())
    return folder


def _remove_own(folder: Path, owner_pid: int) -> None:
    # A forked process inherits the exit handlers of its parent.
    if os.getpid() == owner_pid:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(all_of_host: Path) -> None:
    """Remove the folders that no living process holds."""
    for folder in all_of_host.iterdir():
        # A living process holds the lock of its folder. The lock of all is no folder.
        with suppress(OSError):
            fd = _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(fd)


def _locked(folder: Path, how: int) -> int:
    """Return the open and locked file of a folder.

    Raises: BlockingIOError, if a process holds it and `how` does not wait; OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(folder / _LOCK, flags, 0o600)
    try:
        fcntl.flock(fd, how)
    except OSError:
        os.close(fd)
        raise
    return fd
