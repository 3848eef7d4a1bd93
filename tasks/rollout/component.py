"""The fleet of inference servers as the component `rollout` of a run.

This module checks the fleet in a run spec and plans the fleet's process. It also forwards the
events that this process writes into the events of the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from secrets import token_urlsafe
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from tasks.processes.component import ComponentPlan
from tasks.processes.containment import Containment, Level
from tasks.processes.guarded import Command
from tasks.processes.own_modules import make_own_command
from tasks.ray.dashboard import CLUSTERS_VARIABLE
from tasks.record.events import Emit, Event
from tasks.record.log_bound import LogBound
from tasks.record.log_file import LogFile
from tasks.record.places import AttemptPlace
from tasks.rollout.topology import (
    EVERY_ADDRESS,
    LOOPBACK,
    TopologyPlan,
    gateway_url,
    is_loopback,
    plan_topology,
    ports_needed,
)
from tasks.spec.component import FLEET, OnExitZero
from tasks.spec.errors import Fault
from tasks.spec.placeholders import ROLLOUT_ENGINES, ROLLOUT_URL, find_uses
from tasks.spec.probes import LiveProbe, ReadyProbe
from tasks.spec.rollout import Rollout
from tasks.spec.run import RunSpec
from tasks.spec.secrets import find_argument_secrets, find_env_secrets, mask_text

#: Environment variable in which a component finds its token for the fleet's gateway.
TOKEN_ENV = "MUSTER_ROLLOUT_TOKEN"
#: Name of the component that receives the gateway's order token. This token allows requests that
#: change the fleet. In a run without this component, all components receive the order token.
TRAINER = "trainer"
#: Environment variable in which the fleet's process finds its `FleetPlan` as JSON.
PLAN_ENV = "MUSTER_ROLLOUT_PLAN"
#: Number of seconds by which the grace period of the fleet's process is longer than the grace
#: period of the servers. The fleet's process needs up to 20 s of this time to kill the servers
#: (`recovery.STOPPED_WITHIN_S`).
STOP_MARGIN_S = 30.0

#: Prefix of the names of server ports among the ports of a run, as in `rollout.ports.server.0`.
_PORTS_PREFIX = f"{FLEET}.ports."
#: Name of the gateway's port among the ports of a run.
_GATEWAY_PORT = f"{FLEET}.port"
#: Seconds that the start of a fleet on this machine may take, in addition to the key
#: `start_within_s` of the spec.
_START_MARGIN_S = 60.0
#: Seconds that the start of a fleet on Ray may take, in addition to the key `start_within_s` of
#: the spec. The fleet first waits up to 300 s for free GPUs (`ray_host._ROOM_WITHIN_S`).
_RAY_START_MARGIN_S = 360.0
#: Seconds between two liveness probes of the fleet's gateway.
_LIVE_EVERY_S = 10.0
#: Example addresses of another machine, reserved for documentation (RFC 5737, RFC 3849). Muster
#: asks the kernel which local address is used for packets to these addresses; nothing is sent.
_REMOTE_ADDRESSES = ("198.51.100.1", "2001:db8::1")
#: Port number to use with `_REMOTE_ADDRESSES`. The number is arbitrary, because no packet is sent.
_ANY_PORT = 9
#: Environment variables that stop Ray from logging a native stack trace at SIGTERM. A fleet is
#: normally ended with SIGTERM.
_QUIET_RAY = {"RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
#: Seconds between two reads of the file into which the fleet's process writes its events.
_READ_EVERY_S = 0.1

_log = logging.getLogger(__name__)


def fleet_ports(spec: RunSpec) -> tuple[str, ...]:
    """Return the names of the ports on this machine that a run must reserve for inference servers.

    The port of the fleet's gateway is not included: `list_required_ports` lists this port.

    Returns:
        The names; empty if the run has no fleet, or if its servers run on Ray.
    """
    if spec.fleet is None or spec.fleet.placement != "local":
        return ()
    return tuple(f"{_PORTS_PREFIX}{name}" for name in ports_needed(spec.fleet, node_gpus(spec)))


def node_gpus(spec: RunSpec) -> int | None:
    """Return the number of GPUs that a run requests on each node, or None if it requests none."""
    return spec.gang.gpus_per_node if spec.gang is not None else None


def fleet_names(spec: RunSpec, ports: Mapping[str, int]) -> dict[str, str]:
    """Return the values of the placeholders `${rollout.url}` and `${rollout.engines}` in a run
    spec.

    Args:
        spec: The run spec.
        ports: Port numbers of the run by their names.

    Returns:
        Mapping from placeholder name to value: the gateway's URL, and the addresses of the
            entrypoints as `host:port,host:port`. If the fleet runs on Ray, the mapping has no
            addresses. Empty if the run has no fleet of inference servers.
    """
    fleet = spec.fleet
    if fleet is None:
        return {}
    host = fleet.host
    if host in EVERY_ADDRESS and _remote_uses(spec, ROLLOUT_URL):
        host = _find_reachable_address(spec, host) or host
    names = {ROLLOUT_URL: gateway_url(host, ports[_GATEWAY_PORT])}
    if fleet.placement == "local":
        slots = plan_topology(fleet, node_gpus(spec)).servers
        entrypoint_ports = [
            ports[f"{_PORTS_PREFIX}server.{slot.rank}"] for slot in slots if slot.is_entrypoint
        ]
        names[ROLLOUT_ENGINES] = ",".join(f"{LOOPBACK}:{port}" for port in entrypoint_ports)
    return names


def _find_reachable_address(spec: RunSpec, host: str) -> str | None:
    """Return the address of this machine that the nodes of the run's Ray cluster can reach.

    The address is that of the network interface that routes to the cluster's head node. If this
    machine is the head node, the interface that routes to other machines is used.

    Args:
        spec: The run spec.
        host: Address on which the gateway listens, `0.0.0.0` or `::`.

    Returns:
        The address, or None if this machine has only loopback addresses.
    """
    head = urlsplit(spec.ray.address or "").hostname if spec.ray is not None else None
    family = socket.AF_INET if host == "0.0.0.0" else socket.AF_UNSPEC
    for remote in filter(None, (head, *_REMOTE_ADDRESSES)):
        with contextlib.suppress(OSError):
            lookups = socket.getaddrinfo(remote, _ANY_PORT, family, socket.SOCK_DGRAM)
            socket_family, socket_type, protocol, _, remote_address = lookups[0]
            with socket.socket(socket_family, socket_type, protocol) as datagram_socket:
                # Connecting a UDP socket sends no packet. The kernel only chooses the local address
                # of the socket.
                datagram_socket.connect(remote_address)
                own_address = str(datagram_socket.getsockname()[0])
            if not is_loopback(own_address):
                return own_address
    return None


def fleet_faults(spec: RunSpec, fleet: Rollout) -> list[Fault]:
    """Return the faults in a run spec that are found by planning its inference servers."""
    try:
        plan = plan_topology(fleet, node_gpus(spec))
    except ValueError as error:
        remedy = (
            "change gang.gpus_per_node, or the key that sets the number of GPUs of an engine, for "
            "example tensor_parallel"
        )
        return [Fault(path=f"components.{FLEET}", problem=str(error), remedy=remedy)]
    return [
        *_placement_faults(plan),
        *_gang_faults(spec, plan),
        *_address_faults(spec, fleet),
    ]


def _placement_faults(plan: TopologyPlan) -> Iterator[Fault]:
    """Yield a fault if an inference engine that has to run on a single node spans several nodes.

    Two kinds of engines have to run on a single node: engines on this machine, and engines on Ray
    that have only one server.
    """
    # Check only the first engine, because all engines of a fleet have the same size.
    first_engine = plan.engines[0]
    node_count = len(first_engine.nodes)
    has_one_server = len(first_engine.servers) == 1
    path = f"components.{FLEET}.nodes_per_engine"
    if node_count > 1 and plan.placement == "local":
        problem = (
            "with `placement: local`, an engine runs only on this machine, but here an engine "
            f"needs {node_count} nodes"
        )
        remedy = "write `nodes_per_engine: 1`"
        if not has_one_server:
            remedy += ", or placement: ray"
        yield Fault(path=path, problem=problem, remedy=remedy)
    elif node_count > 1 and has_one_server:
        problem = (
            f"an engine needs {node_count} nodes, but has only one server. This server would "
            "request the GPUs of the other nodes from Ray. But these GPUs are not free: Ray has "
            "already reserved all GPUs of the run for Muster"
        )
        remedy = (
            "write `nodes_per_engine: 1`. Or set expert_parallel, which starts one server for each "
            "rank"
        )
        yield Fault(path=path, problem=problem, remedy=remedy)


def _address_faults(spec: RunSpec, fleet: Rollout) -> Iterator[Fault]:
    """Yield a fault for each component that uses an address of the fleet but cannot reach it.

    If the engines run on Ray, each use of `${rollout.engines}` is a fault, because the addresses of
    the engines are unknown when the run starts.
    """
    host = f"components.{FLEET}.host"
    for path, name in _remote_uses(spec, ROLLOUT_URL):
        if is_loopback(fleet.host):
            problem = (
                f"{name} runs on the Ray cluster, and cannot reach the gateway of the inference "
                f"servers, which listens only on {fleet.host}"
            )
            remedy = f'write `{host}: "0.0.0.0"`, or an address of this machine'
            yield Fault(path=path, problem=problem, remedy=remedy)
        elif fleet.host in EVERY_ADDRESS and _find_reachable_address(spec, fleet.host) is None:
            problem = (
                f"{name} runs on the Ray cluster, and cannot reach the gateway of the inference "
                "servers, because this machine has only loopback addresses"
            )
            remedy = f"set {host} to an address of this machine that the cluster can reach"
            yield Fault(path=path, problem=problem, remedy=remedy)

    remote_components = dict(_remote_uses(spec, ROLLOUT_ENGINES))
    for use in find_uses(spec.written()):
        if use.name != ROLLOUT_ENGINES:
            continue
        if fleet.placement == "ray":
            problem = (
                f"{use}: Muster knows the addresses of engines on Ray only after the engines have "
                "started"
            )
            remedy = (
                f"let the program read the addresses from GET ${{{ROLLOUT_URL}}}/muster/rollout"
            )
            yield Fault(path=use.path, problem=problem, remedy=remedy)
        elif use.path in remote_components:
            name = remote_components[use.path]
            problem = (
                f"{name} runs on the Ray cluster, and cannot reach engines with `placement: "
                "local`, which listen only on this machine"
            )
            remedy = (
                f"use the gateway, with its URL ${{{ROLLOUT_URL}}}. Or write `launcher: process`, "
                f"so that {name} runs on this machine"
            )
            yield Fault(path=use.path, problem=problem, remedy=remedy)


def _remote_uses(spec: RunSpec, placeholder: str) -> list[tuple[str, str]]:
    """Return the uses of a placeholder by components that may run on another machine.

    Uses in the probes of a component are omitted, because Muster sends probes from this machine.

    Returns:
        `(path, component)` of each use: the path of the spec key, and the component's name.
    """
    remote_components = [
        name for name, component in spec.processes.items() if component.launcher == "ray_job"
    ]
    if spec.fleet is not None and spec.fleet.placement == "ray":
        remote_components.append(FLEET)

    uses: list[tuple[str, str]] = []
    for use in find_uses(spec.written()):
        if use.name != placeholder:
            continue
        section, *keys = use.path.split(".")
        if section == "env" and remote_components:
            # All components get the variables of the spec's section `env`. So each component that
            # may run on another machine uses the placeholder. Return only the first of these
            # components, because one name is enough for an error message.
            uses.append((use.path, remote_components[0]))
        elif (
            section == "components"
            and keys[1] not in ("ready", "live")
            and keys[0] in remote_components
        ):
            uses.append((use.path, keys[0]))
    return uses


def _gang_faults(spec: RunSpec, plan: TopologyPlan) -> Iterator[Fault]:
    """Yield a fault if the run requests fewer GPUs than its inference engines need."""
    if spec.gang is None:
        return
    path = f"components.{FLEET}.engines"
    engine_count = len(plan.engines)
    needed_gpus = sum(len(slot.bundles) for slot in plan.servers)
    gang_gpus = spec.gang.nodes * spec.gang.gpus_per_node
    engines_on_first_node = sum(engine.nodes[0] == 0 for engine in plan.engines)
    if needed_gpus > gang_gpus:
        problem = (
            f"the {engine_count} engines need {needed_gpus} GPUs, but the run has only {gang_gpus} "
            "(`gang`)"
        )
        remedy = "request fewer engines, or more GPUs in `gang`"
        yield Fault(path=path, problem=problem, remedy=remedy)
    elif plan.placement == "local" and engines_on_first_node < engine_count:
        problem = (
            "with `placement: local`, all engines run on this machine, but gang.gpus_per_node is "
            f"enough for only {engines_on_first_node} of {engine_count} engines"
        )
        remedy = f"write `engines: {engines_on_first_node}`, or `placement: ray`"
        yield Fault(path=path, problem=problem, remedy=remedy)


class FleetPlan(BaseModel):
    """Plan of one attempt's fleet of inference servers.

    The fleet's process reads the plan as JSON from an environment variable.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    #: Number of the attempt, from 1.
    attempt: int
    #: The fleet's section of the spec, with all placeholders replaced by values. The field `env` of
    #: this section holds all variables that Muster sets for the servers.
    fleet: Rollout = Field(repr=False)
    #: Port of the gateway.
    port: int
    #: Mapping from the name of a reserved port, such as `server.0`, to its number. Empty if the
    #: servers run on Ray.
    ports: Mapping[str, int]
    #: Number of GPUs that the run requests on each node, or None if the run needs no GPUs.
    node_gpus: int | None = None
    #: URL of the Ray cluster's dashboard, or None if the servers run on this machine.
    ray: str | None = None
    #: Absolute path of the servers' working directory.
    cwd: Path
    #: Absolute path of the attempt's directory, which holds logs and events.
    directory: Path
    #: Registry directory of the run, in which each server gets an entry. None if the servers need
    #: no entries, because Ray or a PID namespace ends them.
    register_at: Path | None = None
    #: True if the servers accept requests as soon as they have started. False if they first wait
    #: for weights from the trainer.
    serves_as_loaded: bool = True
    #: Token that the gateway requires in requests for generation. Empty if no token is needed.
    token: str = Field("", repr=False)
    #: Token that the gateway requires in requests that change the fleet, such as a weight sync.
    #: Empty if no token is needed.
    order_token: str = Field("", repr=False)
    #: Secrets of the run, in addition to those in the other fields of this plan.
    secrets: frozenset[str] = Field(frozenset(), repr=False)

    @property
    def place(self) -> AttemptPlace:
        """Paths of the attempt's files."""
        return AttemptPlace(directory=self.directory, number=self.attempt)

    @property
    def tokens(self) -> frozenset[str]:
        """The tokens that the gateway accepts; empty if it requires no token."""
        return frozenset({self.token, self.order_token} - {""})

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of the fleet's process, with the plan and the gateway's token."""
        token = {TOKEN_ENV: self.token} if self.token else {}
        return {**token, PLAN_ENV: self.model_dump_json(exclude_unset=True)}

    @staticmethod
    def of(env: Mapping[str, str]) -> FleetPlan:
        """Return the plan that the environment of the fleet's process contains."""
        return FleetPlan.model_validate_json(env[PLAN_ENV])

    def mask(self, text: str) -> str:
        """Return the text with all secrets of the fleet and its run replaced by a mask."""
        fleet = self.fleet
        argument_secrets = find_argument_secrets([*(fleet.command or ()), *(fleet.args or ())])
        env_secrets = find_env_secrets(fleet.env)
        return mask_text(text, self.secrets | env_secrets | argument_secrets | self.tokens)

    def env_of(self, component: str, *, others: Collection[str]) -> dict[str, str]:
        """Return the environment variables that the fleet adds to a component of the run.

        Args:
            component: Name of the component.
            others: Names of all components of the run, including this component.

        Returns:
            The variable with the component's token for the gateway; empty if the gateway requires
            no token.
        """
        gives_orders = component == TRAINER or TRAINER not in others
        token = self.order_token if gives_orders else self.token
        return {TOKEN_ENV: token} if token else {}

    def log_of(self, rank: int) -> Path:
        """Return the path of the log of the server with this rank."""
        return self.place.log(f"{FLEET}-r{rank}")

    @property
    def log_bound(self) -> LogBound | None:
        """Largest size of the log of each server, or None for no bound."""
        limit_bytes = self.fleet.log_max_bytes
        return LogBound(limit_bytes=limit_bytes) if limit_bytes is not None else None


