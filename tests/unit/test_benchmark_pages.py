"""Tests that BENCHMARKS.md and the tables of docs/limits.md match the stored measurements."""

from __future__ import annotations

import pytest

from tests.benchmarks import limits_page, records
from tests.benchmarks.__main__ import NAMES
from tests.benchmarks.limits_page import Limit, carried, line_through
from tests.benchmarks.page import page
from tests.benchmarks.records import read_all


def limit(bound: float) -> Limit:
    """Return a limit: the number of runs at which the measured duration reaches `bound`.

    `bound` is in milliseconds.
    """
    return Limit(what="runs", group="a", bound=bound, bound_text="so much")


@pytest.mark.parametrize(
    ("values", "bound", "expected"),
    [
        # 1,990 runs take 1,000 ms (5 ms, and 0.5 ms for each run). The result is rounded down
        ((10.0, 55.0, 505.0), 1_000, "1,900"),
        # the result is at most ten times the largest measured number of runs
        ((10.0, 55.0, 505.0), 100_000, "over 10,000"),
        # the durations do not grow with the number of runs, so they never reach the bound. The
        # result is the word "over" and ten times the largest measured number of runs
        ((7.0, 7.0, 7.0), 1_000, "over 10,000"),
        ((9.0, 8.0, 7.0), 1_000, "over 10,000"),
        # the fitted line is 5 ms + 0.5 ms per run. So even 0 runs take 5 ms, and the bound is 1 ms
        ((10.0, 55.0, 505.0), 1, "0"),
        # 14 runs take 12 ms (5 ms + 0.5 ms per run), which is the bound. A result below 100 is not
        # rounded
        ((10.0, 55.0, 505.0), 12, "14"),
    ],
)
def test_limit_is_the_size_at_which_the_line_reaches_the_bound(
    values: tuple[float, ...], bound: float, expected: str
) -> None:
    line = line_through(list(zip((10, 100, 1_000), values, strict=True)), "ms")

    assert line is not None
    assert carried(limit(bound), line) == expected


def test_pages_match_the_stored_measurements() -> None:
    measurements = read_all()
    limits = (records.ROOT / "docs" / "limits.md").read_text(encoding="utf-8")

    assert set(measurements) <= set(NAMES)
    benchmarks = (records.ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
    assert benchmarks == page(measurements, NAMES)
    assert limits == limits_page.filled(limits, measurements), "`make bench ARGS=--page` writes it"


def test_every_series_of_the_limits_is_measured() -> None:
    measurement = read_all()["limits"]
    measured = {figure.group for figure in measurement.figures}

    unknown = {limit.group for limit in limits_page.LIMITS} - measured

    if measurement.missing:
        unknown = {group for group in unknown if "PostgreSQL" not in group}
    assert not unknown
