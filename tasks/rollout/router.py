"""The router chooses the entrypoint that receives each rollout request.

A request of a known session goes to the entrypoint of that session. Any other request goes to the
entrypoint with the fewest outstanding requests. While all entrypoints are at their limit, requests
wait in a queue and are served in the order of their arrival.

The router does no I/O. The time of a choice does not depend on the number of entrypoints.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

#: Number of sessions that a router remembers. It forgets the least recently used session first.
MAX_SESSIONS = 200_000

#: Number that is added to the load of an entrypoint that is not preferred. The router
#: chooses the entrypoint with the least load, so it chooses preferred entrypoints first.
_NOT_PREFERRED_LOAD = 1 << 32

#: Key of an entrypoint: rank and epoch. The epoch counts the starts of the entrypoint.
_Key = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrypoint:
    """A server that accepts rollout requests. A restarted server is a new `Entrypoint`."""

    #: Rank of the server in the fleet.
    rank: int
    #: Epoch of the server: 1 after the first start, 2 after the second start, and so on.
    epoch: int
    #: URL of the server's HTTP API: `http://host:port`.
    url: str
    #: Index of the server's engine in the fleet.
    engine: int = 0
    #: Version of the server's weights, or None if it is unknown.
    version: int | None = None
    #: False if the server did not answer its last health checks. The server is then chosen only if
    #: no preferred server is available.
    is_preferred: bool = True

    @property
    def key(self) -> tuple[int, int]:
        """Rank and epoch of the server. The epoch changes with each restart of the server."""
        return self.rank, self.epoch


class NoEntrypoint(Exception):
    """No server can take the request. The message tells the client the reason."""


class LineFull(NoEntrypoint):
    """The queue has no room for the request, or the request has waited too long in the queue."""


class MustWait(Exception):
    """A request must wait, because all suitable entrypoints are busy or the router is closed."""


@dataclass(slots=True, eq=False)
class _Slot:
    """An entrypoint with the number of its unanswered requests."""

    entrypoint: Entrypoint
    #: Number of requests that were sent to the entrypoint and have not ended.
    outstanding: int = 0
    #: Sort key of the slot: `outstanding`, plus a large number if the entrypoint is not preferred.
    load: int = 0


class _SlotsByLoad:
    """Entrypoint slots in the order of their load.

    Slots with the same load are in the order in which they were added. After each change of its
    load, a slot is added again. So entrypoints with the same load are chosen in turn.
    """

    def __init__(self) -> None:
        # Use an OrderedDict, which finds its first entry at once. A dict is slow at this after many
        # deletions at its beginning.
        self._slots: dict[int, OrderedDict[_Key, _Slot]] = {}

    def add(self, slot: _Slot) -> None:
        """Add the slot of an entrypoint after the other slots with the same load."""
        slots_with_load = self._slots.get(slot.load)
        if slots_with_load is None:
            slots_with_load = OrderedDict()
            self._slots[slot.load] = slots_with_load
        slots_with_load[slot.entrypoint.key] = slot

    def remove(self, slot: _Slot) -> None:
        """Remove an entrypoint slot. The slot's load and key must not have changed since `add`."""
        slots_with_load = self._slots[slot.load]
        del slots_with_load[slot.entrypoint.key]
        if not slots_with_load:
            del self._slots[slot.load]

    def find_first(self, excluded_ranks: Collection[int] = ()) -> _Slot | None:
        """Return the entrypoint slot with the least load; None if all slots are excluded."""
        if not self._slots:
            return None
        if not excluded_ranks:
            return next(iter(self._slots[min(self._slots)].values()))
        for load in sorted(self._slots):
            for slot in self._slots[load].values():
                if slot.entrypoint.rank not in excluded_ranks:
                    return slot
        return None


#: Function like `Router.pick` that chooses an entrypoint for a certain request of the queue.
_Pick = Callable[[], Entrypoint]


