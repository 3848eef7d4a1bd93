"""The directory of the Ray cluster of a `muster up` stack, which holds Ray's sockets and logs.

Ray's default is a directory below /tmp. Many machines delete files below /tmp that are some days
old, for example with systemd-tmpfiles. New Ray jobs then fail, although the cluster still answers.

So the directory is in the MUSTER_HOME, where no program cleans up. If the paths of Ray's sockets
would be too long there, the directory is below /tmp. In both cases, the supervisor of the stack
holds a lock on the directory, because systemd-tmpfiles skips directories that are locked.

Source: tmpfiles.d(5), "Controlling automatic clean-up"; ray/_private/node.py, `Node`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

#: Prefix of the names of Ray's directories in /tmp.
RAY_TEMP_PREFIX = "muster-ray-"
#: Name of Ray's directory in a MUSTER_HOME.
_NAME_IN_HOME = "ray"
#: Name of the subdirectory in which Ray keeps its files. Ray lets all users read this subdirectory.
#: So the directory that contains this subdirectory admits only the user of the stack.
_RAY_OWN_NAME = "r"
#: Longest path that Linux accepts for a UNIX socket, in bytes. Source: unix(7).
_LONGEST_SOCKET_PATH = 107
#: Example of the longest socket path that Ray creates, relative to the directory for Ray. The
#: absolute path of this socket must have at most `_LONGEST_SOCKET_PATH` bytes. The suffix `.99`
#: stands for the number of a Ray node.
_LONGEST_SOCKET = (
    f"{_RAY_OWN_NAME}/session_2026-12-31_23-59-59_999999_4194304/sockets/plasma_store.99"
)


def create_ray_directory(home: Path) -> Path:
    """Create a directory for Ray that only this user may enter, and return the directory.

    Args:
        home: MUSTER_HOME of the stack.

    Raises:
        OSError: The directory cannot be created.
    """
    directory = home.resolve() / _NAME_IN_HOME
    if len(os.fsencode(directory / _LONGEST_SOCKET)) <= _LONGEST_SOCKET_PATH:
        _create(directory)
        if _can_hold_sockets(directory):
            return directory
        directory.rmdir()
    return Path(tempfile.mkdtemp(prefix=RAY_TEMP_PREFIX, dir="/tmp"))


def delete_ray_directory(directory: Path, home: Path) -> None:
    """Delete the directory for Ray of a stack that has ended.

    The path comes from `stack.json`, which may be damaged. So the directory is deleted only if
    `create_ray_directory` could have created it.

    Args:
        directory: The directory for Ray.
        home: MUSTER_HOME of the stack.
    """
    is_in_home = directory == home.resolve() / _NAME_IN_HOME
    if is_in_home or directory.name.startswith(RAY_TEMP_PREFIX):
        shutil.rmtree(directory, ignore_errors=True)


def make_temp_dir_option(directory: Path) -> str:
    """Return the option of `ray start` that makes Ray use the directory."""
    return f"--temp-dir={directory / _RAY_OWN_NAME}"


class LockedRayDirectory:
    """A directory for Ray's files, on which this process holds a lock (flock) until it ends.

    The lock protects the files, because systemd-tmpfiles deletes old files in `/tmp`, but skips
    locked directories.
    """

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: The directory, which `create_ray_directory` has returned.
        """
        self._path = path
        self._lock_fd: int | None = None

    def restore(self) -> None:
        """Create the directory for Ray's files again if it was deleted, and lock the directory.

        The lock prevents systemd-tmpfiles from deleting old files in the directory. Call this
        method before each start of the Ray head.

        Raises:
            OSError: The directory cannot be created, or other users may enter it.
        """
        _create(self._path)
        lock_fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        # A file system without locks raises OSError. The directory is then used without a lock.
        with suppress(OSError):
            fcntl.flock(lock_fd, fcntl.LOCK_SH)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
        self._lock_fd = lock_fd


def _create(directory: Path) -> None:
    """Create a directory that only this user may enter, unless it exists.

    Raises:
        PermissionError: The directory exists, and other users own it or may enter it.
        OSError: The directory cannot be created.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or status.st_mode & 0o077:
        raise PermissionError(
            f"only user {os.geteuid()} may have access to the directory {directory}, but its mode "
            f"is {stat.filemode(status.st_mode)} and its owner is {status.st_uid}. Delete "
            f"{directory}"
        )


def _can_hold_sockets(directory: Path) -> bool:
    """Return True if the file system of a directory supports UNIX sockets."""
    path = directory / "test"
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(str(path))
        except OSError:
            return False
        finally:
            path.unlink(missing_ok=True)
    return True
