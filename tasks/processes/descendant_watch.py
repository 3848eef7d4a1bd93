"""Watch the processes of a component, and explain why one of them was killed.

The guardian reads the exit status of a component's first process only. A parent reads the exit
status of its own children and may print nothing about them, as `multiprocessing` does. This module
watches the descendants through pidfds, so that the first worker process that dies can be named. It
also compares the counters of the kernel's OOM killer at the start and at the end of the component.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tasks.processes import oom_killer, tree
from tasks.processes.child_watch import read_exit
from tasks.processes.guarded import GuardedProcess
from tasks.processes.hang_report import call_with_time_limit
from tasks.processes.identity import ProcessId
from tasks.processes.oom_killer import LoggedKill, MemoryGroup
from tasks.record.outcome import Exit
from tasks.record.ranks import RankFailure

#: Seconds from the start of the component to the first search for its descendants.
_FIRST_SEARCH_S = 0.1
#: Pause between two searches for descendants, as a share of the time since the component's start.
_PAUSE_PART = 0.05
#: Smallest pause between two searches for descendants, in seconds.
_PAUSE_AT_LEAST_S = 0.25
#: Largest pause between two searches for descendants, in seconds. Only the pause after a slow
#: search may exceed this limit, see `_PAUSE_PER_SEARCH`.
_PAUSE_AT_MOST_S = 5.0
#: Smallest pause after a search, as a multiple of the duration of the search.
_PAUSE_PER_SEARCH = 50.0
#: Time limit in seconds for a search for descendants. If a process is stuck in the kernel, reading
#: its files in /proc can block.
_SEARCH_WITHIN_S = 10.0
#: Largest number of descendants that are watched at the same time. Muster keeps a file descriptor
#: open for each watched descendant.
_WATCHED_AT_MOST = 512
#: The death of a descendant, or a kill by the OOM killer, may be the cause of the component's end
#: if it happened at most this number of seconds before the end.
_CAUSE_WITHIN_S = 30.0
#: Names of shells. A subshell has the command line of its shell, but is no worker of a training.
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ash", "ksh"})
#: Largest number of characters of a command line that a message shows.
_SHOWN_CHARACTERS = 120
#: Names of the signals that launchers and terminals use to stop a process. The death of a process
#: by such a signal is the consequence of another event.
_STOP_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGPIPE"})
#: Matches a number in a command line, such as the rank in `--local_rank=1`.
_NUMBER = re.compile(r"\d+")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathEvidence:
    """Facts that the kernel knows about the deaths of a component's processes."""

    #: Clause about the kill by the kernel's OOM killer, with the memory limit. Empty if the OOM
    #: killer has killed no process of the component shortly before the component's end.
    oom_kill: str = ""
    #: True if the limit `memory_gib` of the component caused the kill by the OOM killer.
    reached_own_limit: bool = False
    #: Sentence with the evidence that the OOM killer did not send SIGKILL. Empty without evidence.
    no_oom_kill: str = ""
    #: The descendant that died first, shortly before the end of the component. None if unknown.
    first_death: RankFailure | None = None
    #: The rank that ended with exit code 0, or by a signal such as SIGTERM, before another rank
    #: failed. None if there is none.
    early_end: RankFailure | None = None
    #: Traceback of the rank that failed first, from the file that torchrun writes. Empty if the
    #: file does not exist.
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OomReason:
    """The memory limit that caused a kill by the kernel's OOM killer."""

    #: Clause about the limit, or about the kill with its limit.
    clause: str
    #: True if the limit is the key `memory_gib` of the component.
    is_own_limit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """Facts about a process of the component, as a search of /proc found them."""

    id: ProcessId
    #: Pid of the parent process.
    parent: int
    command: str
    #: Number of the rank to which the process belongs; None if it belongs to no rank of a training.
    rank: int | None
    #: True if the process is the rank itself, and not a child process of the rank, such as a worker
    #: of a data loader. A process without the variable RANK counts as a rank if its parent has
    #: several Python child processes whose commands are equal, or differ only in numbers such as
    #: the 1 in `--local_rank=1`.
    is_rank_itself: bool
    #: True if the process works for its parent. This is assumed in any of these cases:
    #:
    #: - The process has the environment variable RANK.
    #: - The process was started by `multiprocessing`.
    #: - The process is a fork that executes the program of its parent, and is no shell.
    #: - The parent has several Python child processes whose commands are equal to the command of
    #:   this process, or differ from it only in numbers.
    is_worker: bool
    #: Position of the process, from 0, in the list of its parent's workers that have the same
    #: command. The list is sorted by start time. Numbers in the commands are not compared.
    number: int
    #: Number of the parent's workers that have the same command as this process. This process is
    #: counted, too. Numbers in the commands are not compared.
    peers: int
    memory_bytes: int
    #: Directories of the memory cgroups of the process, the innermost first.
    memory_groups: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _DescendantDeath:
    """Death of one descendant of the component's first process."""

    process: _Process
    exit: Exit
    #: Pids of the other watched descendants that were alive when this descendant died.
    survivors: frozenset[int]


