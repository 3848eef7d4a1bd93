"""A fleet as a component of a run: from the spec to what a supervisor is to start and what its
process is to do, and what that says brought into the run's events."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from secrets import token_urlsafe
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from tasks.processes.component import ComponentPlan
from tasks.processes.containment import Containment, Level
from tasks.processes.guarded import Command
from tasks.ray.dashboard import CLUSTERS_VARIABLE
from tasks.record.events import Emit, Event
from tasks.record.log_file import LogFile
from tasks.record.places import AttemptPlace
from tasks.rollout.topology import (
    EVERY_ADDRESS,
    LOOPBACK,
    TopologyPlan,
    gateway_url,
    is_loopback,
    planned,
    ports_needed,
)
from tasks.spec.component import FLEET, OnExitZero
from tasks.spec.errors import Fault
from tasks.spec.placeholders import ROLLOUT_ENGINES, ROLLOUT_URL, find_uses
from tasks.spec.probes import LiveProbe, ReadyProbe
from tasks.spec.rollout import Rollout
from tasks.spec.run import RunSpec
from tasks.spec.secrets import find_argument_secrets, find_env_secrets, mask_text

#: Of names of ports: `rollout.ports.server.0`.
_PORTS = f"{FLEET}.ports."
_PORT = f"{FLEET}.port"
#: What the fleet's process needs after its servers' grace period, for what has to be killed.
STOP_MARGIN_S = 30.0
#: What its start needs beside that of a server; on Ray it may wait for room first.
_START_MARGIN_S, _RAY_MARGIN_S = 60.0, 360.0
_LIVE_EVERY_S = 10.0
#: Nobody's, kept for documentation: the way to them is the way to any other machine.
_ELSEWHERE = ("198.51.100.1", "2001:db8::1")
_ANY_PORT = 9
#: Ray would write a native stack into the log at SIGTERM, by which a fleet is told to end.
_QUIET_RAY = {"RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}


def fleet_ports(spec: RunSpec) -> tuple[str, ...]:
    """The names of the ports to hold for the servers of a fleet on this machine; that of its
    gateway is among the run's own."""
    if spec.fleet is None or spec.fleet.placement != "local":
        return ()
    return tuple(f"{_PORTS}{name}" for name in ports_needed(spec.fleet, node_gpus(spec)))


def node_gpus(spec: RunSpec) -> int | None:
    """GPUs of each node that the run may have; None where it asks for none."""
    return spec.gang.gpus_per_node if spec.gang is not None else None


def fleet_names(spec: RunSpec, ports: Mapping[str, int]) -> dict[str, str]:
    """What a fleet adds to the names of a spec, as the components that use them reach it."""
    fleet = spec.fleet
    if fleet is None:
        return {}
    host = fleet.host
    if host in EVERY_ADDRESS and _uses_elsewhere(spec, ROLLOUT_URL):
        host = _address_elsewhere(spec, host) or host
    names = {ROLLOUT_URL: gateway_url(host, ports[_PORT])}
    if fleet.placement == "local":
        slots = planned(fleet, node_gpus(spec)).servers
        taking = (ports[f"{_PORTS}server.{slot.rank}"] for slot in slots if slot.is_entrypoint)
        names[ROLLOUT_ENGINES] = ",".join(f"{LOOPBACK}:{port}" for port in taking)
    return names


def _address_elsewhere(spec: RunSpec, host: str) -> str | None:
    """The address of this machine that the nodes of the run's cluster reach: that by which it
    reaches the cluster's head, or any other machine where the head is on this one. No packet is
    sent; None where it has no address but loopback."""
    head = urlsplit(spec.ray.address or "").hostname if spec.ray is not None else None
    family = socket.AF_INET if host == "0.0.0.0" else socket.AF_UNSPEC
    for other in filter(None, (head, *_ELSEWHERE)):
        with contextlib.suppress(OSError):
            [found, *_] = socket.getaddrinfo(other, _ANY_PORT, family, socket.SOCK_DGRAM)
            with socket.socket(*found[:3]) as one:
                one.connect(found[4])
                own = str(one.getsockname()[0])
            if not is_loopback(own):
                return own
    return None


