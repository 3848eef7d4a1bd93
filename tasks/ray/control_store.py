"""What only the cluster's control store does: end actors and placement groups by their ids, and
tell what is free now (the dashboard's own figures are up to 5 s old).

Ray offers these to drivers only, which have to run on a node of the cluster. Its own gRPC service
takes the same requests from anywhere. Source: ray/protobuf/gcs_service.proto.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tasks.ray.dashboard import NoAnswer

_WITHIN_S = 5.0
#: A cluster that is up for months keeps a line for each of its jobs; gRPC's own limit is 4 MiB.
_LARGEST_ANSWER_BYTES = 512 * 1024 * 1024

_T = TypeVar("_T")


async def kill_actors(gcs_address: str, actor_ids: Iterable[str]) -> None:
    """SIGKILL for actors, never to be restarted; for a pending one, the end of waiting.

    Raises: NoAnswer.
    """

    def kill(channel: Any) -> None:
        stub = service().ActorInfoGcsServiceStub(channel)
        for actor_id in actor_ids:
            request = messages().KillActorViaGcsRequest(
                actor_id=bytes.fromhex(actor_id), force_kill=True, no_restart=True
            )
            stub.KillActorViaGcs(request, timeout=_WITHIN_S)

    await _call(gcs_address, kill)


async def remove_groups(gcs_address: str, group_ids: Iterable[str]) -> None:
    """Free what placement groups hold. Raises: NoAnswer."""

    def remove(channel: Any) -> None:
        stub = service().PlacementGroupInfoGcsServiceStub(channel)
        for group_id in group_ids:
            request = messages().RemovePlacementGroupRequest(
                placement_group_id=bytes.fromhex(group_id)
            )
            stub.RemovePlacementGroup(request, timeout=_WITHIN_S)

    await _call(gcs_address, remove)


async def drivers_of(gcs_address: str, submission_id: str) -> frozenset[str]:
    """The ids of all drivers that a submission has connected to the cluster: its program may
    start several, of which the dashboard names one. Raises: NoAnswer.
    """

    def ask(channel: Any) -> frozenset[str]:
        stub = service().JobInfoGcsServiceStub(channel)
        # Unless they are left out, the control store asks each driver for one of the fields.
        request = messages().GetAllJobInfoRequest(
            skip_submission_job_info_field=True, skip_is_running_tasks_field=True
        )
        reply = stub.GetAllJobInfo(request, timeout=_WITHIN_S)
        return frozenset(
            job.job_id.hex()
            for job in reply.job_info_list
            if job.config.metadata.get("job_submission_id") == submission_id
        )

    return await _call(gcs_address, ask)


async def free_gpus(gcs_address: str) -> dict[str, float]:
    """`free[node id]`, of nodes that have any free. Raises: NoAnswer."""

    def ask(channel: Any) -> dict[str, float]:
        stub = service().NodeResourceInfoGcsServiceStub(channel)
        reply = stub.GetAllResourceUsage(messages().GetAllResourceUsageRequest(), timeout=_WITHIN_S)
        return {
            node.node_id.hex(): node.resources_available["GPU"]
            for node in reply.resource_usage_data.batch
            if "GPU" in node.resources_available
        }

    return await _call(gcs_address, ask)


async def _call(gcs_address: str, use: Callable[[Any], _T]) -> _T:
    def run() -> _T:
        grpc: Any = importlib.import_module("grpc")
        channel = open_channel(gcs_address)
        try:
            return use(channel)
        except grpc.RpcError as error:
            code = error.code().name if isinstance(error, grpc.Call) else str(error)
            raise NoAnswer(f"no answer from the control store at {gcs_address}: {code}") from error
        finally:
            channel.close()

    return await asyncio.to_thread(run)


def open_channel(gcs_address: str) -> Any:
    """A channel to a control store, with Ray's own authentication and TLS; the caller closes it."""
    constants: Any = importlib.import_module("ray._private.ray_constants")
    utils: Any = importlib.import_module("ray._private.grpc_utils")
    options = (
        *constants.GLOBAL_GRPC_OPTIONS,
        ("grpc.max_receive_message_length", _LARGEST_ANSWER_BYTES),
        # By default a new channel shares the connection of an old one, and waits as long as that
        # one does before it tries again.
        ("grpc.use_local_subchannel_pool", 1),
    )
    return utils.init_grpc_channel(gcs_address, options=options)


# Generated code, without types. Imported where it is used: that takes most of a second.
def service() -> Any:
    return importlib.import_module("ray.core.generated.gcs_service_pb2_grpc")


def messages() -> Any:
    return importlib.import_module("ray.core.generated.gcs_service_pb2")
