"""Find out quickly that a folder is too large for a copy of its code.

git lists the files of a folder only after it has read the whole folder. For a folder such as / or a
home directory, this takes minutes. The function in this module reads the folder level by level, and
stops as soon as the files that it has read are larger than the limit.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.record.places import muster_home
from tasks.record.repository import GitView, find_repository, git_view

#: Number of folders whose files are passed to git in one call. git then finds the ignored files.
_FOLDERS_AT_ONCE = 200
#: A folder that contains fewer files and folders than this number is small. git lists the files of
#: a small folder quickly, so `count_until` need not measure the folder and returns None.
_SMALL_PROJECT = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedFiles:
    """The files that `count_until` has counted in a folder."""

    #: Mapping from the path of each counted file, relative to the folder, to its size in bytes.
    sizes: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Size of all counted files."""
        return sum(self.sizes.values())


def count_until(
    root: Path, limit_bytes: int, excluded: Collection[str], left_out: Collection[str] = ()
) -> CountedFiles | None:
    """Count the files of a large folder until their total size reaches a limit.

    Files that git ignores, and the files of nested repositories, are not counted.

    Args:
        root: The folder.
        limit_bytes: Total size in bytes at which the count stops.
        excluded: Names of files and folders that are not counted.
        left_out: Relative paths of folders that are not counted.

    Returns:
        The counted files. None if the total size of all files does not exceed the limit. Also None
        if the folder contains fewer than `_SMALL_PROJECT` files and folders, even if the files are
        large.

    Raises:
        GitFailed: A git command failed.
        OSError: A temporary file could not be written.
    """
    if _is_small(root, excluded, left_out):
        return None
    home = muster_home().resolve()
    sizes: dict[str, int] = {}
    total_bytes = 0
    with git_view(root, find_repository(root)) as git:
        folders = [""]
        while folders:
            found: dict[str, int] = {}
            inner_folders: list[str] = []
            for folder in folders[:_FOLDERS_AT_ONCE]:
                files, inner = _read_folder(root, folder, excluded)
                found |= files
                inner_folders += [
                    name
                    for name in inner
                    if name not in left_out and (root / name).resolve() != home
                ]
            kept = _without_ignored(git, [*found, *inner_folders])
            for name in found.keys() & kept:
                sizes[name] = found[name]
                total_bytes += found[name]
            if total_bytes > limit_bytes:
                return CountedFiles(sizes=sizes)
            folders = folders[_FOLDERS_AT_ONCE:] + [name for name in inner_folders if name in kept]
    return None


def _is_small(root: Path, excluded: Collection[str], left_out: Collection[str]) -> bool:
    """Return True if a folder contains so few files and folders that git lists them quickly."""
    folders = [""]
    count = 0
    while folders:
        files, inner = _read_folder(root, folders.pop(), excluded)
        count += len(files) + len(inner)
        folders += [name for name in inner if name not in left_out]
        if count >= _SMALL_PROJECT:
            return False
    return True


def _read_folder(
    root: Path, folder: str, excluded: Collection[str]
) -> tuple[dict[str, int], list[str]]:
    """Return the sizes of the files in a folder, and the paths of its subfolders.

    The sizes are a mapping from the relative path of each file to its size in bytes. Both parts of
    the result are empty if the folder cannot be read, or if it is a nested repository.

    Args:
        root: Folder at which relative paths start.
        folder: Relative path of the folder. The empty string stands for `root`.
        excluded: Names of files and folders that are left out.
    """
    files: dict[str, int] = {}
    inner: list[str] = []
    with suppress(OSError), os.scandir(root / folder) as entries:
        for entry in entries:
            if entry.name == ".git" and folder:
                return {}, []
            if entry.name in excluded:
                continue
            name = f"{folder}/{entry.name}" if folder else entry.name
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    inner.append(name)
                elif stat.S_ISREG((status := entry.stat(follow_symlinks=False)).st_mode):
                    files[name] = status.st_size
    return files, inner


def _without_ignored(git: GitView, names: Collection[str]) -> set[str]:
    return set(names) - git.list_ignored(names)
