"""Leftover processes of a component are ended, for every shape of the process tree."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tasks.spec.probes import ReadyProbe
from tests.support.process_trees import SHAPES
from tests.support.supervised_components import (
    DEADLINE_S,
    ComponentHarness,
    is_alive,
    sh,
    wait_until,
)

UP = ReadyProbe(log="up", within_s=DEADLINE_S)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_process_of_a_tree_remains_after_its_guardian_is_killed(
    harness: ComponentHarness, shape: str
) -> None:
    supervisor = harness.start_all(harness.component("trainer", SHAPES[shape], ready=UP))

    os.kill(harness.guardian_of("trainer"), signal.SIGKILL)
    verdict = harness.wait_for_verdict(supervisor)

    assert verdict.failure is not None and verdict.failure.component == "trainer"
    assert "its guardian" in verdict.message
    assert verdict.left == {}


def test_component_gets_the_stop_signal_of_its_plan(harness: ComponentHarness) -> None:
    polite = sh("trap 'echo hello; exit' INT; echo up; while :; do sleep 0.02; done")
    trainer = harness.component(
        "trainer", polite, ready=UP, stop_signal=signal.SIGINT, grace_s=DEADLINE_S
    )

    harness.end(harness.start_all(trainer))

    assert harness.read_log("trainer").splitlines() == ["up", "hello"]


@pytest.mark.parametrize(
    ("victim", "scrubbed", "new_session"),
    [
        ("guardian of a component", False, False),
        ("guardian of a component", True, True),
        ("idle guardian", True, False),
        ("none", False, True),
    ],
)
def test_process_that_belongs_to_no_component_is_not_ended(
    harness: ComponentHarness, victim: str, scrubbed: bool, new_session: bool
) -> None:
    supervisor = harness.supervise(harness.component("api"), harness.component("trainer"))
    supervisor.start("api")
    idle_guardian = supervisor._attempt.components["trainer"].process.guardian_pid
    guardian_pids = {
        "guardian of a component": harness.guardian_of("api"),
        "idle guardian": idle_guardian,
    }
    with subprocess.Popen(
        ["sleep", "600"],
        start_new_session=new_session,
        env={} if scrubbed else None,
        executable="/bin/sleep",
    ) as unrelated:
        harness.others.add(unrelated.pid)
        try:
            if victim in guardian_pids:
                os.kill(guardian_pids[victim], signal.SIGKILL)
                wait_until(lambda: not is_alive(guardian_pids[victim]), "the guardian has ended")
            harness.end(supervisor)

            assert unrelated.poll() is None
        finally:
            unrelated.kill()


def test_daemon_of_the_flow_process_survives_the_death_of_a_guardian(
    harness: ComponentHarness,
) -> None:
    supervisor = harness.start_all(harness.component("trainer"))
    shell = ["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"]
    daemon = int(subprocess.run(shell, capture_output=True, check=True).stdout)
    harness.others.add(daemon)

    os.kill(harness.guardian_of("trainer"), signal.SIGKILL)
    harness.wait_for_verdict(supervisor)

    assert is_alive(daemon)
    # This process is a subreaper, so the daemon is now its child. Therefore this process must reap
    # the daemon.
    os.kill(daemon, signal.SIGKILL)
    os.waitpid(daemon, 0)
