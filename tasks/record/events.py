"""Events of an attempt: a line each in `events.jsonl`, and the same to whoever listens."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a run."""

    #: UTC epoch seconds.
    at: float
    #: `component.ready`, `teardown.begun`, `run.state`, ...
    name: str
    #: The component it happened to; None for the run as a whole.
    component: str | None = None
    #: What else is known: `pid`, `exit_code`, `step`, ...
    fields: Mapping[str, Any] = field(default_factory=dict)

    def as_line(self) -> str:
        head: dict[str, Any] = {"at": self.at, "event": self.name}
        if self.component is not None:
            head["component"] = self.component
        return json.dumps({**head, **self.fields}, default=str)


Listener = Callable[[Event], None]


class EventLog:
    """Writes events to a file and hands each to its listeners, in order, one at a time.

    Safe from any thread. A disk that is full, or a listener that fails, costs a warning and never
    the run: supervision must not depend on bookkeeping.
    """

    def __init__(
        self,
        path: Path,
        listeners: tuple[Listener, ...] = (),
        *,
        mask: Callable[[str], str] = lambda text: text,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            mask: takes secrets out of a text.
        """
        self._path = path
        self._listeners = listeners
        self._mask = mask
        self._clock = clock
        self._lock = threading.RLock()

    def emit(
        self, name: str, component: str | None = None, *, at: float | None = None, **fields: Any
    ) -> None:
        """
        Args:
            at: UTC epoch seconds of what another process saw; None: now.
        """
        with self._lock:
            clean = {key: self._clean(value) for key, value in fields.items()}
            seen_at = self._clock() if at is None else at
            event = Event(at=seen_at, name=name, component=component, fields=clean)
            try:
                with self._path.open("a", encoding="utf-8") as f:
                    f.write(event.as_line() + "\n")
            except OSError as error:
                _log.warning("event %s not written to %s: %s", name, self._path, error)
            for listener in self._listeners:
                try:
                    listener(event)
                except Exception:
                    _log.exception("event %s of %s: a listener failed", name, self._path.parent)

    def _clean(self, value: object) -> object:
        if isinstance(value, str):
            return self._mask(value)
        if isinstance(value, (list, tuple)):
            return [self._clean(item) for item in value]
        return value


#: Told every event of the runs of this context; the terminal listens here.
event_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("event_listeners", default=())
