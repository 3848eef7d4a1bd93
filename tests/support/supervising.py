"""A supervising process that a test may kill: `python -m tests.support.supervising DIRECTORY`.

It supervises the plan that lies in the directory (see `Part`), ends the run as cancelled at `stop`
on stdin, SIGTERM or SIGINT (again: without grace), and leaves `events.jsonl` and `verdict.json`;
its registry, and the record that it keeps as a run does, are those of $MUSTER_HOME.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.processes import registry
from tasks.processes.component import AttemptPlan
from tasks.processes.containment import Level, allowed_level, probe
from tasks.processes.guarded import GuardianTemplate
from tasks.processes.ports import PortsReserved
from tasks.processes.registry import JobEntry, RegisterEntry, RunRegister, remove_unused
from tasks.processes.supervisor import Supervisor
from tasks.record.events import Event, EventLog
from tasks.record.places import RunPlace
from tasks.record.run_json import RunRecord
from tasks.record.states import RunState
from tasks.spec.errors import RunEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What the process is to do."""

    #: Fields of the AttemptPlan.
    plan: Mapping[str, Any]
    #: One of `ODDITIES`.
    oddity: str = ""
    #: The component at whose start the oddity shows, where it is one of a moment.
    at: str = ""
    #: L2 to L4, the highest to try; empty: that of the plan.
    level: str = ""
    #: Components whose start waits for the file `gate-NAME`, told by the event `gate.reached`.
    gates: tuple[str, ...] = ()
    #: To be added to the record, which then needs room.
    record_bytes: int = 0


def supervise(part: Part) -> None:
    plan = AttemptPlan(**part.plan)
    if part.level:
        highest = min(Level(part.level), allowed_level(), key=lambda level: level.value)
        containment = probe(namespace=part.level == "L4", at_most=highest)
        plan = replace(plan, containment=containment)
    place = RunPlace.of(plan.run_id)
    register = RunRegister.opened(plan.run_id, flow_run_id=plan.run_id, directory=place.directory)
    place.attempt(1).directory.mkdir(parents=True)
    disk = register.disk
    record = RunRecord(
        place.record,
        run_id=plan.run_id,
        flow_run_id=plan.run_id,
        disk=disk,
        padding="x" * part.record_bytes,
    )
    own = EventLog(place.attempt(1).events, (record.observe,), disk=disk)

    def note(event: Event) -> None:
        own.emit(event.name, event.component, at=event.at, **event.fields)

    # Those for the test, at once and wherever the run's own go.
    events = EventLog(plan.cwd / "events.jsonl", (note,))
    if part.level:
        events.emit("containment", **plan.containment.as_json())
    record.begin_attempt(1, plan.containment.as_json())
    record.move(RunState.ADMITTED)
    record.move(RunState.STARTING)
    with Supervisor(plan, PortsReserved([]), events.emit, register) as supervisor:
        told = threading.Event()

        def pass_gate(component: str) -> None:
            if component in part.gates:
                events.emit("gate.reached", component)
            while component in part.gates and not (plan.cwd / f"gate-{component}").exists():
                if told.wait(0.01):
                    return

        def end(*_: object) -> None:
            # Noted first: what the run does about it may be seen, and answered, at once.
            is_again = told.is_set()
            if not is_again:  # Its lock is held where this interrupts itself.
                told.set()
            supervisor.interrupt("told to end")
            if is_again:
                supervisor.hurry()

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        threading.Thread(target=obey, args=(end,), daemon=True).start()
        with contextlib.suppress(RunEnded):
            for component in plan.components:
                pass_gate(component.name)
                supervisor.start(component.name)
            supervisor.wait_decided()
        verdict = supervisor.teardown()
    record.end_attempt(verdict)
    remove_unused(register.owner.leftovers)
    record.move(verdict.state, verdict.message)
    register.settle(record.content)
    register.close()
    failure = verdict.failure
    content = {
        "state": verdict.state.value,
        "message": verdict.message,
        "failure": failure.as_json() if failure else None,
        "left": {name: list(pids) for name, pids in verdict.left.items()},
    }
    (plan.cwd / "verdict.json").write_text(json.dumps(content))


def obey(end: Callable[[], None]) -> None:
    # The end of stdin is that of the test.
    for _ in sys.stdin:
        end()
    end()


def ignore_sigchld(run: Callable[[], None]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    run()


def block_signals(run: Callable[[], None]) -> None:
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1}
    )
    run()


def wait_for_any_child(run: Callable[[], None]) -> None:
    """Beside a thread that reaps whatever child it can get, as some libraries do."""

    def reap() -> None:
        pause = threading.Event()
        while True:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
            pause.wait(0.001)

    threading.Thread(target=reap, daemon=True).start()
    run()


