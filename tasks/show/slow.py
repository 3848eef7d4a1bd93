"""Where the time of a run goes: the parts of a step, the use of its GPUs and the requests of its
fleet, of late and against the run's own past. Plain data in, words out."""

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

#: So many steps, or samples, are those of late; the past is what lies before them, as far as kept.
_LATE, _KEPT, _PAST_AT_LEAST = 10, 2000, 3
#: By less a step takes as long as before.
_SLOWER = 1.2
_WHOLE, _WAITING, _REST = "step", "waiting", "other"
_REQUESTS = ("p50", "p99", "max")
#: Of nodes so many are named.
_NODES_NAMED = 4


@cache
def _names() -> Mapping[str, str]:
    """`part[name of a figure]`."""
    written = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: part for part, names in written.items() for name in names}


def parts_of(entry: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step, `step`, and of each of its parts, as one line of figures has them."""
    found, known = dict[str, float](), _names()
    for figures in list_metric_sections(entry):
        for name, value in figures.items():
            if (part := known.get(name)) and is_number(value) and math.isfinite(value):
                found[part] = value + (found.get(part, 0.0) if part != _WHOLE else 0.0)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One figure: the mean of late, and the median of what was before; None while that is none."""

    now: float
    before: float | None

    @staticmethod
    def of(values: Sequence[float], late: Callable[[Sequence[float]], float] = fmean) -> Measured:
        past = values[:-_LATE]
        before = median(past) if len(past) >= _PAST_AT_LEAST else None
        return Measured(now=late(values[-_LATE:]), before=before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """Where the time goes. Whatever is not known is None or empty."""

    #: Seconds a step.
    step: Measured | None
    #: Seconds of a step, by part; what is left of it is `other`.
    parts: Mapping[str, Measured]
    #: By node, the share of the time in which its GPUs did something, from 0 to 1.
    gpus: Mapping[str, Measured]
    #: Seconds of the fleet's answers: `p50`, `p99` and `max`.
    requests: Mapping[str, Measured]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "said": " ".join(self.sentences())}

    @property
    def shares(self) -> dict[str, float]:
        """Of a step, by part, the largest first."""
        whole = sum(part.now for part in self.parts.values())
        found = {name: part.now / whole for name, part in self.parts.items() if whole}
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    def sentences(self) -> Iterator[str]:
        """For people, the most telling first, and in each its beginning."""
        if self.step is not None:
            said = ((name, f"{share:.0%}") for name, share in self.shares.items())
            of = join_commas(f"{name} {share}" for name, share in said if share != "0%")
            yield f"A step takes {format_duration(self.step.now)}{f': {of}' if of else ''}."
            if self.step.before and (times := self.step.now / self.step.before) >= _SLOWER:
                grown = {name: one.now - (one.before or 0.0) for name, one in self.parts.items()}
                name = max(grown, key=grown.__getitem__, default="")
                by = f", and {name} is {format_duration(grown[name])} of it" if name else ""
                before = format_duration(self.step.before)
                yield f"That is {times:.1f} times the {before} of its past{by}."
        if self.gpus:
            busy = fmean(one.now for one in self.gpus.values())
            least = sorted((one.now, node) for node, one in self.gpus.items())[:_NODES_NAMED]
            nodes = join_words(f"{node} {share:.0%}" for share, node in least)
            yield f"Its GPUs are {busy:.0%} busy{f', the least {nodes}' if least[1:] else ''}."
        if self.requests:
            p50, p99, most = (format_duration(self.requests[key].now) for key in _REQUESTS)
            yield f"Half of its answers take up to {p50}, 1 in 100 over {p99}, the longest {most}."


class TimeSpent:
    """What is known of where a run's time goes, by its figures and its events."""

    def __init__(self) -> None:
        #: By step, seconds by part, the oldest first.
        self._steps: dict[float, dict[str, float]] = {}
        #: Seconds a step, by when steps were seen.
        self._seen: deque[float] = deque(maxlen=_KEPT)
        self._last: tuple[float, float] | None = None
        self._gpus: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._requests: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def take(self, step: float, entry: Mapping[str, Any]) -> None:
        """A line of figures, of which a step may have several."""
        if found := parts_of(entry):
            self._steps[step] = {**self._steps.pop(step, {}), **found}
            if len(self._steps) > _KEPT:
                del self._steps[next(iter(self._steps))]

    def observe(self, event: Event) -> None:
        match event.name:
            case "attempt.begun":
                self._last = None
            case "run.progress":
                if self._last and event.step > self._last[1]:
                    at, step = self._last
                    count = event.step - step
                    self._seen.extend([(event.at - at) / count] * max(1, min(int(count), _KEPT)))
                self._last = event.at, event.step
            case "run.load":
                for node, share in event.gpus.items():
                    self._gpus[node].append(share)
            case "rollout.load":
                for key in _REQUESTS:
                    self._requests[key].append(event.requests.get(key, 0.0))

    @property
    def slow(self) -> Slow | None:
        """None while nothing is known."""
        steps = [_whole(one) for one in self._steps.values()]
        # The first one has to wait for all that starts.
        steps = steps[1:] or steps
        totals = [one[_WHOLE] for one in steps] or [*self._seen]
        names = dict.fromkeys(name for one in steps[-_LATE:] for name in one if name != _WHOLE)
        slow = Slow(
            step=Measured.of(totals) if totals else None,
            parts={name: Measured.of([one.get(name, 0.0) for one in steps]) for name in names},
            gpus={node: Measured.of([*values]) for node, values in sorted(self._gpus.items())},
            requests={
                key: Measured.of([*values], max if key == "max" else fmean)
                for key, values in self._requests.items()
            },
        )
        return slow if slow.step or slow.gpus or slow.requests else None


def _whole(found: Mapping[str, float]) -> dict[str, float]:
    """A step whose parts make up the whole of it: what was done beside its training is no part, and
    who waits for something that is a part does not wait besides."""
    parts = {name: value for name, value in found.items() if name != _WHOLE}
    waited = parts.pop(_WAITING, None)
    whole = found.get(_WHOLE) or sum(parts.values()) + (waited or 0.0)
    if waited is not None and sum(parts.values()) > whole:
        parts.pop("rollout", None)
    left = max(0.0, whole - sum(parts.values()))
    if waited is not None:
        parts[_WAITING] = min(waited, left)
        left -= parts[_WAITING]
    return {_WHOLE: whole, **parts, **({_REST: left} if parts else {})}
