"""Settings of a work pool: scheduling policy, Ray clusters, nodes, limits and drained nodes.

An operator changes them with `muster queue` or in the Prefect UI. They are stored in the base job
template of the work pool. `write_settings` emits events for nodes that were drained or undrained.
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
from tasks.server.events import make_pool_event, send_events
from tasks.server.flow_runs import POOL_VARIABLE, read_pool_settings
from tasks.spec.errors import MusterError
from tasks.spec.formatting import join_commas


class TableNode(BaseModel):
    """A node in the node table of a work pool, for runs without Ray."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, title="Name")
    gpus: int = Field(ge=0, title="GPUs")
    cpus: float | None = Field(
        None,
        ge=0,
        title="CPUs",
        description="Number of CPUs of this node that runs may use. If omitted, Muster does not "
        "count the CPUs of this node.",
    )


class FaultyNode(BaseModel):
    """A node that Muster has drained for a day because runs failed on it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    node: str = Field(min_length=1, title="Node")
    reason: str = Field("", title="Reason")
    by: str = Field("", title="Author", description="Id of the last run that failed on the node.")
    until: float = Field(
        title="Until", description="Time at which the drain of the node ends, in UTC epoch seconds."
    )


class PoolSettings(BaseModel):
    """Settings that decide how a work pool of type `gang` starts runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Policy = Field(
        "fifo",
        title="Policy",
        description=(
            "fifo: runs start strictly in the order of the queue. backfill: a later run starts "
            "before the first run of the queue if the first run probably loses no time."
        ),
    )
    nodes: tuple[TableNode, ...] = Field(
        (), title="Nodes", description="Nodes for the runs that use no Ray cluster."
    )
    clusters: tuple[ListedCluster, ...] = Field(
        (),
        title="Ray clusters",
        description="Ray clusters that runs may use. Muster sends Ray's authentication token, "
        "and the `headers` of a cluster, only to clusters in this list. If the list has one "
        "cluster, run specs may omit the address of the cluster.",
    )
    limits: dict[str, int] = Field(
        default_factory=dict,
        title="GPUs per tag",
        description="Limit of GPUs for each tag. All runs with the tag together use at most "
        "this number of GPUs. A tag can stand for a team, for example.",
    )
    drained: tuple[str, ...] = Field(
        (),
        title="Drained nodes",
        description="Names of drained nodes. No new run starts on them, but the runs that are "
        "running there continue.",
    )
    faulty: tuple[FaultyNode, ...] = Field(
        (),
        title="Faulty nodes",
        description="Nodes that seem faulty, because two runs failed on the node within a day. "
        "Muster drains each of these nodes for one day.",
    )

    def drained_at(self, now: float) -> frozenset[str]:
        """Return the names of the nodes that are drained at the given time.

        Args:
            now: Time in UTC epoch seconds.
        """
        faulty = (faulty.node for faulty in self.faulty if faulty.until > now)
        return frozenset((*self.drained, *faulty))

    @property
    def keys(self) -> tuple[str, ...]:
        """Addresses of the Ray clusters of the pool.

        The address "" is added if the settings contain nodes for runs without Ray.
        """
        addresses = tuple(cluster.address for cluster in self.clusters)
        return (*addresses, "") if self.nodes else addresses

    def max_nodes(self, address: str) -> int:
        """Return the largest number of GPU nodes that an autoscaler may give to a cluster.

        Args:
            address: Address of the Ray cluster.

        Returns:
            The number. 0 if the pool does not list the cluster, or lists it without a number.
        """
        for cluster in self.clusters:
            if cluster.address == address:
                return cluster.max_nodes or 0
        return 0

    @property
    def cluster_of_pool(self) -> dict[str, str]:
        """Replacement for the placeholder CLUSTER_OF_POOL: the address of the only Ray cluster.

        The result is a dictionary with one entry: the key is the placeholder, and the value is the
        address. The dictionary is empty if the pool lists no cluster or several clusters.
        """
        return {CLUSTER_OF_POOL: self.clusters[0].address} if len(self.clusters) == 1 else {}

    def explain_missing_cluster(self) -> str:
        """Return the message for a run whose spec omits the address of its Ray cluster.

        Use the message only if the pool lists no cluster or several clusters. If the pool lists
        exactly one cluster, the run uses that cluster, and no address is missing.
        """
        addresses = join_commas(cluster.address for cluster in self.clusters) or "none"
        return (
            "the spec has no ray.address, so the work pool must list exactly one cluster (it "
            f"lists: {addresses}). Write `ray: {{address: URL}}` into the spec, or list one "
            "cluster: `muster queue set cluster.URL=0` (0: no autoscaler)"
        )


