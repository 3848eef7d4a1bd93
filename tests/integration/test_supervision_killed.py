"""The flow process is killed beside a fork of its own, or stopped for a while.

What else may happen to it is in the faults: tests/faults/cases_flow.py.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tasks.spec.probes import ReadyProbe
from tests.support.stage import DEADLINE_S, Stage, wait_until
from tests.support.witness import Witness

NEVER = ReadyProbe(log="never", within_s=DEADLINE_S)

MakeWitness = Callable[..., Witness]


@pytest.mark.parametrize(
    ("ready", "reached"),
    [
        (None, "component.ready"),
        # the guardian of the trainer is idle yet
        (NEVER, "component.spawned"),
    ],
)
def test_supervising_process_that_is_killed_beside_its_own_fork_leaves_nothing(
    stage: Stage, witness: MakeWitness, ready: ReadyProbe | None, reached: str
) -> None:
    api, trainer = stage.component("api", ready=ready), stage.component("trainer")
    supervising = witness(api, trainer, oddity="fork")
    supervising.until(reached, "api")

    supervising.kill()
    wait_until(lambda: supervising.processes_of_run() == [], "nothing of the run is left")
    (stage.directory / "release").touch()

    assert supervising.testimony().left == ()


def test_stopped_supervisor_finds_its_run_as_it_was(stage: Stage, witness: MakeWitness) -> None:
    slow = ReadyProbe(file="ready", within_s=2.0)
    supervising = witness(stage.component("api"), stage.component("trainer", ready=slow))
    supervising.until("component.spawned", "trainer")

    supervising.kill(signal.SIGSTOP)
    wait_until(lambda: supervising.state() == "T", "it is stopped")
    (stage.directory / "ready").touch()
    # What is waited for is that its deadline passes; nothing else marks that.
    passed = supervising.until("component.spawned", "trainer")["at"] + 2.5
    wait_until(lambda: time.time() > passed, "the deadline has passed")
    supervising.kill(signal.SIGCONT)
    supervising.until("component.ready", "trainer")
    supervising.end()

    assert supervising.testimony().left == ()
    assert supervising.verdict()["state"] == "cancelled"
