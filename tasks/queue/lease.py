"""The lease: a lock on the Prefect server that lets only one scheduler write decisions at a time.

A scheduler holds the lease while it repeats its scheduling pass and writes the decisions. This
takes a fraction of a second, or several seconds on busy machines.

The lease is a Prefect variable with a fixed name. Names of variables are unique, so only one
scheduler can create the variable, and creating it takes the lease. Deleting the variable gives the
lease back. The variable is deleted by its id. Each new variable has a new id, so a delayed request
to delete an old lease cannot delete a newer lease.

If a holder does not give the lease back, another scheduler deletes the variable after some time.
The old holder must not write after that. So a holder writes for at most `hold_s` seconds after it
requested the lease. Other schedulers wait for `expire_s` seconds after they first saw the lease.
`expire_s` is larger than `hold_s`, because a request of the old holder may still be in transit.
Each process uses only its own clock, so the clocks of the machines may differ.

The schedulers of one host first lock a file in `$MUSTER_HOME/gate`. So only one process of each
host sends requests for the lease. When the holder of the file lock is killed, the kernel unlocks
the file. So the other processes of this host know at once that the lease is free.
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

#: Name of the Prefect variable that is used as the scheduling lease. There is a single lease for
#: all work pools, because work pools may share GPUs.
NAME = "muster_gate"
#: Name of the Prefect variable that contains the id of the last scheduling decision.
_LAST_DECISION = f"{NAME}_turn"
#: Longest time, in seconds, for a request that takes or reads the scheduling lease. This time must
#: be shorter than `hold_s` of the lease.
_REQUEST_TIMEOUT_S = 10.0
#: Longest time, in seconds, for the request that gives the scheduling lease back.
_RETURN_TIMEOUT_S = 2.0
#: Delay, in seconds, before the scheduling lease of a killed process is deleted. The last request
#: of that process may still be on the way to the server, and should arrive before the deletion.
_SETTLE_S = 0.25
#: Time, in seconds, between two tries to lock the file of this host.
_LOCK_INTERVAL_S = 0.03
#: Longest time, in seconds, to wait for the file lock of this host. After that time a scheduler
#: continues without the file lock, because a suspended process may hold the lock forever.
_LOCK_TIMEOUT_S = 2.0
#: Shortest and longest time, in seconds, between two readings of another scheduler's lease.
_READ_INTERVAL_S = (0.1, 0.25)
#: Text in the Prefect variable, for people who see the variable in the Prefect UI.
_NOTE = (
    "Muster wrote this variable, and removes the variable automatically. The variable is a lock. "
    "The scheduler that holds the lock decides which runs start."
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The scheduling lease, a lock for schedulers, as it is stored on the Prefect server."""

    #: Id of the Prefect variable that stores the lease.
    id: UUID
    #: Random id that the holder chose for this lease. Empty if another program wrote the variable.
    holder: str
    #: Id of the file lock that the holder had (`HostLock.lock_id`). Empty if the holder had no file
    #: lock.
    lock_id: str
    #: Description of the holder for log messages: process id and host.
    description: str


def _parse_lease(variable: Variable) -> Lease:
    """Return the scheduling lease that a Prefect variable contains."""
    value = variable.value if isinstance(variable.value, dict) else {}
    return Lease(
        id=variable.id,
        holder=str(value.get("holder") or ""),
        lock_id=str(value.get("lock") or ""),
        description=f"pid {value.get('pid')} on {value.get('host')}"
        if value
        else "an unknown process",
    )


