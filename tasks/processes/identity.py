"""Who a process is, for ever: a pid alone is given to another sooner or later."""

from __future__ import annotations

import os
import select
import socket
from functools import cache

from pydantic import BaseModel, ConfigDict

from tasks.processes import tree


def host_name() -> str:
    """This machine's name: what is recorded under another name is another machine's business.

    MUSTER_HOST is it where set: a container has a name of its own, and its node another one.
    """
    return os.environ.get("MUSTER_HOST") or socket.gethostname()


#: Names this boot of the kernel and this pid namespace: pids mean something in it only.
boot_id = cache(tree.machine)


class ProcessId(BaseModel):
    """One process for ever: its pid may be given to another, but not together with the rest."""

    model_config = ConfigDict(frozen=True)

    pid: int
    #: When it began, clock ticks since boot.
    start_ticks: int
    #: See `boot_id`.
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
        """Signal this process, and no other that has got its pid; whether it was there."""
        return tree.signal_if(self.pid, signum, self.is_alive)

    def is_gone_within(self, limit_s: float) -> bool:
        """Wait for its end."""
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
