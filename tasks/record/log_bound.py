"""Keep a log below a size while a program writes to it.

Programs write directly into their log file, at its end. So no part of the file can be moved without
the program's cooperation. Linux can release the disk space of a part of a file, which leaves a hole
and changes no offset. The hole reads as zero bytes, and `cat` prints nothing visible for it.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path

#: Smallest allowed value of the spec key `log_max_bytes`.
SMALLEST_BOUND_BYTES = 1 << 16
#: The first lines of a log are always kept. They take up to 1/4 of `log_max_bytes`.
_HEAD_DIVISOR = 4
#: Share of `log_max_bytes` for the newest lines of a log: 1/2. After each call of `LogBound.apply`,
#: the log can grow until it reaches `log_max_bytes` again.
_TAIL_DIVISOR = 2
#: The deleted middle part of a log should end with a whole line. So Muster extends this part to the
#: next newline, if the newline is within this number of bytes.
_LINE_BYTES = 1 << 16
#: Flags of fallocate(2): FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE.
_PUNCH_HOLE = 0x02 | 0x01
#: If a log is too long, Muster deletes the middle part of the log and writes this line at the
#: beginning of the deleted part. The rest of the deleted part reads as zero bytes. The number of
#: bytes in the line has a fixed width, so that a line with a new number can overwrite this line.
_MARKER = "[muster: {:15d} bytes of this log were left out here, see log_max_bytes]\n"
_MARKER_PATTERN = re.compile(rb"\[muster: +(\d+) bytes of this log were left out here, [^\n]*\n")
#: Matches the deleted part of a log, which reads as zero bytes.
ZEROS = re.compile(rb"\0{16,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogBound:
    """Limit for the disk space that a log may take."""

    limit_bytes: int

    def apply(self, log: Path) -> int:
        """Delete the middle of a log with more than `limit_bytes` bytes, to release disk space.

        The first lines (a quarter of `limit_bytes`) and the newest lines (half of `limit_bytes`)
        are kept. A line between them says how many bytes were deleted.

        Args:
            log: The log file.

        Returns:
            Number of bytes that this call and all earlier calls have deleted, or 0 if the log is
            complete.

        Raises:
            OSError: The log cannot be opened, or the file system cannot release a part of a file.
        """
        fd = os.open(log, os.O_RDWR | os.O_CLOEXEC)
        try:
            return self._apply(fd)
        finally:
            os.close(fd)

    def _apply(self, fd: int) -> int:
        size = os.fstat(fd).st_size
        if size <= self.limit_bytes:
            return 0
        head_end, hole_end = self._find_hole(fd)
        if head_end + size - hole_end <= self.limit_bytes:
            return hole_end - head_end
        tail_start = size - self.limit_bytes // _TAIL_DIVISOR
        newline = os.pread(fd, _LINE_BYTES, tail_start).find(b"\n")
        new_hole_end = tail_start + newline + 1
        left_out = new_hole_end - head_end
        marker = _MARKER.format(left_out).encode()
        punch_hole(fd, head_end + len(marker), left_out - len(marker))
        os.pwrite(fd, marker, head_end)
        return left_out

    def _find_hole(self, fd: int) -> tuple[int, int]:
        """Return the offsets at which the deleted part of the log begins and ends.

        If nothing was deleted yet, both values are the offset at which the deleted part will begin.
        """
        head = os.pread(fd, self.limit_bytes // _HEAD_DIVISOR + len(_MARKER) + _LINE_BYTES, 0)
        if marker := _MARKER_PATTERN.search(head):
            return marker.start(), marker.start() + int(marker[1])
        quarter = self.limit_bytes // _HEAD_DIVISOR
        newline = head.rfind(b"\n", 0, quarter)
        head_end = newline + 1 if newline >= 0 else quarter
        return head_end, head_end


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Release the disk space of a part of a file. The size of the file stays the same.

    Args:
        fd: File descriptor that is open for writing.
        offset: Offset of the part in bytes.
        length: Length of the part in bytes.

    Raises:
        OSError: The file system cannot release a part of a file.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.fallocate(fd, _PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(length))
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
