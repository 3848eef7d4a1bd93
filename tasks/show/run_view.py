"""The current state of a run, for the terminal, the Prefect UI and the messages of the flow run.

`ObservedRun` derives the state from the events of the run. `RunView` combines this state with the
run record. The module also has functions for texts that both the terminal and the Prefect UI show.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Literal

from tasks.record.events import Event
from tasks.record.outcome import Failure
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord, ComponentRecord, RunJson
from tasks.record.states import SERVING_STATES, GroupState
from tasks.show.slow import Slow
from tasks.spec.component import FLEET
from tasks.spec.run import RunSpec

#: Text after `starting NAME` for a Ray job that Ray has not started yet.
_PENDING_JOB = ": Ray has not started the job yet, because its GPUs, CPUs or files are not ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Content of an artifact in the Prefect UI."""

    #: Short paragraphs in Markdown for the artifact's card on the run's page in the Prefect UI. The
    #: card cuts each paragraph after about 40 letters. Older versions of the UI show only the first
    #: paragraph.
    headline: str
    #: Full content. Depending on `type`, it is Markdown, a JSON list of table rows, or a
    #: percentage.
    data: str | float
    #: Type of the artifact in Prefect.
    type: Literal["markdown", "table", "progress"] = "markdown"
    #: SVG picture that the artifact's card in the Prefect UI shows, or an empty string. With a
    #: picture, the headline is only used as the alternative text of the picture.
    picture: str = ""


