"""The ledger reads runs that events name, and no flow runs of other work pools."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from tasks.queue.ledger import Ledger, LedgerReader


@dataclass
class FakeResponse:
    content: list[dict[str, Any]]

    def json(self) -> list[dict[str, Any]]:
        return self.content


@dataclass
class FakeClient:
    """Prefect client of a server with flow runs, which applies the filters of the requests."""

    #: Each flow run as JSON, with the name of its flow and the type of its work pool.
    flow_runs: list[tuple[dict[str, Any], str, str]] = field(default_factory=list)

    def add(self, flow: str, pool_type: str) -> Any:
        """Add a scheduled flow run, and return its id."""
        id = uuid4()
        state = {"type": "SCHEDULED", "name": "Scheduled", "timestamp": datetime.now(UTC)}
        content = {"id": str(id), "name": "x", "flow_id": str(uuid4()), "state": state}
        self.flow_runs.append((content, flow, pool_type))
        return id

    async def read_work_pools(self, **_: Any) -> list[Any]:
        return []

    async def request(self, _method: str, path: str, json: dict[str, Any]) -> FakeResponse:
        assert path == "/flow_runs/filter"
        ids = json.get("flow_runs", {}).get("id", {}).get("any_")
        flows = json.get("flows", {}).get("name", {}).get("any_")
        types = json.get("work_pools", {}).get("type", {}).get("any_")
        return FakeResponse(
            [
                content
                for content, flow, pool_type in self.flow_runs
                if ids is not None
                and content["id"] in ids
                and (flows is None or flow in flows)
                and (types is None or pool_type in types)
            ]
        )


def test_flow_runs_of_other_work_pools_are_no_runs_of_the_queue() -> None:
    client = FakeClient()
    run = client.add("train", "gang")
    preflight = client.add("preflight", "gang")
    pipeline = client.add("pipeline", "process")
    earlier = Ledger(at=datetime.now(UTC), pools={}, waiting=(), holding=(), is_cut=False)
    reader = LedgerReader(client)  # type: ignore[arg-type]

    ledger = asyncio.run(reader.read(earlier=earlier, changed={run, preflight, pipeline}))

    assert {entry.id for entry in ledger.waiting} == {run, preflight}
