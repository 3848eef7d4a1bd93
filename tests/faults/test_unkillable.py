"""A process that SIGKILL does not end: the teardown says so, and no verdict is a clean one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tasks.run.lifecycle import RunState
from tests.support.stage import Stage

#: Traces a process until its stdin ends, without ever waiting for it.
TRACER = """
import ctypes, sys
libc = ctypes.CDLL(None)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
seized = libc.ptrace(0x4206, int(sys.argv[1]), None, None) == 0  # PTRACE_SEIZE
print("attached" if seized else "refused", flush=True)
sys.stdin.read()
"""


def test_teardown_that_cannot_end_a_process_says_so_and_fails(stage: Stage) -> None:
    """A process that somebody outside traces, and does not wait for, can't be reaped by its own
    parent: as good as one in uninterruptible sleep."""
    supervisor = stage.running(stage.component("trainer", on_exit_zero="complete"))
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", TRACER, str(stage.pid_of("trainer"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as tracer:
        stage.others.add(tracer.pid)
        assert tracer.stdout is not None and tracer.stdin is not None
        if tracer.stdout.readline() != b"attached\n":
            pytest.skip("tracing is not allowed here")
        try:
            supervisor.interrupt("enough")
            verdict = supervisor.teardown()
        finally:
            tracer.stdin.close()

    assert verdict.state is RunState.FAILED
    assert verdict.left == {"trainer": (stage.pid_of("trainer"),)}
    assert verdict.failure is not None and verdict.failure.rule == "teardown-incomplete"
    assert "outlived SIGKILL" in verdict.message
    assert stage.seen("component.stopped", "trainer") == []
