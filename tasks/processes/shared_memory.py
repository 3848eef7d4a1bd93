"""Find the shared memory segments in /dev/shm that the processes of a run have made.

After the death of the processes that made a segment, the segment has no owner and its name proves
nothing. So each segment is attributed when it appears: inotify reports the new name, and a process
that has the segment open or mapped at that moment has made it.
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
#: Seconds to collect new names before the check. A collective library makes many segments at once.
_GATHER_S = 0.05
#: Seconds in which an unattributed segment is checked again. Its maker may close it and map it
#: later.
_MAPPED_WITHIN_S = 0.2
#: Largest share of one CPU core for the checks. Many new files only make the checks rarer.
_CPU_SHARE = 0.02
#: Seconds to wait for the last check, which may hang on a broken disk.
_LAST_CHECK_WITHIN_S = 5.0
#: Value written to the eventfd to request a check at once.
_CHECK_NOW = 1
#: Value written to the eventfd to request a last check.
_CHECK_LAST = 1 << 32


def _wait(fds: Iterable[int], within_s: float | None) -> bool:
    """Wait until a file descriptor is readable. Return False if the time is over first."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if within_s is None else within_s * 1000))


class SharedMemoryWatch:
    """Notes the shared memory segments that the processes of a run make, until `close`.

    Does nothing if the directory cannot be watched.
    """

    def __init__(
        self,
        own_pids: Callable[[], set[int]],
        note: Callable[[set[Path], set[Path]], None],
        directory: Path = DIRECTORY,
    ) -> None:
        """
        Args:
            own_pids: Returns the pids of the run. Called in a thread, once for each check.
            note: Called in that thread with the segments that the run made, and with all files that
                were removed.
            directory: Directory to watch.
        """
        self._own_pids = own_pids
        self._note = note
        self._directory = directory
        #: Time at which each unattributed file appeared, in CLOCK_MONOTONIC seconds.
        self._appeared: dict[Path, float] = {}
        self._fd = _watch(directory)
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._follow, name="shared-memory", daemon=True)
        if self._fd >= 0:
            self._thread.start()

    def hurry(self, *, is_last: bool = False) -> None:
        """Request a check at once, because a process that made a segment may be about to end.

        Returns at once.
        """
        os.eventfd_write(self._wake, _CHECK_LAST if is_last else _CHECK_NOW)

    def close(self) -> None:
        """Make a last check and stop watching. Blocks for at most 5 seconds."""
        self.hurry(is_last=True)
        if self._thread.is_alive():
            self._thread.join(_LAST_CHECK_WITHIN_S)
        if self._thread.is_alive():
            _log.warning("the last look at %s takes too long: not waited for", self._directory)
            return
        os.close(self._wake)
        if self._fd >= 0:
            os.close(self._fd)

    def _follow(self) -> None:
        """Check after each event or request, until `close`."""
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
        now = time.monotonic()
        gone = self._read_events(now)
        wanted = {path for path in self._appeared if is_own_file(path)}
        made: set[Path] = set()
        try:
            if wanted:
                made = held_by(self._own_pids(), wanted)
        except OSError as error:  # No more files can be opened, for example.
            _log.warning(
                "who has made %s is not known: %s", ", ".join(map(str, sorted(wanted))), error
            )
        self._appeared = {
            path: at
            for path, at in self._appeared.items()
            if path in wanted - made and now - at < _MAPPED_WITHIN_S
        }
        if made or gone:
            self._note(made, gone)

    def _read_events(self, now: float) -> set[Path]:
        """Read the pending inotify events: return removed files, and add new files to
        `_appeared`.
        """
        gone: set[Path] = set()
        with suppress(BlockingIOError):
            while True:
                data = memoryview(os.read(self._fd, 1 << 16))
                while data:
                    _, mask, _, length = _EVENT.unpack_from(data)
                    name = bytes(data[_EVENT.size : _EVENT.size + length]).rstrip(b"\0")
                    data = data[_EVENT.size + length :]
                    path = self._directory / os.fsdecode(name)
                    if mask & _REMOVED:
                        gone.add(path)
                        self._appeared.pop(path, None)
                    elif mask & _APPEARED and not mask & _IN_ISDIR:
                        self._appeared[path] = now
        return gone


def held_by(pids: Iterable[int], wanted: set[Path]) -> set[Path]:
    """Return those of the files that one of the processes has open or mapped.

    Raises:
        OSError: This process cannot check, for example because it cannot open more files (EMFILE).
    """
    held: set[Path] = set()
    names = {str(path): path for path in wanted}
    # Each path of a mapping in /proc/PID/maps begins with a space and its folder.
    folders = {b" " + os.fsencode(path.parent) + b"/" for path in wanted}
    for pid in pids:
        if len(held) == len(wanted):
            break
        held |= {names[target] for target in tree.open_files(pid).values() if target in names}
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            # Processes often have thousands of mappings, so a Python loop over all lines would be
            # slow.
            maps = Path(f"/proc/{pid}/maps").read_bytes()
            for folder in folders:
                for rest in maps.split(folder)[1:]:
                    target = os.fsdecode(folder[1:] + rest.partition(b"\n")[0])
                    if target in names:
                        held.add(names[target])
    return held


def is_own_file(path: Path) -> bool:
    """Return True if the file exists and belongs to this user. Other users' files are never
    removed.
    """
    with suppress(OSError):
        return path.lstat().st_uid == os.getuid()
    return False


def remove_unused(paths: Iterable[Path]) -> list[Path]:
    """Remove the segments of this user that no living process has open or mapped.

    Returns:
        The removed segments; an empty list if their users are unknown.
    """
    candidates = {path for path in paths if is_own_file(path)}
    removed: list[Path] = []
    try:
        unused = candidates - held_by(tree.all_pids(), candidates)
    except OSError as error:
        _log.warning("shared memory is not removed, its users are unknown: %s", error)
        return removed
    for path in sorted(unused):
        with suppress(OSError):
            path.unlink()
            removed.append(path)
    return removed


def _watch(directory: Path) -> int:
    """Return an inotify file descriptor for the directory; -1 if none is available."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        return -1
    if libc.inotify_add_watch(fd, os.fsencode(directory), _APPEARED | _REMOVED) < 0:
        os.close(fd)
        return -1
    return fd
