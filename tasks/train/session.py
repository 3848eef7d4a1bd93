"""One run in this process: its record, its entry in the registry, and its current attempt."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from tasks.processes.devices import DeviceLease
from tasks.processes.guarded import GuardianTemplate
from tasks.processes.identity import host_name
from tasks.processes.place_reader import PlaceReader, PlaceTimeout
from tasks.processes.ports import PortsReserved
from tasks.processes.registry import RunRegistration
from tasks.processes.shared_memory import remove_unused
from tasks.processes.supervisor import Supervisor
from tasks.record import code_store
from tasks.record.cancellation_note import take_note
from tasks.record.checkpoint_paths import check_access
from tasks.record.checkpoint_store import StoreRefused, StoreUnreachable
from tasks.record.checkpoints import (
    ResumePlan,
    describe_rivals,
    describe_unrecognised,
    explain_lack_of_checkpoints,
    find_foreign_checkpoints,
    list_output_folders,
    plan_resume,
)
from tasks.record.disk import replace_file
from tasks.record.events import EventLog, event_listeners
from tasks.record.fruitless import (
    describe_fruitless_attempts,
    has_saved_checkpoint,
    list_fruitless_attempts,
)
from tasks.record.metrics_file import FileFingerprint
from tasks.record.outcome import Failure, Verdict, join_problems
from tasks.record.places import AttemptPlace, RunPlace, muster_home
from tasks.record.resume_check import explain_unchecked
from tasks.record.retries import PREFLIGHT
from tasks.record.run_json import AttemptRecord, ResumeCheck, ResumeRecord, RunJson, RunRecord
from tasks.record.states import RunState
from tasks.rollout.component import prepare_fleet
from tasks.spec.checkpoint_urls import is_url
from tasks.spec.errors import MusterError
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.loading import dump_spec
from tasks.spec.run import LIVE_CODE, RunSpec
from tasks.train.attempt_spec import AttemptSpec, reserve_ports
from tasks.train.background_work import record_provenance, remove_superfluous_checkpoints
from tasks.train.end_request import EndRequest
from tasks.train.mlflow_parents import find_mlflow_parents
from tasks.train.plan import GpuGrant, PlanInputs, find_containment
from tasks.train.run_secrets import RunSecrets
from tasks.train.running_attempt import RunningAttempt, start_guardian_template
from tasks.upkeep.lost_run import finish_predecessor

_log = logging.getLogger(__name__)

#: Absolute path of the spec file of a run that `muster train` starts. None for other runs.
spec_file: ContextVar[Path | None] = ContextVar("spec_file", default=None)
T = TypeVar("T")

#: Pauses in seconds before the folder of checkpoints is read again after an error. The pauses are
#: short, because the run already occupies its GPUs.
_READ_CHECKPOINTS_PAUSES_S = (2.0, 8.0)
#: Longest wait in seconds for reading the folder of checkpoints before an attempt.
_READ_CHECKPOINTS_WITHIN_S = 120.0
#: Longest wait in seconds for finding a checkpoint that an ended attempt has saved.
_FIND_SAVED_WITHIN_S = 5.0
#: Longest wait in seconds for reading checkpoints after a request to end the run.
_ANSWERS_AT_END_WITHIN_S = 2.0
#: Longest wait in seconds for reading the checkpoints before the run gets its GPUs.
_STORE_WITHIN_S = 60.0
#: Longest pause in seconds between two requests to a store of checkpoints that does not answer. The
#: pause may be long, because the run occupies no GPUs yet.
_ASK_STORE_EVERY_S = 60.0
#: Longest wait in seconds for an unresponsive checkpoint store. The run waits before it gets its
#: GPUs.
_STORE_TIMEOUT_S = 6 * 3600.0
#: Longest wait in seconds for a store of checkpoints that refuses access. The run waits, because an
#: operator may be renewing the store's credentials.
_REFUSAL_TIMEOUT_S = 600.0


class CheckpointsUnreadable(MusterError):
    """The folder of the run's checkpoints cannot be read, so no attempt may start.

    An attempt without a checkpoint would start at the first step and overwrite the checkpoints.
    """

    def __init__(self, cause: OSError) -> None:
        super().__init__(
            f"the checkpoints of the run cannot be read, so no attempt starts: {cause}"
        )
        #: Kind of the failure that is recorded for the run.
        self.kind = FailureKind.STORAGE
        if isinstance(cause, StoreUnreachable):
            self.kind = FailureKind.NETWORK


class RunSession:
    """One run, from its first attempt to its final state.

    Any thread may call `interrupt`, `hurry` and `hand_over`.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        run_id: str,
        flow_run_id: UUID,
        api_url: str | None = None,
        worker: str | None = None,
        earlier: RunJson | None = None,
    ) -> None:
        """Create the run's directory, and register this process as the owner of the run.

        Args:
            spec: The run spec, in which placeholders are not replaced yet.
            run_id: Id of the run.
            flow_run_id: Id of the flow run.
            api_url: Address of the Prefect server that stores the flow run. None if the server ends
                together with the run.
            worker: Name of the Prefect worker that started this process. None if no worker did.
            earlier: The record that another host wrote for this run. None if the run was never on
                another host.

        Raises:
            OSError: The files cannot be written, another process of this machine owns the run, or a
                leftover process of the run cannot be ended.
        """
        self.spec = spec
        self.flow_run_id = flow_run_id
        #: Paths of the run's files.
        self.place = RunPlace.of(run_id)
        #: Text for the user about the files that could not be written before the end of the run.
        #: Empty if all files were written.
        self.unwritten_files = ""
        # First check that the run's directory belongs to this flow run. The next steps change files
        # in this directory and end processes of the run.
        RunJson.read_for_flow_run(self.place.record, str(flow_run_id))

        #: True if the Ray jobs of the run continue when this process dies. The next process of the
        #: run then supervises the jobs.
        self.adopts_jobs = spec.on_lost_flow == "adopt"
        finish_predecessor(run_id, adopts=self.adopts_jobs)
        self._register = RunRegistration.opened(
            run_id,
            flow_run_id=str(flow_run_id),
            api_url=api_url,
            worker=worker,
            directory=self.place.directory,
            adopts=self.adopts_jobs,
        )
        # Keep the run registered until this process exits. If the process is killed before the flow
        # run gets its final state, `muster reconcile` finds the run and cleans up.
        atexit.register(self._register.close)
        self.place.directory.mkdir(parents=True, exist_ok=True)
        # An earlier process of the run may have left a note about a cancellation. Delete the note.
        take_note(self.place.directory)

        self._secrets = RunSecrets(spec)
        self._write_spec()
        self._end_request = EndRequest()
        self._events = EventLog(None)
        self.record = RunRecord(
            self.place.record,
            run_id=run_id,
            flow_run_id=str(flow_run_id),
            on_move=self._emit_state,
            earlier=earlier,
            adopts=self.adopts_jobs,
            disk=self._register.disk,
            name=spec.name,
            workload=spec.workload,
            tags=list(spec.tags),
            **self._describe_origin(),
        )

        #: Function that sends all pending reports to the Prefect server. The argument is the
        #: longest wait in seconds. The result is False if a report was not sent. Call this function
        #: before the flow run gets another state, because a late report would set the state to
        #: Running again.
        self.flush_reports: Callable[[float], bool] = lambda timeout_s: True
        #: Dashboard address of the Ray cluster of the work pool. Empty if the spec contains an
        #: address.
        self.ray_address = ""
        #: The submitted code of the run. None if the run uses the project's files directly.
        self.code: code_store.Code | None = None
        #: The nodes and GPUs that the queue granted for the attempt, or None.
        self.grant: GpuGrant | None = None
        self._device_lease: DeviceLease | None = None
        folders = {one.checkpoints for one in spec.processes.values() if one.checkpoints}
        #: Reads the folders of checkpoints in a thread, because the file system may not respond.
        self._checkpoint_reader = PlaceReader(", ".join(sorted(folders)) or "the checkpoints")

        #: Paths of the current or last attempt. None before the first attempt.
        self.attempt: AttemptPlace | None = None
        self._attempt_spec: AttemptSpec | None = None
        self._running: RunningAttempt | None = None
        #: Process from which the guardian processes of the first attempt are forked. A guardian
        #: owns the process tree of one component.
        self._guardian_template: GuardianTemplate | None = None
        self._verdict: Verdict | None = None
        #: Result of the attempt that ended last, without the warnings that `_verdict` contains.
        self._attempt_verdict: Verdict | None = None
        self._is_left = False
        #: True while this process hands the run over to the next flow process. If the handover
        #: fails, the value is False again.
        self.is_handing_over = False

    @property
    def run_id(self) -> str:
        return self.place.run_id

    @property
    def resolved_spec(self) -> RunSpec:
        """The spec in which placeholders are replaced by the values of the current or last attempt.

        Before the first attempt, placeholders are not replaced.
        """
        return self._attempt_spec.resolved if self._attempt_spec is not None else self.spec

    @property
    def supervisor(self) -> Supervisor:
        """The supervisor of the current or last attempt.

        Raises:
            RuntimeError: No attempt has begun.
        """
        if self._running is None:
            raise RuntimeError("no attempt of the run has begun")
        return self._running.supervisor

    @property
    def verdict(self) -> Verdict:
        """Result of the last attempt, or of the run if the run ended without an attempt."""
        if self._verdict is not None:
            return self._verdict
        message = self.interrupt_reason or "not started"
        return Verdict(state=RunState.CANCELLED, message=message)

    @property
    def interrupt_reason(self) -> str:
        """Reason why the run must end as cancelled. Empty if there is no such reason."""
        return self._end_request.interrupt_reason

    @property
    def handover_reason(self) -> str:
        """Reason why another process must continue the run. Empty if there is no such reason."""
        return self._end_request.handover_reason

    def _write_spec(self) -> None:
        """Write the run spec with its placeholders, so that a person can retry the run later."""
        text = dump_spec(self.spec, self._secrets.values)
        replace_file(self.place.spec, text)

    def _describe_origin(self) -> dict[str, Any]:
        """Return the field `provenance` of a new record, which describes the origin of the run.

        The field contains the spec file. If this run starts from a checkpoint of another run, the
        field also contains the checkpoint and the other run.
        """
        provenance: dict[str, Any] = {}
        start = self.spec.start_from
        if start is not None and not start.is_step_back:
            provenance["parent"] = {
                "run": start.run,
                "checkpoint": start.checkpoint,
                "step": start.step,
            }
        file = spec_file.get()
        if file is not None:
            provenance["spec_file"] = str(file)
        return {"provenance": provenance} if provenance else {}

    def interrupt(self, why: str) -> None:
        """End the run as cancelled. Components get their grace periods. Return at once."""
        self._end_request.interrupt(why)

    def hurry(self) -> None:
        """End an interrupted run without its remaining grace periods. Return at once."""
        self._end_request.hurry()

    def hand_over(self, why: str) -> None:
        """End the run's work in this process, but let its Ray jobs continue. Return at once.

        Another process of the run will supervise the Ray jobs.
        """
        self._end_request.hand_over(why)

    def wait(self, delay_s: float) -> bool:
        """Wait for `delay_s` seconds, and return True.

        Return False at once if the run must end, or if another process must continue the run.
        """
        return not self._end_request.wait(delay_s)

    def open(self) -> None:
        """Notify the event listeners that the run has started.

        Also start the process from which the guardian processes of the first attempt are forked.
        """
        self._events = EventLog(None, event_listeners.get(), mask=self.mask)
        self.emit("run.opened", run_id=self.run_id, record=self.place.record)
        number = self.record.attempts + 1
        self._guardian_template = start_guardian_template(self.spec, self.run_id, number)

    def enter_code(self, fetch: code_store.Fetch) -> None:
        """Write the submitted code of the run into a folder, and make this folder the
        working directory.

        Do nothing if the run has no submitted code.

        Args:
            fetch: Function that downloads code with a certain name from the server. The result is
                None if the server does not have the code.

        Raises:
            NoCode: The code is neither on this machine nor on the server.
            OSError: The code cannot be written. Errors of `fetch` are raised, too.
        """
        os.environ.pop(code_store.PROJECT, None)
        if self.spec.code in (None, LIVE_CODE):
            return
        self.code = code_store.read_code(self.spec.code, fetch)
        directory = self.place.code
        outputs = list_output_folders(self.spec, Path(self.code.project))
        code_store.check_out(self.code, directory, fetch, outputs)
        # Make MUSTER_HOME an absolute path, because the working directory changes below.
        os.environ["MUSTER_HOME"] = str(muster_home())
        os.environ[code_store.PROJECT] = self.code.project
        os.chdir(directory)

    def set_secret_blocks(self, block_values: Mapping[str, str]) -> None:
        """Set the values of the run's Prefect Secret blocks.

        The keys of `block_values` are the names of the blocks.
        """
        self._secrets.set_blocks(block_values)

    def accept_grant(self, nodes: Mapping[str, int], lease: DeviceLease | None) -> None:
        """Store the GPUs that the queue granted for the next attempt.

        The GPUs are released at the end of that attempt.

        Args:
            nodes: Mapping from the name of each node to the number of granted GPUs.
            lease: The granted devices of this machine. None if Ray assigns the devices.
        """
        self._device_lease = lease
        if lease is not None:
            self.grant = GpuGrant(nodes=nodes, devices=lease.indices, kind=lease.kind)
        else:
            self.grant = GpuGrant(nodes=nodes)

    def plan_resume(self) -> ResumePlan:
        """Choose the checkpoint from which the next attempt starts.

        Raises:
            CheckpointsUnreadable: The folder of the checkpoints cannot be read, even after several
                tries.
        """
        return self._read_checkpoints(self._plan_resume)

    def _plan_resume(self) -> ResumePlan:
        content = self.record.content
        return plan_resume(self.spec, self.place, content.attempts, content.foreign_checkpoints)

    def _read_checkpoints(self, read: Callable[[], T]) -> T:
        """Call a function that reads the folder of checkpoints, and return its result.

        After an error, the call is repeated.

        Raises:
            CheckpointsUnreadable: The folder cannot be read, even after several tries.
        """
        for pause_s in (*_READ_CHECKPOINTS_PAUSES_S, None):
            try:
                return self._ask_checkpoints(read, _READ_CHECKPOINTS_WITHIN_S)
            except OSError as error:  # includes PlaceTimeout
                if pause_s is None or not self.wait(pause_s):
                    raise CheckpointsUnreadable(error) from error
        raise AssertionError

    def _ask_checkpoints(self, read: Callable[[], T], within_s: float) -> T:
        """Call a function in another thread to read checkpoints, and return its result.

        The file system of the checkpoints may not respond. If the run must end, the time limit is
        `_ANSWERS_AT_END_WITHIN_S` instead of `within_s`.

        Args:
            read: The function.
            within_s: Time limit in seconds.

        Raises:
            PlaceTimeout: The file system of the checkpoints does not respond.
            OSError: The checkpoints cannot be read.
        """
        began_s = time.monotonic()

        def must_stop() -> bool:
            return time.monotonic() - began_s > _ANSWERS_AT_END_WITHIN_S and not self.wait(0)

        return self._checkpoint_reader.ask_blocking(read, within_s, must_stop)

    def await_checkpoint_store(self) -> None:
        """Wait until the store or the folder of the run's checkpoints can be read.

        Call this method before the run gets its GPUs, so that no GPU is idle during the wait. A
        store that does not answer is never treated as an empty store.

        Raises:
            CheckpointsUnreadable: The store did not answer in time, still refuses access, or the
                run must end.
        """
        urls = [one.checkpoints for one in self.spec.processes.values() if one.checkpoints]
        if not urls:
            return
        if self.adopts_jobs and self.record.content.adoptable(self.place) is not None:
            # The checkpoints are not needed, because the Ray jobs of the last attempt still run.
            # This process supervises these jobs and starts no attempt.
            return
        began_s = time.monotonic()
        message = ""
        pause_s = _READ_CHECKPOINTS_PAUSES_S[0]
        while True:
            try:
                self._ask_checkpoints(partial(self._check_checkpoints, urls), _STORE_WITHIN_S)
                return
            except OSError as error:  # includes PlaceTimeout
                if not any(map(is_url, urls)) and not isinstance(error, PlaceTimeout):
                    # A local folder has responded with an error, so waiting does not help. The next
                    # attempt reads the folder again, and reports the error.
                    return
                is_refusal = isinstance(error, StoreRefused)
                limit_s = _REFUSAL_TIMEOUT_S if is_refusal else _STORE_TIMEOUT_S
                is_late = time.monotonic() - began_s > limit_s
                if message != str(error):
                    message = str(error)
                    self.record_waiting(
                        f"{message}; the next attempt waits until the checkpoints can be read"
                    )
                if is_late or not self.wait(pause_s):
                    raise CheckpointsUnreadable(error) from error
                pause_s = min(pause_s * 2, _ASK_STORE_EVERY_S)

    def _check_checkpoints(self, urls: Sequence[str]) -> None:
        """Check that the checkpoints of the run can be read. The call may take long.

        Args:
            urls: URLs and folders of the checkpoints.

        Raises:
            OSError: The checkpoints cannot be read.
        """
        if self.record.attempts or not any(map(is_url, urls)):
            self._plan_resume()
        else:
            for url in urls:
                check_access(url.replace("${run.id}", self.run_id))

    def record_waiting(self, message: str) -> None:
        """Record that the run waits for GPUs, and emit an event with the reason."""
        self.record.move(RunState.PENDING_RESOURCES)
        self.emit("run.waiting", message=message)

    def begin_attempt(self) -> None:
        """Start an attempt: reserve ports, replace the placeholders, and start a supervisor.

        If Ray jobs of an earlier process of this run are still running, continue their attempt.
        Otherwise start a new attempt.

        Raises:
            OSError: No port is free, or the files cannot be written.
        """
        adopted = self.record.content.adoptable(self.place) if self.adopts_jobs else None
        place = self.place.attempt(adopted.number if adopted else self.record.attempts + 1)
        # The directory may exist: an earlier process may have been killed before it wrote the
        # attempt into the record.
        place.directory.mkdir(exist_ok=True)
        if adopted is not None:
            resume = adopted.resume
            resume_from = adopted.resume_from or ""
            ports = PortsReserved.known(adopted.ports)
        else:
            resume_plan = self.plan_resume()
            resume = resume_plan.as_record()
            # If some files may be checkpoints, the text in `resume.rule` already names these files,
            # and says how the spec can name them. So add no further remark.
            if not resume_plan.unrecognised and (
                remark := describe_fruitless_attempts(self.spec, self.record.content.attempts)
            ):
                resume = resume.with_changes(notes=(*resume.notes, remark))
            resume = resume.with_changes(check=ResumeCheck.POSSIBLE)
            if unchecked := explain_unchecked(self.spec, resume):
                notes = (*resume.notes, unchecked)
                resume = resume.with_changes(notes=notes, check=ResumeCheck.IMPOSSIBLE)
            resume_from = str(resume_plan.passed or "")
            ports = reserve_ports(self.spec)

        try:
            running = self._start_supervisor(place, adopted, resume_from, resume, ports)
        except BaseException:
            ports.close()
            raise

        self.emit(
            "attempt.adopted" if adopted else "attempt.begun",
            attempt=place.number,
            run_id=self.run_id,
            directory=place.directory,
            resume_from=resume_from or None,
            resume=resume.as_json() if resume is not None else None,
        )
        with suppress(PlaceTimeout):
            for warning in self._checkpoint_reader.ask_blocking(
                lambda: [*describe_rivals(self.spec, self.place, place.number)]
            ):
                self.emit("run.warning", message=warning)
        containment = running.containment
        self.emit("containment", text=str(containment), **containment.as_json())
        if any(component.keep for component in self.spec.processes.values()):
            work = running.background
            work.start(
                remove_superfluous_checkpoints, self.spec, self.place, self.record, work.is_over
            )
        self._end_request.attach(running.supervisor)

    def _start_supervisor(
        self,
        place: AttemptPlace,
        adopted: AttemptRecord | None,
        resume_from: str,
        resume: ResumeRecord | None,
        ports: PortsReserved,
    ) -> RunningAttempt:
        """Write the files of an attempt, and start its supervisor.

        Args:
            place: Paths of the attempt's files.
            adopted: Record of the attempt if an earlier process started it. None for a new attempt.
            resume_from: Path of the checkpoint from which the attempt starts, or an empty string.
            resume: The checkpoint from which the attempt starts, and the reasons for its choice.
                None if unknown.
            ports: The ports that are reserved for the attempt.

        Returns:
            The attempt with its supervisor.
        """
        attempt_spec = AttemptSpec(
            self.spec,
            run_place=self.place,
            place=place,
            ray_address=self.ray_address,
            resume_from=resume_from,
            ports=ports,
            secrets=self._secrets,
        )
        self._attempt_spec = attempt_spec
        # Write `spec.yaml` for a new attempt. Also write `spec.yaml` if an earlier process started
        # the attempt on another host, because this host then has no such file.
        if adopted is None or not place.spec.exists():
            attempt_spec.write()
        self.attempt = place

        self._events = EventLog(
            place.events,
            (self.record.observe, *event_listeners.get()),
            mask=self.mask,
            disk=self._register.disk,
        )
        # This spec contains secret values. Pass it only to the components, and never write it to a
        # file.
        spec = attempt_spec.with_block_values()
        containment = find_containment(spec)
        metrics = adopted.metrics if adopted is not None else None
        if adopted is None and spec.progress is not None and spec.progress.jsonl is not None:
            # If the file system does not respond in time, continue without a fingerprint. The
            # supervisor makes the fingerprint later.
            file = Path(spec.cwd) / spec.progress.jsonl
            with suppress(PlaceTimeout):
                metrics = PlaceReader(file).ask_blocking(partial(FileFingerprint.of, file))

        mlflow_parents: dict[str, str] = {}
        if adopted is None:
            foreign = self._read_checkpoints(
                partial(find_foreign_checkpoints, self.spec, spec, self.place, place.number)
            )
            self.record.begin_attempt(
                place.number,
                containment.as_json(),
                resume_from=resume_from or None,
                resume=resume,
                metrics=metrics,
                ports=ports.numbers,
                host=host_name(),
            )
            self.record.note_foreign_checkpoints(foreign)
            self.record.move(RunState.ADMITTED)
            mlflow_parents = find_mlflow_parents(
                spec,
                self.run_id,
                place.number,
                must_end=lambda: not self.wait(0),
                warn=lambda message: self.emit("run.warning", message=message),
            )
        elif self.record.state is RunState.STOPPING:
            self.record.move(RunState.STARTING)

        is_resumed = bool(resume_from or (resume is not None and resume.expected))
        fleet = prepare_fleet(
            spec,
            self.run_id,
            place,
            containment,
            ports.numbers,
            self._register.directory,
            resumes=is_resumed,
            secrets=self._secrets.values,
        )
        if fleet is not None:
            self._secrets.add(fleet.tokens)
        plan_inputs = PlanInputs(
            spec=spec,
            run_id=self.run_id,
            place=place,
            containment=containment,
            adopted=adopted,
            fleet=fleet,
            grant=self.grant,
            metrics=metrics,
            resumes=is_resumed,
            resume=resume,
            foreign=self.record.content.foreign_checkpoints,
            best_step_before=self.record.content.find_best_step(
                before=place.number, since=self.spec.first_counted_attempt
            ),
            mlflow_parents=mlflow_parents,
            mask=self.mask,
        )
        # Pass the template process, from which guardian processes are forked, only to the first
        # attempt. The supervisor of that attempt ends the template process.
        template = self._guardian_template
        self._guardian_template = None
        self._running = RunningAttempt(
            plan_inputs,
            attempt_spec,
            emit=self._events.emit,
            register=self._register,
            note_ports=self.record.note_ports,
            template=template,
        )
        if adopted is None:
            # Record the code of the run in the background, because Git may need long to find the
            # changes in a large project.
            self._running.background.start(
                record_provenance, self.record, self.code, spec, Path.cwd(), self._secrets
            )
        return self._running

    def check_devices(self) -> None:
        """Requeue the run if a device that was granted to the run is missing on this machine."""
        reason = self._device_lease.why_unfit() if self._device_lease is not None else None
        if reason:
            message = f"{reason}: the run returns to its place in the queue"
            kind = FailureKind.INSUFFICIENT_RESOURCES
            self.supervisor.fail(Failure(kind=kind, message=message, rule=PREFLIGHT))

    def end_attempt(self) -> Verdict:
        """Stop all components, and record the attempt's result. A repeated call changes nothing.

        Raises:
            RuntimeError: No attempt has started.
        """
        if self._running is None:
            raise RuntimeError("no attempt of the run has begun")
        verdict = self._running.end()
        if verdict is self._attempt_verdict:
            return self.verdict
        self._attempt_verdict = verdict
        self._verdict = verdict
        # Record the end of the attempt only for a final state. Without a final state, the Ray jobs
        # of the attempt are still running, and the next process of the run will supervise the jobs.
        if verdict.state.is_final:
            self._release_grant()
            verdict = self._end_in_record(verdict)
            self._verdict = verdict
            self.emit(
                "attempt.ended",
                attempt=self.record.attempts,
                state=verdict.state.value,
                message=verdict.message,
                failure=verdict.failure.as_json() if verdict.failure else None,
            )
        return verdict

    def _end_in_record(self, verdict: Verdict) -> Verdict:
        """Record the result of the attempt, and warn if the attempt had no lasting result.

        A lasting result is a new checkpoint, or a training step that no earlier attempt reached.

        Returns:
            The result. If the attempt is complete, but the run has saved no checkpoint, the message
            of the result contains a warning.
        """
        content = self.record.content
        attempt = content.under_way
        if attempt is None:
            return verdict
        ended = attempt.ended(verdict.state, time.time(), verdict.failure)
        earlier = content.attempts[:-1]
        attempts = [*earlier, ended]

        is_complete = verdict.state is RunState.COMPLETED

        def find_saved() -> tuple[bool | None, str, str]:
            run = (self.spec, self.place, attempts)
            saved = has_saved_checkpoint(*run, content.foreign_checkpoints)
            unrecognised = ""
            lack = ""
            if saved is False:
                with suppress(OSError):
                    unrecognised = describe_unrecognised(*run)
                    if is_complete and not unrecognised:
                        lack = explain_lack_of_checkpoints(*run, content.foreign_checkpoints)
            return saved, unrecognised, lack

        saved = None
        unrecognised = ""
        lack = ""
        with suppress(PlaceTimeout):
            saved, unrecognised, lack = self._checkpoint_reader.ask_blocking(
                find_saved, _FIND_SAVED_WITHIN_S
            )
        attempts = [*earlier, ended.with_changes(saved_checkpoint=saved)]
        warning = describe_fruitless_attempts(self.spec, attempts, unrecognised)
        if unrecognised and not warning:
            warning = f"the attempt ended without a checkpoint. {unrecognised}"
        if lack and not warning:
            warning = (
                f"{lack}. If the training saves checkpoints in another folder, name this folder in "
                "the key `checkpoints` of the spec. If it saves no checkpoints, remove this key"
            )
        if warning:
            self.emit("run.warning", message=warning)
            if is_complete:
                verdict = verdict.with_warning(warning)
        count = len(list_fruitless_attempts(attempts))
        self.record.end_attempt(verdict, saved_checkpoint=saved, fruitless_attempts=count or None)
        return verdict

    def record_decision(self, text: str) -> None:
        """Record the decision after an attempt: a retry, a requeue, or the end of the run."""
        self.record.decide(self.mask(text))
        self.emit("attempt.decided", attempt=self.record.attempts, text=text)

    def _release_grant(self) -> None:
        """Release the granted devices of this machine."""
        lease = self._device_lease
        self._device_lease = None
        self.grant = None
        if lease is not None:
            lease.close()

    def fail(self, kind: FailureKind, message: str) -> Verdict:
        """Record the result FAILED for an error that no component of the attempt has caused."""
        failure = Failure(kind=kind, message=self.mask(message), rule="start")
        self._verdict = Verdict.failed(failure, 0.0)
        if self.record.attempts:
            self.record.end_attempt(self._verdict)
        return self._verdict

    def crash(self, error: Exception) -> None:
        """End the attempt as FAILED after an error in Muster itself.

        If there is no attempt yet, the whole run gets the result FAILED.
        """
        if self._running is None:
            _log.error(
                "run %s could not start because of an error in Muster", self.run_id, exc_info=error
            )
            self.fail(
                FailureKind.UNKNOWN,
                f"the run could not start because of an error in Muster: {error!r}",
            )
        else:
            self._running.supervisor.crash(error)

    def leave(self) -> None:
        """Stop working on the run, but record no final state. Another process continues the run."""
        self._is_left = True
        # Remove the run from the registry now instead of at exit. The next process of the run
        # refuses to start while the run is registered.
        self._register.close()

    def close(self, *, is_cancelled: bool = False, cancellation: str = "") -> Verdict:
        """Record the final state of the run, unless another process will continue the run.

        Args:
            is_cancelled: True if the flow run was cancelled on the Prefect server. The run then
                ends as cancelled in any case, because the server accepts no other final state.
            cancellation: Reason for the cancellation on the Prefect server, or an empty string if
                unknown. The final message then contains this reason instead of the
                `interrupt_reason`.

        Returns:
            The result of the run and its cause.
        """
        verdict = self.verdict
        interrupt_reason = cancellation or self.interrupt_reason
        self._release_grant()
        if self._guardian_template is not None:
            self._guardian_template.close()
        if self._is_left:
            return verdict

        if self.interrupt_reason and self.record.state is RunState.PENDING_RESOURCES:
            verdict = Verdict(state=RunState.CANCELLED, message=interrupt_reason)
        elif is_cancelled and verdict.state in (RunState.COMPLETED, RunState.FAILED):
            message = (
                f"{interrupt_reason}, after the last attempt had ended. Result of this attempt: "
                f"{join_problems(verdict.message)}"
            )
            verdict = replace(verdict, state=RunState.CANCELLED, message=message, failure=None)
        elif verdict.state is RunState.CANCELLED and self.interrupt_reason:
            message = verdict.message.replace(self.interrupt_reason, interrupt_reason)
            verdict = replace(verdict, message=message)
        self._verdict = verdict
        if not self.record.state.is_final:
            removed = remove_unused(self._register.owner.leftovers)
            if removed:
                self.emit("leftovers.removed", paths=removed)
            self.record.move(verdict.state, verdict.message)
        # Wait until `run.json` is on the disk, because other programs read the file as soon as they
        # notice the end of the run.
        self.unwritten_files = self._register.settle(self.record.content)
        return verdict

    def mask(self, text: str) -> str:
        """Return the text in which each secret of the run is replaced by `***`."""
        return self._secrets.mask(text)

    def emit(self, name: str, **fields: Any) -> None:
        """Write an event to the current attempt's `events.jsonl`, and notify the listeners.

        Before the first attempt, only the listeners are notified.
        """
        self._events.emit(name, **fields)

    def _emit_state(self, state: RunState, message: str) -> None:
        self.emit("run.state", state=state.value, message=message)
