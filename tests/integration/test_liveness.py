"""Tests of liveness probes on a file and on NOTIFY_SOCKET, with real processes."""

from __future__ import annotations

import pytest

from tasks.record.states import RunState
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.probes import LiveProbe
from tests.support.supervised_components import ComponentHarness, python, wait_until

#: Program that sends signs of life to its liveness probe until the file `hang` exists. The argument
#: of the program is the kind of signs: `notify` for messages to NOTIFY_SOCKET, or `file` for a
#: changing file.
PROGRAM = """
import os, socket, sys, time
way = sys.argv[1]
period_s = int(os.environ.get("WATCHDOG_USEC", "100000")) / 2e6
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
    if way == "notify":
        s.connect("\\0" + os.environ["NOTIFY_SOCKET"][1:])
        s.send(b"READY=1")
    signs = 0
    while not os.path.exists("hang"):
        if way == "notify":
            s.send(b"WATCHDOG=1")
        else:
            with open("alive", "w") as f:
                f.write("alive")
        signs += 1
        with open("signs", "w") as f:
            f.write(str(signs))
        time.sleep(period_s)
    time.sleep(600)
"""
WAYS = {
    "notify": LiveProbe(notify=True, every_s=0.1, misses=10),
    "file": LiveProbe(file="alive", every_s=0.1, misses=10),
}


@pytest.mark.parametrize("way", WAYS)
def test_component_that_sends_signs_of_life_is_not_stalled(
    harness: ComponentHarness, way: str
) -> None:
    trainer = harness.component("trainer", (*python(PROGRAM), way), live=WAYS[way])
    supervisor = harness.start_all(trainer)

    signs = harness.directory / "signs"
    wait_until(lambda: signs.exists() and int(signs.read_text() or 0) > 40, "many signs of life")

    assert harness.end(supervisor).state is RunState.CANCELLED


@pytest.mark.parametrize("way", WAYS)
def test_component_that_sends_no_more_signs_of_life_is_stalled(
    harness: ComponentHarness, way: str
) -> None:
    trainer = harness.component("trainer", (*python(PROGRAM), way), live=WAYS[way])
    supervisor = harness.start_all(trainer)
    wait_until((harness.directory / "signs").exists, "the first sign of life")

    (harness.directory / "hang").touch()
    verdict = harness.wait_for_verdict(supervisor)

    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.STALLED
    assert "since the last check" in verdict.failure.message
