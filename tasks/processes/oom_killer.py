"""Read which processes the kernel's OOM killer has killed, and for which memory limit.

The kernel counts these kills for each memory cgroup and for the whole machine. The counters do not
depend on the log of the killed program, which cannot write a message after SIGKILL. Where the
kernel log is readable, it also names each killed process.

The files of a memory cgroup differ between the versions of cgroups. On a hybrid machine, both
versions are mounted, and the memory controller usually belongs to version 1.
"""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: A memory limit above this number of bytes means that there is no limit. Version 1 of cgroups
#: reports the largest multiple of the page size below 2**63 for "no limit".
_NO_LIMIT_BYTES = 1 << 60
#: Share of a memory limit at which the limit counts as reached. The kernel charges memory in
#: batches, so the peak can be slightly below the limit.
_REACHED_PART = 0.9
#: Name of the first PID namespace of a machine. The kernel log uses the pids of this namespace.
#: Source: include/linux/proc_ns.h, PROC_PID_INIT_INO.
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
#: Matches two kinds of entries in the kernel log. The entry before a kill names the cgroup with the
#: memory limit. The entry of the kill itself follows. Source: mm/oom_kill.c, dump_oom_victim and
#: __oom_kill_process.
_KILL_ENTRY = re.compile(
    r"^\d+,\d+,\d+,[^;\n]*;oom-kill:[^\n]*?(?:oom_memcg=(?P<group>[^\n]*?)|global_oom),task_memcg="
    r"|^\d+,\d+,(?P<at_us>\d+),[^;\n]*;(?P<scope>Memory cgroup out of memory|Out of memory[^:\n]*)"
    r": Kill(?:ed)? process (?P<pid>\d+) \((?P<name>[^\n]*?)\)(?=,? (?:UID|total-vm))[^\n]*?"
    r"anon-rss:(?P<kib>\d+)kB",
    re.MULTILINE,
)
#: Largest size of one entry that /dev/kmsg returns. Source: include/linux/printk.h.
_ENTRY_BYTES = 8192


