"""Whether a cluster answers, told once each time that it changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Emit(Protocol):
    """Told what happens to a job, as it happens."""

    def __call__(self, name: str, **fields: object) -> None: ...


class Contact:
    """The owner of what is known of the contact with one cluster."""

    def __init__(
        self, address: str, emit: Emit, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = address
        self._emit = emit
        self._clock = clock
        self._lost_at: float | None = None
        #: What the last unanswered question met.
        self.problem = ""

    @property
    def lost_for_s(self) -> float:
        """Since when it does not answer, 0 while it does."""
        return 0.0 if self._lost_at is None else self._clock() - self._lost_at

    @property
    def is_lost(self) -> bool:
        return self._lost_at is not None

    def answered(self) -> None:
        if self._lost_at is not None:
            lost_for_s, self._lost_at = self.lost_for_s, None
            self._emit("contact.back", address=self._address, after_s=round(lost_for_s, 1))

    def failed(self, problem: str) -> None:
        self.problem = problem
        if self._lost_at is None:
            self._lost_at = self._clock()
            self._emit("contact.lost", address=self._address, message=problem)
