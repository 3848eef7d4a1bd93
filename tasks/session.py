"""A run in this process: its record, its files, and the attempt that is under way."""

from __future__ import annotations

import atexit
import os
import random
import signal as signals
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from uuid import UUID

from tasks.run import masking
from tasks.run.errors import Fault, InvalidSpec
from tasks.run.events import EventLog, Listener
from tasks.run.failure_kinds import FailureKind
from tasks.run.layout import AttemptPlace, RunPlace, project_root
from tasks.run.lifecycle import RunState
from tasks.run.loading import spec_as_yaml, unsupported
from tasks.run.lookup import component_path, lookup_faults
from tasks.run.outcome import Failure, Verdict
from tasks.run.record import RunRecord
from tasks.run.spec import Component, RunSpec
from tasks.run.template import ports_needed, resolve, template_faults
from tasks.supervise.containment import Containment, Level, allowed_level, probe
from tasks.supervise.identity import host_name
from tasks.supervise.plan import AttemptPlan, ComponentPlan
from tasks.supervise.ports import PortsReserved
from tasks.supervise.process import Command
from tasks.supervise.registry import RunRegister
from tasks.supervise.shared_memory import remove_unused
from tasks.supervise.supervisor import Supervisor
from tasks.taking_over import finish_predecessor

#: Told every event of the runs of this context; the terminal listens here.
event_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("event_listeners", default=())