class Standing(Enum):
    """State of a component for tables and texts that the user reads."""

    #: The component was not started yet.
    WAITING = "waiting"
    #: The component was started or submitted as a Ray job, and is not ready yet.
    STARTING = "starting"
    #: The readiness probe of the component has succeeded.
    READY = "ready"
    #: The component is being stopped at the end of the attempt.
    STOPPING = "stopping"
    #: The process or Ray job of the component has ended.
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A component of the current attempt, as a row in tables for the user."""

    name: str
    stage: Standing = Standing.WAITING
    #: Process id, or None if the component has no process on this machine.
    pid: int | None = None
    #: Start time in UTC epoch seconds, or None before the start.
    began_at: float | None = None
    #: End time in UTC epoch seconds, or None if the component has not ended.
    ended_at: float | None = None
    #: Short text for the user, such as the last result of the readiness probe, the exit code, or
    #: the number of serving engines.
    note: str = ""
    #: True if `note` remains valid after the component has become ready: the state of a Ray job, or
    #: the number of serving engines.
    is_note_lasting: bool = False
    #: Reason why the last readiness probe failed, or an empty string.
    unready: str = ""
    #: Last status that the component sent with sd_notify, or an empty string.
    status: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSeen:
    """State of a server of the inference fleet, for the table that the user reads."""

    #: Number of the server in the fleet, from 0.
    rank: int
    #: State of the server, such as `active`. Servers that are always started together have the same
    #: state.
    state: str = GroupState.STARTING.value
    #: Address of the server, or an empty string if it has not been started.
    url: str = ""
    #: Number of times that the server was started.
    starts: int = 0
    #: Reason why the server receives no requests, or an empty string.
    cause: str = ""


#: The speed of a training is computed from the steps in its last `_WINDOW_S` seconds.
_WINDOW_S = 120.0
#: Number of most recent training steps that always count for the speed, even if some of them were
#: completed more than `_WINDOW_S` seconds before the last step.
_MIN_KEPT_STEPS = 6


class Pace:
    """The speed of the training and an estimate of its remaining time."""

    def __init__(self, total: float | None) -> None:
        """
        Args:
            total: Step at which the training is complete, or None if it is unknown.
        """
        self._total = total
        #: The last steps as pairs of time in UTC epoch seconds and step, oldest first.
        self._steps = deque[tuple[float, float]]()

    def snapshot(self) -> Pace:
        """Return a copy. Steps that are added to this object later do not appear in the copy."""
        pace = Pace(self._total)
        pace._steps.extend(self._steps)
        return pace

    @property
    def step(self) -> float | None:
        """The step that the training reported last, or None if it reported no step."""
        return self._steps[-1][1] if self._steps else None

    def add_step(self, at: float, step: float) -> None:
        """Add a step that the training has reported.

        Args:
            at: Time of the step in UTC epoch seconds.
            step: Number of the step.
        """
        if self._steps and step < self._steps[-1][1]:
            # The step is lower than before, because the training has resumed from a checkpoint.
            # Forget the earlier steps. Otherwise the speed would be negative.
            self._steps.clear()
        self._steps.append((at, step))
        while len(self._steps) > _MIN_KEPT_STEPS and self._steps[0][0] < at - _WINDOW_S:
            self._steps.popleft()

    def per_second(self, now: float) -> float | None:
        """Return the speed in steps per second, or None if fewer than two steps are known.

        If the current step takes longer than the earlier steps, it is counted as if it ended now.
        So the speed falls while the training hangs.

        Args:
            now: Current time in UTC epoch seconds.
        """
        if len(self._steps) < 2:
            return None
        first_at, first = self._steps[0]
        last_at, last = self._steps[-1]
        if last <= first or last_at <= first_at:
            return None
        rate = (last - first) / (last_at - first_at)
        is_overdue = last != self._total and (now - last_at) * rate > 1
        return (last - first + 1) / (now - first_at) if is_overdue else rate

    def remaining_s(self, now: float) -> float | None:
        """Return the estimated seconds until the end of the training, or None if unknown.

        Args:
            now: Current time in UTC epoch seconds.
        """
        rate = self.per_second(now)
        if rate is None or self._total is None or self.step is None:
            return None
        return max(0.0, (self._total - self.step) / rate)


#: States in which an inference engine cannot serve requests, temporarily or permanently.
_LOST = frozenset({GroupState.INACTIVE, GroupState.RECOVERING, GroupState.RETIRED})


class ObservedRun:
    """The current state of a run, derived from its events. Only one thread may use it at a time.

    When an attempt begins, the state of the previous attempt is discarded.
    """

    def __init__(self, spec: RunSpec) -> None:
        #: Names of the components in start order.
        self.names = tuple(spec.components)
        #: Step at which the training is complete, or None if it is unknown.
        self.total = spec.progress.total if spec.progress else None
        #: Step that the run must reach for success, or None if the spec requires no step.
        self._success_step = spec.success.step if spec.success else None
        #: Number of engines of the inference fleet, or 0 if the run has no fleet.
        self.engines = spec.fleet.engines if spec.fleet is not None else 0
        #: Path of `run.json`, or None if it does not exist yet.
        self.record: Path | None = None
        #: Current activity of the run, such as `starting trainer`. It is shown as the message of
        #: the flow run's state.
        self.doing = ""
        #: True if an attempt has begun, or if the run waits for its GPUs.
        self.has_begun = False
        self._reset(0, None)

    def snapshot(self) -> ObservedRun:
        """Return a copy of this object that later events do not change.

        Other threads wait during the copy. So make a shallow copy, which is fast.
        """
        seen = copy.copy(self)
        seen.rows = {**self.rows}
        seen._servers = {**self._servers}
        seen.pace = self.pace.snapshot()
        return seen

    def _reset(self, attempt: int, directory: Path | None) -> None:
        """Discard the state of the last attempt, and begin with the state of a new attempt.

        Args:
            attempt: Number of the new attempt, or 0 before the first attempt.
            directory: Directory with the files of the new attempt, or None.
        """
        #: Number of the current or last attempt, or 0 before the first attempt.
        self.attempt = attempt
        #: Directory with the files of this attempt, or None before the first attempt.
        self.directory = directory
        #: Mapping from the name of a component to its table row.
        self.rows = {name: Row(name=name) for name in self.names}
        self.pace = Pace(self.total)
        #: Mapping from the number of an inference engine to its state. All servers of an engine
        #: have the same state, because they are started and stopped together.
        self.groups: dict[int, GroupState] = {}
        #: Mapping from rank to server, for the servers of the inference fleet.
        self._servers: dict[int, ServerSeen] = {}
        #: Reason why the run waits or is being stopped, or an empty string.
        self.why = ""
        self.is_waiting = False
        self.is_stopping = False
        #: True if all components are ready and the teardown has not begun.
        self._is_running = False
        #: True if the text `doing` is a warning about slow progress. The next training step removes
        #: the warning.
        self._is_slow = False
        #: Cause of the attempt's failure, or None.
        self.failure: Failure | None = None

    def observe(self, event: Event) -> None:
        """Update the state with an event of the run. The method does not wait for anything."""
        match event.name:
            case "run.opened":
                self.record = event.record
            case "attempt.begun" | "attempt.adopted":
                self._reset(event.attempt, event.directory)
                self.has_begun = True
            case "run.waiting":
                self.has_begun = True
                self.is_waiting = True
                self.why = event.message
                self.doing = f"waiting: {event.message}"
            case "run.state" if event.state == "pending_resources" and event.message:
                self.is_waiting = True
                self.why = event.message
                self.doing = f"waiting: {event.message}"
            case "run.progress":
                shows_running = self._is_slow or self.doing == self.running
                self.pace.add_step(event.at, event.step)
                if shows_running:
                    self._is_slow = False
                    self.doing = self.running
            case "run.slow":
                self._is_slow = True
                self.doing = event.message
            case "place.unanswered":
                self.doing = f"{event.place} does not answer"
            case "place.answered":
                self.doing = event.message
            case "run.alarm":
                self.doing = f"alarm: {event.message}"
            case "attempt.ready":
                self._is_running = True
                self.doing = self.running
            case "contact.lost":
                # The flow run stays in the state Running. Only this text shows that the Ray cluster
                # does not answer.
                self.doing = f"lost contact: {event.message}"
            case "contact.back":
                self.doing = f"{event.address} answers again"
            case "teardown.begun":
                self._is_running = False
                self.is_stopping = True
                self.why = event.reason
                self.doing = f"stopping: {event.reason}"
                for row in self.rows.values():
                    if row.stage in (Standing.STARTING, Standing.READY):
                        self._change(row.name, stage=Standing.STOPPING)
            case "rollout.failed":
                # The inference fleet has failed. The process of the fleet now stops all inference
                # servers and exits.
                self.is_stopping = True
            case "attempt.ended":
                self.failure = event.failure
            case "rollout.server.started":
                server = self._server(event.rank)
                started = replace(server, url=event.url, starts=server.starts + 1)
                self._servers[event.rank] = started
            case "rollout.group.state":
                cause = "" if event.after in SERVING_STATES else event.cause
                for rank in event.ranks:
                    server = self._server(rank)
                    self._servers[rank] = replace(server, state=event.after.value, cause=cause)
                # Assign a new dict instead of changing the old dict, which another thread may be
                # reading.
                self.groups = {**self.groups, event.group: event.after}
                self._change(
                    FLEET,
                    note=f"{self.serving} of {self.engines} engines serve requests",
                    is_note_lasting=True,
                )
                if self._is_running:
                    self.doing = self.running
            case _ if event.component in self.rows:
                self._observe_component(self.rows[event.component], event)

    def _observe_component(self, row: Row, event: Event) -> None:
        """Update the row of the component that an event names."""
        name = row.name
        note = row.note
        match event.name:
            case "component.starting":
                self.doing = f"starting {name}"
                self._change(name, stage=Standing.STARTING, began_at=event.at)
            case "component.spawned":
                self._change(name, stage=Standing.STARTING, pid=event.pid, began_at=event.at)
            case "job.state":
                self._change(name, note=describe_job(event), is_note_lasting=True)
                if row.stage is Standing.STARTING:
                    is_pending = event.status == "PENDING"
                    self.doing = f"starting {name}{_PENDING_JOB if is_pending else ''}"
            case "probe.failed" if event.probe != "live":
                self._change(name, note=event.reason, unready=event.reason)
            case "component.ready":
                # Remove `note` if it says why an earlier probe failed: the component is ready now.
                new_note = note if row.is_note_lasting else row.status
                # For a component that only prepares the run, this event arrives after the component
                # has ended. The component is then still shown as ended.
                has_ended = row.stage is Standing.ENDED
                stage = Standing.ENDED if has_ended else Standing.READY
                shown_note = note if has_ended else new_note
                self._change(
                    name, stage=stage, note=shown_note, is_note_lasting=row.is_note_lasting
                )
            case "component.status":
                is_ready = row.stage is Standing.READY
                if is_ready:
                    self._change(name, status=event.message, note=event.message)
                else:
                    self._change(name, status=event.message)
            case "component.drained":
                self._change(name, note=f"{note}, finished its work".lstrip(", "))
            case "component.saving":
                self._change(name, note="seems to be writing a checkpoint")
            case "component.exited":
                ending = format_ending(event.exit_code, event.signal)
                self._change(name, stage=Standing.ENDED, ended_at=event.at, note=ending)
            case "component.stuck":
                self._change(name, note="could not be killed")

    def _change(self, name: str, **changes: object) -> None:
        """Change fields of a row. A new note is not lasting, if the changes do not say so."""
        if "note" in changes:
            changes = {"is_note_lasting": False, **changes}
        if name in self.rows:
            self.rows[name] = replace(self.rows[name], **changes)  # type: ignore[arg-type]

    @property
    def serving(self) -> int:
        """Number of inference engines of the fleet that serve requests."""
        return sum(state in SERVING_STATES for state in self.groups.values())

    @property
    def is_degraded(self) -> bool:
        """True if an engine of the fleet cannot serve, temporarily or permanently."""
        return not _LOST.isdisjoint(self.groups.values())

    @property
    def is_at_last_step(self) -> bool:
        """True if the reported training step is the final step of the run, or a higher number."""
        steps = [step for step in (self.total, self._success_step) if step is not None]
        return bool(steps) and self.pace.step is not None and self.pace.step >= max(steps)

    @property
    def running(self) -> str:
        """Text with the components of the run, such as `running: trainer, rollout`.

        If some engines of the fleet do not serve requests, the text also contains the number of
        serving engines. After the last step, the text says that the training is finishing.
        """
        if self.is_at_last_step:
            total = f" of {self.total:g}" if self.total else ""
            return f"finishing: the training is at its last step, step {self.pace.step:g}{total}"
        components = f"running: {', '.join(self.names)}"
        if not self.groups or self.serving == self.engines:
            return components
        return f"{components}; {self.serving} of {self.engines} inference engines serve requests"

    @property
    def servers(self) -> tuple[ServerSeen, ...]:
        """The servers of the fleet, sorted by rank."""
        return tuple(self._servers[rank] for rank in sorted(self._servers))

    def _server(self, rank: int) -> ServerSeen:
        return self._servers.get(rank) or ServerSeen(rank=rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Snapshot of a run: the spec, the record, and the state of the run according to its events."""

    #: Time of this snapshot, in UTC epoch seconds.
    at: float
    #: The run spec. Its placeholders are filled in if an attempt has begun.
    spec: RunSpec
    record: RunJson
    place: RunPlace
    #: State of the run according to its events, as a snapshot.
    seen: ObservedRun
    #: Name of the host of the flow process, or an empty string.
    host: str = ""
    #: Reason why the run ended before its first attempt, or an empty string.
    message: str = ""
    #: Analysis of how the run spends its time, or None if nothing was measured.
    slow: Slow | None = None

    @property
    def failed(self) -> tuple[AttemptRecord, Failure] | None:
        """The last attempt and its failure, or None if the last attempt has not failed."""
        attempt = self.record.attempt
        return (attempt, attempt.failure) if attempt and attempt.failure else None


