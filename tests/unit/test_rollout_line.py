"""Requests that wait while all entrypoints are at their limit."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from tasks.rollout.router import Entrypoint, LineFull, NoEntrypoint, Router

pytestmark = pytest.mark.asyncio


def entrypoint(rank: int) -> Entrypoint:
    return Entrypoint(rank=rank, epoch=1, url=f"http://10.0.0.{rank}:80")


def line_of(*ranks: int, limit: int = 1) -> Router:
    router = Router(limit=limit, queue_size=100, queue_timeout_s=60.0)
    router.set(entrypoint(rank) for rank in ranks)
    return router


class Waiting:
    """Requests that wait, and the order in which their turns came."""

    def __init__(self, line: Router) -> None:
        self.turns: list[tuple[str, int]] = []
        self._line = line

    async def add(self, name: str, exclude: Collection[int] = ()) -> asyncio.Task[Entrypoint]:
        async def wait() -> Entrypoint:
            found = await self._line.take(None, exclude)
            self.turns.append((name, found.rank))
            return found

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)  # lets it reach the line
        return task


async def turns(*tasks: asyncio.Task[Entrypoint]) -> None:
    await asyncio.wait_for(asyncio.gather(*tasks), 10)


async def test_who_came_first_is_first() -> None:
    line = line_of(0)
    held = await line.take(None)
    waiting = Waiting(line)
    tasks = [await waiting.add(name) for name in "abc"]

    for task in tasks:
        line.done(held)
        held = await asyncio.wait_for(task, 10)

    assert [name for name, _ in waiting.turns] == ["a", "b", "c"]
    assert line.waiting == 0


async def test_nobody_who_comes_later_gets_in_between() -> None:
    line = line_of(0)
    held = await line.take(None)
    waiting = Waiting(line)
    first = await waiting.add("first")

    line.done(held)
    late = await waiting.add("late")  # before `first` has run
    await turns(first)

    assert waiting.turns == [("first", 0)]
    line.done(entrypoint(0))
    await turns(late)


async def test_one_that_has_tried_a_server_lets_others_pass_to_it() -> None:
    line = line_of(0, 1)
    mine, other = await line.take(None), await line.take(None)
    waiting = Waiting(line)
    first = await waiting.add("first", exclude=[0])
    second = await waiting.add("second")

    line.done(mine)
    await turns(second)
    line.done(other)
    await turns(first)

    assert waiting.turns == [("second", 0), ("first", 1)]


async def test_all_who_wait_are_told_when_nobody_is_left() -> None:
    router = line_of(0)
    await router.take(None)
    waiting = Waiting(router)
    tasks = [await waiting.add("a"), await waiting.add("b")]

    router.set([], why_none="rank 0 has died")

    for task in tasks:
        with pytest.raises(NoEntrypoint, match="rank 0 has died"):
            await asyncio.wait_for(task, 10)
    assert router.waiting == 0


async def test_a_new_entrypoint_lets_as_many_pass_as_it_takes() -> None:
    router = line_of(0, limit=2)
    for _ in range(2):
        await router.take(None)
    waiting = Waiting(router)
    tasks = [await waiting.add(name) for name in "abc"]

    router.set([entrypoint(0), entrypoint(1)])
    await turns(*tasks[:2])

    assert waiting.turns == [("a", 1), ("b", 1)]
    assert router.waiting == 1
    tasks[2].cancel()


async def test_who_leaves_holds_nobody_up() -> None:
    line = line_of(0)
    held = await line.take(None)
    waiting = Waiting(line)
    gone, next_one = await waiting.add("gone"), await waiting.add("next")

    gone.cancel()
    line.done(held)
    await turns(next_one)

    assert waiting.turns == [("next", 0)]


async def test_a_turn_that_came_as_its_client_left_is_the_next_ones() -> None:
    router = line_of(0)
    held = await router.take(None)
    waiting = Waiting(router)
    gone, next_one = await waiting.add("gone"), await waiting.add("next")

    router.done(held)
    gone.cancel()
    await turns(next_one)

    assert waiting.turns == [("next", 0)]
    assert router.outstanding == 1


async def test_a_line_takes_no_more_than_its_size_and_nobody_longer_than_its_time() -> None:
    line = Router(limit=1, queue_size=2, queue_timeout_s=0.05)
    line.set([entrypoint(0)])
    taken = await line.take(None)
    waiting = [asyncio.create_task(line.take(None)) for _ in range(2)]
    await asyncio.sleep(0)

    with pytest.raises(LineFull, match="2 requests wait already"):
        await line.take(None)
    for one in waiting:
        with pytest.raises(LineFull, match=r"no server had room for it within 0\.05 s"):
            await one
    assert line.waiting == 0
    line.done(taken)
    assert (await line.take(None)).rank == 0


async def test_those_who_wait_at_a_closed_routing_pass_in_order_once_it_opens() -> None:
    router = line_of(0, limit=1)
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
