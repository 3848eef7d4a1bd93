"""A second user of the machine, who attacks: servers and processes of uid 65534.

Only root can start them. Tests that need them have the mark `needs_another_user`. They are skipped
for other users, but not by `make attacks`, which sets MUSTER_REQUIRE_ATTACKS.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

#: User id and group id of the attacker.
NOBODY = 65534
needs_another_user = pytest.mark.skipif(
    os.geteuid() != 0 and "MUSTER_REQUIRE_ATTACKS" not in os.environ,
    reason="only root can start a process of another user",
)

_BECOME = f"""
import ctypes, json, os, re, resource, signal, socket, sys, threading, time
import encodings.idna
os.setgroups(())
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
# Otherwise the kernel would treat it as a program of root that changed its user.
PR_SET_DUMPABLE = 4
ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
"""
#: Answers every connection with 200 and an empty object, and prints what it was sent.
_SERVER = """
PR_SET_NAME = 15
if sys.argv[2]:
    ctypes.CDLL(None).prctl(PR_SET_NAME, sys.argv[2].encode(), 0, 0, 0)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])), reuse_port=False)
print("listening", server.getsockname()[1], flush=True)
def serve(connection):
    connection.settimeout(30)
    head = b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\n"
    answer = head + b"Content-Length: 2\\r\\n\\r\\n{}"
    try:
        while received := connection.recv(65536):
            print("received", received, flush=True)
            connection.sendall(answer)
    except OSError:
        pass
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""


def start_as_another_user(
    code: str, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start Python code as uid 65534, in a session of its own, with its output in a pipe.

    The interpreter may lie in a folder that is closed to that user. So the process is started by
    root, imports what it needs, and then becomes the other user for good.
    """
    return subprocess.Popen(
        (sys.executable, "-I", "-S", "-c", f"{_BECOME}\n{code}", *arguments),
        cwd="/",
        env=dict(env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end_process(process: subprocess.Popen[str]) -> str:
    """Kill the process, and return the rest of its output."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate(timeout=30)
    return rest


@dataclass
class ForeignServer:
    """A server of uid 65534 that records what it is sent."""

    process: subprocess.Popen[str]
    port: int
    #: What it was sent, known once it has ended.
    received: Sequence[str] = ()


@contextmanager
def foreign_server(
    port: int = 0, *, name: str = "", env: Mapping[str, str] | None = None
) -> Iterator[ForeignServer]:
    """A server of another user; what it received is known after the context.

    Args:
        port: 0 for any free one.
        name: the name that its process gives itself.
        env: the variables of its process.
    """
    process = start_as_another_user(_SERVER, str(port), name, env=env)
    assert process.stdout is not None
    _, number = process.stdout.readline().split()
    server = ForeignServer(process, int(number))
    try:
        yield server
    finally:
        server.received = [line for line in end_process(process).splitlines() if line]
