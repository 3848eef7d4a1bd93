"""Find and remove the shared memory segments in /dev/shm that the processes of a run have made.

A segment can outlive the processes that made it. After their end, nothing shows which run the
segment belongs to. So each segment is assigned to a run when it appears. inotify reports the new
file, and the process that has the file open or mapped at that moment has made it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from tasks.processes import tree

_log = logging.getLogger(__name__)

#: Directory of the shared memory segments. Each segment is a file.
DIRECTORY = Path("/dev/shm")
_IN_MOVED_FROM = 0x40
_IN_MOVED_TO = 0x80
_IN_CREATE = 0x100
_IN_DELETE = 0x200
_IN_ISDIR = 1 << 30
_APPEARED = _IN_CREATE | _IN_MOVED_TO
_REMOVED = _IN_DELETE | _IN_MOVED_FROM
#: Layout of `struct inotify_event`. Source: inotify(7).
_EVENT = struct.Struct("iIII")
#: Seconds from the first inotify event to the check of the new files. A library such as NCCL makes
#: many segments at once, which are then checked together.
_GATHER_S = 0.05
#: Seconds in which a new segment is checked repeatedly, until a process of the run has it open or
#: mapped. A process may close a segment and map it a moment later.
_MAPPED_WITHIN_S = 0.2
#: Largest share of one CPU core that the checks use. If there are many new files, the checks become
#: less frequent.
_CPU_SHARE = 0.02
#: Seconds that `close` waits for the last check, which may hang on a broken disk.
_LAST_CHECK_WITHIN_S = 5.0
#: Value that `hurry` writes to the eventfd to request a check at once.
_CHECK_NOW = 1
#: Value that `close` writes to the eventfd to request the last check.
_CHECK_LAST = 1 << 32


def _wait(fds: Iterable[int], within_s: float | None) -> bool:
    """Wait until one of the file descriptors is readable.

    Args:
        fds: The file descriptors.
        within_s: Time limit in seconds. None if there is no limit.

    Returns:
        False if the time limit is over before.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if within_s is None else within_s * 1000))


class SharedMemoryWatch:
    """Reports the shared memory segments that the processes of a run make, until `close`.

    A thread watches the directory with inotify. If the kernel offers no further inotify watch,
    nothing is reported.
    """

    def __init__(
        self,
        own_pids: Callable[[], set[int]],
        note: Callable[[set[Path], set[Path]], None],
        directory: Path = DIRECTORY,
    ) -> None:
        """
        Args:
            own_pids: Returns the pids of the run's processes. Called in the watching thread, once
                for each check.
            note: Called in the watching thread with the segments that the run has made, and with
                all files that were removed.
            directory: Directory to watch.
        """
        self._own_pids = own_pids
        self._note = note
        self._directory = directory
        #: Time at which each new file appeared, in CLOCK_MONOTONIC seconds. A file is removed from
        #: this dictionary when the process that made it is known, or after `_MAPPED_WITHIN_S`.
        self._appeared: dict[Path, float] = {}
        self._fd = _watch(directory)
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._follow, name="shared-memory", daemon=True)
        if self._fd >= 0:
            self._thread.start()

    def hurry(self, *, is_last: bool = False) -> None:
        """Request a check of the new files at once. Returns at once.

        Call this before processes of the run are stopped. After their end, the files that they had
        open are unknown.

        Args:
            is_last: True if the thread must end after this check.
        """
        os.eventfd_write(self._wake, _CHECK_LAST if is_last else _CHECK_NOW)

    def close(self) -> None:
        """Check for new segments a last time, and stop the watch. Blocks for at most 5 seconds."""
        self.hurry(is_last=True)
        if self._thread.is_alive():
            self._thread.join(_LAST_CHECK_WITHIN_S)
        if self._thread.is_alive():
            limit_s = _LAST_CHECK_WITHIN_S
            _log.warning("no last check of %s: it took over %g s", self._directory, limit_s)
            return
        os.close(self._wake)
        if self._fd >= 0:
            os.close(self._fd)

    def _follow(self) -> None:
        """Check the new files after each inotify event and each call of `hurry`, until `close`."""
        next_at = 0.0
        is_closing = False
        while not is_closing:
            if not self._appeared:
                _wait((self._fd, self._wake), None)
            pause_s = max(_GATHER_S, next_at - time.monotonic())
            if _wait((self._wake,), pause_s):
                is_closing = os.eventfd_read(self._wake) >= _CHECK_LAST
            began_s = time.thread_time()
            self._check()
            next_at = time.monotonic() + (time.thread_time() - began_s) / _CPU_SHARE

    def _check(self) -> None:
        """Check once which new files were made by processes of this run, and report these files."""
        now = time.monotonic()
        removed = self._read_events(now)
        wanted = {path for path in self._appeared if is_own_file(path)}
        made: set[Path] = set()
        try:
            if wanted:
                made = find_used_files(self._own_pids(), wanted)
        except OSError as error:  # for example, if this process has too many open files
            _log.warning(
                "the process that made %s could not be determined: %s",
                ", ".join(map(str, sorted(wanted))),
                error,
            )
        self._appeared = {
            path: at
            for path, at in self._appeared.items()
            if path in wanted - made and now - at < _MAPPED_WITHIN_S
        }
        if made or removed:
            self._note(made, removed)

    def _read_events(self, now: float) -> set[Path]:
        """Read the pending inotify events, and add the new files to `_appeared`.

        Args:
            now: The current time in CLOCK_MONOTONIC seconds.

        Returns:
            The files that were removed.
        """
        removed: set[Path] = set()
        with suppress(BlockingIOError):
            while True:
                data = memoryview(os.read(self._fd, 1 << 16))
                while data:
                    _, mask, _, length = _EVENT.unpack_from(data)
                    name = bytes(data[_EVENT.size : _EVENT.size + length]).rstrip(b"\0")
                    data = data[_EVENT.size + length :]
                    path = self._directory / os.fsdecode(name)
                    if mask & _REMOVED:
                        removed.add(path)
                        self._appeared.pop(path, None)
                    elif mask & _APPEARED and not mask & _IN_ISDIR:
                        self._appeared[path] = now
        return removed


