"""From a fleet's spec to its plan: how its engines are cut into servers, on which nodes these are,
which ports they need, and what each runs: frozen data, checked as a whole. Pure: the same spec
gives the same plan everywhere.

Ranks are numbered over the whole fleet, engine by engine: rank r is one GPU (one process of the
backend `command`). A server is called by the first of its ranks.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSlot(Place):
    """What one server process runs, in its planned place."""

    #: One for each of its GPUs, of the one placement group of the fleet.
    bundles: tuple[int, ...]
    #: Ranks whose weights are updated through it; none for one that only takes part.
    weight_ranks: tuple[int, ...]
    #: It accepts rollout requests, and its answers prove that its engine works. Those of another
    #: one prove only that its process lives.
    is_entrypoint: bool
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str | None:
        """None where it has no API."""
        return None if self.port is None else f"http://{self.host}:{self.port}"

    @property
    def listens_on(self) -> tuple[int, ...]:
        """The ports that were given to it; the first server of an engine has where that meets."""
        own = () if self.port is None else (self.port,)
        return own if self.meeting is None or self.index else (*own, self.meeting[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One logical inference instance. Its servers are one lifecycle group."""

    #: Indexes of the nodes that it spans, in the order of its ranks.
    nodes: tuple[int, ...]
    servers: tuple[ServerSlot, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for server in self.servers for rank in server.ranks)

    @property
    def dist_init(self) -> str | None:
        """`host:port`, where its processes on several nodes meet; None where nothing does."""
        meeting = self.servers[0].meeting
        return None if meeting is None else "{}:{}".format(*meeting)

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks of its servers, which are stopped and started together."""
        return tuple(server.rank for server in self.servers)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyPlan:
    """All engines of a fleet.

    Raises: ValueError, where it does not hold together, with each fault by its engine and ranks.
    """

    engines: tuple[Engine, ...]
    questions: Questions
    #: local | ray
    placement: str

    def __post_init__(self) -> None:
        if faults := list(_faults(self.engines)):
            raise ValueError("; ".join(faults))

    @property
    def servers(self) -> tuple[ServerSlot, ...]:
        """All servers, by their ranks."""
        slots = (slot for engine in self.engines for slot in engine.servers)
        return tuple(sorted(slots, key=lambda slot: slot.rank))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """`groups[engine]`: the ranks of the servers that live and die together."""
        return tuple(engine.group for engine in self.engines)

    @property
    def training_mesh(self) -> tuple[tuple[int, ...], ...]:
        """`training_mesh[entry]`: the ranks whose weights a trainer syncs through one server."""
        return tuple(slot.weight_ranks for slot in self.servers if slot.weight_ranks)

    def as_json(self) -> dict[str, Any]:
        """Plain data, as `muster plan --json` prints it."""
        return {
            "engines": [{"ranks": [*one.ranks], "nodes": [*one.nodes]} for one in self.engines],
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


def _faults(engines: tuple[Engine, ...]) -> Iterator[str]:
    if not engines:
        yield "no engines"
    ranks: set[int] = set()
    addresses: set[str] = set()
    for index, engine in enumerate(engines):
        name, updated = f"engine {index}", set[int]()
        if not engine.servers:
            yield f"{name}: no server"
        elif not any(slot.is_entrypoint for slot in engine.servers):
            yield f"{name}: no entrypoint among its servers {join_commas(engine.group)}"
        for slot in engine.servers:
            server = f"{name}, server {slot.rank}"
            yield from _again(f"{server}: a rank is listed twice", slot.ranks, ranks)
            if unknown := set(slot.weight_ranks) - set(engine.ranks):
                what = "updates the weights of ranks that are not its engine's"
                yield f"{server}: {what}: {join_commas(sorted(unknown))}"
            what = "updates the weights of a rank twice"
            yield from _again(f"{server}: {what}", slot.weight_ranks, updated)
            if slot.url is not None:
                yield from _again(f"{server}: an address is used twice", (slot.url,), addresses)
        if missing := set(engine.ranks) - updated:
            yield f"{name}: no server updates the weights of ranks {join_commas(sorted(missing))}"


def _again(fault: str, found: Iterable[T], seen: set[T]) -> Iterator[str]:
    """That some were seen before, or come twice; all of them are seen then."""
    for one in found:
        if one in seen:
            yield f"{fault}: {one}"
        seen.add(one)


#: Where servers of this machine are.
LOOPBACK = "127.0.0.1"
#: A gateway listens on every address of its machine there.
EVERY_ADDRESS = ("0.0.0.0", "::")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it, as far as an address or name tells."""
    bare = host.removeprefix("[").removesuffix("]")
    if bare.lower() == "localhost":
        return True
    try:
        return ip_address(bare).is_loopback
    except ValueError:
        return False


