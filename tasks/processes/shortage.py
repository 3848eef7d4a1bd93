"""Shortages of this machine or process: no open file, memory or port is left.

They say nothing about whoever was to be asked, so they never count against a component or a server.
Standard library only.
"""

from __future__ import annotations

import errno
import os

#: Of an OSError: no open files, here or on the machine, no memory, no ports for connections.
OWN_SHORTAGES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL}
)


class Unasked(str):
    """Why a question could not be asked: this process lacks something, such as open files.

    It says nothing about the component.
    """

    __slots__ = ()


def is_own_shortage(error: BaseException) -> bool:
    """Whether an error, or an error that led to it, says that this machine lacks something."""
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
    """Whether this process can open nothing more. Some libraries do not say that it was why."""
    try:
        os.close(os.open("/", os.O_PATH))
    except OSError as error:
        return error.errno in OWN_SHORTAGES
    return False
