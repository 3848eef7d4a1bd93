"""Write BENCHMARKS.md from the recorded figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tests.benchmarks.records import Figure, Record
from tests.benchmarks.report import shown_figure, with_unit

_HEAD = """\
<!-- Made by `make bench` from tests/benchmarks/results/; what is written here by hand is lost. -->
# Benchmarks

Muster beside other ways of doing the same work. All ways of a table are measured in turn, in one
run, so that the ratios say more than the figures.

| command | does |
| --- | --- |
| `make bench` | measures all of it anew{total}, and writes this page and the tables of \
`docs/limits.md` |
| `make bench ARGS='crash --record'` | the same for one section |
| `make bench ARGS='crash readiness'` | measures, and only prints |
| `make bench ARGS='crash --quick'` | few samples: does it work at all |
| `make bench ARGS=--page` | writes the pages again from what was kept, and measures nothing |

How to read the tables: a row is a way, n its samples. *x Muster* is how many times Muster's median
this way's is; the first row of a kind is Muster's. *Modelled* is a small program with the shape and
the period of the original and none of its other work; *computed* is arithmetic, nothing ran; all
other rows are the real thing. A row that begins with ↳ is a part of another one, or a figure that
has nothing to be compared with.
"""


def page(records: Mapping[str, Record], names: Sequence[str]) -> str:
    """Return the text of BENCHMARKS.md.

    Args:
        records: Recorded figures by the name of the benchmark.
        names: Names of all benchmarks, in the order of the page.
    """
    recorded = [records[name] for name in names if name in records]
    parts = [_HEAD.format(total=_total(recorded, names)), _machines(recorded), _versions(recorded)]
    not_run = list(_not_run(records, names))
    if not_run:
        parts.append("## Not run\n\n" + "\n".join(not_run) + "\n")
    parts += [_section(record, recorded) for record in recorded if not record.not_run]
    return "\n".join(parts)


def _total(recorded: Sequence[Record], names: Sequence[str]) -> str:
    """Return the duration of all benchmarks as text, or an empty string if it is unknown."""
    if len(recorded) < len(names) or any(record.quick for record in recorded):
        return ""
    return f", about {_duration(sum(record.took_s for record in recorded))}"


def _not_run(records: Mapping[str, Record], names: Sequence[str]) -> Iterator[str]:
    """Yield a line for each benchmark or way without figures, with the reason."""
    for name in names:
        record = records.get(name)
        if record is None:
            yield f"- `{name}`: not measured yet"
        elif record.not_run:
            yield f"- `{name}`: {record.not_run}"
        else:
            for missing in record.missing:
                yield f"- `{name}`, {missing.way}: {missing.why}"


def _machines(records: Sequence[Record]) -> str:
    """Return the section with the table of machines."""
    lines = ["## Machine", "", "| | CPU | CPUs | memory | kernel | Python |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for number, machine in enumerate(_distinct_machines(records)):
        lines.append(f"| {_letter(number)} | {' | '.join(machine)} |")
    return "\n".join(lines) + "\n"


def _distinct_machines(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return the different machines of the records, in the order of their first record."""
    return list(dict.fromkeys(_machine(record) for record in records))


def _machine(record: Record) -> tuple[str, ...]:
    """Return CPU, number of CPUs, memory, kernel and Python version of a record's machine."""
    machine = record.machine
    memory = f"{machine['memory_gb']:g} GB"
    return (machine["cpu"], str(machine["cpus"]), memory, machine["kernel"], machine["python"])


def _letter(number: int) -> str:
    """Return the letter of the machine with this number: 0 is A."""
    return chr(ord("A") + number)


def _versions(records: Sequence[Record]) -> str:
    """Return the section with the versions of the packages."""
    names_by_version: dict[str, dict[str, list[str]]] = {}
    for record in records:
        for package, version in record.versions.items():
            names_by_version.setdefault(package, {}).setdefault(version, []).append(record.name)
    lines = ["## Versions", "", "| | |", "| --- | --- |"]
    for package, by_version in names_by_version.items():
        texts = (
            version if len(by_version) == 1 else f"{version} for {', '.join(names)}"
            for version, names in by_version.items()
        )
        lines.append(f"| {package} | {'; '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _section(record: Record, records: Sequence[Record]) -> str:
    """Return the section of one benchmark, with its table."""
    machine = _letter(_distinct_machines(records).index(_machine(record)))
    quick = "**Few samples (`--quick`): the figures say little.** " if record.quick else ""
    conditions = (
        f"{quick}Machine {machine}, load {record.machine['load']:g} before, "
        f"{record.machine['at'][:10]}, {_duration(record.took_s)}: "
        f"`make bench ARGS='{record.name} --record'`"
    )
    lines = [f"## {record.name}", "", f"{_capital(record.question)}.", "", *table(record.figures)]
    return "\n".join([*lines, "", conditions]) + "\n"


def table(figures: Sequence[Figure]) -> list[str]:
    """Return the lines of a Markdown table, with one row per figure."""
    head = "| way | median | p99 | n | x Muster | |"
    return [head, "| --- | ---: | ---: | ---: | ---: | --- |", *map(_line, figures)]


def _line(figure: Figure) -> str:
    """Return the Markdown table row of a figure."""
    numbers = [with_unit(value, figure.unit) for value in (figure.median, figure.p99)]
    ratio = "" if figure.times_muster is None else shown_figure(figure.times_muster)
    note = "; ".join(filter(None, ("" if figure.how == "measured" else figure.how, figure.note)))
    way = f"↳ {figure.way}" if figure.is_detail else figure.way
    cells = (way, *numbers, str(figure.samples or "-"), ratio, note)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def machine_line(record: Record) -> str:
    """Return one line with the time, the version and the machine of a record's figures."""
    cpu, cpus, memory, kernel, python = _machine(record)
    quick = ", few samples (`--quick`): the figures say little" if record.quick else ""
    when = f"{record.machine['at'][:10]}, Muster {record.versions['Muster']}"
    load = f"load {record.machine['load']:g} before"
    return f"{when}; {cpus} CPUs ({cpu}), {memory}, {kernel}, Python {python}, {load}{quick}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
