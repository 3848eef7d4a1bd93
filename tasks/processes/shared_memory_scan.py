"""Find the shared memory segments in /dev/shm that the processes of a run make, by regular scans.

A segment can outlive the processes that made it. After their end, nothing shows which run the
segment belongs to. So each scan looks for new files, and assigns a new file to the run if a process
of the run has the file open or mapped.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tasks.processes.directory_watch import DirectoryWatch
from tasks.processes.shared_memory import DIRECTORY, find_used_files

_log = logging.getLogger(__name__)

#: Longest time in seconds between two scans of /dev/shm.
_SCAN_EVERY_S = 1.0
#: Seconds between two checks whether /dev/shm has changed. A change causes a scan. A check reads
#: only the time of the last change, so it is much cheaper than a scan. In addition, the kernel
#: usually reports a new file at once, so that even the files of a short-lived process are found.
_CHECK_EVERY_S = 0.1
#: Seconds during which the scans check whether a process of the run uses a new file in /dev/shm.
#: The time begins when a scan finds the file. One check is not enough: a process may close the file
#: and map the file a moment later.
_MAPPED_WITHIN_S = 0.25
#: Largest share of one CPU core for scans of /dev/shm. If there are many files, the scans become
#: less frequent.
_CPU_SHARE = 0.02
#: Seconds that `close` waits for the last scan, which may hang on a broken disk.
_LAST_SCAN_WITHIN_S = 5.0

#: Name and inode number of a file. A file that was made again has the same name, but another inode.
_File = tuple[str, int]


def choose_pause_s(cpu_s: float) -> float:
    """Return the pause in seconds after a scan of /dev/shm that took `cpu_s` of CPU time."""
    return max(_CHECK_EVERY_S, cpu_s / _CPU_SHARE)


class SharedMemoryScan:
    """Reports the shared memory segments that the processes of a run make, until `close`.

    A thread scans /dev/shm. If /dev/shm cannot be read, nothing is reported.
    """

    def __init__(
        self,
        own_pids: Callable[[], set[int]],
        note: Callable[[set[Path], set[Path]], None],
        directory: Path = DIRECTORY,
    ) -> None:
        """
        Args:
            own_pids: Returns the pids of the run's processes. Called in the scanning thread, at
                most once for each scan.
            note: Called in the scanning thread with the shared memory segments that the run has
                made, and with segments of the run that were removed.
            directory: Directory to scan. Files that the directory contains now do not belong to the
                run.
        """
        self._own_pids = own_pids
        self._note = note
        self._directory = directory
        #: Files that the last scan has found.
        self._known: set[_File] = set()
        #: Files that processes of the run have made in the directory and that still exist.
        self._made: set[_File] = set()
        #: Mapping from each new file to the time at which the file was found, in CLOCK_MONOTONIC
        #: seconds. An entry is dropped when a process of the run uses the file, or after
        #: `_MAPPED_WITHIN_S` seconds.
        self._found_at: dict[_File, float] = {}
        #: Modification time of the directory at the last scan, in nanoseconds.
        self._changed_at_ns = 0
        self._is_closing = False
        #: Earliest time at which a new file can cause a scan, in CLOCK_MONOTONIC seconds.
        self._next_scan_at = 0.0
        self._wake = threading.Event()
        self._watch: DirectoryWatch | None = None
        self._thread = threading.Thread(target=self._run, name="shared-memory", daemon=True)
        try:
            self._known = self._list_files()
        except OSError as error:
            _log.warning(
                "Muster could not list the files in shared memory. So files of the run may remain "
                "there after the run: %s",
                error,
            )
            return
        self._thread.start()
        self._watch = DirectoryWatch(directory, self._scan_for_new_file)

    def hurry(self) -> None:
        """Request a scan for new files in shared memory. Does not wait for the scan.

        Call this before processes of the run are stopped. After the end of a process, nobody can
        determine which files the process had open.
        """
        self._wake.set()

    def _scan_for_new_file(self) -> None:
        """Request a scan because of a new file. Do nothing in the pause after the last scan."""
        if time.monotonic() >= self._next_scan_at:
            self._wake.set()

    def close(self) -> None:
        """Scan a last time, and stop the thread. Blocks for at most 5 seconds."""
        if self._watch is not None:
            self._watch.close()
        self._is_closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_SCAN_WITHIN_S)
        if self._thread.is_alive():
            limit_s = _LAST_SCAN_WITHIN_S
            _log.warning(
                "Muster could not finish the search for leftover files of the run in %s within "
                "%g s. Some of these files may remain",
                self._directory,
                limit_s,
            )

    def _run(self) -> None:
        """Scan the directory every second, and also after a change and after a call of `hurry`."""
        pause_s = _CHECK_EVERY_S
        scanned_at = time.monotonic()
        is_closing = False
        while not is_closing:
            is_requested = self._wake.wait(pause_s)
            self._wake.clear()
            is_closing = self._is_closing
            is_due = time.monotonic() - scanned_at >= _SCAN_EVERY_S
            pause_s = _CHECK_EVERY_S
            if is_requested or is_due or self._found_at or self._has_changed():
                began_s = time.thread_time()
                try:
                    self._scan(time.monotonic())
                except OSError as error:  # for example, if this process has too many open files
                    _log.warning(
                        "files in shared memory could not be listed. Muster tries again: %s",
                        error,
                    )
                scanned_at = time.monotonic()
                pause_s = choose_pause_s(time.thread_time() - began_s)
                self._next_scan_at = scanned_at + pause_s

    def _has_changed(self) -> bool:
        """Return True if a file was made or removed in the directory since the last scan."""
        try:
            return os.stat(self._directory).st_mtime_ns != self._changed_at_ns
        except OSError:
            return False

    def _list_files(self) -> set[_File]:
        """Return all files of the directory. Raise OSError if the directory cannot be read."""
        self._changed_at_ns = os.stat(self._directory).st_mtime_ns
        with os.scandir(self._directory) as entries:
            return {(entry.name, entry.inode()) for entry in entries}

    def _scan(self, now: float) -> None:
        """Find new files in shared memory that processes of this run have made, and report them.

        Args:
            now: The current time in CLOCK_MONOTONIC seconds.

        Raises:
            OSError: The directory or the files of the run's processes cannot be read.
        """
        files = self._list_files()
        for file in files - self._known:
            if self._is_own_segment(file):
                self._found_at[file] = now
        self._known = files
        self._found_at = {file: at for file, at in self._found_at.items() if file in files}

        removed = self._made - files
        self._made -= removed
        made: set[_File] = set()
        try:
            if self._found_at:
                by_path = {self._directory / file[0]: file for file in self._found_at}
                used_paths = find_used_files(self._own_pids(), set(by_path))
                made = {by_path[path] for path in used_paths}
        finally:
            self._made |= made
            self._found_at = {
                file: at
                for file, at in self._found_at.items()
                if file not in made and now - at < _MAPPED_WITHIN_S
            }
            if made or removed:
                self._note(
                    {self._directory / name for name, _ in made},
                    {self._directory / name for name, _ in removed},
                )

    def _is_own_segment(self, file: _File) -> bool:
        """Return True if a file in /dev/shm is a regular file of this user."""
        try:
            status = os.lstat(os.path.join(self._directory, file[0]))
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
