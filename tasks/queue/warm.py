"""`muster train` in a process that has everything imported already: one that the zygote of a worker
of this host forks, see `zygote`.

    muster train --- words, environment, files ---> zygote == fork ==> run
         ^-------------- pidfd / "go" / exit code --------------------'

The command stays, as the process that has the terminal. It passes signals on; where it is killed,
the kernel kills the run's process with it. What that would inherit of the command it is given;
where it can't be, as another cgroup or namespace, the command goes on by itself.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.processes.signals import ignore_until_exit, ignored_signals, take_dispositions
from tasks.record.places import muster_home
from tasks.spec.ownership import peer_of, require_own_peer

_NAME = "zygote"
#: Of a machine that is very busy; then the command goes on by itself.
_ANSWERS_WITHIN_S = 5.0
_PASSED_ON = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
#: Of linux/fcntl.h, which Python's module lacks.
_F_SETSIG = 10


def run_warm(words: Sequence[str]) -> int | None:
    """Do what the command is asked to, in a process that is forked for it.

    Returns: its exit code; None where there is no zygote that fits, and nothing was begun.
    """
    ignored = ignored_signals()
    with socket.socket(socket.AF_UNIX) as zygote:
        zygote.settimeout(_ANSWERS_WITHIN_S)
        order = {
            "words": [*words],
            "argv": sys.orig_argv,
            "env": dict(os.environ),
            "cwd": os.getcwd(),
            "made_of": _made_of(),
            "ignored": sorted(ignored),
        }
        try:
            zygote.connect(str(muster_home() / _NAME))
            # The order holds the environment, and with it secrets.
            require_own_peer(zygote)
            content = json.dumps(order).encode() + b"\n"
            socket.send_fds(zygote, [content[:1]], [0, 1, 2])
            zygote.sendall(content[1:])
            _said, files, *_ = socket.recv_fds(zygote, 1, 1)
        except OSError:
            return None
        if not files:
            return None
        [run] = files
        for signum in set(_PASSED_ON) - ignored:
            signal.signal(signum, lambda signum, _frame: _pass_on(run, signum))
        zygote.settimeout(None)
        with suppress(OSError):
            zygote.send(b"g")
        code = b""
        with suppress(OSError):
            code = zygote.recv(16)
        select.select([run], [], [])
        ignore_until_exit()
    return int(code or 128 + signal.SIGKILL)


def _pass_on(run: int, signum: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(run, signum)


def _made_of() -> list[str]:
    """Which code, and which interpreter, a process of this command runs."""
    return [__file__, sys.prefix, sys.version]


# The zygote's side.


def listening() -> socket.socket | None:
    """Where the commands of this home ask; None where another zygote has that place."""
    place = muster_home() / _NAME
    with socket.socket(socket.AF_UNIX) as another:
        try:
            another.connect(str(place))
            require_own_peer(another)
            return None
        except OSError:
            pass  # The socket is of a zygote that has ended, or of another user.
    listener = socket.socket(socket.AF_UNIX)
    try:
        place.unlink(missing_ok=True)
        listener.bind(str(place))
    except OSError:  # It is too long, may not be written, or another one was faster.
        listener.close()
        return None
    listener.listen()
    return listener


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A command that has this process forked for it."""

    connection: socket.socket
    order: dict[str, Any]
    #: Its standard input, output and error.
    files: tuple[int, ...]

    @classmethod
    def heard(cls, connection: socket.socket) -> Caller:
        """What it says. Raises: OSError, ValueError, where that is nothing that fits."""
        connection.settimeout(_ANSWERS_WITHIN_S)
        require_own_peer(connection)
        first, files, *_ = socket.recv_fds(connection, 1, 3)
        order = json.loads(first + connection.makefile("rb").readline())
        if order["made_of"] != _made_of() or len(files) != 3:
            raise ValueError("another code, or no files")
        return cls(connection=connection, order=order, files=(*files,))

    @property
    def env(self) -> dict[str, str]:
        return dict(self.order["env"])

    def take_signals(self) -> None:
        """Ignore the signals that the command ignores, and no others."""
        take_dispositions(self.order["ignored"])

    def is_let_begin(self) -> bool:
        """Take what its process would pass on, tell it of this one, and wait for its word. From
        then on its end by SIGKILL is that of this process, too.

        Raises: OSError, ValueError, where something of it can't be had.
        """
        self._take_limits()
        me = os.pidfd_open(os.getpid())
        socket.send_fds(self.connection, [b"p"], [me])
        os.close(me)
        if not self.connection.recv(1):
            return False
        self.connection.settimeout(None)
        fcntl.fcntl(self.connection, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self.connection, _F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(self.connection, fcntl.F_GETFL)
        fcntl.fcntl(self.connection, fcntl.F_SETFL, flags | os.O_ASYNC)
        # It may have ended just before.
        return not select.select([self.connection], [], [], 0)[0]

    def _take_limits(self) -> None:
        pid, uid = peer_of(self.connection)
        of, own = Path(f"/proc/{pid}"), Path("/proc/self")
        named = [f"ns/{name}" for name in _NAMESPACES]
        are_same = (os.path.samestat((of / name).stat(), (own / name).stat()) for name in named)
        if uid != os.geteuid() or not all(are_same):
            raise ValueError("another user, or another namespace")
        if (of / "cgroup").read_text() != (own / "cgroup").read_text():
            raise ValueError("another cgroup")
        for number in (getattr(resource, one) for one in dir(resource) if one.startswith("RLIMIT")):
            resource.setrlimit(number, resource.prlimit(pid, number))
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, pid))
        os.sched_setaffinity(0, os.sched_getaffinity(pid))

    def answer(self, code: int) -> int:
        """Tell it the exit code of this process, which ends next."""
        with suppress(OSError):
            self.connection.send(b"%d" % code)
        return code
