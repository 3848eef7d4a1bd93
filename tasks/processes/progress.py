"""Progress of a run: which step its trainer has reached, and for how long nothing has moved."""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from tasks.processes.component import AttemptPlan
from tasks.processes.probes import size_of
from tasks.record.causes import STEPS_OF_SURVIVAL
from tasks.record.events import Emit
from tasks.record.metrics_file import FileFingerprint, MetricsFile
from tasks.spec.formatting import format_duration
from tasks.spec.probes import get_number
from tasks.spec.run import Progress

_TAIL_BYTES = 65536


#: Seconds between two samples at first, the part of the time since the first, and at most.
_SAMPLED_EVERY_S, _SAMPLED_PART, _SAMPLED_AT_MOST_S = 15.0, 0.02, 600.0


async def ever_more_seldom() -> AsyncIterator[None]:
    """For samples: the longer something lasts, the less a moment says."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        age_s = loop.time() - began
        await asyncio.sleep(min(max(_SAMPLED_EVERY_S, age_s * _SAMPLED_PART), _SAMPLED_AT_MOST_S))
        yield


#: Asks for the step reached; None when it can't be told now. Never raises but for a cancel.
ReadStep = Callable[[], Awaitable[float | None]]


async def _step_by_http(url: str, key: str, client: httpx.AsyncClient) -> float | None:
    """The step stands in the JSON that a GET answers."""
    try:
        async with asyncio.timeout(5.0):
            response = await client.get(url)
        return get_number(response.json(), key)
    except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError):
        return None


class JsonlProgress:
    """The step stands in the last line, of those that have it, of a file of JSON lines."""

    def __init__(
        self,
        path: Path,
        key: str,
        before: FileFingerprint | None = None,
        take: Callable[[float, dict[str, Any]], None] = lambda step, figures: None,
    ) -> None:
        """
        Args:
            before: the file when the attempt began; None: it begins now.
            take: given each line that has a step.
        """
        self._take = take
        self._file = MetricsFile(path, since=before or FileFingerprint.of(path))
        self._begun = 0
        self._key = key
        self._step: float | None = None

    async def step(self) -> float | None:
        while True:
            added = self._file.read_new()
            if self._begun != self._file.restarts:
                self._begun, self._step = self._file.restarts, None
            for figures in added:
                if (step := get_number(figures, self._key)) is not None:
                    self._step = step
                    self._take(step, figures)
            if not self._file.has_more:
                return self._step
            await asyncio.sleep(0)  # A file that grows fast must not keep others waiting.


def source_of(
    progress: Progress | None,
    directory: Path,
    metrics: FileFingerprint | None,
    client: httpx.AsyncClient,
    take: Callable[[float, dict[str, Any]], None],
) -> ReadStep | None:
    """How a run's step is read; None where it writes none. For `take` see `JsonlProgress`."""
    if progress is None:
        return None
    if progress.http is not None:
        return partial(_step_by_http, progress.http, progress.step, client)
    return JsonlProgress(directory / (progress.jsonl or ""), progress.step, metrics, take).step


#: What differs between two lines that say the same at different times.
_NUMBER = re.compile(
    r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b(?:0x)?(?=[a-f]*\d)[0-9a-f]{8,}\b"
    r"|[-+]?\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?|[-+]?\b(?:nan|inf)\b",
    re.IGNORECASE,
)
#: Of a log, so many different lines are remembered, each so far.
_SHAPES_AT_MOST, _SHAPE_LENGTH = 256, 200


class _Output:
    """What one component has to say that it has not said before."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read_bytes = 0
        #: Its size at the last look.
        self._size = -1
        #: A line without its end, as it was at the last look.
        self._begun = ""
        #: The lines of late, numbers aside; the oldest first.
        self._shapes: dict[str, None] = {}

    def has_grown(self) -> bool:
        """Whether the log has got a line that doesn't just repeat another, numbers aside."""
        try:
            if os.stat(self._log).st_size == self._size:
                return False
            with self._log.open("rb") as f:
                size = self._size = f.seek(0, 2)
                start = self._read_bytes if size >= self._read_bytes else 0
                start = max(start, size - _TAIL_BYTES)
                f.seek(start)
                said = f.read(size - start)
        except OSError:
            return False
        whole = max(said.rfind(b"\n"), said.rfind(b"\r")) + 1
        self._read_bytes = start + whole
        lines = said[:whole].decode("utf-8", "replace").splitlines()
        # Each is looked at, so that it is known the next time.
        is_new = any([self._is_new(line) for line in lines])
        begun = said[whole:].decode("utf-8", "replace")
        goes_on, self._begun = begun != self._begun, begun
        return is_new or (goes_on and bool(begun.strip()) and not self._is_known(begun))

    def _is_new(self, line: str) -> bool:
        shape = _shape_of(line)
        if not shape:
            return False
        is_known = shape in self._shapes
        self._shapes.pop(shape, None)
        self._shapes[shape] = None
        if len(self._shapes) > _SHAPES_AT_MOST:
            del self._shapes[next(iter(self._shapes))]
        return not is_known

    def _is_known(self, begun: str) -> bool:
        # It may have been cut within a number.
        shape = _shape_of(begun)
        shape = shape.rstrip(" 0.,:+-") or shape
        return any(known.startswith(shape) for known in self._shapes)


def _shape_of(line: str) -> str:
    return " ".join(_NUMBER.sub("0", line[: 2 * _SHAPE_LENGTH]).split())[:_SHAPE_LENGTH]


