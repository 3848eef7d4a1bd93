"""The servers of a fleet on a Ray cluster: room for them, their addresses, their host."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from tasks.ray.dashboard import Denied, NoAnswer, ready_driver
from tasks.ray.nodes import gcs_address_of
from tasks.ray.submission import submission_id
from tasks.ray.submit import wrapper_sources
from tasks.rollout.addresses import Addresses, nodes_needed, ports_needed
from tasks.rollout.hosts import NoHost, OpenedHost
from tasks.rollout.plan import FleetPlan
from tasks.rollout.ray_host import NoPlace, RayHost
from tasks.rollout.rollout_building import build, planned
from tasks.rollout.topology import ServerSlot, TopologyPlan
from tasks.spec.rollout import Rollout
from tasks.spec.run import FLEET

#: What is not free by then: the run has its gang, so nothing else should hold it.
_ROOM_WITHIN_S = 300.0
_CPUS_PER_SERVER = 1.0


async def opened_on_ray(plan: FleetPlan, fleet: Rollout, env: Mapping[str, str]) -> OpenedHost:
    """
    Args:
        env: of every server, beside its own.

    Raises: NoHost; ValueError, KeyError, as `build` does.
    """
    assert plan.ray is not None
    shape = planned(fleet, plan.node_gpus)
    try:
        address = await gcs_address_of(plan.ray)
        ready_driver(address)
        host = await MovingHost.open(
            address,
            bundles_of(shape, nodes_needed(fleet, plan.node_gpus)),
            job=submission_id(plan.run_id, plan.attempt, FLEET, is_only=False),
            within_s=_ROOM_WITHIN_S,
            wrapper=wrapper_sources(),
            log_of=plan.log_of,
            cwd=plan.cwd,
            env={key: value for key, value in env.items() if _is_of_the_run(key)},
            stop_signal=signal.Signals[fleet.stop.signal],
            grace_s=fleet.stop.grace_s,
        )
    except (NoPlace, NoAnswer, Denied, ConnectionError) as error:
        raise NoHost(str(error)) from error
    places = RayPlaces(plan, fleet, host)
    try:
        topology = await places.found()
    except BaseException:
        await host.close()
        raise
    return OpenedHost(host=host, topology=topology, rebind=places.rebound, close=host.close)


class MovingHost(RayHost):
    """Of servers whose machine is another one once the cluster has moved them from a lost node."""

    async def ports_taken(self, slots: Collection[ServerSlot]) -> frozenset[int]:
        """An address that is no more is as good as taken: the server needs another one."""
        gone = moved(slots, await self.hosts())
        here = [slot for slot in slots if slot.rank not in gone]
        return gone | await super().ports_taken(here)


def moved(slots: Collection[ServerSlot], hosts: Sequence[str]) -> frozenset[int]:
    """The ranks of servers with an address that their node does not have any more.

    Args:
        hosts: by node, as they are now.
    """
    return frozenset(
        slot.rank for slot in slots if slot.port is not None and slot.host != hosts[slot.node]
    )


class Nodes(Protocol):
    """The part of `RayHost` that knows the nodes."""

    async def hosts(self) -> tuple[str, ...]: ...
    async def free_ports(self, node: int, count: int) -> list[int]: ...


class RayPlaces:
    """Where the servers of a fleet are on the cluster, which moves them from a lost node."""

    def __init__(self, plan: FleetPlan, fleet: Rollout, host: Nodes) -> None:
        self._plan = plan
        self._fleet = fleet
        self._host = host
        self._ports: dict[str, int] = {}

    async def found(self) -> TopologyPlan:
        """The whole plan, at ports that are free now."""
        await self._take_ports(range(self._fleet.engines))
        return await self._topology()

    async def rebound(self, group: int) -> Sequence[ServerSlot]:
        """The servers of a group where they are now, each at a port that is free now."""
        await self._take_ports([group])
        return (await self._topology()).engines[group].servers

    async def _topology(self) -> TopologyPlan:
        # After ports were asked for there, which waits until the node is there.
        addresses = Addresses(hosts=await self._host.hosts(), ports=self._ports)
        return build(self._fleet, addresses, self._plan.node_gpus)

    async def _take_ports(self, groups: Collection[int]) -> None:
        engines = planned(self._fleet, self._plan.node_gpus).engines
        names = {f"engine.{group}" for group in groups}
        names |= {f"server.{server.rank}" for group in groups for server in engines[group].servers}
        by_node: dict[int, list[str]] = {}
        for need in ports_needed(self._fleet, self._plan.node_gpus):
            if need.name in names:
                by_node.setdefault(need.node, []).append(need.name)
        found = await asyncio.gather(
            *(self._host.free_ports(node, len(wanted)) for node, wanted in by_node.items())
        )
        for wanted, numbers in zip(by_node.values(), found, strict=True):
            self._ports |= dict(zip(wanted, numbers, strict=True))


def bundles_of(shape: TopologyPlan, nodes: int) -> list[dict[str, float]]:
    """`bundles[node]`: the GPUs of all servers that are planned there, and a CPU for each."""
    gpus: Counter[int] = Counter()
    servers: Counter[int] = Counter()
    for slot in shape.servers:
        gpus[slot.node] += len(slot.bundles)
        servers[slot.node] += 1
    return [
        {"CPU": _CPUS_PER_SERVER * max(servers[node], 1)}
        | ({"GPU": float(gpus[node])} if gpus[node] else {})
        for node in range(nodes)
    ]


def _is_of_the_run(name: str) -> bool:
    """The rest of this machine's environment is not true on another; what the spec says is with
    each server."""
    return name.startswith("MUSTER_") or name in ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER")
