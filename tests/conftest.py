"""What every test stands on: an environment of its own, and proof that no process outlives it.

A test may run beside a user's own Prefect server and Ray cluster, beside another `make test`, or
within a run of Muster: it sees none of them.
"""

from __future__ import annotations

import contextvars
import os
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.forkserver import ForkServer, fork_server
from tests.support.ray_cluster import RAY_ENV, RayCluster

# Before a test module imports Ray, which reads them once.
os.environ.update(RAY_ENV)

#: In the environment of everything that the session spawns: the ids of this session and of those
#: that it runs within, each after a slash.
SESSION_VARIABLE = "MUSTER_TEST_SESSION"

_QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # Of no use to a test's own server, and a tenth of the time that an import of Prefect takes.
    "PREFECT_PLUGINS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}
#: They lead to a server, a cluster or a run that is not the test's own, or make all of it slow.
_FOREIGN = (
    "PREFECT_API_URL",
    "PREFECT_API_KEY",
    "PREFECT_API_AUTH_STRING",
    "PREFECT_API_DATABASE_CONNECTION_URL",
    "PREFECT_PROFILE",
    "PREFECT_PROFILES_PATH",
    "RAY_ADDRESS",
    "MUSTER_RUN_ID",
    "MUSTER_ATTEMPT",
    "MUSTER_COMPONENT",
    # Each process that a test starts would compile our sources anew.
    "PYTHONDONTWRITEBYTECODE",
)
#: What is ending anyway may take this long after the last test.
_LEFTOVERS_WITHIN_S = 10.0
#: multiprocessing's own helper, which lives until the interpreter that began it ends.
_RESOURCE_TRACKER = "from multiprocessing.resource_tracker import main"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A process that a test began and did not end."""

    pid: int
    command: str
    #: Its MUSTER_RUN_ID; empty where it belongs to no run.
    run_id: str

    def __str__(self) -> str:
        run = f" of run {self.run_id}" if self.run_id else ""
        return f"pid {self.pid}{run}: {self.command}"


def leftovers_of(session_id: str) -> list[Leftover]:
    """The living processes of this machine that carry `session_id` in SESSION_VARIABLE.

    A process whose environment was scrubbed is not seen, nor one that was forked from pytest
    without an exec: the tests of the supervision have an oracle of their own for those.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environ = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or another user's
        variables = dict(line.partition("=")[::2] for line in environ)
        if session_id not in variables.get(SESSION_VARIABLE, "").split("/"):
            continue
        if _RESOURCE_TRACKER in command:
            continue
        words = command.replace("\0", " ").strip()
        run_id = variables.get("MUSTER_RUN_ID", "")
        found.append(Leftover(pid=int(entry.name), command=words, run_id=run_id))
    return sorted(found, key=lambda leftover: leftover.pid)


_SESSION_ID = uuid.uuid4().hex
_home = pytest.StashKey[Path]()
_leftovers = pytest.StashKey[list[Leftover]]()


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before a test module can import Prefect, which reads it once."""
    home = Path(tempfile.mkdtemp(prefix="muster-tests-"))
    config.stash[_home] = home
    for name in _FOREIGN:
        os.environ.pop(name, None)
    os.environ.update(_QUIET)
    os.environ["PREFECT_HOME"] = str(home / "prefect")
    os.environ["MUSTER_HOME"] = str(home / "muster")
    os.environ[SESSION_VARIABLE] = f"{os.environ.get(SESSION_VARIABLE, '')}/{_SESSION_ID}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--dist loadgroup` a file stays on one worker, and so do all that share the Ray cluster;
    the groups with the most slow tests begin, so that no worker has one of them left at the end.

    First, since the plugin reads the groups at this moment too.
    """
    slow = Counter[str]()
    groups: dict[pytest.Item, str] = {}
    for item in items:
        shares = "ray_cluster" in getattr(item, "fixturenames", ())
        groups[item] = group = "ray" if shares else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
        slow[group] += item.get_closest_marker("slow") is not None
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: -slow[groups[item]])


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_home], ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that leaves processes, even one whose tests all passed.

    They are named, not killed: what they wait for is the clue. Of a session with workers (`-n 2`)
    the controller looks, last: until xdist has ended them, they are processes of the session too,
    and what a worker says of its own exit status is not counted.
    """
    if hasattr(session.config, "workerinput"):
        return
    deadline = time.monotonic() + _LEFTOVERS_WITHIN_S
    while (found := leftovers_of(_SESSION_ID)) and time.monotonic() < deadline:
        time.sleep(0.05)
    session.config.stash[_leftovers] = found
    if found and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    found = config.stash.get(_leftovers, [])
    if not found:
        return
    terminalreporter.section("processes that outlived the tests, still alive", red=True)
    for leftover in found:
        terminalreporter.line(str(leftover))


@pytest.fixture(scope="session", autouse=True)
def quiet_environment() -> None:
    """No test begins where something could report to the outside or reach a foreign server."""
    changed = [name for name, value in _QUIET.items() if os.environ.get(name) != value]
    wrong = [f"{name} is {os.environ.get(name)!r}" for name in changed]
    wrong += [f"{name} is set" for name in _FOREIGN if name in os.environ]
    assert not wrong, f"the tests' environment was changed during collection: {wrong}"


@pytest.fixture
def muster_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A MUSTER_HOME of the test's own, empty, for it and for what it spawns."""
    home = tmp_path / "muster-home"
    home.mkdir()
    monkeypatch.setenv("MUSTER_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def prefect_url() -> Iterator[str]:
    """A Prefect server that all tests of the session share, of which those in this process see
    nothing unless they set its address.

    A test that counts flow runs, needs a pool of the usual name or kills its server starts one of
    its own.
    """
    from tasks.server.server import prefect_server

    # What it sets for this process is set in a context that no test runs in.
    context, server = contextvars.copy_context(), prefect_server(password="")
    yield context.run(server.__enter__)
    context.run(server.__exit__, None, None, None)


@pytest.fixture(scope="session")
def forkserver(prefect_url: str) -> Iterator[ForkServer]:
    """Starts processes of flow runs on that server."""
    with fork_server(prefect_url) as server:
        yield server


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """A real cluster that all tests of the session share: two nodes with 8 logical GPUs, 32 CPUs
    and {"worker_node": 100} each, beside a head that runs no work.

    A test leaves it as it found it: whoever kills a node or the head starts one of their own.
    """
    with RayCluster.started() as cluster:
        yield cluster
