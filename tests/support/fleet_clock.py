"""An asyncio event loop with virtual time.

Tests with long waits end at once, and their timers fire in the same order in every run.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Stuck(Exception):
    """A coroutine waits forever: the event loop has no ready task and no timer."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop with a virtual clock, which jumps to the next timer if no task is ready.

    The time starts at 1,000 seconds. Coroutines in the loop must not wait for real input or output.
    """

    def __init__(self) -> None:
        self._now_s = 1000.0
        super().__init__(_NoWait(self))

    def time(self) -> float:
        return self._now_s

    def jump(self, seconds: float) -> None:
        """Advance the virtual time."""
        self._now_s += seconds


class _NoWait(selectors.DefaultSelector):
    """Selector that never waits. Instead of waiting, the selector advances the virtual time."""

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
    """Run a coroutine in virtual time, and return its result.

    Raises:
        Stuck: The coroutine waits forever.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Decorator for an asynchronous test, which lets the test run in virtual time."""

    @functools.wraps(test)
    def run_test(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return run_test


def now_s() -> float:
    """Return the virtual time of the running event loop, in seconds."""
    return asyncio.get_running_loop().time()
