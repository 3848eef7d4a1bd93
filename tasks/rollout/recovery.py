"""Recovery of a fleet: starts groups of servers, and restarts groups that have failed.

The recovery handles the failure of a group as one case, until the group works again or is retired.
First, the recovery ends the processes of the failed group. Then it tries to restart the group, with
pauses between the tries. The number of tries is limited by a budget.

If several groups fail within seconds of each other, their failures count as one incident. Each try
to restart the groups of an incident is subtracted from the budget once, not once for each group.
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
from tasks.rollout.clock import choose_pause_s, ended, now_s
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

#: Seconds between the first and the second health check of a starting server.
_FIRST_POLL_S = 0.1
#: Longest time in seconds between two health checks of a starting server.
_LAST_POLL_S = 1.0
#: Longest wait in seconds for the end of a task after its cancellation. The task was starting a
#: server group.
_CANCEL_WITHIN_S = 1.0
#: Time limit in seconds to check the ports of a group of servers and to find new ports.
_PORTS_WITHIN_S = 200.0
#: Default number of recoveries that are allowed for each engine. The limit stops endless restarts
#: of an engine whose servers die at every start.
_BUDGET_PER_ENGINE = 3
#: Number of recoveries that are allowed for a small fleet by default. A larger fleet may make
#: `_BUDGET_PER_ENGINE` recoveries for each engine.
_MIN_DEFAULT_BUDGET = 10
#: Seconds that `ServerHost.stop` may take in addition to the grace period of the servers.
STOPPED_WITHIN_S = 20.0


@dataclass(slots=True, kw_only=True, eq=False)
class Incident:
    """Server groups that failed within seconds of each other, probably for the same reason.

    Together, these failures use up only one of the recoveries that the spec allows.
    """

    #: Time after which further failures no longer belong to the incident, in seconds of the event
    #: loop's clock.
    closes_s: float
    #: Indexes of the server groups that have failed.
    groups: set[int] = field(default_factory=set)
    #: Allowed rounds of restarts. Round 0 is the first restart of each server group, round 1 is the
    #: second restart of each group, and so on. Each round uses up one of the allowed recoveries.
    paid: set[int] = field(default_factory=set)


class Incidents:
    """Groups failures into incidents, and counts the restarts that are still allowed.

    The failures of an incident have happened within seconds of each other. If all server groups of
    an incident are restarted once, these restarts together count as one restart.
    """

    def __init__(self, *, budget: float) -> None:
        """
        Args:
            budget: Number of allowed tries to restart server groups, in total. Infinity for no
                limit.
        """
        self._remaining_budget = budget
        self._last = Incident(closes_s=-math.inf)

    def add_failure(self, group: int, *, now_s: float, window_s: float) -> Incident:
        """Return the incident to which a new failure of a server group belongs.

        If the last incident is not over and does not contain the group yet, the failure belongs to
        that incident. Otherwise, a new incident begins.

        Args:
            group: Index of the group.
            now_s: Time of the failure, in seconds of the event loop's clock.
            window_s: Duration of a new incident in seconds.
        """
        # If the last incident already contains this server group, the group has failed again after
        # a restart. Then the new failure begins a new incident.
        if now_s > self._last.closes_s or group in self._last.groups:
            self._last = Incident(closes_s=now_s + window_s)
        self._last.groups.add(group)
        return self._last

    def pay(self, incident: Incident, attempt: int) -> bool:
        """Return True if a server group may be restarted, and update the allowed recoveries.

        Within an incident, the first restarts of all groups together use up only one of the allowed
        recoveries. The second restarts together use up another recovery, and so on.

        Args:
            incident: The incident that the failure of the group belongs to.
            attempt: Number of the group's restart during the incident, from 0.

        Returns:
            True if the restart is allowed. False if all allowed recoveries are used up.
        """
        if attempt not in incident.paid and self._remaining_budget > 0:
            self._remaining_budget -= 1
            incident.paid.add(attempt)
        return attempt in incident.paid


def count_allowed_recoveries(fleet: Rollout) -> float:
    """Return the number of recoveries that a fleet may make in total; infinity for no limit."""
    default = max(_MIN_DEFAULT_BUDGET, _BUDGET_PER_ENGINE * fleet.engines)
    budget = fleet.recovery.budget or default
    return math.inf if budget == UNLIMITED else budget


@dataclass(slots=True, kw_only=True, eq=False)
class _Case:
    """Handling of a server group's failure, until the group works again or is given up."""

    #: Index of the failed server group.
    group: int
    #: Ranks of the servers in the failed server group.
    ranks: tuple[int, ...]
    #: Reason for the last failure of the server group.
    cause: str
    #: The incident that the failure belongs to. An incident contains failures that have happened
    #: within seconds of each other.
    incident: Incident
    #: Number of completed tries to restart the server group.
    tries: int = 0
    #: Description of the group's processes that could not be ended; empty if all have ended.
    leftover: str = ""
    #: Event that is set when the processes of the failed server group have ended, or could not be
    #: ended.
    processes_ended: asyncio.Event = field(default_factory=asyncio.Event)
    #: Task that ends the processes of the server group and restarts the group.
    task: asyncio.Task[None] | None = None


