"""A PostgreSQL server for one test.

The data and the Unix socket of the server are in a temporary directory. It has no TCP port. The
programs of PostgreSQL come from PATH or from the packages of Debian.
"""

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

from tests.support.host_environment import wait_for

#: Name of the database.
_DATABASE = "prefect"
#: Directory in which Debian installs the releases of PostgreSQL.
_DEBIAN_DIRECTORY = Path("/usr/lib/postgresql")
#: Programs of PostgreSQL that the tests use.
_PROGRAMS = ("initdb", "postgres", "pg_isready", "createdb", "psql", "pg_dump", "pg_restore")
#: Users that may own the server if the tests run as root: PostgreSQL refuses to run as root.
_USERS = ("postgres", "nobody")
#: Time limit of each program of PostgreSQL, in seconds.
_PROGRAM_TIMEOUT_S = 60.0


class Postgres:
    """A PostgreSQL server for one test. Use the context manager `postgres` to create a server."""

    def __init__(self, programs: Path, directory: Path, user: str | None) -> None:
        """
        Args:
            programs: Directory of the programs of PostgreSQL.
            directory: Directory for the data, the socket and the log of the server.
            user: Name of the user who owns the server. None for the current user.
        """
        self._programs = programs
        self._data = directory / "data"
        #: Directory of the Unix socket.
        self.sockets = directory / "sockets"
        self._log = directory / "postgres.log"
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Value of PREFECT_SERVER_DATABASE_CONNECTION_URL for this server."""
        name = self._user or pwd.getpwuid(os.getuid()).pw_name
        return f"postgresql+asyncpg://{name}@/{_DATABASE}?host={self.sockets}"

    def set_up(self) -> None:
        """Create the data directory, start the server, and create an empty database."""
        self.sockets.mkdir(mode=0o700)
        if self._user is not None:
            for path in (self._data.parent, self.sockets):
                shutil.chown(path, self._user)
        self.run("initdb", f"--pgdata={self._data}", "--auth=trust", "--encoding=UTF8", "-N")
        self.start()
        self.run("createdb", f"--host={self.sockets}", _DATABASE)

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._programs / "postgres",
                    "-D",
                    self._data,
                    "-k",
                    self.sockets,
                    "-c",
                    "listen_addresses=",
                ],
                cwd=self.sockets,
                user=self._user,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        is_ready = (self._programs / "pg_isready", f"--host={self.sockets}", "--quiet")
        wait_for(lambda: subprocess.run(is_ready).returncode == 0, f"PostgreSQL: see {self._log}")

    def stop(self, *, at_once: bool = False) -> None:
        """Stop the server, if it runs.

        Args:
            at_once: True to stop as in a crash, without a checkpoint. The next start of the server
                then recovers the data from the write-ahead log. False to roll back the open
                transactions and to close the files.
        """
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT if at_once else signal.SIGINT)
            self._process.wait(_PROGRAM_TIMEOUT_S)
            self._process = None

    def run(self, program: str, *arguments: str) -> str:
        """Run a program of PostgreSQL as the server's user, and return its stdout.

        Raises:
            AssertionError: The program failed.
        """
        result = subprocess.run(
            [self._programs / program, *arguments],
            cwd=self.sockets,
            user=self._user,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROGRAM_TIMEOUT_S,
        )
        if result.returncode != 0:
            raise AssertionError(f"{program} exited {result.returncode}: {result.stderr.strip()}")
        return result.stdout

    def query(self, statement: str) -> str:
        """Execute an SQL statement, and return the rows as psql prints them, without headings."""
        host = f"--host={self.sockets}"
        return self.run("psql", host, "-AtX", "-c", statement, _DATABASE).strip()


def explain_missing_postgres() -> str:
    """Return the reason why no PostgreSQL server can run here, with a remedy.

    The result is an empty string if a server can run.
    """
    if _find_programs() is None:
        return "PostgreSQL is not installed: on Debian and Ubuntu, apt-get install postgresql"
    if os.geteuid() == 0 and _other_user() is None:
        return f"PostgreSQL refuses to run as root, and there is no user {' or '.join(_USERS)}"
    return ""


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Run a PostgreSQL server with an empty database while the context is open.

    After the context, the server has ended and its files are deleted.

    Raises:
        AssertionError: No server can run here. `explain_missing_postgres` returns the reason.
    """
    programs = _find_programs()
    assert programs is not None, explain_missing_postgres()
    # Use /tmp: in the temporary directory of a test, the path of the Unix socket may be too long,
    # and the server's user may have no access.
    directory = Path(tempfile.mkdtemp(prefix="muster-pg-", dir="/tmp"))
    server = Postgres(programs, directory, _other_user() if os.geteuid() == 0 else None)
    try:
        server.set_up()
        yield server
    finally:
        server.stop(at_once=True)
        shutil.rmtree(directory, ignore_errors=True)


def _find_programs() -> Path | None:
    """Return a directory with all programs of PostgreSQL, or None if there is none.

    The directories of PATH are searched first, then those of Debian's packages, the newest release
    first.
    """
    directories = []
    if (on_path := shutil.which("postgres")) is not None:
        directories.append(Path(on_path).resolve().parent)
    directories += sorted(
        _DEBIAN_DIRECTORY.glob("*/bin"),
        key=lambda path: int(path.parent.name.partition(".")[0]),
        reverse=True,
    )
    for directory in directories:
        if all((directory / name).exists() for name in _PROGRAMS):
            return directory
    return None


def _other_user() -> str | None:
    """Return the first name in `_USERS` that is a user of this machine, or None."""
    existing = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in _USERS if name in existing), None)
