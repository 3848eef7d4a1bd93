"""What an operator sets on a work pool: its policy, its clusters and nodes, its limits.

They stand in the pool's base job template; the verbs change them there and announce it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from operator import attrgetter
from typing import Any

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.objects import WorkPool
from prefect.exceptions import ObjectNotFound
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.processes.identity import host_name
from tasks.queue.packing import Policy
from tasks.ray.dashboard import ListedCluster
from tasks.server.events import of_pool, told_at_once
from tasks.server.flow_runs import POOL_VARIABLE, settings_data
from tasks.spec.errors import MusterError
from tasks.spec.words import commas


class TableNode(BaseModel):
    """A node of a cluster without Ray."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, title="Name")
    gpus: int = Field(ge=0, title="GPUs")
    cpus: float | None = Field(
        None, ge=0, title="CPUs", description="Left out: CPUs are not counted."
    )


class FaultyNode(BaseModel):
    """A node that gets no new gang for a while, since runs failed on it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    node: str = Field(min_length=1, title="Node")
    reason: str = Field("", title="Reason")
    by: str = Field("", title="Author", description="The run that failed there last.")
    until: float = Field(title="Until", description="UTC epoch seconds.")


class PoolSettings(BaseModel):
    """How a work pool of type `gang` admits runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Policy = Field(
        "fifo",
        title="Policy",
        description=(
            "fifo: strictly in order. backfill: later runs may pass where, by the estimates, the "
            "first of the line is not delayed by them."
        ),
    )
    nodes: tuple[TableNode, ...] = Field(
        (), title="Nodes", description="For runs that name no Ray cluster: the nodes there are."
    )
    clusters: tuple[ListedCluster, ...] = Field(
        (),
        title="Ray clusters",
        description="Those that runs may use: asked with their headers and Ray's token, and shown "
        "even while no run is on them. Of one alone, runs need not write the address.",
    )
    limits: dict[str, int] = Field(
        default_factory=dict,
        title="GPUs per tag",
        description="At most so many GPUs at once for the runs with a tag, a team's for example.",
    )
    drained: tuple[str, ...] = Field(
        (),
        title="Drained nodes",
        description="Names of nodes that get no new gang; what runs there goes on.",
    )
    faulty: tuple[FaultyNode, ...] = Field(
        (),
        title="Faulty nodes",
        description="Drained by Muster for a day, since two runs failed there of what a node can "
        "be blamed for.",
    )

    def drained_at(self, now: float) -> frozenset[str]:
        """The names of the nodes that get no new gang at that time, UTC epoch seconds."""
        return frozenset((*self.drained, *(one.node for one in self.faulty if one.until > now)))

    @property
    def keys(self) -> tuple[str, ...]:
        """The clusters that it names: by address; empty for its table of nodes."""
        listed = tuple(one.address for one in self.clusters)
        return (*listed, "") if self.nodes else listed

    def max_nodes(self, address: str) -> int:
        """How many nodes with GPUs the autoscaler of a cluster may have; 0 where nobody says."""
        return next((one.max_nodes or 0 for one in self.clusters if one.address == address), 0)

    @property
    def left_out(self) -> dict[str, str]:
        """`address[LEFT_OUT]`, where the pool has one cluster."""
        return {LEFT_OUT: self.clusters[0].address} if len(self.clusters) == 1 else {}

    def why_no_cluster(self) -> str:
        """Why a run that leaves its cluster to its pool has none, where that is so."""
        there = commas(one.address for one in self.clusters) or "none"
        return (
            f"ray.address is left out, and the clusters that the work pool lists are: {there}; "
            "write ray: {address: URL}, or list one alone: muster queue set cluster.URL=0"
        )


#: Stands for the address of a cluster that a spec leaves to its pool, until that is known.
LEFT_OUT = "the pool's cluster"
#: The pool by whose settings runs wait that are of none.
DEFAULT_POOL = "gang"