def find_used_files(pids: Iterable[int], wanted: set[Path]) -> set[Path]:
    """Return the files from `wanted` that at least one of the processes has open or mapped.

    Raises:
        OSError: /proc cannot be read, for example because this process has too many open files.
    """
    held: set[Path] = set()
    names = {str(path): path for path in wanted}
    # In /proc/PID/maps, a space and the directory come before the name of each mapped file.
    folders = {b" " + os.fsencode(path.parent) + b"/" for path in wanted}
    for pid in pids:
        if len(held) == len(wanted):
            break
        held |= {names[target] for target in tree.list_open_files(pid).values() if target in names}
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            # Split the text at the directory instead of looping over its lines, because a process
            # may have thousands of mappings.
            maps = Path(f"/proc/{pid}/maps").read_bytes()
            for folder in folders:
                for rest in maps.split(folder)[1:]:
                    target = os.fsdecode(folder[1:] + rest.partition(b"\n")[0])
                    if target in names:
                        held.add(names[target])
    return held


def is_own_file(path: Path) -> bool:
    """Return True if the file exists and belongs to this user."""
    with suppress(OSError):
        return path.lstat().st_uid == os.getuid()
    return False


def remove_unused(paths: Iterable[Path]) -> list[Path]:
    """Remove the shared memory segments in `paths` that no process has open or mapped.

    Segments of other users stay.

    Args:
        paths: The segments.

    Returns:
        The removed segments. Empty if the processes that use the segments cannot be determined.
    """
    candidates = {path for path in paths if is_own_file(path)}
    removed: list[Path] = []
    try:
        unused = candidates - find_used_files(tree.all_pids(), candidates)
    except OSError as error:
        _log.warning("shared memory stays, because its users could not be determined: %s", error)
        return removed
    for path in sorted(unused):
        with suppress(OSError):
            path.unlink()
            removed.append(path)
    return removed


def _watch(directory: Path) -> int:
    """Return an inotify file descriptor that reports new and removed files of the directory.

    Returns:
        -1 if the kernel offers no further inotify watch.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        return -1
    if libc.inotify_add_watch(fd, os.fsencode(directory), _APPEARED | _REMOVED) < 0:
        os.close(fd)
        return -1
    return fd
