"""Run ids, paths of a run's files, and access rights of Muster's home directory (`MUSTER_HOME`)."""

from __future__ import annotations

import errno
import logging
import os
import pwd
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from uuid import UUID

from tasks.spec.own_settings import HOME, HOME_OWNER, UMASK
from tasks.spec.ownership import (
    UntrustedPath,
    find_ownership_fault,
    find_path_fault,
    is_present,
    trusted_users,
)

_log = logging.getLogger(__name__)

#: Names of the folders in Muster's home directory (`MUSTER_HOME`) that Muster itself creates.
_OWN = (
    "cache",
    "claims",
    "code",
    "gate",
    "live",
    "parked",
    "pipelines",
    "prefect",
    "runs",
    "stack",
    "temp",
    "unseen",
)
#: Names of the folders in Muster's home directory that other users may never read, even if
#: MUSTER_UMASK allows them to read other files.
_OF_SERVERS = ("cache", "prefect", "stack", "temp")
#: Names of all files and folders that Muster creates directly in its home directory.
_ENTRIES = (*_OWN, "agents.key", "password", "ray-token", "zygote")
#: Mode bits of a file that allow writing for the group or for all users.
_WRITE_BITS = 0o022
#: Environment variable with the name or id of the user who owns Muster's home directory. Other
#: users set this variable to read files in that directory.
_OWNER_VARIABLE = HOME_OWNER.name
#: Environment variable with the umask of the process that called Muster, as an octal number. The
#: function `note_callers_umask` sets this variable.
CALLERS_UMASK = "MUSTER_CALLERS_UMASK"
#: Advice to the user if other users could change files in Muster's home directory.
_REMEDY = (
    "Muster's home directory, its files and the folders above it must belong to you or to root, "
    "and no other user may write there. Correct their owners and modes, or set MUSTER_HOME to a "
    f"folder of your own. To use the home of another user whom you trust, set {_OWNER_VARIABLE} to "
    "that user's name."
)
#: Muster home directories that this process has already checked and found safe. Each entry consists
#: of the directory's path, the id of this user, and the ids of the trusted users.
_trusted_homes: set[tuple[Path, int, frozenset[int]]] = set()


def muster_home() -> Path:
    """Return the absolute path of Muster's home directory: `$MUSTER_HOME`, by default `~/.muster`.

    The home directory, the folders above it, and Muster's files in it must belong to a trusted
    user. No other user may have the right to write to them.

    Raises:
        UntrustedPath: Another user could change the content of the home directory.
    """
    home = Path(HOME.read()).expanduser().absolute()
    owners = home_owners()
    checked_home = (home, os.geteuid(), owners)
    if checked_home in _trusted_homes:
        return home
    try:
        fault = _home_fault(home, owners)
    except OSError as error:
        fault = f"{error.filename or home} cannot be checked: {error.strerror}"
    if fault:
        raise UntrustedPath(f"MUSTER_HOME {home} cannot be used: {fault}\n{_REMEDY}")
    # Remember the result only for an existing directory. Another user could create a missing
    # directory after this check.
    if home.exists():
        _trusted_homes.add(checked_home)
    return home


def home_owners() -> frozenset[int]:
    """Return the ids of the users whose files in Muster's home directory are trusted.

    These are the current user, root, and the user in the environment variable MUSTER_HOME_OWNER.

    Raises:
        UntrustedPath: The user in MUSTER_HOME_OWNER does not exist.
    """
    owner = HOME_OWNER.read()
    if not owner:
        return trusted_users()
    try:
        uid = int(owner) if owner.isdecimal() else pwd.getpwnam(owner).pw_uid
    except KeyError:
        raise UntrustedPath(f"{_OWNER_VARIABLE}={owner}: this machine has no such user") from None
    return trusted_users() | {uid}


def _home_fault(home: Path, owners: frozenset[int]) -> str:
    """Return why a Muster home directory is not trusted, or an empty string if it is trusted.

    Args:
        home: Absolute path of the home directory.
        owners: Ids of the trusted users.

    Raises:
        OSError: The owner or the mode of a file could not be read.
    """
    if fault := find_path_fault(home, owners):
        return fault
    if home.exists() and not home.is_dir():
        return (
            f"Muster's home {home} is not a directory. Set MUSTER_HOME to a directory, or remove "
            "this file."
        )
    entries = (home / name for name in _ENTRIES)
    faults = (
        find_path_fault(entry, owners, from_root=False) for entry in entries if is_present(entry)
    )
    return next(filter(None, faults), "")


