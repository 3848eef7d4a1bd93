"""Translate the events of a run into the events that its Prefect server receives.

Events of probes, progress and teardown steps are not sent. They are only in `events.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect.client.schemas.objects import FlowRun

from tasks.processes.identity import host_name
from tasks.record.events import PAYLOADS, SERVER_EVENT_NAMES, Event, listen_to_events
from tasks.record.states import RUNNING_STATES, GroupState, RunState
from tasks.server.events import Announcer, announcer_here, of_run
from tasks.server.server import lasting_api_url
from tasks.show.view import RunSeen
from tasks.spec.secrets import mask_nested
from tasks.train.session import RunSession

#: Largest part of a log tail in an event, in lines and characters. Notifications show this part.
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
        """Yield the server events, with payloads, that follow from an event of the run.

        Most events yield nothing. The caller must exhaust the iterator.
        """
        seen = self._seen
        was_waiting, was_degraded = seen.is_waiting, seen.is_degraded
        seen.observe(event)
        match event.name:
            case name if name in SERVER_EVENT_NAMES:
                yield self._make_server_event(SERVER_EVENT_NAMES[name], event)
            case "attempt.begun" | "attempt.adopted":
                is_adopted, directory = event.name == "attempt.adopted", str(event.directory)
                more = {"directory": directory, "is_adopted": is_adopted}
                yield self._make_server_event("muster.run.started", event, **more)
            case "run.waiting" if not was_waiting:
                # Sent again whenever the reason changes.
                yield self._make_server_event("muster.run.waiting", event)
            case "run.state" if seen.is_waiting and not was_waiting:
                known = {**self._failure(), "message": event.message}
                yield self._make_server_event("muster.run.requeued", event, **known)
            case "run.state" if event.state == RunState.FAILED.value:
                # The message omits the kind, because the payload has a separate key for the kind.
                known = {"component": None, "message": event.message, **self._failure()}
                yield self._make_server_event("muster.run.failed", event, **known)
            case "run.state" if RunState(event.state).is_final:
                yield self._make_server_event(f"muster.run.{event.state}", event)
            case "component.diagnosed":
                more = {"message": seen.why, "report": event.path}
                yield self._make_server_event("muster.component.hung", event, **more)
            case "rollout.group.state" if not seen.is_stopping:
                if event.after is GroupState.RETIRED:
                    yield self._make_server_event("muster.rollout.engine.retired", event)
                elif event.after is GroupState.INACTIVE and event.before in RUNNING_STATES:
                    # A failed restart of an engine that is already inactive is not reported again.
                    yield self._make_server_event("muster.rollout.engine.failed", event)
                if seen.is_degraded != was_degraded:
                    how = "degraded" if seen.is_degraded else "restored"
                    yield self._make_server_event(f"muster.rollout.{how}", event)
            case "rollout.recovery.ended" if event.outcome == "recovered":
                yield self._make_server_event("muster.rollout.engine.recovered", event)
            case "rollout.failed":
                yield self._make_server_event("muster.rollout.floor", event, message=event.reason)

    def _failure(self) -> dict[str, Any]:
        if (failure := self._run.verdict.failure) is None:
            return {}
        tail = "\n".join(failure.log_tail.splitlines()[-_TAIL_LINES:])[-_TAIL_CHARACTERS:]
        return failure.with_changes(log_tail=tail).as_json()

    def _make_server_event(self, name: str, event: Event, **more: Any) -> Event:
        """Return the server event `name` with the payload keys that its definition lists."""
        run, seen = self._run, self._seen
        known = {
            "component": event.component,
            "engine": event.group,
            **event.fields,
            "run_id": run.run_id,
            "workload": run.spec.workload,
            "attempt": seen.attempt,
            "host": host_name(),
            "serving": seen.serving,
            "engines": seen.engines,
            "min_active": self._min_active,
            **more,
        }
        component = known["component"]
        known["log"] = str(run.attempt.log(component)) if component and run.attempt else None
        return Event(name=name, at=event.at, fields={key: known.get(key) for key in PAYLOADS[name]})


@contextmanager
def announced(run: RunSession, flow_run: FlowRun) -> Iterator[None]:
    """Send the events of a run to its Prefect server while the context is open.

    A temporary Prefect server gets no events, because it ends with the run.
    """
    if not (api_url := lasting_api_url()):
        yield
        return
    announcements = RunAnnouncements(run)
    with Announcer(api_url) as announcer:

        def observe(event: Event) -> None:
            for one in announcements.observe(event):
                known = mask_nested(one.fields, run.mask)
                told = of_run(one.name, flow_run, run.run_id, known, at=one.at, tags=run.spec.tags)
                announcer.tell(told, flow_run)

        own_token = announcer_here.set(announcer)
        try:
            with listen_to_events(observe):
                yield
        finally:
            announcer_here.reset(own_token)
