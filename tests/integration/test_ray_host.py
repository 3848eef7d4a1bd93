"""Servers of a fleet as actors of a real Ray cluster with logical GPUs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tasks.ray.dashboard import Credentials
from tasks.ray.usage import ClusterReader
from tasks.rollout.backends import Ask
from tasks.rollout.probing import Death, NoHost, StartFailed
from tasks.rollout.ray_host import RayHost
from tasks.rollout.topology import ServerSlot
from tests.support.fleet_fakes import make_fleet_plan
from tests.support.ray_cluster import RAY_ENV, RayCluster

#: A server that answers GET /health with 200, and has a child process in another session.
_SERVER = """
import http.server, os, subprocess, sys
subprocess.Popen(["sleep", "1234"], start_new_session=True)
print("serving", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("", int(sys.argv[1])), Handler).serve_forever()
"""
_HEALTH = Ask(method="GET", path="/health")
_WITHIN_S = 60.0
_RUN = "fleet-grpo-20260101-120000-abcd91c2"

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]


class Fleet:
    """Runs inference servers as Ray actors with a `RayHost`, and records dead servers."""

    def __init__(self, host: RayHost) -> None:
        self.host = host
        self.deaths: asyncio.Queue[Death] = asyncio.Queue()
        host.on_death = self.deaths.put_nowait

    async def slot(self, rank: int, node: int, *, gpus: int = 4) -> ServerSlot:
        """Reserve a port on a node, and return a `ServerSlot` with this port for a server."""
        [port] = await self.host.hold_ports(node, [f"server.{rank}"])
        return ServerSlot(
            ranks=(rank,),
            engine=rank,
            index=0,
            node=node,
            bundles=tuple(range(rank * gpus, (rank + 1) * gpus)),
            weight_ranks=(rank,),
            is_entrypoint=True,
            host=(await self.host.hosts())[node],
            port=port,
            argv=(sys.executable, "-c", _SERVER, str(port)),
        )

    async def start(self, slot: ServerSlot, epoch: int = 1) -> None:
        """Start the server on its planned node and port, and wait until the server answers."""
        await self.host.start(slot, epoch)
        await until_true(lambda: self._answers(slot))

    async def _answers(self, slot: ServerSlot) -> bool:
        return await self.host.ask(slot.rank, _HEALTH, 5.0) is None


async def until_true(is_true: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the function returns True; raise TimeoutError at the deadline."""
    async with asyncio.timeout(_WITHIN_S):
        while not await is_true():
            await asyncio.sleep(0.1)


