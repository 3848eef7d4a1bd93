"""The time that real components get to save a checkpoint before Muster ends them."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial

import pytest

from tasks.processes.component import ComponentPlan
from tasks.processes.warning_signal import StopWarning
from tasks.record.checkpoints import is_writing_checkpoint
from tasks.record.states import RunState
from tasks.show.lines import lines_of
from tasks.spec.probes import ReadyProbe
from tests.support.supervised_components import DEADLINE_S, ComponentHarness, python

#: A trainer that saves a checkpoint half a second after the warning, the signal SIGUSR1. The
#: trainer fails if the component `environment` has ended by then. SIGTERM ends the trainer at once.
TRAINER = """
import os, signal, time
is_warned = []
signal.signal(signal.SIGUSR1, lambda *_: is_warned.append(1))
print("up", flush=True)
while not is_warned:
    time.sleep(0.05)
time.sleep(0.5)
os.kill(int(open("pid").read()), 0)
open("checkpoint", "w").write("whole")
time.sleep(600)
"""
UP = ReadyProbe(log="up", within_s=DEADLINE_S)


def trainer_of(harness: ComponentHarness, code: str = TRAINER) -> ComponentPlan:
    """Return the plan of a trainer that has 30 s to save a checkpoint after SIGUSR1."""
    checkpoint = harness.directory / "checkpoint"
    component = harness.component("trainer", python(code), ready=UP)
    return replace(
        component,
        command=replace(component.command, save_grace_s=30.0),
        warning=StopWarning(signum=signal.SIGUSR1, before_s=60.0),
        find_checkpoint=lambda: (1, 1.0) if checkpoint.exists() else None,
    )


def test_cancel_warns_the_trainer_and_waits_for_its_checkpoint(harness: ComponentHarness) -> None:
    write_pid = "import os, time; open('pid', 'w').write(str(os.getpid())); print('up', flush=True)"
    environment = harness.component(
        "environment", python(f"{write_pid}\ntime.sleep(600)"), ready=UP
    )
    supervisor = harness.start_all(trainer_of(harness), environment)

    supervisor.interrupt("cancelled")
    verdict = harness.end(supervisor)

    assert verdict.state is RunState.CANCELLED
    assert (harness.directory / "checkpoint").read_text() == "whole"
    assert harness.list_events("component.warned", "trainer")[0].fields["processes"]


def test_second_interrupt_ends_the_wait_for_a_checkpoint(harness: ComponentHarness) -> None:
    code = TRAINER.replace("time.sleep(0.5)", "time.sleep(600)")
    supervisor = harness.start_all(trainer_of(harness, code))

    supervisor.interrupt("cancelled")
    harness.wait_for_event("component.warned", "trainer")
    supervisor.hurry()
    verdict = harness.end(supervisor)

    assert verdict.state is RunState.CANCELLED
    [event] = harness.list_events("component.exited", "trainer")
    assert event.fields["signal"] == "SIGKILL"


def test_terminal_shows_the_wait_for_a_checkpoint(harness: ComponentHarness) -> None:
    code = """
import os, time
os.mkdir("step-10")
part = open("step-10/part", "w")
print("up", flush=True)
while not os.path.exists("stop-seen"):
    part.write("x")
    part.flush()
    time.sleep(0.05)
"""
    component = harness.component("trainer", python(code), ready=UP)
    trainer = replace(
        component,
        command=replace(component.command, save_grace_s=600.0),
        is_saving=partial(is_writing_checkpoint, str(harness.directory), harness.directory),
    )
    supervisor = harness.start_all(trainer)

    supervisor.interrupt("cancelled")
    event = harness.wait_for_event("component.saving", "trainer")
    (harness.directory / "stop-seen").touch()
    harness.end(supervisor)

    assert [line.plain for line in lines_of(event)] == [
        "trainer: seems to be writing a checkpoint; its stop signal waits for at most 600 s"
    ]
    # The trainer exited by itself after its checkpoint. So Muster did not stop it before.
    [exited] = harness.list_events("component.exited", "trainer")
    assert exited.fields["exit_code"] == 0


@pytest.mark.parametrize("handler", ["", "signal.signal(signal.SIGUSR1, signal.SIG_IGN)"])
def test_trainer_without_a_handler_survives_the_warning(
    harness: ComponentHarness, handler: str
) -> None:
    code = f"import signal, time\n{handler}\nprint('up', flush=True)\ntime.sleep(600)"
    supervisor = harness.start_all(trainer_of(harness, code))

    supervisor.interrupt("cancelled")
    harness.end(supervisor)

    [event] = harness.list_events("component.exited", "trainer")
    assert event.fields["signal"] == "SIGTERM"
    [warning] = harness.list_events("run.warning")
    assert "no process of trainer handles SIGUSR1" in warning.message


def test_failure_of_another_component_sends_no_warning(harness: ComponentHarness) -> None:
    environment = harness.component("environment", python("import time; time.sleep(600)"))
    supervisor = harness.start_all(environment, trainer_of(harness))

    os.kill(harness.wait_for_pid("environment"), signal.SIGKILL)
    verdict = harness.wait_for_verdict(supervisor)

    assert verdict.failure is not None and verdict.failure.component == "environment"
    assert harness.list_events("component.warned") == []
