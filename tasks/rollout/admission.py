"""Limits for the number of client connections of a gateway, in total and for each client.

A client is called a stranger until a request on its connection was authorized. Processes of this
user and of root are never strangers; the kernel identifies the user of each connection. Strangers
may use only a small part of the open files, so that they cannot keep the fleet from working.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from tasks.processes import tree
from tasks.processes.sockets import SocketTable
from tasks.rollout.http1 import ServerConnection

_log = logging.getLogger(__name__)

#: Limit of open files that the gateway sets for its process. Each request needs two files: one for
#: the client's connection and one for the server's connection.
_OPEN_FILES = 65536
#: Number of open files reserved for work other than client connections, such as writing logs and
#: reading /proc.
_KEPT_FILES = 256
#: Number of open files reserved for each inference server. The start of the server, its guardian
#: process and its health probes need these files.
_KEPT_FILES_EACH = 8
#: Largest number of connections without an authorized request, if the gateway requires a token.
_STRANGERS = 8192
#: Largest number of connections that a single user or address may have open before an authorized
#: request arrives on them. This limit applies if the gateway requires a token.
_STRANGERS_EACH = 4096
#: Largest number of connections of other users, if the gateway requires no token. Other users are
#: all users except root and the user of this process. The gateway answers all requests of other
#: users with an error.
_REFUSED_STRANGERS = 256
#: Largest number of connections from a single user or address, if the gateway requires no token.
#: The limit does not apply to root and the user of this process.
_REFUSED_STRANGERS_EACH = 64
#: Smallest number of seconds between two log messages about closed connections.
_LOG_EVERY_S = 10.0
#: Length of the IPv6 network prefix that counts as one address. A single host may own all addresses
#: with the same prefix.
_IPV6_PREFIX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Largest numbers of client connections that a gateway keeps open at the same time."""

    #: Largest number of client connections in total.
    in_all: int
    #: Largest number of connections without an authorized request.
    strangers: int
    #: Limit for a single user or address: the largest number of connections without an authorized
    #: request.
    strangers_each: int


