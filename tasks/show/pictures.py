"""Pictures as SVG text, and what is common to them: their ground, their type, their axes.

A picture stands on a ground of its own: it is shown within an image, where it can't know whether
the page around it is white or dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

#: Pixels. On a card of the UI that is some 380, in which the type must still be legible.
WIDTH = 520
GROUND, FRAME, GRID = "#ffffff", "#c9d1d9", "#e6e9ed"
INK, PALE = "#1f2328", "#59636e"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
#: Of a letter, as a part of its height, on average.
_LETTER_WIDTH = 0.54


def picture(parts: Iterable[str], *, height: float, title: str) -> str:
    """The whole, in pixels.

    Args:
        title: what it shows, for who can't see it.
    """
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}"'
            f' viewBox="0 0 {WIDTH} {height:g}" font-family="{_FONT}" font-size="13"'
            f' role="img"><title>{escape(title)}</title>',
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="6"'
            f' fill="{GROUND}" stroke="{FRAME}"/>',
            *parts,
            "</svg>",
        ]
    )


def words(
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
    """A line of text whose foot stands at a point.

    Args:
        room: how wide it may be; 0: as it is.
    """
    if room:
        fits = max(1, int(room / (_LETTER_WIDTH * size * (1.1 if bold else 1.0))))
        said = said if len(said) <= fits else f"{said[: fits - 1]}…"
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="{size}"'
        f' text-anchor="{anchor}"{weight}>{escape(said)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, color: str = GRID, width: float = 1) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        f' stroke="{color}" stroke-width="{width:g}"/>'
    )


def bar(x: float, y: float, width: float, height: float, color: str, said: str = "") -> str:
    """A bar that can be seen, however short what it stands for."""
    title = f"<title>{escape(said)}</title>" if said else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(2.0, width):.1f}" height="{height:g}"'
        f' rx="2" fill={quoteattr(color)}>{title}</rect>'
    )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
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


def number(value: float) -> str:
    """`0.25`, `12,000`, `1.2e+08`: short, and without the noise of sums of floats."""
    if value == 0:
        return "0"
    if abs(value) >= 1e7 or abs(value) < 1e-4:
        return f"{value:.3g}"
    return f"{value:,.4f}".rstrip("0").rstrip(".") if abs(value) < 1000 else f"{value:,.0f}"
