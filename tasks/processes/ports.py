"""Reserve free TCP ports for the components of a run, and find the processes that listen on a
port.
"""

from __future__ import annotations

import hmac
import importlib
import os
import random
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tasks.processes import tree
from tasks.processes.sockets import (
    ListeningSocket,
    list_sockets,
    listening_inodes,
    listening_sockets,
)

__all__ = (
    "Listener",
    "ListeningSocket",
    "PortsReserved",
    "has_listener",
    "list_sockets",
    "listeners",
    "listening_inodes",
    "listening_sockets",
)

#: Range from which ports are reserved. Two other ranges are avoided: 10002 to 19999, which the
#: workers of a Ray node use, and the ports from 32768, which the kernel uses for outgoing
#: connections.
_PORTS = range(20000, 32000)
#: Number of random ports that are tried before the reservation fails.
_TRIES = 2000
#: Names of programs that listen on a port of this machine on behalf of a container.
_FORWARDERS = frozenset({"docker-proxy", "rootlessport", "slirp4netns", "pasta"})


def port_key() -> bytes:
    """Return the secret key of this MUSTER_HOME. Create the key if it is missing.

    `lock_name` uses the key to hide port numbers in the names of Unix sockets.

    Raises:
        OSError: The key can be neither read nor created.
    """
    # Import the module here and not at the top. Ray sends this file to nodes without Muster, and
    # the import would fail there.
    places = importlib.import_module("tasks.record.places")
    home: Path = places.muster_home()
    return str(places.kept_secret(home / "ports.key", lambda: os.urandom(32).hex())).encode()


def lock_name(port: int, key: bytes) -> str:
    """Return the name of the Unix socket that reserves a port for a run.

    The name is in the kernel's abstract socket namespace, which every user can list. Without the
    key, the name does not reveal the port.

    Args:
        port: The port.
        key: Secret of the MUSTER_HOME, see `port_key`.
    """
    return f"\0muster/port/{hmac.new(key, str(port).encode(), 'sha256').hexdigest()}"


