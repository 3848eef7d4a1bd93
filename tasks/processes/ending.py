"""Ending what a guardian that was killed has left: told by whom they came to, and by their mark.

Ending what was started with given environment variables, wherever on the machine it hides.

It runs on machines that have no Muster: its functions are sent there by value, so they return plain
data and import nothing but the standard library, at the head of this module.

Which processes of this machine were started with an environment variable.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tasks.processes import tree
from tasks.processes.identity import send_if
from tasks.processes.tree import is_zombie, parent_of, start_ticks

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


#: What has not ended so long after SIGKILL sits in the kernel: nothing else can be done about it.
_KILLED_WITHIN_S = 5.0
#: So many looks in a row must find nothing: what forks and exits may be missed by one.
_CLEAN_ROUNDS = 2
_ROUND_S = 0.05
#: Longer than anybody waits for a sweep: what is born faster than it is ended is left and named.
_AT_MOST_S = 20.0


def end_carriers(wanted: Mapping[str, str]) -> dict[str, Any]:
    """SIGKILL every process of this machine that has all the variables with exactly these values.

    Neither this process nor an ancestor of it is touched. All are stopped before any is killed, so
    that no two can revive each other. Idempotent; any number may run at once.

    Args:
        wanted: Variables, as they were when the process began its program; at least one.

    Returns: `{"machine": machine(), "killed": [...], "left": [...]}`, each `{"pid", "start",
    "command"}`: what has ended by it, and what outlived SIGKILL.
    """
    found: dict[tuple[int, int], str] = {}
    deadline = time.monotonic() + _AT_MOST_S
    clean = 0
    while clean < _CLEAN_ROUNDS and time.monotonic() < deadline:
        fresh = carriers(wanted)
        found.update(fresh)
        clean = 0 if fresh else clean + 1
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid, start in fresh:
                _send_to(pid, start, signum)
        if fresh and not _are_gone(fresh, deadline):
            break
        time.sleep(_ROUND_S)
    if clean < _CLEAN_ROUNDS:
        # What was born meanwhile is left, too.
        found.update(carriers(wanted))
    parts: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for (pid, start), command in found.items():
        parts[_is_gone(pid, start)].append({"pid": pid, "start": start, "command": command})
    return {"machine": machine(), "killed": parts[True], "left": parts[False]}


def carriers(wanted: Mapping[str, str]) -> dict[tuple[int, int], str]:
    """`command line[pid, start ticks]` of the living processes with the variables, but this one
    and its ancestors."""
    spared = _self_and_ancestors()
    found = {}
    for pid, start, variables in environments():
        if pid not in spared and all(variables.get(k) == v for k, v in wanted.items()):
            found[pid, start] = command_of(pid)
    return found


def environments(prefix: str = "") -> list[tuple[int, int, dict[str, str]]]:
    """`(pid, start ticks, variables)` of each living process whose environment may be read.

    Args:
        prefix: Of the variables that are of interest.
    """
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        pid = int(name)
        start = start_ticks(pid)
        with suppress(OSError):  # It has ended, or is another user's.
            settings = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            pairs = (setting.decode(errors="replace").partition("=") for setting in settings)
            variables = {key: value for key, _, value in pairs if key.startswith(prefix)}
            # Of one process, not of two that had the pid.
            if variables and start and start == start_ticks(pid) and not is_zombie(pid):
                found.append((pid, start, variables))
    return found


def command_of(pid: int) -> str:
    """The command line, shortened; empty where the process is gone."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return " ".join(words.decode(errors="replace").split())[:200]
    return ""


def machine() -> str:
    """Names this boot and pid namespace: within one, a pid and its start name a process for ever.

    `identity.boot_id` by other means: a cached function can't be sent by value.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _self_and_ancestors() -> set[int]:
    found = set()
    pid = os.getpid()
    while pid and pid not in found:
        found.add(pid)
        pid = parent_of(pid)
    return found


def _send_to(pid: int, start: int, signum: int) -> None:
    # Another user's, which no one here may end, is found to be left.
    with suppress(PermissionError):
        send_if(pid, signum, lambda: start_ticks(pid) == start)


def _are_gone(processes: Mapping[tuple[int, int], str], deadline: float) -> bool:
    """Wait for the end of all of them."""
    deadline = min(deadline, time.monotonic() + _KILLED_WITHIN_S)
    while not all(_is_gone(pid, start) for pid, start in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _is_gone(pid: int, start: int) -> bool:
    return start_ticks(pid) != start or is_zombie(pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """The processes that have a variable, as far as it may be known."""

    #: `pids[value]`, living processes only.
    pids: Mapping[str, tuple[int, ...]]
    #: `hidden[pid]`: the command line of a living process whose environment is not for this user.
    hidden: Mapping[int, str]


def holders_of(variable: str, proc: Path = Path("/proc")) -> Holders:
    """Who has the variable now. What a process has changed of it since its start is not seen.

    Args:
        proc: Where processes are listed.
    """
    found: dict[str, tuple[int, ...]] = {}
    hidden: dict[int, str] = {}
    wanted = f"{variable}=".encode()
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        try:
            environment = (entry / "environ").read_bytes()
        except PermissionError:
            if command_line := _command_line(entry):
                hidden[pid] = command_line
            continue
        except OSError:  # It has ended.
            continue
        for setting in environment.split(b"\0"):
            if setting.startswith(wanted):
                value = setting[len(wanted) :].decode(errors="replace")
                found[value] = (*found.get(value, ()), pid)
    return Holders(pids=found, hidden=hidden)


def _command_line(entry: Path) -> str:
    """Empty for a kernel thread, and for what has ended."""
    try:
        return (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
