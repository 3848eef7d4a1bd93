"""The gate: decides which runs of the queue start, and writes the decisions to the Prefect server.

Only one process decides at a time. A scheduling pass that finds nothing to do only reads. Otherwise
the pass is repeated under the lease that all gates of a Prefect server share, and its decisions are
written before the lease is given back.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Failed

from tasks.queue import grants
from tasks.queue.decision import Refused, SchedulingPass
from tasks.queue.grants import PENDING_RESOURCES, Grant, SchedulerProcess
from tasks.queue.lease import GateLease, LeaseHeld
from tasks.queue.ledger import LedgerReader, QueueEntry
from tasks.queue.nodes import Capacity
from tasks.queue.reasons import Message, steady_part
from tasks.queue.scheduling_pass import QueueReader
from tasks.ray.dashboard import Denied, NoAnswer
from tasks.record.places import muster_home
from tasks.server.events import Tell

_log = logging.getLogger(__name__)

#: Seconds to wait for the lease. A living gate has finished its decision by then.
_LEASE_TIMEOUT_S = 5.0
#: Seconds after which an autoscaler is told the demand again. A head that was restarted has
#: forgotten it.
_DEMAND_LIFETIME_S = 30.0
#: Number of states that are rewritten under one lease. Between two leases, other gates can decide.
_WRITES_PER_LEASE = 10
#: Number of states that are rewritten after one pass. By then, what the pass saw is outdated.
_WRITES_PER_PASS = 50


#: Value of `Gate._last` if there is no earlier pass that can be reused.
_NO_LOOK: Final = None, None, -math.inf, -math.inf
#: Decides whether this process should start a run on these nodes: `gpus[node name]`.
MayStart = Callable[[QueueEntry, Mapping[str, int]], bool]


class Gate:
    """The gate of a Prefect server in one process. Use it in one asyncio loop."""

    def __init__(
        self,
        client: PrefectClient,
        *,
        capacity: Capacity,
        home: Path | None = None,
        announce: Tell = lambda *what, **fields: None,
        worker: tuple[str, str] = ("", ""),
    ) -> None:
        """
        Args:
            client: Client of the Prefect server.
            capacity: Reads the nodes.
            home: The MUSTER_HOME directory; None: that of this process.
            announce: Emits an event of a flow run. It must return at once.
            worker: Pool and name of the worker that owns this gate, or empty strings.
        """
        self.process = SchedulerProcess.current()
        self._client = client
        self._announce = announce
        reader = LedgerReader(client, worker)
        self._reader = QueueReader(client, capacity, self.process, reader)
        self._lease = GateLease(client, home=home or muster_home())
        self._capacity = capacity
        #: For each cluster's address: the last demand that its autoscaler was told, and when, in
        #: monotonic seconds.
        self._demands: dict[str, tuple[list[dict[str, float]], float]] = {}
        #: The last pass, the turn for which it is valid, and the monotonic times of the last
        #: complete reading and of the last reading of the queue.
        self._last: tuple[SchedulingPass | None, str | None, float, float] = _NO_LOOK
        #: Ids of waiting runs whose state this gate has rewritten since the last pass.
        self._rewritten: set[UUID] = set()

    async def decide(
        self,
        may_start: MayStart,
        in_flight: Collection[UUID] = (),
        never_refused: Collection[UUID] = (),
        changed: Collection[UUID] | None = None,
        full_read_interval_s: float = 60.0,
    ) -> tuple[SchedulingPass, list[QueueEntry]]:
        """Start runs that can start, fail runs that never can, and take back grants that are stuck.

        Args:
            may_start: Decides whether this process should start a run on the given nodes.
            in_flight: Ids of runs that this process is submitting.
            never_refused: Ids of runs that are not failed if their nodes have gone meanwhile.
            changed: Ids of flow runs that events have reported since the last call. None if events
                may have been missed.
            full_read_interval_s: Seconds after which the queue is read completely, whatever events say.

        Returns:
            The last pass, and the runs that this process must start, each with its grant, in the
            order of their admission.

        Raises:
            httpx.HTTPError, PrefectException: The server did not answer.
            LeaseLost: The decision took too long.
        """
        run_pass = partial(
            self._reader.run_pass,
            in_flight=frozenset(in_flight),
            never_refused=frozenset(never_refused),
        )
        now = time.monotonic()
        # If this call fails, the next one must read everything again.
        last, turn, whole_at, read_at = self._last
        self._last = _NO_LOOK
        rewritten = self._rewritten
        self._rewritten = set()
        changed_ids = {*(changed or ()), *rewritten}
        # There is no event for the beat of a waiting process, so its label must be read in time.
        has_beats = last is not None and any(entry.waits_in_process for entry in last.queue)
        is_fresh = now - read_at < (grants.BEAT_EVERY_S if has_beats else full_read_interval_s)
        is_unchanged = is_fresh and changed is not None and turn is not None and not changed_ids
        if not is_unchanged:
            last_turn = turn
            turn = await self._lease.turn()
            is_old = now - whole_at >= full_read_interval_s
            if changed is None or turn is None or turn != last_turn or is_old:
                last = None
                whole_at = now
            read_at = now
        look = await run_pass(after=last, again=changed_ids, is_unchanged=is_unchanged)
        if not self._has_work(look, may_start):
            self._last = look, turn, whole_at, read_at
            return look, self._unstarted(look, may_start, in_flight)

        async with self._lease.held(within_s=_LEASE_TIMEOUT_S) as holding:
            if holding is None:
                return look, []
            # If no other gate has decided since, the earlier reading of the queue is still valid.
            is_alone = turn is not None and turn == await self._lease.turn()
            look = await run_pass(after=look if is_alone else None)
            turn = await self._lease.begin_turn(holding)
            for entry, cancel in look.cancelled:
                holding.check()
                await grants.restore_state(self._client, entry.flow_run, cancel)
            for entry in look.stuck:
                holding.check()
                await self._take_back(entry)
            if look.stuck:
                # These runs have their old positions again, and nobody may pass them.
                look = await run_pass(after=look)
            for refused in look.refused:
                holding.check()
                if not refused.entry.waits_in_process:
                    await self._fail(refused)
            for entry, gpus in look.moved:
                assert entry.grant is not None
                moved = entry.grant.moved_to(gpus)
                holding.check()
                await self._client.update_flow_run_labels(entry.id, moved.label())
            started = self._unstarted(look, may_start, in_flight)
            resumed = [(entry, entry.grant.nodes) for entry in look.resumed if entry.grant]
            for entry, gpus in (*resumed, *look.admitted):
                if may_start(entry, gpus):
                    old_devices = entry.grant.devices if entry.grant else {}
                    devices = look.devices.get(entry.id) or old_devices
                    started.append(await self._grant(entry, gpus, devices, holding))
        # The time of the last reading is unset, so that the next pass reads what was written here.
        self._last = look, turn, whole_at, -math.inf
        return look, started

    def _has_work(self, look: SchedulingPass, may_start: MayStart) -> bool:
        """Return True if a pass has found something that must be written."""
        return bool(
            look.stuck
            or look.cancelled
            or look.moved
            or any(not refused.entry.waits_in_process for refused in look.refused)
            or any(may_start(entry, gpus) for entry, gpus in look.admitted)
            or any(entry.grant and may_start(entry, entry.grant.nodes) for entry in look.resumed)
        )

    def _unstarted(
        self, look: SchedulingPass, may_start: MayStart, in_flight: Collection[UUID]
    ) -> list[QueueEntry]:
        """Return the runs that this process has granted and must still start."""
        return [
            entry
            for entry in look.ledger.holding
            if entry.is_scheduled
            and entry.id not in in_flight
            and entry.grant is not None
            and entry.grant.by == self.process
            and not entry.is_handed_over
            and may_start(entry, entry.grant.nodes)
        ]

    async def _grant(
        self,
        entry: QueueEntry,
        gpus: Mapping[str, int],
        devices: Mapping[str, tuple[int, ...]],
        holding: LeaseHeld,
    ) -> QueueEntry:
        """Write the grant of a run, emit the event, and return the run with its grant."""
        nodes = dict(gpus)
        now = time.time()
        grant = Grant(
            nodes=nodes,
            devices=dict(devices),
            cluster=entry.request.cluster,
            state_id=str(entry.state.id),
            at=now,
            by=self.process,
        )
        holding.check()
        await self._client.update_flow_run_labels(
            entry.id, grants.no_grant_labels() | grant.label()
        )
        # If the write was late, the GPUs may have been granted to others meanwhile. The next pass
        # detects that.
        holding.check()
        due = entry.flow_run.expected_start_time or entry.state_since
        waited_s = max(0.0, now - due.timestamp())
        self._announce_run(
            entry,
            "muster.run.admitted",
            nodes=nodes,
            gpus=sum(gpus.values()),
            waited_s=round(waited_s, 1),
        )
        return replace(entry, grant=grant)

    async def is_granted(self, entry: QueueEntry) -> bool:
        """Return True if the server still has the run with this grant.

        The run may have ended or been taken back meanwhile, so call this just before it is started.

        Raises:
            httpx.HTTPError, PrefectException: The server did not answer.
        """
        flow_run = await self._client.read_flow_run(entry.id)
        has_same_state = grants.state_of(flow_run).id == entry.state.id
        return has_same_state and grants.grant_of(flow_run) == entry.grant

    async def _take_back(self, entry: QueueEntry) -> None:
        """Return a run to the queue because its worker did not start it. End a cancelled one."""
        if entry.state.is_cancelling():
            cancelled: State[Any] = Cancelled(message="cancelled before it had begun")
            await grants.set_state(self._client, entry.flow_run, cancelled)
            return
        _log.warning("%s was given its gang, and did not start: it waits again", entry.request.name)
        if not entry.is_scheduled:
            if not await grants.is_unchanged(self._client, entry.flow_run):
                return
            await grants.forget_process(self._client, entry.flow_run)
            message = "its worker was lost before it could start it"
            waiting = grants.waiting_state(entry.flow_run, message)
            if await grants.set_state(self._client, entry.flow_run, waiting) is None:
                return
            name = entry.request.name
            self._announce("muster.run.requeued", entry.flow_run, name, message=message)
        await self._client.update_flow_run_labels(entry.id, grants.no_grant_labels())

    async def _fail(self, refused: Refused) -> None:
        """Give a run that can never start its final state, and emit the event."""
        entry = refused.entry
        kind = refused.kind.value
        name = entry.request.name
        await self._rename(entry, name)
        failed: State[Any] = Failed(message=f"{kind}: {refused.message}")
        if await grants.set_state(self._client, entry.flow_run, failed):
            self._announce(
                "muster.run.failed", entry.flow_run, name, kind=kind, message=refused.message
            )

    async def _rename(self, entry: QueueEntry, name: str) -> None:
        """Name the flow run after its run id. Do this before the state is set.

        Automations react to the state and show the name.
        """
        if entry.flow_run.name != name:
            await self._client.update_flow_run(entry.id, name=name)

    def _announce_run(self, entry: QueueEntry, name: str, **fields: Any) -> None:
        """Emit an event about a run, with its pool and queue."""
        fields |= {"pool": entry.pool or None, "queue": entry.queue or None}
        self._announce(name, entry.flow_run, entry.request.name, **fields)

    async def publish_reasons(self, look: SchedulingPass) -> bool:
        """Write into the states of waiting runs why they wait, and tell autoscalers the demand.

        Runs that wait in their own process are left out; they write their state themselves.

        Returns:
            True if some states are not written yet.

        Raises:
            httpx.HTTPError, PrefectException: The server did not answer.
            LeaseLost: Writing took too long.
        """
        await self._show_demands(look)
        outdated = [
            (entry, message)
            for entry in look.queue
            if entry.is_scheduled
            and (message := look.messages.get(entry.id)) is not None
            and not self._has_message(entry, message)
        ]
        for start in range(0, min(len(outdated), _WRITES_PER_PASS), _WRITES_PER_LEASE):
            async with self._lease.held(within_s=_LEASE_TIMEOUT_S) as holding:
                if holding is None:
                    return True
                for entry, message in outdated[start : start + _WRITES_PER_LEASE]:
                    holding.check()
                    await self._write_message(entry, message)
        return len(outdated) > _WRITES_PER_PASS

    async def _show_demands(self, look: SchedulingPass) -> None:
        """Tell the autoscalers which nodes are needed.

        An autoscaler cannot see the demand by itself: a run submits nothing before its GPUs exist.
        """
        now = time.monotonic()
        for address in look.clusters:
            max_nodes = look.rules[address].max_nodes(address)
            shown, shown_at = self._demands.get(address, (None, 0.0))
            if not max_nodes and not shown:
                continue
            wanted = look.list_needed_nodes(address, max_nodes) if max_nodes else []
            is_recent = now - shown_at < _DEMAND_LIFETIME_S
            if wanted == shown and (not wanted or is_recent):
                continue
            try:
                await self._capacity.show_demand(address, wanted)
                self._demands[address] = wanted, now
            except (NoAnswer, Denied) as error:
                _log.warning("the autoscaler of %s is not told what waits: %s", address, error)

    def _has_message(self, entry: QueueEntry, message: Message) -> bool:
        """Return True if the run's state already has this message, apart from its last part."""
        if entry.state.name != PENDING_RESOURCES:
            return False
        return steady_part(entry.state.message or "") == steady_part(message.text)

    async def _write_message(self, entry: QueueEntry, message: Message) -> None:
        state = grants.waiting_state(entry.flow_run, message.text)
        await self._rename(entry, entry.request.name)
        self._rewritten.add(entry.id)
        new_state = await grants.set_state(self._client, entry.flow_run, state)
        # Emit the event only when the run begins to wait, whichever gate has set the state before.
        if new_state is not None and entry.state.name != PENDING_RESOURCES:
            self._announce_run(entry, "muster.run.waiting", message=message.text)
