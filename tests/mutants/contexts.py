"""A pytest plugin that records the lines that each test executes, for `python -m tests.mutants`."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

#: Environment variable with the path of a file. This pytest plugin writes the ids of failed tests
#: into the file.
FAILED_VARIABLE = "MUSTER_MUTANTS_FAILED"

_failed: set[str] = set()


def function_of(nodeid: str) -> str:
    """Return the id of a test without its parameters.

    Coverage stores the executed lines under this id: once for each test function, not for each set
    of parameters.
    """
    return nodeid.partition("[")[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Make coverage store the executed lines under the name of the running test."""
    measurement = coverage.Coverage.current()
    assert measurement is not None, "start pytest with `coverage run -m pytest`"
    measurement.switch_context(function_of(item.nodeid))
    try:
        return (yield)
    finally:
        measurement.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(function_of(report.nodeid))


def pytest_sessionfinish() -> None:
    Path(os.environ[FAILED_VARIABLE]).write_text(json.dumps(sorted(_failed)), encoding="utf-8")
