"""Check that a server on this machine belongs to a trusted user, before a client sends data.

After the end of a server, any user of the machine can listen on its port and receive the passwords
of its clients. So a client asks the kernel which user listens, before and after it connects. It
sends no data if that user is not trusted. Servers on other machines are not checked; use TLS for
those.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import socket
import typing
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

import httpcore
import httpx

from tasks.processes.ports import ListeningSocket, listening_sockets
from tasks.spec import own_settings

#: Environment variable with further users whose Prefect server on this machine is trusted. It
#: contains user names or uids, separated by commas.
SERVER_USERS = own_settings.SERVER_USERS.name

_Address = IPv4Address | IPv6Address


class UntrustedListener(ConnectionError):
    """A server on this machine belongs to a user who is not trusted, or its user is unknown.

    No data was sent to the server.
    """


def trusted_users() -> frozenset[int]:
    """Return the uids of the users whose servers may receive a password.

    These users are the current user, root, and the users in MUSTER_SERVER_USERS. Unknown names are
    skipped.
    """
    users = {0, os.geteuid()}
    for word in own_settings.SERVER_USERS.read():
        if word.isdecimal():
            users.add(int(word))
        else:
            with suppress(KeyError):
                users.add(pwd.getpwnam(word).pw_uid)
    return frozenset(users)


class ListenerCheck:
    """Checks that a connection was accepted by a server process of a trusted user.

    Create the object before the client connects, and call `require_trusted` afterwards. The check
    succeeds only if the same socket listens on the address before and after the connection. While
    a socket listens, the kernel lets no other user listen on the same address. So no other user can
    have accepted the connection.
    """

    def __init__(self) -> None:
        self._before: list[ListeningSocket] = []
        self._problem = ""
        try:
            self._before = listening_sockets()
        except OSError as error:
            self._problem = str(error)

    def require_trusted(self, own: tuple[typing.Any, ...], peer: tuple[typing.Any, ...]) -> None:
        """Check that the server of a new connection belongs to a trusted user.

        A server on another machine passes the check.

        Args:
            own: Address of the client's end, as `getsockname` returns it.
            peer: Address of the server's end, as `getpeername` returns it.

        Raises:
            UntrustedListener: The user of the server is unknown or not trusted. Also raised if
                another socket has begun to listen since this object was created: Muster then does
                not know which socket accepted the connection.
        """
        own_address = _parse_address(own[0])
        peer_address = _parse_address(peer[0])
        if not (peer_address.is_loopback or peer_address == own_address):
            return
        where = f"{peer[0]}:{peer[1]}"
        if self._problem:
            raise UntrustedListener(_format_unknown_user(where, self._problem))
        before = {listener.inode for listener in receivers(self._before, peer_address, peer[1])}
        try:
            now = receivers(listening_sockets(), peer_address, peer[1])
        except OSError as error:
            raise UntrustedListener(_format_unknown_user(where, str(error))) from None
        _require_trusted_users(where, now)
        if not before & {listener.inode for listener in now}:
            why = "another process opened the port of the server while Muster connected"
            raise UntrustedListener(_format_unknown_user(where, why))


def require_trusted_listener(host: str, port: int) -> None:
    """Check that the server at an address belongs to a trusted user.

    Use this function if Muster cannot check each connection, because a library opens the
    connections. Addresses of other machines pass the check, and so do ports without a server.

    Raises:
        UntrustedListener: The user of the server is unknown or not trusted.
    """
    where = f"{host}:{port}"
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        # The host name cannot be resolved. The later attempt to connect reports this error.
        return
    for *_, address in addresses:
        target = _parse_address(str(address[0]))
        if is_address_of_this_machine(target):
            try:
                _require_trusted_users(where, receivers(listening_sockets(), target, port))
            except UntrustedListener:
                raise
            except OSError as error:
                raise UntrustedListener(_format_unknown_user(where, str(error))) from None


def require_trusted_url(url: str) -> None:
    """Check that the server of a URL belongs to a trusted user, see `require_trusted_listener`.

    Raises:
        UntrustedListener: The user of the server is unknown or not trusted.
    """
    parts = urlsplit(url)
    default = 443 if parts.scheme == "https" else 80
    require_trusted_listener(parts.hostname or "", parts.port or default)


def receivers(
    table: Iterable[ListeningSocket], address: _Address, port: int
) -> list[ListeningSocket]:
    """Return the listening sockets that receive connections to an address.

    The kernel prefers sockets that listen on exactly this address to sockets that listen on all
    addresses. Several sockets are returned only if one user shares the port between them with
    SO_REUSEPORT.

    Args:
        table: All listening sockets of this machine.
        address: The address.
        port: The port.
    """
    on_port = [listener for listener in table if listener.port == port]
    candidates: list[_Address] = [address]
    if isinstance(address, IPv4Address):
        candidates += [IPv6Address(f"::ffff:{address}"), IPv4Address("0.0.0.0")]
    for candidate in [*candidates, IPv6Address("::")]:
        if matching := [listener for listener in on_port if listener.address == candidate]:
            return matching
    return []


def _require_trusted_users(where: str, listeners: Iterable[ListeningSocket]) -> None:
    """Check that all listening sockets belong to trusted users.

    Args:
        where: Address and port, for the error message.
        listeners: The listening sockets.

    Raises:
        UntrustedListener: A socket belongs to another user.
    """
    for listener in listeners:
        if listener.uid not in trusted_users():
            raise UntrustedListener(
                f"the server at {where} belongs to user {_user_name(listener.uid)}, who is neither "
                "you nor root. So Muster sent no data. Start your server on another port. If you "
                f"trust that user, set {SERVER_USERS}={_user_name(listener.uid)}"
            )


def _format_unknown_user(where: str, why: str) -> str:
    """Return the error message for a server whose user is unknown."""
    return f"the user of the server at {where} is unknown ({why}). No data was sent. Try again"


def _user_name(uid: int) -> str:
    """Return the name of a user, or the uid if the user has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _parse_address(host: str) -> _Address:
    """Parse an IP address. A zone such as `%eth0` is dropped.

    An IPv6 address that stands for an IPv4 address (`::ffff:10.0.0.1`) becomes that IPv4 address.
    """
    address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def is_address_of_this_machine(address: IPv4Address | IPv6Address) -> bool:
    """Return True if an address belongs to this machine, so that a socket can be bound to it."""
    if address.is_loopback:
        return True
    family = socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True