def compute_bounds(
    open_files: int, *, in_use: int, may_be_let_in: bool, servers: int = 0
) -> Bounds:
    """Return how many client connections this process can have with its limit of open files.

    Args:
        open_files: Limit of open files of this process.
        in_use: Number of files that are open already.
        may_be_let_in: True if the gateway has a token. Then the gateway also serves clients of
            other users, if these clients send the token.
        servers: Number of inference servers of the run. The gateway needs some open files for
            each server, so fewer files remain for client connections.
    """
    kept = min(_KEPT_FILES, open_files // 4) + min(_KEPT_FILES_EACH * servers, open_files // 4)
    # Each client connection needs two open files: its own, and one for the connection to a server.
    in_all = max(1, (open_files - in_use - kept) // 2)
    if may_be_let_in:
        strangers, each = _STRANGERS, _STRANGERS_EACH
    else:
        strangers, each = _REFUSED_STRANGERS, _REFUSED_STRANGERS_EACH
    return Bounds(
        in_all=in_all,
        strangers=min(strangers, max(1, in_all // 2)),
        strangers_each=min(each, max(1, in_all // 4)),
    )


class Admission:
    """Counts the client connections of one gateway, and decides which connections may stay open.

    Args:
        may_be_let_in: True if the gateway has a token. Then the gateway also serves clients of
            other users, if these clients send the token.
        servers: Number of inference servers of the run. The gateway needs some open files for
            each server, so fewer files remain for client connections.
        table: Table of the kernel's sockets, which shows the user who has opened a connection. If
            None, a new `SocketTable` is created.
    """

    def __init__(
        self, *, may_be_let_in: bool, servers: int = 0, table: SocketTable | None = None
    ) -> None:
        self._may_be_let_in = may_be_let_in
        self._servers = servers
        self._table = table or SocketTable()
        self._bounds = compute_bounds(_OPEN_FILES, in_use=0, may_be_let_in=may_be_let_in)
        self._count = 0
        #: Mapping from user or address to the number of connections without an authorized request.
        self._strangers: Counter[str] = Counter()
        self._strangers_in_all = 0
        #: Number of connections that were closed since the last log message, because too many
        #: connections were open.
        self._closed = 0
        self._logged_s = float("-inf")

    @property
    def bounds(self) -> Bounds:
        """The current limits for the numbers of open client connections."""
        return self._bounds

    def open(self) -> None:
        """Raise the process's limit of open files, and compute the limits for client connections.

        The method also opens a socket to the kernel, which later identifies the user of each
        connection. If the socket cannot be opened, the users are read from /proc/net/tcp.
        """
        tree.allow_files(_OPEN_FILES)
        try:
            self._table.open()
        except OSError as error:
            _log.warning(
                "the kernel does not allow sock_diag requests (%s). To find the user of a "
                "connection, Muster reads /proc/net/tcp instead",
                error,
            )
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = _OPEN_FILES if soft == resource.RLIM_INFINITY else min(soft, _OPEN_FILES)
        in_use = len(os.listdir("/proc/self/fd"))
        self._bounds = compute_bounds(
            limit, in_use=in_use, may_be_let_in=self._may_be_let_in, servers=self._servers
        )

    def close(self) -> None:
        self._table.close()

    def enter(self, connection: ServerConnection) -> bool:
        """Identify the client of a new connection, and count the connection.

        Returns:
            True if the connection may stay open. False if the caller has to close the connection,
            because too many connections are open. In both cases, the caller calls `leave` after the
            connection is closed.
        """
        self._identify(connection)
        self._count += 1
        if not connection.is_let_in:
            self._strangers[connection.client] += 1
            self._strangers_in_all += 1
        bounds = self._bounds
        if self._count > bounds.in_all:
            self._note_closed(f"the limit of {bounds.in_all} open connections is reached")
            return False
        if connection.is_let_in:
            return True
        if (
            self._strangers[connection.client] > bounds.strangers_each
            or self._strangers_in_all > bounds.strangers
        ):
            self._note_closed(
                f"there are too many connections from {connection.client} without a valid token"
            )
            return False
        return True

    def let_in(self, connection: ServerConnection) -> None:
        """Stop counting a connection as unauthorized, because a request on it was authorized."""
        self._forget_stranger(connection)
        connection.let_in()

    def leave(self, connection: ServerConnection) -> None:
        """Stop counting a closed connection."""
        self._count -= 1
        if not connection.is_let_in:
            self._forget_stranger(connection)

    def _identify(self, connection: ServerConnection) -> None:
        """Ask the kernel which user opened a connection, and store the user in the connection."""
        transport = connection.transport
        peer = transport.get_extra_info("peername")
        own = transport.get_extra_info("sockname")
        if not peer or not own:
            connection.client = "an unknown address, because the connection is already closed"
            return
        connection.client = _network_of(peer[0])
        try:
            user = user_of_connection(self._table, peer[:2], own[:2])
        except OSError as error:
            connection.unknown_because = str(error)
            return
        if user is None:
            return
        connection.client = f"user {user}"
        if user in (os.geteuid(), 0):
            connection.is_own = connection.is_let_in = True

    def _forget_stranger(self, connection: ServerConnection) -> None:
        self._strangers_in_all -= 1
        self._strangers[connection.client] -= 1
        if not self._strangers[connection.client]:
            del self._strangers[connection.client]

    def _note_closed(self, why: str) -> None:
        """Count a closed connection. Log the count and the reason at most every 10 seconds."""
        self._closed += 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            _log.warning("%d client connections were closed: %s", self._closed, why)
            self._closed = 0
            self._logged_s = now_s


def user_of_connection(
    table: SocketTable, client: tuple[str, int], server: tuple[str, int]
) -> int | None:
    """Return the uid of the user whose process opened a connection within this machine.

    Args:
        table: The kernel's table of TCP sockets.
        client: Address and port of the client's end.
        server: Address and port of the server's end.

    Returns:
        None if no process has the client's end of the connection open.

    Raises:
        OSError: The kernel's table of TCP sockets cannot be read.
    """
    client_end = table.find_connection(client, server)
    return client_end.uid if client_end is not None and client_end.is_open else None


def _network_of(host: str) -> str:
    """Return the key under which connections from a host are counted.

    The key of an IPv4 or loopback address is `address ADDRESS`. All other IPv6 addresses of a /64
    network share the key `network NETWORK`, because a single host may own the whole network.
    """
    address = ip_address(host.partition("%")[0])
    if address.version == 6 and not address.is_loopback:
        return f"network {ip_network((address, _IPV6_PREFIX), strict=False)}"
    return f"address {address}"


async def expire_connections(
    connections: Callable[[], tuple[ServerConnection, ...]], every_s: float = 1.0
) -> None:
    """Periodically close connections that are idle or whose request does not arrive in time.

    The coroutine runs until it is cancelled.

    Args:
        connections: Returns all open connections.
        every_s: Seconds between two checks.
    """
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(every_s)
        now_s = loop.time()
        for connection in connections():
            connection.expire(now_s)
