"""A run at one moment: `RunSeen` makes it of events, and is the one reader of what they mean.

Terminal, page, timeline, states and announcements show what it holds. With it stand the words that
they share, and `RunView`, which adds the record to it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What one artifact shows."""

    #: Short paragraphs, which are all that the run's own page shows of it, on a card that cuts each
    #: after some 40 letters; older pages show the first only. Markdown.
    headline: str
    #: Markdown, JSON of a table, or a percentage.
    data: str | float
    type: Literal["markdown", "table", "progress"] = "markdown"
    #: SVG, shown on the card in place of the headline, which is then its words; empty for none.
    picture: str = ""


class Standing(Enum):
    """Where a component stands, for people."""

    #: Those before it are not ready yet.
    WAITING = "waiting"
    #: Its program runs, or its job is on its way; its readiness probe has not said yes.
    STARTING = "starting"
    READY = "ready"
    #: How the run ends is decided, and it has not ended yet.
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One component of the attempt under way."""

    name: str
    stage: Standing = Standing.WAITING
    #: None where it has none on this machine.
    pid: int | None = None
    #: UTC epoch seconds of its start and its end.
    began_at: float | None = None
    ended_at: float | None = None
    #: What its readiness probe last answered, how it ended, how many engines serve.
    note: str = ""
    #: The last answer to the question whether it is ready.
    unready: str = ""
    #: What it last said of itself, by sd_notify.
    status: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSeen:
    """One server of a fleet."""

    rank: int
    #: Of its lifecycle group: `active`, `recovering`, ...
    state: str = GroupState.STARTING.value
    #: Empty while it has none.
    url: str = ""
    #: How often it was started.
    starts: int = 0
    #: Why it does not serve; empty where it does.
    cause: str = ""


#: A step counts for the rate so long; the last few count however old they are.
_WINDOW_S = 120.0
_KEPT_AT_LEAST = 6


class Pace:
    """The rate of the last steps, and the time that is left."""

    def __init__(self, total: float | None) -> None:
        self._total = total
        #: `(UTC epoch seconds, step)`, oldest first.
        self._seen = deque[tuple[float, float]]()

    def snapshot(self) -> Pace:
        """As it is now, whatever is seen later."""
        pace = Pace(self._total)
        pace._seen.extend(self._seen)
        return pace

    @property
    def step(self) -> float | None:
        return self._seen[-1][1] if self._seen else None

    def see(self, at: float, step: float) -> None:
        if self._seen and step < self._seen[-1][1]:
            # It went back to a checkpoint.
            self._seen.clear()
        self._seen.append((at, step))
        while len(self._seen) > _KEPT_AT_LEAST and self._seen[0][0] < at - _WINDOW_S:
            self._seen.popleft()

    def per_second(self, now: float) -> float | None:
        """None while nobody can say. It falls while no step comes that is due."""
        if len(self._seen) < 2:
            return None
        (began, first), (last_at, last) = self._seen[0], self._seen[-1]
        if last <= first or last_at <= began:
            return None
        rate = (last - first) / (last_at - began)
        is_overdue = last != self._total and (now - last_at) * rate > 1
        return (last - first + 1) / (now - began) if is_overdue else rate

    def left_s(self, now: float) -> float | None:
        """Seconds until the last step; None while nobody can say."""
        rate = self.per_second(now)
        if rate is None or self._total is None or self.step is None:
            return None
        return max(0.0, (self._total - self.step) / rate)


#: Of an engine that is lost to its fleet, for now or for good.
_DOWN = frozenset({GroupState.INACTIVE, GroupState.RECOVERING, GroupState.RETIRED})


class RunSeen:
    """What is known of a run by its events. One thread at a time.

    What it says of an attempt is forgotten when the next one begins.
    """

    def __init__(self, spec: RunSpec) -> None:
        #: Of the components, in the order of their start.
        self.names = tuple(spec.components)
        #: Steps of the training, where that is known.
        self.total = spec.progress.total if spec.progress else None
        self.engines = spec.fleet.engines if spec.fleet is not None else 0
        #: The file `run.json`; None where it has none yet.
        self.record: Path | None = None
        #: What it does just now, in the words of its flow run's state.
        self.doing = ""
        #: Something has happened that is to be shown.
        self.has_begun = False
        self._begin(0, None)

    def snapshot(self) -> RunSeen:
        """As it is now, whatever is observed later; in no time, since others wait for it."""
        seen = copy.copy(self)
        seen.rows, seen._servers, seen.pace = {**self.rows}, {**self._servers}, self.pace.snapshot()
        return seen

    def _begin(self, attempt: int, directory: Path | None) -> None:
        #: The number of the attempt under way or the last one, and where its files are.
        self.attempt, self.directory = attempt, directory
        #: By name.
        self.rows = {name: Row(name=name) for name in self.names}
        self.pace = Pace(self.total)
        #: Of the lifecycle groups of a fleet, an engine each.
        self.groups: dict[int, GroupState] = {}
        #: By rank.
        self._servers: dict[int, ServerSeen] = {}
        #: Why it waits or stops; empty where it does neither.
        self.why = ""
        self.is_waiting = self.is_stopping = self._is_running = self._is_slow = False
        #: How the attempt failed.
        self.failure: Failure | None = None

    def observe(self, event: Event) -> None:
        """Take in an event of the run. Returns at once."""
        match event.name:
            case "run.opened":
                self.record = event.record
            case "attempt.begun" | "attempt.adopted":
                self._begin(event.attempt, event.directory)
                self.has_begun = True
            case "run.waiting":
                self.has_begun, self.is_waiting, self.why = True, True, event.message
                self.doing = f"waiting: {event.message}"
            case "run.state" if event.state == "pending_resources" and event.message:
                self.is_waiting, self.why = True, event.message
                self.doing = f"waiting: {event.message}"
            case "run.progress":
                self.pace.see(event.at, event.step)
                if self._is_slow:
                    self._is_slow, self.doing = False, self.running
            case "run.slow":
                self._is_slow, self.doing = True, event.message
            case "run.alarm":
                self.doing = f"alarm: {event.message}"
            case "attempt.ready":
                self._is_running, self.doing = True, self.running
            case "contact.lost":
                # A run whose cluster is away says Running: why it may not be so is to be seen.
                self.doing = f"no answer: {event.message}"
            case "contact.back":
                self.doing = f"{event.address} answers again"
            case "teardown.begun":
                self._is_running, self.is_stopping, self.why = False, True, event.reason
                self.doing = f"stopping: {event.reason}"
                for row in self.rows.values():
                    if row.stage in (Standing.STARTING, Standing.READY):
                        self._change(row.name, stage=Standing.STOPPING)
            case "rollout.failed":
                # Its process ends by it, and takes the other engines down.
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
                # Whoever looks from another thread sees the groups before it or after it.
                self.groups = {**self.groups, event.group: event.after}
                self._change(FLEET, note=f"{self.serving} of {self.engines} engines serve")
                if self._is_running:
                    self.doing = self.running
            case _ if event.component in self.rows:
                self._observe_component(self.rows[event.component], event)

    def _observe_component(self, row: Row, event: Event) -> None:
        name, note = row.name, row.note
        match event.name:
            case "component.starting":
                self.doing = f"starting {name}"
                self._change(name, stage=Standing.STARTING, began_at=event.at)
            case "component.spawned":
                self._change(name, stage=Standing.STARTING, pid=event.pid, began_at=event.at)
            case "job.state":
                self._change(name, note=job_text(event))
            case "probe.failed" if event.probe != "live":
                self._change(name, note=event.reason, unready=event.reason)
            case "component.ready":
                # What its probe said is over; where its job runs is not.
                is_lasting = note.startswith("job ") or (name == FLEET and "engines" in note)
                self._change(name, stage=Standing.READY, note=note if is_lasting else row.status)
            case "component.status":
                is_ready = row.stage is Standing.READY
                self._change(name, status=event.message, note=event.message if is_ready else note)
            case "component.drained":
                self._change(name, note=f"{note}, its part is done".lstrip(", "))
            case "component.exited":
                how = ending_text(event.exit_code, event.signal)
                self._change(name, stage=Standing.ENDED, ended_at=event.at, note=how)
            case "component.stuck":
                self._change(name, note="can't be ended")

    def _change(self, name: str, **changes: object) -> None:
        if name in self.rows:
            self.rows[name] = replace(self.rows[name], **changes)  # type: ignore[arg-type]

    @property
    def serving(self) -> int:
        """Engines that serve."""
        return sum(state in SERVING_STATES for state in self.groups.values())

    @property
    def is_degraded(self) -> bool:
        """Whether an engine of the fleet is lost, for now or for good."""
        return not _DOWN.isdisjoint(self.groups.values())

    @property
    def running(self) -> str:
        """`running: trainer, rollout`, and of a fleet how many engines serve, unless all do."""
        said = f"running: {', '.join(self.names)}"
        if not self.groups or self.serving == self.engines:
            return said
        return f"{said}; {FLEET} {self.serving} of {self.engines} engines serve"

    @property
    def servers(self) -> tuple[ServerSeen, ...]:
        """Of the fleet, in the order of their ranks."""
        return tuple(self._servers[rank] for rank in sorted(self._servers))

    def _server(self, rank: int) -> ServerSeen:
        return self._servers.get(rank) or ServerSeen(rank=rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run as it is at one moment."""

    #: UTC epoch seconds.
    at: float
    #: With its placeholders filled in, once an attempt has begun.
    spec: RunSpec
    record: RunJson
    place: RunPlace
    #: What its events tell beside the record; a copy of its own.
    seen: RunSeen
    #: The machine of its flow process.
    host: str = ""
    #: Why it has ended without an attempt; empty where it has not.
    message: str = ""
    #: Where its time goes; None while nobody knows.
    slow: Slow | None = None

    @property
    def failed(self) -> tuple[AttemptRecord, Failure] | None:
        """The last attempt, where it failed and nothing else has begun since."""
        attempt = self.record.attempt
        return (attempt, attempt.failure) if attempt and attempt.failure else None


#: With these a run stops its own components.
_STOPS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGKILL"})


def ending_of(one: ComponentRecord | Failure) -> str:
    """How something ended by itself: `killed by SIGSEGV`, `exit code 1`."""
    killed = "killed by " if one.signal else ""
    return killed + ending_text(one.exit_code, one.signal)


def ending_text(exit_code: int | None, signal: str | None) -> str:
    """`SIGTERM`, `exit code 1`."""
    return signal or f"exit code {'unknown' if exit_code is None else exit_code}"


def job_text(event: Event) -> str:
    """`job RUNNING, node 10.0.0.7`, of what a cluster says of a job."""
    return f"job {event.status}{f', {event.place}' if event.place else ''}"


def state_of(attempt: AttemptRecord, name: str) -> str:
    """What a component of an attempt does, or how it ended, which may be by the run's own hand."""
    seen, failure = attempt.components.get(name), attempt.failure
    if seen is None:
        return "never started" if attempt.ended_at else "not started"
    if seen.ended_at is None:
        return "starting" if seen.ready_at is None else "ready"
    is_first = failure is not None and failure.component == name and failure.has_ended
    if seen.signal in _STOPS and not is_first:
        return f"stopped by {seen.signal}"
    return ending_of(seen)