#: Variables of this process that are about this process, and no component's business.
_PRIVATE_ENV = ("NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "MUSTER_ROLE")
_DELAY_GROWTH = 2.0
_JITTER = 0.1


def check_spec(spec: RunSpec) -> None:
    """What a spec names must be known, supported and there.

    Raises: InvalidSpec, with every fault.
    """
    faults = [
        *template_faults(spec),
        *unsupported(spec),
        *lookup_faults(spec, root=project_root(), path=_component_path()),
        *_containment_faults(spec),
    ]
    if faults:
        raise InvalidSpec(tuple(faults), source=f"the spec of run {spec.name!r}")


class RunSession:
    """One run, from its first attempt to its verdict. Safe to interrupt from a signal handler."""

    def __init__(
        self, spec: RunSpec, *, run_id: str, flow_run_id: UUID, api_url: str | None = None
    ) -> None:
        """Makes the run's directory, and registers this process as the run's owner.

        Args:
            api_url: of the Prefect server that keeps the flow run; None: it ends with the run.

        Raises: OSError, when there is no disk, another process of this machine has the run, or
            something of an earlier one can't be ended.
        """
        self.spec = spec
        self.place = RunPlace.of(run_id)
        finish_predecessor(run_id)
        self._register = RunRegister.opened(
            run_id,
            flow_run_id=str(flow_run_id),
            api_url=api_url,
            directory=self.place.directory,
        )
        # Not with the run: until this process has left, its flow run may lack its final state.
        atexit.register(self._register.close)
        self.place.directory.mkdir(parents=True, exist_ok=True)
        #: The attempt under way, or the last one.
        self.attempt: AttemptPlace | None = None
        #: Why the run is to end; empty while it is not.
        self.interrupted_by = ""
        self._secrets = masking.secret_values(_whole_env(spec))
        self._supervisor: Supervisor | None = None
        self._events: EventLog | None = None
        self._verdict: Verdict | None = None
        self._woken = threading.Event()
        self.record = RunRecord(
            self.place.record,
            run_id=run_id,
            flow_run_id=str(flow_run_id),
            on_move=self._tell_state,
            name=spec.name,
            workload=spec.workload,
            tags=list(spec.tags),
        )

    @property
    def run_id(self) -> str:
        return self.place.run_id

    @property
    def components(self) -> tuple[str, ...]:
        """Their names, in the order of their start."""
        return tuple(self.spec.components)

    @property
    def supervisor(self) -> Supervisor:
        """Of the attempt under way, or of the last one."""
        if self._supervisor is None:
            raise RuntimeError("no attempt has begun")
        return self._supervisor

    @property
    def verdict(self) -> Verdict:
        """On the last attempt, or on the run that never came to one."""
        if self._verdict is not None:
            return self._verdict
        return Verdict(state=RunState.CANCELLED, message=self.interrupted_by or "not started")

    def begin_attempt(self) -> None:
        """Reserve ports, fill in the spec's placeholders, and make ready to start components.

        Raises: OSError, when there is no port, no disk or no process to be had.
        """
        place = self.place.attempt(self.record.attempts + 1)
        place.directory.mkdir()
        ports = PortsReserved(ports_needed(self.spec))
        try:
            names = {
                "run.id": self.run_id,
                "run.dir": str(self.place.directory),
                "attempt.number": str(place.number),
                "attempt.dir": str(place.directory),
                "attempt.resume_from": "",
                **{name: str(port) for name, port in ports.numbers.items()},
            }
            spec = resolve(self.spec, names)
            place.spec.write_text(spec_as_yaml(spec, mask_secrets=True), encoding="utf-8")
            self.attempt = place
            self._events = EventLog(
                place.events, (self.record.observe, *event_listeners.get()), mask=self.mask
            )
            containment = _containment(spec)
            self.record.begin_attempt(place.number, containment.as_json())
            self.record.move(RunState.ADMITTED)
            plan = replace(_plan(spec, self.run_id, place, containment), mask=self.mask)
            self._supervisor = Supervisor(plan, ports, self._events.emit, self._register)
        except BaseException:
            ports.close()
            raise
        self._events.emit(
            "attempt.begun", attempt=place.number, run_id=self.run_id, directory=place.directory
        )
        self._events.emit("containment", text=str(containment), **containment.as_json())
        if self.interrupted_by:
            self._supervisor.interrupt(self.interrupted_by)

    def end_attempt(self) -> Verdict:
        """Take down what runs, and note the verdict on the attempt; any number of times."""
        with self.supervisor:
            verdict = self._masked(self.supervisor.teardown())
        if self._verdict is not verdict:
            self._verdict = verdict
            self.record.end_attempt(verdict)
            if self._events is not None:
                self._events.emit(
                    "attempt.ended",
                    attempt=self.record.attempts,
                    state=verdict.state.value,
                    message=verdict.message,
                    failure=verdict.failure.as_json() if verdict.failure else None,
                )
        return verdict

    def wants_attempt(self) -> bool:
        """Whether there is to be a first or another attempt; waits out the delay before it.

        A delay ends at once when the run is interrupted.
        """
        if self.interrupted_by:
            return False
        if self._verdict is None:
            return True
        delay_s = self._retry_delay_s(self._verdict)
        if delay_s is None:
            return False
        self.record.move(
            RunState.PENDING_RESOURCES,
            f"{self._verdict.message}; attempt {self.record.attempts + 1} in {delay_s:.0f} s",
        )
        self._woken.wait(delay_s)
        return not self.interrupted_by

    def close(self) -> Verdict:
        """Give the run its final state, which its verdict says."""
        verdict = self.verdict
        if self.interrupted_by and self.record.state is RunState.PENDING_RESOURCES:
            verdict = Verdict(state=RunState.CANCELLED, message=self.interrupted_by)
        if not self.record.state.is_final:
            removed = remove_unused(self._register.leftovers)
            if removed and self._events is not None:
                self._events.emit("leftovers.removed", paths=removed)
            self.record.move(verdict.state, verdict.message)
        return verdict

    def fail(self, kind: FailureKind, message: str) -> Verdict:
        """Give up before or outside an attempt's components."""
        failure = Failure(kind=kind, message=self.mask(message), rule="start")
        self._verdict = Verdict.failed(failure, 0.0)
        if self.record.attempts:
            self.record.end_attempt(self._verdict)
        return self._verdict

    def crash(self, error: Exception) -> None:
        """End the attempt as failed, by an error of our own."""
        if self._supervisor is None:
            raise error
        self._supervisor.crash(error)

    def interrupt(self, why: str) -> None:
        """End the run as cancelled; asked again, without any grace period. Returns at once."""
        again, self.interrupted_by = bool(self.interrupted_by), self.interrupted_by or why
        self._woken.set()
        if self._supervisor is not None:
            self._supervisor.interrupt(why)
            if again:
                self._supervisor.hurry()

    def mask(self, text: str) -> str:
        """The text without the values of secrets that components may know."""
        return masking.mask_text(text, self._secrets)

    def _masked(self, verdict: Verdict) -> Verdict:
        failure = verdict.failure
        if failure is not None:
            failure = replace(
                failure,
                message=self.mask(failure.message),
                line=self.mask(failure.line),
                log_tail=self.mask(failure.log_tail),
            )
        return replace(verdict, message=self.mask(verdict.message), failure=failure)

    def _retry_delay_s(self, verdict: Verdict) -> float | None:
        """How long to wait before another attempt; None where there is to be none."""
        retry = self.spec.retry_of(verdict.failure.kind) if verdict.failure else None
        tries = self.record.attempts
        if retry is None or (retry.attempts is not None and tries >= retry.attempts):
            return None
        delay_s = min(retry.delay_s * _DELAY_GROWTH ** (tries - 1), retry.max_delay_s)
        return delay_s * random.uniform(1 - _JITTER, 1 + _JITTER)

    def _tell_state(self, state: RunState, message: str) -> None:
        if self._events is not None:
            self._events.emit("run.state", state=state.value, message=message)


@contextmanager
def interrupting(session: RunSession) -> Iterator[None]:
    """While open, SIGINT, SIGTERM and SIGHUP interrupt the run instead of this process.

    Nothing is raised where the signal happens to land: the run ends through its supervisor, and
    the caller, who waits for that, goes on to its teardown. Outside the main thread, where Python
    can't handle signals, it changes nothing.
    """

    def on_signal(signum: int, frame: object) -> None:
        session.interrupt(f"interrupted by {signals.Signals(signum).name}")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        signum: signals.signal(signum, on_signal)
        for signum in (signals.SIGINT, signals.SIGTERM, signals.SIGHUP)
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            # None stands for a handler that was not installed from Python.
            signals.signal(signum, signals.SIG_DFL if handler is None else handler)


def _component_path() -> str:
    return component_path(sys.executable, os.environ.get("PATH", os.defpath))


def _containment(spec: RunSpec) -> Containment:
    return probe(namespace=spec.containment == "namespace", at_most=allowed_level())


def _containment_faults(spec: RunSpec) -> list[Fault]:
    """A level that the spec requires must be there: a weaker one is not what was asked for."""
    if spec.containment != "namespace":
        return []
    why = _containment(spec).missing.get(Level.L4)
    if why is None:
        return []
    problem = f"no PID namespace can be had on {host_name()}: {why}"
    return [Fault(path="containment", problem=problem, remedy="write auto, or run it elsewhere")]


def _whole_env(spec: RunSpec) -> dict[str, str]:
    env = {**os.environ, **spec.env}
    for component in spec.processes.values():
        env |= component.env
    return env


def _plan(spec: RunSpec, run_id: str, place: AttemptPlace, containment: Containment) -> AttemptPlan:
    root = project_root()
    return AttemptPlan(
        run_id=run_id,
        number=place.number,
        cwd=root / spec.cwd,
        components=tuple(
            ComponentPlan(
                name=name,
                command=Command(
                    argv=component.command,
                    env=_component_env(spec, component, name, run_id, place.number),
                    cwd=root / (component.cwd or spec.cwd),
                    log=place.log(name),
                    stop_signal=signals.Signals[component.stop.signal],
                    grace_s=component.stop.grace_s,
                ),
                ready=component.ready,
                live=component.live,
                on_exit_zero=spec.on_exit_zero(name),
            )
            for name, component in spec.processes.items()
        ),
        progress=spec.progress,
        success_step=spec.success.step if spec.success else None,
        stall_after_s=spec.stall_after_s,
        containment=containment,
    )


def _component_env(
    spec: RunSpec, component: Component, name: str, run_id: str, attempt: int
) -> dict[str, str]:
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key not in _PRIVATE_ENV and not key.startswith("PREFECT__")
    }
    return {
        **inherited,
        "PATH": _component_path(),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **spec.env,
        **component.env,
        "MUSTER_RUN_ID": run_id,
        "MUSTER_ATTEMPT": str(attempt),
        "MUSTER_COMPONENT": name,
    }
