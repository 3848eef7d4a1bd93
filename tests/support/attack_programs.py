"""Programs with which tests attack a server of Muster as another user of the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.another_user import NOBODY as OTHER_USER
from tests.support.another_user import needs_another_user as only_as_root

__all__ = ("FLOODS", "OTHER_USER", "only_as_root", "start_as_another_user")

#: Code of a program that opens many connections to a port, sends an incomplete HTTP request on
#: each, and keeps the connections open. For each line on stdin, the program prints the number of
#: open connections. The three arguments are the port, the number of connections, and the length of
#: the incomplete request in bytes.
FLOODS = """
count, head = int(sys.argv[2]), int(sys.argv[3])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
connections = []
for _ in range(count):
    try:
        connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
        if head:
            connection.sendall(b"GET / HTTP/1.1\\r\\nHost: localhost\\r\\nX: " + b"a" * head)
        connections.append(connection)
    except OSError:
        pass
print(len(connections), flush=True)
def is_open(connection):
    connection.setblocking(False)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK)) and False
    except BlockingIOError:
        return True
    except OSError:
        return False
for line in sys.stdin:
    print(sum(map(is_open, connections)), flush=True)
"""

#: First lines of each program in this module. These lines import modules, and then change the user
#: of the process. The imports come first, because the new user may not be allowed to read the
#: folder of the Python interpreter.
_BEGINNING = f"""
import encodings.idna, http.client, json, os, resource, socket, sys, threading, time
os.setgroups([])
os.setgid({OTHER_USER})
os.setuid({OTHER_USER})
"""


def start_as_another_user(script: str, *arguments: object) -> subprocess.Popen[bytes]:
    """Start Python code as another user, with pipes as its stdin and stdout."""
    return subprocess.Popen(
        (sys.executable, "-I", "-c", _BEGINNING + script, *map(str, arguments)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path("/"),
    )
