"""Shortages of this machine or process: no open files, memory or ports remain.

A shortage is no fault of the component or server that this process wanted to ask. So it never
counts against a component or a server. Standard library only.
"""

from __future__ import annotations

import errno
import os

#: Error numbers of a shortage: open files of the process or of the machine, memory, buffers, ports
#: for connections.
OWN_SHORTAGES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL}
)


class Unasked(str):
    """Reason why a question could not be asked: this process has a shortage, such as no open files.

    It is no fault of the component.
    """

    __slots__ = ()


def is_own_shortage(error: BaseException) -> bool:
    """Return True if an error, or one of its causes, is a shortage of this machine or process."""
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

    Some libraries hide the error number of such a failure.
    """
    try:
        os.close(os.open("/", os.O_PATH))
    except OSError as error:
        return error.errno in OWN_SHORTAGES
    return False
