"""Run real components under a real supervisor, and check that no process of them survives.

A supervisor makes the test's process a subreaper. If a component leaves a process behind, that
process becomes a child of the test's process. If the kernel says that the test's process has no
child, no process of a component survived.
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
from tasks.processes.registry import RunRegistration
from tasks.processes.supervisor import Supervisor
from tasks.record.events import Event
from tasks.record.outcome import Verdict
from tasks.spec.component import OnExitZero
from tasks.spec.errors import RunEnded
from tasks.spec.probes import LiveProbe, ReadyProbe
from tasks.spec.run import Progress

#: Time limit of every wait, in seconds. Only failing tests wait that long.
DEADLINE_S = 60.0
#: Grace period of a component in seconds, if a test does not set it.
GRACE_S = 0.3

#: Run id of all attempts in this process. The id is random, because `pytest -n 2` runs tests in two
#: pytest processes. Each pytest process must find only the processes of its own runs.
RUN_ID = f"run-{os.urandom(4).hex()}"

#: Command of a component that runs until it is stopped.
FOREVER = ("sleep", "600")


def sh(script: str) -> tuple[str, ...]:
    """Return the command that runs a shell script."""
    return ("sh", "-c", script)


def python(code: str) -> tuple[str, ...]:
    """Return the command that runs Python code. The interpreter starts within about 20 ms."""
    return (sys.executable, "-I", "-S", "-c", code)


def wait_until(condition: Callable[[], object], description: str) -> None:
    """Wait until a condition is true.

    Args:
        condition: Function that is called every 0.01 s, and returns a true value if the condition
            is true.
        description: Description of the condition, for the error message.

    Raises:
        AssertionError: The condition was not true within `DEADLINE_S`.
    """
    assert becomes_true(condition, DEADLINE_S), f"not within {DEADLINE_S:g} s: {description}"


def becomes_true(condition: Callable[[], object], within_s: float) -> bool:
    """Wait until a condition is true; return False if it was not true within `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def processes_with(variable: str, value: str, *, begins: bool = False) -> list[int]:
    """Return the ids of all processes whose environment has a variable with this value.

    Args:
        variable: Name of the environment variable.
        value: Value of the environment variable.
        begins: True to accept every value of the variable that begins with `value`.
    """
    wanted = f"{variable}={value}".encode()
    if not begins:
        wanted += b"\0"
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            environ = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
            if environ.startswith(wanted) or b"\0" + wanted in environ:
                pids.append(int(entry.name))
    return pids


def is_alive(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    return not tree.is_zombie(pid)


#: Ports that `free_port` has returned. `free_port` does not return these ports again: the kernel
#: may offer a port twice, and a test needs several different ports.
_returned_ports: set[int] = set()


def free_port() -> int:
    """Return a port of 127.0.0.1 on which no program listens. Each call returns another port."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port: int = server.getsockname()[1]
        if port not in _returned_ports:
            _returned_ports.add(port)
            return port


class ComponentHarness:
    """Creates components and supervisors for a test, and records the events of the supervisors."""

    def __init__(self, directory: Path) -> None:
        """
        Args:
            directory: Working directory and directory for the logs of the components.
        """
        self.directory = directory
        #: The events of all supervisors, in order.
        self.events: list[Event] = []
        self._event_added = threading.Condition()
        self._supervisors: list[Supervisor] = []
        #: Process ids that `list_survivors` leaves out. The test adds these ids, for example the id
        #: of a server that the test has started.
        self.others: set[int] = set()
        self._start_ticks = _ticks()

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
        memory_limit_bytes: int | None = None,
    ) -> ComponentPlan:
        """Return the plan of a component with this name.

        The other arguments are the fields of `ComponentPlan` and of its `Command`. By default, the
        component runs until it is stopped, in the working directory of the harness.
        """
        return ComponentPlan(
            name=name,
            command=Command(
                argv=tuple(argv),
                env={**os.environ, "MUSTER_RUN_ID": RUN_ID, **(env or {})},
                cwd=cwd or self.directory,
                log=log or self.log_path(name),
                stop_signal=stop_signal,
                grace_s=grace_s,
                memory_limit_bytes=memory_limit_bytes,
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
        register: RunRegistration | None = None,
        replan: Callable[[str], AttemptPlan] | None = None,
        **fields: Any,
    ) -> Supervisor:
        """Return the supervisor of a new attempt. The supervisor has not started the components.

        `ComponentHarness.clear` ends the supervisor after the test. The keyword arguments `ports`,
        `register` and `replan` are arguments of `Supervisor`. All other keyword arguments are
        fields of `AttemptPlan`.
        """
        plan = AttemptPlan(
            run_id=RUN_ID,
            number=1,
            cwd=self.directory,
            components=components,
            progress=progress,
            success_step=success_step,
            stall_after_s=stall_after_s,
            **fields,
        )
        supervisor = Supervisor(
            plan, ports or PortsReserved([]), self.emit, register, replan=replan
        )
        self._supervisors.append(supervisor)
        return supervisor

    def start_all(self, *components: ComponentPlan, **plan: Any) -> Supervisor:
        """Start the components, wait until all are ready, and return their supervisor.

        The arguments are those of `supervise`.
        """
        supervisor = self.supervise(*components, **plan)
        for component in components:
            supervisor.start(component.name)
        return supervisor

    def run(self, *components: ComponentPlan, **plan: Any) -> Verdict:
        """Run all components until the result of the attempt is certain; return the verdict.

        The verdict has the final state of the attempt, the failure and a message.

        The arguments are those of `supervise`.
        """
        supervisor = self.supervise(*components, **plan)
        with contextlib.suppress(RunEnded):
            for component in components:
                supervisor.start(component.name)
        return self.wait_for_verdict(supervisor)

    def wait_for_verdict(self, supervisor: Supervisor) -> Verdict:
        """Wait until an attempt ends by itself, stop its components, and return its verdict.

        The verdict has the final state of the attempt, the failure and a message.
        """
        self.wait_for_event("teardown.begun")
        return self.end(supervisor)

    def end(self, supervisor: Supervisor) -> Verdict:
        """Stop all components, and return the verdict: the final state of the attempt.

        Raises:
            AssertionError: A process of a component survived.
        """
        with supervisor:
            verdict = supervisor.teardown()
        assert self.list_survivors() == {}
        return verdict

    def list_survivors(self) -> dict[int, str]:
        """Return the process id and command of each surviving process of the components.

        Surviving processes are children of the test's process. Children that are older than this
        object, and the processes in `others`, are left out.
        """
        survivors = {}
        for pid in tree.children(os.getpid()) if has_children() else ():
            if pid not in self.others and tree.start_ticks(pid) > self._start_ticks:
                survivors[pid] = tree.read_command_line(pid) or "a zombie"
        return survivors

    def emit(self, name: str, component: str | None = None, **fields: object) -> None:
        """Record an event. The supervisors call this function from their threads."""
        with self._event_added:
            self.events.append(Event(at=time.time(), name=name, component=component, fields=fields))
            self._event_added.notify_all()

    def list_events(self, name: str, component: str | None = None) -> list[Event]:
        """Return the recorded events with this name, of one component or of all components."""
        return [
            event
            for event in self.events
            if event.name == name and component in (None, event.component)
        ]

    def wait_for_event(self, name: str, component: str | None = None) -> Event:
        """Wait until an event with this name was recorded, and return the first of these events."""
        with self._event_added:
            has_event = self._event_added.wait_for(
                lambda: self.list_events(name, component), DEADLINE_S
            )
        assert has_event, f"no {name} of {component}; events: {self.list_event_names()}"
        return self.list_events(name, component)[0]

    def wait_for_pid(self, component: str) -> int:
        """Wait until a component has started for the first time, and return its process id."""
        pid: int = self.wait_for_event("component.spawned", component).fields["pid"]
        return pid

    def guardian_of(self, component: str) -> int:
        """Return the process id of the guardian process of a living component.

        The guardian is the process that owns the component's process tree.
        """
        return tree.read_parent(self.wait_for_pid(component))

    def list_event_names(self) -> list[str]:
        """Return name and component of each event, for example `component.ready trainer`."""
        return [f"{event.name} {event.component or ''}".strip() for event in self.events]

    def log_path(self, name: str) -> Path:
        """Return the path of the log file of a component."""
        return self.directory / f"{name}.log"

    def read_log(self, name: str) -> str:
        """Return the text of the log file of a component."""
        return self.log_path(name).read_text(errors="replace")

    def clear(self) -> None:
        """End all supervisors, and kill the processes that a failed test did not stop."""
        for supervisor in self._supervisors:
            with supervisor:
                supervisor.hurry()
        for pid in self.list_survivors():
            tree.signal_process(pid, signal.SIGKILL, parent=os.getpid())
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _ticks() -> int:
    """Return the time since the boot in clock ticks, the unit of process start times in /proc."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def has_children() -> bool:
    """Return True if this process has a child or a zombie child. Do not reap the child."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


@contextlib.contextmanager
def create_harness(directory: Path) -> Iterator[ComponentHarness]:
    """Yield a `ComponentHarness` for a directory, and end its processes after the `with` block."""
    harness = ComponentHarness(directory)
    try:
        yield harness
    finally:
        harness.clear()
