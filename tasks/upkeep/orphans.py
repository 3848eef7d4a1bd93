"""End the runs of this host that work although their flow run has ended or was deleted.

The process of a run reads its flow run every two seconds, and ends the run itself, see
`tasks.server.interruption`. This module finds a run whose process fails to do so.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound

from tasks.processes.registry import Owner, find_living_owner, registered_runs, send_to_owner
from tasks.record.cancellation_note import write_note
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.record.states import RunState
from tasks.server.flow_runs import (
    ServerAway,
    connect_to_server,
    is_flow_run_missing,
    read_server_time,
)
from tasks.upkeep.report import RunReport

_log = logging.getLogger(__name__)

#: Time from the end of a flow run on the server until Muster sends SIGTERM to the flow run's
#: process. In this time, the process can end the run by itself.
_SETTLED_AFTER = timedelta(seconds=30)
#: States of a run that is ending or has ended.
_ENDING_STATES = (RunState.STOPPING, RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED)


def end_orphans() -> Iterator[RunReport]:
    """End each run of this host whose flow run has ended or was deleted, and yield a report.

    The flow process of the run gets SIGTERM, and stops the run's components with their grace
    periods. A run is skipped if it is ending already, or if its Prefect server does not answer.
    """
    for run_id in registered_runs():
        owner = find_living_owner(run_id)
        if owner is None or not _is_working(owner):
            continue
        try:
            reason = _find_end_of_flow_run(owner)
            if reason:
                yield _end_orphan(owner, reason)
        except ServerAway as error:
            _log.debug("Run %s was not checked: %s", run_id, error)
        except Exception:
            # A problem with one run must not prevent the check of the other runs.
            _log.exception(
                "Muster could not find out whether the Prefect flow run of the run %s has ended.",
                run_id,
            )


def _is_working(owner: Owner) -> bool:
    """Return True if a run is neither ending nor ended, according to its `run.json`.

    False if `run.json` cannot be read.

    Args:
        owner: The process that supervises the run.
    """
    if owner.directory is None:
        return False
    try:
        record = RunJson.read(RunPlace(directory=owner.directory).record)
    except (OSError, ValueError):
        return False
    return record.state not in _ENDING_STATES


def _find_end_of_flow_run(owner: Owner) -> str:
    """Return a phrase about the end of a run's flow run. Empty if the flow run has not ended.

    Raises:
        ServerAway: The Prefect server does not answer.
    """
    if owner.flow_run_id is None or owner.api_url is None:
        return ""
    with connect_to_server(owner.api_url) as client:
        try:
            state = client.read_flow_run(UUID(owner.flow_run_id)).state
        except ObjectNotFound as error:
            return "the flow run was deleted" if is_flow_run_missing(error) else ""
        if state is None or not state.is_final() or _is_recent(client, state):
            return ""
        return f"the flow run is {state.name}"


def _is_recent(client: SyncPrefectClient, state: State[object]) -> bool:
    """Return True if a state is so new that the run's own process may still react to it."""
    now = read_server_time(client) or datetime.now(UTC)
    return now - state.timestamp < _SETTLED_AFTER


def _end_orphan(owner: Owner, reason: str) -> RunReport:
    """Send SIGTERM to the flow process of a run, and return the report about the run."""
    pid = owner.process.pid
    if owner.directory is not None:
        # A signal carries no text. So write a note that tells the process why the run is cancelled.
        write_note(owner.directory, f"cancelled, because {reason} on the Prefect server")
    try:
        send_to_owner(owner, signal.SIGTERM)
        still_open = f"Muster sent SIGTERM to process {pid}, which is now stopping the run"
    except PermissionError as error:
        still_open = f"process {pid} cannot be ended: {error}"
    return RunReport(
        name=owner.run_id,
        flow_run_id=owner.flow_run_id,
        found=f"{reason}, but the flow process (pid {pid}) is still running",
        open=still_open,
    )
