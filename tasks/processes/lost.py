"""Finishing what a killed run has left on this machine, from its registry."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.processes import cgroup, tree
from tasks.processes.ending import CLEAN_ROUNDS, ROUND_S, end_marked
from tasks.processes.registry import Entry, LostRun
from tasks.processes.shared_memory import DIRECTORY, remove_unused

#: SIGKILL needs no longer than this, but for a process in uninterruptible sleep.
_KILL_WITHIN_S = 5.0
#: A guardian that has lost its supervisor needs no longer than its grace period and this.
_GUARDIAN_MARGIN_S = 10.0
#: How directories of ours are called; nothing else is removed, whatever a registry says.
_PREFIX = "muster-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """What finishing a lost run came to."""

    #: Pids that were ended.
    killed: tuple[int, ...]
    #: `left[component] -> pids` that outlived SIGKILL.
    left: Mapping[str, tuple[int, ...]]
    #: `waiting[component] -> pid` of a guardian that is still within the grace period.
    waiting: Mapping[str, int]
    #: Files, directories and cgroups.
    removed: tuple[Path, ...]

    @property
    def is_clean(self) -> bool:
        """Nothing is left, and nobody waited for."""
        return not self.left and not self.waiting


def finish(lost: LostRun) -> Remains:
    """End what a lost run has left, and remove what must not outlive it; any number of times.

    A guardian that lives takes its component down by itself, with the grace period that it is due:
    it is left to do so, until it has had the time. No process is touched that is not of the run:
    each is told by its mark or by pid, start and boot, looked at once a pidfd pins it.
    """
    killed: set[int] = set()
    left: dict[str, tuple[int, ...]] = {}
    waiting: dict[str, int] = {}
    removed: list[Path] = []
    for entry in reversed(lost.entries) if lost.is_of_this_boot else ():
        if entry.guardian.is_alive() and lost.seconds_lost() <= entry.grace_s + _GUARDIAN_MARGIN_S:
            waiting[entry.component] = entry.guardian.pid
            continue
        ended, remaining = _end(entry)
        killed |= ended
        if remaining:
            left[entry.component] = remaining
        elif entry.cgroup and entry.cgroup.exists() and cgroup.remove(str(entry.cgroup)):
            removed.append(entry.cgroup)
    if not left and not waiting:
        segments = [path for path in lost.owner.leftovers if path.parent == DIRECTORY]
        removed += remove_unused(segments)
        removed += [path for path in lost.owner.leftovers if _remove_directory(path)]
    return Remains(killed=tuple(sorted(killed)), left=left, waiting=waiting, removed=tuple(removed))


def _end(entry: Entry) -> tuple[set[int], tuple[int, ...]]:
    """SIGKILL all of a component.

    Returns: the pids that were ended, and those that could not be.
    """
    found: set[int] = set()
    deadline = time.monotonic() + _KILL_WITHIN_S
    clean_rounds = 0
    while clean_rounds < CLEAN_ROUNDS:
        alive = _end_once(entry)
        found |= alive
        clean_rounds = 0 if alive else clean_rounds + 1
        if alive and time.monotonic() > deadline:
            return found - alive, tuple(sorted(alive))
        if alive or clean_rounds < CLEAN_ROUNDS:
            time.sleep(ROUND_S)
    return found, ()


def _end_once(entry: Entry) -> set[int]:
    """One round; the pids that were there to be ended."""
    found = set(end_marked(entry.mark))
    if entry.cgroup is not None and not cgroup.is_empty(str(entry.cgroup)):
        with suppress(OSError):
            found |= cgroup.pids(str(entry.cgroup))
            cgroup.kill(str(entry.cgroup))
    # Without a mark, at least what is known by name, with what is below it now.
    for process in (entry.guardian, entry.process):
        below = [(pid, tree.parent_of(pid)) for pid in tree.descendants(process.pid)]
        if process.send(signal.SIGKILL):
            found.add(process.pid)
            for pid, parent in below:
                with suppress(PermissionError):
                    if tree.signal_process(pid, signal.SIGKILL, parent=parent):
                        found.add(pid)
    return found


def _remove_directory(path: Path) -> bool:
    """Whether it was there, was ours, and is gone now."""
    with suppress(OSError):
        if path.name.startswith(_PREFIX) and path.lstat().st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)
            return not path.exists()
    return False
