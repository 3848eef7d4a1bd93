"""Ask a Ray cluster over the HTTP API of its dashboard. This works from any machine.

**Loopback addresses.** `muster up` starts a Ray cluster that listens only on the loopback address.
A Ray driver replaces a loopback address with the machine's network address. The cluster does not
listen at the network address, so the driver would wait for minutes. An environment variable of the
driver (see `driver_env`) prevents the replacement.

**Credentials.** A user can write any cluster address into a run spec, and Muster contacts that
address to show the queue. Muster therefore sends Ray's token and configured headers only to
clusters that an operator has listed in the settings. The only exception is the process of a run: it
also sends the token to the cluster that the run uses.
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field, field_validator

from tasks.processes.trusted_server import check_listeners, require_trusted_listener
from tasks.spec.errors import MusterError
from tasks.spec.own_settings import RAY_CLUSTERS
from tasks.spec.placeholders import substitute
from tasks.spec.probes import Url

#: Deadline of one request to a dashboard, in seconds.
ASK_WITHIN_S = 10.0
#: Statuses of HTTP responses after which a later request may succeed: request timeout, too early,
#: and too many requests. Ray's dashboard answers at most 100 requests at a time.
_TEMPORARY_STATUSES = frozenset({408, 425, 429})
#: Beginnings of Ray's state message for a node that was removed on purpose.
#: Source: ray 2.60, ray/dashboard/utils.py, compose_state_message.
_PLANNED_REMOVALS = ("Expected termination", "Terminated due to idle")
#: Largest number of entries that Ray's state API returns for one request.
_MAX_ENTRIES = 10_000


class NoAnswer(MusterError):
    """The Ray cluster was not reached or could not answer. The request may be repeated."""


class Denied(MusterError):
    """The Ray cluster refused the request. A repeated request would be refused, too."""


#: Names of the Ray resources that represent accelerators. A cluster uses only one of these names.
#: Source: ray/_private/accelerators/*.py, get_resource_name.
ACCELERATORS = ("GPU", "NPU", "HPU", "TPU")


def count_accelerators(resources: Mapping[str, float] | None) -> float:
    """Return the number of accelerators, such as GPUs, among Ray resources.

    Args:
        resources: Mapping from the name of a Ray resource to its amount, for a node, bundle, actor
            or task. None if there are no resources.
    """
    for kind in ACCELERATORS:
        if amount := (resources or {}).get(kind):
            return float(amount)
    return 0.0


#: Prefix of the placeholders for environment variables, such as `${env.NAME}`.
_ENV_PREFIX = "env."
#: Environment variable with a JSON list of `ListedCluster` objects. A Muster process sets the
#: variable in its own environment, and its Muster child processes inherit the variable.
CLUSTERS_VARIABLE = RAY_CLUSTERS.name


class ListedCluster(BaseModel):
    """A Ray cluster that an operator trusts, and to which Muster may send credentials.

    Operators list such clusters in the settings of a work pool, or in MUSTER_RAY_CLUSTERS.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: Url = Field(
        title="Address",
        description="URL of the Ray cluster's dashboard, for example http://10.0.0.1:8265.",
    )
    headers: dict[str, str] = Field(
        default_factory=dict,
        title="Headers",
        description="HTTP headers that Muster adds to each request to the dashboard. Write a "
        "secret as ${env.NAME}: each process of Muster then reads the secret from its "
        "environment variable NAME.",
    )
    ca: str | None = Field(
        None,
        min_length=1,
        title="Certificates",
        description="Path of the file with the CA certificates for an https address of the "
        "dashboard. The file has the same path on each host. Default: the public certificate "
        "authorities.",
    )
    max_nodes: int | None = Field(
        None,
        ge=1,
        title="Most nodes",
        description="Largest number of nodes with GPUs that the autoscaler of the Ray "
        "cluster may start. If a run waits for more nodes, Muster requests nodes "
        "from the autoscaler, up to this number. If omitted, the cluster has no "
        "autoscaler.",
    )

    @field_validator("address")
    @classmethod
    def _without_slash(cls, address: str) -> str:
        return address.rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Credentials for requests to one Ray cluster: headers, certificates and Ray's token.

    The methods raise `Denied` if the value of a header or the certificate file cannot be read.
    """

    #: Mapping from the name of each HTTP header to its value in the settings of the cluster. The
    #: value may contain placeholders such as `${env.NAME}`.
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Path of a file with CA certificates. None if the public certificate authorities are used.
    ca: str | None = None
    #: True if Ray's token is sent to the cluster when Ray's authentication is on.
    has_token: bool

    @staticmethod
    def of(address: str, listed: Iterable[ListedCluster], *, is_own: bool = False) -> Credentials:
        """Return the credentials for a Ray cluster.

        Args:
            address: URL of the cluster's dashboard.
            listed: The clusters that operators trust, from the settings.
            is_own: True if the run of this process uses the cluster. Ray's token may then be sent
                to the cluster, even if `listed` does not contain the cluster.
        """
        for cluster in listed:
            if cluster.address == address.rstrip("/"):
                return Credentials(headers=cluster.headers, ca=cluster.ca, has_token=True)
        return Credentials(has_token=is_own)

    @staticmethod
    def own(address: str) -> Credentials:
        """Return the credentials for a Ray cluster to which this process may send Ray's token.

        The settings need not list the cluster.

        Args:
            address: URL of the cluster's dashboard.
        """
        return Credentials.of(address, _listed_clusters().values(), is_own=True)

    def make_headers(self) -> dict[str, str]:
        """Return all HTTP headers to send. Placeholders are replaced with their values."""
        headers = {
            name: substitute(value, _environment_value) for name, value in self.headers.items()
        }
        if self.has_token:
            headers |= _auth_headers(headers)
        return headers

    def verify(self) -> ssl.SSLContext | bool:
        """Return the TLS context with which httpx verifies the cluster's certificate.

        Returns:
            The context, or True if httpx must use the public certificate authorities.
        """
        try:
            return ssl.create_default_context(cafile=self.ca) if self.ca else True
        except OSError as error:
            raise Denied(
                f"Muster cannot read the CA certificates of the cluster from {self.ca}: {error}"
            ) from error


def _environment_value(name: str) -> str:
    """Return the value of the environment variable that a header's placeholder names.

    Args:
        name: Name of the placeholder: `env.VARIABLE` for `${env.VARIABLE}`.

    Raises:
        Denied: The placeholder names no environment variable, or the variable is not set.
    """
    variable = name.removeprefix(_ENV_PREFIX)
    if variable == name:
        raise Denied(
            f"the headers of the cluster contain the unknown placeholder ${{{name}}}. Write "
            "${env.NAME} for an environment variable, or `$${` for a literal `${`"
        )
    if (value := os.environ.get(variable)) is None:
        raise Denied(
            f"the headers of the cluster need the environment variable {variable}, but this "
            "process does not have this variable"
        )
    return value


def add_listed_clusters(clusters: Iterable[object]) -> None:
    """Add clusters to the trusted clusters of this process and of its Muster child processes.

    Muster may send credentials to these clusters.

    Args:
        clusters: `ListedCluster` objects, or dicts with the same fields. Invalid dicts are ignored.
    """
    listed = _listed_clusters() | _parse_clusters(clusters)
    if listed:
        models = [cluster.model_dump() for cluster in listed.values()]
        os.environ[CLUSTERS_VARIABLE] = json.dumps(models)


def _listed_clusters() -> dict[str, ListedCluster]:
    """Return a mapping from address to cluster for the clusters in MUSTER_RAY_CLUSTERS."""
    return _parse_clusters(RAY_CLUSTERS.read())


def _parse_clusters(clusters: Iterable[object]) -> dict[str, ListedCluster]:
    """Return a mapping from address to cluster for all valid entries of `clusters`."""
    parsed = {}
    for entry in clusters:
        with contextlib.suppress(ValueError):
            cluster = ListedCluster.model_validate(entry)
            parsed[cluster.address] = cluster
    return parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveNode:
    """A living node of a Ray cluster."""

    #: Ray's node id, in hex.
    node_id: str
    #: IP address of the node.
    ip: str
    #: Ray's name for the node. Several nodes may have the same name.
    name: str
    #: True if this is the head node of the cluster.
    is_head: bool
    #: Mapping from the name of a Ray resource to its total amount on the node, including the amount
    #: in use.
    resources_total: Mapping[str, float]
    #: Ray labels of the node: mapping from label name to value.
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """State of a submitted Ray job, as the cluster's dashboard reports it.

    The job's *driver* is the process that runs the submitted command on a node of the cluster.
    """

    #: Ray's status of the job: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED.
    status: str
    #: Ray's message about the status, or an empty string.
    message: str = ""
    #: Ray's name for the kind of error of a failed job, or an empty string.
    error_type: str = ""
    #: Exit code of the job's driver. A negative value is the signal that killed the driver. None if
    #: Ray does not know the exit code.
    driver_exit_code: int | None = None
    #: Ray's id of the node where the job's driver runs, in hex. An empty string before the driver
    #: starts.
    driver_node_id: str = ""
    #: IP address of the node where the job's driver runs. An empty string before the driver starts.
    driver_ip: str = ""
    #: End of the job in UTC epoch seconds, by the clock of the driver's node. None if the job has
    #: not ended.
    ended_at: float | None = None

    @property
    def is_final(self) -> bool:
        """True if the job has ended."""
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """A Ray actor in any state except DEAD."""

    #: Ray's id of the actor, in hex.
    actor_id: str
    #: Name of the actor's Python class.
    class_name: str
    #: Ray's state of the actor, such as ALIVE or PENDING_CREATION.
    state: str
    #: Ray's id of the actor's node, in hex. An empty string if Ray has not placed the actor on a
    #: node yet.
    node_id: str
    #: Process id of the actor on its node. 0 if the actor's process has not started yet.
    pid: int
    #: Number of GPUs that the actor holds. GPUs of a placement group do not count.
    gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementGroup:
    """A Ray placement group that has not been removed."""

    #: Ray's id of the placement group, in hex.
    group_id: str
    #: Mapping from node id to the number of GPUs that the group has reserved on the node. Empty if
    #: Ray has not placed the group yet.
    gpus_on: Mapping[str, float] = field(default_factory=dict)


class Dashboard:
    """HTTP client for the dashboard of one Ray cluster.

    Use it in one asyncio loop and call `aclose` at the end. Every method that sends a request may
    raise `NoAnswer` or `Denied`.
    """

    def __init__(self, address: str, *, credentials: Credentials | None = None) -> None:
        """Create a client. The first connection is opened with the first request.

        Args:
            address: URL of the dashboard.
            credentials: Credentials for the cluster. If None, the result of `Credentials.own` is
                used.
        """
        self.address = address.rstrip("/")
        self._credentials = credentials or Credentials.own(address)

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(
            verify=self._credentials.verify(),
            trust_env=False,
            limits=httpx.Limits(max_connections=20),
        )
        client = httpx.AsyncClient(
            base_url=self.address,
            trust_env=False,
            transport=transport,
            timeout=ASK_WITHIN_S,
            headers=self._credentials.make_headers(),
        )
        # When a connection is opened, check that no other user of this machine listens at the
        # address. That user would receive Ray's token, and could run programs on the cluster.
        check_listeners(client)
        return client

    async def aclose(self) -> None:
        """Close the connections to the dashboard."""
        # The cached property `_client` creates the HTTP client at its first use. If no request was
        # sent, there is no client to close.
        if "_client" in vars(self):
            await self._client.aclose()

    async def session(self) -> str:
        """Return the name of the cluster's Ray session. A restart of the head changes the name."""
        return str((await self._json("/api/version"))["session_name"])

    async def nodes(self) -> list[LiveNode]:
        """Return the living nodes of the cluster, including the head node."""
        return [
            LiveNode(
                node_id=entry["node_id"],
                ip=entry["node_ip"],
                name=entry["node_name"],
                is_head=entry["is_head_node"],
                resources_total=entry["resources_total"],
                labels=entry.get("labels") or {},
            )
            for entry in await self._state("nodes", state="ALIVE")
        ]

    async def lost_nodes(self, since: float) -> dict[str, str]:
        """Describe each node that the cluster has lost. Nodes removed on purpose do not count.

        Args:
            since: Earliest time of a loss, in UTC epoch seconds.

        Returns:
            Mapping from node id to a phrase about the node, for all lost nodes.
        """
        sentences = {}
        for entry in await self._state("nodes", state="DEAD"):
            reason = entry["state_message"] or ""
            ended_at = (entry["end_time_ms"] or 0) / 1000
            if ended_at >= since and not reason.startswith(_PLANNED_REMOVALS):
                sentence = f"node {entry['node_ip']}/{entry['node_id'][:8]} left the cluster"
                if reason:
                    sentence += f" ({reason[:200]})"
                sentences[entry["node_id"]] = sentence
        return sentences

    async def gcs_address(self) -> str:
        """Return `HOST:PORT` of the cluster's control store (GCS)."""
        answer = await self._json("/nodes", view="summary")
        for node in answer["data"]["summary"]:
            if node["raylet"].get("isHeadNode"):
                for word in node.get("cmdline", ()):
                    name, _, value = word.partition("=")
                    if name == "--gcs-address":
                        return str(value)
        raise NoAnswer(
            f"the Ray dashboard at {self.address} does not show the address of Ray's control store "
            "(GCS) yet"
        )

    async def gpu_use(self, gpus_by_node: Mapping[str, int]) -> dict[str, float]:
        """Return the mean GPU utilisation of each node in Ray's last sample.

        Args:
            gpus_by_node: Mapping from node name to the number of GPUs that a run uses on the node.
                Ray does not report which GPUs these are. So the mean is taken over this number of
                GPUs with the highest utilisation. If the mapping is empty, the mean is taken over
                all GPUs of each node.

        Returns:
            Mapping from node name to utilisation, from 0 to 1. A node is missing if its utilisation
            is unknown.
        """
        answer = await self._json("/nodes", view="summary")
        utilisation: dict[str, float] = {}
        for node in answer["data"]["summary"]:
            raylet = node["raylet"]
            node_name = str(raylet.get("nodeName"))
            names = (node_name, f"{node_name}/{raylet.get('nodeId', '')[:8]}")
            if gpus_by_node:
                name = next((name for name in names if name in gpus_by_node), "")
            else:
                name = node_name

            readings = [gpu.get("utilizationGpu", -1) or 0 for gpu in node.get("gpus") or ()]
            # Ray reports a negative percentage if the GPU driver does not report the utilisation.
            percents = [percent for percent in readings if percent >= 0]
            if name and percents:
                busiest = sorted(percents, reverse=True)[: gpus_by_node.get(name)]
                utilisation[name] = fmean(busiest) / 100
        return utilisation

    async def job(self, submission_id: str) -> JobState | None:
        """Return the state of a submitted job, or None if the cluster has no such job."""
        response = await self._request("GET", f"/api/jobs/{submission_id}")
        if response.status_code == 404:
            return None
        entry = _parse_object(response)
        ended = entry.get("end_time")
        return JobState(
            status=entry["status"],
            message=entry.get("message") or "",
            error_type=entry.get("error_type") or "",
            driver_exit_code=entry.get("driver_exit_code"),
            driver_node_id=entry.get("driver_node_id") or "",
            driver_ip=urlsplit(entry.get("driver_agent_http_address") or "").hostname or "",
            ended_at=ended / 1000 if ended else None,
        )

    async def stop(self, submission_id: str) -> None:
        """Ask Ray to stop a submitted job. Ray ignores the request while the job is pending."""
        response = await self._request("POST", f"/api/jobs/{submission_id}/stop")
        if response.status_code != 404:
            _check_status(response)

    async def actors_of(self, ray_job_id: str) -> list[Actor]:
        """Return the living actors of a Ray driver.

        Args:
            ray_job_id: Ray's job id of the driver, in hex.
        """
        return await self._actors(job_id=ray_job_id)

    async def supervisor_of(self, submission_id: str) -> Actor | None:
        """Return the supervisor actor with which Ray manages a submitted job.

        Returns:
            The supervisor actor, or None if that actor does not run.
        """
        actors = await self._actors(name=f"_ray_internal_job_actor_{submission_id}")
        return actors[0] if actors else None

    async def groups_of(self, ray_job_id: str) -> list[PlacementGroup]:
        """Return the placement groups of a Ray driver that have not been removed.

        Args:
            ray_job_id: Ray's job id of the driver, in hex.
        """
        groups = []
        for entry in await self._state("placement_groups", creator_job_id=ray_job_id):
            if entry["state"] == "REMOVED":
                continue
            placed_bundles: Iterable[dict[str, Any]] = ()
            if entry["state"] == "CREATED":
                placed_bundles = entry["bundles"] or ()
            gpus_on: dict[str, float] = {}
            for bundle in placed_bundles:
                gpus = count_accelerators(bundle["unit_resources"])
                gpus_on[bundle["node_id"]] = gpus_on.get(bundle["node_id"], 0.0) + gpus
            groups.append(PlacementGroup(group_id=entry["placement_group_id"], gpus_on=gpus_on))
        return groups

    async def gpus_of_tasks(self, ray_job_id: str) -> float:
        """Return the number of GPUs that the running Ray tasks of a Ray driver hold.

        A task in a placement group does not count, because its GPUs belong to the group.

        Args:
            ray_job_id: Ray's job id of the driver, in hex.
        """
        tasks = await self._state("tasks", job_id=ray_job_id, state="RUNNING")
        return sum(
            count_accelerators(task.get("required_resources"))
            for task in tasks
            if task["type"] == "NORMAL_TASK" and not task.get("placement_group_id")
        )

    async def log(
        self, submission_id: str, node_id: str, *, last_lines: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the log of a job's driver as raw bytes, until the present end of the log.

        Args:
            submission_id: Submission id of the job.
            node_id: Ray's id of the driver's node, in hex.
            last_lines: Number of last lines to yield. None for the whole log.
        """
        lines = -1 if last_lines is None else last_lines
        # Let the dashboard wait up to 600 seconds until the node has sent the whole log.
        query = {"submission_id": submission_id, "node_id": node_id, "timeout": "600"}
        timeout = httpx.Timeout(ASK_WITHIN_S, read=60.0)
        try:
            async with self._client.stream(
                "GET", "/api/v0/logs/file", params={**query, "lines": str(lines)}, timeout=timeout
            ) as response:
                if response.is_error:
                    await response.aread()
                _check_status(response)
                async for chunk in response.aiter_raw():
                    yield chunk
        except httpx.HTTPError as error:
            raise NoAnswer(_no_answer_message(error, self.address)) from error

    async def _actors(self, **filters: str) -> list[Actor]:
        """Return the living actors whose fields in Ray's state API have the given values."""
        return [
            Actor(
                actor_id=entry["actor_id"],
                class_name=entry["class_name"],
                state=entry["state"],
                node_id=entry["node_id"] or "",
                pid=int(entry["pid"] or 0),
                gpus=_gpus_of_actor(entry),
            )
            for entry in await self._state("actors", **filters)
            if entry["state"] != "DEAD"
        ]

    async def _state(self, resource: str, **filters: str) -> list[dict[str, Any]]:
        """Return entries of Ray's state API.

        Args:
            resource: Kind of the entries, such as "nodes".
            filters: Mapping from field name to required value. Only entries with these values are
                returned.
        """
        query: list[tuple[str, str | int]] = [("detail", 1), ("limit", _MAX_ENTRIES)]
        for key, value in filters.items():
            query += [("filter_keys", key), ("filter_predicates", "="), ("filter_values", value)]
        answer = _parse_object(await self._request("GET", f"/api/v0/{resource}", params=query))
        if not answer["result"]:
            raise NoAnswer(
                f"the Ray dashboard at {self.address} could not list its {resource}: "
                f"{answer['msg']}"
            )
        entries: list[dict[str, Any]] = answer["data"]["result"]["result"]
        return entries

    async def _json(self, path: str, **query: str) -> dict[str, Any]:
        return _parse_object(await self._request("GET", path, params=query))

    async def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return await self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise NoAnswer(_no_answer_message(error, self.address)) from error
        except httpx.InvalidURL as error:
            raise Denied(
                f"{self.address} is not a valid URL of a Ray dashboard: {error}"
            ) from error


def _gpus_of_actor(entry: Mapping[str, Any]) -> float:
    """Return the number of GPUs that an actor holds. GPUs of a placement group do not count.

    Args:
        entry: The actor's entry in Ray's state API.
    """
    if entry["placement_group_id"] or entry["state"] != "ALIVE":
        return 0.0
    return count_accelerators(entry["required_resources"])


def _check_status(response: httpx.Response) -> None:
    """Raise an exception if an HTTP response has an error status.

    Raises:
        Denied: A repeated request would fail in the same way.
        NoAnswer: A later request may succeed.
    """
    if response.is_error:
        text = f"{response.request.method} {response.url} answered {response.status_code}: "
        text += " ".join(response.text[-500:].split())
        if response.status_code in (401, 403):
            raise Denied(
                f"{text}. If the Ray cluster needs a token, set RAY_AUTH_MODE=token, and store "
                "the token in RAY_AUTH_TOKEN, in the file RAY_AUTH_TOKEN_PATH or in "
                "~/.ray/auth_token."
            )
        if response.status_code in _TEMPORARY_STATUSES:
            raise NoAnswer(text)
        if 400 <= response.status_code < 500:
            raise Denied(text)
        raise NoAnswer(text)


def _parse_object(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object in the body of an HTTP response.

    Raises:
        Denied: The cluster refuses the request, or the body is no JSON object.
        NoAnswer: The response has an error status that may be temporary, such as 503.
    """
    with contextlib.suppress(ValueError):
        _check_status(response)
        content = response.json()
        if isinstance(content, dict):
            return content
    raise Denied(
        f"the answer from {response.request.url} is not a JSON object. Check that this is the "
        "address of a Ray dashboard"
    )


def _no_answer_message(error: httpx.HTTPError, address: str) -> str:
    return f"no answer from {address}: {str(error) or type(error).__name__}"


def _auth_headers(headers: dict[str, str]) -> dict[str, str]:
    """Return the HTTP headers that carry Ray's token.

    Args:
        headers: The other headers of the request.

    Returns:
        Only the headers with the token. An empty dict if Ray's authentication is off, or if
        `headers` already contains a token.
    """
    from ray._private.authentication.http_token_authentication import (
        get_auth_headers_if_auth_enabled,
    )

    return dict(get_auth_headers_if_auth_enabled(headers))


#: Environment variable for a Ray driver. With the value 0, the driver does not replace a loopback
#: address with the network address of the machine.
#: Source: ray/_private/ray_constants.py, ENABLE_RAY_CLUSTERS_ENV_VAR.
_KEEP_LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def require_trusted_control_store(gcs_address: str) -> None:
    """Check that no other user of this machine listens at the address of a control store.

    Call this before Ray's client sends the token to that address.

    Args:
        gcs_address: `HOST:PORT` of the control store (GCS).

    Raises:
        UntrustedListener: The address belongs to this machine, and a process of another user
            listens there.
    """
    host, _, port = gcs_address.rpartition(":")
    if port.isdecimal():
        require_trusted_listener(host.strip("[]"), int(port))


def driver_env(gcs_address: str) -> dict[str, str]:
    """Return the additional environment variables that a Ray driver of a cluster needs.

    If the control store has a loopback address, the variables prevent the driver from using the
    machine's network address instead. Otherwise, no variables are needed.

    Args:
        gcs_address: `HOST:PORT` of the cluster's control store (GCS).
    """
    is_loopback = gcs_address.startswith(("127.", "localhost:"))
    return {_KEEP_LOOPBACK_VARIABLE: "0"} if is_loopback else {}


def prepare_driver(gcs_address: str) -> None:
    """Prepare this process to become a Ray driver of a cluster. Call this before `ray.init`.

    The environment variables of `driver_env` are set in this process.

    Args:
        gcs_address: `HOST:PORT` of the cluster's control store (GCS).

    Raises:
        UntrustedListener: The address belongs to this machine, and a process of another user
            listens there.
    """
    require_trusted_control_store(gcs_address)
    variables = driver_env(gcs_address)
    if not variables:
        return
    os.environ.update(variables)
    # Ray computes the constant ENABLE_RAY_CLUSTER from these environment variables when the module
    # `ray` is imported. If `ray` is already imported, the variables have no effect, so also set the
    # constant.
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False
