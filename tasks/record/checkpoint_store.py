"""Stores of checkpoints: list, examine, read and remove files by one small interface.

`LocalStore` is the file system of this machine, for URLs with `file://`. `FsspecStore` is an object
store, such as Amazon S3 or Google Cloud Storage, that the library fsspec reads.

An object store can fail to answer. This is never the same as a folder without checkpoints: each
request has a deadline, and each failure raises a `StoreError`.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol, TypeVar

from tasks.record.checkpoint_names import REMOVAL_SUFFIX
from tasks.spec.checkpoint_urls import EXTRAS

T = TypeVar("T")

#: Python package that fsspec needs for a protocol.
_CLIENTS = {"s3": "s3fs", "gs": "gcsfs"}
#: Prefixes of the environment variables that change the connection to a store.
_CONNECTION_VARIABLES = ("AWS_", "GOOGLE_", "FSSPEC_", "STORAGE_EMULATOR_HOST")
#: Number of bytes of the first request when a file is read. Most checks read only the beginning and
#: the end of a file.
_FIRST_BLOCK_BYTES = 64 << 10
#: Largest number of bytes of one request. If a file is read from its beginning to its end, the
#: requests become larger, up to this number.
_LARGEST_BLOCK_BYTES = 8 << 20
#: Largest number of requests that are sent to a store at the same time.
_CONNECTIONS = 16
#: Words in the names of exception types for missing or wrong credentials.
_CREDENTIAL_WORDS = ("Credential", "Token", "Profile", "SSO", "DefaultCredentials", "Refresh")
#: Words in the names of exception types for a wrong URL or configuration.
_CONFIGURATION_WORDS = ("ParamValidation", "InvalidEndpoint", "NoRegion", "InvalidRegion")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Deadlines for the requests to an object store, in seconds."""

    #: Longest wait for the list of all files of a folder, in seconds.
    listing_s: float = 30.0
    #: Longest wait for one part of a file, and for the removal of files, in seconds.
    request_s: float = 20.0
    #: Longest wait for a new connection, in seconds.
    connect_s: float = 5.0
    #: Longest time in seconds for all requests that are needed to list the checkpoints of a folder.
    #: After a timeout, the next try is faster: it does not check the same files again.
    total_s: float = 120.0


#: Deadlines for all object stores of this process.
LIMITS = StoreLimits()


class StoreError(OSError):
    """A checkpoint store failed, so it is unknown which checkpoints the store contains."""


class StoreUnreachable(StoreError):
    """The store did not answer, or reported a temporary problem. The caller tries again later."""


