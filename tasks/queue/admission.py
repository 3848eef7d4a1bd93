"""Admission as the run's own process sees it: check the grant, or wait in the queue for one.

A run that was started directly, or by a worker of another type, has no grant yet. Its process waits
for a gate to grant it a gang: the gate of a worker, or its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, State, WorkPool
from prefect.exceptions import PrefectException
from prefect.states import Running

from tasks.processes.devices import DeviceHeld, DeviceLease, Devices, listed
from tasks.processes.identity import host_name
from tasks.queue import grants
from tasks.queue.decision import Refused, SchedulingPass
from tasks.queue.gate import Gate
from tasks.queue.grants import PENDING_RESOURCES, Grant
from tasks.queue.lease import LeaseLost
from tasks.queue.ledger import FLOW, GANG_POOLS, LedgerReader, parse_request
from tasks.queue.nodes import Capacity
from tasks.queue.reasons import steady_part
from tasks.queue.settings import (
    DEFAULT_POOL,
    LEFT_OUT,
    FaultyNode,
    NotThere,
    PoolSettings,
    settings_in,
    write_settings,
)
from tasks.record.outcome import Failure
from tasks.record.retries import find_blamed_nodes
from tasks.server.events import tell_here

_log = logging.getLogger(__name__)

#: Seconds between two scheduling passes of a waiting process.
_PASS_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The nodes and devices that a run may use."""

    #: `gpus[node name]`.
    nodes: dict[str, int]
    #: Address of the Ray cluster of the nodes, or an empty string.
    cluster: str
    #: Lease of devices of this host, or None if Ray assigns the devices. Close it when the attempt
    #: has ended.
    devices: DeviceLease | None

    def __str__(self) -> str:
        device_text = f", GPU {listed(self.devices.indices)}" if self.devices is not None else ""
        return ", ".join(self.nodes) + device_text


def wait_for_gang(
    flow_run_id: UUID,
    *,
    is_first: bool,
    is_anew: bool,
    say: Callable[[str], None],
    wait: Callable[[float], bool],
) -> Admitted | Refused | None:
    """Return the gang of this process's flow run. If it has none yet, wait for one.

    Args:
        flow_run_id: Id of the flow run.
        is_first: True for the run's first attempt. Later attempts wait for nodes that have gone,
            while a first attempt fails if the cluster can never hold it.
        is_anew: True if this process had a gang for an earlier attempt.
        say: Called with the reason for waiting, whenever it changes.
        wait: Waits for some seconds. Returns False if the run must no longer wait.

    Returns:
        The gang; the reason why the run can never start; or None if `wait` returned False.
    """
    return asyncio.run(_Admission(flow_run_id, is_first, is_anew, say, wait).wait())