def merged(settings: Iterable[PoolSettings]) -> PoolSettings:
    """What holds on a cluster that several pools use: the nodes of all of their tables, the drains
    of each, the smaller limit of a tag; and the line is passed only where all of them let it."""
    every = list(settings)
    nodes: dict[str, TableNode] = {}
    limits: dict[str, int] = {}
    clusters: dict[str, ListedCluster] = {}
    for one in every:
        clusters = {listed.address: listed for listed in one.clusters} | clusters
        for node in one.nodes:
            nodes[node.name] = max(node, nodes.get(node.name, node), key=attrgetter("gpus"))
        for tag, most in one.limits.items():
            limits[tag] = min(most, limits.get(tag, most))
    return PoolSettings(
        policy="backfill" if every and all(one.policy == "backfill" for one in every) else "fifo",
        nodes=tuple(nodes.values()),
        clusters=tuple(clusters.values()),
        limits=limits,
        drained=tuple(dict.fromkeys(name for one in every for name in one.drained)),
        faulty=tuple(dict.fromkeys(node for one in every for node in one.faulty)),
    )


def settings_of(base_job_template: Mapping[str, Any]) -> PoolSettings:
    """The settings in the template of a work pool. Raises: pydantic.ValidationError, where somebody
    has spoilt them."""
    return PoolSettings.model_validate(settings_data(base_job_template))


def with_settings(base_job_template: Mapping[str, Any], settings: PoolSettings) -> dict[str, Any]:
    """The template with other settings; all else is left as it is."""
    template = deepcopy(dict(base_job_template))
    properties = template.setdefault("variables", {}).setdefault("properties", {})
    variable = properties.setdefault(POOL_VARIABLE, {"type": "object", "title": "Gang queue"})
    variable["default"] = settings.model_dump(mode="json")
    return template


class NotThere(MusterError):
    """The server has nothing of that name, or nothing that can be read; the message says what it
    has. A value that can't be is `BadSetting`."""


class BadSetting(MusterError):
    """There is no such setting, or no such value of it: nothing was changed."""

    exit_code = 2


async def pool_of(client: PrefectClient, name: str) -> WorkPool:
    """The work pool. Raises: NotThere."""
    try:
        return await client.read_work_pool(name)
    except ObjectNotFound:
        there = _names(pool.name for pool in await client.read_work_pools())
        raise NotThere(
            f"the Prefect server has no work pool {name}; it has: {there}. "
            f"`muster up` makes the pool gang, `prefect work-pool create {name} --type gang` this "
            "one, --pool names another"
        ) from None


def settings_in(pool: WorkPool) -> PoolSettings:
    """The settings of a work pool. Raises: NotThere, where they can't be read."""
    try:
        return settings_of(pool.base_job_template)
    except ValidationError as error:
        raise NotThere(
            f"the settings of the work pool {pool.name} can't be read: {_faults(error)}; mend "
            "them in the UI (the pool, Edit, Advanced: variables.properties.gang.default)"
        ) from None


def _faults(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, fault['loc'])) or 'gang'}: {fault['msg']}" for fault in error.errors()
    )


async def change(client: PrefectClient, pool: WorkPool, settings: PoolSettings) -> None:
    """Give a work pool, as it was read just now, other settings; all else of it stays.

    Raises: NotThere, where the pool has no job template, which holds the settings, yet.
    """
    if not pool.base_job_template.get("job_configuration"):
        raise NotThere(
            f"the work pool {pool.name} has no job template yet, which its settings are part of: "
            f"start its worker once (`prefect worker start --pool {pool.name}`), which gives it one"
        )
    template = with_settings(pool.base_job_template, settings)
    known = settings_of(pool.base_job_template)
    before = {*known.drained, *(one.node for one in known.faulty)}
    after = {node: {"by": _who()} for node in settings.drained}
    after |= {one.node: one.model_dump(exclude={"node"}) for one in settings.faulty}
    await client.update_work_pool(pool.name, WorkPoolUpdate(base_job_template=template))
    out = (one for one in after if one not in before)
    news = [of_pool("muster.node.drained", pool, node=one, **after[one]) for one in out]
    back = sorted(before - after.keys())
    news += [of_pool("muster.node.undrained", pool, node=one, by=_who()) for one in back]
    await told_at_once(client, *news)