class StoreRefused(StoreError):
    """The store refuses access, or the bucket does not exist.

    A person must change the spec or the access rights.

    Args:
        problem: The failed operation and the reason.
        remedy: Advice to the person. Empty if the reason already contains the advice.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}: {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStat:
    """Size and times of a file in a store. The attributes have the same names as in
    `os.stat_result`.
    """

    st_size: int
    #: Time of the last change in nanoseconds since the epoch. Programs can set this time.
    st_mtime_ns: int
    #: Time of the last change, in nanoseconds since the epoch. Programs cannot set this time to an
    #: earlier value, unlike `st_mtime_ns`.
    st_ctime_ns: int
    #: Number that changes if the file gets a new content, or 0 if the store has no such number.
    st_ino: int
    #: Number of blocks of 512 bytes that the file occupies on the disk, or 0 in an object store.
    st_blocks: int = 0

    @property
    def st_mtime(self) -> float:
        return self.st_mtime_ns / 1e9


class CheckpointStore(Protocol):
    """A file system or object store that contains checkpoints.

    A path in the store is called a key.
    """

    def list_folder(self, key: str) -> list[str]:
        """Return the sorted names of the files and folders in a folder."""

    def is_folder(self, key: str) -> bool: ...

    def is_file(self, key: str) -> bool: ...

    def stat(self, key: str) -> StoreStat:
        """Return size and times of a file, or raise FileNotFoundError."""

    def read_link(self, key: str) -> str | None:
        """Return the target of a symbolic link, or None if the file is not a symbolic link."""

    def resolve(self, key: str) -> str:
        """Return the key of the same file with all symbolic links resolved."""

    def open(self, key: str) -> BinaryIO:
        """Open a file to read parts of it, or raise FileNotFoundError."""

    def remove(self, key: str, is_needed: Callable[[], bool] = lambda: False) -> None:
        """Delete a file or folder. No program sees a partly deleted folder.

        Args:
            key: The file or folder.
            is_needed: Function that is called after the files are hidden, and before the first file
                is deleted. If this function returns True or raises an error, the files become
                visible again.
        """


class LocalStore:
    """The file system of this machine. Keys are absolute paths."""

    def list_folder(self, key: str) -> list[str]:
        return sorted(os.listdir(key))

    def is_folder(self, key: str) -> bool:
        return Path(key).is_dir()

    def is_file(self, key: str) -> bool:
        return Path(key).is_file()

    def stat(self, key: str) -> StoreStat:
        status = os.stat(key)
        return StoreStat(
            st_size=status.st_size,
            st_mtime_ns=status.st_mtime_ns,
            st_ctime_ns=status.st_ctime_ns,
            st_ino=status.st_ino,
            st_blocks=status.st_blocks,
        )

    def read_link(self, key: str) -> str | None:
        return os.readlink(key) if os.path.islink(key) else None

    def resolve(self, key: str) -> str:
        return os.path.realpath(key)

    def open(self, key: str) -> BinaryIO:
        return open(key, "rb")

    def remove(self, key: str, is_needed: Callable[[], bool] = lambda: False) -> None:
        raise NotImplementedError("call remove_path to remove a local checkpoint")


class FsspecStore:
    """An object store that is read with the package fsspec.

    The store lists the files below the folder `root` only once, when it is first used. The store
    does not see later changes in the folder. Files outside of `root` count as missing.
    """

    def __init__(
        self,
        filesystem: Any,
        protocol: str,
        root: str,
        *,
        limits: StoreLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            filesystem: The file system object of fsspec.
            protocol: Protocol of the store's URLs, used in messages.
            root: Key of the folder whose files are listed.
            limits: Deadlines for requests. If omitted, `LIMITS`.
            clock: Function that returns the time in seconds for the deadlines.
        """
        self._filesystem = filesystem
        self._protocol = protocol
        self._root = root
        self._limits = LIMITS if limits is None else limits
        self._clock = clock
        self._expires_s = clock() + self._limits.total_s

    def list_folder(self, key: str) -> list[str]:
        return sorted(self._children.get(key, ()))

    def is_folder(self, key: str) -> bool:
        return key in self._children

    def is_file(self, key: str) -> bool:
        return key in self._files

    def stat(self, key: str) -> StoreStat:
        if key not in self._files:
            raise FileNotFoundError(f"{self._url(key)} does not exist")
        return self._files[key]

    def read_link(self, key: str) -> str | None:
        return None

    def resolve(self, key: str) -> str:
        return key

    def open(self, key: str) -> BinaryIO:
        size = self.stat(key).st_size
        reader = _RangeReader(lambda start, end: self._read_range(key, start, end), size)
        return io.BufferedReader(reader, _FIRST_BLOCK_BYTES)

    def remove(self, key: str, is_needed: Callable[[], bool] = lambda: False) -> None:
        """Delete a file or folder, and complete earlier deletions that were interrupted.

        Before the first file is deleted, a small file with a list of all files is written. The
        listed files are hidden until the list is deleted. A file that is stored again in the
        meantime is neither hidden nor deleted.

        Raises:
            StoreError: The store did not answer, or refused the deletion.
        """
        for removal, files in self._removals.items():
            self._finish_removal(removal, files)
        files = self._sign(self._find(key))
        path = PurePosixPath(key)
        removal = str(path.with_name(f".{path.name}{REMOVAL_SUFFIX}"))
        text = json.dumps(files).encode()
        self._request("write to", key, lambda: self._filesystem.pipe_file(removal, text))
        must_restore = True
        try:
            must_restore = is_needed()
        finally:
            if must_restore:
                self._request("remove", removal, lambda: self._filesystem.rm_file(removal))
        if not must_restore:
            self._finish_removal(removal, files)

    def _finish_removal(self, removal: str, files: Mapping[str, str]) -> None:
        """Delete the listed files, except files that were stored again after the list was written.

        Args:
            removal: Key of the small file that lists the files to delete.
            files: Mapping from the key of each listed file to a text with its size, time and
                version. If these values have changed, the file was stored again.
        """
        folder = str(PurePosixPath(removal).parent)
        present = self._sign(self._find(folder))
        for key in sorted(files):
            if present.get(key) == files[key]:
                self._request("remove", key, partial(self._filesystem.rm_file, key))
        self._request("remove", removal, lambda: self._filesystem.rm_file(removal))

    @cached_property
    def _listing(self) -> tuple[dict[str, StoreStat], dict[str, dict[str, str]]]:
        """Two mappings: the visible files below the folder of this store, and the removal lists.

        A removal list is a small file that names files to delete.

        - Mapping from the key of each visible file to the size and times of the file.
        - Mapping from the key of each removal list to its content. The content maps the key of each
          listed file to a text with the size, time and version of the listed file.
        """
        files = self._find(self._root)
        removals: dict[str, dict[str, str]] = {}
        for key in sorted(files):
            name = PurePosixPath(key).name
            if name.startswith(".") and name.endswith(REMOVAL_SUFFIX):
                removals[key] = self._read_removal(key, files[key].st_size)
        signatures = self._sign(files)
        for removal, removed in removals.items():
            del files[removal]
            for key, signature in removed.items():
                if signatures.get(key) == signature:
                    files.pop(key, None)
        return files, removals

    def _read_removal(self, key: str, size: int) -> dict[str, str]:
        try:
            removed = json.loads(self._read_range(key, 0, size))
        except ValueError:
            return {}
        return removed if isinstance(removed, dict) else {}

    @property
    def _files(self) -> Mapping[str, StoreStat]:
        return self._listing[0]

    @property
    def _removals(self) -> Mapping[str, Mapping[str, str]]:
        return self._listing[1]

    @cached_property
    def _children(self) -> Mapping[str, set[str]]:
        """Mapping from the key of each folder to the names of the files and folders in it."""
        children: dict[str, set[str]] = {}
        for key in self._files:
            path = PurePosixPath(key)
            while str(path) != self._root and path.name:
                children.setdefault(str(path.parent), set()).add(path.name)
                path = path.parent
        return children

    def _find(self, folder: str) -> dict[str, StoreStat]:
        """Return a mapping from the key of each file below a folder to the size and times of the
        file.

        If the argument is the key of a file, the result contains only this file.

        Raises:
            StoreError: The store did not answer, or refused the request.
        """
        try:
            infos = self._request(
                "list",
                folder,
                lambda: self._filesystem.find(folder, detail=True),
                limit_s=self._limits.listing_s,
            )
        except FileNotFoundError as error:
            if self._protocol == "memory":
                return {}
            bucket = folder.partition("/")[0]
            raise StoreRefused(
                f"the bucket {self._protocol}://{bucket} does not exist",
                "create the bucket, or correct its name in the key `checkpoints` of the spec",
            ) from error
        files = {name.strip("/"): info for name, info in infos.items() if not name.endswith("/")}
        return {
            name: self._make_stat(name, info)
            for name, info in files.items()
            if info.get("type") == "file"
            # Skip the empty objects that some programs store for each folder.
            and not (info.get("size") == 0 and any(other.startswith(f"{name}/") for other in files))
        }

    def _make_stat(self, key: str, info: Mapping[str, Any]) -> StoreStat:
        changed = next(
            (info[name] for name in ("LastModified", "mtime", "updated") if info.get(name)), None
        )
        if changed is None:
            changed = self._request("read", key, lambda: self._filesystem.modified(key))
        if isinstance(changed, str):
            changed = datetime.fromisoformat(changed)
        if isinstance(changed, datetime):
            changed = changed.timestamp()
        tag = str(info.get("generation") or info.get("ETag") or info.get("etag") or "")
        changed_ns = int(float(changed) * 1e9)
        return StoreStat(
            st_size=int(info.get("size") or 0),
            st_mtime_ns=changed_ns,
            st_ctime_ns=changed_ns,
            st_ino=int(hashlib.sha256(tag.encode()).hexdigest()[:15], 16) if tag else 0,
        )

    @staticmethod
    def _sign(files: Mapping[str, StoreStat]) -> dict[str, str]:
        return {
            key: f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}" for key, stat in files.items()
        }

    def _read_range(self, key: str, start: int, end: int) -> bytes:
        """Return the bytes of a file from `start` to the byte before `end`.

        Raises:
            FileNotFoundError: The file was removed or replaced after the listing.
            StoreError: The store did not answer, or refused the request.
        """
        if start >= end:
            return b""
        content = self._request(
            "read", key, lambda: self._filesystem.cat_file(key, start=start, end=end)
        )
        if len(content) != end - start:
            raise FileNotFoundError(f"{self._url(key)} was replaced while it was read")
        return bytes(content)

    def _request(
        self, verb: str, key: str, request: Callable[[], T], limit_s: float | None = None
    ) -> T:
        """Send a request with a deadline, and return its result.

        Args:
            verb: Verb that describes the request in error messages, such as `read`.
            key: Key of the file or folder that the request is about.
            request: Function that sends the request.
            limit_s: Deadline in seconds. If None, the default deadline of the store.

        Raises:
            FileNotFoundError: There is no such file or bucket.
            StoreError: The store did not answer, or refused the request.
        """
        wanted_s = self._limits.request_s if limit_s is None else limit_s
        limit_s = min(wanted_s, self._expires_s - self._clock())
        subject = f"cannot {verb} {self._url(key)}"
        if limit_s <= 0:
            raise StoreUnreachable(
                f"{subject}: all requests to the object store together took longer than the limit "
                f"of {self._limits.total_s:g} s"
            )
        try:
            return _call_within(limit_s, request)
        except TimeoutError as error:
            raise StoreUnreachable(
                f"{subject}: the object store did not answer within {limit_s:.0f} s"
            ) from error
        except FileNotFoundError:
            raise
        except Exception as error:
            # fsspec raises different error types for each kind of store.
            raise _translate(error, subject, self._protocol) from error

    def _url(self, key: str) -> str:
        return f"{self._protocol}://{key}"


