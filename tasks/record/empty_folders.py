"""Find the empty folders of a project. git lists only files."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

#: Largest number of folders that are read in one search. Folders near the root of the project are
#: read first. A project with more folders usually contains a data set.
_MOST_FOLDERS = 10_000
#: Names that exist only at the root of a Python environment: the file `pyvenv.cfg` in a virtual
#: environment, and the folder `conda-meta` in a conda environment.
_ENVIRONMENT_MARKERS = frozenset(("pyvenv.cfg", "conda-meta"))


def find_empty_folders(root: Path, is_left_out: Callable[[str], bool]) -> Iterator[str]:
    """Yield the relative paths of a project's empty folders.

    A folder that contains an empty folder is not empty itself, so it is not yielded. Folders behind
    symbolic links, folders named `.git`, and subfolders of Python environments are not searched. A
    folder that cannot be read is skipped. The search ends after 10,000 folders.

    Args:
        root: The project folder.
        is_left_out: Function that returns True if a folder must not be searched. The argument is
            the relative path of the folder.
    """
    waiting = deque([""])
    read_count = 0
    while waiting and read_count < _MOST_FOLDERS:
        folder = waiting.popleft()
        read_count += 1
        with suppress(OSError):
            with os.scandir(root / folder) as entries:
                content = list(entries)

            if not content and folder:
                yield folder
            elif not (folder and _ENVIRONMENT_MARKERS & {entry.name for entry in content}):
                prefix = f"{folder}/" if folder else ""
                inner = (f"{prefix}{entry.name}" for entry in content if _is_folder(entry))
                waiting.extend(name for name in inner if not is_left_out(name))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return True for a folder that is not named `.git` and is not a symbolic link."""
    if entry.name == ".git":
        return False
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
