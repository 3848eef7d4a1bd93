"""Which of a run's own events its Prefect server is told of, and as what.

Probes, progress and the steps of a teardown are not among them: they are in `events.jsonl`.

The events of a run of this process for its Prefect server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prefect.client.schemas.objects import FlowRun

from tasks.processes.identity import host_name
from tasks.record.announcements import fields_of, payload_of
from tasks.record.events import Event, event_listeners
from tasks.record.outcome import Failure
from tasks.record.states import SERVING, GroupState, RunState
from tasks.server.events import Announcer, _announcer, of_run
from tasks.server.server import lasting_api_url
from tasks.train.session import RunSession

#: Those that are told as they are: the run's own name of each, and what it is told as.
TOLD: Mapping[str, str] = {
    "attempt.ready": "muster.run.ready",
    "component.spawned": "muster.component.started",
    "component.ready": "muster.component.ready",
    "component.drained": "muster.component.drained",
    "component.exited": "muster.component.exited",
    "component.stopped": "muster.component.stopped",
    "component.stuck": "muster.component.stuck",
}
_ENDED: Mapping[str, str] = {
    RunState.COMPLETED.value: "muster.run.completed",
    RunState.FAILED.value: "muster.run.failed",
    RunState.CANCELLED.value: "muster.run.cancelled",
}
#: Of an engine that is lost to the fleet, for now or for good.
_DOWN = frozenset({GroupState.INACTIVE, GroupState.RECOVERING, GroupState.RETIRED})
#: Of a log, so much goes into an event: notifications show it.
_TAIL_LINES, _TAIL_CHARACTERS = 15, 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An event for the Prefect server."""

    name: str
    #: UTC epoch seconds.
    at: float
    payload: Mapping[str, Any]

    @property
    def component(self) -> str | None:
        return self.payload.get("component")


class Story:
    """Turns the events of one run, in one process, into those for its Prefect server."""

    def __init__(
        self,
        *,
        common: Mapping[str, Any],
        log_of: Callable[[str], str | None],
        failure_of: Callable[[], Failure | None] = lambda: None,
        attempt: int = 0,
        engines: int = 0,
        min_active: int | None = None,
    ) -> None:
        """
        Args:
            common: `run_id`, `workload`, `host`.
            log_of: the log of a component, of the attempt under way.
            failure_of: that of the run, as far as it is known.
            attempt: the last one of the run's earlier processes.
            engines: of its fleet; 0: it has none.
        """
        self._common = common
        self._log_of = log_of
        self._failure_of = failure_of
        self._attempt = attempt
        self._engines, self._min_active = engines, min_active
        self._states: dict[int, GroupState] = {}
        self._reason = ""
        self._is_waiting = self._is_stopping = self._is_degraded = False
        self.has_ended = False

    def observe(self, event: Event) -> Iterator[Told]:
        """What is told of an event of the run; nothing of most. Take in all of it."""
        match event.name:
            case name if name in TOLD:
                yield self._of_event(TOLD[name], event)
            case "attempt.begun" | "attempt.adopted":
                yield self._begun(event)
            case "run.waiting" if not self._is_waiting:
                # Told anew whenever the reason changes.
                self._is_waiting = True
                yield self._told("muster.run.waiting", event.at, message=event.fields["message"])
            case "teardown.begun":
                self._is_stopping, self._reason = True, event.fields["reason"]
            case "component.diagnosed":
                more = {"message": self._reason, "report": event.fields["path"]}
                yield self._of_event("muster.component.hung", event, **more)
            case "run.state":
                yield from self._state(event)
            case "rollout.group.state" if not self._is_stopping:
                yield from self._engine(event)
            case "rollout.recovery.ended" if event.fields["outcome"] == "recovered":
                what = {**event.fields, "engine": event.fields["group"]}
                yield self._of_event("muster.rollout.engine.recovered", event, **what)
            case "rollout.failed":
                # Its process ends by it, and takes the other engines down.
                self._is_stopping = True
                more = {**self._fleet(), "message": event.fields["reason"]}
                yield self._of_event("muster.rollout.floor", event, **more)

    def ended(self, state: RunState, message: str, at: float) -> Told:
        """How the run ended, where no event has said so: it never came to an attempt."""
        return self._end(_ENDED[state.value], message, at)

    def _begun(self, event: Event) -> Told:
        self._attempt = event.fields["attempt"]
        self._states.clear()
        self._is_waiting = self._is_stopping = self._is_degraded = False
        return self._told(
            "muster.run.started",
            event.at,
            directory=str(event.fields["directory"]),
            resume_from=event.fields["resume_from"],
            is_adopted=event.name == "attempt.adopted",
        )

    def _state(self, event: Event) -> Iterator[Told]:
        state, message = event.fields["state"], event.fields["message"]
        if state == RunState.PENDING_RESOURCES.value and message and not self._is_waiting:
            self._is_waiting = True
            failure = self._failure()
            known = {"kind": failure.get("kind"), "component": failure.get("component")}
            yield self._told("muster.run.requeued", event.at, message=message, **known)
        elif state in _ENDED:
            yield self._end(_ENDED[state], message, event.at)

    def _end(self, name: str, message: str, at: float) -> Told:
        self.has_ended = True
        if name != "muster.run.failed":
            return self._told(name, at, message=message)
        known = self._failure()
        component = known.get("component")
        known["log"] = self._log_of(component) if component else None
        known["log_tail"] = _end_of(str(known.get("log_tail") or ""))
        # Without the kind, which has a key of its own.
        known["message"] = known.get("message") or message
        return self._told(name, at, **_known_to(name, known))

    def _failure(self) -> dict[str, Any]:
        failure = self._failure_of()
        return dict(failure.as_json()) if failure is not None else {}

    def _engine(self, event: Event) -> Iterator[Told]:
        before, after = (GroupState(event.fields[key]) for key in ("before", "after"))
        self._states[event.fields["group"]] = after
        what = {**event.fields, "engine": event.fields["group"]}
        if after is GroupState.RETIRED:
            yield self._of_event("muster.rollout.engine.retired", event, **what)
        elif after is GroupState.INACTIVE and before is not GroupState.RECOVERING:
            # Each further try that fails is not a failure of its own.
            yield self._of_event("muster.rollout.engine.failed", event, **what)
        is_down = any(state in _DOWN for state in self._states.values())
        if is_down == self._is_degraded:
            return
        self._is_degraded = is_down
        name = "muster.rollout.degraded" if is_down else "muster.rollout.restored"
        yield self._of_event(name, event, **{**what, **self._fleet()})

    def _fleet(self) -> dict[str, Any]:
        serving = sum(state in SERVING for state in self._states.values())
        return {"serving": serving, "engines": self._engines, "min_active": self._min_active}

    def _of_event(self, name: str, event: Event, **more: Any) -> Told:
        known = {**event.fields, **more, "component": event.component}
        if event.component is not None:
            known["log"] = self._log_of(event.component)
        return self._told(name, event.at, **_known_to(name, known))

    def _told(self, name: str, at: float, **known: Any) -> Told:
        common = {**self._common, "attempt": self._attempt}
        return Told(name=name, at=at, payload=payload_of(name, **_known_to(name, common), **known))


