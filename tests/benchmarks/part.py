"""Component of the benchmarks, which runs as `python -I -S part.py MODE NAME FOLDER ...`.

    wait NAME FOLDER
        waits for SIGTERM
    mapped PROCESSES MAPPINGS NAME FOLDER
        waits for SIGTERM, with several processes and with MAPPINGS memory mappings in each
    segments A_SECOND NAME FOLDER
        creates A_SECOND files per second in /dev/shm, and removes them at SIGTERM
    need SECONDS KIND NAME FOLDER PORT
        becomes ready SECONDS after its start and then waits; KIND is the kind of readiness: http,
        tcp, log, notify, or warming (http with the answer 503 before)

The component records when it began, became ready and received SIGTERM, in the files `NAME.began`,
`NAME.ready` and `NAME.sigterm` of FOLDER. A time is in nanoseconds of CLOCK_MONOTONIC, which is the
same clock in all processes of the machine. The file `NAME.pid` has the process id. The component
uses only the standard library.
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


def note(folder: str, name: str, event: str, number: int) -> None:
    """Write a number to the file of an event.

    The file is renamed into place, so that readers never find an incomplete number.
    """
    path = os.path.join(folder, f"{name}.{event}")
    with open(f"{path}.draft", "w") as f:
        f.write(str(number))
    os.rename(f"{path}.draft", path)


def wait(name: str, folder: str) -> None:
    """Wait for SIGTERM, record the time at which the signal arrived, and exit."""

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
    """Fork processes with many memory mappings each, and wait for SIGTERM.

    Args:
        processes: Number of processes, including this one.
        mappings: Number of memory mappings of each process.
        name: Name of the component.
        folder: Folder for the files of the component.
    """
    memory_maps = [mmap.mmap(-1, mmap.PAGESIZE) for _ in range(mappings)]
    for _ in range(processes - 1):
        if os.fork() == 0:
            signal.pause()
    wait(name, folder)
    del memory_maps


def segments(a_second: float, name: str, folder: str) -> None:
    """Create files in /dev/shm until SIGTERM, and then remove them."""
    paths = []

    def on_term(signum: int, frame: object) -> None:
        for path in paths:
            os.unlink(path)
        os._exit(0)

    signal.signal(signal.SIGTERM, on_term)
    note(folder, name, "ready", time.monotonic_ns())
    while True:
        paths.append(f"/dev/shm/muster-bench-{os.getpid()}-{len(paths)}")
        os.close(os.open(paths[-1], os.O_CREAT | os.O_WRONLY))
        time.sleep(1 / a_second)


def need(seconds: float, kind: str, name: str, folder: str, port: int) -> None:
    """Report readiness some seconds after the start, and then wait forever.

    `kind` is the kind of the readiness report, for example "http" for an answer to HTTP requests.
    """
    note(folder, name, "began", BEGAN_NS)
    if kind == "warming":
        warm_up(seconds, name, folder, port)
    time.sleep(max(0.0, remaining_s(seconds)))
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
    """Listen at once. Answer HTTP 503 until the component is ready, and 200 afterwards."""
    listener = socket.create_server(("127.0.0.1", port))
    while (timeout_s := remaining_s(seconds)) > 0:
        listener.settimeout(timeout_s)
        with contextlib.suppress(TimeoutError):
            serve_one(listener, "503 Service Unavailable")
    note(folder, name, "ready", time.monotonic_ns())
    listener.settimeout(None)
    while True:
        serve_one(listener, "200 OK")


def remaining_s(seconds: float) -> float:
    """Return the seconds until this component becomes ready; a negative number afterwards.

    Args:
        seconds: Planned time from the start of this component to its readiness, in seconds.
    """
    return seconds - (time.monotonic_ns() - BEGAN_NS) / 1e9


def serve_one(listener: socket.socket, status: str) -> None:
    """Accept one connection, and answer its request.

    Args:
        listener: Listening socket.
        status: HTTP status of the answer. An empty string closes the connection without an answer.
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