def find_processes(slot: ServerSlot) -> list[psutil.Process]:
    """Return the server's process and its children, or an empty list if the server does not run."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            command = process.cmdline()
            if command[1:2] == ["-c"] and command[-1:] == [str(slot.port)]:
                return [process, *process.children()]
    return []


@asynccontextmanager
async def open_fleet(
    cluster: RayCluster, folder: Path, *, bundles: int = 2, within_s: float = 30.0
) -> AsyncIterator[Fleet]:
    """Yield a fleet whose host reserves GPUs on the Ray cluster.

    Args:
        cluster: Ray cluster.
        folder: Directory of the fleet's files.
        bundles: Number of nodes. The host reserves 8 GPUs on each node.
        within_s: Time limit of the reservation, in seconds.
    """
    os.environ.update(RAY_ENV)
    fleet = {"backend": "command", "engines": bundles, "gpus_per_node": 8, "placement": "ray"}
    plan = make_fleet_plan(
        folder, run_id=_RUN, grace_s=2.0, fleet=fleet, node_gpus=8, ray=cluster.address
    )
    host = await RayHost.open(plan, {}, within_s=within_s)
    try:
        yield Fleet(host)
    finally:
        await host.close()


@pytest.fixture(autouse=True)
def shut_down_ray() -> Any:
    """Disconnect this process from Ray after each test."""
    yield
    ray.shutdown()


async def test_servers_run_on_their_ports_with_their_own_gpus(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    async with open_fleet(ray_cluster, tmp_path) as fleet:
        first = await fleet.slot(0, node=0)
        second = await fleet.slot(1, node=0)

        await asyncio.gather(fleet.start(first), fleet.start(second))

        missing_page = await fleet.host.ask(0, Ask(method="GET", path="/nothing"), 5.0)
        assert missing_page is not None and "HTTP 404" in missing_page
        assert await fleet.host.ports_taken([first]) == {0}
        server_processes = [process for slot in (first, second) for process in find_processes(slot)]
        leftovers = await fleet.host.stop([0, 1], grace_s=1.0)

    assert leftovers == ()
    assert len(server_processes) == 4
    assert not any(process.is_running() for process in server_processes)
    logs = [(tmp_path / f"rollout-r{rank}.log").read_text().split() for rank in (0, 1)]
    gpus = [log[1].split(",") for log in logs]
    assert len(gpus[0]) == len(gpus[1]) == 4
    assert not set(gpus[0]) & set(gpus[1])


async def test_port_is_reserved_on_its_node_until_its_server_starts(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    async with open_fleet(ray_cluster, tmp_path, bundles=2) as fleet:
        first = await fleet.slot(0, node=0)
        second = await fleet.slot(1, node=1)

        for slot in (first, second):
            assert slot.port is not None
            with pytest.raises(OSError, match="in use"):
                socket.create_server(("", slot.port))
        # A port that is reserved for a server does not count as taken.
        assert await fleet.host.ports_taken([first, second]) == frozenset()
        await fleet.start(first)
        assert await fleet.host.ports_taken([first, second]) == {0}
        for keeper in list_port_keepers(ray_cluster):
            keeper.kill()
        assert await fleet.host.hold_ports(0, ["server.0"]) != [first.port]
        await fleet.start(second)

    async def have_keepers_ended() -> bool:
        return not list_port_keepers(ray_cluster)

    await until_true(have_keepers_ended)


def list_port_keepers(cluster: RayCluster) -> list[psutil.Process]:
    """Return the processes, on all nodes, that keep the ports of servers reserved."""
    keepers = []
    for node in cluster.nodes:
        for process in psutil.Process(node.raylet).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                keepers += [process] if "ray::PortKeeper" in " ".join(process.cmdline()) else []
    return keepers


async def test_gpus_of_a_fleet_count_as_gpus_of_its_run(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    cluster = ClusterReader(ray_cluster.address, Credentials(has_token=False))
    async with open_fleet(ray_cluster, tmp_path):

        async def is_reported() -> bool:
            use = await cluster.look(within_s=_WITHIN_S)
            return sum(use.used.get(_RUN, {}).values()) == 16

        await until_true(is_reported)
        use = await cluster.look(within_s=_WITHIN_S)
    await cluster.close()

    assert [node.others_gpus for node in use.nodes if node.gpus] == [0, 0]


async def test_reported_death_has_the_last_output_of_the_server(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    async with open_fleet(ray_cluster, tmp_path, bundles=1) as fleet:
        slot = await fleet.slot(0, node=0)
        await fleet.start(slot, epoch=7)

        find_processes(slot)[0].send_signal(signal.SIGKILL)
        death = await asyncio.wait_for(fleet.deaths.get(), _WITHIN_S)

        assert (death.rank, death.epoch, death.why) == (0, 7, "killed by SIGKILL")
        assert "serving" in death.log_end
        assert await fleet.host.ask(0, _HEALTH, 5.0) == "the server of rank 0 is not running"
        assert find_processes(slot) == []
        # The server can be started again on the same node and port. Each start is a new epoch.
        await fleet.start(slot, epoch=8)


@pytest.mark.thorough
async def test_the_death_of_an_actor_ends_its_server_and_can_be_recovered(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    async with open_fleet(ray_cluster, tmp_path, bundles=1) as fleet:
        slot = await fleet.slot(0, node=0)
        await fleet.start(slot)
        server_processes = find_processes(slot)
        [front_process] = [
            process for process in server_processes[0].parents() if "--grace" in process.cmdline()
        ][-1:]
        actor = front_process.parent()
        assert actor is not None

        actor.kill()
        death = await asyncio.wait_for(fleet.deaths.get(), _WITHIN_S)

        assert "actor died" in death.why
        async with asyncio.timeout(_WITHIN_S):
            while any(process.is_running() for process in server_processes):
                await asyncio.sleep(0.05)
        await fleet.start(slot, epoch=2)


async def test_fleet_that_does_not_fit_on_the_cluster_is_refused(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    with pytest.raises(
        NoHost, match=r"had no room for the servers of the fleet .* 1 CPU, 8 GPU \+"
    ):
        async with open_fleet(ray_cluster, tmp_path, bundles=3, within_s=2.0):
            raise AssertionError("the cluster has no three nodes with 8 GPUs")


@pytest.mark.thorough
async def test_missing_program_is_reported(ray_cluster: RayCluster, tmp_path: Path) -> None:
    async with open_fleet(ray_cluster, tmp_path, bundles=1) as fleet:
        slot = await fleet.slot(0, node=0)
        broken = replace(slot, argv=("no-such-server",))

        with suppress(StartFailed):
            await fleet.host.start(broken, 1)
            death = await asyncio.wait_for(fleet.deaths.get(), _WITHIN_S)
            assert death.why == "exit 127"
            assert "no-such-server" in death.log_end
