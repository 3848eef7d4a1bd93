"""Read files and folders that may not answer, each in a daemon thread of its own.

A read blocks for as long as its file system does not answer, for example a network file system
whose server is down. No time limit can end such a read. So the supervisor never reads such a file
itself: a `PlaceReader` reads the file in a thread, and the supervisor waits a limited time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from tasks.spec.formatting import format_duration

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: Default time limit of a read, in seconds.
ANSWERS_WITHIN_S = 2.0
#: Seconds between two calls of `must_stop` while `ask_blocking` waits.
_CHECK_STOP_EVERY_S = 0.1


class PlaceTimeout(TimeoutError):
    """A file, folder or server has not answered within the time limit of a read."""


class _Read(Generic[T]):
    """One call of a function that reads a file, a folder or a URL."""

    def __init__(self, work: Callable[[], T], within_s: float) -> None:
        self.work = work
        self.within_s = within_s
        self.result: Future[T] = Future()
        #: Time at which the call began, on the reader's clock. None while the call is queued.
        self.began_s: float | None = None

    def run(self) -> None:
        """Call the function, and store its result or its error in `result`.

        Does nothing if `result` was cancelled while this call was in the queue.
        """
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self.work())
        except Exception as error:
            self.result.set_exception(error)


class PlaceReader:
    """Calls functions that read a file, a folder or a URL, one at a time, in a daemon thread.

    The thread starts with the first call. If a call does not return within its time limit, later
    calls fail at once with `PlaceTimeout`. No further thread is started. All methods can be called
    from any thread.
    """

    def __init__(self, place: object, *, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            place: Path or URL that is read.
            clock: Returns the current time in seconds.
        """
        #: Path or URL that is read. A function that reads several files sets this attribute to the
        #: path of the current file.
        self.place = str(place)
        self._clock = clock
        self._lock = threading.Lock()
        self._reads: SimpleQueue[_Read[Any] | None] = SimpleQueue()
        self._has_thread = False
        #: The call that runs now; None if no call runs.
        self._running: _Read[Any] | None = None

    @property
    def unanswered_s(self) -> float:
        """Seconds since the current call began; 0 if no call runs."""
        read = self._running
        if read is None or read.began_s is None:
            return 0.0
        return self._clock() - read.began_s

    @property
    def is_overdue(self) -> bool:
        """True if the current call has not returned within its time limit."""
        read = self._running
        return read is not None and self.unanswered_s > read.within_s

    @property
    def is_idle(self) -> bool:
        """True if no call runs or is queued."""
        return self._running is None and self._reads.empty()

    def __str__(self) -> str:
        """Return a text such as `/data/metrics.jsonl has not answered for 40 s`."""
        return f"{self.place} has not answered for {format_duration(self.unanswered_s)}"

    def submit(self, work: Callable[[], T], within_s: float = ANSWERS_WITHIN_S) -> Future[T]:
        """Let the reader's thread call a function, and return at once.

        If no thread can be started, this method calls the function itself before it returns.

        Args:
            work: Function that reads a file or a folder.
            within_s: Time in seconds after which the file or folder counts as not answering.

        Returns:
            A future with the result or the error of the function.
        """
        read = _Read(work, within_s)
        with self._lock:
            if self._has_thread or self._start_thread():
                self._reads.put(read)
                return read.result
        read.run()
        return read.result

    def poll(self, work: Callable[[], object], within_s: float = ANSWERS_WITHIN_S) -> None:
        """Let the reader's thread call a function, unless another call runs. Return at once.

        The function itself must store its result. If the function raises OSError, the error is
        ignored.
        """
        if self.is_idle:
            self.submit(work, within_s).add_done_callback(_log_unexpected_error)

    async def ask(self, work: Callable[[], T], within_s: float = ANSWERS_WITHIN_S) -> T:
        """Let the reader's thread call a function, and wait for its result.

        Args:
            work: The function.
            within_s: Time limit in seconds.

        Raises:
            PlaceTimeout: The function has not returned in time, or an earlier call is overdue.
                Other errors of the function are raised, too.
        """
        if self.is_overdue:
            raise PlaceTimeout(str(self))
        return await self.until_done(self.submit(work, within_s), within_s)

    async def until_done(self, result: Future[T], within_s: float = ANSWERS_WITHIN_S) -> T:
        """Wait for the result of a function that was passed to `submit`, and return the result.

        Args:
            result: The future that `submit` returned.
            within_s: Time limit in seconds.

        Raises:
            PlaceTimeout: The function has not returned in time, or the thread of this object is
                blocked in a call that exceeds its time limit.
            Exception: The function has raised this error.
        """
        if result.done():
            return result.result()
        if self.is_overdue:
            raise PlaceTimeout(str(self))
        waiting = asyncio.wrap_future(result)
        try:
            await asyncio.wait({waiting}, timeout=within_s)
            if waiting.done():
                return waiting.result()
        finally:
            # The function may return after the event loop is closed. Without the cancellation, its
            # result would then be passed to the closed loop, which raises an error.
            waiting.cancel()
        raise PlaceTimeout(str(self))

    def ask_blocking(
        self,
        work: Callable[[], T],
        within_s: float = ANSWERS_WITHIN_S,
        must_stop: Callable[[], bool] = lambda: False,
    ) -> T:
        """Call a function in the reader's thread, block until it returns, and return its result.

        Args:
            work: The function.
            within_s: Time limit in seconds.
            must_stop: Function that is called several times per second. The wait ends if the
                function returns True.

        Raises:
            PlaceTimeout: The function has not returned in time, an earlier call is overdue, or
                `must_stop` returned True.
            Exception: The function has raised this error.
        """
        if self.is_overdue:
            raise PlaceTimeout(str(self))
        result = self.submit(work, within_s)
        done = threading.Event()
        result.add_done_callback(lambda _: done.set())
        deadline_s = time.monotonic() + within_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            if done.wait(min(left_s, _CHECK_STOP_EVERY_S)):
                return result.result()
            if must_stop():
                break
        result.cancel()
        raise PlaceTimeout(str(self))

    def close(self) -> None:
        """Let the reader's thread end after its running and queued calls. Return at once."""
        with self._lock:
            if self._has_thread:
                self._has_thread = False
                self._reads.put(None)

    def _start_thread(self) -> bool:
        """Start the reader's thread. Return False if this machine allows no further thread."""
        try:
            threading.Thread(target=self._work, name="place-reader", daemon=True).start()
        except RuntimeError:  # can't start new thread
            return False
        self._has_thread = True
        return True

    def _work(self) -> None:
        while (read := self._reads.get()) is not None:
            read.began_s = self._clock()
            self._running = read
            read.run()
            self._running = None


class PlaceReaders:
    """The readers of one attempt: one `PlaceReader` for each file, folder or URL."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: dict[str, PlaceReader] = {}

    def of(self, place: object) -> PlaceReader:
        """Return the reader of a file, folder or URL. Create the reader if it does not exist."""
        with self._lock:
            return self._readers.setdefault(str(place), PlaceReader(place))

    def list_unanswered(self, after_s: float) -> Iterator[PlaceReader]:
        """Yield the readers whose current call has not returned for `after_s` seconds."""
        with self._lock:
            readers = [*self._readers.values()]
        for reader in readers:
            if reader.unanswered_s > after_s:
                yield reader

    def close(self) -> None:
        """End the threads of all readers. A thread whose call does not return is abandoned."""
        with self._lock:
            for reader in self._readers.values():
                reader.close()


def _log_unexpected_error(result: Future[Any]) -> None:
    error = None if result.cancelled() else result.exception()
    if error is not None and not isinstance(error, OSError):
        _log.error(
            "an unexpected error occurred while Muster read a file, a folder or a URL",
            exc_info=error,
        )