def read_own_file(path: Path) -> bytes:
    """Return the content of a file that Muster wrote.

    Raises:
        PermissionError: The file is not trusted. It is a symbolic link or not a regular file,
            belongs to another user, or is writable for other users.
        OSError: The file could not be read.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PermissionError(
                errno.EACCES,
                "this is a symbolic link, and Muster does not follow symbolic links",
                str(path),
            ) from None
        raise
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(errno.EACCES, "Muster reads only a regular file here", str(path))
        if fault := find_ownership_fault(path, status, home_owners()):
            raise PermissionError(errno.EACCES, fault, str(path))
        return file.read()


def is_at(fd: int, path: Path) -> bool:
    """Return True if a path still leads to the file that this process opened earlier.

    Use this function for lock files. If a lock file was deleted or replaced, other processes lock a
    different file.

    Args:
        fd: Descriptor of the open file.
        path: Path that was used to open the file.
    """
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def keep_private() -> None:
    """Set the umask of this process, and remove other users' access to Muster's home directory.

    By default, only this user can read new files. MUSTER_UMASK=027 allows the group to read them,
    and 022 allows all users. Child processes inherit the umask.

    If other users could read the home directory before, the modes of all files in Muster's folders
    are corrected. Files of other users and files in other folders are not changed.

    Raises:
        InvalidVariable: MUSTER_UMASK is not an octal number.
        UntrustedPath: Muster's home directory is not trusted, or MUSTER_UMASK would allow other
            users to write.
    """
    mask = _umask()
    note_callers_umask()
    os.umask(mask)
    home = muster_home()
    # First change the mode of Muster's home directory. Other users then cannot reach its files
    # while the modes of the files are changed.
    was_open = not _is_more_than_a_home(home) and _restrict(home, mask)
    for name in _OWN:
        hidden = 0o077 if name in _OF_SERVERS else mask
        if _restrict(home / name, hidden) or was_open:
            for path in _below(home / name):
                _restrict(path, hidden, only=True)


def note_callers_umask() -> None:
    """Store the umask of this process in the environment variable `MUSTER_CALLERS_UMASK`.

    Call this function before Muster changes its own umask. The programs of the user later get the
    stored umask. If a parent process has already set the variable, the variable is not changed.
    """
    if CALLERS_UMASK not in os.environ:
        mask = os.umask(0o077)
        os.umask(mask)
        os.environ[CALLERS_UMASK] = f"{mask:03o}"


def callers_umask() -> int | None:
    """Return the umask of the shell or service that started Muster.

    Programs of the user get this umask for their own files.

    Returns:
        None if the umask is unknown, because `keep_private` was not called.
    """
    text = os.environ.get(CALLERS_UMASK, "")
    try:
        return int(text, 8) & 0o777
    except ValueError:
        return None


def write_for_caller(path: Path, text: str) -> None:
    """Write a text file into a project of the user.

    The umask of the user's shell determines the mode of a new file. An existing file keeps its
    mode.
    """
    is_new = not path.exists()
    path.write_text(text, encoding="utf-8")
    mask = callers_umask()
    if is_new and mask is not None:
        path.chmod(0o666 & ~mask)


def _umask() -> int:
    """Return the umask in the environment variable MUSTER_UMASK, by default 077.

    Raises:
        InvalidVariable: MUSTER_UMASK is not an octal number.
        UntrustedPath: MUSTER_UMASK would let other users write.
    """
    mask = UMASK.read()
    if mask & _WRITE_BITS != _WRITE_BITS:
        raise UntrustedPath(
            f"MUSTER_UMASK={os.environ[UMASK.name]} would let other users write to the files of "
            "runs. Set MUSTER_UMASK to 077 (only you can read the files), 027 (your group can "
            "read them) or 022 (all users can read them)."
        )
    # Keep only the umask bits for the group and for other users. With a bit for the owner, Muster
    # itself could not read its new files.
    return mask & 0o077


def _is_more_than_a_home(path: Path) -> bool:
    """Return True if the folder is `/` or the home directory of this user.

    Such a folder also contains files of other programs, so its mode must not be changed.
    """
    with suppress(RuntimeError):
        return path in (Path("/"), Path.home())
    return False


def _restrict(path: Path, mask: int, *, only: bool = False) -> bool:
    """Change the mode of a file or folder to the mode that it would get with a umask.

    Only a file or folder of this user is changed.

    Args:
        path: The file or folder.
        mask: The umask.
        only: True to remove permissions, but never to add any.

    Returns:
        True if the mode was changed.
    """
    with suppress(OSError):
        status = path.lstat()
        mode = stat.S_IMODE(status.st_mode)
        added_rights = 0 if only else (mode & 0o700) >> 3 | (mode & 0o700) >> 6
        new_mode = (mode | added_rights) & ~mask
        if new_mode != mode and status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode):
            path.chmod(new_mode)
            return True
    return False


def _below(directory: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(directory):
        yield from (Path(folder, name) for name in (*folders, *files))


def password_file() -> Path:
    """Return the path of the file with the password of the Prefect servers.

    Only the owner of Muster's home directory may read this file.
    """
    return muster_home() / "password"


def server_password() -> str:
    """Return `user:password` for the Prefect servers that use Muster's home directory.

    The result is an empty string if there is no password yet, or if the password file cannot be
    read or is not trusted.
    """
    with suppress(OSError):
        return read_own_file(password_file()).decode().strip()
    return ""


def make_server_password() -> str:
    """Return `user:password` for the Prefect servers. If there is no password yet, create one.

    Raises:
        PermissionError: The password file is not trusted.
        OSError: The password file could not be read or written.
    """
    return kept_secret(password_file(), _new_password)


def renew_server_password() -> str:
    """Replace the password of the Prefect servers, and return the new `user:password`.

    Raises:
        OSError: The password file could not be written.
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
    """Return the content of a secret file. If the file is missing, create it.

    Only this user may read the file.

    Args:
        path: The secret file.
        make: Function that returns the content for a new file.

    Raises:
        PermissionError: The file is not trusted; see `read_own_file`.
        OSError: The file could not be read or written.
    """
    if not is_present(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Check again that Muster's home directory is safe. Another user may have created the
        # directory in the meantime.
        muster_home()
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{make()}\n")
        try:
            # If two processes create the file at the same time, both use the content of the first
            # process.
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
    content = read_own_file(path).decode().strip()
    if path.lstat().st_mode & 0o077:
        path.chmod(0o600)
    return content


def make_run_id(name: str, workload: str, flow_run_id: UUID, created: datetime) -> str:
    """Return the run id of a flow run: `<name>-<workload>-<YYYYMMDD>-<HHMMSS>-<8 hex>`.

    The run id never changes. The date and the time are those of the creation of the flow run, in
    UTC.
    """
    return f"{name}-{workload}-{created.astimezone(UTC):%Y%m%d-%H%M%S}-{flow_run_id.hex[-8:]}"


#: Patterns of the JSON files that Muster itself writes into the folders of a run and its attempts.
_OWN_JSON_FILES = (
    "events.jsonl",
    "rollout.jsonl",
    "submission*.json",
    "*.error.json",
    "run.json",
    "evaluations.json",
    "lineage.json",
    "result.json",
)


def is_own_json_file(name: str) -> bool:
    """Return True if Muster writes a JSON file of this name into the folders of a run."""
    return any(fnmatchcase(name, pattern) for pattern in _OWN_JSON_FILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlace:
    """Paths of the files of an attempt."""

    #: Absolute path of the attempt's folder, for example `attempt-01` in the run's directory.
    directory: Path
    #: Number of the attempt, from 1.
    number: int

    @property
    def spec(self) -> Path:
        return self.directory / "spec.yaml"

    @property
    def events(self) -> Path:
        return self.directory / "events.jsonl"

    @property
    def fleet_events(self) -> Path:
        """Path of the event log of the inference fleet."""
        return self.directory / "rollout.jsonl"

    @property
    def submission(self) -> Path:
        """Path of the submission record of the attempt's first Ray job.

        The method `submissions` returns the records of all Ray jobs.
        """
        return self.directory / "submission.json"

    def submissions(self) -> list[Path]:
        """Return the paths of the submission records of all Ray jobs of the attempt.

        A record is written before its job is submitted.
        """
        return sorted(self.directory.glob("submission*.json"))

    def log(self, component: str) -> Path:
        return self.directory / f"{component}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """Paths of the files of a run."""

    #: Absolute path of the run's folder, `$MUSTER_HOME/runs/<run id>`.
    directory: Path

    @staticmethod
    def of(run_id: str, home: Path | None = None) -> RunPlace:
        return RunPlace(directory=(home or muster_home()) / "runs" / run_id)

    @property
    def run_id(self) -> str:
        return self.directory.name

    def shorten_paths(self, text: str) -> str:
        """Return a text in which paths in the run's folder are relative to this folder."""
        folder = re.escape(str(self.directory))
        return re.sub(rf"(?<![\w/]){folder}/(?=[^\s/])", "", text)

    @property
    def record(self) -> Path:
        return self.directory / "run.json"

    @property
    def spec(self) -> Path:
        """Path of the run spec, in which placeholders are not replaced and secrets are masked."""
        return self.directory / "spec.yaml"

    @property
    def code(self) -> Path:
        """Folder with the copy of the project. A submitted run works in this folder."""
        return self.directory / "code"

    @property
    def evaluations(self) -> Path:
        """Path of the record of the evaluations of the run's checkpoints."""
        return self.directory / "evaluations.json"

    @property
    def lineage(self) -> Path:
        """Path of the file that lists the inputs and outputs of the run."""
        return self.directory / "lineage.json"

    def attempt(self, number: int) -> AttemptPlace:
        return AttemptPlace(directory=self.directory / f"attempt-{number:02d}", number=number)
