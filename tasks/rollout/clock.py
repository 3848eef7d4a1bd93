"""The time of the fleet's loop, and waits that end when they should."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine
from random import Random
from typing import Any, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: Code of ours that is cancelled ends at once, or after what it has to undo.
_ENDED_WITHIN_S = 5.0

#: What did not end in time and was cancelled: held until it has, for asyncio itself does not.
_abandoned: set[asyncio.Task[Any]] = set()


def now_s() -> float:
    """The time of the running loop, for differences only."""
    return asyncio.get_running_loop().time()


async def within(seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """What the coroutine returns, or TimeoutError after so many seconds, whatever it does.

    `asyncio.wait_for` waits for the end of what it has cancelled, which somebody else's code may
    put off for ever. Here it is cancelled and left to itself, also when the caller is cancelled.
    """
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait({task}, timeout=max(0.0, seconds))
    finally:
        if task.done():
            # Its caller may have been cancelled in the very moment in which it failed.
            _forget(task)
        else:
            task.cancel()
            _abandoned.add(task)
            task.add_done_callback(_forget)
    if not task.done():
        raise TimeoutError(f"no end after {seconds:g} s")
    return task.result()


async def ended(tasks: Collection[asyncio.Task[None]]) -> None:
    """Wait for tasks that were cancelled: a moment, or a bound where one of them does not end."""
    pending = (await asyncio.wait(tasks, timeout=_ENDED_WITHIN_S))[1] if tasks else ()
    for task in pending:
        _log.error("%s goes on although it was cancelled", task.get_name())


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        # Looked at, so that asyncio does not complain of an error nobody asked for.
        task.exception()


def pause_s(count: int, *, first_s: float, longest_s: float, random: Random) -> float:
    """The pause after `count` others in a row: twice as long each time, less up to a half, so that
    those that failed together spread."""
    # Past 2 ** 30 only the bound matters, and a float has no room for ever.
    longest = min(longest_s, first_s * 2.0 ** min(count, 30))
    return longest * random.uniform(0.5, 1.0)
