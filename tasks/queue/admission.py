"""Admission in the process of a run: use the grant of the run, or wait in the queue for a grant.

A run that a worker of type `gang` started has a grant. A run that was started without a worker, or
by a worker of another type, has no grant yet. Its process waits in the queue and runs scheduling
passes itself, until this process or the scheduler of a worker grants GPUs to the run.
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
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.states import Running

from tasks.processes.devices import DeviceHeld, DeviceLease, Devices, format_devices
from tasks.processes.identity import host_name
from tasks.queue import grants
from tasks.queue.decision import Refused, SchedulingPass
from tasks.queue.grants import PENDING_RESOURCES, Grant
from tasks.queue.lease import LeaseLost
from tasks.queue.ledger import FLOW, GANG_POOLS, LedgerReader, parse_request
from tasks.queue.nodes import Capacity
from tasks.queue.reasons import steady_part
from tasks.queue.scheduler import Scheduler
from tasks.queue.settings import (
    CLUSTER_OF_POOL,
    DEFAULT_POOL,
    FaultyNode,
    MissingFromServer,
    PoolSettings,
    settings_in,
    write_settings,
)
from tasks.record.outcome import Failure
from tasks.record.retries import find_blamed_nodes
from tasks.server.events import announce_run_event

_log = logging.getLogger(__name__)

#: Time, in seconds, between two scheduling passes of a process that waits for its GPUs.
_PASS_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The nodes and GPU devices that a run may use after its admission."""

    #: Mapping from node name to the number of GPUs that the run may use on the node.
    nodes: dict[str, int]
    #: Address of the Ray cluster that contains the nodes. Empty if the run does not use Ray.
    cluster: str
    #: Lease of the GPU devices of this host, or None if Ray assigns the devices. The caller must
    #: close the lease at the end of the attempt.
    devices: DeviceLease | None
    #: True if the run starts early: other runs may still use the granted GPUs, and Ray starts the
    #: program of this run when the GPUs become free.
    is_early: bool = False

    def __str__(self) -> str:
        text = ", ".join(self.nodes)
        if self.devices is not None:
            text += f", GPU {format_devices(self.devices.indices)}"
        if self.is_early:
            text += (
                ", while other runs still use the GPUs. Ray starts the program of this run when "
                "the GPUs become free"
            )
        return text


def wait_for_gang(
    flow_run_id: UUID,
    *,
    is_first_attempt: bool,
    ignores_grant: bool,
    report: Callable[[str], None],
    wait: Callable[[float], bool],
) -> Admitted | Refused | None:
    """Wait until the flow run of this process gets its GPUs, and return its nodes and devices.

    If a worker has already granted GPUs to the run, the function returns at once.

    Args:
        flow_run_id: Id of the flow run.
        is_first_attempt: True for the run's first attempt. If the cluster is too small, a first
            attempt fails, but a later attempt waits for missing nodes to return.
        ignores_grant: True to ignore the present grant of the flow run, which belongs to an earlier
            attempt, and to wait for a new grant.
        report: Function that is called with the reason for waiting whenever the reason changes.
        wait: Function that waits for the given number of seconds. The function returns False if the
            run must stop waiting, for example after a cancellation.

    Returns:
        One of three values: the nodes and devices of the run, the reason why the run can never
            start, or None if `wait` returned False.
    """
    admission = _Admission(flow_run_id, is_first_attempt, ignores_grant, report, wait)
    return asyncio.run(admission.wait())


def _explain_failed_pass(error: httpx.HTTPError | PrefectException | LeaseLost) -> str:
    """Return a text that explains why a run waits after a scheduling pass has failed."""
    match error:
        case httpx.TransportError():
            return f"waits for the Prefect server, which does not answer: {error!r}"
        case ObjectNotFound():
            return (
                "waits, because somebody deleted the flow run, its work pool or its deployment "
                "from the Prefect server"
            )
    return (
        "waits, because Muster's last check of the queue failed. Muster will repeat the check: "
        f"{error}"
    )


