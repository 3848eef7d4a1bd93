"""Readers of files for unit tests in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tasks.processes.place_reader import PlaceReader, PlaceReaders

T = TypeVar("T")


class InlineReader(PlaceReader):
    """Reads a file or folder in the thread of the caller, not in a separate thread.

    An event loop with a virtual clock cannot wait for another thread.
    """

    async def ask(self, work: Callable[[], T], within_s: float = 0.0) -> T:
        return work()


class InlineReaders(PlaceReaders):
    """Creates an `InlineReader` for each file or folder."""

    def of(self, place: object) -> PlaceReader:
        return InlineReader(place)