def prepare_fleet(
    spec: RunSpec,
    run_id: str,
    place: AttemptPlace,
    containment: Containment,
    ports: Mapping[str, int],
    register_at: Path,
    *,
    resumes: bool = False,
    secrets: frozenset[str] = frozenset(),
) -> FleetPlan | None:
    """Return the plan of an attempt's inference servers, or None if the run has no such servers.

    Args:
        spec: The run spec, with its placeholders and secrets filled in.
        run_id: Id of the run.
        place: Paths of the attempt's files.
        containment: Kernel features that this machine uses to end all processes of the run.
        ports: The reserved ports of the run, as a mapping from port name to port number.
        register_at: Registry directory of the run. The directory gets an entry for each server.
        resumes: True if the trainer resumes from a checkpoint, so that its weights are newer than
            the weights that the servers load.
        secrets: Secrets of the run, which the fleet's process masks in its output.
    """
    fleet = spec.fleet
    if fleet is None:
        return None
    is_on_ray = fleet.placement == "ray"
    needs_token = fleet.require_token or not is_loopback(fleet.host)
    # Servers on Ray inherit no variables from this machine. So pass them the variables of the
    # spec's section `env` explicitly.
    env = {**(spec.env if is_on_ray else {}), **fleet.env}
    # `muster reconcile` kills the processes in the registry of a lost run. At containment level L4,
    # the servers need no registry entries: they run in a PID namespace, and the kernel ends them
    # together with the first process of the namespace.
    is_registered = containment.level is not Level.L4 and not is_on_ray
    initial_weights = fleet.weights.initial or ("stale" if resumes else "loaded")
    return FleetPlan(
        run_id=run_id,
        attempt=place.number,
        fleet=fleet.model_copy(update={"env": env}),
        port=ports[_GATEWAY_PORT],
        ports={
            name.removeprefix(_PORTS_PREFIX): number
            for name, number in ports.items()
            if name.startswith(_PORTS_PREFIX)
        },
        node_gpus=node_gpus(spec),
        ray=spec.ray.address if spec.ray is not None and is_on_ray else None,
        cwd=Path(fleet.cwd or spec.cwd),
        directory=place.directory,
        register_at=register_at if is_registered else None,
        serves_as_loaded=initial_weights == "loaded",
        token=token_urlsafe(32) if needs_token else "",
        order_token=token_urlsafe(32) if needs_token else "",
        secrets=secrets,
    )


