"""A fleet of inference servers as one thing: its parts, its orders, what it says of itself.

Everything lives in one asyncio loop. The registry owns the state; a change of it is told first to
the router, so that a server that has failed is out of routing before anything else is done, then
to those who watch, start and recover.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from enum import Enum
from random import Random
from typing import Any

from tasks.record.events import Emit
from tasks.record.states import GroupState
from tasks.rollout.clock import ended, now_s
from tasks.rollout.health import Health
from tasks.rollout.probing import Death, FleetParts, Prober, Rebind, ServerHost, StartFailed
from tasks.rollout.recovery import Recovery
from tasks.rollout.registry import FleetView, GroupView, Registry
from tasks.rollout.router import Entrypoint, Router
from tasks.rollout.topology import Ask, FleetSettings, TopologyPlan
from tasks.spec.errors import IllegalTransition, MusterError
from tasks.spec.words import commas

_log = logging.getLogger(__name__)

#: A group that fails so often before the fleet has served at all will not come up.
_FIRST_STARTS = 3
_STOPPED = "the fleet is stopped"
_DRAIN_POLL_S = 0.02
#: Groups whose causes are told where the fleet cannot go on.
_CAUSES = 8


class FleetFailed(MusterError):
    """The fleet does not come up; the message is the reason. Stop it, then mend that."""


class FleetPhase(Enum):
    """Of a fleet as a whole, from its first start to its last stop."""

    NEW = "new"
    #: From a start until each group serves, or is retired.
    STARTING = "starting"
    RUNNING = "running"
    #: Nothing is routed or judged any more.
    STOPPING = "stopping"
    #: May be started again.
    STOPPED = "stopped"


class Fleet:
    """The servers of one run, from `start` to `stop`; both may come again after that.

    The trainer's orders, `barrier`, `restore`, `weights` and `drain`, are obeyed one after the
    other.
    """

    def __init__(
        self,
        plan: TopologyPlan,
        *,
        settings: FleetSettings,
        host: ServerHost,
        prober: Prober,
        emit: Emit,
        random: Random | None = None,
        rebind: Rebind | None = None,
    ) -> None:
        """Made in the loop in which it lives; it takes over `host.on_death`.

        Args:
            emit: takes an event's name and its fields; what it raises is logged.
            rebind: the servers of a group at new addresses; None: it has those it has.
        """
        self.registry = Registry(plan)
        self.router = Router(limit=settings.concurrency)
        #: Resolves with the reason once the run has to fail. The servers still run then.
        self.fatal: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        #: Of the gateway, for the snapshot.
        self.url = ""
        self._sink = emit
        self._phase = FleetPhase.NEW
        self._has_served = False
        self._up: asyncio.Future[None] | None = None
        self._starts: list[asyncio.Task[None]] = []
        self._failed_starts: Counter[int] = Counter()
        self._last_words: dict[int, str] = {}
        #: By rank, what the router has.
        self._entrypoints: dict[int, Entrypoint] = {}
        #: Held by the order that is carried out.
        self._order = asyncio.Lock()
        #: Between a barrier and its restore: nothing is started.
        self._is_held = False
        self._is_draining = False

        self._parts = FleetParts(
            states=self.registry,
            settings=settings,
            questions=plan.questions,
            host=host,
            prober=prober,
            emit=self._emit,
            random=random or Random(),
        )
        self._health = Health(self._parts)
        #: What requests tell, for the gateway.
        self.note_failure = self._health.note_failure
        self.note_tokens = self._health.note_tokens
        self._recovery = Recovery(self._parts, self._health, rebind=rebind)
        self.registry.listen(
            # First: what has failed gets no more requests, whatever the others do about it.
            self._route,
            self._health.on_change,
            self._recovery.starter.on_change,
            self._recovery.on_change,
            self._judge,
        )
        host.on_death = self._on_death

    async def start(self) -> None:
        """Start all groups; returns once each serves, or was retired and is not needed.

        One that fails is recovered like any other. A cancel leaves what runs to `stop`.

        Raises: FleetFailed, once the run has to fail, or when it is stopped before it serves.
        """
        if self._phase not in (FleetPhase.NEW, FleetPhase.STOPPED):
            raise IllegalTransition(f"a fleet that is {self._phase.value} cannot be started")
        self._phase = FleetPhase.STARTING
        self._has_served = False
        self._failed_starts.clear()
        if self.fatal.done():
            self.fatal = asyncio.get_running_loop().create_future()
        self._up = asyncio.get_running_loop().create_future()
        async with self._order:
            self._is_held = False
            self._resume()
            self._recovery.open()
            groups = [
                group for group in self.registry.view.groups if group.state != GroupState.RETIRED
            ]
            self._starts = [
                asyncio.create_task(self._start_first(group), name=f"rollout-start-{group.index}")
                for group in groups
            ]
            either: set[asyncio.Future[Any]] = {self._up, self.fatal}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self.fatal.done():
            raise FleetFailed(self.fatal.result())
        if self._phase is not FleetPhase.STARTING:
            raise FleetFailed(_STOPPED)
        # What they started is up, or somebody else's matter: they end at once.
        await asyncio.wait(self._starts)
        self._phase = FleetPhase.RUNNING
        self._has_served = True

    async def stop(self) -> str:
        """End everything, within the grace period and a bound, also in the midst of a recovery.

        Returns: what could not be ended; empty when nothing is left. Stop it again then.
        """
        self._phase = FleetPhase.STOPPING
        self.router.set((), why_none=_STOPPED)
        if self._up is not None and not self._up.done():
            self._up.set_result(None)
        await self._recovery.stop()
        for task in self._starts:
            task.cancel()
        await ended(self._starts)
        await self._health.stop()
        for group in self.registry.view.groups:
            self.registry.fail(group.ranks[0], group.epoch, _STOPPED)
        ranks = [rank for group in self.registry.view.groups for rank in group.ranks]
        left = await self._recovery.starter.stop(ranks)
        self._phase = FleetPhase.STOPPED
        return left

    async def barrier(self) -> dict[str, Any]:
        """Before a training step: ask every running server once, one bad answer is enough.

        What failed is shut down when this returns, in time. Nothing is started, and nobody is
        asked, from now until `restore`: the trainer may have the GPUs.
        """
        async with self._order:
            self._is_held = True
            await self._recovery.hold()
            self._health.rest()
            running = {group.index for group in self.registry.view.groups if group.is_running}
            await self._health.sweep()
            await self._recovery.down()
            view = self.registry.view
            answer = {
                "epoch": view.epoch,
                "failed": [
                    _named(one)
                    for one in view.groups
                    if one.index in running and not one.is_running
                ],
                "active": [slot.rank for slot in view.entrypoints],
                "inactive": [list(one.ranks) for one in view.groups if not one.is_running],
                "unreachable": [list(one.ranks) for one in view.groups if one.unreachable],
            }
        self._emit("rollout.barrier", **answer)
        return answer

    async def restore(self) -> dict[str, Any]:
        """Before weights are synced: start what is inactive, and wait for it to come up or fail.

        What does not come up is tried again beside everything else. Periodic questions begin
        again, the first a whole interval later.
        """
        async with self._order:
            self._resume()
            groups = self.registry.view.groups
            down = {one.index for one in groups if not one.is_running}
            try:
                await asyncio.gather(*(tried.wait() for tried in self._recovery.release()))
            finally:
                self._health.resume()
                self._is_held = False
            view = self.registry.view
            answer = {
                "epoch": view.epoch,
                "restored": [
                    list(view.groups[one].ranks) for one in down if view.groups[one].is_running
                ],
                "failed": [_named(one) for one in view.groups if not one.is_running],
                "stale": [list(one.ranks) for one in view.groups if one.state is GroupState.STALE],
                "metadata": self.registry.training_metadata().as_json(),
            }
        self._emit("rollout.restore", **{k: v for k, v in answer.items() if k != "metadata"})
        # The stale ones serve once the weights are there, which come next.
        self._check(is_guarded=not answer["stale"])
        return answer

    def weights(
        self,
        version: int,
        ranks: Collection[int] | None = None,
        epochs: Mapping[int, int] | None = None,
    ) -> dict[str, Any]:
        """The caller has synced these weights: see `Registry.weights_synced`. Ends a drain.

        Raises: KeyError, for ranks that have none.
        """
        self.registry.weights_synced(version, ranks=ranks, epochs=epochs)
        self._resume()
        groups = self.registry.view.groups
        answer = {
            "version": version,
            "active": [list(one.ranks) for one in groups if one.is_serving],
            "stale": [list(one.ranks) for one in groups if one.state is GroupState.STALE],
        }
        self._emit("rollout.weights", **answer)
        return answer

    async def drain(self, timeout_s: float) -> dict[str, Any]:
        """Send no new requests; returns once none is outstanding, or it is too late.

        It lasts until `restore` or `weights`.
        """
        self._is_draining = True
        self.router.pause("the fleet drains: new requests are taken after the sync of the weights")
        until_s = now_s() + timeout_s
        while self.router.outstanding and now_s() < until_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        outstanding = self.router.outstanding
        return {"drained": not outstanding, "outstanding": outstanding}

    async def broadcast(self, ask: Ask, timeout_s: float) -> dict[int, dict[str, Any]]:
        """The same request, with its body, to every entrypoint that serves, side by side.

        Returns: `{rank: {"status", "body"}}`, the status None where no answer came.
        """
        slots = self.registry.view.entrypoints
        replies = await asyncio.gather(
            *(self._parts.prober.call(slot.url or "", ask, timeout_s) for slot in slots)
        )
        return {
            slot.rank: {"status": reply.status, "body": reply.body}
            for slot, reply in zip(slots, replies, strict=True)
        }

    def snapshot(self) -> dict[str, Any]:
        """The answer of `GET /muster/rollout`: the fleet at one moment, in plain data."""
        view = self.registry.view
        servers = []
        for slot in view.servers.values():
            group = view.groups[slot.engine]
            servers.append(
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
            )
        return {
            "epoch": view.epoch,
            "version": view.version,
            "ready": view.is_ready,
            "state": self.state,
            "reason": view.why_none,
            "url": self.url,
            "concurrency": self.router.concurrency,
            "servers": servers,
            "groups": [
                {
                    "ranks": list(group.ranks),
                    "state": group.state.value,
                    "epoch": group.epoch,
                    "version": group.version,
                    "cause": group.cause,
                    "recoveries": group.recoveries,
                }
                for group in view.groups
            ],
            "training": self.registry.training_metadata().as_json(),
        }

    @property
    def state(self) -> str:
        """starting | serving | down | draining | stopping"""
        if self._phase in (FleetPhase.STOPPING, FleetPhase.STOPPED):
            return "stopping"
        if self._phase is not FleetPhase.RUNNING:
            return "starting"
        if self._is_draining:
            return "draining"
        return "serving" if self.registry.view.entrypoints else "down"

    def _resume(self) -> None:
        self._is_draining = False
        self.router.resume()

    async def _start_first(self, group: GroupView) -> None:
        try:
            if group.state is GroupState.INACTIVE:
                self.registry.claim(group.index)
            await self._recovery.starter.start(group.index)
        except StartFailed as error:
            # The recovery has it.
            _log.warning("group %d: %s", group.index, error)

    def _on_death(self, death: Death) -> None:
        if not self.registry.is_current(death.rank, death.epoch):
            return
        self._last_words[death.rank] = death.last_words
        if death.is_port_conflict:
            self._recovery.port_lost(self.registry.group_of(death.rank))
        self.registry.fail(death.rank, death.epoch, f"rank {death.rank} died: {death.why}")
        self._emit("rollout.server.died", rank=death.rank, epoch=death.epoch, why=death.why)

    def _route(self, before: GroupView, after: GroupView) -> None:
        view = self.registry.view
        for rank in after.ranks:
            slot = view.servers[rank]
            self._entrypoints.pop(rank, None)
            if slot.is_entrypoint and view.groups[after.index].routes(rank):
                self._entrypoints[rank] = Entrypoint(
                    rank=rank,
                    epoch=after.epoch,
                    url=slot.url or "",
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
        """After each change, whether the fleet is up, or the run has to fail."""
        if self._phase is FleetPhase.STOPPING or before.state is after.state:
            return
        groups = self.registry.view.groups
        if self._up is not None and not self._up.done() and all(map(_is_settled, groups)):
            self._up.set_result(None)
        if after.state in (GroupState.INACTIVE, GroupState.RETIRED):
            self._check(is_guarded=before.is_running)
            self._count_start(before, after)

    def _count_start(self, before: GroupView, after: GroupView) -> None:
        was_starting = before.state in (GroupState.STARTING, GroupState.RECOVERING)
        if self._has_served or after.state is not GroupState.INACTIVE:
            return
        if not was_starting:
            # It has served meanwhile.
            del self._failed_starts[after.index]
            return
        self._failed_starts[after.index] += 1
        if self._failed_starts[after.index] >= _FIRST_STARTS:
            what = f"ranks {commas(after.ranks)} failed to start {_FIRST_STARTS} times"
            self._fail_run(f"{what}: {after.cause}{self._words_of(after)}")

    def _check(self, *, is_guarded: bool) -> None:
        """Fail the run where the fleet cannot go on.

        Args:
            is_guarded: it is the time for its groups to serve.
        """
        view, min_active = self.registry.view, self._parts.settings.min_active or 0
        # Not before the first of them serves, nor while a training step has their GPUs.
        is_guarded = is_guarded and self._has_served and not self._is_held
        left = [group for group in view.groups if group.state is not GroupState.RETIRED]
        total, serving, needed = len(view.groups), len(view.serving), max(1, min_active)
        if len(left) < needed:
            reason = f"{len(left)} of {total} engines are left, {needed} are needed"
        elif is_guarded and serving < min_active:
            reason = f"{serving} of {total} engines serve, min_active is {min_active}"
        else:
            return
        words = next(filter(None, map(self._words_of, view.groups)), "")
        self._fail_run(f"{reason}: {_causes(view)}{words}")

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

    def _emit(self, event: str, **fields: Any) -> None:
        try:
            self._sink(event, **fields)
        except Exception:
            _log.exception("the event %s %s is lost", event, fields)


def _is_settled(group: GroupView) -> bool:
    return group.is_serving or group.state in (GroupState.STALE, GroupState.RETIRED)


def _named(group: GroupView) -> dict[str, Any]:
    return {"group": group.index, "ranks": list(group.ranks), "cause": group.cause}


def _causes(view: FleetView) -> str:
    named = [f"ranks {commas(one.ranks)}: {one.cause}" for one in view.groups if one.cause]
    more = f"; and {len(named) - _CAUSES} more" if len(named) > _CAUSES else ""
    return "; ".join(named[:_CAUSES]) + more
