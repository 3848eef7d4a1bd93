"""Events of an attempt: a line each in `events.jsonl`, and the same to whoever listens; and those
that the Prefect server is told.

`docs/events.md` has every event of both with its fields, to which a test holds whoever emits one or
reads it, and `Event` each field with its type. What another version has written beside them is kept
as it is; what it has not reads as nothing.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from tasks.record.disk import DiskThread
from tasks.record.outcome import Failure
from tasks.record.states import GroupState
from tasks.spec.secrets import masked_in

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _Field(Generic[T]):
    """Reads a field of an event; what is not there, null or not of its kind is `otherwise`."""

    def __init__(
        self, otherwise: T, read: Callable[[Any], T] = lambda value: value, key: str = ""
    ) -> None:
        self._otherwise, self._read, self._key = otherwise, read, key

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = self._key or name

    def __get__(self, event: Event, owner: type) -> T:
        value = event.fields.get(self._key)
        if value is not None:
            with suppress(ValueError, TypeError):
                return self._read(value)
        return self._otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a run. Of its fields those are properties that anybody reads."""

    #: UTC epoch seconds.
    at: float
    #: `component.ready`, `teardown.begun`, `run.state`, ...
    name: str
    #: The component it happened to; None for the run as a whole.
    component: str | None = None
    #: What else is known, as `docs/events.md` has it.
    fields: Mapping[str, Any] = field(default_factory=dict)

    address = _Field("")
    after = _Field(GroupState.STARTING, GroupState)
    after_s = _Field(0.0, float)
    attempt = _Field(0, int)
    before = _Field(GroupState.STARTING, GroupState)
    cause = _Field("", str)
    directory = _Field(Path(), Path)
    exit_code = _Field[int | None](None)
    failure = _Field[Failure | None](None, Failure.model_validate)
    #: By node, the share of the time in which its GPUs are at work.
    gpus = _Field[Mapping[str, float]]({}, dict)
    group = _Field(0, int)
    #: Of a recovery.
    id = _Field("", str)
    is_adopted = _Field(False, bool)
    killed = _Field[tuple[str, ...]]((), tuple)
    #: What could not be ended.
    left = _Field[Collection[object]](())
    message = _Field("", str)
    misses = _Field(0, int)
    outcome = _Field("", str)
    path = _Field("", str)
    pid = _Field[int | None](None)
    pids = _Field[tuple[int | str, ...]]((), tuple)
    #: Where a job runs: `node 10.0.0.7`.
    place = _Field("", str)
    #: `live` of a probe of liveness.
    probe = _Field("", str)
    rank = _Field(0, int)
    ranks = _Field[tuple[int, ...]]((), tuple)
    reason = _Field("", str)
    record = _Field[Path | None](None, Path)
    #: Of a fleet: `p50`, `p99` and `max` seconds of those that were answered since the last time.
    requests = _Field[Mapping[str, float]]({}, dict)
    resume_from = _Field[str | None](None)
    run_id = _Field("", str)
    #: `SIGTERM`.
    signal = _Field[str | None](None)
    #: Of a run.
    state = _Field("", str)
    #: Of a job, as its cluster says it.
    status = _Field("", str)
    step = _Field(0.0, float)
    submission_id = _Field("", str)
    text = _Field("", str)
    took_s = _Field(0.0, float)
    #: The number of a try, from 1.
    tried = _Field(1, int, "try")
    #: Machines of which nobody can say what a component has left there.
    unseen = _Field[tuple[str, ...]]((), tuple)
    url = _Field("", str)
    why = _Field("", str)

    @staticmethod
    def of_line(line: str | bytes) -> Event:
        """Raises: ValueError, for what is no event."""
        try:
            content = json.loads(line)
            at, name = float(content.pop("at")), str(content.pop("event"))
            component = content.pop("component", None)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not an event: {error!r}") from error
        return Event(at=at, name=name, component=component, fields=content)

    def as_line(self) -> str:
        head: dict[str, Any] = {"at": self.at, "event": self.name}
        if self.component is not None:
            head["component"] = self.component
        return json.dumps({**head, **self.fields}, default=str)


Listener = Callable[[Event], None]
#: Takes an event's name, the component it happened to, and its fields: `EventLog.emit`.
Emit = Callable[..., None]


