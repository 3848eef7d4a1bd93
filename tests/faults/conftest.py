"""What the fault tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.support.stage", "tests.support.witness", "tests.faults.scene")

from tests.faults import table  # noqa: E402
from tests.support.stage import Stage, stage_in  # noqa: E402
from tests.support.witness import Witness  # noqa: E402


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Real components in a directory of the test's own; nothing of them outlives the test."""
    with stage_in(tmp_path) as stage:
        yield stage


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[Callable[..., Witness]]:
    """Makes supervising processes, each under an oracle, and ends those that a test has left."""
    made: list[Witness] = []

    def make(*components: object, **more: object) -> Witness:
        made.append(Witness(tmp_path, *components, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.clear()


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
