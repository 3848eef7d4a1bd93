"""The events of a run as lines for people.

The block at the end of a run: how it ended, why, and where to go on reading.

How fast a training goes, from the steps that were seen.

A curve of a training's figures, as text.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotext  # type: ignore[import-untyped]

from tasks.record.events import Event
from tasks.record.outcome import Failure
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord, RunJson
from tasks.show.failure import remedy_of
from tasks.show.screen import Line
from tasks.spec.failure_kinds import REMEDIES
from tasks.spec.words import stopwatch

_TAIL_LINES = 12
#: Before what belongs to the line above it.
_INDENT = " " * 9


def lines_of(event: Event) -> Iterator[Line]:
    """What is said of an event; of most nothing. The run's end is told by `end_block`."""
    name, fields = event.component or "", event.fields
    match event.name:
        case "attempt.begun" | "attempt.adopted":
            goes_on = " goes on" if event.name == "attempt.adopted" else ""
            yield Line(
                text=f"run {fields['run_id']}, attempt {fields['attempt']}{goes_on}", style="bold"
            )
            yield Line(text=f"files in {fields['directory']}")
        case "containment":
            yield Line(text=f"containment {fields['text']}", style="dim")
        case "component.spawned" if fields["pid"] is not None:
            yield Line(text=f"{name}: started, pid {fields['pid']}")
        case "job.submitted" | "job.attached":
            done = event.name.removeprefix("job.")
            yield Line(text=f"{name}: job {fields['submission_id']} {done}")
        case "job.state":
            place = f", {fields['place']}" if fields["place"] else ""
            yield Line(text=f"{name}: job {fields['status']}{place}")
        case "job.swept" if fields["killed"] or fields["left"]:
            ended = "; ".join(fields["killed"])
            yield Line(text=f"{name}: ended what its job had left: {ended}", style="yellow")
        case "contact.lost":
            yield Line(text=f"{name}: no answer: {fields['message']}", style="yellow")
        case "contact.back":
            yield Line(text=f"{name}: {fields['address']} answers again", style="green")
        case "component.ready":
            yield Line(text=f"{name}: ready after {fields['after_s']:.2f} s", style="green")
        case "component.drained":
            yield Line(text=f"{name}: its part is done, the run goes on")
        case "component.exited":
            yield Line(text=f"{name}: ended, {how_ended(fields)}")
        case "component.stuck":
            left = ", ".join(map(str, fields["pids"]))
            yield Line(text=f"{name}: can't be ended: {left}", style="bold red")
        case "component.diagnosed":
            yield Line(text=f"{name}: what it was doing is in {fields['path']}")
        case "rollout.server.died":
            yield Line(
                text=f"{name}: server {fields['rank']} died: {fields['why']}", style="yellow"
            )
        case "rollout.recovery.ended":
            yield from _recovery(name, fields)
        case "rollout.warning":
            yield Line(text=f"{name}: {fields['message']}", style="yellow")
        case "rollout.failed":
            yield Line(text=f"{name}: {fields['reason']}", style="bold red")
        case "probe.failed" if fields.get("probe") == "live":
            yield Line(text=f"{name}: {fields['reason']} (miss {fields['misses']})", style="yellow")
        case "teardown.begun":
            yield Line(text=f"stopping: {fields['reason']}")
        case "run.waiting":
            yield Line(text=f"waiting: {fields['message']}", style="yellow")
        case "run.state" if fields["state"] == "pending_resources" and fields["message"]:
            yield Line(text=f"waiting: {fields['message']}", style="yellow")


def failed_attempt(ended: Event, directory: Path) -> Iterator[Line]:
    """Of an attempt that failed, and that another one follows.

    Args:
        ended: its `attempt.ended`.
        directory: of the attempt.
    """
    failure = ended.fields["failure"]
    yield Line(
        text=f"attempt {ended.fields['attempt']} failed: {failure['kind']}: {failure['message']}",
        style="red",
    )
    if failure["hint"]:
        yield Line(text=f"hint: {failure['hint']}")
    if failure["component"]:
        log = directory / f"{failure['component']}.log"
        tail = failure["log_tail"].splitlines()[-_TAIL_LINES:]
        last = "".join(f"\n{_INDENT}| {line}" for line in tail)
        yield Line(text=f"log {log}; its last lines:{last}" if last else f"log {log}")


def how_ended(fields: Mapping[str, Any]) -> str:
    """`SIGTERM`, `exit code 1`; of a component, by its event or its record."""
    if fields["signal"]:
        return str(fields["signal"])
    code = fields["exit_code"]
    return f"exit code {'unknown' if code is None else code}"


def _recovery(name: str, fields: Mapping[str, Any]) -> Iterator[Line]:
    ranks, took_s = ", ".join(map(str, fields["ranks"])), fields["took_s"]
    if fields["outcome"] == "recovered":
        yield Line(text=f"{name}: server {ranks} is back after {took_s:.1f} s", style="green")
    elif fields["outcome"] == "failed":
        yield Line(text=f"{name}: server {ranks} is not back: {fields['message']}", style="yellow")


#: A step counts for the rate so long; the last few count however old they are.
_WINDOW_S = 120.0
_KEPT_AT_LEAST = 6


