"""The scheduling lease with a scripted server: its holder, its expiry, and faults of requests."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import httpx
import pytest
from prefect.client.orchestration import PrefectClient
from prefect.settings import (
    PREFECT_CLIENT_CSRF_SUPPORT_ENABLED,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)

from tasks.queue import lease
from tasks.queue.lease import HeldLease, HostLock, LeaseLost, SchedulingLease

pytestmark = pytest.mark.asyncio

NAME = "muster_gate"


class Clock:
    """A fake clock that moves forward only during calls of its method `sleep`."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._due: list[tuple[float, Callable[[], object]]] = []

    def __call__(self) -> float:
        return self.now

    def after(self, delay_s: float, do: Callable[[], object]) -> None:
        self._due.append((self.now + delay_s, do))

    async def sleep(self, delay_s: float) -> None:
        self.now += delay_s
        for due in [due for due in self._due if due[0] <= self.now]:
            self._due.remove(due)
            due[1]()
        await asyncio.sleep(0)


class Server:
    """A fake Prefect server that stores variables and answers HTTP requests."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}
        #: The received requests, such as `POST /variables/`.
        self.requests: list[str] = []
        #: Mapping from HTTP method to the faults of the next requests with this method.
        self.faults: dict[str, deque[str]] = {
            method: deque() for method in ("POST", "GET", "PATCH", "DELETE")
        }
        #: Set when a request with the fault `slow` arrives.
        self.has_slow_request = asyncio.Event()
        #: Set by a test to let the server answer the slow request.
        self.may_answer = asyncio.Event()

    @property
    def lease(self) -> dict[str, Any] | None:
        return self._rows.get(NAME)

    def put(self, value: Any = None) -> None:
        """Store a lease of another process, which never gives the lease back."""
        value = value if value is not None else {"holder": uuid4().hex, "lock": None}
        self._rows[NAME] = {"id": str(uuid4()), "name": NAME, "value": value}

    def clear(self) -> None:
        self._rows.clear()

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(f"{request.method} {request.url.path.removeprefix('/api')}")
        faults = self.faults[request.method]
        match faults.popleft() if faults else "":
            case "refused":
                raise httpx.ConnectError("refused", request=request)
            case "answer lost":
                self._do(request)
                raise httpx.ReadError("reset", request=request)
            case "answer lost, asked again":
                self._do(request)
                return httpx.Response(503, headers={"Retry-After": "0"}, request=request)
            case "slow":
                self.has_slow_request.set()
                await self.may_answer.wait()
        return self._do(request)

    def _do(self, request: httpx.Request) -> httpx.Response:
        key = request.url.path.rpartition("/")[2]
        match request.method:
            case "POST" if key != "filter":
                row = {"id": str(uuid4()), **json.loads(request.content)}
                if row["name"] in self._rows:
                    return httpx.Response(409, request=request)
                self._rows[row["name"]] = row
                return httpx.Response(201, json=row, request=request)
            case "GET" if key in self._rows:
                return httpx.Response(200, json=self._rows[key], request=request)
            case "POST" if key == "filter":
                named = json.loads(request.content)["variables"]["name"]["any_"]
                found = [self._rows[name] for name in named if name in self._rows]
                return httpx.Response(200, json=found, request=request)
            case "PATCH" if key in self._rows:
                self._rows[key] |= json.loads(request.content)
                return httpx.Response(204, request=request)
            case "DELETE" if name := [n for n, row in self._rows.items() if row["id"] == key]:
                del self._rows[name[0]]
                return httpx.Response(204, request=request)
        return httpx.Response(404, request=request)


@pytest.fixture(autouse=True)
def impatient_client() -> Iterator[None]:
    settings: dict[Any, Any] = {PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False}
    with temporary_settings({**settings, PREFECT_CLIENT_MAX_RETRIES: 0}):
        yield


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def make_lease(server: Server, clock: Clock, tmp_path: Path) -> Callable[..., SchedulingLease]:
    """Return a function that makes the lease object of a scheduler on a host.

    Each host has its own MUSTER_HOME.
    """

    def make(host: str = "here", **changes: Any) -> SchedulingLease:
        transport = httpx.MockTransport(server.answer)
        client = PrefectClient("http://server/api", httpx_settings={"transport": transport})
        scripted = {"clock": clock, "sleep": clock.sleep}
        return SchedulingLease(client, home=tmp_path / host, **{**scripted, **changes})

    return make


MakeLease = Callable[..., SchedulingLease]


@asynccontextmanager
async def holding(
    scheduling_lease: SchedulingLease, within_s: float = 0.0
) -> AsyncIterator[HeldLease]:
    async with scheduling_lease.acquire(within_s=within_s) as held:
        assert held is not None
        yield held


async def can_take(scheduling_lease: SchedulingLease, within_s: float = 0.0) -> bool:
    async with scheduling_lease.acquire(within_s=within_s) as held:
        return held is not None


def host_lock(tmp_path: Path) -> HostLock:
    """Return the lock of the host `here`, as another process of this host would open it."""
    (path,) = (tmp_path / "here" / "gate").iterdir()
    return HostLock(path)


# Tests in which the holder of the scheduler lease gives the lease back in time.


async def test_taking_and_returning_the_lease_are_two_requests(
    make_lease: MakeLease, server: Server
) -> None:
    async with holding(make_lease()) as held:
        held.check()
        ours = server.lease

    assert ours is not None
    assert server.requests == ["POST /variables/", f"DELETE /variables/{ours['id']}"]
    assert server.lease is None


async def test_last_decision_stays_until_another_scheduler_decides(make_lease: MakeLease) -> None:
    here, there = make_lease("here"), make_lease("there")
    first = await here.read_last_decision()
    async with here.acquire() as holding:
        assert holding is not None
        # This scheduler only takes the lease and makes no decision. So the last decision on the
        # server stays the same.
        assert await here.read_last_decision() == first
        assert await there.read_last_decision() is None
    assert await here.read_last_decision() == await there.read_last_decision() == first
    decisions = [first]
    for _ in range(2):
        async with there.acquire() as holding:
            assert holding is not None
            await there.begin_decision(holding)
            assert await here.read_last_decision() is None
            decisions.append(await there.read_last_decision())
        assert await here.read_last_decision() == decisions[-1]

    assert len({*decisions}) == 3


async def test_no_decision_begins_after_the_lease_was_returned(make_lease: MakeLease) -> None:
    here = make_lease()
    before = await here.read_last_decision()
    async with here.acquire() as holding:
        assert holding is not None
    with pytest.raises(LeaseLost):
        await here.begin_decision(holding)
    assert await here.read_last_decision() == before


async def test_other_host_does_not_get_a_held_lease(make_lease: MakeLease) -> None:
    async with holding(make_lease("here")):
        meanwhile = await can_take(make_lease("there"), within_s=9.0)
    afterwards = await can_take(make_lease("there"))

    assert (meanwhile, afterwards) == (False, True)


async def test_other_scheduler_of_the_host_sends_no_request(
    make_lease: MakeLease, server: Server
) -> None:
    first, second = make_lease(), make_lease()
    meanwhile, requests, afterwards = [], [], []

    for _ in range(2):
        async with holding(first):
            server.requests.clear()
            meanwhile.append(await can_take(second, within_s=1.9))
            requests += server.requests
        afterwards.append(await can_take(second))

    assert (meanwhile, requests, afterwards) == ([False, False], [], [True, True])


@pytest.mark.parametrize("host", ["here", "there"])
async def test_waiting_scheduler_gets_a_returned_lease_at_once(
    make_lease: MakeLease, clock: Clock, host: str
) -> None:
    done = asyncio.Event()
    clock.after(1.0, done.set)

    async def hold() -> None:
        async with holding(make_lease("here")):
            await done.wait()

    first = asyncio.create_task(hold())
    await asyncio.sleep(0)
    is_taken = await can_take(make_lease(host), within_s=3.0)
    await first

    assert is_taken
    assert clock.now < 1003.0


async def test_tasks_that_share_a_lease_object_take_turns(make_lease: MakeLease) -> None:
    scheduling_lease = make_lease()
    inside: list[str] = []
    holders: list[tuple[str, ...]] = []

    async def use(name: str) -> None:
        async with holding(scheduling_lease, within_s=60.0):
            inside.append(name)
            await asyncio.sleep(0.001)
            holders.append(tuple(inside))
            inside.remove(name)

    await asyncio.gather(*(use(name) for name in "abcd"))

    assert sorted(holders) == [("a",), ("b",), ("c",), ("d",)]


# Tests in which the holder of the scheduler lease does not give the lease back.


@pytest.mark.parametrize(
    ("within_s", "is_taken_over"),
    [
        # the lease has expired, but its holder may still be writing to the server. So another
        # scheduler waits before it takes the lease over: 44 s are too short, 46 s are enough
        (44.0, False),
        (46.0, True),
    ],
)
async def test_unchanged_lease_is_taken_over_after_its_expiry(
    make_lease: MakeLease, server: Server, within_s: float, is_taken_over: bool
) -> None:
    server.put()

    assert await can_take(make_lease(), within_s=within_s) == is_taken_over


async def test_time_of_the_first_read_is_kept_between_tries(
    make_lease: MakeLease, server: Server, clock: Clock
) -> None:
    scheduling_lease = make_lease()
    server.put()

    taken = []
    for _ in range(3):
        taken.append(await can_take(scheduling_lease))
        clock.now += 22.5

    assert taken == [False, False, True]


async def test_each_holder_has_its_full_time(
    make_lease: MakeLease, server: Server, clock: Clock
) -> None:
    server.put()
    clock.after(24.0, server.put)
    clock.after(48.0, server.put)
    scheduling_lease = make_lease()

    before = await can_take(scheduling_lease, within_s=90.0)
    after = await can_take(scheduling_lease, within_s=5.0)

    assert (before, after) == (False, True)


async def test_variable_that_no_scheduler_wrote_expires_like_a_lease(
    make_lease: MakeLease, server: Server
) -> None:
    server.put("made by hand")

    assert await can_take(make_lease(), within_s=46.0)


async def test_lease_of_a_killed_holder_on_the_same_host_is_taken_at_once(
    make_lease: MakeLease, server: Server, clock: Clock, tmp_path: Path
) -> None:
    scheduling_lease = make_lease()
    await can_take(scheduling_lease)
    lock = host_lock(tmp_path)
    lock.try_lock()
    server.put({"holder": "killed", "lock": lock.lock_id})
    lock.unlock()

    assert await can_take(scheduling_lease)
    assert clock.now < 1001.0


async def test_lease_of_a_suspended_holder_is_taken_after_its_expiry(
    make_lease: MakeLease, server: Server, tmp_path: Path
) -> None:
    scheduling_lease = make_lease()
    await can_take(scheduling_lease)
    lock = host_lock(tmp_path)
    lock.try_lock()
    server.put({"holder": "suspended", "lock": lock.lock_id})

    early = await can_take(scheduling_lease, within_s=44.0)
    late = await can_take(scheduling_lease, within_s=4.0)
    lock.unlock()

    assert (early, late) == (False, True)


async def test_living_holder_without_the_host_lock_keeps_the_lease(
    make_lease: MakeLease, tmp_path: Path
) -> None:
    scheduling_lease = make_lease()
    await can_take(scheduling_lease)
    lock = host_lock(tmp_path)
    lock.try_lock()

    async with holding(scheduling_lease, within_s=3.0):
        lock.unlock()
        meanwhile = await can_take(make_lease(), within_s=9.0)

    assert not meanwhile


# Tests in which the holder of the scheduler lease gives the lease back late.


@pytest.mark.parametrize(("held_s", "is_safe"), [(29.9, True), (30.0, False)])
async def test_holder_may_write_only_for_a_limited_time_after_its_request(
    make_lease: MakeLease, clock: Clock, held_s: float, is_safe: bool
) -> None:
    async with holding(make_lease()) as held:
        clock.now += held_s
        lost = None
        try:
            held.check()
        except LeaseLost as error:
            lost = str(error)

    assert lost == (
        None
        if is_safe
        else "this scheduler took the scheduler lock 30.0 s ago. The lock allows changes of the "
        "queue for only 30 s, so another scheduler possibly holds the lock now"
    )


async def test_time_limit_of_a_lease_counts_from_its_request(
    make_lease: MakeLease, server: Server, clock: Clock
) -> None:
    server.faults["POST"].append("slow")
    taking = holding(make_lease())

    entering = asyncio.create_task(taking.__aenter__())
    await server.has_slow_request.wait()
    clock.now += 4.0
    server.may_answer.set()
    held = await entering
    left_s = held.remaining_s
    await taking.__aexit__(None, None, None)

    assert left_s == 26.0


async def test_late_return_of_a_suspended_holder_deletes_no_newer_lease(
    make_lease: MakeLease, server: Server, clock: Clock
) -> None:
    async with AsyncExitStack() as late:
        async with holding(make_lease("here")):
            clock.now += 1.0
            mine = server.lease
            await late.enter_async_context(holding(make_lease("there"), within_s=50.0))
            theirs = server.lease
        kept = server.lease

    assert mine is not None and theirs is not None
    assert mine["id"] != theirs["id"]
    assert kept == theirs


async def test_pass_of_a_busy_machine_keeps_its_lease(make_lease: MakeLease, clock: Clock) -> None:
    async with holding(make_lease("here")) as held:
        taken_by_other = await can_take(make_lease("there"), within_s=25.0)
        held.check()

    assert not taken_by_other
    assert clock.now >= 1025.0


async def test_slow_body_is_cancelled(make_lease: MakeLease, server: Server) -> None:
    loop = asyncio.get_running_loop()
    scheduling_lease = make_lease(hold_s=0.05, clock=loop.time)

    with pytest.raises(LeaseLost, match="the time limit of the scheduler lock"):
        async with holding(scheduling_lease):
            await asyncio.sleep(60)

    assert server.lease is None


async def test_nothing_may_be_written_after_the_return(make_lease: MakeLease) -> None:
    async with holding(make_lease()) as held:
        pass

    with pytest.raises(LeaseLost, match="no longer holds"):
        held.check()
    assert held.remaining_s == 0.0


# Tests with a Prefect server that fails.


async def test_unreachable_server_is_an_error(make_lease: MakeLease, server: Server) -> None:
    server.faults["POST"].append("refused")

    with pytest.raises(httpx.HTTPError):
        await can_take(make_lease())


async def test_lease_is_returned_after_an_error_of_the_body(
    make_lease: MakeLease, server: Server
) -> None:
    with pytest.raises(ValueError, match="the body's"):
        async with holding(make_lease()):
            raise ValueError("the body's")

    assert server.lease is None


async def test_repeated_request_of_the_client_still_takes_the_lease(
    make_lease: MakeLease, server: Server
) -> None:
    scheduling_lease = make_lease()
    server.faults["POST"].append("answer lost, asked again")

    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}):
        assert await can_take(scheduling_lease)
    assert server.requests[:2] == ["POST /variables/", "POST /variables/"]
    assert server.lease is None


async def test_unconfirmed_lease_of_the_same_process_is_replaced(
    make_lease: MakeLease, server: Server, tmp_path: Path
) -> None:
    # MUSTER_HOME is a file and not a folder, so the host cannot create a lock file in MUSTER_HOME.
    (tmp_path / "here").touch()
    scheduling_lease = make_lease()
    server.faults["POST"].append("answer lost")

    with pytest.raises(httpx.ReadError):
        await can_take(scheduling_lease)
    unconfirmed_lease = server.lease

    assert unconfirmed_lease is not None
    assert await can_take(scheduling_lease)


async def test_silent_server_is_given_up(
    make_lease: MakeLease, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_REQUEST_TIMEOUT_S", 0.05)
    server.faults["POST"].append("slow")
    scheduling_lease = make_lease()
    asyncio.get_running_loop().call_later(0.2, server.may_answer.set)

    with pytest.raises(
        httpx.TimeoutException,
        match=r"did not answer a request for the scheduler lock within 0\.05 s",
    ):
        await can_take(scheduling_lease)

    # The server stored the lease after the scheduler had given up the request. So the scheduler
    # deleted the stored lease.
    assert server.lease is None


@pytest.mark.parametrize("fault", ["refused", "answer lost"])
async def test_failed_return_does_not_fail_the_body(
    make_lease: MakeLease,
    server: Server,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    # MUSTER_HOME is a file and not a folder, so the host cannot create a lock file in MUSTER_HOME.
    (tmp_path / "here").touch()
    scheduling_lease = make_lease()
    server.faults["DELETE"].append(fault)

    first = await can_take(scheduling_lease)
    second = await can_take(scheduling_lease)

    assert (first, second) == (True, True)
    assert "could not release" in caplog.text


# Tests in which the task that requests or holds the scheduler lease is cancelled.


async def test_lease_is_returned_under_repeated_cancels(
    make_lease: MakeLease, server: Server
) -> None:
    server.faults["DELETE"].append("slow")
    asyncio.get_running_loop().call_later(0.05, server.may_answer.set)

    # Prefect's worker cancels its tasks with an anyio cancel scope. After the cancel, every further
    # await in the scope raises CancelledError.
    with anyio.CancelScope() as scope:
        async with holding(make_lease()):
            scope.cancel()
            await asyncio.sleep(60)

    assert scope.cancelled_caught
    assert server.lease is None


async def test_cancel_during_the_request_leaves_no_lease(
    make_lease: MakeLease, server: Server
) -> None:
    server.faults["POST"].append("slow")
    task = asyncio.create_task(can_take(make_lease()))
    await server.has_slow_request.wait()

    task.cancel()
    await asyncio.sleep(0)
    server.may_answer.set()
    await asyncio.wait({task})

    assert task.cancelled()
    assert server.requests[-1].startswith("DELETE")
    assert server.lease is None


async def test_cancel_does_not_wait_for_a_silent_server(
    make_lease: MakeLease, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_RETURN_TIMEOUT_S", 0.05)
    server.faults["POST"].append("slow")
    task = asyncio.create_task(can_take(make_lease()))
    await server.has_slow_request.wait()

    task.cancel()
    await asyncio.wait({task}, timeout=60)

    assert task.cancelled()


# Tests of the file lock that the processes of a host share.


async def test_lease_works_without_a_host_lock(
    make_lease: MakeLease, server: Server, tmp_path: Path
) -> None:
    # MUSTER_HOME is a file and not a folder, so the host cannot create a lock file in MUSTER_HOME.
    (tmp_path / "here").touch()
    scheduling_lease = make_lease()

    taken = [await can_take(scheduling_lease), await can_take(scheduling_lease)]
    async with holding(scheduling_lease):
        meanwhile = await can_take(make_lease(), within_s=5.0)
        assert server.lease is not None
        lock_id = server.lease["value"]["lock"]

    assert (taken, meanwhile, lock_id) == ([True, True], False, None)


async def test_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    first, second = HostLock(path), HostLock(path)
    first.try_lock()
    (fd,) = (int(fd.name) for fd in Path("/proc/self/fd").iterdir() if leads_to(fd, path))
    of_child = os.dup(fd)  # a copy of the descriptor, as in a child process

    first.unlock()
    taken = second.try_lock()

    assert taken
    second.unlock()
    os.close(of_child)


def leads_to(link: Path, path: Path) -> bool:
    try:
        return link.readlink() == path
    except FileNotFoundError:  # listing /proc/self/fd opened this descriptor and has closed it
        return False


def find_lock_id(path: Path) -> str | None:
    lock = HostLock(path)
    assert lock.try_lock()
    lock_id = lock.lock_id
    lock.unlock()
    return lock_id


async def test_lock_id_belongs_to_one_file(tmp_path: Path) -> None:
    original, copy = tmp_path / "one.lock", tmp_path / "copy.lock"
    first = find_lock_id(original)
    shutil.copy(original, copy)

    assert find_lock_id(original) == first
    assert find_lock_id(copy) != first
    # The lock keeps the file open after `unlink`, so no new file can get the same inode number.
    lock = HostLock(original)
    assert lock.try_lock()
    original.unlink()
    assert find_lock_id(original) != lock.lock_id
    lock.unlock()
