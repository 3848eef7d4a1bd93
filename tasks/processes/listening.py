"""Which sockets of this machine listen on a TCP port, from the kernel's socket table."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST_DUMP = 0x301
_TCP_LISTEN = 10
_HEADER = struct.Struct("=IHHII")
#: Family, protocol, extensions, states, port in network order, the rest of the address.
_QUESTION = struct.Struct("=BBBxI2s46x")
#: Family, state, timer, retransmits, address, expiry, queues, user, inode.
_ANSWER = struct.Struct("=4B48x3III")
_LISTEN = "0A"


def listening_inodes(port: int) -> dict[str, int]:
    """`uid[inode]` of the sockets in state LISTEN, on any address."""
    try:
        return _asked(port)
    except OSError:
        return _read(port)


def _asked(port: int) -> dict[str, int]:
    """Raises: OSError, where the kernel, or a sandbox, does not answer.

    Source: sock_diag(7).
    """
    found: dict[str, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as s:
        s.settimeout(1.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            question = _QUESTION.pack(
                family, socket.IPPROTO_TCP, 0, 1 << _TCP_LISTEN, struct.pack("!H", port)
            )
            length = _HEADER.size + len(question)
            head = _HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0)
            s.send(head + question)
            while _take_in(s.recv(1 << 16), found):
                pass
    return found


def _take_in(data: bytes, found: dict[str, int]) -> bool:
    """Whether more is to come."""
    while len(data) >= _HEADER.size:
        length, kind, *_ = _HEADER.unpack_from(data)
        if kind == _NLMSG_DONE:
            return False
        if kind == _NLMSG_ERROR:
            raise OSError("the kernel does not list sockets by netlink")
        *_, uid, inode = _ANSWER.unpack_from(data, _HEADER.size)
        found[str(inode)] = uid
        data = data[(length + 3) & ~3 :]
    return True


def _read(port: int) -> dict[str, int]:
    """The same from /proc, which takes the kernel a look at every connection of the machine.

    Source: proc_net(5), tcp and tcp6.
    """
    wanted = f":{port:04X}"
    inodes: dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            if f"{wanted} " in line[:50]:
                fields = line.split()
                if fields[3] == _LISTEN and fields[1].endswith(wanted):
                    inodes[fields[9]] = int(fields[7])
    return inodes