class Recovery:
    """Starts and ends groups of servers. From `open` to `stop`, it restarts failed groups."""

    def __init__(self, fleet: FleetParts, health: Health, *, rebind: Rebind) -> None:
        """
        Args:
            fleet: The parts of the fleet that the recovery works with.
            health: Health checks, which begin to watch a group after its start.
            rebind: Function that returns the servers of a group with new addresses. The recovery
                calls this function before a restart if other programs use the present addresses.
        """
        #: Mapping from the index of a server group to the task that starts the group. The task is
        #: cancelled if the group fails or is given up.
        self._starting: dict[int, asyncio.Task[None]] = {}
        #: Mapping from the rank of a starting server to the description of its last failed health
        #: check.
        self._last_answers: dict[int, str] = {}
        self._fleet = fleet
        self._health = health
        self._rebind = rebind
        self._incidents = Incidents(budget=count_allowed_recoveries(fleet.settings))
        #: Limits the number of server groups that are restarted at the same time.
        self._parallel = asyncio.Semaphore(fleet.settings.recovery.parallel)
        #: Event that is set while restarts may begin. During a weight sync, the event is cleared.
        self._released = asyncio.Event()
        self._is_open = False
        #: Mapping from the index of a failed server group to the failure that is being handled.
        self._cases: dict[int, _Case] = {}
        #: Mapping from the index of a server group to the number of consecutive tries to restart
        #: it. The pause before the next try grows with this number. The number is reset after a
        #: group has worked for `max_backoff_s` seconds.
        self._tries_in_row: Counter[int] = Counter()
        #: Mapping from the index of a server group to the end of its last recovery, in seconds of
        #: the event loop's clock.
        self._case_ended_s: dict[int, float] = {}
        #: Number of tries so far to restart server groups. The number is a part of the id of each
        #: try.
        self._count = 0

    def open(self) -> None:
        """Allow this object to restart failed groups of servers, until `stop` is called."""
        self._is_open = True
        self._released.set()

    def has_case(self, group: int) -> bool:
        """Return True if the group of servers has failed and has not been restarted yet."""
        return group in self._cases

    def hold(self) -> None:
        """Begin no restarts of engines until `release` is called. Running restarts continue."""
        self._released.clear()

    def release(self) -> None:
        """Allow restarts of engines again, after a call of `hold`."""
        self._released.set()

    async def wait_for_ended_processes(self) -> None:
        """Wait for the end of the processes of all failed server groups.

        The wait always ends, because each call that ends processes has a time limit. Afterwards,
        processes that could not be ended may still run.
        """
        await asyncio.gather(*(case.processes_ended.wait() for case in self._cases.values()))

    async def stop(self) -> None:
        """Cancel all restarts of failed server groups, and begin no further restarts.

        Afterwards, no group is in the state RECOVERING. Servers whose start was cancelled may still
        run, and the caller has to end them.
        """
        self._is_open = False
        tasks = [case.task for case in self._cases.values() if case.task is not None]
        for task in tasks:
            task.cancel()
        await ended(tasks)
        for case in self._cases.values():
            case.processes_ended.set()
        self._cases.clear()

    def on_change(self, before: GroupView, after: GroupView) -> None:
        """If a server group has failed, start a task that ends and restarts the servers.

        Args:
            before: The group before the change.
            after: The group after the change.
        """
        group = after.index
        starting = self._starting.get(group)
        if starting is not None and after.state in (GroupState.INACTIVE, GroupState.RETIRED):
            starting.cancel()
        if not self._is_open or after.state is not GroupState.INACTIVE:
            return
        # If a server group fails during its restart, the task of its `_Case` tries again. So in
        # this situation, open a new `_Case` only if the group has none.
        is_new = before.is_running or before.state is GroupState.RETIRED
        if is_new or (before.state is GroupState.RECOVERING and group not in self._cases):
            self._open_case(after)

    def _open_case(self, view: GroupView) -> None:
        """Handle the failure of a server group: start a task that ends and restarts its servers."""
        group = view.index
        settings = self._fleet.settings
        works_for_s = now_s() - self._case_ended_s.get(group, 0.0)
        if works_for_s >= settings.recovery.max_backoff_s:
            del self._tries_in_row[group]
        # Each server is probed once per interval of the health checks. So failures with a common
        # cause are detected within one interval, and belong to the same incident.
        window_s = settings.health.interval_s
        incident = self._incidents.add_failure(group, now_s=now_s(), window_s=window_s)
        case = _Case(group=group, ranks=view.ranks, cause=view.cause, incident=incident)
        self._cases[group] = case
        case.task = asyncio.create_task(self._handle(case), name=f"rollout-recovery-{group}")
        self._pay_or_retire(case)

    def _pay_or_retire(self, case: _Case) -> None:
        """Count the next restart of a group, or retire the group if no more restarts are allowed.

        A retired group is not restarted any more.
        """
        if self._incidents.pay(case.incident, case.tries):
            return
        budget = count_allowed_recoveries(self._fleet.settings)
        reason = f"all {budget} allowed restarts are used up (recovery.budget)"
        self._fleet.states.retire(case.group, f"{reason}; last failure of the engine: {case.cause}")

    def _has_state(self, case: _Case, state: GroupState) -> bool:
        """Return True if the failed server group of a `_Case` has the given state now."""
        return self._fleet.states.view.groups[case.group].state is state

    async def _handle(self, case: _Case) -> None:
        """Restart a failed server group until the group works or is given up (retired).

        Each iteration ends the processes of the group, and then tries to start the group. An
        unexpected error retires the group.
        """
        try:
            while True:
                case.leftover = await self.end(case.ranks)
                case.processes_ended.set()
                if case.leftover:
                    message = (
                        "Muster could not end old processes of the inference servers: "
                        f"{case.leftover}"
                    )
                    self._fleet.emit("rollout.warning", message=message)
                if self._has_state(case, GroupState.RETIRED):
                    break
                # If the server group has failed again meanwhile, another task handles the new
                # failure. So this task must stop.
                is_recovered = await self._try_to_restart(case)
                if is_recovered or self._cases.get(case.group) is not case:
                    break
                self._pay_or_retire(case)
        except Exception as error:
            _log.exception(
                "Muster no longer restarts engine %d, because an error occurred during its restart",
                case.group,
            )
            if not self._has_state(case, GroupState.RETIRED):
                self._fleet.states.retire(
                    case.group, f"the recovery of the engine failed: {error!r}"
                )
        case.processes_ended.set()
        self._case_ended_s[case.group] = now_s()
        if self._cases.get(case.group) is case:
            del self._cases[case.group]

    async def _try_to_restart(self, case: _Case) -> bool:
        """Restart a failed server group after a pause, and return True if the group works.

        A failed or cancelled try makes the group INACTIVE again.
        """
        self._count += 1
        id = f"r{self._count}"
        began_s = now_s()
        event_fields = {"id": id, "group": case.group, "ranks": list(case.ranks)}
        self._fleet.states.claim(case.group)
        self._fleet.emit(
            "rollout.recovery.begun", **event_fields, cause=case.cause, **{"try": case.tries + 1}
        )
        # Fields of the event `rollout.recovery.ended`, if the restart is cancelled.
        outcome = "abandoned"
        message = "the fleet is stopped"
        try:
            await self._pause_before_restart(case.group)
            async with self._parallel:
                await self._restart(case)
            outcome = "recovered"
            message = ""
        except StartFailed as error:
            outcome = "failed"
            message = str(error)
        except Exception as error:
            _log.exception("the restart %s of engine %d has failed", id, case.group)
            outcome = "failed"
            message = f"{type(error).__name__}: {error}"
        finally:
            if outcome == "failed":
                case.cause = message
            is_current = self._cases.get(case.group) is case
            if is_current and self._has_state(case, GroupState.RECOVERING):
                self._fleet.states.give_up(case.group, case.cause)
            if outcome != "abandoned":
                case.tries += 1
                self._tries_in_row[case.group] += 1
            self._fleet.emit(
                "rollout.recovery.ended",
                **event_fields,
                outcome=outcome,
                took_s=round(now_s() - began_s, 3),
                message=message,
            )
        return outcome == "recovered"

    async def _pause_before_restart(self, group: int) -> None:
        """Wait before a further restart of a server group. The first restart begins at once."""
        tries_in_row = self._tries_in_row[group]
        if not tries_in_row:
            return
        rules = self._fleet.settings.recovery
        pause_s = choose_pause_s(
            tries_in_row - 1,
            first_s=rules.backoff_s,
            longest_s=rules.max_backoff_s,
            random=self._fleet.random,
        )
        await asyncio.sleep(pause_s)

    async def _restart(self, case: _Case) -> None:
        """Start a failed server group again. If other programs use its ports, use new addresses.

        Raises:
            StartFailed: Old processes of the group still run, or the group does not work.
        """
        if case.leftover:
            raise StartFailed(f"Muster could not end old processes of the engine: {case.leftover}")
        slots = await self._find_new_slots(case.group)
        await self._released.wait()
        await self.start(case.group, slots)

    async def _find_new_slots(self, group: int) -> tuple[ServerSlot, ...] | None:
        """Find new addresses for the servers of a group if other programs use the present ports.

        If the check of the ports fails because this machine lacks resources, such as open files,
        the check is repeated.

        Returns:
            The servers with new addresses. None if no other program uses their present ports.

        Raises:
            TimeoutError: The ports could not be checked in time.
        """
        async with asyncio.timeout(_PORTS_WITHIN_S):
            while True:
                try:
                    taken = await self._fleet.host.ports_taken(self._servers_of(group))
                    return tuple(await self._rebind(group)) if taken else None
                except OSError as error:
                    if error.errno not in OWN_SHORTAGES:
                        raise
                    _log.warning(
                        "Muster could not check the ports of engine %d yet: %s",
                        group,
                        error,
                    )
                await asyncio.sleep(_LAST_POLL_S)

    async def start(self, group: int, slots: tuple[ServerSlot, ...] | None = None) -> None:
        """Start the servers of a group, and return when its entrypoints have generated a token.

        The group must be new, or in the state RECOVERING.

        Args:
            group: Index of the group.
            slots: The group's servers with new addresses. None to keep the present addresses.

        Raises:
            StartFailed: The group does not work, or needs more time than `start_within_s`. The
                group is then INACTIVE.

        After an error or a cancellation, servers may still run, and the caller must end them.
        """
        states = self._fleet.states
        within_s = self._fleet.settings.start_within_s
        epoch = states.begin(group, slots=slots)
        servers = self._servers_of(group)
        start_task = asyncio.create_task(self._start_servers(group, epoch, servers))
        self._starting[group] = start_task
        try:
            await asyncio.wait({start_task}, timeout=within_s)
            if not start_task.done():
                answers = [
                    f"; rank {slot.rank}: {self._last_answers[slot.rank]}"
                    for slot in servers
                    if slot.rank in self._last_answers
                ]
                why = (
                    f"the engine was not ready within {within_s:g} s "
                    f"(start_within_s){''.join(answers)}"
                )
                states.fail(servers[0].rank, epoch, why)
            if not states.view.groups[group].is_current(epoch):
                raise StartFailed(states.view.groups[group].cause)
            start_task.result()
        finally:
            del self._starting[group]
            start_task.cancel()
            # Wait until the cancelled task has ended. Otherwise, the task could start servers while
            # the caller stops the servers of the group.
            await asyncio.wait({start_task}, timeout=_CANCEL_WITHIN_S)

    async def end(self, ranks: Collection[int]) -> str:
        """End the servers with these ranks within the grace period plus `STOPPED_WITHIN_S`.

        Returns:
            Description of processes that could not be ended; empty if all have ended.
        """
        grace_s = self._fleet.settings.stop.grace_s
        try:
            async with asyncio.timeout(grace_s + STOPPED_WITHIN_S):
                return ", ".join(await self._fleet.host.stop(ranks, grace_s=grace_s))
        except Exception as error:
            _log.warning(
                "the servers of ranks %s could not be stopped", join_commas(ranks), exc_info=True
            )
            return f"servers of ranks {join_commas(ranks)}: {str(error) or type(error).__name__}"

    def _servers_of(self, group: int) -> tuple[ServerSlot, ...]:
        """Return the servers of a group with their present addresses."""
        view = self._fleet.states.view
        return tuple(view.servers[rank] for rank in view.groups[group].ranks)

    async def _start_servers(self, group: int, epoch: int, servers: tuple[ServerSlot, ...]) -> None:
        """Start all servers of a group, mark the group as started, and begin its health checks."""
        async with asyncio.TaskGroup() as tasks:
            for slot in servers:
                tasks.create_task(self._start_and_check(slot, epoch))
        self._fleet.states.mark_started(group, epoch)
        self._health.watch(group, epoch)

    async def _start_and_check(self, slot: ServerSlot, epoch: int) -> None:
        """Start a server. If it is an entrypoint, wait until it is ready and generates a token.

        If an error occurs, mark the server as failed.
        """
        try:
            await self._start_server(slot, epoch)
            self._fleet.emit("rollout.server.started", rank=slot.rank, epoch=epoch, url=slot.url)
            if slot.is_entrypoint:
                await self._wait_for_yes(slot, self._fleet.questions.ready)
                await self._wait_for_yes(slot, self._fleet.questions.token)
        except Exception as error:
            if not isinstance(error, StartFailed):
                _log.exception(
                    "Muster could not start the server of rank %d (starts of the engine so "
                    "far: %d)",
                    slot.rank,
                    epoch,
                )
            self._fleet.states.fail(slot.rank, epoch, str(error) or type(error).__name__)

    async def _start_server(self, slot: ServerSlot, epoch: int) -> None:
        """Start the process of a server. Retry while this machine lacks resources.

        Raises:
            StartFailed: The server cannot be started.
        """
        has_warned = False
        while True:
            try:
                return await self._fleet.host.start(slot, epoch)
            except NoRoomToStart as error:
                self._last_answers[slot.rank] = str(error)
                if not has_warned:
                    has_warned = True
                    message = (
                        f"the start of the server of rank {slot.rank} is delayed, because its "
                        f"machine lacks resources ({error}). The delay does not count as a restart"
                    )
                    self._fleet.emit("rollout.warning", message=message)
            await asyncio.sleep(_LAST_POLL_S)

    async def _wait_for_yes(self, slot: ServerSlot, question: Ask | None) -> None:
        """Repeat a request to a starting server until the server answers with status 200.

        Args:
            slot: The server. No request is sent to a server without an API.
            question: The request. If None, nothing is done.

        Raises:
            StartFailed: Another program listens at the server's address.
        """
        if slot.url is None or question is None:
            return
        pause_s = _FIRST_POLL_S
        while True:
            timeout_s = self._fleet.settings.health.timeout_s
            problem = await self._fleet.prober.ask(slot.url, question, timeout_s)
            if problem is None:
                return
            if isinstance(problem, Foreign):
                raise StartFailed(f"rank {slot.rank}: {problem}")
            self._last_answers[slot.rank] = str(problem)
            await asyncio.sleep(pause_s)
            pause_s = min(_LAST_POLL_S, pause_s * 1.5)
