"""A lock among the processes of one host, which the kernel drops with its holder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
from pathlib import Path

from tasks.processes.identity import boot_id

_TOKEN = re.compile(rb"[0-9a-f]{32}")
_TOKEN_BYTES = 32


class HostLock:
    """The lock of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._mark: str | None = None

    @property
    def mark(self) -> str | None:
        """Names the locked file among all of all hosts; None while it is not locked by us.

        Whoever has the lock and reads the same mark somewhere else knows that the one who wrote it
        there has the lock no more: it has unlocked it, or is dead.
        """
        return self._mark

    def try_lock(self) -> bool:
        """Whether it is ours now. Never waits for another's.

        Raises: OSError, where no lock is to be had: the place is not writable, the file system has
            none.
        """
        if self._fd is not None:
            return True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._mark = _mark(fd)
        except BlockingIOError:
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return True

    def unlock(self) -> None:
        """Nothing where it is not ours."""
        fd, self._fd, self._mark = self._fd, None, None
        if fd is None:
            return
        try:
            # Closing alone would leave it to a child that was forked meanwhile.
            fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)


def _mark(fd: int) -> str:
    """Of a locked file, in which it leaves a token on the first time.

    The token alone would be that of a copy of the file too, the numbers alone that of a file on
    another host; with the name of this boot besides, a lock that NFS keeps to each host is told
    from one that spans them.
    """
    token = os.pread(fd, _TOKEN_BYTES, 0)
    if not _TOKEN.fullmatch(token):
        token = secrets.token_hex(_TOKEN_BYTES // 2).encode()
        os.pwrite(fd, token, 0)
    place = os.fstat(fd)
    whole = f"{boot_id()} {place.st_dev} {place.st_ino} {token.decode()}"
    return hashlib.sha256(whole.encode()).hexdigest()[:_TOKEN_BYTES]
