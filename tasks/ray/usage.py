"""A look at what a Ray cluster has and who uses it: no driver, a few milliseconds, a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Callable, Iterable
from typing import Any

from tasks.ray.cluster_use import ACCELERATORS, ActorReport, ClusterUse, NodeReport, jobs_of, use_of
from tasks.ray.control_store import messages, open_channel, service
from tasks.ray.dashboard import Dashboard, Denied, NoAnswer

#: States of actors that may have their place: PENDING_CREATION (its constructor runs), ALIVE,
#: RESTARTING. Source: ray/protobuf/gcs.proto, ActorTableData.ActorState.
_PLACED = (1, 2, 3)
#: Asking again does not help.
_DENIALS = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"})
#: How much longer than the look its questions may take: the look is to end first, and tells of it.
_LONGER_S = 1.0


class ClusterLook:
    """One cluster, by the URL of its dashboard. Use it in one asyncio loop, and `close` it.

    The dashboard is asked for the control store's address; all else is asked of that one, over a
    channel that is kept until a look fails.

    Args:
        dashboard: makes the dashboard of an address.
    """

    def __init__(self, address: str, *, dashboard: Callable[[str], Dashboard] = Dashboard) -> None:
        self._address = address
        self._make_dashboard = dashboard
        self._dashboard: Dashboard | None = None
        self._store: _ControlStore | None = None
        self._lock = asyncio.Lock()
        self._asked = ""

    async def look(self, *, within_s: float) -> ClusterUse:
        """Who uses what now.

        What was taken shows within milliseconds, what was given back within about 0.1 s. The first
        look of a process takes a second more: it loads Ray, which the deadline does not count.

        Raises: NoAnswer when the cluster did not answer in time; Denied.
        """
        if self._store is None:
            await asyncio.to_thread(_load)
        try:
            async with asyncio.timeout(within_s), self._lock:
                return await self._look(within_s)
        except TimeoutError as error:
            raise NoAnswer(
                f"no answer from {self._asked} of {self._address} within {within_s:g} s"
            ) from error

    async def close(self) -> None:
        self._forget()
        if self._dashboard is not None:
            await self._dashboard.close()

    async def _look(self, within_s: float) -> ClusterUse:
        if self._store is not None:
            # A head that was restarted may have it elsewhere.
            with contextlib.suppress(NoAnswer):
                return await self._read(self._store, within_s)
        self._asked = "the dashboard"
        if self._dashboard is None:
            self._dashboard = await asyncio.to_thread(self._make_dashboard, self._address)
        gcs_address = await self._dashboard.gcs_address()
        self._store = await asyncio.to_thread(_ControlStore, gcs_address)
        return await self._read(self._store, within_s)

    async def _read(self, store: _ControlStore, within_s: float) -> ClusterUse:
        self._asked = "the control store"
        try:
            return await asyncio.to_thread(store.read, within_s + _LONGER_S)
        except BaseException:
            # Of a look that is given up the thread goes on: without a channel it ends at once.
            self._forget()
            raise

    def _forget(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


class _ControlStore:
    """One connection, and what was learnt over it that does not change. Its calls block."""

    def __init__(self, gcs_address: str) -> None:
        self._gcs_address = gcs_address
        self._channel = open_channel(gcs_address)
        self._usage = service().NodeResourceInfoGcsServiceStub(self._channel).GetAllResourceUsage
        self._nodes = service().NodeInfoGcsServiceStub(self._channel).GetAllNodeInfo
        self._actors = service().ActorInfoGcsServiceStub(self._channel).GetAllActorInfo
        self._jobs = service().JobInfoGcsServiceStub(self._channel).GetAllJobInfo
        self._infos: dict[bytes, Any] = {}
        self._head = ""
        #: `[job id]`, empty where the driver belongs to no submission.
        self._submissions: dict[str, str] = {}

    def close(self) -> None:
        self._channel.close()

    def read(self, within_s: float) -> ClusterUse:
        """One reading.

        Args:
            within_s: for each question.

        Raises: NoAnswer, Denied.
        """
        grpc: Any = importlib.import_module("grpc")
        try:
            return self._read(within_s)
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            code = error.code().name if isinstance(error, grpc.Call) else type(error).__name__
            if code in _DENIALS:
                raise Denied(
                    f"the control store at {self._gcs_address} refuses: {code}, {error.details()}"
                ) from error
            raise NoAnswer(
                f"no answer from the control store at {self._gcs_address}: {code}"
            ) from error

    def _read(self, within_s: float) -> ClusterUse:
        asking = self._usage.future(messages().GetAllResourceUsageRequest(), timeout=within_s)
        # The actors after the nodes, and all of it at once: what comes in between counts as used
        # by others for one look, which promises nothing that is not there.
        filters = messages().GetAllActorInfoRequest.Filters
        of_states = [
            self._actors.future(
                messages().GetAllActorInfoRequest(filters=filters(state=state)),
                timeout=within_s,
            )
            for state in _PLACED
        ]
        nodes = self._reports(asking.result().resource_usage_data.batch, within_s)
        actors = [
            ActorReport(
                node_id=actor.address.node_id.hex(),
                name=actor.name,
                job_id=actor.job_id.hex(),
                resources=dict(actor.required_resources),
            )
            for answer in of_states
            for actor in answer.result().actor_table_data
            # In a placement group it has none of these. Most are, and this is a large part of it.
            if any(name in actor.required_resources for name in ACCELERATORS)
            and actor.address.node_id
        ]
        self._learn_jobs(jobs_of(nodes, actors), within_s)
        return use_of(nodes, actors, self._submissions)

    def _reports(self, usages: Iterable[Any], within_s: float) -> list[NodeReport]:
        usages = list(usages)
        if any(usage.node_id not in self._infos for usage in usages):
            answer = self._nodes(messages().GetAllNodeInfoRequest(), timeout=within_s)
            there = {usage.node_id for usage in usages}
            self._infos = {
                info.node_id: info for info in answer.node_info_list if info.node_id in there
            }
        reports = [
            NodeReport(
                node_id=usage.node_id.hex(),
                name=info.node_name,
                own=dict(info.resources_total),
                available={
                    key: usage.resources_available.get(key, 0.0) for key in info.resources_total
                },
                grouped={
                    key: amount for key, amount in usage.resources_total.items() if "_group_" in key
                },
                is_draining=usage.is_draining,
            )
            for usage in usages
            if (info := self._infos.get(usage.node_id)) is not None
        ]
        head = next((report.node_id for report in reports if report.is_head), "")
        if head != self._head:
            # Another cluster at the same address: its jobs are counted from 1 again.
            self._head = head
            self._submissions.clear()
        return reports

    def _learn_jobs(self, job_ids: Iterable[str], within_s: float) -> None:
        asking = {
            job_id: self._jobs.future(
                messages().GetAllJobInfoRequest(
                    job_or_submission_id=job_id,
                    skip_submission_job_info_field=True,
                    # For this one the control store asks each driver.
                    skip_is_running_tasks_field=True,
                ),
                timeout=within_s,
            )
            for job_id in job_ids
            if job_id not in self._submissions
        }
        for job_id, answer in asking.items():
            for job in answer.result().job_info_list:
                metadata = job.config.metadata
                self._submissions[job_id] = metadata.get("job_submission_id") or ""


def _load() -> None:
    """Import what takes long, where nobody waits for it."""
    service()
    importlib.import_module("ray._private.grpc_utils")
    importlib.import_module("ray._private.authentication.http_token_authentication")
