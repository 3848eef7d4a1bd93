"""Weight syncs: transactions that bring new weights from the trainer to a whole fleet.

A sync begins, sends requests of the trainer to the engines, and ends with or without a commit.
While a sync is open, no server receives requests that generate tokens, the health checks pause, and
no engine is started.

An engine serves its new weights only after a commit that names the engine and its epoch. The epoch
counts the starts of the engine. An engine that received requests of the trainer and is not named in
the commit becomes stale: it serves no requests. Muster restarts an engine if one of its servers
fails to carry out a request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tasks.processes.shortage import NotChecked
from tasks.record.states import GroupState
from tasks.rollout.backends import Ask
from tasks.rollout.clock import now_s
from tasks.rollout.health import Health
from tasks.rollout.probing import FleetParts, FleetRefused, Reply
from tasks.rollout.recovery import Recovery
from tasks.rollout.registry import GroupView
from tasks.rollout.router import Router
from tasks.rollout.topology import ServerSlot
from tasks.spec.errors import MusterError
from tasks.spec.placeholders import substitute

#: Text that replaces the response of an engine whose servers have ended during the weight sync.
_SERVERS_ENDED = "the servers of the engine ended during the weight sync"
#: Number of characters of a server's response that a failure message quotes.
_QUOTED_CHARACTERS = 300
#: HTTP methods that cannot change the weights of a server.
_READ_ONLY_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class InFlight(Enum):
    """Treatment of the rollout requests that are running when a weight sync begins."""

    #: The weight sync waits until the servers have answered all requests.
    WAIT = "wait"
    #: The weight sync ends all requests. A request whose answer has not begun is retried after the
    #: sync.
    ABORT = "abort"
    #: The servers pause the requests and continue them after the weight sync. Some backends do not
    #: support this.
    INTERRUPT = "interrupt"


class NoSuchSync(MusterError):
    """No weight sync with this id is open. The message says how the sync has ended, if known."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Target:
    """An engine that should receive the new weights of a weight sync.

    If the engine is restarted during the sync, the engine gets no further requests of the sync.
    """

    #: Index of the engine in the fleet.
    engine: int
    #: Epoch of the engine at the begin of the weight sync. The epoch counts the engine's starts.
    epoch: int
    #: True if a request that may change the weights was sent to the engine.
    is_touched: bool = False
    #: Mapping from `(method, path, server URL)` of a request to the reason why this machine could
    #: not send the request.
    unsent: dict[tuple[str, str, str], str] = field(default_factory=dict)
    #: Mapping from `(method, path, server URL)` of a failed request to a description of the
    #: failure. If the same request succeeds later, the entry is removed.
    faults: dict[tuple[str, str, str], str] = field(default_factory=dict)

    @property
    def fault(self) -> str:
        """First entry of `faults`, or an empty string if `faults` has no entries."""
        return next(iter(self.faults.values()), "")

    @property
    def why_without_weights(self) -> str:
        """Reason why the engine lacks the new weights: the description of a failed request.

        Empty if all requests of the weight sync to the engine's servers succeeded.
        """
        return self.fault or next(iter(self.unsent.values()), "")


@dataclass(slots=True, kw_only=True, eq=False)
class _OpenSync:
    """State of the weight sync that the trainer has begun and not ended yet."""

    #: Random hexadecimal id that the trainer uses in its requests.
    id: str
    #: Time at which the weight sync began, in seconds of the event loop's clock.
    began_s: float
    #: Time at which the weight sync expires, in seconds of the event loop's clock.
    until_s: float
    #: The engines that should receive the new weights.
    targets: list[_Target] = field(default_factory=list)
    #: True if the servers of the target engines were asked to pause their requests.
    is_paused: bool = False
    #: Futures of running broadcasts. A broadcast sends one request to all target engines, and waits
    #: for the answers.
    sending: set[asyncio.Future[Any]] = field(default_factory=set)
    #: True if the weight sync is ending or has ended, for example after a commit, a cancellation or
    #: the time limit.
    is_ending: bool = False


