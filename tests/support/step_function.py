"""Fake source of the current training step, for unit tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable


class StepFunction:
    """A fake source of the current training step. A function of the test returns the step."""

    def __init__(self, read_step: Callable[[], Awaitable[float | None]]) -> None:
        self._read_step = read_step

    async def step(self) -> float | None:
        return await self._read_step()

    @property
    def unanswered(self) -> str:
        return ""

    async def explain_missing_step(self, *, is_over: bool) -> None:
        return None
