"""Rules that decide whether another user of the machine could change the content of a path.

A path is trusted if it belongs to this user or to root and no other user may write to it. sshd
applies the same rule to the files of a login (StrictModes).
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

#: The kernel follows at most this many symbolic links in one path. Source: path_resolution(7).
_MOST_LINKS = 40
_ROOT_UID = 0
#: Files of the working directory from which Prefect takes settings. Settings can name programs.
PREFECT_SETTINGS = (".env", "prefect.toml", "pyproject.toml")
#: pid, uid and gid of the process at the other end. Source: SO_PEERCRED in unix(7).
_PEER = struct.Struct("3i")
#: Extended attribute that a file has if its access control list names further users.
_ACL = "system.posix_acl_access"


class UntrustedPath(MusterError):
    """Another user could change the content of a path that Muster needs. Nothing was started."""

    exit_code = 2


def trusted_users() -> frozenset[int]:
    """Return the ids of the users whose files Muster trusts: this user and root."""
    return frozenset((_ROOT_UID, os.geteuid()))


def user_name(uid: int) -> str:
    """Return the name of a user for a message, or `user ID` if it has no name."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"


def ownership_fault(
    path: Path, status: os.stat_result, users: Collection[int] | None = None
) -> str:
    """Return why a file or folder with this status is not trusted, or an empty string.

    A symbolic link is judged by its owner only, because its mode means nothing.

    Args:
        users: the trusted owners; None: `trusted_users`.
    """
    if status.st_uid not in (trusted_users() if users is None else users):
        mode = stat.S_IMODE(status.st_mode)
        return f"{path} belongs to {user_name(status.st_uid)} (mode {mode:04o})"
    if stat.S_ISLNK(status.st_mode):
        return ""
    return writable_fault(path, status)


def writable_fault(path: Path, status: os.stat_result) -> str:
    """Return why users other than the owner may write to a path, or an empty string."""
    mode = stat.S_IMODE(status.st_mode)
    is_open_to_group = bool(mode & stat.S_IWGRP) and not _is_private_group(path, status)
    if not mode & stat.S_IWOTH and not is_open_to_group:
        return ""
    who = "every user" if mode & stat.S_IWOTH else f"group {status.st_gid}"
    owner = user_name(status.st_uid)
    return f"{who} may write to {path} (owner {owner}, mode {mode:04o}): chmod go-w {path}"


def _is_private_group(path: Path, status: os.stat_result) -> bool:
    """Return True if only the owner of a path is in its group.

    Many systems give each user a group of the same name, and a umask that lets it write.
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
    # If there is an access control list, the group bits apply to all users in that list.
    try:
        os.getxattr(path, _ACL, follow_symlinks=False)
    except OSError as error:
        return error.errno in (errno.ENODATA, errno.ENOTSUP)
    return False


def path_fault(path: Path, users: Collection[int] | None = None, *, from_root: bool = True) -> str:
    """Return why another user could change the target of a path, or an empty string.

    Every folder and symbolic link on the path is checked. A sticky parent folder such as `/tmp` is
    accepted, because no user can replace an entry of another user in it. Parts of the path that do
    not exist are not checked.

    Args:
        path: absolute.
        users: the trusted owners; None: `trusted_users`.
        from_root: check all folders from `/` on. If False, check only the last part of the path,
            because its folder is known to be trusted.

    Raises: OSError, if a part of the path cannot be looked up.
    """
    current = Path("/") if from_root else path.parent
    rest = list(reversed(path.parts[1:] if from_root else path.parts[-1:]))
    links = 0
    fault = _folder_fault(current, os.lstat(current), users, is_last=not rest) if from_root else ""
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
            fault = _folder_fault(entry, status, users, is_last=not rest)
            current = entry
            continue
        fault = ownership_fault(entry, status, users)
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


def _folder_fault(
    path: Path, status: os.stat_result, users: Collection[int] | None, *, is_last: bool
) -> str:
    is_sticky = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)
    if is_sticky and not is_last:
        allowed = trusted_users() if users is None else users
        return "" if status.st_uid in allowed else ownership_fault(path, status, users)
    return ownership_fault(path, status, users)


def marker_fault(path: Path, *, is_link_enough: bool = False) -> str:
    """Return why a file that affects which programs Muster runs is not trusted, or an empty string.

    The file, its folder and the target of a symbolic link must belong to this user or to root. The
    folder may be sticky, or writable for a group, as in a project of several people.

    Args:
        is_link_enough: the owner of the target of a symbolic link does not matter.

    Raises: OSError, if the file cannot be looked up.
    """
    for status in (os.lstat(path), os.stat(path)):
        if status.st_uid not in trusted_users():
            return f"{path} belongs to {user_name(status.st_uid)}"
        if is_link_enough:
            break
    return _open_to_all(path, os.stat(path)) or folder_fault(path.parent)


def folder_fault(folder: Path) -> str:
    """Return why another user could have created entries in a folder, or an empty string.

    A sticky folder is accepted. The caller must check each of its entries.

    Raises: OSError, if the folder cannot be looked up.
    """
    status = os.stat(folder)
    if status.st_uid not in trusted_users():
        return f"{folder} belongs to {user_name(status.st_uid)}"
    return _open_to_all(folder, status)


def _open_to_all(path: Path, status: os.stat_result) -> str:
    is_sticky = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)
    if status.st_mode & stat.S_IWOTH and not is_sticky:
        return f"every user may write to {path}: chmod o-w {path}"
    return ""


def refuse_foreign_settings(folder: Path) -> None:
    """Refuse a working directory in which another user has put settings of Prefect.

    Raises: UntrustedPath.
    """
    for name in PREFECT_SETTINGS:
        file = folder / name
        try:
            fault = marker_fault(file)
        except OSError:
            # Prefect does not read a missing file.
            continue
        if fault and _has_settings(file):
            raise UntrustedPath(
                f"Prefect would take settings from {file}, but {fault}: "
                "work in a folder of your own, or remove the file"
            )


def _has_settings(file: Path) -> bool:
    """Return False only if a file certainly contains no Prefect setting."""
    try:
        content = file.read_bytes()
        if file.name == "pyproject.toml":
            return "prefect" in tomllib.loads(content.decode()).get("tool", {})
    except (OSError, ValueError):
        return True
    return file.name == "prefect.toml" or b"prefect" in content.lower()


@cache
def say_ignored(path: Path, fault: str) -> None:
    """Log in one line why a path is not used, at most once per process."""
    _log.warning("%s is not used: %s", path, fault)


def is_present(path: Path) -> bool:
    """Return True if a path exists. A broken symbolic link counts as existing."""
    return os.path.lexists(path)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return pid and user id of the process at the other end of a connected local socket.

    The kernel recorded both when that process connected or began to listen. Raises: OSError.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _gid = _PEER.unpack(credentials)
    return pid, uid


def require_own_peer(connection: socket.socket) -> None:
    """Check that the process at the other end of a local socket belongs to this user.

    Raises: PermissionError, if it belongs to another user; OSError.
    """
    _pid, uid = peer_of(connection)
    if uid != os.geteuid():
        who = user_name(uid)
        raise PermissionError(errno.EACCES, f"a process of {who} is at the other end of the socket")
