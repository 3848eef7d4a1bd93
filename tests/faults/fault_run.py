"""Inject one fault into a real run, in one phase, at one containment level, and check the result.

The run has three components: `api`, `trainer` and `environment`. Its flow process is a child of an
oracle process (`tests/support/oracle.py`), which observes all descendants through the kernel. An
unrelated process tree runs at the same time and must survive.

`run_case` brings the run into the phase and injects the fault. Then the run ends by itself or is
stopped, and the oracle waits until the run has no process left. At last `run.json`, the Prefect
server and the registry of live runs must agree about the run. If the fault requires it,
`muster reconcile` runs first.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from tasks.processes import tree
from tasks.spec.probes import ReadyProbe
from tests.support.forkserver import ForkServer
from tests.support.observed_flow import ObservedFlow, OracleResult, run_unrelated_processes
from tests.support.process_trees import SHAPES
from tests.support.supervised_components import (
    DEADLINE_S,
    ComponentHarness,
    is_alive,
    sh,
    wait_until,
)

#: Names of the components of the run, in the order of their start.
NAMES = ("api", "trainer", "environment")
#: Containment levels of the fault tests. L2 uses guardian processes, L3 also uses cgroups, and L4
#: also uses a PID namespace.
LEVELS = ("L2", "L3", "L4")
#: Readiness probe that succeeds when the component prints `up` to its log.
UP = ReadyProbe(log="up", within_s=DEADLINE_S)
#: Readiness probe that never succeeds during a test.
NEVER = ReadyProbe(log="never", within_s=DEADLINE_S)
#: Program that ignores SIGTERM until the file `release` exists in its working directory.
_WAITS_FOR_RELEASE = sh(
    "trap 'echo stopping' TERM; echo up; while [ ! -e release ]; do sleep 0.02; done"
)
_ROOT = Path(__file__).parents[2]


class Phase(Enum):
    """Phase of the run in which the fault is injected."""

    IDLE = "before the start"
    START_API = "starting api"
    START_TRAINER = "starting trainer"
    START_ENVIRONMENT = "starting environment"
    RUNNING = "running"
    #: The environment component is in its grace period. The other components still run.
    STOPPING = "stopping"
    AFTER = "after the run"

    @property
    def starting(self) -> str:
        """Name of the component that starts in this phase, or an empty string if none starts."""
        return self.value.removeprefix("starting ") if self.name.startswith("START_") else ""

    def __str__(self) -> str:
        return self.value


#: Phases in which the run starts a component.
STARTING = (Phase.START_API, Phase.START_TRAINER, Phase.START_ENVIRONMENT)
#: Phases in which at least one component runs.
ALIVE = (*STARTING, Phase.RUNNING, Phase.STOPPING)


def phases_with(component: str) -> tuple[Phase, ...]:
    """Return the phases in which the process of the component exists."""
    return ALIVE[NAMES.index(component) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The correct result of a run. The test does not compare fields that are None or empty."""

    #: Final state of the run: "completed", "failed" or "cancelled". An empty string if the flow
    #: process was killed and could not report a final state.
    state: str
    #: Name of the component that the run must report as the cause of its failure.
    component: str | None = None
    #: Kind of the failure, for example "RUNTIME_ERROR".
    kind: str | None = None
    #: Name of the signal that ended the component, for example "SIGKILL".
    signal: str | None = None
    #: Exit code of the component.
    exit_code: int | None = None
    #: Text that the message of the run's final state must contain.
    message_part: str = ""
    #: Name of the component with a process that survives SIGKILL, or `ANYTHING`.
    survivor: str = ""


#: Value of `Expected.survivor` that allows a process of any component to survive.
ANYTHING = "*"
CANCELLED = Expected(state="cancelled")
#: Expected result if the flow process is killed, so that it reports no final state.
KILLED = Expected(state="")


def failed(component: str, **fields: Any) -> Expected:
    """Return the expected result of a run that fails because of the component.

    Args:
        component: Name of the component that the run must report as the cause of its failure.
        fields: Further fields of `Expected`.
    """
    return Expected(state="failed", component=component, **fields)


