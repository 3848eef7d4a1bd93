"""List the cases of all faults of a run, sorted by the fault's number."""

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
from tests.faults.fault_run import Case

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
