"""Client for the HTTP API of a Ray cluster's dashboard. It needs neither a driver nor a raylet.

`muster up` starts a Ray cluster that listens on the loopback address only. Ray's drivers replace a
loopback address with the machine's network address, where this cluster does not listen, and then
wait for minutes. A switch in the driver's environment (`driver_env`) prevents that.

Anybody can write any address into a run spec, and Muster contacts that address when it shows the
queue. Muster therefore sends Ray's token and configured headers only to clusters that an operator
has listed. In addition, the process of a run sends the token to the cluster of that run.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
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
from tasks.spec.placeholders import substitute
from tasks.spec.probes import Url

#: Deadline of one request, in seconds.
ASK_WITHIN_S = 10.0
#: TCP keep-alive options. A connection that follows a job's log carries no data while the job
#: prints nothing. Keep-alive probes are the only way to detect that such a connection is dead.
_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
]
#: Beginnings of the state message of a node that was removed on purpose.
#: Source: ray 2.60, ray/dashboard/utils.py, compose_state_message.
_PLANNED_REMOVALS = ("Expected termination", "Terminated due to idle")
#: Largest number of entries that the state API lists.
_MAX_ENTRIES = 10_000


class NoAnswer(MusterError):
    """The cluster was not reached, or it could not answer. The request may be repeated."""


class Denied(MusterError):
    """The cluster refused the request. Repeating the request does not help."""


#: Names of Ray's resources that count whole accelerators. A cluster uses only one of them.
#: Source: ray/_private/accelerators/*.py, get_resource_name.
ACCELERATORS = ("GPU", "NPU", "HPU", "TPU")


def count_accelerators(resources: Mapping[str, float] | None) -> float:
    """Return the number of accelerators among the resources of a node, bundle, actor or task."""
    for kind in ACCELERATORS:
        if amount := (resources or {}).get(kind):
            return float(amount)
    return 0.0


#: Prefix of a placeholder that names an environment variable: `${env.NAME}`.
_ENV_PREFIX = "env."
#: Environment variable with a JSON list of `ListedCluster`. This process and its Muster child
#: processes read it.
CLUSTERS_VARIABLE = "MUSTER_RAY_CLUSTERS"


class ListedCluster(BaseModel):
    """A Ray cluster that an operator has listed, so that Muster may send credentials to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: Url = Field(title="Address", description="Of its dashboard: http://10.0.0.1:8265.")
    headers: dict[str, str] = Field(
        default_factory=dict,
        title="Headers",
        description="Go along with each question to the dashboard. ${env.NAME} in a value is "
        "filled in by the process that asks, from its environment: a secret need not stand here.",
    )
    ca: str | None = Field(
        None,
        min_length=1,
        title="Certificates",
        description="The file, on each host, of those that vouch for an https address; left out: "
        "public ones.",
    )
    max_nodes: int | None = Field(
        None,
        ge=1,
        title="Most nodes",
        description="An autoscaler may have so many nodes with GPUs: what fits them waits, and is "
        "shown to it. Left out: what is there is all there will be.",
    )

    @field_validator("address")
    @classmethod
    def _without_slash(cls, address: str) -> str:
        return address.rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What authenticates requests to one cluster: headers, certificates and Ray's token.

    The methods raise `Denied` if a header or the certificates cannot be read.
    """

    #: Headers as they are listed, with placeholders.
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Path of a file with CA certificates. None: the public certificates.
    ca: str | None = None
    #: True if Ray's token is sent, provided that Ray's authentication is on.
    has_token: bool

    @staticmethod
    def of(address: str, listed: Iterable[ListedCluster], *, is_own: bool = False) -> Credentials:
        """Return the credentials for a cluster.

        Args:
            address: URL of the cluster's dashboard.
            listed: The clusters that operators have listed.
            is_own: True if the cluster belongs to the run of this process.
        """
        for cluster in listed:
            if cluster.address == address.rstrip("/"):
                return Credentials(headers=cluster.headers, ca=cluster.ca, has_token=True)
        return Credentials(has_token=is_own)

    @staticmethod
    def own(address: str) -> Credentials:
        """Return the credentials for the cluster that the run of this process uses."""
        return Credentials.of(address, _listed_clusters().values(), is_own=True)

    def sent(self) -> dict[str, str]:
        """Return all headers to send. Placeholders are replaced by their values."""
        headers = {
            name: substitute(value, _environment_value) for name, value in self.headers.items()
        }
        if self.has_token:
            headers |= _auth_headers(headers)
        return headers

    def verify(self) -> ssl.SSLContext | bool:
        """Return the TLS context that checks the cluster's certificate, or True for the default."""
        try:
            return ssl.create_default_context(cafile=self.ca) if self.ca else True
        except OSError as error:
            raise Denied(f"its certificates can't be read from {self.ca}: {error}") from error


