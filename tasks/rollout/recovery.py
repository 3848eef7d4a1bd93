"""Starts again what has failed: each group by itself, within a budget, and not all at one time.

A group that has failed is a case from then on, until it works again or is retired. Its processes
are ended first and at once, whatever else is held. Each claim of a group ends: in a group that
works, or given up, whatever is raised. Failures of many groups with one cause are one incident,
for which the budget pays once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from tasks.processes.shortage import OWN_SHORTAGES
from tasks.record.states import GroupState
from tasks.rollout.backends import Ask
from tasks.rollout.clock import ended, now_s, pause_s
from tasks.rollout.health import Health
from tasks.rollout.probing import (
    FleetParts,
    Foreign,
    NoRoomToStart,
    Rebind,
    StartFailed,
)
from tasks.rollout.registry import GroupView
from tasks.rollout.topology import ServerSlot
from tasks.spec.formatting import join_commas
from tasks.spec.rollout import UNLIMITED, Rollout

_log = logging.getLogger(__name__)

#: Between two questions to a server that starts, at first and at last.
_FIRST_POLL_S, _LAST_POLL_S = 0.1, 1.0
_CANCEL_WITHIN_S = 1.0
#: For a look at the ports of one group.
_PORTS_WITHIN_S = 200.0
#: Recoveries, where a spec does not say how many: an engine may lose its node and come back, even
#: more than once, but one whose server dies at every start is not restarted for ever.
_BUDGET_PER_ENGINE, _LEAST_BUDGET = 3, 10
#: By then a host has answered a `stop`, after the grace period.
STOPPED_WITHIN_S = 20.0


@dataclass(slots=True, kw_only=True, eq=False)
class Incident:
    """Groups that failed within seconds of each other, and count as one failure."""

    #: Until then it takes in others.
    closes_s: float
    groups: set[int] = field(default_factory=set)
    #: Which tries the budget has paid for, counted from 0, the same for all its groups.
    paid: set[int] = field(default_factory=set)


class Incidents:
    """Puts each failure into an incident, and charges the budget by incident."""

    def __init__(self, *, budget: float) -> None:
        self._left = budget
        self._last = Incident(closes_s=-math.inf)

    def failed(self, group: int, *, now_s: float, window_s: float) -> Incident:
        """The incident that the failure of a group belongs to: the last, or a new one, which takes
        in others for `window_s`."""
        # A group that was in the last one has been recovered since.
        if now_s > self._last.closes_s or group in self._last.groups:
            self._last = Incident(closes_s=now_s + window_s)
        self._last.groups.add(group)
        return self._last

    def pay(self, one: Incident, attempt: int) -> bool:
        """Whether the budget allows this try, which counts once for all groups of the incident."""
        if attempt not in one.paid and self._left > 0:
            self._left -= 1
            one.paid.add(attempt)
        return attempt in one.paid


def budget_of(fleet: Rollout) -> float:
    """Recoveries in all; inf: no limit."""
    budget = fleet.recovery.budget or max(_LEAST_BUDGET, _BUDGET_PER_ENGINE * fleet.engines)
    return math.inf if budget == UNLIMITED else budget


@dataclass(slots=True, kw_only=True, eq=False)
class _Case:
    """One failure of a group, until the group works again or is retired."""

    group: int
    ranks: tuple[int, ...]
    cause: str
    incident: Incident
    #: Tries of this case that have ended.
    tries: int = 0
    #: What could not be ended of what ran.
    left: str = ""
    #: The processes that failed are ended, or it was tried.
    down: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Recovery:
    """Starts and ends groups, and from `open` to `stop` has a case for each that fails.

    Args:
        health: judges the servers that are started.
    """

    def __init__(self, fleet: FleetParts, health: Health, *, rebind: Rebind) -> None:
        #: By group that is being started: cancelled once it has left its state.
        self._starting: dict[int, asyncio.Task[None]] = {}
        #: By rank, what a server that starts answered last.
        self._answers: dict[int, str] = {}
        self._fleet = fleet
        self._health = health
        self._rebind = rebind
        self._incidents = Incidents(budget=budget_of(fleet.settings))
        self._parallel = asyncio.Semaphore(fleet.settings.recovery.parallel)
        self._released = asyncio.Event()
        self._is_open = False
        self._cases: dict[int, _Case] = {}
        #: By group, its recoveries since it last worked for long: without any there is no pause,
        #: and then it grows with them.
        self._in_row: Counter[int] = Counter()
        self._works_since_s: dict[int, float] = {}
        self._count = 0

    def open(self) -> None:
        """What fails from now on is recovered."""
        self._is_open = True
        self._released.set()

    def has(self, group: int) -> bool:
        """A case of it has not ended: what ran of it may still run."""
        return group in self._cases

    def hold(self) -> None:
        """Begin no start until `release`; what is being started goes on."""
        self._released.clear()

    def release(self) -> None:
        self._released.set()

    async def down(self) -> None:
        """Returns once the processes of all that has failed are ended, or cannot be: in time."""
        await asyncio.gather(*(case.down.wait() for case in self._cases.values()))

    async def stop(self) -> None:
        """No case is left, and no claim; what was being started may still run."""
        self._is_open = False
        tasks = [case.task for case in self._cases.values() if case.task is not None]
        for task in tasks:
            task.cancel()
        await ended(tasks)
        for case in self._cases.values():
            case.down.set()
        self._cases.clear()

    def on_change(self, before: GroupView, after: GroupView) -> None:
        group, starting = after.index, self._starting.get(after.index)
        if starting is not None and after.state in (GroupState.INACTIVE, GroupState.RETIRED):
            starting.cancel()
        if not self._is_open or after.state is not GroupState.INACTIVE:
            return
        # One that fails while it is recovered is its case's own matter.
        is_new = before.is_running or before.state is GroupState.RETIRED
        if is_new or (before.state is GroupState.RECOVERING and group not in self._cases):
            self._open(after)

    def _open(self, view: GroupView) -> None:
        group, settings = view.index, self._fleet.settings
        if now_s() - self._works_since_s.get(group, 0.0) >= settings.recovery.max_backoff_s:
            del self._in_row[group]
        # What one cause ends is found out over an interval, as each server is asked.
        window_s = settings.health.interval_s
        incident = self._incidents.failed(group, now_s=now_s(), window_s=window_s)
        case = _Case(group=group, ranks=view.ranks, cause=view.cause, incident=incident)
        self._cases[group] = case
        case.task = asyncio.create_task(self._care(case), name=f"rollout-recovery-{group}")
        self._pay(case)

    def _pay(self, case: _Case) -> None:
        """Retire the group where the budget does not allow its next try."""
        if self._incidents.pay(case.incident, case.tries):
            return
        spent = f"the budget of {budget_of(self._fleet.settings)} recoveries is spent"
        self._fleet.states.retire(case.group, f"{spent}; its last failure: {case.cause}")

    def _is(self, state: GroupState, case: _Case) -> bool:
        return self._fleet.states.view.groups[case.group].state is state

    async def _care(self, case: _Case) -> None:
        try:
            while True:
                case.left = await self.end(case.ranks)
                case.down.set()
                if case.left:
                    self._fleet.emit("rollout.warning", message=f"could not be ended: {case.left}")
                if self._is(GroupState.RETIRED, case):
                    break
                # Between a group that works and the end of its try it may have failed anew.
                if await self._try(case) or self._cases.get(case.group) is not case:
                    break
                self._pay(case)
        except Exception as error:
            _log.exception("group %d is given up", case.group)
            if not self._is(GroupState.RETIRED, case):
                self._fleet.states.retire(case.group, f"its recovery broke: {error!r}")
        case.down.set()
        self._works_since_s[case.group] = now_s()
        if self._cases.get(case.group) is case:
            del self._cases[case.group]

    async def _try(self, case: _Case) -> bool:
        """Whether the group works. A cancel gives it up."""
        self._count += 1
        id, began_s = f"r{self._count}", now_s()
        what = {"id": id, "group": case.group, "ranks": list(case.ranks)}
        self._fleet.states.claim(case.group)
        self._fleet.emit(
            "rollout.recovery.begun", **what, cause=case.cause, **{"try": case.tries + 1}
        )
        outcome, message = "abandoned", "the fleet is stopped"
        try:
            if in_row := self._in_row[case.group]:
                rules, random = self._fleet.settings.recovery, self._fleet.random
                first_s, longest_s = rules.backoff_s, rules.max_backoff_s
                wait_s = pause_s(in_row - 1, first_s=first_s, longest_s=longest_s, random=random)
                await asyncio.sleep(wait_s)
            async with self._parallel:
                await self._start_anew(case)
            outcome, message = "recovered", ""
        except StartFailed as error:
            outcome, message = "failed", str(error)
        except Exception as error:
            _log.exception("group %d, recovery %s", case.group, id)
            outcome, message = "failed", f"{type(error).__name__}: {error}"
        finally:
            case.cause = message if outcome == "failed" else case.cause
            if self._cases.get(case.group) is case and self._is(GroupState.RECOVERING, case):
                self._fleet.states.give_up(case.group, case.cause)
            if outcome != "abandoned":
                case.tries += 1
                self._in_row[case.group] += 1
            took_s = round(now_s() - began_s, 3)
            self._fleet.emit(
                "rollout.recovery.ended", **what, outcome=outcome, took_s=took_s, message=message
            )
        return outcome == "recovered"

    async def _start_anew(self, case: _Case) -> None:
        if case.left:
            raise StartFailed(f"what ran there could not be ended: {case.left}")
        slots = await self._new_slots(case.group)
        await self._released.wait()
        await self.start(case.group, slots)

    async def _new_slots(self, group: int) -> tuple[ServerSlot, ...] | None:
        """The servers of a group at other addresses; None if the addresses it has are good."""
        async with asyncio.timeout(_PORTS_WITHIN_S):
            while True:
                try:
                    taken = await self._fleet.host.ports_taken(self._servers_of(group))
                    return tuple(await self._rebind(group)) if taken else None
                except OSError as error:
                    if error.errno not in OWN_SHORTAGES:
                        raise
                    _log.warning("group %d waits for its ports: %s", group, error)
                await asyncio.sleep(_LAST_POLL_S)

    async def start(self, group: int, slots: tuple[ServerSlot, ...] | None = None) -> None:
        """Start a group that starts first, or is claimed; returns once it has made a token.

        Args:
            slots: its servers, where they have new addresses.

        Raises: StartFailed, when it does not come up, or takes too long; it is inactive then.
            Something of it may run, as after a cancel, and is to be ended.
        """
        states, within_s = self._fleet.states, self._fleet.settings.start_within_s
        epoch = states.begin(group, slots=slots)
        servers = self._servers_of(group)
        up = asyncio.create_task(self._bring_up(group, epoch, servers))
        self._starting[group] = up
        try:
            await asyncio.wait({up}, timeout=within_s)
            if not up.done():
                said = [
                    f"; rank {slot.rank}: {self._answers[slot.rank]}"
                    for slot in servers
                    if slot.rank in self._answers
                ]
                why = f"did not serve within {within_s:g} s (start_within_s){''.join(said)}"
                states.fail(servers[0].rank, epoch, why)
            if not states.view.groups[group].is_current(epoch):
                raise StartFailed(states.view.groups[group].cause)
            up.result()
        finally:
            del self._starting[group]
            up.cancel()
            # The host is told to stop only after its start was cancelled.
            await asyncio.wait({up}, timeout=_CANCEL_WITHIN_S)

    async def end(self, ranks: Collection[int]) -> str:
        """End what runs of these, within a bound; what could not be ended, empty if nothing."""
        grace_s = self._fleet.settings.stop.grace_s
        try:
            async with asyncio.timeout(grace_s + STOPPED_WITHIN_S):
                return ", ".join(await self._fleet.host.stop(ranks, grace_s=grace_s))
        except Exception as error:
            _log.warning("ranks %s could not be stopped", join_commas(ranks), exc_info=True)
            return f"ranks {join_commas(ranks)}: {str(error) or type(error).__name__}"

    def _servers_of(self, group: int) -> tuple[ServerSlot, ...]:
        view = self._fleet.states.view
        return tuple(view.servers[rank] for rank in view.groups[group].ranks)

    async def _bring_up(self, group: int, epoch: int, servers: tuple[ServerSlot, ...]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for slot in servers:
                tasks.create_task(self._serve(slot, epoch))
        self._fleet.states.mark_started(group, epoch)
        self._health.watch(group, epoch)

    async def _serve(self, slot: ServerSlot, epoch: int) -> None:
        try:
            await self._start_server(slot, epoch)
            self._fleet.emit("rollout.server.started", rank=slot.rank, epoch=epoch, url=slot.url)
            if slot.is_entrypoint:
                await self._until_yes(slot, self._fleet.questions.ready)
                await self._until_yes(slot, self._fleet.questions.token)
        except Exception as error:
            if not isinstance(error, StartFailed):
                _log.exception("rank %d, epoch %d: not started", slot.rank, epoch)
            self._fleet.states.fail(slot.rank, epoch, str(error) or type(error).__name__)

    async def _start_server(self, slot: ServerSlot, epoch: int) -> None:
        """Start a server; wait while this machine lacks what a start needs, such as open files.

        Raises: StartFailed.
        """
        is_told = False
        while True:
            try:
                return await self._fleet.host.start(slot, epoch)
            except NoRoomToStart as error:
                self._answers[slot.rank] = str(error)
                if not is_told:
                    is_told = True
                    message = f"the start of rank {slot.rank} waits, which costs nothing: {error}"
                    self._fleet.emit("rollout.warning", message=message)
            await asyncio.sleep(_LAST_POLL_S)

    async def _until_yes(self, slot: ServerSlot, question: Ask | None) -> None:
        """Ask a server that starts until it says yes.

        Raises: StartFailed, when somebody else's process has its address.
        """
        if slot.url is None or question is None:
            return
        pause_s = _FIRST_POLL_S
        while True:
            timeout_s = self._fleet.settings.health.timeout_s
            if (answer := await self._fleet.prober.ask(slot.url, question, timeout_s)) is None:
                return
            if isinstance(answer, Foreign):
                raise StartFailed(f"rank {slot.rank}: {answer}")
            self._answers[slot.rank] = str(answer)
            await asyncio.sleep(pause_s)
            pause_s = min(_LAST_POLL_S, pause_s * 1.5)
