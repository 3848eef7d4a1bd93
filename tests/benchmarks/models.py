"""Small honest models of how others watch, stop and await the processes of a run.

Each keeps the shape and the period of the original, and none of its other work: what is measured is
the way, at its best.
"""

from __future__ import annotations

import multiprocessing.process
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from tasks.processes.registry import held_by


def is_alive_loop(
    processes: Sequence[multiprocessing.process.BaseProcess], every_s: float = 1.0
) -> None:
    """Look at each process every second; on a bad end, stop the others.

    It stops by SIGTERM, where the original SIGKILLs the tree through a SIGQUIT to itself.

    Source: SGLang, `SubprocessWatchdog`.
    """
    while True:
        for process in processes:
            if not process.is_alive() and process.exitcode != 0:
                for other in processes:
                    other.terminate()
                return
        time.sleep(every_s)


def error_queue_loop(processes: Sequence[subprocess.Popen[bytes]], every_s: float = 1.0) -> None:
    """A thread waits for each process and queues its failure; a loop looks at the queue.

    Source: prime-rl, `monitor_process` and the end of `rl` in src/prime_rl/rl.py.
    """
    errors: list[str] = []

    def monitor(process: subprocess.Popen[bytes]) -> None:
        if process.wait() != 0:
            errors.append(f"pid {process.pid} failed")

    for process in processes:
        threading.Thread(target=monitor, args=(process,), daemon=True).start()
    while not errors:
        time.sleep(every_s)
    for process in processes:
        if process.poll() is None:
            process.terminate()
            process.wait()


def poll_loop(processes: Sequence[subprocess.Popen[bytes]], every_s: float) -> None:
    """Poll every half minute, or every minute; on an end, stop environment, trainer and api.

    Source: Hermes' RL training tool, `_monitor_training_run`, 30 s; the plan that Muster began
    with, 60 s.
    """
    while all(process.poll() is None for process in processes):
        time.sleep(every_s)
    for process in reversed(processes):
        if process.poll() is None:
            process.terminate()
            process.wait()


def resource_loop(
    has_room: Callable[[], bool], start: Callable[[], object], every_s: float = 60.0
) -> None:
    """Ask whether the GPUs are free; start then, or ask again a minute later.

    Source: the plan that Muster began with: a run without its GPUs gets `next_run_at = now + 60 s`.
    """
    while not has_room():
        time.sleep(every_s)
    start()


def open_logs(logs: Sequence[Path], is_over: Callable[[], bool]) -> None:
    """Open each log twice a second, and see whether it has grown.

    Source: Muster before silence had a pace of its own.
    """
    while not is_over():
        for log in logs:
            with log.open("rb") as file:
                file.seek(0, 2)
        time.sleep(0.5)


def look_for_makers(
    directory: Path, own_pids: Callable[[], set[int]], is_over: Callable[[], bool]
) -> None:
    """Look four times who holds a file that is new, each 50 ms: what comes later is no reason to
    wait.

    Source: Muster before it had a bound for that.
    """
    looks: dict[Path, int] = {}
    known = set(directory.iterdir())
    while not is_over():
        here = set(directory.iterdir())
        looks |= dict.fromkeys(here - known, 0)
        known = here
        if looks:
            held_by(own_pids(), set(looks))
        looks = {path: n + 1 for path, n in looks.items() if n + 1 < 4}
        time.sleep(0.05)


def await_health(url: str, every_s: float = 1.0) -> None:
    """Ask at once, then every second.

    Source: prime-rl, `check_health` of its inference client.
    """
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                if response.status == 200:
                    return
        except OSError:
            pass
        time.sleep(every_s)


def sleep_then_poll(process: subprocess.Popen[bytes], sleep_s: float) -> None:
    """Sleep for as long as a start may take, then look once whether it still runs.

    Source: Hermes' RL training tool, `_spawn_training_run`.
    """
    time.sleep(sleep_s)
    if process.poll() is not None:
        raise RuntimeError(f"pid {process.pid} has ended")
