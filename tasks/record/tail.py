"""Read the bytes that are added to a file, and notice if the content before them was replaced."""

from __future__ import annotations

import errno
import os

#: Number of bytes before the read position that are remembered. If these bytes differ at the next
#: read, the file was truncated or rewritten.
_REMEMBERED_BYTES = 64
#: Largest number of bytes that one read returns. Files are read in blocks, because a file may be
#: larger than the memory. Larger blocks would be slower: memory for a small block is reused, but
#: memory for a large block is requested from the kernel each time.
BLOCK_BYTES = 1 << 17
#: A block that begins with this number of zero bytes may begin in a hole of a sparse file. In this
#: case, lseek(2) finds the end of the hole.
_SMALLEST_HOLE_BYTES = 4096


class Tail:
    """Position up to which a file was read, and the last bytes before this position.

    If a file was truncated and written again, for example by log rotation, the bytes before the
    position differ at the next read. Holes in the file are skipped. A hole is a part whose bytes
    were deleted with fallocate(2).
    """

    def __init__(self, position: int = 0) -> None:
        """Set the position at which the first call of `read` starts.

        Args:
            position: Number of bytes at the beginning of the file that are not read.
        """
        self.position = position
        #: Last bytes before `position`. Empty if nothing was read yet.
        self._last_bytes = b""

    def read(self, fd: int) -> bytes | None:
        """Return the next bytes of a file. The caller must then pass these bytes to `advance`.

        If the read position is in a hole of the file, the bytes after the hole are returned.

        Args:
            fd: File descriptor of the file.

        Returns:
            The bytes; empty at the end of the file. None if the file was truncated or rewritten.
        """
        if self.position > os.fstat(fd).st_size:
            return None
        data = os.pread(fd, BLOCK_BYTES, self.position)

        # The file may have been truncated before or during this read. So now read the bytes around
        # the position again. Compare them with the remembered bytes and with the start of `data`.
        start = self.position - len(self._last_bytes)
        around = os.pread(fd, len(self._last_bytes) + _REMEMBERED_BYTES, start)
        before = around[: len(self._last_bytes)]
        after = around[len(self._last_bytes) :]
        is_stable = after.startswith(data[:_REMEMBERED_BYTES])
        if not is_stable or not _is_same_except_hole(self._last_bytes, before):
            return None
        if not data or any(data[:_SMALLEST_HOLE_BYTES]):
            return data
        next_data = _find_data(fd, self.position)
        if next_data == self.position:
            return data
        self.restart(next_data)
        return os.pread(fd, BLOCK_BYTES, next_data)

    def advance(self, data: bytes) -> None:
        """Move the position past the bytes that `read` has returned."""
        self.position += len(data)
        last_bytes = self._last_bytes + data[-_REMEMBERED_BYTES:]
        self._last_bytes = last_bytes[-_REMEMBERED_BYTES:]

    def restart(self, position: int = 0, last_bytes: bytes = b"") -> None:
        """Set the position at which the next call of `read` starts.

        Args:
            position: Number of bytes at the beginning of the file that are not read.
            last_bytes: Last bytes before the position. Empty if they are unknown.
        """
        self.position = position
        self._last_bytes = last_bytes[-_REMEMBERED_BYTES:]


def _find_data(fd: int, position: int) -> int:
    """Return the first position at or after `position` that is not in a hole of a file.

    Returns:
        `position` if it is not in a hole, or if the file system does not report holes. If the hole
        reaches to the end of the file, the size of the file.
    """
    try:
        return os.lseek(fd, position, os.SEEK_DATA)
    except OSError as error:
        return os.fstat(fd).st_size if error.errno == errno.ENXIO else position


def _is_same_except_hole(read_before: bytes, now: bytes) -> bool:
    """Return True if a part of a file is unchanged, or if a hole at its start is the only change.

    Args:
        read_before: Bytes of the part at an earlier time.
        now: Bytes of the same part of the file now. A hole reads as zero bytes.
    """
    if now == read_before:
        return True
    rest = now.lstrip(b"\0")
    return len(now) == len(read_before) and rest != now and read_before.endswith(rest)
