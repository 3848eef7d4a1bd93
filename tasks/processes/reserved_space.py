"""Reserved disk space for the final record of a run, in case the disk is full when the run ends.

Two files of fixed size in the registry directory of the run reserve the space from the start of the
run until its end. One is removed to make room for `run.json`. If `run.json` is larger, the other
one receives a short form of the record.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from tasks.record.run_json import AttemptRecord, RunJson

#: Name of the file that reserves disk space for the short form of a run's final record. The file
#: is in the run's registry directory.
_FILE_NAME = "end"
#: Number of bytes that are reserved for the short form of the record.
_SIZE_BYTES = 16384
#: Name of the file that reserves disk space for the whole final `run.json`. The file is in the
#: run's registry directory. It is removed before `run.json` is written.
_ROOM_NAME = "room"
#: Number of bytes that are reserved for `run.json` of each run.
_ROOM_BYTES = 32768


def reserve(directory: Path) -> None:
    """Reserve disk space for the run's final record.

    Two new files in the run's registry directory occupy the space.

    Args:
        directory: Directory of the run in the registry.

    Raises:
        OSError: A file cannot be written, for example because the disk is full.
    """
    for name, size_bytes in ((_FILE_NAME, _SIZE_BYTES), (_ROOM_NAME, _ROOM_BYTES)):
        path = directory / name
        with path.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from error


def make_room(directory: Path) -> None:
    """Free the disk space that is reserved for `run.json`.

    Raises:
        OSError: The file that reserves the space cannot be removed.
    """
    (directory / _ROOM_NAME).unlink(missing_ok=True)


def write_final_record(directory: Path, record: RunJson) -> None:
    """Write a short form of the run's final record into the reserved disk space.

    The short form contains the final state, the message and the failure of the last attempt.
    Nothing is written if the short form is larger than the reserved space.

    Raises:
        OSError: The reserved file does not exist or cannot be written.
    """
    attempts: tuple[AttemptRecord, ...] = ()
    if (last := record.attempt) is not None:
        failure = last.failure.with_changes(log_tail="") if last.failure else None
        attempts = (last.with_changes(components={}, failure=failure),)
    short_record = RunJson(
        state=record.state, message=record.message, ended_at=record.ended_at, attempts=attempts
    )
    text = json.dumps(short_record.as_json()).encode()
    if len(text) <= _SIZE_BYTES:
        fd = os.open(directory / _FILE_NAME, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.pwrite(fd, text.ljust(_SIZE_BYTES), 0)
        finally:
            os.close(fd)


def read_final_record(directory: Path) -> RunJson | None:
    """Return the final record from the reserved disk space; None if none was written there."""
    with suppress(OSError, ValueError):
        return RunJson.read(directory / _FILE_NAME)
    return None
