"""Files that are written by a thread of their own, so that who supervises never waits for a disk.

A disk that is full, or that does not answer, keeps that thread waiting, and what is to be written
stays in memory until there is room.
"""

from __future__ import annotations

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

#: A disk that has refused something is asked again.
_AGAIN_AFTER_S = 0.5
#: What is kept for one file that can't be written; lines that come later are dropped.
_KEPT_BYTES = 1 << 26


def write_json(path: Path, content: object) -> None:
    """Replace a file by JSON: a reader sees the old content or the new, never a part.

    Not forced to the disk, which takes a busy one seconds. Raises: OSError.
    """
    replace_file(path, json_text(content))


def json_text(content: object) -> str:
    """As the files of a run have it."""
    try:
        # A third of the time, which a run's own process has to share.
        return to_json(content, indent=2).decode() + "\n"
    except ValueError:  # A name on a disk that is no text.
        return json.dumps(content, indent=2) + "\n"


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file whole, see `write_json`. Raises: OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


class DiskThread:
    """Writes files, and does whatever else may have to wait for a disk, in a thread of its own.

    Safe from any thread, and returns at once but for `flush`. The thread ends with the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_new = self._is_busy = False
        #: What is not on disk yet, by its file: how it is made, or the lines.
        self._whole: dict[Path, Callable[[], str]] = {}
        self._lines: dict[Path, bytearray] = {}
        self._orders: list[Callable[[], None]] = []
        #: Files of which it was told that they can't be written.
        self._refused: set[Path] = set()

    def replace(self, path: Path, make: Callable[[], str]) -> None:
        """Have a file replaced by the text that `make` gives, in the thread, at each try; what it
        was to be before that is left out."""
        with self._news:
            self._whole[path] = make
            self._wake()

    def append(self, path: Path, line: str) -> None:
        """Have a line added to a file, after those that were added before."""
        with self._news:
            lines = self._lines.setdefault(path, bytearray())
            if len(lines) < _KEPT_BYTES:
                lines += line.encode() + b"\n"
            self._wake()

    def do(self, what: Callable[[], T]) -> Future[T]:
        """Have something done once, after what was asked for before, as far as that was possible;
        the future has its result or its error."""
        future: Future[T] = Future()

        def do_it() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(what())
            except Exception as error:
                future.set_exception(error)

        with self._news:
            self._orders.append(do_it)
            self._wake()
        return future

    def flush(self, within_s: float) -> bool:
        """Wait until all that was asked for is done; whether it is."""
        with self._news:
            return self._news.wait_for(
                lambda: not (self._whole or self._lines or self._orders or self._is_busy), within_s
            )

    def _wake(self) -> None:
        self._is_new = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._news.notify_all()

    def _work(self) -> None:
        while True:
            with self._news:
                is_late = self._whole or self._lines
                self._news.wait_for(lambda: self._is_new, _AGAIN_AFTER_S if is_late else None)
                whole, self._whole = self._whole, {}
                lines, self._lines = self._lines, {}
                orders, self._orders = self._orders, []
                self._is_new, self._is_busy = False, True
            for path, make in whole.items():
                if not self._try(path, partial(_replace, path, make)):
                    with self._news:
                        self._whole.setdefault(path, make)
            for path, some in lines.items():
                if not self._try(path, partial(_append, path, some)):
                    with self._news:
                        some += self._lines.get(path, b"")
                        self._lines[path] = some
            for order in orders:
                order()
            with self._news:
                self._is_busy = False
                self._news.notify_all()

    def _try(self, path: Path, write: Callable[[], None]) -> bool:
        try:
            write()
        except OSError as error:
            if path not in self._refused:
                self._refused.add(path)
                _log.warning("%s could not be written, and is tried again: %s", path, error)
            return False
        except Exception:
            _log.exception("%s could not be written", path)
            return True
        self._refused.discard(path)
        return True


def _replace(path: Path, make: Callable[[], str]) -> None:
    replace_file(path, make())


def _append(path: Path, lines: bytearray) -> None:
    """Add lines to a file; what is on disk, if only a part of them, is taken from them."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        while lines:
            # A disk with little room takes a part.
            del lines[: os.write(fd, lines)]
    finally:
        os.close(fd)
