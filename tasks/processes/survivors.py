"""Describe processes of this machine that Muster could not end, each with the kernel's reason."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
from collections.abc import Iterable
from pathlib import Path

from tasks.processes import tree
from tasks.processes.hang_report import call_with_time_limit

#: Time limit in seconds for reading the facts that describe a process, because a read may block.
#: The command line of a process cannot be read while the process holds a certain lock in the
#: kernel. The name of the user may come from a server that does not answer.
_DESCRIBED_WITHIN_S = 1.0
#: Largest number of characters of a command line that a description shows.
_SHOWN_CHARACTERS = 120


async def describe_survivors(pids: Iterable[int]) -> tuple[str, ...]:
    """Return a description of each process that could not be ended.

    A description names the process. It also says why the process could not be ended, and how the
    user can end it, as far as this is known.

    Args:
        pids: The processes. Zombies are left out if there are other processes.
    """
    remaining = tree.living_or_all(list(pids))
    return tuple(await asyncio.gather(*map(_describe_in_time, remaining)))


async def _describe_in_time(pid: int) -> str:
    bare = f"pid {pid}: its command line could not be read"
    return await call_with_time_limit(_DESCRIBED_WITHIN_S, lambda: describe_survivor(pid), bare)


def describe_survivor(pid: int) -> str:
    """Return a description of a process that could not be ended. The call may block."""
    command = tree.read_command_line(pid)[:_SHOWN_CHARACTERS] or _read_proc(pid, "comm")
    process = f"pid {pid} ({command})" if command else f"pid {pid}"
    if tree.refuses_signals(pid):
        owner = _name_user(tree.read_real_user(pid))
        return (
            f"{process} runs as user {owner}, so user {_name_user(os.getuid())} may not send "
            f"signals to it (EPERM). End the process with `sudo kill {pid}`. In future, start the "
            "program without sudo or another set-user-ID program"
        )
    if tree.is_zombie(pid):
        tracer = _read_tracer(pid)
        why = f", because process {tracer} traces {pid} (end process {tracer})" if tracer else ""
        return (
            f"{process} has ended, but remains as a zombie: the parent process has not read the "
            f"exit status{why}"
        )
    fields = tree.stat_fields(pid)
    if fields and fields[0] == b"D":
        place = _read_place_in_kernel(pid)
        return (
            f"{process} survived SIGKILL. The process waits in the kernel{place}, probably for a "
            f"device or a file system: see /proc/{pid}/stack"
        )
    return f"{process} survived SIGKILL"


def _name_user(uid: int | None) -> str:
    """Return the name of a user, or the user id if the user has no name."""
    if uid is None:
        return "unknown"
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


def _read_place_in_kernel(pid: int) -> str:
    """Return the text ` in FUNCTION`, with the kernel function that a process waits in, or ''."""
    function = _read_proc(pid, "wchan")
    return f" in {function}" if function not in ("", "0") else ""


def _read_tracer(pid: int) -> int:
    """Return the pid of the debugger that traces a process; 0 if there is none."""
    _, _, rest = _read_proc(pid, "status").partition("\nTracerPid:")
    return int(rest.split()[0]) if rest else 0


def _read_proc(pid: int, name: str) -> str:
    """Return the content of the file `/proc/PID/NAME`, or an empty string if it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace").strip()
    return ""
