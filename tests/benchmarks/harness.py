"""Environment, components and real flow processes for the benchmarks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tasks.processes.component import AttemptPlan, ComponentPlan
from tasks.processes.guarded import Command
from tasks.processes.ports import PortsReserved
from tasks.processes.registry import RunRegistration
from tasks.processes.supervisor import Supervisor
from tasks.record.events import EventLog
from tasks.spec.probes import LiveProbe, ReadyProbe
from tests.support.host_environment import with_absolute_cwd

#: Names of the components of a run, in the order of their start.
NAMES = ("api", "trainer", "environment")

#: Default time limit on a wait, in seconds.
_DEADLINE_S = 60.0
_PART = Path(__file__).with_name("part.py")
_MARKED = Path(__file__).with_name("marked.sh")
#: Suffix of a file name. A component that only sleeps creates a file with this suffix when it has
#: started.
_MARK = ".up"
#: Environment variable with which tests/conftest.py finds leftover processes of a test.
_TEST_SESSION = "MUSTER_TEST_SESSION"
_QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}


def settle_environment(home: Path) -> None:
    """Set environment variables that hide the user's Prefect server and runs from this process.

    This function must be called before Prefect is imported.

    Args:
        home: Folder for the new PREFECT_HOME and MUSTER_HOME.
    """
    for name in list(os.environ):
        if name.startswith(("PREFECT_", "MUSTER_")) and name != _TEST_SESSION:
            del os.environ[name]
    os.environ.update(_QUIET)
    os.environ["PREFECT_HOME"] = str(home / "prefect")
    os.environ["MUSTER_HOME"] = str(home / "muster")


@contextmanager
def folder() -> Iterator[Path]:
    """Create a temporary folder, yield it, and delete it."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as path:
        yield Path(path)


def part(*arguments: object) -> tuple[str, ...]:
    """Return the command line of the component program `part.py`."""
    return python_alone(_PART, *arguments)


def python_alone(script: Path, *arguments: object) -> tuple[str, ...]:
    """Return the command line of a Python script that needs only the standard library."""
    return (sys.executable, "-I", "-S", str(script), *map(str, arguments))


def sleepers(place: Path, count: int) -> dict[str, tuple[str, ...]]:
    """Return a mapping from name to command, with components that only sleep.

    Each component creates the file `NAME.up` in the folder when it runs.

    Args:
        place: Folder of these files.
        count: Number of components.
    """
    shell = shutil.which("sh")
    assert shell is not None
    names = [f"c{number:04}" for number in range(count)]
    return {name: (shell, str(_MARKED), str(place / f"{name}{_MARK}")) for name in names}


def await_sleepers(place: Path, count: int, limit_s: float = 300.0) -> None:
    """Wait until this number of sleeping components run.

    Raises:
        TimeoutError: Not all components run within the time limit.
    """

    def are_up() -> bool:
        return sum(entry.name.endswith(_MARK) for entry in os.scandir(place)) == count

    wait_until(are_up, f"the start of {count} components", limit_s)


def recorded_ns(place: Path, name: str, event: str) -> int | None:
    """Return the number in a file of a component, or None if the file does not exist.

    The number is the time of an event, or the process id of the component.

    Args:
        place: Folder of the component's files.
        name: Name of the component.
        event: "began", "ready" or "sigterm" for the time of this event in nanoseconds. "pid" for
            the process id.
    """
    try:
        return int((place / f"{name}.{event}").read_text())
    except FileNotFoundError:
        return None


def wait_until(condition: Callable[[], Any], description: str, limit_s: float = _DEADLINE_S) -> Any:
    """Wait until a function returns a true value, and return the value.

    Args:
        condition: Function that is called repeatedly.
        description: Name of the awaited event, for the error message.
        limit_s: Time limit, in seconds.

    Raises:
        TimeoutError: The function did not return a true value within the time limit.
    """
    deadline = time.monotonic() + limit_s
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{description} took longer than {limit_s:g} s")
        time.sleep(0.02)
    return result


