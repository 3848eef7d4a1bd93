"""Where the servers of a fleet run: processes of this machine, or actors on a Ray cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence

from tasks.processes.guarded import Forked
from tasks.processes.identity import ProcessId
from tasks.processes.ports import PortsReserved
from tasks.processes.registry import Entry, PartsRegister
from tasks.rollout.addresses import Addresses, nodes_needed, ports_needed
from tasks.rollout.hosts import NoHost, OpenedHost
from tasks.rollout.local_host import LocalHost
from tasks.rollout.plan import LOOPBACK, SERVERS_ENV, FleetPlan
from tasks.rollout.rollout_building import build
from tasks.rollout.topology import ServerSlot, TopologyPlan
from tasks.spec.rollout import Rollout
from tasks.spec.run import FLEET

_DEVICES = "CUDA_VISIBLE_DEVICES"
#: Of this process only.
_OWN_ENV = (SERVERS_ENV, "NOTIFY_SOCKET")


async def opened_host(plan: FleetPlan, fleet: Rollout) -> OpenedHost:
    """Raises: NoHost. A cancel leaves nothing."""
    try:
        if plan.ray is not None:
            from tasks.rollout.on_ray import opened_on_ray

            return await opened_on_ray(plan, fleet, servers_env())
        return _on_this_machine(plan, fleet)
    except (KeyError, ValueError) as error:
        raise NoHost(f"the fleet has no place: {error}") from error


def servers_env() -> dict[str, str]:
    """What servers get of this process's variables, beside their own."""
    return {key: value for key, value in os.environ.items() if key not in _OWN_ENV}


def _on_this_machine(plan: FleetPlan, fleet: Rollout) -> OpenedHost:
    ports = _LocalPorts(plan, fleet)
    parts = PartsRegister(plan.register_at, FLEET) if plan.register_at else None

    def register(rank: int, forked: Forked) -> None:
        if parts is not None:
            parts.enter(_part(rank), _entry(plan, fleet, forked))

    def unregister(rank: int) -> None:
        if parts is not None:
            parts.leave(_part(rank))

    host = LocalHost(
        cwd=plan.cwd,
        env=servers_env(),
        log_of=plan.log_of,
        tag={
            "MUSTER_RUN_ID": plan.run_id,
            "MUSTER_ATTEMPT": str(plan.attempt),
            "MUSTER_COMPONENT": FLEET,
        },
        stop_signal=signal.Signals[fleet.stop.signal],
        grace_s=fleet.stop.grace_s,
        register=register,
        unregister=unregister,
    )
    return OpenedHost(host=host, topology=ports.topology(), rebind=ports.rebound, close=host.close)


class _LocalPorts:
    """The ports of a fleet on this machine: at first those that the run held for it."""

    def __init__(self, plan: FleetPlan, fleet: Rollout) -> None:
        self._fleet = fleet
        self._node_gpus = plan.node_gpus
        self._ports: dict[str, int] = dict(plan.ports)
        self._hosts = (LOOPBACK,) * nodes_needed(fleet, plan.node_gpus)
        self._devices = devices_of(fleet, os.environ)
        #: Kept from other runs as long as this process lives.
        self._reserved: list[PortsReserved] = []

    def topology(self) -> TopologyPlan:
        """Raises: ValueError, KeyError."""
        addresses = Addresses(hosts=self._hosts, ports=self._ports, devices=self._devices)
        return build(self._fleet, addresses, self._node_gpus)

    def rebound(self, group: int) -> Sequence[ServerSlot]:
        """The servers of a group, each at a port that is free now. Raises: OSError."""
        engine = self.topology().engines[group]
        ranks = {f"server.{server.rank}" for server in engine.servers}
        wanted = [
            need.name
            for need in ports_needed(self._fleet, self._node_gpus)
            if need.name in ranks or need.name == f"engine.{group}"
        ]
        reserved = PortsReserved(f"{FLEET}.{name}" for name in wanted)
        reserved.release(FLEET)
        self._reserved.append(reserved)
        self._ports |= {name: reserved.numbers[f"{FLEET}.{name}"] for name in wanted}
        return self.topology().engines[group].servers


def devices_of(fleet: Rollout, env: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that this process may use, and so its servers; empty: any, or as the fleet says.

    Args:
        env: of this process.
    """
    written = "" if _DEVICES in fleet.env else env.get(_DEVICES, "")
    return tuple(device.strip() for device in written.split(",") if device.strip())


def _entry(plan: FleetPlan, fleet: Rollout, forked: Forked) -> Entry:
    return Entry(
        run_id=plan.run_id,
        attempt=plan.attempt,
        component=FLEET,
        level=plan.level,
        mark=forked.mark,
        guardian=ProcessId.of(forked.guardian_pid),
        process=ProcessId.of(forked.pid),
        grace_s=fleet.stop.grace_s,
    )


def _part(rank: int) -> str:
    return f"r{rank}"
