"""Pictures of a run as SVG text: its components over time, and the curve of what its training
writes, a JSON object a line, read as it grows.

A picture stands on a ground of its own: it is shown within an image, where it can't know whether
the page around it is white or dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from tasks.record.metrics_file import MetricsFile
from tasks.record.run_json import AttemptRecord
from tasks.show.output import strip_controls
from tasks.show.view import RunView, Shown, state_of
from tasks.spec.formatting import escape_markdown, format_count, format_duration, format_time
from tasks.spec.probes import get_number
from tasks.spec.watch import find_metric

#: Pixels. On a card of the UI that is some 380, in which the type must still be legible.
WIDTH = 520
GROUND, FRAME, GRID = "#ffffff", "#c9d1d9", "#e6e9ed"
INK, PALE = "#1f2328", "#59636e"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
#: Of a letter, as a part of its height, on average.
_LETTER_WIDTH = 0.54


def svg(parts: Iterable[str], height: float) -> str:
    """The whole, in pixels. It is shown as an image: what it says stands in the words beside it."""
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}"'
            f' viewBox="0 0 {WIDTH} {height:g}" font-family="{_FONT}" font-size="13"'
            ' role="img">',
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="6"'
            f' fill="{GROUND}" stroke="{FRAME}"/>',
            *parts,
            "</svg>",
        ]
    )


def svg_text(
    x: float,
    y: float,
    said: str,
    *,
    color: str = INK,
    size: int = 13,
    anchor: str = "start",
    bold: bool = False,
    room: float = 0,
) -> str:
    """Return a line of text that stands on a point.

    Args:
        said: May be text from outside. Control characters, which XML forbids, are removed.
        room: Width in pixels, beyond which the text is cut; 0: it is not cut.
    """
    said = strip_controls(said)
    if room:
        fits = max(1, int(room / (_LETTER_WIDTH * size * (1.1 if bold else 1.0))))
        said = said if len(said) <= fits else f"{said[: fits - 1]}…"
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="{size}"'
        f' text-anchor="{anchor}"{weight}>{escape(said)}</text>'
    )


def svg_line(x1: float, y1: float, x2: float, y2: float, color: str = GRID) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        f' stroke="{color}" stroke-width="1"/>'
    )


def svg_bar(x: float, y: float, width: float, height: float, color: str) -> str:
    """A bar that can be seen, however short what it stands for."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(2.0, width):.1f}" height="{height:g}"'
        f' rx="2" fill="{color}"/>'
    )


def axis_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, some `count` of them."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / max(1, count)))
    steps = (power, 2 * power, 5 * power, 10 * power)
    step = min(steps, key=lambda step: abs(span / step - count))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def number_text(value: float) -> str:
    """`0.25`, `12,000`, `1.2e+08`: short, and without the noise of sums of floats."""
    return f"{value:,.6g}"


Point = tuple[float, float]

_HEIGHT = 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, WIDTH - 18.0, 60.0, _HEIGHT - 48.0
_COLOR = "#0969da"
_POINTS_AT_MOST = 500


def thinned(points: Sequence[Point], at_most: int) -> Sequence[Point]:
    """At most so many of them, evenly, with the first and the last one."""
    every = -(-(len(points) - 1) // (at_most - 1)) or 1
    return [*points[:-1:every], points[-1]]


def curve_of(points: Sequence[Point], *, x: str, y: str, title: str) -> str:
    """The curve as SVG, one point as a dot.

    Args:
        points: finite, in order; at least one.
    """
    xs = _Scale([x for x, _ in points], _LEFT, _RIGHT, margin=0)
    ys = _Scale([y for _, y in points], _BOTTOM, _TOP, margin=0.06)
    first, last = points[0][1], points[-1][1]
    best = max(value for _, value in points)
    at = [number_text(value) for value in (first, last, best)]
    said = f"{at[0]} at first, {at[1]} now, {at[2]} at most"
    return svg(
        [
            svg_text(16, 25, title, size=15, bold=True, room=_RIGHT - 16),
            svg_text(16, 44, said, color=PALE),
            *_axes(xs, ys, x, y),
            *_drawn([(xs(x), ys(y)) for x, y in thinned(points, _POINTS_AT_MOST)]),
        ],
        _HEIGHT,
    )


class _Scale:
    """From values to pixels."""

    def __init__(self, values: Sequence[float], begin: float, end: float, *, margin: float) -> None:
        low, high = min(values), max(values)
        pad = (high - low) * margin or (0.0 if high > low else abs(high) * 0.1 or 1.0)
        self.low, self.high = low - pad, high + pad
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        return self._begin + (value - self.low) / (self.high - self.low) * (self._end - self._begin)


def _axes(xs: _Scale, ys: _Scale, x: str, y: str) -> Iterator[str]:
    for value in axis_ticks(ys.low, ys.high):
        yield svg_line(_LEFT, ys(value), _RIGHT, ys(value))
        at = _LEFT - 8, ys(value) + 4
        yield svg_text(*at, number_text(value), color=PALE, size=12, anchor="end")
    for value in axis_ticks(xs.low, xs.high, 6):
        yield svg_line(xs(value), _BOTTOM, xs(value), _BOTTOM + 4, PALE)
        at = xs(value), _BOTTOM + 17
        yield svg_text(*at, number_text(value), color=PALE, size=12, anchor="middle")
    yield svg_line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, PALE)
    yield svg_text((_LEFT + _RIGHT) / 2, _HEIGHT - 10, x, color=PALE, anchor="middle")
    middle = (_TOP + _BOTTOM) / 2
    turned = svg_text(0, 0, y, color=PALE, anchor="middle", room=_BOTTOM - _TOP)
    yield f'<g transform="translate(16 {middle:g}) rotate(-90)">{turned}</g>'


