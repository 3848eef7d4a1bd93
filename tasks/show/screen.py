"""Where a run is shown: lines that scroll and, on a terminal, a region under them that is drawn
anew. Rich makes the text, and what is written is one write a frame.

What others print meanwhile is made lines of it: a library's warning, a traceback of a thread and
Prefect's log would else be written into the region, and be erased with it.
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
#: A terminal with fewer lines shows no region.
_LINES_AT_LEAST = 5
_TRY_AGAIN_S = 1.0


def draws(is_terminal: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether colours and a region are wanted: on a terminal that nobody has asked to be plain."""
    if environ.get("NO_COLOR") or environ.get("CI", "").lower() not in ("", "0", "false"):
        return False
    return is_terminal and environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def writer_to(fd: int, encoding: str = "utf-8") -> Callable[[str], object]:
    """What writes to standard output without Python's buffer.

    A terminal that is stopped holds whoever writes to it for as long as it likes. The thread that
    is left behind in that would hold the buffer's lock too, for want of which the interpreter
    aborts at its exit.
    """

    def write(text: str) -> None:
        left = memoryview(text.encode(encoding, "replace"))
        while left:
            try:
                left = left[os.write(fd, left) :]
            except BlockingIOError:  # Whoever shares the terminal has made it so.
                poll = select.poll()
                poll.register(fd, select.POLLOUT)
                poll.poll(_TRY_AGAIN_S * 1000)

    return write


class Screen:
    """Lines that scroll, and a region under them. Used by one thread at a time.

    When nobody can read it any more it shows nothing, and says so by `is_gone`.
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
            write: may raise OSError or ValueError, when nobody can read it any more.
            is_live: it takes colours, and has a cursor that can be moved.
            size: of the terminal, as it is now.
        """
        self.is_live = is_live
        self.is_gone = False
        self._write = write
        self.size = size
        # A line is left whole, so that it can be copied.
        self._console = SafeConsole(
            file=io.StringIO(),
            force_terminal=is_live,
            color_system="auto" if is_live else None,
            soft_wrap=True,
        )
        #: Of the lines of the region that stands there.
        self._widths: list[int] = []

    @staticmethod
    def of_stdout() -> Screen:
        """Standard output; one that was closed shows nothing."""
        try:
            fd = sys.stdout.fileno()
            # What was printed before comes before.
            sys.stdout.flush()
        except (AttributeError, OSError, ValueError):
            # It was closed, or is no file, as under a test.
            return Screen((sys.stdout or io.StringIO()).write, is_live=False)
        write = writer_to(fd, sys.stdout.encoding)
        return Screen(write, is_live=draws(os.isatty(fd)), size=lambda: _size_of(fd))

    def show(self, lines: Iterable[Text], region: RenderableType | None = None) -> None:
        """Add lines, and draw the region anew; without a region there is none."""
        if self.is_gone:
            return
        rows = self._rows(region) if region is not None else []
        with self._console.capture() as captured:
            for line in lines:
                self._console.print(line)
            self._console.print(SegmentLines(rows, new_lines=True), end="")
        frame = self._erased() + captured.get()
        self._widths = [Segment.get_line_length(row) for row in rows]
        if not frame:
            return
        try:
            self._write(frame)
        except (OSError, ValueError):
            # The reader is gone, the terminal, or the file: the run goes on.
            self.is_gone = True

    def _rows(self, region: RenderableType) -> list[list[Segment]]:
        """As much of a region as there is room for, the last of it."""
        columns, height = self.size()
        if not self.is_live or height < _LINES_AT_LEAST:
            return []
        options = self._console.options.update(width=max(1, columns - 1), height=None)
        rows, room = self._console.render_lines(region, options, pad=False), height - 2
        return rows if len(rows) <= room else [[Segment("...")], *rows[1 - room :]]

    def _erased(self) -> str:
        """What takes the region away that stands there.

        In a terminal that has become narrower since, its lines take more rows than before.
        """
        if not self._widths:
            return ""
        columns, _ = self.size()
        rows = sum(max(1, -(-width // columns)) for width in self._widths)
        return f"\r\x1b[{rows}A{_ERASE_BELOW}"


def _size_of(fd: int) -> os.terminal_size:
    """Whatever COLUMNS says, which is as old as the shell that has exported it."""
    try:
        size = os.get_terminal_size(fd)
    except OSError:
        return _UNKNOWN_SIZE
    # A terminal that nobody has told its size says 0.
    return size if size.columns > 0 and size.lines > 0 else _UNKNOWN_SIZE


class ForeignLines(io.TextIOBase):
    """Stands for standard output and error of this process, as far as they are a terminal. Hands
    whole lines to `say`, which returns at once; safe from any thread."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.RLock()
        self._rest = ""
        self._undo = ExitStack()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                if line.strip():
                    self._say(line)
        return len(text)

    def take_over(self) -> None:
        """From now until `give_back`, lines that others print come here."""
        for name in ("stdout", "stderr"):
            stream: TextIO | None = getattr(sys, name)
            if stream is not None and _is_terminal(stream):
                replace_stream(name, self, self._undo)

    def give_back(self) -> None:
        """All is as it was; any number of times."""
        self._undo.close()
        self.write("\n" if self._rest else "")


def _is_terminal(stream: TextIO) -> bool:
    with suppress(ValueError, OSError):
        return stream.isatty()
    return False
