"""The component `rollout` of a run: `python -m tasks.rollout.process`, with its plan in PLAN_ENV.

Holds the fleet from its start to its end: servers, their gateway, health, recovery. What happens is
a line on stdout for a reader, and one of JSON in `rollout.jsonl` for the run. SIGTERM ends it.

Exit status: 0 it was told to end · 1 the fleet can't go on, the last line says why · 2 it, or its
gateway, has no place: nothing was started.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import uvloop

from tasks.processes import tree
from tasks.processes.devices import kind_here
from tasks.processes.progress import ever_more_seldom
from tasks.record.disk import DiskThread
from tasks.record.events import Emit, Event, EventLog
from tasks.rollout.component import PLAN_ENV, FleetPlan
from tasks.rollout.fleet import Fleet, FleetFailed
from tasks.rollout.gateway import Gateway
from tasks.rollout.local_host import LocalHost
from tasks.rollout.probing import HttpProber, NoHost, ServerHost
from tasks.rollout.topology import Addresses, ServerSlot, TopologyPlan, build, ports_needed
from tasks.spec.rollout import Rollout
from tasks.spec.run_rules import DEVICE_VARIABLES
from tasks.spec.secrets import mask_logs
from tasks.spec.values import select_literals

_T = TypeVar("_T")
#: Of this process only.
_OWN_ENV = (PLAN_ENV, "NOTIFY_SOCKET")
#: For the last events, on a disk that takes nothing.
_WRITTEN_WITHIN_S = 2.0


async def _opened(plan: FleetPlan, disk: DiskThread) -> tuple[ServerHost, Places, TopologyPlan]:
    """What runs the servers, and where they are. Raises: NoHost. A cancel leaves nothing."""
    # What servers get of this process's variables, beside their own.
    env = {key: value for key, value in os.environ.items() if key not in _OWN_ENV}
    host: ServerHost
    more: dict[str, Any] = {}
    try:
        if plan.ray is not None:
            from tasks.rollout.ray_host import RayHost

            host = await RayHost.open(plan, env)
        else:
            host, kind = LocalHost(plan, env, disk), kind_here()
            more = {"devices": devices_of(plan.fleet, os.environ, kind), "kind": kind}
        places = Places(plan, host, **more)
        try:
            return host, places, await places.found()
        except BaseException:
            await host.close()
            raise
    except (KeyError, ValueError) as error:
        raise NoHost(f"the fleet has no place: {error}") from error


class Places:
    """Where the servers of a fleet are; `more` is of `Addresses`. A cluster moves them from a lost
    node."""

    def __init__(self, plan: FleetPlan, host: ServerHost, **more: Any) -> None:
        self._plan, self._host, self._more = plan, host, more
        self._ports = dict(plan.ports)

    async def found(self) -> TopologyPlan:
        """The whole plan: on this machine at the ports that the run has held, else at free ones,
        for all of which each node is asked once."""
        if self._plan.ray is not None:
            await self._take_ports(range(self._plan.fleet.engines))
        return await self._topology()

    async def rebound(self, group: int) -> Sequence[ServerSlot]:
        """The servers of a group where they are now, each at a port that is free now."""
        await self._take_ports([group])
        return (await self._topology()).engines[group].servers

    async def _topology(self) -> TopologyPlan:
        # On a cluster after ports were asked for there, which waits until the node is there.
        hosts = await self._host.hosts()
        addresses = Addresses(hosts=hosts, ports=self._ports, **self._more)
        return build(self._plan.fleet, addresses, self._plan.node_gpus)

    async def _take_ports(self, groups: Collection[int]) -> None:
        by_node: dict[int, list[str]] = {}
        needs = ports_needed(self._plan.fleet, self._plan.node_gpus, groups)
        for name, node in needs.items():
            by_node.setdefault(node, []).append(name)
        found = await asyncio.gather(
            *(self._host.hold_ports(node, wanted) for node, wanted in by_node.items())
        )
        for wanted, numbers in zip(by_node.values(), found, strict=True):
            self._ports |= dict(zip(wanted, numbers, strict=True))


def devices_of(fleet: Rollout, env: Mapping[str, str], kind: str) -> tuple[str, ...]:
    """The GPUs of a kind (nvidia | amd | ascend) that its own variables allow a fleet, or those of
    the environment `env` this process; empty: any."""
    named = {**env, **select_literals(fleet.env)}
    written = next(
        (named[variable] for variable in DEVICE_VARIABLES[kind] if named.get(variable)), ""
    )
    return tuple(device.strip() for device in written.split(",") if device.strip())


_log = logging.getLogger("fleet")

EXIT_STOPPED, EXIT_FAILED, EXIT_NOT_STARTED = 0, 1, 2
#: For requests under way when the fleet ends, once their servers are gone: to be answered.
_ANSWERS_WITHIN_S = 2.0
#: Libraries that would say more than the fleet does.
_TALKATIVE = ("httpx", "httpcore", "asyncio", "ray")


def main() -> int:
    """The exit status, once the fleet has ended."""
    # With a level, so that a line that tells of a server's end is no cause of the run's.
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    with contextlib.suppress(OSError):  # At level L1.
        tree.become_subreaper()
    plan = FleetPlan.of(os.environ)
    with mask_logs(plan.mask):
        try:
            return run_serving(_run(plan))
        except NoHost as error:
            return _say_last(plan.mask(str(error)), EXIT_NOT_STARTED)


def run_serving(main: Coroutine[Any, Any, _T]) -> _T:
    """As `asyncio.run`, at less CPU a request: most of what one leaves needs no collector."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    return uvloop.run(main)


