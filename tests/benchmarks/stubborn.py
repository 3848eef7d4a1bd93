"""Component that is hard to end, which runs as `python -I -S stubborn.py FOLDER`.

The component has a child process in the same process group, a child in its own session, a daemon,
and a daemon with an empty environment. All processes ignore SIGTERM. Each process writes the file
`FOLDER/ROLE.process` with its process id and its start time in clock ticks since boot. The program
uses only the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
import time

#: Lifetime of each process, in seconds. After this time, a process ends by itself.
LASTS_S = 600.0
ROLES = ("leader", "child", "session", "daemon", "bare-daemon")


def note(folder: str, role: str) -> None:
    """Record the process id and the start time of this process."""
    with open("/proc/self/stat") as stat:
        started = stat.read().rpartition(")")[2].split()[19]
    path = os.path.join(folder, f"{role}.process")
    with open(f"{path}.draft", "w") as f:
        f.write(f"{os.getpid()} {started}")
    os.rename(f"{path}.draft", path)


def spawn(folder: str, role: str) -> None:
    """Start this program in a new process with this role."""
    if os.fork():
        return
    if role != "child":
        os.setsid()
    if role.endswith("daemon") and os.fork():
        os._exit(0)
    env = {} if role == "bare-daemon" else dict(os.environ)
    argv = (sys.executable, "-I", "-S", os.path.abspath(__file__), folder, role)
    os.execve(sys.executable, argv, env)


def main(folder: str, role: str = "leader") -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if role == "leader":
        for other in ROLES[1:]:
            spawn(folder, other)
    note(folder, role)
    time.sleep(LASTS_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
