"""The page of a run whose process is gone, as whoever has closed its record tells it.

Else it would go on to say what the run did at the time of its loss.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient

from tasks.record.places import RunPlace
from tasks.record.states import RunState
from tasks.server.artifacts import ATTEMPTS, COMPONENTS, RECORD, SUMMARY, TIMELINE, FlowArtifacts
from tasks.show.page import attempts_of, components_of, record_of, summary_of
from tasks.show.pictures import timeline_of
from tasks.show.view import RunView
from tasks.spec.loading import load_spec

_log = logging.getLogger(__name__)


def tell_closed(client: SyncPrefectClient, flow_run_id: str, directory: Path) -> None:
    """Have the page show what the record in a run's directory says.

    Never raises: a page that is not current keeps nobody from closing runs.
    """
    try:
        if (view := _view(RunPlace(directory=directory))) is not None:
            _tell(client, UUID(flow_run_id), view)
    except Exception as error:
        _log.warning("the page of %s is not current: %r", directory.name, error)


def _tell(client: SyncPrefectClient, flow_run_id: UUID, view: RunView) -> None:
    told = {
        SUMMARY: summary_of(view),
        COMPONENTS: components_of(view),
        TIMELINE: timeline_of(view),
        ATTEMPTS: attempts_of(view),
        RECORD: record_of(view),
    }
    # What it is made of was masked when it was written.
    artifacts = FlowArtifacts(flow_run_id, told, lambda said: said)
    for key, shown in told.items():
        artifacts.show(client, key, shown)


def _view(place: RunPlace) -> RunView | None:
    """None for a run that never began: its state says all there is."""
    record = json.loads(place.record.read_text(encoding="utf-8"))
    if not record["attempts"]:
        return None
    last = record["attempts"][-1]
    if RunState(record["state"]).is_final and last.get("decision") is None:
        last["decision"] = f"final: {record['state']}"
    return RunView(
        at=time.time(),
        spec=load_spec(place.attempt(last["number"]).spec),
        record=record,
        place=place,
        doing=record.get("message", ""),
        message=record.get("message", ""),
    )
