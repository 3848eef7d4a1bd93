"""Admission as a run's own process sees it: it was admitted, or it waits here, in the same line.

A run that was started directly, or by a worker of another type, has nobody to admit it but the
gates that there are: a worker's, or its own.
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
from tasks.queue.decision import Look, Refused
from tasks.queue.gate import Gate
from tasks.queue.grants import PENDING_RESOURCES, Grant
from tasks.queue.lease import LeaseLost
from tasks.queue.ledger import FLOW, GANG_POOLS, LedgerReader, request_of
from tasks.queue.nodes import Capacity
from tasks.queue.reasons import steady
from tasks.queue.settings import (
    DEFAULT_POOL,
    LEFT_OUT,
    FaultyNode,
    NotThere,
    PoolSettings,
    change,
    settings_in,
)
from tasks.record.outcome import Failure
from tasks.record.retries import blamed
from tasks.server.events import tell_here

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The gang of a run."""

    nodes: dict[str, int]
    #: The address of their Ray cluster; empty for none.
    cluster: str
    #: Of this host, where the run is one of processes. Close it once the attempt has ended.
    devices: DeviceLease | None

    def __str__(self) -> str:
        seen = f", GPU {listed(self.devices.indices)}" if self.devices is not None else ""
        return ", ".join(self.nodes) + seen


def admitted(
    flow_run_id: UUID,
    *,
    is_first: bool,
    is_anew: bool,
    say: Callable[[str], None],
    wait: Callable[[float], bool],
) -> Admitted | Refused | None:
    """The gang of the flow run of this process, waited for in the line where it has none yet; None
    where the run is not to wait any more.

    Args:
        is_first: It is for the run's first attempt. Later, nodes that have gone are waited for.
        is_anew: This process has had a gang for an earlier attempt.
        say: Told why it waits, whenever that changes.
        wait: Waits so many seconds; whether the run shall still wait.
    """
    return asyncio.run(_Line(flow_run_id, is_first, is_anew, say, wait).wait())


@dataclass(slots=True)
class _Line:
    """One run's wait: the fields are those of `admitted`."""

    _id: UUID
    _is_first: bool
    _is_anew: bool
    _say: Callable[[str], None]
    _wait: Callable[[float], bool]
    _capacity: Capacity | None = None
    #: What was said last, and the place then.
    _said: str = ""
    _place: int = 0
    _is_in_line: bool = False
    _beat_at: float = 0.0

    async def wait(self) -> Admitted | Refused | None:
        try:
            while True:
                try:
                    async with get_client() as client:
                        return await self._in_line(client)
                except (httpx.HTTPError, PrefectException, LeaseLost) as error:
                    self._tell(f"waits for the Prefect server, which does not answer: {error!r}")
                if not await asyncio.to_thread(self._wait, _LOOK_EVERY_S):
                    return None
        finally:
            if self._capacity is not None:
                await self._capacity.close()

    async def _in_line(self, client: PrefectClient) -> Admitted | Refused | None:
        flow_run = await client.read_flow_run(self._id)
        may_be_given = not self._is_anew and not self._is_in_line
        granted = await _grant_of_worker(client, flow_run) if may_be_given else None
        if granted is not None and (given := await self._taken(client, granted)) is not None:
            return given
        if self._capacity is None:
            own = request_of(flow_run).cluster
            self._capacity = Capacity(here=not flow_run.work_pool_name, own=own)
        gate = Gate(client, capacity=self._capacity, announce=tell_here)
        if not self._is_in_line:
            await self._beat(client)
            await self._set(client, PENDING_RESOURCES, "waits for its gang of GPUs")
            self._is_in_line = True
        patient: tuple[UUID, ...] = () if self._is_first else (self._id,)
        while True:
            look, _others = await gate.decide(
                lambda entry, _nodes: entry.id == self._id and entry.waits_in_process,
                patient=patient,
            )
            refused = next((one for one in look.doomed if one.entry.id == self._id), None)
            if refused is not None:
                return refused
            patient = (self._id,)
            grant = grants.grant_of(await client.read_flow_run(self._id))
            if grant is not None and (given := await self._taken(client, grant)) is not None:
                await self._set(client, "Running", f"admitted on {grant}")
                return given
            await self._show(client, look)
            if time.monotonic() - self._beat_at >= grants.BEAT_EVERY_S:
                await self._beat(client)
            if not await asyncio.to_thread(self._wait, _LOOK_EVERY_S):
                return None

    async def _beat(self, client: PrefectClient) -> None:
        await client.update_flow_run_labels(self._id, grants.waits_here())
        self._beat_at = time.monotonic()

    async def _taken(self, client: PrefectClient, grant: Grant) -> Admitted | None:
        """What was granted, with its devices leased; None where somebody has them whom the ledger
        does not know."""
        indices = grant.devices.get(host_name(), ())
        lease = None
        if indices:
            try:
                here = await asyncio.to_thread(Devices.here)
                lease = DeviceLease(here, indices, str(self._id))
            except DeviceHeld as error:
                self._tell(f"waits: {error.strerror}")
                await client.update_flow_run_labels(self._id, grants.no_grant())
                return None
        return Admitted(nodes=dict(grant.nodes), cluster=grant.cluster, devices=lease)

    async def _show(self, client: PrefectClient, look: Look) -> None:
        message = look.messages.get(self._id)
        if message is None:
            return
        places = [entry.id for entry in look.line]
        place = places.index(self._id) + 1 if self._id in places else 1
        is_news = steady(message.text) != self._said
        if is_news or place != self._place:
            self._said, self._place = steady(message.text), place
            self._say(f"place {place} of {len(places)} in line; {message.text}")
        if is_news:
            # The state that it waits in changes with that, and a grant is bound to a state: never
            # while one may be on its way.
            await self._set(client, PENDING_RESOURCES, message.text)

    async def _set(self, client: PrefectClient, name: str, message: str) -> None:
        await client.set_flow_run_state(self._id, Running(name=name, message=message))

    def _tell(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)


