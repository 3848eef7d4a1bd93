"""Whether the servers of a fleet still work: asks them, and adds up what their requests tell.

Three questions. Alive: does its process run? The host tells each death at once. Ready: may it be
sent requests? A token: does its engine generate? This here finds what lives and does not work: it
asks entrypoints, which answer for their engine; the answers of other servers prove nothing.

What follows from answers and silences of one server is pure: `Evidence`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field, replace

from tasks.processes.shortage import Unasked
from tasks.rollout.clock import ended, now_s
from tasks.rollout.probing import FleetParts, NoReply
from tasks.rollout.registry import GroupView
from tasks.rollout.topology import ServerSlot
from tasks.spec.errors import LostContact

_log = logging.getLogger(__name__)

#: Between two probes that failed requests bring about; a part of the interval where that is short.
_URGENT_EVERY_S = 1.0
#: What a host needs beside the server's own time, at most, to reach the server's machine.
_HOST_EXTRA_S = 15.0
#: Seconds between two warnings that this machine cannot ask.
_WARN_EVERY_S = 60.0
_NO_TOKEN = (
    "this backend has no question that generates a token: an engine that is dead behind a live "
    "HTTP server is not seen"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Of one incarnation of a server, since its last good answer."""

    #: Probes and requests that failed in a row.
    misses: int = 0
    #: How many of those were requests.
    requests: int = 0
    #: How many were probes that were answered with something else than yes.
    refusals: int = 0
    #: What the last miss was; empty: none.
    reason: str = ""

    def after_tokens(self) -> Evidence:
        """It generates for a request: it is not silent, whatever it says to probes."""
        return self if self.refusals else Evidence()

    def after_probe(self, reason: str, *, is_excused: bool = False) -> Evidence:
        """A probe that failed.

        Args:
            is_excused: tokens for a request came while it was outstanding. A server that prefills
                a long prompt lets a probe time out. Source: sgl-project/sglang#22511.
        """
        is_refusal = not isinstance(reason, NoReply)
        if is_excused and not is_refusal:
            return self
        refusals = self.refusals + is_refusal
        return replace(self, misses=self.misses + 1, refusals=refusals, reason=reason)

    def after_request(self, reason: str, *, threshold: int) -> Evidence:
        """A request that failed in a way that tells of the server, never a 4xx.

        Requests alone never reach the threshold: all those on one lost connection fail at once,
        and a probe, which each of them brings about, has the last word.
        """
        if self.requests >= threshold - 1 or self.misses >= threshold - 1:
            return self
        return replace(self, misses=self.misses + 1, requests=self.requests + 1, reason=reason)

    @property
    def is_silence(self) -> bool:
        """No answer came at last: it is the server, or the network before it."""
        return isinstance(self.reason, NoReply)


