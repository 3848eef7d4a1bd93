"""Read the lines of a log file while a program writes to it, also when the log file is rotated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

from tasks.record import tail
from tasks.record.log_bound import ZEROS
from tasks.record.tail import Tail

#: Number of bytes before the read position that are remembered. If these bytes differ at the next
#: read, the file was truncated or rewritten.
_COMPARED_BYTES = 64
#: Largest length of a line in bytes. A longer line is returned in several parts.
_LONGEST_LINE_BYTES = 8 << 20


class _OpenLog:
    """An open log file, and the position up to which it was read.

    The file stays open even if log rotation renames it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.file = FileIO(path)
        stat = os.fstat(self.file.fileno())
        #: Device number and inode number, which identify the file even after the file is renamed.
        self.file_id = (stat.st_dev, stat.st_ino)
        self._tail = Tail()
        #: Copy of the old content of the log. Log rotation made this copy, and then truncated the
        #: log. Unread lines of the old content are read from this copy. None if there is no copy to
        #: read.
        self._copy: FileIO | None = None
        #: Bytes that were read but not returned yet, because the end of their line is still
        #: missing.
        self.pending = b""

    def read_more(self) -> bool:
        """Append the next bytes of the file to `pending`. Return False if there are none."""
        content = self._read_content()
        self.pending += content or b""
        return content is not None

    def _read_content(self) -> bytes | None:
        """Return the next bytes of the file, or None at its end.

        If Muster has deleted a part of the file, this part contains only zero bytes. These bytes
        are left out.
        If log rotation has copied and truncated the file, the unread part of the old content is
        read from the copy.
        """
        if self._copy is None:
            content = self._tail.read(self.file.fileno())
            if content is not None:
                return self._advance(content)
            self._copy = self._find_copy()
        if self._copy is not None:
            content = self._advance(self._tail.read(self._copy.fileno()) or b"")
            if content is not None:
                return content
            self._copy.close()
            self._copy = None
        # Log rotation has truncated the file. Either the old content was read completely, or no
        # copy of the old content exists. In both cases, continue at the beginning of the file.
        self._tail.restart()
        return self._advance(self._tail.read(self.file.fileno()) or b"")

    def read_blocks(self, *, is_last: bool) -> Iterator[bytes]:
        """Yield the complete lines that were added to the file since the last call, in blocks.

        Each block ends with a newline, unless it is part of a very long line.

        Args:
            is_last: True if the file will not grow any more. An incomplete last line is then
                yielded, too, and the file is closed.
        """
        content: bytes | None = self.pending
        self.pending = b""
        while content is not None:
            end = content.rfind(b"\n") + 1
            if end:
                block = b"".join((self.pending, memoryview(content)[:end]))
                self.pending = content[end:]
                yield block
            else:
                self.pending += content
            if len(self.pending) > _LONGEST_LINE_BYTES:
                block = self.pending
                self.pending = b""
                yield block
            content = self._read_content()
        if is_last:
            self.file.close()
            if self.pending:
                yield self.pending

    def read_rest(self) -> Iterator[bytes]:
        """Yield all bytes of the file that were not read yet, and close the file.

        The blocks of bytes may begin and end in the middle of a line. If the last line of the file
        has no newline, a newline is added.
        """
        content: bytes | None = self.pending
        self.pending = b""
        last_byte = b"\n"
        while content is not None:
            if content:
                last_byte = content[-1:]
                yield content
            content = self._read_content()
        if last_byte != b"\n":
            yield b"\n"
        self.file.close()

    def skip_to_last_lines(self, count: int) -> bool:
        """Set the read position to the beginning of the last lines of the file.

        Args:
            count: Number of lines.

        Returns:
            False if the file has fewer lines. In this case, the read position is unchanged.
        """
        size = os.fstat(self.file.fileno()).st_size
        start = size
        newlines_left = count
        while start > 0:
            end = start
            start = max(0, end - tail.BLOCK_BYTES)
            block = os.pread(self.file.fileno(), end - start, start)
            at = len(block)
            if end == size:
                # Each counted newline separates two lines, so skip a newline at the end of the
                # file.
                at -= block.endswith(b"\n")
            while newlines_left > 0 and (at := block.rfind(b"\n", 0, at)) >= 0:
                newlines_left -= 1
            if newlines_left == 0:
                position = start + at + 1 if count else size
                self._tail.restart(position, self._read_before(position))
                return True
        return False

    def repeats(self, other: _OpenLog) -> bool:
        """Return True if the content of another log begins with the whole content of this log.

        Args:
            other: The other log. Its read position does not change.
        """
        source = other._copy or other.file
        offset = 0
        while block := os.pread(self.file.fileno(), tail.BLOCK_BYTES, offset):
            if os.pread(source.fileno(), len(block), offset) != block:
                return False
            offset += len(block)
        return True

    def _advance(self, content: bytes) -> bytes | None:
        """Move the read position past some bytes, and return these bytes.

        The zero bytes of a hole are left out. `log_bound` makes such a hole to limit the size of a
        log.

        Args:
            content: The bytes that were read.

        Returns:
            The bytes without zeros, or None if no bytes were read.
        """
        self._tail.advance(content)
        if not content:
            return None
        return ZEROS.sub(b"", content) if b"\0" in content else content

    def _find_copy(self) -> FileIO | None:
        """Return the copy that log rotation made before it truncated the log file.

        Lines that were written shortly before the truncation are only in this copy.

        Returns:
            The open copy, or None if there is no copy.
        """
        for path in _rotated_files(self._path):
            with suppress(OSError):
                copy = FileIO(path)
                if self._tail.read(copy.fileno()) is not None:
                    return copy
                copy.close()
        return None

    def _read_before(self, position: int) -> bytes:
        """Return the last `_COMPARED_BYTES` bytes before a position of the file."""
        start = max(0, position - _COMPARED_BYTES)
        return os.pread(self.file.fileno(), position - start, start)


