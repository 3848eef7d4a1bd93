"""Which entrypoint a request goes to: that of its session, else the one with the least to do. While
all are at their limit, requests wait in a line: first come, first served.

No I/O. A choice takes the same time with three entrypoints as with thousands.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

#: Sessions that are remembered; the one that was used least recently is forgotten first.
MAX_SESSIONS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrypoint:
    """A server that accepts rollout requests, in one incarnation of its group."""

    rank: int
    epoch: int
    #: `http://host:port`.
    url: str
    #: Of the fleet's engines.
    engine: int = 0
    #: Of its weights.
    version: int | None = None
    #: False: chosen only when no preferred one is left, because its last answers were missing.
    is_preferred: bool = True

    @property
    def key(self) -> tuple[int, int]:
        """Another epoch is another entrypoint."""
        return self.rank, self.epoch


class NoEntrypoint(Exception):
    """Nobody can take the request: tell the client why, at once."""


class LineFull(NoEntrypoint):
    """There is no room in the waiting line, or its time there is over."""


class Full(Exception):
    """All that could take the request are at their limit, or the routing is closed: it waits."""


#: How much higher on the ladder one stands that is not preferred: above all that are.
_NOT_PREFERRED = 1 << 32


@dataclass(slots=True, eq=False)
class _Slot:
    entrypoint: Entrypoint
    #: Requests that were sent there and are not done.
    outstanding: int = 0
    #: Its step on the ladder.
    height: int = 0


class _Ladder:
    """Slots by how much they have outstanding, each step in the order in which they came there: the
    oldest of the lowest step is "least outstanding, round robin among ties"."""

    def __init__(self) -> None:
        # OrderedDict, because the first entry of a dict is behind those that were deleted.
        self._steps: dict[int, OrderedDict[tuple[int, int], _Slot]] = {}

    def add(self, slot: _Slot) -> None:
        if (step := self._steps.get(slot.height)) is None:
            step = self._steps[slot.height] = OrderedDict()
        step[slot.entrypoint.key] = slot

    def remove(self, slot: _Slot) -> None:
        """Before anything of it changes."""
        step = self._steps[slot.height]
        del step[slot.entrypoint.key]
        if not step:
            del self._steps[slot.height]

    def least(self, exclude: Collection[int] = ()) -> _Slot | None:
        """The first that may be chosen: none of an excluded rank."""
        if not exclude:
            return next(iter(self._steps[min(self._steps)].values())) if self._steps else None
        rising = (slot for height in sorted(self._steps) for slot in self._steps[height].values())
        return next((slot for slot in rising if slot.entrypoint.rank not in exclude), None)


_Pick = Callable[[], Entrypoint]


class Router:
    """The entrypoints that may be chosen now, what each has outstanding, the sessions, and the line
    of those for whom there is no room: nobody who comes later gets in between.

    Args:
        max_sessions: see `MAX_SESSIONS`.
        limit: requests that one entrypoint may have outstanding; None: any number.
        queue_size: so many wait at most.
        queue_timeout_s: nobody waits longer; None: for ever.
    """

    def __init__(
        self,
        *,
        max_sessions: int = MAX_SESSIONS,
        limit: int | None = None,
        queue_size: int = 0,
        queue_timeout_s: float | None = None,
    ) -> None:
        self._max_sessions = max_sessions
        self._limit = limit
        self._queue_size, self._queue_timeout_s = queue_size, queue_timeout_s
        #: Each one's `pick`, in the order of arrival, by its turn: an entrypoint that is counted as
        #: its own, or NoEntrypoint.
        self._line: OrderedDict[asyncio.Future[Entrypoint], _Pick] = OrderedDict()
        self._active: dict[tuple[int, int], _Slot] = {}
        #: Those that have left while something was outstanding there.
        self._leaving: dict[tuple[int, int], _Slot] = {}
        self._ladder = _Ladder()
        #: In the order of their last use.
        self._sessions: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._total = 0
        self._why_none = "none has started yet"
        self._is_closed = False
        #: Resolves once nothing is outstanding; None: nobody waits for that.
        self._idle: asyncio.Future[None] | None = None
        self._listeners: list[Callable[[tuple[Entrypoint, ...]], None]] = []

    def set(self, entrypoints: Iterable[Entrypoint], *, why_none: str = "") -> None:
        """Choose from these from now on. What is outstanding on one that leaves is counted until it
        is done.

        Args:
            why_none: what to tell clients when there is none among them.
        """
        wanted = {entrypoint.key: entrypoint for entrypoint in entrypoints}
        self._why_none = why_none or "all are down"
        gone = [slot for key, slot in self._active.items() if key not in wanted]
        for slot in gone:
            self._ladder.remove(slot)
            del self._active[slot.entrypoint.key]
            if slot.outstanding:
                self._leaving[slot.entrypoint.key] = slot
        for key, entrypoint in wanted.items():
            active = self._active.get(key)
            if active is not None and active.entrypoint == entrypoint:
                continue
            if active is None:
                active = self._leaving.pop(key, None) or _Slot(entrypoint)
                self._active[key] = active
            else:
                self._ladder.remove(active)
            active.entrypoint = entrypoint
            active.height = active.outstanding + _NOT_PREFERRED * (not entrypoint.is_preferred)
            self._ladder.add(active)
        self._tell(tuple(slot.entrypoint for slot in gone))

    def close(self) -> None:
        """Let all that would generate wait, though there may be entrypoints, until `open`."""
        self._is_closed = True

    def open(self) -> None:
        self._is_closed = False
        self._tell(())

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def abort(self) -> None:
        """End what is outstanding; a request that was not answered yet may be tried again."""
        self._tell(self.entrypoints)

    async def idle(self) -> None:
        """Returns once nothing is outstanding."""
        while self._total:
            if self._idle is None or self._idle.done():
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def listen(self, listener: Callable[[tuple[Entrypoint, ...]], None]) -> None:
        """Have it told each `set`, `open` and `abort`, with the entrypoints whose requests end."""
        self._listeners.append(listener)

    async def take(
        self, session: str | None, exclude: Collection[int] = (), *, generates: bool = True
    ) -> Entrypoint:
        """See `pick`; it waits for its turn. To be `done`, whatever becomes of the request.

        Raises: NoEntrypoint, also while it waits; LineFull.
        """
        pick = partial(self.pick, session, exclude, generates=generates)
        try:
            return pick()
        except Full as full:
            if len(self._line) >= self._queue_size:
                why = f"{self._queue_size} requests wait already: send fewer at once"
                raise LineFull(why) from full
        turn: asyncio.Future[Entrypoint] = asyncio.get_running_loop().create_future()
        self._line[turn] = pick
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                return await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            # It was its turn at the very moment at which its client left, or its time was over.
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.done(turn.result())
            if isinstance(error, TimeoutError):
                why = f"no server had room for it within {self._queue_timeout_s:g} s"
                raise LineFull(why) from error
            raise
        finally:
            self._line.pop(turn, None)

    def pick(
        self, session: str | None, exclude: Collection[int] = (), *, generates: bool = True
    ) -> Entrypoint:
        """An entrypoint for one request, which counts as outstanding there until it is `done`.

        Args:
            session: keeps its entrypoint as long as that one is active and preferred; while it is
                at its limit, another one is chosen.
            exclude: ranks that are not wanted, because they were tried.
            generates: False: it is answered while the routing is closed, too.

        Raises:
            NoEntrypoint: none is active and wanted. The session is forgotten.
            Full: all of those are at their limit, or the routing is closed.
        """
        if self._is_closed and generates:
            raise Full
        try:
            slot = self._choose(session, exclude)
        except NoEntrypoint:
            if session is not None:
                self._sessions.pop(session, None)
            raise
        if session is not None:
            self._remember(session, slot.entrypoint.key)
        self._move(slot, 1)
        return slot.entrypoint

    def done(self, entrypoint: Entrypoint) -> None:
        """The request that got this entrypoint has ended, one way or the other.

        Raises: ValueError, when nothing is outstanding there.
        """
        slot = self._active.get(entrypoint.key) or self._leaving.get(entrypoint.key)
        if slot is None or not slot.outstanding:
            raise ValueError(f"nothing is outstanding on rank {entrypoint.rank}")
        self._move(slot, -1)
        self._serve()

    def outstanding_of(self, rank: int, epoch: int) -> int:
        """Requests of this incarnation that are not done; 0 where it is not known."""
        slot = self._active.get((rank, epoch)) or self._leaving.get((rank, epoch))
        return slot.outstanding if slot else 0

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        return len(self._line)

    @property
    def outstanding(self) -> int:
        """Requests that are not done, on entrypoints that have left, too."""
        return self._total

    @property
    def entrypoints(self) -> tuple[Entrypoint, ...]:
        return tuple(slot.entrypoint for slot in self._active.values())

    @property
    def concurrency(self) -> int | None:
        """Requests that the entrypoints take at once; None: any number."""
        return None if self._limit is None else self._limit * len(self._active)

    def _choose(self, session: str | None, exclude: Collection[int]) -> _Slot:
        if session is not None:
            own = self._active.get(self._sessions.get(session, (-1, -1)))
            may_keep = own and own.entrypoint.rank not in exclude and self._may_keep(own)
            if own and may_keep and not self._is_full(own):
                return own
        if (slot := self._ladder.least(exclude)) is not None:
            if self._is_full(slot):
                raise Full
            return slot
        if not self._active:
            raise NoEntrypoint(f"no active rollout worker: {self._why_none}")
        ranks = ", ".join(map(str, sorted(exclude)))
        raise NoEntrypoint(f"no active rollout worker: none is left besides rank {ranks}")

    def _may_keep(self, slot: _Slot) -> bool:
        if slot.entrypoint.is_preferred:
            return True
        least = self._ladder.least()
        return least is None or not least.entrypoint.is_preferred

    def _is_full(self, slot: _Slot) -> bool:
        return self._limit is not None and slot.outstanding >= self._limit

    def _remember(self, session: str, key: tuple[int, int]) -> None:
        own = self._active.get(self._sessions.get(session, key))
        if own is None or not self._may_keep(own):
            self._sessions[session] = key
        # Else it comes back to what it has there, once there is room.
        self._sessions.setdefault(session, key)
        self._sessions.move_to_end(session)
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)

    def _move(self, slot: _Slot, by: int) -> None:
        self._total += by
        if not self._total and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        is_active = slot.entrypoint.key in self._active
        if is_active:
            self._ladder.remove(slot)
        slot.outstanding += by
        slot.height += by
        if is_active:
            self._ladder.add(slot)
        elif not slot.outstanding:
            del self._leaving[slot.entrypoint.key]

    def _tell(self, gone: tuple[Entrypoint, ...]) -> None:
        for listener in tuple(self._listeners):
            listener(gone)
        self._serve()

    def _serve(self) -> None:
        """Let those pass, in their order, for whom there is room, or who wait for nobody."""
        # The line is walked over anew once it has changed.
        while self._line and not self._is_closed:
            least = self._ladder.least()
            is_full = least is not None and self._is_full(least)
            if is_full or not any(map(self._has_passed, self._line)):
                return

    def _has_passed(self, turn: asyncio.Future[Entrypoint]) -> bool:
        """Whether it waits no more."""
        try:
            if not turn.done():
                turn.set_result(self._line[turn]())
        except Full:
            return False
        except NoEntrypoint as error:
            turn.set_exception(error)
        del self._line[turn]
        return True
