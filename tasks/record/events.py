"""Events of an attempt, which are written to `events.jsonl`, and events for the Prefect server.

`docs/events.md` lists all events with their fields. A test checks that the code agrees with this
list. `Event` has a typed property for each field that Muster reads. If an event comes from another
version of Muster, unknown fields are kept, and missing fields have their default value.
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
from tasks.spec.secrets import mask_nested

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _Field(Generic[T]):
    """Descriptor for a property of `Event` that returns a converted field of the event."""

    def __init__(
        self, default: T, convert: Callable[[Any], T] = lambda value: value, key: str = ""
    ) -> None:
        """
        Args:
            default: Value of the property if the field is missing, null, or cannot be converted.
            convert: Function that converts the JSON value to the type of the property.
            key: Name of the field. Empty if the field has the same name as the property.
        """
        self._default = default
        self._convert = convert
        self._key = key

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = self._key or name

    def __get__(self, event: Event, owner: type) -> T:
        value = event.fields.get(self._key)
        if value is not None:
            with suppress(ValueError, TypeError):
                return self._convert(value)
        return self._default


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event in the history of a run, such as the end of a component.

    The fields that Muster itself reads are also properties. `docs/events.md` describes all fields.
    """

    #: Time of the event in UTC epoch seconds.
    at: float
    #: Name of the event, such as `component.ready` or `run.state`.
    name: str
    #: Name of the component, or None if the event belongs to the whole run.
    component: str | None = None
    #: Mapping from the names of further fields of the event to their values.
    fields: Mapping[str, Any] = field(default_factory=dict)

    address = _Field("")
    after = _Field(GroupState.STARTING, GroupState)
    after_s = _Field(0.0, float)
    attempt = _Field(0, int)
    before = _Field(GroupState.STARTING, GroupState)
    cause = _Field("", str)
    #: True if a warning says that the first step of an attempt contradicts its checkpoint.
    contradicts_resume = _Field(False, bool)
    directory = _Field(Path(), Path)
    exit_code = _Field[int | None](None)
    failure = _Field[Failure | None](None, Failure.model_validate)
    #: Mapping from each node to its GPU utilisation, from 0 to 1.
    gpus = _Field[Mapping[str, float]]({}, dict)
    group = _Field(0, int)
    #: Id of a recovery of failed engines.
    id = _Field("", str)
    is_adopted = _Field(False, bool)
    killed = _Field[tuple[str, ...]]((), tuple)
    #: Leftover processes that Muster could not end.
    left = _Field[Collection[object]](())
    message = _Field("", str)
    misses = _Field(0, int)
    outcome = _Field("", str)
    path = _Field("", str)
    pid = _Field[int | None](None)
    pids = _Field[tuple[int | str, ...]]((), tuple)
    #: Node of a Ray job, such as `node 10.0.0.7`, or path of a file or folder that does not
    #: respond.
    place = _Field("", str)
    #: Kind of a health check. The value `live` stands for a liveness probe.
    probe = _Field("", str)
    rank = _Field(0, int)
    ranks = _Field[tuple[int, ...]]((), tuple)
    reason = _Field("", str)
    record = _Field[Path | None](None, Path)
    #: Response times of the inference servers since the previous event with this field, in
    #: seconds. The keys are `p50`, `p99` and `max`.
    requests = _Field[Mapping[str, float]]({}, dict)
    resume_from = _Field[str | None](None)
    #: Record of the checkpoint that Muster chose for an attempt, with the keys `from`, `rule`,
    #: `refused` and `notes`.
    resume = _Field[Mapping[str, Any]]({}, dict)
    run_id = _Field("", str)
    #: Name of a signal, such as `SIGTERM`.
    signal = _Field[str | None](None)
    #: Time at which a file or folder stopped responding, in UTC epoch seconds.
    since = _Field(0.0, float)
    #: State of the run.
    state = _Field("", str)
    #: Status of a Ray job as Ray reports it, such as `RUNNING`.
    status = _Field("", str)
    step = _Field(0.0, float)
    submission_id = _Field("", str)
    text = _Field("", str)
    took_s = _Field(0.0, float)
    #: Number of this try to recover a failed engine, counted from 1.
    tried = _Field(1, int, "try")
    #: Texts about machines on which Muster could not search for leftover processes of a component.
    unseen = _Field[tuple[str, ...]]((), tuple)
    url = _Field("", str)
    why = _Field("", str)
    #: Longest time in seconds for which a stop waits until a component has saved its checkpoint.
    within_s = _Field(0.0, float)

    @staticmethod
    def from_line(line: str | bytes) -> Event:
        """Return the event in a line of `events.jsonl`.

        Raises:
            ValueError: The line does not contain an event.
        """
        try:
            content = json.loads(line)
            at = float(content.pop("at"))
            name = str(content.pop("event"))
            component = content.pop("component", None)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the line is not an event of Muster: {error!r}") from error
        return Event(at=at, name=name, component=component, fields=content)

    def as_line(self) -> str:
        """Return the event as a line of `events.jsonl`, without a newline."""
        head: dict[str, Any] = {"at": self.at, "event": self.name}
        if self.component is not None:
            head["component"] = self.component
        return json.dumps({**head, **self.fields}, default=str)


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events in an event log, or nothing if the file does not exist."""
    with suppress(OSError), path.open("rb") as f:
        for line in f:
            # Skip an invalid line, because the last line may be incomplete.
            with suppress(ValueError):
                yield Event.from_line(line)


Listener = Callable[[Event], None]
#: Type of the method `EventLog.emit`.
Emit = Callable[..., None]


class EventLog:
    """Writes events to a file, and passes each event to the listeners in order.

    The methods can be called from any thread. If the file cannot be written or a listener fails,
    the error is only logged, so that for example a full disk does not end the run.
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
            path: The file, or None to pass events only to the listeners.
            listeners: Functions that are called with each event, one event at a time.
            mask: Function that returns a text with its secrets masked.
            clock: Function that returns the current time in UTC epoch seconds.
            disk: Thread that writes the file, and retries if the disk is full. If None, `emit`
                writes the file itself and does not retry.
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
        """Write an event and pass it to the listeners.

        Args:
            name: Name of the event.
            component: Name of the component, or None if the event belongs to the whole run.
            at: Time of the event in UTC epoch seconds, or None for the current time.
            fields: Further fields of the event. Secrets in them are masked.
        """
        with self._lock:
            masked_fields = mask_nested(fields, self._mask)
            time_of_event = self._clock() if at is None else at
            event = Event(at=time_of_event, name=name, component=component, fields=masked_fields)
            self._write(event)
            for listener in self._listeners:
                try:
                    listener(event)
                except Exception:
                    _log.exception(
                        "An error occurred in a function that processes the event %s of %s",
                        name,
                        self._path,
                    )

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
            _log.warning(
                "The event %s could not be written to %s: %s", event.name, self._path, error
            )


