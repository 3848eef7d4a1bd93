"""Free ports for a run's components, and who it is that listens on one, from the kernel's socket
table.
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

#: Ports are taken from here: above those of the workers of a Ray node, 10002 to 19999, and below
#: what the kernel hands out to outgoing connections unless it was told otherwise.
_PORTS = range(20000, 32000)
_TRIES = 2000
#: What container runtimes have listen on a published port, by the names the kernel keeps.
_FORWARDERS = frozenset({"docker-proxy", "rootlessport", "slirp4netns", "pasta"})


def port_key() -> bytes:
    """The secret of this home by which its runs reserve ports. Raises: OSError."""
    # Imported here, since `PortsReserved` is sent by value to nodes that have no Muster.
    places = importlib.import_module("tasks.record.places")
    home: Path = places.muster_home()
    return str(places.kept_secret(home / "ports.key", lambda: os.urandom(32).hex())).encode()


def lock_name(port: int, key: bytes) -> str:
    """The name in the kernel's abstract socket namespace that keeps a port from other runs.

    Every user can list such names. Without the key they do not tell which port one stands for.
    """
    return f"\0muster/port/{hmac.new(key, str(port).encode(), 'sha256').hexdigest()}"


class PortsReserved:
    """Ports of one attempt: nobody else's from now until `close`.

    Two things keep a port: a bound socket, until `release` gives it up for the component to bind
    itself, and a lock (`lock_name`), which other runs of the home respect, which has the scope that
    ports have, and which the kernel removes together with this process.
    """

    def __init__(self, names: Iterable[str], key: bytes | None = None) -> None:
        """
        Args:
            key: see `lock_name`; None: that of this home.

        Raises: OSError, when no port is free.
        """
        self._key = key
        #: `_locks[name]`
        self._locks: dict[str, socket.socket] = {}
        self._bound: dict[str, socket.socket] = {}
        #: `numbers[name] -> port`.
        self.numbers: dict[str, int] = {}
        try:
            for name in names:
                self._reserve(name)
        except BaseException:
            self.close()
            raise

    @classmethod
    def known(cls, numbers: Mapping[str, int]) -> PortsReserved:
        """Ports that components may listen on already, so that nothing is to be held."""
        ports = cls(())
        ports.numbers.update(numbers)
        return ports

    def of(self, component: str) -> dict[str, int]:
        """The ports of one component: those named `component.port` and below."""
        return {
            name: port for name, port in self.numbers.items() if name.partition(".")[0] == component
        }

    def release(self, component: str) -> None:
        """Let the component bind its ports."""
        for name in self.of(component):
            if (bound := self._bound.pop(name, None)) is not None:
                bound.close()

    def move(self, component: str) -> None:
        """Give a component whose port was taken other ports.

        These are locked but not bound: a bound port is visible to every user, who could take it in
        the moment between `release` and the component's own bind.

        Raises: OSError, when no port is free.
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
    """A process that listens on a TCP port; pid 0 when we may not see which."""

    pid: int
    #: The user who opened the socket.
    uid: int

    @property
    def command(self) -> str:
        """Its command line, or the beginning of it."""
        return tree.command_of(self.pid)[:200]

    @property
    def run_id(self) -> str | None:
        """The run that its environment names."""
        with suppress(PermissionError):
            return tree.environment_of(self.pid).get("MUSTER_RUN_ID")
        return None

    @property
    def is_containers(self) -> bool:
        """It is in a container, or listens for one."""
        try:
            if Path(f"/proc/{self.pid}/comm").read_text().strip() in _FORWARDERS:
                return True
            return os.readlink(f"/proc/{self.pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
        except OSError:
            return False

    @property
    def is_roots_container(self) -> bool:
        """It runs in a PID namespace that root made: other users need a user namespace for one."""
        own, other = Path("/proc/self/ns"), Path(f"/proc/{self.pid}/ns")
        try:
            has_own_pids = os.readlink(other / "pid") != os.readlink(own / "pid")
            return has_own_pids and os.readlink(other / "user") == os.readlink(own / "user")
        except OSError:
            return False


def is_listened(port: int) -> bool:
    """Whether a process listens on the TCP port, on any address of this machine.

    Raises: OSError, where the kernel cannot be asked.
    """
    return bool(listening_inodes(port))


def listeners(port: int, likely: Iterable[int] = ()) -> list[Listener]:
    """Who listens on a TCP port of this machine.

    Args:
        likely: pids looked at first, so that most calls need not look at every process.

    Raises: OSError, where the kernel cannot be asked.
    """
    found = []
    rest = listening_inodes(port)
    for pid in chain(likely, tree.all_pids()):
        if not rest:
            break
        if held := {*sockets_of(pid).values()} & rest.keys():
            uids = [rest.pop(inode) for inode in held]
            found.append(Listener(pid=pid, uid=uids[0]))
    return found + [Listener(pid=0, uid=uid) for uid in rest.values()]
