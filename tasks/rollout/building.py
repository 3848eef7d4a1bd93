"""How the engines of a fleet are cut into servers, and on which nodes these are."""

from __future__ import annotations

from collections.abc import Mapping

from tasks.rollout import backends, lmdeploy, sglang, vllm
from tasks.rollout.place import Backend, Place
from tasks.spec.rollout import Rollout

_BACKENDS: Mapping[str, Backend] = {
    "sglang": sglang,
    "lmdeploy": lmdeploy,
    "vllm": vllm,
    "command": backends,
}


def backend_of(fleet: Rollout) -> Backend:
    """The module that knows the fleet's backend."""
    return _BACKENDS[fleet.sizes.backend]


def places(fleet: Rollout, node_gpus: int | None = None) -> tuple[tuple[Place, ...], ...]:
    """`places[engine]`: its servers in the order of their ranks, without addresses.

    Args:
        fleet: As validated.
        node_gpus: GPUs on each node; engines are packed onto nodes by them. Left out, an engine of
            one node has that node to itself on Ray, and all of them are on one machine otherwise.

    Raises:
        ValueError: What an engine needs of one node is more than a node has.
    """
    sizes = fleet.sizes
    width = sizes.ranks // sizes.servers
    found: list[tuple[Place, ...]] = []
    for engine in range(sizes.engines):
        nodes, first = nodes_of(fleet, engine, node_gpus), engine * sizes.ranks
        found.append(
            tuple(
                Place(
                    engine=engine,
                    index=index,
                    ranks=tuple(range(first + index * width, first + (index + 1) * width)),
                    node=nodes[index * len(nodes) // sizes.servers],
                )
                for index in range(sizes.servers)
            )
        )
    return tuple(found)


def nodes_of(fleet: Rollout, engine: int, node_gpus: int | None = None) -> tuple[int, ...]:
    """The nodes that an engine spans, which may be more than have a server of it.

    Args:
        node_gpus: As for `places`.

    Raises:
        ValueError: As `places` does.
    """
    sizes = fleet.sizes
    on_a_node = sizes.gpus // sizes.nodes
    if node_gpus is not None and on_a_node > node_gpus:
        raise ValueError(f"an engine needs {on_a_node} GPUs of one node, which has {node_gpus}")
    if sizes.nodes > 1:
        return tuple(range(engine * sizes.nodes, (engine + 1) * sizes.nodes))
    if node_gpus is not None and sizes.gpus:
        return (engine // (node_gpus // sizes.gpus),)
    return (engine if fleet.placement == "ray" else 0,)
