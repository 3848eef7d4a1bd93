"""A component that is hard to be rid of: stdlib only, run as `python -I -S stubborn.py FOLDER`.

It has a child in its own process group, a grandchild in a session of its own, a daemon, and a
daemon with an empty environment. All of them ignore SIGTERM. Each writes `FOLDER/ROLE.process`:
its pid and when it started, in ticks since boot.
"""

from __future__ import annotations

import os
import signal
import sys
import time

#: A tree that is forgotten ends by itself.
LASTS_S = 600.0
ROLES = ("leader", "child", "session", "daemon", "bare-daemon")


def note(folder: str, role: str) -> None:
    with open("/proc/self/stat") as stat:
        started = stat.read().rpartition(")")[2].split()[19]
    path = os.path.join(folder, f"{role}.process")
    with open(f"{path}.draft", "w") as f:
        f.write(f"{os.getpid()} {started}")
    os.rename(f"{path}.draft", path)


def spawn(folder: str, role: str) -> None:
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
