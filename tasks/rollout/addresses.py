"""The hosts and ports of a fleet: which are needed, and what was given out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tasks.rollout.building import backend_of, nodes_of, places
from tasks.rollout.topology import Answers
from tasks.spec.rollout import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class PortNeed:
    """A port that must be free on a node before the servers there are started."""

    #: Index into the fleet's nodes.
    node: int
    #: `server.0` for the server of rank 0, `engine.0` for where engine 0 meets.
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a fleet's servers are. A group gets new ports by building it with others."""

    #: By node index, as the gateway and the other nodes reach them.
    hosts: tuple[str, ...]
    #: By the name of the need.
    ports: Mapping[str, int]
    #: Of the GPUs that a local fleet may use, in the order of its ranks; empty: 0, 1, 2 and so on.
    devices: tuple[str, ...] = field(default=())


def server_port(rank: int) -> str:
    """The name of the port on which the server of this rank listens."""
    return f"server.{rank}"


def meeting_port(engine: int) -> str:
    """The name of the port at which the processes of this engine meet."""
    return f"engine.{engine}"


def ports_needed(fleet: Rollout, node_gpus: int | None = None) -> tuple[PortNeed, ...]:
    """Every port that the fleet needs, engine by engine.

    Args:
        fleet: As validated.
        node_gpus: As for `build`.

    Raises:
        ValueError: As `build` does.
    """
    backend = backend_of(fleet)
    needs: list[PortNeed] = []
    for engine, servers in enumerate(places(fleet, node_gpus)):
        if backend.meets(fleet):
            needs.append(PortNeed(node=servers[0].node, name=meeting_port(engine)))
        needs += [
            PortNeed(node=place.node, name=server_port(place.rank))
            for place in servers
            if backend.answers(fleet, place.index) is not Answers.NONE
        ]
    return tuple(needs)


def nodes_needed(fleet: Rollout, node_gpus: int | None = None) -> int:
    """How many nodes the fleet is planned on, so many hosts it needs."""
    engines = range(fleet.engines)
    return 1 + max(node for engine in engines for node in nodes_of(fleet, engine, node_gpus))