class WeightSyncs:
    """Begins and ends the weight syncs of one fleet. At most one sync is open at a time."""

    def __init__(
        self,
        fleet: FleetParts,
        *,
        router: Router,
        health: Health,
        recovery: Recovery,
        on_end: Callable[[], None],
    ) -> None:
        """
        Args:
            fleet: The parts of the fleet that the weight syncs work with.
            router: Router of the fleet's rollout requests. While a sync is open, requests that
                generate tokens wait in the router.
            health: Health checks of the fleet. They pause while a sync is open.
            recovery: Recovery of the fleet. It starts no engine while a sync is open.
            on_end: Function that is called after each sync, committed or not.
        """
        self._on_end = on_end
        self._fleet = fleet
        self._router = router
        self._health = health
        self._recovery = recovery
        self._open: _OpenSync | None = None
        #: Id of the last weight sync that ended, and a description of how it ended.
        self._last: tuple[str, str] = ("", "")
        #: Task that ends the open weight sync when the sync's time limit has passed.
        self._deadline: asyncio.Task[None] | None = None

    @property
    def id(self) -> str | None:
        """Id of the open weight sync, or None if no sync is open."""
        return None if self._open is None else self._open.id

    async def begin(self, timeout_s: float, in_flight: InFlight) -> dict[str, Any]:
        """Begin a weight sync.

        Until the sync ends, new requests that generate tokens have to wait. Depending on
        `in_flight`, the call waits for the end of the running requests, cancels them, or pauses
        them.

        Args:
            timeout_s: Time limit of the whole sync in seconds. A sync that is still open after this
                time ends without a commit.
            in_flight: Treatment of the requests that the servers are still answering.

        Returns:
            `{"sync": id, "targets": [...]}`. The targets are all engines that can receive weights,
            including stale engines.

        Raises:
            FleetRefused: Another sync is open, requests could not be paused, or requests were still
                outstanding after `timeout_s`.
            NoSuchSync: Another call has ended the sync during the wait for outstanding requests.
        """
        if self._open is not None:
            left_s = self._open.until_s - now_s()
            raise FleetRefused(
                f"another weight sync ({self._open.id}) is still open, for at most {left_s:.0f} s. "
                "First commit that sync, or end it with DELETE "
                f"/muster/rollout/sync/{self._open.id}"
            )
        pause = self._fleet.questions.pause if in_flight is InFlight.INTERRUPT else None
        if in_flight is InFlight.INTERRUPT and pause is None:
            raise FleetRefused(
                "this backend can't interrupt requests. Set in_flight to wait or abort"
            )

        began_s = now_s()
        sync = _OpenSync(id=secrets.token_hex(8), began_s=began_s, until_s=began_s + timeout_s)
        self._open = sync
        self._recovery.hold()
        self._router.close()
        if in_flight is InFlight.ABORT:
            self._router.abort()

        try:
            if in_flight is not InFlight.INTERRUPT:
                # The health checks continue while `idle` waits for the end of the running requests.
                # If a health check finds a hanging server, the requests to that server are
                # cancelled, so that the wait can end.
                async with asyncio.timeout(timeout_s):
                    await self._router.idle()
            if sync.is_ending:
                raise NoSuchSync(self._describe_end(sync.id))
            await self._health.rest()
            target_groups = self._fleet.states.view.targets
            sync.targets = [
                _Target(engine=group.index, epoch=group.epoch) for group in target_groups
            ]
            if pause is not None:
                await self._pause_targets(sync, pause)
        except TimeoutError:
            outstanding = self._router.outstanding
            await self._end(
                sync, "ended without a commit, because the running requests did not end in time"
            )
            problem = f"{outstanding} requests were still running after {timeout_s:g} s"
            raise FleetRefused(
                f"{problem}. Set a longer timeout_s, or write `in_flight: abort` to abort such "
                "requests"
            ) from None
        except BaseException:
            await self._end(sync, "ended without a commit, because the sync could not begin")
            raise

        self._deadline = asyncio.create_task(self._expire(sync), name=f"rollout-sync-{sync.id}")
        self._fleet.emit(
            "rollout.sync.begun",
            sync=sync.id,
            engines=[target.engine for target in sync.targets],
            in_flight=in_flight.value,
            waited_s=round(now_s() - began_s, 3),
        )
        return {
            "sync": sync.id,
            "targets": [self._describe_group(group) for group in target_groups],
        }

    async def _pause_targets(self, sync: _OpenSync, pause: Ask) -> None:
        """Ask the servers of all target engines to pause their requests.

        Raises:
            FleetRefused: This machine could not send the request to a server.
        """
        sync.is_paused = True
        reasons = await asyncio.gather(
            *(self._pause_or_resume(target, pause) for target in sync.targets)
        )
        if any(reasons):
            raise FleetRefused(f"{next(filter(None, reasons))}: begin the sync again")

    def _describe_group(self, group: GroupView) -> dict[str, Any]:
        """Return a description, for the trainer, of an engine that can receive new weights."""
        slots = self._fleet.states.view.updated(group)
        return {
            "engine": group.index,
            "epoch": group.epoch,
            "state": group.state.value,
            "version": group.version,
            "ranks": [rank for slot in slots for rank in slot.weight_ranks],
            "urls": [slot.url for slot in slots],
        }

    async def broadcast(self, id: str, ask: Ask, timeout_s: float) -> dict[str, Any]:
        """Send one request to the servers of all target engines at once, and return the answers.

        Three placeholders in the request are replaced for each server:

        - `${engine.index}`: Index of the server's engine.
        - `${engine.world_size}`: Number of ranks whose weights are updated through the server.
        - `${engine.rank_offset}`: First rank of the server in the trainer's process group. The
          trainer has rank 0, and the ranks of all targets follow.

        Args:
            id: Id of the weight sync.
            ask: The request to send.
            timeout_s: Seconds to wait for answers, at most until the sync expires.

        Returns:
            `{"answers": [{engine, epoch, rank, status, body}]}`. If a server did not answer in
            time, its status is None.

        Raises:
            NoSuchSync: No sync with this id is open, or the sync ended during the broadcast.
            KeyError: The request has an unknown placeholder `${engine.NAME}`.
        """
        sync = self._find_open(id)
        view = self._fleet.states.view
        alive_targets = [
            target for target in sync.targets if view.groups[target.engine].is_current(target.epoch)
        ]

        calls: list[tuple[_Target, ServerSlot, Ask]] = []
        # Rank 0 of the trainer's process group is the trainer, so the first server has rank 1.
        rank_offset = 1
        for target in alive_targets:
            for slot in view.updated(view.groups[target.engine]):
                calls.append((target, slot, _fill_placeholders(ask, slot, rank_offset)))
                rank_offset += len(slot.weight_ranks)

        timeout_s = min(timeout_s, sync.until_s - now_s())
        sending = asyncio.gather(*(self._send(*call, timeout_s=timeout_s) for call in calls))
        sync.sending.add(sending)
        try:
            answers = await sending
        except asyncio.CancelledError:
            # If the weight sync is ending, only the broadcast was cancelled, and the caller gets an
            # error below. Otherwise, this task itself was cancelled.
            if not sync.is_ending:
                raise
        finally:
            sync.sending.discard(sending)
        if sync.is_ending:
            raise NoSuchSync(self._describe_end(id))

        answers_for_ended = [
            {
                "engine": target.engine,
                "epoch": target.epoch,
                "rank": None,
                "status": None,
                "body": _SERVERS_ENDED,
            }
            for target in sync.targets
            if target not in alive_targets
        ]
        return {"answers": [*answers, *answers_for_ended]}

    async def commit(
        self, id: str, version: int, epochs: Mapping[int, int], *, force: bool = False
    ) -> dict[str, Any]:
        """End the weight sync. Engines in `epochs` serve the new weights; others become stale.

        Args:
            id: Id of the sync.
            version: Version of the new weights.
            epochs: Mapping from each engine that got the new weights to the engine's epoch at that
                time. The epoch counts the starts of the engine.
            force: True to allow a version lower than the fleet's current version.

        Returns:
            The fleet's version, the serving engines, the stale engines, and under `failed` the
            engines that lack some weights, with the reasons.

        Raises:
            NoSuchSync: No sync with this id is open.
            FleetRefused: A broadcast still waits for answers. The sync stays open.
            IllegalTransition: The version is lower than the current version. The sync stays open.
            KeyError: `epochs` names an engine that the fleet does not have. The sync stays open.
        """
        sync = self._find_open(id)
        if sync.sending:
            raise FleetRefused(
                "some engines have not answered the broadcast of this sync yet. Commit the sync "
                "after all engines have answered"
            )
        states = self._fleet.states
        for engine in epochs:
            states.group(engine)

        failed = [
            {"engine": target.engine, "why": target.why_without_weights}
            for target in sync.targets
            if target.why_without_weights
        ]
        updated_epochs = {
            target.engine: target.epoch
            for target in sync.targets
            if epochs.get(target.engine) == target.epoch and not target.why_without_weights
        }
        states.commit(version, updated_epochs, force=force)
        await self._end(sync, f"committed, version {version}", is_committed=True)
        return {**self._describe_serving(), "failed": failed}

    async def give_up(self, id: str) -> dict[str, Any]:
        """End the weight sync without a commit. Engines whose weights may have changed become
        stale.

        Returns:
            The fleet's version, and the serving and the stale engines.

        Raises:
            NoSuchSync: No sync with this id is open.
        """
        await self._end(self._find_open(id), "ended by the trainer without a commit")
        return self._describe_serving()

    async def stop(self) -> None:
        """End the open weight sync because the fleet stops.

        Paused requests are not resumed, because the servers are stopped.
        """
        if self._open is not None and not self._open.is_ending:
            await self._end(
                self._open,
                "ended without a commit, because the fleet is stopped",
                is_fleet_stopped=True,
            )

    def _describe_serving(self) -> dict[str, Any]:
        """Return the fleet's weight version, and the indexes of its serving and stale engines."""
        view = self._fleet.states.view
        return {
            "version": view.version,
            "serving": [group.index for group in view.serving],
            "stale": [group.index for group in view.groups if group.state is GroupState.STALE],
        }

    def _find_open(self, id: str) -> _OpenSync:
        """Return the open weight sync if it has this id.

        Raises:
            NoSuchSync: No sync with this id is open.
        """
        if self._open is None or self._open.id != id or self._open.is_ending:
            raise NoSuchSync(self._describe_end(id))
        return self._open

    def _describe_end(self, id: str) -> str:
        """Return a message that says how a weight sync has ended, or that no sync with this id is
        open.
        """
        last_id, outcome = self._last
        return (
            f"the weight sync {id} is over: {outcome}"
            if id == last_id
            else f"no weight sync {id} is open"
        )

    async def _expire(self, sync: _OpenSync) -> None:
        """Wait for the time limit of a weight sync, then end the sync without a commit."""
        await asyncio.sleep(sync.until_s - now_s())
        if not sync.is_ending:
            lasted_s = sync.until_s - sync.began_s
            await self._end(
                sync,
                "ended without a commit, because the sync reached its time limit of "
                f"{lasted_s:g} s (timeout_s)",
            )

    async def _end(
        self,
        sync: _OpenSync,
        outcome: str,
        *,
        is_committed: bool = False,
        is_fleet_stopped: bool = False,
    ) -> None:
        """End a weight sync. Routing, health checks and recovery resume even if an error occurs.

        Args:
            sync: The sync to end. If another sync or no sync is open, nothing happens.
            outcome: Description of how the sync ends, for messages and for the event.
            is_committed: True if the new weights were committed.
            is_fleet_stopped: True if the whole fleet stops, so that no server is resumed.
        """
        if self._open is not sync:
            return
        sync.is_ending = True
        self._last = (sync.id, outcome)
        for sending in sync.sending:
            sending.cancel()
        # Cancel the task that ends the sync at its time limit, unless this code runs in that task.
        if self._deadline is not None and self._deadline is not asyncio.current_task():
            self._deadline.cancel()
        self._deadline = None

        states = self._fleet.states
        try:
            for target in sync.targets:
                if target.fault:
                    self._fail(target, target.fault)
                elif target.is_touched and not is_committed:
                    why = f"the engine may have parts of the new weights. The sync was {outcome}"
                    states.mark_stale(target.engine, target.epoch, why)
            if sync.is_paused and not is_fleet_stopped:
                await self._resume_targets(sync)
        finally:
            self._open = None
            self._health.resume()
            self._recovery.release()
            self._router.open()
            self._fleet.emit(
                "rollout.sync.ended",
                sync=sync.id,
                outcome="committed" if is_committed else "given_up",
                message=outcome,
                version=states.view.version,
                serving=[group.index for group in states.view.serving],
                took_s=round(now_s() - sync.began_s, 3),
            )
            self._on_end()

    async def _resume_targets(self, sync: _OpenSync) -> None:
        """Ask the servers of all target engines to continue their paused requests.

        If this machine cannot send the request to an engine, the engine is marked as failed and
        then restarted. Without the restart, the engine's requests would stay paused forever.
        """
        resume = self._fleet.questions.resume
        if resume is None:
            return
        reasons = await asyncio.gather(
            *(self._pause_or_resume(target, resume) for target in sync.targets)
        )
        for target, reason in zip(sync.targets, reasons, strict=True):
            if reason:
                self._fail(target, reason)

    async def _send(
        self, target: _Target, slot: ServerSlot, ask: Ask, *, timeout_s: float
    ) -> dict[str, Any]:
        """Send one request of a broadcast to one server, and record its success or failure.

        If a server does not answer in time, its engine is marked as failed.

        Returns:
            `{engine, epoch, rank, status, body}`; the status is None if no answer came.
        """
        was_touched = target.is_touched
        target.is_touched = was_touched or ask.method not in _READ_ONLY_METHODS
        reply = await self._fleet.prober.call(slot.url or "", ask, timeout_s)

        request_key = (ask.method, ask.path, slot.url or "")
        target.unsent.pop(request_key, None)
        if isinstance(reply.body, NotChecked):
            # The request was not sent, so it has not changed the weights of the engine.
            target.is_touched = was_touched
            target.unsent[request_key] = f"{ask.method} {ask.path}: {reply.body}"
        elif reply.status is None:
            # The server does not answer, so it may hang during the update. Mark the engine as
            # failed, so that later requests of this sync do not wait for the server.
            self._fail(target, f"{ask.method} {ask.path}: {reply.body}")
        elif _is_success(reply):
            target.faults.pop(request_key, None)
        else:
            quoted_body = " ".join(reply.body.split())[:_QUOTED_CHARACTERS]
            target.faults[request_key] = f"{ask.method} {ask.path}: {reply.status} {quoted_body}"
        return {
            "engine": target.engine,
            "epoch": target.epoch,
            "rank": slot.rank,
            "status": reply.status,
            "body": reply.body,
        }

    async def _pause_or_resume(self, target: _Target, ask: Ask) -> str:
        """Ask the servers of an engine to pause or to resume their requests.

        If a server does not answer with a success status, its engine is marked as failed and then
        restarted.

        Returns:
            Reason why this machine could not send the request; empty if the request was sent.
        """
        view = self._fleet.states.view
        group = view.groups[target.engine]
        if not group.is_current(target.epoch):
            return ""
        for slot in view.updated(group):
            timeout_s = self._fleet.settings.health.timeout_s
            reply = await self._fleet.prober.call(slot.url or "", ask, timeout_s)
            if isinstance(reply.body, NotChecked):
                return f"{ask.method} {ask.path}: {reply.body}"
            if not _is_success(reply):
                self._fail(target, f"{ask.method} {ask.path}: {reply.status or ''} {reply.body}")
        return ""

    def _fail(self, target: _Target, why: str) -> None:
        """Mark an engine of the weight sync as failed, so that the engine is restarted."""
        rank = self._fleet.states.view.groups[target.engine].ranks[0]
        self._fleet.states.fail(
            rank, target.epoch, f"the server of rank {rank} failed during a weight sync: {why}"
        )


