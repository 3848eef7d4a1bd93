"""One PID namespace for a run: the kernel's promise that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

_INIT = Path(__file__).with_name("namespace_init.py")
_START_WITHIN_S = 30.0
#: Once its guardians have left, the kernel needs no longer, but for a process in D state.
_END_WITHIN_S = 8.0
_NAMESPACES = ("user", "pid", "mnt")


class PidNamespace:
    """A namespace with its first process, which guardians enter, until the last of them leaves.

    Use: make it, start guardians with `fds` passed on, `settle`, and at the end `close`.
    """

    def __init__(self) -> None:
        """Raises: OSError, where none can be made."""
        alive_read, self._alive = os.pipe()
        report_read, report_write = os.pipe()
        try:
            self._outside = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_INIT), str(alive_read), str(report_write)],
                pass_fds=[alive_read, report_write],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                env={"MUSTER_ROLE": "namespace"},
            )
        except BaseException:
            os.close(report_read)
            os.close(self._alive)
            raise
        finally:
            os.close(alive_read)
            os.close(report_write)
        try:
            readable, _, _ = select.select([report_read], [], [], _START_WITHIN_S)
            said = os.read(report_read, 64) if readable else b""
            if not said:
                raise OSError("no PID namespace can be made here")
            #: Of its first process, as seen from here.
            self.init_pid = int(said)
            self._init = os.pidfd_open(self.init_pid)
            self._fds = [_namespace_of(self.init_pid, name) for name in _NAMESPACES]
        except BaseException:
            self._outside.kill()
            self._outside.wait()
            os.close(self._alive)
            raise
        finally:
            os.close(report_read)

    @property
    def fds(self) -> tuple[int, ...]:
        """What a guardian needs to enter: user (-1: ours), pid and mount namespace, and the pipe
        that keeps the first process."""
        return (*self._fds, self._alive)

    def settle(self) -> None:
        """From now on only the guardians that are there keep the namespace."""
        for fd in (*self._fds, self._alive):
            if fd >= 0:
                os.close(fd)
        self._fds, self._alive = [-1 for _ in self._fds], -1

    def close(self) -> bool:
        """End it, with all that is in it.

        Returns: whether all has ended; the first process does not end before the others.
        """
        self.settle()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init, signal.SIGKILL)
        ended, _, _ = select.select([self._init], [], [], _END_WITHIN_S)
        os.close(self._init)
        if ended:
            self._outside.wait()
        return bool(ended)


def _namespace_of(pid: int, name: str) -> int:
    """An fd of a process's namespace; -1 where it is our own."""
    path = f"/proc/{pid}/ns/{name}"
    if os.readlink(path) == os.readlink(f"/proc/self/ns/{name}"):
        return -1
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
