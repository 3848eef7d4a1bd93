"""Connections to servers of this machine: a client sends nothing to another user's listener.

Any local user may listen on the port of a server that has ended. A client that holds a password
therefore asks the kernel who listens, before and after it connects, and sends nothing until the
answer is known. Servers on other machines are not checked: TLS is the means for those.
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

#: Further users whose servers on this machine are trusted: names or numbers, separated by commas.
SERVER_USERS = "MUSTER_SERVER_USERS"

_Address = IPv4Address | IPv6Address


class UntrustedListener(ConnectionError):
    """A server of this machine belongs to another user, or its owner is unknown. Nothing was
    sent."""


def trusted_users() -> frozenset[int]:
    """Users whose servers may be sent a password: this user, root, and those of
    MUSTER_SERVER_USERS. An unknown name is left out."""
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

    The listener must be the same socket before and after the connection was made. While that socket
    listens, the kernel lets no other user listen on its address, so it received the connection.
    """

    def __init__(self) -> None:
        self._before: list[ListeningSocket] = []
        self._problem = ""
        try:
            self._before = listening_sockets()
        except OSError as error:
            self._problem = str(error)

    def require_trusted(self, own: tuple[typing.Any, ...], peer: tuple[typing.Any, ...]) -> None:
        """
        Args:
            own, peer: the addresses of the connection's two ends, as `getsockname` and
                `getpeername` return them.

        Raises: UntrustedListener.
        """
        own_address, peer_address = _parsed(own[0]), _parsed(peer[0])
        if not (peer_address.is_loopback or peer_address == own_address):
            return
        where = f"{peer[0]}:{peer[1]}"
        if self._problem:
            raise UntrustedListener(_unknown(where, self._problem))
        before = {one.inode for one in receivers(self._before, peer_address, peer[1])}
        try:
            now = receivers(listening_sockets(), peer_address, peer[1])
        except OSError as error:
            raise UntrustedListener(_unknown(where, str(error))) from None
        _refuse_others(where, now)
        if not before & {one.inode for one in now}:
            why = "its listener changed while the connection was made"
            raise UntrustedListener(_unknown(where, why))


def require_trusted_listener(host: str, port: int) -> None:
    """Check who listens at an address, for a client whose connections cannot be checked one by one.

    An address of another machine passes, and so does a port on which nobody listens.

    Raises: UntrustedListener.
    """
    where = f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return  # The client reports the unknown name itself.
    for *_, address in found:
        target = _parsed(str(address[0]))
        if target.is_loopback or _is_of_this_machine(target):
            try:
                _refuse_others(where, receivers(listening_sockets(), target, port))
            except UntrustedListener:
                raise
            except OSError as error:
                raise UntrustedListener(_unknown(where, str(error))) from None


def require_trusted_url(url: str) -> None:
    """Do the same for the host and port of a URL. Raises: UntrustedListener."""
    parts = urlsplit(url)
    default = 443 if parts.scheme == "https" else 80
    require_trusted_listener(parts.hostname or "", parts.port or default)


def receivers(
    table: Iterable[ListeningSocket], address: _Address, port: int
) -> list[ListeningSocket]:
    """The sockets that may receive a connection to the address: those of its most specific
    listener. They are several only if one user shares the port (SO_REUSEPORT)."""
    on_port = [one for one in table if one.port == port]
    candidates: list[_Address] = [address]
    if isinstance(address, IPv4Address):
        candidates += [IPv6Address(f"::ffff:{address}"), IPv4Address("0.0.0.0")]
    for candidate in [*candidates, IPv6Address("::")]:
        if found := [one for one in on_port if one.address == candidate]:
            return found
    return []


def _refuse_others(where: str, found: Iterable[ListeningSocket]) -> None:
    """Raises: UntrustedListener, if one of the sockets belongs to an untrusted user."""
    for one in found:
        if one.uid not in trusted_users():
            raise UntrustedListener(
                f"user {_name_of(one.uid)} listens at {where}, who is neither you nor root: "
                "nothing was sent. Start your server again on another port, or, if you trust this "
                f"user's server, set {SERVER_USERS}={_name_of(one.uid)}"
            )


def _unknown(where: str, why: str) -> str:
    return f"it is unknown whose server listens at {where} ({why}): nothing was sent; try again"


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _parsed(host: str) -> _Address:
    """The address without its zone; an IPv4 address that is written as IPv6 becomes IPv4."""
    address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _is_of_this_machine(address: _Address) -> bool:
    """Return True if a socket can be bound to the address, which only this machine's allow."""
    family = socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True


def check_listeners(client: httpx.Client | httpx.AsyncClient) -> None:
    """Have a client check the listener of each connection to this machine, before it sends.

    httpx offers no public way to replace its network backend, so private attributes are set. A
    release that renames them raises AttributeError here.
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
    """Check the connection of an asyncio transport. Raises: UntrustedListener, OSError."""
    _check_ends(check, transport.get_extra_info("socket"))


def _check_ends(check: ListenerCheck, connected: typing.Any) -> None:
    check.require_trusted(connected.getsockname(), connected.getpeername())
