"""Watch the worker processes of a component that must stay alive, and report how one ended.

A component may answer its health check although one of its workers has died. For example, SGLang's
HTTP server still answers after its scheduler process has aborted in C++ code. Source:
sgl-project/sglang#18421. A worker is not a child of Muster's process, so waitpid(2)
cannot read its exit status. This module reads it from a pidfd or from /proc.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import struct
import time
from dataclasses import dataclass, field

from tasks.processes import tree
from tasks.processes.guarded import GuardedProcess
from tasks.processes.identity import ProcessId
from tasks.record.events import Emit
from tasks.record.outcome import Exit, GiveUpReason
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.probes import LiveProbe

#: Layout of the argument of the ioctl PIDFD_GET_INFO: mask, cgroup, pid, thread group, parent, four
#: pairs of user and group ids, exit status.
#: Source: linux/pidfd.h, the first version of struct pidfd_info.
_INFO = struct.Struct("=QQ11Ii")
#: Number of the ioctl that reads facts about the process of a pidfd.
#: Source: linux/pidfd.h, _IOWR(0xFF, 11, struct pidfd_info).
_PIDFD_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
#: Bit in the mask of PIDFD_GET_INFO that stands for the exit status. Muster sets the bit to ask for
#: the exit status. The kernel sets the bit if its answer contains the exit status.
_PIDFD_INFO_EXIT = 1 << 3
#: Index of the exit status in the list that `tree.stat_fields` returns.
#: Source: proc_pid_stat(5), field 52.
_EXIT_CODE_FIELD = 49


def read_exit(pidfd: int, process: ProcessId) -> Exit:
    """Return the exit of a process that has ended.

    Args:
        pidfd: Pidfd of the process.
        process: Identity of the process.

    Returns:
        The exit with the current time. The exit code and the signal are None if unknown.
    """
    at_monotonic_s = time.monotonic()
    # While the process is a zombie, /proc shows the exit status. After the parent has reaped the
    # process, only the pidfd has the status. The parent may reap the process between the first two
    # reads, so read the pidfd a second time.
    for status in (
        _read_status_of_pidfd(pidfd),
        _read_status_of_zombie(process),
        _read_status_of_pidfd(pidfd),
    ):
        if status is not None:
            return Exit.from_return_code(os.waitstatus_to_exitcode(status), at_monotonic_s)
    note = (
        "the exit status is unknown, because the parent process has already read the status, and "
        "this kernel keeps no copy"
    )
    return Exit.from_return_code(None, at_monotonic_s, note)


def _read_status_of_pidfd(pidfd: int) -> int | None:
    """Return the wait status of a process from its pidfd.

    Returns:
        None if the parent has not reaped the process yet, or if the kernel is older than 6.15.
    """
    answer = bytearray(_INFO.size)
    _INFO.pack_into(answer, 0, _PIDFD_INFO_EXIT, *[0] * 13)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, answer)
    except OSError:
        return None
    answered, *_, status = _INFO.unpack(answer)
    return status if answered & _PIDFD_INFO_EXIT else None


def _read_status_of_zombie(process: ProcessId) -> int | None:
    """Return the wait status of a process that has ended and was not reaped by its parent.

    Returns:
        None if the process runs, was reaped, or belongs to another user.
    """
    fields = tree.stat_fields(process.pid)
    try:
        os.readlink(f"/proc/{process.pid}/exe")
    except PermissionError:
        # This user may not examine the process. /proc/PID/stat then always shows the exit status 0,
        # so the real exit status is unknown.
        return None
    except OSError:
        # The link `exe` cannot be read because the process is a zombie, which has no program. The
        # error is no PermissionError, so this user may examine the process. /proc/PID/stat then
        # shows the true exit status.
        pass
    if not fields or tree.start_ticks(process.pid) != process.start_ticks:
        return None
    return int(fields[_EXIT_CODE_FIELD]) if fields[0] == b"Z" else None


#: Longest time in seconds between the fork of a process and the execution of its program. During
#: this time, the process has the command line of its parent, and is not watched yet.
_FORKED_WITHIN_S = 1.0
#: Largest number of characters of a command line that a message shows.
_SHOWN_CHARACTERS = 200


@dataclass(slots=True)
class ProcessWatch:
    """Watches the processes of a component whose command lines match a pattern.

    Each process is watched through a pidfd, so its death is noticed within milliseconds. A search
    for new processes is repeated at intervals.
    """

    #: The component whose processes are watched.
    process: GuardedProcess
    #: The liveness probe of the component. It contains the pattern for command lines, the seconds
    #: between two searches for matching processes, and the number of consecutive searches without a
    #: match after which the processes count as lost.
    live: LiveProbe
    #: Publishes the event `process.watched` for each process that is watched from now on.
    emit: Emit
    #: Mapping from the pid of each watched process to its pidfd.
    _pidfds: dict[int, int] = field(default_factory=dict)

    async def until_lost(self) -> GiveUpReason:
        """Wait until a watched process ends or no process matches the pattern.

        When the coroutine ends or is cancelled, all pidfds are closed.

        Returns:
            A description of the ended process, or of the pattern that no process matches.
        """
        lost: asyncio.Future[GiveUpReason] = asyncio.get_running_loop().create_future()
        misses = 0
        try:
            while not lost.done():
                misses = 0 if self._watch_new_processes(lost) else misses + 1
                if misses >= self.live.misses:
                    return GiveUpReason(
                        kind=FailureKind.STALLED,
                        rule="process-missing",
                        message=f"none of its processes matches /{self.live.processes}/, the "
                        "pattern `live.processes` in the spec",
                    )
                await asyncio.wait([lost], timeout=self.live.every_s)
            return lost.result()
        finally:
            for pid in list(self._pidfds):
                self._forget(pid)

    def _watch_new_processes(self, lost: asyncio.Future[GiveUpReason]) -> bool:
        """Find new processes of the component that match the pattern, and watch them.

        Args:
            lost: Future that receives the description of a watched process when that process ends.

        Returns:
            True if at least one process of the component matches the pattern.
        """
        is_there = bool(self._pidfds)
        for pid in self.process.processes():
            if pid == self.process.pid or pid in self._pidfds:
                continue
            process = ProcessId.of(pid)
            command = tree.read_command_line(pid)
            if not command or not re.search(self.live.processes or "", command):
                continue
            is_there = True
            if not _may_execute_another_program(process, command):
                self._watch(process, command, lost)
        return is_there

    def _watch(self, process: ProcessId, command: str, lost: asyncio.Future[GiveUpReason]) -> None:
        """Watch one process, unless it has ended already.

        When the process ends, the future `lost` receives a description of the end.
        """
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return
        if tree.start_ticks(process.pid) != process.start_ticks:
            os.close(pidfd)
            return

        def on_end() -> None:
            exit = read_exit(pidfd, process)
            self._forget(process.pid)
            if not lost.done():
                lost_process = f"process {process.pid} ({command[:_SHOWN_CHARACTERS]})"
                message = f"lost its {lost_process}: {exit}"
                loss = GiveUpReason(kind=None, rule="process-died", message=message, exit=exit)
                lost.set_result(loss)

        self._pidfds[process.pid] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, on_end)
        name = self.process.name
        self.emit("process.watched", name, pid=process.pid, command=command)

    def _forget(self, pid: int) -> None:
        """Stop watching a process, and close its pidfd."""
        pidfd = self._pidfds.pop(pid)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


def _may_execute_another_program(process: ProcessId, command: str) -> bool:
    """Return True if a process was just forked and may soon execute another program.

    A process that was just forked still has the command line of its parent, so it matches the
    pattern of `ProcessWatch` if the parent matches. Such a process must not be watched yet. For
    example, it may soon execute a compiler, and the end of a compiler is no failure of the
    component.

    Args:
        process: The process.
        command: The current command line of the process.
    """
    since_boot_s = process.start_ticks / os.sysconf("SC_CLK_TCK")
    is_young = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s < _FORKED_WITHIN_S
    return is_young and command == tree.read_command_line(tree.read_parent(process.pid))
