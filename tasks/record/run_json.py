"""The record of a run, `run.json`, with the history of its attempts.

- `RunJson` is the content of the file as frozen data. Keys that another version of Muster has
  written are kept.
- `SubmissionJson` is the content of a Ray job's `submission.json`.
- `RunRecord` owns the file while the run has a flow process. The events of attempts and components
  update their part of the record, and `move` changes the state of the run. Each change replaces the
  file atomically.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from tasks.record.disk import DiskThread, json_text, replace_file
from tasks.record.events import Event
from tasks.record.metrics_file import FileFingerprint
from tasks.record.outcome import Failure, Recorded, Verdict
from tasks.record.places import RunPlace, read_own_file
from tasks.record.states import LEGAL_TRANSITIONS, RunState
from tasks.spec.errors import IllegalTransition
from tasks.spec.failure_kinds import FailureKind

_log = logging.getLogger(__name__)

#: Mapping from the name of an event to the new state of the run. Other events do not change the
#: state.
_STATE_AFTER = {
    "attempt.begun": RunState.STARTING,
    "attempt.ready": RunState.RUNNING,
    "teardown.begun": RunState.STOPPING,
}
#: Names of events after which `run.json` is written immediately. Events of a Ray job have the same
#: effect.
_SAVED = (
    "component.spawned",
    "component.ready",
    "component.exited",
    "run.alarm",
    "run.warning",
    "place.unanswered",
    "place.answered",
)
#: Names of the fields that are copied from an event of a Ray job into the record of the job.
_JOB_FIELDS = ("submission_id", "address", "status", "nodes", "gpus", "unseen")
#: Number of attempts, counted from the last, that are recorded with all details. Records of earlier
#: attempts are shortened.
_COMPLETE_ATTEMPTS = 100
#: States of a run in which its components run or will soon be started.
_OPEN = (RunState.ADMITTED, RunState.STARTING, RunState.RUNNING)


class ComponentRecord(Recorded):
    """Start, readiness and end of a component in an attempt. Times are UTC epoch seconds."""

    if_any = ("ready_after_s",)

    #: Process id on this machine, or None for a Ray job.
    pid: int | None = None
    started_at: float = 0.0
    ready_at: float | None = None
    #: Seconds from the start of the program until the component was ready. The time in which a Ray
    #: job waits for its start does not count. None if the component was never ready, or in a record
    #: of an earlier version.
    ready_after_s: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    #: Name of the signal that ended the component, such as `SIGSEGV`.
    signal: str | None = None


class JobRecord(Recorded):
    """Facts about the Ray job of a component."""

    submission_id: str = ""
    #: URL of the Ray dashboard.
    address: str = ""
    #: Status of the job as Ray reports it, in lower case.
    status: str = ""
    #: The node on which the driver process of the Ray job runs, as the only item. Empty if unknown.
    nodes: tuple[str, ...] = ()
    #: Texts about nodes on which Muster could not search for leftover processes after the job
    #: ended.
    unseen: tuple[str, ...] = ()


class AlarmRecord(Recorded):
    """Alarm that a rule in the spec key `watch` has raised."""

    rule: str = ""
    message: str = ""
    #: Training step at which the alarm was raised.
    step: float = 0.0
    #: Training step at which the condition of the rule became true. The condition stayed true until
    #: the alarm.
    since: float = 0.0


class RefusedCheckpoint(Recorded):
    """Checkpoint that Muster did not choose as the start of an attempt, with the reason."""

    path: str = ""
    #: Text for the user: the reason why the attempt does not start from the checkpoint.
    why: str = ""


class ResumeCheck(Enum):
    """Comparison of an attempt's first step with the step of its checkpoint."""

    #: Muster compares the steps when the attempt reports its first step. If a step is recorded, it
    #: does not contradict the checkpoint.
    POSSIBLE = "possible"
    #: Muster cannot compare the steps. The notes of the `ResumeRecord` have the reason.
    IMPOSSIBLE = "impossible"
    #: The first step contradicts the checkpoint. The warnings of the attempt describe this.
    CONTRADICTED = "contradicted"


