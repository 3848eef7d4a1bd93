"""A further host on this machine: a host name and processes of its own, in namespaces, and where
it is given a cable, a network of its own.

Nobody in it sees, or could signal, a process of another host, as far as its own eyes go; the
machine itself, and so a test, sees all of them.
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
from tests.support.gang_networks import Cable
from tests.support.ground import ROOT, until

_INTO = ("unshare", "--uts", "--pid", "--fork", "--mount-proc")
#: First in the namespaces: it names the host, and becomes what starts everything on it.
_FIRST = 'hostname "$0" && exec "$@"'


class OtherHost:
    """Starts programs on a host of that name; `other_host` gives one, and ends it."""

    def __init__(self, name: str, directory: Path, cable: Cable | None = None) -> None:
        self.name = name
        into = (*_INTO, "--net") if cable is not None else _INTO
        into = into if os.geteuid() == 0 else (*into, "--user", "--map-root-user")
        first = (sys.executable, "-I", "-S", keeper.__file__, str(directory / "scratch"))
        self._keeper = subprocess.Popen(
            (*into, "sh", "-c", _FIRST, name, *first),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # unshare complains about its own signal mask when it ends.
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if cable is not None:
            # unshare's child, born in the namespaces.
            cable.plug_into(until(lambda: _children(self._keeper.pid), f"host {name}")[0])

    def start(self, *arguments: str, env: Mapping[str, str], log: Path) -> int:
        """A Python program of the project; its pid, as this machine counts."""
        # The keeper's answers come from within: pids of another count.
        changed = {**env, "PWD": str(ROOT)}
        argv = ["/usr/bin/env", "-C", str(ROOT), sys.executable, *arguments]
        command = {"argv": argv, "env": changed, "log": str(log)}
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        self._keeper.stdin.write(json.dumps(command).encode() + b"\n")
        self._keeper.stdin.flush()
        within = int(self._keeper.stdout.readline())
        return until(lambda: self._outside(within), f"pid {within} of {self.name}")

    def _outside(self, pid: int) -> int:
        [first] = _children(self._keeper.pid)
        namespace = os.readlink(f"/proc/{first}/ns/pid")
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if not entry.name.isdigit() or os.readlink(entry / "ns/pid") != namespace:
                    continue
                status = (entry / "status").read_text().splitlines()
                [pids] = (line.split()[1:] for line in status if line.startswith("NSpid:"))
                if int(pids[-1]) == pid:
                    return int(entry.name)
        return 0

    def lose(self) -> None:
        """At once, with everything on it, as by a power cut; any number of times."""
        for pid in _children(self._keeper.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        with suppress(BrokenPipeError):
            self._keeper.stdin.close()
        self._keeper.stdout.close()
        self._keeper.wait(30)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def other_host(name: str, directory: Path, cable: Cable | None = None) -> Iterator[OtherHost]:
    """Nothing of it is left afterwards."""
    host = OtherHost(name, directory, cable)
    try:
        yield host
    finally:
        with suppress(FileNotFoundError):
            host.lose()
