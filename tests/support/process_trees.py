"""Commands that start process trees which are hard to stop.

Each command prints `up` when its process tree is complete.
"""

from __future__ import annotations

from tests.support.supervised_components import python, sh

#: Python program that forks forever. Each process starts a new session, waits `%s` seconds, forks a
#: child that continues in the same way, and exits. So the process ids that a program reads in /proc
#: often belong to processes that have already ended.
_FLICKER = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def flicker():
    while True:
        if os.fork():
            os._exit(0)
        os.setsid()
        time.sleep(%s)
if os.fork() == 0:
    flicker()
os.write(1, b"up\\n")
while True:
    time.sleep(600)
"""

#: Python program that forks `%d` children as fast as possible, each in its own session. The parent
#: and its children ignore SIGTERM.
_BURST = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(%d):
    if os.fork() == 0:
        os.setsid()
        while True:
            time.sleep(600)
os.write(1, b"up\\n")
while True:
    time.sleep(600)
"""

#: Mapping from the name of a shape to the command that starts a process tree of this shape.
SHAPES: dict[str, tuple[str, ...]] = {
    "polite": sh("echo up; exec sleep 600"),
    "leader-ignores-term": sh("trap '' TERM; echo up; exec sleep 600"),
    "polite-leader-stubborn-child": sh("(trap '' TERM; exec sleep 600) & echo up; exec sleep 600"),
    "setsid-grandchild": sh("trap '' TERM; setsid sleep 600 & sleep 0.05; echo up; exec sleep 600"),
    "double-fork-daemon": sh(
        "trap '' TERM; (setsid sh -c 'sleep 600 & exit' &); sleep 0.05; echo up; exec sleep 600"
    ),
    "scrubbed-daemon": sh(
        "trap '' TERM; (setsid env -i /bin/sh -c '/bin/sleep 600 & exit' &);"
        " sleep 0.05; echo up; exec sleep 600"
    ),
    "flicker-2ms": python(_FLICKER % "0.002"),
    "flicker-0.2ms": python(_FLICKER % "0.0002"),
    "fork-burst": python(_BURST % 200),
    "stopped": sh("echo up; kill -STOP $$"),
}
