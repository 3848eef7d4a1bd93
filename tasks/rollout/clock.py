"""Time of the fleet's asyncio loop, and waits with a limit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from random import Random

_log = logging.getLogger(__name__)

#: Largest number of seconds to wait for the end of cancelled tasks.
_ENDED_WITHIN_S = 5.0
#: Highest exponent in the pause between restarts, `first_s * 2**exponent`. Without this limit, the
#: float would overflow after many restarts.
_MAX_EXPONENT = 30


def now_s() -> float:
    """Return the time of the running asyncio loop in seconds. Only the difference between two times
    has a meaning.
    """
    return asyncio.get_running_loop().time()


async def ended(tasks: Collection[asyncio.Task[None]]) -> None:
    """Wait until cancelled tasks have ended, for at most 5 s, and log the tasks that still run."""
    if not tasks:
        return
    _, still_running = await asyncio.wait(tasks, timeout=_ENDED_WITHIN_S)
    for task in still_running:
        _log.error("The task %s was cancelled, but is still running", task.get_name())


def choose_pause_s(count: int, *, first_s: float, longest_s: float, random: Random) -> float:
    """Return the seconds to wait before the next restart of a server group.

    The pause doubles with each restart. A random part of up to one half is subtracted, so that
    groups that failed together do not restart together.

    Args:
        count: Number of earlier pauses in a row.
        first_s: Longest value of the first pause in seconds.
        longest_s: Longest pause in seconds.
        random: Source of random numbers.
    """
    full_pause_s = min(longest_s, first_s * 2.0 ** min(count, _MAX_EXPONENT))
    return full_pause_s * random.uniform(0.5, 1.0)
