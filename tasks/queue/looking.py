"""The queue for onlookers: what a gate would see now, without acting on it."""

from __future__ import annotations

from dataclasses import replace

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import WorkerStatus
from prefect.exceptions import ObjectNotFound

from tasks.queue.capacity import Capacity
from tasks.queue.grants import Giver
from tasks.queue.look import Looker
from tasks.queue.picture import view_of
from tasks.queue.view import QueueView


class Onlooker:
    """Looks at the queues of one Prefect server. Use it with one client, in one asyncio loop."""

    def __init__(self) -> None:
        #: What a looker has found out once, it does not ask again.
        self._lookers: dict[str, Looker] = {}

    async def __call__(self, client: PrefectClient, pool: str) -> QueueView:
        """The queue of a work pool, or of the runs without one where there is no such pool.

        Raises: httpx.HTTPError, PrefectException.
        """
        if pool not in self._lookers:
            self._lookers[pool] = Looker(client, pool=pool, capacity=Capacity(), giver=Giver.me())
        view = view_of(await self._lookers[pool].look(), pool)
        if not view.pool or await _has_worker(client, pool):
            return view
        # What could start is not in the line: without this it would seem to be on its way.
        trouble = (
            "no worker serves the pool, so nothing starts: "
            f"start one with `prefect worker start --pool {pool}`"
        )
        return replace(view, troubles=(*view.troubles, trouble))


async def _has_worker(client: PrefectClient, pool: str) -> bool:
    try:
        workers = await client.read_workers_for_work_pool(pool)
    except ObjectNotFound:
        return False
    return any(worker.status is WorkerStatus.ONLINE for worker in workers)