class Router:
    """Chooses entrypoints for requests, counts outstanding requests, and holds the request queue.

    A new request gets an entrypoint only if no request in the queue can use that entrypoint.
    """

    def __init__(
        self,
        *,
        max_sessions: int = MAX_SESSIONS,
        limit: int | None = None,
        queue_size: int = 0,
        queue_timeout_s: float | None = None,
    ) -> None:
        """
        Args:
            max_sessions: Number of sessions to remember.
            limit: Highest number of outstanding requests for one entrypoint, or None for no limit.
            queue_size: Highest number of requests that wait in the queue.
            queue_timeout_s: Longest wait in the queue in seconds, or None for no limit.
        """
        self._max_sessions = max_sessions
        self._limit = limit
        self._queue_size = queue_size
        self._queue_timeout_s = queue_timeout_s
        #: The waiting requests in the order of their arrival. A key is a future, whose result is
        #: the entrypoint for the request or a NoEntrypoint error. The value is the function that
        #: chooses the entrypoint.
        self._queue: OrderedDict[asyncio.Future[Entrypoint], _Pick] = OrderedDict()
        #: The entrypoints that the router may choose for a request.
        self._active: dict[_Key, _Slot] = {}
        #: Entrypoints that were removed, but still have outstanding requests.
        self._leaving: dict[_Key, _Slot] = {}
        self._by_load = _SlotsByLoad()
        #: Mapping from a session to the key (rank and epoch) of its entrypoint. The session that
        #: was used most recently comes last.
        self._sessions: OrderedDict[str, _Key] = OrderedDict()
        #: Number of outstanding requests of all entrypoints, including removed entrypoints.
        self._total = 0
        self._why_none = "no server has started yet"
        self._is_closed = False
        #: Future that resolves when no request is outstanding. None if no caller waits for this
        #: moment.
        self._idle: asyncio.Future[None] | None = None
        self._listeners: list[Callable[[tuple[Entrypoint, ...]], None]] = []

    def set(self, entrypoints: Iterable[Entrypoint], *, why_none: str = "") -> None:
        """Set the entrypoints that may receive requests, and notify the listeners.

        An outstanding request of a removed entrypoint is still counted until the request ends.

        Args:
            entrypoints: The entrypoints to choose from.
            why_none: Reason to give to clients if there are no entrypoints.
        """
        wanted = {entrypoint.key: entrypoint for entrypoint in entrypoints}
        self._why_none = why_none or "all are down"

        removed = [slot for key, slot in self._active.items() if key not in wanted]
        for slot in removed:
            self._by_load.remove(slot)
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
                self._by_load.remove(active)
            active.entrypoint = entrypoint
            active.load = active.outstanding
            if not entrypoint.is_preferred:
                active.load += _NOT_PREFERRED_LOAD
            self._by_load.add(active)
        self._notify(tuple(slot.entrypoint for slot in removed))

    def close(self) -> None:
        """Let all requests that generate tokens wait until `open` is called."""
        self._is_closed = True

    def open(self) -> None:
        """Let requests that generate tokens proceed again, after `close` has made them wait."""
        self._is_closed = False
        self._notify(())

    @property
    def is_closed(self) -> bool:
        """True between `close` and `open`: requests that generate tokens must wait."""
        return self._is_closed

    def abort(self) -> None:
        """End all outstanding requests. Requests without any response data may be retried."""
        self._notify(self.entrypoints)

    async def idle(self) -> None:
        """Wait until no request is outstanding."""
        while self._total:
            if self._idle is None or self._idle.done():
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def listen(self, listener: Callable[[tuple[Entrypoint, ...]], None]) -> None:
        """Add a function that cancels the unanswered requests to some entrypoints.

        The methods `set`, `open` and `abort` of this router call the function.

        Args:
            listener: The function. Its argument contains the entrypoints, and may be empty.
        """
        self._listeners.append(listener)

    async def take(
        self, session: str | None, exclude: Collection[int] = (), *, generates: bool = True
    ) -> Entrypoint:
        """Return the entrypoint (inference server) that gets a request.

        If all entrypoints are at their limit or the router is closed, the call waits in the queue.
        The caller must call `done` when the request ends, even after a failure.

        Args:
            session: Name of the request's session, or None.
            exclude: Ranks of servers that may not be chosen, because the request has already failed
                there.
            generates: True if the request generates tokens. Other requests may be sent even if the
                router is closed.

        Raises:
            NoEntrypoint: No server can take the request, or no server is available any more.
            LineFull: The queue has no room, or the request has waited too long in the queue.
        """
        pick = partial(self.pick, session, exclude, generates=generates)
        try:
            return pick()
        except MustWait as must_wait:
            if len(self._queue) >= self._queue_size:
                why = (
                    f"the gateway's queue is full: {self._queue_size} requests already wait for a "
                    "server (queue_size). Send fewer requests at once"
                )
                raise LineFull(why) from must_wait
        turn: asyncio.Future[Entrypoint] = asyncio.get_running_loop().create_future()
        self._queue[turn] = pick
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                return await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            # The request may have got an entrypoint at the moment of its timeout or cancellation.
            # Call `done` to free this entrypoint, because the request will not be sent.
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.done(turn.result())
            if isinstance(error, TimeoutError):
                why = f"no server was free within {self._queue_timeout_s:g} s (queue_timeout_s)"
                raise LineFull(why) from error
            raise
        finally:
            self._queue.pop(turn, None)

    def pick(
        self, session: str | None, exclude: Collection[int] = (), *, generates: bool = True
    ) -> Entrypoint:
        """Return the entrypoint (inference server) that gets a request. This method never waits.

        The request counts as outstanding until the caller calls `done`.

        Args:
            session: Session id of the request, or None. All requests of a session go to the same
                entrypoint if possible. Another entrypoint is chosen if the entrypoint of the
                session is inactive, silent or at its limit.
            exclude: Ranks of servers that may not be chosen, because the request has already failed
                there.
            generates: True if the request generates tokens. Other requests may be sent even if the
                router is closed.

        Raises:
            NoEntrypoint: No active entrypoint is left after the exclusion. The router forgets the
                entrypoint of the session.
            MustWait: All suitable entrypoints are at their limit, or the router is closed.
        """
        if self._is_closed and generates:
            raise MustWait
        try:
            slot = self._choose(session, exclude)
        except NoEntrypoint:
            if session is not None:
                self._sessions.pop(session, None)
            raise
        if session is not None:
            self._remember(session, slot.entrypoint.key)
        self._change_load(slot, 1)
        return slot.entrypoint

    def done(self, entrypoint: Entrypoint) -> None:
        """Record that a request to this entrypoint has ended, successfully or not.

        Raises:
            ValueError: The entrypoint has no outstanding request.
        """
        slot = self._active.get(entrypoint.key) or self._leaving.get(entrypoint.key)
        if slot is None or not slot.outstanding:
            raise ValueError(f"no request is in progress on the server of rank {entrypoint.rank}")
        self._change_load(slot, -1)
        self._serve_queue()

    def outstanding_of(self, rank: int, epoch: int) -> int:
        """Return the number of outstanding requests of a server, or 0 if it is not an entrypoint.

        Args:
            rank: Rank of the server.
            epoch: Epoch of the server. The epoch counts the starts of the server's group.
        """
        slot = self._active.get((rank, epoch)) or self._leaving.get((rank, epoch))
        return slot.outstanding if slot else 0

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue)

    @property
    def outstanding(self) -> int:
        """Number of outstanding requests of all entrypoints, including removed entrypoints."""
        return self._total

    @property
    def entrypoints(self) -> tuple[Entrypoint, ...]:
        """The entrypoints that the router may choose for a request."""
        return tuple(slot.entrypoint for slot in self._active.values())

    @property
    def concurrency(self) -> int | None:
        """Number of requests that all entrypoints together accept at once, or None for no limit."""
        return None if self._limit is None else self._limit * len(self._active)

    def _choose(self, session: str | None, exclude: Collection[int]) -> _Slot:
        """Return the slot of the entrypoint that should receive a request.

        Raises:
            NoEntrypoint: No entrypoint is active, or all active entrypoints are in `exclude`.
            MustWait: All suitable entrypoints are at their limit.
        """
        if session is not None:
            session_slot = self._active.get(self._sessions.get(session, (-1, -1)))
            if (
                session_slot is not None
                and session_slot.entrypoint.rank not in exclude
                and self._may_keep(session_slot)
                and not self._is_full(session_slot)
            ):
                return session_slot

        slot = self._by_load.find_first(exclude)
        if slot is not None:
            if self._is_full(slot):
                raise MustWait
            return slot
        if not self._active:
            raise NoEntrypoint(f"no inference server can take the request: {self._why_none}")
        ranks = ", ".join(map(str, sorted(exclude)))
        raise NoEntrypoint(
            "no inference server can take the request: Muster tried all servers without success "
            f"(ranks {ranks})"
        )

    def _may_keep(self, slot: _Slot) -> bool:
        """Return True if a session may keep its entrypoint for further requests.

        Return False if this entrypoint did not answer its last health checks, but another
        entrypoint answered its health checks.
        """
        if slot.entrypoint.is_preferred:
            return True
        first = self._by_load.find_first()
        return first is None or not first.entrypoint.is_preferred

    def _is_full(self, slot: _Slot) -> bool:
        """Return True if an entrypoint has reached its limit of outstanding requests."""
        return self._limit is not None and slot.outstanding >= self._limit

    def _remember(self, session: str, key: _Key) -> None:
        """Remember the entrypoint of a session.

        If too many sessions are remembered, the least recently used session is forgotten.

        If a request goes to another entrypoint only because the session's entrypoint is at its
        limit, the session keeps its old entrypoint. Later requests then return to the old
        entrypoint, which has cached the prefix of their prompts.
        """
        session_slot = self._active.get(self._sessions.get(session, key))
        if session_slot is None or not self._may_keep(session_slot):
            self._sessions[session] = key
        self._sessions.setdefault(session, key)
        self._sessions.move_to_end(session)
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)

    def _change_load(self, slot: _Slot, change: int) -> None:
        """Add `change` to the outstanding requests of an entrypoint."""
        self._total += change
        if not self._total and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        is_active = slot.entrypoint.key in self._active
        if is_active:
            self._by_load.remove(slot)
        slot.outstanding += change
        slot.load += change
        if is_active:
            self._by_load.add(slot)
        elif not slot.outstanding:
            del self._leaving[slot.entrypoint.key]

    def _notify(self, ended: tuple[Entrypoint, ...]) -> None:
        """Call the listeners, then give free entrypoints to the requests in the queue.

        Args:
            ended: Entrypoints whose outstanding requests must end.
        """
        for listener in tuple(self._listeners):
            listener(ended)
        self._serve_queue()

    def _serve_queue(self) -> None:
        """Give free entrypoints to the requests in the queue, in the order of their arrival."""
        # A request that gets an entrypoint leaves the queue. So start again at the beginning of the
        # changed queue.
        while self._queue and not self._is_closed:
            first = self._by_load.find_first()
            is_full = first is not None and self._is_full(first)
            if is_full or not any(map(self._try_to_serve, self._queue)):
                return

    def _try_to_serve(self, turn: asyncio.Future[Entrypoint]) -> bool:
        """Give an entrypoint to a request in the queue, and remove the request from the queue.

        If no server can take the request any more, the request gets an error instead.

        Args:
            turn: Future of the request, which resolves with the entrypoint.

        Returns:
            False if the request must wait longer.
        """
        try:
            if not turn.done():
                pick = self._queue[turn]
                turn.set_result(pick())
        except MustWait:
            return False
        except NoEntrypoint as error:
            turn.set_exception(error)
        del self._queue[turn]
        return True
