"""Read the lines of a log while a program appends to it and the log is rotated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

#: Number of bytes before the read position of a log that are compared to detect truncation.
_TAIL_BYTES = 64


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

    def read_new(self, *, is_last: bool = False) -> Iterator[str]:
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
