"""A run in this process: its record, its files, and the attempt that is under way."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

from tasks.processes.component import AttemptPlan, tag_of
from tasks.processes.containment import Level
from tasks.processes.devices import DeviceLease
from tasks.processes.guarded import GuardianTemplate
from tasks.processes.identity import host_name
from tasks.processes.ports import PortsReserved
from tasks.processes.registry import RunRegister, remove_unused
from tasks.processes.supervisor import Supervisor
from tasks.record import code_store
from tasks.record.causes import recognize_fleet_loss
from tasks.record.checkpoints import (
    find_resume_checkpoint,
    find_superfluous_checkpoints,
    remove_checkpoint,
)
from tasks.record.events import EventLog, event_listeners
from tasks.record.metrics_file import FileFingerprint
from tasks.record.outcome import Failure, Verdict
from tasks.record.places import AttemptPlace, RunPlace, muster_home
from tasks.record.retries import PREFLIGHT
from tasks.record.run_json import RunJson, RunRecord
from tasks.record.states import RunState
from tasks.rollout.component import FleetTail, fleet_faults, fleet_names, fleet_ports, prepare_fleet
from tasks.spec import secrets
from tasks.spec.errors import InvalidSpec
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.loading import dump_spec, list_required_ports, resolve
from tasks.spec.placeholders import find_placeholder_faults
from tasks.spec.programs import find_missing_programs
from tasks.spec.run import LIVE_CODE, RunSpec
from tasks.spec.values import select_literals
from tasks.train.plan import (
    Given,
    Planned,
    component_search_path,
    containment_faults,
    containment_of,
)
from tasks.upkeep.lost_run import finish_predecessor

_log = logging.getLogger(__name__)

#: What a run is made of is on record within that after its attempt's end, or never; and so long is
#: waited for a checkpoint to be removed, of which the rest goes with the next one.
_DESCRIBED_WITHIN_S = 2.0
_CHECKPOINTS_EVERY_S = 30.0


def check_spec(spec: RunSpec) -> None:
    """What a spec names must be known, supported and there. Raises: InvalidSpec."""
    faults = [
        *find_placeholder_faults(spec.written()),
        *(fleet_faults(spec, spec.fleet) if spec.fleet is not None else ()),
        *find_missing_programs(spec, root=Path.cwd(), path=component_search_path()),
        *containment_faults(spec),
    ]
    if faults:
        raise InvalidSpec(tuple(faults), source=f"the spec of run {spec.name!r}")


class RunSession:
    """One run, from its first attempt to its verdict. Safe to interrupt from any thread."""

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
        """Makes the run's directory, and registers this process as the run's owner.

        Args:
            api_url: of the Prefect server that keeps the flow run; None: it ends with the run.
            worker: that has started this process; None where none has.
            earlier: what another host has on record of the run, where it has been there.

        Raises: OSError, when there is no disk, another process of this machine has the run, or
            something of an earlier one can't be ended.
        """
        self.spec = spec
        #: With its placeholders filled in for the attempt under way.
        self.resolved = spec
        self.flow_run_id = flow_run_id
        self.place = RunPlace.of(run_id)
        # Before anything of it is ended, or changed.
        RunJson.read_for_flow_run(self.place.record, str(flow_run_id))
        #: The run's jobs outlive its processes.
        self.adopts = spec.on_lost_flow == "adopt"
        finish_predecessor(run_id, adopts=self.adopts)
        self._register = RunRegister.opened(
            run_id,
            flow_run_id=str(flow_run_id),
            api_url=api_url,
            worker=worker,
            directory=self.place.directory,
            adopts=self.adopts,
        )
        # Not with the run: until this process has left, its flow run may lack its final state.
        atexit.register(self._register.close)
        self.place.directory.mkdir(parents=True, exist_ok=True)
        #: The attempt under way, or the last one.
        self.attempt: AttemptPlace | None = None
        #: Why the run is to end; empty while it is not.
        self.interrupted_by = ""
        self._is_hurried = False
        #: Why this process is to leave the run to its next one; empty while it is not.
        self.left_by = ""
        environ = dict(os.environ)
        with suppress(OSError, ValueError):
            # Ray's token, of which the environment has the place only.
            token = Path(environ.get("RAY_AUTH_TOKEN_PATH", "")).read_text(encoding="utf-8")
            environ["RAY_AUTH_TOKEN"] = token.strip()
        self._secrets = secrets.find_env_secrets(environ) | spec.secrets
        #: The values of its Prefect Secret blocks, by their names.
        self._blocks: Mapping[str, str] = {}
        self._supervisor: Supervisor | None = None
        self._events = EventLog(None)
        self._fleet_tail: FleetTail | None = None
        self._verdict: Verdict | None = None
        #: Whether the server was told, in so many seconds, all that has happened so far, but for
        #: what the run is doing: whoever asks is about to give the flow run another state.
        self.flushed: Callable[[float], bool] = lambda within_s: True
        self._woken = threading.Event()
        self._is_left = False
        #: The address of its Ray cluster, where its spec leaves that to its pool.
        self.cluster = ""
        #: That its components run; None: the project as it lies there.
        self.code: code_store.Code | None = None
        #: What goes on beside the attempt under way, until that is over.
        self._beside: list[threading.Thread] = []
        self._over = threading.Event()
        #: What the queue has given it for its attempt.
        self.given: Given | None = None
        self._lease: DeviceLease | None = None
        #: For the guardians of the first attempt.
        self._template: GuardianTemplate | None = None
        self.record = RunRecord(
            self.place.record,
            run_id=run_id,
            flow_run_id=str(flow_run_id),
            on_move=self._tell_state,
            earlier=earlier,
            adopts=self.adopts,
            disk=self._register.disk,
            name=spec.name,
            workload=spec.workload,
            tags=list(spec.tags),
        )

    @property
    def run_id(self) -> str:
        return self.place.run_id

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

    def resume_point(self) -> Path | None:
        """The checkpoint that the next attempt starts from; None for none."""
        attempts = self.record.content.attempts
        return find_resume_checkpoint(self.spec, self.place, attempts) if attempts else None

    def enter_code(self, fetch: code_store.Fetch) -> None:
        """Work in the code that was submitted from now on, where the spec names one.

        Raises: NoCode; OSError, and what `fetch` raises, which gets what this machine has not.
        """
        os.environ.pop(code_store.PROJECT, None)
        if self.spec.code in (None, LIVE_CODE):
            return
        self.code = code_store.code_of(self.spec.code, fetch)
        place = self.place.directory / "code"
        code_store.check_out(self.code, place, fetch)
        os.environ["MUSTER_HOME"] = str(muster_home())
        os.environ[code_store.PROJECT] = self.code.project
        os.chdir(place)

    def _describe(self, spec: RunSpec, root: Path) -> None:
        """Note what the attempt is made of, beside its start: git may have to look for long."""
        path = select_literals(spec.env).get("PATH") or component_search_path()
        python = Path(shutil.which("python", path=path) or sys.executable)
        try:
            made_of = code_store.made_of(self.code, root, python)
            diff = self.mask(str(made_of.get("diff") or ""))
            made_of["diff"] = secrets.mask_text(diff, secrets.find_code_secrets(diff))
            self.record.describe({**made_of, "host": host_name()})
        except (OSError, ValueError) as error:
            _log.warning("what run %s is made of is not known: %r", self.run_id, error)

    def _keep_few(self) -> None:
        """Remove the checkpoints that are more than its spec keeps, until an attempt is over."""
        over, is_last = self._over, False
        while not is_last:
            is_last = over.wait(_CHECKPOINTS_EVERY_S)
            try:
                for path in find_superfluous_checkpoints(
                    self.spec, self.place, self.record.content.attempts
                ):
                    remove_checkpoint(path)
            except OSError as error:
                _log.warning("run %s keeps more checkpoints: %s", self.run_id, error)

    def begin_attempt(self) -> None:
        """Reserve ports, fill in the spec's placeholders, and make ready to start components.

        Where an earlier process of the run has left its jobs to this one, its attempt goes on.

        Raises: OSError, when there is no port or no disk to be had.
        """
        before = self.record.content.adoptable(self.place) if self.adopts else None
        place = self.place.attempt(before.number if before else self.record.attempts + 1)
        # Its process may have been killed before it could be noted.
        place.directory.mkdir(exist_ok=True)
        if before is not None:
            resume_from, ports = before.resume_from or "", PortsReserved.known(before.ports)
        else:
            resume_from = str(self.resume_point() or "")
            ports = PortsReserved([*list_required_ports(self.spec), *fleet_ports(self.spec)])
        try:
            names = self._names_of(place, resume_from, ports.numbers)
            spec = resolve(self.spec.with_ray_address(self.cluster), names, Path.cwd())
            self.resolved = spec
            # A key that is only the run's id would be masked in every file's name.
            self._secrets |= spec.secrets - {*names.values()}
            # Of an attempt that was begun on another host it may not be here.
            if before is None or not place.spec.exists():
                place.spec.write_text(dump_spec(spec, self._secrets), encoding="utf-8")
            self.attempt = place
            # Only what is started knows them.
            spec = spec.with_secrets(self._blocks)
            self._events = EventLog(
                place.events,
                (self.record.observe, *event_listeners.get()),
                mask=self.mask,
                disk=self._register.disk,
            )
            containment = containment_of(spec)
            metrics = before.metrics if before is not None else None
            if before is None and spec.progress is not None and spec.progress.jsonl is not None:
                metrics = FileFingerprint.of(Path(spec.cwd) / spec.progress.jsonl)
            if before is None:
                self.record.begin_attempt(
                    place.number,
                    containment.as_json(),
                    resume_from=resume_from or None,
                    metrics=metrics,
                    ports=ports.numbers,
                    host=host_name(),
                )
                self.record.move(RunState.ADMITTED)
            elif self.record.state is RunState.STOPPING:
                self.record.move(RunState.STARTING)
            fleet = prepare_fleet(
                spec,
                self.run_id,
                place,
                containment,
                ports.numbers,
                self._register.directory,
                resumes=bool(resume_from),
                secrets=self._secrets,
            )
            if fleet is not None:
                self._secrets |= fleet.tokens
            planned = Planned(
                spec=spec,
                run_id=self.run_id,
                place=place,
                containment=containment,
                adopted=before,
                fleet=fleet,
                given=self.given,
                metrics=metrics,
                resumes=bool(resume_from),
                mask=self.mask,
            )

            def replan(component: str) -> AttemptPlan:
                ports.move(component)
                moved = self._names_of(place, resume_from, ports.numbers)
                return self._planned_again(planned, moved, ports.numbers)

            template, self._template = self._template, None
            self._supervisor = Supervisor(
                planned.plan(), ports, self._events.emit, self._register, template, replan
            )
            self._over, self._beside = threading.Event(), []
            if before is None:
                self._have_beside(self._describe, spec, Path.cwd())
            if fleet is not None:
                self._fleet_tail = FleetTail(place.fleet_events, self._events.emit)
                self._fleet_tail.start()
        except BaseException:
            ports.close()
            raise
        self._events.emit(
            "attempt.adopted" if before else "attempt.begun",
            attempt=place.number,
            run_id=self.run_id,
            directory=place.directory,
            resume_from=resume_from or None,
        )
        self._events.emit("containment", text=str(containment), **containment.as_json())
        if any(part.keep for part in self.spec.processes.values()):
            self._have_beside(self._keep_few)
        if self.interrupted_by:
            self._supervisor.interrupt(self.interrupted_by)
            if self._is_hurried:
                self._supervisor.hurry()
        elif self.left_by:
            self._supervisor.interrupt(self.left_by, RunState.RUNNING)

    def _names_of(
        self, place: AttemptPlace, resume_from: str, numbers: Mapping[str, int]
    ) -> dict[str, str]:
        """The values of the spec's placeholders, by their names.

        Args:
            numbers: the reserved ports, `numbers[name]`.
        """
        return {
            "run.id": self.run_id,
            "run.dir": str(self.place.directory),
            "attempt.number": str(place.number),
            "attempt.dir": str(place.directory),
            "attempt.resume_from": resume_from or "",
            **{name: str(port) for name, port in numbers.items()},
            **fleet_names(self.spec, numbers),
        }

    def _planned_again(
        self, planned: Planned, names: Mapping[str, str], numbers: Mapping[str, int]
    ) -> AttemptPlan:
        """The plan of the attempt with other ports, which its files then name.

        Raises: OSError, if its fleet knows the old ports: its settings are made already.
        """
        spec = resolve(self.spec.with_ray_address(self.cluster), names, Path.cwd())
        is_fleets = planned.fleet is not None and planned.fleet.port not in numbers.values()
        if is_fleets or spec.fleet != self.resolved.fleet:
            raise OSError("the fleet was given the old port already")
        self.resolved = spec
        planned.place.spec.write_text(dump_spec(spec, self._secrets), encoding="utf-8")
        self.record.note_ports(numbers)
        return replace(planned, spec=spec.with_secrets(self._blocks)).plan()

    def _have_beside(self, what: Callable[..., None], *given: object) -> None:
        self._beside.append(threading.Thread(target=what, args=given, daemon=True))
        self._beside[-1].start()

    def know_secrets(self, blocks: Mapping[str, str]) -> None:
        """Have the values of its Prefect Secret blocks, by their names, for the next attempt."""
        self._blocks = blocks
        self._secrets |= secrets.drop_common_values(blocks.values())

    def take(self, nodes: Mapping[str, int], lease: DeviceLease | None) -> None:
        """Have this for the next attempt, until that has ended."""
        self._lease = lease
        devices, kind = (lease.indices, lease.kind) if lease is not None else ((), "nvidia")
        self.given = Given(nodes=nodes, devices=devices, kind=kind)

    def check_devices(self) -> None:
        """Send the run back to its place where a device that it was given is not there any more."""
        if self._lease is not None and (why := self._lease.why_unfit()):
            text = f"{why}: the run goes back to its place"
            kind = FailureKind.INSUFFICIENT_RESOURCES
            self.supervisor.fail(Failure(kind=kind, message=text, rule=PREFLIGHT))

    def _give_back(self) -> None:
        lease, self._lease, self.given = self._lease, None, None
        if lease is not None:
            lease.close()

    def end_attempt(self) -> Verdict:
        """Take down what runs, and note the verdict on the attempt; any number of times."""
        with self.supervisor:
            verdict = self.supervisor.teardown()
        self._over.set()
        for thread in self._beside:
            thread.join(_DESCRIBED_WITHIN_S)
        if self.attempt is not None and self.resolved.fleet is not None:
            verdict = recognize_fleet_loss(verdict, self.attempt, self.resolved.fleet.engines)
        if (failure := verdict.failure) is not None:
            said = {key: getattr(failure, key) for key in ("message", "line", "log_tail")}
            failure = failure.with_changes(**{key: self.mask(text) for key, text in said.items()})
        verdict = replace(verdict, message=self.mask(verdict.message), failure=failure)
        if self._fleet_tail is not None:
            self._fleet_tail.close()
        if not verdict.state.is_final:
            self._verdict = verdict
        elif self._verdict is not verdict:
            self._verdict = verdict
            self._give_back()
            self.record.end_attempt(verdict)
            self.tell(
                "attempt.ended",
                attempt=self.record.attempts,
                state=verdict.state.value,
                message=verdict.message,
                failure=verdict.failure.as_json() if verdict.failure else None,
            )
        return verdict

    def decide(self, text: str) -> None:
        """Note in the ledger what follows the attempt that has ended."""
        self.record.decide(self.mask(text))
        self.tell("attempt.decided", attempt=self.record.attempts, text=text)

    def wait(self, delay_s: float) -> bool:
        """Whether the delay passed without the run being interrupted, which ends it at once."""
        self._woken.wait(delay_s)
        return not (self.interrupted_by or self.left_by)

    def wait_in_line(self, message: str) -> None:
        """Note that the run waits for its gang, and tell whoever listens why."""
        self.record.move(RunState.PENDING_RESOURCES)
        self.tell("run.waiting", message=message)

    def tell(self, name: str, **fields: Any) -> None:
        """Tell whoever listens what happens, and note it of the last attempt, if any."""
        self._events.emit(name, **fields)

    def open(self) -> None:
        """Have the listeners of this context told what happens before the first attempt, and the
        template of its guardians started."""
        self._events = EventLog(None, event_listeners.get(), mask=self.mask)
        self.tell("run.opened", run_id=self.run_id, record=self.place.record)
        # By when it is admitted, that is there: it takes as long as all else of an attempt's begin.
        if len(self.spec.processes) > 1 and containment_of(self.spec).level is not Level.L1:
            with suppress(OSError):
                self._template = GuardianTemplate(tag_of(self.run_id, self.record.attempts + 1))

    def leave(self) -> None:
        """Leave the run as it waits: another process will go on with it."""
        self._is_left = True
        # At once: that process must find no owner, however long this one takes to exit.
        self._register.close()

    def close(self) -> Verdict:
        """Give the run its final state, which its verdict says."""
        verdict = self.verdict
        self._give_back()
        if self._template is not None:
            self._template.close()
        if self._is_left:
            return verdict
        if self.interrupted_by and self.record.state is RunState.PENDING_RESOURCES:
            verdict = Verdict(state=RunState.CANCELLED, message=self.interrupted_by)
        if not self.record.state.is_final:
            if removed := remove_unused(self._register.owner.leftovers):
                self.tell("leftovers.removed", paths=removed)
            self.record.move(verdict.state, verdict.message)
        # Whoever is told that it has ended finds that on the disk, where there is room.
        self._register.settle(self.record.content)
        return verdict

    def fail(self, kind: FailureKind, message: str) -> Verdict:
        """Give up before or outside an attempt's components."""
        failure = Failure(kind=kind, message=self.mask(message), rule="start")
        self._verdict = Verdict.failed(failure, 0.0)
        if self.record.attempts:
            self.record.end_attempt(self._verdict)
        return self._verdict

    def crash(self, error: Exception) -> None:
        """End the attempt as failed, by an error of our own; without one, the run."""
        if self._supervisor is None:
            _log.error("run %s could not be admitted", self.run_id, exc_info=error)
            self.fail(FailureKind.UNKNOWN, f"could not be admitted: {error!r}")
        else:
            self._supervisor.crash(error)

    def interrupt(self, why: str) -> None:
        """End the run as cancelled, with every grace period. Returns at once.

        One cancel may arrive in several ways, so calling this again changes nothing.
        """
        self.interrupted_by = self.interrupted_by or why
        self._woken.set()
        if self._supervisor is not None:
            self._supervisor.interrupt(self.interrupted_by)

    def hurry(self) -> None:
        """Cut the grace periods of a run that was interrupted short. Returns at once."""
        was_hurried, self._is_hurried = self._is_hurried, True
        if self._supervisor is not None and not was_hurried:
            self._supervisor.hurry()

    def let_go(self, why: str) -> None:
        """Leave the run's jobs running, for its next process to go on with. Returns at once."""
        self.left_by = self.left_by or why
        self._woken.set()
        if self._supervisor is not None:
            self._supervisor.interrupt(why, RunState.RUNNING)

    def mask(self, text: str) -> str:
        """The text without the values of secrets that components may know."""
        return secrets.mask_text(text, self._secrets)

    def _tell_state(self, state: RunState, message: str) -> None:
        self.tell("run.state", state=state.value, message=message)