def fleet_component(
    plan: FleetPlan, env: Mapping[str, str], on_exit_zero: OnExitZero
) -> ComponentPlan:
    """Return the plan of the component `rollout`: one process that starts and owns all servers.

    Args:
        plan: Plan of the fleet.
        env: Environment variables of the component `rollout`, including the variables that all
            components get.
        on_exit_zero: Reaction of the run if the fleet's process exits with code 0.
    """
    fleet = plan.fleet
    place = plan.place
    health_url = f"{gateway_url(fleet.host, plan.port)}/muster/health"
    component_env = {**env, **plan.env}
    margin_s = _START_MARGIN_S
    if plan.ray is not None:
        # The list of Ray clusters may contain tokens, so only this component gets the list.
        ray_clusters = os.environ.get(CLUSTERS_VARIABLE, "")
        component_env |= _QUIET_RAY | {CLUSTERS_VARIABLE: ray_clusters}
        margin_s = _RAY_START_MARGIN_S
    return ComponentPlan(
        name=FLEET,
        command=Command(
            argv=make_own_command("tasks.rollout.process"),
            env=component_env,
            cwd=place.directory,
            log=place.log(FLEET),
            grace_s=fleet.stop.grace_s + STOP_MARGIN_S,
        ),
        ready=ReadyProbe.model_validate(
            {
                "http": health_url,
                "json": {"ready": True},
                "within_s": fleet.start_within_s + margin_s,
            }
        ),
        live=LiveProbe(http=health_url, every_s=_LIVE_EVERY_S),
        on_exit_zero=on_exit_zero,
        manages_ports=True,
        log_max_bytes=fleet.log_max_bytes,
    )


