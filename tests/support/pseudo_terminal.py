"""A terminal for a process of a test, and what stands there."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import threading
from typing import Any

from tests.support.emulator import Emulator

#: What a person presses to stop the output, and to have it go on.
STOP_KEY, GO_KEY = b"\x13", b"\x11"


class PseudoTerminal:
    """Of a size, until it is closed. It is read all the time, by a thread."""

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        self._master, self._slave = os.openpty()
        self._columns = columns
        self._written = b""
        self.resize(columns, lines)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def as_stdio(self) -> dict[str, Any]:
        """What `subprocess.Popen` is told, beside `start_new_session`, to start a process on it;
        `started` follows."""

        def take() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self._slave)
        return {**streams, "preexec_fn": take}

    def started(self) -> None:
        """From now on it ends with the last process on it."""
        os.close(self._slave)

    def resize(self, columns: int, lines: int) -> None:
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def emulator(self) -> Emulator:
        """All that was written until now, as it would stand there."""
        made = Emulator(self._columns)
        made.write(self._written.decode(errors="replace"))
        return made

    def text(self) -> str:
        return self.emulator().text

    @property
    def written(self) -> str:
        """All of it, with what a terminal does not show."""
        return self._written.decode(errors="replace")

    def until_read(self, within_s: float = 30.0) -> None:
        """Wait until the last process on it has ended and all is read."""
        self._thread.join(within_s)

    def close(self) -> None:
        """Hang up: SIGHUP to whoever leads the session on it."""
        os.close(self._master)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return
            if not data:
                return
            self._written += data