@dataclass(slots=True)
class FaultRun:
    """The run of one fault test, with operations that a case may apply to the run.

    A case is a fault with its expected result, and a phase is a section of the run's life, for
    example STOPPING.
    """

    #: Phase that the run must reach before the fault is injected.
    phase: Phase
    #: Containment level that the run requests: "L2", "L3" or "L4".
    level: str
    #: Working directory of the components, with their logs.
    directory: Path
    #: Exit stack that is closed at the end of the test. A case registers its cleanups here.
    stack: contextlib.ExitStack
    #: Server that forks the flow process of the run.
    forkserver: ForkServer
    #: Mapping from component name to keyword arguments of `ComponentHarness.component`, for example
    #: the command and the readiness probe. A case changes these arguments before the run starts.
    components: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Further keyword arguments of `ObservedFlow`, the object that starts and observes the run.
    witness_arguments: dict[str, Any] = field(default_factory=dict)
    #: Processes outside the run that must survive the test. Each pair contains process ids, and a
    #: description of these processes.
    bystanders: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    #: True if the test has requested the end of the run.
    has_stopped: bool = False
    #: Time at which the fault was injected, in UTC epoch seconds.
    injected_at: float = 0.0
    #: Random part of the names of files that the test creates outside its directory.
    tag: str = field(default_factory=lambda: os.urandom(4).hex())
    #: Controls and observes the flow process of the run. Set when the run starts.
    observed_flow: ObservedFlow = field(init=False)

    def set_components(self) -> None:
        """Set the arguments of the components, as the phase of the test requires.

        All components exit on SIGTERM. If the phase is the start of a component, this component
        never becomes ready.
        """
        for name in NAMES:
            self.components[name] = {"argv": SHAPES["polite"], "ready": UP}
        if self.phase.starting:
            self.components[self.phase.starting]["ready"] = NEVER
        if self.phase is Phase.STOPPING:
            self.components["environment"] |= {"argv": _WAITS_FOR_RELEASE, "grace_s": DEADLINE_S}

    def begin(self) -> None:
        """Start the run with its three components."""
        plan_component = ComponentHarness(self.directory).component
        plans = [plan_component(name, **arguments) for name, arguments in self.components.items()]
        self.observed_flow = ObservedFlow(
            self.forkserver, self.directory, *plans, level=self.level, **self.witness_arguments
        )
        self.stack.callback(self.observed_flow.clear)

    def reach_phase(self) -> None:
        """Wait until the run is in the phase in which the fault is injected."""
        if starting := self.phase.starting:
            self.until("component.spawned", starting)
            self.until_log(starting, "up")
        elif self.phase is Phase.IDLE:
            self.until("gate.reached", "api")
        else:
            self.until("attempt.ready")
        if self.phase is Phase.STOPPING:
            self.stop()
            self.until("teardown.begun")
            self.until_log("environment", "stopping")

    # The following methods are for the functions that prepare, inject or check a fault.

    @property
    def until(self) -> Callable[..., dict[str, Any]]:
        """Function that waits for an event of the run and returns the event.

        Its arguments are the name of the event and, optionally, the name of the component.
        """
        return self.observed_flow.wait_for_event

    def until_log(self, name: str, text: str) -> None:
        """Wait until the log of the component contains the text."""
        log = self.directory / f"{name}.log"
        wait_until(lambda: log.exists() and text in log.read_text(errors="replace"), text)

    def until_gone(self, pid: int) -> None:
        """Wait until the process with this id has exited."""
        wait_until(lambda: not is_alive(pid), f"{pid} is gone")

    def pid(self, name: str) -> int:
        """Wait until the component was started and return its process id."""
        pid: int = self.until("component.spawned", name)["pid"]
        return pid

    def guardian(self, name: str) -> int:
        """Return the process id of a component's guardian.

        The guardian is the process that starts and ends the component.
        """
        if self.observed_flow.list_events("component.spawned", name):
            return tree.read_parent(self.pid(name))
        [guardian, *_] = self.guardians(name)
        return guardian

    def guardians(self, name: str) -> list[int]:
        """Return the process ids of all guardians whose command line names the component.

        A guardian is the process that starts and ends a component. At containment level L4, a
        component has two guardians: a guardian in the PID namespace, and the parent of this
        guardian outside of the namespace.
        """
        pids = []
        for pid in tree.descendants(self.observed_flow.pid):
            # A process may exit before its command line is read.
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if any(word.endswith("/guardian.py") for word in words) and name in words:
                    pids.append(pid)
        return pids

    def signal(self, name: str, signum: int = signal.SIGKILL) -> None:
        """Send the signal to the first process of the component."""
        os.kill(self.pid(name), signum)

    def stop(self) -> None:
        """Request the end of the run. The run then has the final state "cancelled"."""
        self.has_stopped = True
        self.observed_flow.end()

    def touch(self, file: str) -> None:
        """Create an empty file in the working directory of the components."""
        (self.directory / file).touch()

    def until_verdict(self) -> None:
        """Wait until the flow process has reported the final state of the run to the test."""
        wait_until((self.directory / "verdict.json").exists, "the verdict is there")

    @property
    def reconcile(self) -> Callable[[], dict[str, Any]]:
        """Function that closes the records of lost runs, as `muster reconcile` does.

        The function returns a mapping from run id to result.
        """
        return self.observed_flow.reconcile


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault of a run, with its injection and the correct result."""

    #: Number of the fault, from 1. All cases of one fault have the same number.
    number: int
    #: Short description of the fault.
    title: str
    #: Phases in which the fault is injected.
    phases: tuple[Phase, ...]
    #: Injects the fault into the run.
    inject: Callable[[FaultRun], None] = lambda fault_run: None
    #: Correct result of the run in every phase except STOPPING.
    expect: Expected
    #: Correct result in the phase STOPPING. The run is already cancelled when the fault occurs.
    expect_stopping: Expected = CANCELLED
    #: Prepares the fault before the run starts. For example, changes a component's command.
    prepare: Callable[[FaultRun], None] = lambda fault_run: None
    #: Checks the run after its end, in addition to the checks that all cases share.
    check: Callable[[FaultRun], None] = lambda fault_run: None
    #: Containment levels at which the fault is injected.
    levels: tuple[str, ...] = LEVELS
    #: True if the fault makes the run use a lower containment level than it requested.
    drops: bool = False
    #: True if the fault occurs before the run reaches the phase of the test. In this case, the test
    #: calls `inject` at once and does not wait for the phase.
    is_at_once: bool = False
    #: True if the registry entry and the cgroups of the run must be gone at the end of the run,
    #: before `muster reconcile` is used.
    is_tidy: bool = True
    #: Returns the reason why this machine cannot inject the fault, or an empty string if it can.
    obstacle: Callable[[], str] = lambda: ""

    def expected(self, phase: Phase) -> Expected:
        """Return the correct result of the run if the fault is injected in this phase."""
        return self.expect_stopping if phase is Phase.STOPPING else self.expect

    def __str__(self) -> str:
        return f"{self.number} {self.title}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one run with a fault, for one row of the result table."""

    #: Final state and failure that the run reported, such as `failed RUNTIME_ERROR api SIGSEGV`.
    verdict: str
    #: Seconds from the fault until the run had no process left. If the teardown began after the
    #: fault, the seconds count from the beginning of the teardown.
    empty_after_s: float
    #: Kernel interfaces that confirmed that no process was left.
    #:
    #: "ECHILD": waitpid(2) found no child. "populated": the file cgroup.events of the run's cgroup
    #: shows no process. A run without a cgroup has only "ECHILD".
    oracles: tuple[str, ...]


