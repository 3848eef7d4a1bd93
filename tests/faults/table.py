"""The table that `make faults` ends with: a row for each case, phase and level that was played."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.scene import LEVELS, Outcome, missing_levels

#: Where the table is written, beside the terminal; `build/` is ignored by git.
FILE = Path(os.environ.get("MUSTER_FAULTS_TABLE", "build/faults.md"))
_HEAD = ("case", "phase", "level", "verdict", "time to empty (s)", "oracles", "ok")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    case: str
    phase: str
    level: str
    #: What the run said of itself, or why it was not played.
    verdict: str
    empty_after_s: float | None
    oracles: str
    #: ok | FAILED | skipped
    result: str

    @property
    def cells(self) -> tuple[str, ...]:
        time = "" if self.empty_after_s is None else f"{self.empty_after_s:.2f}"
        return (self.case, self.phase, self.level, self.verdict, time, self.oracles, self.result)


def row_of(report: pytest.TestReport) -> Row | None:
    """None for a report that ends no row: a setup that passed, or a test of something else."""
    noted = dict(report.user_properties)
    if "row" not in noted or (report.when != "call" and report.passed):
        return None
    outcome: Outcome | None = None
    if "outcome" in noted:
        outcome = Outcome(**noted["outcome"])  # type: ignore[arg-type]
    if report.skipped and isinstance(report.longrepr, tuple):
        said, result = report.longrepr[2].removeprefix("Skipped: "), "skipped"
    elif report.failed or outcome is None:
        crash = getattr(report.longrepr, "reprcrash", None)
        said, result = str(getattr(crash, "message", report.longrepr)).split("\n")[0], "FAILED"
    else:
        said, result = outcome.verdict, "ok"
    return Row(
        **noted["row"],  # type: ignore[arg-type]
        verdict=said[:120],
        empty_after_s=outcome.empty_after_s if outcome else None,
        oracles="+".join(outcome.oracles) if outcome else "",
        result=result,
    )


def lines(rows: Iterable[Row]) -> list[str]:
    """The table as Markdown, aligned for a terminal."""
    cells = [_HEAD, *(tuple(c.replace("|", "/") for c in row.cells) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEAD))]
    shown = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    return [shown[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *shown[1:]]


def summary(rows: list[Row]) -> str:
    """One line: how many of each result, and the levels there are."""
    counts = {result: sum(row.result == result for row in rows) for result in _RESULTS}
    levels = [level for level in LEVELS if level not in missing_levels()]
    played = len({row.case.split()[0] for row in rows if row.result == "ok"})
    return (
        f"{played} of 39 cases played; {len(rows)} rows: "
        + ", ".join(f"{n} {result}" for result, n in counts.items() if n)
        + f"; levels on this machine: {', '.join(levels)}; Linux {platform.release()}"
    )


_RESULTS = ("ok", "FAILED", "skipped")


def write(rows: list[Row]) -> Path:
    """Write the table; where it lies."""
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text("\n".join([summary(rows), "", *lines(rows), ""]), encoding="utf-8")
    return FILE
