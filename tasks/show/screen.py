"""Write scrolling lines to standard output and, on a terminal, redraw a status area below them.

The status area is the last lines of the terminal, which are erased and drawn again at each change.
In the code it is called `region`. Rich formats the text. New lines and the status area are written
with a single write.

While the status area is shown, other code may print as well: warnings of libraries, tracebacks of
threads, Prefect's log. `ForeignLines` turns this output into scrolling lines. Otherwise the output
would be written into the status area, and would be erased with it.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import TextIO

from rich.console import RenderableType
from rich.segment import Segment, SegmentLines
from rich.text import Text

from tasks.show.output import SafeConsole, replace_stream

_ERASE_BELOW = "\x1b[J"
_UNKNOWN_SIZE = os.terminal_size((80, 24))
#: Smallest height, in lines, of a terminal with a status area. The status area consists of the last
#: lines of the terminal, which are redrawn at each change.
_MIN_LINES = 5
#: If a terminal accepts no more output, the next write is tried after at most this number of
#: seconds.
_RETRY_AFTER_S = 1.0


def can_draw(is_terminal: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if the output may contain colours and a status area that is redrawn.

    This is the case on a terminal, unless the environment variable NO_COLOR, CI or TERM forbids it.
    """
    if environ.get("NO_COLOR") or environ.get("CI", "").lower() not in ("", "0", "false"):
        return False
    return is_terminal and environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def make_writer(fd: int, encoding: str = "utf-8") -> Callable[[str], object]:
    """Return a function that writes text directly to a file descriptor, without a buffer.

    If the user stops the terminal, for example with Ctrl-S, each write blocks. A blocked write
    through `sys.stdout` would hold the lock of the buffer. At the end of the process, Python
    would then abort, because it needs this lock.
    """

    def write(text: str) -> None:
        remaining = memoryview(text.encode(encoding, "replace"))
        while remaining:
            try:
                remaining = remaining[os.write(fd, remaining) :]
            except BlockingIOError:
                # The terminal accepts no output now, and another process has set it to non-blocking
                # mode. So wait here until the terminal accepts more output.
                poll = select.poll()
                poll.register(fd, select.POLLOUT)
                poll.poll(_RETRY_AFTER_S * 1000)

    return write


class Screen:
    """Shows scrolling lines and, below them, a status area that is redrawn at each change.

    Only one thread may use a screen at a time.

    If a write fails, for example because the terminal was closed, `is_gone` becomes True. The
    screen then writes nothing more.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        *,
        is_live: bool,
        size: Callable[[], os.terminal_size] = lambda: _UNKNOWN_SIZE,
    ) -> None:
        """
        Args:
            write: Function that writes text to the output. It raises OSError or ValueError if the
                output was closed.
            is_live: True if the output accepts colours and cursor movements.
            size: Function that returns the current size of the terminal.
        """
        #: True if the output accepts colours and cursor movements.
        self.is_live = is_live
        #: True if the output was closed.
        self.is_gone = False
        self._write = write
        #: Function that returns the current size of the terminal.
        self.size = size
        # With `soft_wrap`, Rich does not break long lines. The user can copy a line as a whole.
        self._console = SafeConsole(
            file=io.StringIO(),
            force_terminal=is_live,
            color_system="auto" if is_live else None,
            soft_wrap=True,
        )
        #: Width in columns of each line of the status area as it was drawn last.
        self._widths: list[int] = []

    @staticmethod
    def of_stdout() -> Screen:
        """Return a screen for standard output. It shows nothing if standard output is closed."""
        try:
            fd = sys.stdout.fileno()
            # Write the buffered text of standard output now. The screen does not use this buffer,
            # so this text would otherwise appear after the first line of the screen.
            sys.stdout.flush()
        except (AttributeError, OSError, ValueError):
            # Standard output is closed, or has no file descriptor because a test has replaced it.
            return Screen((sys.stdout or io.StringIO()).write, is_live=False)
        write = make_writer(fd, sys.stdout.encoding)
        return Screen(write, is_live=can_draw(os.isatty(fd)), size=lambda: _terminal_size(fd))

    def show(self, lines: Iterable[Text], region: RenderableType | None = None) -> None:
        """Print lines, and redraw the status area below them.

        Args:
            lines: New scrolling lines.
            region: New content of the status area, or None to remove the status area.
        """
        if self.is_gone:
            return
        rows = self._rows(region) if region is not None else []
        with self._console.capture() as captured:
            for line in lines:
                self._console.print(line)
            self._console.print(SegmentLines(rows, new_lines=True), end="")
        frame = self._erase_sequence() + captured.get()
        self._widths = [Segment.get_line_length(row) for row in rows]
        if not frame:
            return
        try:
            self._write(frame)
        except (OSError, ValueError):
            # The terminal or the pipe was closed. The run continues without output.
            self.is_gone = True

    def _rows(self, region: RenderableType) -> list[list[Segment]]:
        """Return the status area as lines for the terminal.

        If the terminal has too few lines, the result is a line `...` followed by the last lines of
        the status area.
        """
        columns, height = self.size()
        if not self.is_live or height < _MIN_LINES:
            return []
        options = self._console.options.update(width=max(1, columns - 1), height=None)
        rows = self._console.render_lines(region, options, pad=False)
        max_rows = height - 2
        return rows if len(rows) <= max_rows else [[Segment("...")], *rows[1 - max_rows :]]

    def _erase_sequence(self) -> str:
        """Return the escape sequence that erases the status area.

        The number of rows depends on the current width of the terminal: on a narrower terminal, the
        lines of the status area are wrapped into more rows.
        """
        if not self._widths:
            return ""
        columns, _ = self.size()
        rows = sum(max(1, -(-width // columns)) for width in self._widths)
        return f"\r\x1b[{rows}A{_ERASE_BELOW}"


def _terminal_size(fd: int) -> os.terminal_size:
    """Return the current size of the terminal.

    The environment variable COLUMNS is ignored, because it has the old size after a resize.
    """
    try:
        size = os.get_terminal_size(fd)
    except OSError:
        return _UNKNOWN_SIZE
    # The size is 0 on a new pseudo-terminal until a program sets it.
    return size if size.columns > 0 and size.lines > 0 else _UNKNOWN_SIZE


class ForeignLines(io.TextIOBase):
    """A stream that collects the lines that other code prints while the status area is shown.

    The stream replaces standard output and standard error if these are a terminal. Any thread may
    write to the stream.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """
        Args:
            say: Function that is called with each printed line that is not blank. The function must
                not block.
        """
        self._say = say
        self._lock = threading.RLock()
        self._incomplete_line = ""
        self._restore_streams = ExitStack()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._incomplete_line = (self._incomplete_line + text).split("\n")
            for line in lines:
                if line.strip():
                    self._say(line)
        return len(text)

    def take_over(self) -> None:
        """Replace standard output and standard error until `give_back` is called."""
        for name in ("stdout", "stderr"):
            stream: TextIO | None = getattr(sys, name)
            if stream is not None and _is_terminal(stream):
                replace_stream(name, self, self._restore_streams)

    def give_back(self) -> None:
        """Restore standard output and standard error. A second call has no effect.

        If the last printed line has no newline yet, the line is shown now.
        """
        self._restore_streams.close()
        self.write("\n" if self._incomplete_line else "")


def _is_terminal(stream: TextIO) -> bool:
    with suppress(ValueError, OSError):
        return stream.isatty()
    return False
