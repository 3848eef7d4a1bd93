"""Print the result table of the fault tests at the end of a pytest session."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "tests.support.supervised_components", "tests.support.observed_flow", "tests.faults.fault_run"
)

from tests.faults import table  # noqa: E402

_rows: list[table.Row] = []
#: Results of test_grace.py: a mapping from the way in which runs were ended to a result such as
#: `9/10`. This result means that 10 runs were ended, and the components of 9 runs saved their
#: state.
_saved: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", default="3", help="runs that test_grace.py ends in each way")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if (row := table.row_of(report)) is not None:
        _rows.append(row)
    properties = dict(report.user_properties)
    if report.when == "call" and "saved" in properties:
        _saved[str(properties["way"])] = str(properties["saved"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _rows:
        terminalreporter.section("faults")
        for line in (*table.lines(_rows), "", table.summary(_rows)):
            terminalreporter.line(line)
        terminalreporter.line(f"The same in {table.write(_rows)}")
    if _saved:
        terminalreporter.section("runs whose component saved")
        for way, saved in _saved.items():
            terminalreporter.line(f"{saved:>7}  {way}")
