"""Two tables on the Prefect server that are kept current: the queue of a work pool, and its nodes.

Each is one artifact, updated in place: the server copies what is updated to where its UI looks for
the latest of a key, and a new version for each change would pile up beside all earlier ones.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import ArtifactCollectionFilter, ArtifactCollectionFilterKey

from tasks.queue.reasons import one_line
from tasks.queue.tables import Rows, node_rows, queue_rows, summary_of
from tasks.queue.view import QueueView

_log = logging.getLogger(__name__)

#: A table shows no more rows.
ROWS_AT_MOST = 200
_TABLE = "table"
_NOT_FOUND = 404


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """What one artifact shows, but for the time."""

    rows: str
    text: str


class QueueArtifacts:
    """Keeps the two tables of a work pool current. For one asyncio task at a time."""

    def __init__(
        self,
        client: PrefectClient,
        *,
        every_s: float = 2.0,
        renewed_every_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            client: Stays the caller's to close.
            every_s: What changes sooner after the last change than so is left to a later `show`.
            renewed_every_s: What was written so long ago is written again, changed or not: another
                gate may have written meanwhile.
        """
        self._client = client
        self._every_s = every_s
        self._renewed_every_s = renewed_every_s
        self._clock = clock
        self._ids: dict[str, UUID] = {}
        self._shown: dict[str, _Shown] = {}
        self._told_at: dict[str, float] = {}
        self._has_failed = False

    async def show(self, view: QueueView) -> None:
        """Have the tables show this, where they do not yet.

        A server that refuses or does not answer is noted in the log; the next call tries again.
        """
        queue, nodes = keys_of(view.pool)
        try:
            await self._keep(queue, _shown(view, queue_rows(view), "waiting runs"), view.at)
            await self._keep(nodes, _shown(view, node_rows(view), "nodes"), view.at)
        except httpx.HTTPError as error:
            # Once is enough: a gate looks each few seconds.
            level = logging.DEBUG if self._has_failed else logging.WARNING
            _log.log(level, "the tables of the queue are not current: %r", error)
            self._has_failed = True
        else:
            self._has_failed = False

    async def _keep(self, key: str, shown: _Shown, at: float) -> None:
        now = self._clock()
        is_same = self._shown.get(key) == shown
        if now - self._told_at.get(key, -1e9) < (
            self._renewed_every_s if is_same else self._every_s
        ):
            return
        said = f"{shown.text}\n\nAs of {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC; "
        said += "rewritten when it changes, and each minute."
        content = {"description": said, "data": shown.rows}
        found = self._ids.get(key)
        if found is None or not await self._updated(found, content):
            # Not made yet, or made by an earlier gate, or deleted by somebody meanwhile.
            found = await self._find(key)
            if found is None or not await self._updated(found, content):
                new = ArtifactCreate(key=key, type=_TABLE, **content)
                found = (await self._client.create_artifact(new)).id
        self._ids[key], self._shown[key], self._told_at[key] = found, shown, now

    async def _find(self, key: str) -> UUID | None:
        of_key = ArtifactCollectionFilter(key=ArtifactCollectionFilterKey(any_=[key]))
        latest = await self._client.read_latest_artifacts(artifact_filter=of_key, limit=1)
        return latest[0].latest_id if latest and latest[0].type == _TABLE else None

    async def _updated(self, artifact: UUID, content: Mapping[str, str]) -> bool:
        """Whether it was still there to be updated."""
        # Prefect's `update_artifact` would send the whole table once more, as an event that the
        # server keeps for days.
        place = {"id": artifact}
        try:
            await self._client.request(
                "PATCH", "/artifacts/{id}", path_params=place, json=dict(content)
            )
        except httpx.HTTPStatusError as error:
            if error.response.status_code == _NOT_FOUND:
                return False
            raise
        return True


def keys_of(pool: str) -> tuple[str, str]:
    """The keys of a pool's artifacts, queue and nodes: `gang-queue` and `gang-nodes`; others begin
    with their pool's name."""
    slug = re.sub(r"[^a-z0-9]+", "-", pool.lower()).strip("-")
    if pool in ("", "gang"):
        before = ""
    elif slug == pool:
        before = f"{pool}-"
    else:
        # What a key can't hold is gone: the digest keeps `a b` and `a/b` apart.
        before = f"{slug}-{sha256(pool.encode()).hexdigest()[:6]}-".lstrip("-")
    return f"{before}gang-queue", f"{before}gang-nodes"


def _shown(view: QueueView, rows: Rows, what: str) -> _Shown:
    lines = [f"- {one_line(line)}" for line in summary_of(view)]
    if len(rows) > ROWS_AT_MOST:
        lines.append(f"- the first {ROWS_AT_MOST} of {len(rows)} {what}")
    return _Shown(rows=json.dumps(list(rows[:ROWS_AT_MOST])), text="\n".join(lines))
