"""Start `muster train` faster, in a process that the zygote of this host's worker forks.

    muster train --- words, environment, files ---> zygote == fork ==> run
         ^-------------- pidfd / "go" / exit code --------------------'

The forked process need not import Prefect and Muster again; see `tasks.queue.zygote`. It takes over
everything that a child process would inherit from the `muster train` command: environment, files,
limits and ignored signals.

The command keeps the terminal and waits. It forwards signals to the forked process. If the command
is killed, the kernel also kills the forked process.

The command does the work itself if there is no suitable zygote, for example because the zygote is
in another cgroup or namespace.
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

#: Name of the zygote's socket in MUSTER_HOME.
_SOCKET_NAME = "zygote"
#: Longest time, in seconds, that the command and the zygote wait for a message of the other. After
#: that time the command does the work itself.
_ANSWERS_WITHIN_S = 5.0
#: Signals that the command forwards to the forked process.
_FORWARDED_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
#: Kinds of namespaces that must be the same for the command and the zygote.
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
#: Constant F_SETSIG of linux/fcntl.h, which is missing in Python's module `fcntl`.
_F_SETSIG = 10


# This part runs in the `muster train` command.


def run_warm(words: Sequence[str]) -> int | None:
    """Run a command of `muster` in a process that the zygote forks, and wait for its end.

    Args:
        words: Arguments of `muster`, for example `["train", "spec.yaml"]`.

    Returns:
        The exit code, or None if nothing was started because there is no suitable zygote.
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
            zygote.connect(str(muster_home() / _SOCKET_NAME))
            # The order contains the environment and its secrets, so only a process of this user
            # may receive it.
            require_own_peer(zygote)
            content = json.dumps(order).encode() + b"\n"
            socket.send_fds(zygote, [content[:1]], [0, 1, 2])
            zygote.sendall(content[1:])
            _message, files, *_ = socket.recv_fds(zygote, 1, 1)
        except OSError:
            return None
        if not files:
            return None

        [run_pidfd] = files
        for signum in set(_FORWARDED_SIGNALS) - ignored:
            signal.signal(signum, lambda signum, _frame: _forward_signal(run_pidfd, signum))
        zygote.settimeout(None)
        with suppress(OSError):
            zygote.send(b"g")
        exit_code = b""
        with suppress(OSError):
            exit_code = zygote.recv(16)
        select.select([run_pidfd], [], [])
        ignore_until_exit()
    # A process that sent no exit code was killed.
    return int(exit_code or 128 + signal.SIGKILL)


def _forward_signal(run_pidfd: int, signum: int) -> None:
    """Send a signal to the forked process, unless that process has ended."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(run_pidfd, signum)


def _made_of() -> list[str]:
    """Return the path of Muster's code and the path and version of the Python interpreter.

    The command and the zygote compare these values. They must be equal.
    """
    return [__file__, sys.prefix, sys.version]


# This part runs in the zygote and in the processes that it forks.


def listening() -> socket.socket | None:
    """Return a new socket at which the zygote receives requests of the commands of MUSTER_HOME.

    Returns:
        The listening socket, or None if another zygote listens or the socket cannot be created.
    """
    path = muster_home() / _SOCKET_NAME
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
            require_own_peer(client)
            return None
        except OSError:
            # No zygote listens, or the socket belongs to another user.
            pass
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
    except OSError:
        # The path is too long, the directory is not writable, or another zygote was faster.
        listener.close()
        return None
    listener.listen()
    return listener


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The `muster train` command whose work this forked process does."""

    #: Socket to the command.
    connection: socket.socket
    #: Words, command line, environment, working directory and ignored signals of the command.
    order: dict[str, Any]
    #: File descriptors of the command's standard input, output and error.
    files: tuple[int, ...]

    @classmethod
    def heard(cls, connection: socket.socket) -> Caller:
        """Receive the request of a command on a connected socket, and return the command.

        Raises:
            OSError: The command belongs to another user or does not send its request in time.
            ValueError: The request is not valid, or the command runs other code.
        """
        connection.settimeout(_ANSWERS_WITHIN_S)
        require_own_peer(connection)
        first_byte, files, *_ = socket.recv_fds(connection, 1, 3)
        order = json.loads(first_byte + connection.makefile("rb").readline())
        if order["made_of"] != _made_of() or len(files) != 3:
            raise ValueError("another code, or no files")
        return cls(connection=connection, order=order, files=tuple(files))

    @property
    def env(self) -> dict[str, str]:
        """Environment of the command."""
        return dict(self.order["env"])

    def take_signals(self) -> None:
        """Ignore exactly the signals that the command ignores."""
        take_dispositions(self.order["ignored"])

    def receive_permission(self) -> bool:
        """Prepare this process, send its pidfd to the command, and wait for permission to begin.

        This process takes over the command's limits, priority and CPU affinity. From now on the
        kernel kills this process when the command closes its end of the socket, for example because
        the command was killed.

        Returns:
            True if this process may begin. False if the command has ended.

        Raises:
            OSError: The command did not answer in time, or its limits cannot be taken over.
            ValueError: The command belongs to another user, namespace or cgroup.
        """
        self._take_limits()
        own_pidfd = os.pidfd_open(os.getpid())
        socket.send_fds(self.connection, [b"p"], [own_pidfd])
        os.close(own_pidfd)
        if not self.connection.recv(1):
            return False

        # The kernel sends SIGKILL to this process at the next event on the socket.
        self.connection.settimeout(None)
        fcntl.fcntl(self.connection, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self.connection, _F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(self.connection, fcntl.F_GETFL)
        fcntl.fcntl(self.connection, fcntl.F_SETFL, flags | os.O_ASYNC)
        # If the command ended before the lines above, the socket is readable now.
        return not select.select([self.connection], [], [], 0)[0]

    def _take_limits(self) -> None:
        """Take over the resource limits, the priority and the CPU affinity of the command.

        Raises:
            OSError: A value of the command cannot be read or taken over.
            ValueError: The command belongs to another user, namespace or cgroup.
        """
        pid, uid = peer_of(self.connection)
        if uid != os.geteuid() or not _is_in_same_namespaces(pid):
            raise ValueError("another user, or another namespace")
        if Path(f"/proc/{pid}/cgroup").read_text() != Path("/proc/self/cgroup").read_text():
            raise ValueError("another cgroup")

        limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT")]
        for limit in limits:
            resource.setrlimit(limit, resource.prlimit(pid, limit))
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, pid))
        os.sched_setaffinity(0, os.sched_getaffinity(pid))

    def answer(self, code: int) -> int:
        """Send the command the exit code of this process, and return the code.

        This process must end next.
        """
        with suppress(OSError):
            self.connection.send(b"%d" % code)
        return code


def _is_in_same_namespaces(pid: int) -> bool:
    """Return True if another process is in the same Linux namespaces as this process."""
    return all(
        os.path.samestat(
            Path(f"/proc/{pid}/ns/{namespace}").stat(), Path(f"/proc/self/ns/{namespace}").stat()
        )
        for namespace in _NAMESPACES
    )
