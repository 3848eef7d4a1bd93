"""A component for the benchmarks: stdlib only, run as `python -I -S part.py HOW NAME FOLDER ...`.

    wait NAME FOLDER                     waits for SIGTERM
    need SECONDS KIND NAME FOLDER PORT   is ready SECONDS after its first line, then stays

What it sees is written into FOLDER in nanoseconds of CLOCK_MONOTONIC, the same clock in every
process of the machine: `NAME.began`, `NAME.ready` and `NAME.sigterm`, so nobody else's word counts.
"""

from __future__ import annotations

import time

BEGAN_NS = time.monotonic_ns()

import os  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402


def note(folder: str, name: str, what: str, at_ns: int) -> None:
    """Write a time so that no reader sees a part of it."""
    path = os.path.join(folder, f"{name}.{what}")
    with open(f"{path}.draft", "w") as f:
        f.write(str(at_ns))
    os.rename(f"{path}.draft", path)


def wait(name: str, folder: str) -> None:
    def on_term(signum: int, frame: object) -> None:
        at_ns = time.monotonic_ns()
        note(folder, name, "sigterm", at_ns)
        os._exit(0)

    signal.signal(signal.SIGTERM, on_term)
    note(folder, name, "began", BEGAN_NS)
    note(folder, name, "ready", time.monotonic_ns())
    while True:
        signal.pause()


def need(seconds: float, kind: str, name: str, folder: str, port: int) -> None:
    note(folder, name, "began", BEGAN_NS)
    time.sleep(max(0.0, seconds - (time.monotonic_ns() - BEGAN_NS) / 1e9))
    if kind in ("http", "tcp"):
        listener = socket.create_server(("127.0.0.1", port))
        note(folder, name, "ready", time.monotonic_ns())
        while True:
            serve_one(listener, answer=kind == "http")
    if kind == "log":
        print("ready", flush=True)
    else:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
            s.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"].replace("@", "\0", 1))
    note(folder, name, "ready", time.monotonic_ns())
    while True:
        signal.pause()


def serve_one(listener: socket.socket, *, answer: bool) -> None:
    connection, _ = listener.accept()
    with connection:
        if answer and connection.recv(65536):
            connection.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
            )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["wait", name, folder]:
            wait(name, folder)
        case ["need", seconds, kind, name, folder, port]:
            need(float(seconds), kind, name, folder, int(port))
