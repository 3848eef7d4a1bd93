"""Send the requests of a pipeline to the Prefect server, also if it does not answer for a while."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from prefect.client.orchestration import SyncPrefectClient

from tasks.server.flow_runs import PrefectConnection, ServerAway

_log = logging.getLogger(__name__)

#: Seconds between two requests for the state of a stage's run, and between two tries of the same
#: request.
POLL_INTERVAL_S = 2.0
#: Seconds to wait for a silent Prefect server when the pipeline must end.
_SERVER_TIMEOUT_S = 30.0

T = TypeVar("T")


class ServerRequests:
    """Sends requests to the Prefect server, and repeats them while the server does not answer.

    After a call of `end_soon`, the waits become short, and a request is repeated for at most 30
    seconds. `end_soon`, `hurry` and `wake` may be called in any thread.
    """

    def __init__(self, api_url: str) -> None:
        """
        Args:
            api_url: Address of the Prefect server's API.
        """
        self._connection = PrefectConnection(api_url)
        #: Event that is set when this process must leave the pipeline: because the pipeline must
        #: end, or because the next flow process will continue the pipeline.
        self.ending = threading.Event()
        #: Event that is set to end the current wait. If no wait is running, the event ends the next
        #: wait at once.
        self._woken = threading.Event()
        #: True if the active runs must be cancelled without their grace periods.
        self.is_hurried = False

    def close(self) -> None:
        """Close the connection to the server. Call this after the last request."""
        self._connection.close()

    def end_soon(self) -> None:
        """Shorten all waits, because this process of the pipeline must end."""
        self.ending.set()
        self.wake()

    def wake(self) -> None:
        """End the current wait, because a run has ended.

        If no wait is running, the next wait ends at once.
        """
        self._woken.set()

    def hurry(self) -> None:
        """Skip the grace periods of cancelled runs, and no longer repeat requests to the server.

        Call `end_soon` first.
        """
        self.is_hurried = True

    def ask(self, request: Callable[[SyncPrefectClient], T]) -> T:
        """Send a request to the Prefect server, and repeat it while the server does not answer.

        Args:
            request: Function that sends the request. Its argument is a client of the server.

        Returns:
            The result of the function.

        Raises:
            ServerAway: The server did not answer, and the pipeline must end.
        """
        ending_since_s: float | None = None
        while True:
            try:
                with self._connection.client() as client:
                    return request(client)
            except ServerAway as error:
                if self.ending.is_set():
                    ending_since_s = ending_since_s or time.monotonic()
                    waited_s = time.monotonic() - ending_since_s
                    if self.is_hurried or waited_s > _SERVER_TIMEOUT_S:
                        raise
                _log.warning("A request to the Prefect server failed and is repeated: %s", error)
            self.wait(POLL_INTERVAL_S)

    def try_once(self, request: Callable[[SyncPrefectClient], object]) -> bool:
        """Send a request to the Prefect server once. A failure is only logged.

        Returns:
            True if the request succeeded.
        """
        try:
            with self._connection.client() as client:
                request(client)
        except Exception as error:
            _log.warning("A request to the Prefect server failed and is not repeated: %r", error)
            return False
        return True

    def wait(self, delay_s: float) -> bool:
        """Wait `delay_s` seconds, or until `wake` or `end_soon` is called.

        If `end_soon` was already called before the wait, wait only a quarter of `delay_s`.

        Returns:
            True if a call of `wake` has ended the wait.
        """
        if self.ending.is_set():
            time.sleep(delay_s / 4)
            return False
        was_woken = self._woken.wait(delay_s)
        self._woken.clear()
        return was_woken
