"""Background tasks of asyncio that have one owner, which cancels them and waits for their end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

_log = logging.getLogger(__name__)

#: Seconds to wait until a cancelled task has ended. A task takes longer only if it waits for a
#: thread that blocks.
_CANCELLED_WITHIN_S = 5.0


async def cancel_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and wait until they have ended, at most five seconds.

    Errors of the tasks are not raised. A task that has not ended in time is logged.
    """
    for task in tasks:
        # Do not cancel a task twice: the second cancel would interrupt the cleanup of the task.
        if not task.cancelling():
            task.cancel()
    # Leave out the current task, because a task cannot wait for its own end.
    others = [task for task in tasks if task is not asyncio.current_task()]
    if not others:
        return
    _, pending = await asyncio.wait(others, timeout=_CANCELLED_WITHIN_S)
    for task in pending:
        _log.warning(
            "the task %s has not ended %g s after it was cancelled",
            task.get_name(),
            _CANCELLED_WITHIN_S,
        )


class OwnedTasks:
    """The background tasks of one owner, for example of one component.

    Only the owner ends the tasks, with `cancel` or `finish`. Both wait until the tasks have ended.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        """
        Args:
            on_error: Called with each error that a task raises.
        """
        self._on_error = on_error
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a background task, and return the task."""
        task = asyncio.create_task(work, name=getattr(work, "__qualname__", None))
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    async def cancel(self) -> None:
        """Cancel all tasks, and wait until they have ended, at most five seconds."""
        await cancel_tasks(*self._tasks)

    async def finish(self) -> None:
        """Wait until all tasks have done their work. The tasks must limit their time themselves."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)
