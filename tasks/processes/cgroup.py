"""Create, fill, kill and remove control groups of version 2 (cgroups).

A cgroup is a directory of the kernel that contains a process and all its descendants. A process can
only leave it with the permission to write to such directories. This module uses only the standard
library, because the guardian imports it.
"""

from __future__ import annotations

import contextlib
import os

#: Prefix of the cgroups that Muster makes.
PREFIX = "muster-"


def own_cgroup(proc: str = "/proc/self") -> str:
    """Return the path of the cgroup v2 directory that contains a process.

    Args:
        proc: Directory of the process in /proc. Default: this process.

    Raises:
        OSError: No cgroup v2 is mounted.
    """
    with open(f"{proc}/cgroup", encoding="utf-8") as f:
        paths = [line[3:].rstrip("\n") for line in f if line.startswith("0::")]
    with open(f"{proc}/mountinfo", encoding="utf-8") as f:
        for line in f:
            before, _, after = line.partition(" - ")
            fields = before.split()
            if after.startswith("cgroup2 ") and paths:
                # In a container, the mount may show only a part of the cgroup hierarchy. The
                # cgroup's path is then relative to the root of that part.
                root = fields[3]
                mounted_at = fields[4]
                inside = os.path.relpath(paths[0], root)
                if not inside.startswith(".."):
                    return os.path.normpath(os.path.join(mounted_at, inside))
    raise OSError("no file system of cgroup v2 is mounted")


def create(parent: str, name: str) -> str:
    """Create a cgroup below the cgroup `parent`.

    If the cgroup exists already and contains no process, it is used again.

    Returns:
        The directory of the cgroup.

    Raises:
        OSError: The cgroup cannot be created, or it exists and contains processes.
    """
    path = os.path.join(parent, PREFIX + name)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not is_empty(path):
            raise
    return path


def put(path: str, pid: int) -> None:
    """Move a process into a cgroup. Later children of the process start in the same cgroup.

    Raises:
        OSError: The process cannot be moved.
    """
    write(os.path.join(path, "cgroup.procs"), str(pid))


def kill(path: str) -> None:
    """Send SIGKILL to all processes in a cgroup at once, including processes that are being forked.

    Raises:
        OSError: The kernel refuses the request, or the cgroup does not exist.
    """
    write(os.path.join(path, "cgroup.kill"), "1")


def kill_all(path: str) -> bool:
    """Send SIGKILL to all processes in a cgroup, if it contains any.

    Returns:
        False if the cgroup contains no process, or if the kernel refuses the request.
    """
    try:
        if is_empty(path):
            return False
        kill(path)
    except OSError:
        return False
    return True


def is_empty(path: str) -> bool:
    """Return True if the kernel reports no process in the cgroup and the cgroups below it.

    Also returns True if the cgroup does not exist.
    """
    try:
        with open(os.path.join(path, "cgroup.events"), encoding="utf-8") as f:
            return "populated 0" in f.read().splitlines()
    except FileNotFoundError:
        return True


def pids(path: str) -> set[int]:
    """Return the pids of the processes in a cgroup.

    Processes in the cgroups below this cgroup are left out. The pids are valid in the PID namespace
    of the calling process.

    Raises:
        OSError: The cgroup cannot be read.
    """
    with open(os.path.join(path, "cgroup.procs"), encoding="ascii") as f:
        return {int(line) for line in f if int(line) > 0}


def remove(path: str) -> bool:
    """Remove a cgroup that Muster has made, and the cgroups below it.

    A cgroup that still contains processes, or whose name lacks Muster's prefix, stays.

    Returns:
        True if the cgroup does not exist any more.
    """
    if os.path.basename(path).startswith(PREFIX):
        for directory, _, _ in os.walk(path, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)
    return not os.path.exists(path)


def write(path: str, text: str) -> None:
    """Write a text into a file of a cgroup.

    Raises:
        OSError: The kernel refuses the text, or the file does not exist.
    """
    # Use os.write, because `Path.write_text` truncates the file before it writes, and reports the
    # kernel's refusal only when it closes the file.
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