def make_in_short_lived_thread(run: Callable[[], None]) -> None:
    """Each supervisor is made by a thread that ends at once."""
    init = Supervisor.__init__

    def from_thread(self: Supervisor, *arguments: Any) -> None:
        thread = threading.Thread(target=init, args=(self, *arguments))
        thread.start()
        thread.join()

    Supervisor.__init__ = from_thread  # type: ignore[method-assign]
    run()


def beside_a_fork(run: Callable[[], None]) -> None:
    """A fork, made once guardians are there, holds copies of all descriptors until told to end."""
    init = Supervisor.__init__

    def with_fork(self: Supervisor, plan: AttemptPlan, *arguments: Any) -> None:
        init(self, plan, *arguments)
        if os.fork() == 0:
            while not (plan.cwd / "release").exists():
                time.sleep(0.01)
            os._exit(0)

    Supervisor.__init__ = with_fork  # type: ignore[method-assign]
    run()


def leak_descriptors(run: Callable[[], None]) -> None:
    for _ in range(5):
        os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
    run()


def have_a_child_of_ones_own(run: Callable[[], None]) -> None:
    """A daemon beside the components; whether it lived on is in the exit status."""
    own = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env={})
    run()
    lives = own.poll() is None
    own.kill()
    own.wait()
    if not lives:
        sys.exit("a process of our own was ended")


def die_before_registering(run: Callable[[], None], at: str) -> None:
    """SIGKILL between the fork of a component and its entry in the registry."""
    enter = registry.enter

    def die(directory: Path, entry: RegisterEntry | JobEntry) -> None:
        if entry.component == at:
            os.kill(os.getpid(), signal.SIGKILL)
        enter(directory, entry)

    registry.enter = die
    run()


def run_out_of_descriptors(run: Callable[[], None], at: str) -> None:
    """Not one more can be opened from the start of a component on; "": nor a guardian be made."""
    name = "__init__" if not at else "start"
    method = getattr(Supervisor, name)

    def starved(self: Supervisor, *arguments: Any) -> None:
        if not at or arguments[0] == at:
            some = 12 if not at else -1
            limit = len(os.listdir("/proc/self/fd")) + some
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        method(self, *arguments)

    setattr(Supervisor, name, starved)
    run()


def lose_the_template(run: Callable[[], None], at: str) -> None:
    """The process that guardians are forked from is `killed before` or `stopped before` it forks
    the second one, or `killed while` it does; with `flow`, this process is killed then, too."""
    fork, made = GuardianTemplate.fork, list[str]()

    def lost(self: GuardianTemplate, name: str, *arguments: Any) -> Any:
        made.append(name)
        pid = self._popen.pid
        if len(made) == 2 and "before" in at:
            os.kill(pid, signal.SIGSTOP if "stopped" in at else signal.SIGKILL)
        elif len(made) == 2:

            def kill() -> None:
                wait_for_child_of(pid)
                if "killed while" in at:
                    os.kill(pid, signal.SIGKILL)
                if "flow" in at:
                    os.kill(os.getpid(), signal.SIGKILL)

            threading.Thread(target=kill).start()
        return fork(self, name, *arguments)

    GuardianTemplate.fork = lost  # type: ignore[method-assign]
    run()
    assert len(made) >= 2, "no guardian was forked"


def wait_for_child_of(pid: int) -> None:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    until = time.monotonic() + 1.0
    with contextlib.suppress(FileNotFoundError):
        while not children.read_text() and time.monotonic() < until:
            pass


#: What may be odd about the process that supervises.
ODDITIES: dict[str, Callable[..., None]] = {
    "": lambda run: run(),
    "sigchld-ignored": ignore_sigchld,
    "signals-blocked": block_signals,
    "foreign-wait": wait_for_any_child,
    "short-lived-thread": make_in_short_lived_thread,
    "fork": beside_a_fork,
    "leaky-descriptors": leak_descriptors,
    "own-child": have_a_child_of_ones_own,
    "dies-registering": die_before_registering,
    "no-descriptors": run_out_of_descriptors,
    "template": lose_the_template,
}
#: Those that show at a moment, see `Part.at`.
OF_A_MOMENT = ("dies-registering", "no-descriptors", "template")


def main() -> None:
    part: Part = pickle.loads((Path(sys.argv[1]) / "part.pickle").read_bytes())
    at = (part.at,) if part.oddity in OF_A_MOMENT else ()
    ODDITIES[part.oddity](lambda: supervise(part), *at)


if __name__ == "__main__":
    main()
