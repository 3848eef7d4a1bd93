"""Inject each fault of the list `CASES` into a run, in each of its phases and containment levels.

`make faults` runs these tests.
"""

from __future__ import annotations

import pytest

from tests.faults.cases import CASES
from tests.faults.fault_run import Case, Phase, run_case_or_skip

ROWS = [(case, phase, level) for case in CASES for phase in case.phases for level in case.levels]


@pytest.mark.parametrize(
    ("case", "phase", "level"),
    ROWS,
    ids=[f"{case}-{phase}-{level}".replace(" ", "-") for case, phase, level in ROWS],
)
def test_run_with_a_fault_has_the_expected_result(
    case: Case, phase: Phase, level: str, request: pytest.FixtureRequest
) -> None:
    run_case_or_skip(case, phase, level, request)
