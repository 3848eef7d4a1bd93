"""BENCHMARKS.md and the tables of docs/limits.md say what was kept, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import limits_page, records
from tests.benchmarks.__main__ import NAMES
from tests.benchmarks.limits_page import Limit, carried, filled, line_through
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
OTHER = Row(way="another | way", values=[600.0], how="modelled", note="each 1 s")
NOBODY = Row(way="a third", values=[30_000.0], samples=0, how="computed")


def test_a_section_has_a_row_for_each_way_with_its_ratio_and_how_it_was_had() -> None:
    text = page({"crash": record(result("crash", MUSTER, OTHER, NOBODY))}, ["crash"])

    assert "## crash\n\nHow long it takes.\n" in text
    assert "| Muster | 3.00 ms | 4.00 ms | 3 | 1.00 |  |" in text
    assert "| another \\| way | 600 ms | 600 ms | 1 | 200 | modelled; each 1 s |" in text
    assert "| a third | 30,000 ms | 30,000 ms | - | 10,000 | computed |" in text


def test_what_is_counted_is_shown_in_whole_numbers() -> None:
    left = Row(way="Muster", values=[0.0, 0.0], unit="of 5")
    opened = Row(way="another", values=[1_024.0, 1_025.0], unit="fds")

    text = page({"orphans": record(result("orphans", left, opened), name="orphans")}, ["orphans"])

    assert "| Muster | 0 of 5 | 0 of 5 | 2 |" in text
    assert "| another | 1,024.5 fds | 1,025 fds | 2 |" in text


def test_a_section_says_when_where_and_by_which_command_it_was_measured() -> None:
    text = page({"crash": record(result("crash", MUSTER))}, ["crash"])

    assert "| A | A CPU | 2 | 24 GB | Linux 6.18 | 3.11.9 |" in text
    assert (
        "Machine A, load 0.1 before, 2026-11-20, 61 s: `make bench ARGS='crash --record'`" in text
    )


def test_few_samples_are_never_shown_as_many() -> None:
    text = page({"crash": record(result("crash", MUSTER), quick=True)}, ["crash"])

    assert "**Few samples (`--quick`): the figures say little.** Machine A" in text


def test_what_was_not_measured_is_listed_with_its_reason() -> None:
    missing = [Missing(way="honcho", why="is not installed")]
    kept = {
        "crash": record(result("crash", MUSTER, missing=missing)),
        "jobs": record("Ray is away", name="jobs"),
    }

    text = page(kept, ["crash", "jobs", "fleet"])

    assert (
        "## Not run\n\n"
        "- `crash`, honcho: is not installed\n"
        "- `jobs`: Ray is away\n"
        "- `fleet`: not measured yet\n"
    ) in text
    assert "## jobs" not in text


def test_sections_of_several_machines_and_versions_name_theirs() -> None:
    newer = {"Muster": "1.1 (def)", "prefect": "3.8.8"}
    there = replace(MACHINE, cpu="Another CPU")
    kept = {
        "crash": record(result("crash", MUSTER)),
        "jobs": record(result("jobs", MUSTER), name="jobs", machine=there, versions=newer),
    }

    text = page(kept, ["crash", "jobs"])

    assert "| B | Another CPU | 2 |" in text
    assert "Machine B, load" in text
    assert "| Muster | 1.0 (abc) for crash; 1.1 (def) for jobs |" in text
    assert "| prefect | 3.8.8 |" in text


def test_what_is_kept_reads_back_as_it_was(tmp_path: Path) -> None:
    many = Row(way="many", values=[float(number) for number in range(1_000)])
    missing = [Missing(way="honcho", why="is not installed")]
    kept = record(result("crash", MUSTER, many, missing=missing))

    write(kept, tmp_path)

    assert read_all(tmp_path) == {"crash": replace(kept, took_s=61)}
    assert kept.figures[0].values == [2.0, 4.0, 3.0]
    assert not kept.figures[1].values and kept.figures[1].samples == 1_000


def test_a_benchmark_that_could_not_run_is_kept_with_the_reason(tmp_path: Path) -> None:
    write(record("Ray is away", name="jobs", took_s=0), tmp_path)

    assert read_all(tmp_path)["jobs"].not_run == "Ray is away"


def series(*values: float, unit: str = "ms") -> list[Row]:
    counts = (10, 100, 1_000)
    group = "gate, a look, by runs waiting on SQLite"
    return [
        Row(way=f"{count}", values=[value], unit=unit, group=group, at=count, is_detail=True)
        for count, value in zip(counts, values, strict=True)
    ]


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


def test_one_count_makes_no_line() -> None:
    assert line_through([(10, 1.0), (10, 2.0)], "ms") is None


def test_the_tables_are_put_between_their_marks_and_the_text_stays() -> None:
    kept = {"limits": record(result("limits", *series(10.0, 55.0, 505.0)), name="limits")}
    text = "before\n<!-- figures: limits -->\nstale figures\n<!-- end of figures -->\nafter\n"

    once = filled(text, kept)

    assert once.startswith("before\n<!-- figures: limits -->\n| what |")
    assert once.endswith("|\n<!-- end of figures -->\nafter\n")
    limit = "| runs that wait, a gate, SQLite | 1,900 | a look takes 1 s |"
    assert f"{limit} 10 to 1,000 | 5.00 + 0.50 x n ms |" in once
    assert "stale figures" not in once
    assert filled(once, kept) == once


def test_rates_say_by_what_they_were_reckoned() -> None:
    cpu = Row(way="Muster, plain, CPU a request", values=[400.0], unit="us")
    looks = [
        Row(way="Muster, further answer, 1 node", values=[10.0]),
        Row(way="Muster, further answer, 4 nodes", values=[16.0]),
    ]
    kept = {
        "gateway": record(result("gateway", cpu), name="gateway"),
        "capacity": record(result("capacity", *looks), name="capacity"),
    }

    text = filled("<!-- figures: rates -->\n<!-- end of figures -->", kept)

    requests = "| a gateway's requests, plain, a core | 2,500 req/s |"
    assert f"{requests} 1 s over 400 us, the `gateway` benchmark |" in text
    look = "| a look at a Ray cluster of 100 nodes | 208 ms |"
    assert f"{look} 8.00 + 2.00 x n ms, 1 to 4 nodes |" in text


def test_without_figures_the_tables_say_so() -> None:
    text = "<!-- figures: all -->\n<!-- end of figures -->"

    assert "Not measured yet: `make bench ARGS='limits --record'`." in filled(text, {})


def test_a_mark_of_no_table_is_a_mistake() -> None:
    with pytest.raises(KeyError, match="speed"):
        filled("<!-- figures: speed -->\n<!-- end of figures -->", {})


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
