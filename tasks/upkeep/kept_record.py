"""The record of a run that its Prefect server keeps, for a host that has none, or an older one."""

from __future__ import annotations

import logging
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.client.schemas.sorting import ArtifactSort

from tasks.server.artifacts import RECORD
from tasks.server.flow_runs import ServerAway, talking_to
from tasks.show.page import record_read

_log = logging.getLogger(__name__)


def record_kept(client: SyncPrefectClient, flow_run_id: UUID) -> dict[str, Any] | None:
    """The content of `run.json` as its host told it last; None where there is none."""
    found = client.read_artifacts(
        artifact_filter=ArtifactFilter(
            key=ArtifactFilterKey(any_=[RECORD]),
            flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]),
        ),
        sort=ArtifactSort.UPDATED_DESC,
        limit=1,
    )
    return record_read(str(found[0].data)) if found else None


def earlier_record(api_url: str, flow_run_id: UUID) -> dict[str, Any] | None:
    """The same, for a process that is about to go on with the run.

    None, too, where the server does not say: a run that starts now is not held up by its past.
    """
    try:
        with talking_to(api_url) as client:
            return record_kept(client, flow_run_id)
    except ServerAway as error:
        _log.warning("what other hosts have on record of this run is not known: %s", error)
        return None
