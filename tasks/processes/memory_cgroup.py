"""Limit the memory of a component and all its descendants with a memory cgroup of the kernel.

The memory controller of the kernel belongs to version 1 or version 2 of cgroups. In version 2, a
process is in one cgroup only, so the memory cgroup is also the cgroup with which Muster ends the
component. In version 1, the component is in a second cgroup.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tasks.processes import cgroup
from tasks.processes.oom_killer import find_memory_groups

#: Memory limit, in bytes, of the cgroup that `_try_out` creates and removes again.
_TRIAL_LIMIT_BYTES = 64 << 20
_CONTROLLER = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParent:
    """The cgroup below which this process can create cgroups with a memory limit."""

    directory: str
    #: True if the memory controller belongs to version 2 of cgroups.
    is_version_2: bool

    def create(self, name: str, limit_bytes: int) -> str:
        """Create a cgroup with a memory limit, and return its directory.

        Swap space does not extend the limit. Remove the cgroup with `cgroup.remove`.

        Args:
            name: Name of the cgroup, without Muster's prefix.
            limit_bytes: The limit. The kernel rounds the limit down to whole pages.

        Raises:
            OSError: The cgroup cannot be created, or its limit cannot be set.
        """
        path = cgroup.create(self.directory, name)
        limit_file = "memory.max" if self.is_version_2 else "memory.limit_in_bytes"
        swap = ("memory.swap.max", 0)
        if not self.is_version_2:
            # In version 1 of cgroups, the limit `memsw` counts memory and swap space together.
            swap = ("memory.memsw.limit_in_bytes", limit_bytes)
        try:
            cgroup.write(os.path.join(path, limit_file), str(limit_bytes))
            # Ignore a missing file: a kernel without support for swap space has no such file.
            with contextlib.suppress(FileNotFoundError):
                cgroup.write(os.path.join(path, swap[0]), str(swap[1]))
        except OSError:
            cgroup.remove(path)
            raise
        return path


@functools.cache
def find_memory_parent() -> MemoryParent:
    """Return the cgroup below which this process can create cgroups with a memory limit.

    The candidates are the cgroup of this process and its ancestors, the nearest first. Each is
    tested: a cgroup is created below it, and a process is moved into the new cgroup.

    Raises:
        OSError: This process cannot create such a cgroup. The message names the reason.
    """
    memberships = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    reason = "this machine has no mounted cgroup with a memory controller"
    for directory in find_memory_groups(memberships, mountinfo):
        is_version_2 = (directory / "cgroup.controllers").exists()
        if is_version_2 and not _passes_controller_on(directory):
            continue
        parent = MemoryParent(directory=str(directory), is_version_2=is_version_2)
        try:
            _try_out(parent)
        except OSError as error:
            reason = f"{error.filename or directory}: {error.strerror}"
        else:
            return parent
    raise OSError(f"no cgroup with a memory limit can be created here ({reason})")


def _passes_controller_on(directory: Path) -> bool:
    """Return True if the children of a version 2 cgroup can have a memory limit.

    This is the case if the cgroup's file `cgroup.subtree_control` contains `memory`.
    """
    with contextlib.suppress(OSError):
        controllers = (directory / "cgroup.subtree_control").read_text(encoding="ascii")
        return _CONTROLLER in controllers.split()
    return False


def _try_out(parent: MemoryParent) -> None:
    """Create a memory cgroup, put a process into it, and remove the cgroup.

    Raises:
        OSError: One of these steps is not possible.
    """
    name = f"memory-probe-{os.getpid()}-{os.urandom(3).hex()}"
    trial = parent.create(name, _TRIAL_LIMIT_BYTES)
    try:
        with subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL) as sleeper:
            try:
                cgroup.put(trial, sleeper.pid)
            finally:
                sleeper.kill()
    finally:
        cgroup.remove(trial)
