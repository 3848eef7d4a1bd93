"""The process of a flow run that a test may kill, under an oracle.

`python -m tests.support.supervising DIRECTORY` runs the flow `train` as `muster train` does, on the
Prefect server of PREFECT_API_URL, with a plan that lies in the directory (see `Part`) in place of
the one that would be made of its spec. There it leaves `events.jsonl` and `verdict.json`; the
registry and the record are those of $MUSTER_HOME. The end of stdin ends it at once.

`main` does so below an oracle.
"""

from __future__ import annotations

import asyncio
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
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from prefect.client.schemas.objects import State

import flows.train as flow
from tasks.processes import registry
from tasks.processes.component import AttemptPlan, ComponentPlan
from tasks.processes.containment import Containment, probe
from tasks.processes.guarded import GuardianTemplate
from tasks.processes.registry import JobEntry, RegisterEntry
from tasks.processes.supervisor import Supervisor
from tasks.record.events import Event, EventLog, listen_to_events
from tasks.record.run_json import RunRecord
from tasks.spec.run import RunSpec
from tasks.train import running_attempt, session
from tasks.train.command import run_here
from tasks.train.plan import Planned
from tasks.train.tasks import conclude
from tests.support import oracle

#: Of a flow whose own child did not live on.
EXIT_CHILD_ENDED = 99


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What the process is to do."""

    #: Fields of the AttemptPlan.
    plan: Mapping[str, Any]
    #: One of `ODDITIES`.
    oddity: str = ""
    #: The component at whose start the oddity shows, where it is one of a moment.
    at: str = ""
    #: L2 to L4, the highest to try; empty: what a run gets.
    level: str = ""
    #: Components whose start waits for the file `gate-NAME`, told by the event `gate.reached`.
    gates: tuple[str, ...] = ()
    #: To be added to the record, which then needs room.
    record_bytes: int = 0

    def containment(self, spec: RunSpec) -> Containment:
        allowed = min(self.level, os.environ.get("MUSTER_MAX_CONTAINMENT") or "L4")
        with mock.patch.dict(os.environ, MUSTER_MAX_CONTAINMENT=allowed):
            return probe(namespace=self.level == "L4")

    def attempt(self, planned: Planned) -> AttemptPlan:
        run_id = planned.run_id

        def of_run(component: ComponentPlan) -> ComponentPlan:
            env = {**component.command.env, "MUSTER_RUN_ID": run_id}
            return replace(component, command=replace(component.command, env=env))

        plan = AttemptPlan(
            run_id=run_id,
            number=planned.place.number,
            containment=planned.containment,
            **self.plan,
        )
        return replace(plan, components=tuple(map(of_run, plan.components)))


def supervise(part: Part) -> int:
    """The exit code of the flow's process."""
    cwd, components = part.plan["cwd"], part.plan["components"]
    # Those for the test, at once and wherever the run's own go.
    events = EventLog(cwd / "events.jsonl")
    start = Supervisor.start

    def start_at_gate(supervisor: Supervisor, name: str) -> None:
        if name in part.gates:
            events.emit("gate.reached", name)
            while supervisor.decision is None and not (cwd / f"gate-{name}").exists():
                time.sleep(0.01)
        start(supervisor, name)

    def tell(event: Event) -> None:
        events.emit(event.name, event.component, at=event.at, **event.fields)

    def conclude_and_tell(run: session.RunSession) -> State[Any]:
        verdict = run.close()
        content = {
            "state": verdict.state.value,
            "message": verdict.message,
            "failure": verdict.failure.as_json() if verdict.failure else None,
            "left": {name: list(pids) for name, pids in verdict.left.items()},
        }
        (cwd / "verdict.json").write_text(json.dumps(content))
        return conclude(run)

    Supervisor.start = start_at_gate  # type: ignore[method-assign]
    flow.conclude = conclude_and_tell  # type: ignore[attr-defined]
    Planned.plan = lambda planned: part.attempt(planned)  # type: ignore[method-assign]
    session.RunRecord = partial(RunRecord, padding="x" * part.record_bytes)  # type: ignore
    if part.level:
        for module in (session, running_attempt):
            module.containment_of = part.containment  # type: ignore[attr-defined]
    spec = {
        "name": "fault",
        "workload": "sft",
        # Each is one attempt.
        "retry": {"START_TIMEOUT": {"attempts": 1}, "INSUFFICIENT_RESOURCES": {"attempts": 1}},
        "components": {one.name: {"command": ["true"]} for one in components},
    }
    (cwd / "spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    threading.Thread(target=end_with_stdin, daemon=True).start()
    with listen_to_events(tell):
        return run_here(flow.train, cwd / "spec.yaml")


def end_with_stdin() -> None:
    """That is the end of the test."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGKILL)


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
        self._loop.call(asyncio.sleep(0))  # Its thread has made the guardians by then.
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
        sys.exit(EXIT_CHILD_ENDED)


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
        if len(made) != 2:
            return fork(self, name, *arguments)
        if "before" in at:
            os.kill(pid, signal.SIGSTOP if "stopped" in at else signal.SIGKILL)
            return fork(self, name, *arguments)
        # Here, where its answer would be waited for: nobody ends it meanwhile.
        os.kill(pid, signal.SIGSTOP)
        answer = self._channel.recv

        def recv(size: int) -> bytes:
            step_until_it_forks(pid)
            os.kill(pid, signal.SIGKILL if "killed while" in at else signal.SIGCONT)
            if "flow" in at:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer(size)

        self._channel = mock.Mock(wraps=self._channel, **{"recv.side_effect": recv})
        return fork(self, name, *arguments)

    GuardianTemplate.fork = lost  # type: ignore[method-assign]
    run()
    assert len(made) >= 2, "no guardian was forked"


def step_until_it_forks(pid: int) -> None:
    """Let a stopped process run by the moment only, so that the one in which it has a child is seen
    on a busy machine, too; where that was missed, it has answered."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    until = time.monotonic() + 0.2
    while not children.read_text() and time.monotonic() < until:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGSTOP)


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


def take_part(directory: Path) -> int:
    part: Part = pickle.loads((directory / "part.pickle").read_bytes())
    at = (part.at,) if part.oddity in OF_A_MOMENT else ()
    exit_code: list[int] = []
    ODDITIES[part.oddity](lambda: exit_code.append(supervise(part)), *at)
    return exit_code[0]


def main() -> None:
    """`DEADLINE_S DIRECTORY [WRAPPER...]`: below an oracle, which waits so long for an empty tree;
    a wrapper is a command that executes the rest of its command line."""
    deadline_s, directory, *wrapper = sys.argv[1:]
    if not oracle.is_watched(float(deadline_s)):
        return
    # The oracle's alone.
    os.dup2(2, 1)
    if wrapper:
        program = (sys.executable, "-m", "tests.support.supervising", directory)
        os.execvp(wrapper[0], (*wrapper, *program))
    sys.exit(take_part(Path(directory)))


if __name__ == "__main__":
    sys.exit(take_part(Path(sys.argv[1])))