@dataclass(slots=True, kw_only=True, eq=False)
class _Watch:
    """One incarnation of a server that is watched."""

    slot: ServerSlot
    epoch: int
    evidence: Evidence = field(default_factory=Evidence)
    #: Pieces of what it has generated for requests, so far.
    tokens: int = 0
    #: Probes since the last token that were answered with yes after a request had failed, at most
    #: one in each interval.
    failing: int = 0
    #: When the last token or the last of these probes came, in monotonic seconds as all of these.
    failing_s: float = -math.inf
    #: When a request failed there last, and why.
    failed_s: float = -math.inf
    failed_why: str = ""
    #: It works, and cannot be reached.
    is_cut: bool = False
    #: When it was probed last.
    probed_s: float = -math.inf
    #: A request has failed: probe it now.
    urgent: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Health:
    """Watches groups from `watch` on until they leave their running states.

    It calls the registry's verbs: what is done about a failed group is the recovery's matter.
    """

    def __init__(self, fleet: FleetParts) -> None:
        self._fleet, self._rules = fleet, fleet.settings.health
        self._watches: dict[int, _Watch] = {}
        self._urgent_every_s = min(_URGENT_EVERY_S, self._rules.interval_s / 4)
        self._is_resting = False
        #: When it was last said that this machine cannot ask, in monotonic seconds.
        self._warned_s = -math.inf
        self._question = fleet.questions.token or fleet.questions.ready
        if fleet.questions.token is None:
            fleet.emit("rollout.warning", message=_NO_TOKEN)

    def watch(self, group: int, epoch: int) -> None:
        """From now on; the first question comes after its grace."""
        view = self._fleet.states.view
        if view.groups[group].epoch != epoch or not view.groups[group].is_running:
            return
        for rank in view.groups[group].ranks:
            if not (slot := view.servers[rank]).is_entrypoint:
                continue
            watch = _Watch(slot=slot, epoch=epoch)
            self._forget(rank)
            self._watches[rank] = watch
            if not self._is_resting:
                self._begin(watch, self._rules.first_after_s or self._rules.interval_s)

    async def rest(self) -> None:
        """No periodic questions until `resume`; what requests tell is not heard either."""
        self._is_resting = True
        tasks = [watch.task for watch in self._watches.values() if watch.task is not None]
        for watch in self._watches.values():
            self._end(watch)
        await ended(tasks)

    def resume(self) -> None:
        """The first question to each comes after a whole interval."""
        self._is_resting = False
        for watch in self._watches.values():
            self._end(watch)
            watch.evidence = Evidence()
            self._begin(watch, self._rules.interval_s)

    async def sweep(self) -> None:
        """Ask every server that runs once, side by side: one bad answer is enough.

        Only while it rests. It takes as long as the slowest answer, at most the timeout.
        """
        watches = list(self._watches.values())
        timeout_s = self._rules.timeout_s
        await asyncio.gather(*(self._look(one, timeout_s, is_last_word=True) for one in watches))

    def note_failure(self, rank: int, epoch: int, why: str) -> None:
        """A request failed there in a way that tells of the server: never a 4xx."""
        watch = self._watch_of(rank, epoch)
        threshold = self._rules.misses
        if watch is None or self._is_resting or not threshold:
            return
        before = watch.evidence
        watch.evidence = before.after_request(why, threshold=threshold)
        watch.failed_s, watch.failed_why = now_s(), why
        if watch.evidence is not before:
            self._tell_miss(watch)
            self._fleet.states.suspect(rank, epoch, why)
        watch.urgent.set()

    def note_tokens(self, rank: int, epoch: int, count: int) -> None:
        """It generates for a request: `count` pieces so far. Cheap: it is called for each."""
        watch = self._watch_of(rank, epoch)
        if watch is None:
            return
        watch.tokens, watch.failing, watch.failing_s = count, 0, now_s()
        if not watch.evidence.misses or watch.is_cut:
            return
        if watch.failing_s - watch.failed_s < self._urgent_every_s:
            # Of many requests at once some fail and some do not: it stays under suspicion a while.
            return
        watch.evidence = watch.evidence.after_tokens()
        self._clear(watch)

    def misses_of(self, rank: int) -> int:
        watch = self._watches.get(rank)
        return watch.evidence.misses if watch is not None else 0

    async def stop(self) -> None:
        """Nothing is watched any more, at once; what is watched later is asked periodically."""
        await self.rest()
        self._watches.clear()
        self._is_resting = False

    def _watch_of(self, rank: int, epoch: int) -> _Watch | None:
        watch = self._watches.get(rank)
        return watch if watch is not None and watch.epoch == epoch else None

    def _begin(self, watch: _Watch, first_s: float) -> None:
        if self._rules.misses:
            name = f"rollout-health-{watch.slot.rank}"
            watch.task = asyncio.create_task(self._ask_for_ever(watch, first_s), name=name)

    def _end(self, watch: _Watch) -> None:
        # A task that cancels itself may lose that to a timeout that it enters next; this one sees
        # by itself that its server is not watched any more.
        if watch.task is not None and watch.task is not asyncio.current_task():
            watch.task.cancel()
        watch.task = None

    def _forget(self, rank: int) -> None:
        watch = self._watches.pop(rank, None)
        if watch is not None:
            self._end(watch)

    def on_change(self, before: GroupView, after: GroupView) -> None:
        if before.is_running and not after.is_running:
            for rank in after.ranks:
                self._forget(rank)

    async def _ask_for_ever(self, watch: _Watch, first_s: float) -> None:
        interval_s, timeout_s = self._rules.interval_s, self._rules.timeout_s
        due_s = now_s() + first_s
        # Those that began together are spread by one shorter pause, since a longer one would put
        # off the detection.
        spread_s = interval_s * self._fleet.random.uniform(0.5, 1.0)
        while self._is_watched(watch):
            late_s = 0.0
            if await self._until(watch, due_s):
                # A timeout longer than the interval makes the next question wait for the last.
                # While answers are missing it ends when it would have, had it begun when due.
                if watch.evidence.misses:
                    late_s = max(0.0, now_s() - due_s)
                due_s = max(due_s, now_s() - late_s) + spread_s
                spread_s = interval_s
            await self._look(watch, max(timeout_s - late_s, min(interval_s, timeout_s)))

    async def _until(self, watch: _Watch, moment_s: float) -> bool:
        """Whether it is that moment; else a request has failed before, though not too soon."""
        try:
            async with asyncio.timeout(moment_s - now_s()):
                await watch.urgent.wait()
                await asyncio.sleep(watch.probed_s + self._urgent_every_s - now_s())
        except TimeoutError:
            return True
        finally:
            watch.urgent.clear()
        return False

    async def _look(self, watch: _Watch, timeout_s: float, *, is_last_word: bool = False) -> None:
        """Ask once, and act on what follows; as the last word, one bad answer is enough."""
        rank, epoch = watch.slot.rank, watch.epoch
        watch.probed_s, tokens = now_s(), watch.tokens
        probe: asyncio.Task[str | None] | None = None
        home: asyncio.Task[bool | Unasked | None] | None = None
        try:
            asked = self._fleet.prober.ask(watch.slot.url or "", self._question, timeout_s)
            probe = asyncio.ensure_future(asked)
            if is_last_word or watch.evidence.misses + 1 >= self._rules.misses:
                # Late enough to be rare, soon enough that both answers are there in one timeout.
                await asyncio.wait({probe}, timeout=timeout_s / 2)
                if not probe.done():
                    home = asyncio.create_task(self._ask_at_home(watch, timeout_s / 2))
            reason = await probe
            if not self._is_watched(watch):
                return
            if reason is None:
                self._note_yes(watch)
            elif isinstance(reason, Unasked):
                self._note_unasked(rank, reason)
            elif self._note_no(watch, reason, tokens, is_last_word):
                # No request is sent there while it is asked at home.
                self._fleet.states.unreachable(rank, epoch, reason)
                home = home or asyncio.create_task(self._ask_at_home(watch, timeout_s / 2))
                answer = await home
                if isinstance(answer, Unasked):
                    self._note_unasked(rank, answer)
                else:
                    self._judge_silence(watch, reason, answer)
        except Exception:
            # A fault of our own says nothing about the server.
            _log.exception("rank %d, epoch %d: not asked", rank, epoch)
        finally:
            for task in (probe, home):
                if task is not None:
                    task.cancel()

    def _note_yes(self, watch: _Watch) -> None:
        rank, settings = watch.slot.rank, self._rules
        if watch.failed_s > watch.failing_s and (
            not watch.failing or now_s() - watch.failing_s >= settings.interval_s
        ):
            watch.failing, watch.failing_s = watch.failing + 1, now_s()
        if watch.failing > settings.misses > 0:
            what = "it answers probes, and its requests fail one after the other, with no token out"
            self._fail(watch, f"rank {rank}: {what}; the last one: {watch.failed_why}")
            return
        watch.evidence, watch.is_cut = Evidence(), False
        self._fleet.states.reachable(rank, watch.epoch)
        self._clear(watch)

    def _clear(self, watch: _Watch) -> None:
        """A group is well once all its servers are."""
        group = self._fleet.states.view.groups[watch.slot.engine]
        watches = (self._watches.get(rank) for rank in group.ranks)
        if not any(one.evidence.misses for one in watches if one is not None):
            self._fleet.states.clear(watch.slot.rank, watch.epoch)

    def _note_no(self, watch: _Watch, reason: str, tokens: int, is_last_word: bool) -> bool:
        """Whether it has been silent for long enough.

        Args:
            tokens: how many it had generated when it was asked.
        """
        rank, epoch, before = watch.slot.rank, watch.epoch, watch.evidence
        is_excused = watch.tokens != tokens and not is_last_word
        watch.evidence = before.after_probe(reason, is_excused=is_excused)
        if watch.evidence is before:
            return False
        self._tell_miss(watch)
        if watch.evidence.misses < (1 if is_last_word else self._rules.misses):
            self._fleet.states.suspect(rank, epoch, reason)
            return False
        if not watch.evidence.is_silence:
            self._fail(watch, f"rank {rank} does not work: {reason}")
        return watch.evidence.is_silence

    def _note_unasked(self, rank: int, reason: Unasked) -> None:
        """This machine could not ask: nothing follows for the server, and a person is told."""
        _log.warning("rank %d was not asked: %s", rank, reason)
        if now_s() - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s()
            message = f"rank {rank} was not asked, which is no failure of it: {reason}"
            self._fleet.emit("rollout.warning", message=message)

    async def _ask_at_home(self, watch: _Watch, timeout_s: float) -> bool | Unasked | None:
        """Whether a server says yes to its own machine.

        Returns: None if its machine cannot be reached; why, if its machine could not ask it.
        """
        try:
            async with asyncio.timeout(timeout_s + _HOST_EXTRA_S):
                answer = await self._fleet.host.ask(watch.slot.rank, self._question, timeout_s)
        except (LostContact, TimeoutError):
            return None
        except Exception:
            _log.exception("rank %d: not asked from its own machine", watch.slot.rank)
            return None
        return answer if isinstance(answer, Unasked) else answer is None

    def _judge_silence(self, watch: _Watch, reason: str, is_yes_at_home: bool | None) -> None:
        """A server that is silent has failed, unless it works and the network is to blame."""
        rank = watch.slot.rank
        if not self._is_watched(watch):
            return
        if is_yes_at_home:
            why = f"rank {rank} works and cannot be reached: {reason}"
        elif is_yes_at_home is None and self._are_most_silent():
            why = f"rank {rank} and most others cannot be reached, nor their machines: {reason}"
        else:
            self._fail(watch, f"rank {rank} does not answer: {reason}")
            return
        # Of servers that one network cuts off, the first is told.
        if not any(one.is_cut for one in self._watches.values()):
            self._fleet.emit("rollout.warning", message=why)
        watch.is_cut = True

    def _are_most_silent(self) -> bool:
        """More than half of the groups that serve, and at least two."""
        silent = {
            watch.slot.engine for watch in self._watches.values() if watch.evidence.is_silence
        }
        serving = [group.index for group in self._fleet.states.view.serving]
        count = len(silent.intersection(serving))
        return count >= 2 and 2 * count > len(serving)

    def _is_watched(self, watch: _Watch) -> bool:
        return self._watches.get(watch.slot.rank) is watch

    def _fail(self, watch: _Watch, cause: str) -> None:
        self._fleet.states.fail(watch.slot.rank, watch.epoch, cause)

    def _tell_miss(self, watch: _Watch) -> None:
        evidence = watch.evidence
        self._fleet.emit(
            "rollout.probe.failed",
            rank=watch.slot.rank,
            epoch=watch.epoch,
            reason=str(evidence.reason),
            kind="silence" if evidence.is_silence else "answer",
            misses=evidence.misses,
        )
