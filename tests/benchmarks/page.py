"""BENCHMARKS.md, made of the figures that were kept and of nothing else."""

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
    """
    Args:
        names: of all benchmarks there are, in the order of the page.
    """
    known = [records[name] for name in names if name in records]
    parts = [_HEAD.format(total=_total(known, names)), _machines(known), _versions(known)]
    left_out = list(_left_out(records, names))
    if left_out:
        parts.append("## Not run\n\n" + "\n".join(left_out) + "\n")
    parts += [_section(record, known) for record in known if not record.not_run]
    return "\n".join(parts)


def _total(known: Sequence[Record], names: Sequence[str]) -> str:
    """How long it takes; nothing where that is not known."""
    if len(known) < len(names) or any(record.quick for record in known):
        return ""
    return f", about {_duration(sum(record.took_s for record in known))}"


def _left_out(records: Mapping[str, Record], names: Sequence[str]) -> Iterator[str]:
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
    lines = ["## Machine", "", "| | CPU | CPUs | memory | kernel | Python |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for number, machine in enumerate(_distinct_machines(records)):
        lines.append(f"| {_letter(number)} | {' | '.join(machine)} |")
    return "\n".join(lines) + "\n"


def _distinct_machines(records: Sequence[Record]) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(_machine(record) for record in records))


def _machine(record: Record) -> tuple[str, ...]:
    it = record.machine
    memory = f"{it['memory_gb']:g} GB"
    return (it["cpu"], str(it["cpus"]), memory, it["kernel"], it["python"])


def _letter(number: int) -> str:
    return chr(ord("A") + number)


def _versions(records: Sequence[Record]) -> str:
    found: dict[str, dict[str, list[str]]] = {}
    for record in records:
        for package, version in record.versions.items():
            found.setdefault(package, {}).setdefault(version, []).append(record.name)
    lines = ["## Versions", "", "| | |", "| --- | --- |"]
    for package, by_version in found.items():
        shown = (
            version if len(by_version) == 1 else f"{version} for {', '.join(those)}"
            for version, those in by_version.items()
        )
        lines.append(f"| {package} | {'; '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _section(record: Record, records: Sequence[Record]) -> str:
    machine = _letter(_distinct_machines(records).index(_machine(record)))
    quick = "**Few samples (`--quick`): the figures say little.** " if record.quick else ""
    taken = (
        f"{quick}Machine {machine}, load {record.machine['load']:g} before, "
        f"{record.machine['at'][:10]}, {_duration(record.took_s)}: "
        f"`make bench ARGS='{record.name} --record'`"
    )
    lines = [f"## {record.name}", "", f"{_capital(record.question)}.", "", *table(record.figures)]
    return "\n".join([*lines, "", taken]) + "\n"


def table(figures: Sequence[Figure]) -> list[str]:
    """In Markdown, a line a row."""
    head = "| way | median | p99 | n | x Muster | |"
    return [head, "| --- | ---: | ---: | ---: | ---: | --- |", *map(_line, figures)]


def _line(figure: Figure) -> str:
    numbers = [with_unit(one, figure.unit) for one in (figure.median, figure.p99)]
    ratio = "" if figure.times_muster is None else shown_figure(figure.times_muster)
    note = "; ".join(filter(None, ("" if figure.how == "measured" else figure.how, figure.note)))
    way = f"↳ {figure.way}" if figure.is_detail else figure.way
    cells = (way, *numbers, str(figure.samples or "-"), ratio, note)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def machine_line(record: Record) -> str:
    """Where and when its figures were taken."""
    cpu, cpus, memory, kernel, python = _machine(record)
    quick = ", few samples (`--quick`): the figures say little" if record.quick else ""
    when = f"{record.machine['at'][:10]}, Muster {record.versions['Muster']}"
    load = f"load {record.machine['load']:g} before"
    return f"{when}; {cpus} CPUs ({cpu}), {memory}, {kernel}, Python {python}, {load}{quick}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