class ResumeRecord(Recorded):
    """The checkpoint that Muster chose for an attempt, and newer checkpoints that were not used."""

    model_config = ConfigDict(frozen=True, extra="allow", serialize_by_alias=True)
    if_any = ("expected", "notes", "step", "signature", "check")

    #: Checkpoint that Muster passed to the components as `${attempt.resume_from}`, or None.
    passed: str | None = Field(None, alias="from")
    #: Evidence that the checkpoint is complete, or the reason for a start without a checkpoint.
    rule: str = ""
    #: Checkpoints from which the attempt should not start, although they are newer than the
    #: checkpoint from which it starts. The newest checkpoint comes first.
    refused: tuple[RefusedCheckpoint, ...] = ()
    #: Checkpoint that the trainer should find by itself. Used if the spec does not contain
    #: `${attempt.resume_from}`. Otherwise None.
    expected: str | None = None
    #: Remarks for the user. Example: the trainer's pointer file contains the name of another
    #: checkpoint.
    notes: tuple[str, ...] = ()
    #: Training step of the checkpoint, or None if unknown.
    step: float | None = None
    #: Hash of the checkpoint's files at the start of the attempt. The hash changes if the trainer
    #: saves the checkpoint again.
    signature: str = ""
    #: Result of the comparison of the first step with `step`. None in records of earlier versions.
    check: ResumeCheck | None = None


class AttemptRecord(Recorded):
    """History of an attempt. Times are UTC epoch seconds."""

    if_any = (
        "metrics",
        "alarms",
        "step",
        "best_step",
        "provenance",
        "resume",
        "warnings",
        "unanswered",
        "saved_checkpoint",
        "fruitless_attempts",
        "not_finite",
    )

    #: Number of the attempt, starting at 1.
    number: int
    state: RunState
    started_at: float = 0.0
    ended_at: float | None = None
    failure: Failure | None = None
    #: Components by name.
    components: Mapping[str, ComponentRecord] = {}
    #: Data about the Ray jobs in the format of `run.json`: the fields of the first job, and the
    #: other jobs under the key `others`. Use the property `jobs` to read them.
    ray: Mapping[str, Any] = {}
    #: Mapping from a placeholder, such as `api.port`, to the reserved port number.
    ports: Mapping[str, int] = {}
    #: Name of the host on which the flow process of the attempt runs. This host has the files of
    #: the attempt.
    host: str | None = None
    #: Checkpoint that was passed to the components as `${attempt.resume_from}`.
    resume_from: str | None = None
    #: Reasons for the choice of the checkpoint `resume_from`, or None if they were not recorded.
    resume: ResumeRecord | None = None
    #: Warnings for the user, for example that the trainer did not load the checkpoint.
    warnings: tuple[str, ...] = ()
    #: Files and folders that do not respond, as a mapping from the path to the time of the first
    #: failed read, in UTC epoch seconds. Example: files on a network file system whose server is
    #: down.
    unanswered: Mapping[str, float] = {}
    #: Fingerprint of the metrics file at the start of the attempt.
    metrics: FileFingerprint | None = None
    alarms: tuple[AlarmRecord, ...] = ()
    #: Training step that the attempt reported last, or None.
    step: float | None = None
    #: Highest training step that the attempt has reported, or None.
    best_step: float | None = None
    #: True if the attempt saved a complete checkpoint that is newer than its start checkpoint. None
    #: if unknown.
    saved_checkpoint: bool | None = None
    #: Number of consecutive attempts without a lasting result, including this attempt. None if this
    #: attempt had a lasting result. A new checkpoint is a lasting result. If it is unknown whether
    #: the attempt saved a checkpoint, a higher training step than in all earlier attempts counts
    #: instead.
    fruitless_attempts: int | None = None
    #: Last values of the metrics that ended without a finite value, such as `nan` or `null`.
    #: Empty for attempts that did not complete, and in records of earlier versions.
    not_finite: tuple[str, ...] = ()
    #: Keys and values of this attempt that differ from `RunJson.provenance`, for example another
    #: host or another commit.
    provenance: Mapping[str, Any] = {}
    #: Text for the user with the decision about a retry, such as `requeued: ...` or `final: ...`.
    #: None if not decided yet.
    decision: str | None = None

    @property
    def jobs(self) -> dict[str, JobRecord]:
        """Mapping from component names to Ray jobs, in the order of submission."""
        first = {self.ray.get("component", ""): self.ray} if self.ray else {}
        jobs = {**first, **self.ray.get("others", {})}
        return {name: JobRecord.model_validate(job) for name, job in jobs.items()}

    @property
    def highest_step(self) -> float | None:
        """Highest training step that the attempt has reported, or None."""
        # Earlier versions of Muster recorded no `best_step`. Then use the last reported step.
        return self.step if self.best_step is None else self.best_step

    @property
    def checkpoint(self) -> str | None:
        """Checkpoint from which the attempt should start, or None if there is none.

        Either Muster passes the path to the trainer, or the trainer finds the checkpoint by itself.
        """
        return self.resume_from or (self.resume.expected if self.resume else None)

    @property
    def is_last(self) -> bool:
        """True if Muster has decided that the run is not retried after this attempt."""
        return (self.decision or "").startswith("final")

    @property
    def ending(self) -> str:
        """Text for the user: the kind of the failure, or the state if the attempt did not fail."""
        return self.failure.kind.value if self.failure else self.state.value

    def in_brief(self) -> AttemptRecord:
        """Return a shortened record. The omitted details are also in the files of the attempt."""
        failure = self.failure.with_changes(log_tail="") if self.failure else None
        resume = self.resume.with_changes(refused=(), notes=()) if self.resume else None
        return self.with_changes(
            components={}, ports={}, failure=failure, provenance={}, resume=resume, warnings=()
        )

    def ended(self, state: RunState, at: float, failure: Failure | None) -> AttemptRecord:
        """Return a copy of the record with a final state, an end time, and perhaps a failure."""
        return self.with_changes(state=state, ended_at=at, failure=failure)

    def reached(self, step: float) -> AttemptRecord:
        """Return a copy of the record with a new training step."""
        return self.with_changes(step=step, best_step=max(step, self.highest_step or step))

    def observed(self, event: Event) -> AttemptRecord:
        """Return a copy of the record, updated after an event of the attempt or of a component."""
        if event.name == "run.alarm":
            alarm = {name: event.fields[name] for name in AlarmRecord.model_fields}
            return self.with_changes(alarms=(*self.alarms, AlarmRecord(**alarm)))
        if event.name == "run.progress":
            return self.reached(event.step)
        if event.name == "run.warning":
            record = self.with_changes(warnings=(*self.warnings, event.message))
            if event.contradicts_resume and self.resume is not None:
                resume = self.resume.with_changes(check=ResumeCheck.CONTRADICTED)
                record = record.with_changes(resume=resume)
            return record
        if event.name == "place.unanswered":
            return self.with_changes(unanswered={**self.unanswered, event.place: event.since})
        if event.name == "place.answered":
            others = {place: at for place, at in self.unanswered.items() if place != event.place}
            return self.with_changes(unanswered=others)
        if (name := event.component) is None:
            return self

        components = {**self.components}
        match event.name:
            case "component.spawned" if not (event.is_adopted and name in components):
                components[name] = ComponentRecord(pid=event.pid, started_at=event.at)
            case "component.ready":
                components[name] = components[name].with_changes(
                    ready_at=event.at, ready_after_s=event.after_s
                )
            case "component.exited":
                components[name] = components[name].with_changes(
                    ended_at=event.at, exit_code=event.exit_code, signal=event.signal
                )
        ray = self.ray
        if "submission_id" in event.fields or event.name.startswith("job."):
            ray = _update_job(ray, name, event.fields)
        return self.with_changes(components=components, ray=ray)


