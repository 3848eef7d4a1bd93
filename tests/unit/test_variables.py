"""`find_holders` returns the processes that were started with an environment variable."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from tasks.processes.ending import find_holders


def add_process(proc: Path, pid: str, environ: bytes, cmdline: bytes = b"python\0-m\0x\0") -> Path:
    entry = proc / pid
    entry.mkdir()
    (entry / "environ").write_bytes(environ)
    (entry / "cmdline").write_bytes(cmdline)
    (entry / "status").write_text(f"Name:\tx\nUid:\t{os.getuid()}\t0\t0\t0\n")
    return entry


def test_processes_are_grouped_by_the_value_of_the_variable(tmp_path: Path) -> None:
    add_process(tmp_path, "1", b"A=1\0RUN=x\0")
    add_process(tmp_path, "2", b"RUN=x\0")
    add_process(tmp_path, "3", b"RUN=y=z\0B=2\0")
    # This process has no variable RUN. It only has variables whose longer names contain RUN, and a
    # variable whose value contains RUN=.
    add_process(tmp_path, "4", b"MY_RUN=x\0RUNS=x\0C=RUN=x\0")
    # An entry of /proc is a process only if the name of the entry is a number.
    add_process(tmp_path, "self", b"RUN=x\0")
    (tmp_path / "uptime").write_text("1")

    found = find_holders("RUN", str(tmp_path))

    assert {value: set(pids) for value, pids in found.pids.items()} == {"x": {1, 2}, "y=z": {3}}
    assert found.hidden == {}


def test_process_with_an_unreadable_environment_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_open = builtins.open

    # Replace `open` to simulate an unreadable file. A file mode is not enough, because root can
    # read every file.
    def refuse_environ(path: str, *mode: str) -> IO[bytes]:
        if path.endswith("/environ"):
            raise PermissionError
        return original_open(path, *mode)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(builtins, "open", refuse_environ)
    add_process(tmp_path, "1", b"RUN=x\0")
    # Process 2 has no command line, like a kernel thread.
    add_process(tmp_path, "2", b"", cmdline=b"")

    found = find_holders("RUN", str(tmp_path))

    assert found.pids == {}
    assert found.hidden == {1: "python -m x"}


def test_real_process_is_found_until_it_ends() -> None:
    variable, value = "MUSTER_TEST_HOLDER", str(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "print(flush=True); input()"],
        env={**os.environ, variable: value},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = find_holders(variable).pids
        process.kill()
        # The process is now a zombie, which has no environment.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        found_dead = find_holders(variable).pids

    assert found == {value: (process.pid,)}
    assert found_dead == {}
