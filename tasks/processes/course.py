"""How far a run has come, and for how long nothing in it has moved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx

from tasks.processes.plan import AttemptPlan
from tasks.processes.progress import Silence, source_of

_READ_EVERY_S = 0.5
#: A trainer that has left wrote its last step before; what serves it over HTTP may lag.
_LAST_STEP_WITHIN_S = 3.0


class Course:
    """The step of one attempt, and the silence of its components. As text, the step reached."""

    def __init__(
        self,
        plan: AttemptPlan,
        client: httpx.AsyncClient,
        emit: Callable[..., None],
        *,
        is_quiet: Callable[[], bool],
    ) -> None:
        """
        Args:
            is_quiet: whether silence means nothing at the moment.
        """
        self._limit_s = plan.stall_after_s
        self._total = plan.progress.total if plan.progress else None
        self._source = source_of(plan.progress, plan.cwd, client, plan.began_at)
        self._silence = Silence([c.command.log for c in plan.components], plan.own_questions)
        self._emit = emit
        self._is_quiet = is_quiet
        #: The step last seen.
        self.step: float | None = None

    def __str__(self) -> str:
        if self.step is None:
            return ""
        return f"step {self.step:g}" + (f" of {self._total:g}" if self._total else "")

    def restart(self) -> None:
        """Something was started: the silence before it does not count."""
        self._silence.restart()

    async def until_stalled(self) -> str:
        """Read the step from time to time, for ever.

        Returns: why, once nothing has moved for longer than the limit. A cancel ends it.
        """
        while True:
            await self._read()
            if self._is_quiet():
                self._silence.restart()
            silent_s = self._silence.lasts_s(self.step)
            if self._limit_s is not None and silent_s > self._limit_s:
                return (
                    f"no progress (step {self.step}) and no output of any component "
                    f"for {silent_s:.0f} s"
                )
            await asyncio.sleep(_READ_EVERY_S)

    async def until_reached(self, step: float | None) -> float | None:
        """The step last seen, which is waited for a moment where it is below the one asked for."""
        deadline = time.monotonic() + _LAST_STEP_WITHIN_S
        await self._read()
        while (self.step or 0) < (step or 0) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            await self._read()
        return self.step

    async def _read(self) -> None:
        step = await self._source.step() if self._source is not None else None
        if step is not None and step != self.step:
            self.step = step
            self._emit("run.progress", step=step, total=self._total)
