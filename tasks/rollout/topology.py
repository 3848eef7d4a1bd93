"""The topology of a fleet: the servers of each engine, with their nodes, ports and command lines.

The plan is computed from the spec of the fleet alone, so the same spec gives the same plan on each
machine. It is frozen and checked as a whole.

Ranks are numbered over the whole fleet, one engine after the other. A rank is one GPU, or one
server if the engines use no GPUs. The first of a server's ranks identifies the server.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from ipaddress import ip_address
from typing import Any, TypeVar

from tasks.rollout.backends import Backend, Place, Questions, backend_of
from tasks.spec.formatting import join_commas
from tasks.spec.rollout import Rollout
from tasks.spec.run_rules import DEVICE_VARIABLES
from tasks.spec.values import select_literals

T = TypeVar("T")

#: Address on which the servers of a local fleet listen.
LOOPBACK = "127.0.0.1"
#: Addresses that stand for all network interfaces of a machine, in IPv4 and in IPv6.
EVERY_ADDRESS = ("0.0.0.0", "::")
#: First example port number, for plans that are made before the real ports are known.
_FIRST_PLANNED_PORT = 30000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSlot(Place):
    """Plan of one server process: its position in the fleet, its GPUs, and its command line."""

    #: Indexes of the server's bundles in the Ray placement group, one for each GPU of the server.
    bundles: tuple[int, ...]
    #: Ranks whose weights are updated through this server. Empty if the server gets no updates.
    weight_ranks: tuple[int, ...]
    #: True if the server accepts rollout requests. The answers of an entrypoint prove that its
    #: engine works. Answers of other servers only prove that their process is alive.
    is_entrypoint: bool
    #: Program of the server and its arguments.
    argv: tuple[str, ...]
    #: Environment variables of the server.
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str | None:
        """URL of the server's HTTP API, or None if the server has no API."""
        return None if self.port is None else f"http://{self.host}:{self.port}"

    @property
    def listens_on(self) -> tuple[int, ...]:
        """Ports that are reserved for this server.

        A server with an HTTP API has one port for the API. If an engine has several processes, its
        first server has one more port, through which these processes connect to each other.
        """
        api_ports = () if self.port is None else (self.port,)
        if self.meeting is None or self.index > 0:
            return api_ports
        return (*api_ports, self.meeting[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One logical inference instance. Its servers form one lifecycle group."""

    #: Indexes of the nodes that the engine spans, in the order of its ranks.
    nodes: tuple[int, ...]
    servers: tuple[ServerSlot, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the engine's servers."""
        return tuple(rank for server in self.servers for rank in server.ranks)

    @property
    def dist_init(self) -> str | None:
        """`host:port` at which the engine's processes on several nodes connect to each other.

        None if the engine does not need the address.
        """
        meeting = self.servers[0].meeting
        if meeting is None:
            return None
        host, port = meeting
        return f"{host}:{port}"

    @property
    def group(self) -> tuple[int, ...]:
        """Ranks of the engine's servers, which are stopped and started together.

        For a server with several ranks, only the first rank is listed.
        """
        return tuple(server.rank for server in self.servers)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyPlan:
    """Plan of all engines of a fleet.

    Raises:
        ValueError: The plans of the engines contradict each other. The message names each fault
            with its engine and ranks.
    """

    engines: tuple[Engine, ...]
    #: Requests that the backend understands, such as health checks.
    questions: Questions
    #: `local` if the servers run on this machine, `ray` if the servers run on a Ray cluster.
    placement: str

    def __post_init__(self) -> None:
        if faults := list(_find_faults(self.engines)):
            raise ValueError("; ".join(faults))

    @property
    def servers(self) -> tuple[ServerSlot, ...]:
        """All servers of the fleet, in the order of their ranks."""
        slots = (slot for engine in self.engines for slot in engine.servers)
        return tuple(sorted(slots, key=lambda slot: slot.rank))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """`groups[engine]` lists the ranks of the servers that are stopped and started together."""
        return tuple(engine.group for engine in self.engines)

    @property
    def training_mesh(self) -> tuple[tuple[int, ...], ...]:
        """`training_mesh[i]` lists the inference ranks that get new weights through one server.

        There is one entry for each server that receives weight updates, in the order of the
        servers' ranks.
        """
        return tuple(slot.weight_ranks for slot in self.servers if slot.weight_ranks)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain data, as `muster plan --json` prints it."""
        return {
            "engines": [
                {"ranks": [*engine.ranks], "nodes": [*engine.nodes]} for engine in self.engines
            ],
            "servers": [
                {
                    "rank": slot.rank,
                    "node": slot.node,
                    "argv": [*slot.argv],
                    "env": dict(slot.env),
                    "entrypoint": slot.is_entrypoint,
                    "group": slot.engine,
                    "bundles": list(slot.bundles),
                }
                for slot in self.servers
            ],
            "groups": [list(group) for group in self.groups],
            "training_mesh": [list(ranks) for ranks in self.training_mesh],
        }


def _find_faults(engines: tuple[Engine, ...]) -> Iterator[str]:
    """Yield a message for each contradiction in the plans of a fleet's engines."""
    if not engines:
        yield "no engines"
    seen_ranks: set[int] = set()
    seen_urls: set[str] = set()
    for index, engine in enumerate(engines):
        name = f"engine {index}"
        if not engine.servers:
            yield f"{name}: no server"
        elif not any(slot.is_entrypoint for slot in engine.servers):
            yield (
                f"{name}: none of the servers {join_commas(engine.group)} of this engine accepts "
                "requests"
            )

        updated_ranks: set[int] = set()
        for slot in engine.servers:
            server = f"{name}, server {slot.rank}"
            yield from _find_repeated(f"{server}: a rank is listed twice", slot.ranks, seen_ranks)
            if unknown := set(slot.weight_ranks) - set(engine.ranks):
                problem = "this server is assigned to update the weights of ranks of another engine"
                yield f"{server}: {problem}: {join_commas(sorted(unknown))}"
            problem = "updates the weights of a rank twice"
            yield from _find_repeated(f"{server}: {problem}", slot.weight_ranks, updated_ranks)
            if slot.url is not None:
                yield from _find_repeated(
                    f"{server}: an address is used twice", (slot.url,), seen_urls
                )
        if missing := set(engine.ranks) - updated_ranks:
            problem = "no server is assigned to update the weights of ranks"
            yield f"{name}: {problem} {join_commas(sorted(missing))}"


def _find_repeated(problem: str, items: Iterable[T], seen: set[T]) -> Iterator[str]:
    """Yield a message for each item that was seen before, and add all items to `seen`.

    Args:
        problem: Beginning of the message.
        items: The items to check.
        seen: The items of earlier calls.
    """
    for item in items:
        if item in seen:
            yield f"{problem}: {item}"
        seen.add(item)


def is_loopback(host: str) -> bool:
    """Return True if a host name or address is reachable only from its own machine.

    Host names are not resolved to addresses. The only host name with the result True is
    `localhost`.
    """
    bare_host = host.removeprefix("[").removesuffix("]")
    if bare_host.lower() == "localhost":
        return True
    try:
        return ip_address(bare_host).is_loopback
    except ValueError:
        return False


def gateway_url(host: str, port: int) -> str:
    """Return the URL at which programs on this machine reach a gateway.

    Args:
        host: The address on which the gateway listens. If it stands for all addresses of this
            machine, the URL contains a loopback address.
        port: The port on which the gateway listens.
    """
    if host in (*EVERY_ADDRESS, "localhost"):
        host = LOOPBACK
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Hosts, ports and GPUs that the servers of a fleet use.

    To move an engine to new ports, call `build` again with other addresses.
    """

    #: `hosts[node]` is the address at which the gateway and the other nodes reach a node.
    hosts: tuple[str, ...]
    #: Mapping from the name of a port, such as `server.0`, to the port number. The function
    #: `ports_needed` lists the names.
    ports: Mapping[str, int]
    #: The GPUs that a local fleet may use, one for each rank. If empty, the fleet uses the GPUs 0,
    #: 1, 2 and so on.
    devices: tuple[str, ...] = ()
    #: Kind of the GPUs: nvidia, amd or ascend.
    kind: str = "nvidia"


def ports_needed(
    fleet: Rollout, node_gpus: int | None = None, engines: Collection[int] | None = None
) -> dict[str, int]:
    """Return the ports that the servers of a fleet need, with the node of each port.

    The server with rank 0 serves its API on the port `server.0`. The processes of engine 0 connect
    to each other through the port `engine.0`.

    Args:
        fleet: Spec of the fleet.
        node_gpus: Number of GPUs that the run requests on each node, or None if it requests none.
        engines: Indexes of the engines whose ports are needed, or None for all engines.

    Returns:
        Mapping from the name of a port to the index of the node on which the port is needed.

    Raises:
        ValueError: An engine needs more GPUs on one node than the node has.
    """
    backend = backend_of(fleet)
    needed: dict[str, int] = {}
    for engine in range(fleet.engines) if engines is None else engines:
        places = _place_servers(fleet, engine, list_engine_nodes(fleet, engine, node_gpus))
        if backend.meets:
            needed[f"engine.{engine}"] = places[0].node
        for place in places:
            if backend.has_api(place.index):
                needed[f"server.{place.rank}"] = place.node
    return needed


def nodes_needed(fleet: Rollout, node_gpus: int | None = None) -> int:
    """Return the number of nodes that all engines of a fleet together need.

    Args:
        fleet: Spec of the fleet.
        node_gpus: Number of GPUs on each node, or None. See the same argument of `build`.
    """
    engines = range(fleet.engines)
    highest_node = max(
        node for engine in engines for node in list_engine_nodes(fleet, engine, node_gpus)
    )
    return 1 + highest_node


def list_engine_nodes(fleet: Rollout, engine: int, node_gpus: int | None = None) -> tuple[int, ...]:
    """Return the indexes of the nodes that an engine spans.

    An engine can have fewer servers than nodes. Then some of these nodes run no server.

    Args:
        fleet: Spec of the fleet.
        engine: Index of the engine.
        node_gpus: Number of GPUs that the run requests on each node, or None if it requests none.

    Raises:
        ValueError: The engine needs more GPUs on one node than the node has.
    """
    sizes = fleet.sizes
    gpus_on_node = sizes.gpus // sizes.nodes
    if node_gpus is not None and gpus_on_node > node_gpus:
        raise ValueError(
            f"an engine needs {gpus_on_node} GPUs on one node, but each node of the run has only "
            f"{node_gpus}"
        )
    if sizes.nodes > 1:
        return tuple(range(engine * sizes.nodes, (engine + 1) * sizes.nodes))
    if node_gpus is not None and sizes.gpus:
        engines_on_node = node_gpus // sizes.gpus
        return (engine // engines_on_node,)
    return (engine if fleet.placement == "ray" else 0,)


def build(fleet: Rollout, addresses: Addresses, node_gpus: int | None = None) -> TopologyPlan:
    """Return the plan of a fleet whose servers use these addresses.

    Args:
        fleet: Spec of the fleet.
        addresses: A host for each node that `nodes_needed` counts, and a number for each port that
            `ports_needed` names.
        node_gpus: Number of GPUs on each node, which determines how many engines share a node. With
            None, each engine on Ray has its own node, and all engines of a local fleet share one
            machine.

    Raises:
        ValueError: An engine needs more GPUs on one node than the node has, or `addresses` has too
            few devices.
        KeyError: `addresses` lacks a port.
    """
    backend = backend_of(fleet)
    devices = _assign_devices(fleet, addresses)
    engines: list[Engine] = []
    for index in range(fleet.engines):
        nodes = list_engine_nodes(fleet, index, node_gpus)
        meeting: tuple[str, int] | None = None
        if backend.meets:
            meeting = (addresses.hosts[nodes[0]], addresses.ports[f"engine.{index}"])
        places: list[Place] = []
        for place in _place_servers(fleet, index, nodes):
            port: int | None = None
            if backend.has_api(place.index):
                port = addresses.ports[f"server.{place.rank}"]
            host = addresses.hosts[place.node]
            places.append(replace(place, host=host, port=port, meeting=meeting))
        servers = tuple(_plan_server(backend, place, places, devices) for place in places)
        engines.append(Engine(nodes=nodes, servers=servers))
    return TopologyPlan(
        engines=tuple(engines), questions=backend.questions(), placement=fleet.placement
    )


def plan_topology(fleet: Rollout, node_gpus: int | None = None) -> TopologyPlan:
    """Return the plan of a fleet with example hosts and ports, for use before the run starts.

    The hosts are `node-0`, `node-1` and so on, or 127.0.0.1 for a local fleet. The port numbers
    begin with 30000.

    Raises:
        ValueError: An engine needs more GPUs on one node than the node has.
    """
    is_local = fleet.placement == "local"
    nodes = range(nodes_needed(fleet, node_gpus))
    hosts = tuple(LOOPBACK if is_local else f"node-{node}" for node in nodes)
    port_names = ports_needed(fleet, node_gpus)
    ports = {name: number for number, name in enumerate(port_names, start=_FIRST_PLANNED_PORT)}
    return build(fleet, Addresses(hosts=hosts, ports=ports), node_gpus)


def _place_servers(fleet: Rollout, engine: int, nodes: Sequence[int]) -> tuple[Place, ...]:
    """Return the ranks and the node of each server of an engine. Addresses are assigned later.

    Args:
        fleet: Spec of the fleet.
        engine: Index of the engine.
        nodes: Indexes of the nodes that the engine spans. The servers are spread evenly over them.
    """
    sizes = fleet.sizes
    ranks_per_server = sizes.ranks // sizes.servers
    first_of_engine = engine * sizes.ranks
    places: list[Place] = []
    for index in range(sizes.servers):
        first_rank = first_of_engine + index * ranks_per_server
        places.append(
            Place(
                engine=engine,
                index=index,
                ranks=tuple(range(first_rank, first_rank + ranks_per_server)),
                node=nodes[index * len(nodes) // sizes.servers],
            )
        )
    return tuple(places)


def _plan_server(
    backend: Backend,
    place: Place,
    places_of_engine: Sequence[Place],
    devices: Mapping[str, Sequence[str]],
) -> ServerSlot:
    """Return the plan of one server.

    Args:
        backend: The inference software that the server runs, such as vLLM.
        place: Position of the server in its fleet, and its addresses.
        places_of_engine: Positions and addresses of the servers that together form one inference
            instance, including `place`.
        devices: `devices[variable][rank]` is the GPU of a rank. `variable` is an environment
            variable that limits a process to its GPUs. The mapping is empty if no such variable
            has to be set.
    """
    fleet = backend.fleet
    env = {**select_literals(fleet.env), **backend.env(place)}
    for variable, device_of_rank in devices.items():
        env[variable] = ",".join(device_of_rank[rank] for rank in place.ranks)

    weight_ranks: tuple[int, ...] = ()
    is_entrypoint = backend.is_entrypoint(place.index)
    if is_entrypoint:
        # Weights of servers that accept no requests are updated through the entrypoint.
        weight_ranks = place.ranks
        for other in places_of_engine:
            if not backend.is_entrypoint(other.index):
                weight_ranks += other.ranks

    arguments = (*backend.argv(place), *(fleet.args or ()))
    return ServerSlot(
        **asdict(place),
        bundles=place.ranks if fleet.sizes.gpus else (),
        weight_ranks=weight_ranks,
        is_entrypoint=is_entrypoint,
        argv=tuple(place.filled(argument) for argument in arguments),
        env={name: place.filled(text) for name, text in env.items()},
    )


def _assign_devices(fleet: Rollout, addresses: Addresses) -> dict[str, tuple[str, ...]]:
    """Return the GPUs of a local fleet as `devices[variable][rank]`.

    `variable` is an environment variable that limits a process to its GPUs, such as
    CUDA_VISIBLE_DEVICES.

    Returns:
        The GPUs. Empty if the fleet needs no GPUs, or if the fleet runs on Ray. Ray itself sets the
        environment variables.

    Raises:
        ValueError: `addresses` has fewer GPUs than the fleet needs.
    """
    needed = fleet.engines * fleet.sizes.gpus
    if fleet.placement != "local" or not needed:
        return {}
    variables = DEVICE_VARIABLES[addresses.kind]
    devices = addresses.devices or tuple(map(str, range(needed)))
    if len(devices) < needed:
        named_devices = f"{variables[0]} names only {len(devices)}: {', '.join(devices)}"
        raise ValueError(f"the inference servers need {needed} GPUs, but {named_devices}")
    return dict.fromkeys(variables, devices)
