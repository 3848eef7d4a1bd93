"""Free ports for a run's components, and the processes that listen on a port.

The listeners come from the kernel's socket table.
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
    listening_inodes,
    listening_sockets,
    sockets_of,
    user_of_connection,
)

__all__ = (
    "Listener",
    "ListeningSocket",
    "PortsReserved",
    "is_listened",
    "listeners",
    "listening_inodes",
    "listening_sockets",
    "sockets_of",
    "user_of_connection",
)

#: Range of the reserved ports. It is above the ports of a Ray node's workers, 10002 to 19999. It is
#: below the ports that the kernel by default uses for outgoing connections.
_PORTS = range(20000, 32000)
#: Number of random ports that are tried before there is no free port.
_TRIES = 2000
#: Process names of the programs that listen on published ports for container runtimes.
_FORWARDERS = frozenset({"docker-proxy", "rootlessport", "slirp4netns", "pasta"})


def port_key() -> bytes:
    """Return the secret with which the runs of this home reserve ports.

    Raises:
        OSError: The secret can be neither read nor created.
    """
    # Imported here, since `PortsReserved` is sent by value to nodes that have no Muster.
    places = importlib.import_module("tasks.record.places")
    home: Path = places.muster_home()
    return str(places.kept_secret(home / "ports.key", lambda: os.urandom(32).hex())).encode()


def lock_name(port: int, key: bytes) -> str:
    """Return the name in the kernel's abstract socket namespace that reserves a port for a run.

    Every user can list such names. Without the key, a name does not reveal its port.
    """
    return f"\0muster/port/{hmac.new(key, str(port).encode(), 'sha256').hexdigest()}"


class PortsReserved:
    """Ports that are reserved for one attempt until `close`.

    Two sockets reserve a port. The first is bound to the port; `release` closes it, so that the
    component can bind the port. The second has the name `lock_name`, which other runs of the home
    respect. The scope of that name is the network namespace, like that of ports, and the kernel
    removes it with this process.
    """

    def __init__(self, names: Iterable[str], key: bytes | None = None) -> None:
        """
        Args:
            names: Names of the ports, as `component.port`.
            key: Key for `lock_name`. None: the key of this home.

        Raises:
            OSError: No port is free.
        """
        self._key = key
        #: Socket with the lock name of each port, by the port's name.
        self._locks: dict[str, socket.socket] = {}
        self._bound: dict[str, socket.socket] = {}
        #: Number of each port, by the port's name.
        self.numbers: dict[str, int] = {}
        try:
            for name in names:
                self._reserve(name)
        except BaseException:
            self.close()
            raise

    @classmethod
    def known(cls, numbers: Mapping[str, int]) -> PortsReserved:
        """Return ports on which components may already listen, so that they are not reserved."""
        ports = cls(())
        ports.numbers.update(numbers)
        return ports

    def of(self, component: str) -> dict[str, int]:
        """Return the ports of one component, which are named `component.port` or longer."""
        return {
            name: port for name, port in self.numbers.items() if name.partition(".")[0] == component
        }

    def release(self, component: str) -> None:
        """Close the bound sockets of a component, so that it can bind its ports."""
        for name in self.of(component):
            if (bound := self._bound.pop(name, None)) is not None:
                bound.close()

    def move(self, component: str) -> None:
        """Give other ports to a component whose port was taken.

        These ports are locked but not bound. Every user can see a bound port, and could take it
        between `release` and the component's own bind.

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
        for held in [*self._locks.values(), *self._bound.values()]:
            held.close()
        self._locks.clear()
        self._bound.clear()

    def _reserve(self, name: str, *, is_bound: bool = True) -> None:
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
        raise OSError(f"no free port for {name} among {_TRIES} tried")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A process that listens on a TCP port."""

    #: Pid of the process; 0 if this user may not see it.
    pid: int
    #: The user who opened the socket.
    uid: int

    @property
    def command(self) -> str:
        """The first 200 characters of the command line."""
        return tree.command_of(self.pid)[:200]

    @property
    def run_id(self) -> str | None:
        """Run id in the process's environment; None if it has none or cannot be read."""
        with suppress(PermissionError):
            return tree.environment_of(self.pid).get("MUSTER_RUN_ID")
        return None

    @property
    def is_containers(self) -> bool:
        """True if the process is in a container or listens for a container."""
        try:
            if Path(f"/proc/{self.pid}/comm").read_text().strip() in _FORWARDERS:
                return True
            return os.readlink(f"/proc/{self.pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
        except OSError:
            return False

    @property
    def is_roots_container(self) -> bool:
        """True if the process is in a PID namespace that root created.

        Other users need a user namespace to create a PID namespace.
        """
        own = Path("/proc/self/ns")
        other = Path(f"/proc/{self.pid}/ns")
        try:
            has_own_pids = os.readlink(other / "pid") != os.readlink(own / "pid")
            return has_own_pids and os.readlink(other / "user") == os.readlink(own / "user")
        except OSError:
            return False


def is_listened(port: int) -> bool:
    """Return True if a process listens on the TCP port, on any address of this machine.

    Raises:
        OSError: The kernel cannot be asked.
    """
    return bool(listening_inodes(port))


def listeners(port: int, likely: Iterable[int] = ()) -> list[Listener]:
    """Return the processes that listen on a TCP port of this machine.

    Args:
        port: The port.
        likely: Pids that are checked first, so that usually not all processes must be checked.

    Raises:
        OSError: The kernel cannot be asked.
    """
    visible_listeners = []
    remaining = listening_inodes(port)
    for pid in chain(likely, tree.all_pids()):
        if not remaining:
            break
        if held := {*sockets_of(pid).values()} & remaining.keys():
            uids = [remaining.pop(inode) for inode in held]
            visible_listeners.append(Listener(pid=pid, uid=uids[0]))
    return visible_listeners + [Listener(pid=0, uid=uid) for uid in remaining.values()]
