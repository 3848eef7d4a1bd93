"""Connections to servers of this machine: a client sends nothing to another user's server.

After the end of a server, any local user may listen on its port. So a client that holds a password
asks the kernel for the listener's user before and after it connects. It sends nothing until the
answer is known. Servers on other machines are not checked; use TLS for those.
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

#: Variable with further users whose servers are trusted: names or numbers, separated by commas.
SERVER_USERS = "MUSTER_SERVER_USERS"

_Address = IPv4Address | IPv6Address


class UntrustedListener(ConnectionError):
    """A server of this machine belongs to another user, or its user is unknown.

    No data was sent.
    """


def trusted_users() -> frozenset[int]:
    """Return the users whose servers may receive a password.

    These are this user, root, and the users of MUSTER_SERVER_USERS. Unknown names are skipped.
    """
    users = {0, os.geteuid()}
    for name in os.environ.get(SERVER_USERS, "").split(","):
        word = name.strip()
        if word.isdecimal():
            users.add(int(word))
        elif word:
            with suppress(KeyError):
                users.add(pwd.getpwnam(word).pw_uid)
    return frozenset(users)


class ListenerCheck:
    """The check of one connection: create it before connecting, then call `require_trusted`.

    The same socket must listen before and after the connection was made. While that socket listens,
    the kernel lets no other user listen on its address, so it received the connection.
    """

    def __init__(self) -> None:
        self._before: list[ListeningSocket] = []
        self._problem = ""
        try:
            self._before = listening_sockets()
        except OSError as error:
            self._problem = str(error)

    def require_trusted(self, own: tuple[typing.Any, ...], peer: tuple[typing.Any, ...]) -> None:
        """Check the listener after the connection was made.

        Args:
            own: Address of the client's end, as `getsockname` returns it.
            peer: Address of the server's end, as `getpeername` returns it.

        Raises:
            UntrustedListener: The listener is not trusted, unknown, or was replaced.
        """
        own_address = _parsed(own[0])
        peer_address = _parsed(peer[0])
        if not (peer_address.is_loopback or peer_address == own_address):
            return
        where = f"{peer[0]}:{peer[1]}"
        if self._problem:
            raise UntrustedListener(_unknown(where, self._problem))
        before = {listener.inode for listener in receivers(self._before, peer_address, peer[1])}
        try:
            now = receivers(listening_sockets(), peer_address, peer[1])
        except OSError as error:
            raise UntrustedListener(_unknown(where, str(error))) from None
        _refuse_others(where, now)
        if not before & {listener.inode for listener in now}:
            why = "its listener changed while the connection was made"
            raise UntrustedListener(_unknown(where, why))


def require_trusted_listener(host: str, port: int) -> None:
    """Check the listener at an address, for a client whose connections cannot be checked.

    Addresses of other machines pass, and so do ports without a listener.

    Raises:
        UntrustedListener: The listener is not trusted or is unknown.
    """
    where = f"{host}:{port}"
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return  # The client reports the unknown name itself.
    for *_, address in addresses:
        target = _parsed(str(address[0]))
        if target.is_loopback or _is_of_this_machine(target):
            try:
                _refuse_others(where, receivers(listening_sockets(), target, port))
            except UntrustedListener:
                raise
            except OSError as error:
                raise UntrustedListener(_unknown(where, str(error))) from None


def require_trusted_url(url: str) -> None:
    """Check the listener at the host and port of a URL, as `require_trusted_listener` does.

    Raises:
        UntrustedListener: The listener is not trusted or is unknown.
    """
    parts = urlsplit(url)
    default = 443 if parts.scheme == "https" else 80
    require_trusted_listener(parts.hostname or "", parts.port or default)


def receivers(
    table: Iterable[ListeningSocket], address: _Address, port: int
) -> list[ListeningSocket]:
    """Return the sockets that may receive a connection to the address.

    These are the sockets of the most specific listener. There are several only if one user shares
    the port between them (SO_REUSEPORT).
    """
    on_port = [listener for listener in table if listener.port == port]
    candidates: list[_Address] = [address]
    if isinstance(address, IPv4Address):
        candidates += [IPv6Address(f"::ffff:{address}"), IPv4Address("0.0.0.0")]
    for candidate in [*candidates, IPv6Address("::")]:
        if matching := [listener for listener in on_port if listener.address == candidate]:
            return matching
    return []


def _refuse_others(where: str, listeners: Iterable[ListeningSocket]) -> None:
    """Check that all listeners belong to trusted users.

    Raises:
        UntrustedListener: A listener belongs to another user.
    """
    for listener in listeners:
        if listener.uid not in trusted_users():
            raise UntrustedListener(
                f"user {_name_of(listener.uid)} listens at {where}, who is neither you nor root: "
                "nothing was sent. Start your server again on another port, or, if you trust this "
                f"user's server, set {SERVER_USERS}={_name_of(listener.uid)}"
            )


def _unknown(where: str, why: str) -> str:
    return f"it is unknown whose server listens at {where} ({why}): nothing was sent; try again"


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _parsed(host: str) -> _Address:
    """Return the address without its zone. An IPv4-mapped IPv6 address becomes an IPv4 address."""
    address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _is_of_this_machine(address: _Address) -> bool:
    """Return True if a socket can be bound to the address, which needs an address of this
    machine.
    """
    family = socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True


def check_listeners(client: httpx.Client | httpx.AsyncClient) -> None:
    """Make a client check the listener of each connection to this machine before it sends data.

    httpx has no public way to replace its network backend, so private attributes are set. If a
    later release renames them, AttributeError is raised here.
    """
    for transport in (client._transport, *client._mounts.values()):
        if isinstance(transport, httpx.AsyncHTTPTransport):
            transport._pool._network_backend = _AsyncBackend(transport._pool._network_backend)
        elif isinstance(transport, httpx.HTTPTransport):
            transport._pool._network_backend = _Backend(transport._pool._network_backend)


class _Backend(httpcore.NetworkBackend):
    """Opens connections as `inner` does, and checks the listener of each."""

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
    """Opens connections as `inner` does, and checks the listener of each."""

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
    """Check the listener of an asyncio transport's connection.

    Raises:
        UntrustedListener: The listener is not trusted or is unknown.
        OSError: The connection has ended.
    """
    _check_ends(check, transport.get_extra_info("socket"))


def _check_ends(check: ListenerCheck, connected: typing.Any) -> None:
    check.require_trusted(connected.getsockname(), connected.getpeername())
