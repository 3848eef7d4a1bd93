"""Which segments of /dev/shm a run's processes made, so that those they leave can be removed.

A segment belongs to nobody once its makers are dead, and its name tells nothing for certain. So a
name is attributed when it appears: the kernel tells of each new one (inotify), and whoever has it
open or mapped then has made it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

DIRECTORY = Path("/dev/shm")
_IN_CREATE, _IN_MOVED_TO = 0x100, 0x80
_EVENT = struct.Struct("iIII")
#: Many appear at once, when a collective library starts: they are looked up together.
_GATHER_S = 0.05
#: A maker may have closed it again by then, and mapped it a moment later.
_LOOKS = 4


class SharedMemoryWatch:
    """Tells of each segment that a process of ours has made. Lives in an asyncio loop.

    Does nothing where /dev/shm can't be watched.
    """

    def __init__(
        self,
        own_pids: Callable[[], set[int]],
        on_made: Callable[[Path], None],
        directory: Path = DIRECTORY,
    ) -> None:
        """
        Args:
            own_pids: every process of the run.
            on_made: told each segment, once.
        """
        self._own_pids = own_pids
        self._on_made = on_made
        self._directory = directory
        #: `looks[name]`: how often it has been looked for without finding who made it.
        self._looks: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looked_at = 0.0
        self._fd = _watch(directory)
        if self._fd >= 0:
            asyncio.get_running_loop().add_reader(self._fd, self._on_news)

    def close(self) -> None:
        """Look a last time, and watch no more."""
        if self._fd < 0:
            return
        self._on_news()
        self._look()
        if self._timer is not None:
            self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1

    def _on_news(self) -> None:
        with suppress(BlockingIOError):
            data = os.read(self._fd, 1 << 16)
            while data:
                *_, length = _EVENT.unpack_from(data)
                name = data[_EVENT.size : _EVENT.size + length].rstrip(b"\0")
                self._looks[os.fsdecode(name)] = 0
                data = data[_EVENT.size + length :]
        self._look_soon()

    def _look_soon(self) -> None:
        if self._timer is None and self._looks:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._looked_at + _GATHER_S, self._look)

    def _look(self) -> None:
        self._timer = None
        self._looked_at = asyncio.get_running_loop().time()
        wanted = {self._directory / name for name in self._looks}
        for path in held_by(self._own_pids(), wanted):
            del self._looks[path.name]
            self._on_made(path)
        self._looks = {name: n + 1 for name, n in self._looks.items() if n + 1 < _LOOKS}
        self._look_soon()


def held_by(pids: Iterable[int], wanted: set[Path]) -> set[Path]:
    """Which of the files a process among `pids` has open or mapped."""
    found: set[Path] = set()
    names = {str(path): path for path in wanted}
    for pid in pids:
        if len(found) == len(wanted):
            break
        with suppress(OSError):
            for fd in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    if (path := names.get(os.readlink(fd.path))) is not None:
                        found.add(path)
        with suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as f:
            for line in f:
                if (path := names.get("/" + line.rstrip("\n").partition("/")[2])) is not None:
                    found.add(path)
    return found


def remove_unused(paths: Iterable[Path]) -> list[Path]:
    """Remove those of our own segments that no living process has open or mapped.

    Returns: those removed.
    """
    candidates = set()
    for path in paths:
        with suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                candidates.add(path)
    if not candidates:
        return []
    in_use = held_by((int(name) for name in os.listdir("/proc") if name.isdigit()), candidates)
    removed = []
    for path in sorted(candidates - in_use):
        with suppress(OSError):
            path.unlink()
            removed.append(path)
    return removed


def _watch(directory: Path) -> int:
    """An inotify fd; -1 where none is to be had."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        return -1
    if libc.inotify_add_watch(fd, os.fsencode(directory), _IN_CREATE | _IN_MOVED_TO) < 0:
        os.close(fd)
        return -1
    return fd
