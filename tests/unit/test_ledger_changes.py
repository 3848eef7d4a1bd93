"""Events that name flow runs of other work pools add nothing to the ledger of a queue."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

from prefect.client.schemas.objects import WorkPool

from tasks.queue.ledger import Ledger, LedgerReader


@dataclass
class FakeResponse:
    content: list[dict[str, Any]]

    def json(self) -> list[dict[str, Any]]:
        return self.content


@dataclass
class FakeClient:
    """Fake client of a Prefect server that has flow runs, and the work pool `gang`."""

    flow_runs: list[dict[str, Any]] = field(default_factory=list)

    def add(self, pool: str) -> UUID:
        """Add a scheduled flow run of a work pool, and return the id of the flow run."""
        id = uuid4()
        state = {"type": "SCHEDULED", "name": "Scheduled", "timestamp": datetime.now(UTC)}
        content = {
            "id": str(id),
            "name": "x",
            "flow_id": str(uuid4()),
            "state": state,
            "work_pool_name": pool,
            "work_queue_id": str(uuid4()),
        }
        self.flow_runs.append(content)
        return id

    async def read_work_pools(self, **_: Any) -> list[WorkPool]:
        return [WorkPool(name="gang", type="gang", default_queue_id=uuid4())]

    async def read_work_queues(self, **_: Any) -> list[Any]:
        return []

    async def read_workers_for_work_pool(self, _pool: str) -> list[Any]:
        return []

    async def request(self, _method: str, path: str, json: dict[str, Any]) -> FakeResponse:
        assert path == "/flow_runs/filter"
        ids = json.get("flow_runs", {}).get("id", {}).get("any_", [])
        return FakeResponse([content for content in self.flow_runs if content["id"] in ids])


def test_flow_runs_of_other_work_pools_are_no_runs_of_the_queue() -> None:
    client = FakeClient()
    run = client.add("gang")
    pipeline = client.add("pipelines")
    earlier = Ledger(at=datetime.now(UTC), pools={}, waiting=(), holding=(), is_cut=False)
    reader = LedgerReader(client)  # type: ignore[arg-type]

    ledger = asyncio.run(reader.read(earlier=earlier, changed={run, pipeline}))

    assert [entry.id for entry in ledger.waiting] == [run]
