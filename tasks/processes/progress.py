"""Read the step that the trainer of a run has reached, and measure the time without progress."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import httpx

from tasks.processes.component import AttemptPlan
from tasks.processes.metrics_search import find_metrics
from tasks.processes.place_reader import PlaceReader, PlaceReaders, PlaceTimeout
from tasks.record.causes import STEPS_OF_SURVIVAL
from tasks.record.events import Emit
from tasks.record.log_file import HeldLog
from tasks.record.metrics_file import FileFingerprint, MetricsFile
from tasks.record.places import is_own_json_file
from tasks.record.resume_check import compare_first_step
from tasks.spec.formatting import format_duration, join_words, suggest_name
from tasks.spec.probes import get_number, get_step, is_whole_number
from tasks.spec.run import Progress
from tasks.spec.values import describe_value, get_value, list_numbers

#: Largest number of bytes at the end of a log that one check reads.
_TAIL_BYTES = 65536


#: Smallest number of seconds between two samples of the GPU utilisation.
_SAMPLED_EVERY_S = 15.0
#: Interval between two samples of the GPU utilisation, as a share of the time since the start.
_SAMPLED_PART = 0.02
#: Largest number of seconds between two samples of the GPU utilisation.
_SAMPLED_AT_MOST_S = 600.0


async def growing_intervals() -> AsyncIterator[None]:
    """Yield each time a sample of the GPU utilisation is due.

    The interval grows with the time since the first call, from 15 seconds to 10 minutes.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        age_s = loop.time() - began
        await asyncio.sleep(min(max(_SAMPLED_EVERY_S, age_s * _SAMPLED_PART), _SAMPLED_AT_MOST_S))
        yield


#: Number of JSON objects that Muster reads before it warns the user that no object contains a
#: training step. The key that the spec names in `progress.step` is then probably wrong.
_PROBABLY_WRONG_AFTER = 20
#: Time limit in seconds for one read of the metrics file. If a read takes longer, Muster assumes
#: that the file system does not answer.
_READ_WITHIN_S = 1.0
#: Time limit, in seconds, of the search for the right metrics file if `progress.jsonl` names a
#: wrong file.
_SEARCH_WITHIN_S = 5.0
#: Largest number of keys and files that a message lists.
_LISTED_AT_MOST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingStep:
    """Reason why the training step of a run is unknown. `str` returns the reason."""

    #: Clause that names the file or URL, and says why no step could be read from it.
    problem: str
    #: Advice for the user. The advice repeats the keys or files that `problem` names.
    remedy: str
    #: True if the training has probably written no metrics yet. Missing metrics are normal before
    #: the first step, so they do not explain a hang.
    is_before_first_line: bool = False

    def __str__(self) -> str:
        return self.problem


#: Matches the line of the module `muster_metrics` in the log of a process that writes no metrics.
#: The group contains the value of the variable RANK.
_NOT_FIRST_RANK = re.compile(
    r"\bmuster_metrics: this process writes no metrics, because RANK is (\S+)\. If"
)


def name_rank(missing: MissingStep, log: str) -> MissingStep:
    """Add the variable RANK to the reason for missing metrics if the training's log names RANK.

    The module `muster_metrics` writes metrics only in the process of rank 0. If a shell still has
    `RANK=1` from earlier work, the only process of a training has rank 1 and writes no metrics.

    In a training with several processes, the log of another rank may name RANK. The metrics of rank
    0 are then missing for another reason, such as a wrong path. So the function keeps the advice of
    `missing`.

    Args:
        missing: Reason for the unknown training step. The metrics file has no lines.
        log: End of the log of the training.

    Returns:
        The reason with RANK, or `missing` if the log does not name RANK.
    """
    match = _NOT_FIRST_RANK.search(log)
    if match is None:
        return missing
    return replace(
        missing,
        problem=f"{missing.problem}. One process wrote no metrics, because its variable RANK is "
        f"{match[1]}. If the training has only one process, remove the variable: unset RANK",
        remedy="If the training has only one process, remove the variable RANK from the shell or "
        "container that starts the run (`unset RANK`), or write `env: {RANK: '0'}` into the spec. "
        f"Otherwise: {missing.remedy}",
    )