def _environment_value(name: str) -> str:
    """Return the value for the placeholder `${env.VARIABLE}` of a header. `name` is its inside."""
    variable = name.removeprefix(_ENV_PREFIX)
    if variable == name:
        raise Denied(f"its headers name ${{{name}}}: write ${{env.NAME}}, or `$${{` for a `${{`")
    if (value := os.environ.get(variable)) is None:
        raise Denied(f"its headers name the environment variable {variable}, which is not set here")
    return value


def add_listed_clusters(clusters: Iterable[object]) -> None:
    """Add listed clusters for this process and its Muster child processes.

    Args:
        clusters: `ListedCluster` objects, or dicts with the same fields. Invalid ones are ignored.
    """
    known = _listed_clusters() | _parse_clusters(clusters)
    if known:
        models = [cluster.model_dump() for cluster in known.values()]
        os.environ[CLUSTERS_VARIABLE] = json.dumps(models)


def _listed_clusters() -> dict[str, ListedCluster]:
    """Return the clusters of the environment variable, by address."""
    return _parse_clusters(json.loads(os.environ.get(CLUSTERS_VARIABLE) or "[]"))


def _parse_clusters(clusters: Iterable[object]) -> dict[str, ListedCluster]:
    """Return the valid clusters by address."""
    parsed = {}
    for entry in clusters:
        with contextlib.suppress(ValueError):
            cluster = ListedCluster.model_validate(entry)
            parsed[cluster.address] = cluster
    return parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveNode:
    """A living node of the cluster."""

    node_id: str
    ip: str
    name: str
    is_head: bool
    resources_total: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """State of a submission, as the cluster reports it."""

    #: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED.
    status: str
    message: str = ""
    error_type: str = ""
    #: Exit code of the driver. Negative: the signal that killed it. None if Ray does not know.
    driver_exit_code: int | None = None
    #: Ray's id of the driver's node, in hex. Empty before the driver runs.
    driver_node_id: str = ""
    #: Address of the driver's node. Empty before the driver runs.
    driver_ip: str = ""
    #: UTC epoch seconds by the clock of the driver's node. None if the job has not ended.
    ended_at: float | None = None

    @property
    def is_final(self) -> bool:
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """An actor that is not dead."""

    actor_id: str
    class_name: str
    state: str
    node_id: str
    pid: int
    #: Number of GPUs that the actor holds outside a placement group.
    gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementGroup:
    """A placement group that has not been removed."""

    group_id: str
    #: `gpus_on[node id]` of the bundles that have been placed.
    gpus_on: Mapping[str, float] = field(default_factory=dict)


