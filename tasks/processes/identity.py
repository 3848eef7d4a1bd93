"""Who a process is, for ever: a pid alone is given to another sooner or later."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tasks.processes import tree

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """This machine's name: what is recorded under another name is another machine's business."""
    return socket.gethostname()


@cache
def boot_id() -> str:
    """Names this boot of the kernel and this pid namespace: pids mean something in it only."""
    return f"{_BOOT_ID.read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"


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
        return send_if(self.pid, signum, self.is_alive)

    def is_gone_within(self, limit_s: float) -> bool:
        """Wait for its end."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:
            return not self.is_alive()
        try:
            if self.is_alive():
                select.select([pidfd], [], [], limit_s)
        finally:
            os.close(pidfd)
        return not self.is_alive()


def send_if(pid: int, signum: int, is_meant: Callable[[], bool]) -> bool:
    """Signal a process if it is the one that is meant; whether it was signalled.

    The pidfd comes first and pins the process, so that the look at it holds for the signal.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not is_meant():
            return False
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signum)
        return True
    finally:
        os.close(pidfd)
