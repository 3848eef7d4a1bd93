"""Ending what is left of a run on this machine, wherever it hides.

Processes are told by whom they came to (`end_orphans`), by their mark (`end_marked`), or by the
variables that they began with (`end_carriers`): each is one round after another until nothing is
found any more.

`end_carriers` runs on machines that have no Muster: it is sent there by value, with all that it
calls. So these functions return plain data and take nothing in but the standard library and
functions of `tree`, at the head of this module.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.processes.tree import (
    all_pids,
    children,
    command_of,
    environment_of,
    is_of_own_user,
    is_zombie,
    kill_below_once,
    kill_once,
    machine,
    mark_of,
    open_files,
    parent_of,
    signal_if,
    start_ticks,
)
from tasks.record.places import muster_home

#: So many rounds in a row must find nothing: one that hides by forking and exiting is caught, or
#: leaves its dead, in some of them.
CLEAN_ROUNDS = 3
#: Between two rounds.
ROUND_S = 0.02
#: What has not ended so long after SIGKILL sits in the kernel: nothing else can be done about it.
KILLED_WITHIN_S = 5.0
#: Longer than anybody waits for a sweep: what is born faster than it is ended is left and named.
_SWEPT_WITHIN_S = 20.0
_SHOWN_CHARACTERS = 200

#: `(pid, start ticks)`, which names a process of this boot for ever.
Known = tuple[int, int]

#: The guardians of this process that are not reaped yet; under the lock while one is made.
guardians: set[int] = set()
guardians_lock = threading.Lock()
#: Marks of processes that outlive their guardian: they are not ended as orphans.
kept_marks: set[int] = set()


def end_all(end_once: Callable[[], set[Known]], within_s: float) -> tuple[set[Known], set[Known]]:
    """Round after round until nothing is found, `CLEAN_ROUNDS` times in a row.

    Args:
        end_once: sends SIGKILL to all that are there, and says who was.

    Returns: those that have ended by it, and those that are left.
    """
    found: set[Known] = set()
    left: set[Known] = set()
    deadline = time.monotonic() + within_s
    clean = 0
    while clean < CLEAN_ROUNDS and time.monotonic() < deadline:
        fresh = end_once()
        found |= fresh
        clean = 0 if fresh else clean + 1
        if fresh and not _are_gone(fresh, deadline):
            break
        time.sleep(ROUND_S)
    if clean < CLEAN_ROUNDS:
        # They count as left even if they end by this: where they came from, there may be more.
        left = end_once()
    left |= {one for one in found if not _is_gone(*one)}
    return found - left, left


def end_orphans() -> list[int]:
    """One round against what dead guardians have left to this process, a subreaper.

    What this process has started itself, and what came of that, is never touched.

    Returns: the orphans that were there, dead or alive.
    """
    found: set[int] = set()
    own_mark = mark_of(os.getpid())

    def is_orphan(child: int) -> bool:
        return child not in guardians and mark_of(child) not in (own_mark, None, *kept_marks)

    def reap() -> bool:
        orphans = [child for child in children(os.getpid()) if is_orphan(child)]
        found.update(orphans)
        for child in orphans:
            with suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        return not orphans

    with guardians_lock:
        if not reap():
            kill_below_once(reap, is_orphan)
    return sorted(found)


def end_marked(mark: int) -> set[Known]:
    """One round of SIGKILL against every process of this machine that has a mark and can be of a
    run of this user, whoever adopted it.

    Returns: those that were alive.
    """
    if not mark:
        return set()
    return _end_matching(lambda pid: mark_of(pid) == mark and can_be_of_own_run(pid))


def can_be_of_own_run(pid: int) -> bool:
    """Return True if a run of this user can have made the process.

    Any user can copy the marks of a run, so the process must belong to this user. Only root's runs
    have processes of other users. Such a process still has a log of the run open for writing, which
    no other user can open.
    """
    if is_of_own_user(pid):
        return True
    return os.getuid() == 0 and _writes_below(pid, muster_home())


def _writes_below(pid: int, directory: Path) -> bool:
    """Return True if the process has a file in the directory open for writing."""
    for fd, target in open_files(pid).items():
        if Path(target).is_relative_to(directory):
            with suppress(OSError):
                flags = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().partition("flags:")[2]
                if int(flags.split()[0], 8) & os.O_ACCMODE != os.O_RDONLY:
                    return True
    return False


def end_carriers(wanted: Mapping[str, str]) -> dict[str, Any]:
    """SIGKILL every process of this machine that has all the variables with exactly these values.

    Neither this process nor an ancestor of it is touched. Idempotent; any number may run at once.

    Args:
        wanted: Variables, as they were when the process began its program; at least one.

    Returns: `{"machine": machine(), "killed": [...], "left": [...]}`, each `{"pid", "start",
    "command"}`: what has ended by it, and what outlived SIGKILL.
    """
    spared = _self_and_ancestors()
    commands: dict[int, str] = {}

    def is_carrier(pid: int) -> bool:
        if pid in spared or not carries(pid, wanted):
            return False
        commands.setdefault(pid, " ".join(command_of(pid).split())[:_SHOWN_CHARACTERS])
        return True

    ended, left = end_all(lambda: _end_matching(is_carrier), _SWEPT_WITHIN_S)
    killed, stuck = (
        [{"pid": pid, "start": start, "command": commands[pid]} for pid, start in sorted(these)]
        for these in (ended, left)
    )
    return {"machine": machine(), "killed": killed, "left": stuck}


def _end_matching(is_meant: Callable[[int], bool]) -> set[Known]:
    """One round against every living process that is meant; those that were there."""
    known: set[Known] = set()

    def send(pid: int, start: int, signum: int) -> bool:
        # Another user's, which no one here may end, is found to be left.
        with suppress(PermissionError):
            return signal_if(pid, signum, lambda: start_ticks(pid) == start)
        return False

    def start_if_meant(pid: int) -> int:
        """0 where it is not alive, or not meant."""
        if not is_meant(pid):
            return 0
        start = start_ticks(pid)
        # Looked at again: the pid may have become another process's before its start was read.
        return start if is_meant(pid) and not is_zombie(pid) else 0

    def send_all(signum: int) -> list[int]:
        known.update((pid, start) for pid in all_pids() if (start := start_if_meant(pid)))
        # One that was found before may run another program by now, without the variables.
        for pid, start in known:
            send(pid, start, signum)
        return [pid for pid, _ in known]

    def kill_newborn(pid: int) -> bool:
        start = start_if_meant(pid)
        if not start or not send(pid, start, signal.SIGKILL):
            return False
        known.add((pid, start))
        return True

    kill_once(send_all, kill_newborn, lambda: not known, set())
    return known


def carries(pid: int, wanted: Mapping[str, str]) -> bool:
    """Return True if this user's process began its program with these variables."""
    with suppress(PermissionError):
        if not is_of_own_user(pid):
            return False
        variables = environment_of(pid)
        return all(variables.get(name) == value for name, value in wanted.items())
    return False


