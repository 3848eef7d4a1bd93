"""Rules that decide whether another user of the machine could change the content of a path.

A path is trusted if it belongs to this user or to root, and no other user may write to it. sshd
applies the same rule to the files that it reads for a login (StrictModes in sshd_config(5)).
"""

from __future__ import annotations

import errno
import grp
import logging
import os
import pwd
import socket
import stat
import struct
import tomllib
from collections.abc import Collection
from functools import cache
from pathlib import Path

from tasks.spec.errors import MusterError

_log = logging.getLogger(__name__)

#: Largest number of symbolic links that the kernel follows in one path. Source: path_resolution(7).
_MOST_LINKS = 40
_ROOT_UID = 0
#: Files in the working directory from which Prefect reads settings. Muster checks that no other
#: user could have changed these files, because a setting can contain the name of a program that
#: Prefect runs.
PREFECT_SETTINGS = (".env", "prefect.toml", "pyproject.toml")
#: Layout of the kernel's data about the process at the other end of a local socket: process id,
#: user id and group id. Source: SO_PEERCRED in unix(7).
_PEER = struct.Struct("3i")
#: Name of the extended attribute with the access control list of a file. Such a list can give
#: access to users other than the owner and the members of the file's group.
_ACL = "system.posix_acl_access"


class UntrustedPath(MusterError):
    """Another user could change the content of a path that Muster needs. Nothing was started."""

    exit_code = 2


def trusted_users() -> frozenset[int]:
    """Return the ids of the users whose files Muster trusts: this user and root."""
    return frozenset((_ROOT_UID, os.geteuid()))


def _format_user(uid: int) -> str:
    """Return the name and the id of a user for a message, such as `alice (1000)`.

    If the user has no name, the result is a text such as `user 1000`.
    """
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"


def _describe_untrusted_user(uid: int) -> str:
    """Return a text about an untrusted user, such as `alice (1000), whom Muster does not trust`."""
    return f"{_format_user(uid)}, whom Muster does not trust"


def find_ownership_fault(
    path: Path, status: os.stat_result, users: Collection[int] | None = None
) -> str:
    """Return an error text if a file or folder is not trusted, otherwise an empty string.

    For a symbolic link, only the owner is checked, because the mode of a link has no meaning.

    Args:
        path: Path of the file or folder, for the message.
        status: Status of the file or folder, from `os.lstat`.
        users: Ids of the trusted owners. None means the users of `trusted_users`.
    """
    if status.st_uid not in (trusted_users() if users is None else users):
        mode = stat.S_IMODE(status.st_mode)
        owner = _describe_untrusted_user(status.st_uid)
        return f"{path} belongs to {owner} (mode {mode:04o})"
    if stat.S_ISLNK(status.st_mode):
        return ""
    return _find_writable_fault(path, status)


def _find_writable_fault(path: Path, status: os.stat_result) -> str:
    """Return a message if other users than the owner may write to a path, otherwise ""."""
    mode = stat.S_IMODE(status.st_mode)
    is_open_to_group = bool(mode & stat.S_IWGRP) and not _is_private_group(path, status)
    if not mode & stat.S_IWOTH and not is_open_to_group:
        return ""
    who = "every user" if mode & stat.S_IWOTH else f"group {status.st_gid}"
    owner = _format_user(status.st_uid)
    return f"{who} may write to {path} (owner {owner}, mode {mode:04o}): run chmod go-w {path}"


def _is_private_group(path: Path, status: os.stat_result) -> bool:
    """Return True if the owner of a path is the only member of the path's group.

    Many systems create such a group for each user. The group has the same name as the user, and may
    write to the user's files. This is safe, because the group has no other member.
    """
    try:
        owner = pwd.getpwuid(status.st_uid)
        group = grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    if group.gr_name != owner.pw_name or owner.pw_gid != group.gr_gid:
        return False
    if set(group.gr_mem) - {owner.pw_name}:
        return False
    # An access control list can give other users the right to write. So return True only if the
    # path has no access control list.
    try:
        os.getxattr(path, _ACL, follow_symlinks=False)
    except OSError as error:
        return error.errno in (errno.ENODATA, errno.ENOTSUP)
    return False


def find_path_fault(
    path: Path, users: Collection[int] | None = None, *, from_root: bool = True
) -> str:
    """Return an error text if another user could change the target of a path, otherwise "".

    Every existing folder and symbolic link on the path is checked. A parent folder with the sticky
    bit, such as `/tmp`, is accepted: users cannot replace each other's files there.

    Args:
        path: Absolute path.
        users: Ids of the trusted owners. None means the users of `trusted_users`.
        from_root: True to check all folders from `/` on. False to check only the last part of the
            path, if its folder is already known to be trusted.

    Raises:
        OSError: The status of a part of the path cannot be read.
    """
    current = Path("/") if from_root else path.parent
    # Parts of the path that are not checked yet, in reverse order. The loop below replaces a
    # symbolic link by the parts of its target.
    rest = list(reversed(path.parts[1:] if from_root else path.parts[-1:]))
    links = 0
    fault = (
        _find_part_fault(current, os.lstat(current), users, is_last=not rest) if from_root else ""
    )
    while rest and not fault:
        name = rest.pop()
        if name == os.pardir:
            current = current.parent
            continue
        entry = current / name
        try:
            status = os.lstat(entry)
        except (FileNotFoundError, NotADirectoryError):
            return ""
        if not stat.S_ISLNK(status.st_mode):
            fault = _find_part_fault(entry, status, users, is_last=not rest)
            current = entry
            continue
        fault = find_ownership_fault(entry, status, users)
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = Path(os.readlink(entry))
        if target.is_absolute():
            current = Path("/")
            rest += reversed(target.parts[1:])
        else:
            rest += reversed(target.parts)
    return fault


