"""Tests of the warning before a cluster ends a drained Ray node. The cluster is a fake."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tasks.ray import control_store
from tasks.ray.control_store import read_drain_deadlines

pytestmark = pytest.mark.asyncio

NODE, OTHER, THIRD = "aa" * 28, "bb" * 28, "cc" * 28
#: Values that Ray reports if a drained node has no deadline. The command `ray drain-node` sends 0.
#: Source: ray 2.60, ray/scripts/scripts.py, drain_node.
NO_DEADLINES = (0, 2**63 - 1)


async def test_drained_nodes_have_their_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines_ms = [1_795_722_178_500, *NO_DEADLINES]
    nodes = [
        SimpleNamespace(node_id=bytes.fromhex(node), draining_deadline_timestamp_ms=deadline_ms)
        for node, deadline_ms in zip((NODE, OTHER, THIRD), deadlines_ms, strict=True)
    ]
    requests: list[tuple[Any, ...]] = []

    async def call(*request: Any) -> list[Any]:
        requests.append(request)
        return [SimpleNamespace(draining_nodes=nodes)]

    monkeypatch.setattr(control_store, "_call", call)

    deadlines = await read_drain_deadlines("10.0.0.1:6379")

    assert deadlines == {NODE: 1_795_722_178.5}
    assert requests == [("10.0.0.1:6379", "NodeResourceInfo", "GetDrainingNodes", [{}])]
