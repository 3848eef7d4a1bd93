"""Settings of a work pool that an operator can change: policy, clusters, nodes and limits.

They are stored in the pool's base job template. Each change emits an event.
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
from tasks.spec.formatting import join_commas


class TableNode(BaseModel):
    """A node of a pool's node table. Such nodes need no Ray."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, title="Name")
    gpus: int = Field(ge=0, title="GPUs")
    cpus: float | None = Field(
        None, ge=0, title="CPUs", description="Left out: CPUs are not counted."
    )


class FaultyNode(BaseModel):
    """A node that Muster has drained for some time because runs failed on it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    node: str = Field(min_length=1, title="Node")
    reason: str = Field("", title="Reason")
    by: str = Field("", title="Author", description="The run that failed there last.")
    until: float = Field(title="Until", description="UTC epoch seconds.")


class PoolSettings(BaseModel):
    """Settings that decide how a work pool of type `gang` starts runs."""

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
        """Return the names of the nodes that are drained at a time in UTC epoch seconds."""
        faulty = (faulty.node for faulty in self.faulty if faulty.until > now)
        return frozenset((*self.drained, *faulty))

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the pool's clusters: their addresses, and "" if the pool has a node table."""
        addresses = tuple(cluster.address for cluster in self.clusters)
        return (*addresses, "") if self.nodes else addresses

    def max_nodes(self, address: str) -> int:
        """Return how many nodes with GPUs a cluster's autoscaler may start; 0 if unknown."""
        for cluster in self.clusters:
            if cluster.address == address:
                return cluster.max_nodes or 0
        return 0

    @property
    def cluster_of_pool(self) -> dict[str, str]:
        """`address[CLUSTER_OF_POOL]` if the pool has exactly one cluster, else empty."""
        return {CLUSTER_OF_POOL: self.clusters[0].address} if len(self.clusters) == 1 else {}

    def explain_missing_cluster(self) -> str:
        """Return why a run without an address cannot use a cluster of the pool."""
        addresses = join_commas(cluster.address for cluster in self.clusters) or "none"
        return (
            "ray.address is left out, and the clusters that the work pool lists are: "
            f"{addresses}; "
            "write ray: {address: URL}, or list one alone: muster queue set cluster.URL=0"
        )


#: Stands for the address of a run's cluster until it is known, if the spec leaves it to the pool.
CLUSTER_OF_POOL = "the pool's cluster"
#: Name of the pool whose settings apply to runs without a pool.
DEFAULT_POOL = "gang"


def merge_settings(settings: Iterable[PoolSettings]) -> PoolSettings:
    """Return the settings for a cluster that several pools use.

    Nodes, clusters and drains are combined. The smaller limit of a tag applies. The policy is
    `backfill` only if all pools have it.
    """
    all_settings = list(settings)
    nodes: dict[str, TableNode] = {}
    limits: dict[str, int] = {}
    clusters: dict[str, ListedCluster] = {}
    for pool in all_settings:
        clusters = {cluster.address: cluster for cluster in pool.clusters} | clusters
        for node in pool.nodes:
            nodes[node.name] = max(node, nodes.get(node.name, node), key=attrgetter("gpus"))
        for tag, limit in pool.limits.items():
            limits[tag] = min(limit, limits.get(tag, limit))
    all_backfill = bool(all_settings) and all(pool.policy == "backfill" for pool in all_settings)
    drained = dict.fromkeys(name for pool in all_settings for name in pool.drained)
    faulty = dict.fromkeys(node for pool in all_settings for node in pool.faulty)
    return PoolSettings(
        policy="backfill" if all_backfill else "fifo",
        nodes=tuple(nodes.values()),
        clusters=tuple(clusters.values()),
        limits=limits,
        drained=tuple(drained),
        faulty=tuple(faulty),
    )


