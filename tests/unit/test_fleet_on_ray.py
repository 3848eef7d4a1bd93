"""Placement and ports of a fleet on a Ray cluster, with fake nodes that can get new addresses."""

from __future__ import annotations

import errno
import itertools
import json
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle

from tasks.processes.ports import lock_name
from tasks.ray.submit import wrapper_sources
from tasks.rollout.actor import SENT, PortKeeper, ServerActor
from tasks.rollout.component import FleetPlan
from tasks.rollout.process import Places
from tasks.rollout.ray_host import RayHost, _ActorServer, find_moved_ranks, plan_bundles
from tasks.rollout.topology import plan_topology
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
    """Fake Ray nodes that assign ports in ascending order."""

    def __init__(self, *hosts: str) -> None:
        self.addresses = list(hosts)
        #: Arguments of each call of `hold_ports`: index of the node, and names of the ports.
        self.requests: list[tuple[int, list[str]]] = []
        self._ports = itertools.count(5000)

    async def hosts(self) -> tuple[str, ...]:
        return tuple(self.addresses)

    async def hold_ports(self, node: int, names: Sequence[str]) -> list[int]:
        self.requests.append((node, list(names)))
        return [next(self._ports) for _ in names]


def make_plan(**fleet: Any) -> FleetPlan:
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


def make_places(nodes: FakeNodes, **fleet: Any) -> Places:
    return Places(make_plan(**fleet), nodes)


@pytest.mark.parametrize(
    ("fleet", "nodes", "bundles"),
    [
        # one server with eight GPUs on each node
        (TP16, 4, [{"CPU": 1.0, "GPU": 8.0}] * 4),
        # servers without GPUs request only a CPU
        (CPU, 2, [{"CPU": 1.0}] * 2),
    ],
)
async def test_bundle_has_the_resources_of_all_servers_of_its_node(
    fleet: dict[str, Any], nodes: int, bundles: list[dict[str, float]]
) -> None:
    plan = make_plan(**fleet)

    assert plan_bundles(plan_topology(plan.fleet, plan.node_gpus), nodes) == bundles


async def test_each_server_has_its_nodes_address_and_its_own_port() -> None:
    nodes = FakeNodes("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")

    plan = await make_places(nodes, **TP16).found()

    assert [server.host for server in plan.servers] == nodes.addresses
    assert len({server.port for server in plan.servers}) == 4
    assert [engine.dist_init and engine.dist_init.split(":")[0] for engine in plan.engines] == [
        "10.0.0.1",
        "10.0.0.3",
    ]


async def test_ports_of_a_node_are_requested_in_one_call() -> None:
    nodes = FakeNodes("10.0.0.1", "10.0.0.2")
    fleet = {**CPU, "engines": 4, "gpus_per_node": 4}
    places = Places(make_plan(**fleet).model_copy(update={"node_gpus": 8}), nodes)

    plan = await places.found()
    new_slots = await places.rebound(3)

    first, second, *later = nodes.requests
    assert first == (0, ["server.0", "server.4"])
    assert second == (1, ["server.8", "server.12"])
    assert later == [(1, ["server.12"])]
    assert [server.port for server in plan.servers] == [5000, 5001, 5002, 5003]
    assert [server.port for server in new_slots] == [5004]


def bind(port: int) -> socket.socket:
    """Bind a TCP port with SO_REUSEADDR, as most servers do.

    Raises:
        OSError: Another socket is bound to the port.
    """
    return socket.create_server(("", port))


async def test_reserved_port_cannot_be_used_until_its_server_starts() -> None:
    key = b"of one home"
    keeper = PortKeeper(key)
    other_keeper = PortKeeper(key)
    first, second, meeting = await keeper.hold(["server.0", "server.1", "engine.0"])

    for port in (first, second, meeting):
        with pytest.raises(OSError, match="in use"):
            bind(port)
    # A port keeper reserves ports on a node. A keeper reports the ports of other keepers as taken,
    # but not its own ports.
    assert await keeper.list_taken([first, second]) == []
    assert await other_keeper.list_taken([first]) == [first]

    await keeper.release(["server.0", "engine.0", "engine.7"])

    bind(meeting).close()
    with bind(first):
        assert await keeper.list_taken([first, second]) == [first]
    with pytest.raises(OSError, match="in use"):
        bind(second)
    # For each port, the keeper also binds a name in the abstract socket namespace. The name is
    # still bound, although the keeper has released the port.
    with socket.socket(socket.AF_UNIX) as lock, pytest.raises(OSError, match="in use"):
        lock.bind(lock_name(first, key))


async def test_second_reservation_frees_the_earlier_port() -> None:
    keeper = PortKeeper()
    [earlier] = await keeper.hold(["server.0"])

    [later] = await keeper.hold(["server.0"])

    assert later != earlier
    bind(earlier).close()
    assert await keeper.list_taken([earlier, later]) == []


#: Program that cannot import Muster, so it receives the classes `PortKeeper` and `ServerActor` in
#: pickled form. The program reserves two ports. Then it lets the actor check a port on which the
#: program itself listens.
_PROGRAM_ON_A_NODE = """
import asyncio, json, socket, sys
sys.modules["tasks"] = None
from ray import cloudpickle
keeper, actor = cloudpickle.load(sys.stdin.buffer)
async def main():
    ports = await keeper().hold(["server.0", "server.1"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listeners = await actor(0, {}).list_listeners(*taken.getsockname())
    print(json.dumps([ports, listeners]))
asyncio.run(main())
"""


