"""A pytest plugin that notes which lines each test runs, for `python -m tests.mutants`."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

#: The file that gets the tests that did not pass on the code as it is.
FAILED_VARIABLE = "MUSTER_MUTANTS_FAILED"

_failed: set[str] = set()


def function_of(nodeid: str) -> str:
    """The id of a test without its parameters: one context for all of them."""
    return nodeid.partition("[")[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    measured = coverage.Coverage.current()
    assert measured is not None, "start pytest with `coverage run -m pytest`"
    measured.switch_context(function_of(item.nodeid))
    try:
        return (yield)
    finally:
        measured.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(function_of(report.nodeid))


def pytest_sessionfinish() -> None:
    Path(os.environ[FAILED_VARIABLE]).write_text(json.dumps(sorted(_failed)), encoding="utf-8")
