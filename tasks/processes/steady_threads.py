"""Threads that are started once, so that later work needs no new thread.

On a machine or in a container whose limit of processes is reached, no thread can be started. A run
whose programs have used up the limit must still be supervised.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class SteadyThreads(ThreadPoolExecutor):
    """An executor that starts all its threads when it is created, and no thread later.

    The threads do not keep the process from exiting. If no thread can be started, `submit` executes
    the work in the calling thread.

    The base class is `ThreadPoolExecutor` only because asyncio accepts no other type as the default
    executor of a loop. The threads of the base class are not used.
    """

    def __init__(self, count: int, name: str) -> None:
        """
        Args:
            count: Number of threads. Fewer threads are started if the machine allows no more.
            name: Name of the threads.
        """
        super().__init__(max_workers=count)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started: list[threading.Thread] = []
        for _ in range(count):
            thread = threading.Thread(target=self._execute, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                started = len(self._started)
                _log.warning("only %d of %d threads of %s: %s", started, count, name, error)
                break
            self._started.append(thread)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Execute a function in one of the threads, and return a future with its result."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        if self._started:
            self._work.put(run)
        else:
            run()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end after all work that was submitted before. Return at once."""
        for _ in self._started:
            self._work.put(None)

    def _execute(self) -> None:
        while (run := self._work.get()) is not None:
            run()