def _known_to(name: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Of all that is known, what the event has a key for."""
    fields = fields_of(name)
    return {key: value for key, value in known.items() if key in fields}


def _end_of(text: str) -> str:
    return "\n".join(text.splitlines()[-_TAIL_LINES:])[-_TAIL_CHARACTERS:]


_log = logging.getLogger(__name__)


@contextmanager
def announced(run: RunSession, flow_run: FlowRun) -> Iterator[None]:
    """While open, the Prefect server is told what happens to a run, and at the end how it ended.

    Not a temporary one: nobody looks at its events, and it ends with the run.
    """
    if not (api_url := lasting_api_url()):
        yield
        return
    story = _story_of(run)
    with Announcer(api_url) as announcer:

        def tell(one: Told) -> None:
            payload = _masked(one.payload, run.mask)
            event = of_run(one.name, flow_run, run.run_id, payload, at=one.at, tags=run.spec.tags)
            announcer.tell(event, flow_run)

        def observe(event: Event) -> None:
            try:
                for one in story.observe(event):
                    tell(one)
            except Exception:
                _log.exception("%s of %s is not announced", event.name, run.run_id)

        token = event_listeners.set((*event_listeners.get(), observe))
        own_token = _announcer.set(announcer)
        try:
            yield
        finally:
            event_listeners.reset(token)
            _announcer.reset(own_token)
            if run.record.state.is_final and not story.has_ended:
                tell(story.ended(run.record.state, run.verdict.message, time.time()))


def _story_of(run: RunSession) -> Story:
    fleet = run.spec.fleet

    def log_of(component: str) -> str | None:
        return str(run.attempt.log(component)) if run.attempt is not None else None

    return Story(
        common={"run_id": run.run_id, "workload": run.spec.workload, "host": host_name()},
        log_of=log_of,
        failure_of=lambda: run.verdict.failure,
        attempt=run.record.attempts,
        engines=fleet.engines if fleet is not None else 0,
        min_active=fleet.recovery.min_active if fleet is not None else None,
    )


def _masked(value: Any, mask: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {key: _masked(one, mask) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(one, mask) for one in value]
    return value