class _RangeReader(io.RawIOBase):
    """A file object that reads a file of an object store.

    Each request reads one block of the file.
    """

    def __init__(self, read_range: Callable[[int, int], bytes], size: int) -> None:
        self._read_range = read_range
        self._size = size
        self._position = 0
        #: The bytes that were read last from the object store. `_block_start` is the position of
        #: the first of these bytes in the file.
        self._block = b""
        self._block_start = 0
        self._next_block_bytes = _FIRST_BLOCK_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if origin + offset < 0:
            raise ValueError(f"negative position {origin + offset}")
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        offset = self._position - self._block_start
        if not 0 <= offset < len(self._block):
            self._read_block(len(buffer))
            offset = 0
        content = self._block[offset : offset + len(buffer)]
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _read_block(self, least_bytes: int) -> None:
        """Read a block of bytes at the present position of the file, and keep the block in memory.

        While the file is read from its beginning to its end, each block is larger than the previous
        block.

        Args:
            least_bytes: Smallest size of the block. At the end of the file, the block may be
                shorter.
        """
        is_in_order = self._position == self._block_start + len(self._block) and self._block
        grown_bytes = min(self._next_block_bytes * 4, _LARGEST_BLOCK_BYTES)
        self._next_block_bytes = grown_bytes if is_in_order else _FIRST_BLOCK_BYTES
        end = min(self._position + max(least_bytes, self._next_block_bytes), self._size)
        self._block = self._read_range(self._position, end)
        self._block_start = self._position

    def readall(self) -> bytes:
        content = self._read_range(self._position, self._size)
        self._position = max(self._position, self._size)
        return content


