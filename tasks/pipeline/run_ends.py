"""Wake a pipeline when one of its runs has ended, by the events of the Prefect server.

Without events, the next run of a pipeline would begin only after the pipeline's next regular read
of the states, and its GPUs would be idle until then. A lost event delays the next run only until
this read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from prefect.events.clients import get_events_subscriber
from prefect.events.filters import EventFilter, EventNameFilter

from tasks.server.flow_runs import make_context_thread

_log = logging.getLogger(__name__)

#: Prefix of the names of Prefect's events about flow runs. The resource ids of these events have
#: the same prefix.
_FLOW_RUN = "prefect.flow-run."
#: Names of the events about the end of a flow run.
_END_EVENTS = [
    f"{_FLOW_RUN}{state}" for state in ("Completed", "Failed", "Crashed", "Cancelled", "TimedOut")
]
#: Delay in seconds from the first loss of the event stream to the next connection. Each further
#: loss doubles this delay.
_RECONNECT_S = 1.0
#: Longest delay in seconds from a loss of the event stream to the next connection.
_RECONNECT_AT_MOST_S = 30.0
#: Longest wait in seconds for the end of the thread that reads the events.
_JOIN_TIMEOUT_S = 5.0


@contextmanager
def listen_for_run_ends(
    is_own_run: Callable[[str], bool], wake: Callable[[], None]
) -> Iterator[None]:
    """While the context is open, call `wake` after the end of each run of the pipeline.

    Args:
        is_own_run: Function that returns True if a flow run with this id belongs to the pipeline.
            The function is called in another thread.
        wake: Function that wakes the pipeline. The function is called in another thread.
    """
    loop = asyncio.new_event_loop()
    reading = loop.create_task(_read_events(is_own_run, wake))

    def run_loop() -> None:
        asyncio.set_event_loop(loop)
        try:
            with suppress(asyncio.CancelledError):
                loop.run_until_complete(reading)
        finally:
            loop.close()

    thread = make_context_thread("run-ends", run_loop)
    thread.start()
    try:
        yield
    finally:
        # The next call raises RuntimeError if an error has already ended the thread and closed its
        # event loop.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(reading.cancel)
        thread.join(_JOIN_TIMEOUT_S)


async def _read_events(is_own_run: Callable[[str], bool], wake: Callable[[], None]) -> None:
    """Until this task is cancelled, read the events about flow runs that have ended.

    If the event stream breaks, it is opened again.
    """
    reconnect_s = _RECONNECT_S
    while True:
        try:
            event_filter = EventFilter(event=EventNameFilter(name=_END_EVENTS))
            async with get_events_subscriber(filter=event_filter) as subscriber:
                reconnect_s = _RECONNECT_S
                async for event in subscriber:
                    if is_own_run(event.resource.id.removeprefix(_FLOW_RUN)):
                        wake()
        except Exception as error:
            # Continue without events: the pipeline also requests the states of its runs every few
            # seconds.
            _log.debug(
                "Muster lost the connection for the events of Prefect, and connects again in %.0f "
                "s: %r",
                reconnect_s,
                error,
            )
        await asyncio.sleep(reconnect_s)
        reconnect_s = min(2 * reconnect_s, _RECONNECT_AT_MOST_S)