def _find_part_fault(
    path: Path, status: os.stat_result, users: Collection[int] | None, *, is_last: bool
) -> str:
    """Return an error text if a file or folder on a path is not trusted, otherwise an empty string.

    Args:
        path: Path of the file or folder, for the message.
        status: Status of the file or folder.
        users: Ids of the trusted owners. None means the users of `trusted_users`.
        is_last: True if this is the last part of the checked path. A folder that every user may
            write to is accepted only if it has the sticky bit and is not the last part.
    """
    is_sticky = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)
    if is_sticky and not is_last:
        allowed = trusted_users() if users is None else users
        return "" if status.st_uid in allowed else find_ownership_fault(path, status, users)
    return find_ownership_fault(path, status, users)


def find_marker_fault(path: Path, *, is_link_enough: bool = False) -> str:
    """Return an error text if another user could have created a file, otherwise an empty string.

    Use this function for files that decide which programs Muster runs, such as `pyproject.toml`.
    The file, its folder and the target of a symbolic link must belong to this user or to root. The
    folder may be writable for a group, as in a shared project, or have the sticky bit.

    Args:
        path: Path of the file.
        is_link_enough: True to accept a symbolic link of this user or root even if its target
            belongs to another user.

    Raises:
        OSError: The file does not exist, or its status cannot be read.
    """
    for status in (os.lstat(path), os.stat(path)):
        if status.st_uid not in trusted_users():
            return f"{path} belongs to {_describe_untrusted_user(status.st_uid)}"
        if is_link_enough:
            break
    return _find_open_fault(path, os.stat(path)) or find_folder_fault(path.parent)


def find_folder_fault(folder: Path) -> str:
    """Return an error text if another user could have created files in a folder, otherwise "".

    A folder with the sticky bit, such as `/tmp`, is accepted although other users can create files
    there. So the caller must also check the owner of each file that it uses from this folder.

    Raises:
        OSError: The folder does not exist, or its status cannot be read.
    """
    status = os.stat(folder)
    if status.st_uid not in trusted_users():
        return f"{folder} belongs to {_describe_untrusted_user(status.st_uid)}"
    return _find_open_fault(folder, status)


def _find_open_fault(path: Path, status: os.stat_result) -> str:
    """Return a message if all users may write to a file or folder, otherwise "".

    A folder with the sticky bit is accepted.
    """
    is_sticky = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)
    if status.st_mode & stat.S_IWOTH and not is_sticky:
        return f"every user may write to {path}: run chmod o-w {path}"
    return ""


def refuse_foreign_settings(folder: Path) -> None:
    """Check that no other user could have put settings of Prefect into the working directory.

    Args:
        folder: The working directory.

    Raises:
        UntrustedPath: A file that another user could have written may contain settings of Prefect.
    """
    for name in PREFECT_SETTINGS:
        file = folder / name
        try:
            fault = find_marker_fault(file)
        except OSError:
            # The file does not exist, so Prefect reads no settings from it.
            continue
        if fault and _has_settings(file):
            raise UntrustedPath(
                f"Another user could have changed {file}, which may contain settings of Prefect: "
                f"{fault}. If you cannot make the file safe, use another working "
                "directory, or remove the file."
            )


def _has_settings(file: Path) -> bool:
    """Return True if a file may contain settings of Prefect.

    For an unreadable file, the result is True, because its content is unknown.

    Args:
        file: One of the files in `PREFECT_SETTINGS`.
    """
    try:
        content = file.read_bytes()
        if file.name == "pyproject.toml":
            return "prefect" in tomllib.loads(content.decode()).get("tool", {})
    except (OSError, ValueError):
        return True
    return file.name == "prefect.toml" or b"prefect" in content.lower()


@cache
def warn_ignored(path: Path, fault: str) -> None:
    """Log a warning that a path is ignored because it is not trusted.

    The same warning is logged at most once per process.

    Args:
        path: The ignored path.
        fault: Reason why the path is not trusted.
    """
    _log.warning("%s is not used: %s", path, fault)


def is_present(path: Path) -> bool:
    """Return True if a path exists. A symbolic link exists even if its target is missing."""
    return os.path.lexists(path)


def get_peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and user id of the process at the other end of a local socket.

    The kernel stored both ids when that process connected or started to listen.

    Raises:
        OSError: The kernel does not know the process, for example because `connection` is not a
            local socket.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _gid = _PEER.unpack(credentials)
    return pid, uid


def require_own_peer(connection: socket.socket) -> None:
    """Check that the process at the other end of a local socket belongs to this user.

    Raises:
        PermissionError: The process belongs to another user.
        OSError: The kernel does not know the process.
    """
    _pid, uid = get_peer(connection)
    if uid != os.geteuid():
        who = _format_user(uid)
        raise PermissionError(
            errno.EACCES,
            f"the process at the other end of the connection belongs to another user, {who}",
        )
