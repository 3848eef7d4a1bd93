"""Where the benchmarks run: an environment of their own, components, and runs of the real flow."""

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
from tasks.processes.registry import RunRegister
from tasks.processes.supervisor import Supervisor
from tasks.record.events import EventLog
from tasks.spec.probes import LiveProbe, ReadyProbe
from tests.support.ground import in_checkout

#: In the order of their start.
NAMES = ("api", "trainer", "environment")

#: Nothing here takes longer, unless it is broken.
_DEADLINE_S = 60.0
_PART = Path(__file__).with_name("part.py")
_MARKED = Path(__file__).with_name("marked.sh")
_MARK = ".up"
#: By this a test finds what outlives it; see tests/conftest.py.
_TEST_SESSION = "MUSTER_TEST_SESSION"
_QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}


def settle_environment(home: Path) -> None:
    """See no Prefect server and no runs of the user's. Before anything imports Prefect."""
    for name in list(os.environ):
        if name.startswith(("PREFECT_", "MUSTER_")) and name != _TEST_SESSION:
            del os.environ[name]
    os.environ.update(_QUIET)
    os.environ["PREFECT_HOME"] = str(home / "prefect")
    os.environ["MUSTER_HOME"] = str(home / "muster")


@contextmanager
def folder() -> Iterator[Path]:
    """A folder for one sample."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as path:
        yield Path(path)


def part(*arguments: object) -> tuple[str, ...]:
    """The command line of a component; see `part.py`."""
    return python_alone(_PART, *arguments)


def python_alone(script: Path, *arguments: object) -> tuple[str, ...]:
    """The command line of a script that needs the standard library only."""
    return (sys.executable, "-I", "-S", str(script), *map(str, arguments))


def sleepers(place: Path, count: int) -> dict[str, tuple[str, ...]]:
    """Components that do nothing: `commands[name]`, each with a mark in the folder once it runs."""
    shell = shutil.which("sh")
    assert shell is not None
    names = [f"c{number:04}" for number in range(count)]
    return {name: (shell, str(_MARKED), str(place / f"{name}{_MARK}")) for name in names}


def await_sleepers(place: Path, count: int, limit_s: float = 300.0) -> None:
    """Raises: TimeoutError."""

    def are_up() -> bool:
        return sum(entry.name.endswith(_MARK) for entry in os.scandir(place)) == count

    wait_until(are_up, f"the start of {count} components", limit_s)


def noted_ns(place: Path, name: str, what: str) -> int | None:
    """What a component wrote down; None when it has not."""
    try:
        return int((place / f"{name}.{what}").read_text())
    except FileNotFoundError:
        return None


def wait_until(is_so: Callable[[], Any], what: str, limit_s: float = _DEADLINE_S) -> Any:
    """What `is_so` says, once that is true.

    Raises: TimeoutError.
    """
    deadline = time.monotonic() + limit_s
    while not (answer := is_so()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} took longer than {limit_s:g} s")
        time.sleep(0.02)
    return answer


def supervisor_of(
    place: Path,
    commands: Mapping[str, Sequence[str]],
    ready: Mapping[str, ReadyProbe | None],
    ports: PortsReserved | None = None,
    live: Mapping[str, LiveProbe] | None = None,
    register: RunRegister | None = None,
    stall_after_s: float | None = None,
) -> Supervisor:
    """A Supervisor as the flow makes it, with its event log, but without Prefect."""
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
    """`python -m flows.train SPEC` in a process of its own, as a user starts it."""

    def __init__(
        self, place: Path, spec: Mapping[str, Any], api_url: str, wrapper: Sequence[str] = ()
    ) -> None:
        """
        Args:
            wrapper: a command that becomes the one which is given to it.
        """
        home = place / "muster"
        self._output = place / "flow.out"
        path = place / "spec.yaml"
        path.write_text(yaml.safe_dump(in_checkout(spec), sort_keys=False))
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
        #: Its MUSTER_HOME, as it sees it itself.
        self.home = Path(f"/proc/{self._popen.pid}/root{home}")

    def __enter__(self) -> FlowProcess:
        return self

    @property
    def popen(self) -> subprocess.Popen[bytes]:
        """The flow process."""
        return self._popen

    def __exit__(self, *error: object) -> None:
        """End it as Ctrl-C twice does; SIGKILL, which the guardians survive, only if that fails."""
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
        """Its `run.json`; empty before there is one."""
        for path in self.home.glob("runs/*/run.json"):
            content: dict[str, Any] = json.loads(path.read_text())
            return content
        return {}

    def components(self, limit_s: float = _DEADLINE_S) -> dict[str, dict[str, Any]]:
        """What `run.json` says of the components, once the run is running."""
        wait_until(self._is_running, "a run's start", limit_s)
        components: dict[str, dict[str, Any]] = self.record()["attempts"][-1]["components"]
        return components

    def wait(self) -> int:
        """Its exit code."""
        return self._popen.wait(_DEADLINE_S)

    def _is_running(self) -> bool:
        if self._popen.poll() is not None:
            raise RuntimeError(f"the flow has ended:\n{self._output.read_text()}")
        return self.record().get("state") == "running"