def cluster_of(flow_run_id: UUID) -> str:
    """The address of the Ray cluster of a run that waits for no gang, and leaves that to its pool.

    Raises: NotThere.
    """

    async def found() -> str:
        async with get_client() as client:
            flow_run = await client.read_flow_run(flow_run_id)
            if (grant := grants.grant_of(flow_run)) is not None and grant.cluster:
                return grant.cluster
            pool = await _pool_of(client, flow_run)
        settings = settings_in(pool) if pool is not None else PoolSettings()
        if not settings.left_out:
            raise NotThere(settings.why_no_cluster())
        return settings.left_out[LEFT_OUT]

    return asyncio.run(found())


#: Failures of two runs on a node within that time have it drained for as long.
_DAY_S = 86_400.0
#: Of more nodes than that at a time, no node is to blame: the storage of all may be full.
_FAULTY_AT_MOST = 2


async def note_failure(flow_run_id: UUID, run_id: str, failure: Failure) -> None:
    """Have the run's next attempts avoid the nodes that the failure of one is blamed on; drain the
    one node that it is blamed on where another run has failed so within a day.

    Raises: httpx.HTTPError, PrefectException, NotThere.
    """
    async with get_client() as client:
        flow_run, now = await client.read_flow_run(flow_run_id), time.time()
        grant = grants.grant_of(flow_run)
        if not (nodes := blamed(failure, grant.nodes if grant is not None else ())):
            return
        # Before others are looked at: of two runs that fail at once, one sees the other.
        await client.update_flow_run_labels(flow_run_id, grants.failed(flow_run, nodes, now))
        pool = await _pool_of(client, flow_run)
        if len(nodes) > 1 or pool is None:
            return
        which = {
            "operator": "or_",
            "end_time": {"after_": datetime.fromtimestamp(now - _DAY_S, UTC).isoformat()},
            "state": {"type": {"not_any_": [*TERMINAL_STATES]}},
        }
        runs = await LedgerReader(client).pages(flow_runs=which, flows={"name": {"any_": [FLOW]}})
        blames = [one for one in runs if grants.failed_on(one).get(nodes[0], 0) > now - _DAY_S]
        before = [one for one in blames if one.id != flow_run_id]
        settings, kind = settings_in(pool), failure.kind.value
        faulty = [one for one in settings.faulty if one.until > now]
        drained = settings.drained_at(now)
        if not before or nodes[0] in drained:
            return
        spare = {one.name for one in settings.nodes} - drained - {nodes[0]}
        if (not spare and not settings.clusters) or len(faulty) >= _FAULTY_AT_MOST:
            why = f"{len(faulty)} nodes are already" if faulty else "there is no other node"
            _log.warning("%s is not drained: %s", nodes[0], why)
            return
        reason = f"{before[0].name} failed there within a day, and {run_id} with {kind}"
        new = FaultyNode(node=nodes[0], reason=reason, by=run_id, until=now + _DAY_S)
        settings = settings.model_copy(update={"faulty": (*faulty, new)})
        await change(client, pool, settings)


async def _pool_of(client: PrefectClient, flow_run: FlowRun) -> WorkPool | None:
    """Its own, where that is one of gangs; else the one in whose line it stands."""
    pools = await client.read_work_pools(work_pool_filter=GANG_POOLS)
    there = {pool.name: pool for pool in pools}
    return there.get(flow_run.work_pool_name or "") or there.get(DEFAULT_POOL)


async def _grant_of_worker(client: PrefectClient, flow_run: FlowRun) -> Grant | None:
    """The grant with which a worker has started this process of the flow run, no earlier one."""
    if (grant := grants.grant_of(flow_run)) is None:
        return None
    history: list[State[Any]] = await client.read_flow_run_states(flow_run.id)
    scheduled = (state for state in history if state.is_scheduled())
    last = max(scheduled, key=lambda state: state.timestamp, default=None)
    return grant if last is not None and grant.state_id == str(last.id) else None
