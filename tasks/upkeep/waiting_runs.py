"""Close the records of runs that end on the Prefect server while they have no process.

A run that waits for its next attempt has no process. If a user cancels a waiting run, its flow run
becomes Cancelled at once. No process starts again that could close the run's record. This host
therefore has a note file for each waiting run. `muster reconcile` reads the note files, and closes
the record of each run that has ended.

The artifacts of a run in the Prefect UI must be updated together with the run's record. The
artifacts also contain a copy of the record `run.json`. Hosts without a record of the run, or with
an older record, read this copy.
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
from prefect.exceptions import ObjectNotFound
from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.processes.registry import read_owner
from tasks.record.disk import write_json
from tasks.record.evaluations import EvaluationsJson
from tasks.record.events import EventLog
from tasks.record.places import RunPlace, muster_home, read_own_file
from tasks.record.run_json import RunJson, RunRecord
from tasks.record.states import RunState
from tasks.server.artifacts import Artifacts, find_artifacts
from tasks.server.flow_runs import ServerAway, cancel, connect_to_server, read_state
from tasks.show import page
from tasks.show.evaluations import show_evaluations
from tasks.show.pictures import show_timeline
from tasks.show.run_view import ObservedRun, RunView
from tasks.spec.loading import load_resolved
from tasks.upkeep.report import RunReport

_log = logging.getLogger(__name__)


def update_page_of_closed_run(client: SyncPrefectClient, flow_run_id: str, directory: Path) -> None:
    """Update the run's artifacts in the Prefect UI from the record in the run's directory.

    Errors are only logged, so that the caller can still finish its work.

    Args:
        client: Client of the Prefect server.
        flow_run_id: Id of the run's flow run.
        directory: Directory of the run.
    """
    place = RunPlace(directory=directory)
    try:
        record = RunJson.read(place.record).decided()
        if record.attempt is None:
            # No attempt has begun, so the run has no artifacts.
            return
        spec = load_resolved(place.attempt(record.attempt.number).spec)
        seen = ObservedRun(spec)
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
        evaluations = show_evaluations(place, spec.keep_best, view.at)
        if evaluations is not None:
            shown[page.EVALUATIONS] = evaluations
        # The content comes from the files of the run, in which secrets are already masked. So
        # `Artifacts` gets no function that masks secrets.
        artifacts = Artifacts(UUID(flow_run_id), shown)
        for key, content in shown.items():
            artifacts.show(client, key, content)
    except Exception as error:
        _log.warning("The page of %s in the UI was not updated: %r", directory.name, error)


def cancel_evaluations_of_closed_run(client: SyncPrefectClient, place: RunPlace) -> None:
    """Cancel the unfinished evaluations of a cancelled training.

    Call this after the record of the training has its final state. If the training was not
    cancelled, its evaluations continue. Errors are only logged, so that the cleanup of the training
    continues.

    Args:
        client: Client of the Prefect server.
        place: Directory of the training's run.
    """
    try:
        if RunJson.read(place.record).state is not RunState.CANCELLED:
            return
        for evaluation in EvaluationsJson.read(place).evaluations:
            if evaluation.state.is_active and evaluation.flow_run_id:
                with suppress(ObjectNotFound):
                    cancel(
                        client,
                        UUID(evaluation.flow_run_id),
                        "the training that saved the checkpoint was cancelled",
                    )
    except Exception as error:
        _log.warning("The evaluations of %s were not cancelled: %r", place.run_id, error)


def read_page_record(client: SyncPrefectClient, flow_run_id: UUID) -> RunJson | None:
    """Return the copy of `run.json` from a run's artifacts on the Prefect server.

    Returns:
        The copy, or None if the server has no copy.
    """
    artifacts = find_artifacts(client, flow_run_id, [page.RECORD])
    return page.parse_record(str(artifacts[0].data)) if artifacts else None


def read_earlier_record(api_url: str, flow_run_id: UUID) -> RunJson | None:
    """Return the copy of `run.json` on the Prefect server, for a process that resumes the run.

    Returns:
        The copy. None if there is no copy, or if the server does not answer. The process can resume
        the run without the records of earlier attempts, so it does not wait for the server.
    """
    try:
        with connect_to_server(api_url) as client:
            return read_page_record(client, flow_run_id)
    except ServerAway as error:
        _log.warning("Muster could not read the records of this run from other hosts: %s", error)
        return None


class WaitingRunNote(BaseModel):
    """Note file about a run that waits for its next attempt and has no process."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    #: Run id, which is also the name of the flow run.
    run_id: str
    #: Prefect id of the run's flow run.
    flow_run_id: str
    #: URL of the Prefect server that starts the run again.
    api_url: str


def note_waiting_run(run_id: str, flow_run_id: str, api_url: str) -> None:
    """Write the note file of a run that has no process while it waits for its next attempt.

    Args:
        run_id: Id of the run.
        flow_run_id: Prefect id of the run's flow run.
        api_url: URL of the Prefect server that starts the run again.

    Raises:
        OSError: The note file could not be written.
    """
    note = WaitingRunNote(run_id=run_id, flow_run_id=flow_run_id, api_url=api_url)
    path = _note_path(run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, note.model_dump(mode="json"), durable=True)


