"""Small models of how other projects watch, stop and await the processes of a run.

A model has the structure and the polling period of the original. It does no other work, so it is at
least as fast as the original.
"""

from __future__ import annotations

import multiprocessing.process
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from tasks.processes.shared_memory import find_used_files


def is_alive_loop(
    processes: Sequence[multiprocessing.process.BaseProcess], every_s: float = 1.0
) -> None:
    """Check all processes every `every_s` seconds until a process has failed. Then stop the rest.

    This imitation of SGLang's watchdog sends SIGTERM. SGLang itself sends SIGQUIT to its own
    process, and then kills its whole process tree.

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
    """Wait until a process fails, and then stop the other processes.

    One thread per process waits for the process, and puts a failure into a list. This function
    checks the list every `every_s` seconds.

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
    """Check all processes every `every_s` seconds. If a process has ended, stop the rest.

    The processes are stopped in the reverse order of their start.

    Source: Hermes' RL training tool, `_monitor_training_run`, which checks every 30 s; Muster's
    first design, which would have checked every 60 s.
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
    """Check every `every_s` seconds until the GPUs are free, and then start the run.

    Source: Muster's first design, in which a waiting run would have checked for free GPUs once a
    minute.

    Args:
        has_room: Function that returns True if the GPUs are free.
        start: Function that starts the run.
        every_s: Polling period, in seconds.
    """
    while not has_room():
        time.sleep(every_s)
    start()


def open_logs(logs: Sequence[Path], is_over: Callable[[], bool]) -> None:
    """Open each log file twice a second and read its size, until the benchmark is over.

    Source: an early version of Muster.
    """
    while not is_over():
        for log in logs:
            with log.open("rb") as file:
                file.seek(0, 2)
        time.sleep(0.5)


def look_for_makers(
    directory: Path, own_pids: Callable[[], set[int]], is_over: Callable[[], bool]
) -> None:
    """Check repeatedly whether processes use the new files of a directory.

    A check runs every 50 ms until the benchmark is over. Each new file is checked four times.

    Source: an early version of Muster, which did not limit the number of checks of a file.

    Args:
        directory: Directory with the files.
        own_pids: Function that returns the ids of the processes that are checked.
        is_over: Function that returns True when the benchmark is over.
    """
    check_counts: dict[Path, int] = {}
    known_paths = set(directory.iterdir())
    while not is_over():
        paths = set(directory.iterdir())
        check_counts |= dict.fromkeys(paths - known_paths, 0)
        known_paths = paths
        if check_counts:
            find_used_files(own_pids(), set(check_counts))
        check_counts = {path: n + 1 for path, n in check_counts.items() if n + 1 < 4}
        time.sleep(0.05)


def await_health(url: str, every_s: float = 1.0) -> None:
    """Request a health URL at once and then every second, until the answer is 200.

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
    """Sleep for the longest time that a start may take, then check once that the process runs.

    Source: Hermes' RL training tool, `_spawn_training_run`.
    """
    time.sleep(sleep_s)
    if process.poll() is not None:
        raise RuntimeError(f"pid {process.pid} has ended")