@dataclass(slots=True)
class _Admission:
    """State of a process that waits for the GPUs of its run.

    The first five fields are the arguments of the function `wait_for_gang`.
    """

    _id: UUID
    _is_first_attempt: bool
    _ignores_grant: bool
    _report: Callable[[str], None]
    _wait: Callable[[float], bool]
    #: Object that reads the nodes and their free GPUs. None before the first scheduling pass.
    _capacity: Capacity | None = None
    #: The last reported reason for waiting, without details that change often, such as the number
    #: of free GPUs.
    _last_message: str = ""
    #: Position of the run in the queue when the last message was reported. The first position is 1,
    #: and 0 means that no message was reported yet.
    _last_position: int = 0
    #: True after this process has set the state of the flow run to PendingResources.
    _is_queued: bool = False
    #: Time of this process's last change of the label HEARTBEAT of the flow run, in seconds of the
    #: monotonic clock. Changes of the label show that the process is alive.
    _beat_at: float = 0.0

    async def wait(self) -> Admitted | Refused | None:
        """Wait until the run gets its GPUs, and return the result of `wait_for_gang`."""
        try:
            while True:
                try:
                    async with get_client() as client:
                        return await self._wait_in_queue(client)
                except (httpx.HTTPError, PrefectException, LeaseLost) as error:
                    self._report_once(_explain_failed_pass(error))
                if not await asyncio.to_thread(self._wait, _PASS_INTERVAL_S):
                    return None
        finally:
            if self._capacity is not None:
                await self._capacity.close()

    async def _wait_in_queue(self, client: PrefectClient) -> Admitted | Refused | None:
        """Wait until the run gets its GPUs. An error of the Prefect server ends the wait.

        Raises:
            httpx.HTTPError, PrefectException: The server did not answer.
            LeaseLost: This process took too long to write a scheduling decision to the server.
        """
        flow_run = await client.read_flow_run(self._id)
        if not self._ignores_grant and not self._is_queued:
            grant = await _find_grant_of_worker(client, flow_run)
            admitted = await self._accept(client, grant) if grant is not None else None
            if admitted is not None:
                return admitted

        if self._capacity is None:
            own_cluster = parse_request(flow_run).cluster
            self._capacity = Capacity(
                includes_this_machine=not flow_run.work_pool_name, own_cluster=own_cluster
            )
        scheduler = Scheduler(client, capacity=self._capacity, announce=announce_run_event)
        if not self._is_queued:
            await self._send_heartbeat(client)
            await self._set_state(
                client, PENDING_RESOURCES, "waits for the GPUs of the run (`gang`)"
            )
            self._is_queued = True

        never_refused: tuple[UUID, ...] = () if self._is_first_attempt else (self._id,)
        while True:
            scheduling_pass, _ = await scheduler.decide(
                lambda entry, _nodes: entry.id == self._id and entry.waits_in_process,
                never_refused=never_refused,
            )
            for refused in scheduling_pass.refused:
                if refused.entry.id == self._id:
                    return refused
            # The scheduling pass did not refuse the run, so its cluster is large enough. If nodes
            # disappear later, the run waits until the nodes return.
            never_refused = (self._id,)
            flow_run = await client.read_flow_run(self._id)
            grant = grants.grant_of(flow_run)
            admitted = await self._accept(client, grant) if grant is not None else None
            if admitted is not None:
                await self._set_state(client, "Running", f"admitted on {grant}")
                return admitted

            await self._return_to_queue(client, flow_run)
            await self._report_pass(client, scheduling_pass)
            if time.monotonic() - self._beat_at >= grants.HEARTBEAT_EVERY_S:
                await self._send_heartbeat(client)
            if not await asyncio.to_thread(self._wait, _PASS_INTERVAL_S):
                return None

    async def _return_to_queue(self, client: PrefectClient, flow_run: FlowRun) -> None:
        """Change the state of the flow run from Running back to PendingResources.

        A flow run in the state Running is not in the queue and would get no GPUs. The state of a
        waiting flow run becomes Running in this case: a user sets another state by hand, such as
        Scheduled, and another thread of this process replaces that state with Running.
        """
        state = grants.state_of(flow_run)
        if state.is_running() and state.name != PENDING_RESOURCES:
            await self._set_state(
                client, PENDING_RESOURCES, "waits for the GPUs of the run (`gang`)"
            )

    async def _send_heartbeat(self, client: PrefectClient) -> None:
        """Change the label HEARTBEAT of the flow run, to show that this process is alive."""
        await client.update_flow_run_labels(self._id, grants.heartbeat_labels())
        self._beat_at = time.monotonic()

    async def _accept(self, client: PrefectClient, grant: Grant) -> Admitted | None:
        """Lease the granted GPU devices of this host, and return the nodes and devices of the run.

        Returns:
            The nodes and devices. None if another program on this host has already leased one of
            the devices. This method then deletes the grant.
        """
        indices = grant.devices.get(host_name(), ())
        lease = None
        if indices:
            try:
                devices = await asyncio.to_thread(Devices.here)
                lease = DeviceLease(devices, indices, str(self._id))
            except DeviceHeld as error:
                self._report_once(f"waits for a GPU: {error.strerror}")
                await client.update_flow_run_labels(self._id, grants.no_grant_labels())
                return None
        return Admitted(
            nodes=dict(grant.nodes),
            cluster=grant.cluster,
            devices=lease,
            is_early=grant.is_early,
        )

    async def _report_pass(self, client: PrefectClient, scheduling_pass: SchedulingPass) -> None:
        """Report the run's position and reason for waiting, if the position or the reason has
        changed.
        """
        message = scheduling_pass.messages.get(self._id)
        if message is None:
            return
        queued_ids = [entry.id for entry in scheduling_pass.queue]
        position = queued_ids.index(self._id) + 1 if self._id in queued_ids else 1
        is_new_reason = steady_part(message.text) != self._last_message
        if is_new_reason or position != self._last_position:
            self._last_message = steady_part(message.text)
            self._last_position = position
            self._report(f"position {position} of {len(queued_ids)} in the queue; {message.text}")
        if is_new_reason:
            # A change of the state makes a grant void. So set the state only here, after a
            # scheduling pass that has not granted GPUs to this run.
            await self._set_state(client, PENDING_RESOURCES, message.text)

    async def _set_state(self, client: PrefectClient, name: str, message: str) -> None:
        await client.set_flow_run_state(self._id, Running(name=name, message=message))

    def _report_once(self, message: str) -> None:
        """Report a message, unless it is equal to the last reported message."""
        if message != self._last_message:
            self._last_message = message
            self._report(message)


