"""Whose server listens at the address of an engine: only a process of the engine's own tree counts.

A port is free from the moment at which its server is started until the server binds it. Whoever
binds it first would get the requests, and the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tasks.processes.sockets import SocketTable, verified_listeners


class Impostor(Exception):
    """A process that is not of an engine's tree listens at the engine's address.

    The message names its user. Nothing may be sent there.
    """


class UnknownListener(Exception):
    """Nobody can tell just now who listens at an engine's address. It says nothing about it."""


class EngineListenerCheck(Protocol):
    """Tells which sockets listen at the URL of a server, all of them its engine's own."""

    def known(self, url: str) -> frozenset[str]:
        """The last answer of `verified`; empty if there is none."""

    async def verified(self, url: str) -> frozenset[str]:
        """The inodes of the sockets that listen there now; empty if nobody listens.

        Raises: Impostor, UnknownListener.
        """


@dataclass(slots=True, kw_only=True, eq=False)
class _Expected:
    """A server that was started."""

    #: Lists the processes of its tree.
    tree: Callable[[], Sequence[int]]
    #: Sockets that its tree was seen to hold while they listened.
    known: frozenset[str] = frozenset()


class LocalListeners:
    """A `EngineListenerCheck` for servers that are processes of this machine."""

    def __init__(self) -> None:
        self._table = SocketTable()
        self._servers: dict[str, _Expected] = {}

    def expect(self, url: str, tree: Callable[[], Sequence[int]]) -> object:
        """A server is about to be started there.

        Returns: what `forget` takes once it has ended.
        """
        server = self._servers[url] = _Expected(tree=tree)
        return server

    def forget(self, url: str, server: object) -> None:
        """It has ended. Another one that was started there since stays."""
        if self._servers.get(url) is server:
            del self._servers[url]

    def known(self, url: str) -> frozenset[str]:
        server = self._servers.get(url)
        return frozenset() if server is None else server.known

    async def verified(self, url: str) -> frozenset[str]:
        server = self._servers.get(url)
        if server is None:
            raise Impostor(f"no server of the fleet runs at {url}")
        host, port = host_and_port(url)
        try:
            # Nearly always the sockets are known, so that the kernel's answer is enough.
            found = frozenset(self._table.listeners(port, host))
            if found <= server.known:
                server.known = found
                return found
            server.known, foreign = await asyncio.to_thread(
                verified_listeners, host, port, server.tree
            )
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started.
            raise UnknownListener(f"who listens at {url} is unknown: {error}") from error
        if foreign:
            raise Impostor(foreign)
        return server.known


def host_and_port(url: str) -> tuple[str, int]:
    """Of `http://host:port`."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host.strip("[]"), int(port)