class HeldLog:
    """A log file that can be read to its end, even if the file is renamed or deleted meanwhile.

    The method `hold` opens the file, and `source` is a path to the open file. A program that has
    opened the same file continues to write to it even after the file was renamed.
    """

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: Path of the log. The file may be missing at first.
        """
        self.path = path
        self._file: FileIO | None = None

    @property
    def source(self) -> Path:
        """Path from which the log can be read.

        After a call of `hold`, the path is a link in /proc/self/fd to the open file. The link stays
        valid if log rotation renames or deletes the file.
        """
        return self.path if self._file is None else Path(f"/proc/self/fd/{self._file.fileno()}")

    def hold(self) -> None:
        """Open the log file, so that it can be read even after log rotation has deleted it.

        Call this method shortly before a program opens the log. If more time passes, log rotation
        may replace the file, and the program opens a different file. A missing file is created. If
        `hold` was called before, the earlier file is closed.

        Raises:
            OSError: The file cannot be opened or created.
        """
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            problem = f"the log {self.path} cannot be opened: {error.strerror}"
            raise OSError(error.errno, problem) from error
        self.release()
        self._file = FileIO(fd)

    def release(self) -> None:
        """Close the file that `hold` opened. Afterwards, `source` is the path of the log again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def size(self) -> int:
        """Return the size of the log in bytes, or -1 if the log does not exist."""
        try:
            return self.source.stat().st_size
        except OSError:
            return -1


def _rotated_files(log: Path) -> list[Path]:
    """Return the older files of a log, newest first. Log rotation has renamed or copied them.

    Examples: `trainer.log.1`, `trainer.log-20260102`. Compressed files are not returned.
    """
    modified_at = {}
    for path in log.parent.glob(f"{log.name}[.-]*"):
        with suppress(OSError):
            if path.suffix != ".gz":
                modified_at[path] = path.stat().st_mtime
    return sorted(modified_at, key=lambda path: -modified_at[path])


class LogFile:
    """Reads the new lines of a log file, even if log rotation replaces the file.

    Each line is returned exactly once. Log rotation may rename the file, or may copy and then
    truncate the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        #: Mapping from device number and inode number to the open files of the log.
        self._open_logs: dict[tuple[int, int], _OpenLog] = {}
        self._was_read = False

    def read_new(self, *, is_last: bool = False) -> Iterator[str]:
        """Yield the lines that were added since the last call.

        Args:
            is_last: True if the log will not grow any more. An incomplete last line is then
                yielded, too.
        """
        for block in self.read_blocks(is_last=is_last):
            for line in block.removesuffix(b"\n").split(b"\n"):
                yield line.removesuffix(b"\r").decode("utf-8", errors="replace")

    def skip_to_last_lines(self, count: int) -> bool:
        """Skip all lines of the log file except the last `count` lines.

        Call this method before the first read.

        Args:
            count: Number of last lines that are not skipped.

        Returns:
            False if the log file does not exist or has fewer than `count` lines. In this case, no
            line is skipped, because some of the last `count` lines may be in older files, which log
            rotation has created.
        """
        self._open(self._path)
        self._was_read = any([log.skip_to_last_lines(count) for log in self._open_logs.values()])
        if not self._was_read:
            for log in self._open_logs.values():
                log.file.close()
            self._open_logs.clear()
        return self._was_read

    def read_blocks(self, *, is_last: bool = False) -> Iterator[bytes]:
        """Yield the lines that were added since the last call, as blocks of bytes.

        The blocks are small, even if the log is larger than the memory. Each block ends with a
        newline, unless it is part of a very long line or an incomplete last line.

        Args:
            is_last: True if the log will not grow any more. An incomplete last line is then
                yielded, too.
        """
        self._open_all()
        for log in self._open_logs.values():
            yield from log.read_blocks(is_last=is_last)

    def read_rest(self) -> Iterator[bytes]:
        """Yield all bytes that were not read yet. The log must not grow any more.

        This method is faster than `read_blocks`, because it does not search for the ends of lines.
        If the last line of a file has no newline, a newline is added.
        """
        self._open_all()
        for log in self._open_logs.values():
            yield from log.read_rest()

    def _open_all(self) -> None:
        """Open the log file. Before the first read, open the older files of the log, too.

        Old files stay open, and each later read also returns their new lines: a program may
        continue to write to a file that log rotation has renamed.
        """
        if not self._was_read:
            self._open_rotated_files()
        self._open(self._path)

    def _open_rotated_files(self) -> None:
        """Open all files of the log before the first read. The oldest file will be read first.

        An older file is skipped if the log file still contains the same lines.
        """
        # Open the log file before the search for older files. Log rotation may rename the log file
        # during the search, and the lines of an open file cannot be lost.
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
            if any(copied_log.repeats(log) for log in current.values()):
                self._open_logs.pop(file_id).file.close()

        self._open_logs |= current
        self._was_read = any(log.pending for log in self._open_logs.values())

    def _open(self, path: Path) -> None:
        """Open a file of the log, unless the same file is open already, even under another name."""
        with suppress(OSError):
            log = _OpenLog(path)
            if self._open_logs.setdefault(log.file_id, log) is not log:
                log.file.close()