#: Names of the signals that Muster may send to a component to stop it.
_STOP_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGKILL"})


def describe_ending(ended: ComponentRecord | Failure) -> str:
    """Return how a component ended, such as `killed by SIGSEGV` or `exit code 1`.

    Args:
        ended: Record of the ended component, or the failure of the component.
    """
    prefix = "killed by " if ended.signal else ""
    return prefix + format_ending(ended.exit_code, ended.signal)


def format_ending(exit_code: int | None, signal: str | None) -> str:
    """Return how a process ended: the name of the signal, or a text such as `exit code 1`."""
    if signal:
        return signal
    return f"exit code {'unknown' if exit_code is None else exit_code}"


def describe_job(event: Event) -> str:
    """Return the text about the state of a Ray job in an event: `job RUNNING, node 10.0.0.7`."""
    place = f", {event.place}" if event.place else ""
    return f"job {event.status}{place}"


def describe_component_state(attempt: AttemptRecord, name: str) -> str:
    """Return the state of a component in an attempt: `starting`, `ready`, or how it ended.

    If a signal such as SIGTERM ended the component, the text is `stopped by SIGTERM`, because
    Muster probably sent the signal. For the component that failed first, the text is `killed by
    SIGTERM`.

    Args:
        attempt: The attempt.
        name: Name of the component.
    """
    component = attempt.components.get(name)
    failure = attempt.failure
    if component is None:
        return "never started" if attempt.ended_at else "not started"
    if component.ended_at is None:
        return "starting" if component.ready_at is None else "ready"
    failed_first = failure is not None and failure.component == name and failure.has_ended
    if component.signal in _STOP_SIGNALS and not failed_first:
        return f"stopped by {component.signal}"
    return describe_ending(component)
