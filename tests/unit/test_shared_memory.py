"""The scan for shared memory: its cost, and which files a process uses."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.processes import shared_memory_scan
from tasks.processes.directory_watch import DirectoryWatch
from tasks.processes.shared_memory import find_used_files
from tasks.processes.shared_memory_scan import SharedMemoryScan, choose_pause_s
from tests.support.supervised_components import wait_until


class Notes:
    """The shared-memory files that a scan has reported."""

    def __init__(self) -> None:
        self.made: set[Path] = set()
        self.removed: list[Path] = []

    def __call__(self, made: set[Path], removed: set[Path]) -> None:
        self.made = (self.made - removed) | made
        self.removed += sorted(removed)


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def scan(tmp_path: Path, notes: Notes) -> Iterator[SharedMemoryScan]:
    """Yield a running scan, which reports the files that this process creates in a directory.

    The file `earlier` exists before the scan starts.
    """
    (tmp_path / "earlier").touch()
    scan = SharedMemoryScan(lambda: {os.getpid()}, notes, directory=tmp_path)
    yield scan
    scan.close()


def test_file_of_the_run_is_reported_without_a_request(
    scan: SharedMemoryScan, notes: Notes, tmp_path: Path
) -> None:
    with (tmp_path / "earlier").open("w"), (tmp_path / "own").open("w"):
        wait_until(lambda: bool(notes.made), "the file is reported")

    assert notes.made == {tmp_path / "own"}


def test_new_file_is_reported_before_the_next_regular_check(
    tmp_path: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory_scan, "_CHECK_EVERY_S", 3600.0)
    monkeypatch.setattr(shared_memory_scan, "_SCAN_EVERY_S", 3600.0)
    scan = SharedMemoryScan(lambda: {os.getpid()}, notes, directory=tmp_path)

    with (tmp_path / "own").open("w"):
        wait_until(lambda: bool(notes.made), "the file is reported")

    scan.close()
    assert notes.made == {tmp_path / "own"}


def test_closed_scan_leaves_no_thread_and_no_open_file(tmp_path: Path, notes: Notes) -> None:
    threads = threading.active_count()
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        scan = SharedMemoryScan(lambda: {os.getpid()}, notes, directory=tmp_path)
        scan.close()

    wait_until(lambda: threading.active_count() <= threads, "the threads end")
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files, "the files are closed")


def test_file_is_reported_without_inotify_instances(
    tmp_path: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_watch: DirectoryWatch, _result: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(DirectoryWatch, "_check", fail)
    scan = SharedMemoryScan(lambda: {os.getpid()}, notes, directory=tmp_path)

    with (tmp_path / "own").open("w"):
        wait_until(lambda: bool(notes.made), "the file is reported")

    scan.close()


def test_files_that_no_process_of_the_run_uses_are_not_reported(
    scan: SharedMemoryScan, notes: Notes, tmp_path: Path
) -> None:
    # Create the file in another directory and then move it. A file that this process opens in the
    # scanned directory would count as a file of the run.
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.touch()
    elsewhere.rename(tmp_path / "others")
    (tmp_path / "link").symlink_to(tmp_path / "others")
    (tmp_path / "folder").mkdir()

    scan.close()

    assert notes.made == set()


def test_file_made_just_before_the_end_is_reported(
    scan: SharedMemoryScan, notes: Notes, tmp_path: Path
) -> None:
    with (tmp_path / "last").open("w"):
        scan.close()

    assert notes.made == {tmp_path / "last"}


def test_file_that_another_process_made_again_is_not_kept_as_a_file_of_the_run(
    scan: SharedMemoryScan, notes: Notes, tmp_path: Path
) -> None:
    """Another process may replace a shared-memory file of the run with a file of the same name.

    This new file does not belong to the run, so it must not be removed at the end of the run.
    """
    segment = tmp_path / "segment"
    with segment.open("w"):
        scan.hurry()
        wait_until(lambda: bool(notes.made), "the file is reported")
    other = tmp_path.parent / f"{tmp_path.name}-other"
    other.touch()
    other.replace(segment)

    scan.close()

    assert notes.made == set()
    assert notes.removed == [segment]


@pytest.mark.parametrize(("cpu_s", "pause_s"), [(0.0, 0.1), (0.001, 0.1), (0.05, 2.5)])
def test_scans_use_at_most_two_percent_of_a_core(cpu_s: float, pause_s: float) -> None:
    assert choose_pause_s(cpu_s) == pytest.approx(pause_s)


def test_closed_segment_is_held_while_it_is_mapped(tmp_path: Path) -> None:
    segment = tmp_path / "a segment"
    with segment.open("w+b") as file:
        file.truncate(4096)
        mapped = mmap.mmap(file.fileno(), 4096)

    held = find_used_files([os.getpid()], {segment, tmp_path / "segment"})

    assert held == {segment}
    mapped.close()
    assert find_used_files([os.getpid()], {segment}) == set()