class Silence:
    """How long a run has made no step; until its first one, and where steps are not known, how long
    it has said nothing new."""

    def __init__(self, logs: Iterable[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._outputs = [_Output(log) for log in logs]
        self._clock = clock
        self._step: float | None = None
        self._since = clock()

    @property
    def is_by_step(self) -> bool:
        """Whether only steps count: a step 0 may be what a server says before training begins."""
        return bool(self._step)

    def restart(self) -> None:
        """Count from now: something was done that takes its time to be heard of."""
        self._since = self._clock()

    def lasts_s(self, step: float | None) -> float:
        """Seconds since the step changed, or before the first one since a component said something
        new."""
        # A step that can't be read just now is not a change.
        moved = step is not None and step != self._step
        if moved:
            self._step = step
        if moved or (not self.is_by_step and any([output.has_grown() for output in self._outputs])):
            self._since = self._clock()
        return self._clock() - self._since


_READ_EVERY_S = 0.5
#: Silence is looked at so often within its limit, but each ten seconds at least.
_LOOKS_A_LIMIT = 50
_LOOK_EVERY_S = 10.0
#: A step that takes so many times the median of those before it is slow, once there are so many.
_SLOW, _STEPS_OF_A_PACE = 10.0, 10
_PACE_AT_MOST = 1000
#: A trainer that has left wrote its last step before; what serves it over HTTP may lag.
_LAST_STEP_WITHIN_S = 3.0


@dataclass
class ProgressWatch:
    """The step of one attempt, and the silence of its components. As text, the step reached."""

    plan: AttemptPlan
    #: None: it writes none.
    read_step: ReadStep | None
    silence: Silence
    emit: Emit
    #: Whether silence means nothing at the moment.
    is_quiet: Callable[[], bool]
    #: The step last seen, when, and how long those before it took.
    step: float | None = None
    _stepped_s: float = 0.0
    _took_s: deque[float] = field(default_factory=lambda: deque(maxlen=_PACE_AT_MOST))
    #: When the next step is late enough to be said.
    _slow_at_s: float = math.inf
    #: `lengths[log]` at each of the last steps that can prove that an error was survived.
    _lengths: deque[dict[Path, int]] = field(
        default_factory=lambda: deque(maxlen=STEPS_OF_SURVIVAL)
    )

    def __str__(self) -> str:
        if self.step is None:
            return ""
        return f"step {self.step:g}" + (f" of {self.total:g}" if self.total else "")

    @property
    def total(self) -> float | None:
        """The step that is the last one, where it is known."""
        return self.plan.progress.total if self.plan.progress else None

    async def until_stalled(self) -> str:
        """Read the step from time to time, for ever.

        Returns: why, once nothing has moved for longer than the limit. A cancel ends it.
        """
        limit_s, progress = self.plan.stall_after_s, self.plan.progress
        if limit_s is None and self.read_step is None:
            await asyncio.Event().wait()  # There is nothing to look for.
        # All the logs are looked at for it, of which there may be a thousand.
        look_every_s = min(max((limit_s or 0) / _LOOKS_A_LIMIT, _READ_EVERY_S), _LOOK_EVERY_S)
        loop = asyncio.get_running_loop()
        look_at = loop.time()
        while True:
            await self._read()
            if limit_s is not None and loop.time() >= look_at:
                look_at = loop.time() + look_every_s
                if self.is_quiet():
                    self.silence.restart()
                silent_s = self.silence.lasts_s(self.step)
                if silent_s > limit_s:
                    return f"{self._what_is_missing()} for {silent_s:.0f} s"
            every_s = (progress and progress.every_s) or _READ_EVERY_S
            await asyncio.sleep(look_every_s if self.read_step is None else every_s)

    def _what_is_missing(self) -> str:
        if self.silence.is_by_step:
            return f"no new step since {self}"
        said = "no output of any component but lines that repeat"
        return f"no step, and {said}," if self.read_step is not None else f"{said},"

    def survived(self, log: Path) -> int:
        """How much of a component's log was there when training is known to have gone on since."""
        is_enough = len(self._lengths) == STEPS_OF_SURVIVAL
        return max(0, self._lengths[0].get(log, 0)) if is_enough else 0

    async def until_reached(self, step: float | None) -> float | None:
        """The step last seen, which is waited for a moment where it is below the one asked for."""
        deadline = time.monotonic() + _LAST_STEP_WITHIN_S
        await self._read()
        while (self.step or 0) < (step or 0) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            await self._read()
        return self.step

    async def _read(self) -> None:
        step = await self.read_step() if self.read_step is not None else None
        now = asyncio.get_running_loop().time()
        if step is not None and step != self.step:
            if self.step is not None:
                self._took_s.append(now - self._stepped_s)
                if step > self.step:
                    logs = (component.command.log for component in self.plan.components)
                    self._lengths.append({log: size_of(log) for log in logs})
            self.step, self._stepped_s = step, now
            if len(self._took_s) >= _STEPS_OF_A_PACE:
                self._slow_at_s = now + _SLOW * median(self._took_s)
            self.emit("run.progress", step=step, total=self.total)
        elif now > self._slow_at_s:
            median_s = (self._slow_at_s - self._stepped_s) / _SLOW
            self._slow_at_s = math.inf
            message = f"no step for {format_duration(now - self._stepped_s)} since {self}"
            message += f", where one takes {format_duration(median_s)}"
            self.emit("run.slow", step=self.step, median_s=median_s, message=message)
