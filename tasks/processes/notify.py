"""The sd_notify socket: a component says itself that it is ready."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable

from tasks.processes import tree

_CREDENTIALS = struct.Struct("3i")


class NotifySocket:
    """Receives `READY=1` from processes of one component.

    It lives in the abstract namespace, so it leaves no file. Anyone on the machine can send to
    such a name, hence the sender's kernel-given pid is checked.

    Source: sd_notify(3); SCM_CREDENTIALS in unix(7).
    """

    def __init__(self, is_ours: Callable[[int], bool]) -> None:
        """
        Args:
            is_ours: whether a pid belongs to the component.
        """
        self._is_ours = is_ours
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)
        name = f"muster/notify/{os.getpid()}/{os.urandom(8).hex()}"
        self._socket.bind(f"\0{name}")
        #: What the component gets as NOTIFY_SOCKET.
        self.address = f"@{name}"
        #: Its last STATUS= line.
        self.status = ""
        self.is_ready = False

    def receive(self) -> None:
        """Take in what has arrived."""
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(12))
            except BlockingIOError:
                return
            except OSError:
                return
            if not self._is_genuine(ancillary):
                continue
            for line in data.decode("utf-8", errors="replace").splitlines():
                key, _, value = line.partition("=")
                if key == "READY" and value == "1":
                    self.is_ready = True
                elif key == "STATUS":
                    self.status = value

    def _is_genuine(self, ancillary: list[tuple[int, int, bytes]]) -> bool:
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                pid, uid, _ = _CREDENTIALS.unpack(content[: _CREDENTIALS.size])
                # `systemd-notify` has often left by now; then its user must do.
                is_gone = tree.parent_of(pid) == 0
                return self._is_ours(pid) or (is_gone and uid == os.getuid())
        return False

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