class EventLog:
    """Writes events to a file and hands each to its listeners, in order, one at a time.

    Safe from any thread. A disk that is full, or a listener that fails, costs a warning and never
    the run: supervision must not depend on bookkeeping.
    """

    def __init__(
        self,
        path: Path | None,
        listeners: tuple[Listener, ...] = (),
        *,
        mask: Callable[[str], str] = lambda text: text,
        clock: Callable[[], float] = time.time,
        disk: DiskThread | None = None,
    ) -> None:
        """
        Args:
            path: None: they are told, and written nowhere.
            mask: takes secrets out of a text.
            disk: writes the file, until there is room for it; None: whoever emits does, once.
        """
        self._path = path
        self._listeners = listeners
        self._mask = mask
        self._clock = clock
        self._disk = disk
        self._lock = threading.RLock()

    def emit(
        self, name: str, component: str | None = None, *, at: float | None = None, **fields: Any
    ) -> None:
        """
        Args:
            at: UTC epoch seconds of what another process saw; None: now.
        """
        with self._lock:
            clean = masked_in(fields, self._mask)
            seen_at = self._clock() if at is None else at
            event = Event(at=seen_at, name=name, component=component, fields=clean)
            self._write(event)
            for listener in self._listeners:
                try:
                    listener(event)
                except Exception:
                    _log.exception("event %s of %s: a listener failed", name, self._path)

    def _write(self, event: Event) -> None:
        if self._path is None:
            return
        if self._disk is not None:
            self._disk.append(self._path, event.as_line())
            return
        try:
            with self._path.open("a", encoding="utf-8") as f:
                f.write(event.as_line() + "\n")
        except OSError as error:
            _log.warning("event %s not written to %s: %s", event.name, self._path, error)


#: Told every event of the runs of this context.
event_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("event_listeners", default=())


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """While open, the listener is told every event of the runs of this context."""
    token = event_listeners.set((*event_listeners.get(), listener))
    try:
        yield
    finally:
        event_listeners.reset(token)


#: Of a run that has a process.
_RUN = ("run_id", "workload", "attempt", "host")
#: Of a run as the queue knows it.
_QUEUED = ("run_id", "pool", "queue")
_COMPONENT = (*_RUN, "component", "pid", "submission_id", "log")
_ENGINE = (*_RUN, "component", "engine", "ranks")
_FLEET = (*_RUN, "component", "serving", "engines", "min_active")
_FAILURE = ("kind", "component", "exit_code", "signal", "message", "hint", "log", "log_tail")

#: The keys of each event's payload: always all of them, null where nothing is known.
PAYLOADS: Mapping[str, tuple[str, ...]] = {
    "muster.run.waiting": (*_QUEUED, "message"),
    "muster.run.admitted": (*_QUEUED, "nodes", "gpus", "waited_s"),
    "muster.run.offered": (*_QUEUED, "nodes"),
    "muster.run.started": (*_RUN, "directory", "resume_from", "is_adopted"),
    "muster.run.ready": _RUN,
    "muster.run.requeued": (*_RUN, "kind", "component", "message"),
    "muster.run.completed": (*_RUN, "message"),
    "muster.run.failed": (*_RUN, *_FAILURE),
    "muster.run.cancelled": (*_RUN, "message"),
    "muster.run.reconciled": (
        *("found", "killed", "jobs", "nodes", "removed", "record", "server", "open"),
    ),
    "muster.run.alarm": (*_RUN, "rule", "metric", "step", "value", "message"),
    "muster.run.slow": (*_RUN, "step", "median_s", "message"),
    "muster.component.started": _COMPONENT,
    "muster.component.ready": (*_COMPONENT, "after_s"),
    "muster.component.drained": _COMPONENT,
    "muster.component.exited": (*_COMPONENT, "exit_code", "signal"),
    "muster.component.hung": (*_COMPONENT, "message", "report"),
    "muster.component.stopped": _COMPONENT,
    "muster.component.stuck": (*_COMPONENT, "pids"),
    "muster.rollout.degraded": (*_FLEET, "engine", "ranks", "cause"),
    "muster.rollout.restored": _FLEET,
    "muster.rollout.floor": (*_FLEET, "message"),
    "muster.rollout.engine.failed": (*_ENGINE, "cause"),
    "muster.rollout.engine.recovered": (*_ENGINE, "took_s"),
    "muster.rollout.engine.retired": (*_ENGINE, "cause"),
    "muster.node.drained": ("node", "pool", "by", "reason", "until"),
    "muster.node.undrained": ("node", "pool", "by"),
}

#: The run's own events that are announced as they are, and as what.
ANNOUNCED_AS: Mapping[str, str] = {
    "attempt.ready": "muster.run.ready",
    "run.alarm": "muster.run.alarm",
    "run.slow": "muster.run.slow",
    "component.spawned": "muster.component.started",
    **{
        f"component.{name}": f"muster.component.{name}"
        for name in ("ready", "drained", "exited", "stopped", "stuck")
    },
}


def payload_of(name: str, **known: Any) -> dict[str, Any]:
    """The payload of an event. Raises: KeyError, for a name or a key that `PAYLOADS` lacks."""
    if strange := set(known).difference(PAYLOADS[name]):
        raise KeyError(f"{name} has no {', '.join(sorted(strange))}")
    return {key: known.get(key) for key in PAYLOADS[name]}
