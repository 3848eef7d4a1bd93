"""A process that watches N sleeping components in one of three ways, and does nothing else.

Run as `python -m tests.benchmarks.watched WAY N FOLDER`: it prints `up` once it watches, watches
until its stdin closes, and then ends them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from tests.benchmarks.stage import sleepers, supervisor_of

_POLL_EVERY_S = 1.0

Ended = threading.Event


@contextmanager
def _supervisor(n: int, place: Path) -> Iterator[Callable[[Ended], None]]:
    commands = sleepers(place, n)
    with supervisor_of(place, commands, dict.fromkeys(commands)) as supervisor:
        for name in commands:
            supervisor.start(name)

        def watch(over: Ended) -> None:
            over.wait()

        yield watch


@contextmanager
def _psutil(n: int, place: Path) -> Iterator[Callable[[Ended], None]]:
    with _popened(n, place) as popened:
        processes = [psutil.Process(popen.pid) for popen in popened]

        def watch(over: Ended) -> None:
            while not over.wait(_POLL_EVERY_S):
                for process in processes:
                    if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                        raise RuntimeError(f"{process} has ended")

        yield watch


@contextmanager
def _poll(n: int, place: Path) -> Iterator[Callable[[Ended], None]]:
    with _popened(n, place) as popened:

        def watch(over: Ended) -> None:
            while not over.wait(_POLL_EVERY_S):
                for popen in popened:
                    if popen.poll() is not None:
                        raise RuntimeError(f"pid {popen.pid} has ended")

        yield watch


@contextmanager
def _popened(n: int, place: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    with ExitStack() as stack:
        popened = []
        for command in sleepers(place, n).values():
            popen = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            stack.callback(popen.wait)
            stack.callback(popen.kill)
            popened.append(popen)
        yield popened


WAYS = {"muster": _supervisor, "psutil": _psutil, "poll": _poll}


def main(way: str, n: int, place: Path) -> None:
    over = threading.Event()
    with WAYS[way](n, place) as watch:
        print("up", flush=True)
        watcher = threading.Thread(target=watch, args=(over,))
        watcher.start()
        os.read(0, 1)
        over.set()
        watcher.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