def run_case(
    case: Case, phase: Phase, level: str, directory: Path, forkserver: ForkServer
) -> Outcome:
    """Start a run, inject the fault of the case, wait for the end, and check the result.

    Args:
        case: The fault with its correct result.
        phase: Phase of the run in which the fault is injected.
        level: Containment level that the run requests.
        directory: Empty directory for the components, their logs and the run's records.
        forkserver: Server that forks the flow process.

    Raises:
        AssertionError: The run, its records or an unrelated process differ from the expectation.
    """
    with contextlib.ExitStack() as stack:
        fault_run = FaultRun(
            phase=phase, level=level, directory=directory, stack=stack, forkserver=forkserver
        )
        fault_run.bystanders.append(
            (stack.enter_context(run_unrelated_processes()), "an unrelated tree")
        )
        fault_run.set_components()
        case.prepare(fault_run)
        fault_run.begin()
        if not case.is_at_once:
            fault_run.reach_phase()
        fault_run.injected_at = time.time()
        case.inject(fault_run)
        expected = case.expected(phase)
        if phase is Phase.STOPPING:
            fault_run.touch("release")
        elif expected.state == "cancelled" and not fault_run.has_stopped:
            fault_run.stop()
        oracle_result = fault_run.observed_flow.oracle_result()

        assert oracle_result.left == (), "processes survived the end of the run"
        for pids, description in fault_run.bystanders:
            assert all(is_alive(pid) for pid in pids), f"{description} was hurt"
        verdict = _judge(fault_run, expected, oracle_result)
        if expected.state:
            _judge_flow_run(fault_run, expected)
        case.check(fault_run)
        if expected.state and case.is_tidy:
            assert oracle_result.cgroups == (), "the cgroups still exist"
            assert not any(fault_run.observed_flow.home.glob("live/*")), (
                "the registry entry still exists"
            )
        _judge_record(fault_run, expected)
        _judge_flow_run(fault_run, expected)
        events = fault_run.observed_flow.list_events("containment")
        # The flow process emits exactly one event about its containment level. If the flow process
        # was killed, this event may be missing.
        assert len(events) == 1 or not (events or expected.state), events
        for containment in events:
            assert (containment["level"] != level) == case.drops, containment
        if case.drops:
            [containment] = events
            verdict += f" (at {containment['level']})"
        return Outcome(
            verdict=verdict,
            empty_after_s=oracle_result.empty_at - _ending_since(fault_run),
            oracles=oracle_result.oracles,
        )