class HttpProgress:
    """Reads the step from the JSON answer of an HTTP server (`progress.http` in the run spec)."""

    def __init__(self, url: str, key: str, client: httpx.AsyncClient) -> None:
        """
        Args:
            url: The URL.
            key: Key of the training step in the JSON object.
            client: HTTP client for the requests.
        """
        self._url = url
        self._key = key
        self._client = client
        self._has_step = False
        #: Reason why a request returned no step; None if every request returned a step.
        self._problem: MissingStep | None = None

    @property
    def unanswered(self) -> str:
        """Always an empty text, because no read hangs: each request ends after at most 5 s."""
        return ""

    async def step(self) -> float | None:
        """Return the step, or None if the request fails or the answer contains no step."""
        try:
            async with asyncio.timeout(5.0):
                response = await self._client.get(self._url)
            content = response.json()
            step = get_step(content, self._key)
        except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError) as error:
            # If an earlier answer of the server had a fault, keep the description of that fault.
            # The server may have ended since then, so this new error says less.
            if self._problem is None:
                self._problem = MissingStep(
                    problem=f"{self._url} did not answer with JSON ({type(error).__name__})",
                    remedy=f"Check that a server at {self._url} answers with JSON during the "
                    "whole training, or correct `progress.http` in the spec.",
                )
            return None
        if step is None:
            self._problem = _describe_lack(self._url, content, self._key)
        else:
            self._has_step = True
        return step

    async def explain_missing_step(self, *, is_over: bool) -> MissingStep | None:
        """Return the reason why the training step is unknown, or None.

        See `StepSource.explain_missing_step`.
        """
        # Before the training begins, answers without a step are normal. Muster cannot see whether
        # the training has begun. So return the reason only after the end of the training.
        return self._problem if is_over and not self._has_step else None


class JsonlProgress:
    """Reads the training step from a JSON lines file (`progress.jsonl` in the run spec).

    The step is taken from the last line that contains a step. The file is read in another thread,
    because its file system may not answer. While the file system does not answer, the last known
    step is returned.
    """

    def __init__(
        self,
        path: Path,
        key: str,
        before: FileFingerprint | None = None,
        take: Callable[[float, dict[str, Any]], None] = lambda step, figures: None,
        reader: PlaceReader | None = None,
    ) -> None:
        """
        Args:
            path: The file. It need not exist yet.
            key: Key of the training step in the JSON object of each line.
            before: Fingerprint of the file at the start of the attempt. Lines that the file
                contained at that time are skipped. If None, the attempt starts now, and this object
                takes the fingerprint itself.
            take: Called with the step and the JSON object of each line that contains a step.
            reader: Reader of the file. None to create a reader.
        """
        self._path = path
        self._take = take
        self._reader = reader or PlaceReader(path)
        self._before = before
        #: The metrics file; None until the reader's thread has opened it. Only that thread uses it.
        self._file: MetricsFile | None = None
        #: Groups of new lines that the reader's thread has read, oldest group first. Each group has
        #: a flag: True if the file was rewritten, so that the lines of earlier groups are outdated.
        self._added: deque[tuple[bool, list[dict[str, Any]]]] = deque()
        self._key = key
        self._step: float | None = None
        #: Number of JSON objects without a step that came before the first object with a step.
        self._without_step = 0
        #: Last JSON object whose value of `key` was no training step. None if there was no such
        #: object.
        self._last_without_step: dict[str, Any] | None = None
        self._has_step = False
        with suppress(PlaceTimeout):
            self._reader.ask_blocking(self._open, _READ_WITHIN_S)

    @property
    def unanswered(self) -> str:
        """A text that says for how long the file has not answered; empty if the file answers."""
        return str(self._reader) if self._reader.is_overdue else ""

    async def step(self) -> float | None:
        """Return the step of the last line that contains a step; None if there is none."""
        has_more = True
        while has_more:
            try:
                has_more = await self._reader.ask(self._read_new, _READ_WITHIN_S)
            except PlaceTimeout:
                has_more = False
            self._take_added()
        return self._step

    def _open(self) -> MetricsFile:
        """Open the file at the first call, and return it. Call this only in the reader's thread."""
        if self._file is None:
            since = self._before or FileFingerprint.of(self._path)
            self._file = MetricsFile(self._path, since=since)
        return self._file

    def _read_new(self) -> bool:
        """Read a part of the new lines, in the reader's thread. Return True if new lines remain."""
        file = self._open()
        restarts = file.restarts
        added = file.read_new()
        self._added.append((file.restarts != restarts, added))
        return file.has_more

    def _take_added(self) -> None:
        """Set `_step` to the last training step in the lines that the reader's thread has read."""
        while self._added:
            was_rewritten, added = self._added.popleft()
            if was_rewritten:
                self._step = None
            for figures in added:
                if (step := get_step(figures, self._key)) is not None:
                    self._step = step
                    self._has_step = True
                    self._take(step, figures)
                else:
                    self._without_step += 1
                    self._last_without_step = figures

    async def explain_missing_step(self, *, is_over: bool) -> MissingStep | None:
        """Return the reason why the training step is unknown, or None.

        See `StepSource.explain_missing_step`.
        """
        if self._has_step:
            return None
        if self._last_without_step is not None:
            is_likely = is_over or self._without_step >= _PROBABLY_WRONG_AFTER
            lack = _describe_lack(str(self._path), self._last_without_step, self._key)
            return lack if is_likely else None
        if not is_over:
            return None
        try:
            return await self._reader.ask(
                partial(_describe_file, self._path, self._key), _READ_WITHIN_S
            )
        except PlaceTimeout as error:
            return _describe_unanswered_file(str(error))


