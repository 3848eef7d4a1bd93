"""Progress of a run: which step its trainer has reached, and silence."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import httpx

_TAIL_BYTES = 65536


class ProgressSource(Protocol):
    """Where the step is read from."""

    async def step(self) -> float | None:
        """The step reached; None when it can't be told now. Never raises but for a cancel."""


class HttpProgress:
    """The step stands in the JSON that a GET answers."""

    def __init__(self, url: str, key: str, client: httpx.AsyncClient) -> None:
        self._url = url
        self._key = key
        self._client = client

    async def step(self) -> float | None:
        try:
            async with asyncio.timeout(5.0):
                response = await self._client.get(self._url)
            return number_at(response.json(), self._key)
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):
            return None


class JsonlProgress:
    """The step stands in the last whole line of a file of JSON lines."""

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = key

    async def step(self) -> float | None:
        try:
            with self._path.open("rb") as f:
                f.seek(0, 2)
                f.seek(max(0, f.tell() - _TAIL_BYTES))
                lines = f.read().split(b"\n")[:-1]
        except OSError:
            return None
        for line in reversed(lines):
            try:
                step = number_at(json.loads(line), self._key)
            except ValueError:
                continue
            if step is not None:
                return step
        return None


def number_at(content: Any, key: str) -> float | None:
    """The number at a dotted key of decoded JSON; None where there is none."""
    for part in key.split("."):
        if not isinstance(content, dict) or part not in content:
            return None
        content = content[part]
    is_number = isinstance(content, (int, float)) and not isinstance(content, bool)
    return content if is_number else None


class Silence:
    """How long a run has shown neither progress nor output."""

    def __init__(
        self,
        logs: Iterable[Path],
        own_questions: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            own_questions: texts such as `GET /status` that mark a line as the mere echo of a
                question of ours: a server that logs each request is not alive for that.
        """
        self._read_bytes = dict.fromkeys(logs, 0)
        self._own_questions = tuple(own_questions)
        self._clock = clock
        self._step: float | None = None
        self._since = clock()

    def lasts_s(self, step: float | None) -> float:
        """Seconds since the step changed or a component wrote a line of its own."""
        # A step that can't be read just now is not a change.
        moved = step is not None and step != self._step
        if moved:
            self._step = step
        if any([self._has_output(log) for log in self._read_bytes]) or moved:
            self._since = self._clock()
        return self._clock() - self._since

    def _has_output(self, log: Path) -> bool:
        try:
            with log.open("rb") as f:
                size = f.seek(0, 2)
                start = self._read_bytes[log]
                self._read_bytes[log] = size
                if size - start > _TAIL_BYTES or size < start:
                    return True
                f.seek(start)
                lines = f.read(size - start).decode("utf-8", "replace").splitlines()
        except OSError:
            return False
        return any(
            line.strip() and not any(echo in line for echo in self._own_questions) for line in lines
        )
