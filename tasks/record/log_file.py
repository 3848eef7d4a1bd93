"""Read the lines of a log file while a program writes to it, also when the log file is rotated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

#: Number of bytes before the read position that are remembered. If the log file has other bytes
#: there at the next read, it was truncated.
_TAIL_BYTES = 64


class _OpenLog:
    """An open log file, and the position up to which it was read.

    The file stays open even if log rotation renames it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.file = FileIO(path)
        stat = os.fstat(self.file.fileno())
        #: Device number and inode number. They identify the file even after it is renamed.
        self.file_id = (stat.st_dev, stat.st_ino)
        self._position = 0
        #: Last bytes before the read position. If the file has other bytes there, it was truncated,
        #: and a program has written new content.
        self._tail = b""
        #: Bytes that were read but not yet returned, because their line has no newline yet.
        self.pending = b""

    def read_more(self) -> None:
        """Append the new content of the file to `pending`.

        If log rotation has copied and truncated the file, the unread end of the old content is read
        from the copy.
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
        """Return the complete lines that were added to the file since the last call.

        Args:
            is_last: True if the file will not grow any more. An incomplete last line is then
                returned as well, and the file is closed.
        """
        self.read_more()
        *lines, self.pending = self.pending.split(b"\n")
        if is_last:
            self.file.close()
            lines += filter(None, [self.pending])
        return [line.removesuffix(b"\r").decode("utf-8", errors="replace") for line in lines]

    def _read_rest_from_copy(self) -> bytes:
        """Return the bytes that were written to the log after the last read, before log rotation.

        These bytes are only in the copy that log rotation made before it truncated the log file.
        """
        for copy in _rotated_files(self._path):
            with suppress(OSError), FileIO(copy) as file:
                content = self._read_from_position(file)
                if content is not None:
                    return content
        return b""

    def _read_from_position(self, file: FileIO) -> bytes | None:
        """Return the content of a file after the position up to which the log was read.

        The bytes before this position are compared with those that were read last. Return None if
        they differ, because the file is then not the file that was read.
        """
        start = self._position - len(self._tail)
        file.seek(start)
        data = file.read()

        # Read the first bytes again. If they differ, the file was truncated during the first read.
        compared_bytes = len(self._tail) + _TAIL_BYTES
        file.seek(start)
        is_stable = file.read(compared_bytes).startswith(data[:compared_bytes])
        if not is_stable or not data.startswith(self._tail):
            return None
        return data[len(self._tail) :]


def _rotated_files(log: Path) -> list[Path]:
    """Return the older files of a log that log rotation has renamed or copied, newest first.

    Examples: `trainer.log.1`, `trainer.log-20260102`. Compressed files are not returned.
    """
    modified_at = {}
    for path in log.parent.glob(f"{log.name}[.-]*"):
        with suppress(OSError):
            if path.suffix != ".gz":
                modified_at[path] = path.stat().st_mtime
    return sorted(modified_at, key=lambda path: -modified_at[path])


class LogFile:
    """Reads the new lines of a log file, also when the log file is rotated.

    Each line is returned exactly once. This holds if log rotation renames the file, and if it
    copies and then truncates the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        #: Open files of the log, by device number and inode number.
        self._open_logs: dict[tuple[int, int], _OpenLog] = {}
        self._was_read = False

    def read_new(self, *, is_last: bool = False) -> Iterator[str]:
        """Yield the lines that were added since the last call.

        Args:
            is_last: True if the log will not grow any more. An incomplete last line is then
                yielded as well.
        """
        if not self._was_read:
            self._open_rotated_files()
        self._open(self._path)
        # After a rename, the program may continue to write to the old file. Therefore old files
        # stay open and are read, too.
        for log in self._open_logs.values():
            yield from log.read_lines(is_last=is_last)

    def _open_rotated_files(self) -> None:
        """Open the older files of the log before the first read, so that their lines come first.

        An older file is skipped if it is a copy of content that is still in the log file. The log
        file is read both before and after the search for older files. Otherwise a rotation during
        the search could lose lines.
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
        """Open a file of the log, unless it is already open under this or another name."""
        with suppress(OSError):
            log = _OpenLog(path)
            if self._open_logs.setdefault(log.file_id, log) is not log:
                log.file.close()