def fleet_faults(spec: RunSpec, fleet: Rollout) -> list[Fault]:
    """What is wrong with the run's fleet that only building it tells."""
    try:
        plan = planned(fleet, node_gpus(spec))
    except ValueError as error:
        remedy = "change its sizes, or gang.gpus_per_node"
        return [Fault(path=f"components.{FLEET}", problem=str(error), remedy=remedy)]
    return [
        *_faults_of_placement(plan),
        *_faults_of_gang(spec, plan),
        *_faults_of_addresses(spec, fleet),
    ]


def _faults_of_placement(plan: TopologyPlan) -> Iterator[Fault]:
    # All engines are alike.
    nodes, is_one_server = len(plan.engines[0].nodes), len(plan.engines[0].servers) == 1
    path = f"components.{FLEET}.nodes_per_engine"
    if nodes > 1 and plan.placement == "local":
        problem = f"a local fleet is on this machine alone, and an engine spans {nodes}"
        remedy = "write 1" if is_one_server else "write 1, or placement: ray"
        yield Fault(path=path, problem=problem, remedy=remedy)
    elif nodes > 1 and is_one_server:
        problem = (
            "the one server of an engine over several nodes asks Ray for the GPUs of the others by "
            "itself, and the fleet's placement group holds them"
        )
        remedy = "write 1, or expert_parallel, which has a server for each rank"
        yield Fault(path=path, problem=problem, remedy=remedy)


def _faults_of_addresses(spec: RunSpec, fleet: Rollout) -> Iterator[Fault]:
    """What uses an address that it could not reach, or that nobody knows yet."""
    host = f"components.{FLEET}.host"
    for path, name in _uses_elsewhere(spec, ROLLOUT_URL):
        if is_loopback(fleet.host):
            problem = f"{name} runs on the cluster, and the gateway listens on {fleet.host} only"
            remedy = f'write {host}: "0.0.0.0", or an address of this machine'
            yield Fault(path=path, problem=problem, remedy=remedy)
        elif fleet.host in EVERY_ADDRESS and _address_elsewhere(spec, fleet.host) is None:
            problem = f"{name} runs on the cluster, and this machine has no address but loopback"
            remedy = f"write the address by which it reaches this machine as {host}"
            yield Fault(path=path, problem=problem, remedy=remedy)
    elsewhere = dict(_uses_elsewhere(spec, ROLLOUT_ENGINES))
    for use in find_uses(spec.written()):
        if use.name != ROLLOUT_ENGINES:
            continue
        if fleet.placement == "ray":
            problem = f"{use}: where the engines of a fleet on Ray are is known once they run"
            remedy = f"have the program ask GET ${{{ROLLOUT_URL}}}/muster/rollout for them"
            yield Fault(path=use.path, problem=problem, remedy=remedy)
        elif use.path in elsewhere:
            name = elsewhere[use.path]
            problem = f"{name} runs on the cluster, and local engines listen on this machine alone"
            remedy = f"write ${{{ROLLOUT_URL}}}, or launcher: process"
            yield Fault(path=use.path, problem=problem, remedy=remedy)


def _uses_elsewhere(spec: RunSpec, name: str) -> list[tuple[str, str]]:
    """`(path, component)` of each use of a name by a program that may be on another machine. Its
    probes are asked from here."""
    jobs = [one for one, component in spec.processes.items() if component.launcher == "ray_job"]
    if spec.fleet is not None and spec.fleet.placement == "ray":
        jobs.append(FLEET)
    found = []
    for use in find_uses(spec.written()):
        part, *rest = use.path.split(".")
        if use.name == name and part == "env":
            found += [(use.path, jobs[0])] if jobs else []
        elif use.name == name and part == "components" and rest[1] not in ("ready", "live"):
            found += [(use.path, rest[0])] if rest[0] in jobs else []
    return found


