"""What a supervisor and a guardian say to each other, at the guardian's end: JSON lines.

Stdlib only, and light to import, as the guardian.
"""

from __future__ import annotations

# The socket module, which is made of this one, takes longer to import than all the rest.
import _socket
import contextlib
import json
import os
import select
import struct
import time


class Order:
    """What to start and how to stop it, as the supervisor sends it.

    `argv` (list of str), `env` (the whole environment), `cwd`, `log` (appended to), `stop_signal`
    (a number), `grace_s` (from that signal to SIGKILL), `cgroup` (a cgroup v2 directory to put it
    into, or None).
    """

    def __init__(self, message: dict) -> None:  # type: ignore[type-arg]
        self.argv: list[str] = message["argv"]
        self.env: dict[str, str] = message["env"]
        self.cwd: str = message["cwd"]
        self.log: str = message["log"]
        self.stop_signal: int = message["stop_signal"]
        self.grace_s: float = message["grace_s"]
        self.cgroup: str | None = message["cgroup"]


class Channel:
    """JSON lines over a file descriptor; the peer's end closing is its message too."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._socket = _socket.socket(fileno=fd)
        self._buffer = b""
        os.set_inheritable(fd, False)

    def receive(self) -> tuple[list[dict], bool]:  # type: ignore[type-arg]
        """The messages that have arrived, and whether the peer is still there. Blocks for one."""
        try:
            data = os.read(self.fd, 65536)
        except ConnectionError:
            data = b""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines], bool(data)

    def send(self, event: str, pidfd: int = -1, **fields: object) -> None:
        message = {"event": event, "at_monotonic_s": time.monotonic(), **fields}
        line = json.dumps(message).encode() + b"\n"
        fds = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", pidfd))]
        # A supervisor that is gone is noticed by the loop, which goes on to end the tree.
        with contextlib.suppress(OSError):
            self._socket.sendmsg([line], fds if pidfd >= 0 else [])


def first_messages(channel: Channel, supervisor: int) -> list[dict]:  # type: ignore[type-arg]
    """What the supervisor says next; nothing when it has gone, or has no more to say."""
    poll = select.poll()
    poll.register(channel.fd, select.POLLIN)
    poll.register(supervisor, select.POLLIN)
    messages: list[dict] = []  # type: ignore[type-arg]
    connected = True
    while connected and not messages:
        if supervisor in dict(poll.poll()):
            return []
        messages, connected = channel.receive()
    return messages
