"""Health checks of a fleet's servers, by periodic probes and by the results of requests.

A server can be checked in three ways:

- Alive: the server's process runs. The object that started the process reports its end at once.
- Ready: the server accepts requests.
- Generating: the server's engine generates a token.

This module finds servers whose process runs but that do not work. It sends probes only to the
entrypoints, whose answers show whether their whole engine works. With some backends, other servers
answer 200 even if the engine hangs.

`Evidence` does no I/O: it only counts the failures of one server.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field, replace

from tasks.processes.shortage import NotChecked
from tasks.rollout.clock import ended, now_s
from tasks.rollout.probing import FleetParts, NoReply
from tasks.rollout.registry import GroupView
from tasks.rollout.topology import ServerSlot
from tasks.spec.errors import LostContact

_log = logging.getLogger(__name__)

#: Smallest number of seconds between two probes that are triggered by failed requests. With a probe
#: interval below 4 s, a quarter of the interval is used instead.
_URGENT_EVERY_S = 1.0
#: Seconds added to the timeout of a probe that the server's own machine sends. The request to send
#: the probe must first reach that machine.
_HOST_EXTRA_S = 15.0
#: Smallest number of seconds between two warnings that this machine could not send a probe.
_WARN_EVERY_S = 60.0
_NO_TOKEN = (
    "this backend has no health check that generates a token. So Muster does not notice a dead "
    "engine whose HTTP server still works"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Numbers of failed probes and failed requests of a server since the server's last success."""

    #: Number of consecutive failures of probes and requests.
    misses: int = 0
    #: Number of failed requests since the server's last success.
    requests: int = 0
    #: Number of probes since the server's last success that failed although the server answered,
    #: for example with the HTTP status 500.
    refusals: int = 0
    #: Description of the last failure, or an empty string if there is none. A `NoReply` if the
    #: server did not answer at all.
    reason: str = ""

    def after_tokens(self) -> Evidence:
        """Return the new counts after the server generated a token for a request.

        Usually, all counts are reset, because the server works. But if a probe was answered with a
        status other than 200, only a later successful probe resets the counts.
        """
        return self if self.refusals else Evidence()

    def after_probe(self, reason: str, *, is_excused: bool = False) -> Evidence:
        """Return the new counts after a probe has failed.

        Args:
            reason: Description of the failure. A `NoReply` if the server did not answer at all.
            is_excused: True if the server generated tokens for a request during the probe. A
                missing answer is then not counted, because a working server lets probes time out
                while it prefills a long prompt. Source: sgl-project/sglang#22511.
        """
        is_refusal = not isinstance(reason, NoReply)
        if is_excused and not is_refusal:
            return self
        refusals = self.refusals + is_refusal
        return replace(self, misses=self.misses + 1, refusals=refusals, reason=reason)

    def after_request(self, reason: str, *, threshold: int) -> Evidence:
        """Return the new counts after a request has failed because of the server.

        Failed requests alone never reach the threshold, because a single lost connection may fail
        many requests at once. Each failed request triggers a probe, and only a failed probe can
        reach the threshold.

        Args:
            reason: Description of the failure. A `NoReply` if the server did not answer at all.
            threshold: Number of consecutive failures at which a server counts as failed.
        """
        if self.requests >= threshold - 1 or self.misses >= threshold - 1:
            return self
        return replace(self, misses=self.misses + 1, requests=self.requests + 1, reason=reason)

    @property
    def is_silence(self) -> bool:
        """True if the last failure was a missing answer.

        Then either the server or the network between this machine and the server is faulty.
        """
        return isinstance(self.reason, NoReply)


@dataclass(slots=True, kw_only=True, eq=False)
class _Watch:
    """State of the health checks of a server, from one start of the server to its end.

    All times are readings of the event loop's monotonic clock, in seconds.
    """

    slot: ServerSlot
    epoch: int
    evidence: Evidence = field(default_factory=Evidence)
    #: Number of response pieces that the server has generated for requests since its start.
    tokens: int = 0
    #: Number of probes that succeeded after a failed request. A high number shows that the server
    #: answers probes but fails requests. A generated token resets the number to 0. At most one
    #: probe in each probe interval is counted.
    yes_after_failures: int = 0
    #: Time of the last sign that the server works: a generated token, or a probe that succeeded
    #: after a failed request.
    token_or_yes_s: float = -math.inf
    #: Time of the last failed request to the server.
    failed_request_s: float = -math.inf
    #: Reason why the last failed request failed; empty if no request has failed.
    failed_request_reason: str = ""
    #: True if the server did not answer because of a network fault.
    is_cut: bool = False
    #: Time at which the last health probe of the server began.
    probed_s: float = -math.inf
    #: Event that is set when a request has failed. The event triggers a probe.
    urgent: asyncio.Event = field(default_factory=asyncio.Event)
    #: Task that probes the server periodically. None while periodic probes are off.
    task: asyncio.Task[None] | None = None


