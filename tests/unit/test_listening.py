"""Which sockets listen on a port: both ways of asking the kernel see the same."""

from __future__ import annotations

import os
import socket

import pytest

from tasks.processes import ports

FAMILIES = {"IPv4": (socket.AF_INET, "127.0.0.1"), "IPv6": (socket.AF_INET6, "::1")}


@pytest.mark.parametrize("family", FAMILIES)
def test_both_ways_of_asking_agree_and_see_no_connections(family: str) -> None:
    kind, address = FAMILIES[family]
    with socket.create_server((address, 0), family=kind) as server:
        port = server.getsockname()[1]
        inode = os.fstat(server.fileno()).st_ino
        with socket.create_connection((address, port)):
            by_netlink, by_proc = ports._asked(port), ports._read(port)

    assert by_netlink == by_proc == {str(inode): os.getuid()}


def test_port_on_which_nobody_listens_has_no_sockets() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]

        assert ports._asked(port) == ports._read(port) == {}