#: Placeholder for the address of a run's Ray cluster if the spec omits the address. The address of
#: the only cluster of the run's work pool replaces the placeholder.
CLUSTER_OF_POOL = "the pool's cluster"
#: Name of the work pool whose settings apply to runs without a pool of type `gang`.
DEFAULT_POOL = "gang"


def merge_settings(settings: Iterable[PoolSettings]) -> PoolSettings:
    """Return the merged settings of several work pools that use the same cluster.

    Nodes, clusters and drained nodes are combined. The smallest limit of each tag applies. The
    policy is `backfill` only if all pools have this policy.
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
    """Return the settings in the base job template of a work pool.

    Raises:
        pydantic.ValidationError: The settings are invalid.
    """
    return PoolSettings.model_validate(read_pool_settings(base_job_template))


def with_settings(base_job_template: Mapping[str, Any], settings: PoolSettings) -> dict[str, Any]:
    """Return a copy of a work pool's base job template with new settings."""
    template = deepcopy(dict(base_job_template))
    properties = template.setdefault("variables", {}).setdefault("properties", {})
    variable = properties.setdefault(POOL_VARIABLE, {"type": "object", "title": "Gang queue"})
    variable["default"] = settings.model_dump(mode="json")
    return template


class MissingFromServer(MusterError):
    """An object with the given name is missing on the Prefect server, or its content is invalid."""


class BadSetting(MusterError):
    """A setting with the given name does not exist, or its new value is invalid. Nothing was
    changed.
    """

    exit_code = 2


async def read_pool(client: PrefectClient, name: str) -> WorkPool:
    """Read the work pool with the given name from the server.

    Raises:
        MissingFromServer: The server has no work pool of this name.
    """
    try:
        return await client.read_work_pool(name)
    except ObjectNotFound:
        existing = _join_names(pool.name for pool in await client.read_work_pools())
        raise MissingFromServer(
            f"the Prefect server has no work pool {name}. Choose one of its work pools with "
            f"--pool: {existing}. Or create the pool: `prefect work-pool create {name} --type "
            "gang` (`muster up` creates the pool `gang`)"
        ) from None


def settings_in(pool: WorkPool) -> PoolSettings:
    """Return the settings of a work pool.

    Raises:
        MissingFromServer: The settings are invalid. The message says how to correct them.
    """
    try:
        return settings_of(pool.base_job_template)
    except ValidationError as error:
        raise MissingFromServer(
            f"the settings of the work pool {pool.name} can't be read: {_describe(error)}. Correct "
            "them in the UI (the pool, Edit, Advanced: variables.properties.gang.default)"
        ) from None


def _describe(error: ValidationError) -> str:
    """Return the faults of invalid settings in one line, each with the key of the setting."""
    return "; ".join(
        f"{'.'.join(map(str, fault['loc'])) or 'gang'}: {fault['msg']}" for fault in error.errors()
    )


async def write_settings(client: PrefectClient, pool: WorkPool, settings: PoolSettings) -> None:
    """Write new settings to a work pool, and emit events for drained and undrained nodes.

    Args:
        client: Client of the Prefect server.
        pool: The work pool, read just before this call. The rest of its base job template is kept.
        settings: The new settings.

    Raises:
        MissingFromServer: The pool has no base job template yet, so it cannot store settings.
    """
    if not pool.base_job_template.get("job_configuration"):
        raise MissingFromServer(
            f"the work pool {pool.name} has no job template yet, so it cannot store settings. To "
            "create the template, start a worker of the pool once: prefect worker start --pool "
            f"{pool.name}"
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
        make_pool_event("muster.node.drained", pool, node=node, **fields)
        for node, fields in new_drained.items()
        if node not in old_drained
    ]
    events += [
        make_pool_event("muster.node.undrained", pool, node=node, by=_current_user())
        for node in sorted(old_drained - new_drained.keys())
    ]
    await send_events(client, *events)