class RunJson(Recorded):
    """Content of `run.json`. Times are UTC epoch seconds."""

    if_any = ("provenance", "message", "foreign_checkpoints", "directory")

    run_id: str = ""
    flow_run_id: str = ""
    state: RunState
    started_at: float = 0.0
    ended_at: float | None = None
    name: str = ""
    workload: str = ""
    tags: tuple[str, ...] = ()
    #: Facts about the method that ends all processes of the run, such as a cgroup: the name, the
    #: guarantees, and the reason why Muster could not use a better method.
    containment: Mapping[str, Any] | None = None
    #: Code, Python interpreter, installed packages and host of the first attempt. If a person
    #: started this run from a checkpoint of another run, the key `parent` contains that run and
    #: that checkpoint. The key `spec_file` contains the spec file for a run of `muster train`.
    provenance: Mapping[str, Any] | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    #: Checkpoints that this run must not use, as a mapping from path to signature. A signature
    #: identifies the content. Either the checkpoint existed before the run, or a person retried the
    #: run from a step before the checkpoint.
    foreign_checkpoints: Mapping[str, str] = {}
    #: Message for the user about the present state.
    message: str = ""
    #: Absolute path of the run's directory on the host that wrote the record. Empty in records of
    #: earlier versions of Muster.
    directory: str = ""

    @staticmethod
    def read(path: Path) -> RunJson:
        """Return the record in a file. Raises: OSError, or ValueError for invalid content."""
        return RunJson.model_validate_json(read_own_file(path))

    @staticmethod
    def read_for_flow_run(path: Path, flow_run_id: str) -> RunJson | None:
        """Return the record of a flow run, or None if the file does not exist.

        Raises:
            FileExistsError: The file contains the record of another flow run.
            OSError: The file cannot be read.
            ValueError: The file is not a valid record.
        """
        if not path.exists():
            return None
        record = RunJson.read(path)
        if record.flow_run_id not in ("", flow_run_id):
            problem = (
                f"the folder {path.parent} already has the record of flow run "
                f"{record.flow_run_id}, so flow run {flow_run_id} cannot use the folder. Move the "
                "folder away, and retry"
            )
            raise FileExistsError(errno.EEXIST, problem)
        return record

    @property
    def attempt(self) -> AttemptRecord | None:
        """Last attempt of the run, which may have ended, or None if there was no attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def under_way(self) -> AttemptRecord | None:
        """The last attempt if it has not ended yet, otherwise None."""
        last = self.attempt
        return last if last is not None and last.ended_at is None else None

    def find_best_step(self, *, before: int, since: int = 1) -> float | None:
        """Return the highest training step in a range of attempts, or None if no step is known.

        Args:
            before: Number of the first attempt after the range.
            since: Number of the first attempt in the range.
        """
        steps = [one.highest_step for one in self.attempts if since <= one.number < before]
        return max((step for step in steps if step is not None), default=None)

    def with_last(self, attempt: AttemptRecord) -> RunJson:
        """Return a copy of the record in which the last attempt is replaced."""
        return self.with_changes(attempts=(*self.attempts[:-1], attempt))

    def adoptable(self, place: RunPlace) -> AttemptRecord | None:
        """Return the attempt that a new flow process can continue, or None.

        If the components are already being stopped, the attempt can be continued only if Muster
        has not yet asked Ray to stop a job of the attempt.

        Args:
            place: Directory of the run.
        """
        attempt = self.under_way
        if attempt is None or self.state is not RunState.STOPPING:
            return attempt if self.state in _OPEN else None
        try:
            files = map(SubmissionJson.read, place.attempt(attempt.number).submissions())
            return None if any(file.stop_asked_at is not None for file in files) else attempt
        except (OSError, ValueError):
            # Ray may already have been asked to stop a job, so the attempt cannot be continued.
            return None

    def decided(self) -> RunJson:
        """Return a copy of the record with the decision that no further attempt follows.

        The record is returned unchanged if the run has not ended, or if the last attempt already
        has a decision.
        """
        last = self.attempt
        if not self.state.is_final or last is None or last.decision is not None:
            return self
        return self.with_last(last.with_changes(decision=f"final: {self.state.value}"))

    def taken_over(self, now: float, *, adopts: bool = False) -> RunJson:
        """Return the record that a flow process on another host needs to continue the run.

        If the last attempt has not ended, it gets the state FAILED.

        Args:
            now: End time of the last attempt, in UTC epoch seconds.
            adopts: True if the Ray jobs of the run continue after the loss of the flow process. An
                active attempt then does not get the state FAILED, because its Ray jobs may still be
                running.
        """
        if adopts and self.state in (*_OPEN, RunState.STOPPING):
            return self
        record = self
        if (attempt := self.under_way) is not None:
            where = f" on {attempt.host}" if attempt.host else ""
            lost = Failure(
                kind=FailureKind.UNKNOWN,
                message=f"the flow process{where} of this attempt was lost together with the host",
                rule="host-lost",
            )
            record = record.with_last(attempt.ended(RunState.FAILED, now, lost))
        return (
            record if self.state.is_final else record.with_changes(state=RunState.PENDING_RESOURCES)
        )


class SubmissionJson(Recorded):
    """Content of a Ray job's `submission.json`. Times are UTC epoch seconds."""

    #: URL of the Ray dashboard.
    address: str = ""
    submission_id: str = ""
    run_id: str = ""
    attempt: int = 0
    component: str = ""
    argv: Sequence[str] = ()
    #: Status of the job: `submitting`, `refused`, `unknown`, or the status from Ray in lower case,
    #: such as `running`.
    status: str = ""
    #: Time at which the job was sent to Ray. None if this has not happened.
    submit_began_at: float | None = None
    #: Name of the Ray cluster's session when the job was submitted. A restarted cluster has a
    #: different session.
    session: str | None = None
    gcs_address: str | None = None
    #: Time at which the cluster confirmed the job.
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
    #: Leftover processes of the job. Muster could not end these processes. None if Muster has not
    #: searched for leftover processes yet.
    left: Sequence[int | str] | None = None
    #: Nodes on which Muster could not search for leftover processes of the job. None if Muster has
    #: not started the search yet.
    unseen: Sequence[str] | None = None

    @staticmethod
    def read(path: Path) -> SubmissionJson:
        """Return the content of a file. Raises: OSError, or ValueError for invalid content."""
        return SubmissionJson.model_validate_json(read_own_file(path))


