"""Paths of checkpoints: paths of this machine, and URLs of files in a checkpoint store.

A `StorePath` has the methods of `pathlib.Path` that the rules for checkpoints use. So each rule is
written once, and applies to both kinds of path.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import has_magic, iglob
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from tasks.record.checkpoint_names import REMOVAL_SUFFIX
from tasks.record.checkpoint_store import CheckpointStore, StoreStat, open_store
from tasks.spec.checkpoint_urls import is_url, split_url


@dataclass(frozen=True, slots=True, order=True)
class StorePath:
    """URL of a file or folder in a checkpoint store.

    All paths that are derived from one `StorePath` share a `CheckpointStore`. The `CheckpointStore`
    lists the files of an object store only once, so later changes are not visible.
    """

    protocol: str
    #: Path in the store, such as `bucket/folder/file`. For the protocol `file`, an absolute path of
    #: this machine.
    key: str
    store: CheckpointStore = field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.protocol}://{self.key}"

    def __truediv__(self, name: str) -> StorePath:
        return self._with_key(str(PurePosixPath(self.key, name)))

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.key).suffix

    @property
    def parent(self) -> StorePath:
        return self._with_key(str(PurePosixPath(self.key).parent))

    @property
    def parents(self) -> tuple[StorePath, ...]:
        return tuple(self._with_key(str(parent)) for parent in PurePosixPath(self.key).parents)

    def with_name(self, name: str) -> StorePath:
        return self._with_key(str(PurePosixPath(self.key).with_name(name)))

    def relative_to(self, other: StorePath) -> PurePosixPath:
        return PurePosixPath(self.key).relative_to(other.key)

    def stat(self) -> StoreStat:
        """Return size and times of a file, or of the target of a symbolic link.

        Raises:
            FileNotFoundError: The file does not exist.
            StoreError: The store did not answer.
        """
        return self.store.stat(self.key)

    def is_dir(self) -> bool:
        return self.store.is_folder(self.key)

    def is_file(self) -> bool:
        return self.store.is_file(self.key)

    def exists(self) -> bool:
        return self.is_dir() or self.is_file()

    def is_symlink(self) -> bool:
        return self.store.read_link(self.key) is not None

    def readlink(self) -> str:
        """Return the target of a symbolic link, or an empty string if this path is no symbolic
        link.
        """
        return self.store.read_link(self.key) or ""

    def resolve(self) -> StorePath:
        return self._with_key(self.store.resolve(self.key))

    def iterdir(self) -> Iterator[StorePath]:
        """Yield the files and folders in a folder, sorted by their names."""
        yield from (self / name for name in self.store.list_folder(self.key))

    def rglob(self, pattern: str) -> Iterator[StorePath]:
        """Yield the files and folders with a matching name, at any depth below a folder."""
        for entry in self.iterdir():
            if fnmatchcase(entry.name, pattern):
                yield entry
            if entry.is_dir() and not entry.is_symlink():
                yield from entry.rglob(pattern)

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open a file for reading. The returned file object supports `seek`."""
        return self.store.open(self.key)

    def read_bytes(self) -> bytes:
        with self.open() as file:
            return file.read()

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.read_bytes().decode(encoding, errors)

    def _with_key(self, key: str) -> StorePath:
        return StorePath(self.protocol, key, self.store)


#: Path of a checkpoint, or of a file in a checkpoint.
CheckpointPath = Path | StorePath


def parse_checkpoint_path(text: str, root: Path | None = None) -> CheckpointPath:
    """Return the path or URL in a text of a spec or a record.

    Args:
        text: A path, or a URL such as `s3://bucket/folder`.
        root: Directory from which a relative path starts. If None, a relative path stays relative.

    Raises:
        StoreRefused: The Python package that connects to the store is not installed.
    """
    if not is_url(text):
        return Path(text) if root is None else root / text
    protocol, key = split_url(text)
    return StorePath(protocol, key, open_store(protocol, find_fixed_folder(key)))


def check_access(written: str) -> None:
    """Check that the object store of a checkpoint folder answers.

    For a path on this machine, nothing is checked.

    Args:
        written: Value of the spec key `checkpoints`, which may contain placeholders.

    Raises:
        StoreRefused: The store refuses access, the bucket does not exist, or the Python package
            that connects to the store is not installed.
        StoreUnreachable: The store did not answer.
    """
    if not is_url(written):
        return
    # The values of the placeholders are not known yet. So replace each placeholder with an
    # arbitrary folder name. The store answers even if that folder does not exist.
    folder = parse_checkpoint_path(re.sub(r"\$\{[^}]*\}", "muster-check", written))
    if "${" not in split_url(written)[1].partition("/")[0]:
        folder.is_dir()


def find_fixed_folder(key: str) -> str:
    """Return the fixed part of a path pattern: the folders before the first `*`, `?` or `[`.

    Example: `a/b` for the pattern `a/b/step-*/model`.
    """
    parts = key.split("/")
    fixed = next((index for index, part in enumerate(parts) if has_magic(part)), len(parts))
    return "/".join(parts[:fixed])


