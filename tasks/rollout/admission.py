"""The connections of clients that a gateway keeps open: bounded by user, by address, and in all.

A connection is a stranger's until a request on it was authorised, unless the kernel says that a
process of this user, or of root, has opened it. Strangers get a small share of the open files, so
that they never keep the fleet from its own work.
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

#: Open files that are enough: a request takes one for its client and one for its server.
_OPEN_FILES = 65536
#: Open files kept for the fleet's own work, such as logs and questions to /proc, and for each
#: server: its guardian, its start, its probes.
_KEPT_FILES, _KEPT_FILES_EACH = 256, 8
#: Strangers at most, for all and for each user or address, where a token may let them in.
_STRANGERS, _STRANGERS_EACH = 8192, 4096
#: The same, where no stranger is ever let in.
_REFUSED_STRANGERS, _REFUSED_STRANGERS_EACH = 256, 64
#: Seconds between two log lines that say that connections were closed.
_LOG_EVERY_S = 10.0
#: One host may have all addresses of such an IPv6 network.
_IPV6_PREFIX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many connections of clients may be open."""

    in_all: int
    strangers: int
    strangers_each: int


def bounds_of(open_files: int, *, in_use: int, may_be_let_in: bool, servers: int = 0) -> Bounds:
    """Divide the open files that a process may have.

    Args:
        open_files: the limit.
        in_use: open already.
        may_be_let_in: strangers may bring a token.
        servers: of the fleet.
    """
    kept = min(_KEPT_FILES, open_files // 4) + min(_KEPT_FILES_EACH * servers, open_files // 4)
    # Each request of a client needs another file, for its server.
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
    """Counts the connections of one gateway, and says which of them are too many.

    Args:
        may_be_let_in: the gateway has a token, which strangers may bring.
        servers: of the fleet.
        table: asks the kernel whose a connection is.
    """

    def __init__(
        self, *, may_be_let_in: bool, servers: int = 0, table: SocketTable | None = None
    ) -> None:
        self._may_be_let_in = may_be_let_in
        self._servers = servers
        self._table = table or SocketTable()
        self._bounds = bounds_of(_OPEN_FILES, in_use=0, may_be_let_in=may_be_let_in)
        self._count = 0
        #: By user or address, its connections that are strangers'.
        self._strangers: Counter[str] = Counter()
        self._strangers_in_all = 0
        self._closed = 0
        self._logged_s = float("-inf")

    @property
    def bounds(self) -> Bounds:
        return self._bounds

    def open(self) -> None:
        """Raise the limit of open files, divide them, and have what questions to the kernel need.

        A kernel that cannot be asked is told by each request, which is refused.
        """
        tree.allow_files(_OPEN_FILES)
        try:
            self._table.open()
        except OSError as error:
            _log.warning("sock_diag is not allowed here, /proc/net/tcp is read: %s", error)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = _OPEN_FILES if soft == resource.RLIM_INFINITY else min(soft, _OPEN_FILES)
        in_use = len(os.listdir("/proc/self/fd"))
        self._bounds = bounds_of(
            limit, in_use=in_use, may_be_let_in=self._may_be_let_in, servers=self._servers
        )

    def close(self) -> None:
        self._table.close()

    def enter(self, connection: ServerConnection) -> bool:
        """Count a new connection; False if it is one too many. It leaves by `leave` either way."""
        self._identify(connection)
        self._count += 1
        if not connection.is_let_in:
            self._strangers[connection.client] += 1
            self._strangers_in_all += 1
        bounds = self._bounds
        if self._count > bounds.in_all:
            self._note_closed(f"{bounds.in_all} connections are open already")
            return False
        if connection.is_let_in:
            return True
        if (
            self._strangers[connection.client] > bounds.strangers_each
            or self._strangers_in_all > bounds.strangers
        ):
            self._note_closed(f"too many of {connection.client}, who was not let in yet")
            return False
        return True

    def let_in(self, connection: ServerConnection) -> None:
        """A request on it was authorised."""
        self._forget_stranger(connection)
        connection.let_in()

    def leave(self, connection: ServerConnection) -> None:
        """It is closed."""
        self._count -= 1
        if not connection.is_let_in:
            self._forget_stranger(connection)

    def _identify(self, connection: ServerConnection) -> None:
        transport = connection.transport
        peer = transport.get_extra_info("peername")
        own = transport.get_extra_info("sockname")
        if not peer or not own:
            connection.client = "nobody: the connection is closed already"
            return
        connection.client = _network_of(peer[0])
        try:
            user = self._table.user_of_connection(peer[:2], own[:2])
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
        self._closed += 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            _log.warning("%d connections of clients were closed: %s", self._closed, why)
            self._closed, self._logged_s = 0, now_s


def _network_of(host: str) -> str:
    """An address, or the network of an IPv6 address, in words."""
    address = ip_address(host.partition("%")[0])
    if address.version == 6 and not address.is_loopback:
        return f"network {ip_network((address, _IPV6_PREFIX), strict=False)}"
    return f"address {address}"


async def expire_connections(
    connections: Callable[[], tuple[ServerConnection, ...]], every_s: float = 1.0
) -> None:
    """Close what is late or idle, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(every_s)
        now_s = loop.time()
        for connection in connections():
            connection.expire(now_s)
