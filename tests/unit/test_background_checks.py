"""Checks that run in the background of an attempt: their errors name the check that failed."""

from __future__ import annotations

import asyncio

import pytest

from tasks.processes.hang_report import call_with_time_limit
from tests.support.supervised_components import DEADLINE_S


def fail() -> bool:
    raise RuntimeError("the driver has crashed")


def test_failed_check_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    result = asyncio.run(
        call_with_time_limit(DEADLINE_S, fail, False, "the query of the GPU driver")
    )

    assert result is False
    assert "the query of the GPU driver has failed" in caplog.text
    assert "hangs" not in caplog.text


def test_failed_check_without_a_name_is_no_component_that_hangs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asyncio.run(call_with_time_limit(DEADLINE_S, fail, False))

    assert "a check in the background has failed" in caplog.text
