"""Find out which processes use a shared memory segment in /dev/shm, and remove unused segments."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tasks.processes import tree

_log = logging.getLogger(__name__)

#: Directory of the shared memory segments. Each segment is a file.
DIRECTORY = Path("/dev/shm")


def find_used_files(pids: Iterable[int], wanted: set[Path]) -> set[Path]:
    """Return the files from `wanted` that at least one of the processes has open or mapped.

    Raises:
        OSError: /proc cannot be read, for example because this process has too many open files.
    """
    held: set[Path] = set()
    names = {str(path): path for path in wanted}
    # The text that comes before the name of a mapped file in /proc/PID/maps: a space and the file's
    # directory.
    folders = {b" " + os.fsencode(path.parent) + b"/" for path in wanted}
    for pid in pids:
        if len(held) == len(wanted):
            break
        held |= {names[target] for target in tree.list_open_files(pid).values() if target in names}
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            # A process may have thousands of mappings, so a loop over the lines of the file would
            # be slow. Split the content of the file at the directories in `folders` instead.
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
        _log.warning(
            "Muster does not remove leftover files from shared memory, because Muster cannot find "
            "out which processes use these files: %s",
            error,
        )
        return removed
    for path in sorted(unused):
        with suppress(OSError):
            path.unlink()
            removed.append(path)
    return removed
