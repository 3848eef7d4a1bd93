"""Write the tables of docs/limits.md from the recorded results of benchmarks.

A table is between the lines `<!-- figures: NAME -->` and `<!-- end of figures -->`. The text around
the tables is written by hand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.benchmarks.page import machine_line, table
from tests.benchmarks.records import Figure, Record
from tests.benchmarks.report import shown_figure

_BLOCK = re.compile(
    r"(<!-- figures: (?P<name>[a-z-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL
)
_NOTHING = "Not measured yet: `make bench ARGS='limits --record'`."
#: Names of the benchmarks whose results the page docs/limits.md shows.
_TAKEN_FROM = ("limits", "queue", "capacity", "gateway", "nodes")
#: A published limit is at most this many times the largest measured load. Further extrapolation
#: would be unreliable.
_BEYOND = 10
_DAY_S = 86_400

Records = Mapping[str, Record]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Straight line through the measured values of a series: `base + each * load`."""

    #: Value of the fitted line at load 0, in `unit`. The load is a count, for example of runs.
    base: float
    #: Increase of the value when the load grows by 1, in `unit`.
    each: float
    #: Unit of the measured values, for example "ms".
    unit: str
    #: Smallest load at which a value was measured.
    least: int
    #: Largest load at which a value was measured.
    most: int

    def reaches(self, bound: float) -> int | None:
        """Return the load at which the fitted line reaches the largest acceptable value `bound`.

        Returns:
            None if the line does not rise, because then no load is too large.
        """
        if self.each <= 0:
            return None
        return max(0, math.floor((bound - self.base) / self.each))

    def __str__(self) -> str:
        sign = "-" if self.each < 0 else "+"
        each = shown_figure(abs(self.each))
        return f"{shown_figure(self.base)} {sign} {each} x n {self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Largest acceptable value in a series of measurements, for example 1 s per scheduling pass.

    The page docs/limits.md shows the load, for example the number of runs, at which this value is
    reached.
    """

    #: Kind of load, for example "waiting runs, scheduler, SQLite".
    what: str
    #: Name of the series of values in the results of the benchmark `limits`.
    group: str
    #: Largest acceptable value, in the unit of the series.
    bound: float
    #: The bound as text for the table, for example "a pass takes 1 s".
    bound_text: str


def _on_each_database(what: str, figure: str, bound: float, bound_text: str) -> Iterator[Limit]:
    """Yield a limit twice: for the measurements with SQLite and with PostgreSQL.

    Args:
        what: Kind of load, for example "waiting runs, scheduler".
        figure: Beginning of the name of the series in the results.
        bound: Largest acceptable value, in the unit of the series.
        bound_text: The bound as text.
    """
    for database in ("SQLite", "PostgreSQL"):
        yield Limit(
            what=f"{what}, {database}",
            group=f"{figure} on {database}",
            bound=bound,
            bound_text=bound_text,
        )


#: All limits in docs/limits.md. The limits are valid for the measured machine. On a faster machine,
#: a limit on a duration is reached only at a higher load.
LIMITS = (
    *_on_each_database(
        "waiting runs, scheduler",
        "scheduler, a pass, by runs waiting",
        bound=1_000,
        bound_text="a pass takes 1 s",
    ),
    *_on_each_database(
        "runs with a gang, scheduler",
        "scheduler, a pass, by runs running",
        bound=1_000,
        bound_text="a pass takes 1 s",
    ),
    *_on_each_database(
        "recorded runs, memory of the server",
        "server, RSS, by runs waiting",
        bound=4_000,
        bound_text="4 GB",
    ),
    *_on_each_database(
        "recorded runs, database of the server",
        "server, database, by runs waiting",
        bound=10_000,
        bound_text="10 GB",
    ),
    *_on_each_database(
        "waiting runs, memory of the worker",
        "worker, RSS, by runs waiting",
        bound=1_000,
        bound_text="1 GB",
    ),
    Limit(
        what="runs that start at the same moment",
        group="runs, start of all, by runs at once",
        bound=60,
        bound_text="the last run starts within 60 s",
    ),
    Limit(
        what="components of a run, start",
        group="flow process, start of all, by components",
        bound=600,
        bound_text="all start within 10 min",
    ),
    Limit(
        what="components of a run, file descriptors",
        group="flow process, file descriptors, by components",
        bound=1_024,
        bound_text="the usual soft limit of 1,024",
    ),
    Limit(
        what="components of a run, memory of the guardians",
        group="guardians, memory (PSS), by components",
        bound=4_000,
        bound_text="4 GB",
    ),
    Limit(
        what="components of a run, memory of the flow process",
        group="flow process, RSS, by components",
        bound=1_000,
        bound_text="1 GB",
    ),
    Limit(
        what="requests in flight, memory of the gateway",
        group="gateway, RSS, by requests in flight",
        bound=4_000,
        bound_text="4 GB",
    ),
    Limit(
        what="requests in flight, file descriptors of the gateway",
        group="gateway, file descriptors, by requests in flight",
        bound=524_288,
        bound_text="the usual hard limit of 524,288, which the gateway sets",
    ),
    Limit(
        what="servers, memory of the gateway",
        group="gateway, RSS, by servers",
        bound=1_000,
        bound_text="1 GB",
    ),
    Limit(
        what="servers, time of a sweep",
        group="health, a sweep, by servers swept",
        bound=15_000,
        bound_text="a sweep takes 15 s, the time-out of a probe",
    ),
    Limit(
        what="servers, CPU of sweeps",
        group="health, CPU of a sweep and of creating the fleet, by servers swept",
        bound=6_000,
        bound_text="a fifth of a core, with a sweep every 30 s",
    ),
)


def filled(text: str, records: Records) -> str:
    """Return the document with all tables written from the records.

    Args:
        text: The document with old tables.
        records: Mapping from the name of a benchmark to its recorded figures.

    Raises:
        KeyError: The document names a table that does not exist.
    """

    def block(match: re.Match[str]) -> str:
        return match[1] + _BLOCKS[match["name"]](records).rstrip() + "\n" + match[3]

    return _BLOCK.sub(block, text)


def line_through(points: Sequence[tuple[int, float]], unit: str) -> Line | None:
    """Return the straight line that fits measured values best (method of least squares).

    Args:
        points: Pairs of a load and the value that was measured at this load.
        unit: Unit of the values.

    Returns:
        The line, or None if the values were measured at fewer than two different loads.
    """
    counts = [count for count, _ in points]
    if len(set(counts)) < 2:
        return None
    mean_count = sum(counts) / len(points)
    mean = sum(value for _, value in points) / len(points)
    spread = sum((count - mean_count) ** 2 for count in counts)
    each = sum((count - mean_count) * (value - mean) for count, value in points) / spread
    return Line(
        base=mean - each * mean_count,
        each=each,
        unit=unit,
        least=min(counts),
        most=max(counts),
    )


def carried(limit: Limit, line: Line) -> str:
    """Return, as text, the load at which a fitted line reaches the bound of a limit.

    The load, for example a number of runs, is rounded down to two significant digits. If the line
    is still below the bound at ten times the largest measured load, the text names the tenfold
    load, for example "over 5,000" if the largest measured load is 500.
    """
    count, furthest = line.reaches(limit.bound), _BEYOND * line.most
    if count is None or count > furthest:
        return f"over {furthest:,}"
    size = max(0, len(str(count)) - 2)
    return f"{count // 10**size * 10**size:,}"


def _limits(records: Records) -> str:
    """Return the table of all limits: the largest load at which Muster stays within a bound."""
    series = _series(records, "limits")
    lines = ["| quantity | maximum | bound | measured range | line |"]
    lines.append("| --- | ---: | --- | ---: | --- |")
    for limit in LIMITS:
        line = _line_of(series.get(limit.group, ()))
        cells = ("-", limit.bound_text, "not measured", "")
        if line is not None:
            measured = f"{line.least:,} to {line.most:,}"
            cells = (carried(limit, line), limit.bound_text, measured, str(line))
        lines.append(f"| {limit.what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _rates(records: Records) -> str:
    """Return a Markdown table of rates and sizes, for example requests per second of a gateway.

    Each row also has the measured value and the formula from which the rate comes.
    """
    lines = ["| quantity | figure | source |", "| --- | ---: | --- |"]
    lines += [f"| {' | '.join(cells)} |" for cells in _each_rate(records)]
    return "\n".join(lines)


def _each_rate(records: Records) -> Iterator[tuple[str, str, str]]:
    """Yield the table cells of each measured rate, such as requests per second.

    Yields:
        Name of the rate, its value with the unit, and its source.
    """
    gateway = _by_way(records, "gateway")
    limits = _series(records, "limits")
    for kind in ("plain", "stream of 20"):
        if (figure_of_kind := gateway.get(f"Muster, {kind}, CPU per request")) is not None:
            rate = f"{shown_figure(1e6 / figure_of_kind.median)} req/s"
            source = f"1 s / {shown_figure(figure_of_kind.median)} us, benchmark `gateway`"
            yield f"requests of a gateway, {kind}, per core", rate, source
    line = _line_of(limits.get("runs, start of all, by runs at once", ()))
    if line is not None and line.each > 0:
        rate = f"{shown_figure(60 / line.each)} per minute"
        yield "starts of runs, this machine", rate, f"60 s / {shown_figure(line.each)} s per run"
    if memory := limits.get("a run, memory (PSS), by runs at once"):
        each = memory[-1].median
        figure = f"{math.floor(1_000 / each):,} runs"
        source = f"{shown_figure(each)} MB per run of three components, without their programs"
        yield "runs per 1 GB of a worker's host", figure, source
    if database := limits.get("server, database per run, by runs at once"):
        each = database[-1].median
        figure = f"{math.floor(1e6 / each):,} runs"
        yield (
            "complete runs per 1 GB of the server's database",
            figure,
            f"{shown_figure(each)} kB per run",
        )
    if steps := limits.get("events.jsonl, a step"):
        each = steps[0].median
        for step_s in (10, 60):
            figure = f"{shown_figure(each * _DAY_S / step_s / 1e6)} MB per day"
            source = f"{shown_figure(each)} bytes per step"
            yield f"events.jsonl, one step every {step_s} s", figure, source
    for database in ("SQLite", "PostgreSQL"):
        if submissions := limits.get(f"server, runs submitted, by runs waiting on {database}"):
            last = submissions[-1]
            figure = f"{shown_figure(last.median)} per second"
            source = f"one client, until {last.at:,} runs waited"
            yield f"runs submitted to a server on {database}", figure, source
    points = [
        (int(match[1]), answer.median)
        for way, answer in _by_way(records, "capacity").items()
        if (match := re.fullmatch(r"Muster, further answer, (\d+) nodes?", way))
    ]
    if (line := line_through(points, "ms")) is not None:
        figure = f"{shown_figure(line.base + 100 * line.each)} ms"
        source = f"{line}, {line.least} to {line.most} nodes"
        yield "state of a Ray cluster of 100 nodes", figure, source
    nodes = _by_way(records, "nodes")
    for task in ("sweep", "preflight"):
        points = [
            (int(words[2]), duration.median)
            for way, duration in nodes.items()
            if (words := way.replace(",", "").split())[:2] == ["Muster", task]
        ]
        if (line := line_through(points, "ms")) is not None:
            figure = f"{shown_figure((line.base + 100 * line.each) / 1000)} s"
            source = f"{line}, {line.least} to {line.most} nodes, all of them on this machine"
            yield f"a {task} of 100 nodes", figure, source


def _queue(records: Records) -> str:
    """Return the table of the durations of scheduling passes without a Prefect server."""
    record = records.get("queue")
    if record is None:
        return _NOTHING.replace("limits", "queue")
    figures = [figure for figure in record.figures if figure.way.startswith("Muster")]
    return "\n".join(table(figures))


def _all(records: Records) -> str:
    """Return the table of all measured values of the benchmark `limits`."""
    record = records.get("limits")
    return _NOTHING if record is None else "\n".join(table(record.figures))


def _taken(records: Records) -> str:
    """Return a list of the benchmarks, each with the machine and the time of its measurement."""
    names = [name for name in _TAKEN_FROM if name in records]
    if not names:
        return _NOTHING
    return "\n".join(f"- `{name}`: {machine_line(records[name])}" for name in names)


def _series(records: Records, name: str) -> dict[str, list[Figure]]:
    """Return a mapping from the name of a series to its measured values, for one benchmark."""
    record = records.get(name)
    series: dict[str, list[Figure]] = {}
    for figure in record.figures if record else ():
        series.setdefault(figure.group, []).append(figure)
    return series


def _by_way(records: Records, name: str) -> dict[str, Figure]:
    """Return the measured values of one benchmark, in a mapping whose keys are row titles."""
    record = records.get(name)
    return {figure.way: figure for figure in (record.figures if record else ())}


def _line_of(figures: Sequence[Figure]) -> Line | None:
    """Return the straight line through a series of values.

    Returns:
        None if the values were measured at fewer than two different loads.
    """
    points = [(figure.at, figure.median) for figure in figures if figure.at is not None]
    return line_through(points, figures[0].unit) if points else None


_BLOCKS: Mapping[str, Callable[[Records], str]] = {
    "taken": _taken,
    "limits": _limits,
    "rates": _rates,
    "queue": _queue,
    "all": _all,
}
