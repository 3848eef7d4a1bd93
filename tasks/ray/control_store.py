"""Send gRPC requests to the control store (GCS) of a Ray cluster.

The Ray dashboard cannot end actors or placement groups by id, list all drivers of a job, or read
the cluster's key-value table. Ray's Python API can, but only for a Ray driver process on a node of
the cluster. The gRPC service of the control store accepts the same requests from any machine.

Each function may raise `NoAnswer`, or `Denied` if another try would not help.

Source: ray/protobuf/gcs_service.proto.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tasks.processes.trusted_server import UntrustedListener
from tasks.ray.dashboard import Denied, NoAnswer, require_trusted_control_store

#: Deadline of one request to the control store, in seconds.
_REQUEST_TIMEOUT_S = 5.0
#: Largest reply that is accepted, in bytes. The list of jobs grows with every job of the cluster.
#: After some months, the list exceeds gRPC's default limit of 4 MiB.
_MAX_REPLY_BYTES = 512 * 1024 * 1024
#: Time in the year 2255, in UTC epoch milliseconds. For a drained node without a deadline, some
#: programs write the largest integer as the deadline. So a deadline at this time or later counts as
#: no deadline.
_NO_DEADLINE_MS = 9_000_000_000_000
#: gRPC status codes of a refused request. A repeated request would be refused, too.
_DENIAL_CODES = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"})


async def kill_actors(gcs_address: str, actor_ids: Iterable[str]) -> None:
    """Kill Ray actors with SIGKILL. Ray does not restart them, and pending actors never start.

    Args:
        gcs_address: `HOST:PORT` of the control store.
        actor_ids: Ray's ids of the actors, in hex.
    """
    options = {"force_kill": True, "no_restart": True}
    requests = [{"actor_id": bytes.fromhex(actor_id), **options} for actor_id in actor_ids]
    await _call(gcs_address, "ActorInfo", "KillActorViaGcs", requests)


async def remove_groups(gcs_address: str, group_ids: Iterable[str]) -> None:
    """Remove Ray placement groups, so that the resources of the groups become free.

    Args:
        gcs_address: `HOST:PORT` of the control store.
        group_ids: Ray's ids of the placement groups, in hex.
    """
    requests = [{"placement_group_id": bytes.fromhex(group_id)} for group_id in group_ids]
    await _call(gcs_address, "PlacementGroupInfo", "RemovePlacementGroup", requests)


async def list_drivers(gcs_address: str, submission_id: str) -> frozenset[str]:
    """Return the Ray job ids of all Ray drivers that the program of a submitted job has started.

    One program may start several drivers. The dashboard names only one of them.

    Args:
        gcs_address: `HOST:PORT` of the control store.
        submission_id: Submission id of the job.

    Returns:
        The Ray job ids, in hex.
    """
    # Without these two flags, the control store contacts every driver process before it replies,
    # which can take long.
    flags = {"skip_submission_job_info_field": True, "skip_is_running_tasks_field": True}
    (reply,) = await _call(gcs_address, "JobInfo", "GetAllJobInfo", [flags])
    return frozenset(
        job.job_id.hex()
        for job in reply.job_info_list
        if job.config.metadata.get("job_submission_id") == submission_id
    )


async def list_living_nodes(gcs_address: str) -> list[Any]:
    """Return a GcsNodeInfo message for each living node of the cluster.

    Source: ray/protobuf/gcs.proto.
    """
    (reply,) = await _call(gcs_address, "NodeInfo", "GetAllNodeInfo", [{}])
    return [node for node in reply.node_info_list if node.state == node.ALIVE]


async def read_drain_deadlines(gcs_address: str) -> dict[str, float]:
    """Return the times at which the cluster will end the nodes that are being drained.

    Nodes are drained by `ray drain-node` or by the cluster's autoscaler, for example before a
    preemption.

    Args:
        gcs_address: `HOST:PORT` of the control store.

    Returns:
        Mapping from node id, in hex, to the deadline of the node in UTC epoch seconds. Nodes that
        are drained without a deadline are not included.
    """
    (reply,) = await _call(gcs_address, "NodeResourceInfo", "GetDrainingNodes", [{}])
    return {
        node.node_id.hex(): node.draining_deadline_timestamp_ms / 1000
        for node in reply.draining_nodes
        if 0 < node.draining_deadline_timestamp_ms < _NO_DEADLINE_MS
    }


async def read_entries(gcs_address: str, namespace: str, prefix: str) -> dict[str, str]:
    """Read the entries of the cluster's key-value table whose keys start with a prefix.

    All jobs of the cluster can read and write this table, so the values are not trustworthy.

    Args:
        gcs_address: `HOST:PORT` of the control store.
        namespace: Namespace of the entries in the table.
        prefix: Start of the keys.

    Returns:
        Mapping from key to value. The keys do not contain the prefix.
    """
    namespace_field = {"namespace": namespace.encode()}
    key_request = {"prefix": prefix.encode(), **namespace_field}
    (key_reply,) = await _call(gcs_address, "InternalKV", "InternalKVKeys", [key_request])

    value_request = {"keys": list(key_reply.results), **namespace_field}
    (reply,) = await _call(gcs_address, "InternalKV", "InternalKVMultiGet", [value_request])
    return {
        entry.key.decode().removeprefix(prefix): entry.value.decode() for entry in reply.results
    }


async def _call(
    gcs_address: str, service: str, method: str, requests: Iterable[dict[str, Any]]
) -> list[Any]:
    """Send several requests of one kind, one after the other, and return the replies in order.

    Args:
        gcs_address: `HOST:PORT` of the control store.
        service: Name of the gRPC service without its ending `GcsService`.
        method: Name of the service's method.
        requests: For each request message, a mapping from field name to value.
    """

    def run() -> list[Any]:
        channel = open_channel(gcs_address)
        try:
            with convert_grpc_errors(gcs_address):
                send = prepare_request(channel, service, method)
                return [send(_REQUEST_TIMEOUT_S, **fields).result() for fields in requests]
        finally:
            channel.close()

    return await asyncio.to_thread(run)


def open_channel(gcs_address: str, *, has_token: bool = True) -> Any:
    """Open a gRPC channel to a control store, with Ray's own TLS settings.

    Args:
        gcs_address: `HOST:PORT` of the control store.
        has_token: If True, Ray's authentication token is sent with each request.

    Returns:
        The channel. The caller must close it.

    Raises:
        NoAnswer: The address belongs to this machine, and a process of another user listens there.
            That process must not receive the token.
    """
    if has_token:
        try:
            require_trusted_control_store(gcs_address)
        except UntrustedListener as error:
            raise NoAnswer(str(error)) from error

    # Importing these two modules takes most of a second, so they are imported at the first use.
    constants: Any = importlib.import_module("ray._private.ray_constants")
    utils: Any = importlib.import_module("ray._private.grpc_utils")
    options = (
        *constants.GLOBAL_GRPC_OPTIONS,
        ("grpc.max_receive_message_length", _MAX_REPLY_BYTES),
        # By default, a new channel shares the TCP connection of an earlier channel. If that
        # connection was lost, the new channel would wait for gRPC's long reconnect delay.
        ("grpc.use_local_subchannel_pool", 1),
    )
    if has_token:
        return utils.init_grpc_channel(gcs_address, options=options)
    if not uses_tls():
        return utils.grpc.insecure_channel(gcs_address, options=options)
    chain, key, root = utils.load_certs_from_env()
    credentials = utils.grpc.ssl_channel_credentials(root, key, chain)
    return utils.grpc.secure_channel(gcs_address, credentials, options=options)


def uses_tls() -> bool:
    """Return True if the variable RAY_USE_TLS makes Ray encrypt its connections.

    Source: ray/_private/tls_utils.py.
    """
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def prepare_request(channel: Any, service: str, method: str) -> Callable[..., Any]:
    """Return a function that sends requests of one kind to the control store.

    Call the returned function as `send(within_s, **fields)`, with a deadline in seconds and the
    fields of the request message. The function returns a gRPC future of the reply.

    Args:
        channel: An open channel to the control store.
        service: Name of the gRPC service without its ending `GcsService`.
        method: Name of the service's method.
    """
    stubs: Any = importlib.import_module("ray.core.generated.gcs_service_pb2_grpc")
    messages: Any = importlib.import_module("ray.core.generated.gcs_service_pb2")
    method_stub = getattr(getattr(stubs, f"{service}GcsServiceStub")(channel), method)
    request = getattr(messages, f"{method}Request")
    return lambda within_s, **fields: method_stub.future(request(**fields), timeout=within_s)


def request_nodes(channel: Any, bundles: Sequence[Mapping[str, float]], within_s: float) -> None:
    """Ask the cluster's autoscaler for enough nodes to hold all resource bundles at once.

    The bundles must include the bundles of running jobs. Each request to the autoscaler replaces
    the previous request, even that of another program. An empty list of bundles withdraws the
    previous request. The request is sent to both versions of Ray's autoscaler, because Muster
    cannot see which version is active.

    Args:
        channel: An open channel to the control store.
        bundles: For each bundle, a mapping from resource name to amount.
        within_s: Deadline of each of the two requests, in seconds.

    Source: ray/autoscaler/v2/sdk.py, request_cluster_resources;
    ray/autoscaler/_private/commands.py, request_resources.
    """
    stubs: Any = importlib.import_module("ray.core.generated.autoscaler_pb2_grpc")
    messages: Any = importlib.import_module("ray.core.generated.autoscaler_pb2")
    constraint = messages.ClusterResourceConstraint()
    for bundle in bundles:
        entry = constraint.resource_requests.add(count=1)
        entry.request.resources_bundle.update(bundle)
    request = messages.RequestClusterResourceConstraintRequest(
        cluster_resource_constraint=constraint
    )
    stub = stubs.AutoscalerStateServiceStub(channel)
    reply = stub.RequestClusterResourceConstraint.future(request, timeout=within_s)

    put = prepare_request(channel, "InternalKV", "InternalKVPut")
    text = json.dumps([dict(bundle) for bundle in bundles])
    put(within_s, key=b"autoscaler_resource_request", value=text.encode(), overwrite=True).result()
    reply.result()


@contextmanager
def convert_grpc_errors(gcs_address: str) -> Iterator[None]:
    """Convert gRPC errors into NoAnswer or Denied, as a context manager.

    Args:
        gcs_address: `HOST:PORT` of the control store, for the error message.
    """
    grpc: Any = importlib.import_module("grpc")
    try:
        yield
    except (grpc.RpcError, grpc.FutureCancelledError) as error:
        code = error.code().name if isinstance(error, grpc.Call) else type(error).__name__
        if code in _DENIAL_CODES:
            message = (
                f"the Ray control store at {gcs_address} refused the request: {code}, "
                f"{error.details()}"
            )
            raise Denied(message) from error
        raise NoAnswer(f"the Ray control store at {gcs_address} does not answer: {code}") from error
