"""Send a signal to the processes of a program that handle it, before the program is ended.

Most signals end a process that has no handler for them. So a process without a handler gets no
warning signal. In a tree of processes, only the first process on each branch that handles the
signal gets it. The shell of `sh -c "python train.py"` and the launcher `torchrun` handle no
SIGUSR1, so the Python program and the workers of `torchrun` get the signal. A process below them,
such as a worker of a data loader, gets no signal, although it has inherited their handler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypedDict

from tasks.processes.ending import was_started_with
from tasks.processes.hang_report import handles_signal

# Import the functions and not the module `tree`: Ray sends this code by value, and cannot send a
# whole module.
from tasks.processes.tree import (
    all_pids,
    children,
    is_zombie,
    machine,
    read_parent,
    signal_if,
    start_ticks,
)

#: Pid of a process, and its start time in clock ticks since boot. No two processes of one boot have
#: the same pair.
ProcessKey = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWarning:
    """The signal that warns a component before Muster ends the attempt."""

    #: Number of the signal.
    signum: int
    #: Seconds from the warning to the end of the attempt.
    before_s: float


class WarnedProcesses(TypedDict):
    """Result of `warn_carriers`, as JSON data."""

    #: Text that identifies the machine, see `tree.machine`.
    machine: str
    #: Pid and start time of each process that got the signal. Processes in the argument `skip` of
    #: `warn_carriers` are not included.
    processes: list[list[int]]


def send_warning(
    roots: Iterable[int],
    signum: int,
    *,
    skip: Collection[ProcessKey] = (),
) -> list[ProcessKey]:
    """Search process trees for processes that handle a signal, and send them the signal.

    If a process handles the signal, its descendants get no signal, even if they inherited the
    signal handler.

    Args:
        roots: Pids of the first processes of the trees.
        signum: Number of the signal.
        skip: Processes that do not get the signal, because they got it before. The processes below
            them get no signal either.

    Returns:
        The processes that got the signal now.
    """
    warned: list[ProcessKey] = []
    pending = list(roots)
    seen = set(pending)
    while pending:
        pid = pending.pop()
        start = start_ticks(pid)
        if (pid, start) in skip:
            continue
        if not handles_signal(pid, signum):
            # Visit each pid only once, so that this loop always ends. If the kernel reuses a pid
            # during the loop, a process could otherwise be found again below its own descendants.
            fresh = [child for child in children(pid) if child not in seen]
            seen.update(fresh)
            pending += fresh
            continue
        # Skip a process that cannot be signalled because it has changed its user id, for example by
        # `sudo`.
        with suppress(PermissionError):
            if signal_if(pid, signum, _is_same(pid, start)):
                warned.append((pid, start))
    return warned


def _is_same(pid: int, start: int) -> Callable[[], bool]:
    """Return a function that checks whether a process still has the start time `start`."""
    return lambda: start != 0 and start_ticks(pid) == start


def warn_carriers(
    wanted: Mapping[str, str], signum: int, skip: Mapping[str, list[list[int]]]
) -> WarnedProcesses:
    """Send a signal to local processes that were started with certain environment variables.

    Ray sends this function by value to nodes without Muster. See `send_warning` for the processes
    that get the signal.

    Args:
        wanted: Names and values of the environment variables.
        signum: Number of the signal.
        skip: `skip[machine]`: pid and start time of each process that got the signal before. These
            processes do not get the signal again.
    """
    carriers = {pid for pid in all_pids() if not is_zombie(pid) and was_started_with(pid, wanted)}
    roots = [pid for pid in carriers if read_parent(pid) not in carriers]
    own_machine = machine()
    warned_before = {(pid, start) for pid, start in skip.get(own_machine, [])}
    warned = send_warning(roots, signum, skip=warned_before)
    return {"machine": own_machine, "processes": [[pid, start] for pid, start in warned]}
