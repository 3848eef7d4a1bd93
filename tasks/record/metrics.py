"""The figures that a training writes, as they grow: a file of JSON objects, one a line.

The one reader of such a file: the verdict, the progress and the curve have the same of it.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

#: A file that grows faster than it is looked at is read in pieces of this size.
_PIECE_BYTES = 1 << 22


class MetricsFile:
    """Reads what was added since the last look, lines of any length.

    A file that was truncated, or replaced by another (it has another inode), is read from its
    beginning: no clock tells the old one from the new one, since it may be another machine's.
    """

    def __init__(self, path: Path, *, from_now: bool = False) -> None:
        """
        Args:
            from_now: leave out what is there already: it tells of an earlier attempt.
        """
        self.path = path
        #: How often the file was begun anew: what was read before then is not in it.
        self.begun = 0
        #: There is more than the last look has read.
        self.is_behind = False
        self._inode = 0
        self._read_bytes = 0
        #: What was read of a line without its end.
        self._partial = b""
        if from_now:
            with suppress(OSError):
                stat = path.stat()
                self._inode, self._read_bytes = stat.st_ino, stat.st_size

    def look(self) -> list[dict[str, Any]]:
        """The objects that were added; none of a file that is not there.

        The last line needs no end, since a part of an object is no JSON; it comes again then.
        """
        try:
            with self.path.open("rb") as f:
                stat = os.fstat(f.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._read_bytes:
                    self.begun += bool(self._inode)
                    self._inode, self._read_bytes = stat.st_ino, 0
                    self._partial = b""
                f.seek(self._read_bytes)
                data = f.read(_PIECE_BYTES)
        except OSError:
            self.is_behind = False
            return []
        self.is_behind = len(data) == _PIECE_BYTES
        self._read_bytes += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [figures for line in (*lines, self._partial) if (figures := _parsed(line))]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
