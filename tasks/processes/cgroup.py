"""Control groups of version 2: a directory that holds a process tree, whatever the tree does.

Stdlib only: the guardian uses it.
"""

from __future__ import annotations

import contextlib
import os

#: Of ours, below the one that this process is in.
PREFIX = "muster-"


def own_cgroup(proc: str = "/proc/self") -> str:
    """The cgroup v2 directory that this process is in.

    Raises: OSError, where none is mounted.
    """
    with open(f"{proc}/cgroup", encoding="utf-8") as f:
        paths = [line[3:].rstrip("\n") for line in f if line.startswith("0::")]
    with open(f"{proc}/mountinfo", encoding="utf-8") as f:
        for line in f:
            before, _, after = line.partition(" - ")
            fields = before.split()
            if after.startswith("cgroup2 ") and paths:
                # The mount may show a part of the hierarchy only: a container's.
                root, mounted_at = fields[3], fields[4]
                inside = os.path.relpath(paths[0], root)
                if not inside.startswith(".."):
                    return os.path.normpath(os.path.join(mounted_at, inside))
    raise OSError("no cgroup v2 is mounted")


def create(parent: str, name: str) -> str:
    """A new cgroup below `parent`.

    Returns: its directory. Raises: OSError, where none can be had.
    """
    path = os.path.join(parent, PREFIX + name)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not is_empty(path):
            raise
    return path


def put(path: str, pid: int) -> None:
    """Move a process there; its children will be born there. Raises: OSError."""
    _write(os.path.join(path, "cgroup.procs"), str(pid))


def kill(path: str) -> None:
    """SIGKILL everything in it at once, forks that are under way included. Raises: OSError."""
    _write(os.path.join(path, "cgroup.kill"), "1")


def is_empty(path: str) -> bool:
    """The kernel's word that no process is in it or below it, or that it is gone."""
    try:
        with open(os.path.join(path, "cgroup.events"), encoding="utf-8") as f:
            return "populated 0" in f.read().splitlines()
    except FileNotFoundError:
        return True


def pids(path: str) -> set[int]:
    """The processes in it, as seen from here; those below it not. Raises: OSError."""
    with open(os.path.join(path, "cgroup.procs"), encoding="ascii") as f:
        return {int(line) for line in f if int(line) > 0}


def remove(path: str) -> bool:
    """Remove it with what its processes made below it; whether it is gone."""
    if os.path.basename(path).startswith(PREFIX):
        for directory, _, _ in os.walk(path, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)
    return not os.path.exists(path)


def _write(path: str, text: str) -> None:
    # Not Path.write_text: it truncates first, and reports an error of the close only.
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
