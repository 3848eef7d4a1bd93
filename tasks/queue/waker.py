"""Wakes the gate when something has happened on the server that it should look at: a run that has
ended, one that was submitted.

Events are a hint and no more: whoever is woken looks at the ledger, and polls besides.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from types import TracebackType

from prefect.events.clients import get_events_subscriber
from prefect.events.filters import EventFilter, EventNameFilter

_log = logging.getLogger(__name__)

#: Of flow runs: they have ended, or are there to be started. That of a waiting run whose message
#: was rewritten is among them; rewrites are rare.
_EVENTS = [
    f"prefect.flow-run.{name}"
    for name in (
        *("Completed", "Failed", "Crashed", "Cancelled", "TimedOut"),
        *("Scheduled", "Late", "PendingResources", "AwaitingRetry"),
    )
]
#: Events that come together are worth one look.
_SETTLE_S = 0.03
#: The stream was cut: it is opened again after so long, at most.
_AGAIN_S, _AGAIN_AT_MOST_S = 1.0, 30.0


class Waker:
    """Calls `wake` after events, and when `again_in` says so; one call at a time."""

    def __init__(self, wake: Callable[[], Awaitable[object]]) -> None:
        self._wake = wake
        self._woken = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        #: When the stream of events was cut last, by the loop's clock: the server was away then.
        self._cut_at = -math.inf

    def was_cut_since(self, at: float) -> bool:
        """Whether the server was away at some time since, as far as this process knows.

        Args:
            at: by the clock of the loop.
        """
        return self._cut_at >= at

    async def __aenter__(self) -> Waker:
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._work())]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def again_in(self, delay_s: float) -> None:
        """Wake after so many seconds, whatever happens; an earlier call with a later time is
        forgotten."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if not self._timer.cancelled() and loop.time() < self._timer.when():
                delay_s = min(delay_s, self._timer.when() - loop.time())
            self._timer.cancel()
        self._timer = loop.call_later(delay_s, self._woken.set)

    async def _work(self) -> None:
        while True:
            await self._woken.wait()
            await asyncio.sleep(_SETTLE_S)
            self._woken.clear()
            began = asyncio.get_running_loop().time()
            try:
                await self._wake()
            except Exception as error:
                # The poll, which comes anyway, says so aloud if that lasts.
                _log.debug("woken in vain: %r", error)
            # A long queue takes long to read: half of the time at most goes into that.
            await asyncio.sleep(min(2.0, asyncio.get_running_loop().time() - began))

    async def _listen(self) -> None:
        again_s = _AGAIN_S
        while True:
            try:
                wanted = EventFilter(event=EventNameFilter(name=_EVENTS))
                async with get_events_subscriber(filter=wanted) as subscriber:
                    again_s = _AGAIN_S
                    # What happened while nobody listened.
                    self._woken.set()
                    async for _event in subscriber:
                        self._woken.set()
            except Exception as error:
                self._cut_at = asyncio.get_running_loop().time()
                _log.debug("no events, again in %.0f s: %r", again_s, error)
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, _AGAIN_AT_MOST_S)
