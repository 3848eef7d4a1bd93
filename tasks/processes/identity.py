"""Identify a process permanently. A pid alone is not enough, because the kernel reuses pids."""

from __future__ import annotations

import getpass
import os
import select
import socket
from functools import cache

from pydantic import BaseModel, ConfigDict

from tasks.processes import tree
from tasks.spec.own_settings import HOST


def host_name() -> str:
    """Return the name of this machine: the value of MUSTER_HOST, or else the host name.

    Muster's records contain this name, to show which machine they belong to. Set MUSTER_HOST in a
    container, because the host name of a container differs from that of its machine.
    """
    return HOST.read() or socket.gethostname()


def user_name() -> str:
    """Return the name of the user who runs this process, or `a user` if the name is unknown."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "a user"


#: Function that returns an id for the current boot of the machine and the current PID namespace. A
#: pid is only valid within the same boot and the same PID namespace.
boot_id = cache(tree.machine)


class ProcessId(BaseModel):
    """Permanent identity of one process.

    The kernel may give the same pid to a later process, but never with the same start time in the
    same boot and PID namespace.
    """

    model_config = ConfigDict(frozen=True)

    pid: int
    #: Start time in clock ticks since boot; 0 if the process had ended before it was identified.
    start_ticks: int
    #: Text that identifies both the boot of the machine and the PID namespace in which the process
    #: was started.
    boot_id: str

    @staticmethod
    def of(pid: int) -> ProcessId:
        """Return the identity of the process that has this pid now."""
        return ProcessId(pid=pid, start_ticks=tree.start_ticks(pid), boot_id=boot_id())

    def is_alive(self) -> bool:
        """Return True if the identified process still runs on this machine.

        Another process with the same pid does not count.
        """
        return (
            self.boot_id == boot_id()
            and self.start_ticks != 0
            and tree.start_ticks(self.pid) == self.start_ticks
            and not tree.is_zombie(self.pid)
        )

    def send(self, signum: int) -> bool:
        """Send a signal to the identified process, but not to a later process with the same pid.

        Returns:
            True if the signal was sent. False if the identified process has ended.
        """
        return tree.signal_if(self.pid, signum, self.is_alive)

    def is_gone_within(self, limit_s: float) -> bool:
        """Wait until the process has ended, at most `limit_s` seconds.

        Returns:
            False if the process still runs.
        """
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:
            return not self.is_alive()
        try:
            if self.is_alive():
                tree.is_ready(pidfd, select.POLLIN, limit_s)
        finally:
            os.close(pidfd)
        return not self.is_alive()
