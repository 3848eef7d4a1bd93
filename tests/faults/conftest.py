"""The fault tests end with a table."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.support.stage", "tests.support.witness", "tests.faults.scene")

from tests.faults import table  # noqa: E402

_rows: list[table.Row] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if (row := table.row_of(report)) is not None:
        _rows.append(row)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _rows:
        terminalreporter.section("faults")
        for line in (*table.lines(_rows), "", table.summary(_rows)):
            terminalreporter.line(line)
        terminalreporter.line(f"The same in {table.write(_rows)}")
