"""List the cases of all faults of a supervised run, sorted by the number of the fault."""

from __future__ import annotations

from tests.faults import (
    cases_crashes,
    cases_disk,
    cases_flow,
    cases_readiness,
    cases_registry,
    cases_surroundings,
    cases_trees,
)
from tests.faults.scene import Case

_MODULES = (
    cases_crashes,
    cases_readiness,
    cases_trees,
    cases_flow,
    cases_disk,
    cases_surroundings,
    cases_registry,
)
CASES: list[Case] = sorted(
    (case for module in _MODULES for case in module.CASES), key=lambda case: case.number
)
