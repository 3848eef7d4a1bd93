"""Files that a run's programs write, as they grow: figures, a JSON object a line, and logs.

The one reader of figures: the verdict, the progress and the curve have the same of them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from tasks.record.outcome import Recorded

#: A file that grows faster than it is looked at is read in pieces of this size.
_PIECE_BYTES = 1 << 22
#: Of a file of figures, so much at each end tells it from another one.
_ENDS_BYTES = 256
#: What is remembered of what was read last of a log.
_TAIL_BYTES = 64


class Mark(Recorded):
    """A file as it was at one moment, by which it is told from another one later.

    No clock is asked: that of a file system may be another machine's.
    """

    #: 0: there was none. The device has no number that all hosts of a network file system share.
    inode: int = 0
    #: How long it was, and of what stood at both its ends.
    length: int = 0
    digest: str = ""

    @staticmethod
    def of(path: Path) -> Mark:
        """As it is now."""
        with suppress(OSError), path.open("rb") as f:
            return Mark.at(f, os.fstat(f.fileno()).st_size)
        return Mark()

    @staticmethod
    def at(f: BinaryIO, length: int) -> Mark:
        """As it was when it was so long."""
        count = min(length, _ENDS_BYTES)
        f.seek(0)
        head = f.read(count)
        f.seek(length - count)
        digest = hashlib.sha256(head + f.read(count)).hexdigest()[:16]
        return Mark(inode=os.fstat(f.fileno()).st_ino, length=length, digest=digest)


class MetricsFile:
    """Reads what was added since the last look, lines of any length.

    A file that was written anew, or replaced by another one, is read from its beginning: it is told
    by its inode, and by what was read of it.
    """

    def __init__(self, path: Path, *, since: Mark | None = None) -> None:
        """
        Args:
            since: what was there then is left out: it tells of an earlier attempt.
        """
        self.path = path
        #: How often the file was begun anew: what was read before then is not in it.
        self.begun = 0
        #: There is more than the last look has read.
        self.is_behind = False
        self._read, self._is_known = since or Mark(), False
        #: What was read of a line without its end.
        self._partial = b""

    def look(self) -> list[dict[str, Any]]:
        """The objects that were added; none of a file that is not there.

        The last line needs no end, since a part of an object is no JSON; it comes again then.
        """
        try:
            with self.path.open("rb") as f:
                if Mark.at(f, self._read.length) != self._read:
                    self.begun += self._is_known
                    self._read, self._partial = Mark(), b""
                self._is_known = True
                f.seek(self._read.length)
                data = f.read(_PIECE_BYTES)
                self._read = Mark.at(f, self._read.length + len(data))
        except OSError:
            self.is_behind = False
            return []
        self.is_behind = len(data) == _PIECE_BYTES
        if not data:
            return []  # What was a last line without its end has been told.
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [figures for line in (*lines, self._partial) if (figures := _parsed(line))]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


class _Opened:
    """One file, whatever it is called by now; of it the lines that were not read yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.file = FileIO(path)
        stat = os.fstat(self.file.fileno())
        self.number = stat.st_dev, stat.st_ino
        self._at = 0
        #: What was read last: a file that was cut and has grown beyond it reads otherwise there.
        self._tail = b""
        #: What was read and not given out: of a line without its end.
        self.pending = b""

    def take(self) -> None:
        """Read what is new."""
        copied, read = b"", self._read(self.file)
        if read is None:
            for copy in _copies(self._path):
                with suppress(OSError), FileIO(copy) as file:
                    # What it got between the last look and the moment it was copied and cut.
                    if (found := self._read(file)) is not None:
                        copied = found
                        break
            self._at, self._tail = 0, b""
            read = self._read(self.file) or b""
        self._at, self._tail = self._at + len(read), (self._tail + read)[-_TAIL_BYTES:]
        self.pending += copied + read

    def look(self, *, is_last: bool) -> list[str]:
        self.take()
        *lines, self.pending = self.pending.split(b"\n")
        if is_last:
            self.file.close()
            lines += filter(None, [self.pending])
        return [line.removesuffix(b"\r").decode("utf-8", errors="replace") for line in lines]

    def _read(self, file: FileIO) -> bytes | None:
        """What comes after what was read; None of a file that reads otherwise there."""
        start, known = self._at - len(self._tail), len(self._tail)
        file.seek(start)
        data = file.read()
        file.seek(start)
        # It may have been cut, and have grown beyond that, while it was read.
        begins = file.read(known + _TAIL_BYTES).startswith(data[: known + _TAIL_BYTES])
        return data[known:] if begins and data.startswith(self._tail) else None


def _copies(log: Path) -> list[Path]:
    """What a log was rotated to: `trainer.log.1`, `trainer.log-20260102`; the youngest first."""
    found = {}
    for path in log.parent.glob(f"{log.name}[.-]*"):
        with suppress(OSError):
            if path.suffix != ".gz":
                found[path] = path.stat().st_mtime
    return sorted(found, key=lambda path: -found[path])


class LogFile:
    """Reads the lines that a log has got since the last look; none is lost or comes twice when it
    is rotated, be it moved away, and another one begun, or copied and cut."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: dict[tuple[int, int], _Opened] = {}
        self._is_begun = False

    def look(self, *, is_last: bool = False) -> Iterator[str]:
        """
        Args:
            is_last: nothing more is written, so that the last line needs no end.
        """
        if not self._is_begun:
            self._begin()
        self._open(self._path)
        # Whoever wrote to one that was moved may still do so, and end a line that is begun there.
        for opened in self._opened.values():
            yield from opened.look(is_last=is_last)

    def _begin(self) -> None:
        """What was rotated before anything was read comes first, but for copies of the log itself,
        which is read before they are looked for and after: none of them is cut yet, or was then."""
        self._open(self._path)
        here, self._opened = self._opened, {}
        for log in here.values():
            log.take()
        for copy in reversed(_copies(self._path)):
            self._open(copy)
        for one in (*self._opened.values(), *here.values()):
            one.take()
        for number, one in [*self._opened.items()]:
            if any(log.pending.startswith(one.pending) for log in here.values()):
                self._opened.pop(number).file.close()
        self._opened |= here
        self._is_begun = any(one.pending for one in self._opened.values())

    def _open(self, path: Path) -> None:
        with suppress(OSError):
            opened = _Opened(path)
            if self._opened.setdefault(opened.number, opened) is not opened:
                opened.file.close()