def _call_within(limit_s: float, function: Callable[[], T]) -> T:
    """Call a function in a daemon thread, and return its result or raise its exception.

    Raises:
        TimeoutError: The function has not returned within `limit_s` seconds. The thread of the
            function is abandoned.
    """
    results: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()

    def run() -> None:
        try:
            result = function()
        except Exception as error:
            results.put(_make_raiser(error))
        else:
            results.put(lambda: result)

    threading.Thread(target=run, name="checkpoint-store", daemon=True).start()
    try:
        outcome = results.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"no result within {limit_s:.0f} s") from None
    return outcome()


def _make_raiser(error: Exception) -> Callable[[], Any]:
    def raise_error() -> Any:
        raise error

    return raise_error


def _translate(error: Exception, subject: str, protocol: str) -> StoreError:
    """Return the `StoreError` for an error of fsspec or of a library that fsspec uses.

    Args:
        error: The error.
        subject: Beginning of the message, such as `cannot read s3://bucket/file`.
        protocol: Protocol of the store's URLs, such as `s3`.
    """
    types = " ".join(base.__name__ for base in type(error).__mro__)
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    reason = " ".join(reason.split())
    if isinstance(error, PermissionError) or any(word in types for word in _CREDENTIAL_WORDS):
        remedy = {
            "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
            "gs": "set GOOGLE_APPLICATION_CREDENTIALS",
        }.get(protocol, "correct the credentials")
        return StoreRefused(
            f"{subject}: the store refused access ({reason})",
            f"{remedy} in the environment of Muster's own process. The credentials "
            "must allow Muster to list, read, write and delete files of the folder",
        )
    if isinstance(error, ValueError) or any(word in types for word in _CONFIGURATION_WORDS):
        return StoreRefused(f"{subject}: {reason}")
    return StoreUnreachable(f"{subject}: {reason}")


