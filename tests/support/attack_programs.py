"""Programs that attack as another user of the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.another_user import NOBODY as OTHER_USER
from tests.support.another_user import needs_another_user as only_as_root

__all__ = ("FLOODS", "OTHER_USER", "only_as_root", "start_as_another_user")

#: Makes connections, sends the same bytes on each, and prints how many are still open on request.
FLOODS = """
count, head = int(sys.argv[2]), int(sys.argv[3])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
made = []
for _ in range(count):
    try:
        one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
        if head:
            one.sendall(b"GET / HTTP/1.1\\r\\nHost: localhost\\r\\nX: " + b"a" * head)
        made.append(one)
    except OSError:
        pass
print(len(made), flush=True)
def is_open(one):
    one.setblocking(False)
    try:
        return bool(one.recv(1, socket.MSG_PEEK)) and False
    except BlockingIOError:
        return True
    except OSError:
        return False
for line in sys.stdin:
    print(sum(map(is_open, made)), flush=True)
"""

#: What a script may use, loaded before it gives up the right to read it.
_BEGINNING = f"""
import encodings.idna, http.client, json, os, resource, socket, sys, threading, time
os.setgroups([])
os.setgid({OTHER_USER})
os.setuid({OTHER_USER})
"""


def start_as_another_user(script: str, *arguments: object) -> subprocess.Popen[bytes]:
    """Start a script of Python as another user; it reads stdin and writes stdout by pipes."""
    return subprocess.Popen(
        (sys.executable, "-I", "-c", _BEGINNING + script, *map(str, arguments)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path("/"),
    )
