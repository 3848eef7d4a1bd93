"""Find the sockets that listen on a TCP port, and the sockets of a TCP connection.

Both are read from the kernel's table of TCP sockets over netlink (sock_diag). If the system does
not allow netlink, the table is read from `/proc/net/tcp`. If both fail, OSError is raised.

This module uses only the standard library, because it is sent to the nodes of a Ray cluster by
value.
"""

from __future__ import annotations

import os
import pwd
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from tasks.processes.tree import list_open_files, read_command_line

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR = 2
_NLMSG_DONE = 3
_REQUEST = 0x1
_DUMP = 0x300
_ALL_STATES = 0xFFFFFFFF
_STATE_LISTEN = 10
#: Names of the states of a TCP connection. The index is the number that the kernel shows for a
#: state.
#: Source: include/net/tcp_states.h.
_STATE_NAMES = (
    "?",
    "ESTABLISHED",
    "SYN_SENT",
    "SYN_RECV",
    "FIN_WAIT1",
    "FIN_WAIT2",
    "TIME_WAIT",
    "CLOSE",
    "CLOSE_WAIT",
    "LAST_ACK",
    "LISTEN",
    "CLOSING",
    "NEW_SYN_RECV",
)
#: Layout of the header of a netlink message: length, type, flags, sequence number, port id. The
#: layout is a text instead of a `struct.Struct`, because a `Struct` cannot be pickled and sent to
#: Ray nodes.
_HEADER = "=IHHII"
#: Layout of a sock_diag request: address family, protocol, extensions, socket states, local and
#: remote port in network order, local and remote address, interface, cookie.
#: Source: linux/inet_diag.h, struct inet_diag_req_v2.
_QUESTION = "=BBBxI2s2s16s16sIQ"
#: Value of the cookie in a request that matches sockets with any cookie.
#: Source: linux/inet_diag.h, INET_DIAG_NOCOOKIE.
_NO_COOKIE = (1 << 64) - 1
#: Layout of a sock_diag answer: address family, state, timer, retransmits, local and remote port,
#: local and remote address, 12 skipped bytes (interface and cookie), expiry, lengths of the two
#: queues, user, inode.
#: Source: linux/inet_diag.h, struct inet_diag_msg.
_ANSWER = "=4B2s2s16s16s12x3III"
_ERROR = "=i"
_HEADER_SIZE = struct.calcsize(_HEADER)
_NO_ADDRESS = bytes(16)
#: Port in a request that matches sockets on any port.
_ANY_PORT = bytes(2)
#: Seconds to wait for an answer of the kernel.
_ANSWERS_WITHIN_S = 1.0
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_TABLES = {socket.AF_INET: "/proc/net/tcp", socket.AF_INET6: "/proc/net/tcp6"}
#: Prefix with which `/proc/net/tcp6` shows the IPv4 address of an IPv6 socket.
_MAPPED = "0000000000000000FFFF0000"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectedSocket:
    """One end of a TCP connection."""

    #: Uid of the user who opened the socket. If `is_open` is False, the uid is not reliable: the
    #: kernel may report another user.
    uid: int
    #: True if a process has the socket open.
    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ListeningSocket:
    """A TCP socket in state LISTEN."""

    #: Local address of the socket. 0.0.0.0 or :: accepts connections to every address.
    address: IPv4Address | IPv6Address
    port: int
    #: Uid of the user who created the socket.
    uid: int
    #: Inode number of the socket. The links in /proc/PID/fd show it as `socket:[INODE]`.
    inode: str


