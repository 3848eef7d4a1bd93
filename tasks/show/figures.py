"""The figures that a training writes, as they grow: a JSON object a line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.show.chart import Point

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
#: Where they may stand below.
_WITHIN = ("data", "metrics")
#: A file that grows faster than it is looked at is read in pieces of this size.
_PIECE_BYTES = 8_000_000


class Figures:
    """What a file of a run has by now. Reads only what was added since the last look."""

    def __init__(self, path: Path, step: str) -> None:
        """
        Args:
            step: the dotted key of the step in a line.
        """
        self.path = path
        #: Of what there is a curve; empty while nothing is known.
        self.name = ""
        self._step = step
        self._read_bytes = 0
        self._points: dict[float, float] = {}

    @property
    def points(self) -> list[Point]:
        """`(step, figure)`, in order; the last word on each step."""
        return sorted(self._points.items())

    def look(self) -> None:
        """Take in what was added; a file that is not there has nothing."""
        try:
            with self.path.open("rb") as f:
                if f.seek(0, 2) < self._read_bytes:
                    # It was begun anew.
                    self._read_bytes = 0
                    self._points.clear()
                f.seek(self._read_bytes)
                whole, end, _ = f.read(_PIECE_BYTES).rpartition(b"\n")
        except OSError:
            return
        self._read_bytes += len(whole) + len(end)
        for line in whole.splitlines():
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(entry, dict):
            return
        step = _at(entry, self._step)
        found = dict(_figures(entry))
        if not self.name:
            self.name = next((name for name in NAMES if name in found), "")
        if step is not None and self.name in found:
            self._points[step] = found[self.name]


def _figures(entry: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    parts = [part for part in (entry, *map(entry.get, _WITHIN)) if isinstance(part, dict)]
    for part in parts:
        for name in NAMES:
            if (value := _finite(part.get(name))) is not None:
                yield name, value


def _at(entry: Mapping[str, Any], key: str) -> float | None:
    content: Any = entry
    for part in key.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return _finite(content)


def _finite(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]
