"""Ports: the reserved ports, the sockets that listen on a port, and the user of a connection."""

from __future__ import annotations

import os
import socket
from contextlib import closing

import pytest

from tasks.processes import ports
from tasks.processes.sockets import SocketTable
from tasks.rollout.admission import user_of_connection

FAMILIES = {"IPv4": (socket.AF_INET, "127.0.0.1"), "IPv6": (socket.AF_INET6, "::1")}


@pytest.mark.parametrize("family", FAMILIES)
def test_users_of_listeners_and_connections_are_known(family: str) -> None:
    kind, address = FAMILIES[family]
    with socket.create_server((address, 0), family=kind) as server:
        port = server.getsockname()[1]
        inode = os.fstat(server.fileno()).st_ino
        with socket.create_connection((address, port)) as client:
            ends = client.getsockname()[:2], (address, port)
            found = ports.listening_inodes(port)
            with SocketTable() as table:
                user = user_of_connection(table, *ends)

    assert found == {str(inode): os.getuid()}
    assert user == os.getuid()


def test_port_without_a_listener_has_no_sockets() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]

        assert ports.listening_inodes(port) == {}
        with SocketTable() as table:
            ends = ("127.0.0.1", port), ("127.0.0.1", port)
            assert user_of_connection(table, *ends) is None


def test_reserved_ports_are_outside_the_range_of_ray_workers() -> None:
    with closing(ports.PortsReserved(f"a.{number}" for number in range(20))) as reserved:
        numbers = set(reserved.numbers.values())

    assert len(numbers) == 20
    assert not numbers & set(range(10002, 20000))
