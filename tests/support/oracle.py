"""Runs a command and says whether anything of it outlived it: `oracle.py DEADLINE_S COMMAND...`.

A judge of its own, which shares no code with what it judges: it is a subreaper, so each descendant
that loses its parent becomes its child, and the kernel's ECHILD is the proof that none is left.
Its lines are `pid N`, `ended STATUS`, and at last `empty S` (after S seconds), or `left PID
COMMAND` for each process that was still there at the deadline, which it then kills.

Stdlib only; started with `-I -S`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time


def main() -> None:
    deadline_s, command = float(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) != 0:  # PR_SET_CHILD_SUBREAPER
        raise SystemExit("not a subreaper")
    pid = os.posix_spawnp(command[0], command, os.environ)
    say(f"pid {pid}")
    ended, status = 0, 0
    while ended != pid:
        ended, status = os.wait()
    say(f"ended {os.waitstatus_to_exitcode(status)}")
    since = time.monotonic()
    while reap():
        if time.monotonic() - since > deadline_s:
            for left in below():
                say(f"left {left} {command_of(left)}")
            end_all()
            return
        time.sleep(0.005)
    say(f"empty {time.monotonic() - since:.3f}")


def reap() -> bool:
    """Whether a child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        return False
    return True


def end_all() -> None:
    since = time.monotonic()
    while reap() and time.monotonic() - since < 10:
        for pid in below():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def below() -> list[int]:
    parents = {int(name): parent_of(name) for name in os.listdir("/proc") if name.isdigit()}
    found = [os.getpid()]
    for root in found:
        found.extend(pid for pid, parent in parents.items() if parent == root)
    return found[1:]


def parent_of(name: str) -> int:
    try:
        with open(f"/proc/{name}/stat", "rb") as f:
            return int(f.read().rpartition(b") ")[2].split()[1])
    except OSError:
        return 0


def command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return f.read().replace(b"\0", b" ").decode(errors="replace").replace("\n", " ")[:120]
    except OSError:
        return "?"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