@dataclass(slots=True)
class DescendantWatch:
    """Watches the processes of one component, from its start to the end of its first process.

    Start `watch` as a task when the component runs, and call `note_end` when its first process has
    ended.
    """

    process: GuardedProcess
    _began_monotonic_s: float = field(default_factory=time.monotonic)
    #: Number of processes that the OOM killer killed on this machine before the start of the
    #: component. None if unknown.
    _machine_kills: int | None = field(default_factory=oom_killer.count_kills_of_machine)
    #: Mapping from the directory of a memory cgroup to the last recorded state of the cgroup. The
    #: state is recorded when the cgroup is found, and again after the OOM killer has killed a
    #: process in the cgroup.
    _groups: dict[Path, MemoryGroup] = field(default_factory=dict)
    #: Mapping from the directory of a memory cgroup to the time of its latest kill, in
    #: CLOCK_MONOTONIC seconds.
    _kill_times: dict[Path, float] = field(default_factory=dict)
    #: Dict that is used as an ordered set: all its values are None. Each key is a tuple of paths: a
    #: memory cgroup that contains a process of the component, followed by its parent cgroups.
    _chains: dict[tuple[Path, ...], None] = field(default_factory=dict)
    #: Mapping from the pid of each watched descendant to its pidfd and its description.
    _watched: dict[int, tuple[int, _Process]] = field(default_factory=dict)
    #: Mapping from pid to description, for all processes of the component that `watch` has found so
    #: far.
    _known: dict[int, _Process] = field(default_factory=dict)
    #: Deaths of descendants, oldest first.
    _deaths: list[_DescendantDeath] = field(default_factory=list)
    _largest: _Process | None = None
    _is_over: bool = False

    def __post_init__(self) -> None:
        # The component inherits the memory cgroup of this process. Record the state of this cgroup
        # before the start, so that all kills during the component's life are noticed.
        self._follow_groups(_read_memory_groups("self", _read_mounts()))

    async def watch(self) -> None:
        """Search for new descendants repeatedly, with growing pauses, until cancelled."""
        # Record the state of the component's cgroup now. The component may reach the memory limit
        # of the cgroup before the first search for descendants.
        self._follow_groups(_read_memory_groups(str(self.process.pid), _read_mounts()))
        await asyncio.sleep(_FIRST_SEARCH_S)
        while not self._is_over:
            began = time.monotonic()
            no_process: list[_Process] = []
            processes = await call_with_time_limit(
                _SEARCH_WITHIN_S,
                self._search,
                no_process,
                "the search for new processes of a component",
            )
            took_s = time.monotonic() - began
            if not self._is_over:
                for process in processes:
                    self._note_process(process)
                self._read_groups()
            age_s = time.monotonic() - self._began_monotonic_s
            pause_s = min(max(_PAUSE_AT_LEAST_S, age_s * _PAUSE_PART), _PAUSE_AT_MOST_S)
            await asyncio.sleep(max(pause_s, took_s * _PAUSE_PER_SEARCH))

    def note_end(self) -> None:
        """Record which descendants have died, and end the watch.

        Call it when the component's first process has ended.
        """
        if self._is_over:
            return
        self._is_over = True
        for pid, (pidfd, _) in list(self._watched.items()):
            if tree.is_ready(pidfd, select.POLLIN):
                self._note_death(pid)
        self._read_groups()
        self.close()

    def close(self) -> None:
        """Close the pidfds of all watched descendants."""
        self._is_over = True
        for pid in list(self._watched):
            self._forget(pid)

    def explain(self, exit: Exit) -> DeathEvidence:
        """Return the facts that may explain the end of the component.

        The call blocks for some milliseconds, because it reads the kernel log.

        Args:
            exit: Exit of the component's first process, or exit of another process that the
                component needs.
        """
        oom_kill = self._describe_oom_kill(exit)
        return DeathEvidence(
            oom_kill=oom_kill.clause if oom_kill else "",
            reached_own_limit=oom_kill is not None and oom_kill.is_own_limit,
            no_oom_kill="" if oom_kill else self._describe_missing_oom_kill(),
            first_death=self._find_first_death(exit),
            early_end=self._find_early_end(),
        )

    def _search(self) -> list[_Process]:
        """Return a description of each process that the component has now."""
        return [*_describe_processes(self.process.processes())]

    def _note_process(self, process: _Process) -> None:
        pid = process.id.pid
        known = self._known.get(pid)
        if known is not None and known.id == process.id:
            if known.parent != process.parent:
                # The process has a new parent, because its former parent has ended. Keep the
                # earlier description, which was derived from the former parent.
                return
            if known.peers > process.peers:
                # Other workers of the same parent have ended. Keep the values of these four fields
                # from an earlier search, which found more of the workers.
                process = replace(
                    process,
                    is_rank_itself=known.is_rank_itself,
                    is_worker=known.is_worker,
                    number=known.number,
                    peers=known.peers,
                )
        self._known[pid] = process
        self._follow_groups(process.memory_groups)
        if self._largest is None or process.memory_bytes > self._largest.memory_bytes:
            self._largest = process
        if pid == self.process.pid:
            return
        if pid in self._watched:
            # The process may have executed another program since the last search. For example, a
            # forked process executes its program a moment later. So replace the description of the
            # process.
            pidfd, watched = self._watched[pid]
            if watched.id == process.id:
                self._watched[pid] = (pidfd, process)
            return
        if len(self._watched) >= _WATCHED_AT_MOST:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            # The process has ended, or no file descriptor is free. In both cases, do not watch the
            # process.
            return
        if tree.start_ticks(pid) != process.id.start_ticks:
            os.close(pidfd)
            return
        self._watched[pid] = (pidfd, process)
        asyncio.get_running_loop().add_reader(pidfd, self._note_death, pid)

    def _note_death(self, pid: int) -> None:
        pidfd, process = self._watched[pid]
        exit = read_exit(pidfd, process.id)
        self._forget(pid)
        survivors = frozenset(self._watched)
        self._deaths.append(_DescendantDeath(process=process, exit=exit, survivors=survivors))

    def _forget(self, pid: int) -> None:
        pidfd, _ = self._watched.pop(pid)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)

    def _follow_groups(self, chain: tuple[Path, ...]) -> None:
        """Record the state of memory cgroups, so that later kills by the OOM killer are noticed.

        A cgroup whose state is already recorded is skipped.

        Args:
            chain: Memory cgroups of a process, the innermost first.
        """
        if chain in self._chains:
            return
        self._chains[chain] = None
        for path in chain:
            if path not in self._groups and (group := oom_killer.read_memory_group(path)):
                self._groups[path] = group

    def _read_groups(self) -> None:
        """Note in which memory cgroups the OOM killer has killed a process since the last call."""
        now = time.monotonic()
        for path, last in self._groups.items():
            kills = oom_killer.count_kills_of_group(path)
            if kills is None or kills <= last.kills:
                continue
            self._kill_times[path] = now
            if group := oom_killer.read_memory_group(path):
                self._groups[path] = group

    def _describe_oom_kill(self, exit: Exit) -> _OomReason | None:
        """Return a clause about the last kill by the OOM killer in this component.

        The result is None if the OOM killer has killed no process of the component.
        """
        # The times in the kernel log can differ slightly from CLOCK_MONOTONIC. So begin the search
        # one second earlier.
        since_s = max(self._began_monotonic_s, exit.at_monotonic_s - _CAUSE_WITHIN_S) - 1.0
        pids = set(self._known) | ({self.process.pid} if self.process.pid is not None else set())
        kernel_log = oom_killer.read_kernel_log()
        logged = oom_killer.find_logged_kills(kernel_log, pids, since_s=since_s)
        if kernel_log and not logged and exit.signal is not None:
            # The kernel log names each process that the OOM killer has killed, and no process of
            # this component is in the log. If the counter of the cgroup shows a kill, the killed
            # process belongs to another component or run in the same cgroup.
            return None
        chain = self._find_chain_with_kill(exit)
        if not logged and chain is None:
            return None
        victim = "a process of the component"
        largest = self._largest
        sizes = [(largest.memory_bytes, largest.command, largest.id.pid)] if largest else []
        if logged:
            kill = logged[-1]
            victim = f"{kill.name} (pid {kill.pid})"
            sizes += [(kill.memory_bytes, kill.name, kill.pid) for kill in logged]
        if logged:
            reason = self._describe_logged_limit(logged[-1], chain or ())
        else:
            reason = self._describe_reached_limit(chain or ()) or _describe_machine_limit()
        clause = f"the kernel's OOM killer killed {victim}, because {reason.clause}"
        if sizes:
            memory_bytes, command, pid = max(sizes)
            size = _format_memory(memory_bytes)
            clause += (
                f"; the largest process was {command[:_SHOWN_CHARACTERS]} (pid {pid}) with {size}"
            )
        return _OomReason(clause=clause, is_own_limit=reason.is_own_limit)

    def _describe_logged_limit(self, kill: LoggedKill, chain: tuple[Path, ...]) -> _OomReason:
        """Return a clause about the memory limit that caused a kill by the kernel's OOM killer.

        Args:
            kill: The kill, as the kernel log reports it.
            chain: Memory cgroups of the killed process, the innermost first. Empty if unknown.
        """
        if kill.limiting_group is None:
            return _describe_machine_limit()
        if not kill.limiting_group:
            # An old kernel does not write the name of the cgroup into its log. So search the
            # cgroups of the killed process for a cgroup that has reached its memory limit.
            return self._describe_reached_limit(chain) or _OomReason(
                clause="the cgroup of this process reached its memory limit"
            )
        path = oom_killer.find_directory(kill.limiting_group, _read_mounts())
        if path is None:
            return _OomReason(clause=f"cgroup {kill.limiting_group} reached its memory limit")
        group = oom_killer.read_memory_group(path) or self._groups.get(path)
        return self._describe_limit(path, group)

    def _describe_reached_limit(self, chain: tuple[Path, ...]) -> _OomReason | None:
        """Return a clause that names the cgroup whose memory limit was reached, or None.

        If several cgroups reached their limits, the clause names the cgroup with the smallest
        limit.

        Args:
            chain: Directories of a cgroup and of the cgroups that contain it.
        """
        groups = [self._groups[path] for path in chain if path in self._groups]
        limiting = oom_killer.select_reached_limit(groups)
        return self._describe_limit(limiting.path, limiting) if limiting else None

    def _describe_limit(self, path: Path, group: MemoryGroup | None) -> _OomReason:
        """Return a clause about a memory limit that was reached.

        Args:
            path: Directory of the cgroup.
            group: State of the cgroup; None if it is unknown.
        """
        clause = f"cgroup {path} reached its memory limit"
        is_own_limit = str(path) == self.process.memory_cgroup
        if is_own_limit:
            clause = f"{self.process.name} reached its limit `memory_gib`, and {clause}"
        if group is not None and group.limit_bytes is not None:
            clause += f": limit {_format_memory(group.limit_bytes)}"
            if group.peak_bytes is not None:
                clause += f", peak {_format_memory(group.peak_bytes)}"
        return _OomReason(clause=clause, is_own_limit=is_own_limit)

    def _find_chain_with_kill(self, exit: Exit) -> tuple[Path, ...] | None:
        """Find a cgroup with a process that the OOM killer killed shortly before the exit.

        If the cgroup was removed, a kill in its nearest remaining parent cgroup counts, too.

        Args:
            exit: Exit of the component.

        Returns:
            Directories of the cgroup and of its parent cgroups, the innermost first. None if the
            OOM killer killed no process shortly before the exit.
        """
        for chain in reversed(self._chains):
            path = next((path for path in chain if oom_killer.read_memory_group(path)), None)
            if path is None:
                continue
            for candidate in {chain[0], path}:
                killed_at = self._kill_times.get(candidate)
                if killed_at is not None and killed_at >= exit.at_monotonic_s - _CAUSE_WITHIN_S:
                    return chain
        return None

    def _describe_missing_oom_kill(self) -> str:
        now = oom_killer.count_kills_of_machine()
        if now is None or self._machine_kills is None:
            return ""
        if now == self._machine_kills:
            return (
                "The kernel's OOM killer has killed no process of this machine since the component "
                "started."
            )
        if oom_killer.read_kernel_log():
            return (
                "The kernel log (dmesg) does not show that the kernel's OOM killer killed this "
                "process."
            )
        # If the component ended before the first search for its processes, the component's cgroup
        # is unknown. Then Muster cannot say that the OOM killer killed no process in this cgroup.
        is_known = self.process.pid in self._known
        if is_known and self._groups and not self._kill_times:
            return "The kernel's OOM killer has killed no process in the cgroup of the component."
        return ""

    def _find_first_death(self, exit: Exit) -> RankFailure | None:
        """Return the descendant whose death explains the exit of the component, or None."""
        if exit.signal is not None or exit.is_zero:
            return None
        failures = [
            death
            for death in self._deaths
            if death.exit.at_monotonic_s >= exit.at_monotonic_s - _CAUSE_WITHIN_S
            and _is_failure(death.process, death.exit)
        ]
        if not failures:
            return None
        others_failed = any(death.process.is_worker for death in failures[1:])
        return self._make_rank_failure(failures[0], others_failed=others_failed)

    def _find_early_end(self) -> RankFailure | None:
        """Return a rank that ended without an error before another rank failed, or None.

        An end without an error is an end with exit code 0, or by a signal such as SIGTERM. The
        failed rank must still have been alive at that time. If several ranks ended in this way,
        the rank that ended first is returned.
        """
        ranks = [death for death in self._deaths if death.process.is_rank_itself]
        for failed in ranks:
            if not _is_failure(failed.process, failed.exit):
                continue
            for death in ranks[: ranks.index(failed)]:
                is_end = death.exit.is_zero or death.exit.signal is not None
                if is_end and failed.process.id.pid in death.survivors:
                    return self._make_rank_failure(death, others_failed=True)
            return None
        return None

    def _make_rank_failure(self, death: _DescendantDeath, *, others_failed: bool) -> RankFailure:
        """Return the description of a process that ended before the other processes.

        Args:
            death: Death of the process.
            others_failed: True if other processes of the training failed later.
        """
        process = death.process
        parent = self._known.get(process.parent)
        is_child = (
            process.is_worker
            and not process.is_rank_itself
            and parent is not None
            and parent.is_rank_itself
            and _has_same_program(process, parent)
        )
        rank = parent if is_child and parent is not None else process
        if rank.rank is not None:
            name = f"rank {rank.rank}"
        elif rank.peers > 1:
            name = f"worker process {rank.number + 1} of {rank.peers}"
        else:
            name = f"process `{process.command[:_SHOWN_CHARACTERS]}`"
        code = death.exit.exit_code
        return RankFailure(
            name=name,
            child="a child process" if is_child else "",
            rank=rank.rank,
            number=rank.number if rank.peers > 1 else None,
            pid=process.id.pid,
            exit_code=-death.exit.signal if death.exit.signal is not None else code,
            others_failed=others_failed,
        )


