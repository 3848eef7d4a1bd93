"""End the leftover processes of a run on this machine.

There are three ways to find these processes. `end_orphans` searches the adopted children of this
process. `end_marked` searches for the mark that `tree.mark_own` sets. `end_carriers` searches for
environment variables that processes had at their start. One round of SIGKILL can miss a new
process, so rounds are repeated until several consecutive rounds find no process (see `end_all`).

`end_carriers` also runs on machines without Muster. Ray sends it there by value, with all functions
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
    belongs_to_own_user,
    children,
    descendants,
    is_zombie,
    kill_below_once,
    kill_once,
    list_open_files,
    machine,
    read_command_line,
    read_environment,
    read_mark,
    read_parent,
    read_real_user,
    refuses_signals,
    signal_if,
    start_ticks,
)
from tasks.record.places import muster_home

#: Number of consecutive rounds of SIGKILL that must find no process. Only then do all processes
#: count as ended. A single round can miss a process that forks and exits quickly. The next rounds
#: find the child or the zombie of that process.
CLEAN_ROUNDS = 3
#: Seconds between two rounds of SIGKILL.
ROUND_S = 0.02
#: Seconds to wait for the end of a process after SIGKILL. A process that takes longer is stuck in
#: the kernel, for example on a broken disk.
KILLED_WITHIN_S = 5.0
#: Time limit in seconds of `end_carriers`. A program that starts new processes faster than they can
#: be killed reaches this limit. The living processes are then reported.
_SWEPT_WITHIN_S = 20.0
#: Largest number of characters of a command line that a report shows.
_SHOWN_CHARACTERS = 200

#: `(pid, start time in clock ticks)`, which identifies a process until the next boot.
PidAndStart = tuple[int, int]

#: Pids of the guardians that are children of this process. A guardian is a process that owns the
#: process tree of one component. `end_orphans` does not end guardians.
guardians: set[int] = set()
#: This lock is held while a guardian process is started and added to `guardians`, and during
#: `end_orphans`. So `end_orphans` does not end a guardian that is not in `guardians` yet.
guardians_lock = threading.Lock()
#: Marks (see `tree.mark_own`) of processes that may outlive their guardian. `end_orphans` does not
#: end processes with these marks.
kept_marks: set[int] = set()


def end_all(
    end_once: Callable[[], set[PidAndStart]], within_s: float
) -> tuple[set[PidAndStart], set[PidAndStart]]:
    """Call `end_once` in rounds until `CLEAN_ROUNDS` consecutive rounds find no process.

    Args:
        end_once: Sends SIGKILL once to all matching processes, and returns their identities.
        within_s: Time limit in seconds.

    Returns:
        `(ended, remaining)`: the ended processes and the remaining processes.
    """
    killed: set[PidAndStart] = set()
    left: set[PidAndStart] = set()
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
        # A process could not be killed, or the time limit was reached. In both cases, new processes
        # may still appear. So call `end_once` a last time, and report the processes that it finds
        # as remaining, even if they end a moment later.
        left = end_once()
    left |= {process for process in killed if not _is_gone(*process)}
    return killed - left, left


def end_orphans(*, chases: bool = True) -> list[int]:
    """Send SIGKILL once to all orphans: the descendants of dead guardian processes.

    The calling process must be a subreaper, so that the kernel makes it the parent of the orphans.
    Processes that the calling process has started itself get no signal, and neither do their
    descendants.

    Args:
        chases: False to skip the search for new processes, see `tree.kill_once`.

    Returns:
        Pids of the orphans that are now children of the calling process, including zombies, in
        ascending order.
    """
    orphan_pids: set[int] = set()
    own_mark = read_mark(os.getpid())

    def is_orphan(child: int) -> bool:
        return child not in guardians and read_mark(child) not in (own_mark, None, *kept_marks)

    def reap() -> bool:
        orphans = [child for child in children(os.getpid()) if is_orphan(child)]
        orphan_pids.update(orphans)
        for child in orphans:
            with suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        return not orphans

    with guardians_lock:
        if not reap():
            kill_below_once(reap, is_orphan, chases=chases)
    return sorted(orphan_pids)


def end_marked(mark: int) -> set[PidAndStart]:
    """Send SIGKILL once to all processes of this machine that are marked with a number.

    Processes that cannot belong to a run of this user get no signal (see `can_be_of_own_run`).

    Args:
        mark: Number that `tree.mark_own` has set. With 0, no process gets a signal.

    Returns:
        The processes that were alive.
    """
    if not mark:
        return set()
    return _end_matching(lambda pid: read_mark(pid) == mark and can_be_of_own_run(pid))


def can_be_of_own_run(pid: int) -> bool:
    """Return True if a run of this user may have started the process.

    Any user can copy the mark that `tree.mark_own` gives the processes of a run. So the process
    must also belong to this user. There are two exceptions:

    - A run of root may have processes of other users. Such a process must have a file in
      MUSTER_HOME open for writing, for example a log. The process can only have inherited this open
      file from a run.
    - A run of an ordinary user may have processes of root, which `sudo` has started. The kernel
      does not allow this user to signal them, so they are only reported.
    """
    if belongs_to_own_user(pid):
        return True
    if os.getuid() == 0:
        return _writes_below(pid, muster_home())
    return read_real_user(pid) == 0


def _writes_below(pid: int, directory: Path) -> bool:
    """Return True if the process has a file in the directory open for writing."""
    for fd, target in list_open_files(pid).items():
        if Path(target).is_relative_to(directory):
            with suppress(OSError):
                flags = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().partition("flags:")[2]
                if int(flags.split()[0], 8) & os.O_ACCMODE != os.O_RDONLY:
                    return True
    return False


def end_carriers(wanted: Mapping[str, str]) -> dict[str, Any]:
    """Kill every process of this user that was started with certain environment variables.

    SIGKILL is sent repeatedly, until no such process is found. The calling process and its
    ancestors get no signal. The call is idempotent, and several calls may run at the same time.

    Args:
        wanted: Names and values of the environment variables, at least one. A process must have
            been started with all of them.

    Returns:
        `{"machine": machine(), "killed": [...], "left": [...]}`: the ended processes, and the
        processes that survived SIGKILL. The latter include descendants of the ended processes that
        this user may not signal. Each is a dictionary with the pid, the start time in clock ticks
        ("start") and the command line ("command").
    """
    spared = _self_and_ancestors()
    commands: dict[int, str] = {}
    refusing: set[PidAndStart] = set()

    def read_command(pid: int) -> str:
        return " ".join(read_command_line(pid).split())[:_SHOWN_CHARACTERS]

    def note_carrier(pid: int) -> None:
        """Store the command lines of a matching process and of its unkillable descendants.

        An unkillable descendant is a process that this user may not signal. Call this function
        before the matching process is killed: afterwards, its descendants cannot be found, because
        they get another parent.
        """
        commands[pid] = read_command(pid)
        for child in descendants(pid):
            if child not in spared and refuses_signals(child):
                refusing.add((child, start_ticks(child)))
                user = read_real_user(child)
                commands[child] = (
                    f"{read_command(child)} (the process belongs to user {user}, so Muster may not "
                    "send signals to it: EPERM)"
                )

    def is_carrier(pid: int) -> bool:
        if pid in spared or not was_started_with(pid, wanted):
            return False
        if pid not in commands:
            note_carrier(pid)
        return True

    ended, left = end_all(lambda: _end_matching(is_carrier), _SWEPT_WITHIN_S)
    left |= {process for process in refusing if not _is_gone(*process)}

    def describe(processes: set[PidAndStart]) -> list[dict[str, Any]]:
        return [
            {"pid": pid, "start": start, "command": commands[pid]}
            for pid, start in sorted(processes)
        ]

    return {"machine": machine(), "killed": describe(ended), "left": describe(left)}


def find_carriers(wanted: Mapping[str, str]) -> list[int]:
    """Return the living processes of this user that were started with certain variables.

    The calling process and its ancestors are left out.

    Args:
        wanted: Names and values of the environment variables, at least one. A process must have
            been started with all of them.

    Returns:
        The pids, in ascending order.

    Raises:
        OSError: The processes cannot be listed, for example because this process has too many open
            files.
    """
    spared = _self_and_ancestors()
    return [
        pid
        for pid in sorted(all_pids())
        if pid not in spared and was_started_with(pid, wanted) and not is_zombie(pid)
    ]


def _end_matching(is_meant: Callable[[int], bool]) -> set[PidAndStart]:
    """Send SIGKILL once to every living process for whose pid `is_meant` returns True.

    Returns:
        The processes that were found.
    """
    known: set[PidAndStart] = set()

    def send(pid: int, start: int, signum: int) -> bool:
        # A process of another user gets no signal. `_end_matching` returns this process anyway, so
        # the caller reports the process as remaining.
        with suppress(PermissionError):
            return signal_if(pid, signum, lambda: start_ticks(pid) == start)
        return False

    def start_if_meant(pid: int) -> int:
        """Return the start time, in clock ticks since boot, of a process that must get SIGKILL.

        Returns 0 if `is_meant` returns False for the process, or if the process has ended.
        """
        if not is_meant(pid):
            return 0
        start = start_ticks(pid)
        # Call `is_meant` a second time. After the first call, the kernel may have given the pid to
        # a new process. Then `start` is the start time of the new process.
        return start if is_meant(pid) and not is_zombie(pid) else 0

    def send_all(signum: int) -> list[int]:
        known.update((pid, start) for pid in all_pids() if (start := start_if_meant(pid)))
        # Also signal all processes that earlier calls have found. Such a process may meanwhile have
        # executed another program without the variables by which `is_meant` recognizes it.
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


def was_started_with(pid: int, wanted: Mapping[str, str]) -> bool:
    """Return True if a process is of this user and was started with these environment variables.

    Args:
        pid: The process.
        wanted: Names and values of the environment variables.
    """
    with suppress(PermissionError):
        if not belongs_to_own_user(pid):
            return False
        variables = read_environment(pid)
        return all(variables.get(name) == value for name, value in wanted.items())
    return False


def _self_and_ancestors() -> set[int]:
    pids = set()
    pid = os.getpid()
    while pid and pid not in pids:
        pids.add(pid)
        pid = read_parent(pid)
    return pids


def _are_gone(processes: Iterable[PidAndStart], deadline: float) -> bool:
    """Wait until all processes have ended.

    The wait ends after `KILLED_WITHIN_S` seconds or at the deadline, whichever comes first.

    Args:
        processes: The processes.
        deadline: The deadline, in CLOCK_MONOTONIC seconds.

    Returns:
        False if a process still exists at the end of the wait.
    """
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
    """The processes of this machine that were started with a certain environment variable."""

    #: `pids[value]`: pids of this user's processes that have this value of the environment
    #: variable.
    pids: Mapping[str, tuple[int, ...]]
    #: `hidden[pid]`: command line of each process that belongs to another user, or whose
    #: environment variables cannot be read.
    hidden: Mapping[int, str]


def find_holders(variable: str, proc: str = "/proc") -> Holders:
    """Return the processes of this machine that were started with an environment variable.

    A variable that a process has set or removed after its start is not noticed.

    Args:
        variable: Name of the environment variable.
        proc: Directory of the proc file system.
    """
    pids_by_value: dict[str, tuple[int, ...]] = {}
    hidden: dict[int, str] = {}
    for pid in all_pids(proc):
        try:
            value = read_environment(pid, proc).get(variable)
            is_own = belongs_to_own_user(pid, proc)
        except PermissionError:
            is_own = False
        if not is_own:
            if command := read_command_line(pid, proc):
                hidden[pid] = command
            continue
        if value is not None:
            pids_by_value[value] = (*pids_by_value.get(value, ()), pid)
    return Holders(pids=pids_by_value, hidden=hidden)