def with_drained(
    settings: PoolSettings, names: Sequence[str], seen: Collection[str], *, is_drained: bool
) -> PoolSettings:
    """The settings with these nodes drained too, or with them no longer drained.

    Args:
        seen: Names of the nodes of clusters.

    Raises: NotThere.
    """
    known = {node.name for node in settings.nodes} | {*seen, *settings.drained}
    known |= {one.node for one in settings.faulty}
    if unknown := [name for name in names if name not in known]:
        raise NotThere(
            f"no node is called {commas(unknown)}; there are: {_names(known)}. Nothing was "
            "changed; the pool's settings in the UI take any name, for a node that is away"
        )
    left = (name for name in settings.drained if is_drained or name not in names)
    drained = tuple(dict.fromkeys((*left, *(names if is_drained else ()))))
    faulty = tuple(one for one in settings.faulty if is_drained or one.node not in names)
    return settings.model_copy(update={"drained": drained, "faulty": faulty})


#: What a setting is called by, which number of it is set, as in `node.NAME=8`, and what 0 is there.
_TABLES = {"node": ("name", "gpus", 0), "cluster": ("address", "max_nodes", None)}


def with_values(
    settings: PoolSettings, assignments: Sequence[str], *, unset: bool = False
) -> PoolSettings:
    """The settings with `policy=backfill`, `limit.TAG=16`, `node.NAME=8` and `cluster.URL=4`
    applied; or with `policy` as it is by default, and `limit.TAG` and its like gone.

    Raises: BadSetting.
    """
    values: dict[str, Any] = settings.model_dump()
    tables: dict[str, dict[str, Any]] = {"limit": values["limits"]}
    for kind, (by, *_) in _TABLES.items():
        tables[kind] = {one[by]: one for one in values[f"{kind}s"]}
    for assignment in assignments:
        key, equals, value = (assignment, "", "") if unset else assignment.rpartition("=")
        if not (equals or unset):
            raise BadSetting(f"{assignment}: write {assignment}=VALUE")
        kind, name = _parsed(key)
        if kind == "policy":
            values[kind] = value or PoolSettings().policy
        elif unset:
            if tables[kind].pop(name, None) is None:
                has = f"the pool has no such {kind}; it has: {_names(tables[kind])}"
                raise BadSetting(f"{key}: {has}")
        elif not value.isdecimal():
            raise BadSetting(f"{assignment}: its value is a number of GPUs, or nodes, 0 or more")
        elif kind == "limit":
            tables[kind][name] = int(value)
        else:
            by, number, nought = _TABLES[kind]
            old = tables[kind].get(name, {})
            tables[kind][name] = {**old, by: name, number: int(value) or nought}
    values |= {f"{kind}s": [*tables[kind].values()] for kind in _TABLES}
    try:
        return PoolSettings.model_validate(values)
    except ValidationError as error:
        raise BadSetting(_faults(error)) from error


def _parsed(key: str) -> tuple[str, str]:
    """Of what kind a setting is, and of what. Raises: BadSetting."""
    kind, _, name = key.partition(".")
    name = name.rstrip("/") if kind == "cluster" else name
    if key == "policy" or (kind in ("limit", "node", "cluster") and name):
        return kind, name
    known = "policy, limit.TAG, node.NAME, cluster.URL"
    raise BadSetting(f"{key}: no such setting; there are: {known}")


def told(settings: PoolSettings) -> str:
    """The settings in one line, as they stand in the UI, without headers."""
    hidden = {"clusters": {"__all__": {"headers"}}}
    return settings.model_dump_json(exclude=hidden, exclude_defaults=True)


def _names(names: Iterable[str]) -> str:
    return commas(sorted(names)) or "none"


def _who() -> str:
    # A user id may have no name, as in some containers.
    return f"{os.environ.get('USER') or f'uid {os.getuid()}'}@{host_name()}"
