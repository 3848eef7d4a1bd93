"""What processes take: CPU time, memory, file descriptors, children, as the kernel counts them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tasks.processes import tree


def cpu_percent(groups: Mapping[str, Sequence[int]], window_s: float) -> dict[str, float]:
    """What each group of pids uses of a core, in %, all over the same seconds."""
    before = {group: cpu_ns(pids) for group, pids in groups.items()}
    began = time.monotonic_ns()
    time.sleep(window_s)
    took_ns = time.monotonic_ns() - began
    return {group: 100 * (cpu_ns(pids) - before[group]) / took_ns for group, pids in groups.items()}


def tree_of(pid: int) -> list[int]:
    """A process and all that descends from it."""
    return [pid, *tree.descendants(pid)]


def thread_cpu_ns(thread: threading.Thread) -> int:
    """The same of one thread of this process."""
    return _on_cpu_ns(Path(f"/proc/self/task/{thread.native_id}/schedstat"))


def cpu_ns(pids: Sequence[int]) -> int:
    """Time on a CPU, user and system, to the nanosecond.

    Source: Documentation/scheduler/sched-stats.rst, /proc/<pid>/schedstat; in /proc/<pid>/stat it
    has a resolution of 10 ms, in which an idle guardian can't be told from none.
    """
    return sum(
        _on_cpu_ns(schedstat)
        for pid in pids
        for schedstat in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


def _on_cpu_ns(schedstat: Path) -> int:
    return int(schedstat.read_text().split()[0])


def memory_mb(pid: int) -> tuple[float, float]:
    """RSS, and the share that would be free if it ended (PSS)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kb = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
    return kb["Rss"] / 1024, kb["Pss"] / 1024


def shared_memory_mb(pids: Sequence[int]) -> float:
    """What would be free if all of them ended: their shares (PSS) together."""
    return sum(memory_mb(pid)[1] for pid in pids)


def fds(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def program(pid: int) -> str:
    """The name of the program that a process runs; empty for one that has gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
