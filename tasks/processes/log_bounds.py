"""Keep the logs of running programs below their size limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from tasks.processes.full_disks import describe_file_system
from tasks.record.log_bound import LogBound
from tasks.record.log_file import HeldLog

#: Seconds between two checks whether a log has exceeded its size limit.
_CHECK_EVERY_S = 1.0


async def keep_log_bounded(
    name: str, log: HeldLog, bound: LogBound, warn: Callable[[str], object]
) -> None:
    """Free the disk space of the middle of a log each time the log exceeds its size limit.

    The function runs until it is cancelled. If the file system cannot free the space of a part of a
    file, the function returns early. The size of the log is then not limited any more.

    Args:
        name: Name of the program that writes the log, for the warning.
        log: The log. Its file may be opened after the call.
        bound: Largest size of the log on the disk.
        warn: Function that is called with a warning if the file system cannot release a part of a
            file.
    """
    while True:
        await asyncio.sleep(_CHECK_EVERY_S)
        if log.size() <= bound.limit_bytes:
            continue
        try:
            await asyncio.to_thread(bound.apply, log.source)
        except OSError as error:
            place = f"the file system of {log.path}"
            with suppress(OSError):
                place = describe_file_system(log.path.parent)
            warn(
                f"the log of {name} is larger than log_max_bytes, and will keep growing. Muster "
                f"cannot shorten it, because {place} cannot free the beginning of a file "
                f"({error.strerror})"
            )
            return
