"""Translate the events of a run into the events that its Prefect server receives.

Events about probes, progress and teardown are not sent to the server. They are only written to
`events.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect.client.schemas.objects import FlowRun

from tasks.processes.identity import host_name
from tasks.record.events import PAYLOADS, SERVER_EVENT_NAMES, Event, listen_to_events
from tasks.record.states import RUNNING_STATES, GroupState, RunState
from tasks.server.events import Announcer, current_announcer, make_run_event
from tasks.server.server import find_lasting_api_url
from tasks.show.run_view import ObservedRun
from tasks.spec.secrets import mask_nested
from tasks.train.session import RunSession

#: Largest number of lines of a component's log in one event. Notifications contain these lines.
_MAX_TAIL_LINES = 15
#: Largest number of characters of a component's log in one event.
_MAX_TAIL_CHARACTERS = 2000


class RunAnnouncements:
    """Converts the events of one run into events for the Prefect server."""

    def __init__(self, run: RunSession) -> None:
        self._run = run
        fleet = run.spec.fleet
        #: Smallest number of active inference engines that the spec allows. None if the run has no
        #: inference servers.
        self._min_active = fleet.recovery.min_active if fleet is not None else None
        self._seen = ObservedRun(run.spec)
        self._seen.attempt = run.record.attempts

    def observe(self, event: Event) -> Iterator[Event]:
        """Yield the events for the Prefect server that result from an event of the run.

        Most events of the run result in no event for the server. The caller must iterate to the
        end, because the iteration also updates the state of this object.
        """
        seen = self._seen
        was_waiting = seen.is_waiting
        was_degraded = seen.is_degraded
        seen.observe(event)
        match event.name:
            case name if name in SERVER_EVENT_NAMES:
                yield self._make_server_event(SERVER_EVENT_NAMES[name], event)
            case "attempt.begun" | "attempt.adopted":
                yield self._make_server_event(
                    "muster.run.started",
                    event,
                    directory=str(event.directory),
                    is_adopted=event.name == "attempt.adopted",
                )
            case "run.waiting" if not was_waiting:
                # The run repeats this event whenever the reason changes. Report only the first
                # event.
                yield self._make_server_event("muster.run.waiting", event)
            case "run.state" if seen.is_waiting and not was_waiting:
                payload = {**self._describe_failure(), "message": event.message}
                yield self._make_server_event("muster.run.requeued", event, **payload)
            case "run.state" if event.state == RunState.FAILED.value:
                # Use the message of the failure instead of the event's message, which begins with
                # the failure kind. The payload has a separate key for this kind.
                payload = {
                    "component": None,
                    "message": event.message,
                    **self._describe_failure(),
                }
                yield self._make_server_event("muster.run.failed", event, **payload)
            case "run.state" if RunState(event.state).is_final:
                yield self._make_server_event(f"muster.run.{event.state}", event)
            case "component.diagnosed":
                yield self._make_server_event(
                    "muster.component.hung", event, message=seen.why, report=event.path
                )
            case "rollout.group.state" if not seen.is_stopping:
                if event.after is GroupState.RETIRED:
                    yield self._make_server_event("muster.rollout.engine.retired", event)
                elif event.after is GroupState.INACTIVE and event.before in RUNNING_STATES:
                    # The condition excludes failed restarts of an engine, because the failure that
                    # led to the restart was already reported.
                    yield self._make_server_event("muster.rollout.engine.failed", event)
                if seen.is_degraded != was_degraded:
                    change = "degraded" if seen.is_degraded else "restored"
                    yield self._make_server_event(f"muster.rollout.{change}", event)
            case "rollout.recovery.ended" if event.outcome == "recovered":
                yield self._make_server_event("muster.rollout.engine.recovered", event)
            case "rollout.failed":
                yield self._make_server_event("muster.rollout.floor", event, message=event.reason)

    def _describe_failure(self) -> dict[str, Any]:
        """Return the last attempt's failure with a shortened log, or {} if there is no failure."""
        failure = self._run.verdict.failure
        if failure is None:
            return {}
        last_lines = "\n".join(failure.log_tail.splitlines()[-_MAX_TAIL_LINES:])
        return failure.with_changes(log_tail=last_lines[-_MAX_TAIL_CHARACTERS:]).as_json()

    def _make_server_event(self, name: str, event: Event, **payload: Any) -> Event:
        """Return the event for the Prefect server that corresponds to an event of the run.

        The values of the payload come from the event of the run, from the run itself, and from the
        argument `payload`. Only the keys that the catalogue of events lists for this name are kept.

        Args:
            name: Name of the event on the Prefect server.
            event: The event of the run.
            payload: Further values of the payload. They replace fields of the event with the same
                name.
        """
        run = self._run
        seen = self._seen
        values = {
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
            **payload,
        }
        component = values["component"]
        values["log"] = str(run.attempt.log(component)) if component and run.attempt else None
        fields = {key: values.get(key) for key in PAYLOADS[name]}
        return Event(name=name, at=event.at, fields=fields)


@contextmanager
def announce_events(run: RunSession, flow_run: FlowRun) -> Iterator[None]:
    """Send the events of a run to its Prefect server while the context is open.

    A temporary Prefect server gets no events, because it ends with the run.
    """
    api_url = find_lasting_api_url()
    if not api_url:
        yield
        return
    announcements = RunAnnouncements(run)
    with Announcer(api_url) as announcer:

        def announce(event: Event) -> None:
            for server_event in announcements.observe(event):
                payload = mask_nested(server_event.fields, run.mask)
                prefect_event = make_run_event(
                    server_event.name,
                    flow_run,
                    run.run_id,
                    payload,
                    at=server_event.at,
                    tags=run.spec.tags,
                )
                announcer.announce(prefect_event, flow_run)

        token = current_announcer.set(announcer)
        try:
            with listen_to_events(announce):
                yield
        finally:
            current_announcer.reset(token)
