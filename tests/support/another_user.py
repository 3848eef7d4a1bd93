"""Start servers and processes of an attacker: another user of the machine, with uid 65534.

Only root can start processes of another user. Tests with such processes have the pytest mark
`needs_another_user`. A run of the tests by another user than root skips these tests. `make attacks`
never skips them, because it sets the environment variable MUSTER_REQUIRE_ATTACKS.
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

#: User id and group id of the user `nobody`, who plays the attacker in the tests.
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
# A process that changed its user belongs to root in /proc, unless it is dumpable again.
PR_SET_DUMPABLE = 4
ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
"""
#: Python code of a server that answers each request with status 200 and an empty JSON object. The
#: server prints all received bytes. The program has two arguments: a TCP port, and a new name for
#: the process.
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
    """Start Python code as uid 65534, in its own session, with stdout in a pipe.

    The process starts as root, imports its Python modules, and then changes to uid 65534. The
    modules are imported first, because uid 65534 may not be allowed to read the folder of the
    Python interpreter.
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
    """Kill a process, and return its output that was not yet read."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate(timeout=30)
    return rest


@dataclass
class ForeignServer:
    """A running server of uid 65534 that prints all received bytes."""

    process: subprocess.Popen[str]
    port: int
    #: Lines of the server's output: the word `received` and the received bytes. Empty while the
    #: server runs.
    received: Sequence[str] = ()


@contextmanager
def foreign_server(
    port: int = 0, *, name: str = "", env: Mapping[str, str] | None = None
) -> Iterator[ForeignServer]:
    """Run a server of uid 65534 while the context is open.

    After the context has ended, the attribute `received` of the server contains the received bytes.

    Args:
        port: TCP port of 127.0.0.1, or 0 for any free port.
        name: New name of the server's process. If empty, the process is not renamed.
        env: Environment variables of the process of the server.
    """
    process = start_as_another_user(_SERVER, str(port), name, env=env)
    assert process.stdout is not None
    _, number = process.stdout.readline().split()
    server = ForeignServer(process, int(number))
    try:
        yield server
    finally:
        server.received = [line for line in end_process(process).splitlines() if line]
