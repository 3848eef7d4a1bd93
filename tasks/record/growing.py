"""Read metrics files and logs while the programs of a run append to them.

The verdict, the progress and the curve of a run all read the metrics file through this module, so
that they agree.
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

#: Largest number of bytes that one call of `MetricsFile.look` reads.
_CHUNK_BYTES = 1 << 22
#: Number of bytes at each end of a metrics file that go into its fingerprint.
_FINGERPRINT_EDGE_BYTES = 256
#: Number of bytes before the read position of a log that are compared to detect truncation.
_TAIL_BYTES = 64


class Mark(Recorded):
    """Identity of a file at one moment, used to detect later that the file was replaced.

    It uses no modification time, because the clock of a network file system may belong to another
    machine. It uses no device number either, because hosts number the same network file system
    differently.
    """

    #: Inode number, or 0 if the file did not exist.
    inode: int = 0
    #: Size of the file in bytes.
    length: int = 0
    #: Hash of the first and last bytes, as 16 hexadecimal digits; empty if there was no file.
    digest: str = ""

    @staticmethod
    def of(path: Path) -> Mark:
        """Return the fingerprint of the file in its current state."""
        with suppress(OSError), path.open("rb") as file:
            return Mark.at(file, os.fstat(file.fileno()).st_size)
        return Mark()

    @staticmethod
    def at(file: BinaryIO, length: int) -> Mark:
        """Return the fingerprint that the file had when it was `length` bytes long."""
        edge = min(length, _FINGERPRINT_EDGE_BYTES)

        file.seek(0)
        head = file.read(edge)
        file.seek(length - edge)
        tail = file.read(edge)

        digest = hashlib.sha256(head + tail).hexdigest()[:16]
        return Mark(inode=os.fstat(file.fileno()).st_ino, length=length, digest=digest)


class MetricsFile:
    """Reads the JSON lines that a training appends to its metrics file.

    If the training replaces, truncates or rewrites the file, reading starts again at the beginning
    of the new content.
    """

    def __init__(self, path: Path, *, since: Mark | None = None) -> None:
        """
        Args:
            path: The metrics file. It need not exist yet.
            since: Fingerprint of the content that an earlier attempt wrote. That content is
                skipped.
        """
        self.path = path
        #: Number of times that the file was replaced, truncated or rewritten since the first read.
        self.begun = 0
        #: True if the last call of `look` did not read the whole file.
        self.is_behind = False
        #: Fingerprint of the content that was already read; its length is the read position.
        self._consumed = since or Mark()
        self._was_opened = False
        #: Last line that was read, if it had no newline yet.
        self._incomplete_line = b""

    def look(self) -> list[dict[str, Any]]:
        """Return the objects that were appended since the last call.

        A last line without a newline counts if it is complete JSON. The next call returns it again
        when the newline has arrived. Lines that are not JSON objects are skipped.

        Returns:
            The objects in file order; an empty list if the file does not exist or has not grown.
        """
        try:
            with self.path.open("rb") as file:
                self._restart_if_replaced(file)
                file.seek(self._consumed.length)
                data = file.read(_CHUNK_BYTES)
                self._consumed = Mark.at(file, self._consumed.length + len(data))
        except OSError:
            self.is_behind = False
            return []

        self.is_behind = len(data) == _CHUNK_BYTES
        if not data:
            return []  # An incomplete last line was already returned by an earlier call.

        *lines, self._incomplete_line = (self._incomplete_line + data).split(b"\n")
        objects = [_parse_object(line) for line in (*lines, self._incomplete_line)]
        return [parsed for parsed in objects if parsed]

    def _restart_if_replaced(self, file: BinaryIO) -> None:
        """Go back to the beginning if the file no longer starts with the content that was read."""
        if Mark.at(file, self._consumed.length) != self._consumed:
            # If the content of an earlier attempt is gone at the first read, that is no restart.
            if self._was_opened:
                self.begun += 1
            self._consumed = Mark()
            self._incomplete_line = b""
        self._was_opened = True


def _parse_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line, or None if the line contains something else."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


class _OpenLog:
    """An open log file, which keeps its identity if it is renamed, and its read position."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.file = FileIO(path)
        stat = os.fstat(self.file.fileno())
        #: Device and inode, which identify the file under any name.
        self.file_id = (stat.st_dev, stat.st_ino)
        self._position = 0
        #: Last bytes before the read position. If the file has other bytes there, it was truncated
        #: and has grown again.
        self._tail = b""
        #: Bytes that were read but not yet returned, because their line has no newline yet.
        self.pending = b""

    def read_more(self) -> None:
        """Append the new content of the file to `pending`.

        If the file was copied and truncated, the end of the old content is read from the copy.
        """
        content = self._read_from_position(self.file)
        copied = b""
        if content is None:
            copied = self._read_rest_from_copy()
            self._position = 0
            self._tail = b""
            content = self._read_from_position(self.file) or b""

        self._position += len(content)
        self._tail = (self._tail + content)[-_TAIL_BYTES:]
        self.pending += copied + content

    def read_lines(self, *, is_last: bool) -> list[str]:
        """Return the new complete lines. If `is_last`, also return an incomplete last line."""
        self.read_more()
        *lines, self.pending = self.pending.split(b"\n")
        if is_last:
            self.file.close()
            lines += filter(None, [self.pending])
        return [line.removesuffix(b"\r").decode("utf-8", errors="replace") for line in lines]

    def _read_rest_from_copy(self) -> bytes:
        """Return the bytes that the log received after the last read and before its truncation."""
        for copy in _rotated_files(self._path):
            with suppress(OSError), FileIO(copy) as file:
                content = self._read_from_position(file)
                if content is not None:
                    return content
        return b""

    def _read_from_position(self, file: FileIO) -> bytes | None:
        """Return the content after the read position, or None if the file does not fit to it.

        A file fits if it has the expected bytes before the read position.
        """
        start = self._position - len(self._tail)
        file.seek(start)
        data = file.read()

        # The file may have been truncated, and may have grown again, during the read.
        compared_bytes = len(self._tail) + _TAIL_BYTES
        file.seek(start)
        is_stable = file.read(compared_bytes).startswith(data[:compared_bytes])
        if not is_stable or not data.startswith(self._tail):
            return None
        return data[len(self._tail) :]