def identify_folder(written: str, root: Path) -> str:
    """Return a text that identifies the folder in a value of the spec key `checkpoints`.

    Two values for the same folder give the same text.
    """
    if not is_url(written):
        return os.path.realpath(root / written)
    protocol, key = split_url(written)
    return os.path.realpath(key) if protocol == "file" else f"{protocol}://{key}"


def identify_path(path: CheckpointPath) -> str:
    """Return a text that identifies a file or folder.

    Different paths to the same file or folder give the same text.
    """
    local_path = find_local_path(path)
    return os.path.realpath(local_path) if local_path is not None else str(path)


def find_local_path(path: CheckpointPath) -> Path | None:
    """Return a checkpoint's path as a local path, or None if the checkpoint is in an object store.

    A local path can also be written as a URL such as `file:///folder`.
    """
    if isinstance(path, Path):
        return path
    return Path(path.key) if path.protocol == "file" else None


def path_exists(path: CheckpointPath) -> bool:
    """Return True if a file, a folder or a link exists now.

    For an object store, a new request is sent each time, because a cached listing may be old.

    Raises:
        StoreError: The store did not answer.
    """
    local_path = find_local_path(path)
    if local_path is not None:
        return os.path.lexists(local_path)
    return parse_checkpoint_path(str(path)).exists()


def list_entries(folder: CheckpointPath) -> list[CheckpointPath]:
    """Return the files and folders in a folder, sorted by their names.

    Raises:
        OSError: The folder cannot be listed.
    """
    names = (
        os.listdir(folder)
        if isinstance(folder, Path)
        else [entry.name for entry in folder.iterdir()]
    )
    return [folder / name for name in sorted(names)]


def match_paths(pattern: CheckpointPath) -> list[CheckpointPath]:
    """Return the sorted paths that match a pattern such as `checkpoints/step_*`.

    As in a shell, `*` does not match a dot at the beginning of a name.

    Raises:
        StoreError: The store did not answer.
    """
    if isinstance(pattern, Path):
        return [Path(match) for match in sorted(iglob(str(pattern)))]
    fixed = find_fixed_folder(pattern.key)
    matches = [StorePath(pattern.protocol, fixed, pattern.store)]
    for part in PurePosixPath(pattern.key).relative_to(fixed).parts:
        matches = [
            entry
            for folder in matches
            if folder.is_dir()
            for entry in folder.iterdir()
            if fnmatchcase(entry.name, part)
            and (part.startswith(".") or not entry.name.startswith("."))
        ]
    return sorted(matches)


def walk_files(folder: CheckpointPath) -> Iterator[CheckpointPath]:
    """Yield the files below a folder. Symbolic links to folders are not followed.

    Raises:
        OSError: A folder cannot be listed. A folder that is deleted during the listing is ignored.
    """
    if isinstance(folder, Path):
        for current, _, names in os.walk(folder, onerror=_raise_unless_missing):
            yield from (Path(current, name) for name in sorted(names))
        return
    folders = [folder]
    while folders:
        current_folder = folders.pop()
        entries = list(current_folder.iterdir())
        folders += [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]
        yield from (entry for entry in entries if not entry.is_dir())


def _raise_unless_missing(error: OSError) -> None:
    # A folder that was deleted during the listing is no error.
    if not isinstance(error, FileNotFoundError):
        raise error


def remove_path(path: CheckpointPath, is_needed: Callable[[], bool] = lambda: False) -> None:
    """Delete a checkpoint in such a way that no program can load a partly deleted checkpoint.

    - On a local file system, the checkpoint is renamed first.
    - In an object store, a list of the checkpoint's files is written to a small file before the
      files are deleted. `CheckpointStore` hides the listed files.

    Args:
        path: The file or folder of the checkpoint.
        is_needed: Function that is called after the checkpoint is hidden, and before its first file
            is deleted. If this function returns True or raises an error, the checkpoint becomes
            visible again.

    Raises:
        OSError: The checkpoint cannot be deleted.
    """
    local_path = find_local_path(path)
    if local_path is None:
        assert isinstance(path, StorePath)
        # List the files again, because they may have changed since the checkpoint was selected.
        open_store(path.protocol, path.parent.key).remove(path.key, is_needed)
        return
    # A process that was killed while it deleted a checkpoint may have left the renamed checkpoint.
    # Delete such leftovers first. Otherwise, the `rename` below may fail, because a leftover may
    # already have the path `renamed`.
    _finish_removals(local_path.parent)
    renamed = local_path.with_name(f".{local_path.name}{REMOVAL_SUFFIX}")
    local_path.rename(renamed)
    must_restore = True
    try:
        must_restore = is_needed()
    finally:
        if must_restore:
            renamed.rename(local_path)
    _finish_removals(local_path.parent)


def _finish_removals(folder: Path) -> None:
    """Delete all checkpoints that `remove_path` has renamed in a folder."""
    for entry in folder.glob(f".*{REMOVAL_SUFFIX}"):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
