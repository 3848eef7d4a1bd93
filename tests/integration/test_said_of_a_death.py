"""The messages about programs that cannot be executed, and about processes that are left behind."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tasks.record.states import RunState
from tasks.spec.failure_kinds import FailureKind
from tests.support.supervised_components import ComponentHarness, is_alive, python, sh


def script(directory: Path, first_line: str) -> str:
    """Write an executable script with this first line; return the command that runs the script."""
    path = directory / "run.sh"
    path.write_bytes(f"{first_line}\necho hello\n".encode())
    path.chmod(0o755)
    return "./run.sh"


def warnings(harness: ComponentHarness) -> list[str]:
    return [event.message for event in harness.events if event.name == "run.warning"]


@pytest.mark.parametrize(
    ("first_line", "interpreter", "is_windows"),
    [
        ("#!/bin/sh\r", "'/bin/sh\\r'", True),
        ("#!/moved/venv/bin/python -u", "'/moved/venv/bin/python'", False),
        ("#! /etc/passwd", "'/etc/passwd'", False),
    ],
)
def test_script_with_a_missing_interpreter_names_the_interpreter(
    harness: ComponentHarness, tmp_path: Path, first_line: str, interpreter: str, is_windows: bool
) -> None:
    command = script(tmp_path, first_line)

    verdict = harness.run(harness.component("trainer", (command,), cwd=tmp_path))

    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.USER_ERROR
    assert f"names the interpreter {interpreter}" in verdict.failure.message
    assert ("Windows line endings" in verdict.failure.message) is is_windows
    assert not any(event.name == "component.ready" for event in harness.events)


def test_script_whose_env_line_has_windows_line_ends_is_a_user_error(
    harness: ComponentHarness, tmp_path: Path
) -> None:
    command = script(tmp_path, "#!/usr/bin/env python3\r")

    verdict = harness.run(harness.component("trainer", (command,), cwd=tmp_path))

    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.USER_ERROR
    assert "Windows line endings" in verdict.failure.hint


def test_process_in_the_background_is_named_when_its_component_ends(
    harness: ComponentHarness, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    command = sh(f"sleep 987 & echo $! > {pid_file}; sleep 0.3; exit 0")

    verdict = harness.run(harness.component("trainer", command, on_exit_zero="complete"))

    assert verdict.state is RunState.COMPLETED
    assert warnings(harness) == [
        "trainer ended, but left 1 process running. Muster ended it: sleep 987"
    ]
    assert not is_alive(int(pid_file.read_text()))


def test_child_that_ignores_the_stop_signal_is_reported_as_killed(
    harness: ComponentHarness, tmp_path: Path
) -> None:
    upload = tmp_path / "upload.py"
    started = tmp_path / "started"
    upload.write_text(
        "import pathlib, signal, time\n"
        "signal.signal(15, signal.SIG_IGN)\n"
        f"pathlib.Path({str(started)!r}).touch()\n"
        "time.sleep(600)\n"
    )
    wait = f"until [ -e {started} ]; do sleep 0.05; done"
    command = sh(f"{sys.executable} -I -S {upload} & {wait}; exit 0")

    verdict = harness.run(
        harness.component("trainer", command, on_exit_zero="complete", grace_s=0.5)
    )

    assert verdict.state is RunState.COMPLETED
    [warning] = warnings(harness)
    assert "killed after the grace period of 0.5 s" in warning
    assert str(upload) in warning


@pytest.mark.parametrize(
    "code",
    [
        # Python's resource tracker outlives its parent for a moment, and then ends by itself. So
        # the resource tracker does not count as a leftover process.
        "import multiprocessing.resource_tracker as r; r.ensure_running()",
        "print('done')",
    ],
)
def test_component_without_leftovers_causes_no_warning(
    harness: ComponentHarness, code: str
) -> None:
    verdict = harness.run(harness.component("trainer", python(code), on_exit_zero="complete"))

    assert verdict.state is RunState.COMPLETED
    assert warnings(harness) == []


@pytest.mark.parametrize(
    ("script_text", "hint"),
    [
        ("exit 127", "Exit code 127 means that a shell did not find a program"),
        ("exit 143", "Exit code 143 means that the component is a shell or launcher, and SIGTERM"),
        ("kill -BUS $$", "df -h /dev/shm"),
        ("exit 1", ""),
    ],
)
def test_hint_fits_the_exit_of_the_component(
    harness: ComponentHarness, script_text: str, hint: str
) -> None:
    verdict = harness.run(harness.component("trainer", sh(script_text)))

    assert verdict.failure is not None
    assert hint in verdict.failure.hint
    if not hint:
        assert verdict.failure.hint == ""
    assert "dmesg" not in f"{verdict.failure.hint} {verdict.failure.kind.properties.remedy}"


def test_sigkill_that_the_kernel_did_not_send_is_explained(harness: ComponentHarness) -> None:
    verdict = harness.run(harness.component("trainer", sh("kill -KILL $$")))

    assert verdict.failure is not None
    assert verdict.failure.signal == signal.SIGKILL.name
    assert "So SIGKILL probably came from a person, another program" in verdict.failure.hint
    assert "The kernel's OOM killer has killed no process" in verdict.failure.hint


@pytest.mark.parametrize(
    ("code", "rule"),
    [("input('continue? ')", "no-standard-input"), ("breakpoint()", "debugger")],
)
def test_program_that_asks_on_stdin_is_a_user_error(
    harness: ComponentHarness, code: str, rule: str
) -> None:
    verdict = harness.run(harness.component("trainer", python(code)))

    assert verdict.failure is not None
    assert (verdict.failure.kind, verdict.failure.rule) == (FailureKind.USER_ERROR, rule)
    assert "no terminal" in verdict.failure.hint or "needs a terminal" in verdict.failure.hint
