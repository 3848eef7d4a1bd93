"""Recognise the loss of a fleet process, and describe the last activity of its fleet."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from tasks.record.causes import read_tail
from tasks.record.events import Event, read_events
from tasks.record.outcome import Verdict
from tasks.record.places import AttemptPlace
from tasks.record.states import SERVING_STATES, GroupState
from tasks.spec.component import FLEET
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.formatting import join_commas

#: Matches the last message of the inference fleet's process after an error in the process itself.
#: Source: tasks/rollout/process.py, _print_last_line.
_OWN_REASON = re.compile(r"^FleetError: ", re.MULTILINE)
#: Text at the end of the field `cause` or `message` of some events. It says that an engine or a
#: weight sync has ended because the whole inference fleet is stopped.
#: Source: tasks/rollout/{fleet,sync}.py.
_STOPPED = "the fleet is stopped"


def recognize_fleet_loss(verdict: Verdict, place: AttemptPlace, engines: int) -> Verdict:
    """Return an attempt's result, with failure kind FLEET_LOST if the inference fleet's process
    died.

    The result is returned unchanged in three cases: another component failed first, the fleet
    process itself reported a reason, or the host ran out of memory.

    Args:
        verdict: Result of an attempt whose processes have all ended.
        place: Paths of the attempt's files.
        engines: Number of engines of the inference fleet.
    """
    failure = verdict.failure
    if failure is None or failure.component != FLEET or failure.kind is FailureKind.HOST_OOM:
        return verdict
    # If the fleet process and its parent process have died at the same time, the exit code of the
    # fleet process is unknown, and `failure.has_ended` is False. In this case, the value `exit` of
    # `failure.rule` shows that the fleet process has ended.
    has_ended = failure.has_ended or failure.rule == "exit"
    if not has_ended or _OWN_REASON.search(read_tail(place.log(FLEET))):
        return verdict

    activity = describe_fleet_activity(read_events(place.fleet_events), engines)
    lost = failure.with_changes(
        kind=FailureKind.FLEET_LOST,
        rule="fleet-lost",
        message=f"{failure.message}; when the process ended, {activity}",
    )
    return replace(verdict, message=str(lost), failure=lost)


def describe_fleet_activity(events: Iterable[Event], engines: int) -> str:
    """Return a phrase that describes the state of an inference fleet before the fleet was stopped.

    Example: `2 of 3 engines served requests, recovering: 2, weights were being synced`. Here, the
    engine with the index 2 was recovering.

    Args:
        events: Events of the fleet, oldest first.
        engines: Number of engines of the fleet.
    """
    states = dict.fromkeys(range(engines), GroupState.STARTING)
    is_syncing = False
    for event in events:
        if (event.cause or event.message).endswith(_STOPPED):
            # This event comes from the stop of the fleet. This event and all later events do not
            # show why the fleet failed.
            break
        match event.name:
            case "rollout.group.state":
                states[event.group] = event.after
            case "rollout.sync.begun":
                is_syncing = True
            case "rollout.sync.ended":
                is_syncing = False

    serving = sum(state in SERVING_STATES for state in states.values())
    parts = [f"{serving} of {engines} engines served requests"]
    for state in GroupState:
        engines_in_state = [
            engine for engine, engine_state in states.items() if engine_state is state
        ]
        if engines_in_state and state not in SERVING_STATES:
            parts.append(f"{state.value}: {join_commas(engines_in_state)}")
    if is_syncing:
        parts.append("weights were being synced")
    return ", ".join(parts)