#: Functions that are called with each event of the runs that are started in the current context.
event_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("event_listeners", default=())


@contextmanager
def listen_to_events(listener: Listener) -> Iterator[None]:
    """Call a function with each event of the runs that are started inside the `with` block.

    The function is stored in a context variable (`contextvars`).
    """
    token = event_listeners.set((*event_listeners.get(), listener))
    try:
        yield
    finally:
        event_listeners.reset(token)


#: Keys in the payload of each event about a run whose flow process has started.
_RUN = ("run_id", "workload", "attempt", "host")
#: Keys in the payload of each event about a queued run.
_QUEUED = ("run_id", "pool", "queue")
_COMPONENT = (*_RUN, "component", "pid", "submission_id", "log")
_ENGINE = (*_RUN, "component", "engine", "ranks")
_FLEET = (*_RUN, "component", "serving", "engines", "min_active")
_FAILURE = ("kind", "component", "exit_code", "signal", "message", "hint", "log", "log_tail")

#: Mapping from the name of each event for the Prefect server to the keys of its payload. A payload
#: always contains all its keys. An unknown value is null.
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
        "found",
        "killed",
        "jobs",
        "nodes",
        "removed",
        "record",
        "server",
        "open",
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

#: Events that Muster writes into `events.jsonl` and also sends to the Prefect server. Each key is
#: the name of an event in `events.jsonl`. The value is the name of the event on the server.
SERVER_EVENT_NAMES: Mapping[str, str] = {
    "attempt.ready": "muster.run.ready",
    "run.alarm": "muster.run.alarm",
    "run.slow": "muster.run.slow",
    "component.spawned": "muster.component.started",
    "component.ready": "muster.component.ready",
    "component.drained": "muster.component.drained",
    "component.exited": "muster.component.exited",
    "component.stopped": "muster.component.stopped",
    "component.stuck": "muster.component.stuck",
}


def build_payload(name: str, **values: Any) -> dict[str, Any]:
    """Return the payload of an event for the Prefect server, with None for missing values.

    Raises:
        KeyError: `PAYLOADS` has no such event, or the event has no such key.
    """
    if unknown_keys := set(values).difference(PAYLOADS[name]):
        raise KeyError(f"the event {name} has no key {', '.join(sorted(unknown_keys))}")
    return {key: values.get(key) for key in PAYLOADS[name]}
