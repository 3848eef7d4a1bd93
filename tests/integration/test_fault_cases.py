"""A representative part of the fault cases of `make faults`.

The cases run at the containment level L3 (cgroups) if this machine offers it, otherwise at L2
(guardian processes).
"""

from __future__ import annotations

import pytest

from tests.faults.cases import CASES
from tests.faults.fault_run import Case, Phase, missing_levels, run_case_or_skip

PART = {
    "SIGKILL of api": [Phase.START_TRAINER],
    "HTTP 200 from a stale instance": [Phase.START_API],
    "daemon with a scrubbed environment": [Phase.STOPPING],
    "leader ignores TERM": [Phase.STOPPING],
    "flicker of 0.2 ms": [Phase.RUNNING],
    "fork burst under a pids limit": [Phase.RUNNING],
    "flow SIGKILLed": [Phase.START_TRAINER, Phase.STOPPING],
    "guardian of trainer SIGKILLed": [Phase.RUNNING],
    "flow and guardians SIGKILLed, then reconcile": [Phase.RUNNING],
    "flow SIGSTOPped, a component dies, flow goes on": [Phase.START_ENVIRONMENT],
    "component SIGSTOPped": [Phase.RUNNING],
    "a foreign waitpid(-1) in the flow": [Phase.RUNNING],
    "pid reuse, then reconcile": [Phase.AFTER],
    "disk full when a component is to be registered": [Phase.START_TRAINER],
    "MUSTER_HOME does not answer when a component dies": [Phase.RUNNING],
    "Ctrl-C to the foreground group, twice": [Phase.STOPPING],
}
#: Titles of fault cases that only `make thorough` runs. Each of these cases is slow, or is nearly
#: covered by other tests.
THOROUGH = {
    "disk full when a component is to be registered",
    "leader ignores TERM",
    "flicker of 0.2 ms",
    "fork burst under a pids limit",
    "a foreign waitpid(-1) in the flow",
    "Ctrl-C to the foreground group, twice",
}
ROWS = [
    pytest.param(case, phase, marks=[pytest.mark.thorough] * (case.title in THOROUGH))
    for case in CASES
    for phase in PART.get(case.title, [])
    if phase in case.phases
]


@pytest.mark.parametrize(("case", "phase"), ROWS, ids=lambda value: str(value).replace(" ", "-"))
def test_run_with_a_fault_has_the_expected_result(
    case: Case, phase: Phase, request: pytest.FixtureRequest
) -> None:
    run_case_or_skip(case, phase, "L2" if "L3" in missing_levels() else "L3", request)


def test_every_named_case_exists() -> None:
    assert len(ROWS) == sum(map(len, PART.values()))


def test_every_fault_of_the_list_has_a_case() -> None:
    assert {case.number for case in CASES} == set(range(1, 40))
