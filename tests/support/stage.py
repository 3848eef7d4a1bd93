"""A stage for real components under a real supervisor, and the proof that nothing is left of them.

The stage's own process is a subreaper once a supervisor was made in it, so whatever a component
leaves becomes its child: that it has no child left is the kernel's word for an empty tree.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.processes import tree
from tasks.processes.component import AttemptPlan, ComponentPlan
from tasks.processes.guarded import Command
from tasks.processes.ports import PortsReserved
from tasks.processes.registry import RunRegister
from tasks.processes.supervisor import Supervisor
from tasks.record.events import Event
from tasks.record.outcome import Verdict
from tasks.spec.component import OnExitZero
from tasks.spec.errors import RunEnded
from tasks.spec.probes import LiveProbe, ReadyProbe
from tasks.spec.run import Progress

#: How long anything may take before a test gives up; never waited for in full unless it is broken.
DEADLINE_S = 60.0
#: From the stop signal to SIGKILL, where a test doesn't say otherwise.
GRACE_S = 0.3

#: Of this process alone: with `-n 2` a run in another one is none of its business.
RUN_ID = f"run-{os.urandom(4).hex()}"

#: Runs until it is told to end.
FOREVER = ("sleep", "600")


def sh(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


def python(code: str) -> tuple[str, ...]:
    """A program that starts in some 20 ms."""
    return (sys.executable, "-I", "-S", "-c", code)


def wait_until(is_so: Callable[[], object], what: str) -> None:
    """Raises: AssertionError, when it is not so by the deadline."""
    assert came(is_so, DEADLINE_S), f"not within {DEADLINE_S:g} s: {what}"


def came(is_so: Callable[[], object], within_s: float) -> bool:
    """Whether it has come to be so by then."""
    deadline = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def processes_with(variable: str, value: str, *, begins: bool = False) -> list[int]:
    """Those in whose environment the variable has the value, or begins with it."""
    wanted, found = f"{variable}={value}{'' if begins else chr(0)}".encode(), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            environ = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
            if environ.startswith(wanted) or b"\0" + wanted in environ:
                found.append(int(entry.name))
    return found


def is_alive(pid: int) -> bool:
    return not tree.is_zombie(pid)


#: The kernel may name a port again as soon as it is free, and a fleet wants several at once.
_named_ports: set[int] = set()


def free_port() -> int:
    """A port that nobody listens on, and another each time."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as s:
            port: int = s.getsockname()[1]
        if port not in _named_ports:
            _named_ports.add(port)
            return port


class Stage:
    """Components, the supervisor that watches them, and what it says has happened."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: list[Event] = []
        self._news = threading.Condition()
        self._supervisors: list[Supervisor] = []
        #: Children of this process that are none of the run's, beside those that are older than it:
        #: what another test began comes to this process whenever the parent of it ends.
        self.others: set[int] = set()
        self._began = _ticks()

    def component(
        self,
        name: str,
        argv: Sequence[str] = FOREVER,
        *,
        ready: ReadyProbe | None = None,
        live: LiveProbe | None = None,
        on_exit_zero: OnExitZero = "fail",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        log: Path | None = None,
        stop_signal: int = signal.SIGTERM,
        grace_s: float = GRACE_S,
    ) -> ComponentPlan:
        return ComponentPlan(
            name=name,
            command=Command(
                argv=tuple(argv),
                env={**os.environ, "MUSTER_RUN_ID": RUN_ID, **(env or {})},
                cwd=cwd or self.directory,
                log=log or self.log_of(name),
                stop_signal=stop_signal,
                grace_s=grace_s,
            ),
            ready=ready,
            live=live,
            on_exit_zero=on_exit_zero,
        )

    def supervise(
        self,
        *components: ComponentPlan,
        ports: PortsReserved | None = None,
        progress: Progress | None = None,
        success_step: float | None = None,
        stall_after_s: float | None = None,
        register: RunRegister | None = None,
        replan: Callable[[str], AttemptPlan] | None = None,
        **more: Any,
    ) -> Supervisor:
        """A supervisor that has started nothing yet; `clear` ends it."""
        plan = AttemptPlan(
            run_id=RUN_ID,
            number=1,
            cwd=self.directory,
            components=components,
            progress=progress,
            success_step=success_step,
            stall_after_s=stall_after_s,
            **more,
        )
        supervisor = Supervisor(
            plan, ports or PortsReserved([]), self.emit, register, replan=replan
        )
        self._supervisors.append(supervisor)
        return supervisor

    def running(self, *components: ComponentPlan, **plan: Any) -> Supervisor:
        """A supervisor that has started all components, and found them ready."""
        supervisor = self.supervise(*components, **plan)
        for component in components:
            supervisor.start(component.name)
        return supervisor

    def run(self, *components: ComponentPlan, **plan: Any) -> Verdict:
        """Start all components, wait until how the run ends is decided, and take it down."""
        supervisor = self.supervise(*components, **plan)
        with contextlib.suppress(RunEnded):
            for component in components:
                supervisor.start(component.name)
        return self.verdict_of(supervisor)

    def verdict_of(self, supervisor: Supervisor) -> Verdict:
        """The verdict on a run that ends by itself."""
        self.until("teardown.begun")
        return self.end(supervisor)

    def end(self, supervisor: Supervisor) -> Verdict:
        """Take everything down, and see with the kernel that nothing is left."""
        with supervisor:
            verdict = supervisor.teardown()
        assert self.left() == {}
        return verdict

    def left(self) -> dict[int, str]:
        """Children of this process but `others`, with their commands: none, once all is taken
        down."""
        found = {}
        for pid in tree.children(os.getpid()) if has_children() else ():
            if pid not in self.others and tree.start_ticks(pid) > self._began:
                found[pid] = tree.command_of(pid) or "a zombie"
        return found

    def emit(self, name: str, component: str | None = None, **fields: object) -> None:
        with self._news:
            self.events.append(Event(at=time.time(), name=name, component=component, fields=fields))
            self._news.notify_all()

    def seen(self, name: str, component: str | None = None) -> list[Event]:
        """Events of a name, of one component or of any."""
        return [
            event
            for event in self.events
            if event.name == name and component in (None, event.component)
        ]

    def until(self, name: str, component: str | None = None) -> Event:
        """Wait for an event; the first one of its kind."""
        with self._news:
            came = self._news.wait_for(lambda: self.seen(name, component), DEADLINE_S)
        assert came, f"no {name} of {component}; events: {self.story()}"
        return self.seen(name, component)[0]

    def pid_of(self, component: str) -> int:
        pid: int = self.until("component.spawned", component).fields["pid"]
        return pid

    def guardian_of(self, component: str) -> int:
        """Only while the component lives."""
        return tree.parent_of(self.pid_of(component))

    def story(self) -> list[str]:
        """The events in order: `component.ready trainer`."""
        return [f"{event.name} {event.component or ''}".strip() for event in self.events]

    def log_of(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def text_of(self, name: str) -> str:
        return self.log_of(name).read_text(errors="replace")

    def clear(self) -> None:
        """End what a test that failed has left."""
        for supervisor in self._supervisors:
            with supervisor:
                supervisor.hurry()
        for pid in self.left():
            tree.signal_process(pid, signal.SIGKILL, parent=os.getpid())
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _ticks() -> int:
    """Now, as the kernel counts the starts of processes: ticks since the boot."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def has_children() -> bool:
    """Whether this process has any child, a zombie included; exact, it reaps none."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


@contextlib.contextmanager
def stage_in(directory: Path) -> Iterator[Stage]:
    stage = Stage(directory)
    try:
        yield stage
    finally:
        stage.clear()
