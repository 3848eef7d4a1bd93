"""The lease that lets one gate decide at a time, on all hosts of a Prefect server.

A gate takes it for the fraction of a second in which it writes. Prefect has no compare-and-set, but
names of variables are unique, and each variable has an id that no other ever gets. So the lease is
a variable of a fixed name: to create it is to take it; to delete it, by its id, is to give it back,
or to take it from a holder that is gone. A late delete harms no lease that was taken since.

That a holder does not write late, once its lease was taken from it, rests on time. It writes for
`hold_s` at most, counted from before it asked for the lease; others leave a lease alone for
`expire_s` after they first saw it. The difference is for what is on its way to the server then.
Each counts on its own clock: no two clocks are compared.

On one host a lock in `$MUSTER_HOME/gate` comes first. It spares the server the crowd, and it tells
at once when a holder was killed: the kernel drops it with that.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID, uuid4

import httpx
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import VariableCreate, VariableUpdate
from prefect.client.schemas.objects import Variable
from prefect.exceptions import ObjectAlreadyExists

from tasks.processes.identity import boot_id, host_name
from tasks.record.places import is_at
from tasks.spec.errors import MusterError

_log = logging.getLogger(__name__)

#: The variable's name. One for all pools: they may share GPUs.
NAME = "muster_gate"
#: Of the variable that names the decision that was begun last.
_TURN = f"{NAME}_turn"
#: Giving back goes on for so long when the server does not answer, or the process is to end.
_BACK_WITHIN_S = 2.0
#: A killed holder's last request may still be at the server.
_SETTLE_S = 0.25
_LOCK_EVERY_S = 0.03
#: The host's lock is not waited for any longer: it may be that of a process that was suspended.
_LOCKED_OUT_FOR_S = 2.0
_LOOK_EVERY_S = (0.1, 0.25)
_NOTE = "Muster: the gate of the queue that decides right now; it goes by itself"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The lease as the server has it."""

    id: UUID
    #: Names this one taking; empty where somebody else wrote the variable.
    holder: str
    #: The mark of the host lock that the holder has; empty where it has none.
    lock: str
    #: Who that is, for people.
    who: str


def _lease(variable: Variable) -> Lease:
    value = variable.value if isinstance(variable.value, dict) else {}
    return Lease(
        id=variable.id,
        holder=str(value.get("holder") or ""),
        lock=str(value.get("lock") or ""),
        who=f"pid {value.get('pid')} on {value.get('host')}" if value else "somebody unknown",
    )


@dataclass(slots=True)
class HostLock:
    """The lock of one file."""

    path: Path
    _fd: int | None = None
    #: Names the locked file among all of all hosts; None while it is not locked by us. Whoever has
    #: the lock knows that somebody else who has written the same mark has it no more.
    mark: str | None = None

    def try_lock(self) -> bool:
        """Whether it is ours now. Never waits. Raises: OSError, where no lock is to be had."""
        if self._fd is not None and not is_at(self._fd, self.path):
            self.unlock()
        while self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_at(fd, self.path):
                    self._fd, self.mark = fd, _mark(fd)
            except BlockingIOError:
                return False
            finally:
                if self._fd is None:
                    os.close(fd)
        return True

    def unlock(self) -> None:
        fd, self._fd, self.mark = self._fd, None, None
        if fd is None:
            return
        try:
            # Closing alone would leave it to a child that was forked meanwhile.
            fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)


def _mark(fd: int) -> str:
    """Of a file that is open. By the name of this boot, a lock that NFS keeps to each host is told
    from one that spans them."""
    place = os.fstat(fd)
    return f"{boot_id()} {place.st_dev} {place.st_ino}"


class LeaseLost(MusterError):
    """It was held for longer than is safe, so another gate may decide by now: write nothing more,
    and begin again with what the server says then."""