class Dashboard:
    """HTTP client for the dashboard of one cluster.

    Use it in one asyncio loop and call `aclose` at the end. Every method that asks the cluster may
    raise `NoAnswer` or `Denied`.
    """

    def __init__(self, address: str, *, credentials: Credentials | None = None) -> None:
        """
        Args:
            address: URL of the dashboard.
            credentials: None: the credentials for the cluster of this process's run.
        """
        self.address = address.rstrip("/")
        self._credentials = credentials or Credentials.own(address)

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(
            verify=self._credentials.verify(),
            trust_env=False,
            socket_options=_KEEPALIVE,
            limits=httpx.Limits(max_connections=20),
        )
        client = httpx.AsyncClient(
            base_url=self.address,
            trust_env=False,
            transport=transport,
            timeout=ASK_WITHIN_S,
            headers=self._credentials.sent(),
        )
        # With the cluster's token a stranger could run programs on it.
        check_listeners(client)
        return client

    async def aclose(self) -> None:
        # The property creates the client at its first use. Closing must not create it.
        if "_client" in vars(self):
            await self._client.aclose()

    async def session(self) -> str:
        """Return the name of the cluster's session. It changes when the head node restarts."""
        return str((await self._json("/api/version"))["session_name"])

    async def nodes(self) -> list[LiveNode]:
        """Return the living nodes, including the head."""
        return [
            LiveNode(
                node_id=entry["node_id"],
                ip=entry["node_ip"],
                name=entry["node_name"],
                is_head=entry["is_head_node"],
                resources_total=entry["resources_total"],
            )
            for entry in await self._state("nodes", state="ALIVE")
        ]

    async def lost_nodes(self, since: float) -> dict[str, str]:
        """Return a sentence for each node that left the cluster unplanned, by node id.

        Args:
            since: UTC epoch seconds. Nodes that left before this time are not returned.
        """
        sentences = {}
        for entry in await self._state("nodes", state="DEAD"):
            reason = entry["state_message"] or ""
            ended_at = (entry["end_time_ms"] or 0) / 1000
            if ended_at >= since and not reason.startswith(_PLANNED_REMOVALS):
                sentence = f"node {entry['node_ip']}/{entry['node_id'][:8]} has left the cluster"
                if reason:
                    sentence += f" ({reason[:200]})"
                sentences[entry["node_id"]] = sentence
        return sentences

    async def gcs_address(self) -> str:
        """Return `HOST:PORT` of the cluster's control store."""
        answer = await self._json("/nodes", view="summary")
        for node in answer["data"]["summary"]:
            if node["raylet"].get("isHeadNode"):
                for word in node.get("cmdline", ()):
                    name, _, value = word.partition("=")
                    if name == "--gcs-address":
                        return str(value)
        raise NoAnswer(f"the dashboard at {self.address} does not name its control store yet")

    async def gpu_use(self, gpus_by_node: Mapping[str, int]) -> dict[str, float]:
        """Return the mean GPU utilisation of each node in the last sample, from 0 to 1.

        Args:
            gpus_by_node: Number of GPUs to count on each node, by node name. The busiest GPUs are
                counted, because Ray does not tell which GPUs a job has. Empty: all GPUs of all
                nodes.
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
            # A negative reading means that the driver does not report the utilisation.
            percents = [percent for percent in readings if percent >= 0]
            if name and percents:
                busiest = sorted(percents, reverse=True)[: gpus_by_node.get(name)]
                utilisation[name] = fmean(busiest) / 100
        return utilisation

    async def job(self, submission_id: str) -> JobState | None:
        """Return the state of a submission, or None if the cluster does not know it."""
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
        """Ask Ray to stop a job. Ray ignores this for a pending job."""
        response = await self._request("POST", f"/api/jobs/{submission_id}/stop")
        if response.status_code != 404:
            _check_status(response)

    async def actors_of(self, ray_job_id: str) -> list[Actor]:
        """Return the living actors of a driver."""
        return await self._actors(job_id=ray_job_id)

    async def supervisor_of(self, submission_id: str) -> Actor | None:
        """Return Ray's supervisor actor of a submission, or None if that actor is dead."""
        actors = await self._actors(name=f"_ray_internal_job_actor_{submission_id}")
        return actors[0] if actors else None

    async def groups_of(self, ray_job_id: str) -> list[PlacementGroup]:
        """Return the placement groups of a driver that have not been removed."""
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
        """Return the number of GPUs that the running tasks of a driver hold.

        Tasks in a placement group do not count: their GPUs belong to the group.
        """
        tasks = await self._state("tasks", job_id=ray_job_id, state="RUNNING")
        return sum(
            count_accelerators(task.get("required_resources"))
            for task in tasks
            if task["type"] == "NORMAL_TASK" and not task.get("placement_group_id")
        )

    async def log(
        self, submission_id: str, node_id: str, *, follow: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yield the raw bytes of a driver's log from its beginning.

        Args:
            follow: Keep waiting for new bytes, without end. Otherwise stop at the end of the file.
        """
        kind = "stream" if follow else "file"
        query = {"submission_id": submission_id, "node_id": node_id, "lines": "-1"}
        if follow:
            query["interval"] = "0.5"
        else:
            # Seconds that the dashboard waits for the node, which sends the whole file.
            query["timeout"] = "600"
        timeout = httpx.Timeout(ASK_WITHIN_S, read=None if follow else 60.0)
        try:
            async with self._client.stream(
                "GET", f"/api/v0/logs/{kind}", params=query, timeout=timeout
            ) as response:
                if response.is_error:
                    await response.aread()
                _check_status(response)
                async for chunk in response.aiter_raw():
                    yield chunk
        except httpx.HTTPError as error:
            raise NoAnswer(_no_answer_message(error, self.address)) from error

    async def _actors(self, **filters: str) -> list[Actor]:
        """Return the living actors whose fields equal the given values."""
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
        """Return the entries of a table of the state API whose fields equal the given values."""
        query: list[tuple[str, str | int]] = [("detail", 1), ("limit", _MAX_ENTRIES)]
        for key, value in filters.items():
            query += [("filter_keys", key), ("filter_predicates", "="), ("filter_values", value)]
        answer = _parse_object(await self._request("GET", f"/api/v0/{resource}", params=query))
        if not answer["result"]:
            raise NoAnswer(f"{self.address}: {answer['msg']}")
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
            raise Denied(f"{self.address} is no URL of a dashboard: {error}") from error


def _gpus_of_actor(entry: Mapping[str, Any]) -> float:
    """Return the number of GPUs that an actor of the state API holds outside a placement group."""
    if entry["placement_group_id"] or entry["state"] != "ALIVE":
        return 0.0
    return count_accelerators(entry["required_resources"])


def _check_status(response: httpx.Response) -> None:
    """Raise Denied or NoAnswer if the response has an error status."""
    if response.is_error:
        text = f"{response.request.method} {response.url} answered {response.status_code}: "
        text += " ".join(response.text[-500:].split())
        if response.status_code in (401, 403):
            raise Denied(
                f"{text}; with RAY_AUTH_MODE=token Ray's token is read from RAY_AUTH_TOKEN, the "
                "file RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token"
            )
        if 400 <= response.status_code < 500:
            raise Denied(text)
        raise NoAnswer(text)


def _parse_object(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object in the body of a response. Raises Denied if there is none."""
    with contextlib.suppress(ValueError):
        _check_status(response)
        content = response.json()
        if isinstance(content, dict):
            return content
    raise Denied(f"{response.request.url} answers no JSON object: is it a dashboard?")


def _no_answer_message(error: httpx.HTTPError, address: str) -> str:
    return f"no answer from {address}: {str(error) or type(error).__name__}"


def _auth_headers(headers: dict[str, str]) -> dict[str, str]:
    """Return Ray's headers if its authentication is on and `headers` does not contain them."""
    from ray._private.authentication.http_token_authentication import (
        get_auth_headers_if_auth_enabled,
    )

    return dict(get_auth_headers_if_auth_enabled(headers))


#: Environment variable that keeps Ray from replacing a loopback address.
#: Source: ray/_private/ray_constants.py, ENABLE_RAY_CLUSTERS_ENV_VAR.
_KEEP_LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def require_trusted_control_store(gcs_address: str) -> None:
    """Check who listens at a control store of this machine, before Ray's client sends the token.

    Args:
        gcs_address: `host:port`.

    Raises: UntrustedListener.
    """
    host, _, port = gcs_address.rpartition(":")
    if port.isdecimal():
        require_trusted_listener(host.strip("[]"), int(port))


def driver_env(gcs_address: str) -> dict[str, str]:
    """Return the environment variables that a driver of this cluster needs in addition."""
    is_loopback = gcs_address.startswith(("127.", "localhost:"))
    return {_KEEP_LOOPBACK_VARIABLE: "0"} if is_loopback else {}


def prepare_driver(gcs_address: str) -> None:
    """Prepare this process for `ray.init` on this cluster.

    Raises:
        UntrustedListener: On this machine, another user listens at the address.
    """
    require_trusted_control_store(gcs_address)
    variables = driver_env(gcs_address)
    if not variables:
        return
    os.environ.update(variables)
    # If Ray is already imported, it has read its environment, so set its constant as well.
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False
