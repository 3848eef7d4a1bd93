"""Tests of the id of the flow run that a flow process executes."""

from __future__ import annotations

import sys

import pytest

from tasks.server.concurrency_lease import exit_if_lease_was_lost
from tasks.server.flow_process import read_flow_run_id

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
