"""Write the result table of `make faults`: one row per case, phase and containment level."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.fault_run import LEVELS, Outcome, missing_levels

#: Path of the file for the results of the fault tests. Git ignores `build/`.
FILE = Path(os.environ.get("MUSTER_FAULTS_TABLE", "build/faults.md"))
_HEAD = ("case", "phase", "level", "verdict", "time to empty (s)", "oracles", "ok")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Row of the result table: the result of one fault test.

    A fault test injects the fault of a case in a phase of the run, at a containment level.
    """

    #: Number and title of the case.
    case: str
    #: Phase of the run in which the fault was injected.
    phase: str
    #: Containment level: "L2", "L3" or "L4".
    level: str
    #: Final state of the run with its failure, or the reason why the test was skipped or failed.
    verdict: str
    #: Seconds from the fault until the run had no process left. If the teardown began after the
    #: fault, the seconds count from the beginning of the teardown. None if the test did not finish.
    empty_after_s: float | None
    #: Kernel interfaces that confirmed that no process was left, joined by "+".
    #:
    #: "ECHILD": waitpid(2) found no child. "populated": the file cgroup.events of the run's cgroup
    #: shows no process.
    oracles: str
    #: Result of the test: "ok", "FAILED" or "skipped".
    result: str

    @property
    def cells(self) -> tuple[str, ...]:
        """Texts of the cells of this table row, in the order of the columns."""
        time = "" if self.empty_after_s is None else f"{self.empty_after_s:.2f}"
        return (self.case, self.phase, self.level, self.verdict, time, self.oracles, self.result)


def row_of(report: pytest.TestReport) -> Row | None:
    """Return the row of the result table for a test, from the pytest report of the test.

    Returns:
        None if the test is not a fault test, or if the report is about a setup or teardown that
        passed.
    """
    properties = dict(report.user_properties)
    if "row" not in properties or (report.when != "call" and report.passed):
        return None
    outcome: Outcome | None = None
    if "outcome" in properties:
        outcome = Outcome(**properties["outcome"])  # type: ignore[arg-type]
    if report.skipped and isinstance(report.longrepr, tuple):
        verdict = report.longrepr[2].removeprefix("Skipped: ")
        result = "skipped"
    elif report.failed or outcome is None:
        crash = getattr(report.longrepr, "reprcrash", None)
        verdict = str(getattr(crash, "message", report.longrepr)).split("\n")[0]
        result = "FAILED"
    else:
        verdict = outcome.verdict
        result = "ok"
    return Row(
        **properties["row"],  # type: ignore[arg-type]
        verdict=verdict[:120],
        empty_after_s=outcome.empty_after_s if outcome else None,
        oracles="+".join(outcome.oracles) if outcome else "",
        result=result,
    )


def lines(rows: Iterable[Row]) -> list[str]:
    """Return the lines of the Markdown table, with columns padded to the same width."""
    cells = [_HEAD, *(tuple(c.replace("|", "/") for c in row.cells) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEAD))]
    padded_lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    separator = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return [padded_lines[0], separator, *padded_lines[1:]]


def summary(rows: list[Row]) -> str:
    """Return one line: the number of tests by result, and this machine's containment levels."""
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
    """Write the results of the fault tests to `FILE`: a summary and a table; return its path."""
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text("\n".join([summary(rows), "", *lines(rows), ""]), encoding="utf-8")
    return FILE