def check_listeners(client: httpx.Client | httpx.AsyncClient) -> None:
    """Change a client, so that it checks the server of each new connection before it sends data.

    If a server on this machine does not belong to a trusted user, the client then raises
    httpx.ConnectError.

    httpx has no public way to replace its network backend, so this function sets private
    attributes. If a later release of httpx renames them, this function raises AttributeError.
    """
    for transport in (client._transport, *client._mounts.values()):
        if isinstance(transport, httpx.AsyncHTTPTransport):
            transport._pool._network_backend = _AsyncBackend(transport._pool._network_backend)
        elif isinstance(transport, httpx.HTTPTransport):
            transport._pool._network_backend = _Backend(transport._pool._network_backend)


class _Backend(httpcore.NetworkBackend):
    """Network backend that sends nothing to servers of untrusted users on this machine.

    The backend `inner` opens the connections. Before any data is sent, this class checks that the
    server of the connection belongs to a trusted user.
    """

    def __init__(self, inner: httpcore.NetworkBackend) -> None:
        self._inner = inner

    def connect_tcp(
        self, host: str, port: int, *args: typing.Any, **options: typing.Any
    ) -> httpcore.NetworkStream:
        check = ListenerCheck()
        stream = self._inner.connect_tcp(host, port, *args, **options)
        try:
            _check_ends(check, stream.get_extra_info("socket"))
        except OSError as error:
            stream.close()
            raise httpcore.ConnectError(str(error)) from error
        return stream

    def connect_unix_socket(
        self, path: str, *args: typing.Any, **options: typing.Any
    ) -> httpcore.NetworkStream:
        return self._inner.connect_unix_socket(path, *args, **options)

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class _AsyncBackend(httpcore.AsyncNetworkBackend):
    """Network backend for asyncio that sends nothing to servers of untrusted users.

    This backend opens and checks connections in the same way as `_Backend`.
    """

    def __init__(self, inner: httpcore.AsyncNetworkBackend) -> None:
        self._inner = inner

    async def connect_tcp(
        self, host: str, port: int, *args: typing.Any, **options: typing.Any
    ) -> httpcore.AsyncNetworkStream:
        check = ListenerCheck()
        stream = await self._inner.connect_tcp(host, port, *args, **options)
        try:
            _check_ends(check, stream.get_extra_info("socket"))
        except OSError as error:
            await stream.aclose()
            raise httpcore.ConnectError(str(error)) from error
        return stream

    async def connect_unix_socket(
        self, path: str, *args: typing.Any, **options: typing.Any
    ) -> httpcore.AsyncNetworkStream:
        return await self._inner.connect_unix_socket(path, *args, **options)

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


def check_transport(check: ListenerCheck, transport: asyncio.BaseTransport) -> None:
    """Check that the server at the other end of a connection belongs to a trusted user.

    Args:
        check: Object that was created before the connection was made.
        transport: Transport of the connection.

    Raises:
        UntrustedListener: The user of the server is unknown or not trusted.
        OSError: The connection has ended.
    """
    _check_ends(check, transport.get_extra_info("socket"))


def _check_ends(check: ListenerCheck, connected: typing.Any) -> None:
    check.require_trusted(connected.getsockname(), connected.getpeername())