@dataclass(slots=True)
class _Admission:
    """One run's wait for its gang. The first fields are the parameters of `wait_for_gang`."""

    _id: UUID
    _is_first: bool
    _is_anew: bool
    _say: Callable[[str], None]
    _wait: Callable[[float], bool]
    _capacity: Capacity | None = None
    #: The last message, and the position at that time.
    _last_message: str = ""
    _last_position: int = 0
    #: True once the flow run has the state PendingResources.
    _is_queued: bool = False
    #: Monotonic time of the last beat.
    _beat_at: float = 0.0

    async def wait(self) -> Admitted | Refused | None:
        """Wait for the gang; see `wait_for_gang`."""
        try:
            while True:
                try:
                    async with get_client() as client:
                        return await self._wait_in_queue(client)
                except (httpx.HTTPError, PrefectException, LeaseLost) as error:
                    self._report(f"waits for the Prefect server, which does not answer: {error!r}")
                if not await asyncio.to_thread(self._wait, _PASS_INTERVAL_S):
                    return None
        finally:
            if self._capacity is not None:
                await self._capacity.close()

    async def _wait_in_queue(self, client: PrefectClient) -> Admitted | Refused | None:
        flow_run = await client.read_flow_run(self._id)
        if not self._is_anew and not self._is_queued:
            grant = await _grant_of_worker(client, flow_run)
            wait_for_gang = await self._accept(client, grant) if grant is not None else None
            if wait_for_gang is not None:
                return wait_for_gang

        if self._capacity is None:
            own_cluster = parse_request(flow_run).cluster
            self._capacity = Capacity(here=not flow_run.work_pool_name, own=own_cluster)
        gate = Gate(client, capacity=self._capacity, announce=tell_here)
        if not self._is_queued:
            await self._beat(client)
            await self._set_state(client, PENDING_RESOURCES, "waits for its gang of GPUs")
            self._is_queued = True

        patient: tuple[UUID, ...] = () if self._is_first else (self._id,)
        while True:
            look, _ = await gate.decide(
                lambda entry, _nodes: entry.id == self._id and entry.waits_in_process,
                patient=patient,
            )
            for refused in look.doomed:
                if refused.entry.id == self._id:
                    return refused
            # The cluster could hold the run at least once, so from now on wait for its nodes.
            patient = (self._id,)
            grant = grants.grant_of(await client.read_flow_run(self._id))
            wait_for_gang = await self._accept(client, grant) if grant is not None else None
            if wait_for_gang is not None:
                await self._set_state(client, "Running", f"admitted on {grant}")
                return wait_for_gang

            await self._report_pass(client, look)
            if time.monotonic() - self._beat_at >= grants.BEAT_EVERY_S:
                await self._beat(client)
            if not await asyncio.to_thread(self._wait, _PASS_INTERVAL_S):
                return None

    async def _beat(self, client: PrefectClient) -> None:
        """Show the gates that this process is alive."""
        await client.update_flow_run_labels(self._id, grants.beat_labels())
        self._beat_at = time.monotonic()

    async def _accept(self, client: PrefectClient, grant: Grant) -> Admitted | None:
        """Lease the devices of a grant.

        Returns:
            None if somebody else, who is not in the ledger, has leased a device. The grant is then
            taken back.
        """
        indices = grant.devices.get(host_name(), ())
        lease = None
        if indices:
            try:
                devices = await asyncio.to_thread(Devices.here)
                lease = DeviceLease(devices, indices, str(self._id))
            except DeviceHeld as error:
                self._report(f"waits: {error.strerror}")
                await client.update_flow_run_labels(self._id, grants.no_grant_labels())
                return None
        return Admitted(nodes=dict(grant.nodes), cluster=grant.cluster, devices=lease)

    async def _report_pass(self, client: PrefectClient, look: SchedulingPass) -> None:
        """Report the run's position, and its reason for waiting if that has changed."""
        message = look.messages.get(self._id)
        if message is None:
            return
        queued_ids = [entry.id for entry in look.line]
        position = queued_ids.index(self._id) + 1 if self._id in queued_ids else 1
        is_new_reason = steady_part(message.text) != self._last_message
        if is_new_reason or position != self._last_position:
            self._last_message = steady_part(message.text)
            self._last_position = position
            self._say(f"place {position} of {len(queued_ids)} in line; {message.text}")
        if is_new_reason:
            # This sets a new state, and a grant is bound to a state. So it must not be done while a
            # grant may be on its way.
            await self._set_state(client, PENDING_RESOURCES, message.text)

    async def _set_state(self, client: PrefectClient, name: str, message: str) -> None:
        await client.set_flow_run_state(self._id, Running(name=name, message=message))

    def _report(self, message: str) -> None:
        """Report a message, unless it was the last one."""
        if message != self._last_message:
            self._last_message = message
            self._say(message)


def find_cluster(flow_run_id: UUID) -> str:
    """Return the address of the Ray cluster for a run without a gang that leaves it to its pool.

    Raises:
        NotThere: The pool does not list exactly one cluster.
    """

    async def find() -> str:
        async with get_client() as client:
            flow_run = await client.read_flow_run(flow_run_id)
            grant = grants.grant_of(flow_run)
            if grant is not None and grant.cluster:
                return grant.cluster
            pool = await _pool_of(client, flow_run)
        settings = settings_in(pool) if pool is not None else PoolSettings()
        if not settings.left_out:
            raise NotThere(settings.why_no_cluster())
        return settings.left_out[LEFT_OUT]

    return asyncio.run(find())


