"""The flow process is killed while its fork lives, or it is suspended for a while.

tests/faults/cases_flow.py has further faults of the flow process.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tasks.spec.probes import ReadyProbe
from tests.support.observed_flow import ObservedFlow
from tests.support.supervised_components import DEADLINE_S, ComponentHarness, wait_until

NEVER = ReadyProbe(log="never", within_s=DEADLINE_S)

MakeWitness = Callable[..., ObservedFlow]


@pytest.mark.parametrize(
    ("ready", "event_name"),
    [
        (None, "component.ready"),
        # At this event, the trainer has not started yet. Only the guardian exists, the process that
        # will own the trainer.
        (NEVER, "component.spawned"),
    ],
)
def test_flow_process_killed_while_its_fork_lives_leaves_no_process(
    harness: ComponentHarness, observed_flow: MakeWitness, ready: ReadyProbe | None, event_name: str
) -> None:
    api = harness.component("api", ready=ready)
    trainer = harness.component("trainer")
    flow_process = observed_flow(api, trainer, oddity="fork")
    flow_process.wait_for_event(event_name, "api")

    flow_process.kill()
    wait_until(lambda: flow_process.processes_of_run() == [], "no process of the run remains")
    (harness.directory / "release").touch()

    assert flow_process.oracle_result().left == ()


def test_resumed_supervisor_finds_a_ready_component_after_its_deadline(
    harness: ComponentHarness, observed_flow: MakeWitness
) -> None:
    slow = ReadyProbe(file="ready", within_s=2.0)
    flow_process = observed_flow(harness.component("api"), harness.component("trainer", ready=slow))
    flow_process.wait_for_event("component.spawned", "trainer")

    flow_process.kill(signal.SIGSTOP)
    wait_until(lambda: flow_process.state() == "T", "the supervisor is stopped")
    (harness.directory / "ready").touch()
    # The readiness deadline of the trainer is 2 s after the start of the trainer. Read the clock to
    # wait until 0.5 s after the deadline, because the suspended supervisor writes no event.
    deadline_time = flow_process.wait_for_event("component.spawned", "trainer")["at"] + 2.5
    wait_until(lambda: time.time() > deadline_time, "the deadline has passed")
    flow_process.kill(signal.SIGCONT)
    flow_process.wait_for_event("component.ready", "trainer")
    flow_process.end()

    assert flow_process.oracle_result().left == ()
    assert flow_process.verdict()["state"] == "cancelled"
