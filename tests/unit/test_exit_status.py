"""Tests of `exit_of`: the exit status of a real process whose parent is another process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tasks.processes import child_watch, tree
from tasks.processes.child_watch import read_exit
from tasks.processes.identity import ProcessId
from tasks.record.outcome import Exit

_WITHIN_S = 60.0

#: Program that starts `sh -c CODE` and prints the pid of the shell. The input line `end` ends the
#: shell. Any other input line makes the program reap the shell.
PARENT = """
import subprocess, sys
child = subprocess.Popen(["sh", "-c", sys.argv[1]], stdin=subprocess.PIPE)
print(child.pid, flush=True)
for line in sys.stdin:
    if line == "end\\n":
        child.stdin.close()
    else:
        child.wait()
        print("reaped", flush=True)
"""

#: Tuples of three values: code that a shell runs, the exit code of this shell, and the signal that
#: ends this shell. Either the exit code or the signal is None.
ENDS = [
    ("exit 42", 42, None),
    ("exit 0", 0, None),
    ("kill -KILL $$", None, signal.SIGKILL),
    ("kill -ABRT $$", None, signal.SIGABRT),
]


@contextmanager
def grandchild(code: str) -> Iterator[tuple[int, ProcessId, subprocess.Popen[str]]]:
    """Yield the pidfd, the identity and the parent of a zombie.

    A zombie is a process that has ended and is not reaped yet.

    Args:
        code: Shell code that ends the process.
    """
    command = [sys.executable, "-I", "-S", "-c", PARENT, f"read line; {code}"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        pid = int(parent.stdout.readline())
        process = ProcessId.of(pid)
        pidfd = os.pidfd_open(pid)
        try:
            send_line(parent, "end")
            assert select.select([pidfd], [], [], _WITHIN_S)[0]
            yield pidfd, process, parent
        finally:
            os.close(pidfd)
            parent.kill()


def send_line(parent: subprocess.Popen[str], line: str) -> None:
    """Write a line to the standard input of `parent`, which runs the program `PARENT`."""
    assert parent.stdin is not None
    parent.stdin.write(f"{line}\n")
    parent.stdin.flush()


def reap(parent: subprocess.Popen[str]) -> None:
    """Make the parent reap its child, and wait until the child is reaped."""
    send_line(parent, "reap")
    assert parent.stdout is not None
    assert parent.stdout.readline() == "reaped\n"


def keeps_status() -> bool:
    """Return True if the kernel keeps the exit status of reaped processes (Linux 6.15 or later)."""
    return tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15)


@pytest.mark.parametrize(("code", "exit_code", "signum"), ENDS)
def test_status_of_a_zombie_is_known(code: str, exit_code: int | None, signum: int | None) -> None:
    with grandchild(code) as (pidfd, process, _):
        exit = read_exit(pidfd, process)

    assert (exit.exit_code, exit.signal) == (exit_code, signum)


@pytest.mark.skipif(not keeps_status(), reason="the kernel does not keep the status of the reaped")
@pytest.mark.parametrize(("code", "exit_code", "signum"), ENDS)
def test_status_of_a_reaped_process_is_known(
    code: str, exit_code: int | None, signum: int | None
) -> None:
    with grandchild(code) as (pidfd, process, parent):
        reap(parent)
        exit = read_exit(pidfd, process)

    assert (exit.exit_code, exit.signal) == (exit_code, signum)


def test_status_of_a_reaped_process_is_unknown_on_older_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child_watch, "_PIDFD_GET_INFO", 0)
    with grandchild("exit 42") as (pidfd, process, parent):
        reap(parent)
        exit = read_exit(pidfd, process)

    assert (exit.exit_code, exit.signal) == (None, None)
    assert str(exit).startswith("exit status unknown: ")
    assert not exit.is_zero


def test_zombie_with_a_reused_pid_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    with grandchild("exit 42") as (pidfd, process, _):
        monkeypatch.setattr(tree, "start_ticks", lambda pid: process.start_ticks + 1)
        exit: Exit = read_exit(pidfd, process)

    assert exit.exit_code is None