def _self_and_ancestors() -> set[int]:
    found = set()
    pid = os.getpid()
    while pid and pid not in found:
        found.add(pid)
        pid = parent_of(pid)
    return found


def _are_gone(processes: Iterable[Known], deadline: float) -> bool:
    """Wait for the end of all of them."""
    deadline = min(deadline, time.monotonic() + KILLED_WITHIN_S)
    while not all(_is_gone(*one) for one in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _is_gone(pid: int, start: int) -> bool:
    return start_ticks(pid) != start or is_zombie(pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """The processes that have a variable, as far as it may be known."""

    #: `pids[value]`: living processes of this user.
    pids: Mapping[str, tuple[int, ...]]
    #: `hidden[pid]`: the command line of a living process of another user, whose environment is
    #: closed to this one or proves nothing, and of one whose environment cannot be read.
    hidden: Mapping[int, str]


def holders_of(variable: str, proc: str = "/proc") -> Holders:
    """Who has the variable now. What a process has changed of it since its start is not seen."""
    found: dict[str, tuple[int, ...]] = {}
    hidden: dict[int, str] = {}
    for pid in all_pids(proc):
        try:
            value = environment_of(pid, proc).get(variable)
            is_own = is_of_own_user(pid, proc)
        except PermissionError:
            is_own = False
        if not is_own:
            if command := command_of(pid, proc):
                hidden[pid] = command
            continue
        if value is not None:
            found[value] = (*found.get(value, ()), pid)
    return Holders(pids=found, hidden=hidden)