#: If two runs fail on a node within this many seconds, the node is drained for the same time.
_DAY_S = 86_400.0
#: No further node is drained if so many are. The cause is then probably common to all nodes, such
#: as a full storage.
_MAX_FAULTY = 2


async def note_failure(flow_run_id: UUID, run_id: str, failure: Failure) -> None:
    """Record that a failure is blamed on nodes.

    The run's next attempts avoid these nodes. If the failure is blamed on one node, and another run
    has failed there within a day, the node is drained.

    Args:
        flow_run_id: Id of the flow run.
        run_id: Id of the run.
        failure: The failure of the last attempt.

    Raises:
        httpx.HTTPError, PrefectException: The server did not answer.
        NotThere: The settings of the pool cannot be read or changed.
    """
    async with get_client() as client:
        flow_run = await client.read_flow_run(flow_run_id)
        now = time.time()
        grant = grants.grant_of(flow_run)
        nodes = find_blamed_nodes(failure, grant.nodes if grant is not None else ())
        if not nodes:
            return
        # Write this before the other runs are read. If two runs fail at the same time, at least one
        # of them then sees the other.
        await client.update_flow_run_labels(
            flow_run_id, grants.failure_labels(flow_run, nodes, now)
        )

        pool = await _pool_of(client, flow_run)
        if len(nodes) > 1 or pool is None:
            return
        node = nodes[0]
        other_runs = await _runs_that_failed_on(client, node, flow_run_id, now)
        settings = settings_in(pool)
        drained = settings.drained_at(now)
        if not other_runs or node in drained:
            return

        faulty = [entry for entry in settings.faulty if entry.until > now]
        spare_nodes = {entry.name for entry in settings.nodes} - drained - {node}
        if (not spare_nodes and not settings.clusters) or len(faulty) >= _MAX_FAULTY:
            why = f"{len(faulty)} nodes are already" if faulty else "there is no other node"
            _log.warning("%s is not drained: %s", node, why)
            return

        kind = failure.kind.value
        reason = f"{other_runs[0].name} failed there within a day, and {run_id} with {kind}"
        new_entry = FaultyNode(node=node, reason=reason, by=run_id, until=now + _DAY_S)
        new_settings = settings.model_copy(update={"faulty": (*faulty, new_entry)})
        await write_settings(client, pool, new_settings)


async def _runs_that_failed_on(
    client: PrefectClient, node: str, flow_run_id: UUID, now: float
) -> list[FlowRun]:
    """Return the other runs that failed on a node within the last day."""
    recent = {
        "operator": "or_",
        "end_time": {"after_": datetime.fromtimestamp(now - _DAY_S, UTC).isoformat()},
        "state": {"type": {"not_any_": [*TERMINAL_STATES]}},
    }
    flow_runs = await LedgerReader(client).pages(flow_runs=recent, flows={"name": {"any_": [FLOW]}})
    return [
        flow_run
        for flow_run in flow_runs
        if flow_run.id != flow_run_id and grants.failed_nodes(flow_run).get(node, 0) > now - _DAY_S
    ]


async def _pool_of(client: PrefectClient, flow_run: FlowRun) -> WorkPool | None:
    """Return the flow run's own pool if it is of type `gang`, else the default pool."""
    pools = await client.read_work_pools(work_pool_filter=GANG_POOLS)
    pools_by_name = {pool.name: pool for pool in pools}
    return pools_by_name.get(flow_run.work_pool_name or "") or pools_by_name.get(DEFAULT_POOL)


async def _grant_of_worker(client: PrefectClient, flow_run: FlowRun) -> Grant | None:
    """Return the grant with which a worker has started this process, or None.

    A grant of an earlier process of the flow run does not count.
    """
    grant = grants.grant_of(flow_run)
    if grant is None:
        return None
    history: list[State[Any]] = await client.read_flow_run_states(flow_run.id)
    scheduled = (state for state in history if state.is_scheduled())
    last_scheduled = max(scheduled, key=lambda state: state.timestamp, default=None)
    if last_scheduled is None or grant.state_id != str(last_scheduled.id):
        return None
    return grant
