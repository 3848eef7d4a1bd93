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

from tasks.rayjobs.dashboard import NoAnswer

_WITHIN_S = 5.0

_T = TypeVar("_T")


async def kill_actors(gcs_address: str, actor_ids: Iterable[str]) -> None:
    """SIGKILL for actors, never to be restarted; for a pending one, the end of waiting.

    Raises: NoAnswer.
    """

    def kill(channel: Any) -> None:
        stub = _service().ActorInfoGcsServiceStub(channel)
        for actor_id in actor_ids:
            request = _messages().KillActorViaGcsRequest(
                actor_id=bytes.fromhex(actor_id), force_kill=True, no_restart=True
            )
            stub.KillActorViaGcs(request, timeout=_WITHIN_S)

    await _call(gcs_address, kill)


async def remove_groups(gcs_address: str, group_ids: Iterable[str]) -> None:
    """Free what placement groups hold. Raises: NoAnswer."""

    def remove(channel: Any) -> None:
        stub = _service().PlacementGroupInfoGcsServiceStub(channel)
        for group_id in group_ids:
            request = _messages().RemovePlacementGroupRequest(
                placement_group_id=bytes.fromhex(group_id)
            )
            stub.RemovePlacementGroup(request, timeout=_WITHIN_S)

    await _call(gcs_address, remove)


async def drivers_of(gcs_address: str, submission_id: str) -> frozenset[str]:
    """The ids of all drivers that a submission has connected to the cluster: its program may
    start several, of which the dashboard names one. Raises: NoAnswer.
    """

    def ask(channel: Any) -> frozenset[str]:
        stub = _service().JobInfoGcsServiceStub(channel)
        request = _messages().GetAllJobInfoRequest()
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
        stub = _service().NodeResourceInfoGcsServiceStub(channel)
        reply = stub.GetAllResourceUsage(
            _messages().GetAllResourceUsageRequest(), timeout=_WITHIN_S
        )
        return {
            node.node_id.hex(): node.resources_available["GPU"]
            for node in reply.resource_usage_data.batch
            if "GPU" in node.resources_available
        }

    return await _call(gcs_address, ask)


async def _call(gcs_address: str, use: Callable[[Any], _T]) -> _T:
    def run() -> _T:
        grpc: Any = importlib.import_module("grpc")
        channel = _grpc_utils().init_grpc_channel(gcs_address)
        try:
            return use(channel)
        except grpc.RpcError as error:
            code = error.code().name if isinstance(error, grpc.Call) else str(error)
            raise NoAnswer(f"no answer from the control store at {gcs_address}: {code}") from error
        finally:
            channel.close()

    return await asyncio.to_thread(run)


# Generated code, without types. Imported where it is used: that takes most of a second.
def _service() -> Any:
    return importlib.import_module("ray.core.generated.gcs_service_pb2_grpc")


def _messages() -> Any:
    return importlib.import_module("ray.core.generated.gcs_service_pb2")


def _grpc_utils() -> Any:
    """With Ray's own authentication and TLS."""
    return importlib.import_module("ray._private.grpc_utils")
