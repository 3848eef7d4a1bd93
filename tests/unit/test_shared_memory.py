"""The watch on shared memory: its cost, and which files a process uses."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tasks.processes import shared_memory
from tasks.processes.shared_memory import SharedMemoryWatch, find_used_files
from tests.support.supervised_components import DEADLINE_S


class Crowd:
    """Simulation of ten seconds in which other processes create 20 files per second in /dev/shm.

    Muster checks which process uses a file. Each of these checks takes 50 ms of CPU time.
    """

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.cpu_s = 0.0
        self.checks = 0
        self.files = iter([(at / 20, directory / f"others-{at}") for at in range(200)])
        self.next = next(self.files, None)

    def own_pids(self) -> set[int]:
        self.checks += 1
        self.cpu_s += 0.05
        return {os.getpid()}

    def wait(self, fds: Sequence[int], within_s: float | None) -> bool:
        if within_s is not None:
            self.now += within_s
        elif self.next is not None:
            self.now = max(self.now, self.next[0])
        while self.next is not None and self.next[0] <= self.now:
            self.next[1].touch()
            self.next = next(self.files, None)
        if self.next is None:
            os.eventfd_write(fds[-1], shared_memory._CHECK_LAST)
        return within_s is None or self.next is None

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.cpu_s


def test_shared_memory_watch_uses_a_limited_share_of_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = Crowd(tmp_path)
    noted: set[Path] = set()
    monkeypatch.setattr(shared_memory, "_wait", crowd.wait)
    monkeypatch.setattr(shared_memory, "time", crowd)

    watch = SharedMemoryWatch(
        crowd.own_pids, lambda made, gone: noted.update(made), directory=tmp_path
    )
    watch._thread.join(DEADLINE_S)
    watch.close()

    assert len(list(tmp_path.iterdir())) == 200 and not noted
    assert crowd.checks >= 2
    # Two checks, the first and the last, are not subject to the limit of 2 % of a core.
    assert crowd.cpu_s <= 0.02 * crowd.now + 2 * 0.05


def test_closed_segment_is_held_while_it_is_mapped(tmp_path: Path) -> None:
    segment = tmp_path / "a segment"
    with segment.open("w+b") as file:
        file.truncate(4096)
        mapped = mmap.mmap(file.fileno(), 4096)

    held = find_used_files([os.getpid()], {segment, tmp_path / "segment"})

    assert held == {segment}
    mapped.close()
    assert find_used_files([os.getpid()], {segment}) == set()
