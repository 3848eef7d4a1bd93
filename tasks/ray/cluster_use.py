"""Who uses what of a Ray cluster: plain data, and the rules that tell whose a use is. No I/O.

A placement group is known by the resources that it makes on its nodes, `GPU_group_0_<group id>`: so
they are of the same instant as what the node has free. The last 4 bytes of the group's id are the
job's that made it.

What a plain task (no actor, no placement group) holds can't be told from what others hold.

Source: ray/design_docs/id_specification.md; ray/common/bundle_spec.h, FormatPlacementGroupResource.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

#: What Ray calls accelerators that are counted whole, the first that any node has.
#: Source: ray/_private/accelerators/*.py, get_resource_name.
ACCELERATORS = ("GPU", "NPU", "HPU", "TPU")

#: Of a bundle: resource, index, group. Without the index: that of all bundles of a group.
_OF_BUNDLE = re.compile(rf"({'|'.join(ACCELERATORS)}|CPU)_group_(\d+)_([0-9a-f]{{36}})")
#: `<run id>--aNN` and maybe `-<component>`, of `tasks.record.places.make_run_id` and
#: `tasks.ray.submission.submission_id`.
_SUBMISSION = re.compile(r"(.+-\d{8}-\d{6}-[0-9a-f]{4})--a\d{2,}(-.+)?")
#: The name of Ray's actor that runs a submission. Source: ray/dashboard/modules/job/common.py.
_SUPERVISOR = "_ray_internal_job_actor_"
#: What every node has; a driver can't ask for them by `entrypoint_resources`.
_MEMORY = ("memory", "object_store_memory")
_HEAD = "node:__internal_head__"
#: Ray counts in ten-thousandths.
_SLACK = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What the control store tells of one living node."""

    #: In hex.
    node_id: str
    #: Not unique.
    name: str
    #: Since it came.
    own: Mapping[str, float]
    #: Of `own`, now.
    available: Mapping[str, float]
    #: What placement groups have made on it, all of each.
    grouped: Mapping[str, float] = field(default_factory=dict)
    #: It is to go: nothing new is placed on it.
    is_draining: bool = False

    @property
    def is_head(self) -> bool:
        return _HEAD in self.own


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorReport:
    """An actor that has its place."""

    node_id: str
    #: Empty for most.
    name: str
    #: Its driver's, in hex.
    job_id: str
    #: What it has; with names of bundles where it is in a placement group.
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInUse:
    """One living node of a cluster."""

    #: Ray's name for it; followed by the start of its id where two living nodes share it.
    name: str
    is_head: bool
    #: Accelerators, all of them.
    gpus: float
    cpus: float
    #: In use by others than submissions of ours.
    others_gpus: float
    #: In use beside the accelerators of our submissions, be it by others or by an actor of ours
    #: that has none.
    others_cpus: float
    #: Other resources, all of each.
    resources: Mapping[str, float]
    is_draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterUse:
    """One reading of a cluster."""

    #: By name.
    nodes: tuple[NodeInUse, ...]
    #: `taken[run id][node name]` accelerators, of runs of ours that have any.
    taken: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    #: What they are called, one of ACCELERATORS.
    accelerator: str = ACCELERATORS[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """What one bundle or one actor has on one node."""

    submission_id: str
    gpus: float
    cpus: float


def run_of(submission_id: str) -> str:
    """The id of the run that made the submission; empty where it is none of ours."""
    match = _SUBMISSION.fullmatch(submission_id)
    return match[1] if match else ""


def jobs_of(nodes: Iterable[NodeReport], actors: Iterable[ActorReport]) -> set[str]:
    """The ids, in hex, of the jobs that have actors or placement groups."""
    groups = {of[2] for node in nodes for key in node.grouped if (of := _of_bundle(key))}
    return {_job_of(group) for group in groups} | {actor.job_id for actor in actors}


def use_of(
    nodes: Sequence[NodeReport],
    actors: Iterable[ActorReport],
    submissions: Mapping[str, str],
) -> ClusterUse:
    """Who uses what.

    Args:
        submissions: `submissions[job id]`: the id of the submission that the driver belongs to;
            empty, or missing, where it belongs to none.
    """
    accelerator = _accelerator(nodes)
    uses: dict[str, list[_Use]] = defaultdict(list)
    for actor in actors:
        if use := _actor_use(actor, accelerator, submissions):
            uses[actor.node_id].append(use)
    for node in nodes:
        uses[node.node_id] += _bundle_uses(node, accelerator, submissions)
    names = _names(nodes)
    taken: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    found = []
    for node in nodes:
        name = names[node.node_id]
        gpus = cpus = 0.0
        for use in uses[node.node_id]:
            if (run_id := run_of(use.submission_id)) and use.gpus:
                taken[run_id][name] += use.gpus
                gpus += use.gpus
                cpus += use.cpus
        found.append(_node(node, name, accelerator, gpus, cpus))
    return ClusterUse(
        nodes=tuple(sorted(found, key=lambda node: node.name)),
        taken={run_id: dict(on) for run_id, on in taken.items()},
        accelerator=accelerator,
    )


def _accelerator(nodes: Iterable[NodeReport]) -> str:
    there = {name for node in nodes for name in ACCELERATORS if node.own.get(name)}
    return next((name for name in ACCELERATORS if name in there), ACCELERATORS[0])


def _names(nodes: Sequence[NodeReport]) -> dict[str, str]:
    count = Counter(node.name for node in nodes)
    return {
        node.node_id: node.name if count[node.name] == 1 else f"{node.name}/{node.node_id[:8]}"
        for node in nodes
    }


def _actor_use(actor: ActorReport, accelerator: str, submissions: Mapping[str, str]) -> _Use | None:
    gpus = actor.resources.get(accelerator, 0.0)
    if not gpus:
        return None
    # A supervisor is an actor of the dashboard's own driver.
    is_supervisor = actor.name.startswith(_SUPERVISOR)
    submission_id = actor.name.removeprefix(_SUPERVISOR) if is_supervisor else ""
    return _Use(
        submission_id=submission_id or submissions.get(actor.job_id, ""),
        gpus=gpus,
        cpus=actor.resources.get("CPU", 0.0),
    )


def _bundle_uses(node: NodeReport, accelerator: str, submissions: Mapping[str, str]) -> list[_Use]:
    bundles: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for key, amount in node.grouped.items():
        if of := _of_bundle(key):
            resource, index, group = of
            bundles[group, index][resource] = amount
    return [
        _Use(
            submission_id=submissions.get(_job_of(group), ""),
            gpus=has.get(accelerator, 0.0),
            cpus=has.get("CPU", 0.0),
        )
        for (group, _), has in bundles.items()
    ]


# A large cluster has thousands of these, the same in each reading.
@lru_cache(maxsize=16_384)
def _of_bundle(key: str) -> tuple[str, str, str] | None:
    """Resource, index and group."""
    match = _OF_BUNDLE.fullmatch(key)
    return (match[1], match[2], match[3]) if match else None


def _job_of(group_id: str) -> str:
    return group_id[-8:]


def _node(
    node: NodeReport, name: str, accelerator: str, our_gpus: float, our_cpus: float
) -> NodeInUse:
    def others(resource: str, ours: float) -> float:
        # A node that has just come may not have told yet what it has free: all of it is in use.
        used = node.own.get(resource, 0.0) - node.available.get(resource, 0.0) - ours
        return used if used > _SLACK else 0.0

    own = {accelerator, "CPU", *_MEMORY}
    return NodeInUse(
        name=name,
        is_head=node.is_head,
        gpus=node.own.get(accelerator, 0.0),
        cpus=node.own.get("CPU", 0.0),
        others_gpus=others(accelerator, our_gpus),
        others_cpus=others("CPU", our_cpus),
        resources={key: amount for key, amount in node.own.items() if key not in own},
        is_draining=node.is_draining,
    )
