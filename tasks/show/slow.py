"""Analyse how long the parts of a run take, and compare recent values with earlier values.

The analysis covers the parts of a training step, the utilisation of the GPUs and the response times
of the inference fleet.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import yaml

from tasks.record.events import Event
from tasks.spec.formatting import format_duration, join_commas, join_words
from tasks.spec.run import DEFAULT_READ_EVERY_S
from tasks.spec.values import is_number
from tasks.spec.watch import list_metric_sections

#: Number of the latest durations of training steps that count as recent. The same number applies to
#: values of the GPU utilisation and to response times.
_RECENT_COUNT = 10
#: Each series of measurements keeps at most this number of values in memory. Examples of a series
#: are the durations of the training steps and the GPU utilisation of a node.
_KEPT_COUNT = 2000
#: Smallest number of earlier values with which recent values are compared.
_MIN_EARLIER_COUNT = 3
#: Recent steps count as slower only if their duration is at least this multiple of the duration of
#: earlier steps.
_SLOWER_RATIO = 1.2
#: Recent steps count as slower only if their duration has increased by more than this number of
#: standard errors. A smaller increase may be random.
_SURE_ERRORS = 2.0
#: Muster reads the number of the current training step at a fixed interval. The recent steps
#: together must last at least this number of intervals. Otherwise, their measured duration would be
#: too inexact.
_MIN_READINGS = 5
#: Key for the whole training step, in a mapping from parts of a training step to durations.
_WHOLE = "step"
#: Key for the time in which the trainer waits, for example for rollouts.
_WAITING = "waiting"
#: Key for the remaining time of a training step, after the durations of its measured parts, such as
#: `rollout`, are subtracted.
_OTHER = "other"
#: Statistics of the response times of the inference fleet, as keys of the event `rollout.load`.
_REQUEST_STATISTICS = ("p50", "p99", "max")
#: Largest number of nodes in the sentence `The least busy nodes are ...`.
_MAX_NODES_NAMED = 4


@cache
def _parts_by_metric() -> Mapping[str, str]:
    """Return a mapping from each known metric to the part of a training step that it measures."""
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: part for part, names in content.items() for name in names}


def measure_parts(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the durations of a training step and of its parts, from a line of a metrics file.

    Args:
        entry: The JSON object of the line.

    Returns:
        Mapping from a part of the step, such as `rollout`, to its seconds. The key `step` stands
        for the whole step.
    """
    durations: dict[str, float] = {}
    parts_by_metric = _parts_by_metric()
    for metrics in list_metric_sections(entry):
        for name, value in metrics.items():
            part = parts_by_metric.get(name)
            if not part or not is_number(value) or not math.isfinite(value):
                continue
            if part == _WHOLE:
                durations[part] = float(value)
            else:
                durations[part] = durations.get(part, 0.0) + value
    return durations


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Summary of the last 10 measurements of a quantity, and of all earlier measurements."""

    #: Mean of the last 10 values. If the quantity is the longest response time, the maximum of the
    #: last 10 values.
    now: float
    #: Median of all values before the last 10. None if there are fewer than 3 of these values.
    before: float | None

    @staticmethod
    def of(
        values: Sequence[float], average: Callable[[Sequence[float]], float] = fmean
    ) -> Measured:
        """Return one value for the last 10 measurements, and one for all earlier measurements.

        The value for the earlier measurements is their median.

        Args:
            values: The measurements, oldest first. There must be at least one.
            average: Function that summarises the last 10 measurements as one value.
        """
        earlier = values[:-_RECENT_COUNT]
        before = median(earlier) if len(earlier) >= _MIN_EARLIER_COUNT else None
        return Measured(now=average(values[-_RECENT_COUNT:]), before=before)


#: A measurement: the total duration of some consecutive training steps in seconds, and the number
#: of these steps.
_Pace = tuple[float, float]


def _measure_steps(paces: Sequence[_Pace]) -> tuple[Measured, float]:
    """Return the recent and the earlier duration of a training step.

    The recent duration is the mean of the last 10 measurements. The earlier measurements are
    divided into groups of 10 consecutive measurements. The earlier duration is the median of the
    groups' means. A median of single measurements would be too low if, for example, each tenth step
    also evaluates the model.

    Args:
        paces: The measurements, oldest first. There must be at least one.

    Returns:
        The recent and the earlier duration in seconds, and the standard error of the recent
        duration.
    """
    recent = paces[-_RECENT_COUNT:]
    earlier = paces[:-_RECENT_COUNT]
    before = None
    if len(earlier) >= _MIN_EARLIER_COUNT:
        ends = range(len(earlier), 0, -_RECENT_COUNT)
        windows = [earlier[max(0, end - _RECENT_COUNT) : end] for end in ends]
        complete = [window for window in windows if len(window) == _RECENT_COUNT]
        before = median(_mean_step(window) for window in complete or windows)
    error_s = 0.0
    if len(recent) > 1:
        error_s = stdev(seconds / count for seconds, count in recent) / math.sqrt(len(recent))
    return Measured(now=_mean_step(recent), before=before), error_s


def _mean_step(paces: Sequence[_Pace]) -> float:
    """Return the mean duration of a training step in seconds."""
    return sum(seconds for seconds, _ in paces) / sum(count for _, count in paces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """Durations and GPU utilisation in a run. Values that were not measured are None or empty."""

    #: Duration of a training step in seconds, or None.
    step: Measured | None
    #: Duration in seconds of each part of a step, such as `rollout`. The part `other` is the time
    #: that belongs to no other part.
    parts: Mapping[str, Measured]
    #: GPU utilisation of each node, from 0 to 1.
    gpus: Mapping[str, Measured]
    #: Response times of the inference fleet in seconds. The keys are `p50`, `p99` and `max`.
    requests: Mapping[str, Measured]
    #: Standard error of the mean duration of the recent training steps, in seconds.
    step_error_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "said": " ".join(self.sentences())}

    @property
    def shares(self) -> dict[str, float]:
        """Mapping from each part of a step to its share of the duration, from 0 to 1, largest share
        first.
        """
        total = sum(part.now for part in self.parts.values())
        shares = {name: part.now / total for name, part in self.parts.items() if total}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def sentences(self) -> Iterator[str]:
        """Yield sentences about the training steps, the GPUs and the response times of a run."""
        if self.step is not None:
            yield from self._step_sentences(self.step)
        if self.gpus:
            yield self._gpu_sentence()
        if self.requests:
            p50, p99, longest = (
                format_duration(self.requests[key].now) for key in _REQUEST_STATISTICS
            )
            statistics = f"median {p50}, 99th percentile {p99}, maximum {longest}"
            yield f"Response times of the inference servers: {statistics}."

    def _step_sentences(self, step: Measured) -> Iterator[str]:
        percentages = ((name, f"{share:.0%}") for name, share in self.shares.items())
        parts = join_commas(f"{name} {share}" for name, share in percentages if share != "0%")
        yield f"A training step takes {format_duration(step.now)}{f': {parts}' if parts else ''}."

        is_sure = step.now - (step.before or 0.0) > _SURE_ERRORS * self.step_error_s
        if step.before and step.now / step.before >= _SLOWER_RATIO and is_sure:
            growth = {name: part.now - (part.before or 0.0) for name, part in self.parts.items()}
            name = max(growth, key=growth.__getitem__, default="")
            ratio = step.now / step.before
            earlier = format_duration(step.before)
            yield (
                f"A step now takes {ratio:.1f} times as long as the earlier steps, which took "
                f"{earlier} each."
            )
            if name:
                yield (
                    f"The largest increase is {format_duration(growth[name])}, in the part "
                    f'"{name}" of the step.'
                )

    def _gpu_sentence(self) -> str:
        mean = fmean(node.now for node in self.gpus.values())
        least_used = sorted((usage.now, node) for node, usage in self.gpus.items())
        least_used = least_used[:_MAX_NODES_NAMED]
        nodes = join_words(f"{node} {share:.0%}" for share, node in least_used)
        suffix = f" The least busy nodes are {nodes}." if len(least_used) > 1 else ""
        return f"The GPUs are {mean:.0%} busy on average.{suffix}"


class TimeSpent:
    """Collects durations and GPU utilisation from a run's metrics and events, and analyses them."""

    def __init__(self, read_every_s: float = DEFAULT_READ_EVERY_S) -> None:
        """
        Args:
            read_every_s: Seconds between two readings of the number of the current training step.
                This is the value of the spec key `progress.every_s`.
        """
        self._read_every_s = read_every_s
        #: Mapping from a training step to the durations that `measure_parts` returned, oldest step
        #: first.
        self._steps: dict[float, dict[str, float]] = {}
        #: Durations of training steps, measured from one progress event to the next. Used if the
        #: metrics of the run contain no durations.
        self._paces: deque[_Pace] = deque(maxlen=_KEPT_COUNT)
        #: Time and training step of the current attempt's last progress event. The time is in UTC
        #: epoch seconds. None before the first progress event.
        self._last_progress: tuple[float, float] | None = None
        #: Mapping from a node to its GPU utilisation values, from 0 to 1.
        self._gpus: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT_COUNT))
        #: Mapping from the statistic (`p50`, `p99` or `max`) to response times of the fleet in
        #: seconds.
        self._requests: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT_COUNT))

    def take(self, step: float, entry: Mapping[str, Any]) -> None:
        """Add the durations in a line of a metrics file to the measurements.

        A training step may have several lines, whose durations are combined.

        Args:
            step: Training step of the line.
            entry: The JSON object of the line.
        """
        durations = measure_parts(entry)
        if durations:
            self._steps[step] = {**self._steps.pop(step, {}), **durations}
            if len(self._steps) > _KEPT_COUNT:
                oldest_step = next(iter(self._steps))
                del self._steps[oldest_step]

    def observe(self, event: Event) -> None:
        """Add the measurements in an event of the run. Events without measurements are ignored."""
        match event.name:
            case "attempt.begun":
                self._last_progress = None
            case "run.progress":
                if self._last_progress and event.step > self._last_progress[1]:
                    last_at, last_step = self._last_progress
                    self._paces.append((event.at - last_at, event.step - last_step))
                self._last_progress = (event.at, event.step)
            case "run.load":
                for node, utilisation in event.gpus.items():
                    self._gpus[node].append(utilisation)
            case "rollout.load":
                for key in _REQUEST_STATISTICS:
                    self._requests[key].append(event.requests.get(key, 0.0))

    @property
    def slow(self) -> Slow | None:
        """Durations and GPU utilisation of the run, or None if nothing was measured."""
        steps = [_complete_parts(parts) for parts in self._steps.values()]
        # The first step is left out, because it includes the start of all components.
        steps = steps[1:] or steps
        paces = [(parts[_WHOLE], 1.0) for parts in steps] or self._measured_paces
        step, step_error_s = _measure_steps(paces) if paces else (None, 0.0)
        names = dict.fromkeys(name for parts in steps[-_RECENT_COUNT:] for name in parts)
        names.pop(_WHOLE, None)
        slow = Slow(
            step=step,
            parts={name: Measured.of([parts.get(name, 0.0) for parts in steps]) for name in names},
            gpus={node: Measured.of([*values]) for node, values in sorted(self._gpus.items())},
            requests={
                key: Measured.of([*values], max if key == "max" else fmean)
                for key, values in self._requests.items()
            },
            step_error_s=step_error_s,
        )
        return slow if slow.step or slow.gpus or slow.requests else None

    @property
    def _measured_paces(self) -> list[_Pace]:
        """Durations between progress events, or [] if the steps are too short to measure."""
        paces = [*self._paces]
        recent_s = sum(seconds for seconds, _ in paces[-_RECENT_COUNT:])
        return paces if recent_s >= _MIN_READINGS * self._read_every_s else []


def _complete_parts(durations: Mapping[str, float]) -> dict[str, float]:
    """Return the durations of a step, adjusted so that the parts add up to the whole step.

    - If the metrics do not contain the duration of the whole step, the sum of the parts is used.
    - The part `rollout` is removed if the rollouts probably ran in parallel to the training. This
      is assumed if the metrics contain a waiting time, and the other parts together take longer
      than the whole step.
    - Waiting time that overlaps with other parts is not counted twice.
    - Time that belongs to no part becomes the part `other`.

    Args:
        durations: Mapping from a part of the step to its seconds, as `measure_parts` returns it.
    """
    parts = {name: duration for name, duration in durations.items() if name != _WHOLE}
    waiting_s = parts.pop(_WAITING, None)
    step_s = durations.get(_WHOLE) or sum(parts.values()) + (waiting_s or 0.0)
    if waiting_s is not None and sum(parts.values()) > step_s:
        parts.pop("rollout", None)

    remaining_s = max(0.0, step_s - sum(parts.values()))
    if waiting_s is not None:
        parts[_WAITING] = min(waiting_s, remaining_s)
        remaining_s -= parts[_WAITING]
    if parts:
        parts[_OTHER] = remaining_s
    return {_WHOLE: step_s, **parts}
