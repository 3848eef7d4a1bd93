"""What the benchmarks found: rows of figures, as one aligned table and as JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

Sample = Callable[[], float]
#: `modelled`: the other way is a small model of the original. `computed`: nothing ran.
How = Literal["measured", "modelled", "computed"]

#: Units of what is counted; `of 5` is one too.
_COUNTED = frozenset({"fds", "threads", "processes"})
_HEAD = ("benchmark", "way", "median", "p99", "max", "n", "x Muster", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way of doing the work, and what it took."""

    way: str
    #: Each in `unit`, in the order in which they were taken; for a computed row its quantiles.
    values: Sequence[float]
    unit: str = "ms"
    #: What must be known to read the figure.
    note: str = ""
    how: How = "measured"
    #: How many were measured; None: as many as there are values. 0: computed.
    samples: int | None = None
    #: Rows of one group are compared with its first.
    group: str = ""
    #: A part of another row, or another figure, so that a ratio would say nothing.
    is_detail: bool = False
    #: How many of what the group counts it was taken with, where that is what is varied.
    at: int | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def n(self) -> int:
        return len(self.values) if self.samples is None else self.samples

    def quantile(self, share: float) -> float:
        """The nearest rank, so always a value that occurred."""
        ranked = sorted(self.values)
        return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A way that was not measured, because something it needs is not there."""

    way: str
    #: What is not there, and how it is had.
    why: str


class NotHere(Exception):
    """A benchmark, or one of its ways, needs what is not there; the message says what, and how it
    is had. Any other error is a fault of the benchmark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One benchmark's rows; the first of each group is Muster's, to which the ratios are."""

    name: str
    #: What is measured, in a line.
    question: str
    rows: Sequence[Row]
    missing: Sequence[Missing] = ()

    def ratio(self, row: Row) -> float | None:
        """How many times Muster's median this way's is; None where that says nothing."""
        base = next(other for other in self.rows if other.group == row.group).median
        return None if row.is_detail or base <= 0 else row.median / base


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where and when the figures were taken."""

    at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    python: str = field(default_factory=platform.python_version)
    kernel: str = field(default_factory=lambda: f"{platform.system()} {platform.release()}")
    cpu: str = field(default_factory=lambda: _cpu_model())
    cpus: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    memory_gb: float = field(
        default_factory=lambda: round(
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1
        )
    )
    #: Runnable processes over the last minute: above `cpus`, figures are noise.
    load: float = field(default_factory=lambda: round(os.getloadavg()[0], 2))

    def __str__(self) -> str:
        return (
            f"{self.at}  Python {self.python}  {self.kernel}  "
            f"{self.cpus} CPUs ({self.cpu})  {self.memory_gb:g} GB  load {self.load:g}"
        )


def interleaved(
    ways: Mapping[str, Sample], rounds: int, *, per_round: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Take samples of every way in turn, A B A B, in a new order each round.

    Args:
        per_round: how many samples of a way each round, where not one.

    Returns: `values[way]`.
    """
    values: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        turns = [way for way in ways for _ in range((per_round or {}).get(way, 1))]
        random.shuffle(turns)
        say(f"  round {number + 1} of {rounds}")
        for way in turns:
            values[way].append(ways[way]())
    return values


def say(text: str) -> None:
    """Progress, beside the table."""
    print(text, file=sys.stderr, flush=True)


def table(results: Sequence[Result]) -> str:
    """All rows, aligned."""
    lines: list[Sequence[str]] = [_HEAD]
    for result in results:
        for row in result.rows:
            ratio = result.ratio(row)
            shown = "" if ratio is None else shown_figure(ratio)
            figures = (row.median, row.quantile(0.99), max(row.values))
            numbers = [with_unit(figure, row.unit) for figure in figures]
            way = f"  {row.way}" if row.is_detail else row.way
            note = "; ".join(filter(None, ("" if row.how == "measured" else row.how, row.note)))
            lines.append((result.name, way, *numbers, str(row.n or "-"), shown, note))
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    numeric = range(2, 7)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in numeric else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def write_json(path: Path, machine: Machine, results: Sequence[Result], *, quick: bool) -> None:
    """All figures, each sample included, for comparing two runs."""
    content = {
        "machine": machine_as_json(machine),
        "quick": quick,
        "benchmarks": [
            {"name": result.name, "question": result.question, "rows": rows_as_json(result)}
            for result in results
        ],
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def machine_as_json(machine: Machine) -> dict[str, Any]:
    return {name: getattr(machine, name) for name in machine.__dataclass_fields__}


def rows_as_json(result: Result) -> list[dict[str, Any]]:
    return [
        {
            "way": row.way,
            "unit": row.unit,
            "median": row.median,
            "p99": row.quantile(0.99),
            "max": max(row.values),
            "samples": row.n,
            "times_muster": result.ratio(row),
            "how": row.how,
            "note": row.note,
            "group": row.group,
            "is_detail": row.is_detail,
            "at": row.at,
            "values": list(row.values),
        }
        for row in result.rows
    ]


def with_unit(figure: float, unit: str) -> str:
    """What is counted comes in whole numbers; a median may be half of one."""
    is_count = unit in _COUNTED or unit.startswith("of ")
    shown = f"{figure:,g}" if is_count and figure < 1e5 else shown_figure(figure)
    return f"{shown} {unit}"


def shown_figure(figure: float) -> str:
    """Three digits or so, and never an exponent."""
    size = abs(figure)
    if size >= 99.95:
        return f"{figure:,.0f}"
    if size >= 9.995:
        return f"{figure:.1f}"
    return f"{figure:.2f}" if size >= 0.0995 or size == 0 else f"{figure:.2g}"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
