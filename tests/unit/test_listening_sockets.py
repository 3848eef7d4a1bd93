"""List the listening TCP sockets of this machine, over netlink or from `/proc/net/tcp`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import ip_address

import pytest

from tasks.processes import sockets
from tasks.processes.sockets import ListeningSocket, listening_sockets


@pytest.fixture(params=["netlink", "proc"])
def _source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test read the sockets over netlink, or forbid netlink for the test."""
    if request.param == "proc":

        def refuse(_: sockets.SocketTable) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(sockets.SocketTable, "open", refuse)


@pytest.fixture
def open_sockets() -> Iterator[list[ListeningSocket]]:
    """Listen on IPv4 and IPv6 addresses, and yield a description of each listening socket."""
    addresses = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0")]
    if os.path.exists("/proc/net/if_inet6"):
        addresses += [(socket.AF_INET6, "::1"), (socket.AF_INET6, "::")]
        addresses.append((socket.AF_INET6, "::ffff:127.0.0.1"))
    with ExitStack() as stack:
        expected = []
        for family, address in addresses:
            listener = stack.enter_context(socket.socket(family))
            listener.bind((address, 0))
            listener.listen()
            status = os.fstat(listener.fileno())
            expected.append(
                ListeningSocket(
                    address=ip_address(address),
                    port=listener.getsockname()[1],
                    uid=status.st_uid,
                    inode=str(status.st_ino),
                )
            )
        yield expected


@pytest.mark.usefixtures("_source")
def test_listening_sockets_have_the_address_port_user_and_inode_of_the_open_sockets(
    open_sockets: list[ListeningSocket],
) -> None:
    own_inodes = {expected.inode for expected in open_sockets}
    found = [listener for listener in listening_sockets() if listener.inode in own_inodes]
    assert sorted(found, key=lambda listener: listener.inode) == sorted(
        open_sockets, key=lambda listener: listener.inode
    )


@pytest.mark.usefixtures("_source")
def test_connected_and_closed_sockets_are_not_listed(open_sockets: list[ListeningSocket]) -> None:
    port = open_sockets[0].port
    with socket.create_connection(("127.0.0.1", port)) as client:
        listeners = listening_sockets()
        inodes = {listener.inode for listener in listeners}
        assert str(os.fstat(client.fileno()).st_ino) not in inodes
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        closed.listen()
        inode = str(os.fstat(closed.fileno()).st_ino)
        assert inode in {listener.inode for listener in listening_sockets()}
    assert inode not in {listener.inode for listener in listening_sockets()}
