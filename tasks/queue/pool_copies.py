"""Copies of the settings of work pools, from which a deleted work pool is restored.

If a user deletes a work pool of type `gang`, a running worker creates an empty pool with the same
name within a minute. The leader, the worker that decides for all workers which runs start, then
restores the limit, the nodes, the clusters and the other settings of the pool. For this purpose,
the leader keeps a copy of the settings of each pool in a Prefect variable. The program
`deployments.stack.setup` restores a pool from the same copy.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import VariableCreate, VariableUpdate, WorkPoolUpdate
from prefect.client.schemas.objects import Variable, WorkPool
from prefect.types import MAX_VARIABLE_VALUE_LENGTH
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.queue.settings import PoolSettings, settings_of, with_settings

_log = logging.getLogger(__name__)


class PoolCopy(BaseModel):
    """A copy of a work pool's settings."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    #: Id of the work pool. A pool that was deleted and created again has a new id.
    pool_id: UUID
    #: Description of the work pool.
    description: str | None = None
    #: Largest number of simultaneous runs. None if there is no limit.
    concurrency_limit: int | None = None
    #: True if the work pool is paused, so that no run starts.
    is_paused: bool = False
    #: Settings of the queue: nodes, clusters, limits of tags, drained nodes and policy.
    settings: PoolSettings = Field(default_factory=PoolSettings)

    def fill_in(self, base_job_template: Mapping[str, Any]) -> WorkPoolUpdate:
        """Return the update that restores an empty work pool from this copy.

        Args:
            base_job_template: Base job template of the empty work pool.
        """
        return WorkPoolUpdate(
            description=self.description,
            concurrency_limit=self.concurrency_limit,
            is_paused=self.is_paused,
            base_job_template=with_settings(base_job_template, self.settings),
        )


def is_empty(pool: WorkPool) -> bool:
    """Return True if a work pool has only the settings that a worker gives to a new pool.

    Raises:
        pydantic.ValidationError: The settings of the pool are invalid.
    """
    has_defaults = settings_of(pool.base_job_template) == PoolSettings()
    return has_defaults and not pool.description and pool.concurrency_limit is None


def variable_name(pool_name: str) -> str:
    """Return the name of the Prefect variable with the copy of a work pool.

    Characters that are not allowed in the name of a variable are replaced. In this case, a digest
    is added, so that pools such as `a b` and `a/b` get different names.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", pool_name.lower()).strip("-")
    if slug != pool_name:
        slug = f"{slug[:100]}-{hashlib.sha256(pool_name.encode()).hexdigest()[:6]}"
    return f"muster_pool_{slug}"


def parse_copy(variable: Variable | None) -> PoolCopy | None:
    """Return the copy of a work pool's settings from a Prefect variable.

    Return None if the variable is missing or invalid.
    """
    if variable is None:
        return None
    try:
        return PoolCopy.model_validate(variable.value)
    except ValidationError as error:
        _log.warning(
            "Muster cannot read the backup copy of a work pool's settings in the Prefect "
            "variable %s: %s",
            variable.name,
            error,
        )
        return None


async def read_copy(client: PrefectClient, pool_name: str) -> PoolCopy | None:
    """Return the copy of a work pool's settings from the server, or None if there is no copy.

    Raises:
        httpx.HTTPError: The server did not answer.
    """
    return parse_copy(await client.read_variable_by_name(variable_name(pool_name)))


class PoolCopies:
    """Keeps a copy of each work pool's settings in a Prefect variable.

    If a work pool was deleted and created again, its settings are restored from the copy.
    """

    def __init__(self, client: PrefectClient) -> None:
        """
        Args:
            client: Client of the Prefect server.
        """
        self._client = client
        #: Mapping from pool name to the settings that were last compared with the copy on the
        #: server. While the settings of the pool are unchanged, no request is necessary.
        self._done: dict[str, PoolCopy] = {}

    async def update(self, pools: Iterable[WorkPool]) -> None:
        """Store copies of changed pool settings, and restore the settings of recreated pools.

        The copy of a pool's settings is a Prefect variable. If a pool has no settings, its id is
        compared with the id in the copy. A different id means that the pool was deleted and created
        again. Its settings are then restored from the copy. The same id means that a user has
        removed the settings. Nothing is restored then.

        Args:
            pools: The work pools of type `gang`, as they were read from the server.

        Raises:
            httpx.HTTPError, PrefectException: The server did not answer.
        """
        for pool in pools:
            try:
                copy = PoolCopy(
                    pool_id=pool.id,
                    description=pool.description,
                    concurrency_limit=pool.concurrency_limit,
                    is_paused=pool.is_paused,
                    settings=settings_of(pool.base_job_template),
                )
            except ValidationError:
                # The settings of this pool are invalid. Do not replace the copy on the server,
                # which contains the last valid settings. The scheduling pass reports the fault.
                continue
            if copy != self._done.get(pool.name):
                await self._update_pool(pool, copy)

    async def _update_pool(self, pool: WorkPool, copy: PoolCopy) -> None:
        """Update the stored copy of a work pool's settings, which is a Prefect variable.

        If the work pool was deleted and created again, restore its settings from the stored copy
        instead.
        """
        stored_copy = await read_copy(self._client, pool.name)
        if is_empty(pool) and stored_copy is not None and stored_copy.pool_id != pool.id:
            await self._restore(pool, stored_copy)
            return
        if stored_copy != copy and not (is_empty(pool) and stored_copy is None):
            await self._write(pool.name, copy)
        self._done[pool.name] = copy

    async def _restore(self, pool: WorkPool, copy: PoolCopy) -> None:
        """Restore the settings of an empty work pool from a copy of the settings."""
        current_pool = await self._client.read_work_pool(pool.name)
        if current_pool.id != pool.id or not is_empty(current_pool):
            return
        if not current_pool.base_job_template.get("job_configuration"):
            # The work pool has no base job template yet. A worker adds the template at its next
            # heartbeat, but only if the pool has no settings. So restore the settings later.
            return
        update = copy.fill_in(current_pool.base_job_template)
        await self._client.update_work_pool(pool.name, update)
        _log.warning(
            "the work pool %s was deleted and created again; Muster has restored its settings",
            pool.name,
        )

    async def _write(self, pool_name: str, copy: PoolCopy) -> None:
        """Write the copy of a work pool's settings to the Prefect variable of the pool."""
        value = copy.model_dump(mode="json", exclude_defaults=True)
        length = len(json.dumps(value))
        if length > MAX_VARIABLE_VALUE_LENGTH:
            _log.warning(
                "Muster could not back up the settings of the work pool %s. They have %d "
                "characters as JSON, but a Prefect variable may have at most %d. If the pool is "
                "deleted, Muster cannot restore its settings.",
                pool_name,
                length,
                MAX_VARIABLE_VALUE_LENGTH,
            )
            return
        name = variable_name(pool_name)
        try:
            await self._client.update_variable(VariableUpdate(name=name, value=value))
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.NOT_FOUND:
                raise
            creation = VariableCreate(name=name, value=value, tags=["muster"])
            await self._client.create_variable(creation)
