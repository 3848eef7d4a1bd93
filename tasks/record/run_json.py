"""The record of a run, `run.json`: what happened to it, attempt by attempt.

`RunJson` is what the file says, frozen and typed: keys of another version of Muster stay when it is
written again; `SubmissionJson` is the same of a job's `submission.json`. `RunRecord` is the one
owner of the file of a run that is under way. Attempts and components change by the events they
emit, the run itself by `move`; each change replaces the file atomically.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.record.disk import DiskThread, json_text, replace_file
from tasks.record.events import Event
from tasks.record.growing import Mark
from tasks.record.outcome import Failure, Recorded, Verdict
from tasks.record.places import RunPlace
from tasks.record.states import LEGAL_MOVES, RunState
from tasks.spec.errors import IllegalTransition
from tasks.spec.failure_kinds import FailureKind

_log = logging.getLogger(__name__)

#: The state that an attempt's event brings the run to.
_STATE_AFTER = {
    "attempt.begun": RunState.STARTING,
    "attempt.ready": RunState.RUNNING,
    "teardown.begun": RunState.STOPPING,
}
_SAVED = ("component.spawned", "component.ready", "component.exited", "run.alarm")
#: What of a job's events is kept.
_OF_JOBS = ("submission_id", "address", "status", "nodes", "gpus", "unseen")
#: Of those before the last so many, a record has in brief what became of them.
_WHOLE_ATTEMPTS = 100
_OPEN = (RunState.ADMITTED, RunState.STARTING, RunState.RUNNING)


class ComponentRecord(Recorded):
    """What became of one component. Times are UTC epoch seconds."""

    #: Of the process on this machine; None of a job on a cluster.
    pid: int | None = None
    started_at: float = 0.0
    ready_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    #: `SIGSEGV`.
    signal: str | None = None

    @property
    def ready_after_s(self) -> float | None:
        return self.ready_at - self.started_at if self.ready_at else None


class JobRecord(Recorded):
    """What is known of the Ray job of one component."""

    submission_id: str = ""
    #: URL of the cluster's dashboard.
    address: str = ""
    #: Ray's own, in lower case.
    status: str = ""
    #: Where its driver runs.
    nodes: tuple[str, ...] = ()
    #: Nodes that were not seen after its end, in words.
    unseen: tuple[str, ...] = ()


class AlarmRecord(Recorded):
    """What a rule of `watch` found in the figures of an attempt."""

    rule: str = ""
    message: str = ""
    #: The steps at which it was found, and from which it had held.
    step: float = 0.0
    since: float = 0.0


class AttemptRecord(Recorded):
    """One attempt. Times are UTC epoch seconds."""

    if_any = ("metrics", "alarms", "step", "provenance")

    #: From 1.
    number: int
    state: RunState
    started_at: float = 0.0
    ended_at: float | None = None
    failure: Failure | None = None
    #: By name.
    components: Mapping[str, ComponentRecord] = {}
    #: As it stands in the file: the first job above its others. See `jobs`.
    ray: Mapping[str, Any] = {}
    #: `ports[name]`, as placeholders name them.
    ports: Mapping[str, int] = {}
    #: The machine of its flow process, which has the attempt's files.
    host: str | None = None
    #: The checkpoint that it started from.
    resume_from: str | None = None
    #: The file of its figures when it began.
    metrics: Mark | None = None
    alarms: tuple[AlarmRecord, ...] = ()
    #: The last step that it has made.
    step: float | None = None
    #: What it was made of otherwise than the run's first one.
    provenance: Mapping[str, Any] = {}
    #: What follows it, for people: `requeued: ...`, `final: ...`.
    decision: str | None = None

    @property
    def jobs(self) -> dict[str, JobRecord]:
        """By the name of the component that each one runs; the attempt's first one first."""
        first = {self.ray.get("component", ""): self.ray} if self.ray else {}
        jobs = {**first, **self.ray.get("others", {})}
        return {name: JobRecord.model_validate(job) for name, job in jobs.items()}

    @property
    def is_last(self) -> bool:
        """It was decided that no other attempt follows."""
        return (self.decision or "").startswith("final")

    @property
    def ending(self) -> str:
        """The kind of its failure; of one that has none, its state."""
        return self.failure.kind.value if self.failure else self.state.value

    def in_brief(self) -> AttemptRecord:
        """Without what only its own files need to say, once many others have followed it."""
        failure = self.failure.but(log_tail="") if self.failure else None
        return self.but(components={}, ports={}, failure=failure, provenance={})

    def ended(self, state: RunState, at: float, failure: Failure | None) -> AttemptRecord:
        return self.but(state=state, ended_at=at, failure=failure)

    def observed(self, event: Event) -> AttemptRecord:
        """With what an event of it, or of one of its components, says."""
        if event.name == "run.alarm":
            known = {name: event.fields[name] for name in AlarmRecord.model_fields}
            return self.but(alarms=(*self.alarms, AlarmRecord(**known)))
        if event.name == "run.progress":
            return self.but(step=event.step)
        if (name := event.component) is None:
            return self
        components, ray = {**self.components}, self.ray
        match event.name:
            case "component.spawned" if not (event.is_adopted and name in components):
                components[name] = ComponentRecord(pid=event.pid, started_at=event.at)
            case "component.ready":
                components[name] = components[name].but(ready_at=event.at)
            case "component.exited":
                end = {"exit_code": event.exit_code, "signal": event.signal}
                components[name] = components[name].but(ended_at=event.at, **end)
        if "submission_id" in event.fields or event.name.startswith("job."):
            ray = _with_job(ray, name, event.fields)
        return self.but(components=components, ray=ray)