def _judge(fault_run: FaultRun, expected: Expected, oracle_result: OracleResult) -> str:
    """Check the final state that the flow process reported, and the exit code of the flow process.

    Args:
        fault_run: The run.
        expected: The correct result of the run.
        oracle_result: Exit code of the flow process, and other observations of its parent process.

    Returns:
        A short description of the final state: the state, the failure kind, the component, and
        the signal or the exit code.
    """
    observed_flow = fault_run.observed_flow
    if not expected.state:
        assert oracle_result.exit_code == -signal.SIGKILL, observed_flow.read_stderr()
        return "none: its flow was killed"
    verdict = observed_flow.verdict()
    exit_codes = {"completed": 0, "failed": 1, "cancelled": 130}
    assert oracle_result.exit_code == exit_codes[verdict["state"]], observed_flow.read_stderr()
    failure = verdict["failure"] or {}
    words = [verdict["state"], failure.get("kind"), failure.get("component")]
    words.append(failure.get("signal") or failure.get("exit_code"))
    description = " ".join(str(word) for word in words if word is not None)
    assert verdict["state"] == expected.state, f"{description}: {verdict['message']}"
    for key in ("component", "kind", "signal", "exit_code"):
        expected_value = getattr(expected, key)
        if expected_value is not None:
            assert failure.get(key) == expected_value, f"{description}: {verdict['message']}"
    assert expected.message_part in verdict["message"]
    if expected.survivor:
        assert expected.survivor in (ANYTHING, *verdict["left"]), verdict["message"]
    assert bool(verdict["left"]) == bool(expected.survivor), verdict["message"]
    return description


