"""Start attacks by another user of the machine, and create the folders and sockets for them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.another_user import NOBODY as ATTACKER
from tests.support.another_user import needs_another_user

__all__ = (
    "ATTACKER",
    "attack",
    "attackers_socket",
    "attacking",
    "needs_another_user",
    "shared_folder",
)


@contextmanager
def shared_folder(mode: int = 0o1777) -> Iterator[Path]:
    """Create a folder in `/tmp` that another user can enter; remove it after the context.

    In these tests, the other user is the attacker.

    Args:
        mode: Permissions of the folder. The default is the mode of `/tmp`.
    """
    old_umask = os.umask(0o022)
    try:
        place = Path(tempfile.mkdtemp(prefix="muster-shared-", dir="/tmp"))
        place.chmod(mode)
        yield place
    finally:
        os.umask(old_umask)
        shutil.rmtree(place)


def attack(
    *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program as the user ATTACKER until the program ends, and return the result.

    Raises:
        CalledProcessError: The program failed.
    """
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd or "/",
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **(env or {})},
        user=ATTACKER,
        group=ATTACKER,
        extra_groups=(),
        umask=0o022,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )


@contextmanager
def attacking(act: Callable[[], object]) -> Iterator[int]:
    """Call a function in a new process of user ATTACKER; kill the process when the context ends.

    Args:
        act: The function.

    Yields:
        The id of the new process.
    """
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            os.setgroups(())
            os.setgid(ATTACKER)
            os.setuid(ATTACKER)
            act()
        os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextmanager
def attackers_socket(path: Path) -> Iterator[Callable[[], bytes]]:
    """Run a process of user ATTACKER that listens on a Unix socket while the context is open.

    Args:
        path: Path of the socket.

    Yields:
        A function that returns the bytes that the process has received since the last call.
    """
    received, writer = os.pipe()
    os.set_blocking(received, False)

    def listen() -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen()
        os.write(writer, b"ready ")
        while True:
            connection, _ = listener.accept()
            connection.settimeout(10)
            with suppress(OSError):
                content, _files, *_ = socket.recv_fds(connection, 1 << 16, 3)
                os.write(writer, content)

    def read_received() -> bytes:
        try:
            return os.read(received, 1 << 16)
        except BlockingIOError:
            return b""

    with attacking(listen):
        os.set_blocking(received, True)
        assert os.read(received, 6) == b"ready "
        os.set_blocking(received, False)
        yield read_received
    os.close(received)
    os.close(writer)
