"""What a component leaves behind is ended, whatever shape it has and however the run ends."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tasks.run.lifecycle import RunState
from tasks.run.probes import ReadyProbe
from tests.support.shapes import SHAPES
from tests.support.stage import DEADLINE_S, Stage, is_alive, python, sh, wait_until

UP = ReadyProbe(log="up", within_s=DEADLINE_S)


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_of_a_tree_is_left_after_an_interrupt(stage: Stage, shape: str) -> None:
    supervisor = stage.running(stage.component("trainer", SHAPES[shape], ready=UP))

    supervisor.interrupt("enough")
    verdict = stage.end(supervisor)

    assert verdict.state is RunState.CANCELLED
    assert verdict.left == {}


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_of_a_tree_is_left_after_its_guardian_is_killed(stage: Stage, shape: str) -> None:
    supervisor = stage.running(stage.component("trainer", SHAPES[shape], ready=UP))

    os.kill(stage.guardian_of("trainer"), signal.SIGKILL)
    verdict = stage.verdict_of(supervisor)

    assert verdict.failure is not None and verdict.failure.component == "trainer"
    assert "its guardian" in verdict.message
    assert verdict.left == {}


@pytest.mark.parametrize("new_session", [False, True])
def test_a_process_of_our_own_lives_on_when_a_guardian_is_killed(
    stage: Stage, new_session: bool
) -> None:
    supervisor = stage.running(stage.component("trainer"))
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=new_session)
    try:
        os.kill(stage.guardian_of("trainer"), signal.SIGKILL)
        stage.until("teardown.begun")
        with supervisor:
            supervisor.teardown()

        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("new_session", [False, True])
def test_a_process_of_our_own_lives_on_when_an_idle_guardian_is_killed(
    stage: Stage, new_session: bool
) -> None:
    supervisor = stage.supervise(stage.component("api"), stage.component("trainer"))
    supervisor.start("api")
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=new_session)
    try:
        idle = supervisor._attempt.members["trainer"].process.guardian_pid
        os.kill(idle, signal.SIGKILL)
        wait_until(lambda: not is_alive(idle), "idle guardian is gone")
        import time; time.sleep(0.3)
        with supervisor:
            supervisor.teardown()

        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
