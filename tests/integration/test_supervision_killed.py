"""The supervising process is killed, or is an odd one: nothing is left, no bystander is hurt."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.run.probes import ReadyProbe
from tasks.supervise import tree
from tests.support.shapes import SHAPES
from tests.support.stage import DEADLINE_S, Stage, is_alive, sh, wait_until
from tests.support.witness import Witness, bystander

UP = ReadyProbe(log="up", within_s=DEADLINE_S)
NEVER = ReadyProbe(log="never", within_s=DEADLINE_S)
UNDER_ODDITIES = ["sigchld-ignored", "signals-blocked", "foreign-wait", "short-lived-thread"]

CRASHING = sh("echo up; kill -SEGV $$")

MakeWitness = Callable[..., Witness]


@pytest.mark.parametrize("shape", ["scrubbed-daemon", "flicker-0.2ms"])
@pytest.mark.parametrize("phase", ["starting", "running", "stopping"])
def test_supervising_process_that_is_killed_leaves_nothing(
    stage: Stage, witness: MakeWitness, phase: str, shape: str
) -> None:
    supervising = witness(
        stage.component("api"),
        stage.component("trainer", SHAPES[shape], ready=UP, grace_s=1.0),
        stage.component("environment", ready=NEVER if phase == "starting" else None),
    )
    supervising.until("component.ready", "trainer")

    with bystander() as others:
        match phase:
            case "starting":
                supervising.until("component.spawned", "environment")
            case "running":
                supervising.until("component.ready", "environment")
            case "stopping":
                supervising.end()
                supervising.until("component.stopped", "environment")
        supervising.kill()
        testimony = supervising.testimony()

        assert all(is_alive(pid) for pid in others)
    assert testimony.left == ()
    assert testimony.exit_code == -signal.SIGKILL


def test_supervising_process_that_is_killed_beside_its_own_fork_leaves_nothing(
    stage: Stage, witness: MakeWitness
) -> None:
    supervising = witness(stage.component("api"), stage.component("trainer"), oddity="fork")
    supervising.until("component.ready", "api")

    supervising.kill()
    wait_until(lambda: supervising.processes_of_run() == [], "nothing of the run is left")
    (stage.directory / "release").touch()

    assert supervising.testimony().left == ()


def test_idle_guardian_leaves_when_the_supervising_process_is_killed_beside_its_own_fork(
    stage: Stage, witness: MakeWitness
) -> None:
    supervising = witness(
        stage.component("api", ready=NEVER), stage.component("trainer"), oddity="fork"
    )
    supervising.until("component.spawned", "api")

    supervising.kill()
    wait_until(lambda: supervising.processes_of_run() == [], "nothing of the run is left")
    (stage.directory / "release").touch()

    assert supervising.testimony().left == ()


@pytest.mark.parametrize("oddity", UNDER_ODDITIES)
def test_odd_supervising_process_sees_how_a_component_ended(
    stage: Stage, witness: MakeWitness, oddity: str
) -> None:
    supervising = witness(
        stage.component("api"), stage.component("trainer", ready=UP, argv=CRASHING), oddity=oddity
    )

    testimony = supervising.testimony()

    assert testimony.left == ()
    assert testimony.exit_code == 0, supervising.said()
    assert supervising.verdict()["failure"]["component"] == "trainer"
    assert supervising.verdict()["failure"]["signal"] == "SIGSEGV"


@pytest.mark.parametrize("oddity", UNDER_ODDITIES)
def test_odd_supervising_process_ends_what_a_dead_guardian_leaves(
    stage: Stage, witness: MakeWitness, oddity: str
) -> None:
    supervising = witness(
        stage.component("api"),
        stage.component("trainer", SHAPES["scrubbed-daemon"], ready=UP),
        oddity=oddity,
    )
    supervising.until("component.ready", "trainer")

    pid = supervising.until("component.spawned", "trainer")["pid"]
    os.kill(tree.parent_of(pid), signal.SIGKILL)
    testimony = supervising.testimony()

    assert testimony.left == ()
    assert testimony.exit_code == 0, supervising.said()
    assert supervising.verdict()["left"] == {}
    assert supervising.verdict()["failure"]["component"] == "trainer"


@pytest.mark.parametrize("oddity", UNDER_ODDITIES)
def test_component_begins_with_clean_signals_whoever_starts_it(
    stage: Stage, witness: MakeWitness, oddity: str
) -> None:
    look = sh("grep -E '^Sig(Blk|Ign|Cgt)' /proc/self/status")
    supervising = witness(stage.component("trainer", look, on_exit_zero="complete"), oddity=oddity)

    testimony = supervising.testimony()

    assert testimony.exit_code == 0, supervising.said()
    assert supervising.verdict()["state"] == "completed"
    masks = dict(line.split(":\t") for line in stage.text_of("trainer").splitlines())
    assert int(masks["SigBlk"], 16) == 0
    # The C library keeps 32 and 33 for itself.
    assert int(masks["SigIgn"], 16) & ~(0b11 << 31) == 0


def test_second_stop_ends_the_grace_period(stage: Stage, witness: MakeWitness) -> None:
    supervising = witness(
        stage.component("api", SHAPES["leader-ignores-term"], ready=UP, grace_s=600.0),
        stage.component("trainer", SHAPES["leader-ignores-term"], ready=UP, grace_s=600.0),
    )
    supervising.until("component.ready", "trainer")

    supervising.kill(signal.SIGTERM)
    supervising.until("teardown.begun")
    supervising.kill(signal.SIGTERM)
    testimony = supervising.testimony()

    assert testimony.left == ()
    assert testimony.exit_code == 0, supervising.said()
    assert supervising.verdict()["state"] == "cancelled"


def test_supervising_process_that_was_stopped_finds_its_run_as_it_was(
    stage: Stage, witness: MakeWitness
) -> None:
    slow = ReadyProbe(file="ready", within_s=2.0)
    supervising = witness(stage.component("api"), stage.component("trainer", ready=slow))
    supervising.until("component.spawned", "trainer")

    supervising.kill(signal.SIGSTOP)
    wait_until(lambda: state_of(supervising.pid) == "T", "it is stopped")
    (stage.directory / "ready").touch()
    # What is waited for is that its deadline passes; nothing else marks that.
    passed = supervising.until("component.spawned", "trainer")["at"] + 2.5
    wait_until(lambda: time.time() > passed, "the deadline has passed")
    supervising.kill(signal.SIGCONT)
    supervising.until("component.ready", "trainer")
    supervising.end()

    assert supervising.testimony().left == ()
    assert supervising.verdict()["state"] == "cancelled"


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
