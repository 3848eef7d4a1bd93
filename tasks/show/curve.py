"""A curve of a training's figures, as text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import plotext  # type: ignore[import-untyped]

Point = tuple[float, float]


def read(metrics: Path, x: str, y: str) -> list[Point]:
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


def draw(points: Sequence[Point], *, title: str, columns: int = 72, lines: int = 14) -> str:
    """The curve in Unicode, without colours; at least two points."""
    plotext.clear_figure()
    plotext.plotsize(columns, lines)
    plotext.title(title)
    plotext.plot([x for x, _ in points], [y for _, y in points], marker="braille")
    return str(plotext.uncolorize(plotext.build()))
