"""Permanent identity of a process. A pid alone is not enough, because the kernel reuses pids."""

from __future__ import annotations

import os
import select
import socket
from functools import cache

from pydantic import BaseModel, ConfigDict

from tasks.processes import tree


def host_name() -> str:
    """Return the name of this machine, from MUSTER_HOST or else from the kernel.

    Records with another host name belong to another machine. MUSTER_HOST is needed in containers,
    whose host name differs from that of their node.
    """
    return os.environ.get("MUSTER_HOST") or socket.gethostname()


#: Returns the id of this boot and PID namespace. A pid has a meaning only within them.
boot_id = cache(tree.machine)


class ProcessId(BaseModel):
    """Permanent identity of one process: its pid may be reused, but not together with the other
    fields.
    """

    model_config = ConfigDict(frozen=True)

    pid: int
    #: Start time in clock ticks since boot.
    start_ticks: int
    #: Boot and PID namespace, see the function `boot_id`.
    boot_id: str

    @staticmethod
    def of(pid: int) -> ProcessId:
        return ProcessId(pid=pid, start_ticks=tree.start_ticks(pid), boot_id=boot_id())

    def is_alive(self) -> bool:
        return (
            self.boot_id == boot_id()
            and self.start_ticks != 0
            and tree.start_ticks(self.pid) == self.start_ticks
            and not tree.is_zombie(self.pid)
        )

    def send(self, signum: int) -> bool:
        """Signal this process, but no other process with the same pid. Return True if it was
        alive.
        """
        return tree.signal_if(self.pid, signum, self.is_alive)

    def is_gone_within(self, limit_s: float) -> bool:
        """Wait for the end of the process. Return False if it does not end in time."""
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
