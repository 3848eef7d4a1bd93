"""Tests of logs that are moved, removed, truncated or cut while a component writes to them."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace

import pytest

from tasks.spec.failure_kinds import FailureKind
from tasks.spec.probes import ReadyProbe
from tests.support.supervised_components import ComponentHarness, python, wait_until

#: Ways to replace a log file while a component writes to it. The keys describe the ways. The values
#: are Python code that the component executes.
ROTATIONS = {
    "removed": "os.unlink('trainer.log')",
    "moved": "os.rename('trainer.log', 'trainer.log.1')",
    "moved and created again": (
        "os.rename('trainer.log', 'trainer.log.1'); open('trainer.log', 'w').close()"
    ),
    "truncated": "os.truncate('trainer.log', 0)",
}


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_log_is_read_to_its_end_after_a_rotation(rotation: str, harness: ComponentHarness) -> None:
    program = (
        "import os\n"
        "print('a line before the rotation', 'x' * 5000, flush=True)\n"
        f"{ROTATIONS[rotation]}\n"
        "print('ready now', flush=True)\n"
        "while not os.path.exists('fail'): __import__('time').sleep(0.02)\n"
        "raise ValueError('the cause after the rotation')\n"
    )
    trainer = harness.component(
        "trainer", python(program), ready=ReadyProbe(log="ready now", within_s=20)
    )

    supervisor = harness.start_all(trainer)
    (harness.directory / "fail").touch()
    verdict = harness.wait_for_verdict(supervisor)

    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.USER_ERROR
    assert "ValueError: the cause after the rotation" in verdict.message
    assert "ready now" in verdict.failure.log_tail


def test_output_into_a_moved_log_is_no_stall(harness: ComponentHarness) -> None:
    # The trainer renames its log, and continues to write to the renamed file. If Muster read only
    # the file with the original name, Muster would end the run as stalled.
    program = (
        "import os, time\n"
        "os.rename('trainer.log', 'trainer.log.1')\n"
        "for letter in 'abcdefghijklm': print(letter * 9, flush=True); time.sleep(0.25)\n"
    )
    trainer = harness.component("trainer", python(program), on_exit_zero="complete")

    verdict = harness.run(trainer, stall_after_s=1.5)

    assert verdict.failure is None, verdict.message


def test_no_file_stays_open_after_an_attempt(harness: ComponentHarness) -> None:
    trainer = harness.component("trainer", python("pass"), on_exit_zero="complete")

    harness.run(trainer)

    log = str(harness.log_path("trainer"))
    assert log not in {_target(fd) for fd in os.listdir("/proc/self/fd")}


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_log_of_a_running_component_is_kept_below_its_bound(harness: ComponentHarness) -> None:
    program = (
        "import os, time\n"
        "for number in range(100_000): print(f'line {number:08d}', 'x' * 40)\n"
        "print('all written', flush=True)\n"
        "while not os.path.exists('fail'): time.sleep(0.02)\n"
        "raise ValueError('the cause after the cut')\n"
    )
    trainer = replace(
        harness.component(
            "trainer", python(program), ready=ReadyProbe(log="all written", within_s=30)
        ),
        log_max_bytes=1 << 20,
    )
    log = harness.log_path("trainer")

    supervisor = harness.start_all(trainer)
    wait_until(lambda: log.stat().st_blocks * 512 < 1.1 * (1 << 20), "a log below its bound")
    (harness.directory / "fail").touch()
    verdict = harness.wait_for_verdict(supervisor)

    assert verdict.failure is not None
    assert "ValueError: the cause after the cut" in verdict.message
    assert log.read_bytes().startswith(b"line 00000000 ")
    assert b"bytes of this log were left out" in log.read_bytes()


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
def test_file_system_that_cannot_bound_a_log_is_reported(harness: ComponentHarness) -> None:
    place = harness.directory / "ramfs"
    place.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "none", place], check=True)
    try:
        program = "print('x' * 100_000, flush=True); __import__('time').sleep(600)"
        trainer = harness.component("trainer", python(program), log=place / "trainer.log")
        supervisor = harness.start_all(replace(trainer, log_max_bytes=1 << 16))
        warning = harness.wait_for_event("run.warning")
        harness.end(supervisor)
    finally:
        subprocess.run(["umount", place], check=True)

    assert f"the ramfs file system {place} cannot free the beginning of a file" in str(warning)