class RunRecord:
    """Updates and writes the file `run.json` of a run. Any thread may call its methods."""

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
        **extra_fields: object,
    ) -> None:
        """Start a new record, or continue the record of an earlier flow process of the run.

        If the recorded state is final, for example when Prefect retries the run, the state is set
        to QUEUED. The recorded attempts are kept.

        Args:
            path: The file `run.json`.
            run_id: Id of the run, for a new record.
            flow_run_id: Id of the flow run on the Prefect server.
            clock: Function that returns the current time in UTC epoch seconds.
            on_move: Function that is called with each new state of the run and its message.
            earlier: Record of the run from another host, or None. This record is used if it
                contains more attempts than the file.
            adopts: True if the Ray jobs of the run continue without its flow process.
            disk: Thread that writes the file, and retries if the disk is full. If None, each method
                that changes the record writes the file itself and does not retry.
            extra_fields: Further keys of a new record.

        Raises:
            OSError: The file cannot be read, or it belongs to another flow run.
            ValueError: The file is not a valid record.
        """
        self._path = path
        self._clock = clock
        self._on_move = on_move
        self._disk = disk
        self._lock = threading.RLock()
        new_content = {
            "state": RunState.QUEUED,
            "run_id": run_id,
            "flow_run_id": flow_run_id,
            "started_at": clock(),
            **extra_fields,
        }
        existing = RunJson.read_for_flow_run(path, flow_run_id)
        #: Current content of the record.
        self.content = existing or RunJson.model_validate(new_content)
        if earlier is not None and len(earlier.attempts) > self.attempts:
            self.content = earlier.taken_over(clock(), adopts=adopts)
        if self.state.is_final:
            self.content = self.content.with_changes(state=RunState.QUEUED, ended_at=None)
        self._save(self.content.with_changes(directory=str(path.absolute().parent)))

    @property
    def state(self) -> RunState:
        return self.content.state

    @property
    def attempts(self) -> int:
        """Number of attempts of the run, including the current attempt."""
        return len(self.content.attempts)

    def move(self, state: RunState, message: str = "") -> None:
        """Change the state of the run; do nothing if the run already has this state.

        Args:
            state: The new state.
            message: Message for the user. If this argument is empty, the record keeps its previous
                message.

        Raises:
            IllegalTransition: The run cannot change from its present state to the new state.
        """
        with self._lock:
            if state is self.state:
                return
            if state not in LEGAL_TRANSITIONS[self.state]:
                before = self.state.value
                raise IllegalTransition(
                    f"the state of a run cannot change from {before} to {state.value}"
                )
            content = self.content.with_changes(state=state)
            if message:
                content = content.with_changes(message=message)
            if state.is_final:
                content = content.with_changes(ended_at=self._clock()).decided()
            self._save(content)
        # Release the lock before the callback to prevent a deadlock. The callback may wait for a
        # thread that waits for this lock.
        self._on_move(state, message)

    def begin_attempt(
        self, number: int, containment: Mapping[str, object] | None = None, **fields: object
    ) -> None:
        """Add a new attempt to the record.

        The text "begun again" is added to the retry decision of the previous attempt in two cases:

        - The decision says that no attempt follows, but a user has started the run again.
        - There is no decision, because the flow process was killed.

        Args:
            number: Number of the attempt, starting at 1.
            containment: Containment of the attempt's processes; see `RunJson.containment`.
            fields: Further fields of the attempt's record.
        """
        with self._lock:
            content = self.content.with_changes(
                containment=dict(containment) if containment else None
            )
            last = content.attempt
            if last is not None and (last.decision is None or last.is_last):
                # The recorded decision says that no attempt follows, or there is no decision. So a
                # user has started the run again, or the flow process was killed before it recorded
                # a decision.
                decision = f"{last.decision}; " if last.decision else ""
                content = content.with_last(last.with_changes(decision=f"{decision}begun again"))

            attempt = AttemptRecord.model_validate(
                {
                    "number": number,
                    "state": RunState.ADMITTED,
                    "started_at": self._clock(),
                    **fields,
                }
            )
            attempts = [*content.attempts, attempt]
            index_to_shorten = len(attempts) - _COMPLETE_ATTEMPTS - 1
            if index_to_shorten >= 0:
                attempts[index_to_shorten] = attempts[index_to_shorten].in_brief()
            self._save(content.with_changes(attempts=tuple(attempts)))

    def end_attempt(self, verdict: Verdict, **fields: object) -> None:
        """Record the result of the current attempt. Do nothing if the attempt has ended before.

        Args:
            verdict: Result of the attempt.
            fields: Further fields of the attempt's record.
        """
        with self._lock:
            if (attempt := self.content.under_way) is not None:
                ended = attempt.ended(verdict.state, self._clock(), verdict.failure)
                changes = {"not_finite": verdict.not_finite, **fields}
                self._save(self.content.with_last(ended.with_changes(**changes)))

    def describe(self, provenance: Mapping[str, object]) -> None:
        """Record the code, the software versions and the host of the current attempt.

        The values of the first attempt are stored for the whole run. For each later attempt, only
        values that differ from the values of the first attempt are stored.

        Args:
            provenance: Code, interpreter and host of the attempt, as `code_store.describe_versions`
                returns them.
        """
        with self._lock:
            if (attempt := self.content.under_way) is None:
                return
            of_run = self.content.provenance or {}
            if "host" not in of_run:
                # Keep the values that the record of a new run already contains: the spec file, and
                # the earlier run whose checkpoint a person chose for this run.
                merged = {**of_run, **provenance}
                self._save(self.content.with_changes(provenance=merged))
                return
            different = {
                key: value for key, value in provenance.items() if of_run.get(key) != value
            }
            if different:
                self._save(self.content.with_last(attempt.with_changes(provenance=different)))

    def note_foreign_checkpoints(self, signatures: Mapping[str, str]) -> None:
        """Record checkpoints that this run must not use.

        Args:
            signatures: Mapping from the path of each checkpoint to a text that identifies the
                content of the checkpoint.
        """
        with self._lock:
            known = self.content.foreign_checkpoints
            if signatures:
                self._save(self.content.with_changes(foreign_checkpoints={**known, **signatures}))

    def note_ports(self, ports: Mapping[str, int]) -> None:
        """Replace the recorded ports of the current attempt.

        Args:
            ports: Mapping from placeholder names, such as `api.port`, to port numbers.
        """
        with self._lock:
            if (attempt := self.content.under_way) is not None:
                self._save(self.content.with_last(attempt.with_changes(ports=dict(ports))))

    def decide(self, decision: str) -> None:
        """Record the decision after an attempt: a retry, a requeue, or the end of the run."""
        with self._lock:
            last = self.content.attempts[-1]
            self._save(self.content.with_last(last.with_changes(decision=decision)))

    def observe(self, event: Event) -> None:
        """Update the record after an event of the current attempt."""
        state = _STATE_AFTER.get(event.name)
        with self._lock:
            if (attempt := self.content.under_way) is None:
                return
            attempt = attempt.observed(event)
            self.content = self.content.with_last(
                attempt.with_changes(state=state or attempt.state)
            )
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
            replace_file(self._path, self._as_text(), durable=True)
        except OSError as error:
            _log.warning("%s could not be written: %s", self._path, error)

    def _as_text(self) -> str:
        return json_text(self.content.as_json())


def _update_job(
    ray: Mapping[str, Any], component: str, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the value of `AttemptRecord.ray`, updated after an event of a component's job.

    The fields of the attempt's first job are at the top level. Other jobs are under `others`.
    """
    is_first = ray.get("component", component) == component
    others = ray.get("others", {})
    job = {**ray, "component": component} if is_first else {**others.get(component, {})}
    job |= {key: fields[key] for key in _JOB_FIELDS if key in fields}
    if place := fields.get("place"):
        job.setdefault("nodes", [place.removeprefix("node ")])
    return job if is_first else {**ray, "others": {**others, component: job}}
