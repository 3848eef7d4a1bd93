"""Check whether a file of a checkpoint was written to its end.

In several formats, the file itself contains its correct length. The checks read only headers and
tables, never the tensors, and do not execute code from the file.
"""

from __future__ import annotations

import ast
import json
import math
import os
import pickle
import pickletools
import re
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, BinaryIO

from tasks.record.checkpoint_paths import CheckpointPath
from tasks.record.checkpoint_store import StoreError

#: Largest header of a safetensors file in bytes. Source: safetensors/src/tensor.rs.
_SAFETENSORS_HEADER_BYTES = 100_000_000
#: A file of printable text with fewer bytes than this is a placeholder, and not a damaged file.
_PLACEHOLDER_BYTES = 64
#: Number of bytes at the beginning of a file that are compared with zero. On a full disk, some file
#: systems write zeros instead of the data.
_ZERO_CHECK_BYTES = 4096
#: Size in bytes of the largest pickle that is parsed completely. Of a larger pickle, only the last
#: byte is checked, because parsing would take too long.
_PICKLE_BYTES = 64 << 20
#: Mapping from storage types in PyTorch's file format before version 1.6 to the number of bytes per
#: element.
_STORAGE_ITEM_BYTES = {
    **dict.fromkeys(("ByteStorage", "CharStorage", "BoolStorage"), 1),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    **dict.fromkeys(("FloatStorage", "IntStorage", "ComplexHalfStorage"), 4),
    **dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
}
#: First number in a file that has PyTorch's format before version 1.6. Source:
#: torch/serialization.py.
_TORCH_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C