def gateway_url(host: str, port: int) -> str:
    """Where a gateway that listens on a host is reached from this machine."""
    if host in (*EVERY_ADDRESS, "localhost"):
        host = LOOPBACK
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a fleet's servers are. A group gets new ports by building it with others."""

    #: By node index, as the gateway and the other nodes reach them.
    hosts: tuple[str, ...]
    #: By the names of `list_required_ports`.
    ports: Mapping[str, int]
    #: The GPUs that a local fleet may use, in the order of its ranks; empty: 0, 1, 2 and so on.
    devices: tuple[str, ...] = ()
    #: Of these: nvidia | amd | ascend.
    kind: str = "nvidia"


def ports_needed(
    fleet: Rollout, node_gpus: int | None = None, engines: Collection[int] | None = None
) -> dict[str, int]:
    """`node[name]`: every port that the fleet needs, engine by engine: `server.0` for the server of
    rank 0, `engine.0` for where engine 0 meets.

    Args:
        engines: only what these need; None: all.

    Raises: ValueError, as `build` does.
    """
    backend = backend_of(fleet)
    needs: dict[str, int] = {}
    for engine in range(fleet.engines) if engines is None else engines:
        servers = _places(fleet, engine, nodes_of(fleet, engine, node_gpus))
        if backend.meets:
            needs[f"engine.{engine}"] = servers[0].node
        listening = (place for place in servers if backend.has_api(place.index))
        needs |= {f"server.{place.rank}": place.node for place in listening}
    return needs


def nodes_needed(fleet: Rollout, node_gpus: int | None = None) -> int:
    """How many nodes the fleet is planned on, so many hosts it needs."""
    engines = range(fleet.engines)
    return 1 + max(node for engine in engines for node in nodes_of(fleet, engine, node_gpus))


