"""Watch the processes of a component that must stay alive, and report how one of them ended.

A service may answer its health check although its worker has died. SGLang's HTTP server does so
after an abort in the C++ code of its scheduler. Source: sgl-project/sglang#18421. The worker is not
a child of this process, so its exit status is known only if the kernel reports it.
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

#: Layout of the request and of the answer: mask, cgroup, pid, thread group, parent, four pairs of
#: ids, exit status.
#: Source: linux/pidfd.h, struct pidfd_info in its first size.
_INFO = struct.Struct("=QQ11Ii")
#: _IOWR(0xFF, 11, struct pidfd_info).
_PIDFD_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3
#: Index of the exit status among the fields of /proc/PID/stat after the command. Source:
#: proc_pid_stat(5), 52.
_EXIT_CODE_FIELD = 49


def exit_of(pidfd: int, process: ProcessId) -> Exit:
    """Return how an ended process ended; without exit code and signal if they are unknown."""
    at_monotonic_s = time.monotonic()
    # The process may be reaped between the first two attempts to read its status.
    for status in (_kept_by_pidfd(pidfd), _of_zombie(process), _kept_by_pidfd(pidfd)):
        if status is not None:
            return Exit.from_return_code(os.waitstatus_to_exitcode(status), at_monotonic_s)
    note = "its parent has taken its status, and this kernel does not keep it"
    return Exit.from_return_code(None, at_monotonic_s, note)


def _kept_by_pidfd(pidfd: int) -> int | None:
    """Return the wait status of a reaped process; None for a zombie, and before Linux 6.15."""
    answer = bytearray(_INFO.size)
    _INFO.pack_into(answer, 0, _PIDFD_INFO_EXIT, *[0] * 13)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, answer)
    except OSError:
        return None
    answered, *_, status = _INFO.unpack(answer)
    return status if answered & _PIDFD_INFO_EXIT else None


def _of_zombie(process: ProcessId) -> int | None:
    """Return the wait status of a process that its parent has not reaped; otherwise None."""
    fields = tree.stat_fields(process.pid)
    try:
        os.readlink(f"/proc/{process.pid}/exe")
    except PermissionError:  # Without this permission, the kernel shows a status of 0.
        return None
    except OSError:  # A zombie has no program.
        pass
    if not fields or tree.start_ticks(process.pid) != process.start_ticks:
        return None
    return int(fields[_EXIT_CODE_FIELD]) if fields[0] == b"Z" else None


#: Seconds from fork to exec, during which a process has its parent's command line. Usually this
#: takes milliseconds.
_FORKED_WITHIN_S = 1.0
_SHOWN_CHARACTERS = 200


@dataclass(slots=True)
class ProcessWatch:
    """Watches each process of a tree whose command line matches, through a pidfd.

    A death is noticed within milliseconds. A new process is noticed at the next check.
    """

    #: The component whose processes are watched.
    process: GuardedProcess
    #: Settings: the pattern, the seconds between two checks, and the number of checks without a
    #: match that count as a loss.
    live: LiveProbe
    #: Publishes an event for each process that is watched from now on.
    emit: Emit
    #: Pidfd of each watched process, by its pid.
    _pidfds: dict[int, int] = field(default_factory=dict)

    async def until_lost(self) -> GiveUpReason:
        """Wait for the first loss and return it. Afterwards, also after a cancel, no pidfd is
        open.
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
                        message=f"no process below it matches /{self.live.processes}/",
                    )
                await asyncio.wait([lost], timeout=self.live.every_s)
            return lost.result()
        finally:
            for pid in list(self._pidfds):
                self._forget(pid)

    def _watch_new_processes(self, lost: asyncio.Future[GiveUpReason]) -> bool:
        """Watch new processes that match. Return True if any process matches."""
        is_there = bool(self._pidfds)
        for pid in self.process.processes():
            if pid == self.process.pid or pid in self._pidfds:
                continue
            process = ProcessId.of(pid)
            command = tree.command_of(pid)
            if not command or not re.search(self.live.processes or "", command):
                continue
            is_there = True
            if not _may_become_another(process, command):
                self._watch(process, command, lost)
        return is_there

    def _watch(self, process: ProcessId, command: str, lost: asyncio.Future[GiveUpReason]) -> None:
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return
        if tree.start_ticks(process.pid) != process.start_ticks:
            os.close(pidfd)
            return

        def on_end() -> None:
            exit = exit_of(pidfd, process)
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
        pidfd = self._pidfds.pop(pid)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


def _may_become_another(process: ProcessId, command: str) -> bool:
    """Return True if the process was just forked and may be about to start another program.

    If such a process were watched, the end of a compiler, for example, would be taken for a loss.
    """
    since_boot_s = process.start_ticks / os.sysconf("SC_CLK_TCK")
    is_young = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s < _FORKED_WITHIN_S
    return is_young and command == tree.command_of(tree.parent_of(process.pid))
