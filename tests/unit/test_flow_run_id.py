"""Tests of how a flow process reads the id of its flow run, and of the errors that it logs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
from prefect.exceptions import CancelledRun, CrashedRun, FailedRun

from tasks.server.concurrency_lease import exit_if_lease_was_lost
from tasks.server.flow_process import hide_errors_of_ended_runs, read_flow_run_id

FROM_ARGUMENT = "7712f819-7b19-4723-bcbf-b5067028ec50"
FROM_ENVIRONMENT = "11111111-7b19-4723-bcbf-b5067028ec50"


@pytest.mark.parametrize(
    ("arguments", "variable", "expected"),
    [
        ([FROM_ARGUMENT], None, FROM_ARGUMENT),
        ([], FROM_ENVIRONMENT, FROM_ENVIRONMENT),
        ([FROM_ARGUMENT], FROM_ENVIRONMENT, FROM_ARGUMENT),
        ([], None, ""),
    ],
)
def test_flow_run_id_is_read_from_the_argument_or_else_from_the_environment(
    arguments: list[str],
    variable: str | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["flows", *arguments])
    monkeypatch.delenv("PREFECT__FLOW_RUN_ID", raising=False)
    if variable is not None:
        monkeypatch.setenv("PREFECT__FLOW_RUN_ID", variable)

    assert read_flow_run_id() == expected


@pytest.mark.parametrize("flow_run_id", ["", "no-id"])
def test_check_of_the_lease_leaves_an_invalid_id_to_the_engine_of_prefect(flow_run_id: str) -> None:
    exit_if_lease_was_lost(flow_run_id)


@pytest.fixture
def loggers() -> Iterator[list[logging.Logger]]:
    """Return the loggers of Prefect's engine, and remove their new filters at the end."""
    loggers = [logging.getLogger(name) for name in ("prefect.flow_runs", "prefect.engine")]
    filters = [[*logger.filters] for logger in loggers]
    yield loggers
    for logger, earlier in zip(loggers, filters, strict=True):
        logger.filters = earlier


@pytest.mark.parametrize(
    ("error", "is_logged"),
    [
        (FailedRun("RUNTIME_ERROR: trainer"), False),
        (CancelledRun("cancelled"), False),
        (CrashedRun("crashed"), False),
        (OSError("no space"), True),
        (None, True),
    ],
)
def test_engine_logs_only_errors_that_no_state_reports(
    loggers: list[logging.Logger],
    error: Exception | None,
    is_logged: bool,
) -> None:
    hide_errors_of_ended_runs()

    for logger in loggers:
        exception = (type(error), error, None) if error is not None else None
        record = logger.makeRecord(logger.name, logging.ERROR, "f", 1, "x", (), exception)
        assert bool(logger.filter(record)) is is_logged
