"""The watch over processes below a component that must stay alive, and how one of them ended.

A service whose worker has died may go on answering its health check for ever: SGLang's HTTP server
does, when its scheduler was ended by an abort in C++. Source: sgl-project/sglang#18421. How such a
process ended, which is no child of ours, is told as far as the kernel tells.
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

#: What is asked and answered, cgroup, pid, thread group, parent, four pairs of ids, exit status.
#: Source: linux/pidfd.h, struct pidfd_info in its first size.
_INFO = struct.Struct("=QQ11Ii")
#: _IOWR(0xFF, 11, struct pidfd_info).
_PIDFD_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3
#: Where the exit status stands in /proc/PID/stat behind the command. Source: proc_pid_stat(5), 52.
_EXIT_CODE_FIELD = 49


def exit_of(pidfd: int, process: ProcessId) -> Exit:
    """How a process ended whose pidfd says that it has; without code and signal if nobody knows."""
    at_monotonic_s = time.monotonic()
    # It may be reaped between the first two looks.
    for status in (_kept_by_pidfd(pidfd), _of_zombie(process), _kept_by_pidfd(pidfd)):
        if status is not None:
            return Exit.from_return_code(os.waitstatus_to_exitcode(status), at_monotonic_s)
    note = "its parent has taken its status, and this kernel does not keep it"
    return Exit.from_return_code(None, at_monotonic_s, note)


def _kept_by_pidfd(pidfd: int) -> int | None:
    """The wait status of a process that was reaped; None for a zombie, and before Linux 6.15."""
    answer = bytearray(_INFO.size)
    _INFO.pack_into(answer, 0, _PIDFD_INFO_EXIT, *[0] * 13)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, answer)
    except OSError:
        return None
    answered, *_, status = _INFO.unpack(answer)
    return status if answered & _PIDFD_INFO_EXIT else None


def _of_zombie(process: ProcessId) -> int | None:
    """The wait status of a process that its parent has not reaped; None where it has."""
    fields = tree.stat_fields(process.pid)
    try:
        os.readlink(f"/proc/{process.pid}/exe")
    except PermissionError:  # Whoever may not look at the program is shown a status of 0.
        return None
    except OSError:  # A zombie has no program any more.
        pass
    if not fields or tree.start_ticks(process.pid) != process.start_ticks:
        return None
    return int(fields[_EXIT_CODE_FIELD]) if fields[0] == b"Z" else None


#: Between fork and exec a process has its parent's command line; it takes milliseconds.
_FORKED_WITHIN_S = 1.0
_SHOWN_CHARACTERS = 200


@dataclass(slots=True)
class ProcessWatch:
    """Watches each process of a tree whose command line matches, through a pidfd.

    A death is known in milliseconds; that a new process has come, at the next look.
    """

    #: What they are below.
    process: GuardedProcess
    #: With the pattern, the pause between two looks, and after how many looks without a match they
    #: count as lost.
    live: LiveProbe
    #: Says of each process that it is watched from now on.
    emit: Emit
    #: `pidfds[pid]` of what is watched.
    _pidfds: dict[int, int] = field(default_factory=dict)

    async def until_lost(self) -> GiveUpReason:
        """The first loss. A cancel ends the watch; no pidfd is left open then, nor at a loss."""
        lost: asyncio.Future[GiveUpReason] = asyncio.get_running_loop().create_future()
        misses = 0
        try:
            while not lost.done():
                misses = 0 if self._look(lost) else misses + 1
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

    def _look(self, lost: asyncio.Future[GiveUpReason]) -> bool:
        """Watch what is new; whether any process matches."""
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
                what = f"process {process.pid} ({command[:_SHOWN_CHARACTERS]})"
                message = f"lost its {what}: {exit}"
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
    """It was forked a moment ago, and may be about to start a program: a compiler, for example.

    To watch it would be to take the end of that program for a loss.
    """
    since_boot_s = process.start_ticks / os.sysconf("SC_CLK_TCK")
    is_young = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s < _FORKED_WITHIN_S
    return is_young and command == tree.command_of(tree.parent_of(process.pid))
