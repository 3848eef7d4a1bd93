"""Serve a file system in memory through FUSE: `python fuse_server.py MOUNT_POINT`.

The file system has regular files and folders. A test stops this program with SIGSTOP: all calls to
the file system then block, as with a network file system whose server is down. The program needs
root's rights to mount the file system. It prints one line when the file system is mounted.

Source: include/uapi/linux/fuse.h of Linux, protocol 7.31.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field

# Operation codes of the FUSE protocol.
LOOKUP, FORGET, GETATTR, SETATTR = 1, 2, 3, 4
MKDIR, UNLINK, RMDIR, RENAME = 9, 10, 11, 12
OPEN, READ, WRITE, STATFS, RELEASE, FSYNC = 14, 15, 16, 17, 18, 20
FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR = 25, 26, 27, 28, 29
ACCESS, CREATE, INTERRUPT, BATCH_FORGET, RENAME2 = 34, 35, 36, 42, 45

_IN_HEADER = struct.Struct("<IIQQIIII")
#: Flag in the answer to OPEN. With this flag, the kernel does not cache the content of the file, so
#: each read reaches this program.
_DIRECT_IO = 1
#: Bit in a SETATTR request which says that the request changes the size of the file.
_SIZE_CHANGES = 1 << 3


class Refused(Exception):
    """Raised to reject an operation on the file system.

    The argument of the exception is the errno value for the calling program.
    """


@dataclass
class Node:
    """A file or folder of the file system in memory."""

    number: int
    mode: int
    content: bytearray = field(default_factory=bytearray)
    children: dict[bytes, Node] = field(default_factory=dict)
    changed_at: float = field(default_factory=time.time)

    def attributes(self) -> bytes:
        """Return the `struct fuse_attr` of the file."""
        size = len(self.content)
        seconds = int(self.changed_at)
        nanoseconds = int((self.changed_at - seconds) * 1e9)
        times = struct.pack("<QQQIII", *[seconds] * 3, *[nanoseconds] * 3)
        head = struct.pack("<QQQ", self.number, size, (size + 511) // 512)
        return head + times + struct.pack("<IIIIIII", self.mode, 1, 0, 0, 0, 4096, 0)


class Server:
    """Answers the requests that the kernel sends for the mounted FUSE file system."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._nodes = {1: Node(1, stat.S_IFDIR | 0o755)}

    def serve(self) -> None:
        """Answer the kernel's FUSE requests until the file system is unmounted."""
        while True:
            try:
                request = os.read(self._device, 1 << 20)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    # The program that sent the request has been killed.
                    continue
                raise
            _, code, unique, node, *_ = _IN_HEADER.unpack_from(request)
            if code in (FORGET, BATCH_FORGET, INTERRUPT):
                continue
            number, answer = 0, b""
            try:
                answer = self._answer(code, node, request[_IN_HEADER.size :])
            except Refused as refusal:
                number = -refusal.args[0]
            head = struct.pack("<IiQ", 16 + len(answer), number, unique)
            # ENOENT: the program that sent the request was killed before this answer.
            with suppress(FileNotFoundError):
                os.write(self._device, head + answer)

    def _answer(self, code: int, number: int, body: bytes) -> bytes:
        if code == INIT:
            return struct.pack("<IIIIHHIIHHIIIIII", 7, 31, 0, 0, 12, 9, 1 << 16, 1, 0, 0, *[0] * 6)
        node = self._nodes.get(number)
        if node is None:
            raise Refused(errno.ENOENT)
        match code:
            case 1:  # LOOKUP
                return self._entry(self._child(node, body.rstrip(b"\0")))
            case 3:  # GETATTR
                return struct.pack("<QII", 0, 0, 0) + node.attributes()
            case 4:  # SETATTR
                (valid,) = struct.unpack_from("<I", body)
                if valid & _SIZE_CHANGES:
                    (size,) = struct.unpack_from("<Q", body, 16)
                    node.content = (node.content + bytes(max(0, size - len(node.content))))[:size]
                return struct.pack("<QII", 0, 0, 0) + node.attributes()
            case 9:  # MKDIR
                (mode,) = struct.unpack_from("<I", body)
                return self._entry(self._make(node, body[8:], stat.S_IFDIR | mode))
            case 10 | 11:  # UNLINK, RMDIR
                node.children.pop(body.rstrip(b"\0"), None)
                return b""
            case 12 | 45:  # RENAME, RENAME2
                (target,) = struct.unpack_from("<Q", body)
                old, new, *_ = body[8 if code == RENAME else 16 :].split(b"\0")
                self._nodes[target].children[new] = self._child(node, old)
                del node.children[old]
                return b""
            case 14 | 27:  # OPEN, OPENDIR
                return struct.pack("<QII", 0, _DIRECT_IO if code == OPEN else 0, 0)
            case 35:  # CREATE
                _, mode = struct.unpack_from("<II", body)
                made = self._make(node, body[16:], stat.S_IFREG | (mode & 0o777))
                return self._entry(made) + struct.pack("<QII", 0, _DIRECT_IO, 0)
            case 15:  # READ
                _, offset, size = struct.unpack_from("<QQI", body)
                return bytes(node.content[offset : offset + size])
            case 16:  # WRITE
                _, offset, size = struct.unpack_from("<QQI", body)
                node.content[offset : offset + size] = body[40 : 40 + size]
                node.changed_at = time.time()
                return struct.pack("<II", size, 0)
            case 28:  # READDIR
                _, offset, size = struct.unpack_from("<QQI", body)
                return self._list(node, offset, size)
            case 17:  # STATFS
                free_blocks = 1 << 19
                sizes = (2 * free_blocks, free_blocks, free_blocks, 99, 9)
                return struct.pack("<QQQQQIIII24x", *sizes, 4096, 255, 4096, 0)
            case 18 | 20 | 29 | 34:  # RELEASE, FSYNC, RELEASEDIR, ACCESS
                return b""
        # Reject all other operations, such as FLUSH, with ENOSYS. After this answer to FLUSH, the
        # kernel no longer sends FLUSH when a program closes a file. So a program can close its
        # files and end while a test has suspended this server.
        raise Refused(errno.ENOSYS)

    def _child(self, folder: Node, name: bytes) -> Node:
        if name not in folder.children:
            raise Refused(errno.ENOENT)
        return folder.children[name]

    def _make(self, folder: Node, name: bytes, mode: int) -> Node:
        node = Node(max(self._nodes) + 1, mode)
        self._nodes[node.number] = node
        folder.children[name.rstrip(b"\0")] = node
        return node

    def _entry(self, node: Node) -> bytes:
        """Return the `struct fuse_entry_out` of a file.

        The cache timeouts in the struct are 0, so that the kernel caches no names and no sizes.
        """
        return struct.pack("<QQQQII", node.number, 0, 0, 0, 0, 0) + node.attributes()

    def _list(self, folder: Node, offset: int, size: int) -> bytes:
        listing = b""
        for position, (name, node) in enumerate([*folder.children.items()][offset:], offset + 1):
            head = struct.pack("<QQII", node.number, position, len(name), node.mode >> 12)
            entry = head + name + bytes(-len(name) % 8)
            if len(listing) + len(entry) > size:
                break
            listing += entry
        return listing


def mount(point: str) -> int:
    """Mount a FUSE file system; return the file descriptor from which the requests are read.

    Raises:
        OSError: The file system cannot be mounted.
    """
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"test", point.encode(), b"fuse.test", 6, options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{point} cannot be mounted: {os.strerror(number)}")
    return device


if __name__ == "__main__":
    server = Server(mount(sys.argv[1]))
    print("mounted", flush=True)
    server.serve()
