"""How a process ended that is no child of ours, as far as the kernel tells."""

from __future__ import annotations

import fcntl
import os
import struct
import time

from tasks.processes import tree
from tasks.processes.identity import ProcessId
from tasks.record.outcome import Exit

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
    status = _kept_by_pidfd(pidfd)
    if status is None:
        status = _of_zombie(process)
    if status is None:  # Reaped between the two looks.
        status = _kept_by_pidfd(pidfd)
    if status is None:
        note = "its parent has taken its status, and this kernel does not keep it"
        return Exit(exit_code=None, signal=None, at_monotonic_s=at_monotonic_s, note=note)
    code = os.waitstatus_to_exitcode(status)
    return Exit(
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        at_monotonic_s=at_monotonic_s,
    )


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
    fields: list[bytes] = []
    try:
        with open(f"/proc/{process.pid}/stat", "rb") as f:
            fields = f.read().rpartition(b") ")[2].split()
        os.readlink(f"/proc/{process.pid}/exe")
    except PermissionError:  # Whoever may not look at the program is shown a status of 0.
        return None
    except OSError:  # A zombie has no program any more.
        pass
    if not fields or tree.start_ticks(process.pid) != process.start_ticks:
        return None
    return int(fields[_EXIT_CODE_FIELD]) if fields[0] == b"Z" else None
