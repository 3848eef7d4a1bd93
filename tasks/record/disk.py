"""Write files in a separate thread, so that supervision never waits for a disk.

If a disk is full or does not respond, only this thread waits. Content that could not be written
stays in memory and is written later.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic_core import to_json

_log = logging.getLogger(__name__)
T = TypeVar("T")

#: Delay before a failed write is retried, in seconds.
_RETRY_AFTER_S = 0.5
#: Largest number of bytes that wait to be appended to a file. Further lines are dropped.
_MAX_PENDING_BYTES = 1 << 26


def write_json(path: Path, content: object, *, durable: bool = False) -> None:
    """Write an object as JSON to a file, and replace the file atomically; see `replace_file`."""
    replace_file(path, json_text(content), durable=durable)


def json_text(content: object) -> str:
    """Return an object as indented JSON text. All JSON files of a run have this format."""
    try:
        # Use pydantic, because it is three times faster than the module `json`.
        return to_json(content, indent=2).decode() + "\n"
    except ValueError:  # pydantic rejects file names that are not valid UTF-8.
        return json.dumps(content, indent=2) + "\n"


def replace_file(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replace the content of a file atomically: a reader sees either the old or the new content.

    Args:
        path: The file.
        content: The new content.
        durable: True to protect the file against a power failure. This can take seconds on a busy
            disk. If False, a power failure can leave an empty file on some file systems.

    Raises:
        OSError: The file was not replaced. If `durable` is True, there is a second possibility: the
            file was replaced, but is not protected against a power failure.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        if durable:
            with draft.open("rb") as file:
                _sync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    if durable:
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Force the names of the files in a directory to the disk.

    Otherwise, the names of new and replaced files can be lost in a power failure.

    Raises:
        OSError: The disk reports an error.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync(fd)
    finally:
        os.close(fd)


def _sync(fd: int) -> None:
    """Force an open file or directory to the disk, if the file system supports this.

    Raises:
        OSError: The disk reports an error.
    """
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


class DiskThread:
    """Thread that writes files and calls other functions that may wait for a disk.

    All methods can be called from any thread. Only the method `flush` waits. The thread ends with
    the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        #: Condition whose lock protects all attributes below. Threads that wait for the condition
        #: are notified about new work and about completed work.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._has_new_work = False
        self._is_busy = False
        #: Files that must be replaced, as a mapping from the path to a function that returns the
        #: new content.
        self._replacements: dict[Path, Callable[[], str]] = {}
        #: Mapping from the path of a file to the lines that the disk thread must append.
        self._lines: dict[Path, bytearray] = {}
        #: Functions that the disk thread must call.
        self._calls: list[Callable[[], None]] = []
        #: Files whose last write failed, as a mapping from the path to the reason. A warning about
        #: each of these failures was already logged.
        self._failing_files: dict[Path, str] = {}

    def replace(self, path: Path, make: Callable[[], str]) -> None:
        """Let the disk thread replace the content of a file. The call returns immediately.

        After a power failure, the file has either the old or the new content; see `replace_file`.

        Args:
            path: The file. A pending earlier replacement of this file is dropped.
            make: Function that returns the new content. The disk thread calls this function before
                each try to write the file.
        """
        with self._changed:
            self._replacements[path] = make
            self._wake()

    def append(self, path: Path, line: str) -> None:
        """Let the disk thread append a line to a file. The order of the calls is kept."""
        with self._changed:
            lines = self._lines.setdefault(path, bytearray())
            if len(lines) < _MAX_PENDING_BYTES:
                lines += line.encode() + b"\n"
            self._wake()

    def do(self, function: Callable[[], T]) -> Future[T]:
        """Let the disk thread call a function once. All earlier writes are tried before the call.

        Returns:
            A future with the result or the exception of the function.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        with self._changed:
            self._calls.append(run)
            self._wake()
        return future

    def flush(self, within_s: float) -> bool:
        """Wait until the disk thread has done all its work.

        Returns:
            True if all work is done. False if the thread needs longer than `within_s` seconds.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._has_work(), within_s)

    def describe_unwritten_files(self) -> str:
        """Return a text that lists each file that could not be written, with the reason.

        The text is empty if all files were written. If the write of a file is pending and has not
        failed yet, the reason is that the disk does not respond.
        """
        with self._changed:
            reasons = dict.fromkeys(
                (*self._replacements, *self._lines), "the disk does not respond"
            )
            reasons |= self._failing_files
        return "; ".join(f"{path}: {reason}" for path, reason in sorted(reasons.items()))

    def _has_work(self) -> bool:
        return bool(self._replacements or self._lines or self._calls or self._is_busy)

    def _wake(self) -> None:
        """Tell the disk thread that there is new work. The first call starts the thread.

        The caller must hold the lock.
        """
        self._has_new_work = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        """Write files and call functions in an endless loop. Failed writes are retried."""
        while True:
            with self._changed:
                has_failed_writes = bool(self._replacements or self._lines)
                timeout_s = _RETRY_AFTER_S if has_failed_writes else None
                self._changed.wait_for(lambda: self._has_new_work, timeout_s)

                replacements = self._replacements
                lines_by_path = self._lines
                calls = self._calls
                self._replacements = {}
                self._lines = {}
                self._calls = []
                self._has_new_work = False
                self._is_busy = True

            for path, make in replacements.items():
                if not self._try_write(path, partial(_replace, path, make)):
                    with self._changed:
                        self._replacements.setdefault(path, make)
            for path, lines in lines_by_path.items():
                if not self._try_write(path, partial(_append, path, lines)):
                    with self._changed:
                        lines += self._lines.get(path, b"")
                        self._lines[path] = lines
            for call in calls:
                call()

            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _try_write(self, path: Path, write: Callable[[], None]) -> bool:
        """Call a function that writes a file. Return False if the write must be retried."""
        try:
            write()
        except OSError as error:
            is_known = path in self._failing_files
            with self._changed:
                self._failing_files[path] = error.strerror or str(error)
            if not is_known:
                _log.warning(
                    "%s could not be written. Muster tries again until the file is written: %s",
                    path,
                    error,
                )
            return False
        except Exception:
            _log.exception("%s could not be written, and Muster does not try again", path)
            return True
        with self._changed:
            self._failing_files.pop(path, None)
        return True


def _replace(path: Path, make: Callable[[], str]) -> None:
    replace_file(path, make(), durable=True)


def _append(path: Path, lines: bytearray) -> None:
    """Append lines to a file, and remove the written bytes from `lines`."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        while lines:
            # If the disk is nearly full, write(2) may write only some of the bytes. So repeat the
            # call with the remaining bytes.
            del lines[: os.write(fd, lines)]
    finally:
        os.close(fd)