def nodes_of(fleet: Rollout, engine: int, node_gpus: int | None = None) -> tuple[int, ...]:
    """The nodes that an engine spans, which may be more than have a server of it."""
    sizes = fleet.sizes
    on_a_node = sizes.gpus // sizes.nodes
    if node_gpus is not None and on_a_node > node_gpus:
        raise ValueError(f"an engine needs {on_a_node} GPUs of one node, which has {node_gpus}")
    if sizes.nodes > 1:
        return tuple(range(engine * sizes.nodes, (engine + 1) * sizes.nodes))
    if node_gpus is not None and sizes.gpus:
        return (engine // (node_gpus // sizes.gpus),)
    return (engine if fleet.placement == "ray" else 0,)


def build(fleet: Rollout, addresses: Addresses, node_gpus: int | None = None) -> TopologyPlan:
    """The plan of a fleet at these addresses.

    Args:
        addresses: a host for each of `nodes_needed`, a port for each of `list_required_ports`.
        node_gpus: GPUs on each node; engines are packed onto nodes by them. None: an engine of one
            node has that node to itself on Ray, and all of them are on one machine otherwise.

    Raises: ValueError, when an engine needs more of a node than that has, or there are too few
        devices; KeyError, when a port that is needed is not there.
    """
    backend = backend_of(fleet)
    shown = _shown(fleet, addresses)
    engines: list[Engine] = []
    for index in range(fleet.engines):
        nodes = nodes_of(fleet, index, node_gpus)
        meeting: tuple[str, int] | None = None
        if backend.meets:
            meeting = (addresses.hosts[nodes[0]], addresses.ports[f"engine.{index}"])
        places = [
            replace(
                place,
                host=addresses.hosts[place.node],
                port=addresses.ports[f"server.{place.rank}"]
                if backend.has_api(place.index)
                else None,
                meeting=meeting,
            )
            for place in _places(fleet, index, nodes)
        ]
        servers = tuple(_slot(backend, place, places, shown) for place in places)
        engines.append(Engine(nodes=nodes, servers=servers))
    return TopologyPlan(
        engines=tuple(engines), questions=backend.questions(), placement=fleet.placement
    )


def planned(fleet: Rollout, node_gpus: int | None = None) -> TopologyPlan:
    """The plan of a fleet at hosts and ports that stand in for those that a run finds: `node-0`,
    `node-1` and so on, a local one at 127.0.0.1, and ports from 30000 on.

    Raises: ValueError, as `build` does.
    """
    is_local, nodes = fleet.placement == "local", range(nodes_needed(fleet, node_gpus))
    hosts = tuple(LOOPBACK if is_local else f"node-{node}" for node in nodes)
    ports = {name: 30000 + number for number, name in enumerate(ports_needed(fleet, node_gpus))}
    return build(fleet, Addresses(hosts=hosts, ports=ports), node_gpus)


def _places(fleet: Rollout, engine: int, nodes: Sequence[int]) -> tuple[Place, ...]:
    """The servers of an engine in the order of their ranks, without addresses."""
    sizes = fleet.sizes
    width, first = sizes.ranks // sizes.servers, engine * sizes.ranks
    return tuple(
        Place(
            engine=engine,
            index=index,
            ranks=tuple(range(first + index * width, first + (index + 1) * width)),
            node=nodes[index * len(nodes) // sizes.servers],
        )
        for index in range(sizes.servers)
    )


def _slot(
    backend: Backend, place: Place, engine: Sequence[Place], shown: Mapping[str, Sequence[str]]
) -> ServerSlot:
    """One server of an engine; `shown[variable]` are the devices of the fleet's ranks."""
    fleet = backend.fleet
    env = {**select_literals(fleet.env), **backend.env(place)}
    for variable, devices in shown.items():
        env[variable] = ",".join(devices[rank] for rank in place.ranks)
    is_entrypoint = backend.is_entrypoint(place.index)
    # An entrypoint stands for its own ranks and for those of the servers that have none.
    others = [one for one in engine if not backend.is_entrypoint(one.index)]
    updated = place.ranks + tuple(rank for one in others for rank in one.ranks)
    words = (*backend.argv(place), *(fleet.args or ()))
    return ServerSlot(
        **asdict(place),
        bundles=place.ranks if fleet.sizes.gpus else (),
        weight_ranks=updated if is_entrypoint else (),
        is_entrypoint=is_entrypoint,
        argv=tuple(map(place.filled, words)),
        env={name: place.filled(text) for name, text in env.items()},
    )


def _shown(fleet: Rollout, addresses: Addresses) -> dict[str, tuple[str, ...]]:
    """`devices[variable]`: the GPU of each rank of a local fleet, by each variable that shows it;
    empty where no GPUs are asked for, and on Ray, which gives an actor its GPUs itself."""
    needed = fleet.engines * fleet.sizes.gpus
    if fleet.placement != "local" or not needed:
        return {}
    variables = DEVICE_VARIABLES[addresses.kind]
    devices = addresses.devices or tuple(map(str, range(needed)))
    if len(devices) < needed:
        found = f"{variables[0]} names {len(devices)}: {', '.join(devices)}"
        raise ValueError(f"the fleet needs {needed} GPUs, and {found}")
    return dict.fromkeys(variables, devices)