def _describe_unanswered_file(problem: str) -> MissingStep:
    """Return the reason why the step is unknown: the metrics file does not answer.

    Args:
        problem: Text that says for how long the file has not answered.
    """
    return MissingStep(
        problem=problem,
        remedy="Check the file system of the metrics file, for example an NFS mount, then start "
        "the run again.",
    )


def _describe_lack(source: str, content: object, key: str) -> MissingStep:
    """Return the reason why decoded JSON contains no step.

    Args:
        source: Path of the file, or URL.
        content: The decoded JSON.
        key: Key of the step in the JSON object.
    """
    missing = object()
    value = get_value(content, key, missing)
    if get_number(content, key) is not None:
        # The value is a number, but not a whole number. So `key` probably does not name the step,
        # but another metric, such as a loss.
        steps = [name for name, number in list_numbers(content) if is_whole_number(number)]
        if not steps:
            has_steps = "has no whole number"
            remedy = f"Change the training so that it writes its step as a number into {source}."
        else:
            has_steps = f"has whole numbers in {_list_some(steps)}"
            remedy = (
                f"Set `progress.step` in the spec to the name that {source} uses for the training "
                f"step. {source} {has_steps}."
            )
        return MissingStep(
            problem=f"the value of `{key}` in {source} is {value:g}, but a training step must be a "
            f"whole number; {source} {has_steps}",
            remedy=remedy,
        )
    if value is not missing:
        return MissingStep(
            problem=f"the value of `{key}` in {source} is {describe_value(value)}, but must be a "
            "finite number",
            remedy=f"Change the training so that `{key}` in {source} is a number, or write another "
            "key into `progress.step` of the spec.",
        )
    keys = [name for name, _ in list_numbers(content)]
    if not keys:
        return MissingStep(
            problem=f"{source} has no `{key}`, and no other number",
            remedy=f"Change the training so that it writes its step as the number `{key}` into "
            f"{source}.",
        )
    advice = suggest_name(key, keys)
    end = f"; {advice}" if advice else ""
    return MissingStep(
        problem=f"{source} has no number `{key}`, but has {_list_some(keys)}{end}",
        remedy=f"Set `progress.step` in the spec to the name that {source} uses for the training "
        f"step. The file has numbers with these names: {_list_some(keys)}.",
    )


def _describe_file(path: Path, key: str) -> MissingStep:
    """Return the reason why a metrics file has no new JSON object.

    Args:
        path: The metrics file.
        key: Key of the training step in the JSON object of each line.
    """
    advice = (
        f'Change the training so that it appends a line such as {{"{key}": 1}} to {path} after '
        "each step. The module muster_metrics does this: see `muster docs your-training`."
    )
    other = "Or set `progress.jsonl` in the spec to the path of another file."
    if path.exists():
        return MissingStep(
            problem=f"{path} has no new line with a JSON object",
            remedy=f"{advice} {other}",
            is_before_first_line=True,
        )
    try:
        names = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return MissingStep(
            problem=f"{path} and its folder do not exist",
            remedy=f"{advice} {other}",
            is_before_first_line=True,
        )
    similar = [
        name
        for name in names
        if name.endswith((".json", ".jsonl", ".ndjson")) and not is_own_json_file(name)
    ]
    if not similar:
        return MissingStep(
            problem=f"{path} does not exist",
            remedy=f"{advice} {other}",
            is_before_first_line=True,
        )
    return MissingStep(
        problem=f"{path} does not exist, but its folder has {_list_some(similar)}",
        remedy="In `progress.jsonl` of the spec, write the path of the file to which the training "
        f"writes its metrics. {path.parent} has {_list_some(similar)}.",
    )


def _list_some(names: Sequence[str]) -> str:
    """List at most `_LISTED_AT_MOST` names in a text, and say how many names are left out."""
    left_out = len(names) - _LISTED_AT_MOST
    if left_out <= 0:
        return join_words(names)
    return f"{', '.join(names[:_LISTED_AT_MOST])} and {left_out} more"