class RunJson(Recorded):
    """What the file says. Times are UTC epoch seconds."""

    if_any = ("provenance", "message")

    run_id: str = ""
    flow_run_id: str = ""
    state: RunState
    started_at: float = 0.0
    ended_at: float | None = None
    name: str = ""
    workload: str = ""
    tags: tuple[str, ...] = ()
    #: What holds its processes: level, promise, and why no higher one does.
    containment: Mapping[str, Any] | None = None
    #: What its first attempt was made of: the code, the interpreter and its packages, the host.
    provenance: Mapping[str, Any] | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    #: With which it came to its state.
    message: str = ""

    @staticmethod
    def read(path: Path) -> RunJson:
        """Raises: OSError, ValueError."""
        return RunJson.model_validate_json(path.read_bytes())

    @staticmethod
    def of_flow_run(path: Path, flow_run_id: str) -> RunJson | None:
        """What is on record of a run; None for nothing.

        Raises: FileExistsError, where it is another flow run's; OSError, ValueError.
        """
        if not path.exists():
            return None
        found = RunJson.read(path)
        if found.flow_run_id not in ("", flow_run_id):
            why = (
                f"{path.parent} has the record of flow run {found.flow_run_id}: flow run "
                f"{flow_run_id} does not go on with it; move that directory away, and retry"
            )
            raise FileExistsError(errno.EEXIST, why)
        return found

    @property
    def attempt(self) -> AttemptRecord | None:
        """The one under way, or the last."""
        return self.attempts[-1] if self.attempts else None

    @property
    def under_way(self) -> AttemptRecord | None:
        """The attempt that has not ended; an ended one is never changed again."""
        last = self.attempt
        return last if last is not None and last.ended_at is None else None

    def with_last(self, attempt: AttemptRecord) -> RunJson:
        """With another last attempt."""
        return self.but(attempts=(*self.attempts[:-1], attempt))

    def adoptable(self, place: RunPlace) -> AttemptRecord | None:
        """The attempt that another process can go on with; None for none.

        One that was being taken down can be judged anew, as long as no job of it was asked to end.
        """
        attempt = self.under_way
        if attempt is None or self.state is not RunState.STOPPING:
            return attempt if self.state in _OPEN else None
        try:
            files = map(SubmissionJson.read, place.attempt(attempt.number).submissions())
            return None if any(file.stop_asked_at is not None for file in files) else attempt
        except (OSError, ValueError):
            return None  # Nobody can say.

    def decided(self) -> RunJson:
        """Of a run that has ended nothing follows the last attempt, where it was not decided."""
        last = self.attempt
        if not self.state.is_final or last is None or last.decision is not None:
            return self
        return self.with_last(last.but(decision=f"final: {self.state.value}"))

    def taken_over(self, now: float, *, adopts: bool = False) -> RunJson:
        """The record of a run on one host, for its next process on another one.

        An attempt that has no end there is over: its process may live only where it can't be seen,
        and the run's server has given the run to somebody else. Not so where its jobs outlive its
        process: a second attempt would run beside them.

        Args:
            now: UTC epoch seconds.
        """
        if adopts and self.state in (*_OPEN, RunState.STOPPING):
            return self
        record = self
        if (attempt := self.under_way) is not None:
            where = f" on {attempt.host}" if attempt.host else ""
            lost = Failure(
                kind=FailureKind.UNKNOWN,
                message=f"the flow process{where} of this attempt was lost, with its host",
                rule="host-lost",
            )
            record = record.with_last(attempt.ended(RunState.FAILED, now, lost))
        return record if self.state.is_final else record.but(state=RunState.PENDING_RESOURCES)


