"""Start a `muster` command faster, in a process that was forked from the fork server of a worker.

    command --- words, environment, files ---> fork server == fork ==> forked process
       ^------------ pidfd / "go" / exit code -------------------------------'

The fork server is a process of the worker that has already imported Prefect and Muster, see
`tasks.queue.fork_server`. A process that is forked from it starts faster, because it need not
import them again. It takes over everything that a child process would inherit from the command:
environment, open files, limits and ignored signals.

The command keeps the terminal and waits for the forked process. It forwards signals to the forked
process. If the command is killed, the kernel also kills the forked process.

Without a suitable fork server, the command does the work itself. A fork server is not suitable if
it runs in another cgroup or namespace, for example.
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

from tasks.processes.signals import ignore_exactly, ignore_until_exit, ignored_signals
from tasks.record.places import muster_home, note_callers_umask
from tasks.spec.ownership import get_peer, require_own_peer

#: File name of the fork server's socket in the MUSTER_HOME directory.
_SOCKET_NAME = "zygote"
#: Time limit in seconds for each message that the `muster` command and the fork server exchange
#: before the work begins. If a message does not arrive in time, the command does its work without
#: the fork server.
_ANSWERS_WITHIN_S = 5.0
#: Signals that the `muster` command forwards to the process that does the work of the command.
_FORWARDED_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
#: Linux namespaces that must be the same for the `muster` command and the fork server.
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
#: Value of the constant F_SETSIG of linux/fcntl.h, which is missing in Python's module `fcntl`.
_F_SETSIG = 10


# The following functions run in the process of the `muster` command.


def run_in_fork(words: Sequence[str]) -> int | None:
    """Run a `muster` command in a process that is forked from the fork server of this host.

    The function waits for the end of that process.

    Args:
        words: Arguments of `muster`, for example `["train", "spec.yaml"]`.

    Returns:
        The exit code of the process. None if nothing was started, because this host has no suitable
        fork server.
    """
    ignored = ignored_signals()
    # Store the umask of this process in an environment variable, which is sent with the request.
    # Otherwise the forked process would use the umask of the fork server.
    note_callers_umask()
    with socket.socket(socket.AF_UNIX) as fork_server:
        fork_server.settimeout(_ANSWERS_WITHIN_S)
        order = {
            "words": [*words],
            "argv": sys.orig_argv,
            "env": dict(os.environ),
            "cwd": os.getcwd(),
            "made_of": _describe_code(),
            "ignored": sorted(ignored),
        }
        try:
            fork_server.connect(str(muster_home() / _SOCKET_NAME))
            # Check that the process at the other end of the socket belongs to this user, because
            # the environment variables in the request (`order`) may be secret.
            require_own_peer(fork_server)
            content = json.dumps(order).encode() + b"\n"
            socket.send_fds(fork_server, [content[:1]], [0, 1, 2])
            fork_server.sendall(content[1:])
            _message, files, *_ = socket.recv_fds(fork_server, 1, 1)
        except OSError:
            return None
        if not files:
            return None

        [run_pidfd] = files
        for signum in set(_FORWARDED_SIGNALS) - ignored:
            signal.signal(signum, lambda signum, _frame: _forward_signal(run_pidfd, signum))
        fork_server.settimeout(None)
        with suppress(OSError):
            fork_server.send(b"g")
        exit_code = b""
        with suppress(OSError):
            exit_code = fork_server.recv(16)
        select.select([run_pidfd], [], [])
        ignore_until_exit()
    # A process that ends without sending its exit code was killed by SIGKILL.
    return int(exit_code or 128 + signal.SIGKILL)


def _forward_signal(run_pidfd: int, signum: int) -> None:
    """Send a signal to the forked process, unless that process has ended.

    Args:
        run_pidfd: File descriptor that refers to the forked process.
        signum: Number of the signal.
    """
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(run_pidfd, signum)


def _describe_code() -> list[str]:
    """Return the path of this file, and the path and the version of the Python interpreter.

    Equal values in the `muster` command and in the fork server show that both run the same code.
    """
    return [__file__, sys.prefix, sys.version]


# The following functions run in the fork server and in the processes that are forked from it.


def open_listener() -> socket.socket | None:
    """Create the socket in MUSTER_HOME to which `muster` commands send their requests.

    Returns:
        The listening socket. None if another fork server listens already, or if the socket cannot
        be created.
    """
    path = muster_home() / _SOCKET_NAME
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
            require_own_peer(client)
            return None
        except OSError:
            # The connection failed, so no fork server of this user listens at this path. Create the
            # socket below.
            pass
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
    except OSError:
        # The socket cannot be created. For example, the path is too long, the directory is not
        # writable, or another fork server has just created its socket at this path. `muster`
        # commands then cannot use this fork server.
        listener.close()
        return None
    listener.listen()
    return listener


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The `muster` command that requested this process.

    This process was forked from the fork server, and does the work of the command.
    """

    #: Socket that is connected to the `muster` command.
    connection: socket.socket
    #: Request from the `muster` command. The request contains the command line, the environment,
    #: the working directory and the ignored signals of the command.
    order: dict[str, Any]
    #: File descriptors of the standard input, output and error of the `muster` command.
    files: tuple[int, ...]

    @classmethod
    def receive(cls, connection: socket.socket) -> Caller:
        """Receive the request of a `muster` command, and return the command as a `Caller`.

        Args:
            connection: Connected socket to the command.

        Raises:
            OSError: The command belongs to another user or does not send its request in time.
            ValueError: The request is invalid, or the command runs other code than this process.
        """
        connection.settimeout(_ANSWERS_WITHIN_S)
        require_own_peer(connection)
        first_byte, files, *_ = socket.recv_fds(connection, 1, 3)
        order = json.loads(first_byte + connection.makefile("rb").readline())
        if order["made_of"] != _describe_code():
            raise ValueError(
                "the `muster` command and the fork server have loaded different versions of the "
                "code"
            )
        if len(files) != 3:
            raise ValueError(
                f"the `muster` command sent {len(files)} open files to the fork server, but must "
                "send 3"
            )
        return cls(connection=connection, order=order, files=tuple(files))

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of the `muster` command, for use by the forked process."""
        return dict(self.order["env"])

    def take_signals(self) -> None:
        """Ignore exactly the signals that the `muster` command ignores.

        For example, `nohup muster train` ignores SIGHUP. This process does the work of the command
        and must ignore SIGHUP, too.
        """
        ignore_exactly(self.order["ignored"])

    def receive_permission(self) -> bool:
        """Prepare this process, and wait until the `muster` command allows the process to begin.

        This process takes over the limits, priority and CPU affinity of the command, and sends the
        command a pidfd (a file descriptor for this process). After that, the kernel kills this
        process when the command closes the socket, for example after a SIGKILL of the command.

        Returns:
            True if this process may begin. False if the command has ended.

        Raises:
            OSError: The command did not answer in time, or this process cannot take over its
                limits.
            ValueError: The command belongs to another user, namespace or cgroup.
        """
        self._take_limits()
        own_pidfd = os.pidfd_open(os.getpid())
        socket.send_fds(self.connection, [b"p"], [own_pidfd])
        os.close(own_pidfd)
        if not self.connection.recv(1):
            return False

        # Make the kernel send SIGKILL to this process when the `muster` command closes its end of
        # the socket. The kernel also closes that end if the command is killed.
        self.connection.settimeout(None)
        fcntl.fcntl(self.connection, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self.connection, _F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(self.connection, fcntl.F_GETFL)
        fcntl.fcntl(self.connection, fcntl.F_SETFL, flags | os.O_ASYNC)
        # If the `muster` command has already closed its end of the socket, the kernel does not send
        # SIGKILL to this process. In this case the socket is readable, and this process must not
        # begin to work.
        return not select.select([self.connection], [], [], 0)[0]

    def _take_limits(self) -> None:
        """Give this process the resource limits, priority and CPU affinity of the `muster` command.

        Raises:
            OSError: A value of the command cannot be read, or cannot be set for this process.
            ValueError: This process and the command have different users, namespaces or cgroups.
        """
        pid, uid = get_peer(self.connection)
        if uid != os.geteuid() or not _is_in_same_namespaces(pid):
            raise ValueError(
                "the `muster` command and the forked process have different users or namespaces"
            )
        if Path(f"/proc/{pid}/cgroup").read_text() != Path("/proc/self/cgroup").read_text():
            raise ValueError("the `muster` command and the forked process are in different cgroups")

        limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT")]
        for limit in limits:
            resource.setrlimit(limit, resource.prlimit(pid, limit))
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, pid))
        os.sched_setaffinity(0, os.sched_getaffinity(pid))

    def send_exit_code(self, code: int) -> int:
        """Send the exit code of this process to the `muster` command, and return the code.

        This process must end after the call.
        """
        with suppress(OSError):
            self.connection.send(b"%d" % code)
        return code


def _is_in_same_namespaces(pid: int) -> bool:
    """Return True if the process with the given pid is in the Linux namespaces of this process."""
    return all(
        os.path.samestat(
            Path(f"/proc/{pid}/ns/{namespace}").stat(), Path(f"/proc/self/ns/{namespace}").stat()
        )
        for namespace in _NAMESPACES
    )
