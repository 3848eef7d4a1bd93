"""A fleet of inference servers as one thing: its parts, its orders, what it says of itself.

Everything lives in one asyncio loop. The registry owns the state, and tells each change of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from enum import Enum
from itertools import islice
from random import Random
from typing import Any

from tasks.processes.shortage import Unasked
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
from tasks.spec.formatting import join_commas
from tasks.spec.rollout import Rollout

_log = logging.getLogger(__name__)

#: A group that fails so often before the fleet has served at all will not come up.
_FIRST_STARTS = 3
_STOPPED = "the fleet is stopped"
#: A front end says so late that its engine has died.
_MOMENT_S = 0.3
#: Groups, the first ones, whose causes are told where the fleet cannot go on.
_CAUSES = 8


class FleetFailed(MusterError):
    """The fleet does not come up; the message is the reason. Stop it, then mend that."""


class FleetPhase(Enum):
    """Of a fleet as a whole, from its first start to its last stop."""

    #: From a start until each group serves, or is retired.
    STARTING = "starting"
    RUNNING = "running"
    #: Nothing is routed or judged any more.
    STOPPING = "stopping"
    #: May be started, or started again.
    STOPPED = "stopped"


class Fleet:
    """The servers of one run, from `start` to `stop`; both may come again after that.

    Its trainer brings it new weights by `begin_sync` and then `syncs`.
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
        """Made in the loop in which it lives; it takes over `host.on_death`.

        Args:
            rebind: the servers of a group at new addresses, where others have taken theirs.
            serves_as_loaded: see `Registry`.
        """
        self.registry = Registry(plan, serves_as_loaded=serves_as_loaded)
        self.router = Router(
            limit=settings.concurrency,
            queue_size=settings.queue_size,
            queue_timeout_s=settings.queue_timeout_s,
        )
        self.settings = settings
        #: Resolves with the reason once the run has to fail. The servers still run then.
        self.fatal: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        #: Of the gateway, for the snapshot.
        self.url = ""
        self._emit = emit
        self._phase = FleetPhase.STOPPED
        self._up: asyncio.Future[None] | None = None
        #: By group.
        self._starts: dict[int, asyncio.Task[None]] = {}
        self._failed_starts: Counter[int] = Counter()
        self._last_words: dict[int, str] = {}
        #: By rank, what the router has.
        self._entrypoints: dict[int, Entrypoint] = {}
        #: Held while the servers are checked.
        self._order = asyncio.Lock()

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
        #: What requests tell, for the gateway.
        self.note_failure = self._health.note_failure
        self.note_tokens = self._health.note_tokens
        self._recovery = Recovery(self._parts, self._health, rebind=rebind)
        self.syncs = WeightSyncs(
            self._parts,
            router=self.router,
            health=self._health,
            recovery=self._recovery,
            on_end=lambda: self._check(is_guarded=True),
        )
        self.registry.listen(
            # First: what has failed gets no more requests, whatever the others do about it.
            self._route,
            self._health.on_change,
            self._recovery.on_change,
            self._judge,
        )
        host.on_death = self._on_death

    async def start(self) -> None:
        """Start all groups; returns once `min_active` are up, or all that are not retired. A cancel
        leaves what runs to `stop`.

        Raises: FleetFailed, once the run has to fail, or when it is stopped before it serves.
        """
        if self._phase is not FleetPhase.STOPPED:
            raise IllegalTransition(f"a fleet that is {self._phase.value} cannot be started")
        self._phase = FleetPhase.STARTING
        self._failed_starts.clear()
        if self.fatal.done():
            self.fatal = asyncio.get_running_loop().create_future()
        self._up = asyncio.get_running_loop().create_future()
        async with self._order:
            self._recovery.open()
            self._starts = {
                group.index: asyncio.create_task(
                    self._start_first(group), name=f"rollout-start-{group.index}"
                )
                for group in self.registry.view.groups
                if group.state is not GroupState.RETIRED
            }
            either: set[asyncio.Future[Any]] = {self._up, self.fatal}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self.fatal.done():
            raise FleetFailed(self.fatal.result())
        if self._phase is not FleetPhase.STARTING:
            raise FleetFailed(_STOPPED)
        view = self.registry.view
        # What these started is up, or somebody else's matter: they end at once.
        over = [
            task
            for group, task in self._starts.items()
            if view.groups[group].state is not GroupState.STARTING
        ]
        await asyncio.wait(over)
        self._phase = FleetPhase.RUNNING

    async def stop(self) -> str:
        """End everything, within the grace period and a bound, also in the midst of a recovery.

        Returns: what could not be ended; empty when nothing is left. Stop it again then.
        """
        self._phase = FleetPhase.STOPPING
        self.router.set((), why_none=_STOPPED)
        await self.syncs.stop()
        if self._up is not None and not self._up.done():
            self._up.set_result(None)
        await self._recovery.stop()
        for task in self._starts.values():
            task.cancel()
        await ended(self._starts.values())
        await self._health.stop()
        for group in self.registry.view.groups:
            self.registry.fail(group.ranks[0], group.epoch, _STOPPED)
        ranks = [rank for group in self.registry.view.groups for rank in group.ranks]
        left = await self._recovery.end(ranks)
        self._phase = FleetPhase.STOPPED
        return left

    async def check(self) -> dict[str, Any]:
        """Ask every running server once; one bad answer is enough. What failed is shut down when
        this returns, in time, and is recovered.

        Raises: FleetRefused, while a sync is open.
        """
        async with self._order:
            if self.syncs.id is not None:
                raise FleetRefused("a sync is open, and engines need not answer: check before it")
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
            await self._recovery.down()
            view = self.registry.view
            answer = {
                "epoch": view.epoch,
                "failed": failed,
                "active": [slot.rank for slot in view.entrypoints],
                "inactive": [list(one.ranks) for one in view.groups if not one.is_running],
                "unreachable": [list(one.ranks) for one in view.groups if one.unreachable],
            }
        self._emit("rollout.check", **answer)
        return answer

    async def begin_sync(self, timeout_s: float, in_flight: InFlight) -> dict[str, Any]:
        """See `WeightSyncs.begin`; a check that is under way ends before."""
        async with self._order:
            pass
        return await self.syncs.begin(timeout_s, in_flight)

    async def restart(self, engine: int) -> dict[str, Any]:
        """End an engine that runs, and start it again.

        Raises: KeyError, for one that the fleet does not have; FleetRefused.
        """
        group = self.registry.group(engine)
        if not self.registry.fail(group.ranks[0], group.epoch, "restarted by order"):
            raise FleetRefused(f"engine {engine} is {group.state.value}: there is nothing to end")
        return {"engine": engine, "state": self.registry.group(engine).state.value}

    async def retire(self, rank: int) -> dict[str, Any]:
        """End the engine of a server for good; its requests are tried on others.

        Raises: KeyError, for a rank that has no server; FleetRefused, where the fleet needs it.
        """
        group = self.registry.group(self.registry.group_of(rank))
        left = sum(one.state is not GroupState.RETIRED for one in self.registry.view.groups)
        if group.state is not GroupState.RETIRED:
            if left <= max(1, self.settings.recovery.min_active or 0):
                raise FleetRefused(f"{left} engines are left, and so many are needed (min_active)")
            self.registry.retire(group.index, "retired by order")
            await self._recovery.end(group.ranks)
        return {"status": "accepted", "worker_id": str(rank), "engine": group.index}

    def workers(self) -> dict[str, Any]:
        """The servers that take requests, as sglang-router lists its own.

        Source: sgl-project/sglang, sgl-model-gateway, `GET /workers`.
        """
        view = self.registry.view
        found = [
            {
                "id": str(slot.rank),
                "url": slot.url,
                "worker_type": "regular",
                "is_healthy": view.groups[slot.engine].may_receive_requests(slot.rank),
                "load": self.router.outstanding_of(slot.rank, view.groups[slot.engine].epoch),
            }
            for slot in view.servers.values()
            if slot.is_entrypoint and view.groups[slot.engine].state is not GroupState.RETIRED
        ]
        return {"workers": found, "total": len(found)}

    async def add(self, url: str) -> dict[str, Any]:
        """Have a server of the fleet among those that take requests: an engine that was retired is
        started again, from the budget of recoveries.

        Raises: FleetRefused, for a server that is not the fleet's, or an engine that can't be.
        """
        servers = self.registry.view.servers.values()
        known = (slot for slot in servers if slot.is_entrypoint and slot.url == url.rstrip("/"))
        if (found := next(known, None)) is None:
            raise FleetRefused(
                f"{url} is no server of this fleet: ask for more engines in the spec"
            )
        engine = found.engine
        if self.registry.group(engine).state is GroupState.RETIRED:
            if not self.has_started or self._recovery.has(engine):
                raise FleetRefused(f"engine {engine} is being ended: try again when it is")
            self.registry.bring_back(engine, "brought back by order")
            if (after := self.registry.group(engine)).state is GroupState.RETIRED:
                raise FleetRefused(f"engine {engine} stays retired: {after.cause}")
        return {"status": "accepted", "worker_id": str(found.rank), "url": found.url}

    def snapshot(self) -> dict[str, Any]:
        """The answer of `GET /muster/rollout`: the fleet at one moment, in plain data."""
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
        """Whether a server says that it may be asked, now and a moment later."""
        ready, ask = self._parts.questions.ready, self._parts.prober.ask
        for pause_s in (0.0, _MOMENT_S):
            await asyncio.sleep(pause_s)
            answer = await ask(url, ready, _MOMENT_S)
            if answer is not None and not isinstance(answer, Unasked):
                return False
        return True

    def version_of(self, engine: int) -> int | None:
        """Of the weights that an engine has now."""
        return self.registry.view.groups[engine].version

    @property
    def has_started(self) -> bool:
        """From the end of its start to its stop: it serves, or has served."""
        return self._phase is FleetPhase.RUNNING

    @property
    def state(self) -> str:
        """starting | serving | down | syncing | stopping"""
        if self._phase in (FleetPhase.STOPPING, FleetPhase.STOPPED):
            return "stopping"
        if not self.has_started:
            return "starting"
        if self.syncs.id is not None:
            return "syncing"
        return "serving" if self.registry.view.entrypoints else "down"

    async def _start_first(self, group: GroupView) -> None:
        try:
            if group.state is GroupState.INACTIVE:
                self.registry.claim(group.index)
            await self._recovery.start(group.index)
        except StartFailed as error:
            # The recovery has it.
            _log.warning("group %d: %s", group.index, error)

    def _on_death(self, death: Death) -> None:
        group = self.registry.view.groups[self.registry.group_of(death.rank)]
        if not group.is_current(death.epoch):
            return
        self._last_words[death.rank] = last_lines(death.last_words)
        self.registry.fail(death.rank, death.epoch, f"rank {death.rank} died: {death.why}")
        self._emit("rollout.server.died", rank=death.rank, epoch=death.epoch, why=death.why)

    def _route(self, before: GroupView, after: GroupView) -> None:
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

    def _judge(self, before: GroupView, after: GroupView) -> None:
        """Whether the fleet is up, or the run has to fail."""
        if self._phase is FleetPhase.STOPPING or before.state is after.state:
            return
        groups = self.registry.view.groups
        awaited = [one for one in groups if one.state is not GroupState.RETIRED]
        # One that was started after a commit waits for its weights.
        up = [one for one in awaited if one.is_serving or one.state is GroupState.STALE]
        needed = min(self.settings.recovery.min_active or len(awaited), len(awaited))
        if self._up is not None and not self._up.done() and len(up) >= needed:
            self._up.set_result(None)
        if after.state in (GroupState.INACTIVE, GroupState.RETIRED):
            self._check(is_guarded=before.is_running)
        if after.state is GroupState.INACTIVE and not self.has_started:
            self._count_start(before, after)

    def _count_start(self, before: GroupView, after: GroupView) -> None:
        if before.state not in (GroupState.STARTING, GroupState.RECOVERING):
            # It has served meanwhile.
            del self._failed_starts[after.index]
            return
        self._failed_starts[after.index] += 1
        if self._failed_starts[after.index] >= _FIRST_STARTS:
            what = f"ranks {join_commas(after.ranks)} failed to start {_FIRST_STARTS} times"
            self._fail_run(f"{what}: {after.cause}{self._words_of(after)}")

    def _check(self, *, is_guarded: bool) -> None:
        """Fail the run where the fleet cannot go on; guarded: it is time for groups to serve."""
        view, min_active = self.registry.view, self.settings.recovery.min_active or 0
        # Not before the first of them serves, nor while they get new weights.
        is_guarded = is_guarded and self.has_started and self.syncs.id is None
        left = sum(group.state is not GroupState.RETIRED for group in view.groups)
        total, serving, needed = len(view.groups), len(view.up), max(1, min_active)
        if left < needed:
            reason = f"{left} of {total} engines are left, {needed} are needed"
        elif is_guarded and serving < min_active:
            reason = f"{serving} of {total} engines serve, min_active is {min_active}"
        else:
            return
        words = next(filter(None, map(self._words_of, view.groups)), "")
        named = (f"ranks {join_commas(one.ranks)}: {one.cause}" for one in view.groups if one.cause)
        self._fail_run(f"{reason}: {'; '.join(islice(named, _CAUSES))}{words}")

    def _words_of(self, group: GroupView) -> str:
        """The end of the log of a server of a group that died; empty where none is known."""
        for rank in group.ranks:
            if group.cause and self._last_words.get(rank):
                return f"\nlast lines of rank {rank}:\n{self._last_words[rank]}"
        return ""

    def _fail_run(self, reason: str) -> None:
        if not self.fatal.done():
            self._emit("rollout.failed", reason=reason)
            self.fatal.set_result(reason)
