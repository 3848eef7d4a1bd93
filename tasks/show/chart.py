"""A training's curve as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from tasks.show import pictures

Point = tuple[float, float]

_HEIGHT = 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, pictures.WIDTH - 18.0, 60.0, _HEIGHT - 48.0
_COLOR, _BAND = "#0969da", "#b6d7ff"
#: More points than so are drawn as the mean of neighbours, and how far these spread.
_POINTS_AT_MOST = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Neighbours that are drawn as one."""

    x: float
    y: float
    low: float
    high: float


def curve_of(points: Sequence[Point], *, x: str, y: str, title: str) -> str:
    """The curve as SVG; one point is a dot.

    Args:
        points: finite, in order; at least one.
        x: what the figures along the foot are.
        y: what the figures along the side are.
    """
    groups = [*_grouped(points)]
    xs = _Scale([p for p, _ in points], _LEFT, _RIGHT, margin=0)
    ys = _Scale([v for one in groups for v in (one.low, one.high)], _BOTTOM, _TOP, margin=0.06)
    first, last = points[0][1], points[-1][1]
    best = max(value for _, value in points)
    at = [pictures.number(value) for value in (first, last, best)]
    said = f"{at[0]} at first, {at[1]} now, {at[2]} at most"
    return pictures.picture(
        [
            pictures.words(16, 25, title, size=15, bold=True, room=_RIGHT - 16),
            pictures.words(16, 44, said, color=pictures.PALE),
            *_axes(xs, ys, x, y),
            *_drawn(groups, xs, ys),
        ],
        height=_HEIGHT,
        title=f"{title}: {said}",
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
    for value in pictures.ticks(ys.low, ys.high):
        yield pictures.line(_LEFT, ys(value), _RIGHT, ys(value))
        at = _LEFT - 8, ys(value) + 4
        yield pictures.words(
            *at, pictures.number(value), color=pictures.PALE, size=12, anchor="end"
        )
    for value in pictures.ticks(xs.low, xs.high, 6):
        yield pictures.line(xs(value), _BOTTOM, xs(value), _BOTTOM + 4, pictures.PALE)
        at = xs(value), _BOTTOM + 17
        yield pictures.words(
            *at, pictures.number(value), color=pictures.PALE, size=12, anchor="middle"
        )
    yield pictures.line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, pictures.PALE)
    yield pictures.words(
        (_LEFT + _RIGHT) / 2, _HEIGHT - 10, x, color=pictures.PALE, anchor="middle"
    )
    middle = (_TOP + _BOTTOM) / 2
    turned = pictures.words(0, 0, y, color=pictures.PALE, anchor="middle", room=_BOTTOM - _TOP)
    yield f'<g transform="translate(16 {middle:g}) rotate(-90)">{turned}</g>'


def _drawn(groups: Sequence[_Group], xs: _Scale, ys: _Scale) -> Iterator[str]:
    if any(one.low < one.high for one in groups):
        upper = [f"{xs(one.x):.1f},{ys(one.high):.1f}" for one in groups]
        lower = [f"{xs(one.x):.1f},{ys(one.low):.1f}" for one in reversed(groups)]
        yield f'<polygon points="{" ".join([*upper, *lower])}" fill="{_BAND}"/>'
    if len(groups) > 1:
        points = " ".join(f"{xs(one.x):.1f},{ys(one.y):.1f}" for one in groups)
        yield (
            f'<polyline points="{points}" fill="none" stroke="{_COLOR}" stroke-width="2"'
            ' stroke-linejoin="round"/>'
        )
    last = groups[-1]
    yield f'<circle cx="{xs(last.x):.1f}" cy="{ys(last.y):.1f}" r="3.5" fill="{_COLOR}"/>'


def _grouped(points: Sequence[Point]) -> Iterator[_Group]:
    size = -(-len(points) // _POINTS_AT_MOST)
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        values = [value for _, value in part]
        x = part[-1][0] if begin + size >= len(points) else fmean(x for x, _ in part)
        yield _Group(x=x, y=fmean(values), low=min(values), high=max(values))