class StepSource(Protocol):
    """Source of the step that the trainer has reached."""

    @property
    def unanswered(self) -> str:
        """A text that names the file, and says for how long its file system has not answered.

        The text is empty if the file can be read.
        """

    async def step(self) -> float | None:
        """Return the step; None if it is unknown now. Raise no errors."""

    async def explain_missing_step(self, *, is_over: bool) -> MissingStep | None:
        """Return the reason why the training step was never known.

        Args:
            is_over: True if the training is over. During the training, a reason is returned only
                if the source was read several times and contained no step.

        Returns:
            None if a step was read, or if the training continues and may still report a step.
        """


def make_step_reader(
    progress: Progress | None,
    directory: Path,
    metrics: FileFingerprint | None,
    client: httpx.AsyncClient,
    take: Callable[[float, dict[str, Any]], None],
    readers: PlaceReaders,
) -> StepSource | None:
    """Return the object that reads the training step of a run.

    Args:
        progress: The setting `progress` of the run spec.
        directory: Directory from which relative paths are resolved.
        metrics: Fingerprint of the metrics file at the start of the attempt, see `JsonlProgress`.
        client: HTTP client for `progress.http`.
        take: Called with the step and the JSON object of each line of the metrics file that
            contains a step.
        readers: Object with the threads that read the files of the attempt.

    Returns:
        None if the run spec has no setting `progress`.
    """
    if progress is None:
        return None
    if progress.http is not None:
        return HttpProgress(progress.http, progress.step, client)
    path = directory / (progress.jsonl or "")
    return JsonlProgress(path, progress.step, metrics, take, readers.of(path))


#: Pattern of ids and numbers. Log lines that differ only in ids and numbers count as equal.
_NUMBER = re.compile(
    r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b(?:0x)?(?=[a-f]*\d)[0-9a-f]{8,}\b"
    r"|[-+]?\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?|[-+]?\b(?:nan|inf)\b",
    re.IGNORECASE,
)
#: Largest number of different lines of a log that are remembered, to recognise repeated lines.
_SHAPES_AT_MOST = 256
#: Number of characters at the start of a log line that are compared with earlier lines.
_SHAPE_LENGTH = 200


class _Output:
    """Detects new lines in the log of one component. Repeated lines do not count as new."""

    def __init__(self, log: HeldLog) -> None:
        self._log = log
        #: Number of bytes from the start of the log to the end of the last complete line that was
        #: read.
        self._read_bytes = 0
        #: Size of the log in bytes at the last check; -1 before the first check.
        self._size = -1
        #: Incomplete line at the end of the log, from the last check; empty if there was none.
        self._partial_line = ""
        #: Recent lines with all numbers and ids replaced by 0, oldest first. The dictionary is used
        #: as an ordered set.
        self._shapes: dict[str, None] = {}

    def has_grown(self) -> bool:
        """Return True if the log has a new line since the last check.

        A line does not count as new if it differs from a recent line only in numbers and ids.
        """
        try:
            if self._log.size() == self._size:
                return False
            with self._log.source.open("rb") as f:
                size = self._size = f.seek(0, 2)
                start = self._read_bytes if size >= self._read_bytes else 0
                start = max(start, size - _TAIL_BYTES)
                f.seek(start)
                data = f.read(size - start)
        except OSError:
            return False
        complete_bytes = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._read_bytes = start + complete_bytes
        lines = data[:complete_bytes].decode("utf-8", "replace").splitlines()
        # Pass a list to `any`, because `_is_new` must remember every line. With a generator, `any`
        # would stop at the first new line.
        is_new = any([self._is_new(line) for line in lines])
        partial_line = data[complete_bytes:].decode("utf-8", "replace")
        has_changed = partial_line != self._partial_line
        self._partial_line = partial_line
        return is_new or (
            has_changed and bool(partial_line.strip()) and not self._is_known(partial_line)
        )

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

    def _is_known(self, partial_line: str) -> bool:
        # The line is incomplete. If the line ends with a number, more digits may follow. So compare
        # only the text before this number.
        shape = _shape_of(partial_line)
        shape = shape.rstrip(" 0.,:+-") or shape
        return any(known.startswith(shape) for known in self._shapes)


def _shape_of(line: str) -> str:
    """Return the beginning of a line with all numbers and ids replaced by 0.

    Lines that differ only in numbers and ids have the same result.
    """
    return " ".join(_NUMBER.sub("0", line[: 2 * _SHAPE_LENGTH]).split())[:_SHAPE_LENGTH]


