"""The gate's lease against a scripted server: who gets it, when, and after which faults."""

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
from tasks.queue.lease import GateLease, HeldLease, HostLock, LeaseLost

pytestmark = pytest.mark.asyncio

NAME = "muster_gate"


class Clock:
    """A clock that moves only while somebody sleeps."""

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
    """Prefect's variables, served over HTTP."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}
        #: The requests, such as `POST /variables/`.
        self.asked: list[str] = []
        #: By HTTP method: the faults of the next requests.
        self.faults: dict[str, deque[str]] = {
            method: deque() for method in ("POST", "GET", "PATCH", "DELETE")
        }
        #: Set when a request without an answer arrives, and set to let its answer through.
        self.hangs, self.goes_on = asyncio.Event(), asyncio.Event()

    @property
    def lease(self) -> dict[str, Any] | None:
        return self._rows.get(NAME)

    def put(self, value: Any = None) -> None:
        """Store the lease of another gate, which will not give it back."""
        value = value if value is not None else {"holder": uuid4().hex, "lock": None}
        self._rows[NAME] = {"id": str(uuid4()), "name": NAME, "value": value}

    def clear(self) -> None:
        self._rows.clear()

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url.path.removeprefix('/api')}")
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
                self.hangs.set()
                await self.goes_on.wait()
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
def gate_on(server: Server, clock: Clock, tmp_path: Path) -> Callable[..., GateLease]:
    """Make gates on hosts. The gates of a host share a MUSTER_HOME."""

    def make(host: str = "here", **changes: Any) -> GateLease:
        transport = httpx.MockTransport(server.answer)
        client = PrefectClient("http://server/api", httpx_settings={"transport": transport})
        scripted = {"clock": clock, "sleep": clock.sleep}
        return GateLease(client, home=tmp_path / host, **{**scripted, **changes})

    return make


GateOn = Callable[..., GateLease]


@asynccontextmanager
async def holding(gate: GateLease, within_s: float = 0.0) -> AsyncIterator[HeldLease]:
    async with gate.acquire(within_s=within_s) as held:
        assert held is not None
        yield held


async def gets_it(gate: GateLease, within_s: float = 0.0) -> bool:
    async with gate.acquire(within_s=within_s) as held:
        return held is not None


def host_lock(tmp_path: Path) -> HostLock:
    """The lock of the host `here`, for a process that is no gate."""
    (path,) = (tmp_path / "here" / "gate").iterdir()
    return HostLock(path)


# Who gets the lease.


async def test_taking_and_returning_the_lease_are_two_requests(
    gate_on: GateOn, server: Server
) -> None:
    async with holding(gate_on()) as held:
        held.check()
        ours = server.lease

    assert ours is not None
    assert server.asked == ["POST /variables/", f"DELETE /variables/{ours['id']}"]
    assert server.lease is None


async def test_turn_stays_until_another_gate_begins_to_decide(gate_on: GateOn) -> None:
    here, there = gate_on("here"), gate_on("there")
    first = await here.read_last_decision()
    async with here.acquire() as holding:
        assert holding is not None
        # This gate only writes messages.
        assert await here.read_last_decision() == first
        assert await there.read_last_decision() is None
    assert await here.read_last_decision() == await there.read_last_decision() == first
    turns = [first]
    for _ in range(2):
        async with there.acquire() as holding:
            assert holding is not None
            await there.begin_decision(holding)
            assert await here.read_last_decision() is None
            turns.append(await there.read_last_decision())
        assert await here.read_last_decision() == turns[-1]

    assert len({*turns}) == 3


async def test_no_turn_begins_after_the_lease_was_returned(gate_on: GateOn) -> None:
    here = gate_on()
    before = await here.read_last_decision()
    async with here.acquire() as holding:
        assert holding is not None
    with pytest.raises(LeaseLost):
        await here.begin_decision(holding)
    assert await here.read_last_decision() == before


async def test_other_host_does_not_get_a_held_lease(gate_on: GateOn) -> None:
    async with holding(gate_on("here")):
        meanwhile = await gets_it(gate_on("there"), within_s=9.0)
    afterwards = await gets_it(gate_on("there"))

    assert (meanwhile, afterwards) == (False, True)


async def test_other_gate_of_the_host_does_not_ask_the_server(
    gate_on: GateOn, server: Server
) -> None:
    first, second = gate_on(), gate_on()
    meanwhile, asked, afterwards = [], [], []

    for _ in range(2):
        async with holding(first):
            server.asked.clear()
            meanwhile.append(await gets_it(second, within_s=1.9))
            asked += server.asked
        afterwards.append(await gets_it(second))

    assert (meanwhile, asked, afterwards) == ([False, False], [], [True, True])


@pytest.mark.parametrize("host", ["here", "there"])
async def test_waiting_gate_gets_a_returned_lease_at_once(
    gate_on: GateOn, clock: Clock, host: str
) -> None:
    done = asyncio.Event()
    clock.after(1.0, done.set)

    async def hold() -> None:
        async with holding(gate_on("here")):
            await done.wait()

    first = asyncio.create_task(hold())
    await asyncio.sleep(0)
    got = await gets_it(gate_on(host), within_s=3.0)
    await first

    assert got
    assert clock.now < 1003.0


async def test_tasks_that_share_a_gate_take_turns(gate_on: GateOn) -> None:
    gate = gate_on()
    inside: list[str] = []
    seen: list[tuple[str, ...]] = []

    async def use(name: str) -> None:
        async with holding(gate, within_s=60.0):
            inside.append(name)
            await asyncio.sleep(0.001)
            seen.append(tuple(inside))
            inside.remove(name)

    await asyncio.gather(*(use(name) for name in "abcd"))

    assert sorted(seen) == [("a",), ("b",), ("c",), ("d",)]


# A holder that does not give the lease back.


@pytest.mark.parametrize(
    ("within_s", "is_taken_over"),
    [
        # the holder may still be writing
        (14.0, False),
        (16.0, True),
    ],
)
async def test_unchanged_lease_is_taken_over_after_its_expiry(
    gate_on: GateOn, server: Server, within_s: float, is_taken_over: bool
) -> None:
    server.put()

    assert await gets_it(gate_on(), within_s=within_s) == is_taken_over


async def test_time_of_first_sight_is_kept_between_tries(
    gate_on: GateOn, server: Server, clock: Clock
) -> None:
    gate = gate_on()
    server.put()

    taken = []
    for _ in range(3):
        taken.append(await gets_it(gate))
        clock.now += 7.5

    assert taken == [False, False, True]


async def test_each_holder_has_its_full_time(gate_on: GateOn, server: Server, clock: Clock) -> None:
    server.put()
    clock.after(8.0, server.put)
    clock.after(16.0, server.put)
    gate = gate_on()

    before = await gets_it(gate, within_s=30.0)
    after = await gets_it(gate, within_s=2.0)

    assert (before, after) == (False, True)


async def test_foreign_variable_expires_like_a_lease(gate_on: GateOn, server: Server) -> None:
    server.put("made by hand")

    assert await gets_it(gate_on(), within_s=16.0)


async def test_lease_of_a_killed_holder_on_the_same_host_is_taken_at_once(
    gate_on: GateOn, server: Server, clock: Clock, tmp_path: Path
) -> None:
    gate = gate_on()
    await gets_it(gate)
    lock = host_lock(tmp_path)
    lock.try_lock()
    server.put({"holder": "killed", "lock": lock.lock_id})
    lock.unlock()

    assert await gets_it(gate)
    assert clock.now < 1001.0


async def test_lease_of_a_suspended_holder_is_taken_after_its_expiry(
    gate_on: GateOn, server: Server, tmp_path: Path
) -> None:
    gate = gate_on()
    await gets_it(gate)
    lock = host_lock(tmp_path)
    lock.try_lock()
    server.put({"holder": "suspended", "lock": lock.lock_id})

    early = await gets_it(gate, within_s=14.0)
    late = await gets_it(gate, within_s=4.0)
    lock.unlock()

    assert (early, late) == (False, True)


async def test_holder_without_the_host_lock_is_not_taken_for_dead(
    gate_on: GateOn, tmp_path: Path
) -> None:
    gate = gate_on()
    await gets_it(gate)
    lock = host_lock(tmp_path)
    lock.try_lock()

    async with holding(gate, within_s=3.0):
        lock.unlock()
        meanwhile = await gets_it(gate_on(), within_s=9.0)

    assert not meanwhile


# A holder that is late.


@pytest.mark.parametrize(("held_s", "is_safe"), [(9.9, True), (10.0, False)])
async def test_holder_writes_while_safe(
    gate_on: GateOn, clock: Clock, held_s: float, is_safe: bool
) -> None:
    async with holding(gate_on()) as held:
        clock.now += held_s
        lost = None
        try:
            held.check()
        except LeaseLost as error:
            lost = str(error)

    assert lost == (
        None
        if is_safe
        else "the scheduler's lease was requested 10.0 s ago and allows writes for 10 s. "
        "Another scheduler may be deciding now"
    )


async def test_time_counts_from_the_request(gate_on: GateOn, server: Server, clock: Clock) -> None:
    server.faults["POST"].append("slow")
    taking = holding(gate_on())

    entering = asyncio.create_task(taking.__aenter__())
    await server.hangs.wait()
    clock.now += 4.0
    server.goes_on.set()
    held = await entering
    left_s = held.remaining_s
    await taking.__aexit__(None, None, None)

    assert left_s == 6.0


async def test_late_return_of_a_suspended_holder_deletes_no_newer_lease(
    gate_on: GateOn, server: Server, clock: Clock
) -> None:
    async with AsyncExitStack() as late:
        async with holding(gate_on("here")):
            clock.now += 1.0
            mine = server.lease
            await late.enter_async_context(holding(gate_on("there"), within_s=20.0))
            theirs = server.lease
        kept = server.lease

    assert mine is not None and theirs is not None
    assert mine["id"] != theirs["id"]
    assert kept == theirs


async def test_slow_body_is_cancelled(gate_on: GateOn, server: Server) -> None:
    loop = asyncio.get_running_loop()
    gate = gate_on(hold_s=0.05, clock=loop.time)

    with pytest.raises(LeaseLost, match="Another scheduler may be deciding now"):
        async with holding(gate):
            await asyncio.sleep(60)

    assert server.lease is None


async def test_nothing_may_be_written_after_the_return(gate_on: GateOn) -> None:
    async with holding(gate_on()) as held:
        pass

    with pytest.raises(LeaseLost, match="given back"):
        held.check()
    assert held.remaining_s == 0.0


# A server that fails.


async def test_unreachable_server_is_an_error(gate_on: GateOn, server: Server) -> None:
    server.faults["POST"].append("refused")

    with pytest.raises(httpx.HTTPError):
        await gets_it(gate_on())


async def test_lease_is_returned_after_an_error_of_the_body(
    gate_on: GateOn, server: Server
) -> None:
    with pytest.raises(ValueError, match="the body's"):
        async with holding(gate_on()):
            raise ValueError("the body's")

    assert server.lease is None


async def test_repeated_request_of_the_client_still_takes_the_lease(
    gate_on: GateOn, server: Server
) -> None:
    gate = gate_on()
    server.faults["POST"].append("answer lost, asked again")

    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}):
        assert await gets_it(gate)
    assert server.asked[:2] == ["POST /variables/", "POST /variables/"]
    assert server.lease is None


async def test_gate_replaces_its_own_unconfirmed_lease(
    gate_on: GateOn, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "here").touch()  # no lock of the host that would tell it
    gate = gate_on()
    server.faults["POST"].append("answer lost")

    with pytest.raises(httpx.ReadError):
        await gets_it(gate)
    left = server.lease

    assert left is not None
    assert await gets_it(gate)


async def test_silent_server_is_given_up(gate_on: GateOn, server: Server) -> None:
    server.faults["POST"].append("slow")
    gate = gate_on(hold_s=0.05)
    asyncio.get_running_loop().call_later(0.2, server.goes_on.set)

    with pytest.raises(
        httpx.TimeoutException, match=r"no answer about the scheduler's lease within 0\.05 s"
    ):
        await gets_it(gate)

    # the answer came after the gate had given up
    assert server.lease is None


@pytest.mark.parametrize("fault", ["refused", "answer lost"])
async def test_failed_return_does_not_fail_the_body(
    gate_on: GateOn, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    (tmp_path / "here").touch()
    gate = gate_on()
    server.faults["DELETE"].append(fault)

    first = await gets_it(gate)
    second = await gets_it(gate)

    assert (first, second) == (True, True)
    assert "could not be given back" in caplog.text


# Cancels.


async def test_lease_is_returned_under_repeated_cancels(gate_on: GateOn, server: Server) -> None:
    server.faults["DELETE"].append("slow")
    asyncio.get_running_loop().call_later(0.05, server.goes_on.set)

    # Prefect's worker ends its tasks in this way: every wait in the scope is cancelled.
    with anyio.CancelScope() as scope:
        async with holding(gate_on()):
            scope.cancel()
            await asyncio.sleep(60)

    assert scope.cancelled_caught
    assert server.lease is None


async def test_cancel_during_the_request_leaves_no_lease(gate_on: GateOn, server: Server) -> None:
    server.faults["POST"].append("slow")
    task = asyncio.create_task(gets_it(gate_on()))
    await server.hangs.wait()

    task.cancel()
    await asyncio.sleep(0)
    server.goes_on.set()
    await asyncio.wait({task})

    assert task.cancelled()
    assert server.asked[-1].startswith("DELETE")
    assert server.lease is None


async def test_cancel_does_not_wait_for_a_silent_server(
    gate_on: GateOn, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_RETURN_TIMEOUT_S", 0.05)
    server.faults["POST"].append("slow")
    task = asyncio.create_task(gets_it(gate_on()))
    await server.hangs.wait()

    task.cancel()
    await asyncio.wait({task}, timeout=60)

    assert task.cancelled()


# The lock of the host.


async def test_gate_works_without_a_host_lock(
    gate_on: GateOn, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "here").touch()
    gate = gate_on()

    taken = [await gets_it(gate), await gets_it(gate)]
    async with holding(gate):
        meanwhile = await gets_it(gate_on(), within_s=5.0)
        assert server.lease is not None
        mark = server.lease["value"]["lock"]

    assert (taken, meanwhile, mark) == ([True, True], False, None)


async def test_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    first, second = HostLock(path), HostLock(path)
    first.try_lock()
    (fd,) = (int(fd.name) for fd in Path("/proc/self/fd").iterdir() if leads_to(fd, path))
    of_child = os.dup(fd)  # the same open file, as in a child

    first.unlock()
    taken = second.try_lock()

    assert taken
    second.unlock()
    os.close(of_child)


def leads_to(link: Path, path: Path) -> bool:
    try:
        return link.readlink() == path
    except FileNotFoundError:  # that of the look itself
        return False


def mark(path: Path) -> str | None:
    lock = HostLock(path)
    assert lock.try_lock()
    found = lock.lock_id
    lock.unlock()
    return found


async def test_mark_names_one_file(tmp_path: Path) -> None:
    one, copy = tmp_path / "one.lock", tmp_path / "copy.lock"
    first = mark(one)
    shutil.copy(one, copy)

    assert mark(one) == first
    assert mark(copy) != first
    # While somebody has a removed file open, no other file gets its number.
    lock = HostLock(one)
    assert lock.try_lock()
    one.unlink()
    assert mark(one) != lock.lock_id
    lock.unlock()