@dataclass(slots=True)
class HostLock:
    """A lock on a file. Only one process of a host can hold the lock at a time."""

    #: Path of the file that is locked.
    path: Path
    #: File descriptor of the locked file, or None if this object does not hold the lock.
    _fd: int | None = None
    #: Id of the lock. None if this object does not hold the lock. A scheduler that holds the lock
    #: writes this id into its scheduling lease. While this object holds the lock, no other process
    #: of the host holds the lock. So if the lease of another scheduler then contains this id, that
    #: scheduler has ended without giving the lease back.
    lock_id: str | None = None

    def try_lock(self) -> bool:
        """Try to lock the file without waiting, and return True if this object holds the lock now.

        Raises:
            OSError: The file cannot be opened or locked.
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
                    self.lock_id = _make_lock_id(fd)
            except BlockingIOError:
                return False
            finally:
                if self._fd is None:
                    os.close(fd)
        return True

    def unlock(self) -> None:
        """Unlock the file, if this object holds the lock."""
        fd = self._fd
        self._fd = None
        self.lock_id = None
        if fd is None:
            return
        try:
            # Unlock explicitly, because closing the file would keep the lock if a forked child
            # process also has the file open.
            fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)


def _make_lock_id(fd: int) -> str:
    """Return the id of a lock on an open file. Each host has a different id for the same file.

    On some NFS mounts, processes on two hosts can lock the same file at the same time. If both
    locks had the same id, each process would assume that the other process has ended.
    """
    status = os.fstat(fd)
    return f"{boot_id()} {status.st_dev} {status.st_ino}"


class LeaseLost(MusterError):
    """This process held the scheduling lease too long. Another scheduler may hold the lease now.

    The caller must write nothing more, and must read the queue from the server again before its
    next decision.
    """


def _read_boot_clock() -> float:
    """Return the seconds since the boot of this host. Time in suspend mode is included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True, kw_only=True)
class HeldLease:
    """The scheduling lease while this process holds it.

    The holder may write decisions to the Prefect server for a limited time.
    """

    #: The scheduling lease on the server.
    lease: Lease
    #: Time at which this process requested the scheduling lease, as a value of `clock`.
    requested_at: float
    #: This process may write decisions to the server until this number of seconds has passed since
    #: `requested_at`.
    hold_s: float
    #: Function that returns the current time in seconds.
    clock: Callable[[], float]
    #: True after the scheduling lease was given back.
    is_over: bool = False

    @property
    def remaining_s(self) -> float:
        """Seconds during which this process may still write decisions; 0 without a valid lease."""
        if self.is_over:
            return 0.0
        return max(0.0, self.requested_at + self.hold_s - self.clock())

    def check(self) -> None:
        """Raise an error if this process may no longer write decisions.

        Call this method directly before each write, without an `await` between the call and the
        write.

        Raises:
            LeaseLost: The scheduling lease was given back, or `hold_s` seconds are over.
        """
        if self.is_over:
            raise LeaseLost(
                "this scheduler no longer holds the scheduler lock. Without the lock, a scheduler "
                "must not change the queue"
            )
        if self.remaining_s <= 0:
            age_s = self.clock() - self.requested_at
            raise LeaseLost(
                f"this scheduler took the scheduler lock {age_s:.1f} s ago. The lock allows "
                f"changes of the queue for only {self.hold_s:g} s, so another scheduler possibly "
                "holds the lock now"
            )


