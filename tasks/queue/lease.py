"""The lease that lets only one gate decide at a time, on all hosts of a Prefect server.

A gate holds the lease for the fraction of a second in which it writes. Prefect has no
compare-and-set, but names of variables are unique, and the id of a variable is never used again.
So the lease is a variable with a fixed name. Creating it takes the lease. Deleting it by its id
gives the lease back, or takes it from a holder that is gone. A delete that arrives late cannot
remove a newer lease, which has another id.

Time keeps a holder from writing after its lease was taken away. The holder writes for at most
`hold_s`, counted from before it asked for the lease. Others leave a lease alone for `expire_s`
after they first saw it. The difference leaves time for requests that are on their way to the
server. Clocks of different machines are never compared.

On each host, a file lock in `$MUSTER_HOME/gate` comes first. It keeps the gates of one host from
crowding the server. It also shows at once that a holder was killed, because the kernel then frees
the lock.
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

#: Name of the variable. There is one for all pools, because pools may share GPUs.
NAME = "muster_gate"
#: Name of the variable that identifies the decision that was begun last.
_TURN = f"{NAME}_turn"
#: Seconds to try to give the lease back if the server does not answer or the process must end.
_BACK_WITHIN_S = 2.0
#: Seconds to wait before the lease of a killed holder is taken over. The last request of the holder
#: may still be on its way.
_SETTLE_S = 0.25
#: Seconds between two tries to lock the host's file.
_LOCK_INTERVAL_S = 0.03
#: Seconds after which a gate goes on without the host's lock. A suspended process may hold it.
_LOCK_TIMEOUT_S = 2.0
#: Smallest and largest pause before another holder's lease is read again, in seconds.
_READ_INTERVAL_S = (0.1, 0.25)
_NOTE = "Muster: the gate of the queue that decides right now; it goes by itself"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The lease, as it is stored on the server."""

    id: UUID
    #: Random id of this use of the lease. Empty if the variable was not written by Muster.
    holder: str
    #: Mark of the host lock of the holder, or an empty string.
    lock: str
    #: Description of the holder for people.
    who: str


def _parse_lease(variable: Variable) -> Lease:
    value = variable.value if isinstance(variable.value, dict) else {}
    return Lease(
        id=variable.id,
        holder=str(value.get("holder") or ""),
        lock=str(value.get("lock") or ""),
        who=f"pid {value.get('pid')} on {value.get('host')}" if value else "somebody unknown",
    )


@dataclass(slots=True)
class HostLock:
    """A lock on a file, for the processes of one host."""

    path: Path
    _fd: int | None = None
    #: Identifies the locked file among the files of all hosts; None while it is not locked here.
    #: Only one process at a time has the lock of a file. So while this process has it, a lease with
    #: the same mark belongs to a process that has lost the lock.
    mark: str | None = None

    def try_lock(self) -> bool:
        """Try to lock the file without waiting. Returns True if it is locked now.

        Raises:
            OSError: The file cannot be locked at all.
        """
        if self._fd is not None and not is_at(self._fd, self.path):
            self.unlock()
        while self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_at(fd, self.path):
                    self._fd = fd
                    self.mark = _mark_of(fd)
            except BlockingIOError:
                return False
            finally:
                if self._fd is None:
                    os.close(fd)
        return True

    def unlock(self) -> None:
        """Unlock the file, if it is locked."""
        fd = self._fd
        self._fd = None
        self.mark = None
        if fd is None:
            return
        try:
            # Closing is not enough: a child that was forked meanwhile also has the file open.
            fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)


def _mark_of(fd: int) -> str:
    """Return the mark of an open file.

    It contains the id of this boot, because some NFS mounts lock files for each host separately.
    """
    status = os.fstat(fd)
    return f"{boot_id()} {status.st_dev} {status.st_ino}"


class LeaseLost(MusterError):
    """The lease was held for too long, so another gate may decide now.

    Write nothing more, and start again with what the server says.
    """