class SocketTable:
    """Reads the kernel's table of TCP sockets, over one netlink socket that stays open.

    After `open`, the methods need no further file descriptor if netlink is allowed. So they work
    even if this process cannot open more files.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._sequence = 0

    def open(self) -> None:
        """Open the netlink socket, unless it is open.

        Raises:
            OSError: The system does not allow netlink sockets.
        """
        if self._socket is None:
            netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)
            netlink.settimeout(_ANSWERS_WITHIN_S)
            self._socket = netlink

    def __enter__(self) -> SocketTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the netlink socket. The next request opens a new socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def listeners(self, port: int, host: str | None = None) -> dict[str, int]:
        """Return the sockets that listen on a TCP port.

        Args:
            port: The port.
            host: Address of this machine. Only sockets that accept connections to this address are
                returned. If None, the sockets of all addresses are returned.

        Returns:
            Mapping from the inode of each socket to the uid of the socket's user.

        Raises:
            OSError: The kernel's table of TCP sockets cannot be read.
        """
        try:
            return self._listeners_by_netlink(port, host)
        except OSError as refused:
            return _listeners_by_proc(port, host, refused)

    def find_connection(
        self, local: tuple[str, int], remote: tuple[str, int]
    ) -> ConnectedSocket | None:
        """Return the socket at one end of a TCP connection between two processes of this machine.

        Args:
            local: Address and port of this end.
            remote: Address and port of the other end.

        Returns:
            The socket at the address `local`, or None if the connection does not exist any more.

        Raises:
            OSError: The kernel's table of TCP sockets cannot be read.
        """
        try:
            return self._connection_by_netlink(local, remote)
        except OSError as refused:
            return _connection_by_proc(local, remote, refused)

    def list_all_listeners(self) -> list[ListeningSocket]:
        """Return all listening TCP sockets of this network namespace.

        Raises:
            OSError: The kernel's table of TCP sockets cannot be read.
        """
        try:
            return [
                ListeningSocket(
                    address=ip_address(address[: 4 if family == socket.AF_INET else 16]),
                    port=int.from_bytes(port, "big"),
                    uid=uid,
                    inode=str(inode),
                )
                for family in _FAMILIES
                for port, address, uid, inode in self._ask_for_listeners(family)
            ]
        except OSError as refused:
            return _all_listeners_by_proc(refused)

    def _listeners_by_netlink(self, port: int, host: str | None) -> dict[str, int]:
        users: dict[str, int] = {}
        local = struct.pack("!H", port)
        addresses = None if host is None else _list_local_addresses(host)
        for family in _FAMILIES:
            for source, address, uid, inode in self._ask_for_listeners(family, local):
                if source == local and (addresses is None or address in addresses):
                    users[str(inode)] = uid
        return users

    def _ask_for_listeners(
        self, family: int, port: bytes = _ANY_PORT
    ) -> Iterator[tuple[bytes, bytes, int, int]]:
        """Ask the kernel for the listening sockets of an address family.

        Args:
            family: Address family, AF_INET or AF_INET6.
            port: Local port of the sockets in network order. `_ANY_PORT` for all ports. An old
                kernel may also return sockets on other ports.

        Yields:
            Local port and local address of a socket in network order, uid of its user, and its
            inode. The address has 16 bytes. An IPv4 address is in the first 4 bytes.

        Raises:
            OSError: The kernel's table of TCP sockets cannot be read.
        """
        question = struct.pack(
            _QUESTION,
            family,
            socket.IPPROTO_TCP,
            0,
            1 << _STATE_LISTEN,
            port,
            b"",
            _NO_ADDRESS,
            _NO_ADDRESS,
            0,
            _NO_COOKIE,
        )
        for answer in self._ask(question, _REQUEST | _DUMP):
            _, state, _, _, source, _, address, *_, uid, inode = struct.unpack_from(_ANSWER, answer)
            if state == _STATE_LISTEN:
                yield source, address, uid, inode

    def _connection_by_netlink(
        self, local: tuple[str, int], remote: tuple[str, int]
    ) -> ConnectedSocket | None:
        family = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
        hosts = [socket.inet_pton(family, host).ljust(16, b"\0") for host, _ in (local, remote)]
        ports = [struct.pack("!H", port) for _, port in (local, remote)]
        question = struct.pack(
            _QUESTION, family, socket.IPPROTO_TCP, 0, _ALL_STATES, *ports, *hosts, 0, _NO_COOKIE
        )
        try:
            [answer] = self._ask(question, _REQUEST)
        except FileNotFoundError:
            return None
        _, state, *_, uid, inode = struct.unpack_from(_ANSWER, answer)
        if state == _STATE_LISTEN:
            # The connection does not exist. The kernel then answers with the socket that listens on
            # the local port, if there is one.
            return None
        return ConnectedSocket(uid=uid, is_open=inode != 0)

    def _ask(self, question: bytes, flags: int) -> list[bytes]:
        """Send a sock_diag request to the kernel, and return the bodies of its answers.

        Args:
            question: The request, in the layout of `_QUESTION`.
            flags: Flags of the netlink header. With `_DUMP`, all matching sockets are returned.

        Raises:
            FileNotFoundError: No socket matches the request.
            OSError: The kernel's table of TCP sockets cannot be read.
        """
        self.open()
        assert self._socket is not None
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        length = _HEADER_SIZE + len(question)
        head = struct.pack(_HEADER, length, _SOCK_DIAG_BY_FAMILY, flags, self._sequence, 0)
        answers: list[bytes] = []
        try:
            self._socket.send(head + question)
            while True:
                for kind, sequence, body in _parse_messages(self._socket.recv(1 << 16)):
                    if sequence != self._sequence:
                        continue  # a late answer to an earlier request
                    if kind == _NLMSG_DONE:
                        return answers
                    if kind == _NLMSG_ERROR:
                        [code] = struct.unpack_from(_ERROR, body)
                        raise OSError(-code, f"sock_diag: {os.strerror(-code)}")
                    answers.append(body)
                    if not flags & _DUMP:
                        return answers
        except FileNotFoundError:
            raise
        except OSError:
            self.close()
            raise


def _parse_messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield `(type, sequence number, body)` of each message of a netlink datagram."""
    at = 0
    while at + _HEADER_SIZE <= len(data):
        length, kind, _, sequence, _ = struct.unpack_from(_HEADER, data, at)
        if length < _HEADER_SIZE:
            return
        yield kind, sequence, data[at + _HEADER_SIZE : at + length]
        at += (length + 3) & ~3


