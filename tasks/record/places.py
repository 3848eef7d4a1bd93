"""Names and places of a run: its id, the files it leaves, and who may read them."""

from __future__ import annotations

import errno
import logging
import os
import pwd
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

from tasks.spec.ownership import (
    UntrustedPath,
    is_present,
    ownership_fault,
    path_fault,
    trusted_users,
)

_log = logging.getLogger(__name__)

#: The folders that Muster keeps in its home.
_OWN = ("cache", "code", "gate", "live", "parked", "prefect", "runs", "stack", "temp", "unseen")
#: Folders that nobody else may read, whatever MUSTER_UMASK says.
_OF_SERVERS = ("cache", "prefect", "stack", "temp")
#: All that Muster keeps directly in its home.
_ENTRIES = (*_OWN, "agents.key", "password", "ray-token", "zygote")
#: Rights of a mode by which a group, or every user, writes.
_WRITE_BITS = 0o022
#: Names the user whose home this is, if another user only reads in it.
_OWNER_VARIABLE = "MUSTER_HOME_OWNER"
#: What a user can do about a home that is not trusted.
_REMEDY = (
    "The home, the folders above it and Muster's files in it must belong to you or to root, and "
    "no other user may write there. Mend that, or set MUSTER_HOME to a folder of your own. "
    f"To read in the home of a user that you trust, set {_OWNER_VARIABLE} to that user."
)
#: Homes that were found to be trusted: path, this user, trusted users.
_trusted_homes: set[tuple[Path, int, frozenset[int]]] = set()


def muster_home() -> Path:
    """Return `$MUSTER_HOME`, by default `~/.muster`; absolute.

    Raises: UntrustedPath, if another user may decide what is in it: the home, a folder above it, or
        an entry that Muster keeps in it belongs to another user, or other users may write to it.
    """
    home = Path(os.environ.get("MUSTER_HOME") or "~/.muster").expanduser().absolute()
    owners = home_owners()
    known = (home, os.geteuid(), owners)
    if known in _trusted_homes:
        return home
    try:
        fault = _home_fault(home, owners)
    except OSError as error:
        fault = f"{error.filename or home} can't be looked up: {error.strerror}"
    if fault:
        raise UntrustedPath(f"MUSTER_HOME {home} is not used: {fault}\n{_REMEDY}")
    # A home that is not there yet may still be made by another user.
    if home.exists():
        _trusted_homes.add(known)
    return home


def home_owners() -> frozenset[int]:
    """Return the ids of the users whose files in the home are taken.

    They are this user, root, and the user that MUSTER_HOME_OWNER names.

    Raises: UntrustedPath, if there is no such user.
    """
    named = os.environ.get(_OWNER_VARIABLE)
    if not named:
        return trusted_users()
    try:
        uid = int(named) if named.isdecimal() else pwd.getpwnam(named).pw_uid
    except KeyError:
        raise UntrustedPath(f"{_OWNER_VARIABLE}={named}: there is no such user") from None
    return trusted_users() | {uid}


def _home_fault(home: Path, owners: frozenset[int]) -> str:
    """Return why a home is not trusted, or an empty string. Raises: OSError."""
    if fault := path_fault(home, owners):
        return fault
    entries = (home / name for name in _ENTRIES)
    faults = (path_fault(entry, owners, from_root=False) for entry in entries if is_present(entry))
    return next(filter(None, faults), "")


def read_own_file(path: Path) -> bytes:
    """Return the content of a file that Muster wrote.

    Raises: PermissionError, if the file is a link or no regular file, belongs to another user, or
        if other users may write to it; OSError.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PermissionError(errno.EACCES, "it is a link", str(path)) from None
        raise
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(errno.EACCES, "it is no regular file", str(path))
        if fault := ownership_fault(path, status, home_owners()):
            raise PermissionError(errno.EACCES, fault, str(path))
        return file.read()


def is_at(fd: int, path: Path) -> bool:
    """Whether an open file is the one that is on disk by that name. A lock on one that was removed
    or replaced since it was opened keeps nobody out."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def keep_private() -> None:
    """Keep what this process and its children write from now on from other users.

    The whole home is closed, too. MUSTER_UMASK (027, 022) lets a group, or every user, read. A home
    that is open to more users than that is gone through once. What belongs to another user, and
    what in the home is not Muster's, stays as it is.

    Raises: UntrustedPath, if the home is not trusted, or MUSTER_UMASK lets other users write.
    """
    mask = _umask()
    os.umask(mask)
    home = muster_home()
    # First: nobody else reaches what is in it any more.
    was_open = not _is_more_than_a_home(home) and _restrict(home, mask)
    for name in _OWN:
        hidden = 0o077 if name in _OF_SERVERS else mask
        if _restrict(home / name, hidden) or was_open:
            for path in _below(home / name):
                _restrict(path, hidden, only=True)