def _since_boot() -> float:
    """Monotonic seconds; unlike `time.monotonic`, they go on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True, kw_only=True)
class LeaseHeld:
    """The lease, taken."""

    lease: Lease
    #: By the clock.
    began: float
    hold_s: float
    clock: Callable[[], float]
    is_over: bool = False

    @property
    def left_s(self) -> float:
        """Seconds in which to write; 0 when it is over."""
        return 0.0 if self.is_over else max(0.0, self.began + self.hold_s - self.clock())

    def check(self) -> None:
        """Call it right before each write, with no await between. Raises: LeaseLost."""
        if self.is_over:
            raise LeaseLost("the gate's lease was given back: nothing may be written by it")
        if self.left_s <= 0:
            raise LeaseLost(
                f"the gate's lease was asked for {self.clock() - self.began:.1f} s ago, and is "
                f"safe for {self.hold_s:g} s: another gate may decide by now"
            )


@dataclass(slots=True)
class GateLease:
    """Takes the lease, again and again, for one gate.

    Several tasks of an event loop may use it: they get it one after the other, as others do.
    """

    #: Entered, of this event loop.
    client: PrefectClient
    #: MUSTER_HOME, below which the lock of this host lies.
    home: Path
    #: The same for all gates of a server, as is `expire_s`, which is well above it.
    hold_s: float = 10.0
    expire_s: float = 15.0
    clock: Callable[[], float] = _since_boot
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _locked_out_since: float | None = None
    #: The taking that is ours now.
    _holder: str = ""
    #: Another's lease, and since when we see it.
    _seen: tuple[UUID, float] | None = None
    #: Takings of ours that are over, though the server may not know.
    _ghosts: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def held(self, *, within_s: float = 10.0) -> AsyncIterator[LeaseHeld | None]:
        """The lease, for the body; None when another gate had it for so long.

        It is given back when the body ends, by an error or a cancel too; a cancel waits for that,
        2 s at most. A body that takes longer than is safe is cancelled.

        Args:
            within_s: 0: it is asked for once. An answer of the server may take 10 s longer.

        Raises: httpx.HTTPError; LeaseLost, by the body's own check or by the cancel. That the lease
            could not be given back is only logged.
        """
        server = hashlib.sha256(str(self.client.api_url).encode()).hexdigest()[:16]
        lock = HostLock(self.home / "gate" / f"{server}.lock")
        try:
            holding = await self._take(lock, self.clock() + within_s)
            if holding is None:
                lock.unlock()
                yield None
                return
            try:
                self._holder = holding.lease.holder
                async with asyncio.timeout(holding.left_s) as limit:
                    yield holding
            except TimeoutError as error:
                if limit.expired():
                    why = f"safe for {self.hold_s:g} s: another gate may decide by now"
                    raise LeaseLost(f"the gate's lease is {why}") from error
                raise
            finally:
                holding.is_over, self._holder = True, ""
                await _in_any_case(self._give_back(holding))
        finally:
            lock.unlock()

    async def turn(self) -> str | None:
        """Names the decision that was begun last; None while another gate may be at one. As long as
        it stays the same, no other gate has written what a decision writes.

        Raises: httpx.HTTPError.
        """
        wanted = {"variables": {"name": {"any_": [NAME, _TURN]}}}
        asked = self.client.request("POST", "/variables/filter", json=wanted)
        answer = await self._asked(asked)
        found = {one.name: one for one in map(Variable.model_validate, answer.json())}
        # At one moment: while another gate may be at a decision, its turn is not known.
        if NAME in found and _lease(found[NAME]).holder != self._holder:
            return None
        return str(found[_TURN].value) if _TURN in found else ""

    async def begin_turn(self, holding: LeaseHeld) -> str:
        """Before the first write of a decision: whoever read before it is to read again.

        Returns: the turn that this is. Raises: httpx.HTTPError, LeaseLost.
        """
        holding.check()
        turn = holding.lease.holder
        try:
            update = VariableUpdate(name=_TURN, value=turn)
            await self._asked(self.client.update_variable(update))
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.NOT_FOUND:
                raise
            made = VariableCreate(name=_TURN, value=turn, tags=["muster"])
            await self._asked(self.client.create_variable(made))
        return turn

    async def _take(self, lock: HostLock, deadline: float) -> LeaseHeld | None:
        lease: Lease | None = None
        while True:
            if not self._is_locked_out(lock):
                # A look costs the server less than a try, so there is one try for each lease.
                lease = await self._asked(self._read()) if lease is not None else None
                if lease is None:
                    holding, lease = await self._create(lock)
                    if holding is not None:
                        return holding
                if lease is not None and await self._is_over(lease, lock):
                    await self._asked(self._delete(lease))
                    lease = None
                    continue
            if self.clock() >= deadline:
                who = lease.who if lease is not None else "another process of this host"
                _log.info("the gate is left to %s, which decides right now", who)
                return None
            if lease is None:
                await self.sleep(_LOCK_EVERY_S)
            else:
                await self.sleep(random.uniform(*_LOOK_EVERY_S))

    def _is_locked_out(self, lock: HostLock) -> bool:
        """Whether to leave the server in peace: another of this host has the lock, not for long."""
        try:
            if lock.try_lock():
                self._locked_out_since = None
                return False
        except OSError as error:
            _log.debug("the gate goes without a lock on this host, %s: %s", lock.path, error)
            return False
        if self._locked_out_since is None:
            self._locked_out_since = self.clock()
        return self.clock() - self._locked_out_since < _LOCKED_OUT_FOR_S

    async def _is_over(self, lease: Lease, lock: HostLock) -> bool:
        """Whether a lease's holder has gone without giving it back."""
        if lease.holder in self._ghosts:
            return True
        if lease.lock and lease.lock == lock.mark:
            _log.warning("the gate is taken over: %s has gone without giving it back", lease.who)
            await self.sleep(_SETTLE_S)
            return True
        now = self.clock()
        if self._seen is None or self._seen[0] != lease.id:
            self._seen = (lease.id, now)
        is_expired = now - self._seen[1] >= self.expire_s
        if is_expired:
            told = "the gate is taken over: %s has it for more than %g s"
            _log.warning(told, lease.who, self.expire_s)
        return is_expired

    async def _create(self, lock: HostLock) -> tuple[LeaseHeld | None, Lease | None]:
        """The lease as ours, or as another's; neither where that one has just given it back."""
        holder = uuid4().hex
        began = self.clock()
        creation = asyncio.create_task(self._created(holder, lock.mark))
        try:
            lease = await self._asked(asyncio.shield(creation))
        except BaseException:
            # It may be at the server all the same, now or later.
            self._ghosts.add(holder)
            await _in_any_case(self._undo(creation, holder))
            raise
        if lease is None or lease.holder != holder:
            return None, lease
        self._ghosts.clear()
        held = LeaseHeld(lease=lease, began=began, hold_s=self.hold_s, clock=self.clock)
        return held, lease

    async def _created(self, holder: str, lock: str | None) -> Lease | None:
        """The lease as it is then, whosever it is."""
        value = {
            "note": _NOTE,
            "holder": holder,
            "lock": lock,
            "host": host_name(),
            "pid": os.getpid(),
        }
        try:
            made = VariableCreate(name=NAME, value=value, tags=["muster"])
            return _lease(await self.client.create_variable(made))
        except ObjectAlreadyExists:
            # By ourselves, where Prefect's client has asked again because an answer was lost.
            return await self._read()

    async def _read(self) -> Lease | None:
        variable = await self.client.read_variable_by_name(NAME)
        return _lease(variable) if variable is not None else None

    async def _delete(self, lease: Lease) -> bool:
        """Whether it was there. A lease that was taken since is left alone."""
        # By its id, which the client's own method cannot: the name may be another's by now.
        ids = {"id": str(lease.id)}
        try:
            await self.client.request("DELETE", "/variables/{id}", path_params=ids)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.NOT_FOUND:
                raise
            return False
        return True

    async def _undo(self, creation: asyncio.Task[Lease | None], holder: str) -> None:
        with suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(_BACK_WITHIN_S):
                lease = await creation
                if lease is not None and lease.holder == holder:
                    await self._delete(lease)

    async def _give_back(self, holding: LeaseHeld) -> None:
        try:
            async with asyncio.timeout(_BACK_WITHIN_S):
                if not await self._delete(holding.lease):
                    _log.warning("the gate's lease was gone before it was given back")
        except (TimeoutError, httpx.HTTPError) as error:
            self._ghosts.add(holding.lease.holder)
            reason = str(error) or type(error).__name__
            _log.warning("the gate's lease is not given back, but will expire: %s", reason)

    async def _asked(self, answer: Awaitable[T]) -> T:
        """An answer that comes later than the holding would end is of no use."""
        try:
            async with asyncio.timeout(self.hold_s):
                return await answer
        except TimeoutError as error:
            reason = f"the gate's lease: no answer within {self.hold_s:g} s"
            raise httpx.ReadTimeout(reason) from error


async def _in_any_case(work: Coroutine[Any, Any, None]) -> None:
    """Do something that ends by itself, then be cancelled if that was asked meanwhile."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            # More than once: a scope of anyio's, as in Prefect's worker, cancels each wait anew.
            cancelled = error
    if cancelled is not None:
        raise cancelled
