"""New weights for a whole fleet, as one transaction: begun, sent, and committed or given up.

From its begin to its end the routing is closed for generation, health rests, and no start begins.
What an engine was sent counts only once a commit names its incarnation. So an engine that took a
part of it and no commit is stale, and one that did not do what it was sent is started again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tasks.processes.shortage import Unasked
from tasks.record.states import GroupState
from tasks.rollout.backends import Ask
from tasks.rollout.clock import now_s
from tasks.rollout.health import Health
from tasks.rollout.probing import FleetParts, FleetRefused, Reply
from tasks.rollout.recovery import Recovery
from tasks.rollout.router import Router
from tasks.rollout.topology import ServerSlot
from tasks.spec.errors import MusterError
from tasks.spec.placeholders import substitute


class InFlight(Enum):
    """What becomes of the requests that are under way when a sync begins."""

    #: They are waited for.
    WAIT = "wait"
    #: They end. What was not answered yet is tried again after the sync.
    ABORT = "abort"
    #: They stand still, and go on after the sync; not every backend can.
    INTERRUPT = "interrupt"


class NoSuchSync(MusterError):
    """No sync of this name is open; the message says how it ended, where that is known."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Target:
    """One incarnation of an engine that is to get the weights."""

    engine: int
    epoch: int
    #: Something was sent to it that may have changed its weights.
    is_touched: bool = False
    #: By request, why this machine could not send it.
    unsent: dict[tuple[str, str, str], str] = field(default_factory=dict)
    #: By request, what it did not do, last.
    faults: dict[tuple[str, str, str], str] = field(default_factory=dict)

    @property
    def fault(self) -> str:
        """The first that is left; empty: none."""
        return next(iter(self.faults.values()), "")

    @property
    def why_without_weights(self) -> str:
        """Why the engine lacks a part of the weights; empty if it has all that was sent."""
        return self.fault or next(iter(self.unsent.values()), "")


@dataclass(slots=True, kw_only=True, eq=False)
class _Open:
    """The sync that is open."""

    id: str
    began_s: float
    until_s: float
    targets: list[_Target] = field(default_factory=list)
    #: Its targets were told to stand still.
    is_paused: bool = False
    #: Broadcasts that are under way.
    sending: set[asyncio.Future[Any]] = field(default_factory=set)
    #: It is being ended, by whoever said so first.
    is_ending: bool = False