def _read_table(family: int) -> list[list[str]]:
    """Return the lines of `/proc/net/tcp` or `/proc/net/tcp6`, each split into words.

    Args:
        family: Address family, AF_INET or AF_INET6.

    Source: proc_net(5).

    Raises:
        OSError: The table cannot be read.
    """
    try:
        with open(_TABLES[socket.AddressFamily(family)], encoding="ascii") as f:
            return [line.split() for line in f.readlines()[1:]]
    except FileNotFoundError:
        if family == socket.AF_INET6:
            return []  # a kernel without IPv6
        raise


def _list_local_addresses(host: str) -> frozenset[bytes]:
    """Return each address on which a socket can listen to accept connections to `host`.

    The result contains the address `host`, its IPv6 form, and the address 0 (`0.0.0.0` or `::`). A
    socket with the address 0 listens on all addresses. Each address has 16 bytes.
    """
    is_v6 = ":" in host
    packed = socket.inet_pton(socket.AF_INET6 if is_v6 else socket.AF_INET, host)
    # For an IPv4 socket, the kernel appends 12 zero bytes to the address. For an IPv6 socket, the
    # kernel shows an IPv4 address as an IPv4-mapped IPv6 address.
    mapped = packed if is_v6 else bytes(10) + b"\xff\xff" + packed
    return frozenset({packed.ljust(16, b"\0"), mapped, _NO_ADDRESS})


def _listeners_by_proc(port: int, host: str | None, refused: OSError) -> dict[str, int]:
    try:
        users: dict[str, int] = {}
        for family in _FAMILIES:
            any_host = "::" if family == socket.AF_INET6 else "0.0.0.0"
            addresses = [address for address in (host, any_host) if address is not None]
            ends = {_format_end(family, address, port) for address in addresses}
            for row in _read_table(family):
                is_meant = row[1] in ends or (host is None and row[1].endswith(f":{port:04X}"))
                if row[3] == f"{_STATE_LISTEN:02X}" and is_meant:
                    users[row[9]] = int(row[7])
        return users
    except OSError as error:
        raise error from refused


def _connection_by_proc(
    local: tuple[str, int], remote: tuple[str, int], refused: OSError
) -> ConnectedSocket | None:
    try:
        for family in _FAMILIES:
            ends = [_format_end(family, *end) for end in (local, remote)]
            for row in _read_table(family):
                if row[1:3] == ends:
                    return ConnectedSocket(uid=int(row[7]), is_open=row[9] != "0")
    except OSError as error:
        raise error from refused
    return None


def _format_end(family: int, host: str, port: int) -> str:
    """Return an address and a port in the format of `/proc/net/tcp` or `/proc/net/tcp6`."""
    is_v6 = ":" in host
    packed = socket.inet_pton(socket.AF_INET6 if is_v6 else socket.AF_INET, host)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    text = "".join(f"{word:08X}" for word in words)
    if family == socket.AF_INET6 and not is_v6:
        text = _MAPPED + text
    return f"{text}:{port:04X}"


def listening_sockets() -> list[ListeningSocket]:
    """Return all listening TCP sockets of this network namespace.

    Raises:
        OSError: The kernel's table of TCP sockets cannot be read.
    """
    with SocketTable() as table:
        return table.list_all_listeners()


def _all_listeners_by_proc(refused: OSError) -> list[ListeningSocket]:
    try:
        return [
            ListeningSocket(
                address=_parse_address(row[1].partition(":")[0]),
                port=int(row[1].partition(":")[2], 16),
                uid=int(row[7]),
                inode=row[9],
            )
            for family in _FAMILIES
            for row in _read_table(family)
            if row[3] == f"{_STATE_LISTEN:02X}"
        ]
    except OSError as error:
        raise error from refused


