"""What a trainer tells the fleet about its turns: before a step, before and after a sync."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tasks.record.states import GroupState
from tasks.rollout.clock import Clock, Emit
from tasks.rollout.health import Health
from tasks.rollout.recovery import Recovery
from tasks.rollout.registry import Registry
from tasks.rollout.router import Router
from tasks.rollout.snapshot import as_json
from tasks.rollout.views import GroupView

_DRAIN_POLL_S = 0.02


class Control:
    """The orders of the trainer, one after the other."""

    def __init__(
        self,
        registry: Registry,
        router: Router,
        *,
        health: Health,
        recovery: Recovery,
        emit: Emit,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._router = router
        self._health = health
        self._recovery = recovery
        self._emit = emit
        self._clock = clock
        self._lock = asyncio.Lock()
        #: Between a barrier and its restore: nothing is started.
        self.is_held = False
        self.is_draining = False

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """For the start of the fleet: as before any order, and none is obeyed meanwhile."""
        async with self._lock:
            self.is_held = False
            self._resume()
            yield

    async def barrier(self) -> dict[str, Any]:
        """Before a training step: ask every running server once, one bad answer is enough.

        What failed is shut down when this returns, in time. Nothing is started, and nobody is
        asked, from now until `restore`: the trainer may have the GPUs.
        """
        async with self._lock:
            self.is_held = True
            await self._recovery.hold()
            self._health.rest()
            running = {group.index for group in self._registry.view.groups if group.is_running}
            await self._health.sweep()
            await self._recovery.down()
            view = self._registry.view
            answer = {
                "epoch": view.epoch,
                "failed": [_named(one) for one in view.groups if _has_left(one, running)],
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
        async with self._lock:
            self._resume()
            groups = self._registry.view.groups
            down = {one.index for one in groups if not one.is_running}
            try:
                await asyncio.gather(*(tried.wait() for tried in self._recovery.release()))
            finally:
                self._health.resume()
                self.is_held = False
            view = self._registry.view
            answer = {
                "epoch": view.epoch,
                "restored": [
                    list(view.groups[one].ranks) for one in down if view.groups[one].is_running
                ],
                "failed": [_named(one) for one in view.groups if not one.is_running],
                "stale": [list(one.ranks) for one in view.groups if one.state is GroupState.STALE],
                "metadata": as_json(self._registry.training_metadata()),
            }
        self._emit("rollout.restore", **{k: v for k, v in answer.items() if k != "metadata"})
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
        self._registry.weights_synced(version, ranks=ranks, epochs=epochs)
        self._resume()
        groups = self._registry.view.groups
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
        self.is_draining = True
        self._router.pause("the fleet drains: new requests are taken after the sync of the weights")
        until_s = self._clock.monotonic_s() + timeout_s
        while self._router.outstanding and self._clock.monotonic_s() < until_s:
            await self._clock.sleep(_DRAIN_POLL_S)
        outstanding = self._router.outstanding
        return {"drained": not outstanding, "outstanding": outstanding}

    def _resume(self) -> None:
        self.is_draining = False
        self._router.resume()


def _has_left(group: GroupView, running: Collection[int]) -> bool:
    return group.index in running and not group.is_running


def _named(group: GroupView) -> dict[str, Any]:
    return {"group": group.index, "ranks": list(group.ranks), "cause": group.cause}
