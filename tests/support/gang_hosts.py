"""Simulate further hosts on this machine with namespaces of the Linux kernel.

Each simulated host has its own host name and its own process ids. With a cable, it also has its
own network. Processes on a simulated host cannot see or signal processes of other hosts. A test
runs on the machine itself and sees the processes of all hosts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support import keeper
from tests.support.gang_networks import NetworkLink
from tests.support.host_environment import ROOT, wait_for

#: Command that starts a process in new namespaces for the host name and the process ids.
_UNSHARE = ("unshare", "--uts", "--pid", "--fork", "--mount-proc")
#: Shell script of the first process in the namespaces. The script sets the host name, and then
#: becomes the keeper (`tests.support.keeper`), the program that starts all other processes of the
#: host.
_FIRST_SCRIPT = 'hostname "$0" && exec "$@"'


class OtherHost:
    """A simulated host, on which tests start programs. Use `other_host` to create a host."""

    def __init__(self, name: str, directory: Path, cable: NetworkLink | None = None) -> None:
        """
        Args:
            name: Host name of the simulated host.
            directory: Directory for the scratch files of the host.
            cable: Pair of network devices that connects the host to this machine. None if the host
                uses the network of this machine.
        """
        self.name = name

        unshare = [*_UNSHARE]
        if cable is not None:
            unshare += ["--net"]
        if os.geteuid() != 0:
            unshare += ["--user", "--map-root-user"]
        keeper_command = (sys.executable, "-I", "-S", keeper.__file__, str(directory / "scratch"))
        self._keeper = subprocess.Popen(
            (*unshare, "sh", "-c", _FIRST_SCRIPT, name, *keeper_command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # unshare prints a warning about its own signal mask when it ends.
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if cable is not None:
            # Only the child process of the program `unshare` is in the new namespaces. The process
            # of `unshare` itself stays outside.
            cable.move_into_namespace(
                wait_for(lambda: _children(self._keeper.pid), f"host {name}")[0]
            )

    def start(self, *arguments: str, env: Mapping[str, str], log: Path) -> int:
        """Start a Python program of the project on the host, and return its process id.

        The process id is valid outside of the host's PID namespace.

        Args:
            *arguments: Arguments of the Python interpreter.
            env: Environment variables of the program.
            log: File for stdout and stderr of the program.
        """
        program_env = {**env, "PWD": str(ROOT)}
        argv = ["/usr/bin/env", "-C", str(ROOT), sys.executable, *arguments]
        command = {"argv": argv, "env": program_env, "log": str(log)}
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        self._keeper.stdin.write(json.dumps(command).encode() + b"\n")
        self._keeper.stdin.flush()

        # The keeper, which starts the programs of the host, runs in the PID namespace of the host.
        # So the keeper answers with the process id inside of this namespace.
        inner_pid = int(self._keeper.stdout.readline())
        return wait_for(lambda: self._outer_pid(inner_pid), f"pid {inner_pid} of {self.name}")

    def _outer_pid(self, inner_pid: int) -> int:
        """Translate a process id in the host's PID namespace to the id outside.

        Return 0 if the process does not exist.

        Args:
            inner_pid: Process id in the host's PID namespace.
        """
        [first_pid] = _children(self._keeper.pid)
        namespace = os.readlink(f"/proc/{first_pid}/ns/pid")
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if not entry.name.isdigit() or os.readlink(entry / "ns/pid") != namespace:
                    continue
                status = (entry / "status").read_text().splitlines()
                [pids] = (line.split()[1:] for line in status if line.startswith("NSpid:"))
                if int(pids[-1]) == inner_pid:
                    return int(entry.name)
        return 0

    def lose(self) -> None:
        """Kill all processes of the host at once, as a power cut does. May be called twice."""
        for pid in _children(self._keeper.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        with suppress(BrokenPipeError):
            self._keeper.stdin.close()
        self._keeper.stdout.close()
        self._keeper.wait(30)


def _children(pid: int) -> list[int]:
    """Return the process ids of the children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def other_host(name: str, directory: Path, cable: NetworkLink | None = None) -> Iterator[OtherHost]:
    """Simulate a host while the context is open; then kill all of its processes."""
    host = OtherHost(name, directory, cable)
    try:
        yield host
    finally:
        with suppress(FileNotFoundError):
            host.lose()
