"""Questions to a Ray cluster over the HTTP of its dashboard: no driver, no raylet near by.

A cluster that listens on loopback only, as `muster up` starts one, needs a switch in the
environment of its drivers: Ray replaces a loopback address by the machine's address in its network,
where such a cluster does not listen, and looks for it there for minutes.

Anybody may write any address into a spec, and whoever looks at the queue asks it. So Ray's token
and headers go to clusters that an operator has listed; and the token besides to that of the run
whose process asks.
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

from tasks.spec.errors import MusterError
from tasks.spec.placeholders import substituted
from tasks.spec.probes import Url

#: How long one question may take.
ASK_WITHIN_S = 10.0
#: A log that follows a node is silent as long as the job is: only the kernel's own probes tell a
#: connection that is gone from one on which nothing is said.
_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
]
#: How Ray begins the reason where a node was taken out, idle or with its processes told to end.
#: Source: ray 2.60, ray/dashboard/utils.py, compose_state_message.
_PLANNED = ("Expected termination", "Terminated due to idle")
#: As many entries as the state API lists at most.
_LIMIT = 10_000


class NoAnswer(MusterError):
    """The cluster was not reached, or could not say: ask again."""


class Denied(MusterError):
    """The cluster answered, and will not do this however often it is asked."""


#: What Ray calls accelerators that are counted whole; a cluster has the first that any node has.
#: Source: ray/_private/accelerators/*.py, get_resource_name.
ACCELERATORS = ("GPU", "NPU", "HPU", "TPU")


def accelerators(resources: Mapping[str, float] | None) -> float:
    """What a node, a bundle, an actor or a task has of them."""
    return next((float(n) for kind in ACCELERATORS if (n := (resources or {}).get(kind))), 0.0)


_ENV = "env."
#: A JSON list of `ListedCluster`, for this process and those of Muster's own that it starts.
CLUSTERS_VARIABLE = "MUSTER_RAY_CLUSTERS"


class ListedCluster(BaseModel):
    """A Ray cluster that an operator lets be asked."""

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
    """What goes along with the questions to one cluster; Denied, once it can't be had."""

    #: As they are listed.
    headers: Mapping[str, str] = field(default_factory=dict)
    #: A file; None: public certificates.
    ca: str | None = None
    #: Ray's own token goes along, where its authentication is on.
    has_token: bool

    @staticmethod
    def of(address: str, listed: Iterable[ListedCluster], *, is_own: bool = False) -> Credentials:
        """
        Args:
            is_own: of the run whose process asks.
        """
        for one in listed:
            if one.address == address.rstrip("/"):
                return Credentials(headers=one.headers, ca=one.ca, has_token=True)
        return Credentials(has_token=is_own)

    @staticmethod
    def own(address: str) -> Credentials:
        """By what this process was told of the cluster of its run."""
        return Credentials.of(address, _known().values(), is_own=True)

    def sent(self) -> dict[str, str]:
        """All headers, filled in."""
        headers = {name: substituted(value, _variable) for name, value in self.headers.items()}
        return headers | (_auth_headers(headers) if self.has_token else {})

    def verify(self) -> ssl.SSLContext | bool:
        """What an https address has to prove."""
        try:
            return ssl.create_default_context(cafile=self.ca) if self.ca else True
        except OSError as error:
            raise Denied(f"its certificates can't be read from {self.ca}: {error}") from error


def _variable(name: str) -> str:
    variable = name.removeprefix(_ENV)
    if variable == name:
        raise Denied(f"its headers name ${{{name}}}: write ${{env.NAME}}, or `$${{` for a `${{`")
    if (value := os.environ.get(variable)) is None:
        raise Denied(f"its headers name the environment variable {variable}, which is not set here")
    return value


def know(clusters: Iterable[object]) -> None:
    """Have this process, and those of Muster's own that it starts, know more listed clusters; what
    is none is left out."""
    known = _known() | _read(clusters)
    if known:
        os.environ[CLUSTERS_VARIABLE] = json.dumps([one.model_dump() for one in known.values()])


def _known() -> dict[str, ListedCluster]:
    return _read(json.loads(os.environ.get(CLUSTERS_VARIABLE) or "[]"))


