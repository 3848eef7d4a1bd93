"""Recognise a shortage of this machine or process: no more files, memory or ports are available.

If a probe fails because of such a shortage, the component or server that the probe checks is not to
blame. So the failed check does not count as a failure of that component or server. This module uses
only the standard library.
"""

from __future__ import annotations

import errno
import os

#: Error numbers that mean that this process or this machine has no more file descriptors, memory,
#: network buffers, or free ports for connections.
OWN_SHORTAGES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL}
)


class NotChecked(str):
    """Reason for a missing check of a component: the checking process lacked a resource.

    The missing check does not count as a failure of the component.
    """

    __slots__ = ()


def is_own_shortage(error: BaseException) -> bool:
    """Return True if an error was caused by a shortage of file descriptors, memory or ports.

    Only a shortage in this process or on this machine counts. The error itself, its causes, and the
    members of an exception group are checked. Some libraries do not pass the error number on. So
    the function also returns True if this process cannot open another file now.
    """
    causes: list[BaseException | None] = [error]
    seen: set[int] = set()
    while causes:
        cause = causes.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        if isinstance(cause, OSError) and cause.errno in OWN_SHORTAGES:
            return True
        if isinstance(cause, BaseExceptionGroup):
            causes += cause.exceptions
        causes += [cause.__cause__, cause.__context__]
    return has_no_files_left()


def has_no_files_left() -> bool:
    """Return True if this process cannot open another file.

    Call this if an exception contains no error number (`errno`). Some libraries do not pass the
    number on, so the exception does not show whether too many files were open.
    """
    try:
        os.close(os.open("/", os.O_PATH))
    except OSError as error:
        return error.errno in OWN_SHORTAGES
    return False
