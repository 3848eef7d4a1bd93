"""The time of the fleet's loop, and waits that end when they should."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from random import Random

_log = logging.getLogger(__name__)

#: Code of ours that is cancelled ends at once, or after what it has to undo.
_ENDED_WITHIN_S = 5.0


def now_s() -> float:
    """The time of the running loop, for differences only."""
    return asyncio.get_running_loop().time()


async def ended(tasks: Collection[asyncio.Task[None]]) -> None:
    """Wait for tasks that were cancelled: a moment, or a bound where one of them does not end."""
    pending = (await asyncio.wait(tasks, timeout=_ENDED_WITHIN_S))[1] if tasks else ()
    for task in pending:
        _log.error("%s goes on although it was cancelled", task.get_name())


def pause_s(count: int, *, first_s: float, longest_s: float, random: Random) -> float:
    """The pause after `count` others in a row: twice as long each time, less up to a half, so that
    those that failed together spread."""
    # Past 2 ** 30 only the bound matters, and a float has no room for ever.
    longest = min(longest_s, first_s * 2.0 ** min(count, 30))
    return longest * random.uniform(0.5, 1.0)
