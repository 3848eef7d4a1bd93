"""The time of the fleet's loop, and waits that end when they should."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

#: What did not end in time and was cancelled: held until it has, for asyncio itself does not.
_abandoned: set[asyncio.Task[Any]] = set()


class Clock:
    """The time of the running loop; in a loop with a time of its own it is that time."""

    def monotonic_s(self) -> float:
        """Seconds since some moment; for differences only."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))


async def within(seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """What the coroutine returns, or TimeoutError after so many seconds, whatever it does.

    `asyncio.wait_for` waits for the end of what it has cancelled, which somebody else's code may
    put off for ever. Here it is cancelled and left to itself, also when the caller is cancelled.
    """
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait({task}, timeout=max(0.0, seconds))
    finally:
        if not task.done():
            task.cancel()
            _abandoned.add(task)
            task.add_done_callback(_forget)
    if not task.done():
        raise TimeoutError(f"no end after {seconds:g} s")
    return task.result()


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        # Looked at, so that asyncio does not complain of an error nobody asked for.
        task.exception()
