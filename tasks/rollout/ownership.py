"""Checks that only the processes of an engine listen at the engine's address.

A port is free from the start of its server until the server listens on it. Another program could
listen there first, and would then receive rollout requests and weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tasks.processes.sockets import SocketTable, verified_listeners


class Impostor(Exception):
    """A process outside the engine's process tree listens at the engine's address.

    The message names the user of that process. No request may be sent to the address.
    """


class UnknownListener(Exception):
    """The process that listens at an address could not be identified at the moment."""


class EngineListenerCheck(Protocol):
    """Checks that only processes of an engine listen at the URL of the engine's server."""

    def known(self, url: str) -> frozenset[str]:
        """Return the inodes of the sockets that the last call of `verified` found at the URL."""

    async def verified(self, url: str) -> frozenset[str]:
        """Check the sockets that listen at the URL now, and return their inodes.

        Raises:
            Impostor: A process outside the engine's process tree listens at the URL.
            UnknownListener: The listening processes are unknown.
        """


@dataclass(slots=True, kw_only=True, eq=False)
class _StartedServer:
    """A server of this machine, with the sockets on which its processes listen."""

    #: Function that returns the pids of the server's process tree.
    tree: Callable[[], Sequence[int]]
    #: Inodes of the listening sockets that the process tree held at the last check.
    known: frozenset[str] = frozenset()


class LocalListeners:
    """An `EngineListenerCheck` for servers that are processes of this machine."""

    def __init__(self) -> None:
        self._table = SocketTable()
        #: Mapping from URL to the server that was started there.
        self._servers: dict[str, _StartedServer] = {}

    def expect(self, url: str, tree: Callable[[], Sequence[int]]) -> object:
        """Record that a server will be started at this URL.

        Args:
            url: `http://host:port` of the server.
            tree: Function that returns the pids of the server's process tree.

        Returns:
            Handle to pass to `forget` when the server has ended.
        """
        server = self._servers[url] = _StartedServer(tree=tree)
        return server

    def forget(self, url: str, server: object) -> None:
        """Record that a server has ended. The record of a newer server at this URL is kept.

        Args:
            url: `http://host:port` of the server.
            server: The handle that `expect` returned.
        """
        if self._servers.get(url) is server:
            del self._servers[url]

    def known(self, url: str) -> frozenset[str]:
        """Return the inodes of the sockets that the last call of `verified` found at the URL."""
        server = self._servers.get(url)
        return frozenset() if server is None else server.known

    async def verified(self, url: str) -> frozenset[str]:
        """Check the sockets that listen at the URL now, and return their inodes.

        Raises:
            Impostor: A process outside the server's process tree listens at the URL, or the fleet
                has no server at this URL.
            UnknownListener: The kernel's table of sockets could not be read.
        """
        server = self._servers.get(url)
        if server is None:
            raise Impostor(f"no server of the fleet runs at {url}")
        host, port = host_and_port(url)
        try:
            # Usually, an earlier check has already found all sockets in the process tree. Search
            # the process tree only for a new socket, because the search is slow.
            inodes = frozenset(self._table.listeners(port, host))
            if inodes <= server.known:
                server.known = inodes
                return inodes
            server.known, foreign_listener = await asyncio.to_thread(
                verified_listeners, host, port, server.tree
            )
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started.
            raise UnknownListener(
                f"the process that listens at {url} is unknown: {error}"
            ) from error
        if foreign_listener:
            raise Impostor(foreign_listener)
        return server.known


def host_and_port(url: str) -> tuple[str, int]:
    """Return the host and the port of a URL of the form `http://host:port`.

    The brackets around an IPv6 address are removed.
    """
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host.strip("[]"), int(port)
