"""What the drivers of a job hold of a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tasks.ray.dashboard import Actor, Dashboard, Node, PlacementGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The living actors and the placement groups of a job."""

    actors: tuple[Actor, ...]
    groups: tuple[PlacementGroup, ...]

    @property
    def is_empty(self) -> bool:
        return not self.actors and not self.groups

    @property
    def gpus(self) -> float:
        """What they have of GPUs; what only waits for some has none."""
        grouped = sum(sum(group.gpus_on.values()) for group in self.groups)
        return grouped + sum(actor.gpus for actor in self.actors)

    def in_words(self, nodes: Sequence[Node]) -> tuple[str, ...]:
        """Each by node and pid, with its GPUs."""
        ips = {node.node_id: node.ip for node in nodes}

        def place(node_id: str) -> str:
            return f"node {ips.get(node_id, node_id[:8] or 'unknown')}"

        actors = [
            f"{place(a.node_id)}, pid {a.pid}: actor {a.class_name} is {a.state}"
            + (f" with {a.gpus:g} GPUs" if a.gpus else "")
            for a in self.actors
        ]
        groups = [
            f"{place(node_id)}: placement group {g.group_id[:8]} has {gpus:g} GPUs"
            for g in self.groups
            for node_id, gpus in (g.gpus_on or {"": 0.0}).items()
        ]
        return (*actors, *groups)


async def holdings_of(dashboard: Dashboard, ray_job_ids: Iterable[str]) -> Holdings:
    """What is held now by drivers, by their ids at Ray. Raises: NoAnswer, Denied."""
    actors: list[Actor] = []
    groups: list[PlacementGroup] = []
    for ray_job_id in sorted(ray_job_ids):
        actors += await dashboard.actors_of(ray_job_id)
        groups += await dashboard.groups_of(ray_job_id)
    return Holdings(actors=tuple(actors), groups=tuple(groups))


async def gpus_of(dashboard: Dashboard, ray_job_ids: Iterable[str]) -> float:
    """GPUs that drivers hold now, running tasks included. Raises: NoAnswer, Denied."""
    ids = sorted(ray_job_ids)
    held = await holdings_of(dashboard, ids)
    return held.gpus + sum([await dashboard.gpus_of_tasks(ray_job_id) for ray_job_id in ids])


def room_in_words(nodes: Sequence[Node], free: Mapping[str, float]) -> str:
    """`127.0.0.1: 3 of 8 free, ...`, of the nodes that have GPUs."""
    return (
        ", ".join(
            f"{node.ip}: {free.get(node.node_id, 0):g} of {node.gpus:g} free"
            for node in nodes
            if node.gpus
        )
        or "no node has GPUs"
    )
