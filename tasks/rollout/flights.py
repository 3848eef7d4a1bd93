"""Requests that are under way, by the entrypoint they are with, so that they can be ended."""

from __future__ import annotations

import asyncio
from types import TracebackType

from tasks.rollout.router import Entrypoint


class EntrypointGone(Exception):
    """The entrypoint has left the routing while a request was with it."""


class _Flight:
    """A scope within which a request is with an entrypoint; see `Flights.to`."""

    __slots__ = ("_cancels", "_entrypoint", "_flights", "is_gone", "task")

    def __init__(self, flights: Flights, entrypoint: Entrypoint) -> None:
        self._flights = flights
        self._entrypoint = entrypoint
        self.is_gone = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        # As asyncio.timeout does: a cancel of ours is told from one of somebody else's.
        self._cancels = task.cancelling()
        self._flights.add(self._entrypoint, self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._flights.remove(self._entrypoint, self)
        if (
            self.is_gone
            and self.task.uncancel() <= self._cancels
            and kind is asyncio.CancelledError
        ):
            raise EntrypointGone(f"rank {self._entrypoint.rank} has left the routing") from error


class Flights:
    """All requests that are with an entrypoint."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], dict[_Flight, None]] = {}

    def to(self, entrypoint: Entrypoint) -> _Flight:
        """`with flights.to(entrypoint): ...`; raises EntrypointGone out of it after `abort`."""
        return _Flight(self, entrypoint)

    def abort(self, rank: int, epoch: int) -> int:
        """End all that is with this incarnation, at once.

        Returns: how many requests that were. One that calls this itself is not among them.
        """
        aborted = 0
        for flight in self._of.get((rank, epoch), {}):
            if not flight.is_gone and flight.task is not asyncio.current_task():
                flight.is_gone = True
                flight.task.cancel()
                aborted += 1
        return aborted

    def abort_all(self) -> int:
        return sum(self.abort(*key) for key in tuple(self._of))

    def add(self, entrypoint: Entrypoint, flight: _Flight) -> None:
        self._of.setdefault(entrypoint.key, {})[flight] = None

    def remove(self, entrypoint: Entrypoint, flight: _Flight) -> None:
        flights = self._of[entrypoint.key]
        del flights[flight]
        if not flights:
            del self._of[entrypoint.key]