#: Names of the files of a memory cgroup, for cgroup v2 and for cgroup v1: the file with the number
#: of kills by the OOM killer, the file with the memory limit, and the file with the highest memory
#: use.
_FILES = (
    ("memory.events", "memory.max", "memory.peak"),
    ("memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGroup:
    """State of a memory cgroup at one moment."""

    #: Directory of the cgroup.
    path: Path
    #: Number of processes that the OOM killer has killed in the cgroup since its creation.
    kills: int
    #: Memory limit in bytes; None for no limit.
    limit_bytes: int | None
    #: Highest memory use since the creation of the cgroup, in bytes; None if the kernel does not
    #: report it.
    peak_bytes: int | None


@functools.lru_cache(maxsize=64)
def find_memory_groups(memberships: str, mountinfo: str) -> tuple[Path, ...]:
    """Return the directories of the memory cgroups that contain a process, the innermost first.

    Args:
        memberships: Content of `/proc/PID/cgroup` of the process.
        mountinfo: Content of `/proc/PID/mountinfo` of the calling process.

    Returns:
        The cgroup of the process and the cgroups above it, up to the root of the mounted hierarchy.
        In a container, this root is the cgroup of the container. Empty if no cgroup is visible.
    """
    paths: dict[str, str] = {}
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path

    directories: tuple[Path, ...] = ()
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        file_system, _, options = after.split(" ", 2)
        root, mounted_at = before.split()[3:5]
        is_version_1 = file_system == "cgroup" and "memory" in options.split(",")
        if not (is_version_1 or file_system == "cgroup2") or file_system not in paths:
            continue
        inside = os.path.relpath(paths[file_system], root)
        if inside.startswith(".."):
            continue
        top = Path(mounted_at)
        innermost = top / inside
        chain = (innermost, *innermost.parents)
        directories = tuple(path for path in chain if path.is_relative_to(top))
        if is_version_1:
            # On this machine, the memory controller belongs to version 1 of cgroups. A controller
            # belongs to only one version at a time, so version 2 need not be searched.
            return directories
    return directories


def read_memory_group(path: Path) -> MemoryGroup | None:
    """Return the state of a memory cgroup.

    Returns:
        None if the cgroup does not exist, or if it has no memory controller.
    """
    for events, limit, peak in _FILES:
        kills = _read_counter(path / events, "oom_kill")
        if kills is not None:
            limit_bytes = _read_number(path / limit)
            return MemoryGroup(
                path=path,
                kills=kills,
                limit_bytes=limit_bytes if (limit_bytes or 0) < _NO_LIMIT_BYTES else None,
                peak_bytes=_read_number(path / peak),
            )
    return None


def count_kills_of_group(path: Path) -> int | None:
    """Return the number of processes that the OOM killer has killed in a memory cgroup.

    This function is three times faster than `read_memory_group`, which reads more files.

    Returns:
        None if the cgroup does not exist, or if it has no memory controller.
    """
    counters = (_read_counter(path / events, "oom_kill") for events, _, _ in _FILES)
    return next((kills for kills in counters if kills is not None), None)


def count_kills_of_machine(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """Return the number of processes that the OOM killer has killed since boot; None if unknown."""
    return _read_counter(vmstat, "oom_kill")


def _read_counter(path: Path, name: str) -> int | None:
    """Return a counter from a file with lines `NAME NUMBER`; None if the counter is missing."""
    with suppress(OSError, ValueError):
        for line in path.read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return None


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None if the file is missing or contains `max`."""
    with suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedKill:
    """A kill by the OOM killer, as the kernel log reports it."""

    #: Pid of the killed process in the first PID namespace of the machine.
    pid: int
    #: Name of the killed process, at most 15 characters.
    name: str
    #: Memory of the killed process in bytes, without files and shared memory.
    memory_bytes: int
    #: Path, from the root of the cgroup hierarchy, of the cgroup whose memory limit was reached.
    #: Empty if the kernel log does not name the cgroup. None if the process was killed because the
    #: whole machine had no free memory.
    limiting_group: str | None


def read_kernel_log() -> str:
    """Return the entries of the kernel log, or an empty string if this user may not read them.

    The kernel log contains the pids of the machine's first PID namespace. In another PID namespace,
    such as that of a container, processes have other pids. In such a namespace, the result is an
    empty string.
    """
    entries: list[bytes] = []
    with suppress(OSError):
        if os.readlink("/proc/self/ns/pid") != _FIRST_PID_NAMESPACE:
            return ""
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while True:
                try:
                    entries.append(os.read(fd, _ENTRY_BYTES))
                except OSError as error:
                    # EPIPE means that the kernel has overwritten the next entry. The following
                    # read continues with the oldest entry that exists.
                    if error.errno != errno.EPIPE:
                        break
        finally:
            os.close(fd)
    return b"".join(entries).decode(errors="replace")


def find_logged_kills(
    kernel_log: str, pids: Collection[int], *, since_s: float
) -> list[LoggedKill]:
    """Return the kills of certain processes, oldest first.

    Args:
        kernel_log: Entries of the kernel log, see `read_kernel_log`.
        pids: Pids of the processes.
        since_s: Start of the search, in seconds since boot. Earlier kills may be those of other
            processes that had the same pids.
    """
    kills: list[LoggedKill] = []
    group = ""
    for match in _KILL_ENTRY.finditer(kernel_log):
        if match["pid"] is None:
            group = match["group"] or ""
            continue
        if int(match["pid"]) not in pids or int(match["at_us"]) / 1e6 < since_s:
            continue
        is_for_cgroup = match["scope"].startswith("Memory cgroup")
        kills.append(
            LoggedKill(
                pid=int(match["pid"]),
                name=match["name"],
                memory_bytes=int(match["kib"]) * 1024,
                limiting_group=group if is_for_cgroup else None,
            )
        )
    return kills


def find_directory(path: str, mountinfo: str) -> Path | None:
    """Return the directory of a memory cgroup that the kernel log names.

    Args:
        path: Path of the cgroup from the root of the hierarchy.
        mountinfo: Content of `/proc/PID/mountinfo` of the calling process.

    Returns:
        None if the cgroup is outside the mounted part of the hierarchy.
    """
    groups = find_memory_groups(f"1:memory:{path}\n0::{path}\n", mountinfo)
    return groups[0] if groups else None


def select_reached_limit(groups: Iterable[MemoryGroup]) -> MemoryGroup | None:
    """Return the cgroup with the lowest memory limit that was reached, or None."""
    reached = [
        group
        for group in groups
        if group.limit_bytes is not None
        and (group.peak_bytes is None or group.peak_bytes >= _REACHED_PART * group.limit_bytes)
    ]
    return min(reached, key=lambda group: group.limit_bytes or 0, default=None)
