"""Which of a run's own events are announced to its Prefect server, and as what.

Probes, progress and the steps of a teardown are not among them: they are in `events.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prefect.client.schemas.objects import FlowRun

from tasks.processes.identity import host_name
from tasks.record.events import ANNOUNCED_AS, PAYLOADS, Event, listening
from tasks.record.states import RUNNING, GroupState, RunState
from tasks.server.events import Announcer, announcer_here, of_run
from tasks.server.server import lasting_api_url
from tasks.show.view import RunSeen
from tasks.spec.secrets import masked_in
from tasks.train.session import RunSession

_ENDED: Mapping[str, str] = {
    RunState.COMPLETED.value: "muster.run.completed",
    RunState.FAILED.value: "muster.run.failed",
    RunState.CANCELLED.value: "muster.run.cancelled",
}
#: Of a log, so much goes into an event: notifications show it.
_TAIL_LINES, _TAIL_CHARACTERS = 15, 2000


class RunAnnouncements:
    """Turns the events of one run, in one process, into those for its Prefect server."""

    def __init__(self, run: RunSession) -> None:
        self._run = run
        fleet = run.spec.fleet
        self._min_active = fleet.recovery.min_active if fleet is not None else None
        self._seen = RunSeen(run.spec)
        self._seen.attempt = run.record.attempts

    def observe(self, event: Event) -> Iterator[Event]:
        """What is told of an event of the run, each with its payload; nothing of most. Take in all
        of it."""
        seen = self._seen
        was_waiting, was_degraded = seen.is_waiting, seen.is_degraded
        seen.observe(event)
        match event.name:
            case name if name in ANNOUNCED_AS:
                yield self._of_event(ANNOUNCED_AS[name], event)
            case "attempt.begun" | "attempt.adopted":
                is_adopted, directory = event.name == "attempt.adopted", str(event.directory)
                more = {"directory": directory, "is_adopted": is_adopted}
                yield self._of_event("muster.run.started", event, **more)
            case "run.waiting" if not was_waiting:
                # Announced anew whenever the reason changes.
                yield self._of_event("muster.run.waiting", event)
            case "run.state" if seen.is_waiting and not was_waiting:
                known = {**self._failure(), "message": event.message}
                yield self._of_event("muster.run.requeued", event, **known)
            case "run.state" if event.state in _ENDED:
                yield self._end(_ENDED[event.state], event.message, event.at)
            case "component.diagnosed":
                more = {"message": seen.why, "report": event.path}
                yield self._of_event("muster.component.hung", event, **more)
            case "rollout.group.state" if not seen.is_stopping:
                yield from self._engine(event, was_degraded=was_degraded)
            case "rollout.recovery.ended" if event.outcome == "recovered":
                yield self._of_event("muster.rollout.engine.recovered", event, engine=event.group)
            case "rollout.failed":
                more = {**self._fleet(), "message": event.reason}
                yield self._of_event("muster.rollout.floor", event, **more)

    def _end(self, name: str, message: str, at: float) -> Event:
        if name != "muster.run.failed":
            return self._told(name, at, message=message)
        known = self._failure()
        component = known.get("component")
        known["log"] = self._log_of(component) if component else None
        tail = str(known.get("log_tail") or "").splitlines()[-_TAIL_LINES:]
        known["log_tail"] = "\n".join(tail)[-_TAIL_CHARACTERS:]
        # Without the kind, which has a key of its own.
        known["message"] = known.get("message") or message
        return self._told(name, at, **known)

    def _failure(self) -> dict[str, Any]:
        failure = self._run.verdict.failure
        return failure.as_json() if failure is not None else {}

    def _log_of(self, component: str) -> str | None:
        attempt = self._run.attempt
        return str(attempt.log(component)) if attempt is not None else None

    def _engine(self, event: Event, *, was_degraded: bool) -> Iterator[Event]:
        what = {"engine": event.group, **self._fleet()}
        if event.after is GroupState.RETIRED:
            yield self._of_event("muster.rollout.engine.retired", event, **what)
        elif event.after is GroupState.INACTIVE and event.before in RUNNING:
            # Each further try that fails is not a failure of its own.
            yield self._of_event("muster.rollout.engine.failed", event, **what)
        is_degraded = self._seen.is_degraded
        if is_degraded != was_degraded:
            name = "muster.rollout.degraded" if is_degraded else "muster.rollout.restored"
            yield self._of_event(name, event, **what)

    def _fleet(self) -> dict[str, Any]:
        seen, floor = self._seen, self._min_active
        return {"serving": seen.serving, "engines": seen.engines, "min_active": floor}

    def _of_event(self, name: str, event: Event, **more: Any) -> Event:
        known = {"component": event.component, **event.fields, **more}
        if event.component is not None:
            known["log"] = self._log_of(event.component)
        return self._told(name, event.at, **known)

    def _told(self, name: str, at: float, **known: Any) -> Event:
        known |= {"run_id": self._run.run_id, "workload": self._run.spec.workload}
        known |= {"host": host_name(), "attempt": self._seen.attempt}
        return Event(name=name, at=at, fields={key: known.get(key) for key in PAYLOADS[name]})


@contextmanager
def announced(run: RunSession, flow_run: FlowRun) -> Iterator[None]:
    """While open, the Prefect server is told what happens to a run, and at the end how it ended.

    Not a temporary one: nobody looks at its events, and it ends with the run.
    """
    if not (api_url := lasting_api_url()):
        yield
        return
    announcements = RunAnnouncements(run)
    with Announcer(api_url) as announcer:

        def observe(event: Event) -> None:
            for one in announcements.observe(event):
                known = masked_in(one.fields, run.mask)
                told = of_run(one.name, flow_run, run.run_id, known, at=one.at, tags=run.spec.tags)
                announcer.tell(told, flow_run)

        own_token = announcer_here.set(announcer)
        try:
            with listening(observe):
                yield
        finally:
            announcer_here.reset(own_token)
