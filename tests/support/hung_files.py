"""Files and folders that do not answer, as on a network file system whose server is down."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SERVER = Path(__file__).with_name("fuse_server.py")
#: Flag of umount2(2): detach the file system at once, even if it is in use.
_MNT_DETACH = 2


class HangingFolder:
    """A mounted file system. A test can block all calls to this file system, and unblock them."""

    def __init__(self, path: Path, server: subprocess.Popen[str]) -> None:
        #: Mount point of the file system.
        self.path = path
        #: Process id of the program that serves the file system.
        self.server_pid = server.pid
        self._server = server

    def hang(self) -> None:
        """Let all calls to the file system block."""
        assert self._server.poll() is None, "the server of the file system has ended"
        self._server.send_signal(signal.SIGSTOP)

    def answer(self) -> None:
        """Let the hanging file system answer again."""
        self._server.send_signal(signal.SIGCONT)


@contextmanager
def hanging_folder(path: Path) -> Iterator[HangingFolder]:
    """Mount a file system in memory at a path that does not exist yet, and yield it.

    A test can block all calls to the file system, see `HangingFolder`. When the context ends, all
    blocked calls fail, and the file system is unmounted.

    Raises:
        OSError: This user may not mount a file system.
    """
    path.mkdir()
    server = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_SERVER), str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        if server.stdout.readline() != "mounted\n":
            assert server.stderr is not None
            raise OSError(server.stderr.read())
        # Close a file once while the FUSE server answers. The kernel then learns that the server
        # does not implement FLUSH, and sends no FLUSH later. Otherwise a killed process could not
        # end: the kernel would wait until the stopped server answers FLUSH.
        first = path / "first"
        first.touch()
        first.unlink()
        yield HangingFolder(path, server)
    finally:
        server.kill()
        server.communicate()
        ctypes.CDLL(None).umount2(os.fsencode(path), _MNT_DETACH)


def has_fuse() -> bool:
    """Return True if this user may mount a file system through FUSE."""
    return os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK)
