"""Folders and sockets that another user of the machine has prepared, for tests of attacks."""

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
    """A folder that the attacker can enter, as `/tmp` is one; removed at the end."""
    before = os.umask(0o022)
    try:
        place = Path(tempfile.mkdtemp(prefix="muster-shared-", dir="/tmp"))
        place.chmod(mode)
        yield place
    finally:
        os.umask(before)
        shutil.rmtree(place)


def attack(
    *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program as the attacker, to its end. Raises: CalledProcessError, if it fails."""
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
    """Have a function called in a process of the attacker; its pid. The process is ended after."""
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
    """A local socket on which the attacker listens, and answers as a zygote would.

    Yields a function that says what the attacker has received.
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

    def seen() -> bytes:
        try:
            return os.read(received, 1 << 16)
        except BlockingIOError:
            return b""

    with attacking(listen):
        os.set_blocking(received, True)
        assert os.read(received, 6) == b"ready "
        os.set_blocking(received, False)
        yield seen
    os.close(received)
    os.close(writer)
