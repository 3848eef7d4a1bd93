"""Runs that wait without a process, each recorded in a note on this host.

A run that waits for its next attempt has no process. If it is cancelled meanwhile, its flow run
becomes Cancelled at once and no process of the run starts again. `reconcile` therefore checks the
notes and closes the record of such a run.

A run's page on the Prefect server must be updated together with its record. The page also contains
a copy of the record, for hosts that have no record of the run or an older one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.processes.registry import owner_of
from tasks.record.disk import write_json
from tasks.record.events import EventLog
from tasks.record.places import RunPlace, muster_home, read_own_file
from tasks.record.run_json import RunJson, RunRecord
from tasks.record.states import RunState
from tasks.server.artifacts import Artifacts, artifacts_of
from tasks.server.flow_runs import ServerAway, state_of, talking_to
from tasks.show import page
from tasks.show.pictures import show_timeline
from tasks.show.view import RunSeen, RunView
from tasks.spec.loading import load_resolved
from tasks.upkeep.report import Reconciled

_log = logging.getLogger(__name__)


def update_page_of_closed_run(client: SyncPrefectClient, flow_run_id: str, directory: Path) -> None:
    """Update the run's page on the server from the record in the run's directory.

    Never raises: an outdated page must not keep a run from being closed.
    """
    place = RunPlace(directory=directory)
    try:
        record = RunJson.read(place.record).decided()
        if record.attempt is None:
            # No attempt began, so the flow run's state says everything.
            return
        spec = load_resolved(place.attempt(record.attempt.number).spec)
        seen = RunSeen(spec)
        seen.doing = record.message
        view = RunView(
            at=time.time(),
            spec=spec,
            record=record,
            place=place,
            seen=seen,
            message=record.message,
        )
        shown = {
            page.SUMMARY: page.show_summary(view),
            page.COMPONENTS: page.show_components(view),
            page.TIMELINE: show_timeline(view),
            page.ATTEMPTS: page.show_attempts(view),
            page.RECORD: page.show_record(view),
        }
        # The texts come from files whose secrets are masked already.
        artifacts = Artifacts(UUID(flow_run_id), shown)
        for key, content in shown.items():
            artifacts.show(client, key, content)
    except Exception as error:
        _log.warning("the page of %s is not current: %r", directory.name, error)


def read_page_record(client: SyncPrefectClient, flow_run_id: UUID) -> RunJson | None:
    """Return the copy of `run.json` that is on the run's page, or None if there is none."""
    artifacts = artifacts_of(client, flow_run_id, [page.RECORD])
    return page.parse_record(str(artifacts[0].data)) if artifacts else None


def read_earlier_record(api_url: str, flow_run_id: UUID) -> RunJson | None:
    """Return the copy of `run.json` on the run's page, for a process that continues the run.

    Returns:
        None if there is no copy or the server does not answer. A run that starts now must not wait
        for the records of its earlier attempts.
    """
    try:
        with talking_to(api_url) as client:
            return read_page_record(client, flow_run_id)
    except ServerAway as error:
        _log.warning("what other hosts have on record of this run is not known: %s", error)
        return None


class WaitingRunNote(BaseModel):
    """The note of a run that waits without a process."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run_id: str
    flow_run_id: str
    #: URL of the Prefect server that starts the run again.
    api_url: str


def note_waiting_run(run_id: str, flow_run_id: str, api_url: str) -> None:
    """Write the note of a run whose process is about to exit.

    Raises:
        OSError: The note could not be written.
    """
    parked = WaitingRunNote(run_id=run_id, flow_run_id=flow_run_id, api_url=api_url)
    path = _note_path(run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, parked.model_dump(mode="json"))


def forget_waiting_run(run_id: str) -> None:
    """Delete the note of a run that has a process again or has ended."""
    _note_path(run_id).unlink(missing_ok=True)


def list_waiting_runs() -> list[str]:
    """Return the ids of the runs that wait on this host, sorted."""
    return sorted(path.stem for path in _note_path("").parent.glob("*.json"))


def close_ended_waiting_runs() -> Iterator[Reconciled]:
    """Close the record of each run of this host that ended while it waited without a process.

    A run that still waits, that has a process again, or whose server does not answer is left as it
    is.
    """
    for run_id in list_waiting_runs():
        try:
            parked = WaitingRunNote.model_validate_json(read_own_file(_note_path(run_id)))
            report = _close_if_ended(parked)
            if report is not None:
                yield report
        except (OSError, ValidationError, ServerAway) as error:
            _log.debug("%s is left as it is: %s", run_id, error)
        except Exception:
            # Continue with the other runs.
            _log.exception("%s could not be looked after", run_id)


def _close_if_ended(parked: WaitingRunNote) -> Reconciled | None:
    """Close the run's record if its flow run has ended. Returns None if nothing was changed."""
    if owner_of(parked.run_id) is not None:
        # The next process of the run has started. If it was killed, the run is a lost run.
        return None
    with talking_to(parked.api_url) as client:
        state = state_of(client, parked.flow_run_id)
        if state is not None and not state.is_final():
            return None
        page_record = None
        if state is not None:
            page_record = read_page_record(client, UUID(parked.flow_run_id))
    record_state = _close_record(parked, state, page_record)
    forget_waiting_run(parked.run_id)
    if record_state is None:
        return None
    if state is not None:
        with suppress(ServerAway), talking_to(parked.api_url) as client:
            update_page_of_closed_run(
                client, parked.flow_run_id, RunPlace.of(parked.run_id).directory
            )
    return Reconciled(
        name=parked.run_id,
        flow_run_id=parked.flow_run_id,
        found=f"it waited without a process, and is {state.name if state else 'no more'}",
        record=record_state.value,
    )


def _close_record(
    parked: WaitingRunNote, state: State[Any] | None, page_record: RunJson | None
) -> RunState | None:
    """Give the run's record its final state, or replace it by the record of another host.

    Args:
        parked: The note of the run.
        state: State of the flow run, or None if the server does not know it.
        page_record: Copy of the record on the run's page. Another host, which may be lost by now,
            can have written it. None if there is no copy.

    Returns:
        The new state. None if the record did not say that the run waits, or if the run ended on
        another host.
    """
    place = RunPlace.of(parked.run_id)
    try:
        local_record = RunJson.read(place.record)
    except (OSError, ValueError):
        return None

    # Another host may have continued the attempt that ran here, so its record can have the same
    # number of attempts.
    is_newer = page_record is not None and len(page_record.attempts) >= len(local_record.attempts)
    if page_record is not None and page_record.state.is_final and is_newer:
        write_json(place.record, page_record.as_json())
        return None
    if local_record.state is not RunState.PENDING_RESOURCES:
        return None
    if state is not None and state.is_completed():
        # The run completed on another host. Only that host's record says how.
        return None

    if state is None or state.is_cancelled():
        new_state = RunState.CANCELLED
        message = "cancelled while it waited for its next attempt"
    else:
        new_state = RunState.FAILED
        message = f"while it waited: {state.message or state.name}"
    record = RunRecord(
        place.record, run_id=parked.run_id, flow_run_id=parked.flow_run_id, earlier=page_record
    )
    record.move(new_state, message)
    if record.attempts:
        events = EventLog(place.attempt(record.attempts).events)
        events.emit("run.state", state=new_state.value, message=message)
    return new_state


def _note_path(run_id: str) -> Path:
    return muster_home() / "parked" / f"{run_id}.json"