def _parse_address(text: str) -> IPv4Address | IPv6Address:
    """Parse the hexadecimal address of a socket in `/proc/net/tcp` or `/proc/net/tcp6`.

    The kernel writes the address as 32-bit words in this machine's byte order.
    """
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    return ip_address(struct.pack(f"={len(words)}I", *words))


def listening_inodes(port: int) -> dict[str, int]:
    """Return the sockets that listen on a TCP port, as a mapping from inode to the owner's uid.

    Raises:
        OSError: The kernel's table of TCP sockets cannot be read.
    """
    with SocketTable() as table:
        return table.listeners(port)


def list_sockets(pid: int, proc: str = "/proc") -> dict[int, str]:
    """Return the inodes of the sockets that a process has open.

    Returns:
        Mapping from each file descriptor of a socket in that process to the inode of the socket.
        Empty if the process has ended or belongs to another user.

    Raises:
        OSError: /proc cannot be read, for example because this process has too many open files.
    """
    files = list_open_files(pid, proc).items()
    return {fd: target[8:-1] for fd, target in files if target.startswith("socket:[")}


def describe_connections(pid: int, proc: str = "/proc") -> list[str]:
    """Return a line about each TCP socket that a process has open, sorted by file descriptor.

    Examples: `fd 3 127.0.0.1:8000 LISTEN`, and `fd 4 127.0.0.1:41000 -> 127.0.0.1:80 ESTABLISHED`.

    Raises:
        OSError: The sockets of the process or the kernel's table cannot be read.
    """
    inodes = list_sockets(pid, proc)
    if not inodes:
        return []
    rows = {row[9]: row for family in _FAMILIES for row in _read_table(family)}
    lines = []
    for fd, inode in sorted(inodes.items()):
        if (row := rows.get(inode)) is None:
            continue  # a socket of another kind, for example a Unix socket
        state = int(row[3], 16)
        name = _STATE_NAMES[state] if state < len(_STATE_NAMES) else str(state)
        ends = row[1:2] if state == _STATE_LISTEN else row[1:3]
        lines.append(f"fd {fd} {' -> '.join(map(_describe_end, ends))} {name}")
    return lines


def _describe_end(text: str) -> str:
    """Return an address and a port of `/proc/net/tcp` as a text such as `127.0.0.1:80`."""
    address, _, port = text.partition(":")
    return f"{_parse_address(address)}:{int(port, 16)}"


def find_open_inodes(pids: Iterable[int], wanted: Iterable[str]) -> set[str]:
    """Return the inodes from `wanted` whose sockets are open in at least one of the processes.

    Raises:
        OSError: /proc cannot be read, for example because this process has too many open files.
    """
    missing = set(wanted)
    held: set[str] = set()
    for pid in pids:
        if not missing:
            break
        held_by_pid = missing.intersection(list_sockets(pid).values())
        held |= held_by_pid
        missing -= held_by_pid
    return held


def verified_listeners(
    host: str,
    port: int,
    tree: Callable[[], Sequence[int]],
    known: frozenset[str] = frozenset(),
) -> tuple[frozenset[str], str]:
    """Check that every socket that listens at an address belongs to one process tree.

    Args:
        host: The address.
        port: The port.
        tree: Returns the pids of the tree's current processes.
        known: Inodes of sockets that an earlier check has found in the tree.

    Returns:
        `(inodes, problem)`: the inodes of the listening sockets and an empty text. If a socket
        belongs to a process outside the tree, no inodes and a text that names this process.

    Raises:
        OSError: The kernel's table of TCP sockets cannot be read.
    """
    with SocketTable() as table:
        users = table.listeners(port, host)
        foreign = users.keys() - known
        # Compare the list of sockets with the list of processes twice, because the lists are not
        # from the same moment. In between, a process may have started, or a socket may have been
        # closed.
        for _ in range(2):
            foreign -= find_open_inodes(tree(), foreign)
            if not foreign:
                break
            users = table.listeners(port, host)
            foreign &= users.keys()
    if not foreign:
        return frozenset(users), ""
    user = users[min(foreign)]
    return frozenset(), f"port {port} is taken by {_describe_holder(user, foreign)}"


def _describe_holder(user: int, inodes: Iterable[str]) -> str:
    """Return a description of the process that has one of the sockets open.

    The description names the user of the process, and its pid if the calling user can see the
    process.

    Args:
        user: Uid of the process.
        inodes: Inodes of the sockets.
    """
    try:
        name = f"{pwd.getpwuid(user).pw_name} ({user})"
    except KeyError:
        name = str(user)
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        if find_open_inodes([pid], inodes):
            return f"a process of user {name}: pid {pid} ({read_command_line(pid)[:200]})"
    return f"a process of user {name}"