def find_cluster(flow_run_id: UUID) -> str:
    """Return the address of the Ray cluster for a run whose spec names no address.

    The function returns the cluster in the GPU grant of the run. If the run has no grant, it
    returns the only cluster in the settings of the run's work pool.

    Raises:
        MissingFromServer: The run has no grant, and its work pool does not list exactly one
            cluster.
    """

    async def find_address() -> str:
        async with get_client() as client:
            flow_run = await client.read_flow_run(flow_run_id)
            grant = grants.grant_of(flow_run)
            if grant is not None and grant.cluster:
                return grant.cluster
            pool = await _find_gang_pool(client, flow_run)
        settings = settings_in(pool) if pool is not None else PoolSettings()
        if not settings.cluster_of_pool:
            raise MissingFromServer(settings.explain_missing_cluster())
        return settings.cluster_of_pool[CLUSTER_OF_POOL]

    return asyncio.run(find_address())


#: One day, in seconds. After two runs have failed on a node within a day, Muster starts no new runs
#: on that node for a day.
_DAY_S = 86_400.0
#: Largest number of nodes that Muster drains at the same time because runs failed on them. If even
#: more nodes seem faulty, there is probably a cause that affects all nodes, such as full storage.
_MAX_FAULTY = 2


async def note_failure(flow_run_id: UUID, run_id: str, failure: Failure) -> None:
    """Record the nodes that may have caused the failure of a run's attempt.

    The next attempts of the run avoid these nodes. If two runs fail on the same node within 24
    hours, Muster drains the node for 24 hours, so that no new runs start there. A failure with
    several possible nodes never causes a drain.

    Args:
        flow_run_id: Id of the flow run.
        run_id: Id of the run.
        failure: The failure of the last attempt.

    Raises:
        httpx.HTTPError, PrefectException: The server did not answer.
        MissingFromServer: The settings of the pool cannot be read or changed.
    """
    async with get_client() as client:
        flow_run = await client.read_flow_run(flow_run_id)
        now = time.time()
        grant = grants.grant_of(flow_run)
        nodes = find_blamed_nodes(failure, grant.nodes if grant is not None else ())
        if not nodes:
            return
        # Write the failure of this run before reading the other runs below. Otherwise, two runs
        # that fail at the same time could each miss the failure of the other run.
        await client.update_flow_run_labels(
            flow_run_id, grants.failure_labels(flow_run, nodes, now)
        )

        pool = await _find_gang_pool(client, flow_run)
        if len(nodes) > 1 or pool is None:
            return
        node = nodes[0]
        other_runs = await _read_other_failed_runs(client, node, flow_run_id, now)
        settings = settings_in(pool)
        drained = settings.drained_at(now)
        if not other_runs or node in drained:
            return

        faulty = [entry for entry in settings.faulty if entry.until > now]
        spare_nodes = {entry.name for entry in settings.nodes} - drained - {node}
        if (not spare_nodes and not settings.clusters) or len(faulty) >= _MAX_FAULTY:
            cause = "the work pool has no other node for new runs"
            if len(faulty) >= _MAX_FAULTY:
                cause = (
                    f"{len(faulty)} faulty nodes are already drained, and Muster drains at most "
                    f"{_MAX_FAULTY} faulty nodes at the same time"
                )
            _log.warning(
                "the node %s seems faulty, but Muster does not drain it, because %s", node, cause
            )
            return

        kind = failure.kind.value
        reason = (
            f"the runs {other_runs[0].name} and {run_id} failed on this node within a day "
            f"({run_id} failed as {kind})"
        )
        new_entry = FaultyNode(node=node, reason=reason, by=run_id, until=now + _DAY_S)
        new_settings = settings.model_copy(update={"faulty": (*faulty, new_entry)})
        await write_settings(client, pool, new_settings)


async def _read_other_failed_runs(
    client: PrefectClient, node: str, flow_run_id: UUID, now: float
) -> list[FlowRun]:
    """Return the other flow runs that failed on a node within the last 24 hours.

    Args:
        client: Client of the Prefect server.
        node: Name of the node.
        flow_run_id: Id of the flow run that is left out.
        now: Current time in UTC epoch seconds.
    """
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


async def _find_gang_pool(client: PrefectClient, flow_run: FlowRun) -> WorkPool | None:
    """Return the work pool of type `gang` whose settings apply to a flow run.

    Returns:
        The pool of the flow run if it is of type `gang`, otherwise the pool named `gang`. None if
        the server has neither of these two pools.
    """
    pools = await client.read_work_pools(work_pool_filter=GANG_POOLS)
    pools_by_name = {pool.name: pool for pool in pools}
    return pools_by_name.get(flow_run.work_pool_name or "") or pools_by_name.get(DEFAULT_POOL)


async def _find_grant_of_worker(client: PrefectClient, flow_run: FlowRun) -> Grant | None:
    """Return the GPU grant with which a worker started this process.

    Returns:
        The grant, or None if no worker of type `gang` started this process. A grant that an earlier
        process of the flow run used is not returned.
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