class WeightSyncs:
    """The syncs of one fleet, of which one at a time is open."""

    def __init__(
        self,
        fleet: FleetParts,
        *,
        router: Router,
        health: Health,
        recovery: Recovery,
        on_end: Callable[[], None],
    ) -> None:
        #: Told once a sync has ended, whichever way.
        self._on_end = on_end
        self._fleet = fleet
        self._router = router
        self._health = health
        self._recovery = recovery
        self._open: _Open | None = None
        #: How the last one ended, by its id.
        self._last: tuple[str, str] = ("", "")
        self._deadline: asyncio.Task[None] | None = None

    @property
    def id(self) -> str | None:
        """Of the sync that is open; None: none is."""
        return None if self._open is None else self._open.id

    async def begin(self, timeout_s: float, in_flight: InFlight) -> dict[str, Any]:
        """Close the routing, and see to what is under way.

        Args:
            timeout_s: until the whole sync is given up, unless it has ended.

        Returns: its id, and what is to get the weights, stale engines among them.

        Raises: FleetRefused, also where requests are still under way when the time is over.
        """
        if self._open is not None:
            left_s = self._open.until_s - now_s()
            found = f"the sync {self._open.id} is open, for {left_s:.0f} s at most"
            raise FleetRefused(f"{found}: commit it, or DELETE it")
        pause = self._fleet.questions.pause if in_flight is InFlight.INTERRUPT else None
        if in_flight is InFlight.INTERRUPT and pause is None:
            raise FleetRefused("this backend can't interrupt requests: say wait, or abort")
        began_s = now_s()
        sync = self._open = _Open(
            id=secrets.token_hex(8), began_s=began_s, until_s=began_s + timeout_s
        )
        self._recovery.hold()
        self._router.close()
        if in_flight is InFlight.ABORT:
            self._router.abort()
        try:
            if in_flight is not InFlight.INTERRUPT:
                # Health goes on meanwhile: what hangs is found, and its requests end.
                async with asyncio.timeout(timeout_s):
                    await self._router.idle()
            if sync.is_ending:
                raise NoSuchSync(self._ended(sync.id))
            await self._health.rest()
            targets = self._fleet.states.view.targets
            sync.targets = [_Target(engine=one.index, epoch=one.epoch) for one in targets]
            if pause is not None:
                sync.is_paused = True
                unsent = await asyncio.gather(*(self._tell(one, pause) for one in sync.targets))
                if any(unsent):
                    raise FleetRefused(f"{next(filter(None, unsent))}: begin it again")
        except TimeoutError:
            outstanding = self._router.outstanding
            await self._end(sync, "given up: requests were under way for too long")
            found = f"{outstanding} requests were still under way after {timeout_s:g} s"
            raise FleetRefused(f"{found}: give it more time, or say in_flight: abort") from None
        except BaseException:
            await self._end(sync, "given up: it could not begin")
            raise
        self._deadline = asyncio.create_task(self._expire(sync), name=f"rollout-sync-{sync.id}")
        self._fleet.emit(
            "rollout.sync.begun",
            sync=sync.id,
            engines=[target.engine for target in sync.targets],
            in_flight=in_flight.value,
            waited_s=round(now_s() - began_s, 3),
        )
        shown = [
            {
                "engine": group.index,
                "epoch": group.epoch,
                "state": group.state.value,
                "version": group.version,
                "ranks": [rank for slot in slots for rank in slot.weight_ranks],
                "urls": [slot.url for slot in slots],
            }
            for group in targets
            for slots in (self._fleet.states.view.updated(group),)
        ]
        return {"sync": sync.id, "targets": shown}

    async def broadcast(self, id: str, ask: Ask, timeout_s: float) -> dict[str, Any]:
        """The same request to every target, side by side, with what is each engine's own filled in.

        `${engine.index}`, `${engine.world_size}`, the ranks that are updated through the server,
        and `${engine.rank_offset}`, the first of them in a process group in which the trainer is
        rank 0 and the targets follow, one after the other.

        Returns: `{answers: [{engine, epoch, rank, status, body}]}`, the status None where no answer
            came in time.

        Raises: NoSuchSync.
        """
        sync = self._named(id)
        view = self._fleet.states.view
        alive = [one for one in sync.targets if view.groups[one.engine].is_current(one.epoch)]
        calls, offset = [], 1
        for target in alive:
            for slot in view.updated(view.groups[target.engine]):
                calls.append((target, slot, _filled(ask, slot, offset)))
                offset += len(slot.weight_ranks)
        timeout_s = min(timeout_s, sync.until_s - now_s())
        sending = asyncio.gather(*(self._send(*call, timeout_s=timeout_s) for call in calls))
        sync.sending.add(sending)
        try:
            answers = await sending
        except asyncio.CancelledError:
            if not sync.is_ending:
                raise
        finally:
            sync.sending.discard(sending)
        if sync.is_ending:
            raise NoSuchSync(self._ended(id))
        lost = [
            {"engine": one.engine, "epoch": one.epoch, "rank": None, "status": None, "body": _GONE}
            for one in sync.targets
            if one not in alive
        ]
        return {"answers": [*answers, *lost]}

    async def commit(
        self, id: str, version: int, epochs: Mapping[int, int], *, force: bool = False
    ) -> dict[str, Any]:
        """These engines serve these weights from now on; the others are stale.

        Args:
            epochs: by engine, which incarnation has them.

        Raises: NoSuchSync. FleetRefused, while a broadcast goes on; IllegalTransition, where the
            version goes back; the sync stays open. KeyError, for an engine that there is not.
        """
        sync = self._named(id)
        if sync.sending:
            raise FleetRefused("a broadcast is under way: commit what all have answered to")
        states = self._fleet.states
        for engine in epochs:
            states.group(engine)
        faults = [
            {"engine": one.engine, "why": one.why_without_weights}
            for one in sync.targets
            if one.why_without_weights
        ]
        having = {
            one.engine: one.epoch
            for one in sync.targets
            if epochs.get(one.engine) == one.epoch and not one.why_without_weights
        }
        states.commit(version, having, force=force)
        await self._end(sync, f"committed, version {version}", is_committed=True)
        return {**self._served(), "failed": faults}

    async def give_up(self, id: str) -> dict[str, Any]:
        """End it without new weights: what was touched is stale. Raises: NoSuchSync."""
        await self._end(self._named(id), "given up by its trainer")
        return self._served()

    async def stop(self) -> None:
        """The fleet ends: nobody waits for a sync any more."""
        if self._open is not None and not self._open.is_ending:
            await self._end(self._open, "given up: the fleet is stopped", is_over=True)

    def _served(self) -> dict[str, Any]:
        view = self._fleet.states.view
        return {
            "version": view.version,
            "serving": [one.index for one in view.serving],
            "stale": [one.index for one in view.groups if one.state is GroupState.STALE],
        }

    def _named(self, id: str) -> _Open:
        if self._open is None or self._open.id != id or self._open.is_ending:
            raise NoSuchSync(self._ended(id))
        return self._open

    def _ended(self, id: str) -> str:
        last, how = self._last
        return f"the sync {id} is over: {how}" if id == last else f"no sync {id} is open"

    async def _expire(self, sync: _Open) -> None:
        await asyncio.sleep(sync.until_s - now_s())
        if not sync.is_ending:
            lasted_s = sync.until_s - sync.began_s
            await self._end(sync, f"given up: it had not ended after {lasted_s:g} s (timeout_s)")

    async def _end(
        self, sync: _Open, how: str, *, is_committed: bool = False, is_over: bool = False
    ) -> None:
        """Whatever is raised, the fleet goes on afterwards."""
        if self._open is not sync:
            return
        sync.is_ending = True
        self._last = (sync.id, how)
        for sending in sync.sending:
            sending.cancel()
        if self._deadline is not None and self._deadline is not asyncio.current_task():
            self._deadline.cancel()
        self._deadline = None
        states = self._fleet.states
        try:
            for target in sync.targets:
                if target.fault:
                    self._fail(target, target.fault)
                elif target.is_touched and not is_committed:
                    why = f"it may have a part of new weights: the sync was {how}"
                    states.spoil(target.engine, target.epoch, why)
            resume = self._fleet.questions.resume
            if sync.is_paused and resume is not None and not is_over:
                unsent = await asyncio.gather(*(self._tell(one, resume) for one in sync.targets))
                for target, why in zip(sync.targets, unsent, strict=True):
                    if why:
                        # Its requests would stand still for ever.
                        self._fail(target, why)
        finally:
            self._open = None
            self._health.resume()
            self._recovery.release()
            self._router.open()
            self._fleet.emit(
                "rollout.sync.ended",
                sync=sync.id,
                outcome="committed" if is_committed else "given_up",
                message=how,
                version=states.view.version,
                serving=[one.index for one in states.view.serving],
                took_s=round(now_s() - sync.began_s, 3),
            )
            self._on_end()

    async def _send(
        self, target: _Target, slot: ServerSlot, ask: Ask, *, timeout_s: float
    ) -> dict[str, Any]:
        was_touched = target.is_touched
        target.is_touched = was_touched or ask.method not in _HARMLESS
        reply = await self._fleet.prober.call(slot.url or "", ask, timeout_s)
        what = (ask.method, ask.path, slot.url or "")
        target.unsent.pop(what, None)
        if isinstance(reply.body, Unasked):
            # The engine works on, without the weights.
            target.is_touched = was_touched
            target.unsent[what] = f"{ask.method} {ask.path}: {reply.body}"
        elif reply.status is None:
            # It may hang for ever in the midst of it: nobody may wait for it again.
            self._fail(target, f"{ask.method} {ask.path}: {reply.body}")
        elif _is_done(reply):
            target.faults.pop(what, None)
        else:
            said = " ".join(reply.body.split())[:_SHOWN_CHARACTERS]
            target.faults[what] = f"{ask.method} {ask.path}: {reply.status} {said}"
        return {
            "engine": target.engine,
            "epoch": target.epoch,
            "rank": slot.rank,
            "status": reply.status,
            "body": reply.body,
        }

    async def _tell(self, target: _Target, ask: Ask) -> str:
        """Pause or resume an engine. One that does not do it is started again.

        Returns: why this machine could not ask it; empty if it was asked.
        """
        view = self._fleet.states.view
        group = view.groups[target.engine]
        for slot in view.updated(group) if group.is_current(target.epoch) else ():
            timeout_s = self._fleet.settings.health.timeout_s
            reply = await self._fleet.prober.call(slot.url or "", ask, timeout_s)
            if isinstance(reply.body, Unasked):
                return f"{ask.method} {ask.path}: {reply.body}"
            if not _is_done(reply):
                self._fail(target, f"{ask.method} {ask.path}: {reply.status or ''} {reply.body}")
        return ""

    def _fail(self, target: _Target, why: str) -> None:
        rank = self._fleet.states.view.groups[target.engine].ranks[0]
        self._fleet.states.fail(rank, target.epoch, f"rank {rank}, in a sync of weights: {why}")


_GONE = "its servers have ended since the sync began"
#: Of an answer's text.
_SHOWN_CHARACTERS = 300
#: Methods that change no weights.
_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})


def _is_done(reply: Reply) -> bool:
    return reply.status is not None and 200 <= reply.status < 300


def _filled(ask: Ask, slot: ServerSlot, offset: int) -> Ask:
    """Raises: KeyError, for an `${engine.x}` that there is not."""
    values = {
        "engine.index": slot.engine,
        "engine.rank_offset": offset,
        "engine.world_size": len(slot.weight_ranks),
    }

    def value_of(name: str) -> str:
        if name not in values:
            known = ", ".join(f"${{{one}}}" for one in values)
            raise KeyError(f"unknown name `${{{name}}}`: known are {known}")
        return str(values[name])

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            if value[:2] == "${" and value[2:-1] in values:
                # By itself it is the number that an engine asks for.
                return values[value[2:-1]]
            return substitute(value, value_of, is_left=lambda name: name[:7] != "engine.")
        if isinstance(value, Mapping):
            return {key: fill(one) for key, one in value.items()}
        return [fill(one) for one in value] if isinstance(value, list | tuple) else value

    return Ask(method=ask.method, path=str(fill(ask.path)), body=fill(ask.body))