def with_drained(
    settings: PoolSettings, names: Sequence[str], present: Collection[str], *, is_drained: bool
) -> PoolSettings:
    """Return a copy of the settings in which some nodes are drained or undrained.

    Args:
        settings: The old settings.
        names: Names of the nodes to drain or undrain.
        present: Names of the nodes of all clusters at present.
        is_drained: True to drain the nodes, False to undrain them.

    Raises:
        MissingFromServer: A name is neither a present node nor a node in the settings.
    """
    known = {node.name for node in settings.nodes} | {*present, *settings.drained}
    known |= {faulty.node for faulty in settings.faulty}
    if unknown := [name for name in names if name not in known]:
        raise MissingFromServer(
            f"there is no node {join_commas(unknown)}; the nodes are: {_join_names(known)}. The "
            "settings are unchanged. To drain an absent node, write its name into the pool's "
            "settings in the UI"
        )
    if is_drained:
        drained = tuple(dict.fromkeys((*settings.drained, *names)))
        return settings.model_copy(update={"drained": drained})
    drained = tuple(dict.fromkeys(name for name in settings.drained if name not in names))
    faulty_nodes = tuple(faulty for faulty in settings.faulty if faulty.node not in names)
    return settings.model_copy(update={"drained": drained, "faulty": faulty_nodes})


#: Kinds of settings that have a name and a number, such as `node` in `node.NAME=8`. Three values
#: belong to each kind: the field that stores the name, the field that stores the number, and the
#: value that is stored instead of the number 0.
_TABLES = {"node": ("name", "gpus", 0), "cluster": ("address", "max_nodes", None)}


def with_values(
    settings: PoolSettings, assignments: Sequence[str], *, unset: bool = False
) -> PoolSettings:
    """Return a copy of the settings in which some settings are changed or removed.

    Args:
        settings: The old settings.
        assignments: Assignments such as `policy=backfill`, `limit.TAG=16`, `node.NAME=8` or
            `cluster.URL=4`. With `unset`, only the keys without values, such as `limit.TAG`.
        unset: True to remove the named limits, nodes and clusters, and to reset the policy to its
            default.

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
                raise BadSetting(f"{assignment}: the value is missing; write {assignment}=VALUE")
        kind, name = _parse_key(key)
        if kind == "policy":
            values[kind] = value or PoolSettings().policy
        elif unset:
            if tables[kind].pop(name, None) is None:
                reason = (
                    f"the work pool has no {kind} with this name. It has only: "
                    f"{_join_names(tables[kind])}"
                )
                raise BadSetting(f"{key}: {reason}")
        elif not value.isdecimal():
            raise BadSetting(f"{assignment}: the value must be a whole number, 0 or more")
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
    """Return the two parts of a setting such as `node.NAME`: its kind and its name.

    The setting `policy` has an empty name.

    Raises:
        BadSetting: There is no setting of this kind.
    """
    kind, _, name = key.partition(".")
    name = name.rstrip("/") if kind == "cluster" else name
    if key == "policy" or (kind in ("limit", "node", "cluster") and name):
        return kind, name
    known = "policy, limit.TAG, node.NAME, cluster.URL"
    raise BadSetting(f"{key}: no such setting; the settings are: {known}")


def format_settings(settings: PoolSettings) -> str:
    """Return the settings as one line of JSON.

    Default values are left out. HTTP headers of clusters are also left out, because they can
    contain secrets.
    """
    hidden = {"clusters": {"__all__": {"headers"}}}
    return settings.model_dump_json(exclude=hidden, exclude_defaults=True)


def _join_names(names: Iterable[str]) -> str:
    return join_commas(sorted(names)) or "none"


def _current_user() -> str:
    """Return the user and the host of this process, for example `anna@node-1`."""
    # Show the user id if the user has no name, as in some containers.
    return f"{os.environ.get('USER') or f'uid {os.getuid()}'}@{host_name()}"
