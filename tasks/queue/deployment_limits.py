"""Read the concurrency limits of deployments from the Prefect server.

The server refuses to start a run if its deployment has reached its concurrency limit. The scheduler
must know this before it grants GPUs to the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import ConcurrencyLimitStrategy

#: Largest number of deployments in one answer of the server.
_PAGE = 200
#: Time, in seconds, between two readings of a deployment that has no concurrency limit. A new limit
#: need not be noticed at once, because the server itself enforces the limit.
_READ_AGAIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentLimit:
    """The concurrency limit of a deployment."""

    #: Largest number of active runs.
    limit: int
    #: Number of active runs according to the server.
    active: int = 0
    #: True if the server cancels a new run while `limit` other runs are active. False if the new
    #: run waits.
    skips: bool = False


@dataclass(slots=True)
class DeploymentLimitReader:
    """Reads the concurrency limits of deployments from the Prefect server."""

    _client: PrefectClient
    #: Mapping from a deployment without a limit to the monotonic time of the last reading.
    _unlimited: dict[UUID, float] = field(default_factory=dict)

    async def read(self, ids: Collection[UUID]) -> dict[UUID, DeploymentLimit]:
        """Return the concurrency limits of deployments, as a mapping from deployment id to limit.

        Deployments without a limit are not in the result.

        Raises:
            httpx.HTTPError, PrefectException: The server did not answer.
        """
        now = time.monotonic()
        needed = [
            str(id) for id in ids if now - self._unlimited.get(id, -math.inf) >= _READ_AGAIN_S
        ]
        self._unlimited = {id: at for id, at in self._unlimited.items() if id in ids}
        limits = {}
        for start in range(0, len(needed), _PAGE):
            page_filter = {"id": {"any_": needed[start : start + _PAGE]}}
            content = {"deployments": page_filter, "limit": _PAGE}
            answer = await self._client.request("POST", "/deployments/filter", json=content)
            for row in answer.json():
                limit = parse_limit(row)
                if limit is None:
                    self._unlimited[UUID(row["id"])] = now
                else:
                    self._unlimited.pop(UUID(row["id"]), None)
                    limits[UUID(row["id"])] = limit
        return limits


def parse_limit(row: Mapping[str, Any]) -> DeploymentLimit | None:
    """Return the concurrency limit in the JSON of a deployment, or None without a limit."""
    limit = row.get("global_concurrency_limit")
    if limit is None:
        return None
    strategy = (row.get("concurrency_options") or {}).get("collision_strategy")
    return DeploymentLimit(
        limit=limit["limit"],
        active=limit["active_slots"],
        skips=strategy == ConcurrencyLimitStrategy.CANCEL_NEW.value,
    )