def settings_of(base_job_template: Mapping[str, Any]) -> PoolSettings:
    """Return the settings in the template of a work pool.

    Raises:
        pydantic.ValidationError: The settings are invalid.
    """
    return PoolSettings.model_validate(settings_data(base_job_template))


def with_settings(base_job_template: Mapping[str, Any], settings: PoolSettings) -> dict[str, Any]:
    """Return a copy of the template with other settings."""
    template = deepcopy(dict(base_job_template))
    properties = template.setdefault("variables", {}).setdefault("properties", {})
    variable = properties.setdefault(POOL_VARIABLE, {"type": "object", "title": "Gang queue"})
    variable["default"] = settings.model_dump(mode="json")
    return template


class NotThere(MusterError):
    """The server does not have the named object, or its content cannot be read."""


class BadSetting(MusterError):
    """The setting does not exist, or its value is invalid. Nothing was changed."""

    exit_code = 2


async def read_pool(client: PrefectClient, name: str) -> WorkPool:
    """Return a work pool.

    Raises:
        NotThere: The server has no such pool.
    """
    try:
        return await client.read_work_pool(name)
    except ObjectNotFound:
        existing = _join_names(pool.name for pool in await client.read_work_pools())
        raise NotThere(
            f"the Prefect server has no work pool {name}; it has: {existing}. "
            f"`muster up` makes the pool gang, `prefect work-pool create {name} --type gang` this "
            "one, --pool names another"
        ) from None


def settings_in(pool: WorkPool) -> PoolSettings:
    """Return the settings of a work pool.

    Raises:
        NotThere: The settings are invalid.
    """
    try:
        return settings_of(pool.base_job_template)
    except ValidationError as error:
        raise NotThere(
            f"the settings of the work pool {pool.name} can't be read: {_describe(error)}; mend "
            "them in the UI (the pool, Edit, Advanced: variables.properties.gang.default)"
        ) from None


def _describe(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, fault['loc'])) or 'gang'}: {fault['msg']}" for fault in error.errors()
    )


async def write_settings(client: PrefectClient, pool: WorkPool, settings: PoolSettings) -> None:
    """Write new settings to a work pool, and announce nodes that were drained or undrained.

    Args:
        client: Client of the Prefect server.
        pool: The pool, read just now. Everything but the settings is kept.
        settings: The new settings.

    Raises:
        NotThere: The pool has no job template yet, which stores the settings.
    """
    if not pool.base_job_template.get("job_configuration"):
        raise NotThere(
            f"the work pool {pool.name} has no job template yet, which its settings are part of: "
            f"start its worker once (`prefect worker start --pool {pool.name}`), which gives it one"
        )
    template = with_settings(pool.base_job_template, settings)
    old_settings = settings_of(pool.base_job_template)
    old_drained = {*old_settings.drained, *(faulty.node for faulty in old_settings.faulty)}
    new_drained: dict[str, dict[str, Any]] = {
        node: {"by": _current_user()} for node in settings.drained
    }
    new_drained |= {faulty.node: faulty.model_dump(exclude={"node"}) for faulty in settings.faulty}
    await client.update_work_pool(pool.name, WorkPoolUpdate(base_job_template=template))

    events = [
        of_pool("muster.node.drained", pool, node=node, **fields)
        for node, fields in new_drained.items()
        if node not in old_drained
    ]
    events += [
        of_pool("muster.node.undrained", pool, node=node, by=_current_user())
        for node in sorted(old_drained - new_drained.keys())
    ]
    await told_at_once(client, *events)


