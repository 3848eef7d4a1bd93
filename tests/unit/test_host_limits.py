"""Messages about limits of processes and open files."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from tasks.processes.host_limits import FILE_RULE, name_reached_limit
from tasks.record.outcome import Failure
from tasks.spec.failure_kinds import FailureKind

#: Program that has no free file descriptor, and prints its pid and Muster's text about an error.
_WITHOUT_DESCRIPTORS = """
import errno, os, resource, sys
from tasks.processes.host_limits import describe_shortage
errors = {"files": OSError(errno.EMFILE, ""), "threads": RuntimeError("can't start new thread")}
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1,) * 2)
print(os.getpid(), describe_shortage(errors[sys.argv[1]]), flush=True)
"""


def describe_without_descriptors(error: str) -> tuple[str, str]:
    """Let a process without a free file descriptor describe an error.

    Args:
        error: "files" if open(2) failed, "threads" if a thread could not start.

    Returns:
        The pid of the process, and the description that it printed.
    """
    program = [sys.executable, "-c", _WITHOUT_DESCRIPTORS, error]
    result = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    pid, _, text = result.stdout.strip().partition(" ")
    return pid, text


def test_process_without_free_descriptors_names_its_own_limit() -> None:
    pid, text = describe_without_descriptors("files")

    assert f"process {pid} has reached its limit of" in text


def test_limits_that_cannot_be_read_are_no_error() -> None:
    _, text = describe_without_descriptors("threads")

    assert "Traceback" not in text


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_failure_names_no_process_that_is_below_its_limit(number: int) -> None:
    line = f"OSError: [Errno {number}] Too many open files"
    failure = Failure(kind=FailureKind.RUNTIME_ERROR, message=line, rule="exit")

    named = name_reached_limit(failure)

    assert named.rule == FILE_RULE
    assert "files (RLIMIT_NOFILE, ulimit -n)" in named.message
    assert " pid " not in named.message


def test_limit_is_named_once_if_a_component_cannot_be_started() -> None:
    message = "trainer can't be started: Too many open files; Muster's process 7 has reached it"
    failure = Failure(kind=FailureKind.UNKNOWN, message=message, rule="spawn")

    assert name_reached_limit(failure).message == message
