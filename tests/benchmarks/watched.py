"""Program that watches N sleeping components in one of three ways, and does nothing else.

    python -m tests.benchmarks.watched WAY N FOLDER

The program prints `up` when it has started the components and watches them. It ends them when its
stdin is closed.
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

from tests.benchmarks.harness import sleepers, supervisor_of

#: Seconds between two polls of the components, for the methods `psutil` and `poll`.
_POLL_EVERY_S = 1.0

#: Type of the event that ends the watch of the components. A function that watches components
#: returns when the event is set.
Ended = threading.Event


@contextmanager
def _supervisor(n: int, place: Path) -> Iterator[Callable[[Ended], None]]:
    """Start the components under Muster's supervisor, and yield the function that watches them."""
    commands = sleepers(place, n)
    with supervisor_of(place, commands, dict.fromkeys(commands)) as supervisor:
        for name in commands:
            supervisor.start(name)

        def watch(is_over: Ended) -> None:
            is_over.wait()

        yield watch


@contextmanager
def _psutil(n: int, place: Path) -> Iterator[Callable[[Ended], None]]:
    """Start the components, and yield a function that polls them with psutil."""
    with _popened(n, place) as popened:
        processes = [psutil.Process(popen.pid) for popen in popened]

        def watch(is_over: Ended) -> None:
            while not is_over.wait(_POLL_EVERY_S):
                for process in processes:
                    if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                        raise RuntimeError(f"{process} has ended")

        yield watch


@contextmanager
def _poll(n: int, place: Path) -> Iterator[Callable[[Ended], None]]:
    """Start the components, and yield a function that polls them with `Popen.poll`."""
    with _popened(n, place) as popened:

        def watch(is_over: Ended) -> None:
            while not is_over.wait(_POLL_EVERY_S):
                for popen in popened:
                    if popen.poll() is not None:
                        raise RuntimeError(f"pid {popen.pid} has ended")

        yield watch


@contextmanager
def _popened(n: int, place: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the components as child processes, and kill them when the context ends."""
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
    """Start the components, and watch them until stdin is closed.

    Args:
        way: Name of the method to watch the components, a key of WAYS.
        n: Number of components.
        place: Folder for the files of the components.
    """
    is_over = threading.Event()
    with WAYS[way](n, place) as watch:
        print("up", flush=True)
        watcher = threading.Thread(target=watch, args=(is_over,))
        watcher.start()
        os.read(0, 1)
        is_over.set()
        watcher.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
