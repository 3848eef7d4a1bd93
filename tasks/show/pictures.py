"""Draw pictures as SVG: the timeline and the curve of a run, and the curves of a matrix.

Every picture has a white background. The Prefect UI shows it as an image, which cannot adapt to a
light or dark page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from xml.sax.saxutils import escape

from tasks.record.metrics_file import MetricsFile
from tasks.record.metrics_of_run import read_rows
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord
from tasks.show.markdown import escape_markdown
from tasks.show.output import strip_controls
from tasks.show.run_view import RunView, Shown, describe_component_state
from tasks.spec.formatting import format_count, format_duration, format_time
from tasks.spec.probes import get_step
from tasks.spec.watch import find_metric

#: Width of a picture in pixels. The text must still be legible on an artifact's card in the Prefect
#: UI, which scales pictures to about 380 pixels.
WIDTH = 520
#: Colour of the background of a picture.
GROUND = "#ffffff"
#: Colour of the border of a picture.
FRAME = "#c9d1d9"
#: Colour of grid lines.
GRID = "#e6e9ed"
#: Colour of the main text of a picture.
INK = "#1f2328"
#: Colour of secondary text and of axes.
PALE = "#59636e"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
#: Average width of a letter as a fraction of the font size.
_LETTER_WIDTH = 0.54


def svg(parts: Iterable[str], height: float) -> str:
    """Return an SVG document with a background and a border.

    The Prefect UI shows the document as an image. A screen reader cannot read the text in an image,
    so the artifact with the picture repeats the content as text.

    Args:
        parts: SVG elements of the picture, in drawing order.
        height: Height of the picture in pixels.
    """
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
    content: str,
    *,
    color: str = INK,
    size: int = 13,
    anchor: str = "start",
    bold: bool = False,
    room: float = 0,
) -> str:
    """Return an SVG element with a line of text.

    Args:
        x: Horizontal position of the text's anchor in pixels.
        y: Vertical position of the baseline in pixels.
        content: The text, which may be untrusted. Control characters are removed, because XML
            forbids them.
        size: Font size in pixels.
        anchor: Part of the text that is placed at `x`: `start`, `middle` or `end`.
        room: Largest width in pixels. Longer text is cut. 0 means that the text is never cut.
    """
    content = strip_controls(content)
    if room:
        letter_width = _LETTER_WIDTH * size * (1.1 if bold else 1.0)
        max_letters = max(1, int(room / letter_width))
        if len(content) > max_letters:
            content = f"{content[: max_letters - 1]}…"
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="{size}"'
        f' text-anchor="{anchor}"{weight}>{escape(content)}</text>'
    )


def svg_line(x1: float, y1: float, x2: float, y2: float, color: str = GRID) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        f' stroke="{color}" stroke-width="1"/>'
    )


def svg_bar(x: float, y: float, width: float, height: float, color: str) -> str:
    """Return an SVG rectangle, at least 2 pixels wide, so that a short phase is visible."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(2.0, width):.1f}" height="{height:g}"'
        f' rx="2" fill="{color}"/>'
    )