def call_in_parallel(function: Callable[[T], object], arguments: Iterable[T]) -> None:
    """Call a function for many arguments at the same time, and ignore its results and errors.

    This is useful for a function that caches its results: later calls are fast.
    """

    def call(argument: T) -> None:
        with suppress(Exception):
            function(argument)

    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        pool.map(call, arguments)


@contextmanager
def suppress_file_errors() -> Iterator[None]:
    """Suppress errors about a single file, such as a missing file. A `StoreError` is not
    suppressed.
    """
    try:
        yield
    except StoreError:
        raise
    except (OSError, ValueError):
        pass


#: File system objects of fsspec. The key consists of the protocol, the process id and the
#: environment variables for the connection. The process id is part of the key because a child
#: process must not use the objects of its parent process.
_filesystems: dict[tuple[object, ...], Any] = {}


def open_store(protocol: str, root: str) -> CheckpointStore:
    """Return an object that reads the checkpoints below a folder of a store.

    The files of an object store are listed when the returned object is used for the first time.

    Args:
        protocol: Protocol of the URL: `s3`, `gs`, `file`, or `memory` for tests.
        root: Key of the folder.

    Raises:
        StoreRefused: The Python package for the store is not installed, or its configuration is
            invalid.
    """
    if protocol == "file":
        return LocalStore()
    variables = tuple(
        (name, value)
        for name, value in sorted(os.environ.items())
        if name.startswith(_CONNECTION_VARIABLES)
    )
    connection = (protocol, os.getpid(), variables)
    if connection not in _filesystems:
        _filesystems[connection] = _connect(protocol)
    return FsspecStore(_filesystems[connection], protocol, root)


def _connect(protocol: str) -> Any:
    """Return the file system object of fsspec for a protocol."""
    if fault := _find_client_fault(protocol):
        raise StoreRefused(*fault)
    # Import fsspec only if needed, because the import takes 0.1 s.
    import fsspec

    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol == "s3":
        options["config_kwargs"] = {
            "connect_timeout": LIMITS.connect_s,
            "read_timeout": LIMITS.request_s,
            "retries": {"max_attempts": 1},
            "max_pool_connections": _CONNECTIONS,
        }
    try:
        return fsspec.filesystem(protocol, **options)
    except Exception as error:
        raise _translate(error, f"cannot connect to {protocol}://", protocol) from error


def _find_client_fault(protocol: str) -> tuple[str, str] | None:
    """Check that Muster can read checkpoints with a protocol.

    Args:
        protocol: Protocol of a URL, such as `s3`.

    Returns:
        Two texts: the problem, and advice to the user. None if the protocol is known and its Python
        package can be imported.
    """
    client = _CLIENTS.get(protocol)
    if client is None:
        if protocol in (*EXTRAS, "memory"):
            return None
        return f"Muster cannot read checkpoints with the protocol {protocol}://", "use s3://"
    try:
        importlib.import_module(client)
    except ImportError as error:
        problem = (
            f"for {protocol}:// URLs, Muster needs the Python package {client}, which cannot be "
            "imported"
        )
        return f"{problem} ({error})", f'run pip install "muster[{EXTRAS[protocol]}]"'
    return None