def with_drained(
    settings: PoolSettings, names: Sequence[str], seen: Collection[str], *, is_drained: bool
) -> PoolSettings:
    """Return the settings with these nodes drained, or no longer drained.

    Args:
        settings: The old settings.
        names: Names of the nodes.
        seen: Names of all nodes of the clusters.
        is_drained: True to drain.

    Raises:
        NotThere: A name is unknown.
    """
    known = {node.name for node in settings.nodes} | {*seen, *settings.drained}
    known |= {faulty.node for faulty in settings.faulty}
    if unknown := [name for name in names if name not in known]:
        raise NotThere(
            f"no node is called {join_commas(unknown)}; there are: {_join_names(known)}. Nothing "
            "was changed; the pool's settings in the UI take any name, for a node that is away"
        )
    if is_drained:
        drained = tuple(dict.fromkeys((*settings.drained, *names)))
        return settings.model_copy(update={"drained": drained})
    drained = tuple(dict.fromkeys(name for name in settings.drained if name not in names))
    faulty_nodes = tuple(faulty for faulty in settings.faulty if faulty.node not in names)
    return settings.model_copy(update={"drained": drained, "faulty": faulty_nodes})


#: For each kind of setting such as `node.NAME=8`: the field of the name, the field of the number,
#: and the value that stands for 0.
_TABLES = {"node": ("name", "gpus", 0), "cluster": ("address", "max_nodes", None)}


def with_values(
    settings: PoolSettings, assignments: Sequence[str], *, unset: bool = False
) -> PoolSettings:
    """Return the settings with assignments applied or settings removed.

    Args:
        settings: The old settings.
        assignments: `policy=backfill`, `limit.TAG=16`, `node.NAME=8`, `cluster.URL=4`. With
            `unset`, only the part before the equals sign.
        unset: Set the policy to its default, or remove the limit, node or cluster.

    Raises:
        BadSetting: An assignment is invalid.
    """
    values: dict[str, Any] = settings.model_dump()
    tables: dict[str, dict[str, Any]] = {"limit": values["limits"]}
    for kind, (name_field, *_) in _TABLES.items():
        tables[kind] = {entry[name_field]: entry for entry in values[f"{kind}s"]}
    for assignment in assignments:
        if unset:
            key = assignment
            value = ""
        else:
            key, equals, value = assignment.rpartition("=")
            if not equals:
                raise BadSetting(f"{assignment}: write {assignment}=VALUE")
        kind, name = _parse_key(key)
        if kind == "policy":
            values[kind] = value or PoolSettings().policy
        elif unset:
            if tables[kind].pop(name, None) is None:
                reason = f"the pool has no such {kind}; it has: {_join_names(tables[kind])}"
                raise BadSetting(f"{key}: {reason}")
        elif not value.isdecimal():
            raise BadSetting(f"{assignment}: its value is a number of GPUs, or nodes, 0 or more")
        elif kind == "limit":
            tables[kind][name] = int(value)
        else:
            name_field, number_field, zero_value = _TABLES[kind]
            old_entry = tables[kind].get(name, {})
            tables[kind][name] = {
                **old_entry,
                name_field: name,
                number_field: int(value) or zero_value,
            }
    values |= {f"{kind}s": [*tables[kind].values()] for kind in _TABLES}
    try:
        return PoolSettings.model_validate(values)
    except ValidationError as error:
        raise BadSetting(_describe(error)) from error


def _parse_key(key: str) -> tuple[str, str]:
    """Return the kind and the name of a setting such as `node.NAME`.

    Raises:
        BadSetting: There is no such setting.
    """
    kind, _, name = key.partition(".")
    name = name.rstrip("/") if kind == "cluster" else name
    if key == "policy" or (kind in ("limit", "node", "cluster") and name):
        return kind, name
    known = "policy, limit.TAG, node.NAME, cluster.URL"
    raise BadSetting(f"{key}: no such setting; there are: {known}")


def format_settings(settings: PoolSettings) -> str:
    """Return the settings as one line of JSON, without defaults and without headers."""
    hidden = {"clusters": {"__all__": {"headers"}}}
    return settings.model_dump_json(exclude=hidden, exclude_defaults=True)


def _join_names(names: Iterable[str]) -> str:
    return join_commas(sorted(names)) or "none"


def _current_user() -> str:
    # A user id may have no name, as in some containers.
    return f"{os.environ.get('USER') or f'uid {os.getuid()}'}@{host_name()}"
