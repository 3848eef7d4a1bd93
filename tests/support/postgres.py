"""A PostgreSQL server of a test's own, as Debian packages it, with its data and its socket in a
directory of its own, and without a port."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.ground import until

_DATABASE = "prefect"
_OF_DEBIAN = Path("/usr/lib/postgresql")
_PROGRAMS = ("initdb", "postgres", "pg_isready", "createdb", "psql", "pg_dump", "pg_restore")
#: It refuses to run as root.
_USERS = ("postgres", "nobody")
_WITHIN_S = 60.0


class Postgres:
    """One cluster; `postgres` gives one, and ends it."""

    def __init__(self, programs: Path, directory: Path, user: str | None) -> None:
        self._programs = programs
        self._data, self.sockets = directory / "data", directory / "sockets"
        self._log = directory / "postgres.log"
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """For PREFECT_SERVER_DATABASE_CONNECTION_URL."""
        name = self._user or pwd.getpwuid(os.getuid()).pw_name
        return f"postgresql+asyncpg://{name}@/{_DATABASE}?host={self.sockets}"

    def set_up(self) -> None:
        """A new cluster that runs, with an empty database."""
        self.sockets.mkdir(mode=0o700)
        if self._user is not None:
            for path in (self._data.parent, self.sockets):
                shutil.chown(path, self._user)
        self.run("initdb", f"--pgdata={self._data}", "--auth=trust", "--encoding=UTF8", "-N")
        self.start()
        self.run("createdb", f"--host={self.sockets}", _DATABASE)

    def start(self) -> None:
        """Returns: once it takes connections."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(self._programs / "postgres", "-D", self._data, "-k", self.sockets),
                    *("-c", "listen_addresses="),
                ],
                cwd=self.sockets,
                user=self._user,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        ask = (self._programs / "pg_isready", f"--host={self.sockets}", "--quiet")
        until(lambda: subprocess.run(ask).returncode == 0, f"PostgreSQL: see {self._log}")

    def stop(self, *, at_once: bool = False) -> None:
        """
        Args:
            at_once: as by a crash: its next start recovers from the log. Else it takes back what is
                under way and closes its files.
        """
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT if at_once else signal.SIGINT)
            self._process.wait(_WITHIN_S)
            self._process = None

    def run(self, program: str, *arguments: str) -> str:
        """One of its own programs, as its user; what it prints. Raises: CalledProcessError."""
        done = subprocess.run(
            [self._programs / program, *arguments],
            cwd=self.sockets,
            user=self._user,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
        )
        if done.returncode != 0:
            raise AssertionError(f"{program} exited {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def query(self, statement: str) -> str:
        """What psql answers, without headings."""
        host = f"--host={self.sockets}"
        return self.run("psql", host, "-AtX", "-c", statement, _DATABASE).strip()


def why_no_postgres() -> str:
    """Why none can be had here, and the remedy; empty where one can."""
    if _programs() is None:
        return "PostgreSQL is not installed: on Debian and Ubuntu, apt-get install postgresql"
    if os.geteuid() == 0 and _other_user() is None:
        return f"PostgreSQL refuses to run as root, and there is no user {' or '.join(_USERS)}"
    return ""


@contextmanager
def postgres() -> Iterator[Postgres]:
    """One that runs, with an empty database; nothing of it is left afterwards.

    Raises: AssertionError, where `why_no_postgres` says why.
    """
    programs = _programs()
    assert programs is not None, why_no_postgres()
    # Short, since it holds a socket, and not below a directory that its user may not enter.
    directory = Path(tempfile.mkdtemp(prefix="muster-pg-", dir="/tmp"))
    server = Postgres(programs, directory, _other_user() if os.geteuid() == 0 else None)
    try:
        server.set_up()
        yield server
    finally:
        server.stop(at_once=True)
        shutil.rmtree(directory, ignore_errors=True)


def _programs() -> Path | None:
    """The directory of its programs, of the newest release there is."""
    releases = sorted(
        _OF_DEBIAN.glob("*/bin"), key=lambda path: int(path.parent.name.partition(".")[0])
    )
    on_path = shutil.which("postgres")
    places = [*([Path(on_path).resolve().parent] if on_path else []), *reversed(releases)]
    found = (place for place in places if all((place / name).exists() for name in _PROGRAMS))
    return next(found, None)


def _other_user() -> str | None:
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in _USERS if name in known), None)
