"""Run a flow process that a test may kill, under the watch of an oracle.

    python -m tests.support.supervising DIRECTORY

This runs the flow `train` like `muster train`, on the Prefect server of PREFECT_API_URL. The plan
of the attempt comes from `part.pickle` in the directory (see `FlowInstructions`), not from a spec.
The process writes `events.jsonl` and `verdict.json` into the directory. It uses the registry and
the record of $MUSTER_HOME. When its stdin is closed, the process kills itself.

The function `main` runs the same process as a child of an oracle (`tests.support.oracle`).
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
from tasks.processes.registry import JobEntry, ProcessEntry
from tasks.processes.supervisor import Supervisor
from tasks.record.events import Event, EventLog, listen_to_events
from tasks.record.run_json import RunRecord
from tasks.spec.run import RunSpec
from tasks.train import running_attempt, session
from tasks.train.command import run_here
from tasks.train.plan import PlanInputs
from tasks.train.tasks import conclude
from tests.support import oracle

#: Exit code of the flow process in the test condition `own-child`, if Muster has wrongly ended a
#: child process that Muster did not start.
EXIT_CHILD_ENDED = 99


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowInstructions:
    """Instructions of a test to the flow process, which reads them from the file `part.pickle`."""

    #: Fields of the `AttemptPlan`.
    plan: Mapping[str, Any]
    #: Name of an unusual condition of the flow process, from `CONDITIONS`. Empty for no condition.
    oddity: str = ""
    #: Argument `at` of the condition's function in `CONDITIONS`, for example the name of a
    #: component. Only the conditions in `CONDITIONS_OF_A_MOMENT` use this field.
    at: str = ""
    #: Highest containment level to use: `L2` (guardian processes), `L3` (cgroups) or `L4`
    #: (namespaces). Empty for the level that a run normally gets.
    level: str = ""
    #: Names of the components whose start waits until the test creates the file `gate-NAME` in the
    #: working directory of the run. The flow process emits the event `gate.reached` when a start
    #: waits.
    gates: tuple[str, ...] = ()
    #: Number of padding bytes in the record file of the run. With many padding bytes, the file does
    #: not fit on an almost full disk.
    record_bytes: int = 0

    def containment(self, spec: RunSpec) -> Containment:
        """Return the kernel features for the containment level `level`, for example cgroups.

        If the machine does not support `level`, the next lower supported level is used. Muster
        calls this method in place of `tasks.train.session.find_containment`.
        """
        allowed = min(self.level, os.environ.get("MUSTER_MAX_CONTAINMENT") or "L4")
        with mock.patch.dict(os.environ, MUSTER_MAX_CONTAINMENT=allowed):
            return probe(namespace=self.level == "L4")

    def attempt(self, plan_inputs: PlanInputs) -> AttemptPlan:
        """Return the test's own plan of the attempt (the field `plan`), with the run id set.

        Unlike Muster itself, this method does not compute the plan from the run spec.
        """
        run_id = plan_inputs.run_id

        def with_run_id(component: ComponentPlan) -> ComponentPlan:
            env = {**component.command.env, "MUSTER_RUN_ID": run_id}
            return replace(component, command=replace(component.command, env=env))

        plan = AttemptPlan(
            run_id=run_id,
            number=plan_inputs.place.number,
            containment=plan_inputs.containment,
            **self.plan,
        )
        return replace(plan, components=tuple(map(with_run_id, plan.components)))


def supervise(part: FlowInstructions) -> int:
    """Run the flow as the test instructs, and return the exit code for the flow process."""
    cwd = part.plan["cwd"]
    components = part.plan["components"]
    # The test reads all events from this file, without the Prefect server and without the run's own
    # directory.
    events = EventLog(cwd / "events.jsonl")
    start = Supervisor.start

    def start_at_gate(supervisor: Supervisor, name: str) -> None:
        if name in part.gates:
            events.emit("gate.reached", name)
            while supervisor.decision is None and not (cwd / f"gate-{name}").exists():
                time.sleep(0.01)
        start(supervisor, name)

    def write_event(event: Event) -> None:
        events.emit(event.name, event.component, at=event.at, **event.fields)

    def write_verdict_and_conclude(run: session.RunSession) -> State[Any]:
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
    flow.conclude = write_verdict_and_conclude  # type: ignore[attr-defined]
    PlanInputs.plan = lambda plan_inputs: part.attempt(plan_inputs)  # type: ignore[method-assign]
    session.RunRecord = partial(RunRecord, padding="x" * part.record_bytes)  # type: ignore
    if part.level:
        for module in (session, running_attempt):
            module.find_containment = part.containment  # type: ignore[attr-defined]
    spec = {
        "name": "fault",
        "workload": "sft",
        # Each run has only one attempt: a failed attempt is not retried.
        "retry": {"START_TIMEOUT": {"attempts": 1}, "INSUFFICIENT_RESOURCES": {"attempts": 1}},
        "components": {component.name: {"command": ["true"]} for component in components},
    }
    (cwd / "spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    threading.Thread(target=end_with_stdin, daemon=True).start()
    with listen_to_events(write_event):
        return run_here(flow.train, cwd / "spec.yaml")


def end_with_stdin() -> None:
    """Wait until stdin is closed, and then kill this process.

    The test holds the other end of stdin, so stdin is closed when the test has ended.
    """
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def ignore_sigchld(run: Callable[[], None]) -> None:
    """Call `run` while the process ignores SIGCHLD."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    run()


