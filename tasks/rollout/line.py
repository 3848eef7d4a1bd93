"""Where requests wait while all entrypoints are at their limit: first come, first served."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from tasks.rollout.router import Entrypoint, Full, NoEntrypoint, Router


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiter:
    #: By their arrival.
    number: int
    session: str | None
    exclude: Collection[int]
    is_retry: bool
    #: Its turn: an entrypoint that is counted as its own, or NoEntrypoint.
    turn: asyncio.Future[Entrypoint]
    #: The only entrypoint that it waits for; None: any.
    key: tuple[int, int] | None


class Line:
    """Hands out entrypoints, and lets those wait for whom there is no room.

    A waiter is handed its entrypoint at the moment at which another request gives it back, so that
    nobody who comes later gets in between.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        #: By what they wait for, each in the order of arrival.
        self._lines: dict[tuple[int, int] | None, OrderedDict[_Waiter, None]] = {
            None: OrderedDict()
        }
        self._numbers = itertools.count()
        router.listen(lambda gone: self._serve_all())

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    async def take(
        self, session: str | None, exclude: Collection[int] = (), *, is_retry: bool = False
    ) -> Entrypoint:
        """See `Router.pick`. To be given back, whatever becomes of the request.

        Raises: NoEntrypoint, also while it waits.
        """
        try:
            return self._router.pick(session, exclude, is_retry=is_retry)
        except Full as full:
            waiter = _Waiter(
                number=next(self._numbers),
                session=session,
                exclude=exclude,
                is_retry=is_retry,
                turn=asyncio.get_running_loop().create_future(),
                key=full.session_key,
            )
        self._lines.setdefault(waiter.key, OrderedDict())[waiter] = None
        try:
            return await waiter.turn
        except asyncio.CancelledError:
            # It was its turn at the very moment at which its client left.
            turn = waiter.turn
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give_back(turn.result())
            raise
        finally:
            self._leave(waiter)

    def give_back(self, entrypoint: Entrypoint) -> None:
        """Room for one, which is that of whoever waits for it longest."""
        self._router.done(entrypoint)
        while len(self._lines) > 1 or self._lines[None]:
            own = self._lines.get(entrypoint.key, OrderedDict())
            # Nothing is changed while these are walked over, but before the walk ends.
            for waiter in heapq.merge(own, self._lines[None], key=lambda waiter: waiter.number):
                if (is_served := self._try(waiter)) is not None:
                    break
            else:
                return
            if is_served:
                return

    def _serve_all(self) -> None:
        """Anything may have changed: let all pass for whom there is room."""
        waiters = itertools.chain.from_iterable(self._lines.values())
        for waiter in sorted(waiters, key=lambda waiter: waiter.number):
            self._try(waiter)

    def _try(self, waiter: _Waiter) -> bool | None:
        """
        Returns: None: it waits as before. True: it was given an entrypoint. False: it waits no
            more, or for another one than before.
        """
        is_served = False
        try:
            if not waiter.turn.done():
                entrypoint = self._router.pick(
                    waiter.session, waiter.exclude, is_retry=waiter.is_retry
                )
                waiter.turn.set_result(entrypoint)
                is_served = True
        except Full as full:
            if full.session_key == waiter.key:
                return None
            self._leave(waiter)
            waiter.key = full.session_key
            self._lines.setdefault(waiter.key, OrderedDict())[waiter] = None
            return False
        except NoEntrypoint as error:
            waiter.turn.set_exception(error)
        self._leave(waiter)
        return is_served

    def _leave(self, waiter: _Waiter) -> None:
        line = self._lines.get(waiter.key)
        if line is not None:
            line.pop(waiter, None)
            if not line and waiter.key is not None:
                del self._lines[waiter.key]