def _has_same_program(process: _Process, parent: _Process) -> bool:
    """Return True if a process is a fork of its parent, or was started by `multiprocessing`."""
    return process.command == parent.command or "multiprocessing" in process.command


def _is_failure(process: _Process, death: Exit) -> bool:
    """Return True if the death of a descendant can be the cause of the component's end."""
    is_kill = death.signal is not None and death.signal_name not in _STOP_SIGNALS
    is_error = process.is_worker and death.exit_code not in (None, 0)
    return is_kill or is_error


def _describe_processes(pids: list[int]) -> Iterator[_Process]:
    """Yield a description of each process that still exists."""
    mountinfo = _read_mounts()
    ids: dict[int, ProcessId] = {}
    commands: dict[int, str] = {}
    parents: dict[int, int] = {}
    ranks: dict[int, int | None] = {}
    #: Mapping from a parent and a command to the pids of the parent's children with this command.
    #: Each number in the command is replaced by 0.
    groups: dict[tuple[int, str], list[int]] = {}
    for pid in pids:
        id = ProcessId.of(pid)
        command = tree.read_command_line(pid)
        if not command or not id.start_ticks:
            continue
        ids[pid] = id
        commands[pid] = command
        parents[pid] = tree.read_parent(pid)
        ranks[pid] = _read_rank(pid)
        groups.setdefault((parents[pid], _NUMBER.sub("0", command)), []).append(pid)

    peers: dict[int, list[int]] = {}
    workers: set[int] = set()
    for group in groups.values():
        group.sort(key=lambda pid: (ids[pid].start_ticks, pid))
        for pid in group:
            program = Path(commands[pid].split()[0]).name
            parent_command = commands.get(parents[pid]) or tree.read_command_line(parents[pid])
            is_fork = commands[pid] == parent_command and program not in _SHELLS
            is_of_python = is_fork or program.startswith("python")
            peers[pid] = group if is_of_python else [pid]
            is_multiprocessing = "multiprocessing" in commands[pid]
            if ranks[pid] is not None or is_multiprocessing or is_fork or len(peers[pid]) > 1:
                workers.add(pid)

    for pid, id in ids.items():
        parent = parents[pid]
        rank = ranks[pid]
        if rank is not None:
            is_rank_itself = rank != (ranks[parent] if parent in ranks else _read_rank(parent))
        else:
            is_rank_itself = len(peers[pid]) > 1 and parent not in workers
        memory_bytes = 0
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
            memory_bytes = int(pages) * _PAGE_BYTES
        yield _Process(
            id=id,
            parent=parent,
            command=commands[pid],
            rank=rank,
            is_rank_itself=is_rank_itself,
            is_worker=pid in workers,
            number=peers[pid].index(pid),
            peers=len(peers[pid]),
            memory_bytes=memory_bytes,
            memory_groups=_read_memory_groups(str(pid), mountinfo),
        )


def _read_rank(pid: int) -> int | None:
    """Return the number of the rank to which a process belongs, from its environment, or None."""
    with contextlib.suppress(OSError, ValueError):
        return int(tree.read_environment(pid).get("RANK", ""))
    return None


def _read_mounts() -> str:
    """Return the table of the mounted file systems, or an empty string if it cannot be read."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    return ""


def _read_memory_groups(pid: str, mountinfo: str) -> tuple[Path, ...]:
    """Return the memory cgroups of a process, the innermost first; empty if it has ended."""
    with contextlib.suppress(OSError):
        memberships = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8", errors="replace")
        return oom_killer.find_memory_groups(memberships, mountinfo)
    return ()


def _describe_machine_limit() -> _OomReason:
    total_bytes = _PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")
    memory = _format_memory(total_bytes)
    return _OomReason(clause=f"this machine ran out of memory: it has {memory}")


def _format_memory(count_bytes: int) -> str:
    """Return a number of bytes in MiB or GiB, such as `64 MiB` or `1.5 GiB`."""
    if count_bytes < 1 << 30:
        return f"{count_bytes / (1 << 20):.0f} MiB"
    return f"{count_bytes / (1 << 30):.1f} GiB"
