"""Copy the log of a Ray job's driver to a local file, while the log grows.

Ray's dashboard can follow a log, but Muster does not use this. The dashboard notices a closed
connection only when the log gets another line, and the log of an ended job gets no more lines. So
each followed job would occupy one of the 100 requests that the dashboard answers at the same time,
until the dashboard is restarted. Instead, this module requests the last lines of the log again and
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from dataclasses import dataclass, field
from pathlib import Path

from tasks.ray.dashboard import Dashboard, Denied, NoAnswer
from tasks.ray.submit import finish_thread_work

#: Shortest pause between two requests for the log of a job, in seconds.
_PAUSE_AT_LEAST_S = 0.5
#: Pause after a copy of new log lines, as a multiple of the time that the copy took, but at least
#: `_PAUSE_AT_LEAST_S`. So a long log does not keep the dashboard busy.
_PAUSE_PER_COPY = 20.0
#: Largest number of requests for the rest of a job's log after the job has ended.
_COPY_TRIES = 5
#: Number of last lines of the log that are requested while the log grows.
_LAST_LINES = 1000
#: To find the new part of the log, Muster searches the log for the last bytes of the local copy.
#: This is the number of these bytes.
_SEARCHED_BYTES = 1 << 12
#: Largest number of bytes from the end of the local copy that are kept in memory.
_KEPT_BYTES = 1 << 18


@dataclass(slots=True)
class LogCopy:
    """Copies the log of a Ray job's driver to a local file.

    Copying can continue after a lost connection, and after log rotation has moved, truncated or
    removed the local file. A new process of the run continues after the bytes that the local file
    already contains.
    """

    _dashboard: Dashboard
    _submission_id: str
    _path: Path
    _is_writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Number of bytes of the log that were copied. None before the local file was opened.
    _copied_bytes: int | None = None
    #: The most recently copied bytes, at most `_KEPT_BYTES`.
    _copied_end: bytes = b""

    async def follow(self, node_id: str) -> None:
        """Copy the log while it grows, until this call is cancelled.

        Args:
            node_id: Ray's id of the driver's node, in hex.
        """
        while True:
            began_s = time.monotonic()
            # Ignore errors and try again: the cluster may answer later, and a full disk may get
            # free space. If the end of the log is never copied, `complete` reports that.
            with contextlib.suppress(NoAnswer, Denied, OSError):
                await self._copy_new_bytes(node_id)
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(_PAUSE_AT_LEAST_S, _PAUSE_PER_COPY * took_s))

    async def complete(self, node_id: str) -> str:
        """Copy the rest of the log after the driver has ended.

        Args:
            node_id: Ray's id of the driver's node, in hex.

        Returns:
            Reason why the end of the log may be missing, or an empty string for a complete log.
        """
        problem = ""
        for _ in range(_COPY_TRIES):
            try:
                async with self._is_writing:
                    with await asyncio.to_thread(self._open) as log:
                        await self._copy_from_whole_log(log, node_id)
                return ""
            except (NoAnswer, Denied, OSError) as error:
                problem = str(error)
            await asyncio.sleep(_PAUSE_AT_LEAST_S)
        return f"the last lines of {self._path.name} may be missing: {problem}"

    async def _copy_new_bytes(self, node_id: str) -> None:
        """Append the new bytes of the log to the local file. Request no more than necessary.

        Args:
            node_id: Ray's id of the driver's node, in hex.

        Raises:
            NoAnswer, Denied: The cluster did not send the log.
            OSError: The local file could not be written.
        """
        async with self._is_writing:
            with await asyncio.to_thread(self._open) as log:
                last_lines = await self._read_last_lines(node_id)
                new_bytes = self._find_new_bytes(last_lines)
                if new_bytes is None:
                    await self._copy_from_whole_log(log, node_id)
                elif new_bytes:
                    await finish_thread_work(asyncio.to_thread(self._write, log, new_bytes))

    async def _read_last_lines(self, node_id: str) -> bytes:
        chunks = self._dashboard.log(self._submission_id, node_id, last_lines=_LAST_LINES)
        async with contextlib.aclosing(chunks):
            return b"".join([chunk async for chunk in chunks])

    def _find_new_bytes(self, last_lines: bytes) -> bytes | None:
        """Return the part of `last_lines` that was not copied yet.

        Args:
            last_lines: At most the last `_LAST_LINES` lines of the log.

        Returns:
            The new bytes. None if `last_lines` does not contain the most recently copied bytes, or
            contains them twice.
        """
        assert self._copied_bytes is not None
        if last_lines.count(b"\n") < _LAST_LINES - 1:
            # The log is shorter than `_LAST_LINES` lines, so `last_lines` is the whole log.
            return last_lines[self._copied_bytes :]
        searched = self._copied_end[-_SEARCHED_BYTES:]
        ends = []
        start = last_lines.find(searched) if searched else -1
        while start != -1:
            end = start + len(searched)
            # The searched bytes may occur several times in the log. So also compare the longer
            # `_copied_end` with the bytes of the log up to `end`.
            if self._copied_end.endswith(last_lines[max(0, end - len(self._copied_end)) : end]):
                ends.append(end)
            start = last_lines.find(searched, start + 1)
        return last_lines[ends[0] :] if len(ends) == 1 else None

    async def _copy_from_whole_log(self, log: io.FileIO, node_id: str) -> None:
        """Request the whole log, and complete the local file with the missing bytes.

        Args:
            log: The local file.
            node_id: Ray's id of the driver's node, in hex.

        Raises:
            NoAnswer, Denied: The cluster did not send the log.
            OSError: The local file could not be written.
        """
        assert self._copied_bytes is not None
        bytes_to_skip = self._copied_bytes
        chunks = self._dashboard.log(self._submission_id, node_id)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                if new_bytes := chunk[bytes_to_skip:]:
                    await finish_thread_work(asyncio.to_thread(self._write, log, new_bytes))
                bytes_to_skip = max(0, bytes_to_skip - len(chunk))

    def _open(self) -> io.FileIO:
        """Open the local file. The first call also reads the size and the last bytes of the file.

        Raises:
            OSError: The file cannot be opened or read.
        """
        log = self._path.open("ab", buffering=0)
        try:
            if self._copied_bytes is None:
                size = log.tell()
                with self._path.open("rb") as file:
                    file.seek(max(0, size - _KEPT_BYTES))
                    self._copied_end = file.read(min(size, _KEPT_BYTES))
                self._copied_bytes = size
        except BaseException:
            log.close()
            raise
        return log

    def _write(self, log: io.FileIO, data: bytes) -> None:
        """Write all bytes to an unbuffered file, with several `write` calls if necessary.

        The number of written bytes is added to `_copied_bytes`, even if a later call fails.

        Raises:
            OSError: The file cannot be written, for example because the disk is full.
        """
        assert self._copied_bytes is not None
        while data:
            written_bytes = log.write(data)
            self._copied_bytes += written_bytes
            self._copied_end = (self._copied_end + data[:written_bytes])[-_KEPT_BYTES:]
            data = data[written_bytes:]