def forget_waiting_run(run_id: str) -> None:
    """Delete the note file of a run that has a process again or has ended."""
    _note_path(run_id).unlink(missing_ok=True)


def list_waiting_runs() -> list[str]:
    """Return the sorted ids of the runs of this host that wait without a process."""
    return sorted(path.stem for path in _note_path("").parent.glob("*.json"))


def close_ended_waiting_runs() -> Iterator[RunReport]:
    """Close the records of this host's runs that ended while they waited for their next attempt.

    These runs have no process that could close their records. A run is skipped if it is still
    waiting, if it has a process again, or if its Prefect server does not answer.

    Yields:
        A report for each run whose record was closed.
    """
    for run_id in list_waiting_runs():
        try:
            note = WaitingRunNote.model_validate_json(read_own_file(_note_path(run_id)))
            report = _close_if_ended(note)
            if report is not None:
                yield report
        except (OSError, ValidationError, ServerAway) as error:
            _log.debug("Waiting run %s was not checked: %s", run_id, error)
        except Exception:
            # A problem with one run must not prevent the check of the other runs.
            _log.exception("Muster could not check whether the waiting run %s has ended.", run_id)


def _close_if_ended(note: WaitingRunNote) -> RunReport | None:
    """Close the record of a waiting run if its flow run has ended, and return a report.

    Args:
        note: Note file about the run.

    Returns:
        The report, or None if the record was not closed.
    """
    if read_owner(note.run_id) is not None:
        # The run is in the registry, so the next process of the run has started. That process
        # closes the record. If the process is killed, the cleanup of lost runs closes the record.
        return None
    with connect_to_server(note.api_url) as client:
        state = read_state(client, note.flow_run_id)
        if state is not None and not state.is_final():
            return None
        page_record = None
        if state is not None:
            page_record = read_page_record(client, UUID(note.flow_run_id))
    record_state = _close_record(note, state, page_record)
    forget_waiting_run(note.run_id)
    if record_state is None:
        return None
    if state is not None:
        with suppress(ServerAway), connect_to_server(note.api_url) as client:
            place = RunPlace.of(note.run_id)
            cancel_evaluations_of_closed_run(client, place)
            update_page_of_closed_run(client, note.flow_run_id, place.directory)
    flow_run_text = f"is {state.name}" if state else "was deleted from the Prefect server"
    return RunReport(
        name=note.run_id,
        flow_run_id=note.flow_run_id,
        found=f"the run waited for its next attempt, but its flow run {flow_run_text}",
        record=record_state.value,
    )


def _close_record(
    note: WaitingRunNote, state: State[Any] | None, page_record: RunJson | None
) -> RunState | None:
    """Write the final state into a waiting run's record, or replace the record with `page_record`.

    Args:
        note: Note file about the run.
        state: State of the run's flow run, or None if the Prefect server does not have the flow
            run.
        page_record: Copy of the record from the run's artifacts on the Prefect server. Another
            host can have written this copy. None if there is no copy.

    Returns:
        The state that was written. None if the run is not waiting according to this host's record,
        or if the run has ended on another host.
    """
    place = RunPlace.of(note.run_id)
    try:
        local_record = RunJson.read(place.record)
    except (OSError, ValueError):
        return None

    # If both records have the same number of attempts, `page_record` is taken as the newer one.
    # Another host may have resumed the last attempt, without adding an attempt, and then written
    # `page_record`.
    is_newer = page_record is not None and len(page_record.attempts) >= len(local_record.attempts)
    if page_record is not None and page_record.state.is_final and is_newer:
        write_json(place.record, page_record.as_json(), durable=True)
        return None
    if local_record.state is not RunState.PENDING_RESOURCES:
        return None
    has_later_attempt = page_record is not None and (
        len(page_record.attempts) > len(local_record.attempts)
    )
    if state is not None and state.is_completed() and has_later_attempt:
        # The run has completed on another host, in an attempt that the record of this host does not
        # contain. So leave the record of this host unchanged.
        return None

    if state is not None and state.is_completed():
        # A user has set the flow run to Completed, although its last attempt did not complete. The
        # user has ended the run, so record the run as cancelled.
        new_state = RunState.CANCELLED
        message = "a user set the flow run to Completed while the run waited for its next attempt"
    elif state is None or state.is_cancelled():
        new_state = RunState.CANCELLED
        message = "cancelled while the run waited for its next attempt"
    else:
        new_state = RunState.FAILED
        message = (
            "the flow run ended on the Prefect server while the run waited for its next attempt: "
            f"{state.message or state.name}"
        )
    record = RunRecord(
        place.record, run_id=note.run_id, flow_run_id=note.flow_run_id, earlier=page_record
    )
    record.move(new_state, message)
    if record.attempts:
        events = EventLog(place.attempt(record.attempts).events)
        events.emit("run.state", state=new_state.value, message=message)
    return new_state


def _note_path(run_id: str) -> Path:
    return muster_home() / "parked" / f"{run_id}.json"