class Health:
    """Checks the servers of each engine, from the call of `watch` until the engine stops running.

    A failed server is reported to the fleet's `Registry`, which owns the states of the engines. The
    fleet's `Recovery` then restarts the engine.

    Args:
        fleet: The objects that the health checks share with the other parts of the fleet.
    """

    def __init__(self, fleet: FleetParts) -> None:
        self._fleet = fleet
        self._rules = fleet.settings.health
        #: Mapping from the rank of a checked entrypoint to the state of its health checks.
        self._watches: dict[int, _Watch] = {}
        self._urgent_every_s = min(_URGENT_EVERY_S, self._rules.interval_s / 4)
        #: True between a call of `rest` and a call of `resume`: no periodic probes are sent.
        self._is_resting = False
        #: Monotonic time in seconds of the last warning that this machine could not send a probe.
        self._warned_s = -math.inf
        self._question = fleet.questions.token or fleet.questions.ready
        if fleet.questions.token is None:
            fleet.emit("rollout.warning", message=_NO_TOKEN)

    def watch(self, group: int, epoch: int) -> None:
        """Start the health checks of an engine's entrypoints.

        The first probe is sent after `health.first_after_s` seconds. If this key is not set, the
        first probe is sent after one probe interval. If the group is no longer running in the given
        epoch, the call does nothing.

        Args:
            group: Index of the engine's lifecycle group.
            epoch: Epoch of the group: 1 after the first start, 2 after the second start, and so on.
        """
        view = self._fleet.states.view
        if view.groups[group].epoch != epoch or not view.groups[group].is_running:
            return
        for rank in view.groups[group].ranks:
            slot = view.servers[rank]
            if not slot.is_entrypoint:
                continue
            watch = _Watch(slot=slot, epoch=epoch)
            self._forget(rank)
            self._watches[rank] = watch
            if not self._is_resting:
                self._start_probes(watch, self._rules.first_after_s or self._rules.interval_s)

    async def rest(self) -> None:
        """Stop periodic probes, and ignore failed requests, until `resume` is called."""
        self._is_resting = True
        tasks = [watch.task for watch in self._watches.values() if watch.task is not None]
        for watch in self._watches.values():
            self._stop_probes(watch)
        await ended(tasks)

    def resume(self) -> None:
        """Restart the periodic probes that `rest` has stopped, and forget all earlier failures.

        The first probe of each server comes after one probe interval.
        """
        self._is_resting = False
        for watch in self._watches.values():
            self._stop_probes(watch)
            watch.evidence = Evidence()
            self._start_probes(watch, self._rules.interval_s)

    async def sweep(self) -> None:
        """Send one health probe to all checked servers at the same time.

        A single failed probe marks the server as failed. Call this method only between `rest` and
        `resume`. The call takes about one probe timeout at most.
        """
        watches = list(self._watches.values())
        timeout_s = self._rules.timeout_s
        await asyncio.gather(
            *(self._probe_once(watch, timeout_s, is_decisive=True) for watch in watches)
        )

    def note_failure(self, rank: int, epoch: int, why: str) -> None:
        """Count a request that failed because of a server, and trigger a probe of the server.

        Args:
            rank: Rank of the server.
            epoch: Epoch of the server at the time of the request. The epoch counts the starts of
                the server's group.
            why: Description of the failure. The caller must not report a 4xx response, because it
                is not a failure of the server.
        """
        watch = self._watch_of(rank, epoch)
        threshold = self._rules.misses
        if watch is None or self._is_resting or not threshold:
            return
        before = watch.evidence
        watch.evidence = before.after_request(why, threshold=threshold)
        watch.failed_request_s = now_s()
        watch.failed_request_reason = why
        if watch.evidence is not before:
            self._emit_miss(watch)
            self._fleet.states.suspect(rank, epoch, why)
        watch.urgent.set()

    def note_tokens(self, rank: int, epoch: int, count: int) -> None:
        """Record that a server has generated a piece of a response.

        This method is called for each piece of each response, so it has to be fast.

        Args:
            rank: Rank of the server.
            epoch: Epoch of the server. The epoch counts the starts of the server's group.
            count: Number of response pieces that the server has generated in this epoch.
        """
        watch = self._watch_of(rank, epoch)
        if watch is None:
            return
        watch.tokens = count
        watch.yes_after_failures = 0
        watch.token_or_yes_s = now_s()
        if not watch.evidence.misses or watch.is_cut:
            return
        if watch.token_or_yes_s - watch.failed_request_s < self._urgent_every_s:
            # A request to this server failed a moment ago. A token that another request gets so
            # soon afterwards does not prove that the server works. So keep the counted failures.
            return
        watch.evidence = watch.evidence.after_tokens()
        self._clear_if_well(watch)

    def misses_of(self, rank: int) -> int:
        """Return the number of consecutive failed probes and requests of a server.

        Args:
            rank: Rank of the server. If this server is not checked, the result is 0.
        """
        watch = self._watches.get(rank)
        return watch.evidence.misses if watch is not None else 0

    async def stop(self) -> None:
        """Stop the health checks of all servers. `watch` may be called again after this."""
        await self.rest()
        self._watches.clear()
        self._is_resting = False

    def _watch_of(self, rank: int, epoch: int) -> _Watch | None:
        watch = self._watches.get(rank)
        return watch if watch is not None and watch.epoch == epoch else None

    def _start_probes(self, watch: _Watch, first_s: float) -> None:
        """Start periodic probes of a server, unless the spec turns them off (`health.misses: 0`).

        Args:
            watch: State of the server's health checks.
            first_s: Seconds from now to the first probe.
        """
        if self._rules.misses:
            name = f"rollout-health-{watch.slot.rank}"
            watch.task = asyncio.create_task(self._probe_periodically(watch, first_s), name=name)

    def _stop_probes(self, watch: _Watch) -> None:
        # The task that probes the server may itself call this method. Do not cancel the task in
        # that case, because an `asyncio.timeout` in the task could swallow the cancellation. The
        # cancellation is not necessary: the task ends by itself when the server is no longer
        # checked.
        if watch.task is not None and watch.task is not asyncio.current_task():
            watch.task.cancel()
        watch.task = None

    def _forget(self, rank: int) -> None:
        watch = self._watches.pop(rank, None)
        if watch is not None:
            self._stop_probes(watch)

    def on_change(self, before: GroupView, after: GroupView) -> None:
        """Stop checking the servers of a lifecycle group if the group no longer runs.

        Args:
            before: The group before its change.
            after: The group after its change.
        """
        if before.is_running and not after.is_running:
            for rank in after.ranks:
                self._forget(rank)

    async def _probe_periodically(self, watch: _Watch, first_s: float) -> None:
        """Probe a server once per interval, and soon after a failed request.

        Args:
            watch: State of the server's health checks.
            first_s: Seconds from now to the first probe.
        """
        interval_s = self._rules.interval_s
        timeout_s = self._rules.timeout_s
        due_s = now_s() + first_s
        # Make the first pause shorter by a random time. Otherwise, engines that started together
        # would be probed at the same moments.
        spread_s = interval_s * self._fleet.random.uniform(0.5, 1.0)
        while self._is_watched(watch):
            late_s = 0.0
            if await self._wait_for_probe(watch, due_s):
                # A slow earlier probe may have delayed this probe. If probes or requests have
                # already failed, measure the delay (`late_s`). The call of `_probe_once` below
                # subtracts the delay from the timeout, so that a failed server is found in time.
                if watch.evidence.misses:
                    late_s = max(0.0, now_s() - due_s)
                due_s = max(due_s, now_s() - late_s) + spread_s
                spread_s = interval_s
            await self._probe_once(watch, max(timeout_s - late_s, min(interval_s, timeout_s)))

    async def _wait_for_probe(self, watch: _Watch, due_s: float) -> bool:
        """Wait until the next probe of a server should begin.

        Args:
            watch: State of the server's health checks.
            due_s: Monotonic time in seconds of the next periodic probe.

        Returns:
            True if the periodic probe is due. False if a probe is needed earlier, because a request
            to the server has failed.
        """
        try:
            async with asyncio.timeout(due_s - now_s()):
                await watch.urgent.wait()
                await asyncio.sleep(watch.probed_s + self._urgent_every_s - now_s())
        except TimeoutError:
            return True
        finally:
            watch.urgent.clear()
        return False

    async def _probe_once(
        self, watch: _Watch, timeout_s: float, *, is_decisive: bool = False
    ) -> None:
        """Send one health probe to a server, and report the result to the fleet's registry.

        Args:
            watch: State of the server's health checks.
            timeout_s: Seconds that the server gets to answer.
            is_decisive: True if a single failure means that the server has failed.
        """
        rank = watch.slot.rank
        epoch = watch.epoch
        watch.probed_s = now_s()
        tokens_before = watch.tokens
        probe: asyncio.Task[str | None] | None = None
        local_probe: asyncio.Task[bool | NotChecked | None] | None = None
        try:
            answer = self._fleet.prober.ask(watch.slot.url or "", self._question, timeout_s)
            probe = asyncio.ensure_future(answer)
            if is_decisive or watch.evidence.misses + 1 >= self._rules.misses:
                # A failure of this probe can be enough to mark the server as failed. A second
                # probe, from the server's own machine, shows whether only the network is faulty. If
                # the first probe is not done after half of the timeout, start the second probe, so
                # that both probes end within one timeout.
                await asyncio.wait({probe}, timeout=timeout_s / 2)
                if not probe.done():
                    local_probe = asyncio.create_task(self._probe_locally(watch, timeout_s / 2))
            reason = await probe
            if not self._is_watched(watch):
                return
            if reason is None:
                self._note_success(watch)
            elif isinstance(reason, NotChecked):
                self._warn_not_checked(rank, reason)
            elif self._note_miss(watch, reason, tokens_before, is_decisive):
                # A probe from the server's own machine shows whether the server or the network is
                # at fault. Until the result is known, the server gets no requests.
                self._fleet.states.unreachable(rank, epoch, reason)
                local_probe = local_probe or asyncio.create_task(
                    self._probe_locally(watch, timeout_s / 2)
                )
                local_result = await local_probe
                if isinstance(local_result, NotChecked):
                    self._warn_not_checked(rank, local_result)
                else:
                    self._judge_silence(watch, reason, local_result)
        except Exception:
            # An error in Muster itself must not count as a failure of the server.
            _log.exception(
                "Muster could not send a health check to the server of rank %d (starts of the "
                "engine so far: %d)",
                rank,
                epoch,
            )
        finally:
            for task in (probe, local_probe):
                if task is not None:
                    task.cancel()

    def _note_success(self, watch: _Watch) -> None:
        """Forget a server's failures after a successful probe, unless its requests keep failing.

        A server that answers probes but repeatedly fails requests is reported as failed.
        """
        rank = watch.slot.rank
        settings = self._rules
        if watch.failed_request_s > watch.token_or_yes_s and (
            not watch.yes_after_failures or now_s() - watch.token_or_yes_s >= settings.interval_s
        ):
            watch.yes_after_failures += 1
            watch.token_or_yes_s = now_s()
        if watch.yes_after_failures > settings.misses > 0:
            what = (
                f"the server of rank {rank} passes its health checks, but every request to this "
                "server fails before the first generated token"
            )
            reason = watch.failed_request_reason
            self._report_failed(watch, f"{what}; last failure: {reason}")
            return
        watch.evidence = Evidence()
        watch.is_cut = False
        self._fleet.states.reachable(rank, watch.epoch)
        self._clear_if_well(watch)

    def _clear_if_well(self, watch: _Watch) -> None:
        """Change a group's state from SUSPECT to ACTIVE if no server of the group has failures."""
        group = self._fleet.states.view.groups[watch.slot.engine]
        watches = (self._watches.get(rank) for rank in group.ranks)
        if not any(other.evidence.misses for other in watches if other is not None):
            self._fleet.states.clear(watch.slot.rank, watch.epoch)

    def _note_miss(self, watch: _Watch, reason: str, tokens_before: int, is_decisive: bool) -> bool:
        """Count a failed probe. If the failures reach the threshold, report the server as failed.

        If the last probe got no answer, the server is not reported as failed, even at the
        threshold. The reason is that the network may be the cause.

        Args:
            watch: State of the server's health checks.
            reason: Description of the failure. A `NoReply` if the server did not answer at all.
            tokens_before: Number of response pieces that the server had generated when the probe
                began.
            is_decisive: True if a single failure means that the server has failed.

        Returns:
            True if the failures reach the threshold and the last probe got no answer. The caller
            then has to find out whether the network is to blame.
        """
        rank = watch.slot.rank
        epoch = watch.epoch
        before = watch.evidence
        is_excused = watch.tokens != tokens_before and not is_decisive
        watch.evidence = before.after_probe(reason, is_excused=is_excused)
        if watch.evidence is before:
            return False
        self._emit_miss(watch)
        if watch.evidence.misses < (1 if is_decisive else self._rules.misses):
            self._fleet.states.suspect(rank, epoch, reason)
            return False
        if not watch.evidence.is_silence:
            self._report_failed(watch, f"the server of rank {rank} does not work: {reason}")
        return watch.evidence.is_silence

    def _warn_not_checked(self, rank: int, reason: NotChecked) -> None:
        """Warn that this machine lacked the resources to send a probe to a server.

        The missing probe does not count as a failure of the server.
        """
        _log.warning("rank %d was not probed: %s", rank, reason)
        if now_s() - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s()
            message = (
                f"Muster could not check the server of rank {rank}, because this machine lacks "
                f"resources: {reason}"
            )
            self._fleet.emit("rollout.warning", message=message)

    async def _probe_locally(self, watch: _Watch, timeout_s: float) -> bool | NotChecked | None:
        """Probe a server from the machine that it runs on.

        Args:
            watch: State of the server's health checks.
            timeout_s: Seconds that the server gets to answer.

        Returns:
            - True if the probe succeeded, False if it failed.
            - None if the server's machine cannot be reached.
            - A `NotChecked` with the reason if the machine could not send the probe.
        """
        try:
            async with asyncio.timeout(timeout_s + _HOST_EXTRA_S):
                answer = await self._fleet.host.ask(watch.slot.rank, self._question, timeout_s)
        except (LostContact, TimeoutError):
            return None
        except Exception:
            _log.exception(
                "the machine of rank %d could not send a health check to the server of this rank",
                watch.slot.rank,
            )
            return None
        return answer if isinstance(answer, NotChecked) else answer is None

    def _judge_silence(self, watch: _Watch, reason: str, succeeds_locally: bool | None) -> None:
        """Report a silent server as failed, or warn if the network is the cause.

        Args:
            watch: State of the server's health checks.
            reason: Description of the missing answer.
            succeeds_locally: Result of the probe from the server's own machine. None if the machine
                cannot be reached.
        """
        rank = watch.slot.rank
        if not self._is_watched(watch):
            return
        if succeeds_locally:
            warning = (
                f"the server of rank {rank} works, but the machine of the gateway cannot reach the "
                f"server: {reason}"
            )
        elif succeeds_locally is None and self._are_most_silent():
            warning = (
                "Muster cannot reach most servers, nor their machines. The network is the probable "
                "cause, so Muster does not restart the servers. The first unreachable server is "
                f"rank {rank}: {reason}"
            )
        else:
            self._report_failed(watch, f"the server of rank {rank} does not answer: {reason}")
            return
        # One network fault may cut off many servers. Emit a warning only for the first of them.
        if not any(other.is_cut for other in self._watches.values()):
            self._fleet.emit("rollout.warning", message=warning)
        watch.is_cut = True

    def _are_most_silent(self) -> bool:
        """Return True if at least two engines, and more than half of the engines, do not answer."""
        silent_groups = {
            watch.slot.engine for watch in self._watches.values() if watch.evidence.is_silence
        }
        serving_groups = [group.index for group in self._fleet.states.view.serving]
        count = len(silent_groups.intersection(serving_groups))
        return count >= 2 and 2 * count > len(serving_groups)

    def _is_watched(self, watch: _Watch) -> bool:
        return self._watches.get(watch.slot.rank) is watch

    def _report_failed(self, watch: _Watch, cause: str) -> None:
        """Report to the registry that a server has failed."""
        self._fleet.states.fail(watch.slot.rank, watch.epoch, cause)

    def _emit_miss(self, watch: _Watch) -> None:
        """Emit the event `rollout.probe.failed` after a failed probe or request."""
        evidence = watch.evidence
        self._fleet.emit(
            "rollout.probe.failed",
            rank=watch.slot.rank,
            epoch=watch.epoch,
            reason=str(evidence.reason),
            kind="silence" if evidence.is_silence else "answer",
            misses=evidence.misses,
        )
