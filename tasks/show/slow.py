"""Analyse how a run spends its time, and compare recent values with earlier values.

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
from statistics import fmean, median
from typing import Any

import yaml

from tasks.record.events import Event
from tasks.spec.formatting import format_duration, join_commas, join_words
from tasks.spec.values import is_number
from tasks.spec.watch import list_metric_sections

#: The last steps or samples that count as recent.
_RECENT_COUNT = 10
#: Number of steps or samples that are kept.
_KEPT_COUNT = 2000
#: Earlier values are only compared if there are at least this many of them.
_MIN_EARLIER_COUNT = 3
#: Steps are reported as slower if their duration is at least this multiple of the earlier duration.
_SLOWER_RATIO = 1.2
#: Name of the whole step among its parts.
_WHOLE = "step"
#: Name of the part in which the trainer waits, for example for rollouts.
_WAITING = "waiting"
#: Name of the rest of a step that no other part covers.
_OTHER = "other"
#: Statistics of the response times of the fleet.
_REQUEST_STATISTICS = ("p50", "p99", "max")
#: Largest number of nodes that a sentence names.
_MAX_NODES_NAMED = 4


@cache
def _parts_by_metric() -> Mapping[str, str]:
    """Return the part of a step that each known metric measures, by name of the metric."""
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: part for part, names in content.items() for name in names}


def measure_parts(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the duration of a step and of its parts from one line of a metrics file.

    Returns:
        Seconds by name of the part. The key `step` is the whole step.
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
    """A recent value and an earlier value of the same quantity."""

    #: Mean of the last 10 values, or their maximum for the quantity `max`.
    now: float
    #: Median of all earlier values. None if there are fewer than 3 earlier values.
    before: float | None

    @staticmethod
    def of(
        values: Sequence[float], average: Callable[[Sequence[float]], float] = fmean
    ) -> Measured:
        """Return the recent and the earlier value of a series.

        Args:
            values: The series, oldest first; not empty.
            average: Computes the recent value from the last 10 values.
        """
        earlier = values[:-_RECENT_COUNT]
        before = median(earlier) if len(earlier) >= _MIN_EARLIER_COUNT else None
        return Measured(now=average(values[-_RECENT_COUNT:]), before=before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """Analysis of the time that a run spends. Unknown values are None or empty."""

    #: Duration of a step in seconds.
    step: Measured | None
    #: Duration of each part of a step in seconds. The part `other` is the rest of the step.
    parts: Mapping[str, Measured]
    #: GPU utilisation of each node, from 0 to 1.
    gpus: Mapping[str, Measured]
    #: Response times of the fleet in seconds. The keys are `p50`, `p99` and `max`.
    requests: Mapping[str, Measured]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "said": " ".join(self.sentences())}

    @property
    def shares(self) -> dict[str, float]:
        """Share of each part in the step, from 0 to 1, largest first."""
        total = sum(part.now for part in self.parts.values())
        shares = {name: part.now / total for name, part in self.parts.items() if total}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def sentences(self) -> Iterator[str]:
        """Yield sentences for the user, most important first."""
        if self.step is not None:
            yield from self._step_sentences(self.step)
        if self.gpus:
            yield self._gpu_sentence()
        if self.requests:
            p50, p99, longest = (
                format_duration(self.requests[key].now) for key in _REQUEST_STATISTICS
            )
            statistics = f"median {p50}, 99th percentile {p99}, maximum {longest}"
            yield f"Response times of the fleet: {statistics}."

    def _step_sentences(self, step: Measured) -> Iterator[str]:
        percentages = ((name, f"{share:.0%}") for name, share in self.shares.items())
        parts = join_commas(f"{name} {share}" for name, share in percentages if share != "0%")
        yield f"A step takes {format_duration(step.now)}{f': {parts}' if parts else ''}."

        if step.before and step.now / step.before >= _SLOWER_RATIO:
            growth = {name: part.now - (part.before or 0.0) for name, part in self.parts.items()}
            name = max(growth, key=growth.__getitem__, default="")
            ratio = step.now / step.before
            earlier = format_duration(step.before)
            yield f"This is {ratio:.1f} times the duration of earlier steps, {earlier}."
            if name:
                yield f"Most of the increase is in {name}: {format_duration(growth[name])}."

    def _gpu_sentence(self) -> str:
        mean = fmean(node.now for node in self.gpus.values())
        least_used = sorted((usage.now, node) for node, usage in self.gpus.items())
        least_used = least_used[:_MAX_NODES_NAMED]
        nodes = join_words(f"{node} {share:.0%}" for share, node in least_used)
        suffix = f" The least busy nodes are {nodes}." if len(least_used) > 1 else ""
        return f"The GPUs are {mean:.0%} busy on average.{suffix}"


class TimeSpent:
    """Collects measurements from the metrics and the events of a run, for `Slow`."""

    def __init__(self) -> None:
        #: Seconds of each part, by step; oldest step first.
        self._steps: dict[float, dict[str, float]] = {}
        #: Seconds per step, computed from progress events. Used if the metrics have no durations.
        self._step_durations: deque[float] = deque(maxlen=_KEPT_COUNT)
        #: Time in UTC epoch seconds and step of the last progress event of this attempt.
        self._last_progress: tuple[float, float] | None = None
        #: GPU utilisation by node, from 0 to 1.
        self._gpus: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT_COUNT))
        #: Response times in seconds, by statistic.
        self._requests: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT_COUNT))

    def take(self, step: float, entry: Mapping[str, Any]) -> None:
        """Add a line of a metrics file. A step may have several lines."""
        durations = measure_parts(entry)
        if durations:
            self._steps[step] = {**self._steps.pop(step, {}), **durations}
            if len(self._steps) > _KEPT_COUNT:
                oldest_step = next(iter(self._steps))
                del self._steps[oldest_step]

    def observe(self, event: Event) -> None:
        """Add an event of the run."""
        match event.name:
            case "attempt.begun":
                self._last_progress = None
            case "run.progress":
                if self._last_progress and event.step > self._last_progress[1]:
                    last_at, last_step = self._last_progress
                    count = event.step - last_step
                    step_s = (event.at - last_at) / count
                    self._step_durations.extend([step_s] * max(1, min(int(count), _KEPT_COUNT)))
                self._last_progress = (event.at, event.step)
            case "run.load":
                for node, utilisation in event.gpus.items():
                    self._gpus[node].append(utilisation)
            case "rollout.load":
                for key in _REQUEST_STATISTICS:
                    self._requests[key].append(event.requests.get(key, 0.0))

    @property
    def slow(self) -> Slow | None:
        """The analysis of all measurements, or None if there are none."""
        steps = [_complete_parts(parts) for parts in self._steps.values()]
        # The first step is not representative: it includes the start-up of all components.
        steps = steps[1:] or steps
        totals = [parts[_WHOLE] for parts in steps] or [*self._step_durations]
        names = dict.fromkeys(name for parts in steps[-_RECENT_COUNT:] for name in parts)
        names.pop(_WHOLE, None)
        slow = Slow(
            step=Measured.of(totals) if totals else None,
            parts={name: Measured.of([parts.get(name, 0.0) for parts in steps]) for name in names},
            gpus={node: Measured.of([*values]) for node, values in sorted(self._gpus.items())},
            requests={
                key: Measured.of([*values], max if key == "max" else fmean)
                for key, values in self._requests.items()
            },
        )
        return slow if slow.step or slow.gpus or slow.requests else None


def _complete_parts(durations: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of a step, adjusted so that their sum is the whole step.

    - If the metrics have no duration of the whole step, the sum of the parts is used.
    - If the trainer waits and the other parts take longer than the step, the rollout runs in
      parallel to the training. It is then omitted.
    - Waiting time that overlaps with other parts is not counted twice.
    - The remaining time becomes the part `other`.

    Args:
        durations: Seconds by name of the part, as `measure_parts` returns them.
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
