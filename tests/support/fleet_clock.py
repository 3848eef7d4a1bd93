"""An asyncio loop whose time is its own: whole histories run in no time, always the same way."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Stuck(Exception):
    """Nobody waits for a moment any more, and nothing else will happen: a wait without an end."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer whenever nothing is ready. Nothing in it may wait for real I/O."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        super().__init__(_NoWait(self))

    def time(self) -> float:
        return self._now_s

    def jump(self, seconds: float) -> None:
        self._now_s += seconds


class _NoWait(selectors.DefaultSelector):
    """Instead of waiting, moves the loop's time."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise Stuck
        if not ready and timeout:
            self._loop.jump(timeout)
        return ready


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """What it returns, after a history in virtual time. Raises: Stuck."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The test of a whole history."""

    @functools.wraps(test)
    def play(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return play


def now_s() -> float:
    return asyncio.get_running_loop().time()