def _judge_record(fault_run: FaultRun, expected: Expected) -> None:
    """Check `run.json`. If the run still has a registry entry, first clean up after the run.

    The clean-up is the same as that of `muster reconcile`.

    Every component must have an end time, except a component with a process that survives SIGKILL.
    """
    observed_flow = fault_run.observed_flow
    home = observed_flow.home
    if any(home.glob("live/*")):
        fault_run.reconcile()
        assert not any(home.glob("live/*")), "the registry entry exists after a reconcile"
    record = observed_flow.record()
    attempt = record.attempt
    assert attempt is not None and record.state.is_final and attempt.state is record.state
    surviving_components = observed_flow.verdict()["left"] if expected.state else {}
    unended_components = {
        name for name, component in attempt.components.items() if component.ended_at is None
    }
    assert unended_components <= set(surviving_components), "a component has no end time"
    failure = attempt.failure.as_json() if attempt.failure else {}
    if not expected.state:
        assert failure["rule"] == "flow-lost", failure
        return
    verdict = observed_flow.verdict()
    assert (record.state.value, record.message) == (verdict["state"], verdict["message"])
    for key, value in (verdict["failure"] or {}).items():
        # If the disk was full when the record was written, the record does not contain the last
        # lines of the log.
        if key != "log_tail" or failure[key]:
            assert failure[key] == value, key


def _judge_flow_run(fault_run: FaultRun, expected: Expected) -> None:
    """Check the state of the flow run on the Prefect server.

    If the flow process was killed, call this function only after `muster reconcile`.
    """
    state = fault_run.observed_flow.flow_run()["state"]
    state_fields = state["type"], state["name"], state["message"]
    if expected.state:
        verdict = fault_run.observed_flow.verdict()
        message = verdict["message"]
        if verdict["state"] == "failed":
            assert message.startswith(f"{verdict['failure']['kind']}: "), message
        expected_type = expected.state.upper()
        expected_name = expected.state.capitalize()
        assert state_fields[:2] == (expected_type, expected_name), state_fields
        assert state["message"].startswith(message), state_fields
    else:
        assert state_fields[:2] == ("CRASHED", "Crashed"), state_fields
        # The message on the server ends with advice. The record stores this advice separately, as a
        # hint.
        cause, _, _ = state["message"].partition(". To continue the run")
        assert cause in fault_run.observed_flow.record().message, state_fields


def _ending_since(fault_run: FaultRun) -> float:
    """Return the time at which the run began to end, in UTC epoch seconds.

    The result is normally the time at which the teardown of the run began. If the run had no
    teardown, or if the fault was injected during the teardown (phase STOPPING), the result is the
    time of the fault.
    """
    teardown_events = fault_run.observed_flow.list_events("teardown.begun")
    if teardown_events and fault_run.phase is not Phase.STOPPING:
        return float(teardown_events[0]["at"])
    return fault_run.injected_at


@functools.cache
def missing_levels() -> dict[str, str]:
    """Return the containment levels that this machine cannot use, each with the reason.

    A containment level, such as "L3", says which kernel features hold the processes of a run.
    """
    code = (
        "import json; from tasks.processes.containment import probe\n"
        "print(json.dumps({k.value: v for k, v in probe(namespace=True).missing.items()}))"
    )
    # Run the check in a new process. The check turns its process into a subreaper, and the process
    # of the tests must not become a subreaper.
    completed = subprocess.run(
        [sys.executable, "-c", code], cwd=_ROOT, capture_output=True, check=True
    )
    missing: dict[str, str] = json.loads(completed.stdout)
    return missing


def run_case_or_skip(case: Case, phase: Phase, level: str, request: pytest.FixtureRequest) -> None:
    """Run the test of one fault case in one phase and at one containment level.

    The result is added to the pytest report, as a row of the result table. The test is skipped if
    this machine does not support the containment level or cannot inject the fault.
    """
    add_property = request.node.user_properties.append
    add_property(("row", {"case": str(case), "phase": str(phase), "level": level}))
    skip_reason = missing_levels().get(level) or case.obstacle()
    if skip_reason:
        pytest.skip(skip_reason)
    directory = request.getfixturevalue("tmp_path")
    forkserver = request.getfixturevalue("forkserver")
    outcome = run_case(case, phase, level, directory, forkserver)
    # `pytest -n` sends the report to another process as plain data, so the outcome is a dict.
    add_property(("outcome", asdict(outcome)))
