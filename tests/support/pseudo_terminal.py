"""A pseudo-terminal in which a test starts a process and reads the text on its screen."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import threading
from typing import Any

from tests.support.emulator import Emulator

#: Key with which a person stops the output of a terminal: Ctrl-S.
STOP_KEY = b"\x13"
#: Key with which a person resumes the output of a terminal: Ctrl-Q.
GO_KEY = b"\x11"


class PseudoTerminal:
    """A pseudo-terminal. A thread reads all of its output until the terminal is closed."""

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        """
        Args:
            columns: Width of the terminal in characters.
            lines: Height of the terminal in lines.
        """
        self._master, self._slave = os.openpty()
        self._columns = columns
        self._written = b""
        self.resize(columns, lines)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def as_stdio(self) -> dict[str, Any]:
        """Return the arguments of `subprocess.Popen` that start a process in this terminal.

        Pass `start_new_session=True`, too, and call `started` after the process has started.
        """

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self._slave)
        return {**streams, "preexec_fn": take_terminal}

    def close_device(self) -> None:
        """Close the test process's copy of the terminal device.

        Call this method after a process was started in the terminal. Without this call, the output
        would not end when the last process in the terminal has ended.
        """
        os.close(self._slave)

    def resize(self, columns: int, lines: int) -> None:
        """Change the size of the terminal; its processes receive SIGWINCH."""
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def press(self, key: bytes) -> None:
        """Send the bytes of a key to the terminal."""
        os.write(self._master, key)

    def emulator(self) -> Emulator:
        """Return a terminal emulator that has received all output up to now."""
        emulator = Emulator(self._columns)
        emulator.write(self._written.decode(errors="replace"))
        return emulator

    def text(self) -> str:
        """Return the text of the terminal, with the lines that have scrolled out of the screen."""
        return self.emulator().text

    @property
    def written(self) -> str:
        """All output up to now, with its escape sequences."""
        return self._written.decode(errors="replace")

    def wait_until_read(self, within_s: float = 30.0) -> None:
        """Wait until the last process in the terminal has ended and all output is read.

        Return after `within_s` seconds even if a process still runs.
        """
        self._thread.join(within_s)

    def close(self) -> None:
        """Close the terminal. The leader of the session in the terminal receives SIGHUP."""
        os.close(self._master)

    def _read(self) -> None:
        """Read the output of the terminal until its end. The reader thread runs this method."""
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return
            if not data:
                return
            self._written += data