def _is_success(reply: Reply) -> bool:
    """Return True if the server answered with an HTTP status from 200 to 299."""
    return reply.status is not None and 200 <= reply.status < 300


def _fill_placeholders(ask: Ask, slot: ServerSlot, rank_offset: int) -> Ask:
    """Return the request with the placeholders `${engine.NAME}` replaced for one server.

    Args:
        ask: The request, as the trainer wrote it.
        slot: The server that will receive the request.
        rank_offset: First rank of the server in the trainer's process group.

    Raises:
        KeyError: The request has an unknown placeholder `${engine.NAME}`.
    """
    values = {
        "engine.index": slot.engine,
        "engine.rank_offset": rank_offset,
        "engine.world_size": len(slot.weight_ranks),
    }

    def value_of(name: str) -> str:
        if name not in values:
            known = ", ".join(f"${{{known_name}}}" for known_name in values)
            raise KeyError(
                f"there is no placeholder `${{{name}}}`. The known placeholders are {known}"
            )
        return str(values[name])

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            if value[:2] == "${" and value[2:-1] in values:
                # If a string consists only of a placeholder, replace the string by a JSON number,
                # because the engines expect a number.
                return values[value[2:-1]]
            return substitute(value, value_of, is_deferred=lambda name: name[:7] != "engine.")
        if isinstance(value, Mapping):
            return {key: fill(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [fill(item) for item in value]
        return value

    return Ask(method=ask.method, path=str(fill(ask.path)), body=fill(ask.body))