def _faults_of_gang(spec: RunSpec, plan: TopologyPlan) -> Iterator[Fault]:
    if spec.gang is None:
        return
    engines, path = len(plan.engines), f"components.{FLEET}.engines"
    needed = sum(len(slot.bundles) for slot in plan.servers)
    held = spec.gang.nodes * spec.gang.gpus_per_node
    here = sum(engine.nodes[0] == 0 for engine in plan.engines)
    if needed > held:
        problem = f"its {engines} engines take {needed} GPUs, and the gang has {held}"
        remedy = "ask for fewer engines, or for a larger gang"
        yield Fault(path=path, problem=problem, remedy=remedy)
    elif plan.placement == "local" and here < engines:
        problem = (
            f"a local fleet is on this machine alone, and one node of the gang holds {here} of its "
            f"{engines} engines"
        )
        yield Fault(path=path, problem=problem, remedy=f"write {here}, or placement: ray")


#: Where a component finds the gateway's token: for requests, and that of TRAINER, or of all where
#: the run has none of that name, for orders, too.
TOKEN_ENV, TRAINER = "MUSTER_ROLLOUT_TOKEN", "trainer"
#: Where the fleet's process finds its plan, as JSON.
PLAN_ENV = "MUSTER_ROLLOUT_PLAN"


class FleetPlan(BaseModel):
    """One fleet of one attempt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    #: From 1.
    attempt: int
    #: As in the spec, its placeholders filled in; its `env` is all that its servers are given.
    fleet: Rollout = Field(repr=False)
    #: The port of the gateway.
    port: int
    #: Of a fleet on this machine, by the names of `list_required_ports`.
    ports: Mapping[str, int]
    #: GPUs of each node that the run may have; None: it asks for none.
    node_gpus: int | None = None
    #: The dashboard of the Ray cluster; None: the fleet is on this machine.
    ray: str | None = None
    #: Where the servers run; absolute.
    cwd: Path
    #: Of the attempt, for logs and events; absolute.
    directory: Path
    #: The run's register, for the servers' own entries; None: what holds the component's processes
    #: ends them all at once.
    register_at: Path | None = None
    #: Until the first weights come, its servers serve the model as they load it; else they wait.
    serves_as_loaded: bool = True
    #: That the gateway asks for; empty: none.
    token: str = Field("", repr=False)
    #: The same, for orders.
    order_token: str = Field("", repr=False)
    #: The run's, beside those that the plan itself shows.
    secrets: frozenset[str] = Field(frozenset(), repr=False)

    @property
    def place(self) -> AttemptPlace:
        """The files of the attempt."""
        return AttemptPlace(directory=self.directory, number=self.attempt)

    @property
    def tokens(self) -> frozenset[str]:
        return frozenset({self.token, self.order_token} - {""})

    @property
    def env(self) -> dict[str, str]:
        """What the fleet's own process gets."""
        token = {TOKEN_ENV: self.token} if self.token else {}
        return {**token, PLAN_ENV: self.model_dump_json(exclude_unset=True)}

    @staticmethod
    def of(env: Mapping[str, str]) -> FleetPlan:
        return FleetPlan.model_validate_json(env[PLAN_ENV])

    def mask(self, text: str) -> str:
        """The text without what is secret of the fleet and of its run."""
        fleet = self.fleet
        words = find_argument_secrets([*(fleet.command or ()), *(fleet.args or ())])
        return mask_text(text, self.secrets | find_env_secrets(fleet.env) | words | self.tokens)

    def env_of(self, component: str, *, others: Collection[str]) -> dict[str, str]:
        """What a component of the run gets, whose components are `others`."""
        gives_orders = component == TRAINER or TRAINER not in others
        token = self.order_token if gives_orders else self.token
        return {TOKEN_ENV: token} if token else {}

    def log_of(self, rank: int) -> Path:
        """Of the server that is called by this rank."""
        return self.place.log(f"{FLEET}-r{rank}")


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
    """What the process of the run's fleet is to do; None: it has none.

    Args:
        spec: with its placeholders and secrets filled in.
        register_at: the directory of the run's register.
        resumes: the attempt begins with a checkpoint, which the servers do not have.
        secrets: of the run, which the fleet's process is to mask.
    """
    fleet = spec.fleet
    if fleet is None:
        return None
    is_on_ray = fleet.placement == "ray"
    needs_token = fleet.require_token or not is_loopback(fleet.host)
    # On other machines, servers inherit nothing of this one.
    env = {**(spec.env if is_on_ray else {}), **fleet.env}
    # In a PID namespace, pids mean nothing outside, and all end with its first process.
    is_registered = containment.level is not Level.L4 and not is_on_ray
    return FleetPlan(
        run_id=run_id,
        attempt=place.number,
        fleet=fleet.model_copy(update={"env": env}),
        port=ports[_PORT],
        ports={
            name.removeprefix(_PORTS): number
            for name, number in ports.items()
            if name.startswith(_PORTS)
        },
        node_gpus=node_gpus(spec),
        ray=spec.ray.address if spec.ray is not None and is_on_ray else None,
        cwd=Path(fleet.cwd or spec.cwd),
        directory=place.directory,
        register_at=register_at if is_registered else None,
        serves_as_loaded=(fleet.weights.initial or ("stale" if resumes else "loaded")) == "loaded",
        token=token_urlsafe(32) if needs_token else "",
        order_token=token_urlsafe(32) if needs_token else "",
        secrets=secrets,
    )


