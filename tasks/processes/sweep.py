"""Ending what was started with given environment variables, wherever on the machine it hides.

It runs on machines that have no Muster: its functions are sent there by value, so they return plain
data and import nothing but the standard library, at the head of this module.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.processes.identity import send_if
from tasks.processes.tree import is_zombie, parent_of, start_ticks

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
                _send(pid, start, signum)
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


def _send(pid: int, start: int, signum: int) -> None:
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
