"""What others print on the terminal while a live region stands there: made lines of it.

A library's warning, a traceback of a thread and Prefect's log would else be written into the
region, and be erased with it.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TextIO


class Spoken(io.TextIOBase):
    """A stream that hands over whole lines. Safe from any thread."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.RLock()
        self._rest = ""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        # So that nobody colours it.
        return False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                if line.strip():
                    self._say(line)
        return len(text)

    def finish(self) -> None:
        """Hand over a last line without an end."""
        self.write("\n" if self._rest else "")


class ForeignLines:
    """Standard output and error of this process, as far as they are a terminal."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """
        Args:
            say: told each line; it returns at once.
        """
        self._spoken = Spoken(say)
        self._undo: list[Callable[[], None]] = []

    def take_over(self) -> None:
        """Until `give_back`, lines come here."""
        for name in ("stdout", "stderr"):
            stream: TextIO | None = getattr(sys, name)
            if stream is not None and _is_terminal(stream):
                self._set(sys, name, self._spoken)
                for handler in _handlers_of(stream):
                    # A handler keeps the stream that was there when it was made.
                    self._set(handler, "stream", self._spoken)
                    console = getattr(handler, "console", None)
                    if console is not None:
                        self._set(console, "file", self._spoken)

    def give_back(self) -> None:
        """All is as it was; any number of times."""
        while self._undo:
            self._undo.pop()()
        self._spoken.finish()

    def _set(self, holder: Any, name: str, value: object) -> None:
        before = getattr(holder, name)
        setattr(holder, name, value)
        self._undo.append(lambda: setattr(holder, name, before))


def _handlers_of(stream: TextIO) -> Iterator[logging.StreamHandler[Any]]:
    names = list(logging.root.manager.loggerDict)
    for logger in (logging.root, *map(logging.getLogger, names)):
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                yield handler


def _is_terminal(stream: TextIO) -> bool:
    with suppress(ValueError, OSError):
        return stream.isatty()
    return False
