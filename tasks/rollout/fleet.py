"""A fleet of inference servers: starts and stops it, checks it, and reports its state.

A fleet lives in one asyncio loop. Its registry owns the states of the engines and notifies the
router, the health checks, the recovery and the fleet itself of each change.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from enum import Enum
from itertools import islice
from random import Random
from typing import Any

from tasks.processes.shortage import NotChecked
from tasks.record.causes import last_lines
from tasks.record.events import Emit
from tasks.record.states import GroupState
from tasks.rollout.clock import ended
from tasks.rollout.health import Health
from tasks.rollout.probing import (
    Death,
    FleetParts,
    FleetRefused,
    HttpProber,
    Rebind,
    ServerHost,
    StartFailed,
)
from tasks.rollout.recovery import Recovery
from tasks.rollout.registry import GroupView, Registry
from tasks.rollout.router import Entrypoint, Router
from tasks.rollout.sync import InFlight, WeightSyncs
from tasks.rollout.topology import TopologyPlan
from tasks.spec.errors import IllegalTransition, MusterError
from tasks.spec.formatting import format_count, join_commas
from tasks.spec.rollout import Rollout

_log = logging.getLogger(__name__)

#: While the fleet starts, the run fails after this number of consecutive failed starts of one
#: server group.
_MAX_FAILED_STARTS = 3
#: Reason that messages give if a request, a weight sync or a server ends because the fleet stops.
_STOPPED = "the fleet is stopped"
#: Seconds during which the HTTP server of a dead engine may still answer that the engine is ready.
_DEATH_REPORT_DELAY_S = 0.3
#: Largest number of server groups whose failures are described in the message of a failed fleet.
_MAX_NAMED_CAUSES = 8


class FleetFailed(MusterError):
    """The fleet could not start. The message gives the reason. The caller must still call
    `Fleet.stop`.
    """


class FleetPhase(Enum):
    """Phase of a fleet, from its start to its stop."""

    #: `start` was called, and waits until enough server groups work.
    STARTING = "starting"
    #: `start` has returned.
    RUNNING = "running"
    #: `stop` is ending the servers. No request is sent to a server, and no server is probed.
    STOPPING = "stopping"
    #: No server runs. `start` may be called, for the first time or again after `stop`.
    STOPPED = "stopped"


class Fleet:
    """The inference servers of one run.

    A fleet runs from `start` to `stop`, and may then be started again. A transfer of new weights
    begins with `begin_sync`, and continues with the methods of `syncs`.
    """

    def __init__(
        self,
        plan: TopologyPlan,
        *,
        settings: Rollout,
        host: ServerHost,
        prober: HttpProber,
        emit: Emit,
        rebind: Rebind,
        random: Random | None = None,
        serves_as_loaded: bool = True,
    ) -> None:
        """
        Create the fleet in the asyncio loop in which it will run.

        Args:
            plan: Topology of the fleet.
            settings: The fleet's section of the run spec.
            host: Starts and stops the servers. The constructor sets the attribute `on_death` of the
                host.
            prober: Sends requests to the servers.
            emit: Function that emits an event.
            rebind: Function that returns the servers of a lifecycle group with new addresses. The
                fleet calls `rebind` if another program already uses an address of the group.
            random: Source of random numbers, or None for a new one.
            serves_as_loaded: True if server groups accept requests as soon as they have started.
                False if they first wait for weights from the trainer.
        """
        self.registry = Registry(plan, serves_as_loaded=serves_as_loaded)
        self.router = Router(
            limit=settings.concurrency,
            queue_size=settings.queue_size,
            queue_timeout_s=settings.queue_timeout_s,
        )
        self.settings = settings
        #: Future that resolves with a reason when the run must fail. The fleet then keeps running
        #: until `stop` is called.
        self.fatal: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        #: URL of the gateway, for `snapshot`. Empty before the gateway has started.
        self.url = ""
        self._emit = emit
        self._phase = FleetPhase.STOPPED
        #: Future that resolves when enough groups of servers work; None before the first call of
        #: `start`.
        self._up: asyncio.Future[None] | None = None
        #: Mapping from the index of a server group to the task that starts the group for the first
        #: time.
        self._starts: dict[int, asyncio.Task[None]] = {}
        #: Mapping from the index of a server group to the number of its consecutive failed starts.
        #: After the fleet has started, failed starts are no longer counted.
        self._failed_starts: Counter[int] = Counter()
        #: Mapping from the rank of a dead server to the last lines of its log.
        self._last_log_lines: dict[int, str] = {}
        #: Mapping from rank to entrypoint, for the entrypoints that the router may choose.
        self._entrypoints: dict[int, Entrypoint] = {}
        #: Lock that is held during `start` and `check`. A weight sync waits for the lock before it
        #: begins.
        self._start_or_check = asyncio.Lock()

        self._parts = FleetParts(
            states=self.registry,
            settings=settings,
            questions=plan.questions,
            host=host,
            prober=prober,
            emit=emit,
            random=random or Random(),
        )
        self._health = Health(self._parts)
        #: Functions that the gateway calls when a request fails or a server generates tokens.
        self.note_failure = self._health.note_failure
        self.note_tokens = self._health.note_tokens
        self._recovery = Recovery(self._parts, self._health, rebind=rebind)
        self.syncs = WeightSyncs(
            self._parts,
            router=self.router,
            health=self._health,
            recovery=self._recovery,
            on_end=lambda: self._fail_if_too_few_engines(checks_min_active=True),
        )
        self.registry.listen(
            # The router is the first listener, so that a failed server group receives no more
            # requests while the other listeners run.
            self._update_routing,
            self._health.on_change,
            self._recovery.on_change,
            self._check_progress,
        )
        host.on_death = self._on_death

    async def start(self) -> None:
        """Start all groups of servers, and return when `min_active` groups work.

        Without `min_active` in the spec, all groups have to work, except retired groups. If the
        call is cancelled, servers may still run: call `stop` to end them.

        Raises:
            FleetFailed: The run must fail, or the fleet was stopped before it could serve.
            IllegalTransition: The fleet was not in the phase STOPPED before this call.
        """
        if self._phase is not FleetPhase.STOPPED:
            raise IllegalTransition(
                "only a stopped fleet of inference servers can be started, but this fleet is "
                f"{self._phase.value}"
            )
        self._phase = FleetPhase.STARTING
        self._failed_starts.clear()
        if self.fatal.done():
            self.fatal = asyncio.get_running_loop().create_future()
        self._up = asyncio.get_running_loop().create_future()
        async with self._start_or_check:
            self._recovery.open()
            self._starts = {
                group.index: asyncio.create_task(
                    self._start_first(group), name=f"rollout-start-{group.index}"
                )
                for group in self.registry.view.groups
                if group.state is not GroupState.RETIRED
            }
            up_or_fatal: set[asyncio.Future[Any]] = {self._up, self.fatal}
            await asyncio.wait(up_or_fatal, return_when=asyncio.FIRST_COMPLETED)
        if self.fatal.done():
            raise FleetFailed(self.fatal.result())
        if self._phase is not FleetPhase.STARTING:
            raise FleetFailed(_STOPPED)

        # Wait for the start tasks of all server groups that are no longer STARTING. These tasks end
        # at once, because the start has succeeded or failed.
        groups = self.registry.view.groups
        ending_tasks = [
            task
            for group, task in self._starts.items()
            if groups[group].state is not GroupState.STARTING
        ]
        await asyncio.wait(ending_tasks)
        self._phase = FleetPhase.RUNNING

    async def stop(self) -> str:
        """End all servers, and kill the servers that still run after the grace period.

        The method may be called at any moment, for example during a start or a recovery. If a step
        raises an error, the next steps still end the servers.

        Returns:
            An empty string if all processes have ended. Otherwise a description of the remaining
            processes and of errors in Muster's own code; the caller then calls `stop` again.
        """
        self._phase = FleetPhase.STOPPING
        self.router.set((), why_none=_STOPPED)
        errors = [await _try_to_end("the weight sync", self.syncs.stop)]
        if self._up is not None and not self._up.done():
            self._up.set_result(None)
        errors.append(await _try_to_end("the recovery", self._recovery.stop))
        for task in self._starts.values():
            task.cancel()
        await ended(self._starts.values())
        errors.append(await _try_to_end("the health checks", self._health.stop))
        for group in self.registry.view.groups:
            self.registry.fail(group.ranks[0], group.epoch, _STOPPED)
        ranks = [rank for group in self.registry.view.groups for rank in group.ranks]
        remaining = await self._recovery.end(ranks)
        self._phase = FleetPhase.STOPPED
        return "; ".join(filter(None, [remaining, *errors]))

    async def check(self) -> dict[str, Any]:
        """Check each running server once. A single failed check marks the engine as failed.

        When this method returns, the processes of the failed engines have ended, and their restart
        has been scheduled.

        Returns:
            Mapping with the failed engines and the causes of their failures, and with the ranks of
            the active, inactive and unreachable servers.

        Raises:
            FleetRefused: A weight sync is open. During a sync, a working server may fail to answer.
        """
        async with self._start_or_check:
            if self.syncs.id is not None:
                raise FleetRefused(
                    "a weight sync is in progress. During a sync, even a working engine can leave "
                    "a health check unanswered. Request the health check again after the sync"
                )
            running = {group.index for group in self.registry.view.groups if group.is_running}
            await self._health.rest()
            try:
                await self._health.sweep()
            finally:
                self._health.resume()
            failed = [
                {"engine": group.index, "ranks": list(group.ranks), "cause": group.cause}
                for group in self.registry.view.groups
                if group.index in running and not group.is_running
            ]
            await self._recovery.wait_for_ended_processes()
            view = self.registry.view
            answer = {
                "epoch": view.epoch,
                "failed": failed,
                "active": [slot.rank for slot in view.entrypoints],
                "inactive": [list(group.ranks) for group in view.groups if not group.is_running],
                "unreachable": [list(group.ranks) for group in view.groups if group.unreachable],
            }
        self._emit("rollout.check", **answer)
        return answer

    async def begin_sync(self, timeout_s: float, in_flight: InFlight) -> dict[str, Any]:
        """Wait for the end of a running `start` or `check`, then begin a weight sync.

        Arguments, result and errors are those of `WeightSyncs.begin`.
        """
        async with self._start_or_check:
            pass
        return await self.syncs.begin(timeout_s, in_flight)

    async def restart(self, engine: int) -> dict[str, Any]:
        """End a running engine, so that the recovery starts it again.

        Returns:
            Index of the engine and its new state.

        Raises:
            KeyError: The fleet has no engine with this index.
            FleetRefused: The engine does not run.
        """
        group = self.registry.group(engine)
        if not self.registry.fail(group.ranks[0], group.epoch, "restarted by order"):
            raise FleetRefused(
                f"engine {engine} has no running server: the state of the engine is "
                f"{group.state.value}"
            )
        return {"engine": engine, "state": self.registry.group(engine).state.value}

    async def retire(self, rank: int) -> dict[str, Any]:
        """End the engine of a server for good, and send the engine's requests to other engines.

        Returns:
            The answer of the gateway: status, server id, and index of the engine.

        Raises:
            KeyError: The fleet has no server with this rank.
            FleetRefused: Without this engine, the fleet would have fewer engines than `min_active`,
                or no engine.
        """
        group = self.registry.group(self.registry.group_of(rank))
        groups = self.registry.view.groups
        kept = sum(other.state is not GroupState.RETIRED for other in groups)
        if group.state is not GroupState.RETIRED:
            needed = max(1, self.settings.recovery.min_active or 0)
            if kept <= needed:
                raise FleetRefused(
                    f"engine {group.index} cannot be shut down for good: only {kept} engines are "
                    f"left, and recovery.min_active requires at least {needed}"
                )
            self.registry.retire(group.index, "retired by order")
            await self._recovery.end(group.ranks)
        return {"status": "accepted", "worker_id": str(rank), "engine": group.index}

    def workers(self) -> dict[str, Any]:
        """Return the fleet's entrypoints in the format of sglang-router's `GET /workers`.

        Entrypoints of retired engines, which are not restarted any more, are omitted.

        Source: sgl-project/sglang, sgl-model-gateway, `GET /workers`.
        """
        view = self.registry.view
        workers = []
        for slot in view.servers.values():
            group = view.groups[slot.engine]
            if slot.is_entrypoint and group.state is not GroupState.RETIRED:
                workers.append(
                    {
                        "id": str(slot.rank),
                        "url": slot.url,
                        "worker_type": "regular",
                        "is_healthy": group.may_receive_requests(slot.rank),
                        "load": self.router.outstanding_of(slot.rank, group.epoch),
                    }
                )
        return {"workers": workers, "total": len(workers)}

    async def add(self, url: str) -> dict[str, Any]:
        """Start a retired engine again. Muster does not restart a retired engine by itself.

        The start uses up one of the restarts that the spec allows. The method is the counterpart of
        sglang-router's request to add a worker.

        Args:
            url: URL of the entrypoint of the engine.

        Returns:
            The answer of the gateway: status, server id and URL.

        Raises:
            FleetRefused: The URL does not belong to the fleet, or the engine cannot be started now.
        """
        slots = self.registry.view.servers.values()
        matching = [slot for slot in slots if slot.is_entrypoint and slot.url == url.rstrip("/")]
        if not matching:
            raise FleetRefused(
                f"{url} is not a server of this run, and a running run accepts no new servers. For "
                "more servers, set a larger number in components.rollout.engines, and start the "
                "run again"
            )
        slot = matching[0]
        engine = slot.engine
        if self.registry.group(engine).state is GroupState.RETIRED:
            if not self.has_started or self._recovery.has_case(engine):
                raise FleetRefused(
                    f"Muster is still stopping the servers of engine {engine}. Try again later"
                )
            self.registry.bring_back(engine, "restarted by order")
            group = self.registry.group(engine)
            if group.state is GroupState.RETIRED:
                raise FleetRefused(f"engine {engine} cannot be started again: {group.cause}")
        return {"status": "accepted", "worker_id": str(slot.rank), "url": slot.url}

    def snapshot(self) -> dict[str, Any]:
        """Return the current state of the fleet as plain data, for `GET /muster/rollout`."""
        view = self.registry.view
        return {
            "epoch": view.epoch,
            "version": view.version,
            "ready": view.is_ready,
            "state": self.state,
            "reason": view.why_none,
            "url": self.url,
            "concurrency": self.router.concurrency,
            "servers": [
                {
                    "rank": slot.rank,
                    "group": slot.engine,
                    "node": slot.node,
                    "host": slot.host,
                    "port": slot.port,
                    "url": slot.url,
                    "entrypoint": slot.is_entrypoint,
                    "state": group.state.value,
                    "reachable": slot.rank not in group.unreachable,
                    "epoch": group.epoch,
                    "version": group.version,
                    "outstanding": self.router.outstanding_of(slot.rank, group.epoch),
                    "misses": self._health.misses_of(slot.rank),
                    "cause": group.cause,
                }
                for slot in view.servers.values()
                for group in (view.groups[slot.engine],)
            ],
            "engines": [
                {
                    "engine": group.index,
                    "ranks": list(group.ranks),
                    "urls": [view.servers[rank].url for rank in group.ranks],
                    "state": group.state.value,
                    "epoch": group.epoch,
                    "version": group.version,
                    "cause": group.cause,
                    "recoveries": group.recoveries,
                }
                for group in view.groups
            ],
            "sync": self.syncs.id,
            "training": view.training,
        }

    async def stays_ready(self, url: str) -> bool:
        """Ask a server twice, 0.3 s apart, and return True if it is ready both times.

        The second request is needed because the HTTP server of a dead engine may still answer for a
        moment. If this machine could not send a request, the server counts as ready.
        """
        ready, ask = self._parts.questions.ready, self._parts.prober.ask
        for pause_s in (0.0, _DEATH_REPORT_DELAY_S):
            await asyncio.sleep(pause_s)
            problem = await ask(url, ready, _DEATH_REPORT_DELAY_S)
            if problem is not None and not isinstance(problem, NotChecked):
                return False
        return True

    def version_of(self, engine: int) -> int | None:
        """Return the current weight version of an engine, or None if it is unknown."""
        return self.registry.view.groups[engine].version

    @property
    def has_started(self) -> bool:
        """True after `start` has succeeded, until `stop` is called."""
        return self._phase is FleetPhase.RUNNING

    @property
    def state(self) -> str:
        """Name of the fleet's state for users: starting, serving, down, syncing or stopping."""
        if self._phase in (FleetPhase.STOPPING, FleetPhase.STOPPED):
            return "stopping"
        if not self.has_started:
            return "starting"
        if self.syncs.id is not None:
            return "syncing"
        return "serving" if self.registry.view.entrypoints else "down"

    async def _start_first(self, group: GroupView) -> None:
        """Start a group of servers when the fleet starts.

        If the start fails, the method logs the reason and returns. `Recovery` then restarts the
        group.
        """
        try:
            if group.state is GroupState.INACTIVE:
                self.registry.claim(group.index)
            await self._recovery.start(group.index)
        except StartFailed as error:
            _log.warning("group %d: %s", group.index, error)

    def _on_death(self, death: Death) -> None:
        """Mark the group of a dead server as failed, and emit an event.

        If the server's group has already failed or was started again, nothing happens.
        """
        group = self.registry.view.groups[self.registry.group_of(death.rank)]
        if not group.is_current(death.epoch):
            return
        self._last_log_lines[death.rank] = last_lines(death.log_end)
        self.registry.fail(
            death.rank, death.epoch, f"the server of rank {death.rank} died: {death.why}"
        )
        self._emit("rollout.server.died", rank=death.rank, epoch=death.epoch, why=death.why)

    def _update_routing(self, before: GroupView, after: GroupView) -> None:
        """Update the router's list of available entrypoints after a change, and emit an event.

        Args:
            before: The server group before the change.
            after: The group after the change.
        """
        view = self.registry.view
        for rank in after.ranks:
            slot = view.servers[rank]
            self._entrypoints.pop(rank, None)
            if slot.is_entrypoint and view.groups[after.index].may_receive_requests(rank):
                self._entrypoints[rank] = Entrypoint(
                    rank=rank,
                    epoch=after.epoch,
                    url=slot.url or "",
                    engine=after.index,
                    version=after.version,
                    is_preferred=after.state is GroupState.ACTIVE,
                )
        if self._phase is not FleetPhase.STOPPING:
            reason = "" if self._entrypoints else view.why_none
            self.router.set(self._entrypoints.values(), why_none=reason)
        if before.state is not after.state:
            self._emit(
                "rollout.group.state",
                group=after.index,
                ranks=list(after.ranks),
                before=before.state.value,
                after=after.state.value,
                cause=after.cause,
                epoch=after.epoch,
            )

    def _check_progress(self, before: GroupView, after: GroupView) -> None:
        """React to the new state of a server group.

        End the wait in `start` if enough groups work. Fail the run if too many groups have been
        given up.

        Args:
            before: The server group before its state changed.
            after: The server group after its state changed.
        """
        if self._phase is FleetPhase.STOPPING or before.state is after.state:
            return
        groups = self.registry.view.groups
        wanted = [group for group in groups if group.state is not GroupState.RETIRED]
        # A stale server group counts as working: it has started, and only waits for new weights
        # from the trainer.
        working = [group for group in wanted if group.is_serving or group.state is GroupState.STALE]
        needed = min(self.settings.recovery.min_active or len(wanted), len(wanted))
        if self._up is not None and not self._up.done() and len(working) >= needed:
            self._up.set_result(None)
        if after.state in (GroupState.INACTIVE, GroupState.RETIRED):
            self._fail_if_too_few_engines(checks_min_active=before.is_running)
        if after.state is GroupState.INACTIVE and not self.has_started:
            self._count_failed_start(before, after)

    def _count_failed_start(self, before: GroupView, after: GroupView) -> None:
        """Count the failed starts of a server group. Three failures in a row fail the run.

        Args:
            before: The group before its failure.
            after: The group after its failure.
        """
        if before.state not in (GroupState.STARTING, GroupState.RECOVERING):
            # The server group has served requests before this failure, so its last start succeeded.
            # Reset the count.
            del self._failed_starts[after.index]
            return
        self._failed_starts[after.index] += 1
        if self._failed_starts[after.index] >= _MAX_FAILED_STARTS:
            problem = (
                f"the servers of ranks {join_commas(after.ranks)} failed to start "
                f"{_MAX_FAILED_STARTS} times"
            )
            self._fail_run(f"{problem}: {after.cause}{self._quote_log(after)}")

    def _fail_if_too_few_engines(self, *, checks_min_active: bool) -> None:
        """Fail the run if too many engines are given up (retired), or if too few serve requests.

        Args:
            checks_min_active: True to fail the run also if fewer than `min_active` engines serve
                requests. This second check is skipped until the fleet has started, and during each
                weight sync.
        """
        view = self.registry.view
        min_active = self.settings.recovery.min_active or 0
        needed = max(1, min_active)
        total = len(view.groups)
        kept = sum(group.state is not GroupState.RETIRED for group in view.groups)
        serving = len(view.up)
        is_time_to_serve = self.has_started and self.syncs.id is None
        if kept < needed:
            reason = (
                f"Muster no longer restarts {total - kept} of {total} engines, but the run needs "
                f"at least {format_count(needed, 'engine')}"
            )
        elif checks_min_active and is_time_to_serve and serving < min_active:
            reason = (
                f"only {serving} of {total} engines serve requests, but recovery.min_active "
                f"requires at least {min_active}"
            )
        else:
            return
        log_lines = next(filter(None, map(self._quote_log, view.groups)), "")
        causes = (
            f"ranks {join_commas(group.ranks)}: {group.cause}"
            for group in view.groups
            if group.cause
        )
        self._fail_run(f"{reason}: {'; '.join(islice(causes, _MAX_NAMED_CAUSES))}{log_lines}")

    def _quote_log(self, group: GroupView) -> str:
        """Return the last log lines of a server in a failed group; empty if unknown."""
        for rank in group.ranks:
            if group.cause and self._last_log_lines.get(rank):
                return f"\nlast lines of rank {rank}:\n{self._last_log_lines[rank]}"
        return ""

    def _fail_run(self, reason: str) -> None:
        """Make the run fail: emit an event and resolve `fatal`. Only the first reason counts."""
        if not self.fatal.done():
            self._emit("rollout.failed", reason=reason)
            self.fatal.set_result(reason)


async def _try_to_end(part: str, end: Callable[[], Awaitable[None]]) -> str:
    """Call a function that ends a part of the fleet of inference servers.

    Args:
        part: Name of the part, for messages.
        end: The function.

    Returns:
        Description of the error that the function has raised, or an empty string.
    """
    try:
        await end()
    except Exception as error:
        _log.exception("%s could not be ended", part)
        return f"{part} could not be ended: {error!r}"
    return ""
