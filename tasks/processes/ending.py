"""Ending what a guardian that was killed has left: told by whom they came to, and by their mark."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from functools import partial

from tasks.processes import tree
from tasks.processes.identity import send_if

#: After so many rounds in a row without an orphan there is none: one that hides by forking and
#: exiting is caught, or leaves its dead, in some of them.
CLEAN_ROUNDS = 3
#: Between two rounds.
ROUND_S = 0.02
#: How long one round follows newborn processes.
_CHASE_S = 0.005

#: The guardians of this process that are not reaped yet; under the lock while one is made.
guardians: set[int] = set()
guardians_lock = threading.Lock()


def end_orphans() -> list[int]:
    """One round against what dead guardians have left to this process, a subreaper.

    What this process has started itself, and what came of that, is never touched.

    Returns: the orphans that were there, dead or alive.
    """
    found: set[int] = set()
    own_mark = tree.mark_of(os.getpid())

    def is_orphan(child: int) -> bool:
        return child not in guardians and tree.mark_of(child) not in (own_mark, None)

    def reap() -> bool:
        orphans = [child for child in tree.children(os.getpid()) if is_orphan(child)]
        found.update(orphans)
        for child in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        return not orphans

    with guardians_lock:
        if not reap():
            tree.kill_below_once(reap, is_orphan)
    return sorted(found)


def end_marked(mark: int) -> list[int]:
    """One round against every process of this machine that has a mark, whoever adopted it.

    Returns: those that were alive.
    """
    if not mark:
        return []
    found: set[int] = set()
    # All are stopped before any is killed, so that no two can revive each other.
    for _ in range(20):
        fresh = set(marked(mark)) - found
        if not fresh:
            break
        found |= fresh
        for pid in fresh:
            _send(pid, signal.SIGSTOP, mark)
    for pid in marked(mark):
        found.add(pid)
        _send(pid, signal.SIGKILL, mark)
    if found:
        _kill_newborns(mark, found)
    return sorted(found)


def marked(mark: int) -> list[int]:
    """Every living process of this machine with the mark."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if tree.mark_of(pid) == mark and not tree.is_zombie(pid)]


def _kill_newborns(mark: int, found: set[int]) -> None:
    """What forks and exits faster than a listing of the machine takes is never found by one."""
    deadline = time.monotonic() + _CHASE_S
    last = tree.last_pid()
    while time.monotonic() < deadline:
        newest = tree.last_pid()
        for pid in range(last + 1, newest + 1):
            if tree.mark_of(pid) == mark and _send(pid, signal.SIGKILL, mark):
                found.add(pid)
        last = newest


def _send(pid: int, signum: int, mark: int) -> bool:
    with contextlib.suppress(PermissionError):
        return send_if(pid, signum, partial(_has_mark, pid, mark))
    return False


def _has_mark(pid: int, mark: int) -> bool:
    return tree.mark_of(pid) == mark
