"""Keeps what a test starts: `keeper.py DIRECTORY`, stdlib only, started with `-I -S`.

A subreaper: whatever the commands that it starts leave behind becomes its child. Once its stdin
ends, by its owner's word or its owner's death, it kills them all, until the kernel says that none
is left, removes DIRECTORY and exits 0; 1 where something is left after 20 s.

Each line of stdin is a command as JSON, {"argv": [...], "env": {...}, "log": PATH}; the answer is
its pid.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import shutil
import signal
import sys
import time
from contextlib import suppress

_END_WITHIN_S = 20.0
_REAP_EVERY_S = 0.05


def main() -> int:
    if ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) != 0:  # PR_SET_CHILD_SUBREAPER
        raise SystemExit("not a subreaper")
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Not SIG_IGN, which the commands would inherit.
        signal.signal(signum, lambda *_: None)
    serve()
    is_ended = end_all()
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    return 0 if is_ended else 1


def serve() -> None:
    waiting = selectors.DefaultSelector()
    waiting.register(0, selectors.EVENT_READ)
    buffered = b""
    while True:
        has_children()
        if not waiting.select(_REAP_EVERY_S):
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            return
        *lines, buffered = (buffered + chunk).split(b"\n")
        for line in lines:
            os.write(1, b"%d\n" % start(json.loads(line)))


def start(command: dict[str, object]) -> int:
    argv, env, log = command["argv"], command["env"], command["log"]
    assert isinstance(argv, list) and isinstance(env, dict) and isinstance(log, str)
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1)
        os.dup2(1, 2)
        os.execve(argv[0], argv, env)
    finally:
        os._exit(127)


def has_children() -> bool:
    """Whether one is left; reaps those that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        return False
    return True


def end_all() -> bool:
    deadline = time.monotonic() + _END_WITHIN_S
    while has_children():
        if time.monotonic() > deadline:
            return False
        for pid in below(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return True


def below(root: int) -> list[int]:
    """The descendants of a process, parents first."""
    parents = {int(name): parent_of(name) for name in os.listdir("/proc") if name.isdigit()}
    found = [root]
    for one in found:
        found.extend(pid for pid, parent in parents.items() if parent == one)
    return found[1:]


def parent_of(name: str) -> int:
    try:
        with open(f"/proc/{name}/stat", "rb") as f:
            return int(f.read().rpartition(b") ")[2].split()[1])
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