@dataclass(slots=True)
class SchedulingLease:
    """Takes the scheduling lease for one process, and gives the lease back.

    The lease is a lock on the Prefect server. Several tasks of an asyncio loop may use one
    instance. The tasks get the lease one after the other.
    """

    #: Client of the Prefect server. It must be open in the event loop that uses this object.
    client: PrefectClient
    #: The MUSTER_HOME directory, which contains the lock file of this host.
    home: Path
    #: Time limit, in seconds, for the changes that a scheduler writes to the Prefect server. The
    #: time starts when the scheduler requests the scheduling lease. A scheduling pass that takes
    #: longer must be repeated. All schedulers of a server must use the same value. Otherwise one
    #: scheduler could delete the lease while another scheduler still writes.
    hold_s: float = 30.0
    #: Time, in seconds, after which a scheduler deletes the lease of another scheduler, if that
    #: lease was not given back. The time starts when the deleting scheduler first reads the lease.
    #: The value must be clearly larger than `hold_s`, so that the last write of the holder reaches
    #: the server before the deletion.
    expire_s: float = 45.0
    #: Function that returns the current time in seconds.
    clock: Callable[[], float] = _read_boot_clock
    #: Function that waits for the given number of seconds.
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    #: Time (a value of `clock`) since which another process of this host has held the file lock.
    #: None if no other process holds the file lock.
    _locked_out_since: float | None = None
    #: Holder id of the scheduling lease that this object holds now. Empty if it holds no lease.
    _holder: str = ""
    #: Id of another scheduler's lease, and the time (a value of `clock`) at which this object first
    #: read that lease. The lease expires `expire_s` seconds later. None without such a lease.
    _foreign_lease: tuple[UUID, float] | None = None
    #: Holder ids of this object's old leases that may still be on the server, because the request
    #: to delete them failed. If such a lease is found later, this object deletes the lease at once.
    _undeleted_holders: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def acquire(self, *, within_s: float = 10.0) -> AsyncIterator[HeldLease | None]:
        """Take the scheduling lease for the body of a `with` statement, and then give it back.

        The value of the `with` statement is the lease, or None if another scheduler held the lease
        for `within_s` seconds. After `hold_s` seconds, the body is cancelled. The lease is given
        back in every case, within 2 s.

        Args:
            within_s: Longest time, in seconds, to wait for the lease. 0 to try only once. A slow
                server can make the wait up to `_REQUEST_TIMEOUT_S` seconds longer.

        Raises:
            httpx.HTTPError: The server did not answer. An error while the lease is given back is
                only logged.
            LeaseLost: The body took longer than `hold_s` seconds.
        """
        server = hashlib.sha256(str(self.client.api_url).encode()).hexdigest()[:16]
        lock = HostLock(self.home / "gate" / f"{server}.lock")
        try:
            held_lease = await self._take(lock, self.clock() + within_s)
            if held_lease is None:
                lock.unlock()
                yield None
                return
            try:
                self._holder = held_lease.lease.holder
                async with asyncio.timeout(held_lease.remaining_s) as limit:
                    yield held_lease
            except TimeoutError as error:
                if limit.expired():
                    raise LeaseLost(
                        "this scheduler did not finish the changes of the queue within "
                        f"{self.hold_s:g} s, the time limit of the scheduler lock. Another "
                        "scheduler possibly holds the lock now"
                    ) from error
                raise
            finally:
                held_lease.is_over = True
                self._holder = ""
                await _finish(self._give_back(held_lease))
        finally:
            lock.unlock()

    async def read_last_decision(self) -> str | None:
        """Return the id of the last scheduling decision on the server.

        If two calls return the same id, no scheduler has written a decision between the calls.

        Returns:
            The id. Empty before the first decision. None if another scheduler holds the lease and
            may be writing a decision.

        Raises:
            httpx.HTTPError: The server did not answer.
        """
        # Read both variables with one request, so that their values are from the same moment.
        name_filter = {"variables": {"name": {"any_": [NAME, _LAST_DECISION]}}}
        request = self.client.request("POST", "/variables/filter", json=name_filter)
        answer = await self._with_timeout(request)
        variables = {
            variable.name: variable for variable in map(Variable.model_validate, answer.json())
        }
        if NAME in variables and _parse_lease(variables[NAME]).holder != self._holder:
            return None
        return str(variables[_LAST_DECISION].value) if _LAST_DECISION in variables else ""

    async def begin_decision(self, held_lease: HeldLease) -> str:
        """Write the id of a new decision to the server, before the first write of the decision.

        Other schedulers notice the new id, and then read the queue again.

        Args:
            held_lease: The lease of this process.

        Returns:
            The id of the new decision.

        Raises:
            httpx.HTTPError: The server did not answer.
            LeaseLost: The scheduling lease is no longer valid.
        """
        held_lease.check()
        decision_id = held_lease.lease.holder
        try:
            update = VariableUpdate(name=_LAST_DECISION, value=decision_id)
            await self._with_timeout(self.client.update_variable(update))
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.NOT_FOUND:
                raise
            creation = VariableCreate(name=_LAST_DECISION, value=decision_id, tags=["muster"])
            await self._with_timeout(self.client.create_variable(creation))
        return decision_id

    async def _take(self, lock: HostLock, deadline: float) -> HeldLease | None:
        """Wait until the scheduling lease is free, and take it.

        Args:
            lock: The file lock of this host, which the method takes before the lease.
            deadline: Time at which the wait ends, as a value of `clock`.

        Returns:
            The lease, or None if it was not free before the deadline.
        """
        lease: Lease | None = None
        while True:
            if not self._is_locked_out(lock):
                # If another scheduler held the lease at the last try, first read the lease again. A
                # read costs the server less than a failed try to create the lease.
                if lease is not None:
                    lease = await self._with_timeout(self._read())
                if lease is None:
                    held_lease, lease = await self._create(lock)
                    if held_lease is not None:
                        return held_lease
                if lease is not None and await self._is_abandoned(lease, lock):
                    await self._with_timeout(self._delete(lease))
                    lease = None
                    continue
            if self.clock() >= deadline:
                holder = "another process of this host"
                if lease is not None:
                    holder = lease.description
                _log.info("this scheduler waits, because %s holds the scheduler lock", holder)
                return None
            if lease is None:
                await self.sleep(_LOCK_INTERVAL_S)
            else:
                await self.sleep(random.uniform(*_READ_INTERVAL_S))

    def _is_locked_out(self, lock: HostLock) -> bool:
        """Return True if this object must wait for the file lock of this host.

        The result is False if this object holds the lock. The result is also False after a wait of
        two seconds, because a suspended process may hold the lock forever.
        """
        try:
            if lock.try_lock():
                self._locked_out_since = None
                return False
        except OSError as error:
            _log.debug(
                "the scheduler cannot use the file lock %s, and continues without it: %s",
                lock.path,
                error,
            )
            return False
        if self._locked_out_since is None:
            self._locked_out_since = self.clock()
        return self.clock() - self._locked_out_since < _LOCK_TIMEOUT_S

    async def _is_abandoned(self, lease: Lease, lock: HostLock) -> bool:
        """Return True if the holder of the scheduling lease will never give the lease back.

        Args:
            lease: The lease on the server.
            lock: The file lock of this host.
        """
        if lease.holder in self._undeleted_holders:
            return True
        if lease.lock_id and lease.lock_id == lock.lock_id:
            _log.warning(
                "this scheduler takes over the scheduler lock, because the holder %s has ended",
                lease.description,
            )
            await self.sleep(_SETTLE_S)
            return True
        now = self.clock()
        if self._foreign_lease is None or self._foreign_lease[0] != lease.id:
            self._foreign_lease = (lease.id, now)
        is_expired = now - self._foreign_lease[1] >= self.expire_s
        if is_expired:
            message = (
                "this scheduler takes over the scheduler lock, because %s has held the lock for "
                "more than %g s"
            )
            _log.warning(message, lease.description, self.expire_s)
        return is_expired

    async def _create(self, lock: HostLock) -> tuple[HeldLease | None, Lease | None]:
        """Try once to take the scheduling lease by creating its Prefect variable.

        Args:
            lock: The file lock of this host.

        Returns:
            Two values: the lease of this process, and the lease on the server. The first value is
                None if another scheduler holds the lease. Both values are None if that scheduler
                gave the lease back during this call.
        """
        holder = uuid4().hex
        requested_at = self.clock()
        creation = asyncio.create_task(self._request_creation(holder, lock.lock_id))
        try:
            lease = await self._with_timeout(asyncio.shield(creation))
        except BaseException:
            # The request may still reach the server and create the lease. Undo the creation,
            # because a lease without a holder would block all schedulers until it expires.
            self._undeleted_holders.add(holder)
            await _finish(self._undo_creation(creation, holder))
            raise
        if lease is None or lease.holder != holder:
            return None, lease
        self._undeleted_holders.clear()
        held_lease = HeldLease(
            lease=lease, requested_at=requested_at, hold_s=self.hold_s, clock=self.clock
        )
        return held_lease, lease

    async def _request_creation(self, holder: str, lock_id: str | None) -> Lease | None:
        """Create the Prefect variable of the scheduling lease, if no other scheduler has done so.

        Args:
            holder: Id that this process chose for the lease.
            lock_id: Id of the file lock of this host, or None without a file lock.

        Returns:
            The lease of this process or of another scheduler. None if another scheduler gave its
            lease back during this call.
        """
        value = {
            "note": _NOTE,
            "holder": holder,
            "lock": lock_id,
            "host": host_name(),
            "pid": os.getpid(),
        }
        try:
            creation = VariableCreate(name=NAME, value=value, tags=["muster"])
            return _parse_lease(await self.client.create_variable(creation))
        except ObjectAlreadyExists:
            # Another scheduler may have created the variable. It is also possible that the request
            # above has created the variable, and that Prefect's client has sent the request twice.
            return await self._read()

    async def _read(self) -> Lease | None:
        """Return the scheduling lease on the server, or None if no scheduler holds it."""
        variable = await self.client.read_variable_by_name(NAME)
        return _parse_lease(variable) if variable is not None else None

    async def _delete(self, lease: Lease) -> bool:
        """Delete a scheduling lease from the server, and return False if it was already deleted."""
        # Delete the variable by its id, not by its name as Prefect's client does, because a newer
        # lease has the same name.
        path_parameters = {"id": str(lease.id)}
        try:
            await self.client.request("DELETE", "/variables/{id}", path_params=path_parameters)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.NOT_FOUND:
                raise
            return False
        return True

    async def _undo_creation(self, creation: asyncio.Task[Lease | None], holder: str) -> None:
        """Delete the scheduling lease that a failed or cancelled request may have created.

        Args:
            creation: The task of the request.
            holder: Id that this process chose for the lease.
        """
        with suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(_RETURN_TIMEOUT_S):
                lease = await creation
                if lease is not None and lease.holder == holder:
                    await self._delete(lease)

    async def _give_back(self, held_lease: HeldLease) -> None:
        """Give the scheduling lease back: delete it from the server.

        An error is only logged, because other schedulers delete the lease after `expire_s` seconds.
        """
        try:
            async with asyncio.timeout(_RETURN_TIMEOUT_S):
                if not await self._delete(held_lease.lease):
                    _log.warning(
                        "another process deleted the scheduler lock before this process released "
                        "the lock"
                    )
        except (TimeoutError, httpx.HTTPError) as error:
            self._undeleted_holders.add(held_lease.lease.holder)
            reason = str(error) or type(error).__name__
            _log.warning(
                "this scheduler could not release the scheduler lock (%s). The lock expires in %g "
                "s",
                reason,
                self.expire_s,
            )

    async def _with_timeout(self, request: Awaitable[T]) -> T:
        """Await a request to the server for at most `_REQUEST_TIMEOUT_S` seconds.

        Returns:
            The result of the request.

        Raises:
            httpx.ReadTimeout: The server did not answer in time.
        """
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                return await request
        except TimeoutError as error:
            reason = (
                "the Prefect server did not answer a request for the scheduler lock within "
                f"{_REQUEST_TIMEOUT_S:g} s"
            )
            raise httpx.ReadTimeout(reason) from error


async def _finish(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, even if this task is cancelled.

    Raises:
        asyncio.CancelledError: This task was cancelled. The coroutine has ended.
    """
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            # Repeat the wait until `work` is done. After a cancellation, the anyio cancel scopes of
            # Prefect's worker also cancel each later `await` of this task.
            cancelled = error
    if cancelled is not None:
        raise cancelled
