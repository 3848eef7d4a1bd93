"""BENCHMARKS.md and the tables of docs/limits.md say what was kept, and nothing else."""

from __future__ import annotations

import pytest

from tests.benchmarks import limits_page, records
from tests.benchmarks.__main__ import NAMES
from tests.benchmarks.limits_page import Limit, carried, line_through
from tests.benchmarks.page import page
from tests.benchmarks.records import read_all


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
