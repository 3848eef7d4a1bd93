"""A representative part of `make faults`, at the level that a run gets on this machine."""

from __future__ import annotations

import pytest

from tests.faults.cases import CASES
from tests.faults.scene import Case, Phase, act, missing_levels

PART = {
    "SIGKILL of api": [Phase.START_TRAINER],
    "SIGKILL of environment": [Phase.STOPPING],
    "exit before ready": [Phase.START_ENVIRONMENT],
    "ready, then dead before its dependents start": [Phase.START_ENVIRONMENT],
    "HTTP 200 from a stale instance": [Phase.START_API],
    "daemon with a scrubbed environment": [Phase.STOPPING],
    "leader ignores TERM": [Phase.STOPPING],
    "idle guardian SIGKILLed": [Phase.START_TRAINER],
    "fd leak between siblings": [Phase.RUNNING],
    "grandchild holds stdout open": [Phase.RUNNING],
    "log deleted": [Phase.RUNNING],
    "EMFILE in the flow at spawn": [Phase.START_TRAINER],
    "flicker of 0.2 ms": [Phase.RUNNING],
    "fork burst under a pids limit": [Phase.RUNNING],
    "flow SIGKILLed, nothing started": [Phase.IDLE],
    "flow SIGKILLed": [Phase.START_TRAINER, Phase.RUNNING, Phase.STOPPING],
    "flow SIGKILLed between fork and registry": [Phase.START_TRAINER],
    "guardian of trainer SIGKILLed": [Phase.RUNNING],
    "flow and guardians SIGKILLed, then reconcile": [Phase.RUNNING],
    "flow SIGSTOPped, a component dies, flow goes on": [Phase.START_ENVIRONMENT],
    "component SIGSTOPped": [Phase.RUNNING],
    "SIGCHLD ignored, inherited": [Phase.RUNNING],
    "blocked signal mask, inherited": [Phase.RUNNING],
    "spawned from a short-lived thread": [Phase.RUNNING],
    "a foreign waitpid(-1) in the flow": [Phase.RUNNING],
    "a foreign waitpid(-1) in the flow; guardian SIGKILLed": [Phase.RUNNING],
    "pid reuse, then reconcile": [Phase.AFTER],
    "registry from before a reboot": [Phase.AFTER],
    "disk full when a component is to be registered": [Phase.START_TRAINER],
    "Ctrl-C to the foreground group, twice": [Phase.STOPPING],
    "second stop during the grace": [Phase.RUNNING],
    "two crash together": [Phase.RUNNING],
    "another run lives on, ours ends by a double kill": [Phase.RUNNING],
    "leaked /dev/shm segment, its maker SIGKILLed": [Phase.RUNNING],
}
ROWS = [
    (case, phase) for case in CASES for phase in PART.get(case.title, []) if phase in case.phases
]


@pytest.mark.parametrize(
    ("case", "phase"), ROWS, ids=[f"{case}-{phase}".replace(" ", "-") for case, phase in ROWS]
)
def test_fault(case: Case, phase: Phase, request: pytest.FixtureRequest) -> None:
    act(case, phase, "L2" if "L3" in missing_levels() else "L3", request)


def test_part_names_cases_that_there_are() -> None:
    assert len(ROWS) == sum(map(len, PART.values()))


def test_every_fault_of_the_list_has_a_case() -> None:
    assert {case.number for case in CASES} == set(range(1, 40))
