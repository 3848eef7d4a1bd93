"""Start the programs of a test, and kill all of their processes when the test ends.

    python -I -S keeper.py DIRECTORY

Each line of stdin is a command as JSON: {"argv": [...], "env": {...}, "log": PATH}. The keeper
starts it, and prints its process id. The keeper is a subreaper: a descendant that loses its parent
becomes a child of the keeper. When stdin is closed, or the owner of the pipe has died, the keeper
kills all of its descendants and removes DIRECTORY. It exits with 0, or with 1 if a process is still
alive after 20 s.

This program uses only the standard library.
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

#: Time limit for killing all descendants, in seconds.
_END_WITHIN_S = 20.0
#: Time between two checks for ended children, in seconds.
_REAP_EVERY_S = 0.05


def main() -> int:
    """Start the programs of a test, and kill them when stdin is closed.

    Returns:
        Exit code 0, or 1 if a process is still alive.
    """
    if ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) != 0:  # PR_SET_CHILD_SUBREAPER
        raise SystemExit("not a subreaper")
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The handler does nothing, so that this process survives the signal. SIG_IGN would be
        # wrong: started commands would inherit SIG_IGN, but they do not inherit a handler.
        signal.signal(signum, lambda *_: None)
    serve()
    is_ended = end_all()
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    return 0 if is_ended else 1


def serve() -> None:
    """Start each command that arrives on stdin, and reap ended children, until stdin is closed."""
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    incomplete_line = b""
    while True:
        has_children()
        if not selector.select(_REAP_EVERY_S):
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            return
        *lines, incomplete_line = (incomplete_line + chunk).split(b"\n")
        for line in lines:
            os.write(1, b"%d\n" % start(json.loads(line)))


def start(command: dict[str, object]) -> int:
    """Start a command in its own session, with its output in a log file; return its process id."""
    argv = command["argv"]
    env = command["env"]
    log = command["log"]
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
    """Reap the children that have ended, and return True if a child is still alive."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        return False
    return True


def end_all() -> bool:
    """Kill all descendants of this process; return False if a process is still alive after 20 s."""
    deadline = time.monotonic() + _END_WITHIN_S
    while has_children():
        if time.monotonic() > deadline:
            return False
        for pid in list_descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return True


def list_descendants(root: int) -> list[int]:
    """Return the process ids of the descendants of a process, parents before their children."""
    parents = {int(name): read_parent_pid(name) for name in os.listdir("/proc") if name.isdigit()}
    pids = [root]
    # The list grows during the loop, so that the children of each descendant are added, too.
    for ancestor in pids:
        pids.extend(pid for pid, parent in parents.items() if parent == ancestor)
    return pids[1:]


def read_parent_pid(name: str) -> int:
    """Return the pid of a process's parent, or 0 if the process has ended.

    Args:
        name: Pid of the process, as the name of its folder in /proc.
    """
    try:
        with open(f"/proc/{name}/stat", "rb") as f:
            return int(f.read().rpartition(b") ")[2].split()[1])
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
