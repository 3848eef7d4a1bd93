"""Who has an environment variable: living processes, each value with all of its holders."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from tasks.processes.ending import find_holders


def plant(proc: Path, pid: str, environ: bytes, cmdline: bytes = b"python\0-m\0x\0") -> Path:
    entry = proc / pid
    entry.mkdir()
    (entry / "environ").write_bytes(environ)
    (entry / "cmdline").write_bytes(cmdline)
    (entry / "status").write_text(f"Name:\tx\nUid:\t{os.getuid()}\t0\t0\t0\n")
    return entry


def test_each_value_has_its_holders(tmp_path: Path) -> None:
    plant(tmp_path, "1", b"A=1\0RUN=x\0")
    plant(tmp_path, "2", b"RUN=x\0")
    plant(tmp_path, "3", b"RUN=y=z\0B=2\0")
    # another variable that only ends or begins like it, and a value that only looks like one
    plant(tmp_path, "4", b"MY_RUN=x\0RUNS=x\0C=RUN=x\0")
    # no process
    plant(tmp_path, "self", b"RUN=x\0")
    (tmp_path / "uptime").write_text("1")

    found = find_holders("RUN", str(tmp_path))

    assert {value: set(pids) for value, pids in found.pids.items()} == {"x": {1, 2}, "y=z": {3}}
    assert found.hidden == {}


def test_what_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open = builtins.open

    def refusing(path: str, *mode: str) -> IO[bytes]:  # root may read whatever its mode is
        if path.endswith("/environ"):
            raise PermissionError
        return really_open(path, *mode)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(builtins, "open", refusing)
    plant(tmp_path, "1", b"RUN=x\0")
    # a kernel thread has no command line
    plant(tmp_path, "2", b"", cmdline=b"")

    found = find_holders("RUN", str(tmp_path))

    assert found.pids == {}
    assert found.hidden == {1: "python -m x"}


def test_a_real_process_is_found_until_it_ends() -> None:
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
        # Not reaped yet: a zombie has no environment.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        found_dead = find_holders(variable).pids

    assert found == {value: (process.pid,)}
    assert found_dead == {}
