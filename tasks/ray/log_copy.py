"""The log of a driver, copied byte by byte into a local file while it grows."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tasks.ray.dashboard import Dashboard, Denied, NoAnswer

_AGAIN_AFTER_S = 0.5
#: For the node's agent to answer, once the job has ended.
_TRIES = 5


class LogCopy:
    """Ray offers a log from its first byte on. The local file says how much of it is there
    already, so neither a lost connection nor a new process leaves a gap or a repeat in it.
    """

    def __init__(self, dashboard: Dashboard, submission_id: str, path: Path) -> None:
        self._dashboard = dashboard
        self._submission_id = submission_id
        self._path = path
        self._is_writing = asyncio.Lock()

    async def follow(self, node_id: str) -> None:
        """Copy while the job runs, for ever; a cancel ends it.

        Args:
            node_id: The driver's node.
        """
        while True:
            # A disk that is full may have room again, and `complete` says what is missing.
            with contextlib.suppress(NoAnswer, Denied, OSError):
                await self._copy(node_id, follow=True)
            await asyncio.sleep(_AGAIN_AFTER_S)

    async def complete(self, node_id: str) -> str:
        """Fetch what is missing of a log that grows no more.

        Returns: why the end of it may be missing; empty when it is whole.
        """
        problem = ""
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(_AGAIN_AFTER_S)
            try:
                await self._copy(node_id, follow=False)
                return ""
            except (NoAnswer, Denied, OSError) as error:
                problem = str(error)
        return f"the end of {self._path.name} may be missing: {problem}"

    async def _copy(self, node_id: str, *, follow: bool) -> None:
        async with self._is_writing:
            log = await asyncio.to_thread(_open, self._path)
            try:
                skip = os.fstat(log).st_size
                chunks = self._dashboard.log(self._submission_id, node_id, follow=follow)
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        fresh, skip = beyond(chunk, skip)
                        if fresh:
                            await _finish(asyncio.to_thread(_write, log, fresh))
            finally:
                os.close(log)


def beyond(chunk: bytes, skip: int) -> tuple[bytes, int]:
    """What of a chunk is new, and how much is to be skipped after it.

    Args:
        skip: how many bytes from the chunk's first on are known already.
    """
    return chunk[skip:], max(0, skip - len(chunk))


async def _finish(writing: Coroutine[Any, Any, None]) -> None:
    """A thread's write is not undone by a cancel, so it is waited for."""
    task = asyncio.ensure_future(writing)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
