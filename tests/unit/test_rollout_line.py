"""Tests of the router's queue: requests wait while all entrypoints are at their limit."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from tasks.rollout.router import Entrypoint, LineFull, NoEntrypoint, Router

pytestmark = pytest.mark.asyncio


def entrypoint(rank: int) -> Entrypoint:
    return Entrypoint(rank=rank, epoch=1, url=f"http://10.0.0.{rank}:80")


def router_of(*ranks: int, limit: int = 1) -> Router:
    router = Router(limit=limit, queue_size=100, queue_timeout_s=60.0)
    router.set(entrypoint(rank) for rank in ranks)
    return router


class Waiting:
    """Requests that wait in a router, and the order in which they got an entrypoint.

    An entrypoint is an inference server that receives requests.
    """

    def __init__(self, router: Router) -> None:
        #: Names of the requests that got an entrypoint, each with the rank of this entrypoint. The
        #: list is in chronological order.
        self.turns: list[tuple[str, int]] = []
        self._router = router

    async def add(self, name: str, exclude: Collection[int] = ()) -> asyncio.Task[Entrypoint]:
        async def wait() -> Entrypoint:
            chosen = await self._router.take(None, exclude)
            self.turns.append((name, chosen.rank))
            return chosen

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)  # lets the request reach the queue
        return task


async def wait_for(*tasks: asyncio.Task[Entrypoint]) -> None:
    await asyncio.wait_for(asyncio.gather(*tasks), 10)


async def test_queue_is_served_in_order_of_arrival() -> None:
    router = router_of(0)
    held = await router.take(None)
    waiting = Waiting(router)
    tasks = [await waiting.add(name) for name in "abc"]

    for task in tasks:
        router.done(held)
        held = await asyncio.wait_for(task, 10)

    assert [name for name, _ in waiting.turns] == ["a", "b", "c"]
    assert router.waiting == 0


async def test_later_request_does_not_overtake_a_waiting_request() -> None:
    router = router_of(0)
    held = await router.take(None)
    waiting = Waiting(router)
    first = await waiting.add("first")

    router.done(held)
    late = await waiting.add("late")  # arrives before the task `first` runs again
    await wait_for(first)

    assert waiting.turns == [("first", 0)]
    router.done(entrypoint(0))
    await wait_for(late)


async def test_request_that_excludes_a_server_does_not_block_other_requests() -> None:
    router = router_of(0, 1)
    taken_0 = await router.take(None)
    taken_1 = await router.take(None)
    waiting = Waiting(router)
    first = await waiting.add("first", exclude=[0])
    second = await waiting.add("second")

    router.done(taken_0)
    await wait_for(second)
    router.done(taken_1)
    await wait_for(first)

    assert waiting.turns == [("second", 0), ("first", 1)]


async def test_waiting_requests_fail_when_no_entrypoint_remains() -> None:
    router = router_of(0)
    await router.take(None)
    waiting = Waiting(router)
    tasks = [await waiting.add("a"), await waiting.add("b")]

    router.set([], why_none="rank 0 has died")

    for task in tasks:
        with pytest.raises(NoEntrypoint, match="rank 0 has died"):
            await asyncio.wait_for(task, 10)
    assert router.waiting == 0


async def test_new_entrypoint_takes_waiting_requests_up_to_its_limit() -> None:
    router = router_of(0, limit=2)
    for _ in range(2):
        await router.take(None)
    waiting = Waiting(router)
    tasks = [await waiting.add(name) for name in "abc"]

    router.set([entrypoint(0), entrypoint(1)])
    await wait_for(*tasks[:2])

    assert waiting.turns == [("a", 1), ("b", 1)]
    assert router.waiting == 1
    tasks[2].cancel()


async def test_cancelled_request_does_not_block_the_queue() -> None:
    router = router_of(0)
    held = await router.take(None)
    waiting = Waiting(router)
    cancelled, next_request = await waiting.add("cancelled"), await waiting.add("next")

    cancelled.cancel()
    router.done(held)
    await wait_for(next_request)

    assert waiting.turns == [("next", 0)]


async def test_turn_of_a_cancelled_request_goes_to_the_next_request() -> None:
    router = router_of(0)
    held = await router.take(None)
    waiting = Waiting(router)
    cancelled, next_request = await waiting.add("cancelled"), await waiting.add("next")

    router.done(held)
    cancelled.cancel()
    await wait_for(next_request)

    assert waiting.turns == [("next", 0)]
    assert router.outstanding == 1


async def test_queue_has_a_size_limit_and_a_time_limit() -> None:
    router = Router(limit=1, queue_size=2, queue_timeout_s=0.05)
    router.set([entrypoint(0)])
    taken = await router.take(None)
    waiting = [asyncio.create_task(router.take(None)) for _ in range(2)]
    await asyncio.sleep(0)

    with pytest.raises(LineFull, match="2 requests already wait"):
        await router.take(None)
    for request in waiting:
        with pytest.raises(LineFull, match=r"no server was free within 0\.05 s"):
            await request
    assert router.waiting == 0
    router.done(taken)
    assert (await router.take(None)).rank == 0


async def test_requests_that_wait_for_a_closed_router_are_served_in_order() -> None:
    router = router_of(0, limit=1)
    waiting = Waiting(router)
    taken = await router.take(None)
    router.close()
    for name in ("a", "b"):
        await waiting.add(name)
    router.done(taken)
    await asyncio.sleep(0)
    assert waiting.turns == []
    router.open()
    await asyncio.sleep(0)
    assert waiting.turns == [("a", 0)]
    router.done(entrypoint(0))
    await asyncio.sleep(0)

    assert waiting.turns == [("a", 0), ("b", 0)]
