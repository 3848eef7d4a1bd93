"""Where the servers of a fleet are on a cluster, by nodes that a test moves."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from tasks.processes.ports import lock_name
from tasks.rollout.actor import SENT, PortKeeper, ServerActor
from tasks.rollout.component import FleetPlan
from tasks.rollout.process import Places
from tasks.rollout.ray_host import find_moved_ranks, plan_bundles
from tasks.rollout.topology import planned
from tasks.spec.rollout import Rollout

pytestmark = pytest.mark.asyncio

TP16 = {
    "backend": "sglang",
    "model": "m",
    "engines": 2,
    "nodes_per_engine": 2,
    "tensor_parallel": 16,
    "placement": "ray",
}
CPU = {"backend": "command", "engines": 2, "command": ["serve", "${server.port}"]}


class FakeNodes:
    """Nodes whose ports are given out in order."""

    def __init__(self, *hosts: str) -> None:
        self.addresses = list(hosts)
        #: `(node, names)` of each question for ports.
        self.asked: list[tuple[int, list[str]]] = []
        self._ports = itertools.count(5000)

    async def hosts(self) -> tuple[str, ...]:
        return tuple(self.addresses)

    async def hold_ports(self, node: int, names: Sequence[str]) -> list[int]:
        self.asked.append((node, list(names)))
        return [next(self._ports) for _ in names]


def plan_of(**fleet: Any) -> FleetPlan:
    return FleetPlan(
        run_id="a-run",
        attempt=1,
        fleet=Rollout.model_validate({**fleet, "placement": "ray"}),
        port=4000,
        ports={},
        ray="http://127.0.0.1:8265",
        cwd=Path("/"),
        directory=Path("/"),
    )


def places_of(nodes: FakeNodes, **fleet: Any) -> Places:
    return Places(plan_of(**fleet), nodes)


@pytest.mark.parametrize(
    ("fleet", "nodes", "bundles"),
    [
        # eight GPUs of each node, with a CPU for the one server there
        (TP16, 4, [{"CPU": 1.0, "GPU": 8.0}] * 4),
        # servers that ask for no GPU
        (CPU, 2, [{"CPU": 1.0}] * 2),
    ],
)
async def test_a_bundle_is_what_the_servers_of_a_node_need(
    fleet: dict[str, Any], nodes: int, bundles: list[dict[str, float]]
) -> None:
    plan = plan_of(**fleet)

    assert plan_bundles(planned(plan.fleet, plan.node_gpus), nodes) == bundles


async def test_each_server_is_planned_at_its_nodes_address_and_a_port_of_its_own() -> None:
    nodes = FakeNodes("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")

    plan = await places_of(nodes, **TP16).found()

    assert [server.host for server in plan.servers] == nodes.addresses
    assert len({server.port for server in plan.servers}) == 4
    assert [engine.dist_init and engine.dist_init.split(":")[0] for engine in plan.engines] == [
        "10.0.0.1",
        "10.0.0.3",
    ]


async def test_a_node_is_asked_once_for_the_ports_of_the_whole_fleet() -> None:
    nodes = FakeNodes("10.0.0.1", "10.0.0.2")
    fleet = {**CPU, "engines": 4, "gpus_per_node": 4}
    places = Places(plan_of(**fleet).model_copy(update={"node_gpus": 8}), nodes)

    plan = await places.found()
    moved_to = await places.rebound(3)

    first, second, *later = nodes.asked
    assert first == (0, ["server.0", "server.4"])
    assert second == (1, ["server.8", "server.12"])
    assert later == [(1, ["server.12"])]
    assert [server.port for server in plan.servers] == [5000, 5001, 5002, 5003]
    assert [server.port for server in moved_to] == [5004]


def bind(port: int) -> socket.socket:
    """As most servers do it. Raises: OSError, when somebody has it."""
    return socket.create_server(("", port))


async def test_a_port_is_kept_from_everybody_until_its_server_starts() -> None:
    key = b"of one home"
    keeper, neighbour = PortKeeper(key), PortKeeper(key)
    first, second, meeting = await keeper.hold(["server.0", "server.1", "engine.0"])

    for port in (first, second, meeting):
        with pytest.raises(OSError, match="in use"):
            bind(port)
    # Held for its own servers: it is nobody else's.
    assert await keeper.list_taken([first, second]) == []
    assert await neighbour.list_taken([first]) == [first]

    await keeper.release(["server.0", "engine.0", "engine.7"])

    bind(meeting).close()
    with bind(first):
        assert await keeper.list_taken([first, second]) == [first]
    with pytest.raises(OSError, match="in use"):
        bind(second)
    # Until the fleet ends, no other fleet or run is given it, although nobody listens there.
    with socket.socket(socket.AF_UNIX) as lock, pytest.raises(OSError, match="in use"):
        lock.bind(lock_name(first, key))


async def test_a_server_that_is_to_have_another_port_gets_one_and_its_old_one_is_free() -> None:
    keeper = PortKeeper()
    [before] = await keeper.hold(["server.0"])

    [after] = await keeper.hold(["server.0"])

    assert after != before
    bind(before).close()
    assert await keeper.list_taken([before, after]) == []


#: A port of its own is nobody's; one on which this process itself listens is an impostor's.
_ON_A_NODE = """
import asyncio, json, socket, sys
sys.modules["tasks"] = None
from ray import cloudpickle
keeper, actor = cloudpickle.load(sys.stdin.buffer)
async def main():
    ports = await keeper().hold(["server.0", "server.1"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = await actor(0, {}).list_listeners(*taken.getsockname())
    print(json.dumps([ports, found]))
asyncio.run(main())
"""


async def test_what_is_sent_to_a_node_needs_no_code_of_the_project_there() -> None:
    for module in SENT:
        cloudpickle.register_pickle_by_value(module)
    try:
        sent = cloudpickle.dumps((PortKeeper, ServerActor))
    finally:
        for module in SENT:
            cloudpickle.unregister_pickle_by_value(module)

    done = subprocess.run(
        (sys.executable, "-I", "-c", _ON_A_NODE), input=sent, capture_output=True, timeout=60
    )

    assert done.returncode == 0, done.stderr
    ports, (own, foreign) = json.loads(done.stdout)
    assert len(set(ports)) == 2
    assert own == [] and "is taken by a process of user" in foreign


async def test_a_group_that_was_moved_is_planned_where_it_is_now_and_no_other_moves() -> None:
    nodes = FakeNodes("10.0.0.1", "10.0.0.2")
    places = places_of(nodes, **CPU)
    before = (await places.found()).servers
    nodes.addresses[1] = "10.0.0.9"

    [after] = await places.rebound(1)

    assert after.host == "10.0.0.9"
    assert after.port != before[1].port
    [other] = [server for server in (await places.found()).engines[0].servers]
    assert other.host == before[0].host


async def test_a_server_whose_node_has_another_address_has_moved() -> None:
    nodes = FakeNodes("10.0.0.1", "10.0.0.2")
    servers = (await places_of(nodes, **CPU).found()).servers

    assert find_moved_ranks(servers, ("10.0.0.1", "10.0.0.2")) == frozenset()
    assert find_moved_ranks(servers, ("10.0.0.1", "10.0.0.9")) == {1}
    # A node that is not there yet.
    assert find_moved_ranks(servers, ("", "10.0.0.2")) == {0}
