"""What a run asks for, and what its Ray cluster has."""

from __future__ import annotations

import asyncio

from tasks.gang.demand import Demand, NodeTotal
from tasks.rayjobs.dashboard import Dashboard, Denied, NoAnswer
from tasks.run.spec import Gang


def demand_of(gang: Gang) -> Demand:
    return Demand(
        nodes=gang.nodes, gpus_per_node=gang.gpus_per_node, cpus_per_gpu=gang.cpus_per_gpu
    )


def nodes_of_cluster(address: str) -> list[NodeTotal] | None:
    """What the living nodes have in all; None where the cluster does not answer.

    Args:
        address: of its dashboard.
    """
    return asyncio.run(_nodes_of_cluster(address))


async def _nodes_of_cluster(address: str) -> list[NodeTotal] | None:
    dashboard = Dashboard(address)
    try:
        nodes = await dashboard.nodes()
    except (NoAnswer, Denied):
        return None
    finally:
        await dashboard.close()
    return [NodeTotal(name=node.name, gpus=node.gpus, cpus=node.cpus) for node in nodes]