class Pace:
    """The rate of the last steps, and the time that is left."""

    def __init__(self, total: float | None = None) -> None:
        self._total = total
        #: `(UTC epoch seconds, step)`, oldest first.
        self._seen: deque[tuple[float, float]] = deque()

    @property
    def step(self) -> float | None:
        return self._seen[-1][1] if self._seen else None

    def see(self, at: float, step: float) -> None:
        if self._seen and step < self._seen[-1][1]:
            # It went back to a checkpoint.
            self._seen.clear()
        self._seen.append((at, step))
        while len(self._seen) > _KEPT_AT_LEAST and self._seen[0][0] < at - _WINDOW_S:
            self._seen.popleft()

    def per_second(self, now: float) -> float | None:
        """None while nobody can say. It falls while no step comes that is due."""
        if len(self._seen) < 2:
            return None
        (began, first), (last_at, last) = self._seen[0], self._seen[-1]
        if last <= first or last_at <= began:
            return None
        rate = (last - first) / (last_at - began)
        is_done = self._total is not None and last >= self._total
        is_overdue = not is_done and (now - last_at) * rate > 1
        return (last - first + 1) / (now - began) if is_overdue else rate

    def left_s(self, now: float) -> float | None:
        """Seconds until the last step; None while nobody can say."""
        rate = self.per_second(now)
        if rate is None or self._total is None or self.step is None:
            return None
        return max(0.0, (self._total - self.step) / rate)


def rate_text(per_second: float) -> str:
    """`3.3/s`, `12/min`, `0.5/h`."""
    for unit, seconds in (("s", 1.0), ("min", 60.0)):
        if per_second * seconds >= 1:
            return f"{_short(per_second * seconds)}/{unit}"
    return f"{_short(per_second * 3600)}/h"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


_STYLES = {"completed": "bold green", "failed": "bold red", "crashed": "bold red"}
_LABEL = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended, as far as this process knows."""

    #: The run's or its flow run's: `completed`, `failed`, `cancelled`, `crashed`.
    state: str
    message: str
    #: None where it has none: it never began.
    record: Path | None = None
    #: Of the flow run in the UI; empty where its server ends with this process.
    page: str = ""


def end_block(ending: Ending) -> Iterator[Line]:
    """The block, after an empty line."""
    record = _read(ending.record)
    attempt = record.attempt if record is not None and ending.state != "completed" else None
    failure = attempt.failure if attempt is not None else None
    left = "; nothing is left running" if ending.state == "cancelled" else ""
    yield Line(text="")
    # The message of the flow run says where to look, too, which stands below here.
    message = ending.message
    if failure and ending.state == "failed":
        message = str(failure)
    yield Line(
        text=f"{ending.state}: {message}{left}",
        style=_STYLES.get(ending.state, "bold yellow"),
    )
    if record is not None:
        yield _field("run", record.run_id)
        yield _field("took", _took(record))
    if ending.state == "failed":
        yield from _cause(ending, attempt, failure)
    if ending.record is not None:
        yield _field("record", str(ending.record))
    if ending.page:
        yield _field("page", ending.page)


def _cause(
    ending: Ending, attempt: AttemptRecord | None, failure: Failure | None
) -> Iterator[Line]:
    """What failed first, its last words, and what to do."""
    if failure and failure.component:
        yield _field("first", f"{failure.component}, {_how_failed(failure)}")
    if failure and failure.hint:
        yield _field("hint", failure.hint)
    if remedy := REMEDIES[failure.kind] if failure else remedy_of(ending.message):
        yield _field("to do", remedy)
    if failure and failure.component and attempt and ending.record is not None:
        place = RunPlace(directory=ending.record.parent).attempt(attempt.number)
        log = place.log(failure.component)
        yield _field("log", str(log))
        hang = log.with_suffix(".hang.txt")
        if hang.exists():
            yield _field("hung in", str(hang))
        if tail := failure.log_tail.splitlines()[-_TAIL_LINES:]:
            yield _field("", "its last lines:")
            for line in tail:
                yield _field("", f"| {line}")


def _how_failed(failure: Failure) -> str:
    """`RUNTIME_ERROR, SIGSEGV`; of one that had not ended by itself the kind alone."""
    kind = failure.kind.value
    return f"{kind}, {how_ended(failure.as_json())}" if failure.has_ended else kind


def _took(record: RunJson) -> str:
    """`0:21, 2 attempts (NODE_LOST, completed)`."""
    ended = record.ended_at
    took = stopwatch(ended - record.started_at) if ended is not None else "not ended"
    ends = [attempt.ending for attempt in record.attempts]
    if len(ends) < 2:
        return f"{took}, {'1 attempt' if ends else 'no attempt'}"
    shown = ends if len(ends) <= 6 else [*ends[:3], f"{len(ends) - 5} more", *ends[-2:]]
    return f"{took}, {len(ends)} attempts ({', '.join(shown)})"


def _field(name: str, text: str) -> Line:
    return Line(text=f"  {name:<{_LABEL}}{text}")


def _read(path: Path | None) -> RunJson | None:
    """None where it can't be read: what is known otherwise is shown even so."""
    try:
        return RunJson.read(path) if path is not None else None
    except (OSError, ValueError):
        return None


Point = tuple[float, float]


def read_curve(metrics: Path, x: str, y: str) -> list[Point]:
    """The points `(x, y)` of a file of JSON lines; lines without both, and what is not
    finite, are left out.

    Raises: OSError.
    """
    points = []
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            point = float(entry[x]), float(entry[y])
        except (ValueError, KeyError, TypeError):
            continue
        if all(map(math.isfinite, point)):
            points.append(point)
    return points


def draw_curve(points: Sequence[Point], *, title: str, columns: int = 72, lines: int = 14) -> str:
    """The curve in Unicode, without colours; at least two points."""
    plotext.clear_figure()
    plotext.plotsize(columns, lines)
    plotext.title(title)
    plotext.plot([x for x, _ in points], [y for _, y in points], marker="braille")
    return str(plotext.uncolorize(plotext.build()))
