"""Every fault of shared/facts/supervision.md, by its number there."""

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

_THEMES = (
    cases_crashes,
    cases_readiness,
    cases_trees,
    cases_flow,
    cases_disk,
    cases_surroundings,
    cases_registry,
)
CASES: list[Case] = sorted(
    (case for theme in _THEMES for case in theme.CASES), key=lambda case: case.number
)
