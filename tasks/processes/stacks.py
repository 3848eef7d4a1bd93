"""Where a program hangs in its own code: asked of py-spy, and of the processes themselves."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress

from tasks.processes.identity import ProcessId
from tasks.processes.kernel_view import has_signal, status_of

#: Each is a py-spy of its own for a moment.
_ASKED_AT_MOST = 32


def python_stacks(pids: Iterable[int], within_s: float) -> Iterator[str]:
    """What py-spy says of each Python process; nothing where it is not installed.

    Args:
        within_s: for all of them together.
    """
    spy = _py_spy()
    if spy is None:
        return
    deadline = time.monotonic() + within_s
    with ExitStack() as stack:
        asked = []
        for pid in [pid for pid in pids if _is_python(pid)][:_ASKED_AT_MOST]:
            popen = _dump(spy, pid)
            stack.callback(popen.wait)
            stack.callback(popen.kill)
            asked.append((pid, popen))
        for pid, popen in asked:
            try:
                said, _ = popen.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                popen.kill()
                said, _ = popen.communicate()
            yield f"py-spy of pid {pid}:\n{said.decode(errors='replace')}"


def abort(processes: Iterable[ProcessId], within_s: float) -> None:
    """Have those that catch SIGABRT write down their stacks, as faulthandler does, and die.

    The others are left as they are: to them it is but a death, and says nothing.

    Args:
        within_s: how long to wait, all in all, for one to be done before the next, so that what
            they write is not mixed.
    """
    deadline = time.monotonic() + within_s
    asked = [p for p in processes if has_signal(status_of(p.pid), "SigCgt", signal.SIGABRT)]
    for process in asked:
        # What waits for another of them would go on when that one has ended, and say nothing.
        _send(process, signal.SIGSTOP)
    for process in asked:
        with suppress(OSError, ValueError):
            # To write out its memory would take longer than it has. Source: core(5); a limit of 1
            # stops a program that collects cores, too, which 0 does not.
            _, hard = resource.prlimit(process.pid, resource.RLIMIT_CORE)
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (1, hard))
        _send(process, signal.SIGABRT)
        # A stopped process takes it only when it goes on, and then before anything else.
        _send(process, signal.SIGCONT)
        process.is_gone_within(max(0.0, deadline - time.monotonic()))


def _send(process: ProcessId, signum: int) -> None:
    with suppress(PermissionError):
        process.send(signum)


def _py_spy() -> str | None:
    beside = os.path.dirname(sys.executable)
    return shutil.which("py-spy", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


def _dump(spy: str, pid: int) -> subprocess.Popen[bytes]:
    # Without a pause of the process: one that is stopped would keep py-spy waiting for it.
    return subprocess.Popen(
        [spy, "dump", "--nonblocking", "--pid", str(pid)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _is_python(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith(("python", "pypy"))
    except OSError:
        return False