async def test_actors_need_no_code_of_muster_on_the_node() -> None:
    for module in SENT:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled_classes = cloudpickle.dumps((PortKeeper, ServerActor))
    finally:
        for module in SENT:
            cloudpickle.unregister_pickle_by_value(module)

    completed = subprocess.run(
        (sys.executable, "-I", "-c", _PROGRAM_ON_A_NODE),
        input=pickled_classes,
        capture_output=True,
        timeout=60,
    )

    assert completed.returncode == 0, completed.stderr
    ports, (own_inodes, foreign_listener) = json.loads(completed.stdout)
    assert len(set(ports)) == 2
    assert own_inodes == []
    assert "is taken by a process of user" in foreign_listener


async def test_copied_part_of_a_log_takes_no_disk_space_on_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    actor = ServerActor(0, wrapper_sources())
    line = b"a line of the log".ljust(63) + b"\n"
    program = f"import os\nfor _ in range(64): os.write(1, {line!r} * 1024)"
    argv = [sys.executable, "-I", "-S", "-c", program]
    await actor.start(argv, {}, str(tmp_path), int(signal.SIGTERM), 1.0)
    await actor.wait_for_exit()

    copy = b""
    while data := await actor.read_log(len(copy)):
        copy += data

    [log] = tmp_path.glob("*/log")
    assert copy == line * 1024 * 64
    assert log.stat().st_size == len(copy)
    assert log.stat().st_blocks * 512 < 128 * 1024
    assert (await actor.wait_for_exit())[1].encode() == line * (16 * 1024 // 64)


async def test_moved_group_gets_its_new_address_and_other_groups_keep_their_addresses() -> None:
    nodes = FakeNodes("10.0.0.1", "10.0.0.2")
    places = make_places(nodes, **CPU)
    servers_before = (await places.found()).servers
    nodes.addresses[1] = "10.0.0.9"

    [moved_server] = await places.rebound(1)

    assert moved_server.host == "10.0.0.9"
    assert moved_server.port != servers_before[1].port
    [other_server] = (await places.found()).engines[0].servers
    assert other_server.host == servers_before[0].host


async def test_server_has_moved_if_its_node_has_another_address() -> None:
    nodes = FakeNodes("10.0.0.1", "10.0.0.2")
    servers = (await make_places(nodes, **CPU).found()).servers

    assert find_moved_ranks(servers, ("10.0.0.1", "10.0.0.2")) == frozenset()
    assert find_moved_ranks(servers, ("10.0.0.1", "10.0.0.9")) == {1}
    # The first node has no address, because it has left the cluster.
    assert find_moved_ranks(servers, ("", "10.0.0.2")) == {0}


class FakeCall:
    """Fake method of a Ray actor. The call returns no object reference."""

    def remote(self, *arguments: object) -> None:
        return None


class FakeActor:
    """Fake Ray actor of an inference server."""

    stop = remove_files = FakeCall()


async def test_every_server_ends_if_the_log_of_a_server_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[object] = []
    monkeypatch.setattr("ray.kill", killed.append)
    monkeypatch.setattr("tasks.rollout.ray_host.remove_placement_group", lambda group: None)
    host = RayHost(make_plan(**CPU), {}, group=None)  # type: ignore[arg-type]
    slots = plan_topology(make_plan(**CPU).fleet).servers
    for rank, slot in enumerate(slots):
        host._servers[rank] = _ActorServer(slot=slot, epoch=1, actor=FakeActor(), is_alive=True)
    actors = [server.actor for server in host._servers.values()]

    async def answer(*arguments: object) -> list[int]:
        return []

    async def fail_for_first_server(server: _ActorServer) -> None:
        if server.actor is actors[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(host, "_wait_for_answer", answer)
    monkeypatch.setattr(host, "_copy_new_log", fail_for_first_server)
    await host.close()

    assert killed == actors


class FakeLogActor:
    """Fake Ray actor of a server that has written a long log."""

    def __init__(self, log: bytes) -> None:
        self.read_log = SimpleNamespace(remote=lambda offset: log[offset : offset + 100_000])


async def test_copied_log_of_a_server_is_kept_below_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_bytes = 1 << 18
    plan = make_plan(**CPU, log_max_bytes=limit_bytes).model_copy(update={"directory": tmp_path})
    host = RayHost(plan, {}, group=None)  # type: ignore[arg-type]
    log = b"".join(b"line %08d\n" % number for number in range(50_000))
    slot = plan_topology(plan.fleet).servers[0]
    server = _ActorServer(slot=slot, epoch=1, actor=FakeLogActor(log))

    async def answer(data: bytes, _within_s: float) -> bytes:
        return data

    monkeypatch.setattr(host, "_wait_for_answer", answer)
    await host._copy_new_log(server)

    copy = plan.log_of(0)
    assert copy.stat().st_blocks * 512 < 1.1 * limit_bytes
    assert copy.read_bytes().startswith(b"line 00000000\n")
    assert copy.read_bytes().endswith(b"line 00049999\n")
    assert b"bytes of this log were left out" in copy.read_bytes()