def fleet_component(
    plan: FleetPlan, env: Mapping[str, str], on_exit_zero: OnExitZero
) -> ComponentPlan:
    """The fleet as a component like any other: one process, which holds all its servers.

    Args:
        env: the variables that every component gets, and those of this one.
    """
    fleet, place = plan.fleet, plan.place
    health = f"{gateway_url(fleet.host, plan.port)}/muster/health"
    is_on_ray = plan.ray is not None
    # Other components are not told.
    known = {CLUSTERS_VARIABLE: os.environ.get(CLUSTERS_VARIABLE, "")}
    within_s = fleet.start_within_s + (_RAY_MARGIN_S if is_on_ray else _START_MARGIN_S)
    return ComponentPlan(
        name=FLEET,
        command=Command(
            # -P: the path begins with no folder that may have a package `tasks` of its own.
            argv=(sys.executable, "-P", "-m", "tasks.rollout.process"),
            env={**env, **plan.env, **(_QUIET_RAY | known if is_on_ray else {})},
            cwd=place.directory,
            log=place.log(FLEET),
            grace_s=fleet.stop.grace_s + STOP_MARGIN_S,
        ),
        ready=ReadyProbe.model_validate(
            {"http": health, "json": {"ready": True}, "within_s": within_s}
        ),
        live=LiveProbe(http=health, every_s=_LIVE_EVERY_S),
        on_exit_zero=on_exit_zero,
        manages_ports=True,
    )


_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.1


class FleetTail:
    """Tells the run what the fleet's process writes to its file, an event a line: from a thread of
    its own, from `start` to `close`, which brings in what is left."""

    def __init__(self, path: Path, emit: Emit) -> None:
        self._path, self._log = path, LogFile(path)
        self._emit = emit
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="fleet-tail", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Once the process has ended; any number of times."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self, *, is_last: bool = False) -> None:
        """Tell the lines that were completed since the last look."""
        for line in self._log.read_new(is_last=is_last):
            try:
                event = Event.from_line(line)
            except ValueError as error:
                _log.warning("%s: not an event: %r: %r", self._path, line[:200], error)
                continue
            fields = {key: value for key, value in event.fields.items() if key != "name"}
            self._emit(event.name, FLEET, at=event.at, **fields)

    def _follow(self) -> None:
        is_last = False
        while not is_last:
            # Asked first, so that what was written before the end is looked at after it.
            is_last = self._closing.wait(_LOOK_EVERY_S)
            self.look(is_last=is_last)