class SubmissionJson(Recorded):
    """What the `submission.json` of one job says. Times are UTC epoch seconds."""

    #: URL of the cluster's dashboard.
    address: str = ""
    submission_id: str = ""
    run_id: str = ""
    attempt: int = 0
    component: str = ""
    argv: Sequence[str] = ()
    #: `submitting`, `refused`, `unknown`, or Ray's own in lower case.
    status: str = ""
    #: None: the cluster was never asked to run it.
    submit_began_at: float | None = None
    #: Of the cluster that was asked.
    session: str | None = None
    gcs_address: str | None = None
    #: When the cluster was known to have it.
    submitted_at: float | None = None
    driver_ip: str | None = None
    driver_node_id: str | None = None
    running_at: float | None = None
    gpus_taken_at: float | None = None
    stop_asked_at: float | None = None
    message: str | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    #: What was not freed; None until that is known.
    left: Sequence[int | str] | None = None
    #: Nodes that were not seen after its end; None until that is known.
    unseen: Sequence[str] | None = None

    @staticmethod
    def read(path: Path) -> SubmissionJson:
        """Raises: OSError, ValueError."""
        return SubmissionJson.model_validate_json(path.read_bytes())


class RunRecord:
    """What is known of one run, kept in `run.json`. Safe from any thread."""

    def __init__(
        self,
        path: Path,
        *,
        run_id: str,
        flow_run_id: str,
        clock: Callable[[], float] = time.time,
        on_move: Callable[[RunState, str], None] = lambda state, message: None,
        earlier: RunJson | None = None,
        adopts: bool = False,
        disk: DiskThread | None = None,
        **more: object,
    ) -> None:
        """Begins a record, or goes on with the one that an earlier process of the run left.

        A run that has ended and is begun again, by Prefect's own retry for example, goes on with
        its next attempt.

        Args:
            on_move: told each new state of the run, with its message.
            earlier: what another host has on record of the run, where it has been there.
            adopts: its jobs outlive its processes, on any host.
            disk: writes the file, until there is room for it; None: each change does, at once.
            more: further keys of the file.

        Raises: OSError, ValueError, when the file can't be read, or is of another flow run.
        """
        self._path = path
        self._clock = clock
        self._on_move = on_move
        self._disk = disk
        self._lock = threading.RLock()
        own = {"run_id": run_id, "flow_run_id": flow_run_id, "started_at": clock(), **more}
        found = RunJson.of_flow_run(path, flow_run_id)
        #: As it stands in the file.
        self.content = found or RunJson.model_validate({"state": RunState.QUEUED, **own})
        if earlier is not None and len(earlier.attempts) > self.attempts:
            self.content = earlier.taken_over(clock(), adopts=adopts)
        if self.state.is_final:
            self.content = self.content.but(state=RunState.QUEUED, ended_at=None)
        self._save()

    @property
    def state(self) -> RunState:
        return self.content.state

    @property
    def attempts(self) -> int:
        """How many attempts were begun."""
        return len(self.content.attempts)

    def move(self, state: RunState, message: str = "") -> None:
        """Bring the run to a state; into the same state does nothing. Raises: IllegalTransition."""
        with self._lock:
            if state is self.state:
                return
            if state not in LEGAL_MOVES[self.state]:
                before = self.state.value
                raise IllegalTransition(f"a run can't go from {before} to {state.value}")
            content = self.content.but(state=state, **({"message": message} if message else {}))
            if state.is_final:
                content = content.but(ended_at=self._clock()).decided()
            self._save(content)
        # Without the lock: whoever is told may hold one that another of our callers waits for.
        self._on_move(state, message)

    def begin_attempt(
        self, number: int, containment: Mapping[str, object] | None = None, **known: object
    ) -> None:
        """Add an attempt to the ledger. Those before it stay as they are.

        Args:
            containment: what holds its processes: level, promise, and why no higher one does.
            known: what else is of its record.
        """
        with self._lock:
            content = self.content.but(containment=dict(containment) if containment else None)
            if (last := content.attempt) is not None and (last.decision is None or last.is_last):
                # Somebody began it anew, by hand or after the loss of its process.
                decided = f"{last.decision}; " if last.decision else ""
                content = content.with_last(last.but(decision=f"{decided}begun again"))
            own = {"number": number, "state": RunState.ADMITTED, "started_at": self._clock()}
            attempt = AttemptRecord.model_validate({**own, **known})
            attempts = [*content.attempts, attempt]
            if (old := len(attempts) - _WHOLE_ATTEMPTS - 1) >= 0:
                attempts[old] = attempts[old].in_brief()
            self._save(content.but(attempts=tuple(attempts)))

    def end_attempt(self, verdict: Verdict) -> None:
        """Give the attempt under way its verdict; one that has its own keeps it."""
        with self._lock:
            if (attempt := self.content.under_way) is not None:
                ended = attempt.ended(verdict.state, self._clock(), verdict.failure)
                self._save(self.content.with_last(ended))

    def describe(self, provenance: Mapping[str, object]) -> None:
        """Note what the attempt under way is made of, as `code_store.made_of` says it."""
        with self._lock:
            if (attempt := self.content.under_way) is None:
                return
            if (first := self.content.provenance) is None:
                self._save(self.content.but(provenance=dict(provenance)))
            elif other := {k: v for k, v in provenance.items() if first.get(k) != v}:
                self._save(self.content.with_last(attempt.but(provenance=other)))

    def decide(self, decision: str) -> None:
        """Note what follows the last attempt, which has ended."""
        with self._lock:
            last = self.content.attempts[-1]
            self._save(self.content.with_last(last.but(decision=decision)))

    def observe(self, event: Event) -> None:
        """Take in an event of the attempt that runs now."""
        state = _STATE_AFTER.get(event.name)
        with self._lock:
            if (attempt := self.content.under_way) is None:
                return
            attempt = attempt.observed(event)
            self.content = self.content.with_last(attempt.but(state=state or attempt.state))
            if event.name in _SAVED or event.name.startswith("job."):
                self._save()
        if state is not None:
            self.move(state)

    def _save(self, content: RunJson | None = None) -> None:
        self.content = content or self.content
        if self._disk is not None:
            self._disk.replace(self._path, self._as_text)
            return
        try:
            replace_file(self._path, self._as_text())
        except OSError as error:
            _log.warning("%s could not be written: %s", self._path, error)

    def _as_text(self) -> str:
        return json_text(self.content.as_json())


def _with_job(ray: Mapping[str, Any], component: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """With what happened to a job; the attempt's first one stands above its others."""
    is_first = ray.get("component", component) == component
    others = ray.get("others", {})
    job = {**ray, "component": component} if is_first else {**others.get(component, {})}
    job |= {key: fields[key] for key in _OF_JOBS if key in fields}
    if place := fields.get("place"):
        job.setdefault("nodes", [place.removeprefix("node ")])
    return job if is_first else {**ray, "others": {**others, component: job}}
