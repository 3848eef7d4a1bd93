"""Control groups of version 2: directories from which the processes of a tree cannot escape.

Standard library only, because the guardian imports it.
"""

from __future__ import annotations

import contextlib
import os

#: Prefix of the cgroups that Muster makes.
PREFIX = "muster-"


def own_cgroup(proc: str = "/proc/self") -> str:
    """Return the cgroup v2 directory of a process.

    Args:
        proc: The directory of the process in /proc.

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
                # In a container, the mount may show only a part of the hierarchy.
                root = fields[3]
                mounted_at = fields[4]
                inside = os.path.relpath(paths[0], root)
                if not inside.startswith(".."):
                    return os.path.normpath(os.path.join(mounted_at, inside))
    raise OSError("no cgroup v2 is mounted")


def create(parent: str, name: str) -> str:
    """Create a cgroup below `parent`, or return an existing empty one.

    Returns:
        Its directory.

    Raises:
        OSError: It cannot be created, or it exists and is not empty.
    """
    path = os.path.join(parent, PREFIX + name)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not is_empty(path):
            raise
    return path


def put(path: str, pid: int) -> None:
    """Move a process into a cgroup. Its later children are in the same cgroup.

    Raises:
        OSError: The process cannot be moved.
    """
    _write(os.path.join(path, "cgroup.procs"), str(pid))


def kill(path: str) -> None:
    """SIGKILL all processes in a cgroup at once, including processes that are just being forked.

    Raises:
        OSError: The cgroup cannot be killed.
    """
    _write(os.path.join(path, "cgroup.kill"), "1")


def is_empty(path: str) -> bool:
    """Return True if, according to the kernel, no process is in the cgroup or below it.

    Also True if the cgroup no longer exists.
    """
    try:
        with open(os.path.join(path, "cgroup.events"), encoding="utf-8") as f:
            return "populated 0" in f.read().splitlines()
    except FileNotFoundError:
        return True


def pids(path: str) -> set[int]:
    """Return the processes in a cgroup, without those in cgroups below it.

    The pids are those of this process's PID namespace.

    Raises:
        OSError: The cgroup cannot be read.
    """
    with open(os.path.join(path, "cgroup.procs"), encoding="ascii") as f:
        return {int(line) for line in f if int(line) > 0}


def remove(path: str) -> bool:
    """Remove a cgroup of Muster and the cgroups below it. Return True if it no longer exists."""
    if os.path.basename(path).startswith(PREFIX):
        for directory, _, _ in os.walk(path, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)
    return not os.path.exists(path)


def _write(path: str, text: str) -> None:
    # `Path.write_text` would truncate the file first and would report only errors of the close.
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