def _drawn(points: Sequence[Point]) -> Iterator[str]:
    """In pixels."""
    if len(points) > 1:
        yield (
            f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" fill="none"'
            f' stroke="{_COLOR}" stroke-width="2" stroke-linejoin="round"/>'
        )
    x, y = points[-1]
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{_COLOR}"/>'


#: The last ones are drawn.
ATTEMPTS_AT_MOST = 5
_BARS_LEFT, _BARS_RIGHT = 104.0, WIDTH - 144.0
_HEAD, _ROW, _BAR, _AXIS, _GAP = 26.0, 22.0, 14.0, 24.0, 8.0
_BARS_TOP, _FOOT = 58.0, 8.0
_FAILED = "#cf222e"
_COLORS = {"waiting": "#d0d7de", "starting": "#d4a72c", "ready": "#2da44e", "failed": _FAILED}
#: Less than so is the start of a process.
_WAITED_S = 5.0
_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def timeline_of(view: RunView) -> Shown:
    """What ran when, in each of the last attempts."""
    if view.record.attempt is None:
        return Shown(headline="nothing was started yet", data="No attempt has begun.")
    said = f"{_title(view)}, as of {format_time(view.at)}"
    return Shown(
        headline=escape_markdown(said), picture=drawn(view), data=f"{escape_markdown(said)}."
    )


def drawn(view: RunView) -> str:
    """The timeline as SVG."""
    attempts = view.record.attempts[-ATTEMPTS_AT_MOST:]
    names = [[*dict.fromkeys([*view.spec.components, *one.components])] for one in attempts]
    heights = [_HEAD + len(rows) * _ROW + _AXIS + _GAP for rows in names]
    parts = [svg_text(16, 25, _title(view), size=15, bold=True, room=WIDTH - 32)]
    for number, (name, color) in enumerate(_COLORS.items()):
        x = 16.0 + 80 * number
        parts += [svg_bar(x, 36, 10, 10, color), svg_text(x + 15, 45, name, color=PALE, size=12)]
    top = _BARS_TOP
    for attempt, rows, height in zip(attempts, names, heights, strict=True):
        parts += _attempt(view, attempt, rows, top)
        top += height
    return svg(parts, top + _FOOT)


def phases_of(view: RunView, attempt: AttemptRecord, name: str) -> list[tuple[str, float, float]]:
    """What a component did in an attempt, `(what, begin, end)` in UTC epoch seconds, in order and
    without gaps."""
    begin, end = attempt.started_at, _end_of(view, attempt)
    seen = attempt.components.get(name)
    if seen is None:
        return [("waiting", begin, end)]
    started, ready, over = seen.started_at, seen.ready_at, seen.ended_at or end
    found = [
        ("waiting", begin, started),
        ("starting", started, ready or over),
        ("ready", ready or over, over),
    ]
    return [phase for phase in found if phase[2] > phase[1]]