def supervisor_of(
    place: Path,
    commands: Mapping[str, Sequence[str]],
    ready: Mapping[str, ReadyProbe | None],
    ports: PortsReserved | None = None,
    live: Mapping[str, LiveProbe] | None = None,
    register: RunRegistration | None = None,
    stall_after_s: float | None = None,
) -> Supervisor:
    """Return a Supervisor for components, with an event log and without Prefect.

    Args:
        place: Working directory of the components, with their logs.
        commands: Mapping from the name of a component to its command.
        ready: Mapping from the name of each component to its readiness probe, or to None.
        ports: Ports that are reserved for the components.
        live: Mapping from the name of a component to its liveness probe. Components without a
            liveness probe may be left out.
        register: Registry entry of the run.
        stall_after_s: The run counts as stalled if there is no output for this number of seconds.
            With None, the run never counts as stalled.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    components = tuple(
        ComponentPlan(
            name=name,
            command=Command(
                argv=tuple(argv), env=env, cwd=place, log=place / f"{name}.log", grace_s=5.0
            ),
            ready=ready[name],
            live=(live or {}).get(name),
            on_exit_zero="fail",
        )
        for name, argv in commands.items()
    )
    plan = AttemptPlan(
        run_id="benchmark",
        number=1,
        cwd=place,
        components=components,
        stall_after_s=stall_after_s,
    )
    emit = EventLog(place / "events.jsonl").emit
    return Supervisor(plan, ports or PortsReserved([]), emit, register)


class FlowProcess:
    """Flow process `python -m flows.train SPEC`, started as a user starts it."""

    def __init__(
        self, place: Path, spec: Mapping[str, Any], api_url: str, wrapper: Sequence[str] = ()
    ) -> None:
        """Start the flow process.

        Args:
            place: Folder for the spec, the output and MUSTER_HOME.
            spec: Run spec.
            api_url: URL of the Prefect API.
            wrapper: Command prefix that executes the flow's command line.
        """
        home = place / "muster"
        self._output = place / "flow.out"
        path = place / "spec.yaml"
        path.write_text(yaml.safe_dump(with_absolute_cwd(spec), sort_keys=False))
        with self._output.open("wb") as output:
            self._popen = subprocess.Popen(
                [*wrapper, sys.executable, "-m", "flows.train", str(path)],
                cwd=Path.cwd(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PREFECT_API_URL": api_url, "MUSTER_HOME": str(home)},
            )
        #: MUSTER_HOME of the flow process. The path leads into the mount namespace of the flow
        #: process, because only the flow process sees a file system that `wrapper` has mounted.
        self.home = Path(f"/proc/{self._popen.pid}/root{home}")

    def __enter__(self) -> FlowProcess:
        return self

    @property
    def popen(self) -> subprocess.Popen[bytes]:
        """The flow process."""
        return self._popen

    def __exit__(self, *error: object) -> None:
        """End the flow process: send SIGTERM, 20 s later SIGTERM again, and 10 s later SIGKILL.

        After SIGKILL, the guardian processes of the components end the components.
        """
        for signum, limit_s in ((signal.SIGTERM, 20.0), (signal.SIGTERM, 10.0)):
            if self._popen.poll() is None:
                self._popen.send_signal(signum)
                try:
                    self._popen.wait(limit_s)
                except subprocess.TimeoutExpired:
                    continue
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait()

    def record(self) -> dict[str, Any]:
        """Return the content of `run.json`, or an empty dict if it does not exist yet."""
        for path in self.home.glob("runs/*/run.json"):
            content: dict[str, Any] = json.loads(path.read_text())
            return content
        return {}

    def components(self, limit_s: float = _DEADLINE_S) -> dict[str, dict[str, Any]]:
        """Wait until the run is running, and return its components.

        The result maps the name of each component to its entry in `run.json`.
        """
        wait_until(self._is_running, "a run's start", limit_s)
        components: dict[str, dict[str, Any]] = self.record()["attempts"][-1]["components"]
        return components

    def wait(self) -> int:
        """Wait for the end of the flow process, and return its exit code."""
        return self._popen.wait(_DEADLINE_S)

    def _is_running(self) -> bool:
        if self._popen.poll() is not None:
            raise RuntimeError(f"the flow has ended:\n{self._output.read_text()}")
        return self.record().get("state") == "running"
