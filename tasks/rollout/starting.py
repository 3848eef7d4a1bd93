"""Brings one group of servers up until it generates, and takes one down until nothing is left."""

from __future__ import annotations

import asyncio
import logging

from tasks.record.states import GroupState
from tasks.rollout.clock import Clock, Emit, within
from tasks.rollout.health import Health
from tasks.rollout.hosts import ServerHost, StartFailed
from tasks.rollout.probing import Prober
from tasks.rollout.registry import Registry
from tasks.rollout.settings import FleetSettings
from tasks.rollout.topology import Answers, Ask, Questions, ServerSlot
from tasks.rollout.views import GroupView

_log = logging.getLogger(__name__)

#: Between two questions to a server that starts, at first and at last.
_FIRST_POLL_S, _LAST_POLL_S = 0.1, 1.0
_CANCEL_WITHIN_S = 1.0
#: Looking at the ports of one group.
_PORTS_WITHIN_S = 200.0
#: What a server that has just been started has: the model as it was loaded.
_FIRST_VERSION = 0


class Starter:
    """Starts and stops groups. It moves them in the registry, except out of a claim."""

    def __init__(
        self,
        registry: Registry,
        *,
        settings: FleetSettings,
        questions: Questions,
        host: ServerHost,
        prober: Prober,
        health: Health,
        emit: Emit,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._settings = settings
        self._questions = questions
        self._host = host
        self._prober = prober
        self._health = health
        self._emit = emit
        self._clock = clock
        #: By group that is being started: broken once it has left its state.
        self._broken: dict[int, asyncio.Future[None]] = {}
        #: By rank, what a server that starts answered last.
        self._answers: dict[int, str] = {}
        registry.listen(self._on_change)

    async def start(self, group: int, slots: tuple[ServerSlot, ...] | None = None) -> None:
        """Start a group that starts first, or is claimed; returns once it has made a token.

        Args:
            slots: its servers, where they have new addresses.

        Raises: StartFailed, when it does not come up or takes too long; something of it may run
            then, as after a cancel, and is to be stopped. It is inactive then, after a cancel not.
        """
        epoch = self._registry.begin(group, slots=slots)
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._broken[group] = broken
        servers = self._servers_of(group)
        up = asyncio.ensure_future(self._bring_up(group, epoch, servers))
        try:
            await asyncio.wait(
                {up, broken},
                timeout=self._settings.start_within_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if broken.done():
                raise StartFailed(self._registry.view.groups[group].cause)
            if not up.done():
                raise StartFailed(self._too_late(servers))
            up.result()
        except StartFailed as error:
            self._registry.fail(servers[0].rank, epoch, str(error))
            raise
        finally:
            del self._broken[group]
            broken.cancel()
            up.cancel()
            # So that the host is told to stop only after its start was cancelled.
            await asyncio.wait({up}, timeout=_CANCEL_WITHIN_S)

    async def stop(self, group: int) -> str:
        """End what runs of a group, within a bound; what could not be ended, empty if nothing."""
        ranks = self._registry.view.groups[group].ranks
        try:
            left = await within(
                self._settings.stop_within_s,
                self._host.stop(ranks, grace_s=self._settings.grace_s),
            )
        except Exception as error:
            _log.warning("ranks %s could not be stopped", ranks, exc_info=True)
            return f"ranks {_listed(ranks)}: {error or type(error).__name__}"
        return ", ".join(left)

    async def ports_taken(self, group: int) -> frozenset[int]:
        """The ranks whose port somebody else has; none where nobody can say."""
        try:
            return await within(_PORTS_WITHIN_S, self._host.ports_taken(self._servers_of(group)))
        except Exception:
            _log.warning("the ports of group %d could not be looked at", group, exc_info=True)
            return frozenset()

    def _servers_of(self, group: int) -> tuple[ServerSlot, ...]:
        view = self._registry.view
        return tuple(view.servers[rank] for rank in view.groups[group].ranks)

    async def _bring_up(self, group: int, epoch: int, servers: tuple[ServerSlot, ...]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for slot in servers:
                tasks.create_task(self._serve(slot, epoch))
        for slot in servers:
            # One that nobody asks anything may have gone without a word.
            if not self._host.is_alive(slot.rank):
                self._registry.fail(slot.rank, epoch, f"rank {slot.rank}: its process does not run")
        self._registry.started(group, epoch, version=_FIRST_VERSION)
        self._health.watch(group, epoch)

    async def _serve(self, slot: ServerSlot, epoch: int) -> None:
        try:
            await self._host.start(slot, epoch)
            self._emit("rollout.server.started", rank=slot.rank, epoch=epoch, url=slot.url)
            if slot.is_entrypoint or slot.answers is Answers.ENGINE:
                await self._until_yes(slot, self._questions.ready)
                await self._until_yes(slot, self._questions.token)
        except Exception as error:
            if not isinstance(error, StartFailed):
                _log.exception("rank %d, epoch %d: not started", slot.rank, epoch)
            self._registry.fail(slot.rank, epoch, str(error) or type(error).__name__)

    async def _until_yes(self, slot: ServerSlot, question: Ask | None) -> None:
        if slot.url is None or question is None:
            return
        pause_s = _FIRST_POLL_S
        while True:
            answer = await self._prober.ask(slot.url, question, self._settings.timeout_s)
            if answer is None:
                return
            self._answers[slot.rank] = str(answer)
            await self._clock.sleep(pause_s)
            pause_s = min(_LAST_POLL_S, pause_s * 1.5)

    def _too_late(self, servers: tuple[ServerSlot, ...]) -> str:
        said = [
            f"rank {slot.rank}: {self._answers[slot.rank]}"
            for slot in servers
            if slot.rank in self._answers
        ]
        return "; ".join(
            [f"did not serve within {self._settings.start_within_s:g} s (start_within_s)", *said]
        )

    def _on_change(self, before: GroupView, after: GroupView) -> None:
        broken = self._broken.get(after.index)
        has_ended = after.state in (GroupState.INACTIVE, GroupState.RETIRED)
        if broken is not None and has_ended and not broken.done():
            broken.set_result(None)


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
