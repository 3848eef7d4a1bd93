"""Call a function as soon as a file is made in a directory, with inotify(7).

The kernel reports a new file within a millisecond, and an idle directory costs no CPU time.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

_log = logging.getLogger(__name__)

#: Flags of linux/inotify.h: a file was made in the directory, or was moved into it.
_IN_CREATE = 0x100
_IN_MOVED_TO = 0x80
#: Flag of the last event that the kernel reports about a directory.
_IN_IGNORED = 0x8000
#: Number of bytes for one read of events. The largest event has 272 bytes.
_READ_BYTES = 1 << 16
#: Layout of an inotify event: number of bytes before the name of the file, position of the flags,
#: and position of the length of the name. Source: inotify(7).
_HEADER_BYTES = 16
_FLAGS = slice(4, 8)
_NAME_LENGTH = slice(12, 16)


class DirectoryWatch:
    """Calls a function whenever a file is created in a directory.

    A thread of this object calls the function, until `close` ends the thread.

    If the kernel has no more inotify instances for this user, the function is never called. So the
    caller must also look at the directory from time to time.
    """

    def __init__(self, directory: Path, on_new_file: Callable[[], None]) -> None:
        """
        Args:
            directory: The directory.
            on_new_file: Called when a file was created in the directory. Must return at once.
        """
        self._on_new_file = on_new_file
        self._fd = -1
        self._watch_id = -1
        self._libc = ctypes.CDLL(None, use_errno=True)
        try:
            self._fd = self._check(self._libc.inotify_init1(os.O_CLOEXEC))
            path = os.fsencode(directory)
            flags = _IN_CREATE | _IN_MOVED_TO
            self._watch_id = self._check(self._libc.inotify_add_watch(self._fd, path, flags))
            threading.Thread(target=self._read_events, name="directory-watch", daemon=True).start()
        except (OSError, RuntimeError) as error:
            _log.debug(
                "Muster cannot use inotify for %s, so it notices new files there with a delay: %s",
                directory,
                error,
            )
            self._watch_id = -1
            if self._fd >= 0:
                os.close(self._fd)

    def close(self) -> None:
        """Stop the thread. Returns at once."""
        if self._watch_id >= 0:
            # End the thread: this call makes the kernel send the event IN_IGNORED, and the thread
            # ends when it reads that event.
            self._libc.inotify_rm_watch(self._fd, self._watch_id)
            self._watch_id = -1

    def _check(self, result: int) -> int:
        """Return the result of a system call, or raise the OSError that it has reported."""
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    def _read_events(self) -> None:
        """Read the events of the directory, and call `on_new_file` after each read."""
        is_over = False
        while not is_over:
            events = os.read(self._fd, _READ_BYTES)
            while events:
                flags = int.from_bytes(events[_FLAGS], "little")
                is_over = is_over or bool(flags & _IN_IGNORED)
                name_length = int.from_bytes(events[_NAME_LENGTH], "little")
                events = events[_HEADER_BYTES + name_length :]
            if not is_over:
                self._on_new_file()
        os.close(self._fd)
