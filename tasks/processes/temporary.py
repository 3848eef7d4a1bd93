"""A private temporary folder, which no other user can enter or create first.

Prefect's runner keeps files in `runner_storage` of the folder that Python's `tempfile` names. In
`/tmp`, the first user's umask excludes all other users, and any user can create that folder first.
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

#: Name of the lock file in each folder. Its process holds the lock until the process ends.
_LOCK = "held"
#: The folder of this process, and its open lock. Empty until there is one.
_own: dict[Path, int] = {}


def use_own_temporary_folder() -> Path:
    """Make Python's `tempfile` in this process use a private folder, and return that folder.

    The folder is in the home and is removed when this process ends. If this process is killed, the
    next process on this host removes it. The environment does not change, so child processes keep
    the user's TMPDIR. A second call returns the same folder.

    Raises:
        UntrustedPath: Another user can change the home.
        OSError: The folder cannot be created.
    """
    for folder in _own:
        return folder
    all_of_host = muster_home() / "temp" / host_name()
    all_of_host.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Only one process at a time: a folder without its lock would seem abandoned.
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
        # A living process holds the lock of its folder. The common lock file is no folder and
        # raises OSError.
        with suppress(OSError):
            fd = _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(fd)


def _locked(folder: Path, how: int) -> int:
    """Open and lock the lock file of a folder, and return its file descriptor.

    Raises:
        BlockingIOError: Another process holds the lock, and `how` does not wait.
        OSError: The lock file cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(folder / _LOCK, flags, 0o600)
    try:
        fcntl.flock(fd, how)
    except OSError:
        os.close(fd)
        raise
    return fd