def _rotated_files(log: Path) -> list[Path]:
    """Return the files that a log was rotated to, newest first.

    Examples: `trainer.log.1`, `trainer.log-20260102`. Compressed files are not returned.
    """
    modified_at = {}
    for path in log.parent.glob(f"{log.name}[.-]*"):
        with suppress(OSError):
            if path.suffix != ".gz":
                modified_at[path] = path.stat().st_mtime
    return sorted(modified_at, key=lambda path: -modified_at[path])


class LogFile:
    """Reads the new lines of a log, and keeps track of the log when it is rotated.

    Each line is returned exactly once, both if rotation renames the log and if rotation copies and
    truncates the log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        #: Files that are still read, by device and inode.
        self._open_logs: dict[tuple[int, int], _OpenLog] = {}
        self._was_read = False

    def look(self, *, is_last: bool = False) -> Iterator[str]:
        """Yield the lines that were added since the last call.

        Args:
            is_last: True if the log will not grow any more. An incomplete last line is then
                returned, too.
        """
        if not self._was_read:
            self._open_rotated_files()
        self._open(self._path)
        # A program may continue to write to a renamed log, so its file stays open.
        for log in self._open_logs.values():
            yield from log.read_lines(is_last=is_last)

    def _open_rotated_files(self) -> None:
        """Before the first read, also open the files that the log was rotated to earlier.

        Their lines come first. A copy whose content is still in the log itself is skipped. To
        notice a rotation that happens just now, the log is read both before and after the search
        for its copies.
        """
        self._open(self._path)
        current = self._open_logs
        self._open_logs = {}
        for log in current.values():
            log.read_more()

        for copy in reversed(_rotated_files(self._path)):
            self._open(copy)
        for log in (*self._open_logs.values(), *current.values()):
            log.read_more()
        for file_id, copied_log in [*self._open_logs.items()]:
            if any(log.pending.startswith(copied_log.pending) for log in current.values()):
                self._open_logs.pop(file_id).file.close()

        self._open_logs |= current
        self._was_read = any(log.pending for log in self._open_logs.values())

    def _open(self, path: Path) -> None:
        """Open a file unless it is already open under this or another name."""
        with suppress(OSError):
            log = _OpenLog(path)
            if self._open_logs.setdefault(log.file_id, log) is not log:
                log.file.close()
