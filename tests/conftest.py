"""Give each test an isolated environment. A test must leave no process and no failed listener.

The machine may run the Prefect server and the Ray cluster of a user, or a second `make test`. The
tests may also run in a component of Muster. The tests must not use this server, cluster or run.
"""

from __future__ import annotations

import contextvars
import logging
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

# Ray reads these variables during its import. So the variables must be set before a test module
# imports Ray.
os.environ.update(RAY_ENV)

#: Environment variable of all processes that the tests start. The value is a slash and the id of
#: this test session. If another test session has started this session, the value begins with a
#: slash and the id of that other session.
SESSION_VARIABLE = "MUSTER_TEST_SESSION"

#: Environment variables of the tests. The variables prevent programs from sending data to the
#: internet.
_QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # The tests need no Prefect plugins. Without plugins, the import of Prefect is a tenth faster.
    "PREFECT_PLUGINS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}
#: Environment variables that are removed for the tests. These variables name a Prefect server, a
#: Ray cluster or a run of the user, or slow down all tests.
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
    # With these variables, runs would use the activated Python environment of the user.
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    # With this variable, each process that a test starts would compile all sources again.
    "PYTHONDONTWRITEBYTECODE",
)
#: Seconds after the last test until all processes of the tests must have ended.
_LEFTOVERS_WITHIN_S = 10.0
#: Part of the command line of a helper process of Python's multiprocessing module. A helper that
#: pytest itself started lives until pytest ends. So the search for leftovers skips all helpers.
_RESOURCE_TRACKER = "from multiprocessing.resource_tracker import main"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A process that a test started and did not end."""

    pid: int
    #: Command line of the process.
    command: str
    #: Value of the process's variable MUSTER_RUN_ID. Empty if the process belongs to no run.
    run_id: str

    def __str__(self) -> str:
        run = f" of run {self.run_id}" if self.run_id else ""
        return f"pid {self.pid}{run}: {self.command}"


def find_leftovers(session_id: str) -> list[Leftover]:
    """Return the living processes of this machine with `session_id` in SESSION_VARIABLE.

    Two kinds of processes are not found. A process that was started with an empty environment lacks
    the variable. For a fork of pytest, /proc shows the environment from before pytest set the
    variable. The helper program `tests/support/oracle.py` finds both kinds among the descendants of
    a flow process, because the program asks the kernel and does not read the variable.
    """
    leftovers = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environ = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            # The process has ended, or belongs to another user.
            continue
        variables = dict(line.partition("=")[::2] for line in environ)
        if session_id not in variables.get(SESSION_VARIABLE, "").split("/"):
            continue
        if _RESOURCE_TRACKER in command:
            continue
        words = command.replace("\0", " ").strip()
        run_id = variables.get("MUSTER_RUN_ID", "")
        leftovers.append(Leftover(pid=int(entry.name), command=words, run_id=run_id))
    return sorted(leftovers, key=lambda leftover: leftover.pid)


_SESSION_ID = uuid.uuid4().hex
_home = pytest.StashKey[Path]()
_leftovers = pytest.StashKey[list[Leftover]]()


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment variables before the test modules are imported.

    Prefect reads its variables only once, when a test module imports Prefect.
    """
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
    """Group the tests for `pytest -n 2 --dist loadgroup`: one worker runs all tests of a group.

    The tests of a file are one group. All tests that use the shared Ray cluster are one group, too.
    The groups with the most slow tests start first. If such a group started last, one worker would
    still run this group while the other worker has nothing to do.

    This hook must run before the same hook of pytest-xdist, which reads the groups.
    """
    slow_tests_of_group = Counter[str]()
    group_of_item: dict[pytest.Item, str] = {}
    for item in items:
        uses_ray_cluster = "ray_cluster" in getattr(item, "fixturenames", ())
        group = "ray" if uses_ray_cluster else str(item.path)
        group_of_item[item] = group
        item.add_marker(pytest.mark.xdist_group(group))
        slow_tests_of_group[group] += item.get_closest_marker("slow") is not None
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: -slow_tests_of_group[group_of_item[item]])


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_home], ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the test session if a process outlives the tests, even if all tests passed.

    The processes are reported and not killed, so that a developer can examine them. With several
    workers (`-n 2`), only the controller process of pytest-xdist does the check. One of the other
    hooks ends the workers. An earlier check would report the workers, too, so the check runs after
    all other hooks.
    """
    if hasattr(session.config, "workerinput"):
        return
    deadline = time.monotonic() + _LEFTOVERS_WITHIN_S
    while (leftovers := find_leftovers(_SESSION_ID)) and time.monotonic() < deadline:
        time.sleep(0.05)
    session.config.stash[_leftovers] = leftovers
    has_passed = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if leftovers and has_passed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the processes that outlived the tests."""
    leftovers = config.stash.get(_leftovers, [])
    if not leftovers:
        return
    terminalreporter.section("processes that outlived the tests, still alive", red=True)
    for leftover in leftovers:
        terminalreporter.line(str(leftover))


@pytest.fixture(autouse=True)
def restored_environment() -> Iterator[None]:
    """Restore the environment variables that a test, or the code under test, has changed."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


class _CollectingHandler(logging.Handler):
    """Stores each log entry as text, with the traceback of its exception."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@pytest.fixture(autouse=True)
def listener_errors() -> Iterator[list[str]]:
    """Fail the test if a listener of an event log raised an exception in the process of the test.

    `EventLog.emit` only logs such an exception, so that the exception does not end a user's run.

    Yields:
        The logged exceptions as texts. A test that provokes an exception on purpose removes its
        text from the list.
    """
    handler = _CollectingHandler()
    logger = logging.getLogger("tasks.record.events")
    logger.addHandler(handler)
    yield handler.texts
    logger.removeHandler(handler)
    if handler.texts:
        pytest.fail("\n".join(handler.texts), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def quiet_environment() -> None:
    """Check that the import of the test modules has not changed the environment variables."""
    changed = [name for name, value in _QUIET.items() if os.environ.get(name) != value]
    changes = [f"{name} is {os.environ.get(name)!r}" for name in changed]
    changes += [f"{name} is set" for name in _FOREIGN if name in os.environ]
    assert not changes, f"the tests' environment was changed during collection: {changes}"


@pytest.fixture
def muster_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an empty MUSTER_HOME for one test and for the processes that the test starts."""
    home = tmp_path / "muster-home"
    home.mkdir()
    monkeypatch.setenv("MUSTER_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def prefect_url() -> Iterator[str]:
    """Run a Prefect server that all tests of the session share, and return its API's URL.

    The server is used only by tests that set the URL of the API. A test must start its own server
    if the test counts flow runs, needs a work pool with the default name, or kills the server.
    """
    from tasks.server.server import prefect_server

    # `prefect_server` also sets context variables with the settings of Prefect. Only a copy of the
    # context gets these values, so that the tests keep their own settings.
    context = contextvars.copy_context()
    server = prefect_server(password="")
    yield context.run(server.__enter__)
    context.run(server.__exit__, None, None, None)


@pytest.fixture(scope="session")
def forkserver(prefect_url: str) -> Iterator[ForkServer]:
    """Run a fork server for flow processes that use the shared Prefect server."""
    with fork_server(prefect_url) as server:
        yield server


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """Run a real Ray cluster that all tests of the session share.

    The cluster has two worker nodes, and a head node that runs no work. Each worker node has 8
    logical GPUs, 32 CPUs and the custom resource {"worker_node": 100}. A test must not change this
    cluster. To kill a node or the head, a test starts another cluster.
    """
    with RayCluster.run() as cluster:
        yield cluster
