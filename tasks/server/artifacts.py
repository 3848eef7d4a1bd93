"""The artifacts of one flow run on its Prefect server: one of each key, kept current in place.

A new one for each change would be shown beside all earlier ones. Prefect's own verbs would send
what an artifact shows a second time, as an event that the server keeps for days.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)

from tasks.show.view import Shown
from tasks.spec.words import picture

#: The keys of the artifacts of a run.
SUMMARY, COMPONENTS, TIMELINE = "summary", "components", "timeline"
REWARD, PROGRESS, ATTEMPTS = "reward", "progress", "attempts"
RECORD = "record"
_NOT_FOUND = 404


class FlowArtifacts:
    """Asks the server: use it from a thread that may wait. Each call may raise what httpx does."""

    def __init__(self, flow_run_id: UUID, keys: Iterable[str], mask: Callable[[str], str]) -> None:
        """
        Args:
            keys: all that there will be.
            mask: takes secrets out of a text.
        """
        self._flow_run_id = flow_run_id
        self._keys = list(keys)
        self._mask = mask
        #: None until it was asked what an earlier process of the flow run has made.
        self._ids: dict[str, UUID] | None = None

    def show(self, client: SyncPrefectClient, key: str, shown: Shown) -> None:
        """Have the artifact of a key show this."""
        if self._ids is None:
            self._ids = self._found(client)
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

    def _found(self, client: SyncPrefectClient) -> dict[str, UUID]:
        made = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                key=ArtifactFilterKey(any_=self._keys),
                flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run_id]),
            )
        )
        return {artifact.key: artifact.id for artifact in made if artifact.key}

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