class PortsReserved:
    """Ports that are reserved for one attempt until `close`.

    Two sockets reserve a port. A TCP socket is bound to the port, and `release` closes it, so that
    the component can bind the port. A Unix socket exists until `close`. The function `lock_name`
    derives the name of this socket from the port. While the Unix socket exists, no other run of
    this MUSTER_HOME uses the port. The kernel removes both sockets when this process ends.
    """

    def __init__(self, names: Iterable[str], key: bytes | None = None) -> None:
        """
        Args:
            names: Names of the ports, for example `trainer.port`.
            key: Secret for the function `lock_name`. If None, the result of `port_key` is used.

        Raises:
            OSError: No port is free.
        """
        self._key = key
        #: Mapping from port name to the Unix socket that reserves the port (see `lock_name`).
        self._locks: dict[str, socket.socket] = {}
        #: Mapping from port name to TCP socket. The socket is bound to the port until `release`.
        self._bound: dict[str, socket.socket] = {}
        #: Mapping from port name to port number.
        self.numbers: dict[str, int] = {}
        try:
            for name in names:
                self._reserve(name)
        except BaseException:
            self.close()
            raise

    @classmethod
    def known(cls, numbers: Mapping[str, int]) -> PortsReserved:
        """Return ports with known numbers, without reserving them.

        Use this method if the components may already listen on the ports.

        Args:
            numbers: Mapping from port name to port number.
        """
        ports = cls(())
        ports.numbers.update(numbers)
        return ports

    def of(self, component: str) -> dict[str, int]:
        """Return a mapping from port name to port number, for all ports of one component.

        The name of a port begins with the component and a dot, for example `trainer.port`.
        """
        return {
            name: port for name, port in self.numbers.items() if name.partition(".")[0] == component
        }

    def release(self, component: str) -> None:
        """Close the TCP sockets on a component's ports, so that the component can bind them."""
        for name in self.of(component):
            if (bound := self._bound.pop(name, None)) is not None:
                bound.close()

    def move(self, component: str) -> None:
        """Reserve other ports for a component, because another process has taken one of its ports.

        Each new port is reserved only by a Unix socket, see `lock_name`. A bound TCP socket would
        show the port to other users. Another user could then take the port between `release` and
        the component's own bind.

        Args:
            component: Name of the component.

        Raises:
            OSError: No port is free.
        """
        self.release(component)
        for name in self.of(component):
            before = self._locks.pop(name, None)
            self._reserve(name, is_bound=False)
            if before is not None:
                before.close()

    def close(self) -> None:
        """End the reservation of all ports."""
        for held in [*self._locks.values(), *self._bound.values()]:
            held.close()
        self._locks.clear()
        self._bound.clear()

    def _reserve(self, name: str, *, is_bound: bool = True) -> None:
        """Reserve a random free port.

        Args:
            name: Name of the port.
            is_bound: True to keep a TCP socket bound to the port until `release`.

        Raises:
            OSError: None of the tried ports is free.
        """
        if self._key is None:
            self._key = port_key()
        for port in random.SystemRandom().sample(_PORTS, _TRIES):
            lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            hold = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                lock.bind(lock_name(port, self._key))
                hold.bind(("0.0.0.0", port))
            except OSError:
                lock.close()
                hold.close()
                continue
            self._locks[name] = lock
            if is_bound:
                self._bound[name] = hold
            else:
                hold.close()
            self.numbers[name] = port
            return
        tried = f"Muster tried {_TRIES} ports from {_PORTS.start} to {_PORTS.stop - 1}"
        raise OSError(f"no free port for {name}: {tried}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A process that listens on a TCP port."""

    #: Pid of the process; 0 if the process is hidden from this user.
    pid: int
    #: Uid of the user who opened the socket.
    uid: int

    @property
    def command(self) -> str:
        """The first 200 characters of the process's command line; empty if it is unknown."""
        return tree.read_command_line(self.pid)[:200]

    @property
    def run_id(self) -> str | None:
        """Value of MUSTER_RUN_ID in the environment of the process.

        None if the variable is not set or the environment cannot be read.
        """
        with suppress(PermissionError):
            return tree.read_environment(self.pid).get("MUSTER_RUN_ID")
        return None

    @property
    def is_containers(self) -> bool:
        """True if the process runs in a container, or listens on behalf of a container.

        A process runs in a container if it is in another PID namespace than the calling process.
        """
        try:
            if Path(f"/proc/{self.pid}/comm").read_text().strip() in _FORWARDERS:
                return True
            return os.readlink(f"/proc/{self.pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
        except OSError:
            return False

    @property
    def is_roots_container(self) -> bool:
        """True if the process is in another PID namespace, which root has created.

        Without root's rights, a PID namespace can be created only inside a new user namespace. So
        if the process is in another PID namespace, but in the user namespace of the calling
        process, root has created the PID namespace.
        """
        own = Path("/proc/self/ns")
        other = Path(f"/proc/{self.pid}/ns")
        try:
            has_own_pids = os.readlink(other / "pid") != os.readlink(own / "pid")
            return has_own_pids and os.readlink(other / "user") == os.readlink(own / "user")
        except OSError:
            return False


def has_listener(port: int) -> bool:
    """Return True if a process listens on a TCP port at any address of this machine.

    Raises:
        OSError: The kernel's table of TCP sockets cannot be read.
    """
    return bool(listening_inodes(port))


def listeners(port: int, likely: Iterable[int] = ()) -> list[Listener]:
    """Return the processes that listen on a TCP port of this machine.

    Args:
        port: The port.
        likely: Pids that are checked first. If they include the listeners, the other processes of
            this machine need not be checked, which saves time.

    Returns:
        One `Listener` for each process. A hidden process is included with pid 0.

    Raises:
        OSError: The kernel's table of TCP sockets cannot be read.
    """
    visible_listeners = []
    remaining = listening_inodes(port)
    for pid in chain(likely, tree.all_pids()):
        if not remaining:
            break
        if held := {*list_sockets(pid).values()} & remaining.keys():
            uids = [remaining.pop(inode) for inode in held]
            visible_listeners.append(Listener(pid=pid, uid=uids[0]))
    return visible_listeners + [Listener(pid=0, uid=uid) for uid in remaining.values()]
