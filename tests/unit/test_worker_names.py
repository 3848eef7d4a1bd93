"""Tests of the detection of two live workers with the same name."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from deployments.stack import part_checks
from deployments.stack.env import POOL
from tasks.queue.worker_names import WorkerName, name_variable, read_other_worker


class Variables:
    """A fake Prefect client that stores Prefect variables."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    async def read_variable_by_name(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(value=self.values[name]) if name in self.values else None

    async def create_variable(self, variable: Any) -> None:
        assert variable.name not in self.values
        self.values[variable.name] = variable.value

    async def update_variable(self, variable: Any) -> None:
        assert variable.name in self.values
        self.values[variable.name] = variable.value


class Cluster:
    """Workers of one Prefect server. A test refers to each worker by a letter."""

    def __init__(self, names: dict[str, tuple[str, str]]) -> None:
        """Create the workers.

        Args:
            names: Mapping from the letter of each worker to its work pool and its name.
        """
        self.client = Variables()
        self._workers = {
            letter: WorkerName(pool, name, f"process {letter}")
            for letter, (pool, name) in names.items()
        }

    def synchronise(self, script: str) -> list[str]:
        """Let workers synchronise with the Prefect server, one after the other.

        When a worker synchronises, it detects another living worker of the same name and work pool.

        Args:
            script: One letter for each synchronisation, in order. With "aab", worker a synchronises
                twice, and then worker b synchronises once.

        Returns:
            One text for each synchronisation: the process of the other worker that was detected,
            or an empty string if no other worker was detected.
        """
        return [
            asyncio.run(self._workers[letter].find_other(self.client))  # type: ignore[arg-type]
            for letter in script
        ]


SAME = {"a": ("gang", "node"), "b": ("gang", "node")}


def test_two_live_workers_of_one_name_detect_each_other() -> None:
    cluster = Cluster(SAME)

    others = cluster.synchronise("abab")

    assert others == ["", "", "process b", "process a"]
    assert read_other_worker(cluster.client.values[name_variable("gang", "node")]) == "process a"


def test_restarted_worker_is_no_second_worker() -> None:
    cluster = Cluster(SAME)

    others = cluster.synchronise("aaabbb")

    assert others == [""] * 6


def test_other_worker_is_forgotten_after_it_has_ended() -> None:
    cluster = Cluster(SAME)

    others = cluster.synchronise("abaaaa")

    assert others == ["", "", "process b", "process b", "process b", ""]
    assert read_other_worker(cluster.client.values[name_variable("gang", "node")]) == ""


@pytest.mark.parametrize("other", [("gang", "node-2"), ("other", "node")])
def test_workers_of_other_names_or_pools_are_not_compared(other: tuple[str, str]) -> None:
    cluster = Cluster({"a": ("gang", "node"), "b": other})

    assert cluster.synchronise("ababab") == [""] * 6


@pytest.mark.parametrize("value", [None, "text", {}, {"other": 1}, {"process": "process a"}])
def test_foreign_value_of_the_variable_names_no_other_worker(value: object) -> None:
    assert read_other_worker(value) == ""


@pytest.mark.parametrize("other", ["", "process 7 on node"])
def test_status_names_the_other_worker_of_the_same_name(other: str) -> None:
    heartbeat = {"name": "node", "status": "ONLINE", "last_heartbeat_time": "2026-01-02T00:00:00Z"}
    contents = {
        "/health": {},
        f"/api/work_pools/{POOL}/workers/filter": [heartbeat],
        f"/api/variables/name/{name_variable(POOL, 'node')}": {"value": {"other": other}},
    }
    stack: Any = SimpleNamespace(
        api_url="http://server/api",
        worker="node",
        worker_health="http://worker/health",
        started_at=0.0,
    )

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=contents[request.url.path])

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        check = part_checks._check_worker(client, stack)

    assert check.problem == ""
    assert check.description == (
        f"node (another worker also has this name: {other})" if other else "node"
    )