def _attempt(
    view: RunView, attempt: AttemptRecord, names: Sequence[str], top: float
) -> Iterator[str]:
    begin, end = attempt.started_at, _end_of(view, attempt)
    scale = (_BARS_RIGHT - _BARS_LEFT) / max(end - begin, 0.1)
    said = f"attempt {attempt.number}: {attempt.ending}"
    yield svg_text(16, top + 14, said, bold=True, room=WIDTH - 232)
    at = WIDTH - 16, top + 14
    yield svg_text(*at, _when(view, attempt), color=PALE, size=12, anchor="end")
    foot = top + _HEAD + len(names) * _ROW
    unit, unit_s = next(one for one in _UNITS if end - begin >= 2 * one[1] or one[1] == 1)
    for tick in (one * unit_s for one in axis_ticks(0, max(end - begin, 0.1) / unit_s, 4)):
        x = _BARS_LEFT + tick * scale
        yield svg_line(x, top + _HEAD - 4, x, foot)
        said = f"{number_text(tick / unit_s)} {unit}"
        yield svg_text(x, foot + 14, said, color=PALE, size=12, anchor="middle")
    for number, name in enumerate(names):
        y = top + _HEAD + number * _ROW
        yield svg_text(16, y + 11, name, room=_BARS_LEFT - 24)
        for what, since, until in phases_of(view, attempt, name):
            x, width = _BARS_LEFT + (since - begin) * scale, (until - since) * scale
            yield svg_bar(x, y, width, _BAR, _COLORS[what])
        seen = attempt.components.get(name)
        is_failed = attempt.failure is not None and name == attempt.failure.component
        if is_failed:
            died = (seen.ended_at if seen else None) or end
            yield _cross(_BARS_LEFT + (died - begin) * scale, y + _BAR / 2)
        x, room = _BARS_RIGHT + 12, WIDTH - _BARS_RIGHT - 16
        color = _FAILED if is_failed else PALE
        yield svg_text(x, y + 11, state_of(attempt, name), color=color, size=12, room=room)


def _cross(x: float, y: float) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="{_FAILED}"/>'
        f'<path d="M{x - 3:.1f} {y - 3:.1f}l6 6m0-6l-6 6" stroke="#ffffff" stroke-width="2"/>'
    )


def _title(view: RunView) -> str:
    count = len(view.record.attempts)
    shown = f", the last {ATTEMPTS_AT_MOST} drawn" if count > ATTEMPTS_AT_MOST else ""
    return f"{view.record.run_id}: {format_count(count, 'attempt')}{shown}"


def _when(view: RunView, attempt: AttemptRecord) -> str:
    before = [one for one in view.record.attempts if one.number < attempt.number]
    waited_since = before[-1].ended_at if before else view.record.started_at
    waited_s = attempt.started_at - waited_since if waited_since else 0.0
    waited = f", waited {format_duration(waited_s)}" if waited_s >= _WAITED_S else ""
    return f"{format_time(attempt.started_at)}{waited}"


def _end_of(view: RunView, attempt: AttemptRecord) -> float:
    return attempt.ended_at if attempt.ended_at is not None else max(view.at, attempt.started_at)


#: What a curve is drawn of: the first of these that a file has. verl writes its own below `data`.
NAMES = (
    "reward",
    "mean_reward",
    "reward_mean",
    "critic/rewards/mean",
    "critic/score/mean",
    "reward/mean",
    "rewards/mean",
    "train/reward",
    "loss",
    "train/loss",
)


class Figures:
    """What a file of a run has by now. Reads only what was added since the last look."""

    def __init__(
        self,
        path: Path,
        step: str,
        names: Sequence[str] = NAMES,
        take: Callable[[float, Mapping[str, Any]], None] = lambda step, entry: None,
    ) -> None:
        """
        Args:
            step: the dotted key of the step in a line.
            names: of what there may be a curve; one of the first line that has any.
            take: given each line that has a step.
        """
        self.path = path
        #: Of what there is a curve; empty while nothing is known.
        self.name = ""
        self._step, self._names, self._give = step, names, take
        self._file = MetricsFile(path)
        self._begun = 0
        self._points: dict[float, float] = {}

    @property
    def points(self) -> list[Point]:
        """`(step, figure)`, in order; the last word on each step."""
        return sorted(self._points.items())

    def look(self) -> bool:
        """Take in what was added; whether there is more."""
        added = self._file.read_new()
        if self._begun != self._file.restarts:
            self._begun = self._file.restarts
            self._points.clear()
        for entry in added:
            self._take(entry)
        return self._file.has_more

    def _take(self, entry: Mapping[str, Any]) -> None:
        if (step := get_number(entry, self._step)) is None:
            return
        self._give(step, entry)
        found = find_metric(entry, [self.name] if self.name else self._names)
        if found is None or not math.isfinite(found[1]):
            return
        self.name, self._points[step] = found
