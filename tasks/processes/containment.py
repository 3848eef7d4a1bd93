"""Containment: how reliably the processes of a run are ended on this machine.

This module defines the levels, finds the levels that are available here, and makes the PID
namespace of the highest level. With it, the kernel guarantees that no process remains.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from tasks.processes import cgroup, tree

#: Options of unshare(1) for a PID namespace and a mount namespace with its own /proc.
_UNSHARE = ("--pid", "--fork", "--mount-proc", "--propagation", "slave")
#: Commands that are tried. The second works without privileges: it adds a user namespace with the
#: same user.
_UNSHARE_COMMANDS = (("unshare", *_UNSHARE), ("unshare", "--user", "--map-current-user", *_UNSHARE))
#: Program of a namespace's first process. Because it ignores SIGCHLD, the kernel reaps its orphans.
_INIT = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.write(1, b"ready")
os.close(1)
os.read(0, 1)
"""
#: Time limit in seconds of a trial of `unshare`.
_PROBE_WITHIN_S = 20.0


class Level(Enum):
    """Levels of containment. Each includes the promises of the lower levels."""

    L1 = "L1"
    L2 = "L2"
    L3 = "L3"
    L4 = "L4"


_PROMISES = {
    Level.L1: "process groups only: processes that leave their session may be left behind",
    Level.L2: "guardians: no single SIGKILL leaves a process behind",
    Level.L3: "guardians and cgroups: what a double SIGKILL leaves is gone at the next reconcile",
    Level.L4: "a PID namespace: the kernel ends every process of the run",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Containment:
    """The containment of a run's processes."""

    level: Level
    #: Cgroup below which each component gets its own cgroup; None: components get no cgroup.
    cgroup_parent: str | None = None
    #: Reason for each higher level that is not used.
    missing: Mapping[Level, str] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        why = "".join(f"; no {level.value}: {text}" for level, text in self.missing.items())
        return f"{self.level.value} ({_PROMISES[self.level]}{why})"

    def as_json(self) -> dict[str, Any]:
        return {
            "level": self.level.value,
            "promise": _PROMISES[self.level],
            "missing": {level.value: text for level, text in self.missing.items()},
        }


def probe(*, namespace: bool = False) -> Containment:
    """Return the highest level that is available here, found by trials.

    The variable `MUSTER_MAX_CONTAINMENT` limits the level. The default is L4.

    Args:
        namespace: True if the run requests L4, which is not used otherwise.
    """
    missing: dict[Level, str] = {}
    try:
        tree.become_subreaper()
    except OSError:
        missing[Level.L2] = "this process may not become a subreaper"
        return Containment(level=Level.L1, missing=missing)
    allowed = os.environ.get("MUSTER_MAX_CONTAINMENT", "").strip()
    level = Level.L2
    parent = None
    for higher in (Level.L3, Level.L4) if namespace else (Level.L3,):
        try:
            if allowed in Level.__members__ and allowed < higher.value:
                raise OSError(f"MUSTER_MAX_CONTAINMENT is {allowed}")
            if higher is Level.L3:
                parent = _require_usable(cgroup.own_cgroup())
            else:
                _unshare_command()
            level = higher
        except (OSError, subprocess.TimeoutExpired) as error:
            missing[higher] = str(error)
    return Containment(level=level, cgroup_parent=parent, missing=MappingProxyType(missing))


@functools.cache
def _unshare_command() -> tuple[str, ...]:
    """Return the command that runs a program as the first process of a new PID namespace.

    Raises:
        OSError: No command works here.
    """
    for command in _UNSHARE_COMMANDS:
        done = subprocess.run(
            [*command, "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_WITHIN_S,
        )
        if done.returncode == 0:
            return command
    raise OSError(f"unshare is refused: {done.stderr.decode(errors='replace').strip()}")


@functools.cache
def _require_usable(parent: str) -> str:
    """Return the cgroup if processes can be put below it and killed there (since Linux 5.14).

    Raises:
        OSError: The cgroup cannot be used.
    """
    trial = cgroup.create(parent, f"probe-{os.getpid()}-{os.urandom(3).hex()}")
    try:
        with subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL) as sleeper:
            try:
                cgroup.put(trial, sleeper.pid)
                cgroup.kill(trial)
            finally:
                sleeper.kill()
    finally:
        cgroup.remove(trial)
    return parent


#: Seconds to wait for the start of a namespace.
_START_WITHIN_S = 30.0
#: Seconds to wait for its end. Only a process in uninterruptible sleep takes longer.
_END_WITHIN_S = 8.0


class PidNamespace:
    """A PID namespace with its first process. Guardians enter it, and it ends with the last of
    them.

    The first process runs until its standard input closes. The write end of that pipe is held by
    the guardians. When the first process ends for any reason, the kernel ends every process in the
    namespace.

    Create the namespace, start guardians with `fds`, call `settle`, and finally call `close`.
    """

    def __init__(self) -> None:
        """Create a namespace.

        Raises:
            OSError: No namespace can be created.
        """
        self._outside = subprocess.Popen(
            [*_unshare_command(), sys.executable, "-I", "-S", "-c", _INIT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            cwd="/",
            env={"MUSTER_ROLE": "namespace", "PATH": os.environ.get("PATH", os.defpath)},
        )
        assert self._outside.stdin is not None and self._outside.stdout is not None
        self._alive = self._outside.stdin
        try:
            stdout = self._outside.stdout
            has_answered = tree.is_ready(stdout.fileno(), select.POLLIN, _START_WITHIN_S)
            if not (has_answered and stdout.read(64)):
                raise OSError("no PID namespace can be made here")
            #: Pid of the namespace's first process in this process's PID namespace.
            [self.init_pid] = tree.children(self._outside.pid)
            self._init = os.pidfd_open(self.init_pid)
        except BaseException:
            self._outside.kill()
            self._outside.wait()
            self._alive.close()
            raise
        finally:
            self._outside.stdout.close()

    @property
    def fds(self) -> tuple[int, ...]:
        """File descriptors that a guardian needs to enter: a pidfd of the first process, and the
        write end of the pipe that keeps the namespace alive.
        """
        return self._init, self._alive.fileno()

    def settle(self) -> None:
        """Leave it to the existing guardians to keep the namespace alive."""
        self._alive.close()

    def close(self) -> bool:
        """End the namespace and all processes in it.

        Returns:
            True if all processes have ended. The first process ends only after all others.
        """
        self.settle()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init, signal.SIGKILL)
        has_ended = tree.is_ready(self._init, select.POLLIN, _END_WITHIN_S)
        os.close(self._init)
        if has_ended:
            self._outside.wait()
        return has_ended