class FleetTail:
    """Thread that adds the events of the fleet's process to the events of the run.

    The fleet's process writes its events into a file. The thread reads the file from the call of
    `start` to the call of `close`.
    """

    def __init__(self, path: Path, emit: Emit) -> None:
        """
        Args:
            path: The event file of the fleet's process, with one event in each line.
            emit: Function that adds an event to the run.
        """
        self._path = path
        self._log = LogFile(path)
        self._emit = emit
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="fleet-tail", daemon=True)

    def start(self) -> None:
        """Start the thread that reads the event file of the fleet's process."""
        self._thread.start()

    def close(self) -> None:
        """Forward the last events, and end the thread that reads the event file.

        Call this method after the end of the fleet's process. Further calls do nothing.
        """
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def forward_new_events(self, *, is_last: bool = False) -> None:
        """Forward the events of all lines that were added to the event file since the last call.

        The last line may be incomplete. It is forwarded after the process has written its newline.

        Args:
            is_last: True to forward the last line even if it has no newline.
        """
        for line in self._log.read_new(is_last=is_last):
            try:
                event = Event.from_line(line)
            except ValueError as error:
                _log.warning("%s printed an invalid event: %r: %r", self._path, line[:200], error)
                continue
            fields = {key: value for key, value in event.fields.items() if key != "name"}
            self._emit(event.name, FLEET, at=event.at, **fields)

    def _follow(self) -> None:
        """Forward new events of the fleet's process every `_READ_EVERY_S` seconds.

        After the call of `close`, forward the remaining events, and return.
        """
        is_last = False
        while not is_last:
            # Wait before the read, not after the read. Then the last read comes after the call of
            # `close`, and finds all events of the ended process.
            is_last = self._closing.wait(_READ_EVERY_S)
            self.forward_new_events(is_last=is_last)
