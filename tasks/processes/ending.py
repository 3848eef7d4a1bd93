"""End the leftover processes of a run on this machine.

Processes are selected by their parent (`end_orphans`), by their mark (`end_marked`), or by their
initial environment variables (`end_carriers`). Each works in rounds until a round finds no process.

`end_carriers` also runs on machines without Muster: Ray sends it there by value, with all functions
that it calls. So these functions return plain data, and use only the standard library and the
functions of `tree` that this module imports at its top.
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

#: Number of consecutive rounds that must find no process. A process that hides by forking and
#: exiting is caught in one of them, or its zombie is.
CLEAN_ROUNDS = 3
#: Seconds between two rounds.
ROUND_S = 0.02
#: Seconds after SIGKILL. A process that still lives then is stuck in the kernel.
KILLED_WITHIN_S = 5.0
#: Time limit in seconds of a sweep. Processes that are created faster than they are ended are
#: reported.
_SWEPT_WITHIN_S = 20.0
_SHOWN_CHARACTERS = 200

#: `(pid, start ticks)`, which identifies a process of this boot permanently.
Known = tuple[int, int]

#: Pids of guardians that this process has not reaped. The lock is held while a guardian is made.
guardians: set[int] = set()
guardians_lock = threading.Lock()
#: Marks of processes that may outlive their guardian. They are not ended as orphans.
kept_marks: set[int] = set()


def end_all(end_once: Callable[[], set[Known]], within_s: float) -> tuple[set[Known], set[Known]]:
    """Call `end_once` in rounds until `CLEAN_ROUNDS` consecutive rounds find no process.

    Args:
        end_once: Sends SIGKILL to all matching processes, and returns their ids.
        within_s: Time limit in seconds.

    Returns:
        The processes that have ended, and the remaining processes.
    """
    killed: set[Known] = set()
    left: set[Known] = set()
    deadline = time.monotonic() + within_s
    clean = 0
    while clean < CLEAN_ROUNDS and time.monotonic() < deadline:
        fresh = end_once()
        killed |= fresh
        clean = 0 if fresh else clean + 1
        if fresh and not _are_gone(fresh, deadline):
            break
        time.sleep(ROUND_S)
    if clean < CLEAN_ROUNDS:
        # These count as remaining even if they end now, because more may follow from the same
        # source.
        left = end_once()
    left |= {process for process in killed if not _is_gone(*process)}
    return killed - left, left


def end_orphans() -> list[int]:
    """End the orphans that this process, a subreaper, adopted from dead guardians, in one round.

    Processes that this process has started itself are never touched, nor are their descendants.

    Returns:
        Pids of the orphans, dead or alive.
    """
    orphan_pids: set[int] = set()
    own_mark = mark_of(os.getpid())

    def is_orphan(child: int) -> bool:
        return child not in guardians and mark_of(child) not in (own_mark, None, *kept_marks)

    def reap() -> bool:
        orphans = [child for child in children(os.getpid()) if is_orphan(child)]
        orphan_pids.update(orphans)
        for child in orphans:
            with suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        return not orphans

    with guardians_lock:
        if not reap():
            kill_below_once(reap, is_orphan)
    return sorted(orphan_pids)


def end_marked(mark: int) -> set[Known]:
    """SIGKILL this machine's processes that have the mark and may belong to this user's run, in one
    round.

    Returns:
        The processes that were alive.
    """
    if not mark:
        return set()
    return _end_matching(lambda pid: mark_of(pid) == mark and can_be_of_own_run(pid))


def can_be_of_own_run(pid: int) -> bool:
    """Return True if a run of this user may have started the process.

    Any user can copy the mark of a run, so the process must belong to this user. Only runs of root
    have processes of other users. Such a process has a log of the run open for writing, which other
    users cannot open.
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

    This process and its ancestors are not touched. The call is idempotent, and several may run at
    the same time.

    Args:
        wanted: At least one variable, with the value that it had when the process began its
            program.

    Returns:
        `{"machine": machine(), "killed": [...], "left": [...]}`: the ended processes, and the
        processes that survived SIGKILL. Each is `{"pid", "start", "command"}`.
    """
    spared = _self_and_ancestors()
    commands: dict[int, str] = {}

    def is_carrier(pid: int) -> bool:
        if pid in spared or not carries(pid, wanted):
            return False
        commands.setdefault(pid, " ".join(command_of(pid).split())[:_SHOWN_CHARACTERS])
        return True

    ended, left = end_all(lambda: _end_matching(is_carrier), _SWEPT_WITHIN_S)

    def describe(processes: set[Known]) -> list[dict[str, Any]]:
        return [
            {"pid": pid, "start": start, "command": commands[pid]}
            for pid, start in sorted(processes)
        ]

    return {"machine": machine(), "killed": describe(ended), "left": describe(left)}


def _end_matching(is_meant: Callable[[int], bool]) -> set[Known]:
    """SIGKILL every living process that `is_meant` selects, in one round.

    Returns:
        The processes that were found.
    """
    known: set[Known] = set()

    def send(pid: int, start: int, signum: int) -> bool:
        # Another user's process cannot be signalled. It is reported as remaining.
        with suppress(PermissionError):
            return signal_if(pid, signum, lambda: start_ticks(pid) == start)
        return False

    def start_if_meant(pid: int) -> int:
        """Return the start ticks of a meant, living process; otherwise 0."""
        if not is_meant(pid):
            return 0
        start = start_ticks(pid)
        # Check again: another process may have got this pid before the start time was read.
        return start if is_meant(pid) and not is_zombie(pid) else 0

    def send_all(signum: int) -> list[int]:
        known.update((pid, start) for pid in all_pids() if (start := start_if_meant(pid)))
        # Signal all of them, because a process may have executed another program without the
        # variables.
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
    pids = set()
    pid = os.getpid()
    while pid and pid not in pids:
        pids.add(pid)
        pid = parent_of(pid)
    return pids


def _are_gone(processes: Iterable[Known], deadline: float) -> bool:
    """Wait until all processes have ended. Return False if they do not end in time."""
    deadline = min(deadline, time.monotonic() + KILLED_WITHIN_S)
    while not all(_is_gone(*process) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _is_gone(pid: int, start: int) -> bool:
    return start_ticks(pid) != start or is_zombie(pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """The processes that have a certain variable in their environment."""

    #: `pids[value]`: pids of this user's living processes with that value.
    pids: Mapping[str, tuple[int, ...]]
    #: `hidden[pid]`: command line of a living process that could not be checked. It belongs to
    #: another user, or its environment cannot be read.
    hidden: Mapping[int, str]


def holders_of(variable: str, proc: str = "/proc") -> Holders:
    """Return the processes that have the variable in their initial environment.

    Changes that a process made to its environment after its start are not visible.
    """
    pids_by_value: dict[str, tuple[int, ...]] = {}
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
            pids_by_value[value] = (*pids_by_value.get(value, ()), pid)
    return Holders(pids=pids_by_value, hidden=hidden)