class Silence:
    """Measures the time in which a run has shown no sign of work.

    Progress and the growth of a checkpoint are signs of work. A new step is progress. Until the
    first step is known, a new line in a log of a component is progress, too.
    """

    def __init__(
        self,
        logs: Iterable[HeldLog],
        clock: Callable[[], float] = time.monotonic,
        resumed_step: float | None = None,
    ) -> None:
        """
        Args:
            logs: Logs of the components.
            clock: Returns the current time in seconds.
            resumed_step: Step of the checkpoint from which the attempt starts; None if unknown. A
                report of this step does not count as progress, because the trainer may report the
                step before it trains.
        """
        self._logs = tuple(logs)
        self._outputs = [_Output(log) for log in self._logs]
        self._clock = clock
        self._resumed_step = resumed_step
        self._step: float | None = None
        #: Time of the last call of `restart`. If `restart` was never called, the time at which this
        #: object was created.
        self._start_s = clock()
        #: Time of the last progress. If there was none, the time of the last call of `restart`.
        self._progress_s = clock()
        #: Time at which a checkpoint last grew; None if no checkpoint has grown.
        self._growth_s: float | None = None

    @property
    def is_by_step(self) -> bool:
        """True if only a new step counts as progress, and new lines in logs do not.

        The value becomes True with the first step other than 0. Step 0 does not count, because a
        server may report step 0 before the training has begun.
        """
        return bool(self._step)

    def restart(self) -> None:
        """Set the times of the last start and of the last progress to the current time."""
        self._start_s = self._clock()
        self._progress_s = self._start_s

    def note_growth(self, ago_s: float) -> None:
        """Record that a checkpoint has grown, which is a sign of work.

        Args:
            ago_s: Seconds since the checkpoint last grew.
        """
        self._growth_s = self._clock() - ago_s

    @property
    def has_grown_since_progress(self) -> bool:
        """True if a checkpoint has grown since the last new step or the last call of `restart`.

        If `is_by_step` is False, a new line in a log counts like a new step.
        """
        return self._growth_s is not None and self._growth_s > self._progress_s

    @property
    def seconds_since_start(self) -> float:
        """Seconds since the last start of a component, see `restart`."""
        return self._clock() - self._start_s

    @property
    def seconds_since_progress(self) -> float:
        """Seconds since the last progress. The growth of a checkpoint does not count."""
        return self._clock() - self._progress_s

    def measure_logs(self) -> dict[Path, int]:
        """Return a mapping from the path of each log to its size in bytes; -1 for a missing log.

        The call may block.
        """
        return {log.path: log.size() for log in self._logs}

    def has_output(self) -> bool:
        """Return True if a log has new lines since the last call. The call may block."""
        # Pass a list to `any`, because `has_grown` must be called for every log. With a generator,
        # `any` would stop at the first log with a new line. A later call would then report old
        # lines of the other logs as new.
        return any([output.has_grown() for output in self._outputs])

    def seconds_without_work(self, step: float | None, has_output: bool | None = None) -> float:
        """Check for progress, and return the seconds since the last sign of work.

        Args:
            step: Step that the trainer has reached; None if it is unknown now.
            has_output: True if a component has written new output. If None, this method reads the
                logs itself, but only if no step is known.
        """
        # A new step counts as progress, with one exception: the first known step does not count if
        # it is the step of the loaded checkpoint.
        moved = step is not None and step != self._step
        if self._step is None and step == self._resumed_step:
            moved = False
        if moved:
            self._step = step
        if has_output is None and not moved and not self.is_by_step:
            has_output = self.has_output()
        if moved or (not self.is_by_step and has_output):
            self._progress_s = self._clock()
        if self._growth_s is not None and self.has_grown_since_progress:
            return self._clock() - self._growth_s
        return self.seconds_since_progress


#: Time limit, in seconds, for finding out whether the checkpoints of a component have grown.
_GROWTH_WITHIN_S = 20.0
#: Default number of seconds between two reads of the step.
_READ_EVERY_S = 0.5
#: Number of checks for progress within the time limit `stall_after_s`.
_CHECKS_PER_LIMIT = 50
#: Largest number of seconds between two checks for progress.
_CHECK_EVERY_S = 10.0
#: A step counts as slow if it takes longer than the median duration of earlier steps, multiplied by
#: this factor.
_SLOW = 10.0
#: Smallest number of step durations for a reliable median. While fewer durations are known, no step
#: counts as slow.
_STEPS_OF_A_PACE = 10
#: Largest number of step durations for the calculation of the median. Older durations are dropped.
_PACE_AT_MOST = 1000
#: Seconds to wait for the last step after the trainer has ended. A server that reports
#: the step over HTTP may report the last step late.
_LAST_STEP_WITHIN_S = 3.0


