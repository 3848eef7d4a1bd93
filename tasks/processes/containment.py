"""How surely nothing outlives a run on this machine: the levels, which of them can be had here,
and the PID namespace of the highest, by which the kernel promises that nothing is left.
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

#: In a namespace of processes and of mounts, with a /proc of its own.
_UNSHARE = ("--pid", "--fork", "--mount-proc", "--propagation", "slave")
#: The second is for who has no privileges: a user namespace in which we are who we were.
_WAYS = (("unshare", *_UNSHARE), ("unshare", "--user", "--map-current-user", *_UNSHARE))
#: The first process of a namespace. The kernel itself reaps what is left to it.
_INIT = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.write(1, b"ready")
os.close(1)
os.read(0, 1)
"""
_PROBE_WITHIN_S = 20.0


class Level(Enum):
    """What is promised, each with all that stands above it. Source: shared/facts/supervision.md."""

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
    """What a run's processes are held by."""

    level: Level
    #: Below which each component gets a cgroup; None: none does.
    cgroup_parent: str | None = None
    #: `missing[level]`: why a higher one is not in force.
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
    """The highest level that can be had here, found by trying it.

    `MUSTER_MAX_CONTAINMENT` is the highest that this machine's keeper allows, by default L4.

    Args:
        namespace: whether the run asks for L4, which is not taken otherwise.
    """
    missing: dict[Level, str] = {}
    try:
        tree.become_subreaper()
    except OSError:
        missing[Level.L2] = "this process may not become a subreaper"
        return Containment(level=Level.L1, missing=missing)
    allowed = os.environ.get("MUSTER_MAX_CONTAINMENT", "").strip()
    level, parent = Level.L2, None
    for higher in (Level.L3, Level.L4) if namespace else (Level.L3,):
        try:
            if allowed in Level.__members__ and allowed < higher.value:
                raise OSError(f"MUSTER_MAX_CONTAINMENT is {allowed}")
            if higher is Level.L3:
                parent = _usable(cgroup.own_cgroup())
            else:
                _way()
            level = higher
        except (OSError, subprocess.TimeoutExpired) as error:
            missing[higher] = str(error)
    return Containment(level=level, cgroup_parent=parent, missing=MappingProxyType(missing))


@functools.cache
def _way() -> tuple[str, ...]:
    """What has a program be the first process of a new PID namespace, found by trying it.

    Raises: OSError, where none can be had.
    """
    for way in _WAYS:
        done = subprocess.run(
            [*way, "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_WITHIN_S
        )
        if done.returncode == 0:
            return way
    raise OSError(f"unshare is refused: {done.stderr.decode(errors='replace').strip()}")


@functools.cache
def _usable(parent: str) -> str:
    """A cgroup, once another process could be put below it, and killed there (since Linux 5.14).

    Raises: OSError.
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


_START_WITHIN_S = 30.0
#: Once its guardians have left, the kernel needs no longer, but for a process in D state.
_END_WITHIN_S = 8.0


class PidNamespace:
    """A namespace with its first process, which guardians enter, until the last of them leaves.

    The first process stays until its standard input ends, a pipe whose write end the guardians
    hold. With its end, whatever way it comes, the kernel ends every process in the namespace.

    Use: make it, start guardians with `fds` passed on, `settle`, and at the end `close`.
    """

    def __init__(self) -> None:
        """Raises: OSError, where none can be made."""
        self._outside = subprocess.Popen(
            [*_way(), sys.executable, "-I", "-S", "-c", _INIT],
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
            out = self._outside.stdout
            if not (tree.is_ready(out.fileno(), select.POLLIN, _START_WITHIN_S) and out.read(64)):
                raise OSError("no PID namespace can be made here")
            #: Of its first process, as seen from here.
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
        """What a guardian needs to enter: a pidfd of the first process, and the pipe that keeps
        that."""
        return self._init, self._alive.fileno()

    def settle(self) -> None:
        """From now on only the guardians that are there keep the namespace."""
        self._alive.close()

    def close(self) -> bool:
        """End it, with all that is in it.

        Returns: whether all has ended; the first process does not end before the others.
        """
        self.settle()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init, signal.SIGKILL)
        has_ended = tree.is_ready(self._init, select.POLLIN, _END_WITHIN_S)
        os.close(self._init)
        if has_ended:
            self._outside.wait()
        return has_ended
