"""Process of the component `rollout`: `python -m tasks.rollout.process`.

The process reads its `FleetPlan` from the environment variable PLAN_ENV. Until SIGTERM, it runs the
inference servers of a run, their gateway, health checks and recovery. It writes each event to
`rollout.jsonl` for the run, and as a line to stdout for people.

Exit status:

- 0: The process was asked to end.
- 1: The fleet cannot continue. The last line of the output gives the reason.
- 2: The servers or the gateway have no machine or no address. No server was started.
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
from tasks.processes.progress import growing_intervals
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
_log = logging.getLogger("fleet")

#: Exit status of the fleet's process after it was stopped with SIGTERM.
EXIT_STOPPED = 0
#: Exit status of the fleet's process if the fleet cannot continue.
EXIT_FAILED = 1
#: Exit status of the fleet's process if no server could be started.
EXIT_NOT_STARTED = 2

#: Environment variables of this process that the servers must not inherit. The variables contain
#: the plan of the fleet with secret tokens, and the socket to which only this process may report
#: its state.
_OWN_VARIABLES = (PLAN_ENV, "NOTIFY_SOCKET", "WATCHDOG_USEC")
#: Seconds that this process waits, at its end, until the last events are on the disk.
_WRITTEN_WITHIN_S = 2.0
#: When the fleet is stopped, the gateway waits this number of seconds for the end of unfinished
#: requests. Then the gateway answers the remaining requests with an error.
_ANSWERS_WITHIN_S = 2.0
#: Libraries with long logs. Only their warnings are logged.
_VERBOSE_LIBRARIES = ("httpx", "httpcore", "asyncio", "ray")
#: Names of the events that appear in the log as warnings.
_WARNING_EVENTS = frozenset({"rollout.server.died", "rollout.warning"})


async def _open_host(plan: FleetPlan, disk: DiskThread) -> tuple[ServerHost, Places, TopologyPlan]:
    """Open the `ServerHost` that will run the servers, and return it with the plan of the fleet.

    If this call fails or is cancelled, it closes the `ServerHost`.

    Args:
        plan: Plan of the fleet.
        disk: Thread for writes to the disk.

    Raises:
        NoHost: There is no machine or no address for the servers.
    """
    # Variables that servers inherit from this process, in addition to their own variables.
    env = {key: value for key, value in os.environ.items() if key not in _OWN_VARIABLES}
    host: ServerHost
    device_fields: dict[str, Any] = {}
    try:
        if plan.ray is not None:
            from tasks.rollout.ray_host import RayHost

            host = await RayHost.open(plan, env)
        else:
            host = LocalHost(plan, env, disk)
            kind = kind_here()
            devices = read_allowed_devices(plan.fleet, os.environ, kind)
            device_fields = {"devices": devices, "kind": kind}
        places = Places(plan, host, **device_fields)
        try:
            return host, places, await places.found()
        except BaseException:
            await host.close()
            raise
    except (KeyError, ValueError) as error:
        raise NoHost(f"Muster could not assign the inference servers to nodes: {error}") from error


class Places:
    """Plans the address, the ports and the GPUs of each server of the fleet.

    Addresses can change, because a Ray cluster moves the servers of a lost node to another node.
    """

    def __init__(self, plan: FleetPlan, host: ServerHost, **device_fields: Any) -> None:
        """
        Args:
            plan: Plan of the fleet.
            host: The `ServerHost` that runs the servers.
            **device_fields: Arguments for `Addresses`: `devices` lists the GPUs that a local fleet
                may use, and `kind` is the kind of these GPUs. Empty for a fleet on Ray.
        """
        self._plan = plan
        self._host = host
        self._device_fields = device_fields
        #: Mapping from the name of a port, such as `server.0`, to its number.
        self._ports = dict(plan.ports)

    async def found(self) -> TopologyPlan:
        """Return the topology of the whole fleet.

        A local fleet uses the ports that the run has reserved. For a fleet on Ray, this method
        reserves free ports, with one request to each node.
        """
        if self._plan.ray is not None:
            await self._reserve_ports(range(self._plan.fleet.engines))
        return await self._build_topology()

    async def rebound(self, group: int) -> Sequence[ServerSlot]:
        """Return the servers of a group with the address of their current node and new, free ports.

        Args:
            group: Index of the group.
        """
        await self._reserve_ports([group])
        return (await self._build_topology()).engines[group].servers

    async def _build_topology(self) -> TopologyPlan:
        """Return the topology with the current hosts and ports.

        For a fleet on Ray, call `_reserve_ports` first, which waits until the nodes exist.
        """
        hosts = await self._host.hosts()
        addresses = Addresses(hosts=hosts, ports=self._ports, **self._device_fields)
        return build(self._plan.fleet, addresses, self._plan.node_gpus)

    async def _reserve_ports(self, groups: Collection[int]) -> None:
        """Reserve new ports for the servers of some groups, with one request to each node.

        Args:
            groups: Indexes of the groups.
        """
        names_of_node: dict[int, list[str]] = {}
        node_of_port = ports_needed(self._plan.fleet, self._plan.node_gpus, groups)
        for name, node in node_of_port.items():
            names_of_node.setdefault(node, []).append(name)
        reserved_ports = await asyncio.gather(
            *(self._host.hold_ports(node, names) for node, names in names_of_node.items())
        )
        for names, numbers in zip(names_of_node.values(), reserved_ports, strict=True):
            self._ports |= dict(zip(names, numbers, strict=True))


def read_allowed_devices(fleet: Rollout, env: Mapping[str, str], kind: str) -> tuple[str, ...]:
    """Return the GPUs that a fleet may use according to variables such as CUDA_VISIBLE_DEVICES.

    Args:
        fleet: Spec of the fleet. The environment variables in the spec take precedence over `env`.
        env: Environment variables of this process.
        kind: Kind of the GPUs: nvidia, amd or ascend.

    Returns:
        Names of the GPUs; empty if no variable limits them.
    """
    variables = {**env, **select_literals(fleet.env)}
    for name in DEVICE_VARIABLES[kind]:
        if variables.get(name):
            devices = (device.strip() for device in variables[name].split(","))
            return tuple(device for device in devices if device)
    return ()


def main() -> int:
    """Run the fleet to its end, and return the exit status of the process."""
    # Write a level such as INFO into each log line. Muster searches this log for the cause of a
    # failed run. Without the level, the line about a server's normal end would look like an error.
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    for name in _VERBOSE_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)
    # Become a subreaper: if a guardian process is killed, the kernel makes this process the parent
    # of the guardian's descendants. If the kernel does not support subreapers, these descendants
    # may survive.
    with contextlib.suppress(OSError):
        tree.become_subreaper()
    plan = FleetPlan.of(os.environ)
    with mask_logs(plan.mask):
        try:
            return run_serving(_run(plan))
        except NoHost as error:
            return _print_last_line(plan.mask(str(error)), EXIT_NOT_STARTED)


def run_serving(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine like `asyncio.run`, with uvloop and fewer runs of the garbage collector.

    Each run of the garbage collector delays requests. CPython frees most objects without the
    garbage collector, when their last reference is gone.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    return uvloop.run(main)


async def _run(plan: FleetPlan) -> int:
    """Serve until SIGTERM or SIGINT, or until the fleet cannot continue. Return the exit status."""
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
    """Run the fleet and its gateway until the fleet cannot continue. Return the exit status.

    If the call is cancelled, the servers and the gateway are stopped before the call ends.

    Raises:
        NoHost: There is no machine or no address for the servers.
    """
    disk = DiskThread("disk")
    events = EventLog(plan.place.fleet_events, (_log_event,), mask=plan.mask, disk=disk)
    host, places, topology = await _open_host(plan, disk)
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
            address = f"{plan.fleet.host}:{plan.port}"
            reason = f"the gateway can't listen on {address}: {error}"
            return _print_last_line(reason, EXIT_NOT_STARTED)
        fleet.url = gateway.url
        _log.info("gateway on %s", gateway.url)
        reason = await _run_until_failure(fleet, gateway, events.emit)
        return _print_last_line(plan.mask(reason), EXIT_FAILED)
    finally:
        try:
            await host.close()
        except Exception:
            _log.exception(
                "An error occurred while Muster ended the inference servers and released their GPUs"
            )
        await asyncio.to_thread(disk.flush, _WRITTEN_WITHIN_S)


async def _run_until_failure(fleet: Fleet, gateway: Gateway, emit: Emit) -> str:
    """Run the fleet until it cannot continue, and return the reason.

    The fleet and the gateway are stopped before the function ends, even if it is cancelled.
    """

    def emit_load() -> None:
        if load := gateway.metrics.load():
            emit("rollout.load", requests=load)

    async def emit_load_repeatedly() -> None:
        async for _ in growing_intervals():
            emit_load()

    load_reports = asyncio.create_task(emit_load_repeatedly())
    try:
        await fleet.start()
        return await asyncio.shield(fleet.fatal)
    except FleetFailed as error:
        return str(error)
    finally:
        # Stop the fleet and the gateway at the same time. While the servers end, the gateway
        # answers open requests with an error that says why the fleet stops.
        results = await asyncio.gather(
            fleet.stop(), gateway.stop(_ANSWERS_WITHIN_S), return_exceptions=True
        )
        load_reports.cancel()
        emit_load()
        for result in results:
            if isinstance(result, BaseException):
                _log.error("the fleet could not be ended", exc_info=result)
            elif result:
                _log.warning(
                    "Muster could not end these processes of the inference servers: %s", result
                )


def _log_event(event: Event) -> None:
    """Write an event to the log as one line."""
    fields = " ".join(f"{key}={value}" for key, value in event.fields.items() if value != "")
    level = logging.WARNING if event.name in _WARNING_EVENTS else logging.INFO
    _log.log(level, "%s %s", event.name.removeprefix("rollout."), " ".join(fields.split()))


def _print_last_line(reason: str, status: int) -> int:
    """Print the reason for the end of this process, and return the exit status.

    The run reports the last printed line as the cause of its failure. So the first line of `reason`
    is printed last, after the quoted lines.

    Args:
        reason: The reason in the first line, and then quoted lines, such as log lines of a server.
        status: The exit status to return.
    """
    first_line, _, quoted_lines = reason.partition("\n")
    last_line = f"FleetError: {first_line}"
    print(f"{quoted_lines}\n{last_line}" if quoted_lines else last_line, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