async def _run(plan: FleetPlan) -> int:
    serving = asyncio.create_task(_serve(plan))

    def end() -> None:
        if not serving.cancelling():
            serving.cancel()

    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, end)
    await asyncio.wait([serving])
    if not serving.cancelled():
        return serving.result()
    _log.info("stopped")
    return EXIT_STOPPED


async def _serve(plan: FleetPlan) -> int:
    """The exit status, once the fleet can't go on. Raises: NoHost. A cancel ends it, in order."""
    disk = DiskThread("disk")
    events = EventLog(plan.place.fleet_events, (_say,), mask=plan.mask, disk=disk)
    host, places, topology = await _opened(plan, disk)
    try:
        fleet = Fleet(
            topology,
            settings=plan.fleet,
            host=host,
            prober=HttpProber(host.listeners),
            emit=events.emit,
            rebind=places.rebound,
            serves_as_loaded=plan.serves_as_loaded,
        )
        gateway = Gateway(
            fleet,
            host=plan.fleet.host,
            port=plan.port,
            token=plan.token or None,
            order_token=plan.order_token or None,
            listeners=host.listeners,
            servers=len(topology.servers),
        )
        try:
            await gateway.start()
        except OSError as error:
            where = f"{plan.fleet.host}:{plan.port}"
            return _say_last(f"the gateway can't listen on {where}: {error}", EXIT_NOT_STARTED)
        fleet.url = gateway.url
        _log.info("gateway on %s", gateway.url)
        return _say_last(plan.mask(await _until_over(fleet, gateway, events.emit)), EXIT_FAILED)
    finally:
        try:
            await host.close()
        except Exception:
            _log.exception("the host of the servers could not be closed")
        await asyncio.to_thread(disk.flush, _WRITTEN_WITHIN_S)


async def _until_over(fleet: Fleet, gateway: Gateway, emit: Emit) -> str:
    """Why the fleet can't go on; it and its gateway have been stopped, as after a cancel."""

    def tell() -> None:
        if load := gateway.metrics.load():
            emit("rollout.load", requests=load)

    async def tell_load() -> None:
        async for _ in ever_more_seldom():
            tell()

    telling = asyncio.create_task(tell_load())
    try:
        await fleet.start()
        return await asyncio.shield(fleet.fatal)
    except FleetFailed as error:
        return str(error)
    finally:
        # Side by side: a request whose server goes is answered by the gateway, which says so.
        left, _ = await asyncio.gather(fleet.stop(), gateway.stop(_ANSWERS_WITHIN_S))
        telling.cancel()
        tell()
        if left:
            _log.warning("could not be ended: %s", left)


def _say(event: Event) -> None:
    fields = " ".join(f"{key}={value}" for key, value in event.fields.items() if value != "")
    level = logging.WARNING if event.name in _WARNINGS else logging.INFO
    _log.log(level, "%s %s", event.name.removeprefix("rollout."), " ".join(fields.split()))


_WARNINGS = frozenset({"rollout.server.died", "rollout.warning"})


def _say_last(reason: str, status: int) -> int:
    """The reason as the last line, after what it quotes: by that the run is explained."""
    first, _, quoted = reason.partition("\n")
    print(f"{quoted}\nFleetError: {first}" if quoted else f"FleetError: {first}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
