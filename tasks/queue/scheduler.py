"""The scheduler: decides which runs of the queue start, and writes its decisions to the server.

Each worker of type `gang` contains a scheduler. Each process in which a run waits for its GPUs also
contains a scheduler. Only one scheduler of a Prefect server may write decisions at a time: the
holder of the scheduling lease, a lock on the server, see `tasks.queue.lease`. A scheduler without
the lease only reads. If its scheduling pass finds a decision to write, the scheduler takes the
lease, repeats the pass, writes the decisions and gives the lease back.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import LogCreate
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Failed

from tasks.queue import grants
from tasks.queue.decision import Refused, SchedulingPass, Skipped
from tasks.queue.grants import PENDING_RESOURCES, Grant, SchedulerProcess
from tasks.queue.lease import HeldLease, SchedulingLease
from tasks.queue.ledger import LedgerReader, QueueEntry
from tasks.queue.nodes import Capacity
from tasks.queue.reasons import Message, steady_part
from tasks.queue.scheduling_pass import QueueReader
from tasks.ray.dashboard import Denied, NoAnswer
from tasks.record.places import muster_home
from tasks.server.events import SendRunEvent
from tasks.server.flow_runs import TYPED_NAME_LABEL

_log = logging.getLogger(__name__)

#: Longest time, in seconds, to wait for the scheduling lease, the lock for writing decisions. Other
#: schedulers normally hold the lease for a shorter time.
_LEASE_TIMEOUT_S = 5.0
#: Time, in seconds, after which an unchanged demand is sent to an autoscaler again. The repetition
#: is needed because a Ray head node forgets the demand when it restarts.
_DEMAND_LIFETIME_S = 30.0
#: Largest number of state messages that a scheduler writes while it holds the scheduling lease.
#: After these writes, the scheduler gives the lease back, so that other schedulers can write their
#: decisions. For the next messages, the scheduler takes the lease again.
_WRITES_PER_LEASE = 10
#: Largest number of state messages that are written after one scheduling pass. A limit is needed
#: because the messages become outdated during the writes.
_WRITES_PER_PASS = 50
#: Name of the logger that the Prefect UI shows next to the reason of a waiting run.
_LOGGER_OF_FLOW_RUNS = "muster.queue"


#: Value of `Scheduler._last` if the next scheduling pass must read all waiting runs again.
_NO_PASS: Final = None, None, -math.inf, -math.inf
#: Type of a function that returns True if this process should start a run. The arguments are the
#: run, and a mapping from node name to the number of GPUs that the run gets on the node.
MayStart = Callable[[QueueEntry, Mapping[str, int]], bool]


class Scheduler:
    """The scheduler of one process, for all work pools of a Prefect server.

    Use an instance in one asyncio loop only.
    """

    def __init__(
        self,
        client: PrefectClient,
        *,
        capacity: Capacity,
        home: Path | None = None,
        announce: SendRunEvent = lambda *what, **fields: None,
        worker: tuple[str, str] = ("", ""),
    ) -> None:
        """
        Args:
            client: Client of the Prefect server.
            capacity: Object that reads the nodes and their free GPUs.
            home: The MUSTER_HOME directory, or None for the MUSTER_HOME of this process.
            announce: Function that emits an event about a flow run. The function must return at
                once.
            worker: Names of the work pool and of the worker in which this scheduler runs. Empty
                strings outside of a worker.
        """
        self.process = SchedulerProcess.current()
        self._client = client
        self._announce = announce
        reader = LedgerReader(client, worker)
        self._reader = QueueReader(client, capacity, self.process, reader)
        self._lease = SchedulingLease(client, home=home or muster_home())
        self._capacity = capacity
        #: Mapping from the address of a Ray cluster to the last request to its autoscaler: the
        #: requested nodes, and the time of the request in monotonic seconds.
        self._demands: dict[str, tuple[list[dict[str, float]], float]] = {}
        #: Four values: the last scheduling pass, the last known id of a decision that any scheduler
        #: has written to the server, the time of the last complete reading of the queue, and the
        #: time of the last complete or partial reading. The times are monotonic seconds.
        self._last: tuple[SchedulingPass | None, str | None, float, float] = _NO_PASS
        #: Ids of the waiting runs whose state message this scheduler has written since the last
        #: pass. The next pass must read these runs again.
        self._rewritten: set[UUID] = set()

    async def decide(
        self,
        may_start: MayStart,
        in_flight: Collection[UUID] = (),
        never_refused: Collection[UUID] = (),
        changed: Collection[UUID] | None = None,
        full_read_interval_s: float = 60.0,
    ) -> tuple[SchedulingPass, list[QueueEntry]]:
        """Run a scheduling pass, and write its decisions to the server.

        - Runs that can start get a grant.
        - Runs that can never start fail.
        - Waiting runs of a deployment that has reached its concurrency limit are cancelled, if the
          strategy of the limit is CANCEL_NEW.
        - If a run has a grant but no worker will start the run, the run loses the grant and waits
          again.

        Args:
            may_start: Function that returns True if this process should start a run on given nodes.
            in_flight: Ids of runs that this process is submitting.
            never_refused: Ids of runs that wait instead of failing if their cluster is too small.
            changed: Ids of the flow runs in the events since the last call. None if events may have
                been missed.
            full_read_interval_s: Longest time, in seconds, between two complete readings of the
                queue.

        Returns:
            The last scheduling pass, and the runs that this process must start. Each of these runs
            has a grant. The runs are in the order of their admission.

        Raises:
            httpx.HTTPError, PrefectException: The server did not answer.
            LeaseLost: Writing the decisions took longer than the scheduling lease allows.
        """
        run_pass = partial(
            self._reader.run_pass,
            in_flight=frozenset(in_flight),
            never_refused=frozenset(never_refused),
        )
        now = time.monotonic()
        # Discard the stored result of the last pass. The result of this pass is stored only if the
        # pass succeeds. So after a failure, the next pass reads the whole queue again.
        last_pass, decision_id, complete_read_at, read_at = self._last
        self._last = _NO_PASS
        rewritten = self._rewritten
        self._rewritten = set()
        changed_ids = {*(changed or ()), *rewritten}
        # The process of a waiting run changes the label HEARTBEAT of its flow run every 10 seconds.
        # The server emits no event for this change, so read the queue every 10 seconds.
        has_beats = last_pass is not None and any(
            entry.waits_in_process for entry in last_pass.queue
        )
        is_fresh = now - read_at < (grants.HEARTBEAT_EVERY_S if has_beats else full_read_interval_s)
        is_unchanged = (
            is_fresh and changed is not None and decision_id is not None and not changed_ids
        )
        if not is_unchanged:
            last_decision_id = decision_id
            decision_id = await self._lease.read_last_decision()
            has_other_decision = decision_id is None or decision_id != last_decision_id
            is_old = now - complete_read_at >= full_read_interval_s
            if changed is None or has_other_decision or is_old:
                last_pass = None
                complete_read_at = now
            read_at = now
        scheduling_pass = await run_pass(
            earlier_pass=last_pass, changed=changed_ids, is_unchanged=is_unchanged
        )
        if not self._has_work(scheduling_pass, may_start):
            self._last = scheduling_pass, decision_id, complete_read_at, read_at
            return scheduling_pass, self._find_unstarted(scheduling_pass, may_start, in_flight)

        async with self._lease.acquire(within_s=_LEASE_TIMEOUT_S) as held_lease:
            if held_lease is None:
                return scheduling_pass, []
            # The scheduling pass above ran without the lease. Use its list of waiting runs again
            # only if no other scheduler has written a decision since then.
            is_valid = (
                decision_id is not None and decision_id == await self._lease.read_last_decision()
            )
            scheduling_pass = await run_pass(earlier_pass=scheduling_pass if is_valid else None)
            decision_id = await self._lease.begin_decision(held_lease)
            for entry, cancel in scheduling_pass.cancelled:
                held_lease.check()
                await grants.restore_state(self._client, entry.flow_run, cancel)
            for entry in scheduling_pass.stuck:
                held_lease.check()
                await self._requeue(entry)
            if scheduling_pass.stuck:
                # The requeued runs have returned to their old positions in the queue. Repeat the
                # scheduling pass, so that later runs do not start before the requeued runs.
                scheduling_pass = await run_pass(earlier_pass=scheduling_pass)
            for refused in scheduling_pass.refused:
                held_lease.check()
                if not refused.entry.waits_in_process:
                    await self._fail(refused)
            for skipped in scheduling_pass.skipped:
                held_lease.check()
                await self._skip(skipped)
            for entry, gpus in scheduling_pass.moved:
                assert entry.grant is not None
                new_grant = entry.grant.moved_to(gpus)
                held_lease.check()
                await self._client.update_flow_run_labels(entry.id, new_grant.label())
            runs_to_start = self._find_unstarted(scheduling_pass, may_start, in_flight)
            resumed = [
                (entry, entry.grant.nodes) for entry in scheduling_pass.resumed if entry.grant
            ]
            for entry, gpus in (*resumed, *scheduling_pass.admitted):
                if may_start(entry, gpus):
                    old_devices = entry.grant.devices if entry.grant else {}
                    devices = scheduling_pass.devices.get(entry.id) or old_devices
                    is_early = entry.id in scheduling_pass.early
                    runs_to_start.append(
                        await self._grant(entry, gpus, devices, held_lease, is_early=is_early)
                    )
        # Store -math.inf as the time of the last reading. The next pass then reads the queue again,
        # including the grants that this pass has written.
        self._last = scheduling_pass, decision_id, complete_read_at, -math.inf
        return scheduling_pass, runs_to_start

    def _has_work(self, scheduling_pass: SchedulingPass, may_start: MayStart) -> bool:
        """Return True if a scheduling pass has made a decision that this process must write."""
        return bool(
            scheduling_pass.stuck
            or scheduling_pass.cancelled
            or scheduling_pass.skipped
            or scheduling_pass.moved
            or any(not refused.entry.waits_in_process for refused in scheduling_pass.refused)
            or any(may_start(entry, gpus) for entry, gpus in scheduling_pass.admitted)
            or any(
                entry.grant and may_start(entry, entry.grant.nodes)
                for entry in scheduling_pass.resumed
            )
        )

    def _find_unstarted(
        self,
        scheduling_pass: SchedulingPass,
        may_start: MayStart,
        in_flight: Collection[UUID],
    ) -> list[QueueEntry]:
        """Return the runs to which this process has granted GPUs, but which it has not started yet.

        Args:
            scheduling_pass: The last scheduling pass.
            may_start: Function that returns True if this process should start a run on given nodes.
            in_flight: Ids of runs that this process is submitting. These runs are not returned.
        """
        return [
            entry
            for entry in scheduling_pass.ledger.holding
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
        held_lease: HeldLease,
        *,
        is_early: bool,
    ) -> QueueEntry:
        """Write the grant of a run to the server, emit an event, and return the run with its grant.

        Args:
            entry: The run.
            gpus: Mapping from node name to the number of GPUs that the run gets on the node.
            devices: Mapping from node name to the numbers of the GPU devices. Empty if Ray assigns
                the devices.
            held_lease: The scheduling lease, which must be valid during the write.
            is_early: True if other runs still use the GPUs.

        Raises:
            httpx.HTTPError, PrefectException: The server did not answer.
            LeaseLost: The scheduling lease is no longer valid.
        """
        nodes = dict(gpus)
        now = time.time()
        grant = Grant(
            nodes=nodes,
            devices=dict(devices),
            cluster=entry.request.cluster,
            state_id=str(entry.state.id),
            at=now,
            by=self.process,
            is_early=is_early,
        )
        held_lease.check()
        await self._client.update_flow_run_labels(
            entry.id, grants.no_grant_labels() | grant.label() | _label_typed_name(entry)
        )
        # If writing the grant took too long, `check` raises LeaseLost, and the run does not start.
        # The reason is that another scheduler may have granted the same GPUs to another run. In
        # that case, the next scheduling pass deletes the grant of one of these two runs.
        held_lease.check()
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
        """Return True if the run on the server still has the state and the GPU grant of `entry`.

        Call this method just before the start of a run, because the run may have been cancelled or
        requeued after the grant.

        Raises:
            httpx.HTTPError, PrefectException: The server did not answer.
        """
        flow_run = await self._client.read_flow_run(entry.id)
        has_same_state = grants.state_of(flow_run).id == entry.state.id
        return has_same_state and grants.grant_of(flow_run) == entry.grant

    async def _requeue(self, entry: QueueEntry) -> None:
        """Return a run to the queue because its worker did not start it.

        If the run is being cancelled, its state is set to Cancelled instead.
        """
        if entry.state.is_cancelling():
            cancelled: State[Any] = Cancelled(message="the run was cancelled before its start")
            await grants.set_state(self._client, entry.flow_run, cancelled)
            return
        _log.warning(
            "The worker did not start the run %s, although the run had got its GPUs. The run "
            "returns to the queue.",
            entry.request.name,
        )
        if entry.is_scheduled:
            await self._client.update_flow_run_labels(entry.id, grants.no_grant_labels())
            return
        message = "the worker was lost before it started the run"
        if await grants.requeue_unstarted(self._client, entry.flow_run, message):
            name = entry.request.name
            self._announce("muster.run.requeued", entry.flow_run, name, message=message)

    async def _fail(self, refused: Refused) -> None:
        """Set the state Failed for a run that can never start, and emit an event."""
        entry = refused.entry
        kind = refused.kind.value
        name = entry.request.name
        await self._rename(entry, name)
        failed: State[Any] = Failed(message=f"{kind}: {refused.message}")
        if await grants.set_state(self._client, entry.flow_run, failed):
            self._announce(
                "muster.run.failed", entry.flow_run, name, kind=kind, message=refused.message
            )

    async def _skip(self, skipped: Skipped) -> None:
        """Set the state of a run to Cancelled, because its deployment allows no waiting runs."""
        await self._rename(skipped.entry, skipped.entry.request.name)
        cancelled: State[Any] = Cancelled(message=skipped.message)
        await grants.set_state(self._client, skipped.entry.flow_run, cancelled)

    async def _rename(self, entry: QueueEntry, name: str) -> None:
        """Set the name of a flow run on the server, unless the flow run already has that name.

        A user may have typed the old name into the form *Custom run* of the Prefect UI. So a label
        keeps the old name, and `muster show` still finds the run by the old name.

        Call this method before setting the state of the flow run, because messages of Prefect's
        automations about the new state contain the name.
        """
        if entry.flow_run.name != name:
            if label := _label_typed_name(entry):
                await self._client.update_flow_run_labels(entry.id, label)
            await self._client.update_flow_run(entry.id, name=name)

    def _announce_run(self, entry: QueueEntry, name: str, **fields: Any) -> None:
        """Emit an event about a run.

        The names of the run's work pool and queue become event fields.

        Args:
            entry: The run.
            name: Name of the event.
            fields: Further fields of the event.
        """
        fields |= {"pool": entry.pool or None, "queue": entry.queue or None}
        self._announce(name, entry.flow_run, entry.request.name, **fields)

    async def publish_reasons(self, scheduling_pass: SchedulingPass) -> bool:
        """Write the messages of a scheduling pass into the states of the waiting runs.

        No message is written for a run that waits in its own process, because that process writes
        the state of the run. The method also asks the autoscalers of Ray clusters for the nodes
        that the waiting runs need.

        Args:
            scheduling_pass: The last scheduling pass.

        Returns:
            True if some messages have not been written.

        Raises:
            httpx.HTTPError, PrefectException: The server did not answer.
            LeaseLost: Writing the messages took longer than the scheduling lease allows.
        """
        await self._show_demands(scheduling_pass)
        outdated = [
            (entry, message)
            for entry in scheduling_pass.queue
            if entry.is_scheduled
            and (message := scheduling_pass.messages.get(entry.id)) is not None
            and not self._has_message(entry, message)
        ]
        for start in range(0, min(len(outdated), _WRITES_PER_PASS), _WRITES_PER_LEASE):
            async with self._lease.acquire(within_s=_LEASE_TIMEOUT_S) as held_lease:
                if held_lease is None:
                    return True
                written = []
                for entry, message in outdated[start : start + _WRITES_PER_LEASE]:
                    held_lease.check()
                    if await self._write_message(entry, message):
                        written.append((entry, message))
            await self._log_messages(written)
        return len(outdated) > _WRITES_PER_PASS

    async def _show_demands(self, scheduling_pass: SchedulingPass) -> None:
        """Request from each autoscaler the nodes that its Ray cluster needs.

        An autoscaler does not know the demand of waiting runs, because a run submits its Ray job
        only after its GPUs exist.
        """
        now = time.monotonic()
        for address in scheduling_pass.clusters:
            max_nodes = scheduling_pass.rules[address].max_nodes(address)
            sent_demand, sent_at = self._demands.get(address, (None, 0.0))
            if not max_nodes and not sent_demand:
                continue
            demand = scheduling_pass.list_needed_nodes(address, max_nodes) if max_nodes else []
            is_recent = now - sent_at < _DEMAND_LIFETIME_S
            if demand == sent_demand and (not demand or is_recent):
                continue
            try:
                await self._capacity.show_demand(address, demand)
                self._demands[address] = demand, now
            except (NoAnswer, Denied) as error:
                _log.warning(
                    "Muster could not request the GPUs of waiting runs from the autoscaler "
                    "of %s: %s",
                    address,
                    error,
                )

    def _has_message(self, entry: QueueEntry, message: Message) -> bool:
        """Return True if the state of a run already contains a message.

        Details at the end of the message, such as the numbers of free GPUs, are not compared.
        """
        if entry.state.name != PENDING_RESOURCES:
            return False
        return steady_part(entry.state.message or "") == steady_part(message.text)

    async def _log_messages(self, written: Sequence[tuple[QueueEntry, Message]]) -> None:
        """Write the reasons of waiting runs into the logs of their flow runs.

        A waiting run has no process that could write its log, but users look for the reason in the
        log in the Prefect UI. A failed request is not repeated, because the state of the run has
        the same message.
        """
        if not written:
            return
        now = datetime.now(UTC)
        logs = [
            LogCreate(
                name=_LOGGER_OF_FLOW_RUNS,
                level=logging.INFO,
                message=f"waiting: {message.text}",
                timestamp=now,
                flow_run_id=entry.id,
            )
            for entry, message in written
        ]
        try:
            await self._client.create_logs(logs)
        except httpx.HTTPError as error:
            _log.warning(
                "Muster could not write into the logs of the waiting flow runs why these runs "
                "wait: %r",
                error,
            )

    async def _write_message(self, entry: QueueEntry, message: Message) -> bool:
        """Write a message into the state of a waiting run.

        Returns:
            True if the server has accepted the state with the message.
        """
        state = grants.waiting_state(entry.flow_run, message.text)
        await self._rename(entry, entry.request.name)
        self._rewritten.add(entry.id)
        new_state = await grants.set_state(self._client, entry.flow_run, state)
        # The event is emitted only when the run begins to wait, not when its message changes.
        if new_state is not None and entry.state.name != PENDING_RESOURCES:
            self._announce_run(entry, "muster.run.waiting", message=message.text)
        return new_state is not None


def _label_typed_name(entry: QueueEntry) -> dict[str, bool | int | float | str]:
    """Return a Prefect label that keeps the name that a user typed for a flow run.

    Muster will replace that name with the run id.

    Returns:
        A dictionary with the name and the value of the label. Empty if the flow run is already
        named by its run id, or if a schedule has created the flow run.
    """
    flow_run = entry.flow_run
    if flow_run.auto_scheduled or flow_run.name == entry.request.name:
        return {}
    return {TYPED_NAME_LABEL: flow_run.name}