def _since_boot() -> float:
    """Return monotonic seconds that, unlike `time.monotonic`, include suspended time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True, kw_only=True)
class LeaseHeld:
    """The lease while this process holds it."""

    lease: Lease
    #: Time at which the lease was requested, by the clock.
    began: float
    hold_s: float
    clock: Callable[[], float]
    is_over: bool = False

    @property
    def left_s(self) -> float:
        """Seconds that are left for writing; 0 if the lease is over."""
        return 0.0 if self.is_over else max(0.0, self.began + self.hold_s - self.clock())

    def check(self) -> None:
        """Call this right before each write, with no await in between.

        Raises:
            LeaseLost: The lease is over.
        """
        if self.is_over:
            raise LeaseLost("the gate's lease was given back: nothing may be written by it")
        if self.left_s <= 0:
            raise LeaseLost(
                f"the gate's lease was asked for {self.clock() - self.began:.1f} s ago, and is "
                f"safe for {self.hold_s:g} s: another gate may decide by now"
            )


@dataclass(slots=True)
class GateLease:
    """Takes the lease for one gate, as often as needed.

    Several tasks of an event loop may use it. They get the lease one after the other.
    """

    #: An open client of this event loop.
    client: PrefectClient
    #: The MUSTER_HOME directory, which contains the lock file of this host.
    home: Path
    #: Seconds for which a holder may write. All gates of a server must use the same value.
    hold_s: float = 10.0
    #: Seconds after which others take the lease away. Must be well above `hold_s`.
    expire_s: float = 15.0
    clock: Callable[[], float] = _since_boot
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    #: Time since when another process of this host has the lock, or None.
    _locked_out_since: float | None = None
    #: Holder id of the lease that this object has now, or an empty string.
    _holder: str = ""
    #: Id of the lease of another gate, and when it was first seen.
    _seen: tuple[UUID, float] | None = None
    #: Holder ids of earlier leases of this object that the server may still store.
    _ghosts: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def held(self, *, within_s: float = 10.0) -> AsyncIterator[LeaseHeld | None]:
        """Take the lease for the body of a `with` statement.

        The value is None if another gate had the lease for `within_s` seconds. The lease is given
        back when the body ends, also after an error or a cancel. A cancel waits for that, at most
        2 s. A body that takes longer than `hold_s` is cancelled.

        Args:
            within_s: Seconds to wait for the lease; 0: try once. An answer of the server may take
                10 s longer.

        Raises:
            httpx.HTTPError: The server did not answer. A failure to give the lease back is only
                logged.
            LeaseLost: The body took too long.
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
                holding.is_over = True
                self._holder = ""
                await _finish(self._give_back(holding))
        finally:
            lock.unlock()

    async def turn(self) -> str | None:
        """Return the id of the decision that was begun last.

        While the id stays the same, no other gate has written a decision.

        Returns:
            None while another gate may be deciding.

        Raises:
            httpx.HTTPError: The server did not answer.
        """
        # Both variables are read by one request, so they belong to the same moment.
        name_filter = {"variables": {"name": {"any_": [NAME, _TURN]}}}
        request = self.client.request("POST", "/variables/filter", json=name_filter)
        answer = await self._with_timeout(request)
        variables = {
            variable.name: variable for variable in map(Variable.model_validate, answer.json())
        }
        if NAME in variables and _parse_lease(variables[NAME]).holder != self._holder:
            return None
        return str(variables[_TURN].value) if _TURN in variables else ""

    async def begin_turn(self, holding: LeaseHeld) -> str:
        """Announce a decision. Call this before its first write.

        A gate that read the queue before this call must read it again.

        Returns:
            The id of this decision.

        Raises:
            httpx.HTTPError: The server did not answer.
            LeaseLost: The lease is over.
        """
        holding.check()
        turn = holding.lease.holder
        try:
            update = VariableUpdate(name=_TURN, value=turn)
            await self._with_timeout(self.client.update_variable(update))
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.NOT_FOUND:
                raise
            creation = VariableCreate(name=_TURN, value=turn, tags=["muster"])
            await self._with_timeout(self.client.create_variable(creation))
        return turn

    async def _take(self, lock: HostLock, deadline: float) -> LeaseHeld | None:
        """Take the lease, or return None after the deadline."""
        lease: Lease | None = None
        while True:
            if not self._is_locked_out(lock):
                # Reading costs the server less than a try to create the variable. So create it only
                # after the last known lease has gone.
                if lease is not None:
                    lease = await self._with_timeout(self._read())
                if lease is None:
                    holding, lease = await self._create(lock)
                    if holding is not None:
                        return holding
                if lease is not None and await self._is_over(lease, lock):
                    await self._with_timeout(self._delete(lease))
                    lease = None
                    continue
            if self.clock() >= deadline:
                who = lease.who if lease is not None else "another process of this host"
                _log.info("the gate is left to %s, which decides right now", who)
                return None
            if lease is None:
                await self.sleep(_LOCK_INTERVAL_S)
            else:
                await self.sleep(random.uniform(*_READ_INTERVAL_S))

    def _is_locked_out(self, lock: HostLock) -> bool:
        """Return True if another process of this host has the lock, for up to two seconds."""
        try:
            if lock.try_lock():
                self._locked_out_since = None
                return False
        except OSError as error:
            _log.debug("the gate goes without a lock on this host, %s: %s", lock.path, error)
            return False
        if self._locked_out_since is None:
            self._locked_out_since = self.clock()
        return self.clock() - self._locked_out_since < _LOCK_TIMEOUT_S

    async def _is_over(self, lease: Lease, lock: HostLock) -> bool:
        """Return True if the holder of a lease has gone without giving it back."""
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
            message = "the gate is taken over: %s has it for more than %g s"
            _log.warning(message, lease.who, self.expire_s)
        return is_expired

    async def _create(self, lock: HostLock) -> tuple[LeaseHeld | None, Lease | None]:
        """Create the lease.

        Returns:
            The lease as taken, and the lease on the server. The first is None if another gate has
            the lease. Both are None if that gate has just given it back.
        """
        holder = uuid4().hex
        began = self.clock()
        creation = asyncio.create_task(self._request_creation(holder, lock.mark))
        try:
            lease = await self._with_timeout(asyncio.shield(creation))
        except BaseException:
            # The request may still reach the server, so the lease must be deleted.
            self._ghosts.add(holder)
            await _finish(self._undo(creation, holder))
            raise
        if lease is None or lease.holder != holder:
            return None, lease
        self._ghosts.clear()
        holding = LeaseHeld(lease=lease, began=began, hold_s=self.hold_s, clock=self.clock)
        return holding, lease

    async def _request_creation(self, holder: str, lock: str | None) -> Lease | None:
        """Create the variable, and return the lease on the server, whoever holds it."""
        value = {
            "note": _NOTE,
            "holder": holder,
            "lock": lock,
            "host": host_name(),
            "pid": os.getpid(),
        }
        try:
            creation = VariableCreate(name=NAME, value=value, tags=["muster"])
            return _parse_lease(await self.client.create_variable(creation))
        except ObjectAlreadyExists:
            # It may also be our own: Prefect's client repeats a request whose answer was lost.
            return await self._read()

    async def _read(self) -> Lease | None:
        variable = await self.client.read_variable_by_name(NAME)
        return _parse_lease(variable) if variable is not None else None

    async def _delete(self, lease: Lease) -> bool:
        """Delete a lease. Returns False if it did not exist any more."""
        # The client's own method deletes by name, and the name may belong to a newer lease.
        path_parameters = {"id": str(lease.id)}
        try:
            await self.client.request("DELETE", "/variables/{id}", path_params=path_parameters)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.NOT_FOUND:
                raise
            return False
        return True

    async def _undo(self, creation: asyncio.Task[Lease | None], holder: str) -> None:
        """Delete the lease that a failed or cancelled request has created after all."""
        with suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(_BACK_WITHIN_S):
                lease = await creation
                if lease is not None and lease.holder == holder:
                    await self._delete(lease)

    async def _give_back(self, holding: LeaseHeld) -> None:
        """Delete the lease. A failure is logged: the lease then expires."""
        try:
            async with asyncio.timeout(_BACK_WITHIN_S):
                if not await self._delete(holding.lease):
                    _log.warning("the gate's lease was gone before it was given back")
        except (TimeoutError, httpx.HTTPError) as error:
            self._ghosts.add(holding.lease.holder)
            reason = str(error) or type(error).__name__
            _log.warning("the gate's lease is not given back, but will expire: %s", reason)

    async def _with_timeout(self, request: Awaitable[T]) -> T:
        """Await a request for at most `hold_s`. A later answer would be useless."""
        try:
            async with asyncio.timeout(self.hold_s):
                return await request
        except TimeoutError as error:
            reason = f"the gate's lease: no answer within {self.hold_s:g} s"
            raise httpx.ReadTimeout(reason) from error


async def _finish(work: Coroutine[Any, Any, None]) -> None:
    """Wait until the work is done, even if this task is cancelled. Then raise the cancel."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            # The loop is needed: a scope of anyio, as in Prefect's worker, cancels every await.
            cancelled = error
    if cancelled is not None:
        raise cancelled