def _read(clusters: Iterable[object]) -> dict[str, ListedCluster]:
    found = {}
    for one in clusters:
        with contextlib.suppress(ValueError):
            cluster = ListedCluster.model_validate(one)
            found[cluster.address] = cluster
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveNode:
    """One living node."""

    node_id: str
    ip: str
    name: str
    is_head: bool
    resources_total: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What the cluster says of a submission."""

    #: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED.
    status: str
    message: str = ""
    error_type: str = ""
    #: Below zero: the signal; None where Ray does not know it.
    driver_exit_code: int | None = None
    driver_node_id: str = ""
    driver_ip: str = ""
    #: Seconds since the epoch by the clock of the driver's node; None before its end.
    ended_at: float | None = None

    @property
    def is_final(self) -> bool:
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """One actor that is not dead."""

    actor_id: str
    class_name: str
    state: str
    node_id: str
    pid: int
    #: GPUs of its own, beside those of a placement group.
    gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementGroup:
    """One placement group that is not removed."""

    group_id: str
    #: `gpus_on[node id]`, of bundles that have their place.
    gpus_on: Mapping[str, float] = field(default_factory=dict)


class Dashboard:
    """One cluster, by the URL of its dashboard. Use it in one asyncio loop, and `aclose` it.

    Each question may raise NoAnswer and Denied.
    """

    def __init__(self, address: str, *, credentials: Credentials | None = None) -> None:
        """
        Args:
            credentials: None: those of the cluster of this process's run.
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
        return httpx.AsyncClient(
            base_url=self.address,
            trust_env=False,
            transport=transport,
            timeout=ASK_WITHIN_S,
            headers=self._credentials.sent(),
        )

    async def aclose(self) -> None:
        if "_client" in vars(self):
            await self._client.aclose()

    async def session(self) -> str:
        """The name of the cluster's session: another one after a restart of its head."""
        return str((await self._json("/api/version"))["session_name"])

    async def nodes(self) -> list[LiveNode]:
        """The living nodes, the head among them."""
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
        """What is to be said, by node id, of the nodes that have left the cluster, but for those
        that were taken out as planned.

        Args:
            since: UTC epoch seconds; those that had left before are not listed.
        """
        words = {}
        for entry in await self._state("nodes", state="DEAD"):
            why, ended_at = entry["state_message"] or "", (entry["end_time_ms"] or 0) / 1000
            if ended_at >= since and not why.startswith(_PLANNED):
                said = f"node {entry['node_ip']}/{entry['node_id'][:8]} has left the cluster"
                words[entry["node_id"]] = f"{said} ({why[:200]})" if why else said
        return words

    async def gcs_address(self) -> str:
        """`host:port` of the cluster's control store."""
        answer = await self._json("/nodes", view="summary")
        for node in answer["data"]["summary"]:
            if node["raylet"].get("isHeadNode"):
                for word in node.get("cmdline", ()):
                    name, _, value = word.partition("=")
                    if name == "--gcs-address":
                        return str(value)
        raise NoAnswer(f"the dashboard at {self.address} does not name its control store yet")

    async def gpu_use(self, given: Mapping[str, int]) -> dict[str, float]:
        """By node, the share of the last moment in which its GPUs did something.

        Args:
            given: GPUs by node, the busiest ones there: which a job has, Ray keeps to itself.
                Empty: all of all nodes.
        """
        answer, found = await self._json("/nodes", view="summary"), dict[str, float]()
        for node in answer["data"]["summary"]:
            its, gpus = node["raylet"], node.get("gpus") or ()
            names = (str(its.get("nodeName")), f"{its.get('nodeName')}/{its.get('nodeId', '')[:8]}")
            name = next((one for one in names if one in given or not given), "")
            # Below 0 where its driver does not say.
            use = [one for gpu in gpus if (one := gpu.get("utilizationGpu", -1) or 0) >= 0]
            if name and use:
                found[name] = fmean(sorted(use, reverse=True)[: given.get(name)]) / 100
        return found

    async def job(self, submission_id: str) -> JobState | None:
        """What is known of a submission, None where the cluster does not know it."""
        response = await self._request("GET", f"/api/jobs/{submission_id}")
        if response.status_code == 404:
            return None
        entry = _content(response)
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
        """Ask Ray to stop a job; it does nothing for a pending one."""
        response = await self._request("POST", f"/api/jobs/{submission_id}/stop")
        if response.status_code != 404:
            _checked(response)

    async def actors_of(self, ray_job_id: str) -> list[Actor]:
        """The actors of a driver that are not dead."""
        return await self._actors(job_id=ray_job_id)

    async def supervisor_of(self, submission_id: str) -> Actor | None:
        """Ray's actor that runs a submission, None where it is dead."""
        found = await self._actors(name=f"_ray_internal_job_actor_{submission_id}")
        return found[0] if found else None

    async def groups_of(self, ray_job_id: str) -> list[PlacementGroup]:
        """The placement groups of a driver that are not removed."""
        groups = []
        for entry in await self._state("placement_groups", creator_job_id=ray_job_id):
            if entry["state"] == "REMOVED":
                continue
            gpus_on: dict[str, float] = {}
            for bundle in entry["bundles"] or () if entry["state"] == "CREATED" else ():
                gpus = accelerators(bundle["unit_resources"])
                gpus_on[bundle["node_id"]] = gpus_on.get(bundle["node_id"], 0.0) + gpus
            groups.append(PlacementGroup(group_id=entry["placement_group_id"], gpus_on=gpus_on))
        return groups

    async def gpus_of_tasks(self, ray_job_id: str) -> float:
        """GPUs that running tasks of a driver hold."""
        tasks = await self._state("tasks", job_id=ray_job_id, state="RUNNING")
        return sum(
            accelerators(task.get("required_resources"))
            for task in tasks
            if task["type"] == "NORMAL_TASK" and not task.get("placement_group_id")
        )

    async def log(
        self, submission_id: str, node_id: str, *, follow: bool
    ) -> AsyncGenerator[bytes, None]:
        """The raw bytes of a driver's log from its first on; where it is followed, for ever."""
        kind = "stream" if follow else "file"
        query = {"submission_id": submission_id, "node_id": node_id, "lines": "-1"}
        # The timeout is that of the server's own question to the node, in which it reads it all.
        query |= {"interval": "0.5"} if follow else {"timeout": "600"}
        timeout = httpx.Timeout(ASK_WITHIN_S, read=None if follow else 60.0)
        try:
            async with self._client.stream(
                "GET", f"/api/v0/logs/{kind}", params=query, timeout=timeout
            ) as response:
                if response.is_error:
                    await response.aread()
                _checked(response)
                async for chunk in response.aiter_raw():
                    yield chunk
        except httpx.HTTPError as error:
            raise NoAnswer(_words(error, self.address)) from error

    async def _actors(self, **equal: str) -> list[Actor]:
        return [
            Actor(
                actor_id=entry["actor_id"],
                class_name=entry["class_name"],
                state=entry["state"],
                node_id=entry["node_id"] or "",
                pid=int(entry["pid"] or 0),
                gpus=0.0
                if entry["placement_group_id"] or entry["state"] != "ALIVE"
                else accelerators(entry["required_resources"]),
            )
            for entry in await self._state("actors", **equal)
            if entry["state"] != "DEAD"
        ]

    async def _state(self, what: str, **equal: str) -> list[dict[str, Any]]:
        query: list[tuple[str, str | int]] = [("detail", 1), ("limit", _LIMIT)]
        for key, value in equal.items():
            query += [("filter_keys", key), ("filter_predicates", "="), ("filter_values", value)]
        answer = _content(await self._request("GET", f"/api/v0/{what}", params=query))
        if not answer["result"]:
            raise NoAnswer(f"{self.address}: {answer['msg']}")
        found: list[dict[str, Any]] = answer["data"]["result"]["result"]
        return found

    async def _json(self, path: str, **query: str) -> dict[str, Any]:
        return _content(await self._request("GET", path, params=query))

    async def _request(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            return await self._client.request(method, path, **more)
        except httpx.HTTPError as error:
            raise NoAnswer(_words(error, self.address)) from error
        except httpx.InvalidURL as error:
            raise Denied(f"{self.address} is no URL of a dashboard: {error}") from error


def _checked(response: httpx.Response) -> httpx.Response:
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
    return response


def _content(response: httpx.Response) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(content := _checked(response).json(), dict):
            return content
    raise Denied(f"{response.request.url} answers no JSON object: is it a dashboard?")


def _words(error: httpx.HTTPError, address: str) -> str:
    return f"no answer from {address}: {str(error) or type(error).__name__}"


def _auth_headers(headers: dict[str, str]) -> dict[str, str]:
    """Ray's own, where its authentication is on and these have none."""
    from ray._private.authentication.http_token_authentication import (
        get_auth_headers_if_auth_enabled,
    )

    return dict(get_auth_headers_if_auth_enabled(headers))


#: Source: ray/_private/ray_constants.py, ENABLE_RAY_CLUSTERS_ENV_VAR.
_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def driver_env(gcs_address: str) -> dict[str, str]:
    """What the environment of a driver of this cluster needs beside its own."""
    return {_SWITCH: "0"} if gcs_address.startswith(("127.", "localhost:")) else {}


def ready_driver(gcs_address: str) -> None:
    """Make this process ready for `ray.init` at this cluster."""
    if not (more := driver_env(gcs_address)):
        return
    os.environ.update(more)
    # Ray has read its environment where something has imported it already.
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False
