"""Resource use of processes from /proc: CPU time, memory, file descriptors, threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tasks.processes import tree


def cpu_percent(groups: Mapping[str, Sequence[int]], window_s: float) -> dict[str, float]:
    """Measure the CPU use of several groups of processes during the same time window.

    Args:
        groups: Mapping from the name of a group to its process ids.
        window_s: Length of the window, in seconds.

    Returns:
        Mapping from the name of a group to its CPU use, in percent of one core.
    """
    before = {group: cpu_ns(pids) for group, pids in groups.items()}
    began = time.monotonic_ns()
    time.sleep(window_s)
    took_ns = time.monotonic_ns() - began
    return {group: 100 * (cpu_ns(pids) - before[group]) / took_ns for group, pids in groups.items()}


def tree_of(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    return [pid, *tree.descendants(pid)]


def thread_cpu_ns(thread: threading.Thread) -> int:
    """Return the CPU time of a thread of this process, user and system, in nanoseconds."""
    return _on_cpu_ns(Path(f"/proc/self/task/{thread.native_id}/schedstat"))


def cpu_ns(pids: Sequence[int]) -> int:
    """Return the CPU time of processes, user and system, in nanoseconds.

    This function reads /proc/<pid>/schedstat. The more common file /proc/<pid>/stat has a
    resolution of only 10 ms, which is too coarse for idle processes.

    Source: Documentation/scheduler/sched-stats.rst.
    """
    return sum(
        _on_cpu_ns(schedstat)
        for pid in pids
        for schedstat in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


def _on_cpu_ns(schedstat: Path) -> int:
    """Return the CPU time of a task in nanoseconds, from its file `schedstat` in /proc."""
    return int(schedstat.read_text().split()[0])


def memory_mb(pid: int) -> tuple[float, float]:
    """Return the memory of a process in MB: the resident set size (RSS), and the PSS.

    PSS divides each shared page among the processes that share it.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kb = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
    return kb["Rss"] / 1024, kb["Pss"] / 1024


def shared_memory_mb(pids: Sequence[int]) -> float:
    """Return the sum of the processes' memory (PSS), in MB.

    PSS divides a shared page among the processes that share it, so no page is counted twice.
    """
    return sum(memory_mb(pid)[1] for pid in pids)


def fds(pid: int) -> int:
    """Return the number of open file descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def threads(pid: int) -> int:
    """Return the number of threads of a process."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def program(pid: int) -> str:
    """Return the name of a process's program, or an empty string if the process has exited."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