def block_signals(run: Callable[[], None]) -> None:
    """Call `run` while the thread blocks SIGTERM, SIGINT, SIGCHLD and SIGUSR1."""
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1}
    )
    run()


def wait_for_any_child(run: Callable[[], None]) -> None:
    """Call `run` while a thread reaps every child of the process, as some libraries do."""

    def reap() -> None:
        pause = threading.Event()
        while True:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
            pause.wait(0.001)

    threading.Thread(target=reap, daemon=True).start()
    run()


def create_in_short_lived_thread(run: Callable[[], None]) -> None:
    """Call `run`. When `run` creates a `Supervisor`, a new thread executes the constructor.

    The thread ends when the constructor returns.
    """
    init = Supervisor.__init__

    def from_thread(self: Supervisor, *arguments: Any) -> None:
        thread = threading.Thread(target=init, args=(self, *arguments))
        thread.start()
        thread.join()

    Supervisor.__init__ = from_thread  # type: ignore[method-assign]
    run()


def fork_after_guardians(run: Callable[[], None]) -> None:
    """Call `run`, and fork the flow process as soon as `run` has started the guardian processes.

    A guardian is the process that owns the process tree of one component. The forked process has
    copies of all file descriptors, and ends when the file `release` exists.
    """
    init = Supervisor.__init__

    def with_fork(self: Supervisor, plan: AttemptPlan, *arguments: Any) -> None:
        init(self, plan, *arguments)
        # The supervisor's thread first starts the guardians, the processes that own the components.
        # The thread handles calls in order. So the guardians have started when this call returns.
        self._loop.call(asyncio.sleep(0))
        if os.fork() == 0:
            while not (plan.cwd / "release").exists():
                time.sleep(0.01)
            os._exit(0)

    Supervisor.__init__ = with_fork  # type: ignore[method-assign]
    run()


def leak_descriptors(run: Callable[[], None]) -> None:
    """Call `run` while this process has five open descriptors that child processes inherit."""
    for _ in range(5):
        os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
    run()


def keep_unrelated_child(run: Callable[[], None]) -> None:
    """Call `run` while this process has a child process that Muster did not start.

    Muster must not stop this child. If the child has ended when `run` returns, this process exits
    with EXIT_CHILD_ENDED.
    """
    child = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env={})
    run()
    is_child_alive = child.poll() is None
    child.kill()
    child.wait()
    if not is_child_alive:
        sys.exit(EXIT_CHILD_ENDED)


def die_before_registering(run: Callable[[], None], at: str) -> None:
    """Call `run`, and kill this process between the fork of a component and its registration.

    At that moment, the registry has no entry of the component yet.

    Args:
        run: The function to call.
        at: Name of the component.
    """
    enter = registry.enter

    def die(directory: Path, entry: ProcessEntry | JobEntry) -> None:
        if entry.component == at:
            os.kill(os.getpid(), signal.SIGKILL)
        enter(directory, entry)

    registry.enter = die
    run()


def run_out_of_descriptors(run: Callable[[], None], at: str) -> None:
    """Call `run`, and lower the limit of open files, so that this process cannot open enough files.

    Args:
        run: The function to call.
        at: Name of a component. When this component starts, the limit is lowered so that no
            further file can be opened. If empty, the limit is lowered when the supervisor is
            created. The process can then open a few files, but too few for the guardian processes.
    """
    method_name = "start" if at else "__init__"
    method = getattr(Supervisor, method_name)

    def with_limit(self: Supervisor, *arguments: Any) -> None:
        if not at or arguments[0] == at:
            # If `spare` is -1, no further file can be opened, because `listdir` returns one
            # descriptor too many: the descriptor that `listdir` itself opens and closes.
            spare = -1 if at else 12
            limit = len(os.listdir("/proc/self/fd")) + spare
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        method(self, *arguments)

    setattr(Supervisor, method_name, with_limit)
    run()


