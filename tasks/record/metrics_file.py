"""Read the metrics file of a training while the training appends to it.

The check for success, the displayed progress and the drawn curve of a run all use this module, so
that they agree.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from tasks.record.outcome import Recorded
from tasks.record.tail import Tail

#: Largest number of bytes that one call of `MetricsFile.read_new` reads.
_CHUNK_BYTES = 1 << 22
#: The fingerprint of a metrics file contains a hash of this number of bytes at the beginning of the
#: file, and of the same number of bytes at the end of the file.
_FINGERPRINT_EDGE_BYTES = 256


class FileFingerprint(Recorded):
    """Identity of a file at one moment. A later comparison shows whether the file was replaced.

    The fingerprint contains neither the modification time, which may come from the clock of another
    machine, nor the device number, which differs between hosts on a network file system.
    """

    #: Inode number, or 0 if the file did not exist.
    inode: int = 0
    #: Size of the file in bytes.
    length: int = 0
    #: Hash of the first 256 and the last 256 bytes, as 16 hexadecimal digits. Empty if the file did
    #: not exist.
    digest: str = ""

    @staticmethod
    def of(path: Path) -> FileFingerprint:
        """Return the fingerprint of the file in its current state."""
        with suppress(OSError), path.open("rb") as file:
            return FileFingerprint.at(file, os.fstat(file.fileno()).st_size)
        return FileFingerprint()

    @staticmethod
    def at(file: BinaryIO, length: int) -> FileFingerprint:
        """Return the fingerprint of the first `length` bytes of a file.

        If lines were only appended since the file was `length` bytes long, the result equals the
        fingerprint from that time.
        """
        edge = min(length, _FINGERPRINT_EDGE_BYTES)

        file.seek(0)
        head = file.read(edge)
        file.seek(length - edge)
        tail = file.read(edge)

        digest = hashlib.sha256(head + tail).hexdigest()[:16]
        return FileFingerprint(inode=os.fstat(file.fileno()).st_ino, length=length, digest=digest)


class MetricsFile:
    """Reads the JSON lines that a training appends to its metrics file.

    If the training replaces, truncates or rewrites the file, the new content is read from its
    beginning. If the file was renamed or deleted, its last lines are read before the new file.
    """

    def __init__(self, path: Path, *, since: FileFingerprint | None = None) -> None:
        """
        Args:
            path: The metrics file. The file may be missing at first.
            since: Fingerprint of the content that an earlier attempt wrote, or None. This content
                is skipped.
        """
        self.path = path
        #: Number of times that the file was replaced, truncated or rewritten since the first read.
        self.restarts = 0
        #: True if the last call of `read_new` did not read the file to its end.
        self.has_more = False
        #: Fingerprint of the content that was already read. The field `length` is the read
        #: position.
        self._consumed = since or FileFingerprint()
        self._was_opened = False
        #: Last line that was read, if it had no newline. Otherwise empty.
        self._incomplete_line = b""
        #: The file that was read last, or None before the first read. The file stays open, so that
        #: its end can be read after it was renamed or deleted.
        self._last_file: FileIO | None = None

    def read_new(self) -> list[dict[str, Any]]:
        """Return the JSON objects that were appended to the metrics file since the last call.

        A last line without a newline is used, too, if it is complete JSON. In this case, a later
        call returns the same object again. Lines that are not JSON objects are skipped.

        Returns:
            The objects in file order. Empty if the file does not exist or has not grown.
        """
        try:
            data = self._read_moved_file()
            self.has_more = bool(data)
            if not data:
                data = self._read_file()
                self.has_more = len(data) == _CHUNK_BYTES
        except OSError:
            self.has_more = False
            return []
        if not data:
            # The file has not grown. An earlier call has already returned the last line, even if
            # this line has no newline.
            return []

        *lines, self._incomplete_line = (self._incomplete_line + data).split(b"\n")
        objects = [_parse_object(line) for line in (*lines, self._incomplete_line)]
        return [parsed for parsed in objects if parsed]

    def _read_moved_file(self) -> bytes:
        """Return the next bytes of a metrics file that was renamed or deleted since the last read.

        Returns:
            The bytes. Empty if the file is still at its path, or if it was read to its end.
        """
        if self._last_file is None:
            return b""
        present = None
        with suppress(FileNotFoundError):
            present = self.path.stat()
        last = os.fstat(self._last_file.fileno())
        if present is not None and os.path.samestat(present, last):
            return b""
        tail = Tail(self._consumed.length)
        data = tail.read(self._last_file.fileno()) or b""
        tail.advance(data)
        self._consumed = FileFingerprint.at(self._last_file, tail.position)
        return data

    def _read_file(self) -> bytes:
        """Open the metrics file again, and return the bytes after the read position.

        Raises:
            OSError: The file cannot be opened or read.
        """
        file = self.path.open("rb", buffering=0)
        self.close()
        self._last_file = file
        self._restart_if_replaced(file)
        file.seek(self._consumed.length)
        data = file.read(_CHUNK_BYTES) or b""
        self._consumed = FileFingerprint.at(file, self._consumed.length + len(data))
        return data

    def close(self) -> None:
        """Close the file. A later read opens the file again."""
        if self._last_file is not None:
            self._last_file.close()
            self._last_file = None

    def _restart_if_replaced(self, file: BinaryIO) -> None:
        """Move the read position to the beginning if the content that was read has changed."""
        if FileFingerprint.at(file, self._consumed.length) != self._consumed:
            # Count the change of the content only if the caller already has lines of the old
            # content. At the first read, the caller has none.
            if self._was_opened:
                self.restarts += 1
            self._consumed = FileFingerprint()
            self._incomplete_line = b""
        self._was_opened = True


def _parse_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line, or None if the line contains something else."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