def axis_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers between `low` and `high`, for the labels of an axis."""
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
    """Format a number with at most six significant digits: `0.25`, `12,000`, `1.2e+08`."""
    return f"{value:,.6g}"


#: A point of a curve: x and y.
Point = tuple[float, float]

#: Height of the picture of a curve in pixels.
_CURVE_HEIGHT = 280
#: Edges of the rectangle in which the curve is drawn, in pixels.
_LEFT = 66.0
_RIGHT = WIDTH - 18.0
_TOP = 60.0
_BOTTOM = _CURVE_HEIGHT - 48.0
_CURVE_COLOR = "#0969da"
#: Largest number of points with which a curve is drawn.
_MAX_CURVE_POINTS = 500


def thin_out(points: Sequence[Point], at_most: int) -> Sequence[Point]:
    """Return at most `at_most` evenly spaced points, including the first and the last point."""
    stride = -(-(len(points) - 1) // (at_most - 1)) or 1
    return [*points[:-1:stride], points[-1]]


def draw_curve(points: Sequence[Point], *, x: str, y: str, title: str) -> str:
    """Return the curve through the points as an SVG document.

    A single point is drawn as a dot.

    Args:
        points: At least one point. The points are finite and sorted by x.
        x: Label of the horizontal axis.
        y: Label of the vertical axis.
    """
    xs = _Scale([x for x, _ in points], _LEFT, _RIGHT, margin=0)
    ys = _Scale([y for _, y in points], _BOTTOM, _TOP, margin=0.06)
    first = number_text(points[0][1])
    last = number_text(points[-1][1])
    highest = number_text(max(value for _, value in points))
    caption = f"first {first}, latest {last}, highest {highest}"
    return svg(
        [
            svg_text(16, 25, title, size=15, bold=True, room=_RIGHT - 16),
            svg_text(16, 44, caption, color=PALE),
            *_axes(xs, ys, x, y),
            *_draw_curve([(xs(x), ys(y)) for x, y in thin_out(points, _MAX_CURVE_POINTS)]),
        ],
        _CURVE_HEIGHT,
    )


class _Scale:
    """Converts the values on an axis of a curve to positions in pixels."""

    def __init__(self, values: Sequence[float], begin: float, end: float, *, margin: float) -> None:
        """
        Args:
            values: Values that the axis must include.
            begin: Position of the low end of the axis in pixels.
            end: Position of the high end of the axis in pixels.
            margin: Free space at both ends, as a fraction of the range of the values.
        """
        low = min(values)
        high = max(values)
        # If all values are equal, their range is 0. Then extend the axis by a tenth of the value,
        # or by 1 if the value is 0.
        padding = (high - low) * margin if high > low else abs(high) * 0.1 or 1.0
        #: Value at the low end of the axis.
        self.low = low - padding
        #: Value at the high end of the axis.
        self.high = high + padding
        self._begin = begin
        self._end = end

    def __call__(self, value: float) -> float:
        return self._begin + (value - self.low) / (self.high - self.low) * (self._end - self._begin)


def _axes(xs: _Scale, ys: _Scale, x: str, y: str) -> Iterator[str]:
    """Yield the SVG elements of both axes, with ticks and labels.

    Args:
        xs: Positions on the horizontal axis.
        ys: Positions on the vertical axis.
        x: Label of the horizontal axis.
        y: Label of the vertical axis.
    """
    for value in axis_ticks(ys.low, ys.high):
        y_position = ys(value)
        label = number_text(value)
        yield svg_line(_LEFT, y_position, _RIGHT, y_position)
        yield svg_text(_LEFT - 8, y_position + 4, label, color=PALE, size=12, anchor="end")

    for value in axis_ticks(xs.low, xs.high, 6):
        x_position = xs(value)
        label = number_text(value)
        yield svg_line(x_position, _BOTTOM, x_position, _BOTTOM + 4, PALE)
        yield svg_text(x_position, _BOTTOM + 17, label, color=PALE, size=12, anchor="middle")

    yield svg_line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, PALE)
    yield svg_text((_LEFT + _RIGHT) / 2, _CURVE_HEIGHT - 10, x, color=PALE, anchor="middle")
    middle = (_TOP + _BOTTOM) / 2
    y_label = svg_text(0, 0, y, color=PALE, anchor="middle", room=_BOTTOM - _TOP)
    yield f'<g transform="translate(16 {middle:g}) rotate(-90)">{y_label}</g>'


def _draw_curve(points: Sequence[Point], color: str = _CURVE_COLOR) -> Iterator[str]:
    """Yield an SVG line through the points, which are in pixels, and a dot at the last point."""
    if len(points) > 1:
        coordinates = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield (
            f'<polyline points="{coordinates}" fill="none"'
            f' stroke="{color}" stroke-width="2" stroke-linejoin="round"/>'
        )
    x, y = points[-1]
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>'


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCurve:
    """Curve of one run or pipeline step of a matrix, in the picture with all curves."""

    #: Number of the combination of parameters in the matrix, from 1.
    number: int
    #: At least one point of the curve, as a pair of x and y. All values are finite, and the points
    #: are sorted by x.
    points: Sequence[Point]
    #: True if this run or pipeline step is the best of the matrix so far.
    is_best: bool = False
    #: True if the run was stopped early.
    is_stopped: bool = False


#: Colours of the curves of a matrix. The legend shows them in this order.
_MATRIX_COLORS = {"best": _CURVE_COLOR, "other": "#80b4ef", "stopped early": "#afb8c1"}
#: Largest total number of data points in all curves of one matrix. If there are more, some data
#: points are left out, so that the picture stays small.
_MAX_MATRIX_CORNERS = 4000
#: Each curve of a matrix may have this number of data points, even if the total number of data
#: points then exceeds `_MAX_MATRIX_CORNERS`.
_MIN_CORNERS = 8
#: Largest number of curves of a matrix that are all labelled. With more curves, only the best curve
#: has a label.
_MAX_LABELLED_CURVES = 12


def draw_matrix(
    curves: Sequence[MatrixCurve], *, x: str, y: str, title: str, caption: str = ""
) -> str:
    """Return the curves of the runs or pipeline steps of a matrix as an SVG document.

    The best curve is drawn last, so that no other curve covers it. A curve with a single point is
    drawn as a dot.

    Args:
        curves: At least one curve.
        x: Label of the horizontal axis.
        y: Label of the vertical axis.
        title: Title of the picture.
        caption: Text beside the legend, or an empty string.
    """
    pairs = [pair for curve in curves for pair in curve.points]
    xs = _Scale([x for x, _ in pairs], _LEFT, _RIGHT - 20, margin=0)
    ys = _Scale([y for _, y in pairs], _BOTTOM, _TOP, margin=0.06)
    parts = [svg_text(16, 25, title, size=15, bold=True, room=_RIGHT - 16)]
    for index, (name, color) in enumerate(_MATRIX_COLORS.items()):
        legend_x = 16.0 + 80 * index
        parts.append(svg_bar(legend_x, 36, 10, 10, color))
        parts.append(svg_text(legend_x + 15, 45, name, color=PALE, size=12))
    legend_end = 16.0 + 80 * len(_MATRIX_COLORS) + 30
    parts.append(
        svg_text(_RIGHT, 45, caption, color=PALE, size=12, anchor="end", room=_RIGHT - legend_end)
    )
    parts += _axes(xs, ys, x, y)

    at_most = max(_MIN_CORNERS, _MAX_MATRIX_CORNERS // len(curves))
    for curve in sorted(curves, key=lambda curve: (curve.is_best, not curve.is_stopped)):
        kind = "stopped early" if curve.is_stopped else "other"
        color = _MATRIX_COLORS["best" if curve.is_best else kind]
        positions = [(xs(x), ys(y)) for x, y in thin_out(curve.points, at_most)]
        parts += _draw_curve(positions, color)
        if curve.is_best or len(curves) <= _MAX_LABELLED_CURVES:
            last_x, last_y = positions[-1]
            parts.append(svg_text(last_x + 6, last_y + 4, str(curve.number), color=PALE, size=11))
    return svg(parts, _CURVE_HEIGHT)


#: Largest number of attempts in the timeline of a run. Earlier attempts are left out.
ATTEMPTS_AT_MOST = 5
#: Left and right edge of the bars of the timeline, in pixels.
_BARS_LEFT = 104.0
_BARS_RIGHT = WIDTH - 144.0
#: Upper edge of the first attempt in the timeline, in pixels.
_BARS_TOP = 58.0
#: Height of the title of an attempt, in pixels.
_TITLE_HEIGHT = 26.0
#: Distance between the bars of two components, in pixels.
_ROW_HEIGHT = 22.0
#: Height of a bar, in pixels.
_BAR_HEIGHT = 14.0
#: Height of the time axis of an attempt, in pixels.
_AXIS_HEIGHT = 24.0
#: Free space between two attempts, in pixels.
_ATTEMPT_GAP = 8.0
#: Free space at the bottom of the picture, in pixels.
_BOTTOM_MARGIN = 8.0
_FAILED_COLOR = "#cf222e"
#: Colour of each phase of a component; the legend shows them in this order.
_PHASE_COLORS = {
    "waiting": "#d0d7de",
    "starting": "#d4a72c",
    "ready": "#2da44e",
    "failed": _FAILED_COLOR,
}
#: The timeline mentions a wait before an attempt only if the wait lasted at least this number of
#: seconds. A shorter wait is usually only the time in which the flow process starts.
_MIN_SHOWN_WAIT_S = 5.0
#: Units of the time axis with their length in seconds, longest first.
_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def show_timeline(view: RunView) -> Shown:
    """Return the artifact with the timeline of the components in the last attempts."""
    if view.record.attempt is None:
        return Shown(
            headline="no attempt has started yet", data="No attempt of this run has started yet."
        )
    caption = f"{_title(view)}, as of {format_time(view.at)}"
    return Shown(
        headline=escape_markdown(caption),
        picture=draw_timeline(view),
        data=f"{escape_markdown(caption)}.",
    )


def draw_timeline(view: RunView) -> str:
    """Return the timeline of a run as an SVG document."""
    parts = [svg_text(16, 25, _title(view), size=15, bold=True, room=WIDTH - 32)]
    for index, (name, color) in enumerate(_PHASE_COLORS.items()):
        x = 16.0 + 80 * index
        parts.append(svg_bar(x, 36, 10, 10, color))
        parts.append(svg_text(x + 15, 45, name, color=PALE, size=12))

    top = _BARS_TOP
    for attempt in view.record.attempts[-ATTEMPTS_AT_MOST:]:
        names = [*dict.fromkeys([*view.spec.components, *attempt.components])]
        parts += _draw_attempt(view, attempt, names, top)
        top += _TITLE_HEIGHT + len(names) * _ROW_HEIGHT + _AXIS_HEIGHT + _ATTEMPT_GAP
    return svg(parts, top + _BOTTOM_MARGIN)


def list_phases(view: RunView, attempt: AttemptRecord, name: str) -> list[tuple[str, float, float]]:
    """Return the times at which a component was waiting, starting and ready in an attempt.

    Returns:
        Tuples of phase name, begin and end in UTC epoch seconds, in order and without gaps. The
        names are `waiting`, `starting` and `ready`.
    """
    begin = attempt.started_at
    end = _end_of(view, attempt)
    component = attempt.components.get(name)
    if component is None:
        return [("waiting", begin, end)]
    component_end = component.ended_at or end
    ready = component.ready_at or component_end
    phases = [
        ("waiting", begin, component.started_at),
        ("starting", component.started_at, ready),
        ("ready", ready, component_end),
    ]
    return [phase for phase in phases if phase[2] > phase[1]]


def _draw_attempt(
    view: RunView, attempt: AttemptRecord, names: Sequence[str], top: float
) -> Iterator[str]:
    """Yield the SVG elements of an attempt: title, time axis and a row for each component.

    Args:
        names: Names of the components.
        top: Upper edge of the attempt in pixels.
    """
    begin = attempt.started_at
    end = _end_of(view, attempt)
    pixels_per_s = (_BARS_RIGHT - _BARS_LEFT) / max(end - begin, 0.1)

    title = f"attempt {attempt.number}: {attempt.ending}"
    yield svg_text(16, top + 14, title, bold=True, room=WIDTH - 232)
    start = _describe_start(view, attempt)
    yield svg_text(WIDTH - 16, top + 14, start, color=PALE, size=12, anchor="end")

    yield from _draw_time_axis(
        duration_s=end - begin,
        pixels_per_s=pixels_per_s,
        top=top + _TITLE_HEIGHT - 4,
        bottom=top + _TITLE_HEIGHT + len(names) * _ROW_HEIGHT,
    )

    for index, name in enumerate(names):
        y = top + _TITLE_HEIGHT + index * _ROW_HEIGHT
        yield svg_text(16, y + 11, name, room=_BARS_LEFT - 24)
        for phase, phase_begin, phase_end in list_phases(view, attempt, name):
            x = _BARS_LEFT + (phase_begin - begin) * pixels_per_s
            width = (phase_end - phase_begin) * pixels_per_s
            yield svg_bar(x, y, width, _BAR_HEIGHT, _PHASE_COLORS[phase])

        component = attempt.components.get(name)
        is_failed = attempt.failure is not None and name == attempt.failure.component
        if is_failed:
            failed_at = (component.ended_at if component else None) or end
            yield _cross(_BARS_LEFT + (failed_at - begin) * pixels_per_s, y + _BAR_HEIGHT / 2)
        yield svg_text(
            _BARS_RIGHT + 12,
            y + 11,
            describe_component_state(attempt, name),
            color=_FAILED_COLOR if is_failed else PALE,
            size=12,
            room=WIDTH - _BARS_RIGHT - 16,
        )


def _draw_time_axis(
    *, duration_s: float, pixels_per_s: float, top: float, bottom: float
) -> Iterator[str]:
    """Yield SVG lines and labels at round times since the start of an attempt.

    Args:
        duration_s: Duration of the attempt.
        pixels_per_s: Horizontal pixels for each second.
        top: Upper end of the lines in pixels.
        bottom: Lower end of the lines in pixels.
    """
    unit, unit_s = next(
        (name, length_s) for name, length_s in _UNITS if duration_s >= 2 * length_s or length_s == 1
    )
    for tick in axis_ticks(0, max(duration_s, 0.1) / unit_s, 4):
        time_s = tick * unit_s
        x = _BARS_LEFT + time_s * pixels_per_s
        yield svg_line(x, top, x, bottom)
        label = f"{number_text(time_s / unit_s)} {unit}"
        yield svg_text(x, bottom + 14, label, color=PALE, size=12, anchor="middle")


def _cross(x: float, y: float) -> str:
    """Return the SVG elements of a white cross in a red circle, which marks a failure."""
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="{_FAILED_COLOR}"/>'
        f'<path d="M{x - 3:.1f} {y - 3:.1f}l6 6m0-6l-6 6" stroke="#ffffff" stroke-width="2"/>'
    )


def _title(view: RunView) -> str:
    count = len(view.record.attempts)
    shown = f", the last {ATTEMPTS_AT_MOST} shown" if count > ATTEMPTS_AT_MOST else ""
    return f"{view.record.run_id}: {format_count(count, 'attempt')}{shown}"


def _describe_start(view: RunView, attempt: AttemptRecord) -> str:
    """Return the start time of an attempt, and the duration of the wait before the start.

    Example: `12:00:03 UTC, waited 1 min 05 s`. A wait of less than 5 seconds is left out.
    """
    earlier = [record for record in view.record.attempts if record.number < attempt.number]
    waiting_since = earlier[-1].ended_at if earlier else view.record.started_at
    wait_s = attempt.started_at - waiting_since if waiting_since else 0.0
    wait = f", waited {format_duration(wait_s)}" if wait_s >= _MIN_SHOWN_WAIT_S else ""
    return f"{format_time(attempt.started_at)}{wait}"


def _end_of(view: RunView, attempt: AttemptRecord) -> float:
    """Return the end of an attempt in UTC epoch seconds. For a running attempt, return the current
    time.
    """
    return attempt.ended_at if attempt.ended_at is not None else max(view.at, attempt.started_at)


_LOSSES = ("loss", "train/loss")
#: Names of metrics that can be drawn as a curve. If a metrics file contains several of these
#: metrics, the first in this list is drawn. For some workloads, the metrics in `_FIRST_NAMES` are
#: preferred.
NAMES = (
    "reward",
    "mean_reward",
    "reward_mean",
    "critic/rewards/mean",
    "critic/score/mean",
    "reward/mean",
    "rewards/mean",
    "train/reward",
    *_LOSSES,
)
#: Preferred metrics for each workload, best first. The metrics in `NAMES` come after these metrics.
#: For a reward model (`rm`), a loss is preferred, because the rewards from the model do not show
#: how good the model is.
_FIRST_NAMES: Mapping[str, tuple[str, ...]] = {
    "dpo": ("rewards/margins", "train/rewards/margins", *_LOSSES),
    "rm": _LOSSES,
    "pretrain": _LOSSES,
}


def list_curve_metrics(workload: object) -> tuple[str, ...]:
    """Return the names of metrics that can be drawn for a workload, best first.

    Args:
        workload: Workload of the run. An unknown value counts as `other`.
    """
    return tuple(dict.fromkeys((*_FIRST_NAMES.get(str(workload), ()), *NAMES)))


def collect_points(
    place: RunPlace, attempts: Sequence[AttemptRecord], names: Sequence[str] = NAMES
) -> dict[str, dict[float, float]]:
    """Return the finite values of some metrics of a run, as `points[metric][step]`.

    If several attempts reached a step, the value of the last attempt is used.

    Args:
        place: Directory of the run.
        attempts: Attempts whose metrics are read.
        names: Names of the metrics.
    """
    points: dict[str, dict[float, float]] = {}
    for row in read_rows(place, attempts):
        for name in names:
            metric = find_metric(row.metrics, [name])
            if metric is not None and math.isfinite(metric[1]):
                points.setdefault(name, {})[row.step] = metric[1]
    return points


class Figures:
    """Collects the values of one metric while the training appends to its metrics file."""

    def __init__(
        self,
        path: Path,
        step: str,
        names: Sequence[str] = NAMES,
        take: Callable[[float, Mapping[str, Any]], None] = lambda step, entry: None,
        earlier: Mapping[str, Mapping[float, float]] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            path: The metrics file, with one JSON object per line. It need not exist yet.
            step: Key of the step in a line. Dots separate nested keys.
            names: Names of metrics, best first. Only one metric is collected: the best metric in
                the first line that contains any of these metrics.
            take: Function that is called with the step and the content of each line that has a
                step.
            earlier: Values from earlier attempts of the run, as `earlier[metric][step]`.
        """
        self.path = path
        #: Name of the collected metric, which is one of `names`. Empty until a line with a finite
        #: value has decided which metric is collected.
        self.name = ""
        self._step_key = step
        self._names = names
        self._on_line = take
        self._earlier = earlier
        self._file = MetricsFile(path)
        #: Value of `MetricsFile.restarts` at the last read. If the value changes, the metrics file
        #: was replaced.
        self._restarts = 0
        self._points: dict[float, float] = {}
        #: First step of the present series of NaN or infinite values, and the value at this step.
        #: None if the last value of the metric is finite.
        self.not_finite_since: Point | None = None

    @property
    def points(self) -> list[Point]:
        """Pairs of step and value, sorted by step. For each step, only the last value is kept."""
        if not self.name:
            return []
        return sorted({**self._earlier.get(self.name, {}), **self._points}.items())

    @property
    def is_loss(self) -> bool:
        """True if the collected metric is a loss, and False if it is a reward or unknown."""
        return "loss" in self.name.lower()

    def read_new(self) -> bool:
        """Read the lines that were added to the file since the last call.

        Returns:
            True if unread lines remain, so that the method must be called again.
        """
        entries = self._file.read_new()
        if self._restarts != self._file.restarts:
            self._restarts = self._file.restarts
            self._points.clear()
            self.not_finite_since = None
        for entry in entries:
            self._add(entry)
        return self._file.has_more

    def _add(self, entry: Mapping[str, Any]) -> None:
        step = get_step(entry, self._step_key)
        if step is None:
            return
        self._on_line(step, entry)

        metric = find_metric(entry, [self.name] if self.name else self._names)
        if metric is None:
            return
        name, value = metric
        if math.isfinite(value):
            self.name = name
            self._points[step] = value
            self.not_finite_since = None
        elif self.not_finite_since is None:
            self.not_finite_since = (step, value)

    def describe_not_finite(self) -> str:
        """Return a text such as `nan since step 12`, or an empty string if the metric is finite."""
        if self.not_finite_since is None:
            return ""
        step, value = self.not_finite_since
        return f"{value} since step {number_text(step)}"
