"""Run an asyncio loop in a separate thread, for callers that block or handle signals."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tasks.processes.steady_threads import SteadyThreads

#: Number of threads in which an asyncio event loop executes functions that may block.
_THREADS = 4

T = TypeVar("T")


class LoopThread:
    """Runs an asyncio loop in a daemon thread until `close`. Safe to use from any other thread.

    The threads for `asyncio.to_thread` are started together with the loop. So `asyncio.to_thread`
    also works if the machine later allows no further thread.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        """
        Args:
            name: Name of the thread.
            on_error: The new thread calls this function with each error that no coroutine handles.
        """
        self._on_error = on_error
        self._loop = asyncio.new_event_loop()
        self._threads = SteadyThreads(_THREADS, f"{name} worker")
        self._loop.set_default_executor(self._threads)
        self._loop.set_exception_handler(self._handle_error)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """True until `close` is called."""
        return not self._loop.is_closed()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, wait for its end, and return its result or raise its error.

        Do not call this method from the thread of the loop: the wait would block the loop.
        """
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Schedule a call of a function in the thread of the loop, and return at once.

        Does nothing after `close`.
        """
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Stop the loop, and wait until its thread has ended."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._threads.shutdown(wait=False)
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _handle_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._on_error(error if error is not None else RuntimeError(context["message"]))