class ProgressEnd(Enum):
    """Reason why Muster stops watching the progress of an attempt."""

    #: The run has made no progress for longer than `stall_after_s`.
    STALLED = "stalled"
    #: The run has made no first step, and no component has written output for longer than
    #: `stall_after_s`. The run may hang, or it may still import, load or compile.
    NO_FIRST_STEP = "no first step"
    #: The last step was reached, but the components did not end within `finish_within_s`.
    FINISHED = "finished"


@dataclass
class ProgressWatch:
    """Watches the progress of one attempt, and detects slow steps and stalls.

    `str(watch)` returns the last known step as a text, such as `step 57 of 200`. The text is empty
    if no step is known.
    """

    plan: AttemptPlan
    #: Source of the step; None if the run reports no steps.
    source: StepSource | None
    #: Object that measures the time without progress.
    silence: Silence
    #: Function that publishes an event of the run.
    emit: Emit
    #: Function that returns True while no progress is expected, for example before a component was
    #: started.
    is_quiet: Callable[[], bool]
    #: Objects that read the attempt's files and folders in threads, because a read may block.
    readers: PlaceReaders = field(default_factory=PlaceReaders)
    #: Object that reads the logs of all components in a thread.
    log_reader: PlaceReader = field(default_factory=lambda: PlaceReader("the logs"))
    #: Training step that was read last; None if no step is known.
    step: float | None = None
    #: Highest training step that was read; None if no step is known. A lower step that is read
    #: later does not change this value.
    highest_step: float | None = None
    #: Step in the first line that this attempt has added to the metrics file. None if the attempt
    #: has added no line.
    _first_line: float | None = None
    #: True if a warning was published that the training step cannot be read.
    has_warned: bool = False
    #: Time at which the training reached its final step, in UTC epoch seconds. None before that
    #: time.
    reached_at: float | None = None
    #: Time at which the last known step was read, in seconds on the clock of the asyncio loop.
    _stepped_s: float = 0.0
    #: Durations of the steps before the last known step, in seconds.
    _took_s: deque[float] = field(default_factory=lambda: deque(maxlen=_PACE_AT_MOST))
    #: Time at which the current step begins to count as slow, in seconds on the clock of the
    #: asyncio loop.
    _slow_at_s: float = math.inf
    #: Size of each log in bytes at each of the last `STEPS_OF_SURVIVAL` steps, oldest step first.
    #: The first bytes of a log, up to its oldest size, were written before the later steps. So
    #: errors in these bytes did not stop the training. See `size_of_survived_log`.
    _lengths: deque[dict[Path, int]] = field(
        default_factory=lambda: deque(maxlen=STEPS_OF_SURVIVAL)
    )

    def __str__(self) -> str:
        if self.step is None:
            return ""
        return f"step {self.step:g}" + (f" of {self.total:g}" if self.total else "")

    @property
    def total(self) -> float | None:
        """Last step of the run according to its spec; None if unknown."""
        return self.plan.progress.total if self.plan.progress else None

    @property
    def is_finished(self) -> bool:
        """True if this attempt or an earlier attempt has reached the last step of the training."""
        last = self.plan.last_step
        if last is None:
            return False
        if self.highest_step is None:
            return self.plan.starts_finished
        return self.highest_step >= last

    def describe_end(self) -> str:
        """Return a text that says that the last step was reached: `step 60 of 60 reached`.

        Returns:
            An empty string if the last step is unknown.
        """
        last = self.plan.last_step
        reached = last if self.highest_step is None else self.highest_step
        return f"step {reached:g} of {last:g} reached" if last is not None else ""

    async def until_over(self) -> tuple[ProgressEnd, str]:
        """Read the step repeatedly until the run makes no progress for too long.

        Also returns if the last step was reached, but the components do not end in time.

        Returns:
            The reason for the return, and its description for the user.
        """
        limit_s = self.plan.stall_after_s
        progress = self.plan.progress
        if limit_s is None and self.source is None:
            # There is neither a limit nor a step to watch. Wait until this coroutine is cancelled.
            await asyncio.Event().wait()
        # Read the training step often, but check for missing progress only every `check_every_s`
        # seconds: each check reads all logs of the run, and there may be a thousand logs.
        check_every_s = min(max((limit_s or 0) / _CHECKS_PER_LIMIT, _READ_EVERY_S), _CHECK_EVERY_S)
        loop = asyncio.get_running_loop()
        check_at = loop.time()
        #: Start of the period `finish_within_s`, in seconds on the clock of the asyncio loop. None
        #: until the training has reported its last step. The period starts again with each sign of
        #: work, for example with the growth of a checkpoint.
        finished_s: float | None = None
        finished_step: float | None = None
        while True:
            await self._read()
            if self.is_finished:
                if finished_s is None or self.step != finished_step or await self._is_at_work():
                    finished_s = loop.time()
                    finished_step = self.step
                within_s = self.plan.finish_within_s
                if within_s is not None and loop.time() - finished_s > within_s:
                    growth_s = await self.seconds_since_growth()
                    if growth_s is None or growth_s > within_s:
                        return ProgressEnd.FINISHED, self.describe_end()
                    # A checkpoint has grown. Let the period `finish_within_s` begin at the time of
                    # the last growth, which may be long before this check.
                    finished_s = loop.time() - growth_s
            elif limit_s is not None and loop.time() >= check_at:
                check_at = loop.time() + check_every_s
                if self.is_quiet():
                    self.silence.restart()
                has_output = not self.silence.is_by_step and await self._has_output()
                silent_s = self.silence.seconds_without_work(self.step, has_output)
                if silent_s > limit_s:
                    growth_s = await self.seconds_since_growth()
                    if growth_s is None or growth_s > limit_s:
                        end = ProgressEnd.STALLED
                        if self.source is not None and not self.silence.is_by_step:
                            end = ProgressEnd.NO_FIRST_STEP
                        return end, await self._describe_silence(silent_s)
                    self.silence.note_growth(growth_s)
            every_s = (progress and progress.every_s) or _READ_EVERY_S
            await asyncio.sleep(check_every_s if self.source is None else every_s)

    async def _has_output(self) -> bool:
        """Return True if a log has new lines since the last call.

        Returns False if the logs cannot be read in time.
        """
        try:
            return await self.log_reader.ask(self.silence.has_output)
        except PlaceTimeout:
            return False

    async def _is_at_work(self) -> bool:
        """Return True if the trainer may still be training after the last step was reported.

        A server may report the last step before the trainer has trained on the last batch. So if a
        server reports the step, new lines in a log mean that the trainer may still be training.
        """
        is_server = self.plan.progress is not None and self.plan.progress.http is not None
        return is_server and await self._has_output()

    async def seconds_since_growth(self) -> float | None:
        """Return the seconds since the last growth of a checkpoint.

        Returns:
            None if no checkpoint has grown since the previous call of this method.
        """
        ages_s = []
        for component in self.plan.components:
            if component.seconds_since_growth is None:
                continue
            with suppress(PlaceTimeout):
                reader = self.readers.of(component.checkpoints)
                ages_s.append(await reader.ask(component.seconds_since_growth, _GROWTH_WITHIN_S))
        return min((age_s for age_s in ages_s if age_s is not None), default=None)

    async def _describe_silence(self, silent_s: float) -> str:
        """Return the reason for a stall.

        The text also names each file and folder that cannot be read, because its file system does
        not answer. If no step is known, the text says why, for example because of a wrong key in
        `progress.step`.

        Args:
            silent_s: Seconds since the last sign of work.
        """
        text = f"no new step since {self}"
        if not self.silence.is_by_step:
            text = "no component wrote any output except repeated lines"
        if not self.silence.is_by_step and self.source is not None:
            first_step = f"no step after {self}" if self.step else "no first step"
            start_s = self.silence.seconds_since_start
            text = f"{first_step} within {start_s:.0f} s of the start, and {text}"
        text += f" for {self.silence.seconds_since_progress:.0f} s"
        if self.silence.has_grown_since_progress:
            text += f", and no checkpoint has grown for {silent_s:.0f} s"
        problems = []
        missing_step = await self.explain_missing_step()
        if missing_step is not None and not missing_step.is_before_first_line:
            problems.append(str(missing_step))
        if not self.silence.is_by_step and self.log_reader.is_overdue:
            problems.append(str(self.log_reader))
        return "; ".join([text, *problems])

    def _measure_logs(self, sizes: dict[Path, int]) -> None:
        """Store the size of each log in `sizes`. Called in the thread of the log reader."""
        sizes.update(self.silence.measure_logs())

    def size_of_survived_log(self, log: Path) -> int:
        """Return the size in bytes that a log had several training steps ago.

        The training has made `STEPS_OF_SURVIVAL` steps since then. So errors in these first bytes
        of the log did not stop the training. The size is 0 if there were fewer steps.

        Args:
            log: Log file of a component.
        """
        is_enough = len(self._lengths) == STEPS_OF_SURVIVAL
        return max(0, self._lengths[0].get(log, 0)) if is_enough else 0

    async def until_reached(self, step: float | None) -> float | None:
        """Read the step, and return it.

        If the step is smaller than required, read it again for some seconds, because a trainer may
        report its last step late.

        Args:
            step: Required step; None if no step is required.

        Returns:
            The last known step; None if no step is known.
        """
        deadline = time.monotonic() + _LAST_STEP_WITHIN_S
        await self._read()
        while (self.step or 0) < (step or 0) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            await self._read()
        return self.step

    def note_line(self, step: float) -> None:
        """Store the step of the first line that this attempt adds to the metrics file.

        Called for each line, but only the first call has an effect. The method `_read` cannot store
        this step: if several lines are read at once, `_read` gets only the step of the last line.

        Args:
            step: Training step that the line contains.
        """
        if self._first_line is None:
            self._first_line = step

    def _compare_first_step(self, first_line: float, step: float) -> str:
        """Return a warning if the trainer does not seem to have loaded the chosen checkpoint.

        Args:
            first_line: Step in the first line that this attempt has added to the metrics file.
            step: Step in the last line, if several lines were read at once. Otherwise equal to
                `first_line`.

        Returns:
            An empty string if the steps fit the checkpoint, or cannot be compared with it.
        """
        is_server = self.plan.progress is not None and self.plan.progress.http is not None
        if self.plan.resume is None or is_server:
            return ""
        return compare_first_step(self.plan.resume, first_line, step)

    async def explain_missing_step(self) -> MissingStep | None:
        """Return the reason why the last training step is unknown.

        Call this when the training has ended or makes no progress.

        Returns:
            None if the last step is known.
        """
        if self.source is None:
            return None
        if self.step is not None:
            unanswered = self.source.unanswered
            return _describe_unanswered_file(unanswered) if unanswered else None
        missing = await self.source.explain_missing_step(is_over=True)
        if missing is None or not missing.is_before_first_line:
            return missing
        return await self._name_other_metrics(missing)

    async def _name_other_metrics(self, missing: MissingStep) -> MissingStep:
        """Add the name of another file that contains the steps to the reason for a missing step.

        Args:
            missing: Reason for the missing step. `missing.is_before_first_line` is True.

        Returns:
            The reason with the name of the other file. `missing` if Muster does not find another
            file within the time limit.
        """
        reader = self.readers.of(self.plan.cwd)
        try:
            found = await reader.ask(partial(find_metrics, self.plan), _SEARCH_WITHIN_S)
        except PlaceTimeout:
            return missing
        if found is None:
            return missing

        path_in_spec = json.dumps(found.path_in_spec, ensure_ascii=False)
        problem = f"{missing.problem}, but {found.path} has steps of this attempt"
        remedy = f"In the key `progress` of the spec, write `jsonl: {path_in_spec}`."
        if found.named_by:
            problem += f", and {found.named_by} names this file or a folder that contains it"
        else:
            remedy = f"Check whether the training writes its steps to {found.path}. If so: {remedy}"
        return MissingStep(problem=problem, remedy=remedy)

    async def _warn_of_missing_step(self) -> None:
        """Publish a warning if the training step will probably never be known.

        The reason can be, for example, that the file of the metrics does not contain the step.
        """
        if self.source is None:
            return
        problem = await self.source.explain_missing_step(is_over=False)
        if problem is not None:
            self.has_warned = True
            self.emit("run.warning", message=f"the training step is not known yet: {problem}")

    async def _read(self) -> None:
        """Read the step once, and publish an event for a new step or a slow step."""
        step = await self.source.step() if self.source is not None else None
        if step is None and not self.has_warned:
            await self._warn_of_missing_step()
        now = asyncio.get_running_loop().time()
        if step is not None and step != self.step:
            if self.step is not None:
                self._took_s.append(now - self._stepped_s)
                if step > self.step:
                    self._lengths.append({})
                    if not self.log_reader.is_overdue:
                        self.log_reader.submit(partial(self._measure_logs, self._lengths[-1]))
            is_first = self.step is None
            first_line = step if self._first_line is None else self._first_line
            self.step = step
            self.highest_step = max(step, step if self.highest_step is None else self.highest_step)
            if self.reached_at is None and self.is_finished:
                self.reached_at = time.time()
            self._stepped_s = now
            if len(self._took_s) >= _STEPS_OF_A_PACE:
                self._slow_at_s = now + _SLOW * median(self._took_s)
            self.emit("run.progress", step=step, total=self.total)
            if is_first and (warning := self._compare_first_step(first_line, step)):
                self.emit("run.warning", message=warning, contradicts_resume=True)
        elif now > self._slow_at_s and not self.is_finished:
            median_s = (self._slow_at_s - self._stepped_s) / _SLOW
            self._slow_at_s = math.inf
            message = f"no step for {format_duration(now - self._stepped_s)} since {self}"
            message += f"; a step usually takes {format_duration(median_s)}"
            self.emit("run.slow", step=self.step, median_s=median_s, message=message)