def _umask() -> int:
    """Raises: UntrustedPath, if MUSTER_UMASK lets other users write."""
    asked = os.environ.get("MUSTER_UMASK") or "077"
    try:
        mask = int(asked, 8)
    except ValueError:
        _log.warning("MUSTER_UMASK=%s is no octal number, as 027 is one: taken as 077", asked)
        return 0o077
    if mask & _WRITE_BITS != _WRITE_BITS:
        raise UntrustedPath(
            f"MUSTER_UMASK={asked} would let other users write to the files of runs: "
            "write 077 (nobody else reads), 027 (the group reads) or 022 (everybody reads)"
        )
    # A process whose own files are kept from it would come to nothing.
    return mask & 0o077


def _is_more_than_a_home(path: Path) -> bool:
    """Return True for a folder that holds more than Muster's files: a person's home, `/`."""
    with suppress(RuntimeError):
        return path in (Path("/"), Path.home())
    return False


def _restrict(path: Path, mask: int, *, only: bool = False) -> bool:
    """Give a file or folder of this user the mode that it has by a umask, or `only` take rights
    away; whether it had another."""
    with suppress(OSError):
        found = path.lstat()
        mode = stat.S_IMODE(found.st_mode)
        given = 0 if only else (mode & 0o700) >> 3 | (mode & 0o700) >> 6
        wanted = (mode | given) & ~mask
        if wanted != mode and found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode):
            path.chmod(wanted)
            return True
    return False


def _below(directory: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(directory):
        yield from (Path(folder, name) for name in (*folders, *files))


def password_file() -> Path:
    """Where the password of the Prefect servers of this home is, for its user alone."""
    return muster_home() / "password"


def server_password() -> str:
    """Return `user:password` of the Prefect servers that are started in this home.

    It is empty if the home has none yet, or if the file is another user's.
    """
    with suppress(OSError):
        return read_own_file(password_file()).decode().strip()
    return ""


def make_server_password() -> str:
    """The same, made where it has none. Raises: as `kept_secret`."""
    return kept_secret(password_file(), _new_password)


def renew_server_password() -> str:
    """Replace the password of this home's Prefect servers by a new one, and return it.

    Raises: OSError.
    """
    password = _new_password()
    path = password_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{password}\n")
    draft.replace(path)
    return password


def _new_password() -> str:
    return f"muster:{secrets.token_urlsafe(24)}"


def kept_secret(path: Path, make: Callable[[], str]) -> str:
    """Return the content of a file for its user alone, which is made if it is not there.

    Raises: PermissionError, if it is not this user's own, see `read_own_file`; OSError.
    """
    if not is_present(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another user may have made the folder at the same moment.
        muster_home()
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{make()}\n")
        try:
            # Of two that begin together, one has its way.
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
    content = read_own_file(path).decode().strip()
    if path.lstat().st_mode & 0o077:
        path.chmod(0o600)
    return content


def make_run_id(name: str, workload: str, flow_run_id: UUID, created: datetime) -> str:
    """`<name>-<workload>-<YYYYMMDD>-<HHMMSS>-<8 hex>`, the same each time for one flow run, by the
    UTC of its creation."""
    return f"{name}-{workload}-{created.astimezone(UTC):%Y%m%d-%H%M%S}-{flow_run_id.hex[-8:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlace:
    """The files of one attempt."""

    #: `attempt-01` under the run's directory, absolute.
    directory: Path
    #: From 1.
    number: int

    @property
    def spec(self) -> Path:
        return self.directory / "spec.yaml"

    @property
    def events(self) -> Path:
        return self.directory / "events.jsonl"

    @property
    def fleet_events(self) -> Path:
        """What the process of its fleet says happens to it."""
        return self.directory / "rollout.jsonl"

    @property
    def submission(self) -> Path:
        """Of its Ray job; further jobs of the attempt have files beside it."""
        return self.directory / "submission.json"

    def submissions(self) -> list[Path]:
        """Of its jobs that were submitted, or about to be."""
        return sorted(self.directory.glob("submission*.json"))

    def log(self, component: str) -> Path:
        return self.directory / f"{component}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """The files of one run."""

    #: `$MUSTER_HOME/runs/<run id>`, absolute.
    directory: Path

    @staticmethod
    def of(run_id: str, home: Path | None = None) -> RunPlace:
        return RunPlace(directory=(home or muster_home()) / "runs" / run_id)

    @property
    def run_id(self) -> str:
        return self.directory.name

    @property
    def record(self) -> Path:
        return self.directory / "run.json"

    def attempt(self, number: int) -> AttemptPlace:
        return AttemptPlace(directory=self.directory / f"attempt-{number:02d}", number=number)