#: Pickle opcodes that may occur between a key and its value.
_MEMO_OPCODES = frozenset({"MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"})
#: Pickle opcodes that contain an integer.
_NUMBER_OPCODES = frozenset({"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCheck:
    """Result of the check whether one file is complete."""

    #: True if the content of the file says how long the file must be.
    is_known_format: bool
    #: Reason why the file is incomplete, or an empty string.
    damage: str = ""


#: Results of `check_file` for undamaged files. The same files are checked many times, possibly on a
#: slow file system. The key consists of path, size, modification time in nanoseconds, and inode
#: number.
_whole_files: dict[tuple[str, int, int, int], FileCheck] = {}
#: Largest number of results that are kept in `_whole_files`.
_WHOLE_FILES_AT_MOST = 100_000


def check_file(path: CheckpointPath) -> FileCheck:
    """Check whether a file was written completely.

    A file of an unknown format counts as damaged only if it is empty or consists of zeros.

    Raises:
        OSError: The file cannot be read.
    """
    status = path.stat()
    key = (str(path), status.st_size, status.st_mtime_ns, status.st_ino)
    if key in _whole_files:
        return _whole_files[key]
    check = _examine(path, status.st_size)
    if not check.damage:
        if len(_whole_files) >= _WHOLE_FILES_AT_MOST:
            _whole_files.clear()
        _whole_files[key] = check
    return check


def _examine(path: CheckpointPath, size: int) -> FileCheck:
    if size == 0:
        return FileCheck(is_known_format=True, damage="the file is empty")
    with path.open("rb") as file:
        head = file.read(_ZERO_CHECK_BYTES)
        if size > _PLACEHOLDER_BYTES and not any(head):
            return FileCheck(is_known_format=True, damage="the file begins with zero bytes only")
        check = _find_check(path.suffix.lower(), head, size)
        if check is None:
            return FileCheck(is_known_format=False)
        file.seek(0)
        try:
            damage = check(file, size)
        except OSError:
            raise
        except Exception as error:
            # Catch every exception, because the parsers of the standard library raise many types of
            # exceptions for a damaged file.
            damage = f"cannot be parsed ({type(error).__name__}: {error})"
    return FileCheck(is_known_format=True, damage=damage)


def _find_check(suffix: str, head: bytes, size: int) -> Callable[[BinaryIO, int], str] | None:
    """Return the function that checks files of a format, or None if the format is unknown.

    The format is recognised by the first bytes of the file. For a format without fixed first bytes,
    such as JSON, the suffix of the file name is used.

    Args:
        suffix: Suffix of the file name in lower case, such as `.json`.
        head: The first bytes of the file.
        size: Size of the file in bytes.

    Returns:
        A function whose arguments are the open file and its size. The function returns the reason
        why the file is incomplete, or an empty string.
    """
    if suffix == ".distcp":
        # A `.distcp` file cannot be checked alone, because its length is stored in the file
        # `.metadata` in the same folder.
        return None
    if head.startswith(b"PK") or b"PK\x03\x04".startswith(head):
        return _check_zip
    if head.startswith(b"\x93NUMPY"):
        return _check_npy
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return _check_hdf5
    if head[257:262] == b"ustar":
        return _check_tar
    if re.match(rb"\x80[\x02-\x05]", head) and suffix not in (".safetensors", ".msgpack"):
        return _check_pickle
    if suffix == ".json":
        return _check_json
    if size < _PLACEHOLDER_BYTES and head.decode("latin1").isprintable():
        return None
    return {".safetensors": _check_safetensors, ".npz": _check_zip}.get(suffix)


def _describe_wrong_size(size: int, expected: int) -> str:
    return f"the file has {size} bytes, but its header requires {expected} bytes"


def _check_safetensors(file: BinaryIO, size: int) -> str:
    """Return the reason why a safetensors file is incomplete, or an empty string.

    The size of the file is compared with the offsets in the header of the file.
    """
    head = file.read(8)
    if len(head) < 8:
        return f"the file has only {size} bytes, fewer than the header of a safetensors file"
    (header_bytes,) = struct.unpack("<Q", head)
    if header_bytes > _SAFETENSORS_HEADER_BYTES:
        return "the file has no safetensors header"
    if size < 8 + header_bytes:
        return f"the file has {size} bytes, but its header alone needs {8 + header_bytes} bytes"

    header: Mapping[str, Any] = json.loads(file.read(header_bytes))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    expected = 8 + header_bytes + max(ends, default=0)
    return "" if size == expected else _describe_wrong_size(size, expected)


def _check_zip(file: BinaryIO, size: int) -> str:
    """Return the reason why a zip archive is incomplete, or an empty string.

    PyTorch, NumPy and Lightning write such archives. The table at the end of an archive lists all
    of its parts.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.header_offset + entry.compress_size > size:
                    return (
                        f"the file is cut short: it ends at byte {size}, before the end of its "
                        f"part {entry.filename}"
                    )
    except zipfile.BadZipFile as error:
        return f"the file is cut short: {str(error).lower()}"
    return ""


def _check_npy(file: BinaryIO, size: int) -> str:
    """Return the reason why a NumPy file is incomplete, or an empty string.

    The size of the file is compared with the shape and the type in the header of the file.
    """
    major_version = file.read(8)[6]
    length_format = "<H" if major_version == 1 else "<I"
    length_bytes = struct.calcsize(length_format)
    (header_bytes,) = struct.unpack(length_format, file.read(length_bytes))
    header = ast.literal_eval(file.read(header_bytes).decode("latin1"))
    match = re.fullmatch(r"[<>|=]?[a-zA-Z](\d+)", str(header["descr"]))
    if match is None or "O" in str(header["descr"]):
        # For structured types and pickled objects, the header does not say how large the data is.
        return ""
    item_bytes = int(match[1]) * (4 if "U" in header["descr"] else 1)
    expected = 8 + length_bytes + header_bytes + item_bytes * math.prod(header["shape"])
    return "" if size >= expected else _describe_wrong_size(size, expected)


def _check_hdf5(file: BinaryIO, size: int) -> str:
    """Return the reason why an HDF5 file is incomplete, or an empty string.

    The size of the file is compared with the length in its superblock. Source: HDF5 format, section
    II.
    """
    head = file.read(64)
    version = head[8]
    if version > 3:
        return ""
    offset = 40 if version == 0 else 44 if version == 1 else 28
    (expected,) = struct.unpack("<Q", head[offset : offset + 8])
    return "" if size >= expected else _describe_wrong_size(size, expected)


def _check_tar(file: BinaryIO, size: int) -> str:
    """Return the reason why a tar archive is incomplete, or an empty string.

    The archive is not compressed, for example a `.nemo` file. Only its headers are read, because
    they contain the lengths of all parts.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            ends = [member.offset_data + member.size for member in archive]
    except tarfile.TarError as error:
        return f"the file is cut short: {error}"
    expected = max(ends, default=0)
    return (
        ""
        if size >= expected
        else f"this tar archive has {size} bytes, but the last file in the archive should end at "
        f"byte {expected}"
    )


def _check_json(file: BinaryIO, size: int) -> str:
    try:
        json.loads(file.read())
    except ValueError as error:
        return f"the file is not JSON: {error}"
    return ""


class _Stub:
    """Harmless replacement for all classes and functions in a pickle.

    Because of this class, no code is executed while a pickle is read.
    """

    def __init__(self, *args: object, **fields: object) -> None:
        pass

    def __new__(cls, *args: object, **fields: object) -> _Stub:
        return super().__new__(cls)

    def __call__(self, *args: object, **fields: object) -> _Stub:
        return self

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)

    def append(self, item: object) -> None:
        pass

    def extend(self, items: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass


class _Dict(dict[Any, Any]):
    """Replacement for an OrderedDict in a pickle.

    This class allows attributes, unlike a plain dict: PyTorch sets the attribute `_metadata` of a
    state dict.
    """


class SafeUnpickler(pickle.Unpickler):
    """Reads the plain data in a pickle without executing code from the pickle.

    All classes and functions are replaced by stubs. After a call of `load`, the attribute
    `persistent_ids` contains the references to tensor data in a PyTorch file.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.persistent_ids: list[tuple[Any, ...]] = []

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _Dict
        return type(name, (_Stub,), {"__module__": module})

    def persistent_load(self, reference: Any) -> Any:
        if isinstance(reference, tuple):
            self.persistent_ids.append(reference)
        return _Stub()


def _check_pickle(file: BinaryIO, size: int) -> str:
    """Return the reason why a file that begins with a pickle is incomplete, or an empty string.

    The files of PyTorch versions before 1.6 begin with a pickle, too.
    """
    if size > _PICKLE_BYTES:
        head = file.read(1 << 16)
        if _is_old_torch(head):
            return ""  # A complete check would have to parse all pickles in this large file.
        file.seek(-1, os.SEEK_END)
        return (
            ""
            if file.read(1) == pickle.STOP
            else "the file is cut short: the pickle in it has no end"
        )
    first = SafeUnpickler(file).load()
    if first == _TORCH_MAGIC_NUMBER:
        return _check_old_torch(file, size)
    # A file may contain several pickles, one after the other. Parse each of them.
    while file.tell() < size:
        if file.read(1) != pickle.PROTO:
            return ""  # The pickle is followed by data in another format, which is not checked.
        file.seek(-1, os.SEEK_CUR)
        for _ in pickletools.genops(file):
            pass
    return ""


def _is_old_torch(head: bytes) -> bool:
    try:
        return bool(SafeUnpickler(BytesIO(head)).load() == _TORCH_MAGIC_NUMBER)
    except Exception:
        return False


def _check_old_torch(file: BinaryIO, size: int) -> str:
    """Return the reason why a file in PyTorch's format before version 1.6 is incomplete.

    The result is an empty string if the file is complete. The size of the file is compared with the
    total size of its storages. Source: torch/serialization.py.
    """
    for _ in range(2):  # Skip the protocol version and the data about the machine.
        SafeUnpickler(file).load()
    objects = SafeUnpickler(file)
    objects.load()
    keys = SafeUnpickler(file).load()

    item_bytes: dict[object, int] = {}
    for reference in objects.persistent_ids:
        storage_type = getattr(reference[1], "__name__", "")
        if reference[0] == "storage" and storage_type in _STORAGE_ITEM_BYTES:
            item_bytes[reference[2]] = _STORAGE_ITEM_BYTES[storage_type]
    for key in keys:
        if key not in item_bytes:
            return ""
        count_field = file.read(8)
        if len(count_field) < 8:
            return "the file is cut short: a tensor is missing"
        (count,) = struct.unpack("<q", count_field)
        end = file.tell() + count * item_bytes[key]
        if end > size:
            return f"the file has {size} bytes, but a tensor in it should end at byte {end}"
        file.seek(end)
    return ""


def read_pickled_number(path: CheckpointPath, *keys: str) -> int | None:
    """Return the integer under a key in a pickle, or None if there is no such integer.

    Args:
        path: The pickle, or a PyTorch file that contains a pickle `data.pkl`.
        keys: Possible keys, in the order of their priority. A key may be at any depth.

    Raises:
        StoreError: The store of the checkpoint did not answer.
    """
    try:
        data = _read_pickle_bytes(path)
    except StoreError:
        raise
    except (OSError, zipfile.BadZipFile, KeyError, ValueError):
        return None
    found: dict[str, int] = {}
    key = ""
    try:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if isinstance(argument, str) and "UNICODE" in name:
                key = argument if argument in keys else ""
            elif name not in _MEMO_OPCODES:
                if key and isinstance(argument, int) and name in _NUMBER_OPCODES:
                    found.setdefault(key, argument)
                key = ""
    except Exception:
        # The pickle is damaged. Use the numbers before the damaged part.
        pass
    return next((found[key] for key in keys if key in found), None)


def _read_pickle_bytes(path: CheckpointPath) -> bytes:
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            if path.stat().st_size > _PICKLE_BYTES:
                raise ValueError("too large")
            file.seek(0)
            return file.read()
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            [name, *_] = [name for name in archive.namelist() if name.endswith("data.pkl")]
            if archive.getinfo(name).file_size > _PICKLE_BYTES:
                raise ValueError("too large")
            return archive.read(name)


def read_stored_lengths(metadata: CheckpointPath) -> dict[str, int]:
    """Return the smallest possible size of each file of a torch.distributed.checkpoint.

    The file `.metadata` of the checkpoint lists the offset and the length of all parts of each
    file. A file that ends before the end of its last part is incomplete.

    Returns:
        Mapping from the path of each file, relative to the folder, to the size in bytes. Empty if
        `metadata` has another format.
    """
    ends: dict[str, int] = {}

    class Info(_Stub):
        def __setstate__(self, state: object) -> None:
            fields = state if isinstance(state, dict) else {}
            if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
                fields = state[1]
            name = fields.get("relative_path")
            if isinstance(name, str):
                end = int(fields.get("offset", 0)) + int(fields.get("length", 0))
                ends[name] = max(ends.get(name, 0), end)

    class Reader(SafeUnpickler):
        def find_class(self, module: str, name: str) -> Any:
            return Info if name == "_StorageInfo" else super().find_class(module, name)

    with metadata.open("rb") as file:
        if file.read(1) != pickle.PROTO:
            return {}
        file.seek(0)
        try:
            Reader(file).load()
        except OSError:
            raise
        except Exception as error:
            # The unpickler can raise almost any type of error for a damaged pickle.
            raise ValueError(f"cannot be parsed ({type(error).__name__}: {error})") from error
    return ends
