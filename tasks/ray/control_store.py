"""What only the cluster's control store does: end actors and placement groups by their ids, name
the drivers of a job, and keep a table that all jobs read and write.

Ray offers these to drivers only, which have to run on a node of the cluster. Its own gRPC service
takes the same requests from anywhere. Source: ray/protobuf/gcs_service.proto.

Each question may raise NoAnswer, and Denied where asking again does not help.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tasks.ray.dashboard import Denied, NoAnswer

_WITHIN_S = 5.0
#: A cluster that is up for months keeps a line for each of its jobs; gRPC's own limit is 4 MiB.
_LARGEST_ANSWER_BYTES = 512 * 1024 * 1024
#: Asking again does not help.
_DENIALS = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"})


async def kill_actors(gcs_address: str, actor_ids: Iterable[str]) -> None:
    """SIGKILL for actors, never to be restarted; for a pending one, the end of waiting."""
    how = {"force_kill": True, "no_restart": True}
    which = [{"actor_id": bytes.fromhex(actor_id), **how} for actor_id in actor_ids]
    await _call(gcs_address, "ActorInfo", "KillActorViaGcs", which)


async def remove_groups(gcs_address: str, group_ids: Iterable[str]) -> None:
    """Free what placement groups hold."""
    which = [{"placement_group_id": bytes.fromhex(group_id)} for group_id in group_ids]
    await _call(gcs_address, "PlacementGroupInfo", "RemovePlacementGroup", which)


async def drivers_of(gcs_address: str, submission_id: str) -> frozenset[str]:
    """The ids of all drivers that a submission has connected to the cluster: its program may
    start several, of which the dashboard names one."""
    # Unless they are left out, the control store asks each driver for one of the fields.
    brief = {"skip_submission_job_info_field": True, "skip_is_running_tasks_field": True}
    (reply,) = await _call(gcs_address, "JobInfo", "GetAllJobInfo", [brief])
    return frozenset(
        job.job_id.hex()
        for job in reply.job_info_list
        if job.config.metadata.get("job_submission_id") == submission_id
    )


async def living_nodes(gcs_address: str) -> list[Any]:
    """A GcsNodeInfo for each node that has not left. Source: ray/protobuf/gcs.proto."""
    (reply,) = await _call(gcs_address, "NodeInfo", "GetAllNodeInfo", [{}])
    return [node for node in reply.node_info_list if node.state == node.ALIVE]


async def entries(gcs_address: str, namespace: str, prefix: str) -> dict[str, str]:
    """What stands in the table that all jobs of the cluster read and write, by keys without their
    common prefix."""
    named = {"namespace": namespace.encode()}
    whose = {"prefix": prefix.encode(), **named}
    (found,) = await _call(gcs_address, "InternalKV", "InternalKVKeys", [whose])
    keys = {"keys": list(found.results), **named}
    (reply,) = await _call(gcs_address, "InternalKV", "InternalKVMultiGet", [keys])
    return {one.key.decode().removeprefix(prefix): one.value.decode() for one in reply.results}


async def _call(
    gcs_address: str, service: str, method: str, requests: Iterable[dict[str, Any]]
) -> list[Any]:
    """The answers to requests, which are made one after the other."""

    def run() -> list[Any]:
        channel = open_channel(gcs_address)
        try:
            with answering(gcs_address):
                ask = question(channel, service, method)
                return [ask(_WITHIN_S, **fields).result() for fields in requests]
        finally:
            channel.close()

    return await asyncio.to_thread(run)


# What is imported by name has no types, and takes most of a second: only whoever asks has it.
def open_channel(gcs_address: str, *, has_token: bool = True) -> Any:
    """A channel to a control store, with Ray's own TLS, and its token; the caller closes it."""
    constants: Any = importlib.import_module("ray._private.ray_constants")
    utils: Any = importlib.import_module("ray._private.grpc_utils")
    options = (
        *constants.GLOBAL_GRPC_OPTIONS,
        ("grpc.max_receive_message_length", _LARGEST_ANSWER_BYTES),
        # By default a new channel shares the connection of an old one, and waits as long as that
        # one does before it tries again.
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
    """Whether Ray's own connections are encrypted. Source: ray/_private/tls_utils.py."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def question(channel: Any, service: str, method: str) -> Callable[..., Any]:
    """Sends one request of a service: `question(...)(within_s, **fields)` is a future of the
    answer."""
    stubs: Any = importlib.import_module("ray.core.generated.gcs_service_pb2_grpc")
    messages: Any = importlib.import_module("ray.core.generated.gcs_service_pb2")
    ask = getattr(getattr(stubs, f"{service}GcsServiceStub")(channel), method)
    request = getattr(messages, f"{method}Request")
    return lambda within_s, **fields: ask.future(request(**fields), timeout=within_s)


def show_demand(channel: Any, bundles: Sequence[Mapping[str, float]], within_s: float) -> None:
    """Have the autoscaler of a cluster see to it that all of these fit at once, whatever is in use;
    none: nothing of it any more. What others have asked for in this way is forgotten.

    It goes to both versions of the autoscaler, of which one looks.

    Source: ray/autoscaler/v2/sdk.py, request_cluster_resources;
    ray/autoscaler/_private/commands.py, request_resources.
    """
    stubs: Any = importlib.import_module("ray.core.generated.autoscaler_pb2_grpc")
    messages: Any = importlib.import_module("ray.core.generated.autoscaler_pb2")
    constraint = messages.ClusterResourceConstraint()
    for bundle in bundles:
        wanted = constraint.resource_requests.add(count=1)
        wanted.request.resources_bundle.update(bundle)
    request = messages.RequestClusterResourceConstraintRequest(
        cluster_resource_constraint=constraint
    )
    ask = stubs.AutoscalerStateServiceStub(channel).RequestClusterResourceConstraint
    answer = ask.future(request, timeout=within_s)
    put = question(channel, "InternalKV", "InternalKVPut")
    text = json.dumps([dict(bundle) for bundle in bundles])
    put(within_s, key=b"autoscaler_resource_request", value=text.encode(), overwrite=True).result()
    answer.result()


@contextmanager
def answering(gcs_address: str) -> Iterator[None]:
    """Turns what gRPC raises within into NoAnswer and Denied."""
    grpc: Any = importlib.import_module("grpc")
    try:
        yield
    except (grpc.RpcError, grpc.FutureCancelledError) as error:
        code = error.code().name if isinstance(error, grpc.Call) else type(error).__name__
        if code in _DENIALS:
            refusal = f"the control store at {gcs_address} refuses: {code}, {error.details()}"
            raise Denied(refusal) from error
        raise NoAnswer(f"no answer from the control store at {gcs_address}: {code}") from error
