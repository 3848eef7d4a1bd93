"""BENCHMARKS.md and the tables of docs/limits.md say what was kept, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import limits_page, records
from tests.benchmarks.__main__ import NAMES
from tests.benchmarks.limits_page import Limit, carried, line_through
from tests.benchmarks.page import page
from tests.benchmarks.records import Record, read_all, record_of, write
from tests.benchmarks.report import Machine, Missing, Result, Row

MACHINE = Machine(
    at="2026-11-20T10:00:00+00:00",
    python="3.11.9",
    kernel="Linux 6.18",
    cpu="A CPU",
    cpus=2,
    memory_gb=24.0,
    load=0.1,
)


def result(name: str = "crash", *rows: Row, missing: Sequence[Missing] = ()) -> Result:
    return Result(name=name, question="how long it takes", rows=rows, missing=missing)


def record(found: Result | str, *, name: str = "crash", **more: Any) -> Record:
    given = {
        "machine": MACHINE,
        "versions": {"Muster": "1.0 (abc)", "prefect": "3.8.8"},
        "quick": False,
        "took_s": 61.4,
        **more,
    }
    return record_of(name, found, **given)


MUSTER = Row(way="Muster", values=[2.0, 4.0, 3.0])


def test_few_samples_are_never_shown_as_many() -> None:
    text = page({"crash": record(result("crash", MUSTER), quick=True)}, ["crash"])

    assert "**Few samples (`--quick`): the figures say little.** Machine A" in text


def test_what_is_kept_reads_back_as_it_was(tmp_path: Path) -> None:
    many = Row(way="many", values=[float(number) for number in range(1_000)])
    missing = [Missing(way="honcho", why="is not installed")]
    kept = record(result("crash", MUSTER, many, missing=missing))

    write(kept, tmp_path)

    assert read_all(tmp_path) == {"crash": replace(kept, took_s=61)}
    assert kept.figures[0].values == [2.0, 4.0, 3.0]
    assert not kept.figures[1].values and kept.figures[1].samples == 1_000


def limit(bound: float) -> Limit:
    return Limit(what="runs", group="a", bound=bound, bound_text="so much")


@pytest.mark.parametrize(
    ("values", "bound", "expected"),
    [
        # 5 + 0.5 n
        ((10.0, 55.0, 505.0), 1_000, "1,900"),
        # never more than ten times what was tried
        ((10.0, 55.0, 505.0), 100_000, "over 10,000"),
        # flat, and falling
        ((7.0, 7.0, 7.0), 1_000, "over 10,000"),
        ((9.0, 8.0, 7.0), 1_000, "over 10,000"),
        # reached before anything was measured
        ((10.0, 55.0, 505.0), 1, "0"),
        # few are told exactly
        ((10.0, 55.0, 505.0), 12, "14"),
    ],
)
def test_a_limit_is_where_the_line_meets_its_bound(
    values: tuple[float, ...], bound: float, expected: str
) -> None:
    line = line_through(list(zip((10, 100, 1_000), values, strict=True)), "ms")

    assert line is not None
    assert carried(limit(bound), line) == expected


def test_the_pages_are_made_of_what_was_kept() -> None:
    kept = read_all()
    limits = (records.ROOT / "docs" / "limits.md").read_text(encoding="utf-8")

    assert set(kept) <= set(NAMES)
    assert (records.ROOT / "BENCHMARKS.md").read_text(encoding="utf-8") == page(kept, NAMES)
    assert limits == limits_page.filled(limits, kept), "`make bench ARGS=--page` writes it"


def test_every_series_of_the_limits_is_measured() -> None:
    kept = read_all()["limits"]
    measured = {figure.group for figure in kept.figures}

    unknown = {limit.group for limit in limits_page.LIMITS} - measured

    if kept.missing:
        unknown = {group for group in unknown if "PostgreSQL" not in group}
    assert not unknown
