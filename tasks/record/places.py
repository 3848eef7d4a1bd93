"""Names and places of a run: its id, the files it leaves, and who may read them."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

_log = logging.getLogger(__name__)

#: What Muster keeps in its home; of these, what tells everything, or lets in: for nobody else.
_OWN = ("cache", "code", "gate", "live", "parked", "prefect", "runs", "stack", "unseen")
_OF_SERVERS = ("cache", "prefect", "stack")


def muster_home() -> Path:
    """`$MUSTER_HOME`, by default `~/.muster`; absolute."""
    return Path(os.environ.get("MUSTER_HOME") or "~/.muster").expanduser().absolute()


def is_at(fd: int, path: Path) -> bool:
    """Whether an open file is the one that is on disk by that name. A lock on one that was removed
    or replaced since it was opened keeps nobody out."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def keep_private() -> None:
    """What this process and its children write from now on is for its user alone, and so is the
    whole home; also for a group, or for everybody, where `MUSTER_UMASK` says so (027, 022).

    A home that is open to more than that is gone through, once. What belongs to somebody else, and
    what a home has that is not Muster's, stays as it is.
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
    asked = os.environ.get("MUSTER_UMASK") or "077"
    try:
        # A process whose own files are kept from it would come to nothing.
        return int(asked, 8) & 0o077
    except ValueError:
        _log.warning("MUSTER_UMASK=%s is no octal number, as 027 is one: taken as 077", asked)
        return 0o077


def _is_more_than_a_home(path: Path) -> bool:
    """Whether others have a right to it: `/tmp`, a person's home."""
    with suppress(OSError, RuntimeError):
        return bool(path.stat().st_mode & stat.S_ISVTX) or path in (Path("/"), Path.home())
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
    """`user:password` of the Prefect servers that are started in this home; empty where it has none
    yet, or it is another user's."""
    with suppress(OSError):
        return password_file().read_text(encoding="utf-8").strip()
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
    """What a file for its user alone holds, made where it is not there. Raises: OSError."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{make()}\n")
        try:
            # Of two that begin together, one has its way.
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
    path.chmod(0o600)
    return path.read_text(encoding="utf-8").strip()


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
