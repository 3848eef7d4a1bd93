"""Levels of containment: how reliably all processes of a run are ended on this machine.

This module defines the levels, finds the highest level that works on this machine, and makes the
PID namespace of level L4. When a PID namespace ends, the kernel kills every process in it.
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
from tasks.spec.own_settings import MAX_CONTAINMENT

#: Options of unshare(1) for a PID namespace and a mount namespace with its own /proc.
_UNSHARE = ("--pid", "--fork", "--mount-proc", "--propagation", "slave")
#: Commands that start a program in a new PID namespace, in the order in which they are tried. The
#: second command works without privileges, because it also makes a user namespace.
_UNSHARE_COMMANDS = (("unshare", *_UNSHARE), ("unshare", "--user", "--map-current-user", *_UNSHARE))
#: Python program of the first process of a PID namespace. The kernel makes this process the parent
#: of all orphans in the namespace. The process ignores SIGCHLD, so that the kernel reaps children
#: that have ended. The process ends when its standard input closes.
_INIT = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.write(1, b"ready")
os.close(1)
os.read(0, 1)
"""
#: Time limit in seconds for one trial of an `unshare` command.
_PROBE_WITHIN_S = 20.0


class Level(Enum):
    """Ways to make sure that all processes of a run can be ended, the weakest first."""

    #: A signal to the process group of a component ends the component's processes.
    L1 = "L1"
    #: Each component has a guardian process, which ends all processes of the component.
    L2 = "L2"
    #: In addition to the guardian process, each component has a cgroup.
    L3 = "L3"
    #: In addition to guardian processes (and cgroups if possible), the components run in a PID
    #: namespace.
    L4 = "L4"


#: Text for users about each containment level: its mechanisms, and which processes it ends.
_PROMISES = {
    Level.L1: "process groups only: a process that starts its own session (setsid) may outlive "
    "the run",
    Level.L2: "guardian processes: all processes of the run end, even if one of Muster's own "
    "processes is killed",
    Level.L3: "guardian processes and cgroups: even if two of Muster's own processes are killed, "
    "`muster reconcile` ends the remaining processes of the run",
    Level.L4: "a PID namespace: the kernel ends every process of the run",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Containment:
    """The way in which Muster makes sure that it can end all processes of a run on this machine."""

    level: Level
    #: Directory of the parent cgroup. Each component gets a cgroup below this directory. None if
    #: the components get no cgroup.
    cgroup_parent: str | None = None
    #: Mapping from each unavailable containment level to the reason why it is unavailable.
    missing: Mapping[Level, str] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        why = "".join(f"; no {level.value}: {text}" for level, text in self.missing.items())
        return f"{self.level.value} ({_PROMISES[self.level]}{why})"

    def as_json(self) -> dict[str, Any]:
        """Return the containment as the JSON object that is written into `run.json`."""
        return {
            "level": self.level.value,
            "promise": _PROMISES[self.level],
            "missing": {level.value: text for level, text in self.missing.items()},
        }


def probe(*, namespace: bool = False) -> Containment:
    """Return the highest level of process containment that works on this machine.

    The environment variable `MUSTER_MAX_CONTAINMENT` limits the level, for example to `L2`.

    Args:
        namespace: True if the run requests level L4, a PID namespace. Otherwise L4 is not tried.

    Raises:
        InvalidVariable: `MUSTER_MAX_CONTAINMENT` is not a level.
    """
    limit = Level(MAX_CONTAINMENT.read())
    levels = [level for level in Level if namespace or level is not Level.L4]
    missing = {
        level: f"{MAX_CONTAINMENT.name} is {limit.value}"
        for level in levels
        if level.value > limit.value
    }
    if limit is Level.L1:
        return Containment(level=Level.L1, missing=MappingProxyType(missing))
    try:
        tree.become_subreaper()
    except OSError:
        missing[Level.L2] = (
            "the kernel does not let this process become a subreaper (the parent of orphaned "
            "processes)"
        )
        return Containment(level=Level.L1, missing=missing)
    level = Level.L2
    parent = None
    for higher in levels:
        if higher.value <= Level.L2.value or higher in missing:
            continue
        try:
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
    """Return the first words of a command that runs a program in a new PID namespace.

    The program becomes the first process of the namespace.

    Raises:
        OSError: The system allows this user no PID namespace.
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
    raise OSError(
        f"the kernel refuses a PID namespace: {done.stderr.decode(errors='replace').strip()}"
    )


@functools.cache
def _require_usable(parent: str) -> str:
    """Check that a cgroup can be created below `parent`, and that its processes can be killed.

    For the check, a trial process is moved into a new cgroup and killed with that cgroup. Killing a
    whole cgroup needs Linux 5.14.

    Args:
        parent: Directory of the parent cgroup.

    Returns:
        The directory `parent`.

    Raises:
        OSError: No cgroup can be created below `parent`, or its processes cannot be killed.
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


#: Seconds to wait for the start of a PID namespace.
_START_WITHIN_S = 30.0
#: Seconds to wait for the end of a PID namespace. The end takes longer only if a process in the
#: namespace is in uninterruptible sleep.
_END_WITHIN_S = 8.0


class PidNamespace:
    """A PID namespace for the components of a run.

    The first process of the namespace runs until its standard input, a pipe, closes. The guardian
    processes, which own the components, keep the write end of this pipe open. So the pipe closes
    when the last guardian has ended. When the first process ends for any reason, the kernel kills
    every process in the namespace.

    Create the namespace, start guardians with the file descriptors in `fds`, call `settle`, and
    finally call `close`.
    """

    def __init__(self) -> None:
        """Create the namespace, and wait until its first process runs.

        Raises:
            OSError: The system allows this user no PID namespace.
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
                raise OSError(
                    "a PID namespace could not be created: the first process of the namespace did "
                    "not answer"
                )
            #: Pid of the namespace's first process, as seen from the calling process.
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
        """File descriptors that a guardian process needs to enter the namespace.

        The first descriptor is a pidfd of the namespace's first process. The second is the write
        end of the pipe that keeps this first process running.
        """
        return self._init, self._alive.fileno()

    def settle(self) -> None:
        """Let the PID namespace end when the last guardian has ended.

        Guardians are the processes that own the components. The namespace exists while a process
        has the write end of a pipe open. This method closes the write end in the calling process,
        so that only guardians still have it open.

        Call it after the last guardian was started.
        """
        self._alive.close()

    def close(self) -> bool:
        """Kill the first process of the namespace, so that the kernel kills all others in it.

        Returns:
            True if all processes of the namespace have ended. The first process ends last.
        """
        self.settle()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init, signal.SIGKILL)
        has_ended = tree.is_ready(self._init, select.POLLIN, _END_WITHIN_S)
        os.close(self._init)
        if has_ended:
            self._outside.wait()
        return has_ended
