"""A component for the benchmarks: stdlib only, run as `python -I -S part.py HOW NAME FOLDER ...`.

    wait NAME FOLDER                     waits for SIGTERM
    mapped PROCESSES MAPPINGS NAME FOLDER  the same, as so many processes with so many mappings each
    segments A_SECOND NAME FOLDER        makes so many files in /dev/shm, removed at SIGTERM
    need SECONDS KIND NAME FOLDER PORT   is ready SECONDS after its first line, then stays: by
                                         http, tcp, log, notify, or warming (503 until then)

What it sees is written into FOLDER in nanoseconds of CLOCK_MONOTONIC, the same clock in every
process of the machine: `NAME.began`, `NAME.ready` and `NAME.sigterm`, so nobody else's word counts.
`NAME.pid` is its pid.
"""

from __future__ import annotations

import time

BEGAN_NS = time.monotonic_ns()

import contextlib  # noqa: E402
import mmap  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402


def note(folder: str, name: str, what: str, number: int) -> None:
    """Write a number so that no reader sees a part of it."""
    path = os.path.join(folder, f"{name}.{what}")
    with open(f"{path}.draft", "w") as f:
        f.write(str(number))
    os.rename(f"{path}.draft", path)


def wait(name: str, folder: str) -> None:
    def on_term(signum: int, frame: object) -> None:
        at_ns = time.monotonic_ns()
        note(folder, name, "sigterm", at_ns)
        os._exit(0)

    signal.signal(signal.SIGTERM, on_term)
    note(folder, name, "pid", os.getpid())
    note(folder, name, "began", BEGAN_NS)
    note(folder, name, "ready", time.monotonic_ns())
    while True:
        signal.pause()


def mapped(processes: int, mappings: int, name: str, folder: str) -> None:
    kept = [mmap.mmap(-1, mmap.PAGESIZE) for _ in range(mappings)]
    for _ in range(processes - 1):
        if os.fork() == 0:
            signal.pause()
    wait(name, folder)
    del kept


def segments(a_second: float, name: str, folder: str) -> None:
    made = []

    def on_term(signum: int, frame: object) -> None:
        for path in made:
            os.unlink(path)
        os._exit(0)

    signal.signal(signal.SIGTERM, on_term)
    note(folder, name, "ready", time.monotonic_ns())
    while True:
        made.append(f"/dev/shm/muster-bench-{os.getpid()}-{len(made)}")
        os.close(os.open(made[-1], os.O_CREAT | os.O_WRONLY))
        time.sleep(1 / a_second)


def need(seconds: float, kind: str, name: str, folder: str, port: int) -> None:
    note(folder, name, "began", BEGAN_NS)
    if kind == "warming":
        warm_up(seconds, name, folder, port)
    time.sleep(max(0.0, left_s(seconds)))
    if kind in ("http", "tcp"):
        listener = socket.create_server(("127.0.0.1", port))
        note(folder, name, "ready", time.monotonic_ns())
        while True:
            serve_one(listener, "200 OK" if kind == "http" else "")
    if kind == "log":
        print("ready", flush=True)
    else:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
            s.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"].replace("@", "\0", 1))
    note(folder, name, "ready", time.monotonic_ns())
    while True:
        signal.pause()


def warm_up(seconds: float, name: str, folder: str, port: int) -> None:
    """Listen at once, and answer 503 until the time has come."""
    listener = socket.create_server(("127.0.0.1", port))
    while (left := left_s(seconds)) > 0:
        listener.settimeout(left)
        with contextlib.suppress(TimeoutError):
            serve_one(listener, "503 Service Unavailable")
    note(folder, name, "ready", time.monotonic_ns())
    listener.settimeout(None)
    while True:
        serve_one(listener, "200 OK")


def left_s(seconds: float) -> float:
    return seconds - (time.monotonic_ns() - BEGAN_NS) / 1e9


def serve_one(listener: socket.socket, status: str) -> None:
    """
    Args:
        status: of the answer; empty: none is given.
    """
    connection, _ = listener.accept()
    connection.settimeout(1.0)
    with connection, contextlib.suppress(ConnectionError):
        if status and connection.recv(65536):
            head = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode())


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["wait", name, folder]:
            wait(name, folder)
        case ["mapped", processes, mappings, name, folder]:
            mapped(int(processes), int(mappings), name, folder)
        case ["segments", a_second, name, folder]:
            segments(float(a_second), name, folder)
        case ["need", seconds, kind, name, folder, port]:
            need(float(seconds), kind, name, folder, int(port))
