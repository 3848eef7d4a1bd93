"""Runs that wait without a process: a note of each on this machine, until its next process starts.

A flow run that is cancelled while it waits is Cancelled on its server at once, and no process of it
ever starts again; so `reconcile` looks after the notes, and closes the record of such a run.

Whoever has closed a record has its page say so, or that would go on to say what the run did before.
The page holds the record for a host that has none, or an older one.
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
from tasks.record.places import RunPlace, muster_home
from tasks.record.run_json import RunJson, RunRecord
from tasks.record.states import RunState
from tasks.server.artifacts import Artifacts, artifacts_of
from tasks.server.flow_runs import ServerAway, state_of, talking_to
from tasks.show import page
from tasks.show.pictures import timeline_of
from tasks.show.view import RunSeen, RunView
from tasks.spec.loading import load_resolved
from tasks.upkeep.report import Reconciled

_log = logging.getLogger(__name__)


def tell_closed(client: SyncPrefectClient, flow_run_id: str, directory: Path) -> None:
    """Have the page show what the record in a run's directory says.

    Never raises: a page that is not current keeps nobody from closing runs.
    """
    place = RunPlace(directory=directory)
    try:
        record = RunJson.read(place.record).decided()
        if record.attempt is None:
            # It never began: its state says all there is.
            return
        seen = RunSeen(spec := load_resolved(place.attempt(record.attempt.number).spec))
        seen.doing = said = record.message
        view = RunView(
            at=time.time(), spec=spec, record=record, place=place, seen=seen, message=said
        )
        shown = {
            page.SUMMARY: page.summary_of(view),
            page.COMPONENTS: page.components_of(view),
            page.TIMELINE: timeline_of(view),
            page.ATTEMPTS: page.attempts_of(view),
            page.RECORD: page.record_of(view),
        }
        # What it is made of was masked when it was written.
        artifacts = Artifacts(UUID(flow_run_id), shown)
        for key, what in shown.items():
            artifacts.show(client, key, what)
    except Exception as error:
        _log.warning("the page of %s is not current: %r", directory.name, error)


def record_kept(client: SyncPrefectClient, flow_run_id: UUID) -> RunJson | None:
    """The content of `run.json` as its host told it last; None where there is none."""
    found = artifacts_of(client, flow_run_id, [page.RECORD])
    return page.record_read(str(found[0].data)) if found else None


def earlier_record(api_url: str, flow_run_id: UUID) -> RunJson | None:
    """The same, for a process that is about to go on with the run.

    None, too, where the server does not say: a run that starts now is not held up by its past.
    """
    try:
        with talking_to(api_url) as client:
            return record_kept(client, flow_run_id)
    except ServerAway as error:
        _log.warning("what other hosts have on record of this run is not known: %s", error)
        return None


class Parked(BaseModel):
    """A run that waits without a process."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run_id: str
    flow_run_id: str
    #: The Prefect server that starts it again.
    api_url: str


def note_parked(run_id: str, flow_run_id: str, api_url: str) -> None:
    """Note a run that is about to be left without a process. Raises: OSError."""
    parked = Parked(run_id=run_id, flow_run_id=flow_run_id, api_url=api_url)
    path = _note(run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, parked.model_dump(mode="json"))


def forget_parked(run_id: str) -> None:
    """The run has a process again, or has ended."""
    _note(run_id).unlink(missing_ok=True)


def parked_runs() -> list[str]:
    """Run ids, in order."""
    return sorted(path.stem for path in _note("").parent.glob("*.json"))


def close_ended_parked() -> Iterator[Reconciled]:
    """Close the record of each run of this machine that came to its end while it waited.

    One that still waits, that has a process again or whose server is away is left as it is.
    """
    for run_id in parked_runs():
        try:
            parked = Parked.model_validate_json(_note(run_id).read_bytes())
            if (closed := _closed(parked)) is not None:
                yield closed
        except (OSError, ValidationError, ServerAway) as error:
            _log.debug("%s is left as it is: %s", run_id, error)
        except Exception:
            # The others shall not wait for this one.
            _log.exception("%s could not be looked after", run_id)


def _closed(parked: Parked) -> Reconciled | None:
    if owner_of(parked.run_id) is not None:
        # Its next process has come; if that is gone too, it is a lost run as any other.
        return None
    with talking_to(parked.api_url) as client:
        state = state_of(client, parked.flow_run_id)
        if state is not None and not state.is_final():
            return None
        kept = record_kept(client, UUID(parked.flow_run_id)) if state is not None else None
    record = _close_record(parked, state, kept)
    forget_parked(parked.run_id)
    if record is None:
        return None
    if state is not None:
        with suppress(ServerAway), talking_to(parked.api_url) as client:
            tell_closed(client, parked.flow_run_id, RunPlace.of(parked.run_id).directory)
    return Reconciled(
        name=parked.run_id,
        flow_run_id=parked.flow_run_id,
        found=f"it waited without a process, and is {state.name if state else 'no more'}",
        record=record.value,
    )


def _close_record(
    parked: Parked, state: State[Any] | None, kept: RunJson | None
) -> RunState | None:
    """The state that the record was given; None where it did not say that the run waits, or where
    the run came to its end on another host, whose record is here now.

    Args:
        kept: what another host, which may have been lost with the run, has told the server last.
    """
    place = RunPlace.of(parked.run_id)
    try:
        here = RunJson.read(place.record)
    except (OSError, ValueError):
        return None
    # As many as here: it went on there with the attempt that was under way.
    if kept is not None and kept.state.is_final and len(kept.attempts) >= len(here.attempts):
        write_json(place.record, kept.as_json())
        return None
    if here.state is not RunState.PENDING_RESOURCES or (state is not None and state.is_completed()):
        # Completed elsewhere: the record of that machine says how, and this one can't.
        return None
    if state is None or state.is_cancelled():
        after, message = RunState.CANCELLED, "cancelled while it waited for its next attempt"
    else:
        after, message = RunState.FAILED, f"while it waited: {state.message or state.name}"
    record = RunRecord(
        place.record, run_id=parked.run_id, flow_run_id=parked.flow_run_id, earlier=kept
    )
    record.move(after, message)
    if record.attempts:
        events = EventLog(place.attempt(record.attempts).events)
        events.emit("run.state", state=after.value, message=message)
    return after


def _note(run_id: str) -> Path:
    return muster_home() / "parked" / f"{run_id}.json"
