"""The gate: at one time, one process decides which runs of the queue start, and notes it.

A look costs only reading. What it finds to do is decided again, by another look, under the lease
that all gates of a Prefect server share, and is on the server before the lease is given back.
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
from tasks.queue.decision import Look, Refused
from tasks.queue.grants import PENDING_RESOURCES, Giver, Grant
from tasks.queue.lease import GateLease, LeaseHeld
from tasks.queue.ledger import LedgerReader, QueueEntry
from tasks.queue.look import QueueReader
from tasks.queue.nodes import Capacity
from tasks.queue.reasons import Message, steady
from tasks.ray.dashboard import Denied, NoAnswer
from tasks.record.places import muster_home
from tasks.server.events import Tell

_log = logging.getLogger(__name__)

#: Another gate has decided by then, as long as it is alive.
_LEASE_WITHIN_S = 5.0
#: A head that was started anew has forgotten it.
_SHOWN_FOR_S = 30.0
#: So many states are rewritten at a time: what can start must not wait for words.
_WRITES_AT_ONCE = 10
#: After one look: what it saw grows old.
_WRITES_AT_MOST = 50


_NO_LOOK: Final = None, None, -math.inf, -math.inf
#: Whether a run is somebody's to start on these nodes: `gpus[node name]`.
MayStart = Callable[[QueueEntry, Mapping[str, int]], bool]


class Gate:
    """The gate of a Prefect server, in one process. Use it in one asyncio loop."""

    def __init__(
        self,
        client: PrefectClient,
        *,
        capacity: Capacity,
        home: Path | None = None,
        announce: Tell = lambda *what, **known: None,
        worker: tuple[str, str] = ("", ""),
    ) -> None:
        """
        Args:
            announce: tells an event of a flow run; returns at once.
            worker: whose gate it is: its pool and its name.
        """
        self.giver = Giver.me()
        self._client = client
        self._announce = announce
        reader = LedgerReader(client, worker)
        self._reader = QueueReader(client, capacity, self.giver, reader)
        self._lease = GateLease(client, home=home or muster_home())
        self._capacity = capacity
        #: What each autoscaler was shown last, and when, by a monotonic clock.
        self._demands: dict[str, tuple[list[dict[str, float]], float]] = {}
        #: The last look, the turn that it is good for, and when the line was read as a whole, and
        #: when at all, by a monotonic clock.
        self._last: tuple[Look | None, str | None, float, float] = _NO_LOOK
        #: Runs of the line that have another state since.
        self._rewritten: set[UUID] = set()

    async def decide(
        self,
        may_start: MayStart,
        in_flight: Collection[UUID] = (),
        patient: Collection[UUID] = (),
        changed: Collection[UUID] | None = None,
        whole_every_s: float = 60.0,
    ) -> tuple[Look, list[QueueEntry]]:
        """Admit what can start, refuse what never can, and take back what got stuck.

        Args:
            may_start: Whether the run is this process's to start on these nodes.
            in_flight: What this process is submitting.
            patient: What is not refused, should its nodes have gone meanwhile.
            changed: All flow runs that events have told of since the last call; None: they may
                have missed some.
            whole_every_s: So often the line is read as a whole, whatever is told.

        Returns: the look that it was decided by, and this process's runs in the order of their
            admission, each with its grant.

        Raises: httpx.HTTPError, PrefectException, LeaseLost.
        """
        look_again = partial(
            self._reader.look, in_flight=frozenset(in_flight), patient=frozenset(patient)
        )
        now = time.monotonic()
        # Until this one has come to its end.
        (last, turn, whole_at, read_at), self._last = self._last, _NO_LOOK
        rewritten, self._rewritten = self._rewritten, set()
        news = {*(changed or ()), *rewritten}
        # No event tells that a process which waits is alive.
        beats = last is not None and any(entry.waits_in_process for entry in last.line)
        is_fresh = now - read_at < (grants.BEAT_EVERY_S if beats else whole_every_s)
        is_told = is_fresh and changed is not None and turn is not None and not news
        if not is_told:
            last_turn, turn = turn, await self._lease.turn()
            is_old = now - whole_at >= whole_every_s
            if changed is None or turn is None or turn != last_turn or is_old:
                last, whole_at = None, now
            read_at = now
        look = await look_again(after=last, again=news, is_told=is_told)
        if not self._has_work(look, may_start):
            self._last = look, turn, whole_at, read_at
            return look, self._left_over(look, may_start, in_flight)
        async with self._lease.held(within_s=_LEASE_WITHIN_S) as holding:
            if holding is None:
                return look, []
            is_alone = turn is not None and turn == await self._lease.turn()
            look = await look_again(after=look if is_alone else None)
            turn = await self._lease.begin_turn(holding)
            for entry, cancel in look.cancelled:
                holding.check()
                await grants.put_back(self._client, entry.flow_run, cancel)
            for entry in look.stuck:
                holding.check()
                await self._take_back(entry)
            if look.stuck:
                # They are back in their places, where nobody may pass them.
                look = await look_again(after=look)
            for doomed in look.doomed:
                holding.check()
                if not doomed.entry.waits_in_process:
                    await self._fail(doomed)
            for entry, gpus in look.moved:
                assert entry.grant is not None
                moved = entry.grant.moved_to(gpus)
                holding.check()
                await self._client.update_flow_run_labels(entry.id, moved.label())
            started = self._left_over(look, may_start, in_flight)
            again = [(entry, entry.grant.nodes) for entry in look.resumed if entry.grant]
            for entry, gpus in (*again, *look.admitted):
                if may_start(entry, gpus):
                    had = entry.grant.devices if entry.grant else {}
                    devices = look.devices.get(entry.id) or had
                    started.append(await self._grant(entry, gpus, devices, holding))
        # What it has written is read before anything else is decided.
        self._last = look, turn, whole_at, -math.inf
        return look, started

    def _has_work(self, look: Look, may_start: MayStart) -> bool:
        return bool(
            look.stuck
            or look.cancelled
            or look.moved
            or any(not one.entry.waits_in_process for one in look.doomed)
            or any(may_start(entry, gpus) for entry, gpus in look.admitted)
            or any(one.grant and may_start(one, one.grant.nodes) for one in look.resumed)
        )

    def _left_over(
        self, look: Look, may_start: MayStart, in_flight: Collection[UUID]
    ) -> list[QueueEntry]:
        """What was granted by this process, or goes on, and has no process yet."""
        return [
            entry
            for entry in look.ledger.holding
            if entry.is_scheduled
            and entry.id not in in_flight
            and entry.grant is not None
            and entry.grant.by == self.giver
            and not entry.goes_on
            and may_start(entry, entry.grant.nodes)
        ]

    async def _grant(
        self,
        entry: QueueEntry,
        gpus: Mapping[str, int],
        devices: Mapping[str, tuple[int, ...]],
        holding: LeaseHeld,
    ) -> QueueEntry:
        nodes, now = dict(gpus), time.time()
        grant = Grant(
            nodes=nodes,
            devices=dict(devices),
            cluster=entry.request.cluster,
            state_id=str(entry.state.id),
            at=now,
            by=self.giver,
        )
        holding.check()
        await self._client.update_flow_run_labels(entry.id, grants.no_grant() | grant.label())
        # What was late may promise what was given to others since: the next look sees it.
        holding.check()
        due = entry.flow_run.expected_start_time or entry.since
        waited_s = max(0.0, now - due.timestamp())
        known = {"nodes": nodes, "gpus": sum(gpus.values()), "waited_s": round(waited_s, 1)}
        self._tell_of(entry, "muster.run.admitted", **known)
        return replace(entry, grant=grant)

    async def is_granted(self, entry: QueueEntry) -> bool:
        """Whether the ledger has a run as it was granted: it may have ended, or been taken back,
        since. Ask just before it is handed over. Raises: httpx.HTTPError, PrefectException."""
        found = await self._client.read_flow_run(entry.id)
        is_same = grants.state_of(found).id == entry.state.id
        return is_same and grants.grant_of(found) == entry.grant

    async def _take_back(self, entry: QueueEntry) -> None:
        """What a worker has not come further with waits again, or has ended where it was cancelled
        meanwhile."""
        if entry.state.is_cancelling():
            end: State[Any] = Cancelled(message="cancelled before it had begun")
            await grants.set_state(self._client, entry.flow_run, end)
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
        await self._client.update_flow_run_labels(entry.id, grants.no_grant())

    async def _fail(self, doomed: Refused) -> None:
        entry, kind = doomed.entry, doomed.kind.value
        name, why = entry.request.name, f"{kind}: {doomed.message}"
        await self._name(entry, name)
        if await grants.set_state(self._client, entry.flow_run, Failed(message=why)):
            known = {"kind": kind, "message": doomed.message}
            self._announce("muster.run.failed", entry.flow_run, name, **known)

    async def _name(self, entry: QueueEntry, name: str) -> None:
        # Before its state: whoever is notified of that goes by the name.
        if entry.flow_run.name != name:
            await self._client.update_flow_run(entry.id, name=name)

    def _tell_of(self, entry: QueueEntry, name: str, **known: Any) -> None:
        known |= {"pool": entry.pool or None, "queue": entry.queue or None}
        self._announce(name, entry.flow_run, entry.request.name, **known)

    async def tell(self, look: Look) -> bool:
        """Have waiting runs say why they wait, but for those that wait in their own process.

        Returns: whether there is more to be told.

        Raises: httpx.HTTPError, PrefectException, LeaseLost.
        """
        await self._show_demands(look)
        news = [
            (entry, message)
            for entry in look.line
            if entry.is_scheduled
            and (message := look.messages.get(entry.id)) is not None
            and not self._is_told(entry, message)
        ]
        for start in range(0, min(len(news), _WRITES_AT_MOST), _WRITES_AT_ONCE):
            async with self._lease.held(within_s=_LEASE_WITHIN_S) as holding:
                if holding is None:
                    return True
                for entry, message in news[start : start + _WRITES_AT_ONCE]:
                    holding.check()
                    await self._tell(entry, message)
        return len(news) > _WRITES_AT_MOST

    async def _show_demands(self, look: Look) -> None:
        """Have autoscalers see what waits, which submits nothing before its GPUs are there."""
        now = time.monotonic()
        for address in look.clusters:
            most = look.rules[address].max_nodes(address)
            shown, at = self._demands.get(address, (None, 0.0))
            if not most and not shown:
                continue
            wanted = look.wanted(address, most) if most else []
            if wanted == shown and (not wanted or now - at < _SHOWN_FOR_S):
                continue
            try:
                await self._capacity.show_demand(address, wanted)
                self._demands[address] = wanted, now
            except (NoAnswer, Denied) as error:
                _log.warning("the autoscaler of %s is not told what waits: %s", address, error)

    def _is_told(self, entry: QueueEntry, message: Message) -> bool:
        is_said = entry.state.name == PENDING_RESOURCES
        return is_said and steady(entry.state.message or "") == steady(message.text)

    async def _tell(self, entry: QueueEntry, message: Message) -> None:
        state = grants.waiting_state(entry.flow_run, message.text)
        await self._name(entry, entry.request.name)
        self._rewritten.add(entry.id)
        after = await grants.set_state(self._client, entry.flow_run, state)
        # By the state that the server has: another gate, or an earlier one, may have told it.
        if after is not None and entry.state.name != PENDING_RESOURCES:
            self._tell_of(entry, "muster.run.waiting", message=message.text)