def lose_the_template(run: Callable[[], None], at: str) -> None:
    """Call `run`, and let the process that forks the guardians fail at the second guardian.

    A guardian is the process that owns the process tree of one component.

    Args:
        run: The function to call.
        at: The failure. `killed before` and `stopped before`: the forking process is killed or
            stopped before the fork. `killed while`: the forking process is killed directly after
            the fork. `killed while, and the flow`: the flow process is then killed, too.
    """
    fork = GuardianTemplate.fork
    #: Names of the components whose guardian process was already requested.
    requested: list[str] = []

    def fork_and_fail(self: GuardianTemplate, name: str, *arguments: Any) -> Any:
        requested.append(name)
        template_pid = self._popen.pid
        if len(requested) != 2:
            return fork(self, name, *arguments)
        if "before" in at:
            os.kill(template_pid, signal.SIGSTOP if "stopped" in at else signal.SIGKILL)
            return fork(self, name, *arguments)

        # Suspend the template process, which forks the guardians. The method `fork` then sends a
        # request to the suspended process, and calls the function `recv` below to get the answer.
        # `recv` lets the template process run until it has a child, and then causes the failure
        # that the argument `at` names.
        os.kill(template_pid, signal.SIGSTOP)
        receive_answer = self._channel.recv

        def recv(size: int) -> bytes:
            step_until_it_forks(template_pid)
            os.kill(template_pid, signal.SIGKILL if "killed while" in at else signal.SIGCONT)
            if "flow" in at:
                os.kill(os.getpid(), signal.SIGKILL)
            return receive_answer(size)

        self._channel = mock.Mock(wraps=self._channel, **{"recv.side_effect": recv})
        return fork(self, name, *arguments)

    GuardianTemplate.fork = fork_and_fail  # type: ignore[method-assign]
    run()
    assert len(requested) >= 2, "no guardian was forked"


def step_until_it_forks(pid: int) -> None:
    """Let a stopped process run in short steps until it has a child, for at most 0.2 s.

    The steps are short so that this function notices the child soon after the fork, even on a busy
    machine. The function may miss a child that ends at once. In this case, the function returns
    after 0.2 s.
    """
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + 0.2
    while not children.read_text() and time.monotonic() < deadline:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGSTOP)


#: Mapping from the name of an unusual condition to the function that creates the condition. The
#: first argument of this function is another function, which runs the flow under the condition.
CONDITIONS: dict[str, Callable[..., None]] = {
    "": lambda run: run(),
    "sigchld-ignored": ignore_sigchld,
    "signals-blocked": block_signals,
    "foreign-wait": wait_for_any_child,
    "short-lived-thread": create_in_short_lived_thread,
    "fork": fork_after_guardians,
    "leaky-descriptors": leak_descriptors,
    "own-child": keep_unrelated_child,
    "dies-registering": die_before_registering,
    "no-descriptors": run_out_of_descriptors,
    "template": lose_the_template,
}
#: Names of the conditions in `CONDITIONS` that begin during the attempt, at the moment that
#: `FlowInstructions.at` gives. The other conditions hold from the beginning.
CONDITIONS_OF_A_MOMENT = ("dies-registering", "no-descriptors", "template")


def run_flow_process(directory: Path) -> int:
    """Run the flow as the file `part.pickle` instructs, and return its exit code."""
    part: FlowInstructions = pickle.loads((directory / "part.pickle").read_bytes())
    at = (part.at,) if part.oddity in CONDITIONS_OF_A_MOMENT else ()
    exit_code: list[int] = []
    CONDITIONS[part.oddity](lambda: exit_code.append(supervise(part)), *at)
    return exit_code[0]


def main() -> None:
    """Run the flow process as a child of an oracle, which checks for surviving descendants.

    Arguments of the program: `DEADLINE_S DIRECTORY [WRAPPER...]`.

    Descendants may survive the flow process for DEADLINE_S seconds. WRAPPER is a command prefix of
    the flow process, for example `unshare` with its options.
    """
    deadline_s, directory, *wrapper = sys.argv[1:]
    if not oracle.is_watched(float(deadline_s)):
        return
    # Only the oracle, the observing parent process, may write to stdout. The output of the flow
    # process goes to stderr.
    os.dup2(2, 1)
    if wrapper:
        program = (sys.executable, "-m", "tests.support.supervising", directory)
        os.execvp(wrapper[0], (*wrapper, *program))
    sys.exit(run_flow_process(Path(directory)))


if __name__ == "__main__":
    sys.exit(run_flow_process(Path(sys.argv[1])))
