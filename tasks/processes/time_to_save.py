"""Give the components of an attempt time to save a checkpoint before Muster ends them.

Every end of an attempt uses this module:

- Before an end that is known beforehand, the components get their warning signal `stop.warn_s`
  seconds earlier. Such an end is the time limit of the attempt, a scheduled shutdown of the
  machine, or a drain of a Ray node that has a deadline.
- An end without notice sends the warning signal at once. Muster then waits for the checkpoint that
  the component saves, within `stop.save_grace_s`.
- If a component is writing a checkpoint, the stop signal waits for it within `stop.save_grace_s`.
  SIGKILL waits for it within the remaining part of this time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from tasks.processes.component import RunningComponent
from tasks.processes.place_reader import PlaceReaders, PlaceTimeout
from tasks.record.events import Emit
from tasks.record.outcome import signal_name

_log = logging.getLogger(__name__)
T = TypeVar("T")

#: Time limit in seconds for one check whether a component is writing a checkpoint.
_CHECK_WITHIN_S = 2.0
#: Seconds between two checks whether a component is writing a checkpoint.
_CHECK_EVERY_S = 0.2
#: If a check finds that a component is not writing a checkpoint, this result is valid for this
#: number of seconds. During this time, the component may be stopped without another check.
_CHECK_AGAIN_AFTER_S = 0.1
#: Seconds between two searches for processes that have not got the warning signal. A process may
#: install its handler after the warning is due, for example because it still loads its model.
_WARN_EVERY_S = 2.0
#: Seconds between two checks whether a component's machine will end the component, for example by a
#: shutdown.
_PLANNED_END_EVERY_S = 15.0
#: Components get a warning signal before an expected end of their attempt. If the attempt still
#: runs this number of seconds after the expected end, its components can get the signal again.
_CALLED_OFF_AFTER_S = 60.0
#: Seconds by which one request delays SIGKILL. The request is repeated while the component writes
#: its checkpoint.
_DELAY_KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class _Warned:
    """A component that got a signal as a warning before the end of the attempt."""

    #: Time of the first warning signal, in CLOCK_MONOTONIC seconds.
    at_monotonic_s: float
    #: Step and time of the newest complete checkpoint when the first warning signal was sent. None
    #: if there was no checkpoint.
    checkpoint: object
    #: Time at which the attempt ends according to the warning, in UTC epoch seconds.
    end_at: float


@dataclass(kw_only=True)
class TimeToSave:
    """Warns the components before their attempt ends, and waits for their checkpoints."""

    #: Function that returns the components that were launched.
    components: Callable[[], Iterable[RunningComponent]]
    #: Function that publishes an event of the run.
    emit: Emit
    #: Returns the current time in UTC epoch seconds.
    clock: Callable[[], float] = time.time
    #: Returns the current time in CLOCK_MONOTONIC seconds.
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    #: Objects that read the attempt's files and folders in threads, because a read may block.
    readers: PlaceReaders = field(default_factory=PlaceReaders)
    #: True if the run was cancelled a second time. Components are then killed at once, even while
    #: they save a checkpoint.
    is_hurried: bool = False
    #: Mapping from the name of each warned component to the time of the warning, the announced end
    #: of the attempt, and the newest checkpoint before the warning.
    _warned: dict[str, _Warned] = field(default_factory=dict)
    #: Mapping from component name to the remaining seconds for which the end of the component may
    #: be delayed while it saves a checkpoint.
    _left_s: dict[str, float] = field(default_factory=dict)
    #: Mapping from component name to the time, in CLOCK_MONOTONIC seconds, of the last check that
    #: found that the component was not writing a checkpoint.
    _not_saving_s: dict[str, float] = field(default_factory=dict)

    async def announce_end(self, end_at: float, reason: str) -> None:
        """Warn the components that the attempt will end at a known time.

        Each component gets its warning signal `stop.warn_s` seconds before the end, or at once if
        less time is left. The coroutine returns at the time of the end. Cancel the coroutine if the
        attempt ends earlier.

        Args:
            end_at: Time at which the attempt will end, in UTC epoch seconds.
            reason: Reason for the end, in one line for the user.
        """
        while (left_s := end_at - self.clock()) > 0:
            for component in self.components():
                warning = component.plan.warning
                if warning is not None and left_s <= warning.before_s:
                    await self._warn(component, reason, end_at)
            await self.sleep(min(left_s, _WARN_EVERY_S))

    async def follow_planned_ends(self) -> None:
        """Warn each component before its machine shuts down. Runs until it is cancelled."""
        while True:
            for component in self.components():
                warning = component.plan.warning
                if warning is None or not self._may_wait(component):
                    continue
                end = await component.read_planned_end()
                if end is not None and 0 < end.at - self.clock() <= warning.before_s:
                    await self._warn(component, end.reason, end.at)
            await self.sleep(_PLANNED_END_EVERY_S)

    async def warn_now(self, reason: str) -> None:
        """Send the warning signal to all components that did not get it yet.

        Call this at the end of the attempt, before the components are stopped. If no process of a
        component handles the signal, this method publishes a warning for the user.
        """
        unwarned = [
            component
            for component in self.components()
            if component.plan.warning is not None and not self._is_warned(component)
        ]
        await asyncio.gather(
            *(self._warn(component, reason, self.clock()) for component in unwarned)
        )
        for component in unwarned:
            is_unaware = component.is_ready and not self._is_warned(component)
            if is_unaware and self._may_wait(component):
                self._report_unwarned(component)

    def _report_unwarned(self, component: RunningComponent) -> None:
        warning = component.plan.warning
        assert warning is not None
        name = signal_name(warning.signum)
        message = (
            f"Muster did not send the warning signal {name} to {component.name}, because no "
            f"process of {component.name} handles {name}. Install a signal handler in the trainer, "
            "or remove `stop.warn` from the spec"
        )
        self.emit("run.warning", message=message)

    async def _warn(self, component: RunningComponent, reason: str, end_at: float) -> None:
        """Send the warning signal to the processes of a component that have not got it yet."""
        warning = component.plan.warning
        if warning is None or not self._may_wait(component):
            return
        checkpoint = None
        if not self._is_warned(component):
            checkpoint = await self._find_checkpoint(component)
        processes = await component.warn(warning.signum)
        if not processes:
            return
        self._warned.setdefault(component.name, _Warned(self.monotonic(), checkpoint, end_at))
        self.emit(
            "component.warned",
            component.name,
            signal=signal_name(warning.signum),
            processes=processes,
            reason=reason,
            deadline=end_at,
        )

    def _is_warned(self, component: RunningComponent) -> bool:
        """Return True if a component was warned of the attempt's end, and the warning still holds.

        If the attempt still runs some time after the announced end, this method deletes the
        warning, so that the component can be warned again.
        """
        warned = self._warned.get(component.name)
        if warned is not None and self.clock() > warned.end_at + _CALLED_OFF_AFTER_S:
            del self._warned[component.name]
            component.forget_warnings()
            return False
        return warned is not None

    async def until_saved(self, component: RunningComponent) -> None:
        """Wait until a component has saved its checkpoint, or until the time for saving is over.

        The waits for one component together take at most `stop.save_grace_s` seconds. Return at
        once if this method found, less than `_CHECK_AGAIN_AFTER_S` seconds ago, that the component
        was not writing a checkpoint.
        """
        since = self.monotonic()
        if since - self._not_saving_s.get(component.name, -math.inf) < _CHECK_AGAIN_AFTER_S:
            return
        left_s = self._left_s.setdefault(component.name, component.plan.command.saves_within_s)
        is_reported = False
        while self._may_wait(component) and self.monotonic() - since < left_s:
            is_saving = await self._is_saving(component)
            if not is_saving and not await self._has_time_to_react(component):
                self._not_saving_s[component.name] = self.monotonic()
                break
            if is_saving and not is_reported:
                self.emit("component.saving", component.name, within_s=left_s)
                is_reported = True
            await self.sleep(_CHECK_EVERY_S)
        self._left_s[component.name] = left_s - (self.monotonic() - since)

    @asynccontextmanager
    async def delaying_kill(self, component: RunningComponent) -> AsyncIterator[None]:
        """Delay SIGKILL after a component's stop signal while the component writes a checkpoint.

        The caller stops the component in the body of the `async with` statement. After the body,
        SIGKILL is no longer delayed.
        """
        delaying = asyncio.create_task(self._delay_kill(component))
        try:
            yield
        finally:
            delaying.cancel()
            await asyncio.wait({delaying})
            if not delaying.cancelled() and (error := delaying.exception()) is not None:
                _log.error(
                    "Muster could not delay SIGKILL of component %s until the checkpoint was "
                    "written",
                    component.name,
                    exc_info=error,
                )

    async def _delay_kill(self, component: RunningComponent) -> None:
        """Delay SIGKILL by a few seconds again and again, while a component writes a checkpoint.

        All delays together take at most `stop.save_grace_s` seconds.
        """
        left_s = self._left_s.get(component.name, component.plan.command.saves_within_s)
        if component.is_hung or left_s <= component.plan.command.grace_s:
            return
        kill_at = self.monotonic() + left_s
        while not self.is_hurried and (left_s := kill_at - self.monotonic()) > 0:
            if await self._is_saving(component):
                component.delay_kill(min(left_s, _DELAY_KILL_S))
            await self.sleep(_CHECK_EVERY_S)

    def _may_wait(self, component: RunningComponent) -> bool:
        """Return True if the end of a component may be delayed, so that it can save a checkpoint.

        Returns False if the component has ended or hangs, or if the run was cancelled a second
        time, which ends all grace periods.
        """
        return not (self.is_hurried or component.is_hung or component.exit is not None)

    async def _is_saving(self, component: RunningComponent) -> bool:
        """Return True if a component is writing a checkpoint."""
        is_saving = component.plan.is_saving
        return is_saving is not None and await self._ask(component, is_saving, False)

    async def _has_time_to_react(self, component: RunningComponent) -> bool:
        """Return True if a component may still react to its warning by saving a checkpoint.

        The component has `stop.warn_s` seconds for this reaction. A new complete checkpoint ends
        this time early. If Muster cannot see the checkpoints, the time does not end early.
        """
        warned = self._warned.get(component.name)
        warning = component.plan.warning
        if warned is None or warning is None:
            return False
        if self.monotonic() - warned.at_monotonic_s >= warning.before_s:
            return False
        if component.plan.find_checkpoint is None:
            return True
        return await self._find_checkpoint(component) == warned.checkpoint

    async def _find_checkpoint(self, component: RunningComponent) -> object:
        """Return the step and the time of the newest complete checkpoint, or None if unknown."""
        find_checkpoint = component.plan.find_checkpoint
        if find_checkpoint is None:
            return None
        unknown: object = None
        return await self._ask(component, find_checkpoint, unknown)

    async def _ask(self, component: RunningComponent, read: Callable[[], T], unknown: T) -> T:
        """Call a function that reads the checkpoints of a component, and return its result.

        Args:
            component: The component.
            read: Function that reads the checkpoints.
            unknown: Result if the checkpoints cannot be read, or if their folder does not answer
                within two seconds.
        """
        reader = self.readers.of(component.plan.checkpoints)
        try:
            return await reader.ask(read, _CHECK_WITHIN_S)
        except PlaceTimeout:
            return unknown
        except Exception:
            _log.exception("the checkpoints of component %s cannot be read", component.name)
            return unknown
