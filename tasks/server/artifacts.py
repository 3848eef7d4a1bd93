"""The artifacts that Muster has on a Prefect server: those of a flow run, one of each key, kept
current in place; and reports, each one for itself.

A new one for each change would be shown beside all earlier ones. Prefect's own verbs would send
what an artifact shows a second time, as an event that the server keeps for days.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.client.schemas.objects import Artifact
from prefect.client.schemas.sorting import ArtifactSort
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_URL
from prefect.utilities.context import get_task_and_flow_run_ids

from tasks.server.flow_runs import talking_to
from tasks.show.view import Shown
from tasks.spec.words import picture

#: The keys of the artifacts of a run.
SUMMARY, COMPONENTS, TIMELINE = "summary", "components", "timeline"
REWARD, PROGRESS, ATTEMPTS = "reward", "progress", "attempts"
RECORD = "record"
_NOT_FOUND = 404

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


def run_log(own: logging.Logger) -> Log:
    """The log of the flow run of this context; without one, the module's own."""
    with suppress(MissingContextError):
        return get_run_logger()
    return own


def leave_report(key: str, markdown: str, summary: str, log: Log) -> None:
    """Leave an artifact beside all earlier ones of its key, on the flow run of this context if any.

    Never raises: what a report is about was done, and its lines are in the log.
    """
    if not (api_url := PREFECT_API_URL.value()):
        return
    task_run_id, flow_run_id = get_task_and_flow_run_ids()
    whose = {"task_run_id": task_run_id, "flow_run_id": flow_run_id}
    content = {"key": key, "type": "markdown", "data": markdown, "description": summary}
    content |= {name: str(id) for name, id in whose.items() if id is not None}
    try:
        with talking_to(api_url) as client:
            client.request("POST", "/artifacts/", json=content)
    except Exception as error:
        log.warning("the artifact was not made: %r", error)


def artifacts_of(
    client: SyncPrefectClient, flow_run_id: UUID, keys: Iterable[str]
) -> list[Artifact]:
    """Those of a flow run, the one that was updated last first."""
    return client.read_artifacts(
        artifact_filter=ArtifactFilter(
            key=ArtifactFilterKey(any_=list(keys)),
            flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]),
        ),
        sort=ArtifactSort.UPDATED_DESC,
    )


class FlowArtifacts:
    """Asks the server: use it from a thread that may wait. Each call may raise what httpx does."""

    def __init__(
        self, flow_run_id: UUID, keys: Iterable[str], mask: Callable[[str], str] = str
    ) -> None:
        """Of all the keys that there will be; `mask` takes secrets out of a text."""
        self._flow_run_id = flow_run_id
        self._keys = list(keys)
        self._mask = mask
        #: None until it was asked what an earlier process of the flow run has made.
        self._ids: dict[str, UUID] | None = None

    def show(self, client: SyncPrefectClient, key: str, shown: Shown) -> None:
        """Have the artifact of a key show this."""
        if self._ids is None:
            found = artifacts_of(client, self._flow_run_id, self._keys)
            self._ids = {one.key: one.id for one in reversed(found) if one.key}
        content = {"description": self._description(shown), "data": shown.data}
        if isinstance(shown.data, str):
            content["data"] = self._mask(shown.data)
        if key in self._ids and self._is_updated(client, self._ids[key], content):
            return
        whose = {"key": key, "type": shown.type, "flow_run_id": str(self._flow_run_id)}
        answer = client.request("POST", "/artifacts/", json={**whose, **content})
        self._ids[key] = UUID(answer.json()["id"])

    def _description(self, shown: Shown) -> str:
        words = self._mask(shown.headline)
        # Before it is a picture: what is masked in its code breaks it.
        return picture(self._mask(shown.picture), words) if shown.picture else words

    def _is_updated(
        self, client: SyncPrefectClient, artifact: UUID, content: dict[str, str | float]
    ) -> bool:
        """Whether it was still there to be updated."""
        place = {"id": str(artifact)}
        try:
            client.request("PATCH", "/artifacts/{id}", path_params=place, json=content)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == _NOT_FOUND:
                return False
            raise
        return True
