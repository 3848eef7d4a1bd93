"""Results of the benchmarks: measured values, printed as an aligned table and written as JSON."""

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

#: Function that measures once and returns the measured value.
Sample = Callable[[], float]
#: Origin of the values in a row of the results. "measured": a real program ran. "modelled": a small
#: imitation of another project ran. "computed": no program ran.
How = Literal["measured", "modelled", "computed"]

#: Units whose values are whole numbers. The report does not round these values.
_COUNTED = frozenset({"fds", "threads", "processes"})
_HEAD = ("benchmark", "way", "median", "p99", "max", "n", "x Muster", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row in the results of a benchmark: the samples of one program, or of one method."""

    #: Name of the program or method, used as the title of the row.
    way: str
    #: Samples in the unit `unit`, in the order in which they were taken. If `how` is "computed",
    #: calculated values instead of samples.
    values: Sequence[float]
    #: Unit of the values.
    unit: str = "ms"
    #: Explanation that a reader needs to understand the values.
    note: str = ""
    #: Origin of the values: measured, modelled or computed.
    how: How = "measured"
    #: Number of samples. None if each of the `values` is a sample. 0 if nothing was measured.
    samples: int | None = None
    #: Name of the group of rows that are compared with each other. The first row of a group is the
    #: row for Muster.
    group: str = ""
    #: True if this row measures only a part of another row, or if no other row is comparable. The
    #: results then show no ratio to Muster for this row.
    is_detail: bool = False
    #: Load during the measurement, for example the number of components. None if the benchmark did
    #: not vary the load.
    at: int | None = None

    @property
    def median(self) -> float:
        """Median of the samples, in the row's unit."""
        return statistics.median(self.values)

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.values) if self.samples is None else self.samples

    def quantile(self, share: float) -> float:
        """Return a quantile of the values, computed by the nearest-rank method.

        A quantile of this method is always one of the values.

        Args:
            share: The quantile as a number from 0 to 1, for example 0.99 for the 99th percentile.
        """
        ranked = sorted(self.values)
        return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A program that was not measured, because this machine lacks a required program or package."""

    #: Name of the program that was not measured.
    way: str
    #: Name of the missing program or package, with an instruction to install it.
    why: str


class NotHere(Exception):
    """This machine lacks a program or package that a benchmark needs.

    The message names the missing program or package, and says how to install it. Any other
    exception is an error of the benchmark.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of one benchmark. The first row of each group is Muster's."""

    #: Name of the benchmark.
    name: str
    #: Description of the measurement in one line.
    question: str
    #: Rows of the result, in the order of the printed table.
    rows: Sequence[Row]
    #: Programs that were not measured, each with the reason.
    missing: Sequence[Missing] = ()

    def ratio(self, row: Row) -> float | None:
        """Return how many times larger the median of a row is than the median of Muster.

        Returns:
            None if the row is not comparable with Muster's row, or if Muster's median is 0.
        """
        base = next(other for other in self.rows if other.group == row.group).median
        return None if row.is_detail or base <= 0 else row.median / base


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Machine and time of a measurement."""

    #: Start of the measurement, as an ISO 8601 time in UTC.
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
    #: Average number of runnable processes in the last minute. If this number is higher than
    #: `cpus`, the measured values are not reliable.
    load: float = field(default_factory=lambda: round(os.getloadavg()[0], 2))

    def __str__(self) -> str:
        return (
            f"{self.at}  Python {self.python}  {self.kernel}  "
            f"{self.cpus} CPUs ({self.cpu})  {self.memory_gb:g} GB  load {self.load:g}"
        )


def interleaved(
    ways: Mapping[str, Sample], rounds: int, *, per_round: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Take samples of all compared programs or methods, in a new random order in each round.

    Because of this order, a change of the machine's speed affects all programs and methods equally.

    Args:
        ways: Mapping from the name of a program or method to the function that takes one sample.
        rounds: Number of rounds.
        per_round: Mapping from the name of a program or method to the number of samples per round.
            Default: 1.

    Returns:
        Mapping from the name of a program or method to its samples.
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
    """Print a progress message to stderr."""
    print(text, file=sys.stderr, flush=True)


def table(results: Sequence[Result]) -> str:
    """Return the results of all benchmarks as an aligned table for a terminal."""
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
    """Write all measured values, with each sample, to a JSON file."""
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
    """Return a measured value with its unit as text.

    Counts are not rounded, because they are whole numbers. Only a median of counts may end with .5.
    """
    is_count = unit in _COUNTED or unit.startswith("of ")
    text = f"{figure:,g}" if is_count and figure < 1e5 else shown_figure(figure)
    return f"{text} {unit}"


def shown_figure(figure: float) -> str:
    """Return a measured value as text with about three digits and without an exponent."""
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
