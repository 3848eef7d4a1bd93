"""Which processes of this machine were started with an environment variable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """The processes that have a variable, as far as it may be known."""

    #: `pids[value]`, living processes only.
    pids: Mapping[str, tuple[int, ...]]
    #: `hidden[pid]`: the command line of a living process whose environment is not for this user.
    hidden: Mapping[int, str]


def holders_of(variable: str, proc: Path = Path("/proc")) -> Holders:
    """Who has the variable now. What a process has changed of it since its start is not seen.

    Args:
        proc: Where processes are listed.
    """
    found: dict[str, tuple[int, ...]] = {}
    hidden: dict[int, str] = {}
    wanted = f"{variable}=".encode()
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        try:
            environment = (entry / "environ").read_bytes()
        except PermissionError:
            if command_line := _command_line(entry):
                hidden[pid] = command_line
            continue
        except OSError:  # It has ended.
            continue
        for setting in environment.split(b"\0"):
            if setting.startswith(wanted):
                value = setting[len(wanted) :].decode(errors="replace")
                found[value] = (*found.get(value, ()), pid)
    return Holders(pids=found, hidden=hidden)


def _command_line(entry: Path) -> str:
    """Empty for a kernel thread, and for what has ended."""
    try:
        return (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
